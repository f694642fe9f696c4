//! Where the time of a replay goes: seconds of the wall, and of the processors that this process had.
//!
//! Told and never used: no outcome depends on a clock.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

/// Time that something took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spent {
    /// Seconds on the wall.
    pub wall: f64,
    /// Seconds of all processors together, in hundredths; 0 where the system does not say.
    pub processor: f64,
}

/// Times by part, and what was computed in them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// Each part's.
    parts: BTreeMap<&'static str, Spent>,
    /// Tokens that went forward through the model on this rank, the way to the state before the step left out.
    pub forward_tokens: u64,
    /// Tokens of these that went backward too.
    pub backward_tokens: u64,
}

impl Times {
    /// Adds to a part.
    pub(crate) fn add(&mut self, part: &'static str, spent: Spent) {
        let sum = self.parts.entry(part).or_default();
        sum.wall += spent.wall;
        sum.processor += spent.processor;
    }

    /// Of a part.
    pub fn of(&self, part: &str) -> Spent {
        self.parts.get(part).copied().unwrap_or_default()
    }

    /// For people: a line for each part.
    pub fn lines(&self) -> Vec<String> {
        let line = |(part, spent): (&&str, &Spent)| {
            format!(
                "time: {part:<12} {:>9.3} s, {:>8.2} s of processors",
                spent.wall, spent.processor
            )
        };
        let tokens = format!(
            "tokens through the model: {} forward, {} of them backward",
            self.forward_tokens, self.backward_tokens
        );
        self.parts.iter().map(line).chain([tokens]).collect()
    }
}

/// A watch that runs.
pub(crate) struct Watch {
    begun: Instant,
    processor: f64,
}

impl Watch {
    /// Starts it.
    pub(crate) fn start() -> Self {
        Watch { begun: Instant::now(), processor: processor() }
    }

    /// What it says.
    pub(crate) fn read(&self) -> Spent {
        Spent { wall: self.begun.elapsed().as_secs_f64(), processor: processor() - self.processor }
    }
}

/// Seconds that this process had of processors: Linux counts hundredths, in fields 14 and 15 behind the name in parentheses.
fn processor() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks = fields.split_ascii_whitespace().skip(11).take(2);
    ticks.filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>() as f64 / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_thread_spends_processor_time_and_a_sleeping_one_does_not() {
        let (mut times, watch) = (Times::default(), Watch::start());
        let mut sum = 0u64;
        while watch.read().wall < 0.2 {
            sum = std::hint::black_box(sum.wrapping_mul(31) + 1);
        }
        times.add("busy", watch.read());
        times.add("busy", Spent { wall: 1.0, processor: 0.0 });
        let busy = times.of("busy");
        assert!(busy.wall >= 1.2 && busy.processor > 0.0, "{busy:?}");
        assert_eq!(times.of("nothing"), Spent::default());
        assert_eq!(times.lines().len(), 2);
    }
}
