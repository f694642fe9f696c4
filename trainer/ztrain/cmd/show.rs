//! `ztrain show RUN`.

use std::ops::Range;

use contract::Result;
use contract::terminal::print_raw;
use tools::report::StepRows;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    run: super::Run,
    /// The steps, from A to before B [default: the last ones].
    #[arg(long, value_name = "A..B", value_parser = super::step_range)]
    steps: Option<Range<u64>>,
    /// How many of the last steps without --steps.
    #[arg(long, value_name = "COUNT", default_value_t = 20, conflicts_with = "steps",
          value_parser = clap::value_parser!(u64).range(1..))]
    last: u64,
    /// Print JSON, one line for each step.
    #[arg(long)]
    json: bool,
}

/// Prints each step as it is read.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let mut table = StepRows::open(args.run.path(), args.steps, args.last)?;
    if !args.json {
        print_line!("{}", table.heads());
    }
    while let Some(row) = table.next_step()? {
        match args.json {
            true => print_raw(&format!("{}\n", row.to_json()))?,
            false => print_line!("{}", table.text(&row)),
        }
    }
    Ok(0)
}
