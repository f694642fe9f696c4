//! `ztrain report`.

use std::path::PathBuf;

use contract::Result;
use contract::terminal::print_raw;
use serde_json::json;
use tools::report::{RunView, page};
use trainer::folder::RunFolder;

use super::drawing::Drawing;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The run's folder; further ones are plotted next to the first.
    #[arg(value_parser = super::run(), required_unless_present = "named")]
    run: Vec<PathBuf>,
    /// The same, by its flag.
    #[arg(id = "named", long = "run", value_name = "RUN", value_parser = super::run(), conflicts_with = "run")]
    named: Vec<PathBuf>,
    /// The file to write [default: report.html in the first run's folder].
    #[arg(long, value_name = "FILE", value_parser = super::local("copy the page there afterwards"))]
    out: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Writes the page, whole at any moment.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let named = args.out.as_deref().map(|path| Drawing::at("--out", path)).transpose()?;
    let runs = [args.run, args.named].concat();
    let views = runs.iter().map(|run| RunView::open(run)).collect::<Result<Vec<RunView>>>()?;
    for (run, view) in runs.iter().zip(&views) {
        let unreadable = view.log().unreadable;
        if unreadable > 0 {
            contract::note!(
                "warning: {} of {} are unreadable and left out",
                contract::counted(unreadable, "line"),
                RunFolder::new(run).events().display()
            );
        }
    }
    let out = args.out.unwrap_or_else(|| RunFolder::new(&runs[0]).report());
    // The place in a run's folder is looked at when that is known to be one.
    let drawing = named.map_or_else(|| Drawing::at("--out", &out), Ok)?;
    let text = page(&views, false)?;
    drawing.put(&text)?;
    if args.json {
        let steps: Vec<u64> = views.iter().map(RunView::last_step).collect();
        let odd: Vec<usize> = views.iter().map(|view| view.odd().len()).collect();
        let file = out.display().to_string();
        let answer = json!({"file": file, "bytes": text.len(), "step_counts": steps, "odd_step_counts": odd});
        print_raw(&format!("{answer}\n"))?;
        return Ok(0);
    }
    print_line!("{}: {:.2} MB, open it in a browser", out.display(), text.len() as f64 / 1e6);
    Ok(0)
}
