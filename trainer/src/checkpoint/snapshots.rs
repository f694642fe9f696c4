//! Snapshots of recent states in memory: when a loss jumps, the one before it is written to disk, so that the step can
//! be replayed without recomputing from the last checkpoint.
//!
//! Invariant: what is written and when is a function of the run and of these options, so all ranks decide alike.

use std::collections::VecDeque;

use contract::Result;

use super::Snapshot;

/// Losses that a jump is measured against: at most, and at least.
const LOSSES: (usize, usize) = (64, 8);

/// Which states are kept in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SnapshotOptions {
    /// The maximum number of states; 0 for no snapshots. Each is as large as this rank's part of a checkpoint.
    pub states: usize,
    /// Steps between them.
    pub every: u64,
    /// A loss jumps if it exceeds the mean of the losses before it by this many standard deviations.
    pub spike: f64,
}

/// Recent states and losses.
pub struct Snapshots {
    options: SnapshotOptions,
    states: VecDeque<Snapshot>,
    losses: VecDeque<f64>,
}

impl Snapshots {
    /// With no states yet.
    pub fn new(options: SnapshotOptions) -> Self {
        Snapshots { options, states: VecDeque::new(), losses: VecDeque::new() }
    }

    /// Records the step whose state `copy` copies. Returns the state to write to disk if its loss has jumped.
    pub fn step(
        &mut self,
        step: u64,
        loss: f64,
        copy: impl FnOnce() -> Result<Snapshot>,
    ) -> Result<Option<Snapshot>> {
        let SnapshotOptions { states, every, .. } = self.options;
        if states == 0 {
            return Ok(None);
        }
        let jumped = self.jumped(loss);
        // The newest one is from before this step. It is taken, so that one jump is written once.
        let before = if jumped { self.states.pop_back() } else { None };
        if step.is_multiple_of(every.max(1)) {
            // Removes before it adds: there are never more than requested.
            while self.states.len() >= states {
                self.states.pop_front();
            }
            self.states.push_back(copy()?);
        }
        Ok(before)
    }

    fn jumped(&mut self, loss: f64) -> bool {
        let count = self.losses.len() as f64;
        let mean = self.losses.iter().sum::<f64>() / count;
        let square = |one: &f64| (one - mean) * (one - mean);
        let deviation = (self.losses.iter().map(square).sum::<f64>() / count).sqrt();
        let jumped = self.losses.len() >= LOSSES.1 && loss > mean + self.options.spike * deviation;
        if jumped {
            // Later losses are compared only with losses since the jump.
            self.losses.clear();
        }
        self.losses.push_back(loss);
        if self.losses.len() > LOSSES.0 {
            self.losses.pop_front();
        }
        jumped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn snapshot(step: u64) -> Snapshot {
        Snapshot::empty(step)
    }

    proptest! {
        #[test]
        fn a_jump_gives_the_newest_state_before_it(states in 1usize..5, every in 1u64..6, jump in 9u64..60) {
            let mut snapshots = Snapshots::new(SnapshotOptions { states, every, spike: 6.0 });
            for step in 1..=jump {
                let loss = if step == jump { 9.0 } else { 3.0 + (step % 3) as f64 * 0.01 };
                let found = snapshots.step(step, loss, || Ok(snapshot(step))).unwrap();
                let found = found.map(|found| found.step());
                let wanted = (step - 1) / every * every;
                prop_assert_eq!(found, (step == jump && wanted > 0).then_some(wanted));
                prop_assert!(snapshots.states.len() <= states);
            }
            prop_assert!(snapshots.step(jump + 1, 9.0, || Ok(snapshot(0))).unwrap().is_none(), "a jump is told once");
        }
    }

    #[test]
    fn without_a_ring_nothing_is_copied() {
        let mut snapshots = Snapshots::new(SnapshotOptions { states: 0, every: 1, spike: -9.0 });
        for step in 1..100 {
            assert!(snapshots.step(step, step as f64, || panic!("it copied")).unwrap().is_none());
        }
    }
}
