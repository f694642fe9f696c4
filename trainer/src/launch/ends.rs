//! Exit reports: each process appends a line for the supervisor of the run, since an exit code does not distinguish a
//! full disk from a lost network.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use contract::{Class, Fault};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::rules::Cause;

/// The environment variable with the file's name, for every process that a supervisor starts.
pub(super) const VARIABLE: &str = "ZTRAIN_LAST_WORDS";

/// The exit report of a process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ExitReport {
    /// The rank, as launched. In a report of the launcher: the rank that it is about.
    pub(super) rank: Option<u32>,
    /// Whether the launcher wrote it.
    pub(super) launcher: bool,
    /// The cause; `None` for one that would recur.
    pub(super) cause: Option<Cause>,
    /// The host.
    pub(super) host: String,
    /// A description for people.
    pub(super) description: String,
    /// The rank, as launched, whose loss made this one exit, if that was the reason.
    #[serde(default)]
    pub(super) missed: Option<u32>,
}

/// A start note: where a rank started. A killed rank leaves nothing else.
#[derive(Debug, Serialize, Deserialize)]
struct StartNote {
    begins: u32,
    host: String,
}

/// The file of exit reports of a supervised run.
#[derive(Clone, Debug)]
pub(super) struct ExitReports(PathBuf);

impl ExitReports {
    /// The file that this process's supervisor reads, if it has one.
    pub(super) fn of_environment() -> Option<ExitReports> {
        std::env::var_os(VARIABLE).map(|path| ExitReports(path.into()))
    }

    /// Creates a new file that only its owner can read.
    pub(super) fn begin(path: &Path) -> std::io::Result<ExitReports> {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        Ok(ExitReports(path.to_owned()))
    }

    /// Removes all reports.
    pub(super) fn clear(&self) {
        // Old reports next to new ones are merely less clear.
        let _ = OpenOptions::new().write(true).truncate(true).open(&self.0);
    }

    /// Appends a line with one write. Errors are ignored: the exit code is enough.
    pub(super) fn leave(&self, end: &impl Serialize) {
        let Ok(line) = serde_json::to_string(end) else { return };
        if let Ok(mut file) = OpenOptions::new().append(true).open(&self.0) {
            let _ = file.write_all(format!("{line}\n").as_bytes());
        }
    }

    /// The reports so far, oldest first.
    pub(super) fn read(&self) -> Vec<ExitReport> {
        self.lines()
    }

    /// The host on which a rank last started.
    pub(super) fn host_of(&self, rank: u32) -> Option<String> {
        let all: Vec<StartNote> = self.lines();
        all.into_iter().rev().find(|note| note.begins == rank).map(|note| note.host)
    }

    /// The lines of one kind.
    fn lines<T: DeserializeOwned>(&self) -> Vec<T> {
        let text = std::fs::read_to_string(&self.0).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

/// Records for the supervisor on which host this rank, as launched, starts.
pub fn first_words(rank: u32) {
    if let Some(ends) = ExitReports::of_environment() {
        ends.leave(&StartNote { begins: rank, host: super::place::host_name() });
    }
}

/// Writes this process's exit report for the supervisor: with this rank and, if it exits because another rank was lost,
/// that one (`missed`). Processes that only exit because another one did write none.
pub fn last_words(rank: Option<u32>, missed: Option<u32>, fault: &Fault, spoke_first: bool) {
    // A rank that the others continue without reports before it notifies them, not when it exits.
    static LEFT: AtomicBool = AtomicBool::new(false);
    let Some(ends) = ExitReports::of_environment().filter(|_| spoke_first) else { return };
    if LEFT.swap(true, Ordering::Relaxed) {
        return;
    }
    let (cause, host) = (Cause::of(fault), super::place::host_name());
    let description = fault.to_string().lines().next().unwrap_or_default().to_owned();
    ends.leave(&ExitReport { rank, launcher: false, cause, host, description, missed });
}

/// The process that starts the ranks of a supervised run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Starter {
    /// None: the command is the only rank.
    Nobody,
    /// Our launcher, on this machine.
    Ours,
    /// Another launcher, on any machines.
    Another,
}

/// The cause of a run's end, from its exit `code` (`None`: a signal) and exit reports. The launcher's report takes
/// precedence, then the first that names a cause other than a lost rank.
pub(super) fn verdict(ends: &[ExitReport], code: Option<u8>, starter: Starter) -> ExitReport {
    let of_launcher = ends.iter().rev().find(|end| end.launcher);
    if let Some(end) = of_launcher.filter(|_| code.is_some()) {
        return end.clone();
    }
    let unknown = |cause: Option<Cause>, description: &str| ExitReport {
        rank: None,
        launcher: false,
        cause,
        // Ranks of another launcher may run anywhere, so the supervisor's machine is not blamed.
        host: if starter == Starter::Another { String::new() } else { super::place::host_name() },
        description: description.to_owned(),
        missed: None,
    };
    let Some(code) = code else {
        let cause = if starter == Starter::Ours { Cause::Launcher } else { Cause::Crash };
        return unknown(Some(cause), "it was ended from outside");
    };
    // A report of the original fault says more than those of ranks that were lost or missed another.
    let tells = |end: &&ExitReport| end.cause.is_none() || end.cause != Some(Cause::Crash);
    let machine = Class::Machine.exit_code();
    let end = ends.iter().find(tells).or(ends.last()).cloned();
    end.unwrap_or_else(|| {
        let description =
            if code == machine { "a rank or its machine was lost" } else { "it ended in a fault" };
        unknown(Cause::of_code(code), description)
    })
}

#[cfg(test)]
mod tests {
    use super::super::place::host_name;
    use super::*;
    use contract::Symptom;

    fn end(rank: u32, launcher: bool, cause: Option<Cause>) -> ExitReport {
        ExitReport {
            rank: Some(rank),
            launcher,
            cause,
            host: "here".to_owned(),
            description: "x".to_owned(),
            missed: None,
        }
    }

    #[test]
    fn the_launcher_knows_best_then_who_met_more_than_a_loss() {
        let (crash, disk) = (Some(Cause::Crash), Some(Cause::Disk));
        let lost = [end(0, false, crash), end(1, false, disk), end(2, false, crash)];
        assert_eq!(verdict(&lost, Some(6), Starter::Ours), lost[1]);
        let reports = [&lost[..], &[end(2, true, Some(Cause::Hang))]].concat();
        assert_eq!(verdict(&reports, Some(6), Starter::Ours), reports[3]);
        // A launcher that was killed has not reported its own end.
        assert_eq!(verdict(&reports, None, Starter::Ours).cause, Some(Cause::Launcher));
        assert_eq!(verdict(&[], None, Starter::Nobody).cause, crash);
        assert_eq!(verdict(&[], Some(5), Starter::Nobody).cause, Some(Cause::Diverged));
        assert_eq!(verdict(&[], Some(2), Starter::Nobody).cause, None);
    }

    /// With another launcher, the supervisor's machine is not blamed for an unexplained loss.
    #[test]
    fn a_loss_that_nobody_explains_is_held_against_no_machine_of_another_launcher() {
        for code in [None, Some(6), Some(137)] {
            let of = |starter| verdict(&[], code, starter).host;
            assert_eq!(of(Starter::Another), "", "{code:?}");
            assert_eq!([of(Starter::Ours), of(Starter::Nobody)], [(); 2].map(|()| host_name()));
        }
        let said = [ExitReport { host: "there".to_owned(), ..end(1, false, Some(Cause::Crash)) }];
        assert_eq!(verdict(&said, Some(6), Starter::Another).host, "there");
    }

    #[test]
    fn what_is_left_is_read() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("ends");
        let ends = ExitReports::begin(&path).unwrap();
        let all = [end(0, false, None), end(3, true, Some(Cause::Audit))];
        all.iter().for_each(|end| ends.leave(end));
        // A crash left an incomplete line.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"ra").unwrap();
        assert_eq!(ends.read(), all);
    }

    #[test]
    fn where_a_rank_began_last_is_known() {
        let folder = tempfile::TempDir::new().unwrap();
        let ends = ExitReports::begin(&folder.path().join("ends")).unwrap();
        for (begins, host) in [(0, "a"), (1, "b"), (1, "c")] {
            ends.leave(&StartNote { begins, host: host.to_owned() });
        }
        let said = end(0, false, Some(Cause::Crash));
        ends.leave(&said);
        assert_eq!((ends.host_of(1), ends.host_of(2)), (Some("c".to_owned()), None));
        assert_eq!(ends.read(), [said]);
    }

    #[test]
    fn a_full_disk_and_a_machine_that_errs_are_told_apart_from_a_loss() {
        let machine = || Fault::machine("x");
        assert_eq!(Cause::of(&machine()), Some(Cause::Crash));
        assert_eq!(Cause::of(&machine().sign_of(Symptom::Untrusted)), Some(Cause::Audit));
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        assert_eq!(Cause::of(&Fault::io("write", Path::new("x"), &full)), Some(Cause::Disk));
    }
}
