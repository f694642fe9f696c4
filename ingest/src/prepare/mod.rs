//! Preparation: what happens to a document between its file and its tokens, as `corpus.toml` declares it.
//!
//! A source has a recipe: how a record becomes a text, then steps in the order written. Most steps look at one text at
//! a time; they run on the workers, between parsing and encoding. Three compare a document with others (exact and near
//! duplicates, evaluation sets): if a corpus has one of them, a survey reads it once before the build and decides.
//!
//! Invariant: what becomes of a document is a function of the corpus and its inputs alone; workers, kills and the
//! order in which threads finish cannot matter.
//! Invariant: a document that does not go through is counted under one reason, and what steps add to and remove from
//! the others is counted by step: the ledger balances to zero in documents and in bytes.
//! Invariant: a source without steps pays nothing, and keeps its identity and its bits.

mod c4;
mod clean;
pub(crate) mod config;
mod decontaminate;
mod exact;
mod in_order;
mod look;
mod minhash;
mod normal;
mod quality;
mod record;
mod removed;
mod repetition;
mod run;
pub mod sample;
pub(crate) mod setting;
mod survey;
#[cfg(test)]
mod tests;
mod trim;
mod words;

use std::path::Path;

use contract::{Digest, Result};
use store::far;
use store::verify::{Damage, unread};
use store::{Change, FileRecord, PreparedRecord, SourceRecord};

pub(crate) use look::{Looked, Mark};
pub(crate) use removed::{FILE as REMOVED, List, cut as cut_list};
pub(crate) use run::{InFile, Prepared, Tools, Trace};
pub(crate) use survey::{Gathered, Seen, Survey, look_through};

/// A document that goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Drop {
    /// The step and its rule: what the ledger counts.
    pub(crate) reason: &'static str,
    /// What was found, for people.
    pub(crate) found: String,
}

impl Drop {
    fn new(reason: &'static str, found: impl ToString) -> Self {
        Drop { reason, found: found.to_string() }
    }
}

/// Whether a loss was decided by a step, and not by a record that cannot be read. Every reason of a step begins with
/// its name and a colon.
pub(crate) fn is_reason(reason: &str) -> bool {
    reason.contains(": ")
}

/// What is damaged of the lists that steps left in a source's folder.
pub(crate) fn damages(store: &Path, source: &SourceRecord) -> Result<Vec<Damage>> {
    let files = source.prepared.iter().flat_map(|prepared| &prepared.files);
    let damage = |file: &FileRecord| {
        let path = store.join(&source.name).join(&file.name);
        let what = match far::read(&path) {
            Err(error) => unread(&path, &error)?,
            Ok(bytes) if Digest::of_bytes(&bytes) == file.digest => return Ok(None),
            Ok(_) => "its digest is not the manifest's".to_owned(),
        };
        let file = format!("{}/{}", source.name, file.name);
        Ok(Some(Damage { file, what, block: None, documents: None }))
    };
    files.filter_map(|file| damage(file).transpose()).collect()
}

/// The first steps in which two preparations differ: nobody reads the whole of both.
pub(crate) fn first_difference<'a>(old: &'a str, new: &'a str) -> (&'a str, &'a str) {
    let (mut a, mut b) = (old.split(" | "), new.split(" | "));
    loop {
        match (a.next(), b.next()) {
            (Some(a), Some(b)) if a == b => {}
            (None, None) => return (old, new),
            (a, b) => return (a.unwrap_or("no such step"), b.unwrap_or("no such step")),
        }
    }
}

/// What is done to one source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recipe {
    /// How a record becomes a text, if one field is not enough.
    pub(crate) mapping: Option<record::Mapping>,
    /// The steps in order, each with its number in the corpus file.
    pub(crate) steps: Vec<(usize, Step)>,
}

impl Recipe {
    /// Whether nothing is done.
    pub(crate) fn is_empty(&self) -> bool {
        self.mapping.is_none() && self.steps.is_empty()
    }

    /// How many steps the survey takes documents through: up to the last that compares them.
    pub(crate) fn surveyed(&self) -> usize {
        let last = self.steps.iter().rposition(|(_, step)| step.compares());
        last.map_or(0, |last| last + 1)
    }

    /// Whether the step at `place` runs where a survey came before: that has judged; what changes a text is done again.
    fn runs_again(&self, place: usize) -> bool {
        let step = self.steps.get(place);
        place >= self.surveyed() || step.is_some_and(|(_, step)| step.changes())
    }

    /// The places of the steps that run while documents are encoded.
    pub(crate) fn encoding_places(&self) -> Vec<usize> {
        (0..self.steps.len()).filter(|place| self.runs_again(*place)).collect()
    }

    /// What the survey does, as canonical text; the sets of evaluation items by name too, since hits name them.
    pub(crate) fn describe_survey(&self) -> String {
        let steps = self.steps[..self.surveyed()].to_vec();
        let sets = steps.iter().filter_map(|(_, step)| match step {
            Step::Decontaminate(step) => Some(&step.files),
            _ => None,
        });
        let sets: Vec<&str> = sets.flatten().map(|(file, _)| file.shown.as_str()).collect();
        let surveyed = Recipe { mapping: self.mapping.clone(), steps: steps.clone() };
        format!("{} sets={sets:?}", surveyed.describe())
    }

    /// What is done while documents are encoded, as canonical text.
    pub(crate) fn describe_encoding(&self) -> String {
        let steps = self.encoding_places().into_iter().map(|place| self.steps[place].clone());
        Recipe { mapping: self.mapping.clone(), steps: steps.collect() }.describe()
    }

    /// Whether the survey counts tokens.
    pub(crate) fn survey_encodes(&self) -> bool {
        let steps = &self.steps[..self.surveyed()];
        steps.iter().any(|(_, step)| matches!(step, Step::Trim(_)))
    }

    /// Counts what one document that was kept went through.
    pub(crate) fn count(&self, trace: &Trace, record: &mut PreparedRecord) {
        record.read_bytes += trace.read;
        for (number, before, after) in &trace.changes {
            let name = self.step_name(*number);
            // In the order of the steps, which is that of their names' numbers.
            let slot = match record.changes.iter().position(|change| change.step == name) {
                Some(slot) => slot,
                None => {
                    let change = Change { step: name, documents: 0, added: 0, removed: 0 };
                    record.changes.push(change);
                    record.changes.sort_by(|a, b| a.step.cmp(&b.step));
                    let name = self.step_name(*number);
                    record.changes.iter().position(|c| c.step == name).unwrap_or_default()
                }
            };
            let change = &mut record.changes[slot];
            change.documents += 1;
            change.added += after.saturating_sub(*before);
            change.removed += before.saturating_sub(*after);
        }
    }

    /// A step as people call it: its place in the recipe and its name.
    pub(crate) fn step_name(&self, number: usize) -> String {
        let name = self.steps.get(number).map_or("mapping", |(_, step)| step.name());
        format!("{:02} {name}", number + 1)
    }

    /// The recipe as canonical text, to be added to what is said of a source: empty if nothing is done.
    pub(crate) fn describe(&self) -> String {
        let mapping = self.mapping.iter().map(record::Mapping::describe);
        let steps = self.steps.iter().map(|(_, step)| step.describe());
        mapping.chain(steps).map(|part| format!(" | {part}")).collect()
    }
}

/// One step, with its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Clean(clean::Clean),
    Length(quality::Length),
    GopherQuality(quality::GopherQuality),
    GopherRepetition(repetition::GopherRepetition),
    C4(c4::C4),
    FineWeb(quality::FineWeb),
    Exact(exact::Exact),
    Near(minhash::Near),
    Decontaminate(decontaminate::Decontaminate),
    Trim(trim::Trim),
}

impl Step {
    /// The step as canonical text.
    fn describe(&self) -> String {
        match self {
            Step::Clean(step) => step.describe(),
            Step::Length(step) => step.describe(),
            Step::GopherQuality(step) => step.describe(),
            Step::GopherRepetition(step) => step.describe(),
            Step::C4(step) => step.describe(),
            Step::FineWeb(step) => step.describe(),
            Step::Exact(step) => step.describe(),
            Step::Near(step) => step.describe(),
            Step::Decontaminate(step) => step.describe(),
            Step::Trim(step) => step.describe(),
        }
    }

    /// Its name in `corpus.toml`.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Step::Clean(_) => "clean",
            Step::Length(_) => "length",
            Step::GopherQuality(_) => "gopher-quality",
            Step::GopherRepetition(_) => "gopher-repetition",
            Step::C4(_) => "c4",
            Step::FineWeb(_) => "fineweb",
            Step::Exact(_) => "exact-duplicates",
            Step::Near(_) => "near-duplicates",
            Step::Decontaminate(_) => "decontaminate",
            Step::Trim(_) => "trim",
        }
    }

    /// Whether it compares a document with others, and so needs a survey.
    fn compares(&self) -> bool {
        matches!(self, Step::Exact(_) | Step::Near(_) | Step::Decontaminate(_))
    }

    /// Whether it may change a text.
    fn changes(&self) -> bool {
        matches!(self, Step::Clean(_) | Step::C4(_) | Step::Trim(_))
    }
}
