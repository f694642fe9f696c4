//! `--metrics-exec`: sends the curves of each step to a user's program, as a line of JSON.
//!
//! ```text
//! step --> queue (bounded) --> thread --> standard input of `sh -c PROGRAM`
//!                                 ^
//!              ledger of the run -+  steps not sent yet: those of an earlier process, or dropped by the queue
//!              its events --------+  validations and scores of tasks, behind their steps
//! ```
//!
//! Training never waits for the program: the queue drops lines that do not fit, and the thread reads those steps from
//! the ledger. `metrics-exec.json` has the last step sent and how much of the events was, so a run that continues sends
//! all once.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use contract::{Fault, Result, note};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use store::disk::write_atomic;
use store::regular;

use super::{between, line};
use crate::folder::RunFolder;
use crate::launch::signal;
use crate::ledger::{Ledger, StepRecord};

/// The maximum size of queued lines in bytes.
const WAITING: usize = 16 << 20;

/// When the run ends, how long the program may take to read the queued lines and exit.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long to wait before the program is restarted after it ended.
const PAUSE: Duration = Duration::from_secs(5);

/// Sends steps to a program.
#[derive(Debug)]
pub(crate) struct MetricsFeed {
    shared: Arc<Shared>,
    ended: Mutex<Receiver<()>>,
}

/// The file with the progress of a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct FeedMark {
    /// The last step that was sent.
    step: u64,
    /// Bytes of the events that were read, up to the end of a line: those of validations and tasks were sent.
    events: u64,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<Queue>,
    changed: Condvar,
    /// The program, until it has ended.
    program: Mutex<Option<Child>>,
}

#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<(u64, String)>,
    bytes: usize,
    /// The last recorded step.
    last: u64,
    /// Whether there are new validations or scores of tasks.
    between: bool,
    ending: bool,
}

impl MetricsFeed {
    /// Starts `command` by `sh` for the run at `root`, whose ledger ends with step `last`; `curves` makes the line of a
    /// step that is read from the ledger.
    pub(crate) fn start(
        command: &str,
        root: &Path,
        last: u64,
        curves: impl Fn(&StepRecord) -> String + Send + 'static,
    ) -> Result<MetricsFeed> {
        let shared = Arc::new(Shared::default());
        (shared.lock().last, shared.lock().between) = (last, true);
        let (done, ended) = channel();
        let mut sender = Sender {
            command: command.to_owned(),
            root: root.to_owned(),
            mark: root.join("metrics-exec.json"),
            shared: Arc::clone(&shared),
            curves: Box::new(curves),
            input: None,
            sent: FeedMark::default(),
            before: FeedMark::default(),
        };
        sender.sent = sender.marked(last)?;
        sender.start()?;
        let work = move || {
            sender.run();
            let _ = done.send(());
        };
        thread::Builder::new().name("metrics".to_owned()).spawn(work).map_err(|error| {
            Fault::machine(format!("the thread of --metrics-exec cannot be started: {error}"))
        })?;
        Ok(MetricsFeed { shared, ended: Mutex::new(ended) })
    }

    /// Queues the line of a new step, or drops it if the program is far behind; the ledger has it.
    pub(crate) fn step(&self, step: u64, line: String) {
        let mut queue = self.shared.lock();
        queue.last = step;
        if queue.bytes + line.len() <= WAITING {
            queue.bytes += line.len();
            queue.lines.push_back((step, line));
        }
        self.shared.changed.notify_one();
    }

    /// Says that the events have a new validation or new scores of tasks.
    pub(crate) fn between(&self) {
        self.shared.lock().between = true;
        self.shared.changed.notify_one();
    }
}

impl Drop for MetricsFeed {
    /// Lets the program read the queued lines and exit.
    fn drop(&mut self) {
        self.shared.lock().ending = true;
        self.shared.changed.notify_one();
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(PATIENCE) {
            note!(
                "warning: the program of --metrics-exec did not read everything within {} s and was killed; the run sends the \
                 rest when it is resumed",
                PATIENCE.as_secs()
            );
            if let Some(program) = &*self.shared.program() {
                signal("KILL", program);
            }
            let _ = ended.recv_timeout(PAUSE);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn program(&self) -> MutexGuard<'_, Option<Child>> {
        self.program.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the program has ended. The lock is free meanwhile, so that it can be killed.
    fn ended(&self) -> Option<ExitStatus> {
        loop {
            let mut program = self.program();
            match program.as_mut()?.try_wait() {
                Ok(None) => drop(program),
                ended => {
                    *program = None;
                    return ended.ok().flatten();
                }
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The state of the thread.
struct Sender {
    command: String,
    root: PathBuf,
    mark: PathBuf,
    shared: Arc<Shared>,
    curves: Box<dyn Fn(&StepRecord) -> String + Send>,
    input: Option<ChildStdin>,
    sent: FeedMark,
    /// The value of `sent` when this program was started, to resume from if it fails.
    before: FeedMark,
}

impl Sender {
    /// The progress of earlier programs, at most step `last`.
    fn marked(&self, last: u64) -> Result<FeedMark> {
        let text = match regular::read(&self.mark) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(FeedMark::default()),
            Err(error) => return Err(Fault::io("read", &self.mark, &error)),
        };
        let mark: FeedMark = serde_json::from_slice(&text).map_err(|error| {
            Fault::data(format!("not a mark of --metrics-exec: {error}"))
                .at(self.mark.display().to_string())
                .wanted("{\"step\": N, \"events\": BYTES}, what was sent")
                .hint("remove it, and every step of the run is sent again")
        })?;
        let events = regular::size(&RunFolder::new(&self.root).events()).unwrap_or(0);
        let within = FeedMark {
            step: mark.step.min(last),
            events: if mark.events > events { 0 } else { mark.events },
        };
        if within != mark {
            note!(
                "warning: {} is of step {} and {} bytes of events, of which the run has {last} and {events}; what follows \
                 step {} is sent",
                self.mark.display(),
                mark.step,
                mark.events,
                within.step
            );
        }
        Ok(within)
    }

    /// Starts the program. Its output is sent to standard error, since ours is on standard output. Ctrl-C does not
    /// reach it: it exits when its input ends.
    fn start(&mut self) -> Result<()> {
        let fault = |error: io::Error| {
            Fault::machine(format!("the program of --metrics-exec cannot be started: {error}"))
                .found(&self.command)
        };
        let errors = File::from(io::stderr().as_fd().try_clone_to_owned().map_err(fault)?);
        let mut command = Command::new("sh");
        command.arg("-c").arg(&self.command).env("ZTRAIN_RUN", &self.root);
        command.stdin(Stdio::piped()).stdout(errors).process_group(0);
        let mut child = command.spawn().map_err(fault)?;
        (self.input, self.before) = (child.stdin.take(), self.sent);
        *self.shared.program() = Some(child);
        Ok(())
    }

    fn run(&mut self) {
        loop {
            let (lines, last, ending) = self.wait();
            let sent = self.send(lines, last);
            if let Err(why) = &sent {
                self.input = None;
                self.reap(&why.to_string(), self.shared.ended());
            }
            if ending {
                break;
            }
            if sent.is_err() {
                thread::sleep(PAUSE);
                if let Err(fault) = self.start() {
                    note!("warning: {fault}");
                }
            }
        }
        // Closing its input tells the program that the run has ended.
        self.input = None;
        if let Some(status) = self.shared.ended().filter(|status| !status.success()) {
            self.reap("the program of --metrics-exec has failed", Some(status));
        }
    }

    /// Waits for something to send, and returns it.
    fn wait(&self) -> (VecDeque<(u64, String)>, u64, bool) {
        let mut queue = self.shared.lock();
        let nothing = |queue: &Queue| {
            queue.lines.is_empty()
                && queue.last <= self.sent.step
                && !queue.between
                && !queue.ending
        };
        while nothing(&queue) {
            queue = self.shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        (queue.bytes, queue.between) = (0, false);
        (std::mem::take(&mut queue.lines), queue.last, queue.ending)
    }

    /// Sends lines, and steps missing between them, up to step `last`; behind each step what follows it.
    fn send(&mut self, lines: VecDeque<(u64, String)>, last: u64) -> Result<()> {
        let before = self.sent;
        let (mut events, read) = self.events(last)?;
        let sent = self
            .follow(&mut events)
            .and_then(|()| {
                lines.into_iter().filter(|(step, _)| *step > before.step).try_for_each(
                    |(step, line)| {
                        self.missing(step - 1, &mut events)?;
                        self.send_step(step, &line, &mut events)
                    },
                )
            })
            .and_then(|()| self.missing(last, &mut events));
        if sent.is_ok() {
            self.sent.events = read;
        }
        if self.sent != before {
            self.put_mark()?;
        }
        sent
    }

    /// Sends the steps up to `until` that were not sent yet, from the ledger.
    fn missing(&mut self, until: u64, events: &mut BTreeMap<u64, Vec<String>>) -> Result<()> {
        if self.sent.step >= until {
            return Ok(());
        }
        let ledger = Ledger::read(&RunFolder::new(&self.root).ledger())?;
        for step in self.sent.step + 1..=until.min(ledger.last_step()) {
            let line = (self.curves)(&ledger.record(step)?);
            self.send_step(step, &line, events)?;
        }
        Ok(())
    }

    fn send_step(
        &mut self,
        step: u64,
        line: &str,
        events: &mut BTreeMap<u64, Vec<String>>,
    ) -> Result<()> {
        self.write(line)?;
        self.sent.step = step;
        self.follow(events)
    }

    /// Sends what follows steps that were sent.
    fn follow(&mut self, events: &mut BTreeMap<u64, Vec<String>>) -> Result<()> {
        let later = events.split_off(&(self.sent.step + 1));
        let due = std::mem::replace(events, later);
        due.into_values().flatten().try_for_each(|line| self.write(&line))
    }

    /// The lines of validations and tasks that were not sent, by step, and where they end in the events. One that
    /// follows a step after `last` waits for it, with all behind it.
    fn events(&self, last: u64) -> Result<(BTreeMap<u64, Vec<String>>, u64)> {
        let path = RunFolder::new(&self.root).events();
        let read = || -> io::Result<Vec<u8>> {
            let (mut bytes, mut file) = (Vec::new(), regular::open(&path)?);
            file.seek(SeekFrom::Start(self.sent.events))?;
            file.read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = match read() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            found => found.map_err(|error| Fault::io("read", &path, &error))?,
        };
        let (mut found, mut read) = (BTreeMap::<_, Vec<_>>::new(), self.sent.events);
        for text in
            bytes.split_inclusive(|byte| *byte == b'\n').filter(|text| text.ends_with(b"\n"))
        {
            let event: Value = serde_json::from_slice(text).unwrap_or_default();
            let name = event["event"].as_str().unwrap_or_default();
            if let (Some(step), Some(values)) = (event["step"].as_u64(), between(name, &event)) {
                if step > last {
                    break;
                }
                found.entry(step).or_default().push(line(step, &values));
            }
            read += text.len() as u64;
        }
        Ok((found, read))
    }

    fn write(&mut self, line: &str) -> Result<()> {
        let ended = || Fault::machine("the program of --metrics-exec has ended");
        let input = self.input.as_mut().ok_or_else(ended)?;
        input.write_all(line.as_bytes()).map_err(|_| ended())
    }

    fn put_mark(&self) -> Result<()> {
        write_atomic(&self.mark, json(&self.sent).as_bytes()).map(drop)
    }

    /// Cleans up after a program that ended, and warns. How much a failed program has read is unknown, so the next one
    /// gets all steps since the failed one was started.
    fn reap(&mut self, why: &str, status: Option<ExitStatus>) {
        if !status.is_some_and(|status| status.success()) {
            self.sent = self.before;
        }
        let marked = self.put_mark();
        let how = status.map_or_else(String::new, |status| format!(" ({status})"));
        note!(
            "warning: {why}{how}; the steps after step {} are sent to the next one",
            self.sent.step
        );
        if let Err(fault) = marked {
            note!("warning: {fault}");
        }
    }
}

/// A line of JSON.
pub(super) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The run may write a step and its validation after the queue was looked at.
    #[test]
    fn a_validation_of_a_later_step_waits_for_it() {
        let folder = tempfile::TempDir::new().unwrap();
        let event = |step: u64| {
            format!("{{\"event\":\"validation\",\"step\":{step},\"all\":{{\"loss\":{step}.5}}}}\n")
        };
        let step = "{\"event\":\"step\",\"step\":4}\n";
        let text = [&event(3), step, &event(4), "{\"event\":\"val"].concat();
        std::fs::write(folder.path().join("events.jsonl"), &text).unwrap();
        let mut sender = Sender {
            command: String::new(),
            root: folder.path().to_owned(),
            mark: folder.path().join("metrics-exec.json"),
            shared: Arc::new(Shared::default()),
            curves: Box::new(|_| String::new()),
            input: None,
            sent: FeedMark::default(),
            before: FeedMark::default(),
        };
        let (found, read) = sender.events(3).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), [&3]);
        assert_eq!(read as usize, event(3).len() + step.len());
        sender.sent.events = read;
        let (found, read) = sender.events(4).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), [&4]);
        // An incomplete line is read when it is complete.
        assert_eq!(read as usize, text.len() - "{\"event\":\"val".len());
    }
}
