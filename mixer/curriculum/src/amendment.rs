//! Amendments: changes from some step on, made after the steps before it have been trained.
//!
//! They are only appended to the file, so their steps never decrease. An amendment may change the mix of the phase that
//! contains its step (until that phase ends), ban documents for the rest of the run, add a store for later mixes,
//! change the learning rate, its schedule, the clips, the skip rules and the number format, and make its own step
//! update nothing.

use std::collections::{BTreeMap, BTreeSet};

use std::num::NonZeroU64;
use std::ops::Range;

use contract::{Fault, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use settings::{File, Spanned, Table};

use super::mix::{Mix, MixText};
use super::numbers::{
    AutoClipChange, Hyperparameters, NumbersChange, OptimizerChange, SkipStepChange,
};
use super::places::KeySpans;
use super::text::{Text as Out, inline, key, quoted};
use super::{Curriculum, Dtype, Phase, ScheduleChange};

/// One amendment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Amendment {
    /// The first step that it affects.
    pub step: u64,
    /// The mix from that step to the end of the phase; `None` if unchanged.
    pub mix: Option<Mix>,
    /// By source: document numbers in its training stream that no later step reads.
    pub ban: BTreeMap<String, BTreeSet<u64>>,
    /// An additional store.
    pub store: Option<AddedStore>,
    /// Learning rate, schedule, clips, skip rules and number format from that step on.
    pub numbers: NumbersChange,
    /// Whether this one step updates nothing: neither weights nor moments nor balancing biases.
    pub skip: bool,
}

/// A store that an amendment adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedStore {
    /// Its path, as in [`Curriculum::stores`].
    pub path: String,
    /// Its digest, which identifies it whatever its path.
    pub digest: String,
}

/// Consecutive steps with one mix and one batch: a phase, or the part of a phase between amendments of its mix and
/// changes of its batch.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseSegment {
    /// Index of the phase.
    pub phase: usize,
    /// The phase with this segment's own steps and mix.
    pub spec: Phase,
    /// The key of its mix for [`Curriculum::place`].
    pub mix_key: String,
    /// Samples of the phase before this segment that have the same mix.
    pub mix_before: u64,
    /// Samples from the first of these to the end of the phase: those of a ramp, even if an amendment ends it early.
    pub mix_samples: u64,
    /// The batch of this segment.
    pub batch: u64,
}

/// What changes from a step on.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Amendment")]
pub(super) struct AmendmentText {
    /// The first step that changes; never decreases from one amendment to the next.
    #[schemars(extend("digest" = "plan, run"))]
    step: NonZeroU64,
    /// The whole mix from then to the end of the phase, as in a phase; a ramp begins at this step.
    #[schemars(with = "Option<MixText>", extend("digest" = "plan, run"))]
    mix: Option<Spanned<Table>>,
    /// By source, documents (their numbers in the source) that no step sees from then on.
    #[serde(default)]
    #[schemars(extend("digest" = "plan, run"))]
    ban: BTreeMap<String, BTreeSet<u64>>,
    /// Path of a further store, whose sources later mixes may name.
    #[schemars(extend("digest" = "run, by `digest`"))]
    store: Option<String>,
    /// Digest of that store.
    #[schemars(extend("digest" = "run"))]
    digest: Option<String>,
    /// Keys of `[optimizer]` from then on.
    #[serde(default)]
    #[schemars(extend("digest" = "run"))]
    optimizer: OptimizerChange,
    /// Keys of `[schedule]` from then on.
    #[serde(default)]
    #[schemars(extend("digest" = "run"))]
    schedule: ScheduleChange,
    /// Keys of `[skip_step]` from then on.
    #[serde(default)]
    #[schemars(extend("digest" = "run"))]
    skip_step: SkipStepChange,
    /// Keys of `[auto_clip]` from then on.
    #[serde(default)]
    #[schemars(extend("digest" = "run"))]
    auto_clip: AutoClipChange,
    /// Number format from then on.
    #[schemars(extend("digest" = "run"))]
    dtype: Option<Dtype>,
    /// Whether this one step changes nothing: neither weights nor moments nor balancing biases.
    #[serde(default)]
    #[schemars(extend("digest" = "run"))]
    skip: bool,
}

impl AmendmentText {
    /// The first step that it affects.
    pub(super) fn step(&self) -> u64 {
        self.step.get()
    }
}

impl Curriculum {
    /// Inserts amendments by step, each after existing ones of the same step. Removes from later amendments what is
    /// then redundant: bans of documents already banned, and mixes or numbers already in force. The resulting text has
    /// to be parsed again before use: only parsing validates it.
    pub fn amend(&mut self, amendments: Vec<Amendment>) {
        let mut amendments = amendments;
        amendments.sort_by_key(|amendment| amendment.step);
        for amendment in amendments {
            let same = self.amendments.iter_mut().filter(|one| one.step == amendment.step);
            if amendment.mix.is_some() {
                same.for_each(|one| one.mix = None);
            }
            let at = self.amendments.partition_point(|one| one.step <= amendment.step);
            self.amendments.insert(at, amendment);
            self.drop_needless(at + 1);
            self.drop_needless_mixes(at + 1);
        }
        self.amendments.retain(|amendment| !amendment.is_empty());
    }

    /// Removes bans and numbers from the amendments from number `from` on that are already in force at their step.
    fn drop_needless(&mut self, from: usize) {
        for number in from..self.amendments.len() {
            let mut before = self.clone();
            before.amendments.truncate(number);
            let amendment = &mut self.amendments[number];
            for one in &before.amendments {
                for (source, documents) in &mut amendment.ban {
                    let banned = one.ban.get(source);
                    documents.retain(|document| banned.is_none_or(|them| !them.contains(document)));
                }
            }
            amendment.ban.retain(|_, documents| !documents.is_empty());
            let mut numbers = before.numbers_at(amendment.step);
            let was = numbers.clone();
            numbers.change(&amendment.numbers);
            if numbers == was {
                amendment.numbers = NumbersChange::default();
            }
        }
    }

    /// Does the same for mixes.
    fn drop_needless_mixes(&mut self, from: usize) {
        for number in from..self.amendments.len() {
            let mut before = self.clone();
            before.amendments.truncate(number);
            let amendment = &mut self.amendments[number];
            let mut first = 1;
            let segments = before.segments();
            let segment = segments.iter().find(|segment| {
                first += segment.spec.steps;
                amendment.step < first
            });
            let same = |it: &PhaseSegment, mix: &Mix| {
                // A ramp or a reaction that begins anew is another one.
                let begins = amendment.step + it.spec.steps == first && it.mix_before == 0;
                it.spec.mix.same(mix) && (begins || !mix.begins_anew())
            };
            amendment.mix.take_if(|mix| segment.is_some_and(|it| same(it, mix)));
        }
    }

    /// Removes `source` from every mix of `steps`, from the first such step to the end of its phase or the next
    /// amendment of its mix. Returns whether any mix had it; an error if it is the only source of one of them.
    pub fn drop_source(&mut self, source: &str, steps: Range<u64>) -> Result<bool> {
        let (mut amendments, mut first, mut next) = (Vec::new(), 1, 1);
        let segments = self.segments();
        for (number, segment) in segments.iter().enumerate() {
            // One mix, whatever its batches.
            next += segment.spec.steps;
            if segments.get(number + 1).is_some_and(|after| after.mix_before > 0) {
                continue;
            }
            let (mix, end) = (segment.spec.mix.clone(), next);
            let reached = end > steps.start && first < steps.end;
            if reached && mix.has(source) {
                let step = first.max(steps.start);
                let place = || self.place(&segment.mix_key);
                if mix.begins_anew() && step > first {
                    let kind =
                        if mix.is_ramp() { "a ramp" } else { "a mix that reacts to the loss" };
                    let what = format!("{kind} cannot lose {source:?} on its way");
                    return Err(Fault::usage(what)
                        .at(place())
                        .found(format!("step {step} of {kind} that begins at step {first}"))
                        .hint(format!("begin at step {first}, or amend the mix instead")));
                }
                let left = mix.without(source).ok_or_else(|| {
                    Fault::usage(format!("{source:?} is the only source of a mix"))
                        .at(place())
                        .hint("amend the mix instead: another source has to take its place")
                })?;
                amendments.push(Amendment { step, mix: Some(left), ..Amendment::default() });
            }
            first = end;
        }
        let any = !amendments.is_empty();
        self.amend(amendments);
        self.drop_needless_mixes(0);
        self.amendments.retain(|amendment| !amendment.is_empty());
        Ok(any)
    }

    /// The phases, split into segments where an amendment changes their mix, or where their batch changes.
    pub fn segments(&self) -> Vec<PhaseSegment> {
        let (mut segments, mut first) = (Vec::new(), 1);
        for (phase, spec) in self.phases.iter().enumerate() {
            let end = first + spec.steps;
            let mut segment = PhaseSegment {
                phase,
                spec: spec.clone(),
                mix_key: format!("phase.{}.mix", spec.name),
                mix_before: 0,
                mix_samples: spec.samples(),
                batch: spec.batch.first(),
            };
            // Steps of the phase before the segment.
            let mut before = 0;
            for (number, amendment) in self.amendments.iter().enumerate() {
                let Amendment { step, mix, .. } = amendment;
                let Some(mix) = mix.as_ref().filter(|_| (first..end).contains(step)) else {
                    continue;
                };
                segment.spec.steps = step - first - before;
                segments.extend(segment.by_batch(before));
                before = step - first;
                segment.spec = Phase { steps: end - step, mix: mix.clone(), ..segment.spec };
                segment.mix_key = format!("amendment.{}.mix", number + 1);
                segment.mix_samples = spec.samples_after(before);
            }
            segments.extend(segment.by_batch(before));
            first = end;
        }
        segments
    }
}

impl PhaseSegment {
    /// This segment of one mix, split where the batch changes; `before` are the steps of the phase before it.
    fn by_batch(&self, before: u64) -> Vec<PhaseSegment> {
        let (mut parts, mut at, mut done) = (Vec::new(), 0, 0);
        for (steps, batch) in self.spec.batch.runs(before + self.spec.steps) {
            at += steps;
            let steps = steps.min(at.saturating_sub(before));
            if steps > 0 {
                let mut part = self.clone();
                (part.spec.steps, part.batch, part.mix_before) = (steps, batch, done);
                done += steps * batch;
                parts.push(part);
            }
        }
        parts
    }
}

/// The amendments of a run with these phases; `begins` are the numbers in force at a step before the amendments.
pub(super) fn amendments(
    file: &File,
    places: &KeySpans,
    phases: &[Phase],
    begins: (Hyperparameters, u64),
    texts: Vec<AmendmentText>,
) -> Result<Vec<Amendment>> {
    let mut all: Vec<Amendment> = Vec::new();
    let (mut numbers, mut at) = begins;
    // By phase: the mix in force, and its first step.
    let mut mixes: BTreeMap<usize, (Mix, u64)> = BTreeMap::new();
    for text in texts {
        let path = format!("amendment.{}", all.len() + 1);
        let fault = |key: &str, what: &str| places.fault(&format!("{path}.{key}"), what);
        let amendment = amendment(file, places, &path, text)?;
        let Amendment { step, mix, ban, store: _, numbers: change, skip } = &amendment;
        if all.last().is_some_and(|before| before.step > *step) {
            return Err(fault("step", "an amendment stands behind a later one")
                .found(format!("step {step}"))
                .wanted("amendments in the order of their steps: new ones at the end"));
        }
        let Some(phase) = phase_at(phases, *step) else {
            let last: u64 = phases.iter().map(|phase| phase.steps).sum();
            let fault = fault("step", "the curriculum does not have this step");
            return Err(fault.found(step).wanted(format!("1 to {last}")));
        };
        if amendment.is_empty() {
            let wanted = "`mix`, `ban`, `store`, `optimizer`, `schedule`, `skip_step`, `auto_clip`, `dtype` or `skip`: \
                          something to change";
            return Err(places.missing(&path, "mix", wanted));
        }
        if let Some(mix) = mix {
            let taken = |one: &Amendment| one.step == *step && one.mix.is_some();
            let begins: u64 = phases[..phase].iter().map(|phase| phase.steps).sum();
            let before =
                mixes.entry(phase).or_insert_with(|| (phases[phase].mix.clone(), begins + 1));
            if all.iter().any(taken) {
                return Err(fault("mix", "two amendments change the mix at one step"));
            }
            let samples = phases[phase].samples_after(step - 1 - begins);
            mix.check(samples).map_err(|fault| fault.at(places.place(&format!("{path}.mix"))))?;
            // A ramp or a reaction that begins anew is another one.
            if before.0.same(mix) && (!mix.begins_anew() || before.1 == *step) {
                return Err(fault("mix", "this is the mix that the phase has already"));
            }
            *before = (mix.clone(), *step);
        }
        check_bans(&all, ban).map_err(|fault| fault.at(places.place(&format!("{path}.ban"))))?;
        numbers.advance(phases, at..*step);
        at = *step;
        change.check(places, &path, &numbers)?;
        numbers.change(change);
        if *skip && all.iter().any(|one| one.step == *step && one.skip) {
            return Err(fault("skip", "this step is skipped already"));
        }
        all.push(amendment);
    }
    Ok(all)
}

fn amendment(file: &File, places: &KeySpans, path: &str, text: AmendmentText) -> Result<Amendment> {
    let AmendmentText { step, mix, ban, store, digest, optimizer, schedule, .. } = text;
    let AmendmentText { skip_step, auto_clip, dtype, skip, .. } = text;
    let mix = mix.map(|mix| Mix::read(file, places, &format!("{path}.mix"), &mix)).transpose()?;
    if let Some((source, _)) = ban.iter().find(|(_, documents)| documents.is_empty()) {
        let key = format!("{path}.ban.{source}");
        return Err(places
            .fault(&key, format!("`ban.{source}` does not name a document"))
            .wanted("a list of documents, by their numbers in the source: [17, 230]"));
    }
    let store = match (store.filter(|path| !path.is_empty()), digest) {
        (None, None) => None,
        (Some(path), Some(digest)) => Some(AddedStore { path, digest }),
        (Some(_), None) => {
            let wanted = "the digest of the store, as `zdata inspect` shows it";
            let fault = places.missing(path, "digest", wanted);
            return Err(fault.hint("`zdata amend` writes both"));
        }
        (None, Some(_)) => {
            return Err(places.missing(path, "store", "the path of the store with this digest"));
        }
    };
    let numbers = NumbersChange { optimizer, schedule, skip_step, auto_clip, dtype };
    Ok(Amendment { step: step.get(), mix, ban, store, numbers, skip })
}

/// The phase of a step.
fn phase_at(phases: &[Phase], step: u64) -> Option<usize> {
    let mut last = 0;
    phases.iter().position(|phase| {
        last += phase.steps;
        step <= last
    })
}

fn check_bans(before: &[Amendment], ban: &BTreeMap<String, BTreeSet<u64>>) -> Result<()> {
    for (source, documents) in ban {
        let banned = before.iter().filter_map(|one| one.ban.get(source));
        if let Some(twice) = banned.flat_map(|banned| banned.intersection(documents)).next() {
            return Err(Fault::usage(format!("document {twice} of {source} is banned already")));
        }
    }
    Ok(())
}

impl Amendment {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        let Amendment { step: _, mix, ban, store, numbers, skip } = self;
        mix.is_none() && ban.is_empty() && store.is_none() && numbers.is_empty() && !skip
    }

    /// Its canonical text, which can be appended to any curriculum. An error if its weights have no integer form.
    pub fn text(&self) -> Result<String> {
        self.mix.as_ref().map_or(Ok(()), |mix| mix.check(0))?;
        let mut out = Out::default();
        self.write(&mut out);
        Ok(out.0)
    }

    /// Writes its canonical text.
    pub(super) fn write(&self, out: &mut Out) {
        let Amendment { step, mix, ban, store, numbers, skip } = self;
        out.head("[[amendment]]");
        out.line("step", step);
        if let Some(mix) = mix {
            out.line("mix", mix.text());
        }
        if !ban.is_empty() {
            let list = |documents: &BTreeSet<u64>| {
                documents.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
            };
            let pairs =
                ban.iter().map(|(source, them)| format!("{} = [{}]", key(source), list(them)));
            out.line("ban", inline(pairs.collect()));
        }
        if let Some(AddedStore { path, digest }) = store {
            // `meaning` clears the path.
            if !path.is_empty() {
                out.line("store", quoted(path));
            }
            out.line("digest", quoted(digest));
        }
        numbers.write(out);
        if *skip {
            out.line("skip", skip);
        }
    }

    /// Its canonical text without the path of its store, so that equal amendments compare equal.
    pub(super) fn meaning(&self) -> String {
        let mut same = self.clone();
        if let Some(store) = &mut same.store {
            store.path.clear();
        }
        let mut out = Out::default();
        same.write(&mut out);
        let text = out.0.trim().replace('\n', ", ");
        text.trim_start_matches("[[amendment]], ").to_owned()
    }
}
