//! Counting the words of a corpus in parallel.
//!
//! Each worker counts into a table of its own. Sums do not know their order, and the tables are sorted into one at the
//! end, so the result is the same for any number of workers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use contract::{Digest, Fault, Ratio, Result};
use crossbeam::channel::{Receiver, Sender, bounded};
use tokenizers::utils::SysRegex;

use crate::corpus::{Corpus, Source};
use crate::dedup::Tools;
use crate::pipeline::held_out;
use crate::prepared::InFile;
use crate::progress::Progress;
use crate::request::count_or_stop;
use crate::source::{self, Document, Limits, Parsed, Slab};

use super::{SPLIT, sampled};

/// A longer run without a joint is cut into words of at most this many bytes: nothing is learned from such lengths,
/// and every merge within one would go over all of it.
const WORD_BYTES_MAX: usize = 1024;

/// The words of a corpus.
pub(super) struct Counted {
    /// Each word and how often it occurs.
    pub(super) words: BTreeMap<Box<str>, u64>,
    pub(super) documents: u64,
    pub(super) text_bytes: u64,
    pub(super) dropped: u64,
}

#[expect(clippy::disallowed_types, reason = "only counted in; sorted before anyone looks at it")]
type Table = std::collections::HashMap<Box<str>, u64>;

/// A slab, its place in the order of all slabs, and the source that says how to parse it.
type Work<'a> = (u64, Slab, &'a Source);

/// Counts the words of all documents that are in the sample and not held out.
pub(super) fn count(
    corpus: &Corpus,
    share: Ratio,
    workers: usize,
    progress: &mut Progress,
) -> Result<Counted> {
    let (slabs, work) = bounded::<Work<'_>>(workers + 2);
    // Steps that count tokens have none yet, and do nothing.
    let tools = Tools::new(corpus, None)?;
    let stop = AtomicBool::new(false);
    let (read, tallies) = thread::scope(|scope| {
        let worker = || {
            let (work, stop, tools) = (work.clone(), &stop, &tools);
            scope.spawn(move || tally(&work, (corpus, tools), share, stop))
        };
        let workers: Vec<_> = (0..workers.max(1)).map(|_| worker()).collect();
        drop(work);
        let read = read(corpus, &slabs, &stop, progress);
        drop(slabs);
        let joined = |worker: thread::ScopedJoinHandle<'_, _>| {
            worker.join().unwrap_or_else(|_| Err((0, Fault::bug("a worker of the training died"))))
        };
        (read, workers.into_iter().map(joined).collect::<Vec<_>>())
    });
    let mut counted = Counted { words: BTreeMap::new(), documents: 0, text_bytes: 0, dropped: 0 };
    // Slabs are taken in order, so the lowest failure is the first in the corpus whatever the number of workers.
    let failures = tallies.iter().filter_map(|tally| tally.as_ref().err());
    if let Some((_, fault)) = failures.min_by_key(|(order, _)| *order) {
        return Err(fault.clone());
    }
    read?;
    for tally in tallies.into_iter().flatten() {
        counted.documents += tally.documents;
        counted.text_bytes += tally.text_bytes;
        counted.dropped += tally.dropped;
        for (word, count) in tally.table {
            *counted.words.entry(word).or_default() += count;
        }
    }
    Ok(counted)
}

/// Reads all files in order and hands their slabs out.
fn read<'a>(
    corpus: &'a Corpus,
    slabs: &Sender<Work<'a>>,
    stop: &AtomicBool,
    progress: &mut Progress,
) -> Result<()> {
    let limits = Limits { max_document_bytes: corpus.max_document_bytes, ..Limits::default() };
    let mut order = 0;
    for source in &corpus.sources {
        for file in &source.files {
            let mut input = source::open(&file.path, file.format, &source.fields, &limits)?;
            while let Some(slab) = input.next_slab()? {
                // Workers leave only after a failure, which is the one to tell.
                if stop.load(Ordering::Relaxed) || slabs.send((order, slab, source)).is_err() {
                    return Ok(());
                }
                order += 1;
                progress.tick();
            }
            progress.file(input.content().0);
        }
    }
    Ok(())
}

/// What one worker counted.
struct Tally {
    table: Table,
    documents: u64,
    text_bytes: u64,
    dropped: u64,
}

fn tally(
    work: &Receiver<Work<'_>>,
    (corpus, tools): (&Corpus, &Tools<'_>),
    share: Ratio,
    stop: &AtomicBool,
) -> std::result::Result<Tally, (u64, Fault)> {
    let split = SysRegex::new(SPLIT).map_err(|e| (0, Fault::bug(format!("the split: {e}"))))?;
    let mut tally = Tally { table: Table::new(), documents: 0, text_bytes: 0, dropped: 0 };
    for (order, slab, source) in work {
        let failed = |fault: Fault| {
            stop.store(true, Ordering::Relaxed);
            (order, fault)
        };
        let steps = InFile::unscanned(source, tools);
        for parsed in slab.parse(&source.fields).map_err(failed)? {
            match parsed {
                Parsed::Document(document) => match &steps {
                    None => tally.document(&document, corpus, share, &split),
                    Some(steps) => match steps.apply(document) {
                        Ok((document, _)) => tally.document(&document, corpus, share, &split),
                        Err(dropped) => {
                            tally.dropped(corpus, &dropped.reason, dropped.fault).map_err(failed)?
                        }
                    },
                },
                Parsed::Dropped { reason, fault, .. } => {
                    tally.dropped(corpus, reason, fault).map_err(failed)?;
                }
            }
        }
    }
    Ok(tally)
}

impl Tally {
    /// A record that is no document, or is dropped by a step: the same ones stop a build.
    fn dropped(&mut self, corpus: &Corpus, reason: &str, fault: Fault) -> Result<()> {
        self.dropped += 1;
        count_or_stop(corpus, reason, fault)
    }

    fn document(&mut self, document: &Document, corpus: &Corpus, share: Ratio, split: &SysRegex) {
        let text = document.text.as_str();
        let content = Digest::of_bytes(text.as_bytes());
        if held_out(content, corpus.validation) || !sampled(content, share) {
            return;
        }
        self.documents += 1;
        self.text_bytes += text.len() as u64;
        let mut before = 0;
        for (start, end) in split.find_iter(text) {
            // What the expression matches nowhere is a word as well, as it is for the encoders.
            self.word(&text[before..start]);
            self.word(&text[start..end]);
            before = end;
        }
        self.word(&text[before..]);
    }

    fn word(&mut self, mut word: &str) {
        while !word.is_empty() {
            let (piece, rest) = word.split_at(word.floor_char_boundary(WORD_BYTES_MAX));
            match self.table.get_mut(piece) {
                Some(count) => *count += 1,
                None => drop(self.table.insert(piece.into(), 1)),
            }
            word = rest;
        }
    }
}
