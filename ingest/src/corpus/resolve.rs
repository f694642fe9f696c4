//! From what a corpus file says to what lies on the machine: globs, formats and evaluation sets, once.

use std::path::Path;

use contract::{Fault, Result};
use store::Location;

use super::parse::{SourceSpec, Spec};
use super::steps::StepSpec;
use super::{Corpus, Source, SourceFile, files};
use crate::recipe::compare::{Compare, Decontaminate};
use crate::recipe::{Recipe, Step};
use crate::source::Format;

impl Spec {
    /// Finds the inputs; paths start at the folder of the corpus file `file`.
    pub fn resolve(self, file: Location) -> Result<Corpus> {
        let folder = file.folder();
        let sources = self.sources.into_iter().map(|source| resolved(source, &folder));
        let tokenizer = self.tokenizer.map(|name| storage::resolve(&folder, &name));
        Ok(Corpus {
            tokenizer: tokenizer.transpose().map_err(|fault| fault.or_at(|| file.to_string()))?,
            unit: self.unit,
            validation: self.validation,
            begin: self.begin,
            end: self.end,
            shard_tokens: self.shard_tokens,
            max_document_bytes: self.max_document_bytes,
            on_error: self.on_error,
            sources: sources.collect::<Result<_>>()?,
            file,
        })
    }
}

fn resolved(spec: SourceSpec, folder: &Location) -> Result<Source> {
    let mut files = Vec::new();
    for found in files::find(folder, &spec.files)? {
        let format = spec.format.or_else(|| Format::guess(Path::new(&found.path.name())));
        let format = format.ok_or_else(|| unknown_ending(&found))?;
        files.push(SourceFile { path: found.path, shown: found.shown, format });
    }
    if spec.mapping.is_some() && files.iter().any(|file| file.format == Format::Text) {
        return Err(Fault::usage("`template` and `chat` need records, and a text has none")
            .at(spec.mapping_place)
            .found(format!("a file of format {}", Format::Text.name()))
            .hint("write records: JSON Lines, Parquet or Arrow"));
    }
    let steps =
        spec.steps.into_iter().map(|(number, step)| Ok((number, identified(step, folder)?)));
    let recipe = Recipe { mapping: spec.mapping, steps: steps.collect::<Result<_>>()? };
    Ok(Source { name: spec.name, files, fields: spec.fields, recipe, taken: None })
}

/// A step with the files that it compares documents with.
fn identified(step: StepSpec, folder: &Location) -> Result<Step> {
    let (rules, sets) = match step {
        StepSpec::Whole(step) => return Ok(step),
        StepSpec::Decontaminate(rules, sets) => (rules, sets),
    };
    let file = |found: files::Found| SourceFile {
        path: found.path,
        shown: found.shown,
        format: Format::JsonLines,
    };
    let found = files::find(folder, &sets)?;
    let step = Decontaminate::new(rules, found.into_iter().map(file).collect())?;
    Ok(Step::Compare(Compare::Decontaminate(step)))
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
