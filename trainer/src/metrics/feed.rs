//! `--metrics-exec`: sends the curves of each step to a user's program, as a line of JSON.
//!
//! ```text
//! step --> queue (bounded) --> thread --> standard input of `sh -c PROGRAM`
//!                                 ^
//!              ledger of the run -+  steps not sent yet: those of an earlier process, or dropped by the queue
//! ```
//!
//! Training never waits for the program: the queue drops lines that do not fit, and the thread reads those steps from
//! the ledger. `metrics-exec.json` has the last step sent, so a run that continues sends each step once.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write as _};
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
use store::disk::write_atomic;

use crate::folder::RunFolder;
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
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct FeedMark {
    step: u64,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<Queue>,
    changed: Condvar,
    program: Mutex<Option<Child>>,
}

#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<(Option<u64>, String)>,
    bytes: usize,
    /// The last recorded step.
    last: u64,
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
        shared.lock().last = last;
        let (done, ended) = channel();
        let mut sender = Sender {
            command: command.to_owned(),
            root: root.to_owned(),
            mark: root.join("metrics-exec.json"),
            shared: Arc::clone(&shared),
            curves: Box::new(curves),
            input: None,
            sent: 0,
            before: 0,
        };
        sender.sent = sender.marked()?;
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
        self.put(Some(step), line);
    }

    /// Queues a line that belongs to no new step, or drops it if the queue is full.
    pub(crate) fn line(&self, line: String) {
        self.put(None, line);
    }

    fn put(&self, step: Option<u64>, line: String) {
        let mut queue = self.shared.lock();
        queue.last = step.unwrap_or(queue.last);
        if queue.bytes + line.len() <= WAITING {
            queue.bytes += line.len();
            queue.lines.push_back((step, line));
        }
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
            let _ = self.shared.program().as_mut().map(Child::kill);
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
            let ended = self.program().as_mut().map(Child::try_wait);
            match ended {
                Some(Ok(None)) => thread::sleep(Duration::from_millis(20)),
                Some(Ok(status)) => return status,
                Some(Err(_)) | None => return None,
            }
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
    /// The last step that was sent.
    sent: u64,
    /// The value of `sent` when this program was started, to resume from if it fails.
    before: u64,
}

impl Sender {
    fn marked(&self) -> Result<u64> {
        let text = match std::fs::read(&self.mark) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
            Err(error) => return Err(Fault::io("read", &self.mark, &error)),
        };
        let mark: FeedMark = serde_json::from_slice(&text).map_err(|error| {
            Fault::data(format!("not a mark of --metrics-exec: {error}"))
                .at(self.mark.display().to_string())
                .wanted("{\"step\": N}, the last step that was sent")
                .hint("remove it, and every step of the run is sent again")
        })?;
        Ok(mark.step)
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
                self.reap(&why.to_string());
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
        if self.shared.ended().is_some_and(|status| !status.success()) {
            self.reap("the program of --metrics-exec has failed");
        }
    }

    /// Waits for something to send, and returns it.
    fn wait(&self) -> (VecDeque<(Option<u64>, String)>, u64, bool) {
        let mut queue = self.shared.lock();
        while queue.lines.is_empty() && queue.last <= self.sent && !queue.ending {
            queue = self.shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.bytes = 0;
        (std::mem::take(&mut queue.lines), queue.last, queue.ending)
    }

    /// Sends lines, and steps missing between them, up to step `last`.
    fn send(&mut self, lines: VecDeque<(Option<u64>, String)>, last: u64) -> Result<()> {
        let before = self.sent;
        let sent = lines
            .into_iter()
            .try_for_each(|(step, line)| match step {
                None => self.write(&line),
                Some(step) if step <= self.sent => Ok(()),
                Some(step) => {
                    self.missing(step - 1)?;
                    self.write(&line)?;
                    self.sent = step;
                    Ok(())
                }
            })
            .and_then(|()| self.missing(last));
        if self.sent > before {
            self.put_mark()?;
        }
        sent
    }

    /// Sends the steps up to `until` that were not sent yet, from the ledger.
    fn missing(&mut self, until: u64) -> Result<()> {
        if self.sent >= until {
            return Ok(());
        }
        let ledger = Ledger::read(&RunFolder::new(&self.root).ledger())?;
        for step in self.sent + 1..=until.min(ledger.last_step()) {
            let line = (self.curves)(&ledger.record(step)?);
            self.write(&line)?;
            self.sent = step;
        }
        Ok(())
    }

    fn write(&mut self, line: &str) -> Result<()> {
        let ended = || Fault::machine("the program of --metrics-exec has ended");
        let input = self.input.as_mut().ok_or_else(ended)?;
        input.write_all(line.as_bytes()).map_err(|_| ended())
    }

    fn put_mark(&self) -> Result<()> {
        write_atomic(&self.mark, json(&FeedMark { step: self.sent }).as_bytes()).map(drop)
    }

    /// Cleans up after a program that ended, and warns. How much a failed program has read is unknown, so the next one
    /// gets all steps since the failed one was started.
    fn reap(&mut self, why: &str) {
        self.input = None;
        let status = self.shared.ended();
        if !status.is_some_and(|status| status.success()) {
            self.sent = self.before;
        }
        let marked = self.put_mark();
        let how = status.map_or_else(String::new, |status| format!(" ({status})"));
        note!("warning: {why}{how}; the steps after step {} are sent to the next one", self.sent);
        if let Err(fault) = marked {
            note!("warning: {fault}");
        }
    }
}

/// A line of JSON.
pub(super) fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default() + "\n"
}
