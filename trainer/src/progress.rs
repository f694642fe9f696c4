//! What a person sees while a run goes on: one line for each step, on standard error.
//!
//! Everything left of the data rate is the same in two equal runs.

use std::time::{Duration, Instant};

use contract::counted;
use contract::terminal::name;

use crate::ledger::StepRecord;
use crate::metrics::{DataStall, share};
use crate::optim::guard::Skipped;
use crate::shown::{clock, rate};
use crate::validate::SourceLoss;

/// Prints the lines of one process's part of a run.
pub struct Progress {
    steps: u64,
    shown: bool,
    last: Instant,
    /// Seconds per step, averaged over the last ones.
    pace: Option<f64>,
}

impl Progress {
    /// A run of `steps` steps in all; silent unless `shown`.
    pub fn new(steps: u64, shown: bool) -> Self {
        Progress { steps, shown, last: Instant::now(), pace: None }
    }

    /// Says something that is no step.
    pub fn note(&self, text: &str) {
        contract::note!("{text}");
    }

    /// The loss on held-out text. The time it took is no step's.
    pub fn validation(&mut self, step: u64, sources: &[SourceLoss]) {
        if self.shown {
            contract::note!("{}", validation_line(step, sources));
        }
        self.last = Instant::now();
    }

    /// One step is done, with `tokens` tokens, whose batch was `waited` for; returns how long it took.
    pub fn step(
        &mut self,
        record: &StepRecord,
        tokens: u64,
        waited: Duration,
        recomputed: bool,
    ) -> Duration {
        let taken = self.last.elapsed();
        self.last = Instant::now();
        let seconds = taken.as_secs_f64();
        let pace = self.pace.map_or(seconds, |pace| 0.8 * pace + 0.2 * seconds);
        self.pace = Some(pace);
        if self.shown {
            let left = Duration::from_secs_f64(pace * (self.steps - record.step) as f64);
            let note = if recomputed { " | again, same bits" } else { "" };
            contract::note!(
                "{} | {} tok/s | stall {:.1}% | eta {}{note}",
                line(record, self.steps),
                rate(tokens as f64 / seconds.max(1e-9)),
                100.0 * share(waited, taken),
                clock(left)
            );
        }
        taken
    }

    /// The run ends here, or this process's part of it: how long it has waited for batches.
    pub fn end(&self, stall: &DataStall) {
        if self.shown && stall.steps > 0 {
            contract::note!("{}", stall_line(stall));
        }
    }
}

/// All steps of this process but the first, beside which nothing was read ahead.
fn stall_line(stall: &DataStall) -> String {
    let DataStall { steps, first, taken, .. } = stall;
    format!(
        "data stall: {:.1}% of {:.1} s, the time of {}; {:.3} s before the first",
        100.0 * stall.share(),
        taken.as_secs_f64(),
        counted(steps.saturating_sub(1), "step"),
        first.as_secs_f64()
    )
}

/// The losses on held-out text, all of them first.
fn validation_line(step: u64, sources: &[SourceLoss]) -> String {
    let mut line =
        format!("validation after step {step} | loss {:.6}", SourceLoss::over(sources).mean());
    for one in sources {
        line += &format!(" | {} {:.6}", name(&one.source), one.mean());
    }
    line
}

/// The part of a step's line that is a function of the run.
fn line(record: &StepRecord, steps: u64) -> String {
    let skipped = Skipped::note(record.skipped);
    format!(
        "step {}/{steps} | {} | loss {:.6} | lr {:.2e} | norm {:.4}{skipped} | data {} | state {}",
        record.step,
        name(&record.phase),
        record.loss,
        record.lr(),
        record.norm(),
        record.batch_digest.short(),
        record.state_digest.short()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_of_waiting_leaves_the_first_step_out() {
        let [first, waited] = [9000, 541].map(Duration::from_micros);
        let stall = DataStall { steps: 24, first, waited, taken: Duration::from_millis(54_100) };
        let wanted = "data stall: 0.0% of 54.1 s, the time of 23 steps; 0.009 s before the first";
        assert_eq!(stall_line(&stall), wanted);
        let slow = DataStall { waited: 100 * stall.waited, ..stall };
        assert!(stall_line(&slow).starts_with("data stall: 0.1% of"));
    }
}
