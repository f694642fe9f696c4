//! What a run computes with. It is built at start, and nothing in it outlives it: after a loss another one can be built in the
//! same process.

use kernels::group::Group;
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
}

impl World {
    /// The ranks of `comm`.
    pub fn new(comm: Group, device: Device, runtime: KernelTable) -> Self {
        World { comm, runtime, device }
    }

    /// One rank.
    pub fn alone(device: Device, runtime: KernelTable) -> Self {
        World::new(Group::alone(), device, runtime)
    }
}
