//! `zdata schema`: the keys of our files as JSON Schema, for editors and for the tables of keys on our pages.

use clap::ValueEnum;
use contract::terminal::print_raw;
use contract::{Fault, Result};

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: zdata schema corpus > corpus.schema.json; \
    an editor with Taplo reads it where the file begins with #:schema corpus.schema.json")]
pub(crate) struct Args {
    /// Which file.
    #[arg(value_enum)]
    file: Kind,
}

/// A file that people write.
#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Corpus,
    Curriculum,
}

/// Prints the schema.
pub(crate) fn exec(args: &Args) -> Result<()> {
    let schema = match args.file {
        Kind::Corpus => ingest::corpus::schema(),
        Kind::Curriculum => curriculum::schema(),
    };
    let text = serde_json::to_string_pretty(&schema);
    print_raw(&(text.map_err(|error| Fault::bug(error.to_string()))? + "\n"))
}
