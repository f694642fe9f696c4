//! Counting the words of a corpus in parallel.
//!
//! Each worker counts into its own table. Sums do not depend on order, and the tables are merged into a sorted one at
//! the end, so the result is the same for any number of workers.

use std::collections::BTreeMap;

use contract::{Digest, Fault, Ratio, Result};
use tokenizers::utils::SysRegex;

use crate::assembly::pipeline::held_out;
use crate::corpus::{Corpus, Source, count_or_stop};
use crate::dedup::Tools;
use crate::parallel::{self, Map};
use crate::prepared::InFile;
use crate::progress::Progress;
use crate::source::{Document, Parsed, Slab, place as place_of};
use crate::walk::{Part, Walk, place};

use super::{Records, SPLIT, sampled};

/// A longer run without a joint is cut into words of at most this size: nothing is learned from such lengths, and every
/// merge in such a word would take time proportional to its length.
const WORD_BYTES_MAX: usize = 1024;

/// The words of a corpus.
pub(super) struct Counted {
    /// Each word and its count.
    pub(super) words: BTreeMap<Box<str>, u64>,
    pub(super) documents: u64,
    pub(super) text_bytes: u64,
    /// By source.
    pub(super) records: Vec<Records>,
}

#[expect(clippy::disallowed_types, reason = "only counted in; sorted before anyone looks at it")]
type Table = std::collections::HashMap<Box<str>, u64>;

/// Counts the words of all documents that are in the sample and not held out.
pub(super) fn count(
    corpus: &Corpus,
    share: Ratio,
    workers: usize,
    progress: &mut Progress,
) -> Result<Counted> {
    // Steps that count tokens have no tokenizer yet, and do nothing.
    let tools = Tools::new(corpus, None)?;
    let split = SysRegex::new(SPLIT).map_err(|e| Fault::bug(format!("the split: {e}")))?;
    let rules = Rules { corpus, tools, split, share };
    let mut walk = Walk::new(corpus);
    let tally = |tally: &mut Tally, part| match part {
        Part::Slab { slab, source, file, raw } => {
            tally.slab(&slab, [source, file], &rules).map(|()| Read::Within(raw))
        }
        Part::FileEnd { content, .. } => Ok(Read::File(content.bytes)),
        Part::SourceEnd => Ok(Read::File(0)),
    };
    let begin = || Tally { records: nothing(corpus), ..Tally::default() };
    let map = Map { begin, map: tally, place: |part: &Part| place(corpus, part) };
    let tallies = parallel::run(
        workers,
        || walk.next(),
        map,
        |read| {
            match read {
                Read::Within(bytes) => progress.within(bytes),
                Read::File(bytes) => progress.file(bytes),
            }
            progress.tick();
            Ok(())
        },
    )?;
    let (words, records) = (BTreeMap::new(), nothing(corpus));
    let mut counted = Counted { words, documents: 0, text_bytes: 0, records };
    for tally in tallies {
        counted.documents += tally.documents;
        counted.text_bytes += tally.text_bytes;
        for (sum, records) in counted.records.iter_mut().zip(tally.records) {
            sum.kept += records.kept;
            for (reason, count) in records.dropped {
                *sum.dropped.entry(reason).or_default() += count;
            }
        }
        for (word, count) in tally.table {
            *counted.words.entry(word).or_default() += count;
        }
    }
    Ok(counted)
}

/// Zero counts for each source.
fn nothing(corpus: &Corpus) -> Vec<Records> {
    let named = |source: &Source| Records { source: source.name.clone(), ..Records::default() };
    corpus.sources.iter().map(named).collect()
}

/// The reader's position in bytes.
enum Read {
    /// Inside the open file.
    Within(u64),
    /// At the end of a file of this size.
    File(u64),
}

/// What determines which words of a document count, and where they end.
struct Rules<'a> {
    corpus: &'a Corpus,
    tools: Tools<'a>,
    split: SysRegex,
    share: Ratio,
}

/// The counts of one worker.
#[derive(Default)]
struct Tally {
    table: Table,
    documents: u64,
    text_bytes: u64,
    /// By source.
    records: Vec<Records>,
}

impl Tally {
    fn slab(&mut self, slab: &Slab, place: [usize; 2], rules: &Rules<'_>) -> Result<()> {
        let [number, file] = place;
        let source = &rules.corpus.sources[number];
        let steps = InFile::unscanned(source, &rules.tools);
        for parsed in slab.parse(&source.fields)? {
            match parsed {
                Parsed::Document(document) => match &steps {
                    None => self.document(&document, number, rules),
                    Some(steps) => {
                        let (group, row) = (document.group, document.row);
                        match steps.apply(document) {
                            Ok((document, _)) => self.document(&document, number, rules),
                            Err(dropped) => {
                                let shown = &source.files[file].shown;
                                let fault = dropped.fault.or_at(|| place_of(shown, group, row));
                                self.dropped(number, rules.corpus, &dropped.reason, fault)?;
                            }
                        }
                    }
                },
                Parsed::Dropped { reason, fault, .. } => {
                    self.dropped(number, rules.corpus, reason, fault)?;
                }
            }
        }
        Ok(())
    }

    /// A record that is not a document, or is dropped by a step: it stops training if it would stop a build.
    fn dropped(
        &mut self,
        source: usize,
        corpus: &Corpus,
        reason: &str,
        fault: Fault,
    ) -> Result<()> {
        *self.records[source].dropped.entry(reason.to_owned()).or_default() += 1;
        count_or_stop(corpus, reason, fault)
    }

    fn document(&mut self, document: &Document, source: usize, rules: &Rules<'_>) {
        self.records[source].kept += 1;
        let text = document.text.as_str();
        let content = Digest::of_bytes(text.as_bytes());
        if held_out(content, rules.corpus.validation) || !sampled(content, rules.share) {
            return;
        }
        self.documents += 1;
        self.text_bytes += text.len() as u64;
        let mut before = 0;
        for (start, end) in rules.split.find_iter(text) {
            // Text that the expression does not match is a word too, as in the encoders.
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
