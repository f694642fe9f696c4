//! `ztrain replay`.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use contract::terminal::{name, print_raw};
use contract::{Class, Fault, Result, shell, words};
use serde_json::json;
use store::Location;
use tools::replay::attribute::{AttributionOptions, attribute};
use tools::replay::documents::DocumentLoss;
use tools::replay::flags::words as words_of;
use tools::replay::texts::{DocumentText, texts};
use tools::replay::whatif::imagine;
use tools::replay::{ExplainedReplay, micro_batch, step};
use trainer::World;
use trainer::launch::spawned_us;
use trainer::optim::guard::Skipped;
use trainer::replay::{ReplayParallelism, Replayed, Replayer, Verdict, meet};
use trainer::step::Detail;
use trainer::workers::Workers;

use super::drawing::Drawing;
use super::ranks::{self, Ranks};
use super::whatif::{self, Changes, WhatIfRequest};
use super::{SavedStateFlags, Speed, attribute as attribution};

/// Arguments.
#[derive(clap::Args)]
#[command(
    after_help = "Exit codes: 0 the same bits, 4 different bits, 5 the step diverges, or one of those with a change."
)]
pub(crate) struct Args {
    #[command(flatten)]
    run: super::Run,
    /// Where a store is now, if it was moved; once for each store of the run, in the order of its run.toml.
    #[arg(long, value_name = "STORE", value_parser = super::place())]
    store: Vec<Location>,
    /// The step to compute again.
    #[arg(long, value_name = "N", required_unless_present = "steps", conflicts_with = "steps")]
    #[arg(value_parser = super::step, allow_negative_numbers = true)]
    step: Option<u64>,
    /// Several steps, from A to before B.
    #[arg(long, value_name = "A..B", value_parser = super::step_range)]
    steps: Option<Range<u64>>,
    /// Of --steps only every K-th, each from the newest state before it: those right after a checkpoint cost one step
    /// each.
    #[arg(
        long,
        value_name = "K",
        conflicts_with_all = ["step", "attribute"],
        default_value_t = 1
    )]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    every: u64,
    /// Only this micro-batch of the step, counted from 0.
    #[arg(long, value_name = "V", conflicts_with = "steps")]
    micro_batch: Option<u64>,
    /// How many documents to list, worst first; 0 for all.
    #[arg(long, value_name = "COUNT", default_value_t = 40)]
    top: usize,
    /// Print the text of so many documents, the worst, as the step read it.
    #[arg(long, value_name = "COUNT", num_args = 0..=1, default_missing_value = "1")]
    #[arg(conflicts_with = "steps", default_value_t = 0)]
    texts: usize,
    /// Print everything as JSON, one line for each step.
    #[arg(long)]
    json: bool,
    /// Tell where the time went.
    #[arg(long)]
    timing: bool,
    /// Train K steps from this step on with the change, and show them next to the run's (not a replay).
    #[arg(long = "continue", value_name = "K", conflicts_with = "steps", help_heading = "What if")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    go_on: Option<u64>,
    /// Draw both curves of the loss into this SVG file.
    #[arg(long, value_name = "FILE", help_heading = "What if")]
    #[arg(value_parser = super::local("name a file of this machine"))]
    plot: Option<PathBuf>,
    /// Leave documents of step A out of steps A..B, each by itself and in random halves, and tell what that does to the
    /// loss of step B's batch, next to a prediction from gradients: so many documents, those with most labels.
    #[arg(long, value_name = "COUNT", requires = "steps", help_heading = "What if")]
    #[arg(num_args = 0..=1, default_missing_value = "8", conflicts_with_all = ["go_on", "plot"])]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    attribute: Option<u32>,
    /// How many random halves, at most 10,000.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 16,
        value_parser = clap::value_parser!(u64).range(0..=10_000),
        requires = "attribute",
        help_heading = "What if"
    )]
    subsets: u64,
    #[command(flatten)]
    changes: Changes,
    #[command(flatten)]
    keeping: SavedStateFlags,
    #[command(flatten)]
    ranks: Ranks,
    #[command(flatten)]
    speed: Speed,
}

/// Replays; the worst verdict decides the exit code.
pub(crate) fn exec(mut args: Args) -> Result<u8> {
    check_what_if(&args, args.changes.change().is_some())?;
    args.speed.choose_device(Some(args.run.path()));
    if let Some(count) = args.ranks.to_spawn(&args.speed)? {
        return ranks::start_all(count);
    }
    let launched = args.ranks.launched()?;
    let stop = Arc::default();
    let mut world = args.ranks.world(&args.speed, launched.as_ref(), None, &stop)?;
    let workers = args.speed.workers(launched.as_ref(), &world.runtime)?;
    meet(&mut world, args.ranks.transport())
        .inspect_err(|fault| world.comm.report(&fault.to_string()))?;
    let world = Arc::new(world);
    let outcome = opened(&args, &world, workers).and_then(|mut replayer| {
        let code = answer(&args, &mut replayer)?;
        // Rank 0 says what came out, and ends with it.
        replayer.end().map(|()| if replayer.is_rank_0() { code } else { 0 })
    });
    // The others would only see a connection close.
    let outcome = outcome.inspect_err(|fault| world.comm.report(&fault.to_string()));
    match outcome {
        Err(fault) if spawned_us() && !world.comm.spoke_first() => Ok(fault.class().exit_code()),
        outcome => outcome,
    }
}

/// The run, opened by this rank.
fn opened(args: &Args, world: &Arc<World>, workers: Workers) -> Result<Replayer> {
    let (grad_reduce, flat) = args.ranks.ways();
    let (asked, changed) = (steps(args), words_of(&args.changes.change()).join(", "));
    let one = args.micro_batch.map_or("all".to_owned(), |number| number.to_string());
    let asked = vec![
        words::steps(asked.start, asked.end.saturating_sub(1)),
        format!("--every {}", args.every),
        format!("micro-batches: {one}"),
        format!("a change: {}", if changed.is_empty() { "none" } else { &changed }),
        args.keeping.words(),
        format!("--cp {}", args.ranks.degrees().cp),
        format!("--tsp {}", args.ranks.degrees().tsp),
        format!("--grad-reduce {}", grad_reduce.name()),
        format!("--no-hierarchical {flat}"),
    ];
    let together = ReplayParallelism { grad_reduce, flat, degrees: args.ranks.degrees(), asked };
    let replayer = Replayer::open_with(args.run.path(), &args.store, world, workers, together)?;
    replayer.refuse_memory()?;
    Ok(replayer.keeping(args.keeping.keep()))
}

/// Answers what was asked; the exit code.
fn answer(args: &Args, replayer: &mut Replayer) -> Result<u8> {
    let (steps, change) = (steps(args), args.changes.change());
    if let (Some(kernels), true) = (&replayer.kernels, replayer.is_rank_0()) {
        contract::note!("note: {kernels}");
    }
    let last = replayer.spec().plan.steps();
    let beyond = [steps.start, steps.end - 1].into_iter().find(|step| *step > last);
    if let Some(beyond) = beyond {
        return Err(Fault::usage("the curriculum has no such step")
            .at(match (&args.steps, args.go_on) {
                (Some(_), _) => "--steps",
                (None, Some(_)) if steps.start <= last => "--continue",
                (None, _) => "--step",
            })
            .found(beyond)
            .wanted(format!("1 to {last}")));
    }
    if let Some(micro_batch) = args.micro_batch {
        replayer.check_micro_batch(steps.start, micro_batch)?;
    }
    if change.is_some() {
        let answer = imagine(replayer, steps.clone(), &change)?;
        let plot = args.plot.as_deref().map(|path| Drawing::at("--plot", path)).transpose()?;
        let (run, stores, plot, json) = (args.run.path(), &args.store, plot.as_ref(), args.json);
        if replayer.is_rank_0() {
            whatif::print(
                &WhatIfRequest { run, stores, change: &change, steps, json, plot },
                &answer,
            )?;
        }
        note_warnings(args, replayer);
        return Ok(if answer.diverged.is_some() { Class::Diverged.exit_code() } else { 0 });
    }
    if let Some(documents) = args.attribute {
        let effort = AttributionOptions { documents: documents as usize, subsets: args.subsets };
        let found = attribute(replayer, steps, effort)?;
        note_warnings(args, replayer);
        return attribution::print(&found, args.json).map(|()| 0);
    }
    let code = replay(args, replayer, steps)?;
    note_warnings(args, replayer);
    Ok(code)
}

/// Replays steps, or a micro-batch of one.
fn replay(args: &Args, replayer: &mut Replayer, steps: Range<u64>) -> Result<u8> {
    let mut state = replayer.state_after(steps.start - 1)?;
    let mut code = 0;
    for number in steps.clone().step_by(usize::try_from(args.every).unwrap_or(usize::MAX)) {
        if state.step + 1 != number {
            state = replayer.state_after(number - 1)?;
        }
        let before = state.step;
        if args.micro_batch.is_some() {
            replayer.hold_whole(&mut state)?;
        }
        let found = match args.micro_batch {
            // One rank computes it by itself.
            Some(_) if !replayer.is_rank_0() => continue,
            Some(number) => micro_batch(replayer, &state, number)?,
            None => step(replayer, &mut state, Detail::Tokens)?,
        };
        if replayer.is_rank_0() {
            let texts = texts(replayer, &found, args.texts)?;
            print_replayed(args, &found, &texts, steps.end - steps.start == 1)?;
        }
        code = code.max(exit_code(&found.replayed));
        if state.step == before && args.every == 1 {
            break;
        }
    }
    Ok(code)
}

/// Says what was passed over on the way, and where the time went if that was asked.
fn note_warnings(args: &Args, replayer: &Replayer) {
    if !replayer.is_rank_0() {
        return;
    }
    for warning in &replayer.warnings {
        contract::note!("warning: {warning}");
    }
    let lines = if args.timing { replayer.times().lines() } else { Vec::new() };
    lines.iter().for_each(|line| contract::note!("{line}"));
}

/// Refuses flags of a counterfactual where nothing is changed, and a change where one micro-batch is asked for.
fn check_what_if(args: &Args, changed: bool) -> Result<()> {
    let lone = [("--continue", args.go_on.is_some()), ("--plot", args.plot.is_some())];
    match lone.into_iter().find(|(_, given)| *given) {
        _ if changed && args.every > 1 => {
            let fault = Fault::usage("a change is followed from step to step").at("--every");
            Err(fault.hint("leave --every out"))
        }
        Some((flag, _)) if !changed => {
            let fault = Fault::usage(
                "this flag shows a changed step next to the run's, and nothing is changed",
            )
            .at(flag);
            Err(fault.wanted("--drop-doc, --drop-source, --lr, --clip, --fp32 or --optimizer-skip"))
        }
        _ if changed && args.attribute.is_some() => {
            let fault =
                Fault::usage("documents are left out of the run as it is").at("--attribute");
            Err(fault.hint("leave the change out"))
        }
        _ if changed && args.micro_batch.is_some() => {
            let fault = Fault::usage("a change is computed for whole steps").at("--micro-batch");
            Err(fault.hint("leave --micro-batch out"))
        }
        _ => Ok(()),
    }?;
    // Found out before minutes of computing.
    args.plot.as_deref().map_or(Ok(()), |path| Drawing::at("--plot", path).map(drop))
}

/// The steps that are asked for.
fn steps(args: &Args) -> Range<u64> {
    let step = args.step.unwrap_or(0);
    let one = step..step.saturating_add(args.go_on.unwrap_or(1));
    args.steps.clone().unwrap_or(one)
}

fn exit_code(replayed: &Replayed) -> u8 {
    match replayed.verdict {
        _ if replayed.diverged.is_some() => Class::Diverged.exit_code(),
        Verdict::SameBits | Verdict::NotRecorded => 0,
        Verdict::Repeatable | Verdict::RunHit | Verdict::NotRepeatable => {
            Class::Mismatch.exit_code()
        }
    }
}

fn print_replayed(
    args: &Args,
    found: &ExplainedReplay,
    texts: &[Vec<DocumentText>],
    alone: bool,
) -> Result<()> {
    let ExplainedReplay { replayed, narrowed, documents } = found;
    if args.json {
        let mut line = json!(found);
        line["verdict_words"] = json!(replayed.verdict.words());
        if !texts.is_empty() {
            line["texts"] = json!(texts);
        }
        return print_raw(&format!("{line}\n"));
    }
    let part = replayed.micro_batch;
    let part = part.map_or_else(String::new, |number| format!(", micro-batch {number}"));
    print_line!(
        "step {}{part}: {} (loss {:.6})",
        replayed.step,
        replayed.verdict.words(),
        replayed.loss
    );
    if let Some(found) = &replayed.difference {
        print_line!("  first difference: {}", found.quantity);
        print_line!("    ledger: {}\n    here:   {}", found.left, found.right);
    }
    if let Some(narrowed) = narrowed {
        print_line!("  narrowed: {}", narrowed.words);
    }
    if let Some(fault) = &replayed.diverged {
        print_line!("  diverges: {}", fault.replace('\n', "\n  "));
    }
    if let Some(record) = &replayed.record {
        print_line!(
            "  data {} | {} micro-batches | norm {:.6}{} | lr {:.3e} | state {}",
            record.batch_digest,
            record.micro_batches(),
            record.norm(),
            Skipped::note(record.skipped),
            record.lr(),
            record.state_digest
        );
    }
    print_line!("  {}", replayed.advice);
    if !alone {
        return Ok(());
    }
    print_documents(documents, args.top)?;
    if !texts.is_empty() {
        return print_texts(documents, texts);
    }
    let worst = documents.first().and_then(|document| document.sequences.first());
    if let Some(sequence) = worst {
        let (run, step) = (shell::path(&args.run.path().join("run.toml")), replayed.step);
        // `zdata batch` looks for stores where the run's curriculum says.
        let batch = format!(", or zdata batch {run} --step {step} --sequence {sequence} --text");
        print_line!(
            "text of the worst: --texts{}",
            if args.store.is_empty() { &batch } else { "" }
        );
    }
    Ok(())
}

fn print_texts(documents: &[DocumentLoss], texts: &[Vec<DocumentText>]) -> Result<()> {
    for (document, parts) in documents.iter().zip(texts) {
        for DocumentText { row, first_token, tokens, text } in parts {
            let end = first_token + tokens;
            let id = name(&document.id);
            print_line!("text of {id}, tokens {first_token}..{end}, in sequence {row}:");
            text.lines().try_for_each(|line| {
                print_line!("  | {line}");
                Ok::<(), Fault>(())
            })?;
        }
    }
    Ok(())
}

fn print_documents(documents: &[DocumentLoss], top: usize) -> Result<()> {
    let shown = if top == 0 { documents.len() } else { top.min(documents.len()) };
    print_line!("documents by mean loss, worst first ({shown} of {}):", documents.len());
    print_line!(
        "{:>10} {:>7} {:>7}  source | file:row | id | sequences",
        "loss/label",
        "labels",
        "tokens"
    );
    for document in &documents[..shown] {
        let group = document.group.map_or_else(String::new, |group| format!("group {group} row "));
        let sequences: Vec<String> = document.sequences.iter().map(u64::to_string).collect();
        print_line!(
            "{:>10.4} {:>7} {:>7}  {} | {}:{group}{} | {} | {}",
            document.mean,
            document.labels,
            document.tokens,
            name(&document.source),
            name(&document.file),
            document.row,
            name(&document.id),
            sequences.join(",")
        );
    }
    Ok(())
}
