//! Monitors running ranks for the launcher: which one makes no progress, and which one is slower than the others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use curriculum::stats;
use kernels::group::RankProgress;

use super::rules::StragglerRule;

/// The fields of /proc/PID/stat from the process state (the third) on; empty if the process has ended.
pub(super) fn system_says(process: u32) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The program's name may contain anything, and ends at the last bracket.
    let after = text.rsplit(')').next().unwrap_or_default();
    after.split_whitespace().map(str::to_owned).collect()
}

/// The progress of each rank, by its number as launched.
pub(super) type ProgressByRank = Vec<(u32, Option<RankProgress>)>;

/// Detects a run without progress.
#[derive(Debug)]
pub(super) struct Heartbeat<T> {
    seen: Option<T>,
    since: Instant,
    patience: Duration,
    /// Whether there was any progress yet.
    moved: bool,
}

/// The minimum patience before the first progress: on a busy machine, starting and loading may take a while.
const START: Duration = Duration::from_secs(60);

impl<T: PartialEq> Heartbeat<T> {
    /// With this patience.
    pub(super) fn new(patience: Duration, now: Instant) -> Self {
        Heartbeat { seen: None, since: now, patience, moved: false }
    }

    /// Records an observation; returns whether nothing has changed for too long.
    pub(super) fn is_missed(&mut self, seen: T, now: Instant) -> bool {
        if self.seen.as_ref() != Some(&seen) {
            self.moved |= self.seen.is_some();
            (self.seen, self.since) = (Some(seen), now);
        }
        let patience = if self.moved { self.patience } else { self.patience.max(START) };
        now.saturating_duration_since(self.since) > patience
    }

    /// Restarts the measurement.
    pub(super) fn again(&mut self, now: Instant) {
        (self.seen, self.since) = (None, now);
    }
}

/// The one rank that the others wait for: it has begun fewer exchanges than each of them. `None` if there is none.
pub(super) fn behind(seen: &ProgressByRank) -> Option<u32> {
    let begun = |at: &Option<RankProgress>| at.as_ref().map_or(0, |at| at.begun[0]);
    let least = seen.iter().map(|(_, at)| begun(at)).min()?;
    let mut behind = seen.iter().filter(|(_, at)| begun(at) == least).map(|(rank, _)| *rank);
    let first = behind.next()?;
    (behind.next().is_none() && seen.len() > 1).then_some(first)
}

/// The time of a micro-batch of one step, by rank; `None` for a rank that computed none.
type TimeByRank = BTreeMap<u32, Option<Duration>>;

/// Detects a rank that computes its micro-batches more slowly than the others, step after step.
#[derive(Debug)]
pub(super) struct StragglerDetector {
    slow: StragglerRule,
    /// Steps that not all ranks have finished.
    steps: BTreeMap<u64, TimeByRank>,
    /// The last step that was evaluated.
    checked: u64,
    /// For how many consecutive steps each rank has been slow.
    count: BTreeMap<u32, usize>,
}

/// A straggler, with its times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Straggler {
    pub(super) rank: u32,
    /// The seconds of a micro-batch in the last step: its own, and those of the median rank.
    pub(super) seconds: f64,
    pub(super) usual: f64,
}

impl StragglerDetector {
    /// With no observations yet.
    pub(super) fn new(slow: StragglerRule) -> Self {
        StragglerDetector { slow, steps: BTreeMap::new(), checked: 0, count: BTreeMap::new() }
    }

    /// Records an observation; returns a rank that has just become a straggler. A step is evaluated once all ranks
    /// finished it.
    pub(super) fn look(&mut self, seen: &ProgressByRank) -> Option<Straggler> {
        for (rank, at) in seen {
            for (step, time) in at.iter().flat_map(|at| &at.computed) {
                if *step > self.checked {
                    self.steps.entry(*step).or_default().insert(*rank, *time);
                }
            }
        }
        let mut found = None;
        while let Some((step, times)) = self.complete(seen) {
            self.checked = step;
            self.steps.retain(|left, _| *left > step);
            found = self.find_straggler(&times).or(found);
        }
        found
    }

    /// The first step with the times of all ranks.
    fn complete(&self, seen: &ProgressByRank) -> Option<(u64, TimeByRank)> {
        let all = |times: &TimeByRank| {
            seen.len() > 1 && seen.iter().all(|(rank, _)| times.contains_key(rank))
        };
        let (step, times) = self.steps.iter().find(|(_, times)| all(times))?;
        Some((*step, times.clone()))
    }

    fn find_straggler(&mut self, times: &TimeByRank) -> Option<Straggler> {
        // A rank without micro-batches says nothing about the others.
        let times: BTreeMap<u32, f64> =
            times.iter().filter_map(|(rank, time)| Some((*rank, (*time)?.as_secs_f64()))).collect();
        // The lower one of two: half of the ranks are not slow.
        let usual = stats::median(times.values().copied()).unwrap_or_default();
        // A thousandth of the time is noise.
        let deviation = stats::spread(times.values().copied(), usual).max(1e-3 * usual);
        self.count.retain(|rank, _| times.contains_key(rank));
        let mut found = None;
        for (rank, seconds) in &times {
            let score = (seconds - usual) / deviation;
            let is_slow = *seconds > self.slow.times * usual && score > self.slow.score;
            let count = self.count.entry(*rank).or_default();
            *count = if is_slow { *count + 1 } else { 0 };
            if *count == self.slow.steps {
                found = Some(Straggler { rank: *rank, seconds: *seconds, usual });
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(exchanges: u64, step: u64, seconds: Option<f64>) -> Option<RankProgress> {
        let mut begun = [0; 4];
        begun[0] = exchanges;
        let computed = vec![(step, seconds.map(Duration::from_secs_f64))];
        let [exchange, place] = [String::new(), String::new()];
        Some(RankProgress { begun, computed, exchange, place })
    }

    #[test]
    fn a_pulse_is_missed_after_its_time_and_not_before() {
        let start = Instant::now();
        let mut heartbeat = Heartbeat::new(Duration::from_secs(5), start);
        let mut look =
            |seen, seconds| heartbeat.is_missed(seen, start + Duration::from_secs(seconds));
        // Before the first progress it has time to start.
        assert!(!look(1, 0) && !look(1, 60));
        assert!(!look(2, 61) && !look(2, 66) && look(2, 67));
        assert!(!look(3, 70) && !look(3, 75) && look(3, 76));
    }

    proptest! {
        #[test]
        fn who_is_awaited_is_the_only_one_that_is_behind(begun in prop::collection::vec(0u64..4, 1..6)) {
            let seen = (0..).zip(&begun).map(|(rank, begun)| (rank, at(*begun, 0, None))).collect();
            let least = begun.iter().min().unwrap();
            let last: Vec<usize> = (0..begun.len()).filter(|at| begun[*at] == *least).collect();
            let alone = begun.len() > 1 && last.len() == 1;
            prop_assert_eq!(behind(&seen), alone.then(|| last[0] as u32));
        }

        /// One rank is slow by a factor from some step on; the times of the others vary by a few percent. Ranks without
        /// micro-batches change nothing, and a rank that alone has some is no straggler.
        #[test]
        fn a_straggler_is_found_after_its_steps_and_nobody_else(
            ranks in 1u32..9,
            idle in 0u32..9,
            noise in prop::collection::vec(-0.03f64..0.03, 400),
            factor in 0.9f64..4.0,
            from in 0u64..10,
            steps in 1usize..6,
        ) {
            prop_assume!(!(1.3..2.0).contains(&factor));
            let slow = StragglerRule { times: 1.6, score: 3.0, steps };
            let (mut stragglers, mut found) = (StragglerDetector::new(slow), Vec::new());
            for step in 1..=20 {
                let time = |rank: u32| {
                    let base = 1.0 + noise[(step as u32 * 9 + rank) as usize];
                    if rank == 0 && step > from { base * factor } else { base }
                };
                let busy = (0..ranks).map(|rank| (rank, at(step, step, Some(time(rank)))));
                let idle = (ranks..ranks + idle).map(|rank| (rank, at(step, step, None)));
                let seen = busy.chain(idle).collect();
                found.extend(stragglers.look(&seen).map(|one| (step, one.rank)));
                // A step is evaluated only once.
                prop_assert_eq!(stragglers.look(&seen), None);
            }
            let wanted = (factor >= 2.0 && ranks > 1).then_some((from + steps as u64, 0));
            prop_assert_eq!(found, wanted.into_iter().collect::<Vec<_>>());
        }
    }
}
