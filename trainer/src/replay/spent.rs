//! Times of a replay: wall time, and CPU time of this process.
//!
//! They are only reported: no result depends on a clock.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;

/// A duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SpentTime {
    /// Wall time in seconds.
    pub wall: f64,
    /// CPU time in seconds, to the hundredth; 0 if the system does not say.
    pub processor: f64,
}

/// Times by part, with the number of tokens computed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TimesByPart {
    /// By part.
    parts: BTreeMap<&'static str, SpentTime>,
    /// Tokens in forward passes on this rank, without the steps that lead to the state.
    pub forward_tokens: u64,
    /// Those of them with a backward pass.
    pub backward_tokens: u64,
}

impl TimesByPart {
    /// Adds to a part.
    pub(crate) fn add(&mut self, part: &'static str, spent: SpentTime) {
        let sum = self.parts.entry(part).or_default();
        sum.wall += spent.wall;
        sum.processor += spent.processor;
    }

    /// The time of a part.
    pub fn of(&self, part: &str) -> SpentTime {
        self.parts.get(part).copied().unwrap_or_default()
    }

    /// For people: a line for each part.
    pub fn lines(&self) -> Vec<String> {
        let line = |(part, spent): (&&str, &SpentTime)| {
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

/// A running stopwatch.
pub(crate) struct Stopwatch {
    begun: Instant,
    processor: f64,
}

impl Stopwatch {
    /// Starts it.
    pub(crate) fn start() -> Self {
        Stopwatch { begun: Instant::now(), processor: processor() }
    }

    /// The time since it was started.
    pub(crate) fn read(&self) -> SpentTime {
        SpentTime {
            wall: self.begun.elapsed().as_secs_f64(),
            processor: processor() - self.processor,
        }
    }
}

/// CPU time of this process in seconds: Linux counts hundredths, in fields 14 and 15, after the name in parentheses.
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
        let (mut times, watch) = (TimesByPart::default(), Stopwatch::start());
        let mut sum = 0u64;
        while watch.read().wall < 0.2 {
            sum = std::hint::black_box(sum.wrapping_mul(31) + 1);
        }
        times.add("busy", watch.read());
        times.add("busy", SpentTime { wall: 1.0, processor: 0.0 });
        let busy = times.of("busy");
        assert!(busy.wall >= 1.2 && busy.processor > 0.0, "{busy:?}");
        assert_eq!(times.of("nothing"), SpentTime::default());
        assert_eq!(times.lines().len(), 2);
    }
}
