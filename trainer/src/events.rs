//! `events.jsonl`: ranks, devices, times and restarts are recorded here and nowhere else; it has no checksum chain.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use contract::{Fault, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use store::disk::AppendFile;
use store::regular;

use crate::mesh::{Degrees, GradReduce};

/// The events of a run, for appending.
pub struct Events {
    log: AppendFile,
}

impl Events {
    /// Opens or creates the file. Ends a line that a crash left incomplete, so that it does not swallow the next one.
    pub fn open(path: &Path) -> Result<Self> {
        let opened = || {
            let log = AppendFile::open(path)?;
            let mut last = [b'\n'];
            if let Some(end) = log.file().metadata()?.len().checked_sub(1) {
                log.file().read_exact_at(&mut last, end)?;
            }
            if last != [b'\n'] {
                log.append(b"\n")?;
            }
            Ok(log)
        };
        opened().map(|log| Events { log }).map_err(|error| Fault::io("open", path, &error))
    }

    /// Writes one event: its name, the time in seconds since 1970, and `fields` (an object).
    pub fn write(&mut self, event: &str, fields: Value) -> Result<()> {
        let mut line = json!({"time": now(), "event": event});
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, fields) {
            line.extend(fields);
        }
        let written = self.log.append(format!("{line}\n").as_bytes());
        written.map_err(|error| Fault::io("append to", self.log.path(), &error))
    }
}

/// The event `ranks`: which ranks compute the steps from here on. One rank alone has none.
#[derive(Debug, Serialize, Deserialize)]
pub struct RanksEvent {
    /// How many there are.
    pub world: u32,
    /// How many may share a micro-batch.
    #[serde(flatten)]
    pub degrees: Degrees,
    /// How they distribute micro-batches.
    pub grad_reduce: GradReduce,
    /// What carries their tensors.
    pub transport: String,
    /// Fields that no program reads.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

impl RanksEvent {
    /// The event's name.
    pub const NAME: &str = "ranks";

    /// Parses an event; `None` if it is not a complete one.
    pub fn of(event: &Value) -> Option<RanksEvent> {
        RanksEvent::deserialize(event).ok()
    }
}

/// The events at `path`, in order, without lines that cannot be parsed. `None` if there is no file.
pub fn each(path: &Path) -> Option<impl Iterator<Item = Value>> {
    let lines =
        BufReader::new(regular::open(path).ok()?).split(b'\n').map_while(std::result::Result::ok);
    Some(lines.filter_map(|line| serde_json::from_slice(&line).ok()))
}

/// The text of the events at `path`, empty if there is no file. Bytes that are not UTF-8 spoil only their own line.
pub fn read(path: &Path) -> Result<String> {
    match regular::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(Fault::io("read", path, &error)),
    }
}

/// The last events at `path`; `None` if it cannot be read.
fn last(path: &Path) -> Option<Vec<Value>> {
    let mut file = regular::open(path).ok()?;
    let end = file.seek(SeekFrom::End(0)).ok()?;
    file.seek(SeekFrom::Start(end.saturating_sub(TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    // The first line may be incomplete.
    Some(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Whether the last events at `path` have the step `step` but not its event `name`.
pub(crate) fn lacks(path: &Path, name: &str, step: u64) -> bool {
    let events = last(path).unwrap_or_default();
    let has = |name: &str| events.iter().any(|it| it["event"] == name && it["step"] == step);
    has("step") && !has(name)
}

/// Recent seconds per step by the events at `path`: the median of the last steps; `None` if there are none.
pub(crate) fn pace(path: &Path) -> Option<f64> {
    let steps = last(path)?.into_iter().filter(|event| event["event"] == "step");
    let mut seconds: Vec<f64> = steps.filter_map(|event| event["seconds"].as_f64()).collect();
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied()
}

/// The checkpoints by the events at `path`, without those after a step from which the run was restarted.
pub(crate) fn checkpoints(path: &Path) -> BTreeSet<u64> {
    let mut known = BTreeSet::new();
    for event in each(path).into_iter().flatten() {
        match event["event"].as_str() {
            Some("start") => known.retain(|step| Some(*step) <= event["from_step"].as_u64()),
            Some("checkpoint") => known.extend(event["step"].as_u64()),
            _ => (),
        }
    }
    known
}

/// The newest checkpoint by the events at `path` since the run last started from step 0; `None` if there is none.
pub(crate) fn kept(path: &Path) -> Option<u64> {
    let mut newest = None;
    for event in each(path)? {
        match event["event"].as_str() {
            Some("start") if event["from_step"] == 0 => newest = None,
            Some("checkpoint") => newest = newest.max(event["step"].as_u64()),
            _ => (),
        }
    }
    newest
}

/// [`pace`] reads this many bytes from the end of the file.
const TAIL: u64 = 1 << 15;

/// Seconds since 1970, to the millisecond.
#[expect(clippy::disallowed_methods, reason = "events are where the date may be known")]
pub(crate) fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_secs_f64() * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoints_are_known_since_the_run_last_began() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("events.jsonl");
        assert_eq!(kept(&path), None);
        let mut events = Events::open(&path).unwrap();
        let mut said = |event: &str, fields| {
            events.write(event, fields).unwrap();
            kept(&path)
        };
        assert_eq!(said("start", json!({"from_step": 0})), None);
        assert_eq!(said("checkpoint", json!({"step": 3})), Some(3));
        assert_eq!(said("start", json!({"from_step": 3})), Some(3));
        assert_eq!(said("checkpoint", json!({"step": 6})), Some(6));
        // The run was started with --restart and killed before its first checkpoint.
        assert_eq!(said("start", json!({"from_step": 0})), None);
    }

    #[test]
    fn the_pace_is_the_median_of_the_last_steps() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("events.jsonl");
        assert_eq!(pace(&path), None);
        let mut events = Events::open(&path).unwrap();
        events.write("start", json!({"seconds": 99})).unwrap();
        assert_eq!(pace(&path), None);
        for step in 0..2000 {
            let seconds = if step < 1000 { 50.0 } else { f64::from(step % 3) };
            events.write("step", json!({"step": step, "seconds": seconds})).unwrap();
        }
        assert_eq!(pace(&path), Some(1.0));
    }
}
