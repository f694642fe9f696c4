//! The only loop that runs a document through the steps of a recipe.
//!
//! It has four users: the dedup scan (which decides), the build (which applies the scan's decision and changes texts),
//! the sample of `zdata inspect` (which shows every step) and the training of a tokenizer (where documents are not
//! compared). They differ in which steps run, in the result of a comparing step, and in what they record: each is a
//! [`Passage`].

use std::ops::Range;

use contract::{Fault, Result};

use super::compare::Compare;
use super::{Recipe, Step};
use crate::filters::words::Text;
use crate::filters::{Count, Dropped, Effect};
use crate::source::Document;

/// Counts the tokens of a text, with its control tokens as tokens or as text.
pub(crate) type CountIn<'a> = dyn Fn(bool, &str) -> Result<usize> + Sync + 'a;

/// A user of the loop.
pub(crate) trait Passage {
    /// Whether the step at `place` runs.
    fn wants(&self, _place: usize, _step: &Step) -> bool {
        true
    }

    /// The result of the comparing step with this number in the corpus file.
    fn compare(&mut self, number: usize, step: &Compare, document: &Document) -> Result<Effect>;

    /// Called with the effect of the step at `place`, before the document changes.
    fn hear(&mut self, _place: usize, _document: &Document, _effect: &Effect) {}
}

/// The outcome for a document.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It passed all steps.
    Through,
    /// A step dropped it.
    Dropped {
        /// The step's number in the corpus file.
        number: usize,
        /// Why.
        dropped: Dropped,
    },
    /// A filter that counts tokens failed.
    Refused(Fault),
}

/// A record without a text to prepare.
#[derive(Debug)]
pub(crate) struct NoText {
    /// The reason under which it is counted.
    pub(crate) reason: &'static str,
    /// The same as an error.
    pub(crate) fault: Fault,
}

impl Recipe {
    /// Makes the text that the first step gets.
    pub(crate) fn text(&self, document: &mut Document) -> std::result::Result<(), NoText> {
        let Some(mapping) = &self.mapping else { return Ok(()) };
        document.text = mapping.text(&document.text).map_err(|fault| NoText {
            reason: "missing text",
            fault: fault
                .hint("correct it, or set on_error = \"skip\" to count such records and continue"),
        })?;
        match document.text.is_empty() {
            true => Err(NoText { reason: "empty", fault: Fault::data("the document is empty") }),
            false => Ok(()),
        }
    }

    /// Runs a document through the steps at `places` that `passage` wants, in order, until one drops it.
    pub(crate) fn run(
        &self,
        places: Range<usize>,
        document: &mut Document,
        count: Option<&CountIn<'_>>,
        passage: &mut impl Passage,
    ) -> Result<Outcome> {
        let controls = self.means_controls();
        let count = count.map(|count| move |text: &str| count(controls, text));
        let count = count.as_ref().map(|count| count as &Count<'_>);
        // Words are cut once for all filters between two changes of the text.
        let mut words = None;
        for place in places {
            let (number, step) = &self.steps[place];
            if !passage.wants(place, step) {
                continue;
            }
            let effect = match step {
                Step::Compare(step) => passage.compare(*number, step, document)?,
                Step::Filter(filter) => {
                    let text = Text::with_words(&document.text, words.take());
                    match filter.run(&text, count) {
                        Err(fault) => return Ok(Outcome::Refused(fault)),
                        Ok(effect) => {
                            words = text.into_words();
                            effect
                        }
                    }
                }
            };
            passage.hear(place, document, &effect);
            match effect {
                Effect::Kept => {}
                Effect::Changed(text) => (document.text, words) = (text, None),
                Effect::Dropped(dropped) => {
                    return Ok(Outcome::Dropped { number: *number, dropped });
                }
            }
        }
        Ok(Outcome::Through)
    }
}
