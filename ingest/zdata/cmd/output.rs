//! What the commands share: answers for people and for programs, ranges as arguments, places as text.

use std::ops::Range;

pub(crate) use contract::terminal::answer;
use contract::terminal::{name, reply};
use contract::{Fault, Result};
use store::{DocumentRecord, SourceRecord};

/// One line of JSON.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<String> {
    let text = serde_json::to_string(value);
    Ok(text.map_err(|error| Fault::bug(format!("an answer is not JSON: {error}")))? + "\n")
}

/// What the command line's reader has to say: help that was asked for, or a refusal. Gives the exit code.
pub(crate) fn refused(refusal: &clap::Error) -> Result<u8> {
    let text = refusal.render();
    reply(&text.to_string(), &text.ansi().to_string(), refusal.use_stderr())?;
    Ok(refusal.exit_code() as u8)
}

/// Steps `A..B`, half-open, from 1.
pub(crate) fn steps(text: &str) -> std::result::Result<Range<u64>, String> {
    let wrong = || format!("expected steps A..B (A to B - 1, counted from 1), found {text:?}");
    let (from, to) = text.split_once("..").ok_or_else(wrong)?;
    let number = |text: &str| text.trim().replace('_', "").parse::<u64>().map_err(|_| wrong());
    let (from, to) = (number(from)?, number(to)?);
    if from == 0 || to <= from {
        return Err(wrong());
    }
    Ok(from..to)
}

/// An id, a path or a name within a line for people.
pub(crate) fn plain(text: &str) -> String {
    name(text).into_owned()
}

/// The input file of a document.
pub(crate) fn file<'a>(source: &'a SourceRecord, record: &DocumentRecord) -> &'a str {
    source.inputs.get(record.file as usize).map_or("unknown file", |input| input.path.as_str())
}

/// Where a document's text stands: `raw/web.jsonl.zst line 12, bytes 3400..4811`.
pub(crate) fn origin(source: &SourceRecord, record: &DocumentRecord) -> String {
    let mut place = file(source, record).to_owned();
    place += &match (record.group, record.row) {
        (Some(group), row) => format!(" row group {group} row {row}"),
        (None, 0) => String::new(),
        (None, line) => format!(" line {line}"),
    };
    if let Some((from, to)) = record.bytes {
        place += &format!(", bytes {from}..{to}");
    }
    place
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_steps() {
        assert_eq!(steps("1..21"), Ok(1..21));
        assert_eq!(steps("1_000 .. 1_001"), Ok(1000..1001));
        for text in ["", "5", "0..3", "3..3", "4..3", "1..", "..4", "a..b", "1..-4", "1...4"] {
            assert!(steps(text).is_err(), "{text}");
        }
    }
}
