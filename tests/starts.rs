//! Fear: that an event during a run's start is misreported, or ends a run that could have continued.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::ranks::{Fixture, ranks_of, signal, until_lines};
use crate::support::Ran;

/// Waits until a process blocks or handles a request to stop: until then it has not loaded its libraries.
fn until_it_is_up(process: u32) {
    const TERM: u64 = 1 << 14;
    let start = Instant::now();
    // The process that starts it has the tests' own mask, which blocks them too.
    let is_it =
        || fs::read_to_string(format!("/proc/{process}/comm")).is_ok_and(|name| name == "ztrain\n");
    let is_up = || {
        let said = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        let masks = said.lines().filter_map(|line| line.split_once(":\t"));
        let mut masks = masks.filter(|(name, _)| ["SigBlk", "SigCgt"].contains(name));
        masks.any(|(_, mask)| u64::from_str_radix(mask, 16).is_ok_and(|mask| mask & TERM > 0))
    };
    while !is_it() || !is_up() {
        assert!(start.elapsed() < Duration::from_secs(300), "it never keeps a signal");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The same command with SIGHUP ignored, as under `nohup`, or not, as in a terminal, however the tests are run.
fn hung_up(run: &Command, ignored: bool) -> Command {
    let handler = if ignored { "SIG_IGN" } else { "SIG_DFL" };
    let script = format!(
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.{handler}); os.execv(sys.argv[1], sys.argv[1:])"
    );
    let mut command = Command::new("python3");
    command.args(["-c", &script]).arg(run.get_program()).args(run.get_args());
    command
}

#[test]
fn a_run_under_nohup_outlives_its_terminal() {
    let fixture = Fixture::new(&[]);
    let mut command = hung_up(&fixture.run("run", &[]), true);
    let process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until_it_is_up(process.id());
    signal("HUP", process.id());
    let said = Ran::from(process.wait_with_output().unwrap()).ok();
    assert!(said.starts_with("done after step 20 of 20"), "{said}");
}

#[test]
fn a_run_that_is_asked_to_stop_as_it_starts_ends_well() {
    let fixture = Fixture::new(&[]);
    for (name, flags) in
        [("TERM", &[][..]), ("INT", &[]), ("USR2", &[]), ("HUP", &["--nproc", "2"])]
    {
        let mut command = hung_up(&fixture.run(name, flags), false);
        let process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        until_it_is_up(process.id());
        signal(name, process.id());
        let ran = Ran::from(process.wait_with_output().unwrap());
        assert!(ran.err.contains("nothing was trained"), "{ran:?}");
        assert_eq!(ran.ok(), "");
        assert!(!fixture.scratch.path(name).exists(), "nothing was begun");
    }
}

/// More steps than are computed before a request arrives.
const LONG: [(&str, &str); 2] = [
    ("steps = 12", "steps = 4000"),
    (
        "[source.math]\nmax_epochs = 3",
        "[source.math]\nmax_epochs = 9999\n\n[source.web]\nmax_epochs = 9999",
    ),
];

#[test]
fn so_do_all_ranks_where_one_is_asked() {
    let fixture = Fixture::new(&LONG);
    let mut command = fixture.run("run", &["--nproc", "2"]);
    let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let rank = ranks_of(&launcher, 2)[1];
    until_it_is_up(rank);
    signal("TERM", rank);
    let said = Ran::from(launcher.wait_with_output().unwrap()).ok();
    assert!(said.starts_with("stopped after step "), "{said}");
}

/// Validation may take longer than the time until a scheduler kills the run: it is aborted, and the state is saved.
#[test]
fn a_run_that_is_asked_to_stop_while_it_looks_at_held_out_text_breaks_off() {
    let mut fixture = Fixture::new(&[]);
    // Half of the text is held out, which takes minutes.
    let scratch = &fixture.scratch;
    let text = fs::read_to_string(scratch.path("corpus.toml")).unwrap();
    let text = text.replace("validation = \"1/50\"", "validation = \"1/2\"");
    let store = crate::support::build(scratch, &scratch.write("half.toml", text), "half");
    fixture.curriculum = crate::support::curriculum(scratch, &store, "half-run.toml", &[]);
    for (out, ranks) in [("alone", &[][..]), ("ranks", &["--nproc", "2"])] {
        let flags = ["--validate-every", "4", "--validation-sequences", "1000000"];
        let mut command = fixture.run(out, &[&flags[..], ranks].concat());
        let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let folder = fixture.scratch.path(out);
        until_lines(&folder, 5, &mut run);
        signal("TERM", run.id());
        let ran = Ran::from(run.wait_with_output().unwrap());
        for word in ["asked to stop", "validation after step 4 is broken off"] {
            assert!(ran.err.contains(word), "{out}: {ran:?}");
        }
        assert!(ran.ok().starts_with("stopped after step 4 of 20"));
        assert!(folder.join("checkpoints/step-4/manifest.json").exists());
        // The run that continues does it first, and does not repeat one that was completed.
        for (last, wanted) in [("5", vec!["4", "5"]), ("6", vec!["4", "5", "6"])] {
            let flags = ["--validate-every", "4", "--validation-sequences", "4", "--stop-after"];
            let more = [&flags[..], &[last], ranks].concat();
            Ran::from(fixture.run(out, &more).output().unwrap()).ok();
            let events = fs::read_to_string(folder.join("events.jsonl")).unwrap();
            let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            let validated = events.filter(|event| event["event"] == "validation");
            let steps: Vec<String> = validated.map(|event| event["step"].to_string()).collect();
            assert_eq!(steps, wanted, "{out}");
        }
    }
}

/// The same command with a SIGUSR1 already pending.
fn asked_before(run: &Command) -> Command {
    let script = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); \
                  os.kill(os.getpid(), signal.SIGUSR1); os.execv(sys.argv[1], sys.argv[1:])";
    let mut command = Command::new("python3");
    command.args(["-c", script]).arg(run.get_program()).args(run.get_args());
    command
}

/// A request that arrives before the program handles it stays pending; a launcher keeps it until there are ranks.
#[test]
fn a_run_that_is_asked_to_keep_its_state_as_it_starts_keeps_an_early_one() {
    let fixture = Fixture { every: "100000", ..Fixture::new(&[]) };
    for (out, ranks) in [("alone", &[][..]), ("ranks", &["--nproc", "2"])] {
        let flags = ["--validate-every", "0", "--keep-every", "1"];
        let mut command = asked_before(&fixture.run(out, &[&flags[..], ranks].concat()));
        let ran = Ran::from(command.output().unwrap());
        assert!(ran.err.contains("asked by SIGUSR1"), "{out}: {ran:?}");
        assert!(ran.ok().starts_with("done after step 20 of 20"));
        let kept = fs::read_dir(fixture.scratch.path(out).join("checkpoints")).unwrap();
        let kept: Vec<_> = kept.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(kept.len(), 2, "{out}: besides the last step's: {kept:?}");
        assert!(out != "alone" || kept.iter().any(|name| name == "step-1"), "{kept:?}");
    }
}

/// SIGUSR1 saves the state and continues, SIGUSR2 ends the run cleanly: in one process, and through our launcher.
#[test]
fn signals_that_slurm_sends_before_its_limit_are_heard() {
    let fixture = Fixture { every: "100000", ..Fixture::new(&LONG) };
    for (out, ranks) in [("alone", &[][..]), ("ranks", &["--nproc", "2"])] {
        let mut command = fixture.run(out, &[&["--validate-every", "0"], ranks].concat());
        let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let folder = fixture.scratch.path(out);
        until_lines(&folder, 3, &mut run);
        signal("USR1", run.id());
        let kept = || {
            let steps = fs::read_dir(folder.join("checkpoints")).into_iter().flatten().flatten();
            let mut steps = steps.map(|entry| entry.path().join("manifest.json"));
            steps.find(|manifest| manifest.exists())
        };
        while kept().is_none() {
            assert!(run.try_wait().unwrap().is_none(), "it ended before it kept a state");
            std::thread::sleep(Duration::from_millis(5));
        }
        // It continues: there are steps after the saved one.
        let lines = fs::read_to_string(folder.join("ledger.jsonl")).unwrap().lines().count();
        until_lines(&folder, lines + 2, &mut run);
        signal("USR2", run.id());
        let ran = Ran::from(run.wait_with_output().unwrap());
        for word in ["asked by SIGUSR1", "asked to stop"] {
            assert!(ran.err.contains(word), "{out}: {ran:?}");
        }
        assert!(ran.ok().starts_with("stopped after step"));
    }
}

/// A read-only command has nothing to save: it ends with its launcher.
#[test]
fn ranks_of_a_replay_end_when_it_is_asked_to_stop() {
    let fixture = Fixture::new(&[]);
    fixture.finish("run", &["--validate-every", "0"]);
    let run = fixture.scratch.path("run");
    let args = ["replay", "--run", crate::support::arg(&run), "--steps", "1..21", "--nproc", "2"];
    let mut command = crate::support::ztrain_command(&args);
    let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    assert_eq!(ranks_of(&launcher, 2).len(), 2);
    signal("TERM", launcher.id());
    // Until every rank has closed its output.
    let ran = Ran::from(launcher.wait_with_output().unwrap());
    assert!(!ran.out.contains("step 20"), "{ran:?}");
    assert_ne!(ran.code, Some(0), "{ran:?}");
}

/// Ranks need file handles to reach the rendezvous store, and so does the rank that hosts it, to accept them.
#[test]
fn where_there_are_too_few_files_ranks_are_no_strangers() {
    let fixture = Fixture::new(&[]);
    for limit in ["8", "10", "12", "14"] {
        let run = fixture.run("run", &["--nproc", "3", "--rank-timeout", "5"]);
        let script = format!("ulimit -n {limit}; exec \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).arg(run.get_program()).args(run.get_args());
        let start = Instant::now();
        let ran = Ran::from(command.stdin(Stdio::null()).output().unwrap());
        assert!(start.elapsed() < Duration::from_secs(300), "{limit}: {ran:?}");
        let said = ran.fails(6, &["Too many open files", "raise `ulimit -n`"]);
        for wrong in ["refused", "firewall", "ulimit -u"] {
            assert!(!said.contains(wrong), "{limit}: {said}");
        }
    }
}

/// If oneDNN may not use AVX-512, libtorch does not use it for matmuls: MKL computes them, and the kernel table
/// differs. libtorch trusts a forced capability, and crashes at the first unsupported instruction.
#[cfg(target_arch = "x86_64")]
#[test]
fn a_processor_is_not_asked_for_what_it_cannot_do() {
    let fixture = Fixture::new(&[]);
    let mut command = fixture.run("run", &["--stop-after", "1"]);
    let ran = Ran::from(command.env("ATEN_CPU_CAPABILITY", "avx512").output().unwrap());
    match is_x86_feature_detected!("avx512vl") {
        true => assert!(ran.ok().starts_with("stopped after step 1 of 20")),
        false => drop(ran.fails(6, &["ATEN_CPU_CAPABILITY=avx512", "unset it"])),
    }
}

#[test]
fn a_run_whose_onednn_is_kept_from_the_processor_trains() {
    let fixture = Fixture::new(&[]);
    for most in ["AVX2", "SSE41"] {
        let mut command = fixture.run(most, &["--stop-after", "1"]);
        let ran = Ran::from(command.env("ONEDNN_MAX_CPU_ISA", most).output().unwrap());
        assert!(ran.ok().starts_with("stopped after step 1 of 20"));
    }
}

/// The ranks have not met yet, and the remaining ones meet without it.
#[test]
fn a_rank_that_is_lost_before_the_ranks_have_met_is_done_without() {
    let fixture = Fixture::new(&[]);
    fixture.finish("alone", &["--nproc", "1"]);
    for rank in [0, 1] {
        let out = format!("left by {rank}");
        let mut command = fixture.run(&out, &["--nproc", "2", "--min-ranks", "1"]);
        let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        signal("KILL", ranks_of(&launcher, 2)[rank]);
        let ran = Ran::from(launcher.wait_with_output().unwrap());
        assert!(ran.err.contains(&format!("lost ranks: {rank}; ranks that go on")), "{ran:?}");
        assert!(ran.ok().starts_with("done after step 20 of 20"));
        fixture.assert_same("alone", &out);
    }
}
