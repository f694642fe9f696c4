//! Resolves what a corpus file names: globs, formats and evaluation sets, once.

use std::collections::BTreeMap;
use std::path::Path;

use contract::{Fault, Identity, Result, counted, note};
use serde::{Deserialize, Serialize};
use store::Location;

use super::spec::{MappingSpec, SourceSpec, Spec, StepSpec};
use super::{Corpus, Source, SourceFile, files};
use crate::recipe::chat::{ChatFile, Rendered};
use crate::recipe::compare::{Compare, Decontaminate};
use crate::recipe::mapping::Mapping;
use crate::recipe::{Recipe, Step};
use crate::source::{Format, Place, kinds};

/// The files that were found for a corpus file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Inventory {
    tokenizer: Option<Place>,
    pub(crate) sources: Vec<FoundSource>,
}

/// The files that were found for one source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FoundSource {
    /// Its files, sorted.
    pub(crate) files: Vec<SourceFile>,
    /// For each of its steps that compare with evaluation sets, these files and their content.
    sets: Vec<Vec<(SourceFile, Identity)>>,
    /// The file of its chat template.
    chat: Option<ChatFile>,
}

impl Inventory {
    /// The inventory of a corpus, for processes that work in other folders.
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
                chat: match &source.recipe.mapping {
                    Some(Mapping::Rendered(chat)) => Some(chat.file.clone()),
                    _ => None,
                },
            })
        };
        Ok(Inventory {
            tokenizer: corpus.tokenizer.as_ref().map(|it| it.absolute().map(Place)).transpose()?,
            sources: corpus.sources.iter().map(source).collect::<Result<_>>()?,
        })
    }
}

fn whole(file: &SourceFile) -> Result<SourceFile> {
    Ok(SourceFile { path: file.path.absolute()?, ..file.clone() })
}

impl Spec {
    /// Finds the inputs; paths are relative to the folder of the corpus file `file`.
    pub(super) fn find(&self, file: &Location) -> Result<Inventory> {
        let folder = &file.folder();
        let mut real = Taken::new();
        let mut source = |source: &SourceSpec| -> Result<FoundSource> {
            let sets = source.steps.iter().filter_map(|(_, step)| match step {
                StepSpec::Decontaminate(_, patterns) => Some(patterns),
                StepSpec::Whole(_) => None,
            });
            let files = found(source, folder)?;
            for file in &files {
                real.entry(file.real.clone())
                    .or_default()
                    .push((source.name.clone(), file.file.shown.clone()));
            }
            let files = files.into_iter().map(|found| found.file).collect();
            let sets = sets.map(|patterns| identified(patterns, folder));
            let chat = match &source.mapping {
                Some(MappingSpec::Rendered(chat)) => Some(
                    storage::resolve(folder, &chat.template)
                        .and_then(|file| ChatFile::read(&file))
                        .map_err(|fault| fault.or_at(|| chat.place.clone()))?,
                ),
                _ => None,
            };
            Ok(FoundSource { files, sets: sets.collect::<Result<_>>()?, chat })
        };
        let tokenizer = self.tokenizer.as_ref().map(|name| storage::resolve(folder, name));
        let tokenizer = tokenizer.transpose().map_err(|fault| fault.or_at(|| file.to_string()))?;
        let sources = self.sources.iter().map(&mut source).collect::<Result<_>>()?;
        taken_twice(&real).iter().for_each(|told| note!("note: {file}: {told}"));
        Ok(Inventory { tokenizer: tokenizer.map(Place), sources })
    }

    /// The corpus of the file `file` with this text, from its inventory.
    pub(super) fn resolve(self, file: Location, text: &str, found: Inventory) -> Result<Corpus> {
        if found.sources.len() != self.sources.len() {
            return Err(not_of_this());
        }
        let sources = self.sources.into_iter().zip(found.sources);
        Ok(Corpus {
            file,
            text: text.to_owned(),
            tokenizer: found.tokenizer.map(|Place(place)| place),
            unit: self.unit,
            validation: self.validation,
            begin: self.begin,
            end: self.end,
            part_bytes: self.part_bytes,
            max_document_bytes: self.max_document_bytes,
            on_error: self.on_error,
            sources: sources.map(|(spec, found)| resolved(spec, found)).collect::<Result<_>>()?,
        })
    }
}

/// The hint for a file that is named twice.
const TWICE: &str = "a document that should count twice needs max_epochs, not two names";

/// The inventory belongs to another file.
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
    let mapping = match spec.mapping {
        None => None,
        Some(MappingSpec::Whole(mapping)) => Some(mapping),
        Some(MappingSpec::Rendered(chat)) => {
            let file = found.chat.ok_or_else(not_of_this)?;
            let rendered = Rendered::new(chat.paths, file, chat.date);
            Some(Mapping::Rendered(rendered.map_err(|fault| fault.or_at(|| chat.place))?))
        }
    };
    let recipe = Recipe { mapping, steps };
    Ok(Source { name: spec.name, files: found.files, fields: spec.fields, recipe })
}

/// By location of a file, the sources that name it, and its name in each.
type Taken = BTreeMap<Location, Vec<(String, String)>>;

/// Warnings about files that two sources share, which duplicates their documents but may be intended: a line per pair
/// of sources.
fn taken_twice(taken: &Taken) -> Vec<String> {
    let mut shared: BTreeMap<[&str; 2], (String, u64)> = BTreeMap::new();
    for sources in taken.values() {
        for pair in sources.windows(2) {
            let ((first, shown), (second, _)) = (&pair[0], &pair[1]);
            let slot = shared.entry([first, second]).or_insert_with(|| (shown.clone(), 0));
            slot.1 += 1;
        }
    }
    let line = |([first, second], (shown, files)): ([&str; 2], (String, u64))| {
        let more = match files {
            1 => "is".to_owned(),
            files => format!("and {} are", counted(files - 1, "other file")),
        };
        format!("{shown:?} {more} taken by source {first} and by source {second}")
    };
    shared.into_iter().map(line).collect()
}

/// A file of a source, and its location with all links resolved.
struct FoundFile {
    file: SourceFile,
    real: Location,
}

/// The files of a source.
fn found(spec: &SourceSpec, folder: &Location) -> Result<Vec<FoundFile>> {
    let mut files = Vec::new();
    for found in files::find(folder, &spec.files, TWICE)? {
        let format = spec.format.or_else(|| Format::guess(Path::new(&found.path.name())));
        let format = format.ok_or_else(|| unknown_ending(&found))?;
        if !format.is_stream() && Format::is_compressed(&found.shown) {
            return Err(compressed(&found, format));
        }
        let file = SourceFile::new(found.path, found.shown, format);
        files.push(FoundFile { file, real: found.real });
    }
    if spec.mapping.is_some() && files.iter().any(|found| found.file.format == Format::Text) {
        return Err(Fault::usage("`template` and `chat` need records, and a text has none")
            .at(spec.mapping_place.clone())
            .found(format!("a file of format {}", Format::Text.name()))
            .hint("write records: JSON Lines, Parquet or Arrow"));
    }
    Ok(files)
}

/// The files that a step compares documents with, and their content.
fn identified(
    patterns: &[files::Pattern],
    folder: &Location,
) -> Result<Vec<(SourceFile, Identity)>> {
    let file = |found: files::FoundFile| -> Result<(SourceFile, Identity)> {
        let (_, identity) = found.path.content()?;
        Ok((SourceFile::new(found.path, found.shown, Format::JsonLines), identity))
    };
    let hint = "name each file once: an item counts once, however often it is named";
    files::find(folder, patterns, hint)?.into_iter().map(file).collect()
}

/// A columnar file within a compressed stream: its decoder would only report damage.
fn compressed(found: &files::FoundFile, format: Format) -> Fault {
    Fault::usage(format!("a file of format {} is not read from a compressed stream", format.name()))
        .at(found.named_at.clone())
        .found(&found.shown)
        .wanted("the file itself: its pages or buffers are compressed within it")
        .hint("decompress it with gunzip or unzstd, and name the result")
}

/// A table read as one long text would be a silent loss.
fn unknown_ending(found: &files::FoundFile) -> Fault {
    if let Some(kind) = kinds::unread(&found.shown) {
        return Fault::usage(format!("a file packed by {kind} is not read"))
            .at(found.named_at.clone())
            .found(&found.shown)
            .wanted("a file as it is, or with .gz or .zst behind its ending")
            .hint("unpack it, or compress it with gzip or zstd instead, and name the result");
    }
    Fault::usage("the name of this file does not say what it holds")
        .at(found.named_at.clone())
        .found(&found.shown)
        .wanted("an ending of JSON Lines, Parquet, Arrow or text, or `format`")
        .hint(
            "format = \"text\" makes a document of each file; convert CSV and TSV to Parquet first",
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Workbench, json_lines};

    #[test]
    fn a_file_that_two_sources_take_is_told() {
        let bench = Workbench::new(9);
        bench.write("a/x.jsonl", json_lines(0, 3));
        std::os::unix::fs::symlink("a", bench.path("b")).unwrap();
        let source = |name: &str, files: &str| {
            format!("[[source]]\nname = \"{name}\"\nfiles = [\"{files}\"]\n")
        };
        let corpus = |text: String| Corpus::read(bench.write("corpus.toml", text)).unwrap();
        let text = source("one", "web-*.jsonl")
            + &source("two", "{web-0,a/x}.jsonl")
            + &source("three", "b/x.jsonl");
        let mut taken = Taken::new();
        for source in &corpus(text).sources {
            for file in &source.files {
                let real = std::fs::canonicalize(file.path.local().unwrap()).unwrap();
                taken
                    .entry(real.into())
                    .or_default()
                    .push((source.name.clone(), file.shown.clone()));
            }
        }
        let told = [
            "\"web-0.jsonl\" is taken by source one and by source two",
            "\"a/x.jsonl\" is taken by source two and by source three",
        ];
        assert_eq!(taken_twice(&taken), told);
        for sources in taken.values_mut() {
            *sources = vec![("one".into(), "x".into()), ("two".into(), "x".into())];
        }
        assert_eq!(
            taken_twice(&taken),
            ["\"x\" and 2 other files are taken by source one and by source two"]
        );
    }

    #[test]
    fn a_columnar_file_is_not_compressed_as_a_whole() {
        let bench = Workbench::new(3);
        for (name, keys) in
            [("x.parquet.gz", ""), ("x.arrow.ZST", ""), ("x.gz", "format = \"arrow\"\n")]
        {
            bench.write(name, "whatever");
            let text = format!("[[source]]\nname = \"x\"\nfiles = [\"{name}\"]\n{keys}");
            let fault = Corpus::read(bench.write("corpus.toml", text)).map(drop).unwrap_err();
            assert_eq!(fault.class(), contract::Class::Usage);
            let told = fault.to_string();
            assert!(told.contains(name) && told.contains("decompress it"), "{told}");
        }
    }
}
