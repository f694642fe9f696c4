//! How fast the step was computed, by the events. Waiting never changes results, but explains slow steps.

use contract::Result;
use curriculum::stats::median;
use serde::Serialize;

use crate::report::{EventLog, SLOW};
use trainer::folder::RunFolder;

/// The number of steps before it to compare with.
const BEFORE: usize = 64;

/// With fewer, nothing is reported.
const LEAST: usize = 8;

/// How fast a step was computed.
#[derive(Clone, Debug, Serialize)]
pub struct SpeedEvidence {
    /// Its duration in seconds.
    pub seconds: f64,
    /// The median of the steps before.
    pub seconds_before: Option<f64>,
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// The median of the steps before.
    pub tokens_per_second_before: Option<f64>,
    /// The fraction of its time spent waiting for its batch.
    pub waiting: f64,
    /// Events of the run with this step or just before it.
    pub here: Vec<String>,
}

impl SpeedEvidence {
    /// The speed of a step; `None` if the events do not contain it.
    pub(super) fn read(folder: &RunFolder, step: u64) -> Result<Option<SpeedEvidence>> {
        let mut log = EventLog::new(&folder.events(), &folder.ledger());
        log.refresh()?;
        let at = step as usize - 1;
        let of = |column: &[f32]| column.get(at).copied().filter(|value| value.is_finite());
        let before = |column: &[f32]| {
            let steps = &column[at.saturating_sub(BEFORE)..at];
            let known =
                steps.iter().filter(|value| value.is_finite()).map(|value| f64::from(*value));
            Some(known.collect::<Vec<f64>>()).filter(|known| known.len() >= LEAST).and_then(median)
        };
        let (Some(seconds), Some(speed)) = (of(&log.seconds), of(&log.speed)) else {
            return Ok(None);
        };
        let here = log.happenings.iter().filter(|one| one.step == step || one.step + 1 == step);
        Ok(Some(SpeedEvidence {
            seconds: f64::from(seconds),
            seconds_before: before(&log.seconds),
            tokens_per_second: f64::from(speed),
            tokens_per_second_before: before(&log.speed),
            waiting: f64::from(of(&log.stall).unwrap_or(0.0)),
            here: here.map(|one| one.words.clone()).collect(),
        }))
    }

    /// Whether the step was slow, by the same measure as odd steps in `report`.
    pub(super) fn is_slow(&self) -> bool {
        self.tokens_per_second_before.is_some_and(|usual| self.tokens_per_second < SLOW * usual)
    }

    /// For people.
    pub(super) fn words(&self) -> String {
        let SpeedEvidence { seconds, tokens_per_second: speed, waiting, here, .. } = self;
        let usual = |value: Option<f64>, digits: usize| {
            value.map_or_else(String::new, |value| format!(", usually {value:.digits$}"))
        };
        let mut words = format!(
            "it took {seconds:.2} s{} ({speed:.0} tokens/s{}), {:.0} % of them waiting for its batch",
            usual(self.seconds_before, 2),
            usual(self.tokens_per_second_before, 0),
            100.0 * waiting
        );
        if !here.is_empty() {
            words += &format!("; there {}", here.join("; "));
        }
        words
    }
}
