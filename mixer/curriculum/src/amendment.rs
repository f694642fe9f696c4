//! Amendments: what changes from a step on, when every step before it has been trained.
//!
//! They only ever grow at the end of the file, so their steps never fall. One may change the mix of the phase that its
//! step lies in (up to that phase's end), ban documents for the rest of the run, and add a store for mixes from then on.

use std::collections::{BTreeMap, BTreeSet};

use contract::{Fault, Ratio, Result};

use super::canonical::{Text as Out, inline, key, quoted};
use super::parse::{mix_of, record};
use super::{Curriculum, Phase, Places, Section};

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

/// What weights have to be.
const SUM: &str = "as integers without a common divisor they sum to at most 2^62";

const KEYS: &[&str] = &["step", "mix", "ban", "store", "digest"];

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

/// Reads `[[amendment]]`, which belongs to `phases`.
pub(super) fn amendments(
    root: &Section,
    phases: &[Phase],
    places: &mut Places,
) -> Result<Vec<Amendment>> {
    let mut all: Vec<Amendment> = Vec::new();
    let mut mixes: BTreeMap<usize, Phase> = BTreeMap::new();
    for section in root.sections("amendment")? {
        section.only(KEYS)?;
        let path = format!("amendment.{}", all.len() + 1);
        record(&section, &path, places);
        let amendment = amendment(&section, &path, places)?;
        let Amendment { step, mix, ban, store: _ } = &amendment;
        if all.last().is_some_and(|before| before.step > *step) {
            return Err(section
                .fault("step", "an amendment stands behind a later one")
                .found(format!("step {step}"))
                .wanted("amendments in the order of their steps: new ones at the end"));
        }
        let Some(phase) = phase_at(phases, *step) else {
            let last: u64 = phases.iter().map(|phase| phase.steps).sum();
            let fault = section.fault("step", "the curriculum has no such step");
            return Err(fault.found(step).wanted(format!("1 to {last}")));
        };
        if amendment.is_empty() {
            return Err(section.missing("mix", "`mix`, `ban` or `store`: something to change"));
        }
        if !mix.is_empty() {
            let taken = |one: &Amendment| one.step == *step && !one.mix.is_empty();
            let before = mixes.entry(phase).or_insert_with(|| phases[phase].clone());
            if all.iter().any(taken) {
                return Err(section.fault("mix", "two amendments change the mix at one step"));
            }
            check_mix(&section, before, mix)?;
            before.mix = mix.clone();
        }
        check_bans(&section, &all, ban)?;
        all.push(amendment);
    }
    Ok(all)
}

fn amendment(section: &Section, path: &str, places: &mut Places) -> Result<Amendment> {
    let step = section.whole("step", 1)?;
    let step = step.ok_or_else(|| section.missing("step", "the first step that it changes"))?;
    let mix = if section.has("mix") { mix_of(section, path, places)? } else { BTreeMap::new() };
    let mut ban = BTreeMap::new();
    if let Some(table) = section.section("ban")? {
        for source in table.keys() {
            ban.insert(source.to_owned(), documents(&table, source)?);
        }
    }
    let store = match (section.string("store")?, section.string("digest")?) {
        (None, None) => None,
        (Some(path), Some(digest)) if !path.is_empty() => {
            Some(AddedStore { path: path.to_owned(), digest: digest.to_owned() })
        }
        (Some(_), None) => {
            return Err(section
                .missing("digest", "the digest of the store, as `zdata inspect` shows it")
                .hint("`zdata amend` writes both"));
        }
        (None | Some(_), Some(_)) => {
            return Err(section.missing("store", "the path of the store with this digest"));
        }
    };
    Ok(Amendment { step, mix, ban, store })
}

fn documents(table: &Section, source: &str) -> Result<BTreeSet<u64>> {
    let wanted = "a list of documents, by their numbers in the source: [17, 230]";
    let refused =
        || table.fault(source, format!("`ban.{source}` names no documents")).wanted(wanted);
    let list = table.value(source)?.and_then(|value| value.as_array()).ok_or_else(refused)?;
    let number = |value: &toml_edit::Value| u64::try_from(value.as_integer()?).ok();
    let numbers: Option<BTreeSet<u64>> = list.iter().map(number).collect();
    numbers.filter(|numbers| !numbers.is_empty()).ok_or_else(refused)
}

/// The phase of a step.
fn phase_at(phases: &[Phase], step: u64) -> Option<usize> {
    let mut last = 0;
    phases.iter().position(|phase| {
        last += phase.steps;
        step <= last
    })
}

fn check_mix(section: &Section, before: &Phase, mix: &BTreeMap<String, Ratio>) -> Result<()> {
    let after = Phase { mix: mix.clone(), ..before.clone() };
    let Some(weights) = after.weights() else {
        return Err(section.fault("mix", "these weights are too fine for each other").wanted(SUM));
    };
    if before.mix.keys().eq(mix.keys()) && before.weights() == Some(weights) {
        return Err(section.fault("mix", "this is the mix that the phase has already"));
    }
    Ok(())
}

fn check_bans(
    section: &Section,
    before: &[Amendment],
    ban: &BTreeMap<String, BTreeSet<u64>>,
) -> Result<()> {
    for (source, documents) in ban {
        let banned = before.iter().filter_map(|one| one.ban.get(source));
        if let Some(twice) = banned.flat_map(|banned| banned.intersection(documents)).next() {
            let what = format!("document {twice} of {source} is banned already");
            return Err(section.fault("ban", what));
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
