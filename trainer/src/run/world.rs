//! The ranks, kernels and device of a run. Built at start; after a loss, another one can be built in the same process.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kernels::group::{Group, Rendezvous};
use kernels::runtime::KernelTable;
use tch::Device;

use crate::folder::RunLocks;
use crate::metrics::MetricsFeed;

/// The ranks, and this rank's device and kernels.
#[derive(Debug)]
pub struct World {
    /// The process group; a rank may be alone.
    pub comm: Group,
    /// The kernels of this rank.
    pub runtime: KernelTable,
    /// The device of tensors.
    pub device: Device,
    /// Where the remaining ranks meet after a loss, if that is requested.
    pub(super) rendezvous: Option<Rendezvous>,
    /// Number of refused connections to the ranks' store that have been recorded.
    pub(super) unauthenticated: AtomicU64,
    /// When ranks met although none was lost.
    pub(super) in_vain: Vec<Instant>,
    /// The timeout for other ranks, also for a rank that is temporarily alone.
    pub(super) patience: Duration,
    /// Whether this rank was restarted, and joins running ones.
    pub(super) joins: bool,
    /// Its locks on the run's folder, which do not depend on other ranks.
    pub(super) locks: RunLocks,
    /// The program that gets the curves of this run, if rank 0 has started one.
    pub(super) feed: OnceLock<Arc<MetricsFeed>>,
}

impl World {
    /// The ranks of `comm`.
    pub fn new(comm: Group, device: Device, runtime: KernelTable) -> Self {
        let (unauthenticated, in_vain, patience) = (AtomicU64::new(0), Vec::new(), comm.timeout());
        let (rendezvous, joins, locks, feed) = (None, false, RunLocks::default(), OnceLock::new());
        World {
            comm,
            runtime,
            device,
            rendezvous,
            unauthenticated,
            in_vain,
            patience,
            joins,
            locks,
            feed,
        }
    }

    /// The same ranks, which can meet again after a loss.
    pub fn recoverable(self, rendezvous: Rendezvous) -> Self {
        World { rendezvous: Some(rendezvous), ..self }
    }

    /// The same, where this rank has just joined the others in place of a lost one.
    pub fn joined(self, rendezvous: Rendezvous, patience: Duration) -> Self {
        World { rendezvous: Some(rendezvous), patience, joins: true, ..self }
    }

    /// The same with these locks.
    pub fn holding(self, locks: RunLocks) -> Self {
        World { locks, ..self }
    }

    /// Whether a restarted rank waits to join.
    pub(super) fn is_awaited(&self) -> bool {
        self.rendezvous.as_ref().is_some_and(Rendezvous::is_awaited)
    }

    /// A single rank.
    pub fn alone(device: Device, runtime: KernelTable) -> Self {
        World::new(Group::alone(), device, runtime)
    }
}
