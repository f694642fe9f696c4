//! Recipes: the processing of a document between its file and its tokens, as `corpus.toml` declares it, and its order.
//!
//! A source has a recipe: how a record becomes a text, then steps in the order written. Most steps process one text at
//! a time (`filters`); they run on the workers, between parsing and encoding. Some compare a document with others or
//! with evaluation sets (`dedup`): if a corpus has such a step, a scan reads it once before the build and decides.
//!
//! Invariant: the result for a document depends only on the corpus and its inputs, not on workers, kills or the order
//! in which threads finish.
//! Invariant: a dropped document is counted under one reason, and what steps add to and remove from kept ones is
//! counted by step: the accounting balances to zero in documents and in bytes.
//! Invariant: a source without steps has no overhead, and keeps its identity and its bits.

pub(crate) mod chat;
pub(crate) mod compare;
mod jinja;
pub(crate) mod mapping;
pub(crate) mod run;
#[cfg(test)]
pub(crate) mod tests;
mod written;

use crate::filters::Filter;
use compare::Compare;
use contract::framed::quoted;
pub(crate) use jinja::Date;
use mapping::Mapping;

/// Whether a record was dropped by a step, and not because it cannot be read. The reasons of a step begin with its name
/// and a colon.
pub(crate) fn is_reason(reason: &str) -> bool {
    reason.contains(": ")
}

/// The first steps in which two preparations differ, since the full texts are too long to read.
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

/// The processing of one source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recipe {
    /// How a record becomes a text, if one field is not enough.
    pub(crate) mapping: Option<Mapping>,
    /// The steps in order, each with its number in the corpus file.
    pub(crate) steps: Vec<(usize, Step)>,
}

impl Recipe {
    /// Whether nothing is done.
    pub(crate) fn is_empty(&self) -> bool {
        self.mapping.is_none() && self.steps.is_empty()
    }

    /// Whether control tokens in its texts are encoded as tokens.
    pub(crate) fn means_controls(&self) -> bool {
        matches!(self.mapping, Some(Mapping::Rendered(_)))
    }

    /// How many steps the dedup scan runs: up to the last comparing one.
    pub(crate) fn scanned(&self) -> usize {
        let last = self.steps.iter().rposition(|(_, step)| step.compares());
        last.map_or(0, |last| last + 1)
    }

    /// Whether the step at `place` runs after a scan: filtering is already done; changes of a text are repeated.
    pub(crate) fn runs_again(&self, place: usize) -> bool {
        let step = self.steps.get(place);
        place >= self.scanned() || step.is_some_and(|(_, step)| step.changes())
    }

    /// The places of the steps that run during encoding.
    pub(crate) fn encoding_places(&self) -> Vec<usize> {
        (0..self.steps.len()).filter(|place| self.runs_again(*place)).collect()
    }

    /// The scan's work, as canonical text; with the names of evaluation sets, since matches contain them.
    pub(crate) fn describe_scan(&self) -> String {
        let steps = self.steps[..self.scanned()].to_vec();
        let sets = steps.iter().filter_map(|(_, step)| match step {
            Step::Compare(Compare::Decontaminate(step)) => Some(&step.files),
            _ => None,
        });
        let sets: Vec<String> = sets.flatten().map(|(file, _)| quoted(&file.shown)).collect();
        let recipe = Recipe { mapping: self.mapping.clone(), steps: steps.clone() };
        format!("{} sets=[{}]", recipe.describe(), sets.join(" "))
    }

    /// The work during encoding, as canonical text.
    pub(crate) fn describe_encoding(&self) -> String {
        let steps = self.encoding_places().into_iter().map(|place| self.steps[place].clone());
        Recipe { mapping: self.mapping.clone(), steps: steps.collect() }.describe()
    }

    /// Whether the scan counts tokens.
    pub(crate) fn scan_counts_tokens(&self) -> bool {
        let steps = &self.steps[..self.scanned()];
        steps.iter().any(|(_, step)| step.trims())
    }

    /// A step's name for users: its place in the recipe and its name.
    pub(crate) fn step_name(&self, number: usize) -> String {
        let name = self.steps.get(number).map_or("mapping", |(_, step)| step.name());
        format!("{:02} {name}", number + 1)
    }

    /// The recipe as canonical text, appended to the source's description: empty if nothing is done.
    pub(crate) fn describe(&self) -> String {
        let mapping = self.mapping.iter().map(Mapping::describe);
        let steps = self.steps.iter().map(|(_, step)| step.describe());
        mapping.chain(steps).map(|part| format!(" | {part}")).collect()
    }
}

/// One step, with its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A step that processes one text at a time.
    Filter(Box<Filter>),
    /// A step that compares documents, and so needs a scan.
    Compare(Compare),
}

impl Step {
    /// Whether it is the step that trims.
    fn trims(&self) -> bool {
        matches!(self, Step::Filter(filter) if matches!(**filter, Filter::Trim(_)))
    }

    /// The step as canonical text.
    fn describe(&self) -> String {
        match self {
            Step::Filter(filter) => filter.describe(),
            Step::Compare(step) => step.describe(),
        }
    }

    /// Its name in `corpus.toml`.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Step::Filter(filter) => filter.name(),
            Step::Compare(step) => step.name(),
        }
    }

    /// Whether it compares a document with others, and so needs a scan.
    fn compares(&self) -> bool {
        matches!(self, Step::Compare(_))
    }

    /// Whether it may change a text.
    fn changes(&self) -> bool {
        match self {
            Step::Filter(filter) => filter.changes(),
            Step::Compare(step) => step.changes(),
        }
    }
}
