//! What an edited curriculum changes, and from which step on.

use std::collections::BTreeSet;
use std::fmt;

use super::text::float;
use super::{
    Amendment, Buckets, Curriculum, Fim, LabelMask, Mix, ModelTable, OptimizerSpec, ParamGroup,
    Phase, PhaseSchedule, PhaseSegment, ScheduleSpec, SourceWeights, model,
};

/// Shown where one of the two curricula has no such amendment.
const NO_AMENDMENT: &str = "no amendment";

/// One key whose value differs such that some step changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurriculumDifference {
    /// The key (`optimizer.lr`, `phase.NAME.mix.SOURCE`).
    pub key: String,
    /// The value in the other curriculum.
    pub found: String,
    /// The value in this curriculum.
    pub wanted: String,
    /// The first step that it would change.
    pub first_step: u64,
}

impl fmt::Display for CurriculumDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CurriculumDifference { key, found, wanted, first_step } = self;
        match (wanted.as_str(), found.as_str()) {
            (NO_AMENDMENT, new) => write!(f, "{key} is new: {new}")?,
            (old, NO_AMENDMENT) => write!(f, "{key} was removed: {old}")?,
            (old, new) => write!(f, "{key}: {old} became {new}")?,
        }
        write!(f, ", which matters from step {first_step}")
    }
}

impl Curriculum {
    /// What `other` (the edit) changes against `self` (what the run began with), sorted by the first step affected.
    ///
    /// Phase names and store paths change no step and never appear: stores and initial weights are identified by their
    /// digests. Nor does `max_epochs`, except in a mix that reacts, whose weights it limits: elsewhere a limit either
    /// refuses the plan or has no effect.
    pub fn difference(&self, other: &Curriculum) -> Vec<CurriculumDifference> {
        let Curriculum {
            stores: _,
            init_from: _,
            seed,
            dtype,
            phases: _,
            sources,
            model,
            optimizer,
            schedule: _,
            skip_step: _,
            auto_clip: _,
            amendments,
            places: _,
        } = self;
        let mut list = List::default();
        list.compare("seed", other.seed, seed, 1);
        list.compare("dtype", other.dtype.name(), dtype.name(), 1);
        model_difference("model", model, &other.model, 1, &mut list);
        optimizer_difference(optimizer, &other.optimizer, &mut list);
        schedule_difference(self, &other.schedule, &mut list);
        window_differences(self, other, &mut list);
        phase_differences(self, other, &mut list);
        for source in sources.keys().chain(other.sources.keys()).collect::<BTreeSet<_>>() {
            source_difference(source, self, other, &mut list);
        }
        amendment_differences(amendments, &other.amendments, &mut list);
        list.0.sort_by_key(|difference| difference.first_step);
        list.0
    }
}

#[derive(Default)]
struct List(Vec<CurriculumDifference>);

impl List {
    fn compare(
        &mut self,
        key: &str,
        found: impl fmt::Display,
        wanted: impl fmt::Display,
        first_step: u64,
    ) {
        let (found, wanted) = (found.to_string(), wanted.to_string());
        if found != wanted {
            self.0.push(CurriculumDifference { key: key.to_owned(), found, wanted, first_step });
        }
    }
}

fn model_difference(
    path: &str,
    ModelTable(fields): &ModelTable,
    ModelTable(others): &ModelTable,
    first_step: u64,
    list: &mut List,
) {
    let keys: BTreeSet<&String> = fields.keys().chain(others.keys()).collect();
    for key in keys {
        let show = |value: Option<&toml::Value>| match value {
            Some(value) => model::text(value),
            None => "not set".to_owned(),
        };
        let (found, wanted) = (show(others.get(key)), show(fields.get(key)));
        list.compare(&format!("{path}.{key}"), found, wanted, first_step);
    }
}

fn optimizer_difference(optimizer: &OptimizerSpec, other: &OptimizerSpec, list: &mut List) {
    let OptimizerSpec { kind, lr, betas, eps, momentum, newton_schulz, weight_decay, clip, groups } =
        optimizer;
    let pair = |betas: &[f64; 2]| format!("[{}, {}]", float(betas[0]), float(betas[1]));
    list.compare("optimizer.kind", other.kind.name(), kind.name(), 1);
    list.compare("optimizer.lr", float(other.lr), float(*lr), 1);
    list.compare("optimizer.betas", pair(&other.betas), pair(betas), 1);
    list.compare("optimizer.eps", float(other.eps), float(*eps), 1);
    list.compare("optimizer.momentum", float(other.momentum), float(*momentum), 1);
    let newton_schulz = newton_schulz.name();
    list.compare("optimizer.newton_schulz", other.newton_schulz.name(), newton_schulz, 1);
    list.compare("optimizer.weight_decay", float(other.weight_decay), float(*weight_decay), 1);
    list.compare("optimizer.clip", float(other.clip), float(*clip), 1);
    let text = |groups: &[ParamGroup], number: usize| match groups.get(number) {
        Some(group) => group.text(),
        None => "not set".to_owned(),
    };
    for number in 0..groups.len().max(other.groups.len()) {
        let key = format!("optimizer.group.{}", number + 1);
        list.compare(&key, text(&other.groups, number), text(groups, number), 1);
    }
}

fn schedule_difference(one: &Curriculum, other: &ScheduleSpec, list: &mut List) {
    let with = |schedule| first_other_rate(one, &Curriculum { schedule, ..one.clone() });
    let Some(whole) = with(*other) else { return };
    let was = one.schedule;
    // `other` with one key at a time, in the order of `values`.
    let edits = [
        ScheduleSpec { kind: other.kind, ..was },
        ScheduleSpec { warmup_steps: other.warmup_steps, ..was },
        ScheduleSpec { stable_steps: other.stable_steps, ..was },
        ScheduleSpec { decay_steps: other.decay_steps, ..was },
        ScheduleSpec { decay_shape: other.decay_shape, ..was },
        ScheduleSpec { final_lr: other.final_lr, ..was },
    ];
    let shown = |value: Option<String>| match value {
        Some(value) => value.trim_matches('"').to_owned(),
        None => "not set".to_owned(),
    };
    let values = was.values().into_iter().zip(other.values());
    let edited: Vec<_> = values.zip(edits).filter(|(_, edit)| *edit != was).collect();
    let reached = edited.iter().any(|(_, edit)| with(*edit).is_some_and(|first| first <= whole));
    let mut decay = false;
    for (number, (((key, value), (_, others)), edit)) in edited.into_iter().enumerate() {
        // Two keys may have an effect together that neither has alone.
        let together = (number == 0 && !reached).then_some(whole);
        // A final rate that only one of them has is part of a decay that only one of them has.
        let part = decay && value.is_some() != others.is_some();
        if let Some(first) = together.or(with(edit)).filter(|_| !part) {
            list.compare(key, shown(others), shown(value), first.max(whole));
            decay |= key == "schedule.decay_steps";
        }
    }
}

/// The first step whose rate follows from another formula, amendments and phases included. The curricula may differ
/// only in `[schedule]`.
fn first_other_rate(one: &Curriculum, other: &Curriculum) -> Option<u64> {
    let (mut starts, mut steps) = (BTreeSet::from([1]), 0);
    for phase in &one.phases {
        starts.insert(steps + 1);
        steps += phase.steps;
    }
    starts.extend(one.amendments.iter().map(|amendment| amendment.step));
    let ends = starts.iter().copied().skip(1).chain([steps + 1]);
    starts.iter().zip(ends).find_map(|(&start, end)| {
        let [one, other] = [one, other].map(|of| of.numbers_at(start).rates());
        let mut step = start;
        while step < end {
            let ((part, until), (others, also)) = (one.part(step), other.part(step));
            if part != others {
                return Some(step);
            }
            step = until.min(also);
        }
        None
    })
}

/// Changed windows affect every step from the first on.
fn window_differences(one: &Curriculum, other: &Curriculum, list: &mut List) {
    let changed = one.numbers_at(0).changed(&other.numbers_at(0)).into_iter();
    let windows = changed.filter(|it| {
        ["skip_step.", "auto_clip."].iter().any(|section| it.key.starts_with(section))
    });
    windows.for_each(|it| list.compare(it.key, it.becomes, it.was, 1));
}

/// How a source is packed, cut into buckets and learnt matters from the first step whose mix has the source or a
/// bucket.
fn source_difference(source: &str, one: &Curriculum, other: &Curriculum, list: &mut List) {
    let begins = |of: &Curriculum, reacts: bool| {
        let segments = of.segments();
        // A mix may name the source, one of its buckets, or the source that has it as a bucket.
        let whole = of.whole(source);
        let of_source = |name: &String| match name.strip_prefix(source) {
            Some(rest) => rest.is_empty() || rest.starts_with('/'),
            None => whole == name,
        };
        let has = |segment: &PhaseSegment| {
            let reacting = !reacts || segment.spec.mix.reaction().is_some();
            reacting && segment.spec.mix.sources().into_iter().any(of_source)
        };
        let at = segments.iter().position(has);
        at.map(|at| 1 + segments[..at].iter().map(|segment| segment.spec.steps).sum::<u64>())
    };
    let show = |of: &Curriculum| match of.packing(source) {
        Some(packing) => packing.meaning(),
        None => "concatenate".to_owned(),
    };
    let first = |reacts| [one, other].into_iter().filter_map(|of| begins(of, reacts)).min();
    if let Some(first) = first(true) {
        let most = |of: &Curriculum| of.max_epochs(source);
        list.compare(&format!("source.{source}.max_epochs"), most(other), most(one), first);
    }
    if let Some(first) = first(false) {
        list.compare(&format!("source.{source}.packing"), show(other), show(one), first);
        let none = || "none".to_owned();
        let fim = |of: &Curriculum| of.fim(source).map_or_else(none, Fim::text);
        list.compare(&format!("source.{source}.fim"), fim(other), fim(one), first);
        let mask = |of: &Curriculum| of.mask(source).map_or_else(none, LabelMask::text);
        list.compare(&format!("source.{source}.mask"), mask(other), mask(one), first);
        let weight = |of: &Curriculum| of.loss_weight(source);
        list.compare(&format!("source.{source}.loss_weight"), weight(other), weight(one), first);
        let buckets = |of: &Curriculum| of.sources.get(source)?.buckets.clone();
        let (one, other) = (buckets(one), buckets(other));
        let rule = |buckets: &Option<Buckets>| match buckets {
            Some(buckets) => buckets.rule_text(),
            None => "none".to_owned(),
        };
        list.compare(&format!("source.{source}.buckets"), rule(&other), rule(&one), first);
        let curve = |buckets: &Option<Buckets>| {
            let curve = buckets.as_ref().and_then(Buckets::curve_text);
            curve.unwrap_or_else(|| "each bucket as often".to_owned())
        };
        list.compare(&format!("source.{source}.curve"), curve(&other), curve(&one), first);
    }
}

/// Phases are compared in order; after the first whose end differs, every later step differs.
fn phase_differences(one: &Curriculum, edited: &Curriculum, list: &mut List) {
    let (phases, others) = (&one.phases[..], &edited.phases[..]);
    let (mut first, mut first_other) = (1, 1);
    for (number, (phase, other)) in phases.iter().zip(others).enumerate() {
        let ramps = [one, edited].into_iter().filter_map(|of| first_ramp(of, number)).min();
        phase_difference(phase, other, first.min(first_other), ramps, list);
        first += phase.steps;
        first_other += other.steps;
    }
    let reached = first.min(first_other);
    let common = phases.len().min(others.len());
    for phase in &phases[common..] {
        list.compare(&format!("phase.{}", phase.name), "no such phase", "a phase", reached);
    }
    for phase in &others[common..] {
        list.compare(&format!("phase.{}", phase.name), "a phase", "no such phase", reached);
    }
}

/// Amendments are paired by step (both lists are ascending) and named by their number.
fn amendment_differences(amendments: &[Amendment], others: &[Amendment], list: &mut List) {
    let (mut at, mut there) = (0, 0);
    loop {
        let (one, other) = (amendments.get(at), others.get(there));
        let Some(step) = one.into_iter().chain(other).map(|of| of.step).min() else { return };
        let now = |of: Option<&Amendment>| of.filter(|of| of.step == step).map(Amendment::meaning);
        let (one, other) = (now(one), now(other));
        let number = if other.is_some() { there } else { at };
        (at, there) = (at + usize::from(one.is_some()), there + usize::from(other.is_some()));
        let show = |meaning: Option<String>| meaning.unwrap_or_else(|| NO_AMENDMENT.to_owned());
        list.compare(&format!("amendment.{}", number + 1), show(other), show(one), step);
    }
}

/// The first step of the first ramp in a phase: it ends with the phase, so each of its steps depends on the phase's
/// length.
fn first_ramp(of: &Curriculum, phase: usize) -> Option<u64> {
    let mut first = 1;
    of.segments().into_iter().find_map(|segment| {
        let begins = first;
        first += segment.spec.steps;
        (segment.phase == phase && segment.spec.mix.is_ramp()).then_some(begins)
    })
}

fn phase_difference(
    phase: &Phase,
    other: &Phase,
    first_step: u64,
    first_ramp: Option<u64>,
    list: &mut List,
) {
    let Phase {
        name,
        steps,
        seq_len,
        batch,
        micro_batch,
        context_chunks,
        weight_shards,
        remainder,
        mix,
        model,
        schedule,
    } = phase;
    let key = |field: &str| format!("phase.{name}.{field}");
    let ends = first_step + other.steps.min(*steps);
    list.compare(&key("steps"), other.steps, steps, first_ramp.unwrap_or(ends));
    list.compare(&key("seq_len"), other.seq_len, seq_len, first_step);
    // Sizes of steps that neither phase has change nothing.
    let reached = (*steps).max(other.steps);
    if let Some(step) = batch.first_other(&other.batch).filter(|step| *step <= reached) {
        let first =
            first_ramp.map_or(first_step + step - 1, |ramp| ramp.min(first_step + step - 1));
        list.compare(&key("batch"), other.batch.text(), batch.text(), first);
    }
    list.compare(&key("micro_batch"), other.micro_batch, micro_batch, first_step);
    list.compare(&key("context_chunks"), other.context_chunks, context_chunks, first_step);
    list.compare(&key("weight_shards"), other.weight_shards, weight_shards, first_step);
    list.compare(&key("remainder"), other.remainder.name(), remainder.name(), first_step);
    model_difference(&key("model"), model, &other.model, first_step, list);
    let show = |schedule: &Option<PhaseSchedule>| match schedule {
        Some(schedule) => schedule.text(),
        None => "that of the phase before".to_owned(),
    };
    list.compare(&key("schedule"), show(&other.schedule), show(schedule), first_step);
    // Weights with equal proportions give the same mix.
    if mix.same(&other.mix) {
        return;
    }
    let (Mix::Constant(weights), Mix::Constant(others)) = (mix, &other.mix) else {
        list.compare(&key("mix"), other.mix.text(), mix.text(), first_step);
        return;
    };
    for source in weights.keys().chain(others.keys()).collect::<BTreeSet<_>>() {
        let show = |weights: &SourceWeights| match weights.get(source) {
            Some(weight) => weight.to_string(),
            None => "not in the mix".to_owned(),
        };
        list.compare(&key(&format!("mix.{source}")), show(others), show(weights), first_step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A curriculum with amendments that leave out these steps.
    fn skipping(steps: &[u64]) -> Curriculum {
        let head = "store = \"s\"\nseed = 1\n[model]\npreset = \"zaya1-nano\"\n[optimizer]\nkind = \"adamw\"\nlr = 1e-3\n\
            [[phase]]\nname = \"all\"\nsteps = 60\nseq_len = 64\nbatch = 4\nmicro_batch = 2\nmix = { a = 1 }\n";
        let amendment = |step: &u64| format!("[[amendment]]\nstep = {step}\nskip = true\n");
        let amendments: String = steps.iter().map(amendment).collect();
        Curriculum::parse(&format!("{head}{amendments}"), "c.toml").unwrap()
    }

    #[test]
    fn an_amendment_between_others_is_one() {
        let (few, many) = (skipping(&[5, 13, 20]), skipping(&[5, 9, 13, 20]));
        for (one, other, what) in [
            (&few, &many, "is new: step = 9, skip = true"),
            (&many, &few, "was removed: step = 9, skip = true"),
        ] {
            let told: Vec<_> = one.difference(other).iter().map(ToString::to_string).collect();
            assert_eq!(told, [format!("amendment.2 {what}, which matters from step 9")]);
        }
    }

    /// An amendment is inserted between others, one of which changes too.
    #[test]
    fn amendments_are_told_by_their_steps() {
        let (before, mut after) = (skipping(&[5, 13, 20]), skipping(&[5, 9, 13, 20]));
        after.amendments[3].skip = false;
        after.amendments[3].numbers.dtype = Some(crate::Dtype::Bf16);
        let told: Vec<_> = before.difference(&after).iter().map(ToString::to_string).collect();
        assert_eq!(told.len(), 2, "{told:?}");
        assert!(told[0].starts_with("amendment.2 is new: step = 9"), "{told:?}");
        assert!(
            told[1].starts_with("amendment.4: step = 20, skip = true became step = 20, dtype"),
            "{told:?}"
        );
    }
}
