//! `ztrain`: trains a model as a curriculum says, and computes any past step again, bit for bit.

/// Puts a line for people on standard output, by the rule of `contract::terminal`; for functions that return a
/// `Result`.
macro_rules! print_line {
    ($($text:tt)*) => { contract::terminal::print(&format!("{}\n", format_args!($($text)*)))? };
}

mod cmd;

use std::process::ExitCode;

use allocator::ExitWithoutMemory;
use clap::{CommandFactory as _, Parser, Subcommand};
use contract::Result;

#[global_allocator]
static ALLOCATOR: ExitWithoutMemory = ExitWithoutMemory;

/// Trains a ZAYA1-style model as a curriculum says; any step can be computed again, bit for bit, and explained.
///
/// `ztrain --curriculum FILE` begins a run, or continues it exactly where it stopped. The curriculum decides every bit
/// of a run; flags decide speed, place and what is kept.
/// Results go to standard output, progress and errors to standard error.
/// Exit codes: 0 done, 1 a bug of ours, 2 usage or curriculum, 3 data missing or damaged, 4 digest mismatch,
/// 5 run diverged, 6 machine.
#[derive(Parser)]
#[command(name = "ztrain", version, max_term_width = 100, args_conflicts_with_subcommands = true)]
#[command(subcommand_negates_reqs = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    train: cmd::train::Args,
}

#[derive(Subcommand)]
enum Command {
    /// Compute a past step again, compare it with the ledger, and show the documents behind its loss.
    Replay(Box<cmd::replay::Args>),
    /// Say in one sentence what is odd about a step, then give the evidence: documents, layers, changes,
    /// counterfactuals.
    Explain(cmd::explain::Args),
    /// Make a new run that shares everything up to a step, and differs from there.
    Fork(cmd::fork::Args),
    /// Find the first step and the first quantity in which two runs differ.
    Compare(cmd::compare::Args),
    /// Print the ledger for people: a line for each step.
    Show(cmd::show::Args),
    /// Find the odd steps of a run by themselves, each with the reason and the command that explains it.
    Spikes(cmd::spikes::Args),
    /// Write one HTML page of a run: curves, mixture, router load, odd steps and what explains them.
    Report(cmd::report::Args),
    /// Serve the same page live, on this machine alone.
    Watch(cmd::watch::Args),
    /// Watch over a run: start lost ranks again, go on without them, or start all again, as rules say; the same bits.
    Supervise(Box<cmd::supervise::Args>),
    /// Plan a run: print the memory, traffic, checkpoints and ledger that it needs, without allocating them.
    Plan(cmd::plan::Args),
    /// Measure the machine as training uses it.
    Bench(cmd::bench::Args),
    /// List where this machine can compute, by which libraries, and which bits are promised there.
    Devices(cmd::devices::Args),
    /// Write a run's weights as a folder for Hugging Face transformers.
    Export(cmd::export::Args),
    /// Take over such a folder as the initial weights of a curriculum.
    Import(cmd::import::Args),
    /// Print the keys of a curriculum as JSON Schema.
    Schema(cmd::schema::Args),
    /// Print the completions of a shell for `ztrain`.
    Completions(cmd::completions::Args),
    /// Print a page for `man`.
    Manual(cmd::completions::Manual),
}

impl Cli {
    /// The arguments of a run, where a run is asked for.
    fn training(&mut self) -> Option<&mut cmd::train::Args> {
        match &mut self.command {
            None => Some(&mut self.train),
            Some(Command::Supervise(args)) => Some(&mut args.train),
            Some(_) => None,
        }
    }
}

fn main() -> ExitCode {
    ExitWithoutMemory::reserve_stack();
    ExitWithoutMemory::in_c_for_small_blocks();
    // A file that may not grow is then an error of the write, which says so, and not the end of the process.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
    trainer::refusal::print_panics_once();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(refusal) => {
            let refusal = cmd::advised(refusal);
            let text = refusal.render();
            let (plain, coloured) = (text.to_string(), text.ansi().to_string());
            kernels::signals::unblock();
            let printed = contract::terminal::reply(&plain, &coloured, refusal.use_stderr());
            return contract::terminal::end(printed.map(|()| refusal.exit_code() as u8));
        }
    };
    if !matches!(cli.command, None | Some(Command::Supervise(_))) {
        kernels::signals::unblock();
    }
    contract::terminal::end(trainer::refusal::caught(|| run(cli)))
}

fn run(mut cli: Cli) -> Result<u8> {
    if let Some(path) = cli.training().and_then(|train| train.options.take()) {
        let (read, text) = cmd::options::with_file(&path, std::env::args_os().collect())?;
        cli = read;
        cli.training().into_iter().for_each(|train| train.options_text = Some(text.clone()));
    }
    let Cli { command, train } = cli;
    match command {
        None => cmd::train::exec(train),
        Some(Command::Replay(args)) => cmd::replay::exec(*args),
        Some(Command::Explain(args)) => cmd::explain::exec(args),
        Some(Command::Fork(args)) => cmd::fork::exec(args),
        Some(Command::Compare(args)) => cmd::compare::exec(args),
        Some(Command::Show(args)) => cmd::show::exec(args),
        Some(Command::Spikes(args)) => cmd::spikes::exec(args),
        Some(Command::Report(args)) => cmd::report::exec(args),
        Some(Command::Watch(args)) => cmd::watch::exec(args),
        Some(Command::Supervise(args)) => cmd::supervise::exec(*args),
        Some(Command::Plan(args)) => cmd::plan::exec(args),
        Some(Command::Bench(args)) => cmd::bench::exec(args),
        Some(Command::Devices(args)) => cmd::devices::exec(args),
        Some(Command::Export(args)) => cmd::export::exec(args),
        Some(Command::Import(args)) => cmd::import::exec(args),
        Some(Command::Schema(args)) => cmd::schema::exec(&args),
        Some(Command::Completions(args)) => cmd::completions::exec(&args, Cli::command()),
        Some(Command::Manual(args)) => cmd::completions::manual(&args, Cli::command()),
    }
}
