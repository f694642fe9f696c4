//! Fear: that the programs are unkind to the person or script that calls them.

use std::process::Stdio;

use crate::support::{Scratch, arg, build, corpus, curriculum, zdata, zdata_command};

#[test]
fn wrong_use_is_exit_two_with_the_nearest_word() {
    zdata(&["bulid"]).fails(2, &["build"]);
    zdata(&["build", "corpus.toml"]).fails(2, &["--out"]);
    zdata(&["plan", "x.toml", "--jsn"]).fails(2, &["--json"]);
    for command in ["build", "inspect", "verify", "plan", "batch", "digest", "where", "verify-run"]
    {
        let help = zdata(&[command, "--help"]).ok();
        assert!(help.contains("Usage: zdata"), "{help}");
    }
}

#[cfg(feature = "train")]
#[test]
fn ztrain_refuses_wrong_use_once_and_before_it_starts_anything() {
    use crate::support::ztrain;
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[("steps = 8", "steps = 1")]);
    let (run, file) = (scratch.path("run"), scratch.write("file", ""));
    let train = |out: &std::path::Path, more: &[&str]| {
        ztrain(&[&["--curriculum", arg(&path), "--out", arg(out), "--quiet"], more].concat())
    };
    for wrong in [
        ["--rank-timeout", "0", "--nproc", "2"],
        ["--rank-timeout", "1e300", "--nproc", "2"],
        ["--ring-spike", "nan", "--ring", "2"],
        ["--workers", "0", "--nproc", "2"],
        ["--device", "abacus", "--nproc", "2"],
    ] {
        let said = train(&run, &wrong).fails(2, &wrong[..2]);
        assert_eq!(said.matches("error:").count(), 1, "{said}");
    }
    train(&run, &["--lanes", "2"]).fails(2, &["--lanes", "this flag is called --workers now"]);
    assert!(!run.exists(), "nothing was begun");
    train(&file, &[]).fails(2, &["file", "name another path"]);
    ztrain(&["--curriculum", arg(&store)]).fails(2, &["store", "name another path"]);
    // More workers than there is work for are no threads.
    train(&run, &["--workers", "1000000", "--stop-after", "2"]).ok();
    let replay = |more: &[&str]| ztrain(&[&["replay", "--run", arg(&run)], more].concat());
    replay(&["--step", "0"]).fails(2, &["--step", "0"]);
    let late = replay(&["--steps", "2..99"]);
    assert_eq!(late.out, "", "no step is computed before the last one is known to exist");
    late.fails(2, &["--steps", "98", "1 to 13"]);
    replay(&["--step", "2", "--lr", "nan"]).fails(2, &["--lr", "nan"]);
    for command in ["compare", "export", "replay"] {
        let (store, out) = (arg(&store), scratch.path("out"));
        let args = match command {
            "compare" => vec![command, arg(&run), store],
            "export" => vec![command, "--run", store, "--out", arg(&out)],
            _ => vec![command, "--run", store, "--step", "1"],
        };
        ztrain(&args).fails(2, &["store", "this is no run"]);
    }
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[("steps = 8", "steps = 1")]);
    for args in [
        vec!["plan", arg(&path)],
        vec!["inspect", arg(&store)],
        vec!["digest", arg(&path), "--steps", "1..13"],
    ] {
        let mut child =
            zdata_command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {told}");
        assert!(!told.contains("panicked"), "{args:?}: {told}");
    }
}

#[test]
fn machine_readable_answers_are_json() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 120, ""), "store");
    let path = curriculum(&scratch, &store, "run.toml", &[("steps = 8", "steps = 1")]);
    let commands = [
        vec!["inspect", arg(&store), "--json"],
        vec!["plan", arg(&path), "--json"],
        vec!["batch", arg(&path), "--step", "3", "--json"],
        vec!["where", arg(&path), "--doc", "doc-1-7", "--source", "web", "--json"],
    ];
    for args in commands {
        let told = zdata(&args).ok();
        let values = serde_json::Deserializer::from_str(&told).into_iter::<serde_json::Value>();
        assert!(values.map(Result::unwrap).count() > 0, "{args:?}: {told}");
    }
}
