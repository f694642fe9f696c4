//! `ztrain report`.

use std::fs;
use std::path::PathBuf;

use contract::{Fault, Result};
use trainer::folder::RunFolder;
use trainer::report::{View, page};

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The run's folder; more than one, and the others are drawn beside the first.
    #[arg(long, value_name = "RUN", required = true, value_parser = super::run())]
    run: Vec<PathBuf>,
    /// The file to write [default: report.html in the first run's folder].
    #[arg(long, value_name = "FILE", value_parser = super::local("copy the page there afterwards"))]
    out: Option<PathBuf>,
}

/// Writes the page, whole at any moment.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let views = args.run.iter().map(|run| View::open(run)).collect::<Result<Vec<View>>>()?;
    let text = page(&views, false)?;
    let out = args.out.unwrap_or_else(|| RunFolder::new(&args.run[0]).report());
    let mut scratch = out.clone().into_os_string();
    scratch.push(".partial");
    let scratch = PathBuf::from(scratch);
    fs::write(&scratch, &text).map_err(|error| Fault::io("write", &scratch, &error))?;
    fs::rename(&scratch, &out).map_err(|error| Fault::io("rename to", &out, &error))?;
    tell!("{}: {:.2} MB, open it in a browser", out.display(), text.len() as f64 / 1e6);
    Ok(0)
}
