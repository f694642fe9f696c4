//! Amendments compared with the naive program: mixes that change within a phase, and banned documents.

use super::*;

/// An amendment of the mix, which may be a ramp: a step of the run, and weights.
fn amendment_text(step: u64, mix: &(Vec<u32>, Option<(Vec<u32>, &'static str)>)) -> String {
    let (weights, ramp) = mix;
    format!("[[amendment]]\nstep = {step}\nmix = {}\n", mix_text(weights, ramp.as_ref()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// From an amendment on another mix is served, and every source continues at its position. Earlier samples stay.
    #[test]
    fn amended_mixes_are_the_simulation(
        seed in 0u64..1 << 40,
        tokens in prop::collection::vec(tokens_draw(), 3),
        phases in prop::collection::vec(phase_draw(), 1..5),
        amended in prop::collection::vec(
            (any::<prop::sample::Index>(), (prop::collection::vec(0u32..9, 3), ramp_draw())), 1..4),
        asked in (0u64..26_000, 1u64..60),
    ) {
        let plain = curriculum_text(seed, &phases);
        let steps: u64 = phases.iter().map(|phase| phase.steps).sum();
        let mut amended: Vec<(u64, _)> =
            amended.into_iter().map(|(at, weights)| (1 + at.index(steps as usize) as u64, weights)).collect();
        amended.sort();
        amended.dedup_by_key(|(step, _)| *step);
        let facts = facts(&tokens);
        let before = DataPlan::new(&Curriculum::parse(&plain, "c.toml").unwrap(), &facts).unwrap();
        let mut text = plain.clone();
        for (step, weights) in amended {
            let one = amendment_text(step, &weights);
            // A mix without weights, or the same as before, is refused: that amendment is skipped.
            let Ok(curriculum) = Curriculum::parse(&(text.clone() + &one), "c.toml") else { continue };
            let unamended = DataPlan::new(&Curriculum::parse(&text, "c.toml").unwrap(), &facts).unwrap();
            text += &one;
            let plan = DataPlan::new(&curriculum, &facts).unwrap();
            prop_assert_eq!(plan.digest_through(step - 1), unamended.digest_through(step - 1));
            prop_assert_ne!(plan.digest_through(step), unamended.digest_through(step));
            for source in 0..3 {
                prop_assert_eq!(plan.standing(source, step), unamended.standing(source, step));
            }
            // Whole samples, not digests: earlier ones are the same, even if their phase was split.
            for sample in 0..plan.step(step).unwrap().first_sample {
                prop_assert_eq!(plan.sample(sample).unwrap(), unamended.sample(sample).unwrap());
            }
        }
        let curriculum = Curriculum::parse(&text, "c.toml").unwrap();
        prop_assert_eq!(Curriculum::parse(&curriculum.canonical(), "c.toml").unwrap().canonical(), curriculum.canonical());
        let plan = DataPlan::new(&curriculum, &facts).unwrap();
        prop_assert_eq!(plan.samples(), before.samples());
        let samples = simulate(&curriculum, &facts);
        for sample in &samples {
            prop_assert_eq!(&plan.sample(sample.sample).unwrap(), sample);
        }
        covers(&samples, &facts)?;
        totals_agree(&plan, &samples)?;
        steps_agree(&plan)?;
        for (source, facts) in facts.iter().enumerate() {
            visits_agree(&plan, &samples, source, asked.0 % facts.tokens, asked.1)?;
        }
    }

    /// A banned document is hidden in every sample from its step on and in none before; nothing else is hidden.
    #[test]
    fn banned_text_is_hidden_from_its_step_on(
        tokens in prop::collection::vec(tokens_draw(), 3),
        phases in prop::collection::vec(phase_draw(), 1..5),
        bans in prop::collection::vec((any::<prop::sample::Index>(), 0u64..4000), 1..6),
        length in 1u64..40,
    ) {
        // Documents of one length, the last one shorter.
        let sources: Vec<SourceFacts> = facts(&tokens)
            .into_iter().map(|facts| SourceFacts { documents: facts.tokens.div_ceil(length), ..facts }).collect();
        let steps: u64 = phases.iter().map(|phase| phase.steps).sum();
        let mut bans: Vec<(u64, usize, u64)> = bans.into_iter().enumerate().map(|(number, (at, document))| {
            let source = number % 2;
            (1 + at.index(steps as usize) as u64, source, document % sources[source].documents)
        }).collect();
        bans.sort();
        let mut once = Vec::new();
        bans.retain(|(_, source, document)| {
            let new = !once.contains(&(*source, *document));
            once.push((*source, *document));
            new
        });
        let mut text = curriculum_text(3, &phases);
        let plain = DataPlan::new(&Curriculum::parse(&text, "c.toml").unwrap(), &sources).unwrap();
        for (step, source, document) in &bans {
            text += &format!("[[amendment]]\nstep = {step}\nban = {{ {} = [{document}] }}\n", sources[*source].name);
        }
        let mut plan = DataPlan::new(&Curriculum::parse(&text, "c.toml").unwrap(), &sources).unwrap();
        let of = |source: &SourceFacts, document: u64| document * length..source.tokens.min((document + 1) * length);
        plan.place_bans(|name, documents| {
            let source = sources.iter().find(|source| source.name == name).unwrap();
            Ok(documents.iter().map(|document| of(source, *document)).collect())
        }).unwrap();
        let mut hidden = vec![(0, 0); bans.len()];
        for sample in 0..plan.samples() {
            let (found, wanted) = (plan.sample(sample).unwrap(), plain.sample(sample).unwrap());
            prop_assert_eq!(&SampleSpec { banned: Vec::new(), ..found.clone() }, &wanted);
            let step = plan.step_of(sample).unwrap();
            let mut places = Vec::new();
            let text = wanted.spans.iter().flat_map(|it| it.start..it.start + u64::from(it.tokens));
            for (place, token) in text.enumerate() {
                let ban = bans.iter().position(|(first, source, document)| {
                    step >= *first && wanted.source == *source && of(&sources[*source], *document).contains(&token)
                });
                if let Some(ban) = ban {
                    places.push(place as u32);
                    let last = token + 1 == of(&sources[bans[ban].1], bans[ban].2).end;
                    hidden[ban] = (hidden[ban].0 + 1, hidden[ban].1 + u64::from(!last));
                }
            }
            prop_assert!(found.banned.windows(2).all(|two| two[0].end < two[1].start));
            prop_assert_eq!(found.banned.into_iter().flatten().collect::<Vec<_>>(), places);
        }
        for (ban, hidden) in plan.bans().iter().zip(hidden) {
            prop_assert_eq!(plan.hidden_by(ban).unwrap(), hidden);
        }
        let first = bans[0].0;
        prop_assert_eq!(plan.digest_through(first - 1), plain.digest_through(first - 1));
        prop_assert_ne!(plan.digest_through(first), plain.digest_through(first));
    }
}
