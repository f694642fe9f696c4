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
