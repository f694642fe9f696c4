//! `zdata export`.

use contract::{Result, counted, note};
use ingest::interop::Peer;
use ingest::interop::export::{Export, Exported, Note, export};
use store::{Location, Split};

use super::output;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: zdata export store --format megatron --out megatron --source web")]
pub(crate) struct Args {
    /// The store: a folder or a URL.
    #[arg(value_parser = super::place())]
    store: Location,
    /// Whose layout.
    #[arg(long, value_enum)]
    format: Format,
    /// The folder to make, or a URL: files lie in OUT/SOURCE/SPLIT.
    #[arg(long, value_parser = super::output_place())]
    out: Location,
    /// This source only.
    #[arg(long)]
    source: Option<String>,
    /// This split only.
    #[arg(long, value_enum)]
    split: Option<Which>,
    /// Tell a program what was written.
    #[arg(long)]
    json: bool,
}

/// A peer, as the command line names it.
#[derive(Clone, Copy, clap::ValueEnum)]
pub(crate) enum Format {
    /// Megatron-LM: .bin and .idx.
    Megatron,
    /// datatrove (nanotron): .ds and .ds.index.
    Datatrove,
    /// OLMo and dolma: .npy without a header, and .csv.gz.
    Olmo,
    /// MosaicML Streaming: MDS shards.
    Mds,
}

impl Format {
    pub(crate) fn peer(self) -> Peer {
        match self {
            Format::Megatron => Peer::Megatron,
            Format::Datatrove => Peer::Datatrove,
            Format::Olmo => Peer::Olmo,
            Format::Mds => Peer::Mds,
        }
    }
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Which {
    Train,
    Validation,
}

/// Does it.
pub(crate) fn exec(args: Args, quiet: bool) -> Result<()> {
    let split = args.split.map(|which| match which {
        Which::Train => Split::Train,
        Which::Validation => Split::Validation,
    });
    let Args { store, format, out, source, json, .. } = args;
    let request = Export { store, out, peer: format.peer(), source, split, quiet };
    let note = match export(&request)? {
        Exported::UpToDate(note) => {
            note!("up to date: these files were exported from the same store");
            note
        }
        Exported::Done(note, summary) => {
            note!("{summary}");
            note
        }
    };
    output::answer(json, &note, || text(&request, &note))
}

fn text(request: &Export, note: &Note) -> String {
    let mut told = String::new();
    for stream in &note.streams {
        let files: Vec<String> = stream.files.iter().map(|file| file.name.clone()).collect();
        let (first, more) =
            (files.first().map_or("", String::as_str), files.len().saturating_sub(1));
        told += &format!(
            "{} {}: {}, {} in {} and {more} more\n",
            stream.source,
            stream.split,
            counted(stream.documents, "document"),
            counted(stream.tokens, "token"),
            request.out.join(first),
        );
    }
    told
}
