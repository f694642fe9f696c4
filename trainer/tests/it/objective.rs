//! Fear: that an objective depends on ranks, workers or stops, that a loss weight or z-loss changes something else than
//! the gradient, or that a replay forgets one.

use serde_json::Value;
use tch::Device;
use trainer::ledger::{self, Ledger, StepSummaryFields};
use trainer::mesh::Degrees;
use trainer::metrics::curves;
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

fn float(step: &Value, key: &str) -> f64 {
    f64::from_bits(u64::from_str_radix(step[key].as_str().unwrap(), 16).unwrap())
}

fn norm(step: &Value) -> f64 {
    float(step, "norm")
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

/// The first phase has z-loss, the second one none. Losses are those of a run without it, as long as the weights are.
#[test]
fn z_loss_is_in_the_gradient_and_not_in_the_loss() {
    let cuts = [
        ("micro_batch = 2", "micro_batch = 2\ncontext_chunks = 8\nweight_shards = 2"),
        ("[model]\n", "[model]\nloss_chunk = 24\n"),
    ];
    let of = |changes: &[(&str, &str)]| {
        let scratch = Scratch::new();
        scratch.edited("run.toml", &[&cuts, changes].concat());
        let outcome = scratch.train("alone");
        let all = steps(&scratch, "alone");
        (scratch, outcome, all)
    };
    let second = ("micro_batch = 1", "micro_batch = 1\nmodel = { z_loss = 0 }");
    let (_, _, plain) = of(&[]);
    let (_, _, zero) = of(&[("[model]\n", "[model]\nz_loss = 0.0\n")]);
    let (scratch, alone, found) = of(&[("[model]\n", "[model]\nz_loss = 0.01\n"), second]);
    for (number, (plain, zero)) in plain.iter().zip(&zero).enumerate() {
        assert_eq!(plain["state_digest"], zero["state_digest"], "0 changes no bit");
        assert!(zero["z_loss"].is_null() && plain["z_loss"].is_null());
        assert_ne!(plain["state_digest"], found[number]["state_digest"]);
        assert_eq!(found[number]["z_loss"].is_null(), number >= 6, "step {}", number + 1);
    }
    assert_eq!(plain[0]["micro_batch_losses"], found[0]["micro_batch_losses"]);
    assert_ne!(plain[0]["norm"], found[0]["norm"]);
    // Logits of initial weights are small, so Z is about the size of the vocabulary.
    let wanted = 0.01 * 50f64.ln().powi(2);
    let z_loss = float(&found[0], "z_loss");
    assert!((z_loss / wanted - 1.0).abs() < 0.05, "{z_loss} and {wanted}");
    let ledger = Ledger::read(&scratch.path("alone/ledger.jsonl")).unwrap();
    for step in &found {
        let summary: StepSummaryFields = serde_json::from_value(step.clone()).unwrap();
        let curves = curves(&summary, &[], None);
        let curve = curves.iter().find(|(name, _)| name == "head/z_loss").map(|(_, value)| *value);
        assert_eq!(curve, (!step["z_loss"].is_null()).then(|| float(step, "z_loss")));
        let record = ledger.record(summary.step).unwrap();
        let mut other = record.clone();
        other.z_loss = Some(ledger::Packed::floats([7.0]));
        assert_eq!(record.difference(&other, &[]).unwrap().quantity, "z-loss");
    }
    for (world, degrees) in [(3, Degrees::ALONE), (4, Degrees { cp: 2, tsp: 2 })] {
        let out = format!("ranks-{world}");
        for outcome in train_with(&scratch, &out, world, |_, exec| exec.degrees = degrees) {
            assert_eq!(outcome.unwrap(), alone);
        }
        assert_same(&scratch, "alone", &out);
    }
    let mut replayer =
        Replayer::open(&scratch.path("alone"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(4).unwrap();
    let replayed = tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed;
    assert_eq!(replayed.verdict, Verdict::SameBits, "{:?}", replayed.difference);
}
