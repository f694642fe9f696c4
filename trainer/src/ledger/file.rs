//! `ledger.jsonl` on disk: lines are only appended; an incomplete last line is cut before that.
//!
//! Opening reads line 0 and the lines after the newest mark of its index, so a run of a million steps opens as fast as
//! one of a thousand. `zdata verify-run` checks every line.

use std::borrow::Cow;
use std::fs::{self, File, Metadata};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use contract::{Digest, Fault, Result, chain};
use store::disk::{AppendFile, OutputFile};

use super::index::{CurriculumLine, Index, LedgerLine, LedgerMark, SPACING};
use super::record::{LedgerHead, StepFields, StepRecord};
use super::{FORMAT, RESTORE};
use crate::events;

/// Bytes read at a time.
const BUFFER: usize = 1 << 16;

/// An open ledger. Lines after its newest mark are held by offset and chain; earlier ones are looked up.
pub struct Ledger {
    source: LedgerFile,
    head: LedgerHead,
    /// Line 0.
    head_line: LedgerLine,
    /// The lines after step `tail.first - 1`.
    tail: LineRange,
    /// The curriculum in force at the end, and the line that holds it.
    curriculum: String,
    in_force: CurriculumLine,
    index: Index,
    /// The earlier lines that were looked up most recently.
    looked_up: Mutex<Option<LineRange>>,
}

/// The file. It is read by offset, without a cursor, so threads may read at once.
pub(super) struct LedgerFile {
    log: AppendFile,
    /// Bytes read since it was opened.
    #[cfg(test)]
    read: std::sync::atomic::AtomicU64,
}

/// Consecutive lines.
struct LineRange {
    /// The step of the first of them.
    first: u64,
    /// The line before them.
    before: LedgerLine,
    lines: Vec<LedgerLine>,
}

impl LineRange {
    fn after(step: u64, before: LedgerLine) -> LineRange {
        LineRange { first: step + 1, before, lines: Vec::new() }
    }

    /// The last step.
    fn last_step(&self) -> u64 {
        self.first - 1 + self.lines.len() as u64
    }

    fn last(&self) -> LedgerLine {
        self.lines.last().copied().unwrap_or(self.before)
    }

    /// The line of `step`, or of the step before the first.
    fn line(&self, step: u64) -> Option<LedgerLine> {
        match (step + 1).checked_sub(self.first)? {
            0 => Some(self.before),
            number => self.lines.get(number as usize - 1).copied(),
        }
    }
}

/// The purpose for which a ledger is opened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// For appending: an incomplete last line is cut, and the index is maintained.
    Appending,
    /// For reading: an incomplete last line is ignored, and nothing is written.
    Reading,
    /// The same, but every line is checked.
    Checking,
}

impl Ledger {
    /// Opens the ledger at `path` for appending, and cuts what a kill or a power loss left incomplete at its end.
    /// `None` if not even the head is complete.
    pub fn open(path: &Path) -> Result<Option<Ledger>> {
        if !path.exists() {
            return Ok(None);
        }
        let log = AppendFile::open(path).map_err(|error| Fault::io("open", path, &error))?;
        let Some(ledger) = Ledger::of(log, Purpose::Appending)? else { return Ok(None) };
        ledger.nothing_relies_on_what_is_torn()?;
        let cut = ledger.source.log.cut(ledger.tail.last().end);
        cut.map_err(|error| Fault::io("cut the torn end of", path, &error))?;
        Ok(Some(ledger))
    }

    /// Opens the ledger at `path` for reading; an incomplete last line is ignored.
    pub fn read(path: &Path) -> Result<Ledger> {
        Ledger::to_read(path, Purpose::Reading)
    }

    /// The same, with every line checked.
    pub fn read_whole(path: &Path) -> Result<Ledger> {
        Ledger::to_read(path, Purpose::Checking)
    }

    /// Refuses zeros in a line that was synced before a checkpoint: a power loss cannot have caused them.
    fn nothing_relies_on_what_is_torn(&self) -> Result<()> {
        let (path, step) = (self.source.path(), self.last_step());
        let mut next = Vec::new();
        let mut reader = self.source.reader(self.tail.last().end);
        reader.read_until(b'\n', &mut next).map_err(self.source.fault("read"))?;
        let kept = || events::kept(&path.with_file_name("events.jsonl"));
        match next.contains(&0).then(kept).flatten().filter(|kept| *kept > step) {
            Some(kept) => {
                let what = format!("it has zeros, and the checkpoint of step {kept} relies on it");
                Err(broken(path, step as usize + 1, &what))
            }
            None => Ok(()),
        }
    }

    fn to_read(path: &Path, aim: Purpose) -> Result<Ledger> {
        let log = AppendFile::read(path).map_err(|error| Fault::io("open", path, &error))?;
        Ledger::of(log, aim)?.ok_or_else(|| empty(path))
    }

    /// Creates a ledger with its head; replaces an incomplete one.
    pub fn create(path: &Path, head: LedgerHead) -> Result<Ledger> {
        Index::remove(path)?;
        let opened = AppendFile::open(path).and_then(|log| log.cut(0).map(|()| log));
        let source = LedgerFile::new(opened.map_err(|error| Fault::io("create", path, &error))?);
        let head_line = source.append(LedgerLine::default(), &to_json(&head)?)?;
        let (tail, curriculum) = (LineRange::after(0, head_line), head.curriculum.clone());
        let in_force = LedgerMark::begin(head_line, text_digest(&curriculum)).in_force;
        let (index, looked_up) = (Index::open(path, true), Mutex::new(None));
        let ledger =
            Ledger { source, head, head_line, tail, curriculum, in_force, index, looked_up };
        ledger.sync()?;
        Ok(ledger)
    }

    fn of(log: AppendFile, aim: Purpose) -> Result<Option<Ledger>> {
        let source = LedgerFile::new(log);
        let Some((head, head_line)) = source.head()? else { return Ok(None) };
        let mut from = LedgerMark::begin(head_line, text_digest(&head.curriculum));
        let mut index = Index::open(source.path(), aim == Purpose::Appending);
        if aim == Purpose::Checking {
            index.cut(0)?;
        }
        let newest = match aim {
            // Marks after a wrong one are rewritten, too.
            Purpose::Appending => source.last_in_order(&index, &from),
            Purpose::Reading | Purpose::Checking => {
                let fits =
                    |mark: &LedgerMark| source.fits(mark, &from) && source.holds(mark, &from);
                (1..=index.count()).rev().find_map(|number| index.mark(number).filter(fits))
            }
        };
        index.cut(newest.map_or(0, |mark| mark.step / SPACING))?;
        let mut curriculum = head.curriculum.clone();
        if let Some(mark) = newest {
            from = mark;
            curriculum = source.curriculum(&from.in_force)?.unwrap_or(curriculum);
        }
        let mut tail = LineRange::after(from.step, from.line);
        let mut in_force = from.in_force;
        source.scan(&mut tail, u64::MAX, |step, before, line, text| {
            if let Some(text) = text {
                in_force = CurriculumLine { before, text: text_digest(&text) };
                curriculum = text;
            }
            if step.is_multiple_of(SPACING) {
                index.push(&LedgerMark { step, line, head: from.head, in_force })?;
            }
            Ok(())
        })?;
        let looked_up = Mutex::new(None);
        Ok(Some(Ledger { source, head, head_line, tail, curriculum, in_force, index, looked_up }))
    }

    /// Line 0.
    pub fn head(&self) -> &LedgerHead {
        &self.head
    }

    /// The run's identity: the chain of line 0, which no later edit changes.
    pub fn id(&self) -> Digest {
        self.head_line.chain
    }

    /// The curriculum in force at the last step, in canonical form: that of line 0, or of the last step that has
    /// another.
    pub fn curriculum(&self) -> &str {
        &self.curriculum
    }

    /// The curriculum in force at `step`; for 0, that of line 0.
    pub fn curriculum_at(&self, step: u64) -> Result<String> {
        let source = &self.source;
        let from = self
            .mark_until(step, |mark, begin| source.fits(mark, begin) && source.holds(mark, begin));
        let found = self.source.curriculum(&from.in_force)?;
        let mut curriculum = found.unwrap_or_else(|| self.head.curriculum.clone());
        let mut lines = LineRange::after(from.step, from.line);
        self.source.scan(&mut lines, step - from.step, |_, _, _, text| {
            curriculum = text.unwrap_or_else(|| std::mem::take(&mut curriculum));
            Ok(())
        })?;
        Ok(curriculum)
    }

    /// The newest mark up to `step` that `fits`, compared with the one before the first step; else that one.
    fn mark_until(&self, step: u64, fits: impl Fn(&LedgerMark, &LedgerMark) -> bool) -> LedgerMark {
        let begin = LedgerMark::begin(self.head_line, text_digest(&self.head.curriculum));
        let fits = |mark: &LedgerMark| fits(mark, &begin);
        let mut marks = (1..=step / SPACING).rev();
        marks.find_map(|number| self.index.mark(number).filter(fits)).unwrap_or(begin)
    }

    /// The last recorded step; 0 if there is none.
    pub fn last_step(&self) -> u64 {
        self.tail.last_step()
    }

    /// The chain after `step` (0: after the head).
    pub fn chain_at(&self, step: u64) -> Option<Digest> {
        if step > self.last_step() {
            return None;
        }
        self.line(step).ok().map(|line| line.chain)
    }

    /// The line of `step`; for 0, the head.
    fn line(&self, step: u64) -> Result<LedgerLine> {
        if let Some(line) = self.tail.line(step) {
            return Ok(line);
        }
        let mut looked_up = self.looked_up.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(line) = looked_up.as_ref().and_then(|lines| lines.line(step)) {
            return Ok(line);
        }
        // Opened again: a run that continues may cut the index.
        let from =
            self.mark_until(step.saturating_sub(1), |mark, begin| self.source.fits(mark, begin));
        let mut lines = LineRange::after(from.step, from.line);
        let most = (step.div_ceil(SPACING) * SPACING).min(self.tail.first - 1) - from.step;
        self.source.scan(&mut lines, most, |_, _, _, _| Ok(()))?;
        let line = lines.line(step);
        *looked_up = Some(lines);
        line.ok_or_else(|| {
            broken(self.source.path(), step as usize, "it was there when the ledger was opened")
        })
    }

    /// The record of `step`; its loss is checked against the rest.
    pub fn record(&self, step: u64) -> Result<StepRecord> {
        self.step_as(step)
    }

    /// The fields of `T` in the line of `step`, checked.
    pub fn step_as<T: StepFields>(&self, step: u64) -> Result<T> {
        let path = self.source.path();
        if step == 0 || step > self.last_step() {
            return Err(Fault::usage(format!("step {step} is not in the ledger"))
                .at(path.display().to_string())
                .wanted(format!("a step from 1 to {}", self.last_step())));
        }
        let (before, line) = (self.line(step - 1)?, self.line(step)?);
        let body = self.source.body(before, line.end)?;
        let (body, _) =
            body.ok_or_else(|| broken(path, step as usize, "it changed while it was in use"))?;
        said(path, step as usize, &body)
    }

    /// Appends the record of the next step; with the curriculum in force from it on, if that has changed.
    pub fn append(&mut self, record: &StepRecord, curriculum: Option<String>) -> Result<()> {
        let step = self.last_step() + 1;
        if record.step != step {
            return Err(Fault::bug(format!(
                "step {} was to follow step {}",
                record.step,
                step - 1
            )));
        }
        let before = self.tail.last();
        let record = match curriculum {
            None => Cow::Borrowed(record),
            Some(text) => {
                self.in_force = CurriculumLine { before, text: text_digest(&text) };
                self.curriculum.clone_from(&text);
                Cow::Owned(StepRecord { curriculum: Some(text), ..record.clone() })
            }
        };
        let line = self.source.append(before, &to_json(&*record)?)?;
        self.tail.lines.push(line);
        if step.is_multiple_of(SPACING) {
            let (head, in_force) = (self.head_line.chain, self.in_force);
            self.index.push(&LedgerMark { step, line, head, in_force })?;
        }
        Ok(())
    }

    /// Copies the lines up to that of `step` to a new file, and syncs it.
    pub fn copy_through(&self, step: u64, to: &Path) -> Result<()> {
        let (end, fault) =
            (self.line(step)?.end, |error| Fault::io("copy the ledger to", to, &error));
        let mut copy = OutputFile::create(to)?;
        std::io::copy(&mut self.source.reader(0).take(end), &mut copy).map_err(fault)?;
        copy.sync().map_err(fault)
    }

    /// Syncs the file: required before a checkpoint that relies on it is committed.
    pub fn sync(&self) -> Result<()> {
        self.source.log.sync().map_err(self.source.fault("flush"))
    }
}

/// A reader of the file, at an offset.
struct OffsetReader<'a> {
    source: &'a LedgerFile,
    place: u64,
}

impl Read for OffsetReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = self.source.log.file().read_at(into, self.place)?;
        self.place += count as u64;
        #[cfg(test)]
        self.source.read.fetch_add(count as u64, std::sync::atomic::Ordering::Relaxed);
        Ok(count)
    }
}

impl LedgerFile {
    pub(super) fn new(log: AppendFile) -> LedgerFile {
        LedgerFile {
            log,
            #[cfg(test)]
            read: Default::default(),
        }
    }

    fn path(&self) -> &Path {
        self.log.path()
    }

    fn fault(&self, what: &str) -> impl Fn(std::io::Error) -> Fault {
        let (what, path) = (what.to_owned(), self.path().to_owned());
        move |error| Fault::io(&what, &path, &error)
    }

    /// A reader from an offset on.
    fn reader(&self, place: u64) -> BufReader<OffsetReader<'_>> {
        BufReader::with_capacity(BUFFER, OffsetReader { source: self, place })
    }

    /// The body of line 0, if it is complete.
    fn first(&self) -> Result<Option<(String, LedgerLine)>> {
        let mut bytes = Vec::new();
        let read = self.reader(0).read_until(b'\n', &mut bytes).map_err(self.fault("read"))?;
        let Some(line) = bytes.strip_suffix(b"\n") else { return Ok(None) };
        let (body, chain) = opened(Digest::default(), line)
            .ok_or_else(|| broken(self.path(), 0, "its chain is broken"))?;
        Ok(Some((body, LedgerLine { end: read as u64, chain })))
    }

    /// Line 0, if it is complete.
    pub(super) fn head(&self) -> Result<Option<(LedgerHead, LedgerLine)>> {
        let Some((body, line)) = self.first()? else { return Ok(None) };
        check_format(self.path(), &body)?;
        Ok(Some((from_json(self.path(), 0, &body)?, line)))
    }

    /// The body of the line from the end of `before` to `end`, and the chain after it; `None` if it does not continue
    /// the chain.
    fn body(&self, before: LedgerLine, end: u64) -> Result<Option<(String, Digest)>> {
        let mut bytes = vec![0; end.saturating_sub(before.end) as usize];
        let mut at = OffsetReader { source: self, place: before.end };
        at.read_exact(&mut bytes).map_err(self.fault("read"))?;
        Ok(bytes.strip_suffix(b"\n").and_then(|line| opened(before.chain, line)))
    }

    /// Whether the ledger that begins as `begin` says contains the line of `mark`.
    fn fits(&self, mark: &LedgerMark, begin: &LedgerMark) -> bool {
        let ends = format!("\"chain\":\"{}\"}}\n", mark.line.chain);
        let Some(place) = mark.line.end.checked_sub(ends.len() as u64) else { return false };
        let mut bytes = vec![0; ends.len()];
        let read = OffsetReader { source: self, place }.read_exact(&mut bytes);
        read.is_ok() && bytes == ends.as_bytes() && mark.head == begin.head
    }

    /// Whether the line that the mark names contains the curriculum in force.
    fn holds(&self, mark: &LedgerMark, begin: &LedgerMark) -> bool {
        mark.in_force == begin.in_force || matches!(self.curriculum(&mark.in_force), Ok(Some(_)))
    }

    /// The last mark before the first wrong one.
    fn last_in_order(&self, index: &Index, begin: &LedgerMark) -> Option<LedgerMark> {
        let mut last: Option<LedgerMark> = None;
        for number in 1..=index.count() {
            let mark = index.mark(number).filter(|mark| self.fits(mark, begin));
            let known = |mark: &LedgerMark| {
                last.is_some_and(|last| last.in_force == mark.in_force) || self.holds(mark, begin)
            };
            match mark.filter(known) {
                Some(mark) => last = Some(mark),
                None => break,
            }
        }
        last
    }

    /// The curriculum in the line that holds it; `None` if that is line 0.
    fn curriculum(&self, in_force: &CurriculumLine) -> Result<Option<String>> {
        if in_force.before == LedgerLine::default() {
            return Ok(None);
        }
        let changed = || {
            Fault::mismatch("the line of the ledger that holds the curriculum was changed")
                .at(self.path().display().to_string())
                .hint("restore the file; nothing after a changed line can be trusted")
        };
        let mut bytes = Vec::new();
        let mut reader = self.reader(in_force.before.end);
        reader.read_until(b'\n', &mut bytes).map_err(self.fault("read"))?;
        let line = bytes.strip_suffix(b"\n").and_then(|line| opened(in_force.before.chain, line));
        let said = line.and_then(|(body, _)| serde_json::from_str::<CommonFields>(&body).ok());
        let text = said.and_then(|said| said.curriculum);
        text.filter(|text| text_digest(text) == in_force.text).map(Some).ok_or_else(changed)
    }

    /// Reads up to `most` lines after `lines` and adds them. Calls `each` with the step, the line before, the line, and
    /// the curriculum if it changes there.
    fn scan(
        &self,
        lines: &mut LineRange,
        most: u64,
        mut each: impl FnMut(u64, LedgerLine, LedgerLine, Option<String>) -> Result<()>,
    ) -> Result<()> {
        let mut reader = self.reader(lines.last().end);
        let mut bytes = Vec::new();
        for _ in 0..most {
            bytes.clear();
            let read = reader.read_until(b'\n', &mut bytes).map_err(self.fault("read"))?;
            let Some(line) = chain::whole(&bytes) else { break };
            let (before, step) = (lines.last(), lines.last_step() + 1);
            let number = step as usize;
            let (body, chain) = opened(before.chain, line)
                .ok_or_else(|| broken(self.path(), number, "its chain is broken"))?;
            let said = from_json::<CommonFields>(self.path(), number, &body)?;
            if said.step != step {
                return Err(broken(self.path(), number, &format!("it should be step {step}")));
            }
            let line = LedgerLine { end: before.end + read as u64, chain };
            lines.lines.push(line);
            each(step, before, line, said.curriculum)?;
        }
        Ok(())
    }

    fn append(&self, before: LedgerLine, body: &str) -> Result<LedgerLine> {
        let (mut line, chain) = chain::seal(before.chain, body);
        line.push('\n');
        if is_another(self.path(), self.log.file()).map_err(self.fault("look at"))? {
            return Err(Fault::machine("the folder of this run was moved or replaced under way")
                .at(self.path().display().to_string())
                .hint("nothing was written since: go on in the folder that the run is in now, by naming it with --out"));
        }
        self.log.append(line.as_bytes()).map_err(self.fault("append to"))?;
        Ok(LedgerLine { end: before.end + line.len() as u64, chain })
    }
}

/// Whether these are the same file, by any name.
pub(super) fn of_one(left: &Metadata, right: &Metadata) -> bool {
    (left.dev(), left.ino()) == (right.dev(), right.ino())
}

/// Whether `path` is another file than `held`, or does not exist any more.
fn is_another(path: &Path, held: &File) -> std::io::Result<bool> {
    let held = held.metadata()?;
    match fs::metadata(path) {
        Ok(now) => Ok(!of_one(&now, &held)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

/// Refuses a ledger of another format version.
fn check_format(path: &Path, body: &str) -> Result<()> {
    #[derive(serde::Deserialize)]
    struct Format {
        format: u32,
    }
    match from_json(path, 0, body)? {
        Format { format: FORMAT } => Ok(()),
        Format { format } => Err(Fault::mismatch("the ledger was written by another version")
            .at(path.display().to_string())
            .found(format!("format {format}"))
            .wanted(format!("format {FORMAT}"))
            .hint("go on with, replay or compare it with the version that began it, or train it anew with another --out")),
    }
}

/// The fields that are read from every line.
#[derive(serde::Deserialize)]
struct CommonFields {
    step: u64,
    #[serde(default)]
    curriculum: Option<String>,
}

pub(super) fn opened(before: Digest, line: &[u8]) -> Option<(String, Digest)> {
    chain::open(before, std::str::from_utf8(line).ok()?)
}

fn text_digest(text: &str) -> Digest {
    Digest::of_bytes(text.as_bytes())
}

/// The error for a ledger without a run.
pub(super) fn empty(path: &Path) -> Fault {
    let beside = |name: &str| path.with_file_name(name).exists();
    let begun = beside("checkpoints") || beside("checkpoints.at");
    Fault::data("the ledger is empty").at(path.display().to_string()).hint(match begun {
        true => RESTORE,
        false => "the run had not begun: start it again",
    })
}

pub(super) fn broken(path: &Path, number: usize, what: &str) -> Fault {
    Fault::mismatch(format!("this line of the ledger was changed: {what}"))
        .at(format!("{}:{}", path.display(), number + 1))
        .hint("restore the file; nothing after a changed line can be trusted")
}

fn to_json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| Fault::bug(format!("a ledger line cannot be written: {error}")))
}

/// The content of a step's line, checked against the rest of the line.
pub(super) fn said<T: StepFields>(path: &Path, number: usize, body: &str) -> Result<T> {
    let said: T = from_json(path, number, body)?;
    said.checked().map_err(|what| broken(path, number, &what))
}

pub(super) fn from_json<T: serde::de::DeserializeOwned>(
    path: &Path,
    number: usize,
    body: &str,
) -> Result<T> {
    serde_json::from_str(body).map_err(|error| {
        Fault::data(format!("this line of the ledger cannot be read: {error}"))
            .at(format!("{}:{}", path.display(), number + 1))
            .hint("it was written by another version: use that one")
    })
}

#[cfg(test)]
mod tests;
