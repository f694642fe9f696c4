//! The scan's state of every document, and the decisions of the comparing steps, in order.
//!
//! State per document: 10 bytes, 24 more per step `exact-duplicates`, 4 more per `near-duplicates` (and `8 * bands`
//! bytes on disk during the scan; 20 in memory while one band is decided).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use rayon::slice::ParallelSliceMut as _;
use store::FileRecord;
use store::disk::{self, AtomicFile, OutputFile};

use crate::corpus::Corpus;
use crate::dedup::minhash::Components;
use crate::dedup::observe::{Mark, Observed};
use crate::dedup::repeats::{self, Texts};
use crate::dedup::{exact, minhash, normal};
use crate::dropped::{self, Kept, Line, Writer};
use crate::recipe::Step;
use crate::recipe::compare::Compare;
use crate::spans::Span;

/// Where one file's documents begin in the tables.
struct Start {
    source: usize,
    file: usize,
    first: u32,
}

/// What one comparing step needs of all documents that reached it.
enum Column {
    Exact(Vec<exact::Entry>),
    Texts(Texts),
    Near { documents: Vec<u32>, bands: Vec<(PathBuf, BufWriter<OutputFile>)> },
}

/// The state of every record with a text.
#[derive(Default)]
pub(super) struct Table {
    starts: Vec<Start>,
    /// Group and row (see [`dropped::address`]).
    at: Vec<u64>,
    /// The step that removes it (its number in the corpus file) and the reason.
    gone: Vec<(u8, u8)>,
    reasons: Vec<String>,
    /// For duplicates, the document that was kept.
    kept: BTreeMap<u32, u32>,
    /// The removed spans of kept documents.
    spans: BTreeMap<u32, Vec<Span>>,
    columns: BTreeMap<usize, Column>,
}

/// Not removed by any step.
const HERE: u8 = u8::MAX;

impl Table {
    pub(super) fn new(corpus: &Corpus, scratch: &Path) -> Result<Self> {
        let mut table = Table::default();
        for (number, step) in corpus.sources.iter().flat_map(|source| &source.recipe.steps) {
            let column = match step {
                Step::Compare(Compare::Exact(_)) => Column::Exact(Vec::new()),
                Step::Compare(Compare::Near(near)) => {
                    let create = |band: u64| {
                        let path = spill(scratch, *number, band);
                        let file = BufWriter::new(OutputFile::create(&path)?);
                        Ok((path, file))
                    };
                    let bands = (0..near.bands).map(create).collect::<Result<_>>()?;
                    Column::Near { documents: Vec::new(), bands }
                }
                Step::Compare(Compare::Repeats(_)) => {
                    Column::Texts(Texts::create(scratch.join(format!("step-{number}-texts")))?)
                }
                _ => continue,
            };
            table.columns.entry(*number).or_insert(column);
        }
        Ok(table)
    }

    pub(super) fn push(&mut self, source: usize, file: usize, observed: Observed) -> Result<()> {
        let document = u32::try_from(self.at.len()).ok().filter(|document| *document < u32::MAX);
        let document = document.ok_or_else(|| {
            Fault::usage("too many documents to be compared with each other")
                .wanted("at most 4,294,967,295 in all sources with such steps")
        })?;
        if self.starts.last().is_none_or(|last| (last.source, last.file) != (source, file)) {
            self.starts.push(Start { source, file, first: document });
        }
        self.at.push(observed.at);
        let gone = match observed.dropped {
            None => (HERE, 0),
            Some((step, reason)) => (step, self.reason(reason)),
        };
        self.gone.push(gone);
        for (number, mark) in observed.marks {
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
                (Some(Column::Texts(texts)), Mark::Text(text)) => texts.push(document, &text)?,
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

    /// Decides the comparing steps in order.
    pub(super) fn decide(&mut self, corpus: &Corpus) -> Result<()> {
        for (number, column) in std::mem::take(&mut self.columns) {
            let mut steps = corpus.sources.iter().flat_map(|source| &source.recipe.steps);
            let step = steps.find(|(candidate, _)| *candidate == number).map(|(_, step)| step);
            let Some(Step::Compare(step)) = step else {
                return Err(Fault::bug("a column of no step"));
            };
            match (column, step) {
                (Column::Exact(entries), Compare::Exact(step)) => {
                    let pairs = self.exact(entries, number, step.across);
                    self.remove(pairs, number, exact::REASON);
                }
                (Column::Near { documents, bands }, Compare::Near(step)) => {
                    let pairs = self.near(documents, bands, number, step.across)?;
                    self.remove(pairs, number, minhash::REASON);
                }
                (Column::Texts(texts), Compare::Repeats(step)) => {
                    let group = |document| if step.across { 0 } else { self.source_of(document) };
                    let own = |document| self.reaches(document, number).then(|| group(document));
                    let mut spans = texts.decide(step, own)?;
                    self.spans.append(&mut spans);
                }
                _ => return Err(Fault::bug("a column of another step")),
            }
        }
        Ok(())
    }

    /// Removes documents, each in favour of one that is kept.
    fn remove(&mut self, pairs: Vec<(u32, u32)>, number: usize, reason: &str) {
        let reason = self.reason(reason);
        for (document, kept) in pairs {
            self.gone[document as usize] = (number as u8, reason);
            self.kept.insert(document, kept);
        }
    }

    /// Whether a document reaches step `number`.
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
                entry.0 ^= normal::mixed(1 + self.source_of(entry.2) as u64);
            }
        }
        exact::later(&mut entries)
    }

    fn near(
        &self,
        documents: Vec<u32>,
        bands: Vec<(PathBuf, BufWriter<OutputFile>)>,
        number: usize,
        across: bool,
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
                    keys.push((u64::from_le_bytes(key) ^ normal::mixed(own), *document));
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

    /// Writes the list of removed documents of each source.
    pub(super) fn write(&self, corpus: &Corpus, store: &Path) -> Result<Vec<Vec<FileRecord>>> {
        let mut files = Vec::new();
        for (number, source) in corpus.sources.iter().enumerate() {
            if source.recipe.scanned() == 0 {
                files.push(Vec::new());
                continue;
            }
            let folder = store.join(&source.name);
            disk::create_folder(&folder)?;
            let mut writer = Writer::new(AtomicFile::create(&folder.join(dropped::REMOVED))?)?;
            for document in self.documents_of(number) {
                let (step, reason) = self.gone[document as usize];
                let spans = self.spans.get(&document).map_or(&[][..], Vec::as_slice);
                let reason = match (step, spans) {
                    (HERE, []) => continue,
                    (HERE, _) => repeats::REASON,
                    _ => &self.reasons[usize::from(reason)],
                };
                let kept = self.kept.get(&document).map(|kept| {
                    let start = self.start_of(*kept);
                    let name = &corpus.sources[start.source].name;
                    Kept::at(name, start.file, self.at[*kept as usize])
                });
                let file = self.start_of(document).file;
                let at = self.at[document as usize];
                writer.push(&Line::of_scan(file, at, reason, kept, spans))?;
            }
            files.push(vec![writer.finish()?.commit()?]);
            disk::sync_folder(&folder)?;
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
