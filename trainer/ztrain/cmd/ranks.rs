//! The flags about ranks, and what they and the environment say together.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use contract::{Fault, Result};
use kernels::group::Transport;
use trainer::World;
use trainer::launch::{self, Launch, LaunchedRank, spawned_us};
use trainer::mesh::{Degrees, GradReduce};

use super::Speed;

/// Flags about ranks.
#[derive(clap::Args)]
#[command(next_help_heading = "Parallelism")]
pub(crate) struct Ranks {
    /// Compute with so many processes on this machine; under torchrun, srun or mpirun the environment decides.
    #[arg(long, value_name = "N", value_parser = processes, allow_negative_numbers = true)]
    nproc: Option<u32>,
    /// How long a rank waits for another before it names it and stops.
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = super::patience)]
    #[arg(help_heading = "Faults and supervision")]
    rank_timeout: Duration,
    /// How gradients are reduced: whole, after a rank has added all its micro-batches (fewest bytes), or in buckets
    /// that are sent as soon as each micro-batch is computed (least memory).
    #[arg(long, value_name = "HOW", value_enum, default_value = "whole")]
    grad_reduce: GradReduceName,
    /// How many ranks may share each micro-batch: each phase uses the most, up to N, that divide its `context_chunks`
    /// and the number of ranks; the others compute other micro-batches.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    cp: u32,
    /// How many ranks may besides hold the weights of experts and attention for each other, each a part: as many of the
    /// sequences more are shared. Each phase uses the most, up to N, that divide its `weight_shards`, its
    /// `context_chunks` and the number of ranks.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    tsp: u32,
    /// Reduce gradients between all ranks at once instead of within each machine first.
    #[arg(long)]
    no_hierarchical: bool,
    /// How tensors travel between ranks: from GPU to GPU by RCCL or NCCL (ZTRAIN_RCCL names the library to open),
    /// through plain memory by Gloo, or the first where every rank has it.
    #[arg(long, value_name = "HOW", value_enum, default_value = "auto")]
    transport: TransportName,
    /// Ranks on each machine, to try out what is sent between machines [default: as the launcher says].
    #[arg(long, value_name = "3,2", value_delimiter = ',')]
    ranks_per_node: Vec<u32>,
}

/// A number of processes of one machine.
fn processes(text: &str) -> std::result::Result<u32, &'static str> {
    let number = text.parse().ok().filter(|number: &u32| (1..=1024).contains(number));
    number.ok_or("wanted a number of processes, 1 to 1024")
}

/// A grad_reduce, by its name.
#[derive(Clone, Copy, clap::ValueEnum)]
pub(crate) enum GradReduceName {
    Whole,
    Bucketed,
}

impl GradReduceName {
    /// What it names.
    pub(crate) fn grad_reduce(self) -> GradReduce {
        match self {
            GradReduceName::Whole => GradReduce::Whole,
            GradReduceName::Bucketed => GradReduce::Bucketed,
        }
    }
}

/// A transport, by its name.
#[derive(Clone, Copy, clap::ValueEnum)]
enum TransportName {
    Auto,
    Gloo,
    Rccl,
}

impl Ranks {
    /// How tensors travel between the ranks.
    pub(crate) fn transport(&self) -> Transport {
        match self.transport {
            TransportName::Auto => Transport::Auto,
            TransportName::Gloo => Transport::Gloo,
            TransportName::Rccl => Transport::Rccl,
        }
    }

    /// How many ranks to start, if it is for this process to start them. What each of them would refuse is said here,
    /// once.
    pub(crate) fn to_spawn(&self, speed: &Speed) -> Result<Option<u32>> {
        let Some(count) = self.nproc.filter(|_| !spawned_us()) else { return Ok(None) };
        if self.launched()?.is_some() {
            return Err(Fault::usage("a launcher has started this rank already")
                .at("--nproc")
                .found(count)
                .hint("leave --nproc out under torchrun, srun and mpirun"));
        }
        if count > 1 {
            self.refuse_nodes(count)?;
            speed.refuse_missing()?;
        }
        Ok((count > 1).then_some(count))
    }

    /// Refuses machines that have not as many ranks as there are.
    fn refuse_nodes(&self, world: u32) -> Result<()> {
        let ranks: u64 = self.ranks_per_node.iter().map(|count| u64::from(*count)).sum();
        if self.ranks_per_node.is_empty() || ranks == u64::from(world) {
            return Ok(());
        }
        let nodes: Vec<String> = self.ranks_per_node.iter().map(u32::to_string).collect();
        Err(Fault::usage("the machines do not have as many ranks as there are")
            .at("--ranks-per-node")
            .found(nodes.join(","))
            .wanted(match world {
                1 => "1, or --nproc and a launcher for more ranks".to_owned(),
                _ => format!("ranks of each machine, {world} in all"),
            }))
    }

    /// The place of this process among others, if it has one.
    pub(crate) fn launched(&self) -> Result<Option<LaunchedRank>> {
        let mut launched = launch::place(|name| std::env::var(name).ok())?;
        // With --nproc it is for those that are started to say.
        let alone = launched.is_none() && self.nproc.is_none_or(|count| count == 1);
        if alone {
            self.refuse_nodes(1)?;
        }
        if let (Some(LaunchedRank { place, .. }), false) =
            (&mut launched, self.ranks_per_node.is_empty())
        {
            self.refuse_nodes(place.world)?;
            let ranks = (0u32..).zip(&self.ranks_per_node);
            let mut ranks = ranks.flat_map(|(node, count)| (0..*count).map(move |_| node));
            let node = ranks.nth(place.rank as usize);
            let none = || Fault::bug("a rank without a machine");
            place.node = node.ok_or_else(none)?.to_string();
        }
        Ok(launched)
    }

    /// How many ranks may share a micro-batch.
    pub(crate) fn degrees(&self) -> Degrees {
        Degrees { cp: self.cp, tsp: self.tsp }
    }

    /// How the ranks deal micro-batches, and whether they pass over machines.
    pub(crate) fn ways(&self) -> (GradReduce, bool) {
        let grad_reduce = self.grad_reduce.grad_reduce();
        (grad_reduce, self.no_hierarchical)
    }

    /// What this process computes with: the device first, then the other ranks if there are any. With `min_ranks` they
    /// can go on without each other. `stop` is set when the launcher asks this rank to stop.
    pub(crate) fn world(
        &self,
        speed: &Speed,
        launched: Option<&LaunchedRank>,
        min_ranks: Option<u32>,
        stop: &Arc<AtomicBool>,
    ) -> Result<World> {
        let ((device, runtime), patience) = (speed.start(launched)?, self.rank_timeout);
        Ok(match (launched, min_ranks) {
            (None, _) => World::alone(device, runtime),
            (Some(launched), Some(least)) if launch::started_again() => {
                let (comm, rendezvous) = launch::rejoin(launched, least, patience, stop)?;
                World::new(comm, device, runtime).joined(rendezvous, patience)
            }
            (Some(launched), None) => {
                World::new(launch::meet(launched, patience, stop)?, device, runtime)
            }
            (Some(launched), Some(least)) => match launch::meet(launched, patience, stop) {
                Ok(comm) => {
                    let rendezvous = launch::rendezvous(launched, &comm)?;
                    World::new(comm, device, runtime).recoverable(rendezvous)
                }
                Err(fault) => {
                    let met = launch::meet_without(launched, least, patience, fault)?;
                    World::new(met.0, device, runtime).joined(met.1, patience)
                }
            },
        })
    }
}

/// Refuses to be started as one rank of several, where a command computes in one process.
pub(crate) fn refuse_launcher(command: &str) -> Result<()> {
    match launch::place(|name| std::env::var(name).ok())? {
        None => Ok(()),
        Some(LaunchedRank { place, .. }) => {
            Err(Fault::usage(format!("{command} computes in one process"))
                .at("the environment")
                .found(format!("rank {} of {}", place.rank, place.world))
                .hint("start it without torchrun, srun or mpirun; `ztrain replay` runs under them"))
        }
    }
}

/// Starts `count` ranks of this very command, which need each other, and waits for them.
pub(crate) fn start_all(count: u32) -> Result<u8> {
    // A signal ends this process, and its ranks with it: they read, and have nothing to keep.
    let stop = AtomicBool::new(false);
    let (min_ranks, supervised, arguments) = (None, None, Vec::new());
    launch::spawn(&Launch { count, min_ranks, stay: count, supervised, arguments }, &stop)
}
