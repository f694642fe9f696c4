//! Long phases after short ones: how much of their text is contiguous.

use super::*;

/// One phase, `steps` of `batch` sequences of source `a` alone.
fn alone(seq_len: u32, steps: u64, defer: bool) -> PhaseDraw {
    PhaseDraw {
        seq_len,
        batch: BatchDraw::Constant(1),
        steps,
        weights: vec![1, 0, 0],
        ramp: None,
        defer,
    }
}

fn planned(seed: u64, phases: &[PhaseDraw], tokens: u64) -> (DataPlan, Vec<SampleSpec>) {
    let curriculum = Curriculum::parse(&curriculum_text(seed, phases), "c.toml").unwrap();
    let facts = facts(&[tokens, 1, 1]);
    (DataPlan::new(&curriculum, &facts).unwrap(), simulate(&curriculum, &facts))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// With at least 16 units, a longer phase finds at most a sixteenth of the source open, wherever the shorter one
    /// ended.
    #[test]
    fn a_long_phase_joins_at_most_a_sixteenth(
        seed in any::<u32>(),
        units in 16u64..400,
        tail in 0u64..12,
        short in prop::sample::select(vec![1u32, 2, 3, 4, 6]),
        at in any::<prop::sample::Index>(),
    ) {
        let tokens = units * 12 + tail;
        let steps = 1 + at.index((tokens / u64::from(short)) as usize) as u64;
        let (plan, samples) = planned(seed.into(), &[alone(short, steps, false), alone(12, 2 * units, false)], tokens);
        let joined: u64 = samples.iter().filter(|s| s.phase == 1 && s.spans.len() > 1)
            .flat_map(|s| &s.spans).map(|span| u64::from(span.tokens)).sum();
        prop_assert!(joined * 16 <= tokens, "{} of {} tokens are joined", joined, tokens);
        prop_assert!(plan.composition(1, 0).joined <= units / 16);
    }

    /// With `defer`, nothing is joined until the epoch has no other text; no text is lost or repeated.
    #[test]
    fn deferred_text_waits_for_the_end_of_the_epoch(
        seed in any::<u32>(),
        tokens in 400u64..3000,
        lengths in prop::collection::vec((prop::sample::select(vec![1u32, 2, 3, 4, 6, 12]), 1u64..80), 2..7),
    ) {
        let mut phases: Vec<PhaseDraw> =
            lengths.iter().map(|(seq_len, steps)| alone(*seq_len, *steps, true)).collect();
        phases.push(alone(12, tokens / 6, true));
        let (plan, samples) = planned(seed.into(), &phases, tokens);
        for sample in &samples {
            prop_assert_eq!(&plan.sample(sample.sample).unwrap(), sample);
        }
        covers(&samples, &facts(&[tokens, 1, 1]))?;
        for (at, sample) in samples.iter().enumerate().filter(|(_, s)| s.spans.len() > 1) {
            let before = samples[..at].iter().filter(|s| s.epoch == sample.epoch);
            let seen: u64 = before.flat_map(|s| &s.spans).map(|s| u64::from(s.tokens)).sum();
            // All deferred text: at most one group per change of length.
            let most = (tokens / 16).max(12) * lengths.len() as u64;
            prop_assert!(tokens - seen <= most, "joined with {} of {} tokens to come", tokens - seen, tokens);
        }
    }

    /// Deferred text is served unjoined as soon as a phase of its length begins.
    #[test]
    fn deferred_text_comes_back_where_it_fits(seed in any::<u32>(), units in 16u64..200, steps in 1u64..5) {
        let phases = [alone(4, steps, true), alone(6, 2, true), alone(2, 2, true)];
        let (_, samples) = planned(seed.into(), &phases, units * 12);
        let of = |phase: usize| samples.iter().filter(move |s| s.phase == phase).flat_map(|s| &s.spans);
        let group = units / 16 * 12;
        let left = (group - steps * 4 % group) % group;
        let opened: Vec<u64> = of(0).map(|span| span.start / 12).collect();
        // No text of the group opened at 4 is read at 6.
        if left > 0 {
            prop_assert!(of(1).all(|span| !opened.contains(&(span.start / 12))));
        }
        // At 2, the windows of 4 are served first, each split in two.
        if left >= 4 {
            let text: Vec<&Span> = of(2).collect();
            prop_assert_eq!(text[0].start + 2, text[1].start);
            prop_assert_eq!(text[0].start % 4, 0);
        }
        prop_assert!(samples.iter().all(|sample| sample.spans.len() == 1));
    }
}
