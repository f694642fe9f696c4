//! `zdata import`.

use std::path::PathBuf;

use contract::{Ratio, Result, UNIT_TOKENS_MAX, note};
use ingest::corpus::PART_BYTES;
use ingest::inspect;
use ingest::interop::Width;
use ingest::interop::import::{Import, Imported, Part, import};
use store::{Location, UNIT_TOKENS};

use super::export::Format;
use super::output;

/// Arguments.
#[derive(clap::Args)]
#[command(
    after_help = "Example: zdata import store --format megatron --tokenizer tokenizer.json --source web=data/web"
)]
pub(crate) struct Args {
    /// The folder that becomes the store.
    #[arg(value_parser = super::local("import into a folder, then `zdata publish` it"))]
    store: PathBuf,
    /// Whose layout.
    #[arg(long, value_enum)]
    format: Format,
    /// The tokenizer.json that made the tokens: every id is held against it.
    #[arg(long, value_parser = super::place())]
    tokenizer: Location,
    /// A source and its files, or a folder of them, here or at a URL; again for more.
    #[arg(long = "source", value_name = "NAME=PATH", value_parser = part)]
    sources: Vec<(String, Location)>,
    /// The same; every document is held out for validation.
    #[arg(long, value_name = "NAME=PATH", value_parser = part)]
    held_out: Vec<(String, Location)>,
    /// How a token is stored, where no header says it: uint16, uint32, int64 and so on.
    #[arg(long, value_parser = width)]
    dtype: Option<Width>,
    /// The token that begins each document already, if one does.
    #[arg(long)]
    begin: Option<String>,
    /// The token that ends each document already, if one does.
    #[arg(long)]
    end: Option<String>,
    /// The column of tokens (MDS) [default: tokens].
    #[arg(long)]
    column: Option<String>,
    /// Share of the documents to hold out, taken exactly.
    #[arg(long, default_value = "0", value_parser = share)]
    validation: Ratio,
    /// Tokens in a unit, which every seq_len must divide.
    #[arg(long, default_value_t = UNIT_TOKENS, value_parser = clap::value_parser!(u64).range(1..=UNIT_TOKENS_MAX))]
    unit: u64,
    /// Tell a program what was imported.
    #[arg(long)]
    json: bool,
}

fn part(text: &str) -> std::result::Result<(String, Location), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            let place = storage::locate(path).map_err(|fault| fault.to_string())?;
            Ok((name.to_owned(), place))
        }
        _ => Err(format!("expected NAME=PATH, found {text:?}")),
    }
}

fn width(text: &str) -> std::result::Result<Width, String> {
    let known = || Width::ALL.map(Width::name).join(", ");
    Width::from_name(text).ok_or_else(|| format!("expected one of {}, found {text:?}", known()))
}

fn share(text: &str) -> std::result::Result<Ratio, String> {
    let share: Ratio = text.parse()?;
    if share.num() < share.den() {
        Ok(share)
    } else {
        Err(format!("{share} leaves nothing to train on"))
    }
}

/// Does it.
pub(crate) fn exec(args: Args, quiet: bool) -> Result<()> {
    let part = |(source, path): (String, Location), held_out| Part { source, path, held_out };
    let train = args.sources.into_iter().map(|named| part(named, false));
    let request = Import {
        store: args.store,
        peer: args.format.peer(),
        tokenizer: args.tokenizer,
        parts: train.chain(args.held_out.into_iter().map(|named| part(named, true))).collect(),
        width: args.dtype,
        begin: args.begin,
        end: args.end,
        column: args.column,
        validation: args.validation,
        unit: args.unit,
        part_bytes: PART_BYTES,
        quiet,
    };
    let manifest = match import(&request)? {
        Imported::UpToDate(manifest) => {
            note!("up to date: the store was imported from the same files");
            manifest
        }
        Imported::Done(manifest, summary) => {
            note!("{summary}");
            inspect::notes(&manifest).iter().for_each(|note| note!("{note}"));
            manifest
        }
    };
    let text = || format!("{}  {}\n", manifest.digest, request.store.display());
    output::answer(args.json, &inspect::json(&request.store, &manifest), text)
}
