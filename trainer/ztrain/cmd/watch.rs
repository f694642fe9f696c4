//! `ztrain watch`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use contract::Result;
use trainer::report::Watch;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The run's folder; nothing in it is written.
    #[arg(long, value_name = "RUN", value_parser = super::run())]
    run: PathBuf,
    /// The port of this machine to listen on; 0 takes a free one.
    #[arg(long, value_name = "P", default_value_t = 7070)]
    port: u16,
}

/// Serves until it is interrupted.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let stop = Arc::new(AtomicBool::new(false));
    super::listen(&stop)?;
    let watch = Watch::open(&args.run, args.port)?;
    tell!("http://{}/", watch.address()?);
    contract::note!("on this machine alone; end it with Ctrl-C");
    watch.serve(&stop)?;
    Ok(0)
}
