//! `zdata tokenizer train`.

use contract::{Fault, Result};

/// What to do with a tokenizer.
#[derive(clap::Subcommand)]
pub(crate) enum Command {}

/// Does it.
pub(crate) fn exec(_command: Command) -> Result<()> {
    Err(Fault::bug("not built yet"))
}
