//! The ranks that trained a step, by the events of its run.

use std::path::Path;

use trainer::events::{self, RanksEvent};
use trainer::mesh::{Degrees, GradReduce};

/// The ranks that trained a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ranks {
    /// How many there were.
    pub(super) world: u32,
    /// How many could share a micro-batch.
    pub(super) degrees: Degrees,
    /// How they distributed micro-batches.
    pub(super) grad_reduce: GradReduce,
}

/// The ranks that recorded `step`, by the events at `path`; `None` if these do not say. A later recomputation does not
/// count.
pub(super) fn ranks_at(path: &Path, step: u64) -> Option<Ranks> {
    let mut now = None;
    for event in events::each(path)? {
        match event["event"].as_str() {
            Some("start") => {
                let (degrees, grad_reduce) = (Degrees::ALONE, GradReduce::default());
                now = Some(Ranks { world: 1, degrees, grad_reduce });
            }
            Some(RanksEvent::NAME) => {
                now = RanksEvent::of(&event).map(
                    |RanksEvent { world, degrees, grad_reduce, .. }| Ranks {
                        world,
                        degrees,
                        grad_reduce,
                    },
                );
            }
            Some("step") if event["step"] == step && event["again"] != true => return now,
            _ => (),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use trainer::events::Events;

    use super::*;

    #[test]
    fn a_step_is_known_by_the_ranks_that_recorded_it() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("events.jsonl");
        let mut events = Events::open(&path).unwrap();
        let step = |step: u64, again: bool| json!({"step": step, "again": again});
        events.write("start", json!({})).unwrap();
        events.write("step", step(1, false)).unwrap();
        events.write("start", json!({})).unwrap();
        let event = |world: u32, cp: u32, grad_reduce: &str| {
            let transport = "gloo";
            json!({"world": world, "cp": cp, "tsp": 1, "grad_reduce": grad_reduce, "transport": transport})
        };
        events.write("ranks", event(3, 1, "bucketed")).unwrap();
        events.write("step", step(1, true)).unwrap();
        events.write("step", step(2, false)).unwrap();
        events.write("ranks", event(4, 2, "whole")).unwrap();
        events.write("step", step(3, false)).unwrap();
        let ranks = |world, cp, grad_reduce| {
            Some(Ranks { world, degrees: Degrees { cp, tsp: 1 }, grad_reduce })
        };
        assert_eq!(ranks_at(&path, 1), ranks(1, 1, GradReduce::Whole));
        assert_eq!(ranks_at(&path, 2), ranks(3, 1, GradReduce::Bucketed));
        assert_eq!(ranks_at(&path, 3), ranks(4, 2, GradReduce::Whole));
        assert_eq!(ranks_at(&path, 4), None);
    }
}
