//! Output for users: text without terminal control characters, and one exit code for each outcome.
//!
//! Ids, paths and names come from corpora and from other people's files. A control character in one of them could
//! recolour, hide or forge text on the screen, so everything printed for users passes through [`shown`].
//! Answers for programs (JSON, and streams of lines that are digests and numbers) go out as they are.

use std::fmt;
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

pub use crate::shown::{name, shown};
use crate::{Fault, Result};

/// Prints text for users on standard output.
pub fn print(text: &str) -> Result<()> {
    print_raw(&shown(text))
}

/// Prints an answer for a program on standard output. A reader that stops early (`| head`) is not an error: the rest is
/// not printed, but the command finishes, because its exit code is an answer too.
pub fn print_raw(text: &str) -> Result<()> {
    put(text.as_bytes())
}

/// Prints the answer, as JSON for a program or as text for a user.
pub fn answer(
    json: bool,
    value: &impl serde::Serialize,
    text: impl FnOnce() -> String,
) -> Result<()> {
    if json { put(&crate::json::line(value, "an answer")?) } else { print(&text()) }
}

/// Whether the reader of standard output has closed it.
static UNREAD: AtomicBool = AtomicBool::new(false);

fn put(bytes: &[u8]) -> Result<()> {
    if UNREAD.load(Ordering::Relaxed) {
        return Ok(());
    }
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {
            UNREAD.store(true, Ordering::Relaxed);
            Ok(())
        }
        Err(error) => Err(Fault::io("write to", Path::new("standard output"), &error)),
    }
}

/// Prints the answer of the argument parser, plain or with colours: an error, which quotes untrusted arguments, or the
/// help that was asked for.
pub fn reply(plain: &str, coloured: &str, is_refusal: bool) -> Result<()> {
    match is_refusal {
        true => say(format_args!("{}", plain.trim_end())),
        false if io::stdout().is_terminal() => print_raw(coloured)?,
        false => print_raw(plain)?,
    }
    Ok(())
}

/// Prints a line on standard error. Write errors are ignored: output without a reader is no reason to stop.
pub fn say(text: fmt::Arguments<'_>) {
    let text = text.to_string() + "\n";
    let _ = io::stderr().lock().write_all(shown(&text).as_bytes());
}

/// Whether only answers and errors are printed.
static QUIET: AtomicBool = AtomicBool::new(false);

/// From now on prints only answers and errors (`--quiet`). Called once, at program start.
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Prints an optional message on standard error; `--quiet` suppresses it.
pub fn note(text: fmt::Arguments<'_>) {
    if !QUIET.load(Ordering::Relaxed) {
        say(text);
    }
}

/// Prints an optional line on standard error: `note!("...", ...)`.
#[macro_export]
macro_rules! note {
    ($($text:tt)*) => { $crate::terminal::note(::core::format_args!($($text)*)) };
}

/// The end of a program: prints the fault, whose class is the exit code.
pub fn end(outcome: Result<u8>) -> ExitCode {
    ExitCode::from(exit_code(outcome))
}

/// The same for a caller that ends the process itself.
pub fn exit_code(outcome: Result<u8>) -> u8 {
    outcome.unwrap_or_else(|fault| {
        say(format_args!("error: {fault}"));
        fault.class().exit_code()
    })
}
