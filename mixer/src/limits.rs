//! Refuses repeats beyond `max_epochs` before the run starts, naming the first step that would repeat.

use std::collections::BTreeMap;

use contract::{Fault, Result};

use crate::dealing::PARTS;
use crate::packing::Segment;
use crate::plan::{DataPlan, PhasePlan, SourceUse};
use curriculum::{BucketCurve, Curriculum, PowerCurve};

/// A source with too little text.
struct Shortfall {
    /// The first sample that would repeat it, and its step.
    sample: u64,
    step: u64,
    phase: usize,
    source: usize,
    max_epochs: u64,
}

/// Refuses the plan if a source runs out.
pub(crate) fn check(plan: &DataPlan, curriculum: &Curriculum) -> Result<()> {
    first_short(plan, curriculum).map_or(Ok(()), |(_, fault)| Err(fault))
}

/// The first step in which a source runs out, and the error for it.
pub(crate) fn first_short(plan: &DataPlan, curriculum: &Curriculum) -> Option<(u64, Fault)> {
    let mut short: Vec<Shortfall> = Vec::new();
    let mut spare = BTreeMap::new();
    // What is not fixed is a projection, which may be wrong.
    let fixed = plan.fixed_samples();
    for (index, phase) in plan.phases.iter().enumerate() {
        for (entry, part) in phase.uses.iter().enumerate() {
            let samples = match phase.first_sample + phase.samples() <= fixed {
                true => part.samples,
                false => phase.mixing.count(entry, fixed.saturating_sub(phase.first_sample)),
            };
            let max_epochs = curriculum.max_epochs(&plan.sources[part.source].name);
            let within = part.segment.samples_within(max_epochs);
            let known = short.iter().any(|earlier| earlier.source == part.source);
            let spare: &mut u64 = spare.entry(part.source).or_default();
            if curve(curriculum, &plan.sources[part.source].name).is_some()
                && !phase.mixing.continues()
            {
                // The cap of a curve holds for its exact shares. Their rounding, and that of a mix, may add samples.
                *spare += phase.mixing.deviation() + phase.mixing.samples() / PARTS + 1;
            }
            let beyond = samples.saturating_sub(within);
            let allowed = beyond.min(*spare);
            *spare -= allowed;
            if beyond > allowed && !known {
                let offset = phase.mixing.nth(entry, samples - (beyond - allowed));
                let (sample, step) =
                    (phase.first_sample + offset, phase.first_step + offset / phase.batch);
                let (phase, source) = (index, part.source);
                short.push(Shortfall { sample, step, phase, source, max_epochs });
            }
        }
    }
    short.sort_by_key(|shortfall| shortfall.sample);
    let (first, others) = short.split_first()?;
    Some((first.step, fault(plan, curriculum, first, others)))
}

fn fault(
    plan: &DataPlan,
    curriculum: &Curriculum,
    first: &Shortfall,
    others: &[Shortfall],
) -> Fault {
    let Shortfall { sample: _, step, phase, source, max_epochs } = *first;
    let (facts, phase) = (&plan.sources[source], &plan.phases[phase]);
    let (name, needed) = (&facts.name, plan.tokens_needed(source));
    let whole = curriculum.whole(name);
    let tables = [limited(curriculum, name), Some(name), Some(whole)];
    let mut tables = tables.into_iter().flatten();
    let table = tables.find(|it| curriculum.sources.contains_key(*it));
    let place = match table {
        Some(of) if curve(curriculum, name).is_some() => {
            curriculum.place(&format!("source.{of}.curve"))
        }
        Some(of) => curriculum.place(&format!("source.{of}.max_epochs")),
        None => curriculum.mix_place(&phase.mix_key, name),
    };
    let also: Vec<String> = others
        .iter()
        .map(|other| format!("{} at step {}", plan.sources[other.source].name, other.step))
        .collect();
    let also = if also.is_empty() { String::new() } else { format!("; so do {}", also.join(", ")) };
    let what = format!("source {name:?} runs out at step {step}, in phase {:?}{also}", phase.name);
    let (needed, all, kind) = match packs_needed(plan, first) {
        Some((needed, all)) => (needed, all, "packs of this length"),
        None => (needed, facts.tokens, "tokens"),
    };
    let epochs = hundredths(needed, all);
    let fault = Fault::usage(what)
        .at(place)
        .found(format!("the run takes {needed} of its {all} {kind}: {epochs} epochs"));
    match curve(curriculum, name) {
        Some(PowerCurve { cap, tokens, .. }) => fault
            .wanted(format!("at most {cap} (the `cap` of its curve)"))
            .hint(format!(
                "the curve is solved for {tokens} tokens: set `tokens` to what the run takes from {whole:?}, raise \
                 `cap`, or give it less weight or fewer steps"
            )),
        None => fault.wanted(format!("at most {max_epochs} (max_epochs)")).hint(format!(
            "set max_epochs = {} under [source.{}] to repeat it, or give it less weight or fewer steps",
            plan.epochs_needed(source),
            table.unwrap_or(whole)
        )),
    }
}

/// The power curve whose cap limits a bucket.
fn curve<'a>(curriculum: &'a Curriculum, name: &str) -> Option<&'a PowerCurve> {
    let (_, buckets, _) = curriculum.bucket(name)?;
    match &buckets.curve {
        BucketCurve::Power(curve) if limited(curriculum, name) != Some(name) => Some(curve),
        _ => None,
    }
}

/// The name of the table with the limit of a source, if there is one: its own, or that of the source that has it as a
/// bucket.
fn limited<'a>(curriculum: &'a Curriculum, name: &'a str) -> Option<&'a str> {
    let limits =
        |name: &&str| curriculum.sources.get(*name).is_some_and(|spec| spec.max_epochs.is_some());
    [name, curriculum.whole(name)].into_iter().find(limits)
}

/// For packed documents: the packs of the phase's length used by the end of the phase, and how many exist.
fn packs_needed(plan: &DataPlan, short: &Shortfall) -> Option<(u64, u64)> {
    let part = plan.phases[short.phase].uses.iter().find(|part| part.source == short.source)?;
    match &part.segment {
        Segment::Packs(segment) => Some((segment.served() + part.samples, segment.size().packs())),
        Segment::Windows(..) => None,
    }
}

/// `part / whole` with two decimals, rounded up: 1.004 epochs are more than one.
fn hundredths(part: u64, whole: u64) -> String {
    let value = (u128::from(part) * 100).div_ceil(u128::from(whole));
    format!("{}.{:02}", value / 100, value % 100)
}

impl DataPlan {
    /// Tokens that the run takes from a source, repeats included.
    pub fn tokens_needed(&self, source: usize) -> u64 {
        self.last_use(source).map_or(0, |(_, part)| part.tokens_before + part.tokens)
    }

    /// The least `max_epochs` with which a source lasts for the whole run.
    pub fn epochs_needed(&self, source: usize) -> u64 {
        match self.last_use(source) {
            Some((_, part)) => {
                let order = self.orders[source].as_ref();
                order.map_or(0, |order| order.epochs_begun(&part.after))
            }
            None => 0,
        }
    }

    fn last_use(&self, source: usize) -> Option<(&PhasePlan, &SourceUse)> {
        let in_phase =
            |phase: &'_ PhasePlan| phase.uses.iter().position(|part| part.source == source);
        self.phases
            .iter()
            .rev()
            .find_map(|phase| in_phase(phase).map(|entry| (phase, &phase.uses[entry])))
    }
}
