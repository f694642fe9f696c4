//! How a program speaks to people: text that a terminal shows and does not obey, and one end for each outcome.
//!
//! Ids, paths and names come from corpora and from other people's files. A control character in one of them could
//! recolour, hide or forge what stands on the screen; so whatever is printed for people passes through [`shown`].
//! Answers for programs (JSON, and streams of lines that are digests and numbers) go out as they are.

use std::fmt;
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

pub use crate::shown::{name, shown};
use crate::{Fault, Result};

/// Puts text for people on standard output.
pub fn print(text: &str) -> Result<()> {
    print_raw(&shown(text))
}

/// Puts an answer for a program on standard output. A reader that has seen enough (`| head`) is not an error: from there on
/// nothing is printed, and the command goes on to the end, because its exit code is an answer too.
pub fn print_raw(text: &str) -> Result<()> {
    put(text.as_bytes())
}

/// Gives the answer to a program that asked for JSON, or to a person.
pub fn answer(
    json: bool,
    value: &impl serde::Serialize,
    text: impl FnOnce() -> String,
) -> Result<()> {
    if json { put(&crate::json::line(value, "an answer")?) } else { print(&text()) }
}

/// Whether the reader of standard output is gone.
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

/// What the reader of a command line has to say, plain and with a terminal's colours: a refusal, which quotes arguments that may
/// hold anything, or help that was asked for.
pub fn reply(plain: &str, coloured: &str, is_refusal: bool) -> Result<()> {
    match is_refusal {
        true => say(format_args!("{}", plain.trim_end())),
        false if io::stdout().is_terminal() => print_raw(coloured)?,
        false => print_raw(plain)?,
    }
    Ok(())
}

/// Says something on standard error, in a line of its own. Nobody may be listening, which is no reason to stop.
pub fn say(text: fmt::Arguments<'_>) {
    let text = text.to_string() + "\n";
    let _ = io::stderr().lock().write_all(shown(&text).as_bytes());
}

/// Whether only answers and errors are told.
static QUIET: AtomicBool = AtomicBool::new(false);

/// From now on tells only answers and errors: `--quiet`. Called once, at the start of a program.
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Says something on standard error that nobody has to know.
pub fn note(text: fmt::Arguments<'_>) {
    if !QUIET.load(Ordering::Relaxed) {
        say(text);
    }
}

/// Says something that nobody has to know on standard error, in a line of its own: `note!("...", ...)`.
#[macro_export]
macro_rules! note {
    ($($text:tt)*) => { $crate::terminal::note(::core::format_args!($($text)*)) };
}

/// The end of a program: a fault is told, and its class is the exit code.
pub fn end(outcome: Result<u8>) -> ExitCode {
    ExitCode::from(outcome.unwrap_or_else(|fault| {
        say(format_args!("error: {fault}"));
        fault.class().exit_code()
    }))
}
