//! Snapshots of recent states in memory: the one before a spike is written to disk, so that the step can be replayed
//! without recomputing from the last checkpoint.
//!
//! Invariant: what is written and when is a function of the run and of these options, so all ranks decide alike.

use std::collections::VecDeque;

use contract::Result;
use curriculum::stats::{self, Deviation, GAP, RecentValues};

use super::Snapshot;

/// Which states are kept in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SnapshotOptions {
    /// The maximum number of states; 0 for no snapshots. Each is as large as this rank's part of a checkpoint.
    pub states: usize,
    /// Steps between them.
    pub every: u64,
    /// A step is a spike if its loss or gradient norm is this many spreads from usual ([`stats::bound`]).
    pub spike: f64,
}

impl SnapshotOptions {
    /// No snapshots.
    pub const OFF: SnapshotOptions = SnapshotOptions { states: 0, every: 10, spike: stats::FAR };
}

/// Recent states, losses and gradient norms.
pub struct Snapshots {
    options: SnapshotOptions,
    states: VecDeque<Snapshot>,
    losses: RecentValues,
    norms: RecentValues,
    /// The last spike.
    last: Option<u64>,
}

impl Snapshots {
    /// With no states yet.
    pub fn new(options: SnapshotOptions) -> Self {
        let (losses, norms) = (RecentValues::of_few(), RecentValues::of_few());
        Snapshots { options, states: VecDeque::new(), losses, norms, last: None }
    }

    /// Records a change of the phase or an amendment, from the next step on.
    pub fn change(&mut self) {
        [&mut self.losses, &mut self.norms].into_iter().for_each(RecentValues::change);
    }

    /// Records the step whose state `copy` copies, with its loss and gradient norm; `None` without labels. Returns the
    /// state to write to disk if the step is the first of a spike.
    pub fn step(
        &mut self,
        step: u64,
        measured: Option<[f64; 2]>,
        copy: impl FnOnce() -> Result<Snapshot>,
    ) -> Result<Option<Snapshot>> {
        let SnapshotOptions { states, every, .. } = self.options;
        if states == 0 {
            return Ok(None);
        }
        let begins = measured.is_some_and(|measured| self.begins(step, measured));
        // The newest one is from before this step.
        let before = if begins { self.states.pop_back() } else { None };
        if step.is_multiple_of(every.max(1)) {
            // Removes before it adds: there are never more than requested.
            while self.states.len() >= states {
                self.states.pop_front();
            }
            self.states.push_back(copy()?);
        }
        Ok(before)
    }

    /// Whether a step with this loss and norm is the first of a spike.
    fn begins(&mut self, step: u64, [loss, norm]: [f64; 2]) -> bool {
        let score = |value: f64, found: Option<Deviation>| match value.is_finite() {
            true => found.map(|found| found.score.abs()),
            false => Some(f64::INFINITY),
        };
        let loss = score(loss, self.losses.place_loss(loss));
        let norm = score(norm, self.norms.place_norm(norm));
        if loss.or(norm).is_none() {
            return false;
        }
        let [loss, norm] = [loss, norm].map(Option::unwrap_or_default);
        if loss.max(norm) <= stats::bound(loss, norm, self.options.spike) {
            return false;
        }
        let last = self.last.replace(step);
        last.is_none_or(|last| step > last + GAP)
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
        /// Of the loss, of the norm, or of a loss that is no number; a plateau after it is the same spike.
        #[test]
        fn a_spike_gives_the_newest_state_before_it(
            states in 1usize..5, every in 1u64..6, spike in 9u64..60, kind in 0..3,
        ) {
            let mut snapshots = Snapshots::new(SnapshotOptions { states, every, spike: 8.0 });
            for step in 1..=spike + 9 {
                let noise = (step * 7919 % 13) as f64 * 0.001;
                let measured = match (step >= spike, kind) {
                    (false, _) => [3.0 + noise, 1.0 + noise],
                    (true, 0) => [9.0, 1.0 + noise],
                    (true, 1) => [3.0 + noise, 5.0],
                    (true, _) => [f64::NAN, 1.0 + noise],
                };
                let found = snapshots.step(step, Some(measured), || Ok(snapshot(step))).unwrap();
                let found = found.map(|found| found.step());
                let wanted = (step - 1) / every * every;
                prop_assert_eq!(found, (step == spike && wanted > 0).then_some(wanted));
                prop_assert!(snapshots.states.len() <= states);
            }
        }
    }

    /// A lower level after a change is one spike, and a value that is usual before it is one after it.
    #[test]
    fn a_spike_after_a_change_is_one_of_its_own() {
        for (change, wanted) in [(true, vec![39, 51]), (false, vec![39])] {
            let mut snapshots = Snapshots::new(SnapshotOptions { states: 2, every: 1, spike: 8.0 });
            let mut found = Vec::new();
            for step in 1..80 {
                if change && step == 40 {
                    snapshots.change();
                }
                let noise = (step * 7919 % 13) as f64 * 0.001;
                let level = if step >= 40 && step != 52 { 1.0 } else { 4.0 };
                let kept = snapshots.step(step, Some([level + noise, 1.0]), || Ok(snapshot(step)));
                found.extend(kept.unwrap().map(|kept| kept.step()));
            }
            assert_eq!(found, wanted, "{change}");
        }
    }

    #[test]
    fn a_step_without_labels_is_no_spike() {
        let mut snapshots = Snapshots::new(SnapshotOptions { states: 1, every: 1, spike: 8.0 });
        for step in 1..40 {
            let measured = (step % 5 > 0).then_some([3.0 + (step * 7919 % 13) as f64 * 0.001, 1.0]);
            assert!(snapshots.step(step, measured, || Ok(snapshot(step))).unwrap().is_none());
        }
        let far = snapshots.step(40, Some([4.0, 1.0]), || Ok(snapshot(40))).unwrap();
        assert_eq!(far.map(|far| far.step()), Some(39));
    }

    #[test]
    fn without_a_ring_nothing_is_copied() {
        let mut snapshots = Snapshots::new(SnapshotOptions { states: 0, every: 1, spike: -9.0 });
        for step in 1..100 {
            assert!(
                snapshots
                    .step(step, Some([step as f64; 2]), || panic!("it copied"))
                    .unwrap()
                    .is_none()
            );
        }
    }
}
