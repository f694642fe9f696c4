//! `ztrain compare A B`.

use std::path::{Path, PathBuf};

use contract::terminal::print_raw;
use contract::{Fault, Result};
use tools::compare::{Comparison, chart, compare};

use super::drawing::Drawing;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A run's folder.
    #[arg(value_parser = super::run(), required_unless_present = "named")]
    a: Option<PathBuf>,
    /// Another one.
    #[arg(value_parser = super::run(), required_unless_present = "named")]
    b: Option<PathBuf>,
    /// The same two, each by its flag.
    #[arg(id = "named", long = "run", value_name = "RUN", value_parser = super::run(), conflicts_with = "a")]
    named: Vec<PathBuf>,
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
    let runs: Vec<&Path> =
        args.a.iter().chain(&args.b).chain(&args.named).map(AsRef::as_ref).collect();
    let [a, b] = runs[..] else {
        let fault = Fault::usage("two runs are compared").at("--run");
        return Err(fault.found(runs.len()).wanted("2 of them, as in --run A --run B"));
    };
    let answer = compare(a, b)?;
    if let Some(drawing) = &drawing {
        drawing.put(&chart(a, b, &answer)?.svg())?;
    }
    if args.json {
        print_raw(&format!("{}\n", answer.to_json()))?;
    } else {
        print_line!("{answer}");
        if let Some(drawing) = &drawing {
            print_line!("both curves: {}", drawing.path().display());
        }
    }
    Ok(if matches!(answer, Comparison { difference: None, .. }) {
        0
    } else {
        contract::Class::Mismatch.exit_code()
    })
}
