//! Fear: that a checkpoint which cannot be written ends more than the run at hand.
//!
//! Real processes; what happens to the bytes is tested beside `trainer/src/checkpoint`.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::{Ran, Scratch, arg, assert_same_tree, build, corpus, curriculum, ztrain};

/// The disk takes no file beyond some 0.5 to 1 MB: room for everything but a blob of the embedding.
#[test]
fn a_full_disk_ends_the_run_and_keeps_the_checkpoint_before() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
    let wide = [("router_hidden_size = 16", "router_hidden_size = 16\nvocab_size = 16000")];
    let short = [("steps = 12", "steps = 7"), ("steps = 8", "steps = 2")];
    let change = [&wide[..], &short].concat();
    let path = curriculum(&scratch, &store, "run.toml", &change);
    let args = |out: &Path| {
        ["--curriculum", arg(&path), "--out", arg(out), "--checkpoint-every", "3"]
            .map(str::to_owned)
            .to_vec()
    };
    let run = |args: Vec<String>, more: &[&str]| {
        let args: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
        ztrain(&args)
    };
    let (whole, full) = (scratch.path("whole"), scratch.path("full"));
    run(args(&whole), &[]).ok();
    run(args(&full), &["--stop-after", "3"]).ok();
    for ranks in ["1", "2"] {
        // Past the limit a write fails as on a full disk, once nobody is killed for it.
        let output = Command::new("sh")
            .args(["-c", "trap '' XFSZ; ulimit -f 1000; exec \"$@\"", "sh"])
            .arg(env!("CARGO_BIN_EXE_ztrain"))
            .args(args(&full))
            .args(["--nproc", ranks])
            .env_remove("RUST_BACKTRACE")
            .output();
        let told = Ran::from(output.unwrap()).fails(6, &["checkpoints/step-6/", "cannot write it"]);
        assert!(told.contains("run the same command again"), "{told}");
        assert!(full.join("checkpoints/step-3/manifest.json").exists());
        assert!(!full.join("checkpoints/step-6/manifest.json").exists());
    }
    run(args(&full), &[]).ok();
    let ledger = |run: &Path| fs::read_to_string(run.join("ledger.jsonl")).unwrap();
    assert!(ledger(&whole) == ledger(&full), "a full disk left a trace");
    assert_same_tree(&whole.join("checkpoints"), &full.join("checkpoints"));
    let events = fs::read_to_string(full.join("events.jsonl")).unwrap();
    assert_eq!(events.matches("\"from_step\":3").count(), 3, "{events}");
}
