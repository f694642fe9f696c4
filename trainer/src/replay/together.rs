//! Replays by several ranks: they must see the same run and get the same request; they exchange what only some of them
//! have.

use contract::{Fault, Result};
use kernels::group::Transport;

use super::{ReplayParallelism, Replayer};
use crate::ledger::Ledger;
use crate::memory::{self, MachineDemand};
use crate::mesh::words::{WordReader, WordWriter};
use crate::refusal::lost;
use crate::run::{World, agree as agreement};
use crate::spec::RunSpec;
use crate::step::ReducedGradient;

/// Agrees with the other ranks on the transport of tensors, before a run is opened.
pub fn meet(world: &mut World, transport: Transport) -> Result<()> {
    world.comm.choose_transport(world.device, transport).map_err(lost).map(drop)
}

/// Refuses ranks that see another run or have another request than rank 0. Returns the last step that all of them see
/// in the ledger, since the run may continue meanwhile.
pub(super) fn agree(
    spec: &RunSpec,
    ledger: &Ledger,
    world: &World,
    together: &ReplayParallelism,
) -> Result<u64> {
    agreement::same(spec, &together.asked, world)?;
    let gather = |operation: &str, message: &WordWriter| {
        world.comm.all_gather(operation, message.bytes()).map_err(lost)
    };
    let mut message = WordWriter::default();
    let last = gather("the length of the ledger", message.word(ledger.last_step()))?;
    let last = last.iter().map(|gathered| WordReader::new(gathered).word());
    let recorded = last.collect::<Result<Vec<_>>>()?.into_iter().min().unwrap_or(0);
    let chain = ledger.chain_at(recorded).unwrap_or_default();
    let mut message = WordWriter::default();
    let chains = gather("the chain of the ledger", message.digest(chain))?;
    for (rank, gathered) in chains.iter().enumerate() {
        if *gathered != chains[0] {
            return Err(Fault::mismatch(format!("rank {rank} sees another ledger than rank 0"))
                .found(WordReader::new(gathered).digest()?)
                .wanted(WordReader::new(&chains[0]).digest()?)
                .hint("a run's folder has to be the same on every rank: share it"));
        }
    }
    Ok(recorded)
}

impl Replayer {
    /// The loss of each token of a step, in the order of its micro-batches, from all ranks.
    pub(super) fn token_losses(&self, gradient: &ReducedGradient) -> Result<Vec<f32>> {
        let own = gradient.micro_batches.iter().flat_map(|one| one.token_losses.iter().copied());
        if self.world.comm.world() == 1 {
            return Ok(own.collect());
        }
        let (team, micro_batches) = (self.team()?, gradient.micro_batches.len() as u64);
        let lines = team.lines(self.spec.model_at(gradient.step)?.cut)?;
        let mut message = WordWriter::default();
        for number in lines.micro_batches(micro_batches)? {
            let losses = &gradient.micro_batches[number as usize].token_losses;
            message.word(losses.len() as u64);
            losses.iter().for_each(|loss| {
                message.word(u64::from(loss.to_bits()));
            });
        }
        let gathered = team.all_gather("the gathering of token losses", &message)?;
        let mut reports = Vec::new();
        for (rank, mut gathered) in gathered.readers().into_iter().enumerate() {
            let mut micro_batch = |_: &u64| -> Result<Vec<f32>> {
                let count = gathered.word()?;
                (0..count).map(|_| Ok(f32::from_bits(gathered.word()? as u32))).collect()
            };
            let numbers = lines.micro_batches_of(rank as u32, micro_batches)?;
            reports.push(numbers.iter().map(&mut micro_batch).collect::<Result<Vec<_>>>()?);
        }
        Ok(lines.in_order(micro_batches, reports, |one, _| Ok(one))?.concat())
    }

    /// Refuses a step that exceeds the memory of this machine, before a state is read.
    pub fn refuse_memory(&self) -> Result<()> {
        let (ReplayParallelism { grad_reduce, flat, degrees, .. }, world) =
            (&self.together, &self.world);
        let demand = MachineDemand {
            degrees: *degrees,
            flat: *flat,
            grad_reduce: *grad_reduce,
            workers: self.workers,
            replicate: false,
            // The state before a step is kept until the result is compared.
            copies: 1,
            limit: store::memory::limit(),
        };
        let (names, me) = (world.comm.nodes(), world.comm.rank());
        memory::refuse(&self.spec, demand, names, me, world.device)
    }

    /// Whether this rank prints the results.
    pub fn is_rank_0(&self) -> bool {
        self.world.comm.rank() == 0
    }

    /// Waits until all ranks are done: none may end before rank 0 has printed everything.
    pub fn end(&self) -> Result<()> {
        self.world.comm.barrier("the end").map_err(lost)
    }

    /// Refuses several ranks for a computation that one rank does alone.
    pub fn refuse_ranks(&self, what: &str) -> Result<()> {
        match self.world.comm.world() {
            1 => Ok(()),
            ranks => Err(Fault::usage(format!("{what} is computed by one process"))
                .at("--nproc")
                .found(ranks)
                .hint("leave --nproc out, and start it without torchrun, srun or mpirun")),
        }
    }
}
