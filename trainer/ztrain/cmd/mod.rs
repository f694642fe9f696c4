//! One file per command: parse, call the library, print.

pub(crate) mod compare;
pub(crate) mod replay;
pub(crate) mod train;

use contract::{Fault, Result};
use kernels::device;
use kernels::runtime::{self, KernelTable, RuntimeOptions};
use tch::Device;
use trainer::lanes::Lanes;

/// Flags that only decide speed and place; no value of them can change a bit.
#[derive(clap::Args)]
#[command(next_help_heading = "Speed and place (never bits)")]
pub(crate) struct Speed {
    /// Where to compute: cpu, cuda or cuda:1 (HIP devices answer to the same name).
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: String,
    /// Leaves computed at once, one math thread each [default: one for each core].
    #[arg(long, value_name = "N")]
    pub(crate) lanes: Option<usize>,
    /// Threads that read batches.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) loader_threads: usize,
    /// Batches that wait to be trained on.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(crate) prefetch: usize,
}

impl Speed {
    /// The lanes asked for.
    pub(crate) fn lanes(&self) -> Lanes {
        self.lanes.map_or_else(Lanes::available, Lanes::new)
    }

    /// Puts the determinism switches in force, then opens the device.
    pub(crate) fn start(&self) -> Result<(Device, KernelTable)> {
        let options = RuntimeOptions { device: self.device.clone() };
        let table = runtime::start(&options).map_err(|error| machine(&self.device, &error))?;
        let device = device::open(&self.device).map_err(|error| machine(&self.device, &error))?;
        Ok((device, table))
    }
}

fn machine(device: &str, error: &kernels::Error) -> Fault {
    Fault::machine(error.to_string()).at(format!("--device {device}"))
}
