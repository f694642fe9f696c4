//! Fear: that a spike changes the weights, or that the windows that detect it are lost, shared or counted differently
//! somewhere in a run.

use serde_json::Value;
use tch::Device;
use tools::change::WhatIfChange;
use tools::compare::compare;
use tools::explain::{ExplainRequest, explain};
use tools::replay::whatif::imagine;
use trainer::replay::{Replayer, Verdict};
use trainer::step::Detail;
use trainer::workers::Workers;

use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{Scratch, stop_after, table};

const WINDOW: usize = 8;
const SIGMA: f64 = 4.0;

/// A step of one sequence among steps of six, at a rate close to zero: its gradient is noise.
const SPIKE: usize = 7;

const SECTIONS: &str =
    "[skip_step]\nwindow = 8\nsigma = 4\n\n[auto_clip]\nwindow = 8\npercentile = 40\n\n";

/// Ten steps, one of them a spike; `sections` are inserted before the phases.
fn spiked(scratch: &Scratch, name: &str, sections: &str) -> std::path::PathBuf {
    let phase = |name: &str, steps: usize, batch: u64| {
        format!(
            "[[phase]]\nname = \"{name}\"\nsteps = {steps}\nseq_len = 32\nbatch = {batch}\n\
             micro_batch = 1\nmix = {{ web = 1 }}\n\n"
        )
    };
    let phases = phase("before", SPIKE - 1, 6) + &phase("spike", 1, 1) + &phase("after", 3, 6);
    let path =
        scratch.edited(name, &[("lr = 1e-2", "lr = 1e-5"), ("final_lr = 1e-3", "final_lr = 1e-6")]);
    let text = std::fs::read_to_string(path).unwrap();
    let (head, _) = text.split_once("[[phase]]").unwrap();
    scratch.write(name, &format!("{head}{sections}{phases}"))
}

fn steps(scratch: &Scratch, out: &str) -> Vec<Value> {
    scratch.ledger(out).lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn float(step: &Value, key: &str) -> f64 {
    f64::from_bits(u64::from_str_radix(step[key].as_str().unwrap(), 16).unwrap())
}

/// Recomputes each step's decision from the ledger's numbers of the steps before.
fn check_decisions(steps: &[Value]) {
    for (index, step) in steps.iter().enumerate() {
        let before = &steps[index.saturating_sub(WINDOW)..index];
        let judged = before.len() >= WINDOW / 2;
        let far = |value: f64, before: Vec<f64>| {
            let (n, sum) = (before.len() as f64, before.iter().sum::<f64>());
            let square: f64 = before.iter().map(|one| one * one).sum();
            judged && value > sum / n + SIGMA * ((square - sum * sum / n) / (n - 1.0)).sqrt()
        };
        let loss = |step: &Value| step["loss"].as_f64().unwrap();
        let norm = |step: &Value| float(step, "norm");
        let (by_loss, by_norm) = (
            far(loss(step), before.iter().map(loss).collect()),
            far(norm(step), before.iter().map(norm).collect()),
        );
        let wanted = if by_loss {
            "loss"
        } else if by_norm {
            "norm"
        } else {
            "no"
        };
        assert_eq!(step["skipped"], wanted, "step {}", step["step"]);
        let mut norms: Vec<f64> = before.iter().map(norm).collect();
        norms.sort_by(f64::total_cmp);
        let longest = float(step, "clip_threshold");
        match judged {
            true => assert_eq!(longest, norms[(0.4 * norms.len() as f64).ceil() as usize - 1]),
            false => assert_eq!(longest, f64::INFINITY),
        }
    }
}

#[test]
fn a_planted_spike_is_skipped_and_moves_nothing() {
    let scratch = Scratch::new();
    let curriculum = spiked(&scratch, "run.toml", SECTIONS);
    scratch.train("run");
    let guarded = steps(&scratch, "run");
    check_decisions(&guarded);
    assert_ne!(guarded[SPIKE - 1]["skipped"], "no", "{}", guarded[SPIKE - 1]["norm"]);
    let moved = |steps: &[Value], step: usize| {
        steps[step - 1]["weight_checksums"] != steps[step - 2]["weight_checksums"]
    };
    for step in 2..=10 {
        assert_eq!(moved(&guarded, step), guarded[step - 1]["skipped"] == "no", "step {step}");
        let still = guarded[step - 1]["layer_update_norms"].as_str().unwrap();
        let still = still.bytes().all(|digit| digit == b'0');
        assert_eq!(still, guarded[step - 1]["skipped"] != "no", "norms of updates, step {step}");
    }
    // Without the sections every step is taken, and the ledger does not mention them.
    let plain = spiked(&scratch, "plain.toml", "");
    scratch.run(&plain, "plain", |_| ()).unwrap();
    let free = steps(&scratch, "plain");
    assert!(moved(&free, SPIKE) && !scratch.ledger("plain").contains("skipped"));
    assert_eq!(free[0]["weight_checksums"], guarded[0]["weight_checksums"]);
    assert!(
        guarded.iter().zip(&free).all(|(one, other)| one["batch_digest"] == other["batch_digest"])
    );
    let answer = compare(&scratch.path("run"), &scratch.path("plain")).unwrap();
    assert_eq!(answer.difference.unwrap().1.quantity, "clip of the window");
    // The windows started with the run, so the rule cannot be changed later.
    spiked(&scratch, "run.toml", &SECTIONS.replace("sigma = 4", "sigma = 5"));
    let fault = scratch.run(&curriculum, "run", |_| ()).unwrap_err();
    assert!(fault.to_string().contains("skip_step.sigma"), "{fault}");
}

/// Without a schedule, and with a source of its own, a skipped step does not affect the others: the run equals one
/// without the step, since bias correction counts only steps that updated the moments.
#[test]
fn a_skipped_step_is_as_if_it_had_not_been() {
    let scratch = Scratch::new();
    let path = spiked(&scratch, "run.toml", "[skip_step]\nwindow = 8\nsigma = 4\n\n");
    let text = std::fs::read_to_string(&path).unwrap();
    let steady = [
        ("warmup_steps = 3\ndecay_steps = 30\nfinal_lr = 1e-6\n", ""),
        (
            "batch = 1\nmicro_batch = 1\nmix = { web = 1 }",
            "batch = 1\nmicro_batch = 1\nmix = { math = 1 }",
        ),
    ];
    let text = steady.iter().fold(text, |text, (from, to)| {
        assert!(text.contains(from), "no {from:?} in {text}");
        text.replacen(from, to, 1)
    });
    let (from, to) = (
        text.find("[[phase]]\nname = \"spike\"").unwrap(),
        text.find("[[phase]]\nname = \"after\"").unwrap(),
    );
    let without = text[..from].to_owned() + &text[to..];
    scratch.run(&scratch.write("run.toml", &text), "run", |_| ()).unwrap();
    scratch.run(&scratch.write("without.toml", &without), "without", |_| ()).unwrap();
    let (mut run, without) = (steps(&scratch, "run"), steps(&scratch, "without"));
    assert_ne!(run.remove(SPIKE - 1)["skipped"], "no");
    assert_eq!(run.len(), without.len());
    for (one, other) in run.iter().zip(&without) {
        assert_eq!(one["skipped"], "no");
        assert_eq!(
            (&one["weight_checksums"], &one["micro_batch_grad_checksums"]),
            (&other["weight_checksums"], &other["micro_batch_grad_checksums"])
        );
    }
}

#[test]
fn windows_survive_stops_ranks_and_replays() {
    let scratch = Scratch::new();
    let curriculum = spiked(&scratch, "run.toml", SECTIONS);
    scratch.train("whole");
    for last in [3, 5, 7, 8] {
        scratch.run(&curriculum, "parts", stop_after(last)).unwrap();
    }
    scratch.train("parts");
    assert_same(&scratch, "whole", "parts");
    for (world, last) in [(3, 6), (2, 7), (1, 9), (3, 10)] {
        let part = train_with(&scratch, "ranks", world, |_, exec| exec.stop_after = Some(last));
        assert!(part.iter().all(|outcome| outcome.as_ref().unwrap().step == last));
    }
    assert_same(&scratch, "whole", "ranks");
    for outcome in train_with(&scratch, "two", 2, |_, _| ()) {
        assert_eq!(outcome.unwrap().step, 10);
    }
    assert_same(&scratch, "whole", "two");
    let open =
        || Replayer::open(&scratch.path("whole"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    for step in [5, SPIKE as u64, 8, 10] {
        let mut replayer = open();
        let mut state = replayer.state_after(step - 1).unwrap();
        let replayed = tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed;
        assert_eq!(replayed.verdict, Verdict::SameBits, "{:?}", replayed.difference);
    }
    // Counterfactual steps are judged by the same windows, and report the decision.
    let change = WhatIfChange { lr: Some(1e-4), ..WhatIfChange::default() };
    let imagined = imagine(&mut open(), SPIKE as u64..SPIKE as u64 + 2, &change).unwrap().steps;
    assert!(
        imagined[0].skipped.is_some_and(|skipped| skipped != trainer::optim::guard::Skipped::No)
    );
    assert_eq!(
        imagined[1].was.unwrap().1,
        imagined[1].would_be.1,
        "a skipped step moves nothing at any rate"
    );
}

/// Six steps with text, and steps between them with none: all of their documents are banned.
fn silenced(scratch: &Scratch, name: &str, sections: &str, silent: usize) -> std::path::PathBuf {
    let changes = [
        ("lr = 1e-2", "lr = 1e-3"),
        ("warmup_steps = 3\n", ""),
        ("decay_steps = 30\n", ""),
        ("final_lr = 1e-3\n", ""),
    ];
    let path = scratch.edited(name, &changes);
    let text = std::fs::read_to_string(&path).unwrap();
    let (head, _) = text.split_once("[[phase]]").unwrap();
    let phase = |name: &str, steps: usize, source: &str| match steps {
        0 => String::new(),
        _ => format!(
            "[[phase]]\nname = \"{name}\"\nsteps = {steps}\nseq_len = 32\nbatch = 4\nmicro_batch = 2\n\
             mix = {{ {source} = 1 }}\n\n"
        ),
    };
    let phases =
        phase("before", 4, "math") + &phase("silent", silent, "web") + &phase("after", 4, "math");
    let plain = scratch.write(name, &format!("{head}{sections}{phases}"));
    if silent == 0 {
        return plain;
    }
    let opened = loader::OpenedCurriculum::open(plain).unwrap();
    let web = opened.plan.sources().iter().find(|source| source.name == "web").unwrap();
    let all: Vec<String> = (0..web.documents).map(|document| document.to_string()).collect();
    let ban = format!("[[amendment]]\nstep = 5\nban = {{ web = [{}] }}\n", all.join(", "));
    let path = scratch.write(name, &format!("{head}{sections}{phases}{ban}"));
    let steps =
        loader::steps_without_labels(&loader::OpenedCurriculum::open(&path).unwrap()).unwrap();
    assert_eq!(steps, (5..5 + silent as u64).collect::<Vec<_>>());
    path
}

/// A step whose text is all banned changes nothing, neither by momentum nor by decay, and leaves the windows unchanged.
#[test]
fn a_step_without_labels_moves_nothing() {
    for sections in ["", "[auto_clip]\nwindow = 4\npercentile = 40\n\n"] {
        let scratch = Scratch::new();
        let path = silenced(&scratch, "run.toml", sections, 2);
        scratch.train("whole");
        scratch.run(&silenced(&scratch, "plain.toml", sections, 0), "plain", |_| ()).unwrap();
        let (mut run, plain) = (steps(&scratch, "whole"), steps(&scratch, "plain"));
        let before = run[3]["weight_checksums"].clone();
        for silent in run.drain(4..6) {
            let said = ["label_count", "loss", "skipped", "weight_checksums"]
                .map(|key| silent[key].clone());
            assert_eq!(said, [0.into(), Value::Null, "no-labels".into(), before.clone()]);
        }
        for (one, other) in run.iter().zip(&plain) {
            for key in ["weight_checksums", "clip_threshold", "loss", "layer_update_norms"] {
                assert_eq!(one[key], other[key], "{key} of step {}", one["step"]);
            }
        }
        // Its count of skipped steps is kept in checkpoints, on all ranks, and in a replay.
        for last in [4, 5, 6] {
            scratch.run(&path, "parts", stop_after(last)).unwrap();
        }
        scratch.train("parts");
        assert_same(&scratch, "whole", "parts");
        assert!(train_with(&scratch, "ranks", 2, |_, _| ()).iter().all(Result::is_ok));
        assert_same(&scratch, "whole", "ranks");
        let run = scratch.path("whole");
        let mut replayer = Replayer::open(&run, &table(), Device::Cpu, Workers::new(2)).unwrap();
        let mut state = replayer.state_after(4).unwrap();
        for step in 5..=7 {
            let replayed =
                tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed;
            assert_eq!(replayed.verdict, Verdict::SameBits, "{step}: {:?}", replayed.difference);
        }
    }
}

/// What has no labels has no loss: neither the step after an explained one, nor a micro-batch.
#[test]
fn a_step_without_labels_has_no_loss() {
    let scratch = Scratch::new();
    silenced(&scratch, "run.toml", "", 2);
    scratch.train("run");
    let run = scratch.path("run");
    let open = || Replayer::open(&run, &table(), Device::Cpu, Workers::new(2)).unwrap();
    for step in 3..=6 {
        let request = ExplainRequest { step, window: 8, top: 1, tokens: 0 };
        let found = explain(&mut open(), request).unwrap();
        let next = [4, 7].contains(&(step + 1));
        assert_eq!(found.next_loss.is_some(), next, "the step after step {step}");
        let removals = &found.removals;
        assert!(removals.iter().all(|one| one.next_loss.is_some() == next), "{removals:?}");
    }
    let replayer = &mut open();
    let state = replayer.state_after(4).unwrap();
    let found = replayer.micro_batch(&state, 0).unwrap().replayed;
    assert!(found.loss.is_nan(), "{}", found.loss);
}

/// A loss that is not finite ends a run, until an amendment skips the step, or all such steps.
#[test]
fn a_loss_that_is_not_finite_is_passed_where_the_curriculum_says_so() {
    let scratch = Scratch::new();
    let wild = "[[amendment]]\nstep = 4\noptimizer = { lr = 1e30 }\n\n";
    let path = scratch.edited("run.toml", &[("kind = \"muon\"", "kind = \"adamw\"")]);
    let text = std::fs::read_to_string(&path).unwrap() + "\n" + wild;
    scratch.write("run.toml", &text);
    let said = scratch.run(&path, "run", |_| ()).unwrap_err();
    assert_eq!(said.class(), contract::Class::Diverged);
    let step = steps(&scratch, "run").len() as u64 + 1;
    assert!(said.to_string().contains(&format!("--skip {step}")), "{said}");
    assert!((5..9).contains(&step), "weights that are as large as numbers can be: {said}");
    let text = text + &format!("[[amendment]]\nstep = {step}\nskip = true\n\n");
    scratch.write("run.toml", &text);
    let said = scratch.run(&path, "run", |_| ()).unwrap_err();
    assert!(said.to_string().contains(&format!("step {}", step + 1)), "{said}");
    let rule =
        format!("[[amendment]]\nstep = {}\nskip_step = {{ non_finite = \"skip\" }}\n", step + 1);
    scratch.write("run.toml", &(text + &rule));
    scratch.train("run");
    let run = steps(&scratch, "run");
    let at = step as usize;
    assert_eq!(
        (&run[at - 1]["skipped"], &run[at]["skipped"]),
        (&"amended".into(), &"non-finite".into())
    );
    assert!(run[at..].iter().all(|step| step["loss"].is_null()
        && step["weight_checksums"] == run[at - 1]["weight_checksums"]));
    scratch.train("whole");
    let replay = scratch.path("whole");
    let mut replayer = Replayer::open(&replay, &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(step).unwrap();
    let replayed = tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed;
    assert_eq!(replayed.verdict, Verdict::SameBits, "{:?}", replayed.difference);
}

/// Rules from an amendment apply from its step on, with windows that begin there.
#[test]
fn rules_of_skipping_and_clipping_are_amended() {
    let scratch = Scratch::new();
    let path = spiked(&scratch, "run.toml", "");
    let amendment = "[[amendment]]\nstep = 3\nskip_step = { window = 8, sigma = 4 }\n\
        auto_clip = { window = 8, percentile = 40 }\n";
    let text = std::fs::read_to_string(&path).unwrap() + amendment;
    scratch.write("run.toml", &text);
    scratch.train("whole");
    let run = steps(&scratch, "whole");
    assert!(
        run[..2].iter().all(|step| step["skipped"].is_null() && step["clip_threshold"].is_null())
    );
    check_decisions(&run[2..]);
    assert_ne!(run[SPIKE - 1]["skipped"], "no");
    for last in [1, 3, 6] {
        scratch.run(&path, "parts", stop_after(last)).unwrap();
    }
    scratch.train("parts");
    assert_same(&scratch, "whole", "parts");
}
