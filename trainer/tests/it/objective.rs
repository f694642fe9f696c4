//! Fear: that the objective of a source depends on ranks, workers or stops, that a loss weight scales something else
//! than the gradient, or that a replay forgets one.

use serde_json::Value;
use tch::Device;
use trainer::replay::{Replayer, Verdict};
use trainer::step::Detail;
use trainer::workers::Workers;

use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{Scratch, stop_after, table};

const OBJECTIVES: &str = "\n[source.web]\nfim = { rate = 0.7, prefix = 47, middle = 48, suffix = 49 }\n\
    loss_weight = \"3/2\"\n[source.math]\nmask = { every = 3, context = 4 }\n\n[optimizer]\n";

fn steps(scratch: &Scratch, run: &str) -> Vec<Value> {
    let lines: Vec<Value> =
        scratch.ledger(run).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.into_iter().filter(|line| line["kind"] == "step").collect()
}

fn norm(step: &Value) -> f64 {
    f64::from_bits(u64::from_str_radix(step["norm"].as_str().unwrap(), 16).unwrap())
}

#[test]
fn ranks_stops_and_replays_know_the_objectives() {
    let scratch = Scratch::new();
    scratch.train("plain");
    scratch.edited("run.toml", &[("\n[optimizer]\n", OBJECTIVES)]);
    let alone = scratch.train("alone");
    for last in [2, 7] {
        scratch.run(&scratch.path("run.toml"), "parts", stop_after(last)).unwrap();
    }
    assert_eq!(scratch.train("parts"), alone);
    assert_same(&scratch, "alone", "parts");
    for world in [2, 3] {
        let out = format!("ranks-{world}");
        for outcome in train_with(&scratch, &out, world, |_, _| ()) {
            assert_eq!(outcome.unwrap(), alone);
        }
        assert_same(&scratch, "alone", &out);
    }
    let (plain, found) = (steps(&scratch, "plain"), steps(&scratch, "alone"));
    for (plain, found) in plain.iter().zip(&found) {
        let labels = |step: &Value| step["label_count"].as_u64().unwrap();
        assert!(labels(found) < labels(plain), "labels are left out: {found}");
        assert_ne!(plain["batch_digest"], found["batch_digest"]);
    }
    let mut replayer =
        Replayer::open(&scratch.path("alone"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(4).unwrap();
    let found = tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap();
    assert_eq!(found.replayed.verdict, Verdict::SameBits, "{:?}", found.replayed.difference);
    for document in &found.documents {
        let weight = document.loss_weight.as_deref();
        assert_eq!(weight, (document.source == "web").then_some("3/2"), "{}", document.id);
    }
}

/// The same power of two for all sources doubles the gradient exactly, and leaves loss, labels and text as they are.
#[test]
fn a_loss_weight_scales_the_gradient_alone() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "plain", stop_after(1)).unwrap();
    let weigh = |name: &str, web: &str, math: &str| {
        let keys = format!(
            "\n[source.web]\nloss_weight = {web}\n[source.math]\nloss_weight = {math}\n\n[optimizer]\n"
        );
        let path = scratch.edited(&format!("{name}.toml"), &[("\n[optimizer]\n", &keys)]);
        scratch.run(&path, name, stop_after(1)).unwrap();
        steps(&scratch, name).remove(0)
    };
    let plain = steps(&scratch, "plain").remove(0);
    let (ones, twos, other) =
        (weigh("ones", "1", "1.0"), weigh("twos", "2", "2"), weigh("other", "2", "1"));
    assert_eq!(ones["state_digest"], plain["state_digest"]);
    assert_eq!(ones["batch_digest"], plain["batch_digest"]);
    for weighted in [&twos, &other] {
        for key in ["loss", "label_count", "micro_batch_losses", "sources"] {
            assert_eq!(weighted[key], plain[key], "{key}");
        }
        assert_ne!(weighted["batch_digest"], plain["batch_digest"]);
    }
    assert_eq!(norm(&twos), 2.0 * norm(&plain));
    assert!(norm(&other) != norm(&twos) && norm(&other) != norm(&plain));
}
