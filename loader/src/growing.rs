//! A plan that grows while its batches are read: losses fix the data of later steps.
//!
//! A reader waits for a step whose data is not fixed yet. Steps are handed out in order, and a window of a mix that
//! reacts follows from windows at least two before it, so the steps that a reader waits for never wait for that reader:
//! neither the depth of the queue nor the length of a window can stop a run, and neither changes a batch.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use contract::{Fault, Result};
use mixer::DataPlan;

/// Where readers find the plan of a step.
#[derive(Clone)]
pub enum PlanFeed {
    /// A plan that stays as it is: a step that it does not fix is an error.
    Whole(Arc<DataPlan>),
    /// A plan that is extended meanwhile.
    Growing(Arc<GrowingPlan>),
}

/// A plan that is extended while others read it.
pub struct GrowingPlan {
    state: Mutex<Growth>,
    changed: Condvar,
}

struct Growth {
    plan: Arc<DataPlan>,
    closed: bool,
}

impl PlanFeed {
    /// The plan, once it fixes `step`.
    pub(crate) fn at(&self, step: u64) -> Result<Arc<DataPlan>> {
        match self {
            PlanFeed::Whole(plan) => Ok(Arc::clone(plan)),
            PlanFeed::Growing(plan) => plan.at(step),
        }
    }

    /// Ends every wait.
    pub(crate) fn close(&self) {
        if let PlanFeed::Growing(plan) = self {
            plan.change(|growth| growth.closed = true);
        }
    }
}

impl From<Arc<DataPlan>> for PlanFeed {
    fn from(plan: Arc<DataPlan>) -> Self {
        PlanFeed::Whole(plan)
    }
}

impl GrowingPlan {
    /// Begins with `plan`.
    pub fn new(plan: Arc<DataPlan>) -> Arc<Self> {
        let state = Mutex::new(Growth { plan, closed: false });
        Arc::new(GrowingPlan { state, changed: Condvar::new() })
    }

    /// Replaces it by a plan that fixes more steps.
    pub fn grow(&self, plan: Arc<DataPlan>) {
        self.change(|growth| growth.plan = plan);
    }

    fn change(&self, change: impl FnOnce(&mut Growth)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn at(&self, step: u64) -> Result<Arc<DataPlan>> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |growth: &mut Growth| {
            !growth.closed && growth.plan.fixed_until() < step && growth.plan.can_grow()
        };
        let state = self.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        if !state.plan.can_grow() {
            // A source may have run out.
            state.plan.check_fixed(step)?;
        }
        match state.plan.fixed_until() < step {
            false => Ok(Arc::clone(&state.plan)),
            true => Err(Fault::bug(format!("the data of step {step} was never fixed"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use mixer::{Curriculum, SourceFacts};

    use super::*;

    /// Windows of two steps, the first two of them fixed.
    fn plan() -> DataPlan {
        let text = "store = \"s\"\n[[phase]]\nname = \"a\"\nsteps = 20\nseq_len = 8\nbatch = 1\n\
            mix = { rule = \"learnability\", start = { x = 1, y = 1 }, window = 2 }\n";
        let facts = ["x", "y"].map(|name| SourceFacts {
            name: name.to_owned(),
            tokens: 1 << 20,
            documents: 9,
            unit: 64,
            selection: None,
        });
        DataPlan::new(&Curriculum::parse(text, "c.toml").unwrap(), &facts).unwrap()
    }

    #[test]
    fn a_reader_waits_for_what_is_not_fixed() {
        let begun = plan();
        assert_eq!(begun.fixed_until(), 4);
        let growing = GrowingPlan::new(Arc::new(begun.clone()));
        let feed = PlanFeed::Growing(Arc::clone(&growing));
        assert_eq!(feed.at(4).unwrap().fixed_until(), 4);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| feed.at(7).unwrap().fixed_until());
            let mut losses = begun.losses();
            for (step, last) in [(2, 6), (4, 8)] {
                while losses.through() < step {
                    losses.add([("x", 3, 6.0), ("y", 3, 6.0)]);
                }
                let plan = begun.extended(&losses).unwrap();
                assert_eq!(plan.fixed_until(), last);
                growing.grow(Arc::new(plan));
            }
            assert_eq!(waiting.join().unwrap(), 8);
            let waiting = scope.spawn(|| feed.at(9).map(drop).unwrap_err().to_string());
            feed.close();
            assert!(waiting.join().unwrap().contains("step 9 was never fixed"));
        });
    }
}
