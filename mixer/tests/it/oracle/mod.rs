//! Compares the plan with a naive program of the same rules: lists instead of closed forms, one sample after the other.
//!
//! They share only the keyed permutation and its keys, which have their own tests. Everything else is written again
//! here in the most obvious way.

mod amendments;
mod draws;
mod every;
mod long;
mod packed;

use std::collections::{BTreeMap, VecDeque};

use contract::{Key, Permutation};
use curriculum::Phase;
use mixer::{
    Composition, Curriculum, DataPlan, Mix, MixWeights, RemainderRule, SampleSpec, SourceFacts,
    Span, Visit,
};
use proptest::prelude::*;

use self::draws::*;
use crate::naive::NaiveRamp;

/// A source as lists: what is left of opened groups, and the groups not opened yet.
struct Queue {
    key: Key,
    tokens: u64,
    unit: u64,
    /// Epochs begun.
    begun: u64,
    groups: VecDeque<(u64, Vec<u64>)>,
    open: Option<Left>,
    deferred: Vec<Left>,
    phase: Option<usize>,
}

/// The remaining windows of a group, and how many tokens of the first have been served.
struct Left {
    cut: u32,
    windows: VecDeque<Span>,
    gone: u32,
}

impl Left {
    fn fits(&self, seq_len: u32) -> bool {
        self.cut.is_multiple_of(seq_len) && self.gone.is_multiple_of(seq_len)
    }

    /// The next `seq_len` tokens: from one window if windows are split, else from as many as needed.
    fn next(&mut self, seq_len: u32) -> Vec<Span> {
        let fits = self.fits(seq_len);
        let (mut room, mut text) = (seq_len, Vec::new());
        while room > 0 {
            let Some(Span { start, tokens: whole }) = self.windows.pop_front() else { break };
            let tokens = whole.min(room);
            text.push(Span { start, tokens });
            room -= tokens;
            self.gone = if tokens < whole { self.gone + tokens } else { 0 };
            if tokens < whole {
                let (start, tokens) = (start + u64::from(tokens), whole - tokens);
                self.windows.push_front(Span { start, tokens });
            }
            if fits {
                break;
            }
        }
        text
    }
}

impl Queue {
    fn new(seed: u64, facts: &SourceFacts) -> Self {
        let key = Key::from_seed(seed).child("order").child(&facts.name);
        let (tokens, unit, groups) = (facts.tokens, facts.unit, VecDeque::new());
        Queue { key, tokens, unit, begun: 0, groups, open: None, deferred: Vec::new(), phase: None }
    }

    /// The next sample in phase number `index`, and its epoch.
    fn next(&mut self, index: usize, phase: &Phase) -> (u64, Vec<Span>) {
        let seq_len = phase.seq_len;
        if self.phase != Some(index) {
            self.phase = Some(index);
            self.deferred.sort_by_key(|left| !left.fits(seq_len));
            let stays =
                |open: &mut Left| open.fits(seq_len) || phase.remainder == RemainderRule::Join;
            let put_off = self.open.take_if(|open| !stays(open));
            self.deferred.extend(put_off);
        }
        let ready = self.deferred.first().is_some_and(|left| left.fits(seq_len));
        if !ready && self.open.is_none() {
            if self.groups.is_empty() && self.deferred.is_empty() {
                self.begin_epoch();
            }
            if let Some((group, units)) = self.groups.pop_front() {
                self.open = Some(self.opened(group, &units, seq_len));
            }
        }
        let from_deferred = ready || self.open.is_none();
        let left = if from_deferred { &mut self.deferred[0] } else { self.open.as_mut().unwrap() };
        let text = left.next(seq_len);
        self.deferred.retain(|left| !left.windows.is_empty());
        self.open.take_if(|left| left.windows.is_empty());
        (self.begun - 1, text)
    }

    fn begin_epoch(&mut self) {
        let units: Vec<u64> = (0..self.tokens.div_ceil(self.unit)).collect();
        let order = Permutation::new(self.key.nth(self.begun), units.len() as u64);
        let permuted: Vec<u64> = (0..units.len() as u64).map(|i| order.forward(i)).collect();
        let most = (1..=1024).rev().find(|units| units * self.unit * 16 <= self.tokens);
        let groups = permuted.chunks(most.unwrap_or(1) as usize).map(<[u64]>::to_vec);
        self.groups = groups.enumerate().map(|(group, units)| (group as u64, units)).collect();
        self.begun += 1;
    }

    fn opened(&self, group: u64, units: &[u64], seq_len: u32) -> Left {
        let mut windows = Vec::new();
        for unit in units {
            let (mut start, end) = (unit * self.unit, self.tokens.min((unit + 1) * self.unit));
            while start < end {
                let tokens = u64::from(seq_len).min(end - start);
                windows.push(Span { start, tokens: tokens as u32 });
                start += tokens;
            }
        }
        let order = Permutation::new(self.key.nth(self.begun - 1).nth(group), windows.len() as u64);
        let order = (0..windows.len() as u64).map(|i| windows[order.forward(i) as usize]);
        Left { cut: seq_len, windows: order.collect(), gone: 0 }
    }
}

/// A mixing tree that counts how many samples it has sent each way.
enum Tree {
    Source(usize),
    Node {
        left: Box<Tree>,
        right: Box<Tree>,
        left_weight: u128,
        total: u128,
        sent: u128,
        sent_left: u128,
    },
}

impl Tree {
    fn new(weights: &[u64]) -> Tree {
        let mut open: Vec<(u128, usize, Tree)> =
            weights.iter().enumerate().map(|(i, &w)| (u128::from(w), i, Tree::Source(i))).collect();
        let mut made = weights.len();
        while open.len() > 1 {
            open.sort_by_key(|(weight, age, _)| (*weight, *age));
            let (left_weight, _, left) = open.remove(0);
            let (right_weight, _, right) = open.remove(0);
            let (left, right, total) =
                (Box::new(left), Box::new(right), left_weight + right_weight);
            open.push((
                total,
                made,
                Tree::Node { left, right, left_weight, total, sent: 0, sent_left: 0 },
            ));
            made += 1;
        }
        open.remove(0).2
    }

    fn next(&mut self) -> usize {
        match self {
            Tree::Source(source) => *source,
            Tree::Node { left, right, left_weight, total, sent, sent_left } => {
                *sent += 1;
                // sent x weight / total, rounded to nearest, halves up.
                let due = (2 * *sent * *left_weight + *total) / (2 * *total);
                if due > *sent_left {
                    *sent_left += 1;
                    left.next()
                } else {
                    right.next()
                }
            }
        }
    }
}

/// The source of each sample of a mix, one after the other; a ramp is over after `samples`.
fn mixed(mix: &Mix, samples: u64) -> Box<dyn FnMut() -> usize> {
    match mix.weights().unwrap() {
        MixWeights::Constant(weights) => {
            let mut tree = Tree::new(&weights);
            Box::new(move || tree.next())
        }
        MixWeights::Ramp { from, to, knots } => {
            let mut tree = NaiveRamp::new([&from, &to], &knots, samples);
            Box::new(move || tree.next())
        }
    }
}

/// Simulates every sample of the run.
fn simulate(curriculum: &Curriculum, facts: &[SourceFacts]) -> Vec<SampleSpec> {
    simulate_with(curriculum, facts, &BTreeMap::new())
}

/// The same, with the packs of sources.
fn simulate_with(
    curriculum: &Curriculum,
    facts: &[SourceFacts],
    packs: &BTreeMap<&str, &packed::Lists>,
) -> Vec<SampleSpec> {
    let mut served: BTreeMap<(usize, u32), u64> = BTreeMap::new();
    let mut queues: Vec<Queue> = facts.iter().map(|f| Queue::new(curriculum.seed, f)).collect();
    let (mut samples, mut part, mut number) = (Vec::new(), 0, 0);
    for (index, spec) in curriculum.phases.iter().enumerate() {
        let mut spec = spec.clone();
        let (mut names, mut given) = (Vec::new(), Vec::new());
        let mut next = mixed(&spec.mix, 1);
        for step in 0..spec.steps {
            number += 1;
            let amended =
                curriculum.amendments.iter().find(|a| a.step == number && a.mix.is_some());
            if let Some(amendment) = amended {
                spec.mix = amendment.mix.clone().unwrap();
            }
            if step == 0 || amended.is_some() {
                part += 1;
                names = spec.mix.sources().into_iter().cloned().collect();
                next =
                    mixed(&spec.mix, (step + 1..=spec.steps).map(|step| spec.batch.at(step)).sum());
                given = vec![0; names.len()];
            }
            if step > 0 && amended.is_none() && spec.batch.at(step) != spec.batch.at(step + 1) {
                // The mix continues, in a new segment of the plan.
                part += 1;
                given = vec![0; names.len()];
            }
            for _ in 0..spec.batch.at(step + 1) {
                let entry = next();
                let source = facts.iter().position(|f| f.name == names[entry]).unwrap();
                let (epoch, spans) = match packs.get(facts[source].name.as_str()) {
                    Some(lists) => {
                        let served = served.entry((source, spec.seq_len)).or_default();
                        *served += 1;
                        lists.served(
                            curriculum.seed,
                            &facts[source].name,
                            spec.seq_len,
                            *served - 1,
                        )
                    }
                    None => queues[source].next(index, &spec),
                };
                let (sample, ordinal, seq_len) = (samples.len() as u64, given[entry], spec.seq_len);
                let (phase, banned) = (part - 1, Vec::new());
                samples.push(SampleSpec {
                    sample,
                    phase,
                    source,
                    ordinal,
                    epoch,
                    seq_len,
                    spans,
                    banned,
                    objective: None,
                });
                given[entry] += 1;
            }
        }
    }
    samples
}

/// Checks that each epoch has each token of a source once, complete before the next begins; the last epoch has none
/// twice.
fn covers(samples: &[SampleSpec], facts: &[SourceFacts]) -> Result<(), TestCaseError> {
    for (source, facts) in facts.iter().enumerate() {
        let of_source: Vec<&SampleSpec> =
            samples.iter().filter(|sample| sample.source == source).collect();
        let Some(last) = of_source.last().map(|sample| sample.epoch) else { continue };
        let mut seen = vec![0u64; facts.tokens as usize];
        let mut epoch = 0;
        for sample in of_source {
            prop_assert!(sample.epoch == epoch || sample.epoch == epoch + 1);
            if sample.epoch == epoch + 1 {
                prop_assert!(
                    seen.iter().all(|&times| times == sample.epoch),
                    "an epoch began too early"
                );
                epoch += 1;
            }
            for span in &sample.spans {
                for token in span.start..span.start + u64::from(span.tokens) {
                    seen[token as usize] += 1;
                    prop_assert_eq!(
                        seen[token as usize],
                        epoch + 1,
                        "token {} in epoch {}",
                        token,
                        epoch
                    );
                }
            }
        }
        prop_assert_eq!(last, epoch);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn the_plan_is_the_simulation(
        seed in 0u64..1 << 40,
        tokens in prop::collection::vec(tokens_draw(), 3),
        phases in prop::collection::vec(phase_draw(), 1..7),
        asked in (0u64..26_000, 1u64..60),
    ) {
        let curriculum = Curriculum::parse(&curriculum_text(seed, &phases), "c.toml").unwrap();
        let facts = facts(&tokens);
        let plan = DataPlan::new(&curriculum, &facts).unwrap();
        let samples = simulate(&curriculum, &facts);
        prop_assert_eq!(plan.samples(), samples.len() as u64);
        for sample in &samples {
            prop_assert_eq!(&plan.sample(sample.sample).unwrap(), sample);
        }
        prop_assert!(plan.sample(plan.samples()).is_err());
        covers(&samples, &facts)?;
        totals_agree(&plan, &samples)?;
        steps_agree(&plan)?;
        for (source, facts) in facts.iter().enumerate() {
            let whole = asked.0 % facts.tokens;
            visits_agree(&plan, &samples, source, whole, asked.1)?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// A run is refused if and only if a source runs out, naming the first step that would repeat it.
    #[test]
    fn repeats_are_refused_with_their_step(
        tokens in prop::collection::vec(tokens_draw(), 3),
        phases in prop::collection::vec(phase_draw(), 1..5),
        max_epochs in prop::array::uniform3(prop_oneof![Just(1u64), 1u64..6]),
    ) {
        let free = Curriculum::parse(&curriculum_text(1, &phases), "c.toml").unwrap();
        let limited = Curriculum::parse(&limited_text(1, &phases, max_epochs), "c.toml").unwrap();
        let facts = facts(&tokens);
        let plan = DataPlan::new(&free, &facts).unwrap();
        let samples = simulate(&free, &facts);
        let limit = |source: usize| limited.max_epochs(&facts[source].name);
        let first = samples.iter().find(|sample| sample.epoch >= limit(sample.source));
        match (DataPlan::new(&limited, &facts), first) {
            (Ok(_), None) => {}
            (Err(fault), Some(sample)) => {
                let told = fault.to_string();
                let (name, step) = (&facts[sample.source].name, plan.step_of(sample.sample).unwrap());
                let needed = plan.epochs_needed(sample.source);
                let wanted = [format!("at step {step}"), format!("{name:?}"), format!("[source.{name}]")];
                for word in wanted {
                    prop_assert!(told.contains(&word), "no {} in {}", word, told);
                }
                prop_assert!(told.contains(&format!("max_epochs = {needed} ")) || told.contains("so do"), "{}", told);
            }
            (Ok(_), Some(sample)) => prop_assert!(false, "accepted, but {sample:?} repeats"),
            (Err(fault), None) => prop_assert!(false, "refused: {fault}"),
        }
    }

    /// Later or unused parts change no digest; used parts do.
    #[test]
    fn digests_follow_effect(
        tokens in prop::collection::vec(tokens_draw(), 3),
        phases in prop::collection::vec(phase_draw(), 1..4),
        more in phase_draw(),
        step in 0u64..400,
    ) {
        let sources = facts(&tokens);
        let plan = |phases: &[PhaseDraw], sources: &[SourceFacts]| {
            DataPlan::new(&Curriculum::parse(&curriculum_text(1, phases), "c.toml").unwrap(), sources).unwrap()
        };
        let whole = plan(&phases, &sources);
        let step = step.min(whole.steps());
        let before = whole.digest_through(step);
        let last = phases.len() - 1;

        let added = [&phases[..], std::slice::from_ref(&more)].concat();
        prop_assert_eq!(plan(&added, &sources).digest_through(step), before);
        let mut longer = phases.clone();
        longer[last].steps += 1 + more.steps;
        let first_of_last = 1 + phases[..last].iter().map(|phase| phase.steps).sum::<u64>();
        let stretched = phases[last].is_ramp() && step >= first_of_last;
        prop_assert_eq!(plan(&longer, &sources).digest_through(step) == before, !stretched);
        let unused = SourceFacts { name: "unused".to_owned(), tokens: 5, documents: 1, unit: 7, selection: None };
        let mut sources_more = vec![unused];
        sources_more.extend(sources.iter().rev().cloned());
        prop_assert_eq!(plan(&phases, &sources_more).digest_through(step), before);

        let mut edits: Vec<Vec<PhaseDraw>> = vec![phases.clone(); 4];
        edits[0][last].weights[0] += 1;
        edits[1][last].batch = edits[1][last].batch.grown();
        edits[2][last].seq_len = if phases[last].seq_len == 12 { 6 } else { 12 };
        edits[3][last].steps = 1;
        for (kind, edit) in edits.iter().enumerate() {
            let edit = plan(edit, &sources);
            prop_assert_eq!(edit.digest_through(first_of_last - 1), whole.digest_through(first_of_last - 1));
            let used = phases[last].weights.iter().filter(|&&weight| weight > 0).count();
            // A single source has the whole weight, whatever its number; and a shortened phase is the same while it
            // lasts.
            let shorter = kind == 3 && (!phases[last].is_ramp() || phases[last].steps == 1);
            let same = (kind == 0 && used == 1 && phases[last].weights[0] > 0) || shorter;
            prop_assert_eq!(edit.digest_through(first_of_last) == whole.digest_through(first_of_last), same);
        }
        // Equal digests mean equal samples up to that step.
        let end = match step == 0 || stretched {
            true => 0,
            false => whole.step(step).unwrap().first_sample + whole.step(step).unwrap().batch,
        };
        let long = plan(&longer, &sources);
        for sample in 0..end {
            prop_assert_eq!(whole.sample(sample).unwrap(), long.sample(sample).unwrap());
        }
        for one in 1..=step {
            prop_assert_ne!(whole.digest_through(one), whole.digest_through(one - 1));
        }
    }
}

/// Checks every window of three groups, wherever the partial unit is. A wrong count would show in the few windows right
/// after its group, where random runs seldom stop.
#[test]
fn windows_behind_the_partial_unit_are_found() {
    for seed in 0..6 {
        for (seq_len, tokens) in [(1, 30_001u64), (2, 30_001), (3, 30_004), (6, 30_010)] {
            let steps = 2 * tokens.div_ceil(u64::from(seq_len));
            let draw = PhaseDraw {
                seq_len,
                batch: BatchDraw::Constant(1),
                steps,
                weights: vec![1, 0, 0],
                ramp: None,
                defer: false,
            };
            let curriculum = Curriculum::parse(&curriculum_text(seed, &[draw]), "c.toml").unwrap();
            let facts = facts(&[tokens, 1, 1]);
            let plan = DataPlan::new(&curriculum, &facts).unwrap();
            let samples = simulate(&curriculum, &facts);
            for sample in &samples {
                assert_eq!(&plan.sample(sample.sample).unwrap(), sample);
            }
            covers(&samples, &facts).unwrap();
            visits_agree(&plan, &samples, 1, 0, tokens).unwrap();
        }
    }
}

/// Compares the plan's totals for each phase and source with the samples.
fn totals_agree(plan: &DataPlan, samples: &[SampleSpec]) -> Result<(), TestCaseError> {
    let mut taken: BTreeMap<usize, u64> = BTreeMap::new();
    for (index, phase) in plan.phases().iter().enumerate() {
        for part in &phase.uses {
            let mine = || samples.iter().filter(|s| s.phase == index && s.source == part.source);
            let tokens: u64 =
                mine().flat_map(|s| &s.spans).map(|span| u64::from(span.tokens)).sum();
            prop_assert_eq!(part.samples, mine().count() as u64);
            prop_assert_eq!(part.tokens, tokens);
            let before = taken.entry(part.source).or_default();
            prop_assert_eq!(part.tokens_before, *before);
            let entry = phase.uses.iter().position(|other| other.source == part.source).unwrap();
            prop_assert_eq!(plan.composition(index, entry), composition(mine()));
            *before += tokens;
        }
    }
    for source in 0..plan.sources().len() {
        prop_assert_eq!(plan.tokens_needed(source), taken.get(&source).copied().unwrap_or(0));
        let last = samples.iter().filter(|s| s.source == source).map(|s| s.epoch + 1).max();
        prop_assert_eq!(plan.epochs_needed(source), last.unwrap_or(0));
    }
    Ok(())
}

/// The composition of samples, counted one by one.
fn composition<'a>(samples: impl Iterator<Item = &'a SampleSpec>) -> Composition {
    let mut all = Composition::default();
    for SampleSpec { spans, seq_len, .. } in samples {
        let full = spans.iter().map(|span| span.tokens).sum::<u32>() == *seq_len;
        match (full, spans.len()) {
            (false, _) => all.padded += 1,
            (true, 1) => all.contiguous += 1,
            (true, _) => all.joined += 1,
        }
    }
    all
}

fn steps_agree(plan: &DataPlan) -> Result<(), TestCaseError> {
    let mut sample = 0;
    for number in 1..=plan.steps() {
        let step = plan.step(number).unwrap();
        prop_assert_eq!((step.step, step.first_sample), (number, sample));
        prop_assert_eq!(plan.sample(sample).unwrap().phase, step.phase);
        prop_assert_eq!(plan.step_of(sample).unwrap(), number);
        sample += step.batch;
        prop_assert_eq!(plan.step_of(sample - 1).unwrap(), number);
    }
    prop_assert_eq!(sample, plan.samples());
    prop_assert!(plan.step(0).is_err() && plan.step(plan.steps() + 1).is_err());
    Ok(())
}

/// Compares `visits`, token by token, with a scan of every sample.
fn visits_agree(
    plan: &DataPlan,
    samples: &[SampleSpec],
    source: usize,
    start: u64,
    count: u64,
) -> Result<(), TestCaseError> {
    let mut wanted = Vec::new();
    for sample in samples.iter().filter(|sample| sample.source == source) {
        let mut offset = 0;
        for span in &sample.spans {
            for token in span.start..span.start + u64::from(span.tokens) {
                if (start..start + count).contains(&token) {
                    wanted.push((sample.sample, offset, token));
                }
                offset += 1;
            }
        }
    }
    let mut found = Vec::new();
    for Visit { sample, offset_in_sequence, token, tokens } in
        plan.visits(source, start..start + count).unwrap()
    {
        prop_assert!(tokens > 0);
        found.extend((0..tokens).map(|i| (sample, offset_in_sequence + i, token + u64::from(i))));
    }
    prop_assert_eq!(found, wanted);
    Ok(())
}
