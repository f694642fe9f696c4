//! The survey: one pass over the inputs before the build, if a step compares documents with each other.
//!
//! Workers take each document through the steps up to the last that compares, and hand on, in input order, what that
//! step needs to know: a digest, a signature, hits. Then the steps are decided in their order: a document that one
//! removes is no candidate for the next. What is left is a list of the documents removed, in `STORE/SOURCE/removed.jsonl.zst`,
//! which the build reads. Whoever wants to know why a document is not in the store finds it there.
//!
//! State for each document: 10 bytes, 24 more for each step `exact-duplicates`, 4 more for each `near-duplicates`
//! (and `8 * bands` bytes on the disk while the survey runs; 20 in memory while one band is decided).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Identity, Result};
use rayon::slice::ParallelSliceMut as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use store::far;
use store::{FileRecord, SourceRecord, open, write};

use super::look::{Looked, Mark, Surveyor};
use super::minhash::Components;
use super::removed::{self, Removed};
use super::run::Tools;
use super::{Step, exact, in_order};
use crate::corpus::Corpus;
use crate::progress::Progress;
use crate::source::{self, Input, Limits, Slab};

/// What a finished survey found, in `STORE/.build/survey.json`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Survey {
    /// The inputs by source: whoever reads them later must find the same.
    pub(crate) inputs: Vec<Vec<Identity>>,
    /// The lists in each source's folder.
    pub(crate) files: Vec<Vec<FileRecord>>,
}

/// Where one file's documents begin in the tables.
struct Start {
    source: usize,
    file: usize,
    first: u32,
}

/// All documents that reached a comparing step, by one.
enum Column {
    Exact(Vec<exact::Entry>),
    Near { documents: Vec<u32>, bands: Vec<(PathBuf, BufWriter<File>)> },
}

/// What is known of every record with a text.
#[derive(Default)]
struct Table {
    starts: Vec<Start>,
    /// Group and row (see [`removed::address`]).
    at: Vec<u64>,
    /// The step that removes it (its number in the corpus file) and the reason.
    gone: Vec<(u8, u8)>,
    reasons: Vec<String>,
    /// For duplicates, the document that was kept.
    kept: BTreeMap<u32, u32>,
    columns: BTreeMap<usize, Column>,
}

/// No step.
const HERE: u8 = u8::MAX;

impl Survey {
    /// The survey of this corpus: one that a killed build had finished, or a new one.
    pub(crate) fn take_up(
        tools: &Tools<'_>,
        corpus: &Corpus,
        store: &Path,
        (workers, quiet): (usize, bool),
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let path = store.join(open::BUILD_FOLDER).join("survey.json");
        if let Ok(bytes) = fs::read(&path) {
            return serde_json::from_slice(&bytes).map_err(|error| {
                Fault::data(format!("the survey of this build is damaged: {error}"))
                    .at(path.display().to_string())
                    .hint("delete the store's folder and build it again")
            });
        }
        let scratch = store.join(open::BUILD_FOLDER).join("survey");
        fs::create_dir_all(&scratch).map_err(|error| Fault::io("create", &scratch, &error))?;
        let survey = run(tools, corpus, (store, &scratch), (workers, quiet), go_on)?;
        let bytes = serde_json::to_vec(&survey)
            .map_err(|error| Fault::bug(format!("the survey cannot be written: {error}")))?;
        write::write_whole(&path, &bytes)?;
        fs::remove_dir_all(&scratch).map_err(|error| Fault::io("remove", &scratch, &error))?;
        Ok(survey)
    }

    /// Enters the lists into the records of the finished sources, if these were read from the inputs surveyed.
    pub(crate) fn close(self, corpus: &Corpus, sources: &mut [SourceRecord]) -> Result<()> {
        let Survey { inputs, files } = self;
        for (number, source) in sources.iter_mut().enumerate() {
            if corpus.sources[number].recipe.surveyed() == 0 {
                continue;
            }
            let changed = source.inputs.iter().zip(&inputs[number]).find(|(a, b)| a.sha256 != **b);
            if let Some((input, _)) = changed {
                return Err(Fault::mismatch("this input changed between survey and build")
                    .at(input.path.clone())
                    .hint("delete the store's folder and build it again"));
            }
            source.prepared.get_or_insert_default().files.clone_from(&files[number]);
        }
        Ok(())
    }
}

fn run(
    tools: &Tools<'_>,
    corpus: &Corpus,
    (store, scratch): (&Path, &Path),
    (workers, quiet): (usize, bool),
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<Survey> {
    let mut gathered = Gathered::new(corpus, store, scratch)?;
    let mut progress = Progress::new(bytes_to_read(corpus)?, 0, quiet);
    look_through(tools, corpus, workers, |seen| {
        match seen {
            Seen::End { source, bytes, identity } => {
                gathered.end(source, identity);
                progress.file(bytes);
            }
            Seen::Documents { looked, source, file, raw } => {
                progress.within(raw);
                for looked in looked {
                    go_on()?;
                    progress.document(looked.bytes, 0);
                    gathered.document(source, file, looked)?;
                }
            }
        }
        progress.tick();
        Ok(())
    })?;
    if !quiet {
        eprintln!("survey: {}", progress.finish());
    }
    gathered.decide()
}

/// Reads the sources of `corpus` that are surveyed, and hands on what is seen of their documents, in input order.
pub(crate) fn look_through(
    tools: &Tools<'_>,
    corpus: &Corpus,
    workers: usize,
    take: impl FnMut(Seen) -> Result<()>,
) -> Result<()> {
    let surveyor = Surveyor { corpus, tools };
    let mut walk = Walk { corpus, source: 0, file: 0, input: None };
    let look = |part| match part {
        Part::End { source, bytes, identity } => Ok(Seen::End { source, bytes, identity }),
        Part::Slab { slab, source, file, raw } => {
            let looked = surveyor.look(&slab, source, file)?;
            Ok(Seen::Documents { looked, source, file, raw })
        }
    };
    in_order::run(workers, || walk.next(), look, take)
}

/// What was seen of all documents, until it is decided.
pub(crate) struct Gathered<'a> {
    corpus: &'a Corpus,
    store: &'a Path,
    table: Table,
    hits: Hits,
    inputs: Vec<Vec<Identity>>,
}

impl<'a> Gathered<'a> {
    /// Nothing yet. The lists will be written to `store`; `scratch` is a folder for the time until then.
    pub(crate) fn new(corpus: &'a Corpus, store: &'a Path, scratch: &Path) -> Result<Self> {
        let table = Table::new(corpus, scratch)?;
        let inputs = corpus.sources.iter().map(|_| Vec::new()).collect();
        Ok(Gathered { corpus, store, table, hits: Hits::new(corpus, store), inputs })
    }

    /// The next document, in input order.
    pub(crate) fn document(&mut self, source: usize, file: usize, looked: Looked) -> Result<()> {
        self.hits.write(source, file, &looked.hits)?;
        self.table.push(source, file, looked)
    }

    /// The end of a file.
    pub(crate) fn end(&mut self, source: usize, identity: Identity) {
        self.inputs[source].push(identity);
    }

    /// Decides who goes, and writes the lists.
    pub(crate) fn decide(mut self) -> Result<Survey> {
        self.table.decide(self.corpus)?;
        let mut files = self.table.write(self.corpus, self.store)?;
        for (files, hits) in files.iter_mut().zip(self.hits.finish()?) {
            files.extend(hits);
        }
        Ok(Survey { inputs: self.inputs, files })
    }
}

fn bytes_to_read(corpus: &Corpus) -> Result<u64> {
    let surveyed = corpus.sources.iter().filter(|source| source.recipe.surveyed() > 0);
    let files = surveyed.flat_map(|source| &source.files);
    let length = |path: &Path| far::size(path).map_err(|error| Fault::io("read", path, &error));
    files.map(|file| length(&file.path)).sum()
}

/// What the reader hands to the workers.
enum Part {
    Slab { slab: Slab, source: usize, file: usize, raw: u64 },
    End { source: usize, bytes: u64, identity: Identity },
}

/// What the workers hand on.
pub(crate) enum Seen {
    /// Documents of one file, of which `raw` bytes are read.
    Documents { looked: Vec<Looked>, source: usize, file: usize, raw: u64 },
    /// The end of a file, with its content.
    End { source: usize, bytes: u64, identity: Identity },
}

/// Reads the files of the sources that are surveyed, in order.
struct Walk<'a> {
    corpus: &'a Corpus,
    source: usize,
    file: usize,
    input: Option<Box<dyn Input>>,
}

impl Walk<'_> {
    fn next(&mut self) -> Result<Option<Part>> {
        loop {
            let Some(source) = self.corpus.sources.get(self.source) else { return Ok(None) };
            if self.file == source.files.len() || source.recipe.surveyed() == 0 {
                (self.source, self.file) = (self.source + 1, 0);
                continue;
            }
            let input = match &mut self.input {
                Some(input) => input,
                none => {
                    let file = &source.files[self.file];
                    let max_document_bytes = self.corpus.max_document_bytes;
                    let limits = Limits { max_document_bytes, ..Limits::default() };
                    none.insert(source::open(&file.path, file.format, &source.fields, &limits)?)
                }
            };
            if let Some(slab) = input.next_slab()? {
                let raw = input.content().0;
                return Ok(Some(Part::Slab { slab, source: self.source, file: self.file, raw }));
            }
            let (bytes, identity) = input.content();
            self.input = None;
            self.file += 1;
            return Ok(Some(Part::End { source: self.source, bytes, identity }));
        }
    }
}

impl Table {
    fn new(corpus: &Corpus, scratch: &Path) -> Result<Self> {
        let mut table = Table::default();
        for (number, step) in corpus.sources.iter().flat_map(|source| &source.recipe.steps) {
            let column = match step {
                Step::Exact(_) => Column::Exact(Vec::new()),
                Step::Near(near) => {
                    let create = |band: u64| {
                        let path = spill(scratch, *number, band);
                        let file = File::create(&path);
                        let file = file.map_err(|error| Fault::io("create", &path, &error))?;
                        Ok((path, BufWriter::new(file)))
                    };
                    let bands = (0..near.bands).map(create).collect::<Result<_>>()?;
                    Column::Near { documents: Vec::new(), bands }
                }
                _ => continue,
            };
            table.columns.entry(*number).or_insert(column);
        }
        Ok(table)
    }

    fn push(&mut self, source: usize, file: usize, looked: Looked) -> Result<()> {
        let document = u32::try_from(self.at.len()).ok().filter(|document| *document < u32::MAX);
        let document = document.ok_or_else(|| {
            Fault::usage("too many documents to be compared with each other")
                .wanted("at most 4,294,967,295 in all sources with such steps")
        })?;
        if self.starts.last().is_none_or(|last| (last.source, last.file) != (source, file)) {
            self.starts.push(Start { source, file, first: document });
        }
        self.at.push(looked.at);
        let gone = match looked.gone {
            None => (HERE, 0),
            Some((step, reason)) => (step, self.reason(reason)),
        };
        self.gone.push(gone);
        for (number, mark) in looked.marks {
            match (self.columns.get_mut(&number), mark) {
                (Some(Column::Exact(entries)), Mark::Content(content)) => {
                    entries.push(exact::entry(content, document));
                }
                (Some(Column::Near { documents, bands }), Mark::Bands(keys)) => {
                    documents.push(document);
                    for ((path, band), key) in bands.iter_mut().zip(keys) {
                        let written = band.write_all(&key.to_le_bytes());
                        written.map_err(|error| Fault::io("write", path, &error))?;
                    }
                }
                _ => return Err(Fault::bug("a mark of another step")),
            }
        }
        Ok(())
    }

    fn reason(&mut self, reason: &str) -> u8 {
        let known = self.reasons.iter().position(|known| known == reason);
        known.unwrap_or_else(|| {
            self.reasons.push(reason.to_owned());
            self.reasons.len() - 1
        }) as u8
    }

    /// Decides the comparing steps in their order.
    fn decide(&mut self, corpus: &Corpus) -> Result<()> {
        for (number, column) in std::mem::take(&mut self.columns) {
            let across = corpus.sources.iter().flat_map(|source| &source.recipe.steps).find_map(
                |(candidate, step)| match step {
                    Step::Exact(exact) if *candidate == number => Some(exact.across),
                    Step::Near(near) if *candidate == number => Some(near.across),
                    _ => None,
                },
            );
            let across = across.unwrap_or(true);
            let (pairs, reason) = match column {
                Column::Exact(entries) => (
                    self.exact(entries, number, across),
                    "exact-duplicates: of an earlier document",
                ),
                Column::Near { documents, bands } => (
                    self.near(documents, bands, (number, across))?,
                    "near-duplicates: of an earlier document",
                ),
            };
            let reason = self.reason(reason);
            for (document, kept) in pairs {
                self.gone[document as usize] = (number as u8, reason);
                self.kept.insert(document, kept);
            }
        }
        Ok(())
    }

    /// Whether a document gets as far as step `number`.
    fn reaches(&self, document: u32, number: usize) -> bool {
        usize::from(self.gone[document as usize].0) >= number
    }

    fn exact(
        &self,
        mut entries: Vec<exact::Entry>,
        number: usize,
        across: bool,
    ) -> Vec<(u32, u32)> {
        entries.retain(|(_, _, document)| self.reaches(*document, number));
        if !across {
            for entry in &mut entries {
                entry.0 ^= super::normal::mixed(1 + self.source_of(entry.2) as u64);
            }
        }
        exact::later(&mut entries)
    }

    fn near(
        &self,
        documents: Vec<u32>,
        bands: Vec<(PathBuf, BufWriter<File>)>,
        (number, across): (usize, bool),
    ) -> Result<Vec<(u32, u32)>> {
        let mut components = Components::new(self.at.len() as u32);
        for (path, writer) in bands {
            let fault = |error: std::io::Error| Fault::io("read", &path, &error);
            writer.into_inner().map_err(|error| Fault::io("write", &path, error.error()))?;
            let mut reader = BufReader::new(File::open(&path).map_err(fault)?);
            let mut keys = Vec::new();
            for document in &documents {
                let mut key = [0; 8];
                reader.read_exact(&mut key).map_err(fault)?;
                if self.reaches(*document, number) {
                    let own = if across { 0 } else { 1 + self.source_of(*document) as u64 };
                    keys.push((u64::from_le_bytes(key) ^ super::normal::mixed(own), *document));
                }
            }
            keys.par_sort_unstable();
            for pair in keys.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
                components.join(pair[0].1, pair[1].1);
            }
        }
        let kept = documents.iter().map(|document| (*document, components.least(*document)));
        Ok(kept.filter(|(document, kept)| document != kept).collect())
    }

    fn start_of(&self, document: u32) -> &Start {
        &self.starts[self.starts.partition_point(|start| start.first <= document) - 1]
    }

    fn source_of(&self, document: u32) -> usize {
        self.start_of(document).source
    }

    /// Writes, for each source, which documents were removed.
    fn write(&self, corpus: &Corpus, store: &Path) -> Result<Vec<Vec<FileRecord>>> {
        let mut files = Vec::new();
        for (number, source) in corpus.sources.iter().enumerate() {
            if source.recipe.surveyed() == 0 {
                files.push(Vec::new());
                continue;
            }
            let mut writer = removed::Writer::new()?;
            for document in self.documents_of(number) {
                let (step, reason) = self.gone[document as usize];
                if step == HERE {
                    continue;
                }
                let kept = self.kept.get(&document).map(|kept| {
                    let start = self.start_of(*kept);
                    let name = &corpus.sources[start.source].name;
                    (name.as_str(), start.file, self.at[*kept as usize])
                });
                let file = self.start_of(document).file;
                let reason = &self.reasons[usize::from(reason)];
                writer.push(Removed { file, at: self.at[document as usize], reason, kept })?;
            }
            let bytes = writer.finish()?;
            files.push(vec![list(store, &source.name, removed::FILE, &bytes)?]);
        }
        Ok(files)
    }

    fn documents_of(&self, source: usize) -> std::ops::Range<u32> {
        let first = self.starts.partition_point(|start| start.source < source);
        let after = self.starts.partition_point(|start| start.source <= source);
        let all = self.at.len() as u32;
        let at = |start: usize| self.starts.get(start).map_or(all, |start| start.first);
        at(first)..at(after)
    }
}

fn spill(scratch: &Path, number: usize, band: u64) -> PathBuf {
    scratch.join(format!("step-{number}-band-{band}"))
}

/// Writes a list into a source's folder.
fn list(store: &Path, source: &str, name: &str, bytes: &[u8]) -> Result<FileRecord> {
    let folder = store.join(source);
    fs::create_dir_all(&folder).map_err(|error| Fault::io("create", &folder, &error))?;
    write::write_whole(&folder.join(name), bytes)?;
    let (bytes, digest) = (bytes.len() as u64, Digest::of_bytes(bytes));
    Ok(FileRecord { name: name.to_owned(), bytes, digest })
}

/// The hits of evaluation sets, by source, as lines of JSON.
struct Hits {
    lines: Vec<Option<Vec<u8>>>,
    store: PathBuf,
    names: Vec<String>,
}

impl Hits {
    fn new(corpus: &Corpus, store: &Path) -> Self {
        let decontaminated = |source: &crate::corpus::Source| {
            let steps = source.recipe.steps.iter();
            steps.clone().any(|(_, step)| matches!(step, Step::Decontaminate(_))).then(Vec::new)
        };
        Hits {
            lines: corpus.sources.iter().map(decontaminated).collect(),
            store: store.to_owned(),
            names: corpus.sources.iter().map(|source| source.name.clone()).collect(),
        }
    }

    fn write(&mut self, source: usize, file: usize, hits: &[Value]) -> Result<()> {
        let Some(lines) = &mut self.lines[source] else { return Ok(()) };
        for hit in hits {
            let mut hit = hit.clone();
            hit["file"] = file.into();
            lines.extend_from_slice(hit.to_string().as_bytes());
            lines.push(b'\n');
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<Option<FileRecord>>> {
        let all = self.lines.into_iter().zip(&self.names);
        let write = |(lines, name): (Option<Vec<u8>>, &String)| {
            lines.map(|lines| list(&self.store, name, "contaminated.jsonl", &lines)).transpose()
        };
        all.map(write).collect()
    }
}

#[cfg(test)]
mod tests;
