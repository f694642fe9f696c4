//! `zdata build`.

use std::path::PathBuf;
use std::thread;

use contract::{Fault, Result};
use ingest::build::Options;
use ingest::tokenize::Engine;
use ingest::{Corpus, Outcome, inspect};

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The corpus file: which inputs, which tokenizer.
    corpus: PathBuf,
    /// The folder that becomes the store.
    #[arg(long)]
    out: PathBuf,
    /// Threads that encode [default: one for each core]; never changes a bit.
    #[arg(long)]
    workers: Option<usize>,
    /// The library that encodes; never changes a bit.
    #[arg(long, value_enum, default_value_t = Encoder::Fastest)]
    encoder: Encoder,
    /// Tell a program what was built.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Encoder {
    /// fastokens where it covers the tokenizer, Hugging Face tokenizers otherwise.
    Fastest,
    /// Hugging Face tokenizers.
    Reference,
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    if args.workers == Some(0) {
        return Err(Fault::usage("a build needs a worker")
            .at("--workers")
            .found(0)
            .wanted("at least 1"));
    }
    let corpus = Corpus::read(&args.corpus)?;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let engine = match args.encoder {
        Encoder::Fastest => Engine::Fastest,
        Encoder::Reference => Engine::Reference,
    };
    let options = Options { workers: args.workers.unwrap_or(cores), engine, quiet: false };
    let manifest = match ingest::build(&corpus, &args.out, options)? {
        Outcome::UpToDate(manifest) => {
            eprintln!("up to date: the store was built from this very request");
            manifest
        }
        Outcome::Built { manifest, summary, audited: (documents, bytes) } => {
            eprintln!("{summary}");
            eprintln!(
                "audit: {documents} documents ({bytes} bytes) encoded again by tokenizers, no difference"
            );
            manifest
        }
    };
    if args.json {
        println!("{}", inspect::json(&args.out, &manifest));
    } else {
        println!("{}  {}", manifest.digest, args.out.display());
    }
    Ok(())
}
