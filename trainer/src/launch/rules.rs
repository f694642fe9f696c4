//! The rules of a supervisor: what to do about each kind of failure. A small file, read once.
//!
//! ```toml
//! hang_seconds = 600                                       # no progress for this long is a hang
//! slow = { times = 1.5, score = 6.0, steps = 10 }          # when a rank is a straggler
//!
//! [[crash]]                                                # the first entry that is not used up decides
//! do = "restart"
//! times = 3                                                # at most this often for the same rank ...
//! within = 3600                                            # ... in this many seconds
//!
//! [[crash]]
//! do = "evict"
//! again = 600                                              # restart it after this many seconds, to rejoin
//! ```

use std::time::{Duration, Instant};

use contract::{Class, Fault, Result, Symptom};
use serde::{Deserialize, Serialize};
use settings::{File, Spanned, Value};
use store::Location;

/// The exit code of a Rust program after an uncaught panic.
const PANIC: u8 = 101;

/// The cause of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// A process was killed from outside, or by its machine.
    Crash,
    /// A rank is alive but makes no progress.
    Hang,
    /// A rank computes much longer than the others.
    Straggler,
    /// Losses or gradients are not finite (exit 5).
    Diverged,
    /// A recomputed step has a different result (exit 4).
    Mismatch,
    /// A machine computed a micro-batch twice with different results (`--audit`).
    Audit,
    /// A disk is full.
    Disk,
    /// The process that starts the ranks and serves their store was killed or stopped.
    Launcher,
    /// A bug of ours (exit 1).
    Bug,
}

/// All causes.
pub(crate) const CAUSES: [Cause; 9] = [
    Cause::Crash,
    Cause::Hang,
    Cause::Straggler,
    Cause::Diverged,
    Cause::Mismatch,
    Cause::Audit,
    Cause::Disk,
    Cause::Launcher,
    Cause::Bug,
];

/// The name of a cause or an action, in the file and in events.
fn name_of(one: &impl Serialize) -> String {
    let name = serde_json::to_value(one).unwrap_or_default();
    name.as_str().unwrap_or_default().to_owned()
}

impl Cause {
    /// Its name.
    pub fn name(self) -> String {
        name_of(&self)
    }

    /// The cause for a process that ended with `fault`; `None` for one that would recur in any case.
    pub fn of(fault: &Fault) -> Option<Cause> {
        match fault.symptom() {
            Some(Symptom::DiskFull) => Some(Cause::Disk),
            Some(Symptom::Untrusted) => Some(Cause::Audit),
            Some(Symptom::InUse) => None,
            None => Cause::of_code(fault.class().exit_code()),
        }
    }

    /// The same if only its exit code is known.
    pub(crate) fn of_code(code: u8) -> Option<Cause> {
        let is = |class: Class| class.exit_code() == code;
        match () {
            () if is(Class::Usage) || is(Class::Data) => None,
            () if is(Class::Mismatch) => Some(Cause::Mismatch),
            () if is(Class::Diverged) => Some(Cause::Diverged),
            () if is(Class::Bug) || code == PANIC => Some(Cause::Bug),
            () => Some(Cause::Crash),
        }
    }
}

/// The action taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Records the failure only.
    Note,
    /// Restarts the rank's process, which joins the others while they continue.
    Restart,
    /// Ends the rank; the others continue without it.
    Evict,
    /// Ends and restarts all ranks.
    Retry,
    /// Ends all ranks, and restarts them once `until` succeeds or, for a full disk, once there is space.
    Wait,
    /// Requeues the Slurm job, excluding the machine at fault if it is known.
    Requeue,
    /// Ends the run with the exit code of the failure.
    Stop,
}

impl Action {
    /// Its name.
    pub fn name(self) -> String {
        name_of(&self)
    }

    /// Whether it concerns a single rank while the others continue.
    pub(crate) fn is_of_one_rank(self) -> bool {
        matches!(self, Action::Note | Action::Restart | Action::Evict)
    }
}

/// One action for a cause.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FaultRule {
    /// The action.
    #[serde(rename = "do")]
    pub action: Action,
    /// The maximum number of uses in `within` for the same rank, or the same machine if all ranks are concerned;
    /// default: unlimited.
    pub times: Option<u32>,
    /// The period for `times` in seconds.
    #[serde(default = "hour")]
    pub within: f64,
    /// Seconds to wait before the action.
    #[serde(default)]
    pub pause: f64,
    /// Seconds after which an evicted rank is restarted, doubled after each further eviction; default: never.
    pub again: Option<f64>,
    /// A shell line that must succeed before the ranks are restarted, run every `pause` seconds.
    pub until: Option<String>,
}

fn hour() -> f64 {
    3600.0
}

impl FaultRule {
    /// An unlimited rule.
    const fn always(action: Action) -> Self {
        FaultRule { action, times: None, within: 3600.0, pause: 0.0, again: None, until: None }
    }

    /// At most this often in an hour.
    fn often(action: Action, times: u32) -> Self {
        FaultRule { times: Some(times), ..FaultRule::always(action) }
    }

    /// The time to wait before the action.
    pub fn pause(&self) -> Duration {
        Duration::from_secs_f64(self.pause)
    }
}

/// When a rank is a straggler; all conditions hold in each of the last `steps` steps.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StragglerRule {
    /// It computed its micro-batches this many times as long as the median rank.
    pub times: f64,
    /// And longer by this many standard deviations over ranks, estimated from the median absolute deviation.
    pub score: f64,
    /// The number of consecutive steps.
    pub steps: usize,
}

impl Default for StragglerRule {
    fn default() -> Self {
        StragglerRule { times: 1.5, score: 6.0, steps: 10 }
    }
}

/// The maximum size of a rules file, which is passed in the environment.
const MOST: usize = 1 << 16;

/// The rules for all causes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FaultRules {
    /// Seconds without progress after which a run counts as hung.
    pub hang_seconds: f64,
    /// When a rank is a straggler.
    pub slow: StragglerRule,
    crash: Vec<FaultRule>,
    hang: Vec<FaultRule>,
    straggler: Vec<FaultRule>,
    diverged: Vec<FaultRule>,
    mismatch: Vec<FaultRule>,
    audit: Vec<FaultRule>,
    disk: Vec<FaultRule>,
    launcher: Vec<FaultRule>,
    bug: Vec<FaultRule>,
}

impl Default for FaultRules {
    /// The default rules. Failures that would recur are not retried.
    fn default() -> Self {
        let lost = || {
            let retry = FaultRule { pause: 5.0, ..FaultRule::often(Action::Retry, 5) };
            let evict = FaultRule { again: Some(600.0), ..FaultRule::always(Action::Evict) };
            vec![FaultRule::often(Action::Restart, 3), evict, retry]
        };
        FaultRules {
            hang_seconds: 600.0,
            slow: StragglerRule::default(),
            crash: lost(),
            hang: lost(),
            straggler: vec![FaultRule::always(Action::Note)],
            diverged: Vec::new(),
            mismatch: Vec::new(),
            audit: vec![FaultRule::always(Action::Evict)],
            disk: vec![FaultRule { pause: 10.0, ..FaultRule::always(Action::Wait) }],
            launcher: vec![FaultRule { pause: 1.0, ..FaultRule::often(Action::Retry, 5) }],
            bug: Vec::new(),
        }
    }
}

impl FaultRules {
    /// Reads a file; what it does not mention has its default. Also returns the text, to be passed on to other
    /// processes.
    pub fn read(place: &Location) -> Result<(FaultRules, String)> {
        let bytes = place.read().map_err(|error| place.fault("read", &error))?;
        let file = File::from_bytes(place.to_string(), bytes)?;
        if file.text().len() > MOST {
            let wanted = format!("at most {MOST} bytes");
            let fault = Fault::usage("this file is too large for rules").at(file.name());
            return Err(fault.found(format!("{} bytes", file.text().len())).wanted(wanted));
        }
        Ok((FaultRules::parse(&file)?, file.text().to_owned()))
    }

    /// Parses a text.
    pub fn parse(file: &File) -> Result<FaultRules> {
        let rules: FaultRules = file.parse()?;
        let spanned: std::collections::BTreeMap<String, Spanned<Value>> = file.parse()?;
        let wrong = |key: &str, wanted: &str| match spanned.get(key) {
            Some(value) => file.wrong(key, value, wanted),
            None => Fault::usage(format!("`{key}` is wrong")).at(file.name()).wanted(wanted),
        };
        let (above, long) = (|value: f64| value > 0.0 && value < 1e9, 0.0..1e9);
        if !above(rules.hang_seconds) {
            return Err(wrong("hang_seconds", "seconds, above 0 and below 1e9"));
        }
        let StragglerRule { times, score, steps } = rules.slow;
        if !(above(times) && times > 1.0 && score >= 0.0 && (1..=1000).contains(&steps)) {
            return Err(wrong("slow", "times above 1, a score from 0, steps from 1 to 1,000"));
        }
        for cause in CAUSES {
            let name = &cause.name();
            for rule in rules.about(cause) {
                let of_rank = [Cause::Crash, Cause::Hang, Cause::Straggler, Cause::Audit];
                let alone = matches!(rule.action, Action::Restart | Action::Evict);
                if alone && !of_rank.contains(&cause) {
                    return Err(wrong(name, "note, retry, wait, requeue or stop").hint(
                        "no single rank is at fault here that could be restarted or evicted",
                    ));
                }
                if !(above(rule.within) && long.contains(&rule.pause)) {
                    return Err(wrong(name, "`within` above 0 and `pause` from 0, in seconds"));
                }
                let evicts = rule.action == Action::Evict;
                if rule.again.is_some_and(|again| !evicts || !above(again)) {
                    return Err(wrong(name, "`again`, seconds above 0, with `do = \"evict\"`"));
                }
                let blind = rule.action == Action::Wait && rule.until.is_none();
                if blind && cause != Cause::Disk
                    || rule.until.is_some() && rule.action != Action::Wait
                {
                    return Err(wrong(name, "`until`, a line for the shell, with `do = \"wait\"`")
                        .hint("only a full disk is watched by itself"));
                }
            }
        }
        Ok(rules)
    }

    /// The rules for a cause, in order.
    pub fn about(&self, cause: Cause) -> &[FaultRule] {
        match cause {
            Cause::Crash => &self.crash,
            Cause::Hang => &self.hang,
            Cause::Straggler => &self.straggler,
            Cause::Diverged => &self.diverged,
            Cause::Mismatch => &self.mismatch,
            Cause::Audit => &self.audit,
            Cause::Disk => &self.disk,
            Cause::Launcher => &self.launcher,
            Cause::Bug => &self.bug,
        }
    }

    /// Whether any rule concerns single ranks, for which the others must be able to continue.
    pub fn touch_ranks(&self) -> bool {
        let mut all = CAUSES.iter().flat_map(|cause| self.about(*cause));
        all.any(|rule| matches!(rule.action, Action::Restart | Action::Evict))
    }
}

/// The subject of a rule's counts: failures of one rank do not count for another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RuleScope {
    /// A rank, as launched.
    Rank(Option<u32>),
    /// A machine by name; empty if unknown.
    Machine(String),
}

/// The actions taken so far.
#[derive(Clone, Debug, Default)]
pub struct ActionHistory(Vec<(Cause, usize, RuleScope, Instant)>);

impl ActionHistory {
    /// The action for `cause` now: the first rule that is `possible` and not used up for the culprit, and recorded as
    /// used. If there is none, stop.
    pub(crate) fn choose(
        &mut self,
        rules: &FaultRules,
        cause: Cause,
        culprit: &RuleScope,
        possible: impl Fn(Action) -> bool,
        now: Instant,
    ) -> FaultRule {
        for (number, rule) in rules.about(cause).iter().enumerate() {
            let within = Duration::from_secs_f64(rule.within);
            let lately = |at: &Instant| now.saturating_duration_since(*at) < within;
            let done = self.used(cause, number, culprit).filter(|at| lately(at)).count() as u64;
            if rule.times.is_none_or(|times| done < u64::from(times)) && possible(rule.action) {
                let before = self.used(cause, number, culprit).count();
                self.0.push((cause, number, culprit.clone(), now));
                let again = rule.again.map(|again| again * f64::from(1u32 << before.min(8)));
                return FaultRule { again, ..rule.clone() };
            }
        }
        FaultRule::always(Action::Stop)
    }

    /// When a rule was used for a culprit.
    fn used(&self, cause: Cause, rule: usize, scope: &RuleScope) -> impl Iterator<Item = &Instant> {
        let of_this = move |(of, number, culprit, _): &&(Cause, usize, RuleScope, Instant)| {
            (*of, *number) == (cause, rule) && culprit == scope
        };
        self.0.iter().filter(of_this).map(|(.., at)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<FaultRules> {
        FaultRules::parse(&File::new("rules.toml", text))
    }

    #[test]
    fn a_file_changes_what_it_mentions() {
        let rules = parse("hang_seconds = 5\n[[crash]]\ndo = \"evict\"\ntimes = 2\n").unwrap();
        assert_eq!(rules.hang_seconds, 5.0);
        assert_eq!(rules.about(Cause::Crash), [FaultRule::often(Action::Evict, 2)]);
        assert_eq!(rules.about(Cause::Disk), FaultRules::default().about(Cause::Disk));
        assert_eq!(parse("").unwrap(), FaultRules::default());
    }

    #[test]
    fn what_cannot_be_done_is_refused_with_its_place() {
        for (text, words) in [
            ("hang_seconds = 0", "rules.toml:1:16"),
            ("slow = { times = 0.5 }", "times above 1"),
            ("[[crash]]\ndo = \"evcit\"", "rules.toml:2:6"),
            ("[[crsah]]\ndo = \"stop\"", "crash"),
            ("[[disk]]\ndo = \"evict\"", "no single rank"),
            ("[[crash]]\ndo = \"wait\"", "until"),
            ("[[crash]]\ndo = \"retry\"\nuntil = \"true\"", "until"),
            ("[[crash]]\ndo = \"retry\"\npause = -1", "pause"),
            ("[[crash]]\ntimes = 1", "do"),
            ("[[crash]]\ndo = \"restart\"\nagain = 1", "again"),
            ("[[crash]]\ndo = \"evict\"\nagain = 0", "again"),
        ] {
            let fault = parse(text).unwrap_err();
            assert_eq!(fault.class(), Class::Usage);
            assert!(fault.to_string().contains(words), "{text}: {fault}");
        }
    }

    #[test]
    fn what_befalls_one_rank_uses_up_nothing_of_another() {
        let (rules, now, mut history) =
            (FaultRules::default(), Instant::now(), ActionHistory::default());
        let mut choose = |rank: u32| {
            let culprit = RuleScope::Rank(Some(rank));
            let rule = history.choose(&rules, Cause::Crash, &culprit, |_| true, now);
            (rule.action, rule.again)
        };
        for rank in 0..9 {
            for _ in 0..3 {
                assert_eq!(choose(rank), (Action::Restart, None), "rank {rank}");
            }
        }
        // A rank that keeps failing is restarted less and less often.
        for seconds in [600.0, 1200.0, 2400.0] {
            assert_eq!(choose(4), (Action::Evict, Some(seconds)));
        }
        assert_eq!(choose(5), (Action::Evict, Some(600.0)));
    }

    proptest! {
        /// For any sequence of causes, no rule is used more often in its period than it allows, and one is skipped only
        /// if it is used up or impossible.
        #[test]
        fn rules_are_used_as_often_as_they_allow(
            times in prop::collection::vec(0u32..4, 1..4),
            seconds in prop::collection::vec(0u64..40, 1..40),
            evict: bool,
        ) {
            let actions = [Action::Restart, Action::Evict, Action::Retry];
            let crash = times.iter().zip(actions).map(|(times, action)| FaultRule {
                within: 60.0,
                ..FaultRule::often(action, *times)
            });
            let rules = FaultRules { crash: crash.collect(), ..FaultRules::default() };
            let possible = |action| evict || action != Action::Evict;
            let (mut history, mut now, mut used) = (ActionHistory::default(), Instant::now(), Vec::new());
            for pause in seconds {
                now += Duration::from_secs(pause);
                let rule = history.choose(&rules, Cause::Crash, &RuleScope::Rank(None), possible, now);
                let lately = |action: Action| {
                    let close = |at: &Instant| now - *at < Duration::from_secs(60);
                    used.iter().filter(|(done, at)| *done == action && close(at)).count() as u32
                };
                let free = rules.about(Cause::Crash).iter().find(|rule| {
                    possible(rule.action) && lately(rule.action) < rule.times.unwrap()
                });
                prop_assert_eq!(rule.action, free.map_or(Action::Stop, |rule| rule.action));
                used.push((rule.action, now));
            }
        }
    }
}
