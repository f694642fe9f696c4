//! Fear: that the GPU check reports nothing when stopped, reports success for what it did not check, or needs what the
//! machine with the GPU does not have.
//!
//! Runs `tests/device.sh` on a stand-in GPU, and on fake programs.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::pretended::{libtorch_cuda, pretend, total};
use crate::support::{Ran, Scratch, arg};

/// The script with these arguments.
fn check(args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/device.sh")).args(args);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

fn programs() -> &'static str {
    arg(Path::new(env!("CARGO_BIN_EXE_ztrain")).parent().unwrap())
}

fn found(out: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(out.join("device.json")).unwrap()).unwrap()
}

/// The same on a stand-in GPU with libtorch's operators: our own kernels are ten times slower on the emulator.
fn pretended(args: &[&str], report: &Path) -> Ran {
    let mut command = check(args);
    pretend(&mut command, report);
    command.env("LD_LIBRARY_PATH", libtorch_cuda());
    command.output().unwrap().into()
}

/// Each check reports a result, or why it cannot.
#[test]
fn the_check_of_a_gpu_goes_to_its_end_on_a_pretended_one() {
    let scratch = Scratch::new();
    let (out, report) = (scratch.path("out"), scratch.path("report"));
    let args = [programs(), arg(&out), "--steps", "3", "--ops", "reference"];
    println!("{}", pretended(&args, &report).ok());
    let outcome = found(&out);
    assert_eq!(outcome["pretended"], true);
    let looked = ["devices", "bits f32", "bits bf16", "ranks", "hash", "bandwidth", "gemm"];
    let steps = ["step nano f32", "step nano bf16", "top nano f32", "checkpoints"];
    for name in looked.into_iter().chain(steps).chain(["tolerance"]) {
        assert_eq!(outcome["checks"][name]["outcome"], "ok", "{name}");
    }
    for name in ["kernels", "sanitizer", "step 20m bf16", "top 1b bf16", "memory", "beside"] {
        let check = &outcome["checks"][name];
        assert_eq!(check["outcome"], "skipped", "{name}");
        assert!(check["told"].as_str().is_some_and(|why| why.len() > 20), "{name}: {check}");
    }
    let ledgers = |of: &str| outcome["checks"][of]["ledgers"].as_object().unwrap().len();
    assert_eq!([ledgers("bits f32"), ledgers("bits bf16"), ledgers("ranks")], [3, 3, 4]);
    let experts = outcome["checks"]["gemm"]["experts"].as_array().unwrap();
    assert_eq!(experts.len(), 3 * 2, "two products and a layer, there and back");
    for row in experts {
        let [of, best] = ["trained", "loop"].map(|way| row[way].as_f64().unwrap());
        assert!(of > 0.0 && best > 0.0 && row["own"].is_null(), "{row}");
    }
    assert!(outcome["checks"]["step nano bf16"]["device_mib"].as_f64().unwrap() > 1.0);
    assert_eq!(outcome["checks"]["top nano bf16"]["top"].as_array().unwrap().len(), 10);
    let row = outcome["level"].as_str().unwrap();
    assert!(row.starts_with("| `") && row.ends_with("| D |"), "nothing is shown of a GPU: {row}");
    assert_eq!(row.split('|').count(), 8, "as the table of levels has it: {row}");
    let text = std::fs::read_to_string(out.join("device.txt")).unwrap();
    assert!(text.starts_with("ok       devices") && text.contains(row), "{text}");
    assert_eq!(total(&report, "races"), 0);
}

/// Falling back to libtorch because our kernels do not compile is a failure. Results of several calls are merged.
#[test]
fn what_falls_back_to_libtorch_is_wrong_and_calls_add_up() {
    let scratch = Scratch::new();
    let (out, report) = (scratch.path("out"), scratch.path("report"));
    let only = |check| [programs(), arg(&out), "--steps", "3", "--only", check];
    let reference = [&only("bandwidth")[..], &["--ops", "reference"]].concat();
    pretended(&reference, &report).ok();
    let ran = pretended(&only("bits f32"), &report);
    assert_eq!(ran.code, Some(1), "{} {}", ran.out, ran.err);
    let outcome = found(&out);
    let checks = outcome["checks"].as_object().unwrap();
    let mut names: Vec<_> = checks.keys().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["bandwidth", "bits f32", "devices"]);
    assert_eq!(checks["bandwidth"]["outcome"], "ok");
    assert_eq!(checks["bits f32"]["outcome"], "WRONG", "{outcome}");
}

/// A run trained on one device is replayed on another from the copied files alone.
#[test]
fn runs_are_left_for_another_device() {
    let scratch = Scratch::new();
    let (out, report) = (scratch.path("out"), scratch.path("report"));
    let args = [programs(), arg(&out), "--steps", "3", "--ops", "reference"];
    pretended(&[&args[..], &["--train"]].concat(), &report).ok();
    let moved = scratch.path("moved");
    std::fs::rename(out.join("trained"), &moved).unwrap();
    let other = scratch.path("other");
    let args = [programs(), arg(&other), "--ops", "reference", "--replay", arg(&moved)];
    pretended(&args, &report).ok();
    let told = &found(&other)["checks"]["replay"];
    assert_eq!(told["outcome"], "ok", "{told}");
    assert_eq!(told["bf16 step 3"].as_str().map(|said| said.contains("same bits")), Some(true));

    let ledger = moved.join("f32/ledger.jsonl");
    let text = std::fs::read_to_string(&ledger).unwrap();
    let lines: Vec<_> = text.lines().collect();
    std::fs::write(&ledger, lines[..2].join("\n") + "\n").unwrap();
    std::fs::remove_dir_all(moved.join("bf16")).unwrap();
    let ran = pretended(&args, &report);
    assert_eq!(ran.code, Some(1), "a run that is not there is no run that holds: {}", ran.out);
}

/// Fake programs with made-up output, which start only with a certain libtorch.
const ZTRAIN: &str = r#"#!/bin/sh
case ":${LD_LIBRARY_PATH:-}:" in *"${NEEDED:-}"*) ;; *) echo "cannot open libtorch_cpu.so" >&2; exit 127 ;; esac
case "$*" in
  --version) echo "ztrain 0" ;;
  devices*) echo '{"device": "cuda:0", "name": "none", "architecture": "sm_0", "libraries": {}}' ;;
  "bench memory"*) touch "$REACHED"; exec sleep 60 ;;
  *"--checkpoint-every 2"*) exec sleep 60 ;;
  --curriculum*)
    mkdir -p "$4"
    echo "{\"kernel_table\": {\"operations\": \"${FAKED:-$ZTRAIN_OPS} 4\", \"libtorch\": \"2\"}}" >"$4/ledger.jsonl"
    echo '{"kernels": "a table"}' >"$4/events.jsonl" ;;
  *) exit 1 ;;
esac
"#;

struct Fake {
    scratch: Scratch,
    folder: PathBuf,
}

impl Fake {
    fn new() -> Fake {
        let scratch = Scratch::new();
        let folder = scratch.path("programs");
        std::fs::create_dir(&folder).unwrap();
        let nothing = "#!/bin/sh\n";
        for (name, text) in [("ztrain", ZTRAIN), ("zdata", nothing), ("kernels", nothing)] {
            std::fs::write(folder.join(name), text).unwrap();
            let all = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(folder.join(name), all).unwrap();
        }
        Fake { scratch, folder }
    }

    fn check(&self, programs: &Path, out: &str, args: &[&str]) -> Command {
        let out = self.scratch.path(out);
        let mut command = check(&[&[arg(programs), arg(&out)], args].concat());
        command.env("REACHED", self.scratch.path("reached")).env_remove("LD_LIBRARY_PATH");
        // A stopped program leaves its scratch folder.
        command.env("PYTHONPATH", self.scratch.path("python")).env("TMPDIR", arg(&self.folder));
        command
    }
}

#[test]
fn a_pack_starts_with_the_libtorch_that_is_there() {
    let fake = Fake::new();
    let made = fake.scratch.path("made");
    let told = Ran::from(check(&["--pack", arg(&made), arg(&fake.folder)]).output().unwrap()).ok();
    let pack = made.join("pack.tar.xz");
    assert!(told.contains(arg(&pack)), "{told}");
    assert_eq!(std::fs::read_dir(&made).unwrap().count(), 1, "one file is all of it");

    // Without libtorch: a one-line message, also in the report.
    let needed = "python/torch/lib";
    let run = |out: &str| {
        let mut command = fake.check(&pack, out, &["--only", "devices"]);
        Ran::from(command.env("NEEDED", needed).output().unwrap())
    };
    let ran = run("none");
    assert_eq!(ran.code, Some(6), "{} {}", ran.out, ran.err);
    let outcome = &found(&fake.scratch.path("none"))["checks"]["devices"];
    assert_eq!(outcome["outcome"], "WRONG");
    let told = outcome["told"].as_str().unwrap();
    assert!(told.contains("does not start") && told.lines().count() == 1, "{told}");

    // The torch of this Python, which is not opened for it.
    let torch = fake.scratch.path("python").join("torch");
    std::fs::create_dir_all(torch.join("lib")).unwrap();
    std::fs::write(torch.join("__init__.py"), "raise SystemExit('opened')\n").unwrap();
    std::fs::create_dir_all(fake.scratch.path("python/nvidia/cublas/lib")).unwrap();
    run("some").ok();
    let outcome = found(&fake.scratch.path("some"));
    assert!(outcome["libtorch"].as_str().unwrap().contains(needed), "{outcome}");
    assert!(outcome["programs"]["ztrain"].is_string(), "{outcome}");

    // The release folder with its scripts is sufficient.
    let alone = fake.scratch.path("alone");
    std::fs::create_dir(&alone).unwrap();
    let unpack = Command::new("tar").arg("xf").arg(&pack).arg("-C").arg(&alone).status().unwrap();
    assert!(unpack.success());
    let mut command = Command::new("sh");
    command.arg(alone.join("tests/device.sh")).arg(&alone).arg(fake.scratch.path("own"));
    Ran::from(command.args(["--only", "devices"]).output().unwrap()).ok();
}

#[test]
fn whoever_is_stopped_leaves_what_was_found() {
    let fake = Fake::new();
    let only = ["--only", "gemm", "bandwidth"];
    let mut command = fake.check(&fake.folder, "out", &only);
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let (reached, out) = (fake.scratch.path("reached"), fake.scratch.path("out"));
    for _ in 0..600 {
        if reached.exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(found(&out)["checks"]["devices"]["outcome"], "ok");
    assert!(std::fs::read_to_string(out.join("device.txt")).unwrap().contains("table of levels"));
    let left: Vec<_> =
        std::fs::read_dir(&out).unwrap().map(|one| one.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "nothing else lies there: {left:?}");
}

#[test]
fn other_operations_are_found_and_nobody_waits_for_ever() {
    let fake = Fake::new();
    let bits = ["--only", "bits f32", "--patience", "5"];
    let told = |out: &str| found(&fake.scratch.path(out))["checks"]["bits f32"].clone();
    let run = |out: &str, faked: &str| {
        let ran = fake.check(&fake.folder, out, &bits).env("FAKED", faked).output().unwrap();
        assert_eq!(Ran::from(ran).code, Some(1));
        told(out)
    };
    let other = run("other", "reference");
    assert!(other["told"].as_str().unwrap().contains("instead of 'device'"), "{other}");
    // A run that does not reach the step at which it is to be killed.
    let late = run("late", "device");
    assert!(late["told"].as_str().unwrap().contains("no time is left"), "{late}");
    assert!(late["seconds"].as_f64().unwrap() < 30.0, "{late}");
}

#[test]
fn outcomes_of_one_device_are_merged() {
    let scratch = Scratch::new();
    let put = |name: &str, device: &str, checks: Value| {
        let out = scratch.path(name);
        std::fs::create_dir(&out).unwrap();
        let whole = json!({"device": {"name": device, "architecture": "sm_90"}, "pretended": false,
            "programs": {"ztrain": "1"}, "libtorch": "2", "checks": checks, "level": ""});
        std::fs::write(out.join("device.json"), whole.to_string()).unwrap();
        out
    };
    let ok = |more: Value| {
        let mut one = json!({"outcome": "ok", "told": "", "seconds": 1.5});
        one.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        one
    };
    let table = json!({"fingerprint": "a", "table": {"libtorch": "2", "operations": "device 4"}});
    let kernels = put("kernels", "one", json!({"kernels": ok(json!({}))}));
    let bits = json!({"bits f32": ok(table.clone()), "bits bf16": ok(table.clone())});
    let mut changed = table.clone();
    changed["fingerprint"] = "b".into();
    let more = |name: &str, check: &str, found: Value| {
        let mut checks = bits.clone();
        checks[check] = found;
        put(name, "one", checks)
    };
    let other = put("other", "another", json!({}));
    let merge = |name: &str, with: &Path| {
        let out = scratch.path(name);
        let ran = check(&["--merge", arg(&out), arg(&kernels), arg(with)]).output().unwrap();
        (Ran::from(ran), out)
    };
    let level = |out: &Path| found(out)["level"].as_str().unwrap().to_owned();
    let wrong = json!({"outcome": "WRONG", "told": "", "seconds": 1.5});
    let cases = [
        // A check that was not run does not lower the result.
        ("bandwidth", ok(json!({})), "D L0"),
        ("ranks", ok(table), "D L0 L1 L2 L3"),
        ("ranks", wrong.clone(), "D L0"),
        // Different kernel tables prove nothing.
        ("bits bf16", ok(changed.clone()), "D"),
        ("ranks", ok(changed), "D"),
        ("hash", wrong.clone(), "D"),
        ("memory", wrong, "D"),
    ];
    for (number, (check, found, levels)) in cases.into_iter().enumerate() {
        let with = more(&format!("with-{number}"), check, found.clone());
        let (ran, out) = merge(&format!("both-{number}"), &with);
        assert_eq!(ran.code, Some(i32::from(found["outcome"] == "WRONG")), "{}", ran.err);
        let row = format!("| one | sm_90 | 2 | device 4 | {levels} |");
        assert!(level(&out).ends_with(&row), "{check} {found}: {}", level(&out));
    }
    let (ran, _) = merge("two devices", &other);
    ran.fails(1, &["not of the same device"]);
}
