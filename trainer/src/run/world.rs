//! What a run computes with. It is built at start, and nothing in it outlives it: after a loss another one can be built in the
//! same process.

use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use kernels::group::{Group, Rendezvous};
use kernels::runtime::KernelTable;
use tch::Device;

use crate::folder::Holds;

/// The ranks, and what this one is.
#[derive(Debug)]
pub struct World {
    /// How ranks exchange bytes; a rank may be alone.
    pub comm: Group,
    /// What computes here.
    pub runtime: KernelTable,
    /// Where tensors live.
    pub device: Device,
    /// Where the ranks that are left meet after a loss, if that is asked for.
    pub(super) rendezvous: Option<Rendezvous>,
    /// Connections to the ranks' store that were refused, as far as it is written down.
    pub(super) strangers: AtomicU64,
    /// When they met although nobody was lost.
    pub(super) in_vain: Vec<Instant>,
    /// How long another rank is waited for, also by one that is alone for a while.
    pub(super) patience: Duration,
    /// Whether this rank was started again, and joins others that are under way.
    pub(super) joins: bool,
    /// What it holds of the run's folder, whatever becomes of the other ranks.
    pub(super) holds: Holds,
}

impl World {
    /// The ranks of `comm`.
    pub fn new(comm: Group, device: Device, runtime: KernelTable) -> Self {
        let (strangers, in_vain, patience) = (AtomicU64::new(0), Vec::new(), comm.timeout());
        let (rendezvous, joins, holds) = (None, false, Holds::default());
        World { comm, runtime, device, rendezvous, strangers, in_vain, patience, joins, holds }
    }

    /// The same ranks, which can meet again after a loss.
    pub fn recoverable(self, rendezvous: Rendezvous) -> Self {
        World { rendezvous: Some(rendezvous), ..self }
    }

    /// The same, of which this one has just come to the others, in the place of one that was lost.
    pub fn joined(self, rendezvous: Rendezvous, patience: Duration) -> Self {
        World { rendezvous: Some(rendezvous), patience, joins: true, ..self }
    }

    /// The same, which holds this.
    pub fn holding(self, holds: Holds) -> Self {
        World { holds, ..self }
    }

    /// Whether a rank that was started again waits to be taken in.
    pub(super) fn is_awaited(&self) -> bool {
        self.rendezvous.as_ref().is_some_and(Rendezvous::is_awaited)
    }

    /// One rank.
    pub fn alone(device: Device, runtime: KernelTable) -> Self {
        World::new(Group::alone(), device, runtime)
    }
}
