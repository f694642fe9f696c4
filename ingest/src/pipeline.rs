//! One reader, any number of workers, one committer: parallel work, delivered in input order.
//!
//! The reader cuts inputs into slabs and puts, for each, a promise into an ordered queue; workers keep the promises in
//! any order; the committer redeems them in order. The queue is bounded, and with it memory. The first error in input
//! order is the one reported, whatever the number of workers.

use std::borrow::Cow;
use std::thread;

use contract::draw::happens;
use contract::{Digest, Fault, Key, Purpose, Ratio, Result};
use crossbeam::channel::{Receiver, Sender, bounded, unbounded};
use store::{InputRecord, Split};

use crate::corpus::{Corpus, Source};
use crate::journal::Position;
use crate::prepared::{InFile, Prepared, Trace};
use crate::request::content_of_dropped;
use crate::source::{self, Document, Limits, Parsed, Slab};
use crate::tokenize::Tokenizer;
use crate::tokenize::audit::{self, Sample, Wanted};

/// Slabs in flight beyond one for each worker.
const SPARE_SLABS: usize = 3;

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

enum Promise {
    Slab { reply: Receiver<Result<Vec<Item>>>, raw_bytes: u64 },
    Step(Step),
    Failed(Fault),
}

enum Work<'a> {
    Encode { slab: Box<Slab>, skip: usize, source: &'a Source, file: &'a str, reply: Reply },
    Audit(Box<Sample>),
}

type Reply = Sender<Result<Vec<Item>>>;

/// Hands samples to whichever worker is free.
pub(crate) struct Auditor<'a>(Sender<Work<'a>>);

impl Auditor<'_> {
    /// For documents that are audited already: what it is told goes nowhere.
    pub(crate) fn idle() -> Auditor<'static> {
        Auditor(unbounded().0)
    }

    pub(crate) fn check(&self, sample: Sample) {
        // The workers are gone only when the build has failed already.
        let _ = self.0.send(Work::Audit(Box::new(sample)));
    }
}

/// Runs the inputs from `position` on, and calls `commit` with every step in input order.
pub(crate) fn run(
    corpus: &Corpus,
    encoding: &Encoding<'_>,
    workers: usize,
    position: Position,
    mut commit: impl FnMut(Step, &Auditor<'_>) -> Result<()>,
) -> Result<()> {
    let (order, promises) = bounded::<Promise>(workers + SPARE_SLABS);
    let (slabs, work) = bounded::<Work<'_>>(workers + SPARE_SLABS);
    let (samples, audits) = unbounded::<Work<'_>>();
    let (failures, failed) = unbounded::<Fault>();
    thread::scope(|scope| {
        scope.spawn(move || {
            let reader = Reader { corpus, order: &order, slabs: &slabs };
            if let Err(fault) = reader.run(position) {
                let _ = order.send(Promise::Failed(fault));
            }
        });
        for _ in 0..workers {
            let (work, audits, failures) = (work.clone(), audits.clone(), failures.clone());
            scope.spawn(move || {
                // Samples first: they are few, and what they find makes the rest void.
                loop {
                    let next = match audits.try_recv() {
                        Ok(sample) => Ok(sample),
                        Err(_) => {
                            crossbeam::select! { recv(work) -> w => w, recv(audits) -> a => a }
                        }
                    };
                    match next {
                        Ok(next) => perform(next, encoding, &failures),
                        // One channel is closed: drain the other.
                        Err(_) => {
                            audits
                                .iter()
                                .chain(work.iter())
                                .for_each(|w| perform(w, encoding, &failures));
                            return;
                        }
                    }
                }
            });
        }
        drop((work, audits, failures));
        let auditor = Auditor(samples);
        let outcome = redeem(promises, &failed, |step| commit(step, &auditor));
        drop(auditor);
        outcome?;
        // Ends when the last worker has: every sample is checked before a build is done.
        failed.iter().next().map_or(Ok(()), Err)
    })
}

fn redeem(
    promises: Receiver<Promise>,
    failed: &Receiver<Fault>,
    mut commit: impl FnMut(Step) -> Result<()>,
) -> Result<()> {
    for promise in promises {
        if let Ok(fault) = failed.try_recv() {
            return Err(fault);
        }
        match promise {
            Promise::Step(step) => commit(step)?,
            Promise::Failed(fault) => return Err(fault),
            Promise::Slab { reply, raw_bytes } => {
                let items =
                    reply.recv().map_err(|_| Fault::bug("a worker of the build died"))??;
                commit(Step::Slab { items, raw_bytes })?;
            }
        }
    }
    Ok(())
}

/// The reader stopped because the committer did: its error is the one to tell.
fn gone<T>(_: T) -> Fault {
    Fault::bug("the committer of the build died")
}

struct Reader<'a, 'b> {
    corpus: &'a Corpus,
    order: &'b Sender<Promise>,
    slabs: &'b Sender<Work<'a>>,
}

impl<'a> Reader<'a, '_> {
    fn run(&self, mut position: Position) -> Result<()> {
        for (index, source) in self.corpus.sources.iter().enumerate().skip(position.source) {
            if index > position.source {
                position = Position::start(index, 0);
            }
            let files = if source.taken.is_some() { 0 } else { source.files.len() };
            for number in position.file..files {
                if number > position.file {
                    position = Position::start(index, number);
                }
                self.file(source, number, &position)?;
            }
            self.order.send(Promise::Step(Step::SourceEnd)).map_err(gone)?;
        }
        Ok(())
    }

    /// Reads one file from `position` on.
    fn file(&self, source: &'a Source, number: usize, position: &Position) -> Result<()> {
        let file = &source.files[number];
        let max_document_bytes = self.corpus.max_document_bytes;
        let limits = Limits { max_document_bytes, ..Limits::default() };
        let mut input = source::open(&file.path, file.format, &source.fields, &limits)?;
        let mut passed = Position::start(position.source, number);
        while let Some(slab) = input.next_slab()? {
            let mut skip = 0;
            if passed.documents < position.documents {
                match pass(&slab, source, &mut passed, position)? {
                    Some(records) => skip = records,
                    None => continue,
                }
            }
            let (reply, promise) = bounded(1);
            let (raw_bytes, _) = input.content();
            let promise = Promise::Slab { reply: promise, raw_bytes };
            let slab = Box::new(slab);
            let work = Work::Encode { slab, skip, source, file: &file.shown, reply };
            self.order.send(promise).map_err(gone)?;
            self.slabs.send(work).map_err(gone)?;
        }
        if passed.documents < position.documents {
            return Err(changed(&file.shown));
        }
        let (bytes, sha256) = input.content();
        let record = InputRecord { path: file.shown.clone(), bytes, sha256, documents: 0 };
        self.order.send(Promise::Step(Step::FileEnd(record))).map_err(gone)
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

fn perform(work: Work<'_>, encoding: &Encoding<'_>, failures: &Sender<Fault>) {
    match work {
        Work::Encode { slab, skip, source, file, reply } => {
            // Nobody waits for the reply once the build has failed.
            let _ = reply.send(encode_slab(*slab, skip, source, file, encoding));
        }
        Work::Audit(sample) => {
            if let Err(fault) = audit::check(encoding.tokenizer, &sample) {
                let _ = failures.send(fault);
            }
        }
    }
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
