//! `ztrain supervise`: starts the whole command of a run, and restarts it according to the rules.
//!
//! ```text
//! supervisor       `ztrain supervise`: holds the folder, detects how the command ended and whether it makes progress
//!   launcher       `ztrain --nproc N`: starts the ranks, serves their store; restarts and evicts single ranks
//!     ranks        train
//! ```
//!
//! Supervisor and launcher are two processes, so that a launcher that is killed or hangs is started again; one set of
//! rules decides in both, and each writes what it did by `failure`. With `--launch`, srun or another launcher replaces
//! ours; single ranks are not visible then. If the supervisor dies, a run by our launcher stops cleanly, and the same
//! command continues it; a run by another launcher continues unsupervised.

use std::ffi::OsString;
use std::io::{BufRead as _, ErrorKind, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contract::{Class, Fault, Result};
use kernels::group::RunKey;
use kernels::signals;
use settings::File;
use store::Location;

use super::background::in_background;
use super::ends::{ExitReport, ExitReports, Starter, VARIABLE, verdict};
use super::failure::{FailureEvent, record_failure};
use super::launcher::Supervision;
use super::rules::{Action, ActionHistory, Cause, FaultRule, FaultRules, RuleScope};
use super::watch::{Heartbeat, system_says};
use crate::folder::RunFolder;
use crate::refusal::lost;

/// The environment variable with the text of the rules, for the launcher or a single rank; empty for the defaults.
const RULES: &str = "ZTRAIN_SUPERVISED";

/// The polling interval for the command.
const LOOK: Duration = Duration::from_millis(20);

/// The time between two attempts while waiting, if no rule has another.
const TRY: Duration = Duration::from_secs(10);

/// The time that another launcher gets to end its ranks.
const GRACE: Duration = Duration::from_secs(10);

/// At most this many bytes are written to test whether a disk can hold a checkpoint.
const ROOM: u64 = 1 << 30;

/// More than a step writes.
const LITTLE: u64 = 1 << 20;

/// What a launcher does for its supervisor.
#[derive(Clone, Debug)]
pub struct SupervisorLink {
    rules: FaultRules,
    ends: ExitReports,
    events: PathBuf,
}

impl SupervisorLink {
    /// Reads it from the environment, for the run in the folder `run`; `None` if this process has no supervisor.
    pub fn of_environment(run: &Path) -> Result<Option<SupervisorLink>> {
        let Some(text) = std::env::var_os(RULES).filter(|_| !super::spawned_us()) else {
            return Ok(None);
        };
        let Some(ends) = ExitReports::of_environment() else { return Ok(None) };
        let rules =
            FaultRules::parse(&File::new("the supervisor's rules", text.to_string_lossy()))?;
        Ok(Some(SupervisorLink { rules, ends, events: run.join("events.jsonl") }))
    }

    /// Obeys the supervisor's standard input: a request to stop, or its end.
    pub fn follow(&self, stop: &Arc<AtomicBool>) -> Result<()> {
        let stop = Arc::clone(stop);
        in_background(move || {
            let said = std::io::stdin().lock().lines().next();
            if said.is_none() {
                contract::note!(
                    "error: the supervisor has ended: the run stops, and keeps its state"
                );
            }
            stop.store(true, Ordering::Relaxed);
        })
    }

    /// Whether any rule concerns single ranks, for which the others must be able to continue.
    pub fn touches_ranks(&self) -> bool {
        self.rules.touch_ranks()
    }

    /// Begins to supervise ranks, of which evictions leave at least `stay`.
    pub(super) fn begin(self, stay: u32) -> Supervision {
        Supervision::new(self.rules, stay, self.ends, self.events)
    }
}

/// A run to supervise.
#[derive(Clone, Debug)]
pub struct Supervisor {
    /// The rules.
    pub rules: FaultRules,
    /// The text of their file; empty if there is none.
    pub text: String,
    /// The arguments of `ztrain`.
    pub arguments: Vec<OsString>,
    /// What starts the ranks instead of `--nproc`: a shell line that precedes the command.
    pub launch: Option<String>,
    /// The run's folder.
    pub run: PathBuf,
    /// The number of ranks that `--nproc` starts.
    pub ranks: u32,
}

/// How an attempt ended.
struct Attempt {
    status: ExitStatus,
    /// Whether it was killed because it made no progress.
    hung: bool,
    /// Whether it wrote any event.
    began: bool,
}

impl Supervisor {
    /// Runs the command until it is done, `stop` is set, or the rules say to stop. The exit code is the command's.
    pub fn run(&self, stop: &AtomicBool) -> Result<u8> {
        let words = self.words()?;
        let ends =
            ExitReports::begin(&words).map_err(|error| Fault::io("write", &words, &error))?;
        let outcome = self.attempts(&words, &ends, stop);
        // No process reads it any more.
        let _ = std::fs::remove_file(&words);
        outcome
    }

    fn attempts(&self, words: &Path, ends: &ExitReports, stop: &AtomicBool) -> Result<u8> {
        let (mut history, mut began) = (ActionHistory::default(), false);
        loop {
            ends.clear();
            let attempt = self.attempt(words, stop)?;
            began |= attempt.began;
            if stop.load(Ordering::Relaxed) {
                return Ok(stopped(attempt.status));
            }
            if attempt.status.success() {
                return if attempt.began { Ok(0) } else { Err(self.nothing(attempt.status)) };
            }
            let Some((end, cause, code)) = self.handle_exit(&attempt, ends, began)? else {
                return Ok(code_of(attempt.status));
            };
            let culprit = RuleScope::Machine(end.host.clone());
            let rule = history.choose(&self.rules, cause, &culprit, possible, Instant::now());
            let (events, action) = (self.events(), rule.action);
            let (what, host) = (end.description.as_str(), end.host.as_str());
            record_failure(&events, &FailureEvent { cause, rank: end.rank, action, what, host });
            match action {
                Action::Retry => pause(rule.pause(), stop),
                Action::Wait => self.wait(&rule, stop),
                Action::Requeue => return requeue(&end).map(|()| code),
                _ => return Ok(code),
            }
            if stop.load(Ordering::Relaxed) {
                contract::note!("supervisor: stopped as asked; the same command continues the run");
                return Ok(0);
            }
        }
    }

    /// The cause of a failed attempt, and its exit code. `None` if the cause would recur in every attempt, or if
    /// nothing has begun and a process reports why.
    fn handle_exit(
        &self,
        attempt: &Attempt,
        ends: &ExitReports,
        began: bool,
    ) -> Result<Option<(ExitReport, Cause, u8)>> {
        let Attempt { status, hung, began: _ } = *attempt;
        let starter = match self.launch {
            Some(_) => Starter::Another,
            None if self.ranks > 1 => Starter::Ours,
            None => Starter::Nobody,
        };
        let (words, ends) = (ends, ends.read());
        let mut end = verdict(&ends, status.code().and_then(|code| code.try_into().ok()), starter);
        // The reporting rank is healthy; the lost one could not report.
        if let Some(missed) = end.missed {
            let host = words.host_of(missed).unwrap_or_default();
            (end.rank, end.host) = (Some(missed), host);
        }
        if hung && starter != Starter::Ours {
            end.cause = Some(Cause::Hang);
        }
        let explained = ends.iter().any(|end| !end.launcher);
        if self.launch.is_some() && !began && !explained && status.code().is_some() {
            return Err(self.nothing(status));
        }
        // A full disk may prevent any start.
        let cause = end.cause.filter(|cause| began || !explained || *cause == Cause::Disk);
        Ok(cause.map(|cause| (end, cause, code_of(status))))
    }

    /// The error if another launcher ended before any rank began.
    fn nothing(&self, status: ExitStatus) -> Fault {
        Fault::usage("the command ended before any rank began")
            .at("--launch")
            .found(format!("{} ({status})", self.launch.as_deref().unwrap_or("ztrain")))
            .wanted("what starts the command that follows it, such as 'srun --kill-on-bad-exit=1'")
    }

    /// Runs the command once.
    fn attempt(&self, words: &Path, stop: &AtomicBool) -> Result<Attempt> {
        let mut child = self.start(words)?;
        // Our launcher detects hung ranks itself, so it gets more time.
        let times = if self.ranks > 1 && self.launch.is_none() { 2.0 } else { 1.0 };
        let patience = Duration::from_secs_f64(times * self.rules.hang_seconds);
        let mut heartbeat = Heartbeat::new(patience, Instant::now());
        let before = self.written();
        let (mut asked, mut hung): (_, Option<Instant>) = (false, None);
        loop {
            let ended = child.try_wait();
            let ended = ended.map_err(|error| Fault::machine(format!("cannot wait: {error}")))?;
            if let Some(status) = ended {
                if self.launch.is_some() {
                    // No rank may outlive its launcher.
                    signal("KILL", &child);
                }
                let (hung, began) = (hung.is_some(), self.written() != before);
                return Ok(Attempt { status, hung, began });
            }
            if stop.load(Ordering::Relaxed) && !asked {
                asked = true;
                self.ask_to_stop(&mut child);
            }
            let written = self.written();
            // A single rank may compute for a long time between two events.
            let spent = self.launch.is_none().then(|| spent(child.id()));
            if heartbeat.is_missed((written, spent), Instant::now()) && hung.is_none() {
                hung = Some(Instant::now());
                contract::note!("supervisor: nothing happens any more: the command is ended");
                match self.launch.is_some() {
                    // Its ranks may be on other machines: only the launcher can end them.
                    true => signal("TERM", &child),
                    // Its ranks end with it.
                    false => drop(child.kill()),
                }
            }
            if self.launch.is_some() && hung.is_some_and(|since| since.elapsed() > GRACE) {
                signal("KILL", &child);
            }
            thread::sleep(LOOK);
        }
    }

    fn start(&self, words: &Path) -> Result<Child> {
        let program = std::env::current_exe()
            .map_err(|error| Fault::machine(format!("cannot find this program: {error}")))?;
        let mut command = match &self.launch {
            None => Command::new(&program),
            Some(line) => {
                let mut command = Command::new("sh");
                command.args(["-c", &format!("{line} \"$@\""), "sh"]).arg(&program);
                // Lets signals reach the processes that it starts.
                command.process_group(0);
                command
            }
        };
        command.args(&self.arguments).env(VARIABLE, words);
        let started = match self.launch {
            None => signals::spawn(command.env(RULES, &self.text).stdin(Stdio::piped())),
            Some(_) => command.spawn(),
        };
        started.map_err(|error| Fault::machine(format!("cannot start the run: {error}")))
    }

    fn ask_to_stop(&self, child: &mut Child) {
        match &mut child.stdin {
            // If the process has ended already, the error does not matter.
            Some(input) => drop(input.write_all(b"stop\n")),
            // Other launchers forward signals.
            None => signal("TERM", child),
        }
    }

    /// The file for exit reports: next to the run's folder if ranks may be on other machines.
    fn words(&self) -> Result<PathBuf> {
        // A unique name.
        let drawn = RunKey::draw().map_err(lost)?;
        let name = format!("ztrain-{}.words", drawn.get(..16).unwrap_or(&drawn));
        if self.launch.is_none() {
            return Ok(std::env::temp_dir().join(name));
        }
        let path = self.run.with_added_extension(name);
        let folder = path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder).map_err(|error| Fault::io("create", folder, &error))?;
        Ok(path)
    }

    fn events(&self) -> PathBuf {
        self.run.join("events.jsonl")
    }

    /// The size of the events file.
    fn written(&self) -> u64 {
        std::fs::metadata(self.events()).map_or(0, |file| file.len())
    }

    /// Waits until what was missing is available.
    fn wait(&self, rule: &FaultRule, stop: &AtomicBool) {
        let time = if rule.pause().is_zero() { TRY } else { rule.pause() };
        loop {
            pause(time, stop);
            let there = match &rule.until {
                Some(line) => succeeds(line, stop),
                // Any other error is left for the next attempt to report.
                None => !self.has_room().is_err_and(|error| is_full(&error)),
            };
            if there || stop.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// Tries to write a little in the run's folder, and as much as the largest checkpoint takes where checkpoints are
    /// stored.
    fn has_room(&self) -> std::io::Result<()> {
        takes(&self.run, LITTLE)?;
        let kept = RunFolder::new(&self.run).checkpoints().ok().map(|kept| kept.place());
        // A bucket reports this when it is written to.
        let Some(Location::Local(place)) = kept else { return Ok(()) };
        let mut needed = LITTLE;
        // There may be no checkpoint yet.
        let inside = |folder: &Path| {
            let entries = std::fs::read_dir(folder).into_iter().flatten();
            entries.filter_map(std::result::Result::ok)
        };
        for checkpoint in inside(&place) {
            let files = inside(&checkpoint.path());
            let bytes: u64 = files.filter_map(|file| Some(file.metadata().ok()?.len())).sum();
            needed = needed.max(bytes);
        }
        if place.is_dir() { takes(&place, needed.min(ROOM)) } else { Ok(()) }
    }
}

fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// Tries to write this many bytes into a folder, or its nearest existing parent, in an unlinked file that cannot
/// outlive this process.
fn takes(folder: &Path, bytes: u64) -> std::io::Result<()> {
    let existing = folder.ancestors().find(|folder| folder.is_dir()).unwrap_or(Path::new("."));
    let path = existing.join(format!(".room-{}", std::process::id()));
    let mut file = std::fs::File::create(&path)?;
    std::fs::remove_file(&path)?;
    let block = vec![0; LITTLE as usize];
    (0..bytes.div_ceil(LITTLE)).try_for_each(|_| file.write_all(&block))?;
    file.sync_all()
}

/// The CPU time of a process, as the system prints it; empty if it has ended.
fn spent(process: u32) -> String {
    system_says(process).into_iter().skip(11).take(2).collect::<Vec<_>>().join(" ")
}

/// Whether a shell line succeeds before `stop` is set.
fn succeeds(line: &str, stop: &AtomicBool) -> bool {
    let mut command = Command::new("sh");
    let started = command.args(["-c", line]).stdin(Stdio::null()).process_group(0).spawn();
    let Ok(mut child) = started else { return false };
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if !stop.load(Ordering::Relaxed) => thread::sleep(LOOK),
            _ => {
                signal("KILL", &child);
                let _ = child.wait();
                return false;
            }
        }
    }
}

/// Sends a signal to the process group of a command. Does nothing if that has ended.
pub(crate) fn signal(name: &str, child: &Child) {
    let group = format!("-{}", child.id());
    let mut command = Command::new("kill");
    let command = command.args([&format!("-{name}"), "--", &group]).stderr(Stdio::null());
    let _ = command.status();
}

/// The exit code of a command; that of a lost machine if a signal ended it.
fn code_of(status: ExitStatus) -> u8 {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    code.unwrap_or(Class::Machine.exit_code())
}

/// The same for a command that was asked to stop; also prints if the signal ended it before it could handle the
/// request.
fn stopped(status: ExitStatus) -> u8 {
    if status.code().is_none() {
        contract::note!(
            "supervisor: stopped at once, as asked; the same command continues the run"
        );
        return 0;
    }
    code_of(status)
}

/// Whether the supervisor can do this; actions on single ranks are the launcher's.
fn possible(action: Action) -> bool {
    match action {
        Action::Note | Action::Restart | Action::Evict => false,
        Action::Requeue => std::env::var_os("SLURM_JOB_ID").is_some(),
        Action::Retry | Action::Wait | Action::Stop => true,
    }
}

fn pause(time: Duration, stop: &AtomicBool) {
    let start = Instant::now();
    while start.elapsed() < time && !stop.load(Ordering::Relaxed) {
        thread::sleep(LOOK.min(time));
    }
}

/// Requeues the Slurm job, and excludes the machine at fault if it is known.
fn requeue(end: &ExitReport) -> Result<()> {
    let job = std::env::var("SLURM_JOB_ID").unwrap_or_default();
    let cannot = |(line, why): (String, String)| {
        Fault::machine("cannot give the job back to Slurm")
            .at(line)
            .found(why.trim())
            .hint("start the job again: it continues where it stopped")
    };
    if end.rank.is_none() || end.host.is_empty() {
        return scontrol(&["requeue", &job]).map(|_| ()).map_err(cannot);
    }
    // Only a pending job can be updated, and a pending one may start at any time: so it is held meanwhile.
    let shown = scontrol(&["show", "job", &job]).map_err(cannot)?;
    let before = shown.split_whitespace().find_map(|word| word.strip_prefix("ExcNodeList="));
    let before = before.filter(|list| *list != "(null)" && !list.is_empty());
    let list: Vec<&str> = before.into_iter().chain([end.host.as_str()]).collect();
    let (job_id, list) = (format!("JobId={job}"), format!("ExcNodeList={}", list.join(",")));
    scontrol(&["requeuehold", &job]).map_err(cannot)?;
    let excluded = insist(&["update", &job_id, &list]);
    insist(&["release", &job]).map_err(cannot)?;
    if let Err((_, why)) = excluded {
        contract::note!("supervisor: {} is not excluded: {}", end.host, why.trim());
    }
    Ok(())
}

/// How long to retry: Slurm ends a requeued job, including this process, after a grace time.
const INSISTING: Duration = Duration::from_secs(15);

/// Retries until Slurm complies: the end of the requeued job may kill `scontrol`, too.
fn insist(arguments: &[&str]) -> std::result::Result<String, (String, String)> {
    let start = Instant::now();
    loop {
        match scontrol(arguments) {
            Err(_) if start.elapsed() < INSISTING => thread::sleep(LOOK),
            outcome => return outcome,
        }
    }
}

/// The output of `scontrol`; else the command, and why it failed.
fn scontrol(arguments: &[&str]) -> std::result::Result<String, (String, String)> {
    let ran = Command::new("scontrol").args(arguments).stdin(Stdio::null()).output();
    let cannot = |why: String| (format!("scontrol {}", arguments.join(" ")), why);
    let ran = ran.map_err(|error| cannot(error.to_string()))?;
    match ran.status.success() {
        true => Ok(String::from_utf8_lossy(&ran.stdout).into_owned()),
        false => Err(cannot(String::from_utf8_lossy(&ran.stderr).into_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The run's folder may not exist yet, and an earlier test that was killed leaves a file.
    #[test]
    fn room_is_looked_for_where_a_folder_will_be_and_as_often_as_asked() {
        let place = tempfile::tempdir().unwrap();
        let run = place.path().join("runs/not yet");
        takes(&run, LITTLE).unwrap();
        std::fs::write(place.path().join(format!(".room-{}", std::process::id())), "left").unwrap();
        takes(&run, LITTLE).unwrap();
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
    }
}
