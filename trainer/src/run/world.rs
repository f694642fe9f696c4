//! What a run computes with. It is built at start, and nothing in it outlives it: after a loss another one can be built in the
//! same process.

use std::sync::atomic::AtomicU64;
use std::time::Instant;

use kernels::group::{Group, Rendezvous};
use kernels::runtime::KernelTable;
use tch::Device;

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
}

impl World {
    /// The ranks of `comm`.
    pub fn new(comm: Group, device: Device, runtime: KernelTable) -> Self {
        let (strangers, in_vain) = (AtomicU64::new(0), Vec::new());
        World { comm, runtime, device, rendezvous: None, strangers, in_vain }
    }

    /// The same ranks, which can meet again after a loss.
    pub fn recoverable(self, rendezvous: Rendezvous) -> Self {
        World { rendezvous: Some(rendezvous), ..self }
    }

    /// One rank.
    pub fn alone(device: Device, runtime: KernelTable) -> Self {
        World::new(Group::alone(), device, runtime)
    }
}
