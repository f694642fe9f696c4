//! `zdata publish`.

use std::path::PathBuf;

use contract::{Fault, Result, terminal};
use storage::publish;
use store::{Location, open};

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The store's folder.
    #[arg(value_parser = super::local("what lies in a bucket already is copied by the tools of its provider"))]
    store: PathBuf,
    /// Where to put it: s3://bucket/prefix.
    #[arg(value_parser = super::place())]
    url: Location,
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    let Location::Object(target) = &args.url else {
        return Err(Fault::usage("a store is published into a bucket")
            .at("URL")
            .found(&args.url)
            .wanted("s3://bucket/prefix")
            .hint("a store on this machine is already where it was built"));
    };
    let manifest = open::manifest(&args.store)?;
    publish::publish(&args.store, target, &manifest)?;
    terminal::print(&format!("{}  {}\n", manifest.digest, args.url))
}
