//! `zdata inspect`.

use std::path::PathBuf;

use contract::Result;
use contract::store::open;
use ingest::inspect;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The store's folder.
    store: PathBuf,
    /// Answer a program.
    #[arg(long)]
    json: bool,
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    let manifest = open::manifest(&args.store)?;
    if args.json {
        println!("{}", inspect::json(&args.store, &manifest));
    } else {
        print!("{}", inspect::text(&args.store, &manifest));
    }
    Ok(())
}
