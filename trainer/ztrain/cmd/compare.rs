//! `ztrain compare A B`.

use std::path::PathBuf;

use contract::Result;
use contract::terminal::print_raw;
use trainer::compare::{Answer, chart, compare};

use super::drawing::Drawing;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A run's folder.
    #[arg(value_parser = super::run())]
    a: PathBuf,
    /// Another one.
    #[arg(value_parser = super::run())]
    b: PathBuf,
    /// Draw both curves of the loss into this SVG file: all steps, or where the runs differ, those around it.
    #[arg(long, value_name = "FILE", value_parser = super::local("name a file of this machine"))]
    plot: Option<PathBuf>,
    /// Print the answer as JSON.
    #[arg(long)]
    json: bool,
}

/// Compares; exit code 4 if the runs differ.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let drawing = args.plot.as_deref().map(|path| Drawing::at("--plot", path)).transpose()?;
    let answer = compare(&args.a, &args.b)?;
    if let Some(drawing) = &drawing {
        drawing.put(&chart(&args.a, &args.b, &answer)?.svg())?;
    }
    if args.json {
        print_raw(&format!("{}\n", answer.to_json()))?;
    } else {
        tell!("{answer}");
        if let Some(drawing) = &drawing {
            tell!("both curves: {}", drawing.path().display());
        }
    }
    Ok(if matches!(answer, Answer { difference: None, .. }) {
        0
    } else {
        contract::Class::Mismatch.exit_code()
    })
}
