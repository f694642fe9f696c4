//! `zdata`: raw corpora to an immutable, checksummed, tokenized store, and answers about what a curriculum reads from
//! it.

#![forbid(unsafe_code)]

pub mod answers;
mod cmd;

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use clap::{CommandFactory as _, Parser, Subcommand};
use contract::{Fault, Result, terminal};
use signal_hook::{consts, flag};

/// Prepares corpora for pretraining, and shows what any training step reads.
///
/// Results go to standard output, progress and errors to standard error.
/// Exit codes: 0 done, 1 a bug of ours, 2 usage or curriculum, 3 data missing or damaged, 4 digest mismatch,
/// 5 run diverged, 6 machine.
#[derive(Parser)]
#[command(name = "zdata", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print only results and errors: no notes, no progress.
    #[arg(long, global = true)]
    quiet: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Write a commented corpus file and curriculum for the files in a folder.
    Init(cmd::init::Args),
    /// Train a tokenizer on a corpus.
    #[command(subcommand)]
    Tokenizer(cmd::tokenizer::Command),
    /// Tokenize a corpus into a store; run again after a kill, it continues.
    Build(cmd::build::Args),
    /// The pieces of a build that a scheduler runs.
    #[command(subcommand)]
    Task(cmd::task::Command),
    /// Show a store: sources, documents, tokens, sizes, digests, dropped records by reason.
    Inspect(cmd::inspect::Args),
    /// Check every byte of a store, naming what is damaged.
    Verify(cmd::verify::Args),
    /// Put a store into a bucket: every file, then the manifest.
    Publish(cmd::publish::Args),
    /// Show what a curriculum trains on, and refuse what cannot run.
    Plan(cmd::plan::Args),
    /// Show what one step trains on: documents, file, row, text.
    Batch(cmd::batch::Args),
    /// Find every step that sees a document.
    Where(cmd::whereabouts::Args),
    /// Print one data digest per step.
    Digest(cmd::digest::Args),
    /// Append an amendment to a curriculum: from a step on, other weights, banned documents, another store.
    Amend(cmd::amend::Args),
    /// Recompute every data digest of a run.
    VerifyRun(cmd::verify_run::Args),
    /// Make a store of another project's token files.
    Import(cmd::import::Args),
    /// Write a store as another project's token files.
    Export(cmd::export::Args),
    /// Test whether an order looks like chance: ours, or any that a file lists.
    ShuffleTest(cmd::shuffle_test::Args),
    /// Print the keys of a corpus file or of a curriculum as JSON Schema.
    Schema(cmd::schema::Args),
    /// Print the completions of a shell for `zdata`.
    Completions(cmd::completions::Args),
    /// Print a page for `man`.
    Manual(cmd::completions::Manual),
}

/// Runs a command line, whose first word is the name of the program, and returns the exit code. `program` starts the
/// jobs of a cluster. The process is the program's: signals that would end it without a message get a handler.
pub fn main(program: PathBuf, args: impl IntoIterator<Item = OsString>) -> u8 {
    // A file that may not grow is then an error of the write, which says so, and not the end of the process.
    let _ = flag::register(consts::SIGXFSZ, Arc::default());
    // The first process of a container does not have the default action of a signal: it would outlive a request to end.
    if std::process::id() == 1 {
        for signal in [consts::SIGTERM, consts::SIGINT] {
            let _ =
                flag::register_conditional_shutdown(signal, 128 + signal, Arc::new(true.into()));
        }
    }
    // A request for more memory than the machine has is an error, not a crash; where it is not checked, Rust aborts.
    let _ = flag::register_conditional_shutdown(consts::SIGABRT, 6, Arc::new(true.into()));
    terminal::exit_code(match Cli::try_parse_from(args) {
        // The default hook has said where; what is left is to end as every bug of ours does.
        Ok(cli) => catch_unwind(AssertUnwindSafe(|| run(cli, program).map(|()| 0)))
            .unwrap_or_else(|_| Err(Fault::bug("zdata panicked").found("the message above"))),
        Err(refusal) => cmd::output::refused(&refusal),
    })
}

fn run(Cli { command, quiet }: Cli, program: PathBuf) -> Result<()> {
    if quiet {
        terminal::be_quiet();
    }
    match command {
        Command::Init(args) => cmd::init::exec(args),
        Command::Build(args) => cmd::build::exec(args, quiet, program),
        Command::Task(command) => cmd::task::exec(command, quiet),
        Command::Tokenizer(command) => cmd::tokenizer::exec(command, quiet),
        Command::Inspect(args) => cmd::inspect::exec(args),
        Command::Verify(args) => cmd::verify::exec(args, quiet),
        Command::Import(args) => cmd::import::exec(args, quiet),
        Command::Export(args) => cmd::export::exec(args, quiet),
        Command::Publish(args) => cmd::publish::exec(args, quiet),
        Command::Plan(args) => cmd::plan::exec(args),
        Command::Batch(args) => cmd::batch::exec(args),
        Command::Digest(args) => cmd::digest::exec(args, quiet),
        Command::Where(args) => cmd::whereabouts::exec(args),
        Command::Amend(args) => cmd::amend::exec(args),
        Command::VerifyRun(args) => cmd::verify_run::exec(args, quiet),
        Command::ShuffleTest(args) => cmd::shuffle_test::exec(&args),
        Command::Schema(args) => cmd::schema::exec(&args),
        Command::Completions(args) => cmd::completions::exec(&args, Cli::command()),
        Command::Manual(args) => cmd::completions::manual(&args, Cli::command()),
    }
}
