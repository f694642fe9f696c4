//! How a program speaks to people: text that a terminal shows and does not obey, and one end for each outcome.
//!
//! Ids, paths and names come from corpora and from other people's files. A control character in one of them could
//! recolour, hide or forge what stands on the screen; so whatever is printed for people passes through [`shown`].
//! Answers for programs (JSON, and streams of lines that are digests and numbers) go out as they are.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{Fault, Result};

/// Text for people: what a terminal would obey is spelled out (`\u{1b}`), line ends and tabs stay.
pub fn shown(text: &str) -> Cow<'_, str> {
    escaped(text, |c| matches!(c, '\n' | '\t'))
}

/// The same for a name that stands within a line.
pub fn name(text: &str) -> Cow<'_, str> {
    escaped(text, |_| false)
}

fn escaped(text: &str, stays: impl Fn(char) -> bool) -> Cow<'_, str> {
    let obeyed = |c: char| (c.is_control() || turns(c)) && !stays(c);
    if !text.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if obeyed(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// Whether a character turns the direction of what follows, or ends a line where people see none.
fn turns(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Puts text for people on standard output.
pub fn print(text: &str) -> Result<()> {
    print_raw(&shown(text))
}

/// Puts an answer for a program on standard output. A reader that has seen enough (`| head`) is no error: the program
/// ends there, done.
pub fn print_raw(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_a_terminal_obeys_is_spelled_out() {
        assert_eq!(shown("plain caf\u{e9} \u{6587}\n\tx"), "plain caf\u{e9} \u{6587}\n\tx");
        assert_eq!(shown("a\u{1b}[31mb\r\u{7}\u{9b}2J"), "a\\u{1b}[31mb\\r\\u{7}\\u{9b}2J");
        assert_eq!(shown("\u{202e}txt.exe"), "\\u{202e}txt.exe");
        assert_eq!(name("a\nerror: b"), "a\\nerror: b");
        let fault = Fault::data("bad \u{1b}c name").at("x\n\u{1b}]0;t\u{7}").found("\u{1b}[2J");
        let told = fault.hint("\u{9b}1m").to_string();
        assert_eq!(told.lines().count(), 3);
        assert!(!told.contains(|c: char| c.is_control() && c != '\n'), "{told:?}");
    }

    proptest! {
        #[test]
        fn nothing_that_moves_the_cursor_passes(text in any::<String>()) {
            let told = shown(&text);
            prop_assert!(told.chars().all(|c| matches!(c, '\n' | '\t') || !c.is_control() && !turns(c)));
            prop_assert!(name(&text).chars().all(|c| !c.is_control() && !turns(c)));
            let harmless = text.chars().all(|c| matches!(c, '\n' | '\t') || !c.is_control() && !turns(c));
            prop_assert!(!harmless || told == text);
        }
    }
}
