//! `ztrain replay`.

use contract::{Fault, Result};

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Replays.
pub(crate) fn exec(_args: Args) -> Result<u8> {
    Err(Fault::bug("not built yet"))
}
