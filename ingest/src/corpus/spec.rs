//! The content of a corpus file, before any file access.

use contract::Ratio;

use super::OnError;
use super::files::Pattern;
use crate::recipe::chat::Paths;
use crate::recipe::compare::{Compare, Rules};
use crate::recipe::mapping::Mapping;
use crate::recipe::{Date, Step};
use crate::source::{Fields, Format};

/// A parsed corpus file.
#[derive(Clone, Debug)]
pub struct Spec {
    pub(super) tokenizer: Option<String>,
    pub(super) unit: u64,
    pub(super) validation: Ratio,
    pub(super) begin: Option<String>,
    pub(super) end: Option<String>,
    pub(super) part_bytes: u64,
    pub(super) max_document_bytes: u64,
    pub(super) on_error: OnError,
    pub(super) sources: Vec<SourceSpec>,
}

/// A parsed `[[source]]`.
#[derive(Clone, Debug)]
pub(super) struct SourceSpec {
    pub(super) name: String,
    pub(super) files: Vec<Pattern>,
    pub(super) format: Option<Format>,
    pub(super) fields: Fields,
    pub(super) mapping: Option<MappingSpec>,
    /// The place of the key that makes a text from several fields.
    pub(super) mapping_place: String,
    /// The steps, each with its number in the corpus file.
    pub(super) steps: Vec<(usize, StepSpec)>,
}

/// How a corpus file makes a text from several fields.
#[derive(Clone, Debug)]
pub(super) enum MappingSpec {
    /// A mapping without a file.
    Whole(Mapping),
    /// A chat with a template file.
    Rendered(ChatSpec),
}

/// A chat with a template file.
#[derive(Clone, Debug)]
pub(super) struct ChatSpec {
    pub(super) paths: Paths,
    /// The name of the file.
    pub(super) template: String,
    pub(super) date: Option<Date>,
    /// The place of its name in the corpus file.
    pub(super) place: String,
}

/// A parsed step.
#[derive(Clone, Debug)]
pub(super) enum StepSpec {
    /// A step without files.
    Whole(Step),
    /// A step that compares documents with those of some files.
    Decontaminate(Rules, Vec<Pattern>),
}

impl StepSpec {
    /// Whether it compares documents.
    pub(super) fn compares(&self) -> bool {
        !matches!(self, StepSpec::Whole(Step::Filter(_)))
    }

    /// Whether it removes bytes of documents that occur in others.
    pub(super) fn is_repeats(&self) -> bool {
        matches!(self, StepSpec::Whole(Step::Compare(Compare::Repeats(_))))
    }
}
