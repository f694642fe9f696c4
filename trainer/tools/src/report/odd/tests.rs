//! Noise, trends and schedules are not odd; injected trouble is.

use std::ops::Range;

use contract::{Key, Purpose, draw};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use trainer::ledger::{Packed, SourceSums};

/// A step with two evenly loaded layers.
fn seen(step: u64, loss: f64, norm: f64, lr: f64) -> StepSummaryFields {
    let bits = |value: f64| format!("{:016x}", value.to_bits());
    let digest = "0".repeat(32);
    serde_json::from_value(json!({
        "step": step, "phase": "a", "batch_digest": digest, "state_digest": digest, "label_count": 100, "loss": loss,
        "norm": bits(norm), "lr": bits(lr), "tokens_per_expert": [[5, 5, 5, 5, 1], [5, 5, 5, 5, 1]],
        "sources": {}, "micro_batch_labels": [], "micro_batch_losses": "", "layer_gradient_norms": "", "layer_update_norms": "",
    }))
    .unwrap()
}

/// Noise of standard deviation 1, approximately normal: the sum of twelve uniform random numbers.
fn noise(seed: u64, step: u64) -> f64 {
    let key = Key::from_seed(seed).nth(step);
    let even = |index| draw(key, Purpose::Generate, index) as f64 / u64::MAX as f64;
    (0..12).map(even).sum::<f64>() - 6.0
}

/// A normal run: the loss falls with noise, the norm is noisy, the rate warms up and decays by a cosine.
fn quiet(seed: u64, step: u64) -> StepSummaryFields {
    let time = step as f64;
    let loss = 3.0 + 6.0 * (-time / 80.0).exp() + 0.05 * noise(seed, step);
    let norm = (0.2 * noise(seed + 1, step) - time / 500.0).exp();
    let lr = if step <= 20 { 1e-3 * time / 20.0 } else { 5e-4 * (1.0 + (time / 600.0).cos()) };
    seen(step, loss, norm, lr)
}

fn found(steps: impl IntoIterator<Item = StepSummaryFields>) -> Vec<OddStep> {
    let mut detector = Detector::default();
    steps.into_iter().for_each(|seen| {
        detector.step(&seen);
    });
    detector.found().to_vec()
}

/// Seeds of normal runs. In rare seeds, a step is odd by chance, and rightly reported: none of these has one.
const QUIET: Range<u64> = 0..200;

#[test]
fn a_quiet_run_has_no_odd_step() {
    for seed in QUIET {
        let found = found((1..=600).map(|step| quiet(seed, step)));
        assert!(found.is_empty(), "{seed}: {found:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Trouble injected into a normal run is found at its step, and nothing else is.
    #[test]
    fn planted_trouble_is_found_with_its_kind(seed in QUIET, at in 40u64..590, kind in 0usize..6) {
        let plant = |step: u64| {
            let mut seen = quiet(seed, step);
            let (loss, norm, lr) = (seen.loss, seen.norm(), seen.lr());
            if step == at {
                seen = match kind {
                    0 => self::seen(step, loss + 2.5, norm, lr),
                    1 => self::seen(step, loss - 2.5, norm, lr),
                    2 => self::seen(step, loss, 20.0 * norm, lr),
                    3 => self::seen(step, loss, norm / 20.0, lr),
                    _ => seen,
                };
            }
            match kind {
                4 if step >= at => seen.tokens_per_expert[1] = vec![0, 19, 1, 0, 1],
                5 if step >= at => seen = self::seen(step, loss, norm, 3.0 * lr),
                _ => (),
            }
            seen
        };
        let found = found((1..=600).map(plant));
        prop_assert_eq!(found.len(), 1, "{:?}", found);
        let one = &found[0];
        prop_assert_eq!((one.step, one.reasons.len()), (at, 1), "{:?}", one);
        let reason = &one.reasons[0];
        use OddReasonKind as Kind;
        let kinds = [Kind::Loss, Kind::Loss, Kind::Norm, Kind::Norm, Kind::Router, Kind::LearningRate];
        prop_assert_eq!(reason.kind, kinds[kind]);
        match kind {
            0 | 2 => prop_assert!(reason.score.unwrap() > FAR),
            1 | 3 => prop_assert!(reason.score.unwrap() < -FAR),
            4 => prop_assert_eq!(reason.layer, Some(1)),
            _ => prop_assert!((reason.value.unwrap() / reason.usual.unwrap() - 3.0).abs() < 0.1),
        }
    }
}

#[test]
fn odd_steps_in_a_row_are_one_finding_with_the_farthest_value() {
    let steps = (1..=200).map(|step| match step {
        100..=104 => seen(step, quiet(1, step).loss + (step - 98) as f64, 1.0, 1e-3),
        150 => seen(step, 9.0, 1.0, 1e-3),
        _ => seen(step, quiet(1, step).loss, 1.0, 1e-3),
    });
    let found = found(steps);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!((found[0].step, found[0].last), (100, 104));
    assert_eq!((found[0].reasons.len(), found[0].reasons[0].step), (1, 104));
    assert_eq!((found[1].step, found[1].last), (150, 150));
}

#[test]
fn values_that_are_not_finite_and_skipped_steps_are_odd_at_any_step() {
    let mut skipped = seen(2, 5.0, 1.0, 1e-3);
    skipped.skipped = Some(trainer::optim::guard::Skipped::Norm);
    let found = found([seen(1, 5.0, f64::INFINITY, 1e-3), skipped]);
    let kinds: Vec<OddReasonKind> = found[0].reasons.iter().map(|reason| reason.kind).collect();
    assert_eq!((found.len(), kinds), (1, vec![OddReasonKind::NotFinite, OddReasonKind::Skipped]));
}

#[test]
fn what_else_happens_there_is_said() {
    let steps = (1..=100).map(|step| {
        let mut seen = quiet(3, step);
        if step >= 60 {
            seen.phase = "b".to_owned();
            seen.loss += 4.0;
            seen.curriculum = (step == 60).then(|| "seed = 1".to_owned());
        }
        seen
    });
    let found = found(steps);
    assert_eq!((found[0].step, found[0].context.len()), (60, 2), "{found:?}");
    assert!(found[0].context[0].contains("phase b begins"), "{found:?}");
}

/// A shift at the start of a phase is found there, and an odd value soon after it is found separately.
#[test]
fn what_is_odd_soon_after_a_phase_begins_is_found() {
    let steps = (1..=400).map(|step| {
        let mut seen = quiet(4, step);
        if step >= 300 {
            seen.phase = "b".to_owned();
            seen.loss += if step == 312 { -0.6 } else { -1.5 };
        }
        seen
    });
    let found = found(steps);
    let steps: Vec<(u64, u64)> = found.iter().map(|one| (one.step, one.last)).collect();
    assert_eq!(steps, [(300, 307), (312, 312)], "{found:?}");
}

#[test]
fn a_phase_that_moves_nothing_has_no_odd_step() {
    for seed in 0..40 {
        let found = found((1..=300).map(|step| {
            let mut seen = quiet(seed, step);
            seen.curriculum = (step % 60 == 0).then(|| "seed = 1".to_owned());
            seen
        }));
        assert!(found.is_empty(), "{seed}: {found:?}");
    }
}

/// If a tenth of the labels cost twice as much, the total loss changes little, but that of their source much.
#[test]
fn a_source_is_odd_where_the_whole_loss_is_not() {
    let steps = (1..=200).map(|step| {
        let mut seen = quiet(6, step);
        let loss = seen.loss + if step == 150 { 2.0 } else { 0.0 };
        let sum = |labels: u64, loss: f64| SourceSums {
            labels,
            loss: Packed::floats([loss * labels as f64]),
        };
        seen.sources.insert("rare".to_owned(), sum(10, loss));
        seen.sources.insert("much".to_owned(), sum(90, seen.loss));
        seen
    });
    let found = found(steps);
    let [one] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!((one.step, one.reasons.len(), one.reasons[0].kind), (150, 1, OddReasonKind::Source));
    assert!(one.reasons[0].words.contains("of source rare"), "{one:?}");
}

#[test]
fn loss_and_norm_that_are_both_nearly_odd_are_odd() {
    let steps = (1..=600).map(|step| {
        let mut seen = quiet(8, step);
        if step == 550 {
            let time = 550.0f64;
            let loss = 3.0 + 6.0 * (-time / 80.0).exp() + 0.05 * 7.0;
            seen = self::seen(step, loss, (0.2 * 7.0 - time / 500.0).exp(), seen.lr());
        }
        seen
    });
    let found = found(steps);
    let [one] = found.as_slice() else { panic!("{found:?}") };
    let kinds: Vec<OddReasonKind> = one.reasons.iter().map(|reason| reason.kind).collect();
    assert_eq!((one.step, kinds), (550, vec![OddReasonKind::Loss, OddReasonKind::Norm]));
}

#[test]
fn a_router_that_was_never_even_is_told_once() {
    let steps = (1..=300).map(|step| {
        let mut seen = quiet(5, step);
        // Noise around an entropy of about 0.2.
        seen.tokens_per_expert[0] = vec![100, step % 7, 0, 0, 0];
        seen
    });
    let found = found(steps);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].step, found[0].reasons[0].layer), (LENGTH as u64 + 1, Some(0)));
}

#[test]
fn what_is_nearly_odd_is_kept_where_it_is() {
    let mut detector = Detector::default();
    for step in 1..=300 {
        let mut seen = quiet(7, step);
        if [250, 251, 290].contains(&step) {
            seen.loss = 3.0 + 6.0 * (-(step as f64) / 80.0).exp() + 0.29;
        }
        detector.step(&seen);
    }
    let near = detector.near();
    let steps: Vec<(u64, u64)> = near.iter().map(|one| (one.step, one.last)).collect();
    assert!(detector.found().is_empty(), "{:?}", detector.found());
    assert_eq!(steps, [(250, 251), (290, 290)], "{near:?}");
    assert!(near.iter().all(|one| one.reasons[0].kind == OddReasonKind::Loss), "{near:?}");
}

#[test]
fn a_slow_step_is_not_the_one_to_look_at() {
    let slow = OddReason {
        kind: OddReasonKind::Slow,
        step: 109,
        value: Some(1.0),
        usual: Some(9.0),
        score: None,
        layer: None,
        words: "1 tokens/s".to_owned(),
    };
    let steps = (1..=120).map(|step| {
        let mut seen = quiet(7, step);
        seen.loss = if step == 110 { 9.0 } else { seen.loss };
        seen
    });
    let spike = found(steps);
    let [spike] = spike.as_slice() else { panic!("{spike:?}") };
    assert_eq!((spike.step, spike.farthest()), (110, 110));
    let stall = OddStep { step: 109, last: 109, reasons: vec![slow], context: Vec::new() };
    assert_eq!(stall.farthest(), 109);
    let both = merged(std::slice::from_ref(spike), std::slice::from_ref(&stall));
    let [both] = both.as_slice() else { panic!("{both:?}") };
    assert_eq!((both.step, both.last, both.farthest()), (109, 110, 110));
}
