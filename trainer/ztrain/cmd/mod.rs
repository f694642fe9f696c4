//! One file per command: parse, call the library, print.

pub(crate) mod bench;
pub(crate) mod bench_step;
pub(crate) mod compare;
pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod replay;
pub(crate) mod spawn;
pub(crate) mod train;

use contract::{Fault, Result};
use kernels::device;
use kernels::runtime::{self, KernelTable, RuntimeOptions};
use tch::Device;
use trainer::lanes::Lanes;
use trainer::model::Keep;
use trainer::parallel::launch::Launched;

/// Flags that only decide speed and place; no value of them can change a bit.
#[derive(clap::Args)]
#[command(next_help_heading = "Speed and place (never bits)")]
pub(crate) struct Speed {
    /// Where to compute: cpu, cuda or cuda:1 (HIP devices answer to the same name).
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: String,
    /// Leaves computed at once, one math thread each [default: the cores, shared among the ranks here].
    #[arg(long, value_name = "N")]
    pub(crate) lanes: Option<usize>,
    /// Keep only what enters each layer until its backward pass, and compute the rest again: less memory, more time.
    #[arg(long)]
    pub(crate) recompute: bool,
    /// Threads that read batches.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) loader_threads: usize,
    /// Batches that wait to be trained on.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(crate) prefetch: usize,
}

impl Speed {
    /// Everything by default, on the processor.
    pub(crate) fn cpu() -> Self {
        let device = "cpu".to_owned();
        Speed { device, lanes: None, recompute: false, loader_threads: 1, prefetch: 2 }
    }

    /// The lanes asked for, else the cores of the machine, shared among the ranks on it.
    pub(crate) fn lanes(&self, launched: Option<&Launched>) -> Lanes {
        let ranks = launched.map_or(1, |launched| launched.local_world.max(1));
        let shared = || Lanes::new(Lanes::available().count() / ranks as usize);
        let keep = if self.recompute { Keep::LayerInputs } else { Keep::Everything };
        self.lanes.map_or_else(shared, Lanes::new).keeping(keep)
    }

    /// Puts the determinism switches in force, then opens the device. Each rank on a machine takes one of its own.
    pub(crate) fn start(&self, launched: Option<&Launched>) -> Result<(Device, KernelTable)> {
        let name = match launched {
            Some(Launched { local_rank, .. }) if self.device == "cuda" => {
                format!("cuda:{local_rank}")
            }
            _ => self.device.clone(),
        };
        let options = RuntimeOptions { device: name.clone() };
        let table = runtime::start(&options).map_err(|error| machine(&name, &error))?;
        let device = device::open(&name).map_err(|error| machine(&name, &error))?;
        Ok((device, table))
    }
}

fn machine(device: &str, error: &kernels::Error) -> Fault {
    Fault::machine(error.to_string()).at(format!("--device {device}"))
}
