//! `zdata tokenizer train`.

use std::collections::BTreeMap;

use contract::{Identity, Ratio, Result, counted, note};
use ingest::train::{Options, Records, Request, Trained, train};
use ingest::{Corpus, inspect};
use serde_json::json;
use store::Location;

use super::digest::default_workers;
use super::output;

/// What to do with a tokenizer.
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Train a byte-level BPE tokenizer on the documents of a corpus, validation left out.
    ///
    /// The same corpus gives the same bytes, whatever the number of workers.
    ///
    /// Example: zdata tokenizer train corpus.toml --vocab 8192 --out tokenizer.json
    Train(Args),
}

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The corpus file; it needs no `tokenizer`.
    #[arg(value_parser = super::place())]
    corpus: Location,
    /// Tokens in the vocabulary, special ones included.
    #[arg(long)]
    vocab: u32,
    /// The tokenizer to write, in Hugging Face's format: a path or a URL. Another one there is never
    /// overwritten.
    #[arg(long, value_parser = super::output_place())]
    out: Location,
    /// A special token; repeat it for more. They get the last ids.
    #[arg(long = "special", default_value = "<|endoftext|>")]
    special: Vec<String>,
    /// The share of documents looked at, chosen by their content ("1/10").
    #[arg(long, default_value = "1", value_parser = share)]
    sample: Ratio,
    /// Threads that count words [default: one for each core]; never changes a bit.
    #[arg(long, value_parser = super::workers)]
    workers: Option<usize>,
    /// Tell a program what was trained.
    #[arg(long)]
    json: bool,
}

/// A share of the documents: there are no more than all.
fn share(text: &str) -> std::result::Result<Ratio, String> {
    let share: Ratio = text.parse()?;
    match share.num() <= share.den() && !share.is_zero() {
        true => Ok(share),
        false => Err(format!(
            "expected a share of the documents, more than 0 and at most 1, found {share}"
        )),
    }
}

/// Does it.
pub(crate) fn exec(command: Command, quiet: bool) -> Result<()> {
    let Command::Train(args) = command;
    let corpus = Corpus::read(&args.corpus)?;
    let options = Options { workers: args.workers.unwrap_or_else(default_workers), quiet };
    let request = Request { vocab: args.vocab, special: args.special, sample: args.sample };
    let trained = train(&corpus, &request, options)?;
    if !trained.write(&args.out)? {
        note!("already there: {} has these very bytes", args.out);
    }
    tell(&args.out, &request, &trained, args.json)
}

fn tell(out: &Location, request: &Request, trained: &Trained, json: bool) -> Result<()> {
    let Trained { bytes, vocab, documents, text_bytes, words, records } = trained;
    let identity = Identity::of_bytes(bytes);
    note!(
        "{} from {}, {} of text, {}",
        counted(*vocab, "token"),
        counted(*documents, "document"),
        counted(*text_bytes, "byte"),
        counted(*words, "word"),
    );
    let incomplete: Vec<&Records> = records.iter().filter(|it| !it.dropped.is_empty()).collect();
    for records in &incomplete {
        let read = records.kept + records.dropped();
        note!("{}", inspect::dropped_of(&records.source, read, records.reasons()));
    }
    if *vocab < request.vocab {
        note!(
            "note: {vocab} tokens instead of {}: no further pair of tokens occurs twice in this text",
            request.vocab
        );
    }
    let answer = json!({
        "path": out.to_string(), "sha256": identity, "vocab": vocab, "documents": documents,
        "text_bytes": text_bytes, "words": words,
        "dropped": incomplete.iter().map(|records| records.dropped()).sum::<u64>(),
        "reasons": incomplete.iter().map(|it| (&it.source, &it.dropped)).collect::<BTreeMap<_, _>>(),
    });
    output::answer(json, &answer, || format!("{identity}  {out}\n"))
}
