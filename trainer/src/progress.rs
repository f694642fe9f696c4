//! The lines that a run prints on standard error, one for each step.
//!
//! The part before the speed is identical in two equal runs.

use std::time::{Duration, Instant};

use contract::counted;
use contract::terminal::name;

use crate::evaluate::TaskScore;
use crate::ledger::StepRecord;
use crate::metrics::{DataStall, share};
use crate::optim::guard::Skipped;
use crate::shown::{clock, rate};
use crate::validate::SourceLoss;

/// Prints the lines of one process of a run.
pub struct ProgressPrinter {
    steps: u64,
    shown: bool,
    last: Instant,
    /// Seconds per step, as a moving average.
    pace: Option<f64>,
}

impl ProgressPrinter {
    /// For a run of `steps` steps in total; silent unless `shown`.
    pub fn new(steps: u64, shown: bool) -> Self {
        ProgressPrinter { steps, shown, last: Instant::now(), pace: None }
    }

    /// Prints a note.
    pub fn note(&self, text: &str) {
        contract::note!("{text}");
    }

    /// Prints the validation loss. Its time does not count for any step.
    pub fn validation(&mut self, step: u64, sources: &[SourceLoss]) {
        if self.shown {
            contract::note!("{}", validation_line(step, sources));
        }
        self.last = Instant::now();
    }

    /// Prints the scores of tasks. Their time does not count for any step.
    pub fn evaluation(&mut self, step: u64, scores: &[TaskScore]) {
        if self.shown {
            contract::note!("{}", evaluation_line(step, scores));
        }
        self.last = Instant::now();
    }

    /// Prints a finished step with `tokens` tokens, whose batch was `waited` for; returns its duration.
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

    /// Ends this process of the run: prints how long it waited for batches.
    pub fn end(&self, stall: &DataStall) {
        if self.shown && stall.steps > 0 {
            contract::note!("{}", stall_line(stall));
        }
    }
}

/// The stalls of all steps but the first, whose batch is never prefetched.
fn stall_line(stall: &DataStall) -> String {
    let DataStall { steps, first, taken, .. } = stall;
    format!(
        "data stall: waited {:.1}% of {:.1} s ({}) for batches; {:.3} s for the first",
        100.0 * stall.share(),
        taken.as_secs_f64(),
        counted(steps.saturating_sub(1), "step"),
        first.as_secs_f64()
    )
}

/// Each task's accuracy, and by characters of the choices where there are any.
fn evaluation_line(step: u64, scores: &[TaskScore]) -> String {
    let mut line = format!("evaluation after step {step}");
    for score in scores {
        line += &format!(" | {} {:.4}", name(&score.task), score.accuracy());
        if let Some(norm) = score.accuracy_norm() {
            line += &format!(" (norm {norm:.4})");
        }
    }
    line
}

/// The validation losses, the mean over all sources first.
fn validation_line(step: u64, sources: &[SourceLoss]) -> String {
    let mut line =
        format!("validation after step {step} | loss {:.6}", SourceLoss::over(sources).mean());
    for one in sources {
        line += &format!(" | {} {:.6}", name(&one.source), one.mean());
    }
    line
}

/// The part of a step's line that depends only on the run.
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
        let wanted =
            "data stall: waited 0.0% of 54.1 s (23 steps) for batches; 0.009 s for the first";
        assert_eq!(stall_line(&stall), wanted);
        let slow = DataStall { waited: 100 * stall.waited, ..stall };
        assert!(stall_line(&slow).starts_with("data stall: waited 0.1% of"));
    }
}
