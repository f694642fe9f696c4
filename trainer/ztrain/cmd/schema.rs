//! `ztrain schema`: the keys of a curriculum as JSON Schema, those of `[model]` included.

use contract::terminal::print_raw;
use contract::{Fault, Result};

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: ztrain schema > curriculum.schema.json; \
    an editor with Taplo reads it where the file begins with #:schema curriculum.schema.json")]
pub(crate) struct Args {}

/// Prints the schema.
pub(crate) fn exec(_: &Args) -> Result<u8> {
    let text = serde_json::to_string_pretty(&trainer::model::curriculum_schema()?);
    print_raw(&(text.map_err(|error| Fault::bug(error.to_string()))? + "\n"))?;
    Ok(0)
}
