//! Training a tokenizer: byte-level BPE over the words of a corpus.
//!
//! Text is split into words by cl100k's expression, which both encoders support (in `fastokens` on its fast path).
//! Words are counted, and the most frequent pair of neighbouring tokens becomes a token, repeatedly. Of equally
//! frequent pairs, the one with the lowest ids wins.
//!
//! Invariant: the bytes of the result depend only on the texts and the options, not on the number of threads or the
//! order of documents. Documents held out for validation are not used.

mod file;
mod merge;
mod words;

use std::collections::BTreeMap;
use std::io::ErrorKind;

use contract::{Digest, Fault, Identity, Key, Purpose, Ratio, Result, draw};
use store::{Location, disk};

use crate::assembly::request::nothing_left;
use crate::corpus::Corpus;
use crate::progress::{Measure, Progress};

/// The expression that cuts text into words, exactly as in `fastokens`, which recognizes it by its text.
pub const SPLIT: &str = fastokens::tiktoken::CL100K_BASE_PATTERN;

/// Every byte is a token.
const BYTES: u32 = 256;

/// What determines a tokenizer, in addition to the corpus.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens in the vocabulary, special ones included.
    pub vocab: u32,
    /// Special tokens, which get the last ids.
    pub special: Vec<String>,
    /// The share of documents used, chosen by their content.
    pub sample: Ratio,
}

/// Options that affect only speed and messages.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that count words.
    pub workers: usize,
    /// Whether progress is not shown.
    pub quiet: bool,
}

/// A trained tokenizer.
#[derive(Clone, Debug)]
pub struct Trained {
    /// The bytes of `tokenizer.json`.
    pub bytes: Vec<u8>,
    /// Tokens in the vocabulary: fewer than asked for where the text has no more pairs that occur twice.
    pub vocab: u32,
    /// Documents used.
    pub documents: u64,
    /// Bytes of their text.
    pub text_bytes: u64,
    /// Different words in it.
    pub words: u64,
    /// Counts of the records of each source.
    pub records: Vec<Records>,
}

/// Counts of the records of a source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Records {
    /// The source.
    pub source: String,
    /// Records that are documents, in the sample or not.
    pub kept: u64,
    /// The number of dropped records by reason: those that the corpus says to skip, and those dropped by steps.
    pub dropped: BTreeMap<String, u64>,
}

impl Records {
    /// The number of dropped records.
    pub fn dropped(&self) -> u64 {
        self.dropped.values().sum()
    }

    /// The number of dropped records for each reason.
    pub fn reasons(&self) -> impl Iterator<Item = (u64, &str)> {
        self.dropped.iter().map(|(reason, count)| (*count, reason.as_str()))
    }

    /// Refuses a source of which nothing is left, as a build does.
    fn check_kept(&self) -> Result<()> {
        match self.kept > 0 || self.dropped.is_empty() {
            true => Ok(()),
            false => Err(nothing_left(&self.source, self.reasons())),
        }
    }
}

impl Trained {
    /// Writes `tokenizer.json` atomically. Returns whether it is new: an existing file with the same bytes is kept, and
    /// one with other bytes is refused, because stores may have been built with it.
    pub fn write(&self, out: impl Into<Location>) -> Result<bool> {
        let out = out.into();
        let is_free = || match out.size() {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
            size => size.map(|_| false).map_err(|error| out.fault("look at", &error)),
        };
        if is_free()? {
            let new = match &out {
                Location::Local(path) => disk::write_atomic_if(path, &self.bytes, is_free)?,
                Location::Object(_) => out.write(&self.bytes).map(|()| true)?,
            };
            if new {
                return Ok(true);
            }
        }
        let (ours, there) = (Identity::of_bytes(&self.bytes), out.content()?.1);
        if ours == there {
            return Ok(false);
        }
        Err(Fault::usage("another file is there already, and is never overwritten")
            .at(out.to_string())
            .found(format!("SHA-256 {there}"))
            .wanted(format!("SHA-256 {ours}, which this corpus and these options give"))
            .hint("name another --out, or remove that file"))
    }
}

/// Trains a tokenizer on the documents of a corpus.
pub fn train(corpus: &Corpus, request: &Request, options: Options) -> Result<Trained> {
    let special = u32::try_from(request.special.len()).unwrap_or(u32::MAX);
    let smallest = BYTES.saturating_add(special);
    if request.vocab < smallest {
        return Err(Fault::usage("the vocabulary is too small")
            .at("--vocab")
            .found(request.vocab)
            .wanted(format!("at least {smallest}: every byte and every special token")));
    }
    check_special(&request.special)?;
    let mut progress = Progress::new("train", Measure::Bytes, corpus.bytes()?, options.quiet);
    let counted = words::count(corpus, request.sample, options.workers, &mut progress)?;
    counted.records.iter().try_for_each(Records::check_kept)?;
    if counted.words.is_empty() {
        let records: u64 = counted.records.iter().map(|records| records.kept).sum();
        return Err(Fault::data("the corpus has no documents to train a tokenizer on")
            .at(corpus.file.to_string())
            .found(match records {
                0 => "no record".to_owned(),
                records => {
                    format!(
                        "{}, none of them in the sample",
                        contract::counted(records, "document")
                    )
                }
            })
            .hint("check `files` and `text` in the corpus file, and --sample"));
    }
    drop(progress);
    let size = request.vocab - special;
    let mut progress =
        Progress::new("merge", Measure::Count("token"), u64::from(size), options.quiet);
    let learned = merge::learn(&counted.words, size, || progress.add(1));
    drop(progress);
    let bytes = file::tokenizer_json(&learned, &request.special)?;
    Ok(Trained {
        bytes,
        vocab: learned.tokens.len() as u32 + special,
        documents: counted.documents,
        text_bytes: counted.text_bytes,
        words: counted.words.len() as u64,
        records: counted.records,
    })
}

/// Whether a document with this content is in the sample.
fn sampled(content: Digest, share: Ratio) -> bool {
    let key = Key::from_seed(0).child("tokenizer sample");
    draw::happens(key, Purpose::Split, content.0 as u64, share)
}

fn check_special(special: &[String]) -> Result<()> {
    let wrong = |what: &str, token: &str| {
        Err(Fault::usage(what).at("--special").found(format!("{token:?}")))
    };
    for (index, token) in special.iter().enumerate() {
        if token.chars().count() < 2 {
            return wrong("a special token needs two characters or more", token);
        }
        if special[..index].contains(token) {
            return wrong("a special token is named twice", token);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
