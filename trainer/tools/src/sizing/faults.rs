//! The cost of failures: in closed form, and by simulating a run event by event.
//!
//! The model is that of Young (1974) and Daly (2006): failures are independent with a constant rate, M seconds apart on
//! average; a checkpoint saves the work after every tau seconds and stops the run for delta seconds; a failure discards
//! the work since the last checkpoint, and the run continues R seconds later. Failures may also hit checkpoints and
//! restarts.
//!
//! ```text
//! tau   = sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + delta / 18M) - delta       the best interval (Daly, equation 37)
//! share = tau / (M e^(R/M) (e^((tau + delta)/M) - 1))                            of the time that becomes saved work
//! ```

use contract::{Key, Purpose, draw};
use serde::Serialize;

/// Seconds in a day.
pub(crate) const DAY: f64 = 86_400.0;

/// A run with failures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FailureModel {
    /// Seconds of a step.
    pub step: f64,
    /// Steps from checkpoint to checkpoint.
    pub every: u64,
    /// Seconds for which a checkpoint stops the run.
    pub stall: f64,
    /// Mean seconds between failures of any rank; infinite without failures.
    pub between: f64,
    /// Seconds from a failure to the next step.
    pub restart: f64,
}

/// Mean seconds between failures of any of `ranks`.
pub fn between(ranks: u32, per_rank_hour: f64) -> f64 {
    3600.0 / (f64::from(ranks) * per_rank_hour)
}

/// The best seconds of work between checkpoints. Without a stall, or without failures, there is no optimum.
pub(crate) fn best_interval(stall: f64, between: f64) -> f64 {
    if stall >= 2.0 * between {
        return between;
    }
    let part = stall / (2.0 * between);
    (2.0 * stall * between).sqrt() * (1.0 + part.sqrt() / 3.0 + part / 9.0) - stall
}

impl FailureModel {
    /// The share of the time that becomes saved work.
    pub fn goodput(&self) -> f64 {
        let (work, between) = (self.step * self.every as f64, self.between);
        if between.is_infinite() {
            return work / (work + self.stall);
        }
        work / (between * (self.restart / between).exp() * ((work + self.stall) / between).exp_m1())
    }
}

/// The results of a simulated day.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SimulatedDay {
    /// Steps that a checkpoint of this day saved.
    pub kept: u64,
    /// Steps that a failure of this day discarded.
    pub lost: u64,
    /// Failures.
    pub failures: u64,
}

/// The results of a simulation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Simulation {
    /// Day by day.
    pub days: Vec<SimulatedDay>,
    /// Steps saved in all, those after the last checkpoint included.
    pub kept: u64,
    /// Steps discarded.
    pub lost: u64,
    /// Failures.
    pub failures: u64,
    /// Completed restarts; a failure during a restart begins it again.
    pub restarts: u64,
    /// Seconds for which checkpoints stopped it.
    pub stalled: f64,
    /// Seconds of restarts, those cut short included.
    pub restarting: f64,
    /// The share of the time that became saved work.
    pub goodput: f64,
}

/// Samples the seconds to each next failure.
struct FailureClock {
    key: Key,
    next: u64,
    between: f64,
}

impl FailureClock {
    fn draw(&mut self) -> f64 {
        if self.between.is_infinite() {
            return f64::INFINITY;
        }
        self.next += 1;
        // From (0, 1], so that the logarithm is finite.
        let uniform =
            ((draw(self.key, Purpose::Generate, self.next) >> 11) + 1) as f64 / (1u64 << 53) as f64;
        -self.between * uniform.ln()
    }
}

/// Simulates `days` days; a pure function of its arguments.
pub fn simulate(run: FailureModel, days: u32, seed: u64) -> Simulation {
    let end = f64::from(days) * DAY;
    let key = Key::from_seed(seed).child("failures");
    let mut clock = FailureClock { key, next: 0, between: run.between };
    let mut out =
        Simulation { days: vec![SimulatedDay::default(); days as usize], ..Simulation::default() };
    let (mut now, mut failure) = (0.0, clock.draw());
    let segment = run.step * run.every.max(1) as f64;
    while now < end {
        let whole = now + segment + run.stall;
        if failure >= whole && whole <= end {
            out.keep(run.every, whole);
            out.stalled += run.stall;
            now = whole;
            continue;
        }
        let stop = failure.min(end);
        let done = (((stop - now) / run.step) as u64).min(run.every);
        if failure >= end {
            out.stalled += (end - now - segment).max(0.0);
            out.keep(done, end);
            break;
        }
        out.lose(done, failure);
        out.stalled += (failure - now - segment).max(0.0);
        now = restart(run, &mut clock, &mut failure, end, &mut out);
    }
    out.goodput = out.kept as f64 * run.step / end;
    out
}

/// The time at which the run continues after `failure`, which becomes the next failure.
fn restart(
    run: FailureModel,
    clock: &mut FailureClock,
    failure: &mut f64,
    end: f64,
    out: &mut Simulation,
) -> f64 {
    let mut from = *failure;
    loop {
        *failure = from + clock.draw();
        let up = from + run.restart;
        if *failure >= up || *failure >= end {
            out.restarting += (up.min(end) - from).max(0.0);
            out.restarts += u64::from(up < end);
            return up.min(end);
        }
        out.restarting += *failure - from;
        out.lose(0, *failure);
        from = *failure;
    }
}

impl Simulation {
    fn day(&mut self, at: f64) -> Option<&mut SimulatedDay> {
        let last = self.days.len().checked_sub(1)?;
        self.days.get_mut(((at / DAY) as usize).min(last))
    }

    fn keep(&mut self, steps: u64, at: f64) {
        self.kept += steps;
        if let Some(day) = self.day(at) {
            day.kept += steps;
        }
    }

    fn lose(&mut self, steps: u64, at: f64) {
        self.lost += steps;
        self.failures += 1;
        if let Some(day) = self.day(at) {
            day.lost += steps;
            day.failures += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Over thousands of failures the simulated goodput matches the closed form.
        #[test]
        fn a_long_run_is_the_closed_form(
            step in 0.5..20.0f64, every in 1u64..400, stall in 0.0..60.0f64, failures in 0.2..30.0f64,
            restart in 0.0..900.0f64, seed: u64,
        ) {
            let segment = step * every as f64 + stall;
            let run = FailureModel { step, every, stall, between: segment.max(60.0) * failures, restart };
            // Ten thousand failures: a standard error of about one per cent of the lost time.
            let days = (run.between * 1e4 / DAY).ceil() as u32;
            let found = simulate(run, days, seed);
            let expected = f64::from(days) * DAY / run.between;
            let off = found.failures as f64 / expected - 1.0;
            prop_assert!(off.abs() < 0.08, "{} failures of {expected}", found.failures);
            let lost = 1.0 - run.goodput();
            prop_assert!((found.goodput - run.goodput()).abs() < 0.06 * lost + 0.003, "{} and {}", found.goodput, run.goodput());
        }

        /// All time is saved work, lost work or waiting, and the days add up; the same seed gives the same month.
        #[test]
        fn nothing_is_left_over(
            step in 0.5..20.0f64, every in 1u64..400, stall in 0.0..60.0f64, between in 50.0..1e6f64,
            restart in 0.0..900.0f64, seed: u64,
        ) {
            let run = FailureModel { step, every, stall, between, restart };
            let found = simulate(run, 30, seed);
            prop_assert_eq!(&found, &simulate(run, 30, seed));
            let days = |of: fn(&SimulatedDay) -> u64| found.days.iter().map(of).sum::<u64>();
            prop_assert_eq!((days(|day| day.kept), days(|day| day.lost)), (found.kept, found.lost));
            prop_assert_eq!(days(|day| day.failures), found.failures);
            prop_assert!(found.restarts <= found.failures);
            let spent = (found.kept + found.lost) as f64 * step + found.stalled + found.restarting;
            // A step that a failure or the end interrupts is partly uncounted.
            let cut = (found.failures + 1) as f64 * step;
            prop_assert!(spent <= 30.0 * DAY * (1.0 + 1e-9) && spent + cut >= 30.0 * DAY * (1.0 - 1e-9), "{spent}");
        }

        /// No nearby interval is better than the best one by the closed form.
        #[test]
        fn the_best_interval_is_best(stall in 0.1..100.0f64, ratio in 20.0..1e5f64, other in 0.3..3.0f64) {
            let between = stall * ratio;
            let goodput = |interval: f64| {
                FailureModel { step: interval, every: 1, stall, between, restart: 60.0 }.goodput()
            };
            let best = goodput(best_interval(stall, between));
            prop_assert!(best >= goodput(other * best_interval(stall, between)) - 1e-4);
        }
    }

    #[test]
    fn without_failures_only_checkpoints_cost() {
        let run = FailureModel {
            step: 2.0,
            every: 100,
            stall: 50.0,
            between: f64::INFINITY,
            restart: 9.0,
        };
        let found = simulate(run, 10, 1);
        assert!((run.goodput() - 0.8).abs() < 1e-12 && (found.goodput - 0.8).abs() < 1e-3);
        assert_eq!((found.failures, found.lost, found.restarts), (0, 0, 0));
    }
}
