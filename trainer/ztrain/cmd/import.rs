//! `ztrain import`.

use std::path::PathBuf;

use contract::{Result, counted};
use trainer::hf::import::import;

/// Arguments.
#[derive(clap::Args)]
#[command(
    after_help = "A curriculum begins with it by `start = \"START\"`; its [model] may then stay empty."
)]
pub(crate) struct Args {
    /// A folder in the layout of transformers' zaya, or of Zyphra's first releases.
    #[arg(value_name = "HF_DIR", value_parser = super::local("copy the folder here first"))]
    source: PathBuf,
    /// The start to make.
    #[arg(long, value_name = "START", value_parser = super::local("a start is read from this machine: name a folder"))]
    out: PathBuf,
}

/// Imports.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let imported = import(&args.source, &args.out)?;
    for note in &imported.notes {
        contract::note!("note: {note}");
    }
    tell!(
        "{} in the layout of {} | skip = {:?} | content {} | {}",
        counted(imported.tensors, "tensor"),
        imported.layout.name(),
        imported.start.config().skip.name(),
        imported.start.content(),
        args.out.display()
    );
    Ok(0)
}
