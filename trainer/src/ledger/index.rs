//! `ledger.index`: the end of every thousandth line of the ledger, so that a line is found without reading a million
//! others.
//!
//! It follows from the ledger, and is never trusted by itself: a mark is valid only if line 0 has the chain that it
//! names, and the line that ends there has its chain. Without a valid mark all lines are read.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use contract::{Digest, Fault, Result};
use store::disk::{self, AppendFile};

/// Steps between two marks.
pub(crate) const SPACING: u64 = 1000;

/// Bytes of a mark: two numbers of 20 digits, two digests, and the position of a curriculum, each with a separator.
const WIDTH: usize = 3 * 21 + 4 * 33;

/// A line of the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LedgerLine {
    /// Its end offset.
    pub(super) end: u64,
    /// The chain after it.
    pub(super) chain: Digest,
}

/// The line that holds the curriculum in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CurriculumLine {
    /// The end of the line before it.
    pub(super) before: LedgerLine,
    /// The digest of its text.
    pub(super) text: Digest,
}

/// The state of the ledger at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LedgerMark {
    /// The step.
    pub(super) step: u64,
    /// Its line.
    pub(super) line: LedgerLine,
    /// The chain after line 0.
    pub(super) head: Digest,
    /// The curriculum that it was trained with.
    pub(super) in_force: CurriculumLine,
}

impl LedgerMark {
    /// The state before the first step, after the line `head` whose curriculum has the digest `text`.
    pub(super) fn begin(head: LedgerLine, text: Digest) -> LedgerMark {
        let in_force = CurriculumLine { before: LedgerLine::default(), text };
        LedgerMark { step: 0, line: head, head: head.chain, in_force }
    }

    fn text(&self) -> String {
        let LedgerMark { step, line, head, in_force } = self;
        let CurriculumLine { before, text } = in_force;
        format!(
            "{step:020} {:020} {} {head} {:020} {} {text}\n",
            line.end, line.chain, before.end, before.chain
        )
    }

    fn parse(text: &str) -> Option<LedgerMark> {
        fn next<'a, T: FromStr>(words: &mut impl Iterator<Item = &'a str>) -> Option<T> {
            words.next()?.parse().ok()
        }
        let words = &mut text.split_whitespace();
        let step = next(words)?;
        let line = LedgerLine { end: next(words)?, chain: next(words)? };
        let head = next(words)?;
        let before = LedgerLine { end: next(words)?, chain: next(words)? };
        Some(LedgerMark {
            step,
            line,
            head,
            in_force: CurriculumLine { before, text: next(words)? },
        })
    }
}

/// The marks of a ledger, read on demand.
#[derive(Debug)]
pub(super) struct Index {
    path: PathBuf,
    /// `None` if there is no file yet.
    log: Option<AppendFile>,
    count: u64,
    writes: bool,
}

impl Index {
    /// The index of the ledger at `ledger`; a file that cannot be read counts as missing.
    pub(super) fn open(ledger: &Path, writes: bool) -> Index {
        let path = ledger.with_extension("index");
        let open = if writes { AppendFile::open } else { AppendFile::read };
        let log = path.exists().then(|| open(&path).ok()).flatten();
        let about = log.as_ref().and_then(|log| log.file().metadata().ok());
        let bytes = about.map_or(0, |it| it.len());
        Index { path, log, count: bytes / WIDTH as u64, writes }
    }

    /// The number of marks.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The mark of step `number` times [`SPACING`], from 1.
    pub(super) fn mark(&self, number: u64) -> Option<LedgerMark> {
        let log = self.log.as_ref().filter(|_| (1..=self.count).contains(&number))?;
        let mut bytes = [0; WIDTH];
        log.file().read_exact_at(&mut bytes, (number - 1) * WIDTH as u64).ok()?;
        let mark = LedgerMark::parse(std::str::from_utf8(&bytes).ok()?)?;
        (mark.step == number * SPACING).then_some(mark)
    }

    /// Drops all marks after the first `count`.
    pub(super) fn cut(&mut self, count: u64) -> Result<()> {
        self.count = self.count.min(count);
        match &self.log {
            Some(log) if self.writes => {
                let cut = log.cut(self.count * WIDTH as u64);
                cut.map_err(|error| Fault::io("cut", &self.path, &error))
            }
            _ => Ok(()),
        }
    }

    /// Appends the next mark.
    pub(super) fn push(&mut self, mark: &LedgerMark) -> Result<()> {
        if !self.writes || mark.step != (self.count + 1) * SPACING {
            return Ok(());
        }
        let fault = |error| Fault::io("append to", &self.path, &error);
        let log = match self.log.take() {
            Some(log) => log,
            None => AppendFile::open(&self.path).map_err(fault)?,
        };
        let log = self.log.insert(log);
        log.append(mark.text().as_bytes()).map_err(fault)?;
        self.count += 1;
        Ok(())
    }

    /// Removes the index, for a new ledger.
    pub(super) fn remove(ledger: &Path) -> Result<()> {
        disk::remove(&ledger.with_extension("index"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn marks_come_back_from_text(step: u64, ends: [u64; 2], digests: [u128; 4]) {
            let [chain, head, before, text] = digests.map(Digest);
            let in_force = CurriculumLine { before: LedgerLine { end: ends[1], chain: before }, text };
            let mark = LedgerMark { step, line: LedgerLine { end: ends[0], chain }, head, in_force };
            let written = mark.text();
            prop_assert_eq!(written.len(), WIDTH);
            prop_assert_eq!(LedgerMark::parse(&written), Some(mark));
        }
    }
}
