//! `events.jsonl`: where and when. Ranks, devices, times and restarts go here and nowhere else; nothing is chained.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use contract::{Fault, Result};
use serde_json::{Value, json};

/// The events of a run, appended to.
pub struct Events {
    path: PathBuf,
    file: File,
}

impl Events {
    /// Opens the file, making it if need be.
    pub fn open(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.map_err(|error| Fault::io("open", path, &error))?;
        Ok(Events { path: path.to_owned(), file })
    }

    /// Writes one event: `fields` (an object) with its name and the time, in seconds since 1970.
    pub fn write(&mut self, event: &str, fields: Value) -> Result<()> {
        let mut line = json!({"time": now(), "event": event});
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, fields) {
            line.extend(fields);
        }
        let written = self.file.write_all(format!("{line}\n").as_bytes());
        written.map_err(|error| Fault::io("append to", &self.path, &error))
    }
}

/// Seconds since 1970, to the millisecond.
#[expect(clippy::disallowed_methods, reason = "events are where the date may be known")]
pub(crate) fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_secs_f64() * 1e3).round() / 1e3
}
