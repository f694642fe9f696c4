//! `zdata plan`.

use contract::{Fault, Result};

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Does it.
pub(crate) fn exec(_args: Args) -> Result<()> {
    Err(Fault::bug("not built yet"))
}
