//! Fear: that everything is exact but nothing is learned.

use std::fs;

use crate::support::{Scratch, arg, build, corpus, curriculum, ztrain};

/// Mean loss of a ledger's steps, in nats per label.
fn losses(run: &std::path::Path) -> Vec<f64> {
    let ledger = fs::read_to_string(run.join("ledger.jsonl")).unwrap();
    let lines = ledger.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter(|line| line["kind"] == "step").map(|line| line["loss"].as_f64().unwrap()).collect()
}

#[test]
fn a_tiny_model_learns_with_either_optimizer() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 400, ""), "store");
    for kind in ["muon", "adamw"] {
        let change = [("kind = \"muon\"", format!("kind = \"{kind}\""))];
        let change: Vec<_> = change.iter().map(|(from, to)| (*from, to.as_str())).collect();
        let path = curriculum(&scratch, &store, &format!("{kind}.toml"), &change);
        let run = scratch.path(kind);
        ztrain(&["--curriculum", arg(&path), "--out", arg(&run)]).ok();
        let losses = losses(&run);
        assert_eq!(losses.len(), 20);
        // A uniform guess over 400 ids costs ln 400 = 5.99 nats; word frequencies alone cost far less.
        assert!((5.5..6.5).contains(&losses[0]), "{kind}: {losses:?}");
        assert!(losses[19] < losses[0] - 1.0, "{kind}: {losses:?}");
    }
}
