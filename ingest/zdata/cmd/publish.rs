//! `zdata publish`.

use std::path::PathBuf;

use contract::{Fault, Result, terminal};
use storage::publish;
use store::far;
use store::open;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The store's folder.
    store: PathBuf,
    /// Where to put it: s3://bucket/prefix.
    url: PathBuf,
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    if !far::is_far(&args.url) {
        return Err(Fault::usage("this is not a place in a bucket")
            .found(args.url.display())
            .wanted("s3://bucket/prefix"));
    }
    let manifest = open::manifest(&args.store)?;
    publish::publish(&args.store, &args.url, &manifest)?;
    terminal::print(&format!("{}  {}\n", manifest.digest, args.url.display()))
}
