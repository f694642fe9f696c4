//! The flags of a change that a run did not have, and what `ztrain replay` reports about it.

use std::ops::Range;
use std::path::Path;

use contract::terminal::print_raw;
use contract::{Result, shell};
use serde_json::json;
use store::Location;
use tools::change::WhatIfChange;
use tools::chart::Chart;
use tools::replay::flags;
use tools::replay::whatif::WhatIfSteps;
use trainer::optim::guard::Skipped;

use super::drawing::Drawing;

/// A change, from a step on.
#[derive(clap::Args)]
#[command(next_help_heading = "What if")]
pub(crate) struct Changes {
    /// Without this document from the step on: its text is hidden, everything else keeps its place. SOURCE:ID where
    /// documents of several sources have the id.
    #[arg(long, value_name = "ID")]
    drop_doc: Vec<String>,
    /// Without this source, in every mix that the steps have: the others take its place.
    #[arg(long, value_name = "NAME")]
    drop_source: Vec<String>,
    /// With this learning rate in the step; each later step has its own in the same proportion, whether the schedule or
    /// a later amendment set it. Where the step has rate 0, this one stays.
    #[arg(long, value_name = "RATE", value_parser = super::not_negative, allow_hyphen_values = true)]
    lr: Option<f64>,
    /// With gradients clipped at this norm; 0 for no clipping.
    #[arg(long, value_name = "NORM", value_parser = super::not_negative, allow_hyphen_values = true)]
    clip: Option<f64>,
    /// Computed in f32 where the run computes in bf16.
    #[arg(long)]
    fp32: bool,
    /// With a step that moves nothing.
    #[arg(long)]
    optimizer_skip: bool,
}

impl Changes {
    /// What they change.
    pub(crate) fn change(&self) -> WhatIfChange {
        WhatIfChange {
            drop_documents: self.drop_doc.clone(),
            drop_sources: self.drop_source.clone(),
            lr: self.lr,
            clip: self.clip,
            fp32: self.fp32,
            skip: self.optimizer_skip,
        }
    }
}

/// The commands that make a change come true from step `first` on.
fn next(run: &Path, stores: &[Location], change: &WhatIfChange, first: u64) -> [String; 2] {
    // A path without a name of its own (`.`) cannot have a longer one.
    let whole = run.file_name().is_none().then(|| run.canonicalize().ok()).flatten();
    let whole = whole.as_deref().unwrap_or(run);
    let mut name = whole.file_name().unwrap_or_default().to_owned();
    name.push(format!("-from-{first}"));
    let (before, new) = (first - 1, whole.with_file_name(name));
    let (moved, flags) = (flags::moved(stores), flags::flags(change));
    [
        format!(
            "ztrain fork {} --step {before} --out {}{moved}{flags}",
            shell::path(run),
            shell::path(&new)
        ),
        format!(
            "ztrain --curriculum {} --out {}",
            shell::path(&new.join("run.toml")),
            shell::path(&new)
        ),
    ]
}

/// What was asked.
pub(crate) struct WhatIfRequest<'a> {
    pub(crate) run: &'a Path,
    pub(crate) stores: &'a [Location],
    pub(crate) change: &'a WhatIfChange,
    pub(crate) steps: Range<u64>,
    pub(crate) json: bool,
    pub(crate) plot: Option<&'a Drawing>,
}

/// Prints the steps as they were and as they would have been, and the commands that go on so.
pub(crate) fn print(asked: &WhatIfRequest<'_>, answer: &WhatIfSteps) -> Result<()> {
    let WhatIfRequest { run, stores, change, steps, json, plot } = asked;
    let next = match (&answer.no_fork, &answer.diverged) {
        (Some(_), _) | (_, Some(_)) => Vec::new(),
        _ => next(run, stores, change, steps.start).to_vec(),
    };
    if let Some(path) = plot {
        path.put(&chart(asked, answer).svg())?;
    }
    if *json {
        let WhatIfChange { drop_documents, drop_sources, lr, clip, fp32, skip } = change;
        let answer = json!({
            "replay": false, "dropped": drop_documents, "dropped_sources": drop_sources, "lr": lr,
            "clip": clip, "fp32": fp32, "optimizer_skip": skip, "steps": answer.steps,
            "diverged": answer.diverged, "next": next, "no_fork": answer.no_fork,
        });
        return print_raw(&format!("{answer}\n"));
    }
    print_line!("WHAT IF, not a replay: {}", flags::words(change).join(", "));
    print_line!(
        "{:>8} {:>14} {:>14} {:>12} {:>12} {:>8}",
        "step",
        "loss was",
        "would be",
        "norm was",
        "would be",
        "dropped"
    );
    for step in &answer.steps {
        let was = |value: Option<f64>| {
            value.map_or_else(|| "diverged".to_owned(), |value| format!("{value:.6}"))
        };
        print_line!(
            "{:>8} {:>14} {:>14.6} {:>12} {:>12.6} {:>8}{}",
            step.step,
            was(step.was.map(|was| was.0)),
            step.would_be.0,
            was(step.was.map(|was| was.1)),
            step.would_be.1,
            step.dropped_labels,
            Skipped::note(step.skipped)
        );
    }
    if let Some(fault) = &answer.diverged {
        let step = steps.start + answer.steps.len() as u64;
        print_line!("step {step} diverges with the change: {}", fault.replace('\n', "\n  "));
    }
    if let Some(path) = plot {
        print_line!("both curves: {}", path.path().display());
    }
    match &answer.no_fork {
        Some(why) => print_line!("no run can go on so: {}", why.replace('\n', "\n  ")),
        None if answer.diverged.is_some() => {
            print_line!("no run can go on so: it would end there, too")
        }
        None => print_line!("to go on so:\n  {}", next.join("\n  ")),
    }
    Ok(())
}

/// Losses as they were and as they would have been.
fn chart(asked: &WhatIfRequest<'_>, answer: &WhatIfSteps) -> Chart {
    let at = |step: u64| step as f64;
    let was = answer.steps.iter().filter_map(|one| Some((at(one.step), one.was?.0)));
    let would_be = answer.steps.iter().map(|one| (at(one.step), one.would_be.0));
    let words = flags::words(asked.change).join(", ");
    Chart {
        title: format!("loss over steps; not a replay: {words}"),
        log: false,
        curves: vec![
            ("the run".to_owned(), was.collect()),
            ("with the change".to_owned(), would_be.collect()),
        ],
    }
}
