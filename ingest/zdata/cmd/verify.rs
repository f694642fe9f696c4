//! `zdata verify`.

use std::path::PathBuf;

use contract::{Fault, Result};
use serde_json::json;
use store::verify::{Damage, fault};

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
    let report = ingest::verify::verify(&args.store, false)?;
    if args.json {
        let damage = |damage: &Damage| {
            let Damage { file, what, block, documents } = damage;
            json!({"file": file, "what": what, "block": block, "documents": documents})
        };
        let damages: Vec<_> = report.damages.iter().map(damage).collect();
        let (digest, files) = (report.manifest.digest, report.files);
        println!(
            "{}",
            json!({"digest": digest, "files": files, "bytes": report.bytes, "damages": damages})
        );
    }
    let refused: Option<Fault> = fault(&args.store, &report.damages);
    refused.map_or(Ok(()), Err)?;
    if !args.json {
        println!(
            "{}  {} files, {} bytes: every byte as written",
            report.manifest.digest, report.files, report.bytes
        );
    }
    Ok(())
}
