//! `zdata inspect`: what a store holds, and the ledger that says what became of every document read.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::{Value, json};
use store::{Change, InputRecord, Loss, Manifest, PreparedRecord, SourceRecord, StreamRecord};

use crate::verify::bytes;

/// Documents read, kept and lost, of one source: they balance to zero.
pub struct Ledger {
    /// Records of all inputs.
    pub read: u64,
    /// Documents trained on.
    pub train: u64,
    /// Documents held back.
    pub validation: u64,
    /// Documents lost.
    pub lost: u64,
}

impl Ledger {
    /// The ledger of a source.
    pub fn of(source: &SourceRecord) -> Self {
        Ledger {
            read: source.inputs.iter().map(|input| input.documents).sum(),
            train: source.train.documents,
            validation: source.validation.documents,
            lost: source.losses.iter().map(|loss| loss.documents).sum(),
        }
    }

    /// Read minus kept minus lost.
    pub fn balance(&self) -> i128 {
        let Ledger { read, train, validation, lost } = self;
        i128::from(*read) - i128::from(*train) - i128::from(*validation) - i128::from(*lost)
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
    /// Of lost records.
    pub lost: u64,
    /// Of what was encoded.
    pub kept: u64,
}

impl Bytes {
    /// The ledger of a source, if it has steps.
    pub fn of(source: &SourceRecord) -> Option<Self> {
        let PreparedRecord { read_bytes, changes, files: _ } = source.prepared.as_ref()?;
        Some(Bytes {
            read: *read_bytes,
            added: changes.iter().map(|change| change.added).sum(),
            removed: changes.iter().map(|change| change.removed).sum(),
            lost: source.losses.iter().map(|loss| loss.bytes).sum(),
            kept: source.train.text_bytes + source.validation.text_bytes,
        })
    }

    /// Read and added minus removed, lost and kept.
    pub fn balance(&self) -> i128 {
        let Bytes { read, added, removed, lost, kept } = self;
        i128::from(*read) + i128::from(*added)
            - i128::from(*removed)
            - i128::from(*lost)
            - i128::from(*kept)
    }
}

/// The answer for a program.
pub fn json(store: &Path, manifest: &Manifest) -> Value {
    let stream = |stream: &StreamRecord| {
        json!({
            "tokens": stream.tokens, "documents": stream.documents, "text_bytes": stream.text_bytes,
            "bytes": bytes(stream), "shards": stream.shards.len(), "digest": stream.digest,
        })
    };
    let source = |source: &SourceRecord| {
        let ledger = Ledger::of(source);
        let inputs = source.inputs.iter().map(|input| {
            let InputRecord { path, bytes, sha256, documents } = input;
            json!({"path": path, "bytes": bytes, "sha256": sha256, "documents": documents})
        });
        let losses = source.losses.iter().map(|loss| {
            let Loss { reason, documents, bytes } = loss;
            json!({"reason": reason, "documents": documents, "bytes": bytes})
        });
        let mut answer = json!({
            "name": source.name, "preparation": source.preparation,
            "train": stream(&source.train), "validation": stream(&source.validation),
            "inputs": inputs.collect::<Vec<_>>(), "losses": losses.collect::<Vec<_>>(),
            "ledger": {
                "read": ledger.read, "train": ledger.train, "validation": ledger.validation,
                "lost": ledger.lost, "balance": ledger.balance() as i64,
            },
        });
        if let (Some(bytes), Some(prepared)) = (Bytes::of(source), &source.prepared) {
            answer["prepared"] = json!({
                "read_bytes": bytes.read, "changes": prepared.changes, "lost_bytes": bytes.lost,
                "kept_bytes": bytes.kept, "balance": bytes.balance() as i64, "files": prepared.files,
            });
        }
        answer
    };
    json!({
        "store": store, "digest": manifest.digest, "request": manifest.request, "format": manifest.format,
        "unit": manifest.unit, "validation": manifest.validation, "token_bytes": manifest.token_bytes,
        "tokenizer": manifest.tokenizer,
        "sources": manifest.sources.iter().map(source).collect::<Vec<_>>(),
    })
}

/// The answer for a person.
pub fn text(store: &Path, manifest: &Manifest) -> String {
    let mut out = String::new();
    let marker = |id: Option<u32>| id.map_or("none".to_owned(), |id| id.to_string());
    let tokenizer = &manifest.tokenizer;
    let lines = [
        ("store", store.display().to_string()),
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
        ("unit", format!("{} tokens, validation {}", grouped(manifest.unit), manifest.validation)),
    ];
    for (name, value) in lines {
        let _ = writeln!(out, "{name:<10} {value}");
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
    let _ = writeln!(out, "\nledger (documents)");
    for source in &manifest.sources {
        ledger(&mut out, source);
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
        size(bytes(stream)),
        stream.shards.len(),
        stream.digest.short(),
    );
}

fn ledger(out: &mut String, source: &SourceRecord) {
    let ledger = Ledger::of(source);
    let files = source.inputs.len();
    let _ = write!(
        out,
        "{:<16} {} read from {files} files = {} train + {} validation",
        source.name,
        grouped(ledger.read),
        grouped(ledger.train),
        grouped(ledger.validation),
    );
    for loss in &source.losses {
        let (documents, bytes) = (grouped(loss.documents), size(loss.bytes));
        let _ = write!(out, " + {documents} {} ({bytes})", loss.reason);
    }
    let _ = writeln!(out, "; balance {}", ledger.balance());
    let (Some(bytes), Some(prepared)) = (Bytes::of(source), &source.prepared) else { return };
    let Bytes { read, added, removed, lost, kept } = &bytes;
    let [read, added, removed, lost, kept] =
        [read, added, removed, lost, kept].map(|n| grouped(*n));
    let _ = writeln!(
        out,
        "{:<16} bytes of text: {read} read + {added} added - {removed} removed - {lost} lost = {kept} kept; \
         balance {}",
        "",
        bytes.balance()
    );
    for Change { step, documents, added, removed } in &prepared.changes {
        let [documents, added, removed] = [documents, added, removed].map(|n| grouped(*n));
        let _ = writeln!(
            out,
            "{:<16} step {step}: changed {documents} documents, {added} added, {removed} removed",
            ""
        );
    }
    for file in &prepared.files {
        let _ = writeln!(out, "{:<16} {}/{} ({})", "", source.name, file.name, size(file.bytes));
    }
}

/// Digits in groups of three.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn size(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}
