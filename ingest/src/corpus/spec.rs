//! What a corpus file says, before anything is looked for.

use contract::Ratio;

use super::OnError;
use super::files::Pattern;
use crate::recipe::chat::Paths;
use crate::recipe::compare::{Compare, Rules};
use crate::recipe::mapping::Mapping;
use crate::recipe::{Date, Step};
use crate::source::{Fields, Format};

/// What a corpus file says.
#[derive(Clone, Debug)]
pub struct Spec {
    pub(super) tokenizer: Option<String>,
    pub(super) unit: u64,
    pub(super) validation: Ratio,
    pub(super) begin: Option<String>,
    pub(super) end: Option<String>,
    pub(super) shard_tokens: u64,
    pub(super) max_document_bytes: u64,
    pub(super) on_error: OnError,
    pub(super) sources: Vec<SourceSpec>,
}

/// What one `[[source]]` says.
#[derive(Clone, Debug)]
pub(super) struct SourceSpec {
    pub(super) name: String,
    pub(super) files: Vec<Pattern>,
    pub(super) format: Option<Format>,
    pub(super) fields: Fields,
    pub(super) mapping: Option<MappingSpec>,
    /// Where it says that a text is made of several fields.
    pub(super) mapping_place: String,
    /// The steps, each with its number in the corpus file.
    pub(super) steps: Vec<(usize, StepSpec)>,
}

/// What makes a text of several fields, as a corpus file says it.
#[derive(Clone, Debug)]
pub(super) enum MappingSpec {
    /// One that needs nothing else.
    Whole(Mapping),
    /// A chat by the template of a file.
    Rendered(ChatSpec),
}

/// A chat by the template of a file.
#[derive(Clone, Debug)]
pub(super) struct ChatSpec {
    pub(super) paths: Paths,
    /// What the file is called.
    pub(super) template: String,
    pub(super) date: Option<Date>,
    /// Where the file is named.
    pub(super) place: String,
}

/// A step as a corpus file says it.
#[derive(Clone, Debug)]
pub(super) enum StepSpec {
    /// One that needs nothing else.
    Whole(Step),
    /// One that compares documents with those of some files.
    Decontaminate(Rules, Vec<Pattern>),
}

impl StepSpec {
    /// Whether it compares documents.
    pub(super) fn compares(&self) -> bool {
        !matches!(self, StepSpec::Whole(Step::Filter(_)))
    }

    /// Whether it takes bytes of documents that others know.
    pub(super) fn is_repeats(&self) -> bool {
        matches!(self, StepSpec::Whole(Step::Compare(Compare::Repeats(_))))
    }
}
