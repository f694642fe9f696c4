//! `ztrain watch`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use contract::Result;
use contract::terminal::print_raw;
use serde_json::json;
use tools::report::PageServer;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    run: super::Run,
    /// The port of this machine to listen on; 0 takes a free one.
    #[arg(long, value_name = "P", default_value_t = 7070)]
    port: u16,
    /// Print the address as JSON.
    #[arg(long)]
    json: bool,
}

/// Serves until it is interrupted.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let stop = Arc::new(AtomicBool::new(false));
    super::listen(&stop)?;
    let watch = PageServer::open(args.run.path(), args.port)?;
    let address = format!("http://{}/", watch.address()?);
    match args.json {
        true => print_raw(&format!("{}\n", json!({"address": address})))?,
        false => print_line!("{address}"),
    }
    contract::note!("on this machine alone; end it with Ctrl-C");
    watch.serve(&stop)?;
    Ok(0)
}
