//! What the comparing steps need of every document, on disk.
//!
//! Bytes of a document: 32 for `exact-duplicates`, `16 + 8 * bands` for `near-duplicates`, 24 and its text for
//! `repeated-substrings`.

use contract::{Digest, Fault, Result};

use crate::dedup::Doc;
use crate::dedup::observe::Mark;
use crate::dedup::repeats::Texts;
use crate::dedup::sorter::{Scratch, Writer};
use crate::recipe::compare::Compare;

/// What one comparing step needs of all documents that reached it.
pub(super) enum Marks {
    /// The digest of the text, and the document.
    Exact(Writer<4>),
    /// The documents, and their keys in each band.
    Near {
        documents: Writer<2>,
        bands: Vec<Writer<1>>,
    },
    Texts(Texts),
}

impl Marks {
    /// None yet; `None` if the step compares no documents with each other.
    pub(super) fn new(step: &Compare, scratch: &Scratch) -> Result<Option<Self>> {
        Ok(Some(match step {
            Compare::Exact(_) => Marks::Exact(scratch.writer()?),
            Compare::Near(near) => Marks::Near {
                documents: scratch.writer()?,
                bands: (0..near.bands).map(|_| scratch.writer()).collect::<Result<_>>()?,
            },
            Compare::Repeats(_) => Marks::Texts(Texts::create(scratch)?),
            Compare::Decontaminate(_) => return Ok(None),
        }))
    }

    pub(super) fn push(&mut self, document: Doc, mark: Mark) -> Result<()> {
        let [place, at] = document;
        match (self, mark) {
            (Marks::Exact(texts), Mark::Content(Digest(content))) => {
                texts.push([(content >> 64) as u64, content as u64, place, at])
            }
            (Marks::Near { documents, bands }, Mark::Bands(keys)) => {
                documents.push(document)?;
                bands.iter_mut().zip(keys).try_for_each(|(band, key)| band.push([key]))
            }
            (Marks::Texts(texts), Mark::Text(text)) => texts.push(document, &text),
            _ => Err(Fault::bug("a mark of another step")),
        }
    }
}
