//! Amendments: what changes from a step on, when every step before it has been trained.
//!
//! They only ever grow at the end of the file, so their steps never fall. One may change the mix of the phase that its
//! step lies in (up to that phase's end), ban documents for the rest of the run, and add a store for mixes from then on.

use std::collections::{BTreeMap, BTreeSet};

use std::num::NonZeroU64;

use contract::settings::{File, Spanned, Table};
use contract::{Fault, Ratio, Result};
use serde::Deserialize;

use super::canonical::{Text as Out, inline, key, quoted};
use super::parse::{SUM, mix_of};
use super::places::Places;
use super::{Curriculum, Phase};

/// One amendment.
#[derive(Clone, Debug, PartialEq)]
pub struct Amendment {
    /// The first step that it changes.
    pub step: u64,
    /// The mix from then to the end of the phase; empty where it stays.
    pub mix: BTreeMap<String, Ratio>,
    /// By source the numbers of documents, counted in its training stream, that no step sees any more.
    pub ban: BTreeMap<String, BTreeSet<u64>>,
    /// A further store.
    pub store: Option<AddedStore>,
}

/// A store that is there from an amendment on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedStore {
    /// Its path, as in [`Curriculum::stores`].
    pub path: String,
    /// Its digest, by which it is known whatever its path.
    pub digest: String,
}

/// Consecutive steps with one mix: a phase, or a part of one between two amendments.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseSegment {
    /// Index of the phase.
    pub phase: usize,
    /// The phase as it is here: its own steps and mix.
    pub spec: Phase,
    /// What [`Curriculum::place`] knows its mix by.
    pub mix_key: String,
}

/// An amendment as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AmendmentText {
    step: NonZeroU64,
    mix: Option<Spanned<Table>>,
    #[serde(default)]
    ban: BTreeMap<String, BTreeSet<u64>>,
    store: Option<String>,
    digest: Option<String>,
}

impl Curriculum {
    /// The phases, cut into segments where an amendment changes their mix.
    pub fn segments(&self) -> Vec<PhaseSegment> {
        let (mut segments, mut first) = (Vec::new(), 1);
        for (phase, spec) in self.phases.iter().enumerate() {
            let end = first + spec.steps;
            let mut segment = PhaseSegment {
                phase,
                spec: spec.clone(),
                mix_key: format!("phase.{}.mix", spec.name),
            };
            for (number, amendment) in self.amendments.iter().enumerate() {
                let Amendment { step, mix, .. } = amendment;
                if mix.is_empty() || !(first..end).contains(step) {
                    continue;
                }
                let begun = end - segment.spec.steps;
                segment.spec.steps = step - begun;
                if segment.spec.steps > 0 {
                    segments.push(segment.clone());
                }
                segment.spec = Phase { steps: end - step, mix: mix.clone(), ..segment.spec };
                segment.mix_key = format!("amendment.{}.mix", number + 1);
            }
            segments.push(segment);
            first = end;
        }
        segments
    }
}

/// The amendments of a run that has these phases.
pub(super) fn amendments(
    file: &File,
    places: &Places,
    phases: &[Phase],
    texts: Vec<AmendmentText>,
) -> Result<Vec<Amendment>> {
    let mut all: Vec<Amendment> = Vec::new();
    let mut mixes: BTreeMap<usize, Phase> = BTreeMap::new();
    for text in texts {
        let path = format!("amendment.{}", all.len() + 1);
        let fault = |key: &str, what: &str| places.fault(&format!("{path}.{key}"), what);
        let amendment = amendment(file, places, &path, text)?;
        let Amendment { step, mix, ban, store: _ } = &amendment;
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
            let wanted = "`mix`, `ban` or `store`: something to change";
            return Err(places.missing(&path, "mix", wanted));
        }
        if !mix.is_empty() {
            let taken = |one: &Amendment| one.step == *step && !one.mix.is_empty();
            let before = mixes.entry(phase).or_insert_with(|| phases[phase].clone());
            if all.iter().any(taken) {
                return Err(fault("mix", "two amendments change the mix at one step"));
            }
            check_mix(before, mix)
                .map_err(|fault| fault.at(places.place(&format!("{path}.mix"))))?;
            before.mix = mix.clone();
        }
        check_bans(&all, ban).map_err(|fault| fault.at(places.place(&format!("{path}.ban"))))?;
        all.push(amendment);
    }
    Ok(all)
}

fn amendment(file: &File, places: &Places, path: &str, text: AmendmentText) -> Result<Amendment> {
    let AmendmentText { step, mix, ban, store, digest } = text;
    let mix = mix.map(|mix| mix_of(file, &mix)).transpose()?.unwrap_or_default();
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
    Ok(Amendment { step: step.get(), mix, ban, store })
}

/// The phase of a step.
fn phase_at(phases: &[Phase], step: u64) -> Option<usize> {
    let mut last = 0;
    phases.iter().position(|phase| {
        last += phase.steps;
        step <= last
    })
}

fn check_mix(before: &Phase, mix: &BTreeMap<String, Ratio>) -> Result<()> {
    let after = Phase { mix: mix.clone(), ..before.clone() };
    let Some(weights) = after.weights() else {
        return Err(Fault::usage("these weights are too fine for each other").wanted(SUM));
    };
    if before.mix.keys().eq(mix.keys()) && before.weights() == Some(weights) {
        return Err(Fault::usage("this is the mix that the phase has already"));
    }
    Ok(())
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
        let Amendment { step: _, mix, ban, store } = self;
        mix.is_empty() && ban.is_empty() && store.is_none()
    }

    /// Its canonical text, which may be put behind any curriculum's; refused if its weights are too fine for each other.
    pub fn text(&self) -> Result<String> {
        if !self.mix.is_empty() && super::whole_weights(&self.mix).is_none() {
            return Err(Fault::usage("these weights are too fine for each other").wanted(SUM));
        }
        let mut out = Out::default();
        self.write(&mut out);
        Ok(out.0)
    }

    /// Writes its canonical text.
    pub(super) fn write(&self, out: &mut Out) {
        let Amendment { step, mix, ban, store } = self;
        out.head("[[amendment]]");
        out.line("step", step);
        if !mix.is_empty() {
            out.line("mix", mix_text(mix));
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
            out.line("store", quoted(path));
            out.line("digest", quoted(digest));
        }
    }

    /// What it means, whatever the path of its store and the spelling of its weights.
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

/// A mix with its weights as integers without a common divisor.
pub(super) fn mix_text(mix: &BTreeMap<String, Ratio>) -> String {
    let weights = super::whole_weights(mix).expect("checked when the mix was read");
    let pairs =
        mix.keys().zip(weights).map(|(source, weight)| format!("{} = {weight}", key(source)));
    inline(pairs.collect())
}
