//! Fear: that a mix that reacts to the loss makes a run depend on more than its ledger: on stops, ranks, prefetching or
//! who asks.

use std::collections::BTreeMap;
use std::fs;

use contract::{Class, Digest, chain};
use loader::{OpenedCurriculum, PrefetchOptions};
use serde_json::Value;
use tch::Device;
use tools::change::WhatIfChange;
use tools::fork::{ForkRequest, fork};
use tools::replay::whatif::imagine;
use trainer::replay::{Replayer, Verdict};
use trainer::step::Detail;
use trainer::workers::Workers;

use crate::explain::dropping;
use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{Scratch, stop_after, table};

/// Steps of the run: eleven in windows of two, and three more of another phase.
const STEPS: u64 = 14;

fn scratch() -> Scratch {
    let scratch = Scratch::new();
    let reacting = "mix = { rule = \"excess-loss\", start = { web = 0.7, math = \"3/10\" }, window = 2, floor = 0.05, \
                    reference = { web = 3.5, math = 2 }, rate = 0.1 }\n";
    scratch.edited(
        "run.toml",
        &[
            ("mix = { web = 0.7, math = \"3/10\" }\n", reacting),
            ("\nsteps = 6\n", "\nsteps = 11\n"),
            ("\nsteps = 4\n", "\nsteps = 3\n"),
        ],
    );
    scratch
}

/// The weights of `math` that a ledger has, by the first steps of windows.
fn weights(ledger: &str) -> BTreeMap<u64, u64> {
    let step = |line: &str| -> Option<(u64, u64)> {
        let line: Value = serde_json::from_str(line).unwrap();
        Some((line["step"].as_u64()?, line["mix_weights"].get("math")?.as_u64()?))
    };
    ledger.lines().filter_map(step).collect()
}

#[test]
fn stops_ranks_and_prefetching_decide_nothing() {
    let scratch = scratch();
    assert_eq!(scratch.train("whole").step, STEPS);
    let found = weights(&scratch.ledger("whole"));
    assert!(found.keys().copied().eq([1, 3, 5, 7, 9, 11]), "{found:?}");
    assert!(
        found[&1] == found[&3] && found[&3] != found[&5] && found[&5] < found[&11],
        "{found:?}"
    );
    let path = scratch.path("run.toml");
    // Within a window, at its end, and with the first step of another phase.
    for last in [1, 4, 5, 7, 8, 11, 12] {
        scratch.run(&path, "parts", stop_after(last)).unwrap();
    }
    scratch.train("parts");
    assert_same(&scratch, "whole", "parts");
    for (number, (threads, depth)) in [(1, 1), (3, 20)].into_iter().enumerate() {
        let out = format!("ahead-{number}");
        scratch
            .run(&path, &out, |exec| exec.prefetch = PrefetchOptions { threads, depth })
            .unwrap();
        assert_same(&scratch, "whole", &out);
    }
    for (world, last) in [(2, 6), (3, 9), (2, STEPS)] {
        let part = train_with(&scratch, "ranks", world, |_, exec| exec.stop_after = Some(last));
        assert!(part.iter().all(|outcome| outcome.as_ref().unwrap().step == last));
    }
    assert_same(&scratch, "whole", "ranks");
}

#[test]
fn what_a_run_read_is_known_from_its_ledger() {
    let scratch = scratch();
    scratch.train("run");
    let mut opened = OpenedCurriculum::open(scratch.path("run.toml")).unwrap();
    assert_eq!(opened.plan.fixed_until(), 4);
    opened.follow(&scratch.path("run")).unwrap();
    assert_eq!(opened.plan.fixed_until(), STEPS);
    for line in scratch.ledger("run").lines().skip(1) {
        let line: Value = serde_json::from_str(line).unwrap();
        let batch = loader::batch(
            &opened.plan,
            opened.stores().unwrap(),
            line["step"].as_u64().unwrap(),
            loader::RankSlice::WHOLE,
        );
        assert_eq!(line["batch_digest"], batch.unwrap().digest().to_string());
    }
    let mut replayer =
        Replayer::open(&scratch.path("run"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(6).unwrap();
    for step in 7..=STEPS {
        let replayed = tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed;
        assert_eq!(replayed.verdict, Verdict::SameBits, "step {step}: {:?}", replayed.difference);
    }
}

/// A fork reads what the replay of its change read: later windows follow from its own losses.
#[test]
fn a_fork_reacts_to_its_own_losses() {
    let scratch = scratch();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(12)).unwrap();
    let open =
        || Replayer::open(&scratch.path("run"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = open().state_after(4).unwrap();
    let documents = tools::replay::step(&open(), &mut state, Detail::Tokens).unwrap().documents;
    let change = WhatIfChange {
        lr: Some(0.3),
        ..dropping(&[&documents.iter().find(|document| document.labels > 4).unwrap().id])
    };
    let imagined = imagine(&mut open(), 5..12, &change).unwrap().steps;
    let (run, out) = (scratch.path("run"), scratch.path("fork"));
    let request =
        ForkRequest { run: &run, step: 4, out: &out, stores: &[], change: &change, amend: None };
    fork(&request, &table()).unwrap();
    scratch.run(&out.join("run.toml"), "fork", stop_after(12)).unwrap();
    let (parent, fork) = (scratch.ledger("run"), scratch.ledger("fork"));
    assert!(parent.lines().take(5).eq(fork.lines().take(5)));
    for (line, would) in fork.lines().skip(5).zip(&imagined) {
        let step: Value = serde_json::from_str(line).unwrap();
        let wanted = format!("{:016x}", would.would_be.1.to_bits());
        assert_eq!(step["norm"], wanted, "step {}", would.step);
    }
    let (parent, fork) = (weights(&parent), weights(&fork));
    assert!(parent[&7] == fork[&7] && parent[&9] != fork[&9], "{parent:?} {fork:?}");
}

#[test]
fn weights_that_do_not_follow_are_found() {
    let scratch = scratch();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(8)).unwrap();
    let path = scratch.path("run").join("ledger.jsonl");
    // One part more for a source and one less for the other, under a chain that holds.
    let (mut link, mut old, mut forged) = (Digest::default(), Digest::default(), String::new());
    for (step, line) in scratch.ledger("run").lines().enumerate() {
        let (body, after) = chain::open(old, line).unwrap();
        old = after;
        let mut body = body;
        if step == 7 {
            let [math, web] = ["math", "web"].map(|name| {
                let line: Value = serde_json::from_str(&body).unwrap();
                (name, line["mix_weights"][name].as_u64().unwrap())
            });
            for ((name, part), other) in [(math, math.1 + 1), (web, web.1 - 1)] {
                body = body.replace(&format!("\"{name}\":{part}"), &format!("\"{name}\":{other}"));
            }
        }
        let (line, after) = chain::seal(link, &body);
        link = after;
        forged += &(line + "\n");
    }
    fs::write(&path, forged).unwrap();
    let mut opened = OpenedCurriculum::open(scratch.path("run.toml")).unwrap();
    for fault in [
        opened.follow(&scratch.path("run")).unwrap_err(),
        Replayer::open(&scratch.path("run"), &table(), Device::Cpu, Workers::new(2))
            .map(drop)
            .unwrap_err(),
    ] {
        assert_eq!(fault.class(), Class::Mismatch, "{fault}");
        let fault = fault.to_string();
        assert!(
            fault.contains("from step 7 on do not follow") && fault.contains("ledger.jsonl:8"),
            "{fault}"
        );
    }
}
