//! Fear: that running out of a resource is reported unclearly, or leaves a different store behind.
//!
//! Shell limits stand in for a machine without file handles or disk space: the failing call is the same.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::prepare::prepared;
use crate::support::{
    Ran, Scratch, arg, assert_same_tree, build, corpus, curriculum, json_lines, zdata,
};

/// A `zdata` command under `ulimit`.
pub(crate) fn limited(limit: &str, args: &[&str]) -> Command {
    under(limit, env!("CARGO_BIN_EXE_zdata"), args)
}

/// The same for any program.
pub(crate) fn under(limit: &str, program: &str, args: &[&str]) -> Command {
    // With the signal ignored, a write beyond the limit is an error, as on a full disk.
    let script = format!("trap '' XFSZ; ulimit {limit}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, program]).args(args);
    command.stdin(Stdio::null()).env_remove("RUST_BACKTRACE");
    command
}

fn ran(limit: &str, args: &[&str]) -> Ran {
    limited(limit, args).output().unwrap().into()
}

/// Whether a run with few handles gave the same result as with many; if not, it must have reported what it lacked.
fn enough(handles: u64, args: &[&str], wanted: &str) -> bool {
    let ran = ran(&format!("-n {handles}"), args);
    if ran.code == Some(0) {
        assert_eq!(ran.out, wanted, "{args:?} with {handles} handles");
        return true;
    }
    let told = ran.fails(6, &["Too many open files", "ulimit -n"]);
    assert_eq!(told.matches("Too many open files").count(), 1, "{told}");
    false
}

/// Handle limits, from the lowest at which a program starts.
fn handles() -> impl Iterator<Item = u64> {
    let starts = |n: &u64| ran(&format!("-n {n}"), &["--version"]).code == Some(0);
    let least = (3..20).find(starts).unwrap();
    (least..least + 16).chain([least + 24, least + 40])
}

#[test]
fn without_memory_a_store_is_built_or_the_lack_is_said() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 80, "part_bytes = 1");
    let store = scratch.path("store");
    let args = ["build", arg(&corpus), "--out", arg(&store), "--workers", "2"];
    let starts =
        |megabytes: &u64| ran(&format!("-v {megabytes}000"), &["--version"]).code == Some(0);
    let least = (50..1000).step_by(10).find(starts).unwrap();
    // The system's message and ours differ.
    let lack = ["memory", "could not allocate", "cannot start a thread"];
    let mut told_of_it = 0;
    for megabytes in (least..).step_by(15) {
        let limit = format!("-v {megabytes}000");
        let ended = limited(&limit, &args).env("RUST_BACKTRACE", "1").output().unwrap();
        let signal = ended.status.signal();
        let ran = Ran::from(ended);
        if ran.code == Some(0) {
            break;
        }
        assert!(!store.exists(), "{megabytes} MB");
        assert_eq!(signal, None, "{megabytes} MB: {}", ran.err);
        let told = ran.fails(6, &[]);
        assert!(lack.iter().any(|lack| told.contains(lack)), "{megabytes} MB: {told}");
        assert!(!told.contains("backtrace"), "{megabytes} MB: {told}");
        told_of_it += 1;
    }
    assert!(told_of_it > 0);
    zdata(&["verify", arg(&store)]).ok();
}

/// The stack of a main thread grows while there is memory for it; without, a signal ends the process. So both programs
/// let it grow when they start, to the 2 MiB that every command has here; the rest is the environment's.
#[test]
fn no_command_needs_more_stack_than_was_reserved() {
    let scratch = Scratch::new();
    let corpus = prepared(&scratch);
    let (store, run) = (scratch.path("store"), scratch.path("run"));
    let tokenizer = scratch.path("again.json");
    let small = |program: &str, args: &[&str]| {
        let ended = under("-s 2304", program, args).output().unwrap();
        assert_eq!(ended.status.signal(), None, "{args:?}");
        Ran::from(ended).ok()
    };
    let zdata = |args: &[&str]| small(env!("CARGO_BIN_EXE_zdata"), args);
    zdata(&["tokenizer", "train", arg(&corpus), "--vocab", "400", "--out", arg(&tokenizer)]);
    zdata(&["build", arg(&corpus), "--out", arg(&store), "--workers", "1"]);
    let curriculum = curriculum(&scratch, &store, "run.toml", &[]);
    for args in [
        &["verify", arg(&store)][..],
        &["inspect", arg(&store), "--sample", "9", "--corpus", arg(&corpus)],
        &["plan", arg(&curriculum)],
        &["batch", arg(&curriculum), "--step", "3"],
        &["digest", arg(&curriculum), "--steps", "1..21"],
        &["schema", "curriculum"],
        &["manual"],
    ] {
        zdata(args);
    }
    let ztrain = |args: &[&str]| small(env!("CARGO_BIN_EXE_ztrain"), args);
    ztrain(&["--curriculum", arg(&curriculum), "--out", arg(&run), "--workers", "1"]);
    for args in [
        &["replay", arg(&run), "--step", "7", "--workers", "1"][..],
        &["explain", arg(&run), "--step", "7"],
        &["plan", arg(&curriculum)],
        &["report", arg(&run)],
        &["spikes", arg(&run)],
    ] {
        ztrain(args);
    }
}

#[test]
fn without_memory_a_store_is_checked_or_the_lack_is_said_and_never_called_damaged() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 80, "part_bytes = 1");
    let store = scratch.path("store");
    zdata(&["build", arg(&corpus), "--out", arg(&store)]).ok();
    let starts = |kilobytes: &u64| ran(&format!("-v {kilobytes}"), &["--version"]).code == Some(0);
    let least = (44_000..).step_by(1000).find(starts).unwrap();
    let mut done = 0;
    for kilobytes in (least..).step_by(1000) {
        let ended = limited(&format!("-v {kilobytes}"), &["verify", arg(&store)]).output().unwrap();
        assert_eq!(ended.status.signal(), None, "{kilobytes} KB");
        let ran = Ran::from(ended);
        if ran.code == Some(0) {
            done += 1;
            if done == 12 {
                break;
            }
            continue;
        }
        ran.fails(6, &[]);
    }
}

#[test]
fn without_handles_a_store_is_built_or_the_lack_is_said() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 80, "part_bytes = 1");
    let whole = scratch.path("whole");
    let args = ["build", arg(&corpus), "--out", arg(&whole), "--workers", "2"];
    let wanted = zdata(&args).ok();
    let outcomes: Vec<bool> = handles()
        .map(|handles| {
            let store = scratch.path(&format!("store-{handles}"));
            let args = ["build", arg(&corpus), "--out", arg(&store), "--workers", "2"];
            let digest = |told: &str| told.split_whitespace().next().unwrap_or("").to_owned();
            let ran = ran(&format!("-n {handles}"), &args);
            let done = ran.code == Some(0);
            if done {
                assert_eq!(digest(&ran.out), digest(&wanted));
            } else {
                let told = ran.fails(6, &["Too many open files", "ulimit -n"]);
                assert_eq!(told.matches("Too many open files").count(), 1, "{told}");
                assert!(!store.join("manifest.json").exists());
                zdata(&args).ok();
            }
            assert_same_tree(&whole, &store);
            done
        })
        .collect();
    assert!(outcomes.contains(&false) && outcomes.ends_with(&[true]), "{outcomes:?}");
}

#[test]
fn without_handles_nothing_is_called_damaged() {
    let scratch = Scratch::new();
    let corpus = prepared(&scratch);
    let text = fs::read_to_string(&corpus).unwrap();
    fs::write(&corpus, format!("part_bytes = 1\n{text}")).unwrap();
    let store = build(&scratch, &corpus, "store");
    let curriculum = curriculum(&scratch, &store, "run.toml", &[]);
    for args in [
        &["verify", arg(&store)][..],
        &["batch", arg(&curriculum), "--step", "3"],
        &["digest", arg(&curriculum), "--steps", "1..21"],
        &["inspect", arg(&store)],
        &["inspect", arg(&store), "--sample", "9", "--corpus", arg(&corpus)],
    ] {
        let wanted = zdata(args).ok();
        let outcomes: Vec<bool> = handles().map(|n| enough(n, args, &wanted)).collect();
        assert!(outcomes.ends_with(&[true]), "{args:?}: {outcomes:?}");
    }
}

/// Runs a command on increasingly large disks, and after each failure on an unlimited one: the bytes must be as
/// undisturbed.
fn fills_up<const N: usize>(
    scratch: &Scratch,
    name: &str,
    command: impl Fn(&str) -> [String; N],
    keeps: impl Fn(&Path) -> bool,
) {
    let words = |to: &Path| command(arg(to));
    let whole = scratch.path(name);
    zdata(&words(&whole).each_ref().map(String::as_str)).ok();
    let mut full = 0;
    // Blocks of 512 bytes.
    for blocks in [0, 1, 4, 16, 48, 100, 1_000_000] {
        let target = scratch.path(&format!("{name}-{blocks}"));
        let words = words(&target);
        let words = words.each_ref().map(String::as_str);
        let ran = ran(&format!("-f {blocks}"), &words);
        if ran.code != Some(0) {
            ran.fails(6, &["File too large"]);
            assert!(!keeps(&target), "{name} with {blocks} blocks looks whole");
            full += 1;
            zdata(&words).ok();
        }
        assert_same_tree(&whole, &target);
    }
    assert!((2..7).contains(&full), "{name}: {full} disks were full");
}

fn is_store(folder: &Path) -> bool {
    folder.join("manifest.json").exists()
}

#[test]
fn a_full_disk_stops_imports_and_exports_that_then_begin_anew() {
    let scratch = Scratch::new();
    let small = corpus(&scratch, 20, "");
    scratch.write("raw/web-2.jsonl", json_lines(9, 300));
    let store = build(&scratch, &small, "store");
    let tokenizer = scratch.path("tokenizer.json");
    for format in ["megatron", "datatrove", "olmo", "mds"] {
        let name = format!("out-{format}");
        let export =
            |to: &str| ["export", arg(&store), "--format", format, "--out", to].map(str::to_owned);
        fills_up(&scratch, &name, export, |out| out.join("export.json").exists());
        let source = format!("web={}", arg(&scratch.path(&name).join("web/train")));
        let import = |to: &str| {
            ["import", to, "--format", format, "--tokenizer", arg(&tokenizer), "--source", &source]
                .map(str::to_owned)
        };
        fills_up(&scratch, &format!("back-{format}"), import, is_store);
    }
}

#[test]
fn a_full_disk_stops_a_scan_that_then_goes_on() {
    let scratch = Scratch::new();
    let corpus = prepared(&scratch);
    scratch.write("raw/web-2.jsonl", json_lines(9, 300));
    let build =
        |to: &str| ["build", arg(&corpus), "--out", to, "--workers", "2"].map(str::to_owned);
    fills_up(&scratch, "prepared", build, is_store);
}

#[test]
fn a_full_disk_stops_a_build_of_many_parts_that_then_goes_on() {
    let scratch = Scratch::new();
    let small = corpus(&scratch, 20, "part_bytes = 20000");
    scratch.write("raw/web-2.jsonl", json_lines(9, 300));
    let build = |to: &str| ["build", arg(&small), "--out", to].map(str::to_owned);
    fills_up(&scratch, "in-parts", build, is_store);
}
