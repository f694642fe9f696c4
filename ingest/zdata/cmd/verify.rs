//! `zdata verify`.

use contract::terminal::{print, print_raw};
use contract::{Fault, Result, counted};
use ingest::verify::Report;
use serde_json::json;
use store::Location;
use store::verify::fault;

use super::output;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: zdata verify store")]
pub(crate) struct Args {
    /// The store: a folder or a URL.
    #[arg(value_parser = super::place())]
    store: Location,
    /// Answer a program.
    #[arg(long)]
    json: bool,
}

/// Does it.
pub(crate) fn exec(args: Args, quiet: bool) -> Result<()> {
    let report = ingest::verify::verify(&args.store, quiet)?;
    if args.json {
        let Report { manifest, files, bytes, damages } = &report;
        let digest = manifest.digest;
        let answer = json!({"digest": digest, "files": files, "bytes": bytes, "damages": damages});
        print_raw(&output::json(&answer)?)?;
    }
    let refused: Option<Fault> = fault(&args.store, &report.damages);
    refused.map_or(Ok(()), Err)?;
    if args.json {
        return Ok(());
    }
    print(&format!(
        "{}  {}, {}: every byte as written\n",
        report.manifest.digest,
        counted(report.files, "file"),
        counted(report.bytes, "byte"),
    ))
}
