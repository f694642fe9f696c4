//! `zdata init`.

use std::path::PathBuf;

use contract::{Result, note, shell, terminal};
use ingest::init;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: zdata init mine")]
pub(crate) struct Args {
    /// The folder of your text: Parquet, Arrow, JSON Lines or plain text, in folders or not.
    #[arg(value_parser = super::local("name a folder here: what it writes is short, and easily changed to places elsewhere"))]
    folder: PathBuf,
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    let begun = init::init(&args.folder)?;
    begun.notes.iter().for_each(|note| note!("{note}"));
    let [corpus, tokenizer, store] =
        ["corpus.toml", "tokenizer.json", "store"].map(|name| shell::path(&args.folder.join(name)));
    if !args.folder.join("tokenizer.json").exists() {
        note!("next: zdata tokenizer train {corpus} --vocab 8192 --out {tokenizer}");
    }
    note!("next: zdata build {corpus} --check, then --out {store}");
    let files = begun.files.iter().map(|file| format!("{}\n", file.display()));
    terminal::print(&files.collect::<String>())
        .map_err(|fault| fault.after(format_args!("{corpus} is written")))
}
