//! Fear: that a run's page shows nothing, accesses the network, executes a source's name, or chokes on a long run.
//!
//! The run is made up (`long_run`): a ledger of 100,000 steps with its chain, and events with kills and restarts. A
//! real browser opens the page if there is one (`browser.py`).

use std::fs;
use std::io::{BufRead as _, BufReader, BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use contract::{Digest, Key, Purpose, chain, draw};
use serde_json::{Value, json};

use crate::python::{skipped, tests_folder};
use crate::support::{Scratch, arg, free_port, ztrain, ztrain_command, ztrain_on_a_full_disk};

/// A source whose name would be markup if a page did not escape it.
const RUDE: &str = "</script><script>window.hit=1</script>";

const CURRICULUM: &str = r#"store = ["aa"]
seed = 1
dtype = "f32"

[model]
preset = "zaya1-nano"

[optimizer]
kind = "muon"
lr = 4e-3

[schedule]
warmup_steps = 100
decay_steps = 0

[[phase]]
name = "<b>first</b>"
steps = HALF
seq_len = 256
batch = 4
micro_batch = 2
mix = { "</script><script>window.hit=1</script>" = 1, notes = 3 }

[[phase]]
name = "second"
steps = HALF
seq_len = 256
batch = 4
micro_batch = 2
mix = { "</script><script>window.hit=1</script>" = 1, notes = 1, late = 1 }
"#;

/// Uniform in [0, 1].
fn even(step: u64, index: u64) -> f64 {
    draw(Key::from_seed(7).nth(step), Purpose::Generate, index) as f64 / u64::MAX as f64
}

fn floats(values: &[f64]) -> String {
    values.iter().map(|value| format!("{:016x}", value.to_bits())).collect()
}

/// Whether a step has labels of the source `late`: in the second quarter, and in the fourth.
fn is_late(step: u64, steps: u64) -> bool {
    (steps / 4 < step && step <= steps / 2) || step > 3 * steps / 4
}

/// Whether the events have nothing about a step.
fn is_untold(step: u64, steps: u64) -> bool {
    steps / 10 < step && step <= steps / 8
}

/// Writes what a run of `steps` steps would leave: the loss falls with noise, three steps are anomalous, one is
/// skipped.
fn long_run(folder: &Path, steps: u64) {
    fs::create_dir_all(folder).unwrap();
    let create = |name: &str| BufWriter::new(fs::File::create(folder.join(name)).unwrap());
    let (mut ledger, mut events) = (create("ledger.jsonl"), create("events.jsonl"));
    let identity = "ab".repeat(32);
    let head = json!({
        "kind": "head", "format": 7, "kernel_table": {"cpu": "made up", "libtorch": "2.11.0"},
        "curriculum": CURRICULUM.replace("HALF", &(steps / 2).to_string()), "stores": [identity], "tokenizer": identity,
        "levels": ["D", "L0"], "parameters": ["embed", "layers.0.a", "layers.1.a", "norm"],
    });
    let mut last = Digest::default();
    let mut put = |line: Value| {
        let (line, after) = chain::seal(last, &line.to_string());
        last = after;
        ledger.write_all(line.as_bytes()).unwrap();
        ledger.write_all(b"\n").unwrap();
    };
    put(head);
    let mut tell = |line: Value| writeln!(events, "{line}").unwrap();
    let began = |from: u64, recorded: u64| {
        json!({
            "event": "start", "from_step": from, "recorded": recorded, "device": "cpu", "workers": 2,
        })
    };
    tell(began(0, 0));
    for step in 1..=steps {
        put(step_line(step, steps));
        if step == steps / 3 {
            tell(began(step - 10, step - 1));
        }
        let speed = 900.0 + 200.0 * even(step, 3);
        if !is_untold(step, steps) {
            tell(json!({
                "event": "step", "step": step, "seconds": 1.0, "tokens_per_second": speed, "stall": 0.02, "memory": 4e8,
                "time": step,
            }));
        }
        if step % 2_000 == 0 {
            tell(
                json!({"event": "checkpoint", "step": step, "stall_seconds": 0.01, "writing_seconds": 0.2}),
            );
            let loss = json!({"loss": 3.0 + 6.0 * (-(step as f64) / 5e3).exp()});
            tell(
                json!({"event": "validation", "step": step, "all": loss, "sources": {RUDE: loss, "notes": loss}}),
            );
        }
    }
}

fn step_line(step: u64, steps: u64) -> Value {
    let odd = [steps / 5, steps / 2, 4 * steps / 5].contains(&step);
    let noise = 0.03 * (even(step, 0) + even(step, 1) + even(step, 2) - 1.5);
    let jump = if odd { 2.0 } else { 0.0 };
    let loss = 3.0 + 6.0 * (-(step as f64) / 5e3).exp() + noise + jump;
    let norm = (0.3 * even(step, 4)).exp() * if odd { 20.0 } else { 1.0 };
    let rude = 300 + (even(step, 5) * 40.0) as u64;
    let late = if is_late(step, steps) { 200 } else { 0 };
    let notes = 1020 - rude - late;
    let all = [(RUDE, rude), ("notes", notes), ("late", late)];
    let source = |labels: u64| json!({"labels": labels, "loss": floats(&[loss * labels as f64])});
    let sources = all.into_iter().filter(|(_, labels)| *labels > 0);
    let sources: serde_json::Map<_, _> =
        sources.map(|(name, labels)| (name.to_owned(), source(labels))).collect();
    let expert = |index| 100 + (even(step, index) * 50.0) as u64;
    // All routers count all tokens.
    let counts = |at: u64| {
        let seven: Vec<u64> = (0..7).map(|index| expert(at + index)).collect();
        let last = 1_150 - seven.iter().sum::<u64>();
        seven.into_iter().chain([last, 0]).collect::<Vec<_>>()
    };
    // The loss follows from its sum, and the norm from the layers' norms.
    let sum = loss * 1020.0;
    let loss = sum / 1020.0;
    let layers = [norm, norm / 2.0, norm / 3.0, 0.1];
    let norm = layers.iter().map(|norm| norm * norm).sum::<f64>().sqrt();
    let phase = if step <= steps / 2 { "<b>first</b>" } else { "second" };
    let digest = format!("{step:032x}");
    let mut line = json!({
        "kind": "step", "step": step, "phase": phase, "batch_digest": digest, "label_count": 1020, "loss": loss,
        "micro_batch_labels": [1020], "micro_batch_losses": floats(&[sum]),
        "sources": sources, "tokens_per_expert": [counts(10), counts(30)],
        "norm": floats(&[norm]), "lr": floats(&[4e-3 * (step as f64 / 100.0).min(1.0)]),
        "layer_gradient_norms": floats(&layers),
        "layer_update_norms": floats(&[0.1, 0.2, 0.1, 0.01]), "state_digest": digest,
    });
    if step == 4 * steps / 5 {
        line["skipped"] = json!("norm");
    }
    line
}

fn page(run: &Path, out: &Path) -> u64 {
    ztrain(&["report", "--run", arg(run), "--out", arg(out)]).ok();
    fs::metadata(out).unwrap().len()
}

/// The bytes that a command reads in total: the kernel's count is available until the process is waited for. `None` if
/// the kernel has none.
fn bytes_read(args: &[&str]) -> Option<u64> {
    let mut child = ztrain_command(args).stdout(Stdio::null()).spawn().unwrap();
    let told = |name: &str| fs::read_to_string(format!("/proc/{}/{name}", child.id())).ok();
    let ended =
        |stat: &str| stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'));
    let read = loop {
        match told("stat") {
            Some(stat) if !ended(&stat) => std::thread::sleep(Duration::from_millis(20)),
            Some(_) => break told("io"),
            None => break None,
        }
    };
    assert!(child.wait().unwrap().success());
    read?.lines().find_map(|line| line.strip_prefix("rchar: "))?.parse().ok()
}

/// Opens a page in a browser; `None` if there is none.
fn looked_at(page: &str) -> Option<String> {
    let script = tests_folder().join("browser.py");
    let output = Command::new("python3").arg(script).arg("check").arg(page).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    match output.status.code() {
        Some(0) => Some(told),
        Some(77) => {
            skipped("the page in a browser", told.trim());
            None
        }
        code => panic!("{code:?}: {told}\n{}", String::from_utf8_lossy(&output.stderr)),
    }
}

fn made(steps: u64) -> (Scratch, PathBuf) {
    let scratch = Scratch::new();
    let run = scratch.path("a run's folder");
    long_run(&run, steps);
    (scratch, run)
}

#[test]
fn the_page_of_a_long_run_is_small_soon_written_and_fluid() {
    let (scratch, run) = made(100_000);
    let out = scratch.path("page.html");
    let read = bytes_read(&["report", "--run", arg(&run), "--out", arg(&out)]);
    let bytes = fs::metadata(&out).unwrap().len();
    assert!(bytes < 3_600_000, "{bytes} bytes");
    // The time follows from the bytes read: each line once. A clock would also measure other processes.
    let there =
        ["ledger.jsonl", "events.jsonl"].map(|name| fs::metadata(run.join(name)).unwrap().len());
    let there = there.iter().sum::<u64>();
    match read {
        Some(read) => {
            assert!((there..there + there / 4).contains(&read), "{read} bytes read of {there}")
        }
        None => skipped("what a page costs", "the kernel does not tell what a process read"),
    }
    if let Some(told) = looked_at(arg(&out)) {
        let numbers: Value = serde_json::from_str(told.lines().last().unwrap()).unwrap();
        assert_eq!(numbers["steps"], 100_000);
    }
    let found = ztrain(&["spikes", "--run", arg(&run), "--json"]).ok();
    let steps: Vec<Value> = found
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["step"].clone())
        .collect();
    assert_eq!(steps, [20_000, 50_000, 80_000], "{found}");
}

#[test]
fn what_a_source_is_called_is_text() {
    let (scratch, run) = made(40);
    let explained = json!({
        "step": 8, "sentence": RUDE, "findings": [{"words": RUDE}], "loss": 9.0, "norm": 1.0, "next_loss": null,
        "documents": [{
            "id": RUDE, "source": RUDE, "file": RUDE, "row": 1, "bytes": [1, 2],
            "labels": 3, "mean": 9.0, "excess": 1.0,
        }],
        "tokens": [[{"token": 1, "loss": 9.0, "text": [RUDE, RUDE, RUDE]}]],
        "removals": [{"documents": [RUDE], "loss": 8.0, "norm": 1.0, "next_loss": null}],
    });
    fs::create_dir_all(run.join("explained")).unwrap();
    fs::write(run.join("explained/step-8.json"), explained.to_string()).unwrap();
    let out = scratch.path("page.html");
    page(&run, &out);
    let text = fs::read_to_string(&out).unwrap();
    assert!(!text.contains(RUDE) && text.contains("window.hit"), "it stands there, spelled out");
    assert_eq!(text.matches("</script").count(), 4, "as many as the frame has");
    assert!(!text.contains("<b>first"));
    looked_at(arg(&out));
    let told = ztrain(&["spikes", "--run", arg(&run)]).ok();
    assert!(
        told.contains("--run '") || !told.contains("--run"),
        "a path with a blank is quoted: {told}"
    );
}

/// Serves a run's live page while `look` runs; `look` gets its address.
fn watched<T>(run: &Path, look: impl FnOnce(&str) -> T + std::panic::UnwindSafe) -> T {
    let mut command = ztrain_command(&["watch", "--run", arg(run), "--port", "0"]);
    let mut server = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut address = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut address).unwrap();
    let told = std::panic::catch_unwind(|| look(address.trim()));
    server.kill().unwrap();
    server.wait().unwrap();
    told.unwrap()
}

/// The curves shown by the browser.
fn curves(told: &str) -> Value {
    serde_json::from_str::<Value>(told.lines().last().unwrap()).unwrap()["curves"].take()
}

/// A field of each curve of a plot.
fn each<T>(plot: &Value, field: impl Fn(&Value) -> T) -> Vec<T> {
    plot.as_array().unwrap().iter().map(field).collect()
}

/// A real Prometheus accepts the text unchanged, hostile names included.
#[test]
fn the_live_page_is_scraped_too() {
    let (_scratch, run) = made(2_000);
    let told = watched(&run, |address| {
        let target = address.trim_start_matches("http://").trim_end_matches('/');
        let script = tests_folder().join("prometheus.py");
        let args = ["check", target, &free_port().to_string()];
        Command::new("python3").arg("-B").arg(script).args(args).output().unwrap()
    });
    let text = String::from_utf8_lossy(&told.stdout);
    match told.status.code() {
        Some(0) => {}
        Some(77) => return skipped("a scrape by Prometheus", text.trim()),
        code => panic!("{code:?}: {text}\n{}", String::from_utf8_lossy(&told.stderr)),
    }
    let found: Vec<(Value, f64)> = serde_json::from_str(&text).unwrap();
    let value = |name: &str, label: [&str; 2]| {
        let is_it = |metric: &Value| metric["__name__"] == name && metric[label[0]] == label[1];
        found.iter().find(|(metric, _)| is_it(metric)).map(|(_, value)| *value)
    };
    let run = ["run", "a run's folder"];
    assert_eq!(value("ztrain_step", run), Some(2_000.0));
    assert_eq!(value("ztrain_starts_total", run), Some(2.0));
    assert_eq!(value("ztrain_speed_memory", run), Some(4e8));
    assert!(value("ztrain_loss", ["source", RUDE]).is_some(), "{text}");
    assert!(value("ztrain_total_validation", run).is_some());
    assert!(value("ztrain_gradient_norm", ["layer", "layer 1"]).is_some());
}

#[test]
fn the_live_page_is_drawn_too() {
    let (_scratch, run) = made(2_000);
    let Some(told) = watched(&run, looked_at) else { return };
    // A source that is absent for a while, and steps without events: a curve has points only for what was measured.
    let curves = curves(&told);
    let points = |plot: &str| each(&curves[plot], |one| one["points"].as_u64().unwrap());
    assert_eq!(points("loss"), [2_000, 2_000]);
    assert_eq!(points("sources"), [2_000, 2_000, 1_000]);
    assert_eq!((points("speed"), points("stall")), (vec![1_950, 1_950], vec![1_950]));
    let bound = |one: &Value, end: &str| one[end].as_f64().unwrap();
    let loss = &curves["loss"][0];
    for one in curves["sources"].as_array().unwrap() {
        let within = bound(one, "least") >= bound(loss, "least")
            && bound(one, "most") <= bound(loss, "most");
        assert!(within, "a loss that never was: {one}");
    }
    let bridged = each(&curves["sources"], |one| one["bridged"].as_bool().unwrap());
    assert_eq!(bridged, [false; 3], "a line over a gap");
}

#[test]
fn a_fork_is_drawn_as_its_parent_as_far_as_it_is_one() {
    let (scratch, run) = made(2_000);
    let fork = scratch.path("fork");
    fs::create_dir(&fork).unwrap();
    for (name, lines) in [("ledger.jsonl", 1_001), ("events.jsonl", 400)] {
        let text = fs::read_to_string(run.join(name)).unwrap();
        let shared: String = text.split_inclusive('\n').take(lines).collect();
        fs::write(fork.join(name), shared).unwrap();
    }
    let out = scratch.path("page.html");
    ztrain(&["report", "--run", arg(&run), "--run", arg(&fork), "--out", arg(&out)]).ok();
    if let Some(told) = looked_at(arg(&out)) {
        let apart = curves(&told)["apart"].as_f64().unwrap();
        assert!(apart < 1e-9, "{apart}");
    }
}

/// A page opened before the first step gets the run's later data without a reload.
#[test]
fn the_live_page_grows_with_the_run() {
    let (scratch, whole) = made(2_000);
    let run = scratch.path("young");
    fs::create_dir(&run).unwrap();
    let texts =
        ["ledger.jsonl", "events.jsonl"].map(|name| (name, fs::read(whole.join(name)).unwrap()));
    let begin = |text: &[u8]| text.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    for (name, text) in &texts {
        fs::write(run.join(name), &text[..begin(text)]).unwrap();
    }
    watched(&run, |address| {
        let script = tests_folder().join("browser.py");
        let mut looker = Command::new("python3");
        let mut looker =
            looker.arg(script).args(["grow", address]).stdout(Stdio::piped()).spawn().unwrap();
        let mut told = BufReader::new(looker.stdout.take().unwrap());
        let mut line = String::new();
        told.read_line(&mut line).unwrap();
        for (name, text) in &texts {
            let mut file = fs::OpenOptions::new().append(true).open(run.join(name)).unwrap();
            file.write_all(&text[begin(text)..]).unwrap();
        }
        let first = line.clone();
        told.read_to_string(&mut line).unwrap();
        match looker.wait().unwrap().code() {
            Some(0) => assert!(first.contains("\"loss\"") && !first.contains("router"), "{first}"),
            Some(77) => skipped("a live page in a browser", line.trim()),
            code => panic!("{code:?}: {line}"),
        }
    });
}

#[test]
fn two_runs_are_drawn_together_and_what_is_no_run_is_said() {
    let (scratch, run) = made(60);
    let other = scratch.path("other");
    long_run(&other, 30);
    let out = scratch.path("page.html");
    let both = ["report", "--run", arg(&run), "--run", arg(&other), "--out", arg(&out), "--json"];
    let told: Value = serde_json::from_str(&ztrain(&both).ok()).unwrap();
    for counts in ["step_counts", "odd_step_counts"] {
        assert_eq!(told[counts].as_array().map(Vec::len), Some(2), "one for each run: {told}");
    }
    looked_at(arg(&out));
    ztrain(&["report", "--run", arg(&scratch.path("none"))]).fails(2, &["this is not a run"]);
    fs::write(run.join("explained"), "a file").unwrap();
    ztrain(&["report", "--run", arg(&run)]).fails(2, &["explained"]);
}

/// `ztrain explain --json` writes its answer last: until then the shell has made an empty file.
#[test]
fn an_explanation_that_is_none_is_left_out_and_named() {
    let (scratch, run) = made(40);
    fs::create_dir_all(run.join("explained")).unwrap();
    let write =
        |name: &str, text: &[u8]| fs::write(run.join("explained").join(name), text).unwrap();
    write("step-8.json", b"{\"step\": 8, \"sentence\": \"kept as it was\"}");
    let none: [(&str, &[u8]); 4] = [
        ("step-3.json", b""),
        ("step-4.json", b"{\"step\": 4, \"sent"),
        ("step-5.json", b"{\"step\": 8, \"sentence\": \"of another step\"}"),
        ("step-6.json", b"{\"step\": 6, \"sentence\": \"\xff\"}"),
    ];
    none.iter().for_each(|(name, text)| write(name, text));
    let out = scratch.path("page.html");
    let ran = ztrain(&["report", "--run", arg(&run), "--out", arg(&out)]);
    assert!(none.iter().all(|(name, _)| ran.err.contains(name)), "{}", ran.err);
    assert!(!ran.err.contains("step-8.json"), "{}", ran.err);
    ran.ok();
    let text = fs::read_to_string(&out).unwrap();
    assert!(text.contains("kept as it was") && !text.contains("of another step"));
}

/// The old page stays complete until the new one is.
#[test]
fn a_full_disk_keeps_the_page_that_is_there() {
    let scratch = Scratch::new();
    let (run, folder) = (scratch.path("run"), scratch.path("out"));
    long_run(&run, 60);
    fs::create_dir(&folder).unwrap();
    let path = folder.join("page.html");
    let args = ["report", "--run", arg(&run), "--out", arg(&path)];
    ztrain(&args).ok();
    let before = fs::read(&path).unwrap();
    ztrain_on_a_full_disk(&args).fails(6, &[arg(&path)]);
    assert!(before == fs::read(&path).unwrap());
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing is left beside it");
}
