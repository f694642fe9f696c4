//! From files to what the committer is told, in input order: slabs are read, parsed, prepared and encoded in parallel.

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};

use contract::draw::happens;
use contract::{Digest, Fault, Key, Purpose, Ratio, Result};
use rayon::prelude::*;
use store::{InputRecord, Split};

use super::journal::Position;
use super::request::content_of_dropped;
use crate::corpus::{Corpus, Source};
use crate::parallel::{self, Map};
use crate::prepared::{InFile, Prepared, Trace};
use crate::source::{self, Document, Parsed, Slab};
use crate::tokenize::Tokenizer;
use crate::tokenize::audit::{self, Sample, Wanted};
use crate::walk::{Part, Walk, place};

/// A document longer than this is audited by a piece.
const AUDIT_WHOLE_BYTES: usize = 1_000_000;

/// What decides the tokens of a document.
pub(crate) struct Encoding<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) begin: Option<u32>,
    pub(crate) end: Option<u32>,
    pub(crate) validation: Ratio,
    pub(crate) wanted: &'a Wanted,
    pub(crate) prepared: &'a Prepared<'a>,
}

/// What became of one record.
pub(crate) enum Item {
    Document(Box<Encoded>),
    Dropped { reason: Cow<'static, str>, bytes: u64, content: Digest, fault: Fault },
}

/// A document, encoded.
pub(crate) struct Encoded {
    pub(crate) id: Option<String>,
    pub(crate) row: u64,
    pub(crate) group: Option<u32>,
    pub(crate) bytes: Option<(u64, u64)>,
    pub(crate) text_bytes: u64,
    /// Of its text as read.
    pub(crate) consumed: Digest,
    /// Of its text as encoded.
    pub(crate) content: Digest,
    /// What steps of preparation did to it, if there are any.
    pub(crate) trace: Option<Trace>,
    pub(crate) split: Split,
    pub(crate) tokens: Vec<u32>,
    pub(crate) sample: Option<Sample>,
}

/// What the committer is told, in input order.
pub(crate) enum Step {
    Slab {
        items: Vec<Item>,
        /// Bytes of the raw file read when the slab was cut.
        raw_bytes: u64,
    },
    /// A file is exhausted; its number of documents is the committer's to know.
    FileEnd(InputRecord),
    SourceEnd,
}

/// Samples that wait for a worker to encode them again.
#[derive(Default)]
pub(crate) struct Auditor(Mutex<Vec<Sample>>);

impl Auditor {
    /// Puts a sample where the next worker that is free finds it.
    pub(crate) fn check(&self, sample: Sample) {
        self.waiting().push(sample);
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Vec<Sample>> {
        // A push or a pop is whole or did not happen.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks what waits now: samples are few, and what they find makes the rest void.
    fn check_waiting(&self, tokenizer: &Tokenizer) -> Result<()> {
        loop {
            let Some(sample) = self.waiting().pop() else { return Ok(()) };
            audit::check(tokenizer, &sample)?;
        }
    }
}

/// Runs the inputs from `position` on, and calls `commit` with every step in input order.
pub(crate) fn run(
    corpus: &Corpus,
    encoding: &Encoding<'_>,
    workers: usize,
    position: Position,
    mut commit: impl FnMut(Step, &Auditor) -> Result<()>,
) -> Result<()> {
    let auditor = Auditor::default();
    let mut walk = Walk::from(corpus, position.source, position.file);
    let mut passed = Passed { now: Position::start(position.source, position.file), to: position };
    let next = || {
        while let Some(part) = walk.next()? {
            if let Some(skip) = passed.by(&part, corpus)? {
                return Ok(Some((part, skip)));
            }
        }
        Ok(None)
    };
    let step = |(): &mut (), (part, skip): (Part, usize)| {
        auditor.check_waiting(encoding.tokenizer)?;
        step(part, skip, corpus, encoding)
    };
    let map =
        Map { begin: || (), map: step, place: |(part, _): &(Part, usize)| place(corpus, part) };
    parallel::run(workers, next, map, |step| commit(step, &auditor))?;
    // Every sample is checked before a build is done.
    let left = std::mem::take(&mut *auditor.waiting());
    let failure = left.par_iter().find_map_first(|s| audit::check(encoding.tokenizer, s).err());
    failure.map_or(Ok(()), Err)
}

/// What a part becomes.
fn step(part: Part, skip: usize, corpus: &Corpus, encoding: &Encoding<'_>) -> Result<Step> {
    Ok(match part {
        Part::Slab { slab, source, file, raw } => {
            let source = &corpus.sources[source];
            let items = encode_slab(*slab, skip, source, &source.files[file].shown, encoding)?;
            Step::Slab { items, raw_bytes: raw }
        }
        Part::FileEnd { source, file, bytes, identity: sha256 } => {
            let path = corpus.sources[source].files[file].shown.clone();
            Step::FileEnd(InputRecord { path, bytes, sha256, documents: 0 })
        }
        Part::SourceEnd => Step::SourceEnd,
    })
}

/// Goes over what a killed build had committed of the file that it stopped in.
struct Passed {
    now: Position,
    to: Position,
}

impl Passed {
    /// How many records of this part are committed; nothing if all are.
    fn by(&mut self, part: &Part, corpus: &Corpus) -> Result<Option<usize>> {
        let Passed { now, to } = self;
        if now.documents == to.documents {
            return Ok(Some(0));
        }
        let source = &corpus.sources[to.source];
        match part {
            Part::Slab { slab, .. } => pass(slab, source, now, to),
            _ => Err(changed(&source.files[to.file].shown)),
        }
    }
}

/// Goes over the records that a killed build had committed; returns how many of this slab they are, or `None` for all.
fn pass(
    slab: &Slab,
    source: &Source,
    passed: &mut Position,
    to: &Position,
) -> Result<Option<usize>> {
    let records = slab.parse(&source.fields)?;
    let (all, mut skip) = (records.len(), 0);
    for parsed in records {
        if passed.documents == to.documents {
            break;
        }
        passed.pass(match &parsed {
            Parsed::Document(document) => Digest::of_bytes(document.text.as_bytes()),
            Parsed::Dropped { reason, bytes, .. } => content_of_dropped(reason, *bytes),
        });
        skip += 1;
    }
    if passed.documents == to.documents && passed.consumed != to.consumed {
        return Err(changed(&source.files[to.file].shown));
    }
    Ok((skip < all).then_some(skip))
}

fn changed(file: &str) -> Fault {
    Fault::mismatch("this input changed since the build was begun")
        .at(file.to_owned())
        .hint("restore the input, or delete the store's folder and build it again")
}

fn encode_slab(
    slab: Slab,
    skip: usize,
    source: &Source,
    file: &str,
    encoding: &Encoding<'_>,
) -> Result<Vec<Item>> {
    let parsed = slab.parse(&source.fields)?;
    // A long document's line has done its part, and its tokens need the memory.
    drop(slab);
    let steps = encoding.prepared.in_file(&source.name, file);
    let encode = |parsed| encode(parsed, file, encoding, steps.as_ref());
    Ok(parsed.into_iter().skip(skip).map(encode).collect())
}

fn encode(parsed: Parsed, file: &str, encoding: &Encoding<'_>, steps: Option<&InFile<'_>>) -> Item {
    let document = match parsed {
        Parsed::Document(document) => document,
        Parsed::Dropped { reason, bytes, fault } => {
            let content = content_of_dropped(reason, bytes);
            return Item::Dropped { reason: reason.into(), bytes, content, fault };
        }
    };
    let consumed = Digest::of_bytes(document.text.as_bytes());
    let (row, group) = (document.row, document.group);
    let place = || source::place(file, group, row);
    let (document, content, trace) = match steps {
        None => (document, consumed, None),
        Some(steps) => match steps.apply(document) {
            Ok((document, trace)) => {
                let content = Digest::of_bytes(document.text.as_bytes());
                (document, content, Some(trace))
            }
            Err(dropped) => {
                let (reason, bytes, fault) = (dropped.reason.into(), dropped.bytes, dropped.fault);
                return Item::Dropped {
                    reason,
                    bytes,
                    content: consumed,
                    fault: fault.or_at(place),
                };
            }
        },
    };
    let bytes = trace.as_ref().map_or(document.text.len() as u64, |trace| trace.read);
    let dropped = |reason: &'static str, fault: Fault| Item::Dropped {
        reason: reason.into(),
        bytes,
        content: consumed,
        fault,
    };
    match encoding.tokenizer.encode(&document.text) {
        Err(fault) => dropped("refused by the tokenizer", fault.or_at(place)),
        Ok(ids) if ids.is_empty() => {
            dropped("no tokens", Fault::data("it has no tokens").at(place()))
        }
        Ok(ids) => {
            let sample = sample(&document, &ids, content, encoding.wanted, place);
            let parts = (document, ids, (consumed, content), trace, sample);
            Item::Document(Box::new(encoded(parts, encoding)))
        }
    }
}

/// Whether a document with this content is kept for validation: never trained on, by a tokenizer neither.
pub(crate) fn held_out(content: Digest, share: Ratio) -> bool {
    happens(Key::from_seed(0).child("validation"), Purpose::Split, content.0 as u64, share)
}

type Parts = (Document, Vec<u32>, (Digest, Digest), Option<Trace>, Option<Sample>);

fn encoded(parts: Parts, encoding: &Encoding<'_>) -> Encoded {
    let (document, ids, (consumed, content), trace, sample) = parts;
    let held_out = held_out(content, encoding.validation);
    let Encoding { begin, end, .. } = encoding;
    let tokens = match (begin, end) {
        (None, None) => ids,
        _ => begin.iter().copied().chain(ids).chain(end.iter().copied()).collect(),
    };
    Encoded {
        id: document.id,
        row: document.row,
        group: document.group,
        bytes: document.bytes,
        text_bytes: document.text.len() as u64,
        consumed,
        content,
        trace,
        split: if held_out { Split::Validation } else { Split::Train },
        tokens,
        sample,
    }
}

fn sample(
    document: &Document,
    ids: &[u32],
    content: Digest,
    wanted: &Wanted,
    place: impl FnOnce() -> String,
) -> Option<Sample> {
    let key = audit::key_of(content.0);
    if !wanted.may_want(key) {
        return None;
    }
    let whole = document.text.len() <= AUDIT_WHOLE_BYTES;
    let text = if whole { &document.text } else { audit::piece(&document.text, key) };
    let ids = whole.then(|| ids.to_vec());
    Some(Sample { place: place(), text: text.to_owned(), ids })
}
