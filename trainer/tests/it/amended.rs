//! Fear: that an amendment affects a step trained before it, or is lost during a run.

use std::collections::BTreeMap;

use contract::Class;
use curriculum::Dtype;
use loader::OpenedCurriculum;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tch::Device;
use tools::change::{DocumentsBySource, WhatIfChange};
use tools::fork::{ForkRequest, fork};
use tools::replay::whatif::imagine;
use trainer::RunSpec;
use trainer::replay::{Replayer, Verdict};
use trainer::step::Detail;
use trainer::workers::Workers;

use crate::explain::dropping;
use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{CURRICULUM, Scratch, stop_after, table};

/// Another mix in the middle of the second phase, and some documents banned shortly after.
const AMENDMENTS: &str = "\n[[amendment]]\nstep = 8\nmix = { web = 5, math = 2 }\n\n\
    [[amendment]]\nstep = 9\nban = { web = [3, 40, 41, 77, 90, 101, 111], math = [5, 9, 60, 61, 100] }\n";

fn lines(scratch: &Scratch, out: &str) -> Vec<String> {
    scratch.ledger(out).lines().map(str::to_owned).collect()
}

#[test]
fn an_amended_run_goes_on_and_one_that_came_too_far_is_refused() {
    let scratch = Scratch::new();
    let path = scratch.path("run.toml");
    scratch.train("plain");
    for (recorded, refused) in [(7, false), (8, true)] {
        let out = format!("run-{recorded}");
        scratch.write("run.toml", CURRICULUM);
        scratch.run(&path, &out, stop_after(recorded)).unwrap();
        scratch.write("run.toml", &(CURRICULUM.to_owned() + AMENDMENTS));
        let outcome = scratch.run(&path, &out, |_| ());
        if refused {
            let fault = outcome.unwrap_err();
            assert_eq!(fault.class(), Class::Usage);
            let text = fault.to_string();
            assert!(text.contains("amendment.1") && text.contains("step 8 on"), "{text}");
            continue;
        }
        assert_eq!(outcome.unwrap().step, 10);
        let events = std::fs::read_to_string(scratch.path(&out).join("events.jsonl")).unwrap();
        assert!(events.contains("amendment.1") && events.contains("amendment.2"), "{events}");
    }
    let (plain, run) = (lines(&scratch, "plain"), lines(&scratch, "run-7"));
    assert!(plain[..8] == run[..8], "what was trained before the amendment is as it was");
    assert!(plain[8] != run[8]);
}

#[test]
fn an_amended_run_has_the_same_bits_in_parts_on_ranks_and_in_a_replay() {
    let scratch = Scratch::new();
    let path = scratch.write("run.toml", &(CURRICULUM.to_owned() + AMENDMENTS));
    scratch.train("whole");
    scratch.run(&path, "parts", stop_after(8)).unwrap();
    scratch.train("parts");
    assert_same(&scratch, "whole", "parts");
    for (world, last) in [(3, 9), (2, 10)] {
        let part = train_with(&scratch, "ranks", world, |_, exec| exec.stop_after = Some(last));
        assert!(part.iter().all(|outcome| outcome.as_ref().unwrap().step == last));
    }
    assert_same(&scratch, "whole", "ranks");
    let mut replayer =
        Replayer::open(&scratch.path("whole"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(7).unwrap();
    let mut silent = 0;
    for step in 8..=10 {
        let found = tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap();
        assert_eq!(
            found.replayed.verdict,
            Verdict::SameBits,
            "step {step}: {:?}",
            found.replayed.difference
        );
        silent += found.documents.iter().filter(|it| it.tokens > 1 && it.labels == 0).count();
    }
    assert!(silent > 0, "none of the banned documents was met: the test looks at nothing");
}

/// A replay's counterfactual without a document equals a run amended with its ban.
#[test]
fn a_ban_is_the_counterfactual_come_true() {
    let scratch = Scratch::new();
    scratch.train("plain");
    let open =
        || Replayer::open(&scratch.path("plain"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = open().state_after(7).unwrap();
    let documents = tools::replay::step(&open(), &mut state, Detail::Tokens).unwrap().documents;
    let worst = documents.iter().find(|document| document.labels > 4).unwrap();
    let change = dropping(&[&worst.id]);
    let imagined = imagine(&mut open(), 8..10, &change).unwrap().steps;
    let (source, number) = worst.id.split_once('-').unwrap();
    let ban = format!("\n[[amendment]]\nstep = 8\nban = {{ {source} = [{number}] }}\n");
    scratch.write("run.toml", &(CURRICULUM.to_owned() + &ban));
    scratch.train("banned");
    for (line, would) in lines(&scratch, "banned")[8..].iter().zip(&imagined) {
        let step: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(
            step["norm"],
            format!("{:016x}", would.would_be.1.to_bits()),
            "step {}",
            would.step
        );
    }
    assert!(imagined[0].dropped_labels == worst.labels);
}

#[test]
fn a_store_is_added_and_known_by_its_content() {
    let scratch = Scratch::new();
    let path = scratch.path("run.toml");
    scratch.run(&path, "run", stop_after(7)).unwrap();
    scratch.write_other_store("more", ["news", "code"], 5);
    let digest = scratch.store_digest("more");
    let amended = |mix: &str, digest: &str| {
        let text = format!(
            "{CURRICULUM}\n[[amendment]]\nstep = 9\nstore = \"more\"\ndigest = \"{digest}\"\nmix = {{ {mix} }}\n"
        );
        scratch.write("run.toml", &text);
    };
    amended("web = 1, news = 2", &digest);
    assert_eq!(scratch.run(&path, "run", |_| ()).unwrap().step, 10);
    assert_eq!(scratch.run(&path, "whole", |_| ()).unwrap().step, 10);
    // Line 0 has the curriculum at the start, and step 9 of one of them the one in force since then.
    let body = |line: String| line.split(",\"chain\"").next().unwrap().to_owned();
    let steps = |out: &str| -> Vec<String> {
        let steps = lines(&scratch, out).into_iter().skip(1);
        steps
            .map(|line| line.split(",\"curriculum\"").next().unwrap().to_owned())
            .map(body)
            .collect()
    };
    assert_eq!(steps("run").len(), 10);
    assert_eq!(steps("run"), steps("whole"));
    amended("web = 1, news = 2", &"0".repeat(64));
    let fault = scratch.run(&path, "run", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch, "{fault}");
    amended("web = 1, news = 2", &digest);
    let early = std::fs::read_to_string(&path).unwrap();
    scratch.write(
        "run.toml",
        &early.replace("mix = { web = 1, math = 3 }", "mix = { web = 1, code = 3 }"),
    );
    let fault = scratch.run(&path, "other", |_| ()).unwrap_err();
    assert!(fault.class() == Class::Usage && fault.to_string().contains("\"code\""), "{fault}");
}

/// The numbers that an amendment changes, compared with the ledger of an uninterrupted run: the rates by their formula,
/// the rest by which weights change.
#[test]
fn numbers_change_from_their_step_on_and_no_step_before() {
    let scratch = Scratch::new();
    let path = scratch.path("run.toml");
    scratch.train("plain");
    let amended = "\n[[amendment]]\nstep = 5\nskip = true\n\n\
        [[amendment]]\nstep = 7\noptimizer = { lr = 4e-3, clip = 1e-2 }\n\
        schedule = { decay_steps = 10, final_lr = 2e-3 }\n\n\
        [[amendment]]\nstep = 9\ndtype = \"bf16\"\noptimizer = { clip = 0 }\n";
    // Amending in the middle gives the same bits as amending from the beginning.
    scratch.run(&path, "taken", stop_after(4)).unwrap();
    scratch.write("run.toml", &(CURRICULUM.to_owned() + amended));
    scratch.train("taken");
    scratch.train("whole");
    let part = train_with(&scratch, "ranks", 3, |_, _| ());
    assert!(part.iter().all(|outcome| outcome.as_ref().unwrap().step == 10));
    assert_same(&scratch, "whole", "ranks");
    let steps = |out: &str| -> Vec<serde_json::Value> {
        let lines = lines(&scratch, out);
        lines[1..].iter().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let (plain, taken, whole) = (steps("plain"), steps("taken"), steps("whole"));
    assert!(lines(&scratch, "plain")[..5] == lines(&scratch, "taken")[..5]);
    for (taken, whole) in taken.iter().zip(&whole) {
        for key in ["state_digest", "weight_checksums", "norm", "lr", "skipped"] {
            assert_eq!(taken[key], whole[key], "{key} of step {}", whole["step"]);
        }
    }
    // Amended numbers do not affect a step's text.
    assert!(
        plain.iter().zip(&whole).all(|(one, other)| one["batch_digest"] == other["batch_digest"])
    );
    assert_eq!(whole[4]["skipped"], "amended");
    assert_eq!(
        whole[4]["weight_checksums"], whole[3]["weight_checksums"],
        "a skipped step moves nothing"
    );
    assert!(
        whole[5]["skipped"].is_null()
            && whole[5]["weight_checksums"] != whole[4]["weight_checksums"]
    );
    let float = |step: &serde_json::Value, key: &str| {
        f64::from_bits(u64::from_str_radix(step[key].as_str().unwrap(), 16).unwrap())
    };
    for (index, step) in whole.iter().enumerate() {
        let number = index as f64 + 1.0;
        let (peak, decay, last) = if index < 6 { (1e-2, 30.0, 1e-3) } else { (4e-3, 10.0, 2e-3) };
        let decayed = last
            + (peak - last) * 0.5 * (1.0 + ((number - 3.0) / decay * std::f64::consts::PI).cos());
        let wanted = if number < 3.0 { peak * number / 3.0 } else { decayed };
        assert!((float(step, "lr") - wanted).abs() < 1e-12, "step {number}: {wanted}");
    }
    // A run that has recorded the step refuses the change and names the key.
    scratch.run(&path, "late", stop_after(7)).unwrap();
    let other = amended.replace("final_lr = 2e-3", "final_lr = 1e-3");
    scratch.write("run.toml", &(CURRICULUM.to_owned() + &other));
    let fault = scratch.run(&path, "late", |_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Usage);
    assert!(
        fault.to_string().contains("amendment.2") && fault.to_string().contains("step 7 on"),
        "{fault}"
    );
    // Every step can be replayed.
    let mut replayer =
        Replayer::open(&scratch.path("whole"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(4).unwrap();
    for step in 5..=10 {
        let replayed = tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed;
        assert_eq!(replayed.verdict, Verdict::SameBits, "step {step}: {:?}", replayed.difference);
    }
}

/// Every counterfactual equals a run with the same amendment.
#[test]
fn every_change_is_imagined_as_an_amendment_makes_it() {
    let scratch = Scratch::new();
    let text = CURRICULUM.replace("\"f32\"", "\"bf16\"");
    let path = scratch.write("run.toml", &text);
    scratch.train("plain");
    let plain = lines(&scratch, "plain");
    let rate = |line: &str| {
        let step: serde_json::Value = serde_json::from_str(line).unwrap();
        f64::from_bits(u64::from_str_radix(step["lr"].as_str().unwrap(), 16).unwrap())
    };
    let half = rate(&plain[6]) / 2.0;
    let none = WhatIfChange::default();
    let cases = [
        (
            WhatIfChange { drop_sources: vec!["math".to_owned()], ..none.clone() },
            "\nmix = { web = 1 }\n\n[[amendment]]\nstep = 7\nmix = { web = 1 }\n",
        ),
        (
            WhatIfChange { lr: Some(half), ..none.clone() },
            "\noptimizer = { lr = 5e-3 }\nschedule = { final_lr = 5e-4 }\n",
        ),
        (WhatIfChange { clip: Some(1e-3), ..none.clone() }, "\noptimizer = { clip = 1e-3 }\n"),
        (WhatIfChange { fp32: true, ..none.clone() }, "\ndtype = \"f32\"\n"),
        (WhatIfChange { skip: true, ..none }, "\nskip = true\n"),
    ];
    for (number, (change, amendment)) in cases.into_iter().enumerate() {
        let mut replayer =
            Replayer::open(&scratch.path("plain"), &table(), Device::Cpu, Workers::new(2)).unwrap();
        let answer = imagine(&mut replayer, 6..10, &change).unwrap();
        scratch.write("run.toml", &format!("{text}\n[[amendment]]\nstep = 6{amendment}"));
        let out = format!("amended-{number}");
        scratch.run(&path, &out, |_| ()).unwrap();
        let amended = lines(&scratch, &out);
        if change.fp32 {
            // Weights owned by other ranks were held rounded, and are needed in f32 from then on.
            let ranks = train_with(&scratch, "ranks", 3, |_, _| ());
            assert!(ranks.iter().all(Result::is_ok));
            assert_same(&scratch, &out, "ranks");
        }
        assert!(plain[6..10] != amended[6..10], "{change:?} changes nothing");
        assert_eq!(answer.steps.len(), 4);
        for (line, would) in amended[6..].iter().zip(&answer.steps) {
            let step: serde_json::Value = serde_json::from_str(line).unwrap();
            let norm = format!("{:016x}", would.would_be.1.to_bits());
            assert_eq!(step["norm"], norm, "{change:?}, step {}", would.step);
            assert!((step["loss"].as_f64().unwrap() - would.would_be.0).abs() < 1e-9);
        }
    }
}

/// Amendments of rates.
fn of_rates() -> impl Strategy<Value = String> {
    let rate = || prop_oneof![3 => 1e-5..0.1f64, 1 => Just(0.0)];
    prop_oneof![
        3 => rate().prop_map(|lr| format!("optimizer = {{ lr = {lr:e} }}")),
        1 => (0u64..6).prop_map(|steps| format!("schedule = {{ warmup_steps = {steps} }}")),
        1 => Just("schedule = { decay_steps = 0 }".to_owned()),
        2 => (1u64..12, rate())
            .prop_map(|(steps, last)| format!("schedule = {{ decay_steps = {steps}, final_lr = {last:e} }}")),
        1 => (0..KINDS.len()).prop_map(|kind| format!("schedule = {{ kind = {:?} }}", KINDS[kind])),
    ]
}

const KINDS: [&str; 4] = ["linear", "wsd", "inverse-sqrt", "constant"];

/// A schedule of the second phase alone: its peak, its warm-up, its decay.
fn of_a_phase() -> impl Strategy<Value = String> {
    let rate = || 1e-5..0.1f64;
    (prop::option::of(rate()), 0u64..4, 0u64..4, rate()).prop_map(|(lr, warmup, decay, last)| {
        let lr = lr.map_or_else(String::new, |lr| format!("\nlr = {lr:e}"));
        let last = if decay > 0 { format!(", final_lr = {last:e}") } else { String::new() };
        format!(
            "{lr}\nschedule = {{ warmup_steps = {warmup}, decay_steps = {decay}{last} }}\nsteps = 4\n"
        )
    })
}

/// Every later rate has the same ratio to the recorded rate as the requested one has, whatever the amendments in
/// between, and whether the second phase has a schedule of its own or not.
#[test]
fn a_rate_that_is_asked_for_keeps_its_proportion_across_amendments() {
    let scratch = Scratch::new();
    let asked = prop_oneof![4 => 1e-6..0.1f64, 1 => Just(0.0)];
    let said = prop::collection::btree_map(1u64..=10, of_rates(), 0..5);
    let cases = (1u64..=10, asked, said, prop::option::of(of_a_phase()));
    let runner = &mut TestRunner::new(Config::with_cases(128));
    let outcome = runner.run(&cases, |(first, asked, said, phase)| {
        let amendments =
            said.iter().map(|(step, said)| format!("\n[[amendment]]\nstep = {step}\n{said}\n"));
        let phases = match phase {
            Some(keys) => CURRICULUM.replace("\nsteps = 4\n", &keys),
            None => CURRICULUM.to_owned(),
        };
        let path = scratch.write("run.toml", &(phases + &amendments.collect::<String>()));
        let Ok(opened) = OpenedCurriculum::open(&path) else {
            return Err(TestCaseError::reject("these amendments change nothing"));
        };
        let spec = RunSpec::new(&opened).unwrap();
        let rate = |spec: &RunSpec, step: u64| spec.settings_at(step).schedule.rate(step);
        let was = rate(&spec, first);
        prop_assume!(was != asked);
        // A warm-up from the rate before the second phase, now or by a later amendment.
        let origin = spec.settings_at(first).schedule.origin;
        let warms = |step: u64| {
            let amended = said.get(&step).is_some_and(|said| said.contains("warmup_steps"));
            let now = spec.settings_at(first).schedule.is_warming_up(first);
            if step == first { now } else { amended }
        };
        let held = origin.rate > 0.0 && (first..=10).any(warms);
        let change = WhatIfChange { lr: Some(asked), ..WhatIfChange::default() };
        let amended = change.amended(&spec, first..11, DocumentsBySource::new()).unwrap();
        let amended =
            RunSpec::new(&OpenedCurriculum::open_text(&path, amended.canonical()).unwrap())
                .unwrap();
        for step in 1..=10 {
            let wanted = match step {
                _ if step < first => rate(&spec, step),
                // Nothing is in proportion to zero, or to a warm-up from another rate: the requested rate stays.
                _ if was == 0.0 || held => asked,
                _ => rate(&spec, step) * (asked / was),
            };
            let found = rate(&amended, step);
            prop_assert!(
                (found - wanted).abs() <= 1e-12 * wanted,
                "step {step}: {found:e}, not {wanted:e}"
            );
        }
        Ok(())
    });
    outcome.unwrap();
}

/// A requested clip or number format overrides later amendments; their other numbers still apply.
#[test]
fn a_clip_and_a_number_format_that_are_asked_for_hold_behind_later_amendments() {
    let scratch = Scratch::new();
    let later = "\n[[amendment]]\nstep = 7\ndtype = \"f32\"\n\n\
        [[amendment]]\nstep = 8\noptimizer = { clip = 0.25, lr = 1e-3 }\n\n\
        [[amendment]]\nstep = 9\ndtype = \"bf16\"\n";
    let text = CURRICULUM.replace("\"f32\"", "\"bf16\"") + later;
    let path = scratch.write("run.toml", &text);
    let spec = RunSpec::new(&OpenedCurriculum::open(&path).unwrap()).unwrap();
    let change = WhatIfChange { clip: Some(1e-3), fp32: true, ..WhatIfChange::default() };
    let amended = change.amended(&spec, 6..11, DocumentsBySource::new()).unwrap();
    let amended =
        RunSpec::new(&OpenedCurriculum::open_text(&path, amended.canonical()).unwrap()).unwrap();
    for step in 1..=10 {
        let (was, now) = (spec.settings_at(step), amended.settings_at(step));
        assert_eq!(now.clip, if step < 6 { was.clip } else { 1e-3 }, "step {step}");
        assert_eq!(now.schedule.rate(step), was.schedule.rate(step), "step {step}");
        let dtype = amended.curriculum.numbers_at(step).dtype;
        assert_eq!(dtype == Dtype::F32, step >= 6, "step {step}");
    }
}

/// If a phase cannot do without a source, this matters to a fork, but not to a request about steps outside that phase.
#[test]
fn a_source_is_missed_only_in_the_steps_that_are_computed() {
    let scratch = Scratch::new();
    let path = scratch.edited("run.toml", &[("mix = { web = 1, math = 3 }", "mix = { web = 1 }")]);
    let text = std::fs::read_to_string(&path).unwrap();
    scratch.train("run");
    let open =
        || Replayer::open(&scratch.path("run"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let without = |name: &str| WhatIfChange {
        drop_sources: vec![name.to_owned()],
        ..WhatIfChange::default()
    };
    let answer = imagine(&mut open(), 5..7, &without("web")).unwrap();
    assert!(answer.no_fork.as_ref().unwrap().contains("only source"), "{answer:?}");
    scratch.write("run.toml", &format!("{text}\n[[amendment]]\nstep = 5\nmix = {{ math = 1 }}\n"));
    scratch.train("amended");
    for (line, would) in lines(&scratch, "amended")[5..7].iter().zip(&answer.steps) {
        let line: BTreeMap<String, serde_json::Value> = serde_json::from_str(line).unwrap();
        assert_eq!(
            line["norm"],
            format!("{:016x}", would.would_be.1.to_bits()),
            "step {}",
            would.step
        );
    }
    let fault = imagine(&mut open(), 6..8, &without("web")).unwrap_err();
    assert!(fault.class() == Class::Usage && fault.to_string().contains("only source"), "{fault}");
    assert_eq!(imagine(&mut open(), 5..8, &without("math")).unwrap().no_fork, None);
    let fault = imagine(&mut open(), 8..9, &without("math")).unwrap_err();
    assert!(fault.class() == Class::Usage && fault.to_string().contains("\"math\""), "{fault}");
    let (run, out, change) = (scratch.path("run"), scratch.path("fork"), without("web"));
    let request =
        ForkRequest { run: &run, step: 4, out: &out, stores: &[], change: &change, amend: None };
    let fault = fork(&request, &table()).unwrap_err();
    assert!(fault.class() == Class::Usage && fault.to_string().contains("only source"), "{fault}");
}
