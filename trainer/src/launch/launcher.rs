//! The launcher while its ranks run: it forwards a request to stop, and ends the remaining ranks when one fails. If
//! ranks may continue without each other, it tells them which ranks have ended, and ends those that the others continue
//! without. Under a supervisor it applies the rules for single ranks, and writes an exit report when they require more.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contract::{Class, Fault, Result};
use kernels::group::{Agent, KeyValueStore};

use super::ends::{ExitReport, ExitReports};
use super::failure::{FailureEvent, record_failure};
use super::place::host_name;
use super::rules::{Action, ActionHistory, Cause, FaultRule, FaultRules, RuleScope};
use super::watch::{Heartbeat, ProgressByRank, StragglerDetector, behind, system_says};
use crate::refusal::lost;

/// The polling interval for the ranks' processes.
const LOOK: Duration = Duration::from_millis(10);

/// The polling interval for the members and the progress of the ranks.
const ROLL: Duration = Duration::from_millis(200);

/// How long to wait for another rank's report after a rank ended without one.
const SILENCE: Duration = Duration::from_secs(2);

/// The time that the other ranks get to report and end after one has failed: on busy cores they notice it late.
const GRACE: Duration = Duration::from_secs(6);

/// A started rank.
pub(super) struct Rank {
    rank: u32,
    child: Child,
    ended: Option<ExitStatus>,
    /// Why the launcher ended it, if it did.
    evicted: Option<&'static str>,
    /// The rule that made the launcher end it.
    decision: Option<FaultRule>,
    /// Whether its end was handled.
    handled: bool,
    /// When to restart it.
    again: Option<Instant>,
    /// Whether it was restarted and has not joined the others yet.
    joins: bool,
    /// The number of exit reports when it was started.
    words: usize,
    /// When it ended.
    at: Option<Instant>,
}

impl Rank {
    /// A running rank.
    pub(super) fn new(rank: u32, child: Child) -> Self {
        let (ended, evicted, decision, again) = (None, None, None, None);
        let (handled, joins, words, at) = (false, false, 0, None);
        Rank { rank, child, ended, evicted, decision, handled, again, joins, words, at }
    }

    /// Whether it was lost: killed from outside or by its machine, and not ended by a fault that would stop every other
    /// rank as well.
    fn is_lost(&self) -> bool {
        let machine = i32::from(Class::Machine.exit_code());
        self.ended.is_some_and(|status| status.code().is_none_or(|code| code == machine))
    }

    fn failed(&self) -> bool {
        self.ended.is_some_and(|status| !status.success())
    }

    /// Whether it ended by itself without a report: if another rank ends too, that one knows more.
    fn is_silent(&self, ends: &ExitReports) -> bool {
        let code = self.ended.and_then(|status| status.code());
        let lost = code == Some(i32::from(Class::Machine.exit_code()));
        lost && self.evicted.is_none() && self.exit_report(ends).is_none()
    }

    /// Its exit report.
    fn exit_report(&self, ends: &ExitReports) -> Option<ExitReport> {
        let of_this = |end: &ExitReport| end.rank == Some(self.rank) && !end.launcher;
        ends.read().into_iter().skip(self.words).find(of_this)
    }

    /// The cause of its end, and a description. Its own exit report takes precedence.
    fn cause_of(&self, ends: &ExitReports) -> (Option<Cause>, String) {
        let how = self.ended.map(|status| format!("its process ended ({status})"));
        let how = how.unwrap_or_default();
        // A rank that was ended because the others continued without it may have reported why they did.
        let exit_report = self.exit_report(ends);
        let exit_report =
            exit_report.filter(|end| self.evicted.is_none() || end.cause != Some(Cause::Crash));
        if let Some(end) = exit_report {
            return (end.cause, end.description);
        }
        if self.evicted.is_some() {
            return (Some(Cause::Hang), how);
        }
        let code = self.ended.and_then(|status| status.code());
        (Cause::of_code(code.map_or(Class::Machine.exit_code(), |code| code as u8)), how)
    }

    fn end(&mut self, why: &'static str) {
        if self.ended.is_none() && self.evicted.is_none() {
            self.evicted = Some(why);
            // If it has ended in the meantime, the next poll finds it.
            let _ = self.child.kill();
        }
    }
}

/// Ranks that may continue without each other.
pub(super) struct Elastic {
    agent: Agent,
    /// The minimum number that must be left; `None`: all.
    least: Option<u32>,
}

impl Elastic {
    /// With this minimum.
    pub(super) fn new(agent: Agent, least: Option<u32>) -> Self {
        Elastic { agent, least }
    }

    /// Whether the run may continue after the losses so far.
    fn allows(&self, ranks: &[Rank]) -> bool {
        let other = ranks.iter().any(|rank| rank.failed() && !rank.is_lost());
        !other && self.least.is_some_and(|least| left(ranks) >= u64::from(least))
    }

    /// Tells the others that a rank has ended.
    fn ended(&mut self, rank: &Rank, status: ExitStatus) -> Result<()> {
        self.agent
            .ended(rank.rank, status.success(), &format!("its process ended ({status})"))
            .map_err(lost)
    }

    /// Ends the ranks that the others continued without.
    fn evict(&mut self, ranks: &mut [Rank]) -> Result<()> {
        let members = self.agent.members().map_err(lost)?.to_vec();
        for rank in ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            let inside = members.contains(&rank.rank);
            rank.joins &= self.agent.is_awaited(rank.rank);
            if !inside && !rank.joins && self.least.is_some() {
                rank.end("the others went on without it");
            }
        }
        Ok(())
    }
}

/// The state of a supervised launcher.
pub(super) struct Supervision {
    rules: FaultRules,
    history: ActionHistory,
    /// Evictions leave at least this many ranks.
    stay: u32,
    ends: ExitReports,
    /// The run's events.
    events: PathBuf,
    /// Their size when the ranks were started.
    before: u64,
    heartbeat: Heartbeat<(ProgressByRank, u64)>,
    stragglers: StragglerDetector,
}

impl Supervision {
    /// Supervises with these rules the run with these events.
    pub(super) fn new(rules: FaultRules, stay: u32, ends: ExitReports, events: PathBuf) -> Self {
        let patience = Duration::from_secs_f64(rules.hang_seconds);
        let (heartbeat, stragglers) =
            (Heartbeat::new(patience, Instant::now()), StragglerDetector::new(rules.slow));
        let before = events.metadata().map_or(0, |file| file.len());
        Supervision {
            rules,
            history: ActionHistory::default(),
            stay,
            ends,
            events,
            before,
            heartbeat,
            stragglers,
        }
    }

    /// The rule for one rank, or for all. `left` ranks would be left without it, and `may_lose` is whether they can
    /// continue.
    fn choose(&mut self, cause: Cause, rank: Option<u32>, left: u64, may_lose: bool) -> FaultRule {
        let Supervision { rules, history, stay, .. } = self;
        let possible = |action: Action| match action {
            Action::Restart => may_lose,
            Action::Evict => may_lose && left >= u64::from(*stay),
            _ => true,
        };
        let culprit = RuleScope::Rank(rank);
        let rule = history.choose(rules, cause, &culprit, possible, Instant::now());
        // A rank that is only slow loses nothing: if no other action is possible, the run continues.
        match (cause, rule.action) {
            (Cause::Straggler, Action::Stop) if !rules.about(cause).contains(&rule) => {
                FaultRule { action: Action::Note, ..rule }
            }
            _ => rule,
        }
    }
}

/// The launcher of some ranks.
pub(super) struct Launcher<'a> {
    pub(super) ranks: Vec<Rank>,
    pub(super) elastic: Option<Elastic>,
    pub(super) supervision: Option<Supervision>,
    /// The store in which the ranks meet.
    pub(super) store: &'a KeyValueStore,
    /// Starts the process of a rank; `true`: to join the others.
    pub(super) start: &'a dyn Fn(u32, bool) -> Result<Child>,
    pub(super) stop: &'a AtomicBool,
}

impl Launcher<'_> {
    /// Waits for all ranks. When one fails, the others get a moment to end by themselves, unless they may continue
    /// without it.
    pub(super) fn run(mut self) -> Result<u8> {
        let (mut failed, mut asked, mut looked): (Option<Instant>, _, _) =
            (None, false, Instant::now());
        while self.ranks.iter().any(|rank| rank.ended.is_none()) {
            if self.stop.load(Ordering::Relaxed) && !asked {
                asked = true;
                for rank in &mut self.ranks {
                    // If the rank has ended already, the error does not matter.
                    let _ = rank.child.stdin.as_mut().map(|input| input.write_all(b"stop\n"));
                }
            }
            self.look()?;
            self.store.check().map_err(|error| {
                // They would wait for an answer, and report a network error.
                self.ranks.iter_mut().for_each(|rank| rank.end("the store of the ranks failed"));
                lost(error)
            })?;
            if failed.is_none() && !asked {
                self.handle_exits()?;
                self.start_again()?;
            }
            let can_continue = self.can_continue();
            if !can_continue && self.ranks.iter().any(Rank::failed) {
                failed.get_or_insert_with(Instant::now);
            }
            if failed.is_some_and(|since| since.elapsed() > GRACE) {
                let why = "another rank failed, and it did not end by itself";
                self.ranks.iter_mut().for_each(|rank| rank.end(why));
            }
            if looked.elapsed() >= ROLL {
                looked = Instant::now();
                self.roll(failed.is_some() || asked)?;
            }
            thread::sleep(LOOK);
        }
        Ok(if self.can_continue() { 0 } else { exit_code(&self.ranks) })
    }

    /// Whether the run may continue after the losses so far.
    fn can_continue(&self) -> bool {
        self.elastic.as_ref().is_some_and(|elastic| elastic.allows(&self.ranks))
    }

    /// Polls which ranks have ended.
    fn look(&mut self) -> Result<()> {
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            let ended = rank.child.try_wait().map_err(|error| {
                Fault::machine(format!("cannot wait for rank {}: {error}", rank.rank))
            })?;
            if let Some(status) = ended.filter(|status| status.code().is_none()) {
                let number = rank.rank;
                match rank.evicted {
                    Some(why) => contract::note!("rank {number} was ended by the launcher: {why}"),
                    None => {
                        contract::note!("error: rank {number} was ended from outside: {status}")
                    }
                }
            }
            rank.ended = ended;
            rank.at = ended.map(|_| Instant::now());
            if let (Some(status), Some(elastic)) = (ended, self.elastic.as_mut()) {
                elastic.ended(rank, status)?;
            }
        }
        Ok(())
    }

    /// Polls which ranks continue, and their progress; if `ending`, applies no more rules.
    fn roll(&mut self, ending: bool) -> Result<()> {
        let Some(elastic) = &mut self.elastic else { return Ok(()) };
        elastic.evict(&mut self.ranks)?;
        let came = |rank: &Rank| !rank.joins && rank.ended.is_none();
        if !self.ranks.iter().any(came) {
            // There is no rank left to join.
            let joining = self.ranks.iter_mut().filter(|rank| rank.joins);
            joining.for_each(|rank| {
                rank.handled = true;
                rank.end("the run ended before it could join");
            });
        }
        let Some(supervision) = self.supervision.as_mut().filter(|_| !ending) else {
            return Ok(());
        };
        let (seen, now) = (elastic.agent.whereabouts().map_err(lost)?, Instant::now());
        let written = std::fs::metadata(&supervision.events).map_or(0, |file| file.len());
        let slow = supervision.stragglers.look(&seen);
        let held = |rank: &&Rank| rank.ended.is_none() && is_held(rank.child.id());
        let late = behind(&seen).or_else(|| {
            let mut held = self.ranks.iter().filter(held);
            held.next().filter(|_| held.next().is_none()).map(|rank| rank.rank)
        });
        if supervision.heartbeat.is_missed((seen, written), now) {
            supervision.heartbeat.again(now);
            let seconds = supervision.rules.hang_seconds;
            self.apply_rules(late, Cause::Hang, &format!("no sign of life for {seconds} s"));
        }
        if let Some(slow) = slow {
            let (seconds, usual) = (slow.seconds, slow.usual);
            let what = format!(
                "it computed {seconds:.3} s for a micro-batch, the median rank {usual:.3} s"
            );
            self.apply_rules(Some(slow.rank), Cause::Straggler, &what);
        }
        Ok(())
    }

    /// Applies the rules to a running rank; `None`: to all, if the one at fault is unknown.
    fn apply_rules(&mut self, rank: Option<u32>, cause: Cause, what: &str) {
        let index = rank.and_then(|rank| self.ranks.iter().position(|one| one.rank == rank));
        // From now on it counts as lost.
        let left = left(&self.ranks).saturating_sub(1);
        let least = self.elastic.as_ref().and_then(|elastic| elastic.least);
        let may_lose = index.is_some() && least.is_some_and(|least| left >= u64::from(least));
        let Some(supervision) = &mut self.supervision else { return };
        let rule = supervision.choose(cause, rank, left, may_lose);
        let action = rule.action;
        if action.is_of_one_rank() {
            record_failure(
                &supervision.events,
                &FailureEvent { cause, rank, action, what, host: &host_name() },
            );
        }
        match (index, action) {
            (_, Action::Note) => (),
            (Some(index), Action::Restart | Action::Evict) => {
                let rank = &mut self.ranks[index];
                rank.decision = Some(rule);
                rank.end(match cause {
                    Cause::Straggler => "it is slower than the others, and the rules say so",
                    _ => "it gave no sign of life, and the rules say so",
                });
            }
            _ => self.give_up(rank, cause, what),
        }
    }

    /// Applies the rules to ranks that have ended.
    fn handle_exits(&mut self) -> Result<()> {
        for index in 0..self.ranks.len() {
            let (can_continue, left) = (self.can_continue(), left(&self.ranks));
            let Some(supervision) = &mut self.supervision else { return Ok(()) };
            let rank = &mut self.ranks[index];
            if !rank.failed() || rank.handled {
                continue;
            }
            let fresh = rank.at.is_some_and(|at| at.elapsed() < SILENCE);
            if fresh && rank.is_silent(&supervision.ends) {
                continue;
            }
            rank.handled = true;
            let number = rank.rank;
            let (cause, what) = rank.cause_of(&supervision.ends);
            // A rank that reports a fault before training begins is not restarted, except for a full disk.
            let began =
                supervision.events.metadata().map_or(0, |file| file.len()) > supervision.before;
            let silent = rank.exit_report(&supervision.ends).is_none();
            let cause = cause.filter(|cause| began || silent || *cause == Cause::Disk);
            let rule = match (rank.decision.take(), cause) {
                (Some(rule), _) => rule,
                (None, Some(cause)) => {
                    let rule = supervision.choose(cause, Some(number), left, can_continue);
                    let (rank, action, host) = (Some(number), rule.action, host_name());
                    if action.is_of_one_rank() {
                        record_failure(
                            &supervision.events,
                            &FailureEvent { cause, rank, action, what: &what, host: &host },
                        );
                    }
                    rule
                }
                // Every rank would meet this fault: they end by themselves.
                (None, None) => {
                    self.supervision = None;
                    return Ok(());
                }
            };
            match rule.action {
                Action::Restart => rank.again = Some(Instant::now() + rule.pause()),
                // Whether its machine works shows when the rank is started: if it does not come, the others are not
                // disturbed.
                Action::Evict => {
                    let again = rule.again.map(Duration::from_secs_f64);
                    rank.again = again.map(|again| Instant::now() + again);
                }
                Action::Note => (),
                _ => {
                    self.give_up(Some(number), cause.unwrap_or(Cause::Crash), &what);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Ends all ranks, and reports why.
    fn give_up(&mut self, rank: Option<u32>, cause: Cause, what: &str) {
        if let Some(Supervision { ends, .. }) = &self.supervision {
            let (host, what) = (host_name(), what.to_owned());
            ends.leave(&ExitReport {
                rank,
                launcher: true,
                cause: Some(cause),
                host,
                description: what,
                missed: None,
            });
        }
        self.ranks.iter_mut().for_each(|rank| rank.end("all ranks end, by the supervisor's rules"));
        // No rank continues without the others, and no more rules apply.
        (self.elastic, self.supervision) = (None, None);
    }

    /// Restarts ranks that are due.
    fn start_again(&mut self) -> Result<()> {
        let Some(elastic) = &mut self.elastic else { return Ok(()) };
        for rank in &mut self.ranks {
            let Some(_) = rank.again.take_if(|at| *at <= Instant::now()) else { continue };
            elastic.agent.started_again(rank.rank).map_err(lost)?;
            let child = (self.start)(rank.rank, true)?;
            let words = self.supervision.as_ref().map_or(0, |it| it.ends.read().len());
            *rank = Rank { joins: true, words, ..Rank::new(rank.rank, child) };
        }
        Ok(())
    }
}

/// The number of ranks that compute.
fn left(ranks: &[Rank]) -> u64 {
    ranks.iter().filter(|rank| !rank.failed() && !rank.joins).count() as u64
}

/// Whether a process is stopped, or blocked in uninterruptible I/O.
fn is_held(process: u32) -> bool {
    let state = system_says(process).into_iter().next();
    state.is_some_and(|state| ["T", "t", "D"].contains(&state.as_str()))
}

/// The most specific exit code: ranks that only lost another one exit with "machine".
fn exit_code(ranks: &[Rank]) -> u8 {
    let lost = Class::Machine.exit_code();
    let code = |rank: &Rank| {
        let code = rank.ended.and_then(|status| status.code());
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(lost)
    };
    let codes: Vec<u8> = ranks.iter().map(code).filter(|code| *code != 0).collect();
    let specific = codes.iter().find(|code| **code != lost);
    specific.or(codes.first()).copied().unwrap_or(0)
}
