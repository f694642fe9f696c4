//! `zdata inspect`: what a store holds, and the accounting of every document that was read.

use std::fmt::Write as _;

use contract::words::named;
use contract::{Ratio, terminal};
use serde_json::{Value, json};
use store::{Change, Location, Manifest, PreparedRecord, SourceRecord, StreamRecord};

use crate::dropped::{Kept, Line};
use crate::source::place;

/// Documents read, kept and dropped of one source: they balance to zero.
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

/// Bytes of text of a source with preparation steps: they balance to zero too.
pub struct Bytes {
    /// Of all records, before the first step.
    pub read: u64,
    /// Added by steps to kept documents.
    pub added: u64,
    /// Removed by steps from kept documents.
    pub removed: u64,
    /// Of dropped records.
    pub dropped: u64,
    /// Of encoded documents.
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

/// Tokens of a source: those of documents and those of shards balance to zero.
pub struct Tokens {
    /// Tokens of text.
    pub text: u64,
    /// Tokens put before documents.
    pub begin: u64,
    /// Tokens put after documents.
    pub end: u64,
    /// All that is trained on.
    pub train: u64,
    /// All that is held out.
    pub validation: u64,
    /// In the shards of both splits.
    pub shards: u64,
}

impl Tokens {
    /// The accounting of a source of this store.
    pub fn of(manifest: &Manifest, source: &SourceRecord) -> Self {
        let SourceRecord { train, validation, .. } = source;
        let documents = train.documents + validation.documents;
        let one_each = |marker: Option<u32>| if marker.is_some() { documents } else { 0 };
        let (begin, end) = (one_each(manifest.tokenizer.begin), one_each(manifest.tokenizer.end));
        let shards = train.shards.iter().chain(&validation.shards).map(|shard| shard.tokens).sum();
        let (train, validation) = (train.tokens, validation.tokens);
        let text = (train + validation).saturating_sub(begin + end);
        Tokens { text, begin, end, train, validation, shards }
    }

    /// Tokens of documents minus tokens of shards.
    pub fn balance(&self) -> i128 {
        let Tokens { text, begin, end, train: _, validation: _, shards } = self;
        i128::from(*text) + i128::from(*begin) + i128::from(*end) - i128::from(*shards)
    }
}

/// Tokens and documents of one split of all sources.
fn sums(manifest: &Manifest, of: impl Fn(&SourceRecord) -> &StreamRecord) -> (u64, u64) {
    let streams = manifest.sources.iter().map(of);
    streams.fold((0, 0), |(tokens, documents), stream| {
        (tokens + stream.tokens, documents + stream.documents)
    })
}

/// Notes about a successful build: what was dropped, and splits without documents.
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
        if accounting.train == 0 && accounting.validation > 0 && manifest.validation != "0" {
            notes.push(format!(
                "note: source {}: a validation split of {} holds out {}: none is left to train on",
                source.name,
                manifest.validation,
                many(accounting.validation, "document")
            ));
        }
    }
    notes
}

/// The number of dropped records of a source, with the reasons.
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

/// From this expected size on, an empty split is not due to chance (once in 5 * 10^8 splits of different texts).
const EXPECTED: u128 = 20;

/// Why a source has no validation documents although a share was asked for.
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

/// A line of a list of dropped records, for output.
pub struct Shown {
    /// For programs.
    pub json: Value,
    /// For users.
    pub text: String,
}

/// Shows a line of the list of `source`, with file names in place of indexes.
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
        let _ = write!(text, " (removed {})", many(removed, "byte"));
        json["spans"] = json!(spans);
    }
    text.push('\n');
    Shown { json, text }
}

/// The answer for programs.
pub fn json(store: impl Into<Location>, manifest: &Manifest) -> Value {
    let stream = |stream: &StreamRecord| {
        json!({
            "tokens": stream.tokens, "documents": stream.documents, "text_bytes": stream.text_bytes,
            "bytes": stream.bytes(), "shards": stream.shards.len(), "digest": stream.digest,
        })
    };
    let source = |source: &SourceRecord| {
        let (accounting, tokens) = (Accounting::of(source), Tokens::of(manifest, source));
        let mut answer = json!({
            "name": source.name, "preparation": source.preparation,
            "train": stream(&source.train), "validation": stream(&source.validation),
            "inputs": source.inputs, "dropped": source.dropped,
            "parts": source.parts.len(), "removed_file": source.removed_file,
            "accounting": {
                "read": accounting.read, "train": accounting.train, "validation": accounting.validation,
                "dropped": accounting.dropped, "balance": accounting.balance() as i64,
            },
            "tokens": {
                "text": tokens.text, "begin": tokens.begin, "end": tokens.end, "train": tokens.train,
                "validation": tokens.validation, "shards": tokens.shards, "balance": tokens.balance() as i64,
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
    let sum = |(tokens, documents): (u64, u64)| json!({"tokens": tokens, "documents": documents});
    json!({
        "store": store.into().to_string(), "digest": manifest.digest, "request": manifest.request, "format": manifest.format,
        "unit": manifest.unit, "validation": manifest.validation, "token_bytes": manifest.token_bytes,
        "tokenizer": manifest.tokenizer,
        "train": sum(sums(manifest, |source| &source.train)),
        "validation": sum(sums(manifest, |source| &source.validation)),
        "sources": manifest.sources.iter().map(source).collect::<Vec<_>>(),
    })
}

/// The answer for users.
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
    if manifest.sources.len() > 1 {
        let train = sums(manifest, |source| &source.train);
        let validation = sums(manifest, |source| &source.validation);
        for (split, (tokens, documents)) in [("train", train), ("validation", validation)] {
            let (tokens, documents) = (grouped(tokens), grouped(documents));
            let _ = writeln!(out, "{:<16} {split:<11} {tokens:>15} {documents:>12}", "(all)");
        }
    }
    let _ = writeln!(out, "\naccounting");
    for source in &manifest.sources {
        accounting(&mut out, source);
        tokens(&mut out, manifest, source);
        prepared(&mut out, source);
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
}

fn tokens(out: &mut String, manifest: &Manifest, source: &SourceRecord) {
    let all = Tokens::of(manifest, source);
    let Tokens { text, begin, end, train, validation, shards } = &all;
    let _ = write!(out, "{:<16} tokens: {} of text", "", grouped(*text));
    for (count, name) in
        [(begin, "begin"), (end, "end")].into_iter().filter(|(count, _)| **count > 0)
    {
        let _ = write!(out, " + {} {name}", grouped(*count));
    }
    let [train, validation, shards] = [train, validation, shards].map(|count| grouped(*count));
    let balance = all.balance();
    let _ = writeln!(
        out,
        " = {train} train + {validation} validation, {shards} in shards; balance {balance}"
    );
}

fn prepared(out: &mut String, source: &SourceRecord) {
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

/// A count with its noun, the number in groups of three.
pub fn many(number: u64, name: &str) -> String {
    format!("{} {}", grouped(number), named(number, name))
}

fn size(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use store::{Split, Store};

    use super::*;
    use crate::build::{Outcome, build};
    use crate::corpus::Corpus;
    use crate::testing::{Workbench, options};

    /// The ids of a stream.
    fn ids(store: &Store, source: usize, split: Split) -> Vec<u32> {
        let stream = store.stream(source, split);
        let mut ids = Vec::new();
        stream.read_tokens(0..stream.record().tokens, &mut ids).unwrap();
        ids
    }

    /// The reported token counts match the files, for each source and in total.
    #[test]
    fn tokens_are_counted_and_balance() {
        let bench = Workbench::new(30);
        for (number, key) in ["", "begin = \"<|end|>\""].into_iter().enumerate() {
            let store = bench.path(&format!("store-{number}"));
            let corpus = Corpus::read(bench.corpus(&format!("part_bytes = 256\n{key}"))).unwrap();
            let Outcome::Built { manifest, .. } = build(&corpus, &store, options(2)).unwrap()
            else {
                panic!("there was a store already")
            };
            let opened = Store::open(&store).unwrap();
            let answer = json(&store, &manifest);
            let mut all = [0, 0];
            for (source, told) in answer["sources"].as_array().unwrap().iter().enumerate() {
                let told = &told["tokens"];
                let splits = [Split::Train, Split::Validation];
                let splits = splits.map(|split| ids(&opened, source, split));
                let markers = splits.iter().flatten().filter(|id| **id == 256).count();
                let lengths = splits.each_ref().map(Vec::len);
                assert_eq!([&told["train"], &told["validation"]], lengths);
                assert_eq!(told["text"], lengths.iter().sum::<usize>() - markers);
                let (begin, end) = (markers * number / (number + 1), markers / (number + 1));
                assert_eq!([&told["begin"], &told["end"]], [begin, end]);
                assert_eq!(
                    (&told["shards"], &told["balance"]),
                    (&lengths.iter().sum::<usize>().into(), &0.into())
                );
                all = [all[0] + lengths[0], all[1] + lengths[1]];
            }
            assert_eq!([&answer["train"]["tokens"], &answer["validation"]["tokens"]], all);
            let shown = text(&store, &manifest);
            let row =
                shown.lines().find(|line| line.starts_with("(all)            train")).unwrap();
            assert!(row.contains(&grouped(all[0] as u64)), "{shown}");
            let mut cut = manifest;
            cut.sources[0].train.shards.pop();
            assert!(Tokens::of(&cut, &cut.sources[0]).balance() > 0);
        }
    }
}
