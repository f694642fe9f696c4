//! From the files of a part to its documents, in input order: slabs are read, parsed, prepared and encoded.

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};

use contract::draw::happens;
use contract::{Digest, Fault, Key, Purpose, Ratio, Result};
use store::Split;

use crate::corpus::{Corpus, drops};
use crate::prepared::{InFile, Prepared, Trace};
use crate::run_parts::Drive;
use crate::source::{self, Content, Document, Parsed, Row};
use crate::tokenize::Tokenizer;
use crate::tokenize::audit::{self, Sample, Wanted};
use crate::walk::{Part, Walk, place};

/// A longer document is audited by one piece.
const AUDIT_WHOLE_BYTES: usize = 1_000_000;

/// Everything that determines the tokens of a document.
pub(crate) struct Encoding<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) begin: Option<u32>,
    pub(crate) end: Option<u32>,
    pub(crate) validation: Ratio,
    pub(crate) wanted: &'a Wanted,
    pub(crate) prepared: &'a Prepared<'a>,
}

/// The result for one record.
pub(crate) enum Item {
    Document(Box<Encoded>),
    Dropped(Box<Dropped>),
}

/// A record that is not kept.
pub(crate) struct Dropped {
    pub(crate) reason: Cow<'static, str>,
    pub(crate) row: Row,
    /// Its own id, where it could be read.
    pub(crate) id: Option<String>,
    pub(crate) bytes: u64,
    /// The same as a fault.
    pub(crate) fault: Fault,
}

/// A document, encoded.
pub(crate) struct Encoded {
    pub(crate) id: Option<String>,
    pub(crate) row: u64,
    pub(crate) group: Option<u32>,
    pub(crate) bytes: Option<(u64, u64)>,
    /// The values of the kept columns.
    pub(crate) kept: Vec<Option<String>>,
    pub(crate) text_bytes: u64,
    /// The digest of its text as encoded.
    pub(crate) content: Digest,
    /// What preparation steps did to it, if there are any.
    pub(crate) trace: Option<Trace>,
    pub(crate) split: Split,
    pub(crate) tokens: Vec<u32>,
    pub(crate) sample: Option<Sample>,
}

/// What was read, in input order.
pub(crate) enum Step {
    Slab {
        items: Vec<Item>,
        /// Bytes of the raw file read when the slab was cut.
        raw_bytes: u64,
    },
    /// The end of a file, or of the groups that are read.
    FileEnd(Content),
}

/// Samples that wait for a worker to encode them again.
#[derive(Default)]
pub(crate) struct Auditor(Mutex<Vec<Sample>>);

impl Auditor {
    /// Queues a sample for the next free worker.
    pub(crate) fn check(&self, sample: Sample) {
        self.waiting().push(sample);
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Vec<Sample>> {
        // A push or a pop is atomic, so a poisoned lock does no harm.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks the waiting samples now: there are few, and a difference makes all other work useless.
    fn check_waiting(&self, tokenizer: &Tokenizer) -> Result<()> {
        loop {
            let Some(sample) = self.waiting().pop() else { return Ok(()) };
            audit::check(tokenizer, &sample)?;
        }
    }
}

/// Runs the inputs, and calls `take` with every step in input order.
pub(crate) fn run(
    corpus: &Corpus,
    encoding: &Encoding<'_>,
    drive: &Drive<'_>,
    mut take: impl FnMut(Step, &Auditor) -> Result<()>,
) -> Result<()> {
    let auditor = Auditor::default();
    let mut walk = Walk::new(corpus);
    let step = |part: Part| {
        auditor.check_waiting(encoding.tokenizer)?;
        step(part, corpus, encoding)
    };
    let take = |step: Option<Step>| step.map_or(Ok(()), |step| take(step, &auditor));
    drive.run(|| walk.next(), step, |part| place(corpus, part), take)?;
    // Every sample is checked before a part is done.
    let left = std::mem::take(&mut *auditor.waiting());
    drive.each(&left, |sample| audit::check(encoding.tokenizer, sample))
}

/// Turns what was read into its step.
pub(crate) fn step(part: Part, corpus: &Corpus, encoding: &Encoding<'_>) -> Result<Option<Step>> {
    Ok(Some(match part {
        Part::Slab { slab, source, file, raw } => {
            let of = &corpus.sources[source];
            let parsed = slab.parse(&of.fields)?;
            // A long document's line is no longer needed, and its tokens need the memory.
            drop(slab);
            let steps = encoding.prepared.in_file(source, file);
            let encode = |parsed| encode(parsed, &of.files[file].shown, encoding, steps.as_ref());
            let items = parsed.into_iter().map(encode).collect::<Result<_>>()?;
            Step::Slab { items, raw_bytes: raw }
        }
        Part::FileEnd { content, .. } => Step::FileEnd(content),
        Part::SourceEnd => return Ok(None),
    }))
}

fn encode(
    parsed: Parsed,
    file: &str,
    encoding: &Encoding<'_>,
    steps: Option<&InFile<'_>>,
) -> Result<Item> {
    let row = match &parsed {
        Parsed::Document(document) => Row { group: document.group, row: document.row },
        Parsed::Dropped { row, .. } => *row,
    };
    let place = || source::place(file, row.group, row.row);
    let dropped = |reason: Cow<'static, str>, id, bytes, fault: Fault| {
        let fault = drops(fault.or_at(place))?;
        Ok(Item::Dropped(Box::new(Dropped { reason, row, id, bytes, fault })))
    };
    let document = match parsed {
        Parsed::Document(document) => document,
        Parsed::Dropped { reason, bytes, fault, .. } => {
            return dropped(reason.into(), None, bytes, fault);
        }
    };
    let (document, trace) = match steps {
        None => (document, None),
        Some(steps) => {
            let id = document.id.clone();
            match steps.apply(document) {
                Ok((document, trace)) => (document, Some(trace)),
                Err(gone) => return dropped(gone.reason.into(), id, gone.bytes, gone.fault),
            }
        }
    };
    let content = Digest::of_bytes(document.text.as_bytes());
    let bytes = trace.as_ref().map_or(document.text.len() as u64, |trace| trace.read);
    match encoding.tokenizer.encode(&document.text) {
        Err(fault) => dropped("refused by the tokenizer".into(), document.id, bytes, fault),
        Ok(ids) if ids.is_empty() => {
            dropped("no tokens".into(), document.id, bytes, Fault::data("it has no tokens"))
        }
        Ok(ids) => {
            let sample = sample(&document, &ids, content, encoding.wanted, place);
            let held_out = held_out(content, encoding.validation);
            let tokens = match (encoding.begin, encoding.end) {
                (None, None) => ids,
                (begin, end) => begin.into_iter().chain(ids).chain(end).collect(),
            };
            Ok(Item::Document(Box::new(Encoded {
                id: document.id,
                row: document.row,
                group: document.group,
                bytes: document.bytes,
                kept: document.kept,
                text_bytes: document.text.len() as u64,
                content,
                trace,
                split: if held_out { Split::Validation } else { Split::Train },
                tokens,
                sample,
            })))
        }
    }
}

/// Whether a document with this content is held out for validation: neither a model nor a tokenizer is trained on it.
pub(crate) fn held_out(content: Digest, share: Ratio) -> bool {
    happens(Key::from_seed(0).child("validation"), Purpose::Split, content.0 as u64, share)
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

#[cfg(test)]
mod tests {
    use contract::Class;

    use super::*;
    use crate::dedup::{Tools, read_through};
    use crate::dropped::List;
    use crate::run_parts::run_parts;
    use crate::testing::Workbench;
    use crate::tokenize::Engine;

    /// `on_error = "skip"` is about records: after any other failure the record may be fine.
    #[test]
    fn only_a_fault_of_data_drops_a_document() {
        let bench = Workbench::new(9);
        let steps =
            "[[prepare]]\nstep = \"trim\"\ncontext = 9\n[[prepare]]\nstep = \"exact-duplicates\"\n";
        let skip = std::fs::read_to_string(bench.corpus("on_error = \"skip\"")).unwrap() + steps;
        let corpus = Corpus::read(bench.write("corpus.toml", skip)).unwrap();
        let bytes = std::fs::read(bench.path("tokenizer.json")).unwrap();
        let tokenizer = Tokenizer::new(bytes, Engine::Fastest).unwrap();
        for class in [Class::Data, Class::Machine, Class::Mismatch, Class::Usage, Class::Bug] {
            let count = move |_: bool, _: &str| Err(Fault::new(class, "it cannot be counted"));
            let tools = Tools::new(&corpus, Some(Box::new(count))).unwrap();
            let lists = corpus.sources.iter().map(|_| List::default()).collect();
            let prepared = Prepared::new(&corpus, &tools, lists);
            let (begin, end, validation) = (None, None, corpus.validation);
            let (tokenizer, wanted) = (&tokenizer, &Wanted::default());
            let encoding =
                Encoding { tokenizer, begin, end, validation, wanted, prepared: &prepared };
            let counts = Mutex::new((0, 0));
            let encode = |_, drive: &Drive<'_>| {
                run(&corpus, &encoding, drive, |step, _| {
                    let Step::Slab { items, .. } = step else { return Ok(()) };
                    let is_dropped = |item: &&Item| matches!(item, Item::Dropped(_));
                    let gone = items.iter().filter(is_dropped).count();
                    let mut counts = counts.lock().unwrap();
                    *counts = (counts.0 + gone, counts.1 + items.len() - gone);
                    Ok(())
                })
            };
            let encoded = run_parts(1, 2, encode, |()| Ok(()));
            let (dropped, kept) = counts.into_inner().unwrap();
            let scan = |_, drive: &Drive<'_>| read_through(&tools, &corpus, drive, |_| Ok(()));
            let scanned = run_parts(1, 2, scan, |()| Ok(()));
            for outcome in [encoded, scanned] {
                match (class, outcome) {
                    (Class::Data, outcome) => outcome.unwrap(),
                    (_, outcome) => assert_eq!(outcome.unwrap_err().class(), class),
                }
            }
            // Each is counted exactly once.
            assert_eq!(dropped, if class == Class::Data { 9 + 4 + 3 } else { 0 }, "{class:?}");
            assert_eq!(kept, 0, "{class:?}");
        }
    }
}
