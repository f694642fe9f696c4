//! `events.jsonl` as shown to people: speeds by step, and what happened to the run.
//!
//! Events are not chained, and a kill may leave an incomplete line in the middle of the file: such lines are counted
//! and skipped. An incomplete last line is read once it is complete.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use store::regular;
use trainer::events::RanksEvent;

use super::odd::{OddReason, OddReasonKind, OddStep, add};
use curriculum::stats::RecentValues;

/// Bytes read at a time.
const BUFFER: usize = 1 << 18;

/// Less than the length of any ledger line.
const LINE: u64 = 128;

/// A step is slow below this fraction of the usual speed.
pub(crate) const SLOW: f64 = 0.3;

/// The events of a run, as far as they have been read.
pub struct EventLog {
    path: PathBuf,
    ledger: PathBuf,
    /// The maximum number of steps of the ledger.
    most: u64,
    reader: Option<BufReader<File>>,
    place: u64,
    /// Seconds of each step, from step 1 on; NaN if unknown.
    pub seconds: Vec<f32>,
    /// Tokens per second.
    pub speed: Vec<f32>,
    /// The fraction of the step's time spent waiting for its batch.
    pub stall: Vec<f32>,
    /// Memory of the process of rank 0 after the step, in bytes.
    pub memory: Vec<f32>,
    /// TFLOP/s of a rank.
    pub tflops: Vec<f32>,
    /// The same as a fraction of its device's peak.
    pub mfu: Vec<f32>,
    /// Tokens of all steps so far, by the newest event.
    pub tokens: Option<u64>,
    /// What happened, in the order of the file.
    pub happenings: Vec<NotableEvent>,
    /// Validation losses by step.
    pub validation: BTreeMap<u64, ValidationPoint>,
    /// Scores of tasks by step: curves as in [`trainer::metrics`], by their names.
    pub evaluation: BTreeMap<u64, BTreeMap<String, f64>>,
    /// The number of lines that could not be parsed.
    pub unreadable: u64,
    speeds: RecentValues,
    odd: Vec<OddStep>,
    /// The last step of the running process; `None` after its end.
    running: Option<u64>,
    fresh: bool,
}

/// A notable event of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NotableEvent {
    /// Its kind.
    pub kind: NotableEventKind,
    /// The step after which it happened.
    pub step: u64,
    /// Seconds since 1970.
    pub time: f64,
    /// A description for people.
    pub words: String,
}

/// The kind of a notable event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NotableEventKind {
    /// A process started training.
    Start,
    /// The previous process ended without an event.
    Killed,
    /// It ended normally.
    Stop,
    /// A checkpoint was written.
    Checkpoint,
    /// A checkpoint could not be used.
    Damaged,
    /// The curriculum was edited.
    Edit,
    /// It ended with a fault.
    Fault,
    /// A snapshot was written because the loss jumped.
    Spike,
    /// The number of ranks.
    Ranks,
    /// Ranks were lost, and the others continued.
    Loss,
    /// They completed a new step.
    Recovered,
    /// Restarted ranks joined.
    Joined,
    /// An action of a supervisor.
    Supervisor,
    /// Connections without the run's key were refused.
    Unauthenticated,
}

/// The validation loss after a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ValidationPoint {
    /// Mean loss per label, over all sources.
    pub all: f64,
    /// The same by source.
    pub sources: BTreeMap<String, f64>,
}

/// An event whose other fields are parsed only when needed.
#[derive(Deserialize)]
struct Event {
    event: String,
    #[serde(default)]
    time: f64,
    #[serde(default)]
    step: u64,
    #[serde(default)]
    seconds: f64,
    #[serde(default)]
    tokens_per_second: f64,
    #[serde(default)]
    stall: f64,
    #[serde(default)]
    memory: Option<f64>,
    #[serde(default)]
    tflops: Option<f64>,
    #[serde(default)]
    mfu: Option<f64>,
    #[serde(default)]
    tokens: Option<u64>,
}

impl NotableEventKind {
    /// Whether it may explain what is odd at the same step.
    pub(super) fn is_context(self) -> bool {
        !matches!(
            self,
            NotableEventKind::Checkpoint
                | NotableEventKind::Stop
                | NotableEventKind::Spike
                | NotableEventKind::Unauthenticated
        )
    }
}

impl EventLog {
    /// The events at `path`, none read yet; a missing file counts as empty. `ledger` is that of the run.
    pub fn new(path: &Path, ledger: &Path) -> EventLog {
        EventLog {
            path: path.to_owned(),
            ledger: ledger.to_owned(),
            most: 0,
            reader: None,
            place: 0,
            seconds: Vec::new(),
            speed: Vec::new(),
            stall: Vec::new(),
            memory: Vec::new(),
            tflops: Vec::new(),
            mfu: Vec::new(),
            tokens: None,
            happenings: Vec::new(),
            validation: BTreeMap::new(),
            evaluation: BTreeMap::new(),
            unreadable: 0,
            speeds: RecentValues::default(),
            odd: Vec::new(),
            running: None,
            fresh: true,
        }
    }

    /// Steps that were slow, or were not completed.
    pub fn odd(&self) -> &[OddStep] {
        &self.odd
    }

    /// Whether a process has started and not ended, by the events: it trains, or was killed.
    pub(crate) fn running(&self) -> bool {
        self.running.is_some()
    }

    /// Number of bytes read.
    pub(super) fn bytes(&self) -> u64 {
        self.place
    }

    /// How often a process started training.
    pub fn starts(&self) -> usize {
        self.happenings.iter().filter(|one| one.kind == NotableEventKind::Start).count()
    }

    /// Reads new events; returns the number of lines.
    pub fn refresh(&mut self) -> Result<u64> {
        let path = self.path.clone();
        let recorded = || std::fs::metadata(&self.ledger).map_or(0, |file| file.len());
        self.most = recorded() / LINE;
        let fault = |error: std::io::Error| Fault::io("read", &path, &error);
        let mut reader = match self.reader.take() {
            Some(reader) => reader,
            None => match regular::open(&path) {
                Ok(file) => BufReader::with_capacity(BUFFER, file),
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
                Err(error) => return Err(Fault::io("open", &path, &error)),
            },
        };
        let (mut lines, mut text) = (0, Vec::new());
        loop {
            text.clear();
            let read = reader.read_until(b'\n', &mut text).map_err(fault)?;
            if text.last() != Some(&b'\n') {
                reader.seek(SeekFrom::Start(self.place)).map_err(fault)?;
                break;
            }
            self.place += read as u64;
            lines += 1;
            match serde_json::from_slice::<Event>(&text) {
                Ok(event) => self.event(&event, &text),
                Err(_) => self.unreadable += 1,
            }
        }
        self.reader = Some(reader);
        Ok(lines)
    }

    fn event(&mut self, event: &Event, text: &[u8]) {
        match event.event.as_str() {
            "step" => return self.step(event),
            "exchange" => return,
            _ => (),
        }
        let fields: Value = serde_json::from_slice(text).unwrap_or_default();
        match event.event.as_str() {
            "validation" => return self.validated(event.step, &fields),
            "evaluation" => {
                let curves = trainer::metrics::between("evaluation", &fields).into_iter().flatten();
                self.evaluation.insert(event.step, curves.collect());
                return;
            }
            _ => (),
        }
        if let Some((kind, words)) = self.happened(event, &fields) {
            let step = match kind {
                NotableEventKind::Start => number(&fields, "from_step"),
                NotableEventKind::Edit => number(&fields, "recorded"),
                NotableEventKind::Ranks => self.running.unwrap_or(0),
                _ => event.step,
            };
            self.happenings.push(NotableEvent { kind, step, time: event.time, words });
        }
    }

    fn step(&mut self, event: &Event) {
        // A step beyond the ledger is not one of this run, and might exceed all memory.
        let Some(index) = event.step.checked_sub(1).filter(|at| *at < self.most) else { return };
        let index = index as usize;
        let longer = (index + 1).max(self.seconds.len());
        let EventLog { seconds, speed, stall, memory, tflops, mfu, .. } = self;
        for column in [seconds, speed, stall, memory, tflops, mfu] {
            column.resize(longer, f32::NAN);
        }
        let speed = event.tokens_per_second;
        self.seconds[index] = event.seconds as f32;
        self.speed[index] = speed as f32;
        self.stall[index] = (event.stall / event.seconds.max(1e-9)).min(1.0) as f32;
        let known = |value: Option<f64>| value.map_or(f32::NAN, |value| value as f32);
        self.memory[index] = known(event.memory);
        (self.tflops[index], self.mfu[index]) = (known(event.tflops), known(event.mfu));
        self.tokens = event.tokens.or(self.tokens);
        let usual = self.speeds.median();
        // In the first step of a process, libraries are loaded, too.
        if let Some(usual) = usual.filter(|usual| speed < SLOW * usual && !self.fresh) {
            let words = format!("{speed:.0} tokens/s, usually {usual:.0}: {:.2} s", event.seconds);
            let (value, usual) = (Some(speed), Some(usual));
            let (kind, step, score, layer) = (OddReasonKind::Slow, event.step, None, None);
            let reasons = vec![OddReason { kind, step, value, usual, score, layer, words }];
            add(&mut self.odd, OddStep { step, last: step, reasons, context: Vec::new() });
        }
        if !self.fresh {
            self.speeds.push(speed);
        }
        self.fresh = false;
        self.running = self.running.map(|_| event.step);
    }

    fn validated(&mut self, step: u64, fields: &Value) {
        let loss = |value: &Value| value["loss"].as_f64();
        let Some(all) = loss(&fields["all"]) else { return };
        let sources = fields["sources"].as_object().into_iter().flatten();
        let sources = sources.filter_map(|(name, one)| Some((name.clone(), loss(one)?))).collect();
        self.validation.insert(step, ValidationPoint { all, sources });
    }

    /// The kind and description of an event. Some events add a second entry.
    fn happened(&mut self, event: &Event, fields: &Value) -> Option<(NotableEventKind, String)> {
        let (step, text) = (event.step, |key: &str| fields[key].as_str().unwrap_or("?").to_owned());
        Some(match event.event.as_str() {
            "start" => (NotableEventKind::Start, self.started(event.time, fields)),
            "stop" => {
                self.running = None;
                let signal = fields["signal"].as_bool().unwrap_or(false);
                let why = if signal { ", on a signal" } else { "" };
                (NotableEventKind::Stop, format!("ended in order after step {step}{why}"))
            }
            "forked" => {
                self.running = None;
                (NotableEventKind::Stop, format!("forked from {} after step {step}", text("of")))
            }
            "checkpoint" => {
                let mut words = format!("the state after step {step} was kept");
                if let Some(stall) = fields["stall_seconds"].as_f64() {
                    let writing = fields["writing_seconds"].as_f64().unwrap_or(0.0);
                    words += &format!(": the run waited {stall:.3} s, writing took {writing:.2} s");
                }
                (NotableEventKind::Checkpoint, words)
            }
            "damaged checkpoint" => (
                NotableEventKind::Damaged,
                format!("checkpoint step-{step} was passed over: {}", text("fault")),
            ),
            "edit" => {
                (NotableEventKind::Edit, format!("the curriculum was edited: {}", text("edit")))
            }
            "fault" => {
                self.running = None;
                let fault = text("fault");
                let first = fault.lines().next().unwrap_or_default();
                let reason = OddReason::words(
                    OddReasonKind::Stopped,
                    step,
                    format!("it did not end: {first}"),
                );
                let (reasons, context) = (vec![reason], Vec::new());
                add(&mut self.odd, OddStep { step, last: step, reasons, context });
                (NotableEventKind::Fault, format!("stopped in step {step}: {first}"))
            }
            "spike" => {
                let kept = number(fields, "kept");
                (
                    NotableEventKind::Spike,
                    format!("step {step} is a spike: the state after step {kept} was kept"),
                )
            }
            _ => return self.of_ranks(event, fields),
        })
    }

    /// The same for events about ranks.
    fn of_ranks(&mut self, event: &Event, fields: &Value) -> Option<(NotableEventKind, String)> {
        let text = |key: &str| fields[key].as_str().unwrap_or("?").to_owned();
        Some(match event.event.as_str() {
            "loss" => {
                // From here on, the remaining ranks write the events.
                self.running = None;
                (NotableEventKind::Loss, format!("lost ranks: {}", listed(&fields["lost"])))
            }
            "joined" => {
                // From here on, the enlarged group of ranks writes the events.
                self.running = None;
                (
                    NotableEventKind::Joined,
                    format!("ranks that joined: {}", listed(&fields["joined"])),
                )
            }
            "supervisor" => {
                let rank = fields["rank"].as_u64();
                let of_rank = rank.map_or_else(String::new, |rank| format!(" of rank {rank}"));
                let (cause, what, action) = (text("cause"), text("what"), text("action"));
                (
                    NotableEventKind::Supervisor,
                    format!("supervisor: {cause}{of_rank} ({what}): {action}"),
                )
            }
            "recovered" => {
                let held_up = fields["seconds"].as_f64().unwrap_or(0.0);
                (
                    NotableEventKind::Recovered,
                    format!("the ranks' new meeting held the run up for {held_up:.2} s"),
                )
            }
            "unauthenticated" => {
                let refused = number(fields, "refused");
                let words = format!("connections without the run's key, refused so far: {refused}");
                (NotableEventKind::Unauthenticated, words)
            }
            RanksEvent::NAME => {
                let RanksEvent { world, .. } = RanksEvent::of(fields)?;
                (NotableEventKind::Ranks, format!("{world} ranks"))
            }
            _ => return None,
        })
    }

    /// Handles the start of a process; if the previous one has no end event, adds that it was killed.
    fn started(&mut self, time: f64, fields: &Value) -> String {
        let (from, recorded) = (number(fields, "from_step"), number(fields, "recorded"));
        if let Some(last) = self.running {
            let last = last.max(recorded);
            let words = format!("the process before ended after step {last} without a word");
            self.happenings.push(NotableEvent {
                kind: NotableEventKind::Killed,
                step: last,
                time,
                words,
            });
        }
        (self.running, self.fresh) = (Some(from), true);
        let on = fields["device"].as_str().unwrap_or("?").to_lowercase();
        let workers = fields["workers"].as_u64().unwrap_or(1);
        let plural = if workers == 1 { "" } else { "s" };
        let again = match recorded.saturating_sub(from) {
            0 => String::new(),
            1 => format!(", and computed step {recorded} again"),
            _ => format!(", and computed steps {} to {recorded} again", from + 1),
        };
        let word =
            if from == 0 { "began".to_owned() } else { format!("went on after step {from}") };
        format!("{word}{again} ({on}, {workers} worker{plural})")
    }
}

fn listed(ranks: &Value) -> String {
    let ranks = ranks.as_array().map_or(&[][..], Vec::as_slice);
    ranks.iter().map(Value::to_string).collect::<Vec<_>>().join(", ")
}

fn number(fields: &Value, key: &str) -> u64 {
    fields[key].as_u64().unwrap_or(0)
}

#[cfg(test)]
#[path = "log/tests.rs"]
mod tests;
