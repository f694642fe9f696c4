//! `zdata inspect`: what a store holds, and the accounting that says what became of every document read.

use std::fmt::Write as _;

use contract::words::named;
use contract::{Ratio, terminal};
use serde_json::{Value, json};
use store::{Change, Location, Manifest, PreparedRecord, SourceRecord, StreamRecord};

use crate::dropped::{Kept, Line};
use crate::source::place;

/// Documents read, kept and dropped, of one source: they balance to zero.
pub struct Accounting {
    /// Records of all inputs.
    pub read: u64,
    /// Documents trained on.
    pub train: u64,
    /// Documents held out.
    pub validation: u64,
    /// Documents dropped.
    pub dropped: u64,
}

impl Accounting {
    /// The accounting of a source.
    pub fn of(source: &SourceRecord) -> Self {
        Accounting {
            read: source.inputs.iter().map(|input| input.documents).sum(),
            train: source.train.documents,
            validation: source.validation.documents,
            dropped: source.dropped.iter().map(|dropped| dropped.documents).sum(),
        }
    }

    /// Read minus kept minus dropped.
    pub fn balance(&self) -> i128 {
        let Accounting { read, train, validation, dropped } = self;
        i128::from(*read) - i128::from(*train) - i128::from(*validation) - i128::from(*dropped)
    }
}

/// Bytes of text of a source with steps of preparation: they balance to zero as well.
pub struct Bytes {
    /// Of all records, before the first step.
    pub read: u64,
    /// By which steps made documents longer that were kept.
    pub added: u64,
    /// By which steps made them shorter.
    pub removed: u64,
    /// Of dropped records.
    pub dropped: u64,
    /// Of what was encoded.
    pub kept: u64,
}

impl Bytes {
    /// The accounting of a source, if it has steps.
    pub fn of(source: &SourceRecord) -> Option<Self> {
        let PreparedRecord { read_bytes, changes, files: _ } = source.prepared.as_ref()?;
        Some(Bytes {
            read: *read_bytes,
            added: changes.iter().map(|change| change.added).sum(),
            removed: changes.iter().map(|change| change.removed).sum(),
            dropped: source.dropped.iter().map(|dropped| dropped.bytes).sum(),
            kept: source.train.text_bytes + source.validation.text_bytes,
        })
    }

    /// Read and added minus removed, dropped and kept.
    pub fn balance(&self) -> i128 {
        let Bytes { read, added, removed, dropped, kept } = self;
        i128::from(*read) + i128::from(*added)
            - i128::from(*removed)
            - i128::from(*dropped)
            - i128::from(*kept)
    }
}

/// What a person should know of a build that ended well: what was dropped, and splits without documents.
pub fn notes(manifest: &Manifest) -> Vec<String> {
    let mut notes = Vec::new();
    for source in &manifest.sources {
        let accounting = Accounting::of(source);
        if accounting.read == 0 {
            let files = many(source.inputs.len() as u64, "file");
            notes.push(format!("note: source {}: no record in its {files}", source.name));
            continue;
        }
        if accounting.dropped > 0 {
            let dropped = source.dropped.iter();
            let dropped = dropped.map(|dropped| (dropped.documents, dropped.reason.as_str()));
            notes.push(dropped_of(&source.name, accounting.read, dropped));
        }
        if accounting.validation == 0 && manifest.validation != "0" {
            notes.push(format!("note: {}", none_held_out(manifest, source)));
        }
    }
    notes
}

/// What was dropped of so many records of a source, for which reasons.
pub fn dropped_of<'a>(
    source: &str,
    read: u64,
    dropped: impl Iterator<Item = (u64, &'a str)>,
) -> String {
    let dropped: Vec<(u64, &str)> = dropped.collect();
    let all = dropped.iter().map(|(count, _)| count).sum();
    let reasons = dropped.iter().map(|(count, reason)| format!("{} {reason}", grouped(*count)));
    let reasons = reasons.collect::<Vec<_>>().join(", ");
    format!("dropped of {source}: {} of {} ({reasons})", grouped(all), many(read, "record"))
}

/// Documents expected in a split from which on an empty one is no chance (once in 5 * 10^8 splits of different texts).
const EXPECTED: u128 = 20;

/// Why a source has no validation documents although a share of them was asked for.
fn none_held_out(manifest: &Manifest, source: &SourceRecord) -> String {
    let (name, share) = (&source.name, &manifest.validation);
    let documents = source.train.documents;
    let few = share.parse::<Ratio>().is_ok_and(|share| {
        u128::from(documents) * u128::from(share.num()) < EXPECTED * u128::from(share.den())
    });
    let why = match (few, documents) {
        (true, 1) => "is too little for",
        (true, _) => "are too few for",
        (false, _) => "hold too few different texts for",
    };
    let documents = many(documents, "document");
    format!("source {name}: {documents} {why} a validation split of {share}: none was held out")
}

/// A line of a list of dropped records, told.
pub struct Shown {
    /// For a program.
    pub json: Value,
    /// For a person.
    pub text: String,
}

/// Tells a line of the list of `source`: names stand for the numbers of files.
pub fn dropped(manifest: &Manifest, source: &SourceRecord, line: &Line) -> Shown {
    let Line { file, group, row, id, reason, bytes, kept, spans } = line;
    let name = |source: &SourceRecord, file: usize| {
        source.inputs.get(file).map_or("unknown file".to_owned(), |input| input.path.clone())
    };
    let file = name(source, *file);
    let mut text = format!("{} {}", source.name, place(&terminal::name(&file), *group, *row));
    if let Some(id) = id {
        let _ = write!(text, " id {id:?}");
    }
    let _ = write!(text, "  {reason}");
    let mut json = json!({"source": source.name, "file": file, "row": row, "reason": reason});
    let known = [("id", json!(id)), ("group", json!(group)), ("bytes", json!(bytes))];
    for (key, value) in known.into_iter().filter(|(_, value)| !value.is_null()) {
        json[key] = value;
    }
    if let Some(Kept { source: of, file, group, row }) = kept {
        let file = manifest.source(of).map_or("unknown file".to_owned(), |of| name(of, *file));
        let _ = write!(
            text,
            " (kept at this step: {of} {})",
            place(&terminal::name(&file), *group, *row)
        );
        json["kept"] = json!({"source": of, "file": file, "group": group, "row": row});
    }
    if !spans.is_empty() {
        let removed: u64 = spans.iter().map(|(from, to)| u64::from(to - from)).sum();
        let _ = write!(text, " (removed {} of it)", many(removed, "byte"));
        json["spans"] = json!(spans);
    }
    text.push('\n');
    Shown { json, text }
}

/// The answer for a program.
pub fn json(store: impl Into<Location>, manifest: &Manifest) -> Value {
    let stream = |stream: &StreamRecord| {
        json!({
            "tokens": stream.tokens, "documents": stream.documents, "text_bytes": stream.text_bytes,
            "bytes": stream.bytes(), "shards": stream.shards.len(), "digest": stream.digest,
        })
    };
    let source = |source: &SourceRecord| {
        let accounting = Accounting::of(source);
        let mut answer = json!({
            "name": source.name, "preparation": source.preparation,
            "train": stream(&source.train), "validation": stream(&source.validation),
            "inputs": source.inputs, "dropped": source.dropped,
            "dropped_file": source.dropped_file,
            "accounting": {
                "read": accounting.read, "train": accounting.train, "validation": accounting.validation,
                "dropped": accounting.dropped, "balance": accounting.balance() as i64,
            },
        });
        if let (Some(bytes), Some(prepared)) = (Bytes::of(source), &source.prepared) {
            answer["prepared"] = json!({
                "read_bytes": bytes.read, "changes": prepared.changes, "dropped_bytes": bytes.dropped,
                "kept_bytes": bytes.kept, "balance": bytes.balance() as i64, "files": prepared.files,
            });
        }
        answer
    };
    json!({
        "store": store.into().to_string(), "digest": manifest.digest, "request": manifest.request, "format": manifest.format,
        "unit": manifest.unit, "validation": manifest.validation, "token_bytes": manifest.token_bytes,
        "tokenizer": manifest.tokenizer,
        "sources": manifest.sources.iter().map(source).collect::<Vec<_>>(),
    })
}

/// The answer for a person.
pub fn text(store: impl Into<Location>, manifest: &Manifest) -> String {
    let mut out = String::new();
    let marker = |id: Option<u32>| id.map_or("none".to_owned(), |id| id.to_string());
    let tokenizer = &manifest.tokenizer;
    let lines = [
        ("store", store.into().to_string()),
        ("digest", manifest.digest.to_string()),
        ("format", format!("{}, {} bytes a token", manifest.format, manifest.token_bytes)),
        (
            "tokenizer",
            format!(
                "{} (vocab {}, begin {}, end {}, {})",
                tokenizer.sha256.short(),
                tokenizer.vocab,
                marker(tokenizer.begin),
                marker(tokenizer.end),
                tokenizer.encoder,
            ),
        ),
        (
            "unit",
            format!(
                "{}: the run of tokens that is shuffled as one, which every seq_len divides",
                many(manifest.unit, "token")
            ),
        ),
        ("validation", format!("{} of the documents held out", manifest.validation)),
    ];
    for (name, value) in lines {
        let _ = writeln!(out, "{name:<11} {value}");
    }
    let _ = writeln!(
        out,
        "\n{:<16} {:<11} {:>15} {:>12} {:>10} {:>8} {:>7}  digest",
        "source", "split", "tokens", "documents", "bytes", "tok/doc", "shards"
    );
    for source in &manifest.sources {
        row(&mut out, &source.name, "train", &source.train);
        row(&mut out, &source.name, "validation", &source.validation);
    }
    let _ = writeln!(out, "\naccounting (documents)");
    for source in &manifest.sources {
        accounting(&mut out, source);
    }
    out
}

fn row(out: &mut String, name: &str, split: &str, stream: &StreamRecord) {
    let per = stream.tokens.checked_div(stream.documents).unwrap_or(0);
    let _ = writeln!(
        out,
        "{name:<16} {split:<11} {:>15} {:>12} {:>10} {per:>8} {:>7}  {}",
        grouped(stream.tokens),
        grouped(stream.documents),
        size(stream.bytes()),
        stream.shards.len(),
        stream.digest.short(),
    );
}

fn accounting(out: &mut String, source: &SourceRecord) {
    let accounting = Accounting::of(source);
    let files = source.inputs.len() as u64;
    let _ = write!(
        out,
        "{:<16} {} read from {} = {} train + {} validation",
        source.name,
        grouped(accounting.read),
        many(files, "file"),
        grouped(accounting.train),
        grouped(accounting.validation),
    );
    for dropped in &source.dropped {
        let (documents, bytes) = (grouped(dropped.documents), size(dropped.bytes));
        let _ = write!(out, " + {documents} {} ({bytes})", dropped.reason);
    }
    let _ = writeln!(out, "; balance {}", accounting.balance());
    for file in source.lists() {
        let _ = writeln!(out, "{:<16} {}/{} ({})", "", source.name, file.name, size(file.bytes));
    }
    let (Some(bytes), Some(prepared)) = (Bytes::of(source), &source.prepared) else { return };
    let Bytes { read, added, removed, dropped, kept } = &bytes;
    let [read, added, removed, dropped, kept] =
        [read, added, removed, dropped, kept].map(|n| grouped(*n));
    let _ = writeln!(
        out,
        "{:<16} bytes of text: {read} read + {added} added - {removed} removed - {dropped} dropped = {kept} kept; \
         balance {}",
        "",
        bytes.balance()
    );
    for Change { step, documents, added, removed } in &prepared.changes {
        let documents = many(*documents, "document");
        let [added, removed] = [added, removed].map(|n| grouped(*n));
        let _ = writeln!(
            out,
            "{:<16} step {step}: changed {documents}, {added} added, {removed} removed",
            ""
        );
    }
}

/// Digits in groups of three.
pub fn grouped(number: u64) -> String {
    indicatif::HumanCount(number).to_string()
}

/// So many things of this name, the number in groups of three.
pub fn many(number: u64, name: &str) -> String {
    format!("{} {}", grouped(number), named(number, name))
}

fn size(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}
