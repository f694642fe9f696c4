//! `ztrain completions` and `ztrain manual`: what a shell offers behind `ztrain`, and pages for `man`.

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use contract::terminal::print_raw;
use contract::{Fault, Result};

/// Arguments.
#[derive(clap::Args)]
#[command(
    after_help = "Example: ztrain completions bash > ~/.local/share/bash-completion/completions/ztrain"
)]
pub(crate) struct Args {
    /// The shell.
    shell: Shell,
}

/// Prints what the shell reads.
pub(crate) fn exec(args: &Args, mut program: Command) -> Result<u8> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut program, "ztrain", &mut text);
    print(&text)
}

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: ztrain manual > ztrain.1; man ./ztrain.1")]
pub(crate) struct Manual {
    /// A command, and one below it [default: ztrain itself]
    command: Vec<String>,
}

/// Prints the page of a command.
pub(crate) fn manual(args: &Manual, program: Command) -> Result<u8> {
    let mut command = program.disable_help_subcommand(true);
    command.build();
    for name in &args.command {
        let Some(next) = command.find_subcommand(name).cloned() else {
            let hint = "`ztrain --help` lists the commands";
            return Err(Fault::usage(format!("ztrain has no command {name}")).hint(hint));
        };
        command = next;
    }
    let mut text = Vec::new();
    Man::new(command).render(&mut text).map_err(|error| Fault::bug(error.to_string()))?;
    print(&text)
}

fn print(text: &[u8]) -> Result<u8> {
    print_raw(&String::from_utf8_lossy(text))?;
    Ok(0)
}
