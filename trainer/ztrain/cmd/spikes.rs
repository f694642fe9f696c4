//! `ztrain spikes`.

use contract::Result;
use contract::terminal::{name, print_raw};
use serde_json::json;
use tools::report::{OddReasonKind, RunView, explain_command, grouped};

/// Arguments.
#[derive(clap::Args)]
#[command(
    after_help = "A loss (of a source, too) or a gradient norm is odd more than 8 spreads from what the 64 steps before led to \
    expect, above or below, or more than 5 where both are; a spread is 1.4826 times their median distance from their trend, or \
    from each to the next. A step is slow below 0.3 times the usual speed. Where none is odd, the farthest are listed. \
    trainer/docs/explain.md has every rule."
)]
pub(crate) struct Args {
    #[command(flatten)]
    run: super::Run,
    /// Print JSON, one line for each finding.
    #[arg(long)]
    json: bool,
}

/// Finds; an odd step is an answer, not an error.
pub(crate) fn exec(args: Args) -> Result<u8> {
    let view = RunView::open(args.run.path())?;
    let found = view.odd();
    let command = |step: u64| explain_command(args.run.path(), step);
    if args.json {
        for one in &found {
            let mut line = json!(one);
            line["farthest"] = json!(one.farthest());
            line["command"] = json!(command(one.farthest()));
            print_raw(&format!("{line}\n"))?;
        }
        return Ok(0);
    }
    let steps = grouped(view.last_step());
    match found.len() {
        0 => print_line!("no odd step in {steps}"),
        1 => print_line!("1 odd step in {steps}"),
        count => {
            print_line!("{} odd steps in {steps}, in a row counted once", grouped(count as u64))
        }
    }
    let near = if found.is_empty() { view.near() } else { Vec::new() };
    if !near.is_empty() {
        print_line!("nearly odd, the farthest from usual:");
    }
    for one in found.iter().chain(&near) {
        let to =
            if one.last > one.step { format!(" to {}", grouped(one.last)) } else { String::new() };
        print_line!("\nstep {}{to}", grouped(one.step));
        for reason in &one.reasons {
            let at = if reason.step > one.step {
                format!(" (step {})", reason.step)
            } else {
                String::new()
            };
            let score =
                reason.score.map_or_else(String::new, |score| format!(" [{score:+.0} spreads]"));
            print_line!("  {}{score}{at}", name(&reason.words));
        }
        one.context.iter().try_for_each(|context| {
            print_line!("  here: {}", name(context));
            Ok::<_, contract::Fault>(())
        })?;
        let slow = one.reasons.iter().filter(|reason| reason.kind == OddReasonKind::Slow);
        let mut steps = vec![one.farthest()];
        steps.extend(slow.map(|reason| reason.step).filter(|step| *step != one.farthest()));
        steps.into_iter().try_for_each(|step| {
            print_line!("  {}", command(step));
            Ok::<_, contract::Fault>(())
        })?;
    }
    Ok(0)
}
