//! From what a corpus file says to what lies on the machine: globs, formats and evaluation sets, once.

use std::path::Path;

use contract::{Fault, Identity, Result};
use serde::{Deserialize, Serialize};
use store::Location;

use super::spec::{SourceSpec, Spec, StepSpec};
use super::{Corpus, Source, SourceFile, files};
use crate::recipe::compare::{Compare, Decontaminate};
use crate::recipe::{Recipe, Step};
use crate::source::{Format, place};

/// What was found of what a corpus file names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Found {
    #[serde(with = "place::optional")]
    tokenizer: Option<Location>,
    pub(crate) sources: Vec<FoundSource>,
}

/// What was found for one source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FoundSource {
    /// Its files, sorted.
    pub(crate) files: Vec<SourceFile>,
    /// For each of its steps that compare documents with evaluation sets, these files and what they held.
    sets: Vec<Vec<(SourceFile, Identity)>>,
}

impl Found {
    /// What was found of a corpus, for processes that work in other folders.
    pub(crate) fn of(corpus: &Corpus) -> Result<Self> {
        let source = |source: &Source| -> Result<FoundSource> {
            let sets = source.recipe.steps.iter().filter_map(|(_, step)| match step {
                Step::Compare(Compare::Decontaminate(step)) => Some(&step.files),
                _ => None,
            });
            let set = |set: &Vec<(SourceFile, Identity)>| -> Result<Vec<(SourceFile, Identity)>> {
                set.iter().map(|(file, identity)| Ok((whole(file)?, *identity))).collect()
            };
            Ok(FoundSource {
                files: source.files.iter().map(whole).collect::<Result<_>>()?,
                sets: sets.map(set).collect::<Result<_>>()?,
            })
        };
        Ok(Found {
            tokenizer: corpus.tokenizer.as_ref().map(Location::absolute).transpose()?,
            sources: corpus.sources.iter().map(source).collect::<Result<_>>()?,
        })
    }
}

fn whole(file: &SourceFile) -> Result<SourceFile> {
    Ok(SourceFile { path: file.path.absolute()?, ..file.clone() })
}

impl Spec {
    /// Finds the inputs; paths start at the folder of the corpus file `file`.
    pub(super) fn find(&self, file: &Location) -> Result<Found> {
        let folder = &file.folder();
        let source = |source: &SourceSpec| -> Result<FoundSource> {
            let sets = source.steps.iter().filter_map(|(_, step)| match step {
                StepSpec::Decontaminate(_, patterns) => Some(patterns),
                StepSpec::Whole(_) => None,
            });
            let files = found(source, folder)?;
            let sets = sets.map(|patterns| identified(patterns, folder));
            Ok(FoundSource { files, sets: sets.collect::<Result<_>>()? })
        };
        let tokenizer = self.tokenizer.as_ref().map(|name| storage::resolve(folder, name));
        Ok(Found {
            tokenizer: tokenizer.transpose().map_err(|fault| fault.or_at(|| file.to_string()))?,
            sources: self.sources.iter().map(source).collect::<Result<_>>()?,
        })
    }

    /// The corpus of the file `file` with this text, for which this was found.
    pub(super) fn resolve(self, file: Location, text: &str, found: Found) -> Result<Corpus> {
        if found.sources.len() != self.sources.len() {
            return Err(not_of_this());
        }
        let sources = self.sources.into_iter().zip(found.sources);
        Ok(Corpus {
            file,
            text: text.to_owned(),
            tokenizer: found.tokenizer,
            unit: self.unit,
            validation: self.validation,
            begin: self.begin,
            end: self.end,
            shard_tokens: self.shard_tokens,
            max_document_bytes: self.max_document_bytes,
            on_error: self.on_error,
            sources: sources.map(|(spec, found)| resolved(spec, found)).collect::<Result<_>>()?,
        })
    }
}

/// What was found is of another file.
fn not_of_this() -> Fault {
    Fault::data("a plan does not hold what its corpus file names").hint("plan again")
}

fn resolved(spec: SourceSpec, found: FoundSource) -> Result<Source> {
    let mut sets = found.sets.into_iter();
    let step = |(number, step): (usize, StepSpec)| -> Result<(usize, Step)> {
        let step = match step {
            StepSpec::Whole(step) => step,
            StepSpec::Decontaminate(rules, _) => {
                let files = sets.next().ok_or_else(not_of_this)?;
                Step::Compare(Compare::Decontaminate(Decontaminate { rules, files }))
            }
        };
        Ok((number, step))
    };
    let steps = spec.steps.into_iter().map(step).collect::<Result<_>>()?;
    let recipe = Recipe { mapping: spec.mapping, steps };
    Ok(Source { name: spec.name, files: found.files, fields: spec.fields, recipe })
}

/// The files of a source.
fn found(spec: &SourceSpec, folder: &Location) -> Result<Vec<SourceFile>> {
    let mut files = Vec::new();
    for found in files::find(folder, &spec.files)? {
        let format = spec.format.or_else(|| Format::guess(Path::new(&found.path.name())));
        let format = format.ok_or_else(|| unknown_ending(&found))?;
        files.push(SourceFile { path: found.path, shown: found.shown, format });
    }
    if spec.mapping.is_some() && files.iter().any(|file| file.format == Format::Text) {
        return Err(Fault::usage("`template` and `chat` need records, and a text has none")
            .at(spec.mapping_place.clone())
            .found(format!("a file of format {}", Format::Text.name()))
            .hint("write records: JSON Lines, Parquet or Arrow"));
    }
    Ok(files)
}

/// The files that a step compares documents with, and what they hold.
fn identified(
    patterns: &[files::Pattern],
    folder: &Location,
) -> Result<Vec<(SourceFile, Identity)>> {
    let file = |found: files::Found| -> Result<(SourceFile, Identity)> {
        let (_, identity) = found.path.content()?;
        let format = Format::JsonLines;
        Ok((SourceFile { path: found.path, shown: found.shown, format }, identity))
    };
    files::find(folder, patterns)?.into_iter().map(file).collect()
}

/// A table taken for one long text would be a silent loss.
fn unknown_ending(found: &files::Found) -> Fault {
    Fault::usage("the name of this file does not say what it holds")
        .at(found.named_at.clone())
        .found(&found.shown)
        .wanted("an ending of JSON Lines, Parquet, Arrow or text, or `format`")
        .hint(
            "format = \"text\" makes a document of each file; convert CSV and TSV to Parquet first",
        )
}
