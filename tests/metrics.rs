//! Fear: that a step reaches a tracker twice or never, or that a tracker blocks training.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::python::{provision, skipped, tests_folder};
use crate::ranks::{Fixture, ranks_of, signal, until_lines};
use crate::support::{
    Ran, Scratch, arg, build, corpus, curriculum, is_full, zdata, ztrain, ztrain_command,
};

/// The words of a command for a run of 20 steps, begun nowhere yet.
fn begun(scratch: &Scratch) -> Vec<String> {
    let store = build(scratch, &corpus(scratch, 300, ""), "store");
    let path = curriculum(scratch, &store, "run.toml", &[]);
    let run = scratch.path("run");
    let words =
        ["--curriculum", arg(&path), "--out", arg(&run), "--checkpoint-every", "3", "--quiet"];
    words.map(str::to_owned).into()
}

fn with<'a>(run: &'a [String], more: &[&'a str]) -> Vec<&'a str> {
    run.iter().map(String::as_str).chain(more.iter().copied()).collect()
}

/// The losses of the ledger, as shown to users.
fn losses(run: &Path) -> Vec<(u64, f64)> {
    let shown = ztrain(&["show", "--run", arg(run), "--steps", "1..21", "--json"]).ok();
    let lines = shown.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap())).collect()
}

/// The steps that a program received.
fn sent(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let lines = whole.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| !line["total/loss"].is_null()).collect()
}

/// Kills a run once its program has lines of so many steps, and waits until the program has read the rest. Returns the
/// last step that the run knows to have sent.
fn killed_after(steps: usize, mut command: Command, scratch: &Scratch) -> usize {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    let wait = |done: &dyn Fn() -> bool| {
        while !done() {
            assert!(start.elapsed() < Duration::from_secs(300), "the program waits");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait(&|| sent(&scratch.path("lines")).len() >= steps);
    assert!(child.try_wait().unwrap().is_none(), "it was to be killed before its end");
    child.kill().unwrap();
    child.wait().unwrap();
    wait(&|| scratch.path("ended").exists());
    fs::remove_file(scratch.path("ended")).unwrap();
    // It may be killed before its first mark.
    let mark = fs::read(scratch.path("run/metrics-exec.json")).unwrap_or_default();
    serde_json::from_slice::<Value>(&mark).unwrap_or_default()["step"].as_u64().unwrap_or(0)
        as usize
}

#[test]
fn every_step_reaches_a_program_once() {
    let scratch = Scratch::new();
    let (run, folder, lines) = (begun(&scratch), scratch.path("run"), scratch.path("lines"));
    ztrain(&with(&run, &["--stop-after", "5"])).ok();
    let program = format!("cat >> '{}'; echo > '{}'", arg(&lines), arg(&scratch.path("ended")));
    let exec = ["--metrics-exec", &program];
    let marked = killed_after(8, ztrain_command(&with(&run, &exec)), &scratch);
    let before = sent(&lines).len();
    ztrain(&with(&run, &[&exec[..], &["--nproc", "2"]].concat())).ok();
    let found = sent(&lines);
    let pairs: Vec<_> = found
        .iter()
        .map(|line| (line["step"].as_u64().unwrap(), line["total/loss"].as_f64().unwrap()))
        .collect();
    // A kill may come after a line and before its mark: lines behind the mark are sent again.
    let wanted = losses(&folder);
    assert!(marked <= before, "{marked} of {before}");
    assert_eq!(pairs, [&wanted[..before], &wanted[marked..]].concat());
    // For steps before the program was added it gets the ledger's values; for later ones also their speed.
    assert!(found[2]["speed/tflops"].is_null() && found[2]["optimizer/lr"].is_f64());
    let last = found.last().unwrap();
    assert!(last["speed/tflops"].as_f64().unwrap() > 0.0, "{last}");
    let plan = zdata(&["plan", &run[1], "--json"]).ok();
    let plan: Value = serde_json::from_str(&plan).unwrap();
    let positions = |phase: &Value| {
        ["steps", "batch", "seq_len"]
            .map(|key| phase[key].as_u64().unwrap())
            .iter()
            .product::<u64>()
    };
    let tokens: u64 = plan["phases"].as_array().unwrap().iter().map(positions).sum();
    assert_eq!(last["data/tokens"].as_f64(), Some(tokens as f64));
}

#[test]
fn a_program_that_ends_or_never_began_is_told_of_and_changes_nothing() {
    let scratch = Scratch::new();
    let run = begun(&scratch);
    for (program, status, how) in [
        ("read line; exec <&-; sleep 1; exit 7", "exit status: 7", "--metrics-exec has"),
        ("no-such-program", "exit status: 127", "--metrics-exec has"),
        ("cat > /dev/null; exit 3", "exit status: 3", "has failed"),
    ] {
        let _ = fs::remove_dir_all(scratch.path("run"));
        let ran: Ran = ztrain(&with(&run, &["--metrics-exec", program]));
        assert!(ran.err.contains(how) && ran.err.contains(status), "{}", ran.err);
        assert!(ran.ok().starts_with("done after step 20"));
        // What the program has read is not known, so every step is sent again.
        let mark = fs::read_to_string(scratch.path("run/metrics-exec.json")).unwrap();
        assert_eq!(mark.trim(), "{\"step\":0,\"events\":0}");
    }
}

/// A program that was added later, or replaces one that failed, gets earlier validations behind their steps.
#[test]
fn validations_reach_a_later_program_too() {
    let scratch = Scratch::new();
    let (run, lines) = (begun(&scratch), scratch.path("lines"));
    let until = |stop, program: &str| {
        let more = ["--validate-every", "4", "--stop-after", stop, "--metrics-exec", program];
        let ran = ztrain(&with(&run, &more));
        let said = ran.err.clone();
        ran.ok();
        said
    };
    let mark = scratch.path("run/metrics-exec.json");
    until("10", "cat > /dev/null; exit 3");
    let cat = format!("cat >> '{}'", arg(&lines));
    until("14", &cat);
    // A mark beyond the run is cut to it.
    let kept: Value = serde_json::from_slice(&fs::read(&mark).unwrap()).unwrap();
    fs::write(&mark, serde_json::json!({"step": 999, "events": kept["events"]}).to_string())
        .unwrap();
    let said = until("20", &cat);
    assert!(said.contains("metrics-exec.json is of step 999"), "{said}");
    let text = fs::read_to_string(lines).unwrap();
    let found = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|line| (line["step"].as_u64().unwrap(), line["total/validation"].as_f64()));
    let events = fs::read_to_string(scratch.path("run/events.jsonl")).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let validations = events.filter(|event| event["event"] == "validation");
    let loss = |event: Value| (event["step"].as_u64().unwrap(), event["all"]["loss"].as_f64());
    let mut wanted: Vec<_> =
        (1..21).map(|step| (step, None)).chain(validations.map(loss)).collect();
    wanted.sort_by_key(|(step, loss)| (*step, loss.is_some()));
    assert!(wanted.len() > 24, "{wanted:?}");
    assert_eq!(found.collect::<Vec<_>>(), wanted);
}

/// What the shell has started ends with it.
#[test]
fn a_program_that_does_not_end_is_killed_with_its_children() {
    let scratch = Scratch::new();
    let (run, child) = (begun(&scratch), scratch.path("child"));
    let program = format!("sleep 777 & echo $! > '{}'; wait; true", arg(&child));
    let ran: Ran = ztrain(&with(&run, &["--stop-after", "2", "--metrics-exec", &program]));
    assert!(ran.err.contains("and was killed"), "{}", ran.err);
    ran.ok();
    let child = fs::read_to_string(child).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/stat", child.trim())).unwrap_or_default();
    // Its new parent may not have reaped it yet.
    let ended = status.is_empty() || status.contains(") Z ");
    let _ = Command::new("kill").arg(child.trim()).stderr(Stdio::null()).status();
    assert!(ended, "{status}");
}

/// The ranks that are left after a loss do not wait for the program, and do not start it again.
#[test]
fn a_program_outlives_the_loss_of_a_rank() {
    let fixture = Fixture::new(&[]);
    let [run, lines, starts] = ["run", "lines", "starts"].map(|name| fixture.scratch.path(name));
    let program = format!("echo started >> '{}'; cat >> '{}'", arg(&starts), arg(&lines));
    let more = ["--nproc", "3", "--min-ranks", "1", "--replicate", "--metrics-exec", &program];
    let mut launcher =
        fixture.run("run", &more).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let ranks = ranks_of(&launcher, 3);
    until_lines(&run, 7, &mut launcher);
    signal("KILL", ranks[2]);
    assert!(launcher.wait().unwrap().success());
    let pair =
        |line: &Value| (line["step"].as_u64().unwrap(), line["total/loss"].as_f64().unwrap());
    assert_eq!(sent(&lines).iter().map(pair).collect::<Vec<_>>(), losses(&run));
    assert_eq!(fs::read_to_string(starts).unwrap(), "started\n");
    let events = fs::read_to_string(run.join("events.jsonl")).unwrap();
    assert!(events.contains("\"event\":\"loss\""), "no rank was lost");
}

/// A resumed run continues the same run of the tracker, through the tracker's own package.
#[test]
fn trackers_have_every_step_in_one_run() {
    for (tracker, wanted) in [("mlflow", true), ("wandb", is_full())] {
        if !wanted {
            skipped("a run in W&B", "sh tests/full.sh trackers");
            continue;
        }
        let python = match provision(&format!("{tracker}.txt")) {
            Ok(python) => python,
            Err(why) => {
                skipped(&format!("a run in {tracker}"), &why);
                continue;
            }
        };
        let scratch = Scratch::new();
        let (run, folder) = (begun(&scratch), scratch.path("run"));
        let adapter = Path::new(env!("CARGO_MANIFEST_DIR"));
        let adapter = adapter.join(format!("trainer/python/to_{tracker}.py"));
        let program = format!("'{}' '{}'", arg(&python), arg(&adapter));
        for stop in ["8", "20"] {
            let args = with(&run, &["--metrics-exec", &program, "--stop-after", stop]);
            let mut command = ztrain_command(&args);
            let ran = Ran::from(command.env("WANDB_MODE", "offline").output().unwrap());
            assert!(!ran.err.contains("--metrics-exec"), "{}", ran.err);
            ran.ok();
        }
        let script = tests_folder().join("trackers.py");
        let mut asked = Command::new(&python);
        let told =
            Ran::from(asked.arg(script).args([tracker, arg(&folder)]).output().unwrap()).ok();
        let mut told = told.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let pair = |one: &Value| (one[0].as_u64().unwrap(), one[1].as_f64().unwrap());
        let steps: Vec<_> = told.next().unwrap().as_array().unwrap().iter().map(pair).collect();
        assert_eq!(steps, losses(&folder), "{tracker}");
        assert_eq!(told.next().unwrap().as_array().unwrap().len(), 1, "{tracker} has one run");
    }
}
