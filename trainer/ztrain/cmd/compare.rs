//! `ztrain compare A B`.

use std::path::PathBuf;

use contract::Result;
use contract::terminal::print_raw;
use trainer::compare::{Answer, compare};

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A run's folder.
    #[arg(value_parser = super::run())]
    a: PathBuf,
    /// Another one.
    #[arg(value_parser = super::run())]
    b: PathBuf,
    /// Print the answer as JSON.
    #[arg(long)]
    json: bool,
}

/// Compares; exit code 4 if the runs differ.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let answer = compare(&args.a, &args.b)?;
    if args.json {
        print_raw(&format!("{}\n", answer.to_json()))?;
    } else {
        tell!("{answer}");
    }
    Ok(if matches!(answer, Answer { difference: None, .. }) {
        0
    } else {
        contract::Class::Mismatch.exit_code()
    })
}
