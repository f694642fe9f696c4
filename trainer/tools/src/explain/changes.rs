//! What changed in the steps up to the explained one: by the curriculum, by users, or by the machine.

use std::collections::BTreeMap;

use contract::{Result, counted};
use curriculum::{Amendment, ChangedHyperparameter, Mix};
use serde::Serialize;
use serde_json::Value;

use super::history::PreviousSteps;
use crate::change::rate_at;
use trainer::events::{self, RanksEvent};
use trainer::folder::RunFolder;
use trainer::ledger::StepRecord;
use trainer::mesh::Degrees;
use trainer::model::Cut;
use trainer::optim::guard::Skipped;
use trainer::spec::RunSpec;

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunChangeKind {
    /// The learning rate jumped, other than by its warm-up or decay.
    LearningRate,
    /// The share of the samples of a source.
    Mixture,
    /// The phase's name, the length of its sequences, its batch or micro-batch.
    Phase,
    /// An edit of the curriculum took effect.
    Amendment,
    /// The kernel table.
    Kernels,
    /// The number of ranks, or how they exchange.
    Ranks,
    /// Skipped steps.
    Skipped,
}

impl RunChangeKind {
    /// All kinds.
    pub const ALL: [RunChangeKind; 7] = [
        RunChangeKind::LearningRate,
        RunChangeKind::Mixture,
        RunChangeKind::Phase,
        RunChangeKind::Amendment,
        RunChangeKind::Kernels,
        RunChangeKind::Ranks,
        RunChangeKind::Skipped,
    ];

    /// Whether it can change what a step learns. Ranks and kernels do not change results, and a skipped step updates
    /// nothing.
    pub(super) fn moves(self) -> bool {
        match self {
            RunChangeKind::LearningRate
            | RunChangeKind::Mixture
            | RunChangeKind::Phase
            | RunChangeKind::Amendment => true,
            RunChangeKind::Kernels | RunChangeKind::Ranks | RunChangeKind::Skipped => false,
        }
    }

    /// For people.
    pub fn words(self) -> &'static str {
        match self {
            RunChangeKind::LearningRate => "learning rate",
            RunChangeKind::Mixture => "mixture",
            RunChangeKind::Phase => "phase",
            RunChangeKind::Amendment => "amendments",
            RunChangeKind::Kernels => "kernels",
            RunChangeKind::Ranks => "ranks",
            RunChangeKind::Skipped => "skipped steps",
        }
    }
}

/// A change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunChange {
    /// Its kind.
    pub kind: RunChangeKind,
    /// The first step that it affects.
    pub step: u64,
    /// A description for people.
    pub what: String,
}

/// The rate jumps if it rises by more than this factor, unless it rose by as much in the step before.
const JUMP: f64 = 1.5;

/// The mixture changes if the share of a source changes by more than this.
const SHARE: f64 = 0.02;

/// What is known of a step before it is computed.
struct StepInputs {
    step: u64,
    lr: f64,
    /// Whether it was skipped, and why; if that is recorded.
    skipped: Option<Skipped>,
    /// Whether an accepted edit took effect with it.
    edited: bool,
}

impl From<&StepRecord> for StepInputs {
    fn from(record: &StepRecord) -> StepInputs {
        let (step, lr, skipped) = (record.step, record.lr(), record.skipped);
        StepInputs { step, lr, skipped, edited: record.curriculum.is_some() }
    }
}

/// All changes from the oldest step of `history` to `step`, oldest first. `record` is that of `step`; a step that
/// diverges has none, so its values are taken from the plan.
pub(super) fn changes(
    spec: &RunSpec,
    folder: &RunFolder,
    history: &PreviousSteps,
    step: u64,
    record: Option<&StepRecord>,
) -> Result<Vec<RunChange>> {
    let planned = || StepInputs { step, lr: rate_at(spec, step), skipped: None, edited: false };
    let last = record.map_or_else(planned, StepInputs::from);
    let records: Vec<StepInputs> =
        history.records.iter().map(StepInputs::from).chain([last]).collect();
    let first = records[0].step;
    let mut found = rates(&records, if first == 1 { 0.0 } else { rate_at(spec, first - 1) });
    for pair in records.windows(2) {
        found.extend(curriculum(spec, pair[0].step, pair[1].step)?);
        if let Some(reason) = pair[0].skipped.filter(|skipped| *skipped != Skipped::No) {
            let (kind, step) = (RunChangeKind::Skipped, pair[0].step);
            found.push(RunChange {
                kind,
                step,
                what: format!("step {step} was {}", reason.words()),
            });
        }
        let amended =
            spec.curriculum.amendments.iter().any(|amendment| amendment.step == pair[1].step);
        if pair[1].edited && !amended {
            let (kind, step) = (RunChangeKind::Amendment, pair[1].step);
            let what = format!("an edit of the curriculum came into force at step {step}");
            found.push(RunChange { kind, step, what });
        }
    }
    let (mut numbers, mut last) = (spec.curriculum.numbers_at(0), 0);
    for amendment in &spec.curriculum.amendments {
        let at = amendment.step;
        numbers.advance(&spec.curriculum.phases, last..at);
        last = at;
        let before = numbers.clone();
        numbers.change(&amendment.numbers);
        if (first + 1..=step).contains(&at) {
            let description = amended(amendment, &before.changed(&numbers));
            let what = format!("amended from step {at} on: {description}");
            found.push(RunChange { kind: RunChangeKind::Amendment, step: at, what });
        }
    }
    let machines = machines(folder)?;
    found.extend(machines.into_iter().filter(|change| (first + 1..=step).contains(&change.step)));
    found.sort_by_key(|change| (change.step, change.kind));
    Ok(found)
}

/// The last step with a change that can affect what a step learns; 0 if there is none.
pub(super) fn last(changes: &[RunChange]) -> u64 {
    let moving = changes.iter().filter(|change| change.kind.moves());
    moving.map(|change| change.step).max().unwrap_or(0)
}

/// A number for people: very large and small ones with an exponent.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        0.0 | 1e-3..1e6 => value.to_string(),
        _ => format!("{value:e}"),
    }
}

/// An amendment in words; `changed` are the settings that it changes.
fn amended(amendment: &Amendment, changed: &[ChangedHyperparameter]) -> String {
    let Amendment { step: _, mix, ban, store, numbers: _, skip } = amendment;
    let mut parts: Vec<String> = Vec::new();
    parts.extend(mix.as_ref().map(|mix| match mix {
        Mix::Constant(weights) => {
            let mix = weights.iter().map(|(source, weight)| format!("{source} {weight}"));
            format!("mix {}", mix.collect::<Vec<_>>().join(", "))
        }
        Mix::Ramp { .. } | Mix::Reacting(_) => format!("mix {}", mix.text()),
    }));
    parts.extend(ban.iter().map(|(source, documents)| {
        format!("{} of {source} banned", counted(documents.len(), "document"))
    }));
    parts.extend(store.as_ref().map(|store| format!("the store {} added", store.path)));
    let people = |value: &str| match (value.parse::<u64>(), value.parse::<f64>()) {
        (Err(_), Ok(value)) => number(value),
        _ => value.to_owned(),
    };
    parts.extend(changed.iter().map(|ChangedHyperparameter { key, was, becomes }| {
        format!("{key} {}, before {}", people(becomes), people(was))
    }));
    if *skip {
        parts.push("this step moves nothing".to_owned());
    }
    parts.join("; ")
}

/// Jumps of the learning rate; `before` is the rate of the step before these. A warm-up rises by equal amounts, so a
/// rise no larger than the one before is not a jump.
fn rates(records: &[StepInputs], before: f64) -> Vec<RunChange> {
    let mut found = Vec::new();
    let mut risen = records.first().map_or(0.0, |first| first.lr - before);
    for pair in records.windows(2) {
        let (before, lr, step) = (pair[0].lr, pair[1].lr, pair[1].step);
        let rise = lr - before;
        let jumps = lr > JUMP * before && rise > 2.0 * risen.max(0.0);
        if jumps || lr * JUMP * 2.0 < before {
            let what =
                format!("the learning rate went from {before:.3e} to {lr:.3e} at step {step}");
            found.push(RunChange { kind: RunChangeKind::LearningRate, step, what });
        }
        risen = rise;
    }
    found
}

/// Changes by the curriculum between two consecutive steps.
fn curriculum(spec: &RunSpec, before: u64, step: u64) -> Result<Vec<RunChange>> {
    let (old, new) = (spec.plan.step(before)?, spec.plan.step(step)?);
    if old.phase == new.phase {
        return Ok(Vec::new());
    }
    let phases = spec.plan.phases();
    let (share_before, share_after) = (shares(spec, &old), shares(spec, &new));
    let (old, new) = (&phases[old.phase], &phases[new.phase]);
    let mut found = Vec::new();
    let shape = |phase: &mixer::PhasePlan| {
        let (batch, micro_batch) = (phase.batch, phase.micro_batch);
        format!("{batch} sequences of {} tokens in micro-batches of {micro_batch}", phase.seq_len)
    };
    let (was, is) = (&spec.models[old.phase], &spec.models[new.phase]);
    if is.cut != was.cut {
        let Cut { chunks, shards } = is.cut;
        let what = format!(
            "from step {step} on context_chunks {chunks} and weight_shards {shards}, before {} and {}",
            was.cut.chunks, was.cut.shards
        );
        found.push(RunChange { kind: RunChangeKind::Phase, step, what });
    }
    if (&is.config, is.balance_lr) != (&was.config, was.balance_lr) {
        let what = format!("at step {step} phase {:?} brings other numbers of [model]", new.name);
        found.push(RunChange { kind: RunChangeKind::Phase, step, what });
    }
    let [before, now] = [before, step].map(|at| spec.curriculum.numbers_at(at).origin);
    if now != before {
        let what = format!("at step {step} phase {:?} begins a schedule of its own", new.name);
        found.push(RunChange { kind: RunChangeKind::Phase, step, what });
    }
    if shape(old) != shape(new) {
        let what = format!("from step {step} on {}, before {}", shape(new), shape(old));
        found.push(RunChange { kind: RunChangeKind::Phase, step, what });
    }
    let (was, is) = (share_before, share_after);
    let names = is.keys().chain(was.keys().filter(|name| !is.contains_key(*name)));
    let share = |shares: &BTreeMap<&str, f64>, name: &str| shares.get(name).copied().unwrap_or(0.0);
    let moved = names.map(|name| (*name, share(&was, name), share(&is, name)));
    let mut moved: Vec<_> = moved.filter(|(_, was, is)| (was - is).abs() > SHARE).collect();
    moved.sort_by(|a, b| (b.2 - b.1).abs().total_cmp(&(a.2 - a.1).abs()));
    if !moved.is_empty() {
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        let described = |(name, was, is): &(&str, f64, f64)| {
            format!("{name} {} to {}", percent(*was), percent(*is))
        };
        let words: Vec<String> = moved.iter().map(described).collect();
        let what = format!("the mixture changed at step {step}: {}", words.join(", "));
        found.push(RunChange { kind: RunChangeKind::Mixture, step, what });
    }
    Ok(found)
}

/// The planned share of the samples of each source when a step begins.
fn shares<'a>(spec: &'a RunSpec, step: &mixer::StepSpec) -> BTreeMap<&'a str, f64> {
    let phase = &spec.plan.phases()[step.phase];
    let share = |(entry, used): (usize, &mixer::SourceUse)| {
        let name = spec.plan.sources()[used.source].name.as_str();
        (name, phase.mixing.share(entry, step.first_sample - phase.first_sample))
    };
    phase.uses.iter().enumerate().map(share).collect()
}

/// The ranks and kernels that computed a step, by the events.
#[derive(Clone, Debug, Default, PartialEq)]
struct ComputedBy {
    ranks: u32,
    exchange: String,
    kernels: String,
    device: String,
}

/// Changes of ranks and kernels, by the events. Lines that cannot be parsed are skipped: events are not chained, and no
/// result depends on them.
fn machines(folder: &RunFolder) -> Result<Vec<RunChange>> {
    let text = events::read(&folder.events())?;
    let (mut now, mut last, mut found) = (ComputedBy::default(), None::<ComputedBy>, Vec::new());
    for event in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let word = |key: &str| event[key].as_str().unwrap_or_default().to_owned();
        match event["event"].as_str() {
            Some("start") => {
                let kernels = match &event["kernels"] {
                    Value::String(text) => text.clone(),
                    other => other.to_string(),
                };
                now = ComputedBy {
                    ranks: 1,
                    exchange: "none".into(),
                    kernels,
                    device: word("device").to_lowercase(),
                };
            }
            Some(RanksEvent::NAME) => {
                if let Some(ranks) = RanksEvent::of(&event) {
                    (now.ranks, now.exchange) = (ranks.world, exchange(&ranks));
                }
            }
            Some("step") => {
                if let (Some(before), Some(step)) = (&last, event["step"].as_u64()) {
                    found.extend(differences(before, &now, step));
                }
                last = Some(now.clone());
            }
            _ => (),
        }
    }
    Ok(found)
}

/// How the ranks exchange, in words.
fn exchange(ranks: &RanksEvent) -> String {
    let RanksEvent { world: _, degrees: Degrees { cp, tsp }, grad_reduce, transport, more: _ } =
        ranks;
    let mut words = format!("{} by {transport}", grad_reduce.name());
    if *cp > 1 {
        words += &format!(", up to {cp} sharing a micro-batch");
    }
    if *tsp > 1 {
        words += &format!(", up to {tsp} holding its weights for each other");
    }
    words
}

fn differences(before: &ComputedBy, now: &ComputedBy, step: u64) -> Vec<RunChange> {
    let mut found = Vec::new();
    if (before.ranks, &before.exchange) != (now.ranks, &now.exchange) {
        let what = format!(
            "from step {step} on {} ({}) computed, before {} ({})",
            counted(u64::from(now.ranks), "rank"),
            now.exchange,
            before.ranks,
            before.exchange
        );
        found.push(RunChange { kind: RunChangeKind::Ranks, step, what });
    }
    if (&before.kernels, &before.device) != (&now.kernels, &now.device) {
        let what = format!(
            "from step {step} on the kernel table was {} on {}, before {} on {}",
            now.kernels, now.device, before.kernels, before.device
        );
        found.push(RunChange { kind: RunChangeKind::Kernels, step, what });
    }
    found
}

#[cfg(test)]
mod tests {
    use curriculum::{Curriculum, NumbersChange};

    use super::*;

    const TEXT: &str = "store = \"s\"\nseed = 1\ndtype = \"f32\"\n[model]\npreset = \"zaya1-nano\"\n[optimizer]\n\
        kind = \"adamw\"\nlr = 1e-3\n[schedule]\ndecay_steps = 5\nfinal_lr = 1e-4\n[skip_step]\n[auto_clip]\npercentile = 10\n\
        [[phase]]\nname = \"all\"\nsteps = 60\nseq_len = 64\nbatch = 4\nmicro_batch = 2\nmix = { web = 1 }\n";

    /// The description of the last amendment of a curriculum with `amendments`.
    fn told(amendments: &str) -> String {
        let curriculum = Curriculum::parse(&format!("{TEXT}{amendments}"), "a test").unwrap();
        let amendment = curriculum.amendments.last().unwrap();
        let [before, after] =
            [amendment.step - 1, amendment.step].map(|step| curriculum.numbers_at(step));
        amended(amendment, &before.changed(&after))
    }

    #[test]
    fn an_amendment_is_told_in_full() {
        let told = told(
            "[[amendment]]\nstep = 7\nskip = true\nban = { web = [4, 9] }\noptimizer = { clip = 0.25 }\n",
        );
        for part in ["2 documents of web banned", "optimizer.clip 0.25, before 1", "moves nothing"]
        {
            assert!(told.contains(part), "no {part:?} in {told:?}");
        }
    }

    /// Every setting that an amendment may change is described by its key.
    #[test]
    fn every_number_that_may_be_amended_is_told() {
        for (key, _) in NumbersChange::default().values() {
            let value = match key {
                "skip_step.non_finite" => "\"skip\"",
                "schedule.kind" => "\"linear\"",
                "schedule.decay_shape" => "\"sqrt\"",
                "dtype" => "\"bf16\"",
                "optimizer.lr" | "optimizer.clip" | "schedule.final_lr" | "skip_step.sigma" => {
                    "0.125"
                }
                _ => "33",
            };
            // Two keys belong to one kind of schedule.
            let wsd = ["schedule.stable_steps", "schedule.decay_shape"].contains(&key);
            let kind = if wsd { "schedule.kind = \"wsd\"\n" } else { "" };
            let told = told(&format!("[[amendment]]\nstep = 7\n{kind}{key} = {value}\n"));
            let value = value.trim_matches('"');
            assert!(told.contains(&format!("{key} {value}, before ")), "{key}: {told:?}");
        }
        let twice = told(
            "[[amendment]]\nstep = 7\nskip_step = { sigma = 4 }\n[[amendment]]\nstep = 9\nskip_step = { sigma = 5 }\n",
        );
        assert_eq!(twice, "skip_step.sigma 5, before 4");
    }
}
