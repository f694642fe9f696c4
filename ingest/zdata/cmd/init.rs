//! `zdata init`.

use std::path::PathBuf;

use contract::Result;
use ingest::init;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The folder of your text: Parquet, Arrow, JSON Lines or plain text, in folders or not.
    folder: PathBuf,
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    let begun = init::init(&args.folder)?;
    for note in &begun.notes {
        eprintln!("{note}");
    }
    let folder = args.folder.display();
    eprintln!("next: zdata build {folder}/corpus.toml --check, then --out {folder}/store");
    for file in &begun.files {
        println!("{}", file.display());
    }
    Ok(())
}
