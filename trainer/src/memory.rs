//! Memory of a training process, by formula and as measured, in bytes.
//!
//! The formula adds up what can be alive at the same time. That is an upper bound: activations are freed before the
//! last blocks arrive. It leaves out the program with its libraries, which is measured before training, and batches and
//! kernel workspaces, which are small except for what oneDNN keeps under bf16.

mod line;

use std::borrow::Cow;
use std::ops::Range;

use contract::words::bytes as size;
use contract::{Fault, Result, counted};
use curriculum::Dtype;
use kernels::ops::NewtonSchulzIterate;
use serde::Serialize;
use tch::{Device, Kind};

use crate::costs::{self, MicroBatchShape, RankPlace};
use crate::mesh::axes::Axis;
use crate::mesh::behind::OwnedBytes;
use crate::mesh::copies::Partners;
use crate::mesh::share::MESSAGES;
use crate::mesh::slices::Slices;
use crate::mesh::team::{self, AxisGroup};
use crate::mesh::{Degrees, GradReduce, Mesh, gather};
use crate::model::{ParamSpec, WeightShards};
use crate::optim::{OptimizerRule, together};
use crate::spec::{PhaseModel, RunSpec};
use crate::state::ownership::{self, ParamShard};
use crate::workers::Workers;
use line::{SharingPosition, levels};

/// Bytes by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryUse {
    /// All weights, as the model reads them; of sharded ones, this rank's shards.
    pub weights: u64,
    /// The weights of this rank's pieces in f32, where the model reads them rounded or in shards.
    pub masters: u64,
    /// Moments of this rank's pieces.
    pub moments: u64,
    /// What the passes of the running micro-batches hold: activations, logits, and gradients that are being computed.
    pub activations: u64,
    /// Gradients of micro-batches: one for each level of a block that waits for a partner, or one for each worker where
    /// every micro-batch is a block.
    pub gradients: u64,
    /// Blocks that are being sent, or wait for this rank itself.
    pub sent: u64,
    /// This rank's pieces of other ranks' blocks, and as a node leader those of owners elsewhere.
    pub received: u64,
    /// Partial sums of this rank's pieces.
    pub sums: u64,
}

impl MemoryUse {
    /// The sum.
    pub fn sum(self) -> u64 {
        let MemoryUse { weights, masters, moments, activations, gradients, sent, received, sums } =
            self;
        weights + masters + moments + activations + gradients + sent + received + sums
    }
}

/// A rank as a position on its line of gradients. Unless ranks share micro-batches, the line has all ranks.
struct RankMemoryUse<'a> {
    /// Its position on the line.
    rank: u32,
    /// The line.
    line: &'a SharingPosition<'a>,
    /// All ranks.
    ranks: &'a Ranks<'a>,
    /// Which weight shards it holds.
    fold: &'a WeightShards,
}

impl RankMemoryUse<'_> {
    /// Its pieces of the gradients that are reduced along the line.
    fn shards(&self) -> impl Iterator<Item = &ParamShard> {
        self.line.own[self.rank as usize].iter().map(|at| &self.line.pieces[*at])
    }

    /// The number of elements in these.
    fn length(&self) -> u64 {
        self.line.owned.of(self.rank) / 4
    }

    /// Its micro-batches, by round.
    fn part(&self) -> &[Range<u64>] {
        &self.ranks.parts[self.rank as usize]
    }
}

/// All ranks in a phase, with everything that is the same for each.
pub struct Ranks<'a> {
    mesh: Mesh,
    grad_reduce: GradReduce,
    workers: Workers,
    /// The micro-batches of each position on a line of gradients, by round.
    parts: Vec<Vec<Range<u64>>>,
    /// By position in the sharing of micro-batches.
    places: Vec<SharingPosition<'a>>,
    /// By position along the folded axis.
    folds: Vec<WeightShards>,
    /// Bytes of a running micro-batch: at most, and from the backward pass of the first layer on.
    activations: [u64; 2],
    /// Bytes of gradients that are sent to and received from the ranks that share a micro-batch.
    between: u64,
    /// Bytes of a micro-batch's gradient that waits in its original dtype: on a device, if not a sum over chunks.
    leaf: Option<u64>,
    /// Largest number of sums that an owner holds between two bucketed rounds.
    pending: u32,
    /// On a device, the Newton-Schulz form: there many tensors are updated together.
    together: Option<NewtonSchulzIterate>,
}

/// How ranks work together, in every phase.
#[derive(Clone, Copy)]
pub struct Parallelism<'a> {
    /// The machine of each rank.
    pub names: &'a [String],
    /// All pieces with their owners.
    pub pieces: &'a [ParamShard],
    /// How many ranks may share a micro-batch.
    pub degrees: Degrees,
    /// Whether all ranks count as one machine (`--no-hierarchical`).
    pub flat: bool,
    /// How micro-batches are assigned.
    pub grad_reduce: GradReduce,
    /// Micro-batches that each rank computes at once.
    pub workers: Workers,
    /// Whether each rank computes on a device.
    pub on_device: bool,
}

impl<'a> Parallelism<'a> {
    /// The ranks in the phase of `step`.
    pub fn at(self, spec: &RunSpec, step: u64) -> Result<Ranks<'a>> {
        let Parallelism { names, pieces, degrees, flat, grad_reduce, workers, on_device } = self;
        let PhaseModel { config, cut, .. } = spec.model_at(step)?;
        let (placed, dtype) = (spec.plan.step(step)?, spec.dtype_at(step));
        let mesh = Mesh::of(names.len() as u32, degrees, *cut);
        let workers = if mesh.together() > 1 { workers.one() } else { workers };
        let parts = team::parts(grad_reduce, mesh.dp, placed.batch / placed.micro_batch)?;
        let streams = grad_reduce == GradReduce::Bucketed && mesh.world() > 1;
        let slices = Slices::new(mesh, pieces, spec.parameters.len());
        let place = |place: u32| {
            let pieces = match mesh.together() {
                1 => Cow::Borrowed(pieces),
                _ => Cow::Owned(slices.pieces(pieces, place)),
            };
            let AxisGroup { nodes, .. } = AxisGroup::data(mesh, names, place, flat)?;
            SharingPosition::new(spec, pieces, nodes, &parts, streams)
        };
        let places = (0..mesh.together()).map(place).collect::<Result<Vec<_>>>()?;
        let fold = |place| WeightShards::new(mesh.tsp, place, &spec.parameters, cut.shards);
        // The first rank also has the last chunk, whose queries see the keys of all others.
        let first = |degree: u32| RankPlace { degree: degree.into(), place: 0 };
        let shape = MicroBatchShape {
            keep: workers.keep(),
            cut: *cut,
            dtype,
            on_device,
            shared: first(mesh.together()),
            folded: first(mesh.tsp),
            ..MicroBatchShape::whole(placed.micro_batch, placed.seq_len.into())
        };
        let activations = costs::of_micro_batch(config, shape)?.activations;
        let after = |round: usize| parts.iter().map(|parts| parts[round].end).max().unwrap_or(0);
        let rounds = 0..parts.first().map_or(0, Vec::len).saturating_sub(1);
        let pending = rounds.map(|round| after(round).count_ones()).max().unwrap_or(0);
        let folds = (0..mesh.tsp).map(fold).collect();
        // What is sent to and received from the ranks that share a micro-batch: the embedding is the largest.
        let embedding = spec.parameters.first().map_or(0, |first| 4 * first.elements());
        let between = if mesh.together() > 1 { 2 * embedding } else { 0 };
        let leaf = (on_device && cut.chunks == 1).then(|| leaf_bytes(spec, dtype));
        let together = on_device.then(|| spec.settings_at(step).newton_schulz);
        Ok(Ranks {
            mesh,
            grad_reduce,
            workers,
            parts,
            places,
            folds,
            activations,
            between,
            leaf,
            pending,
            together,
        })
    }
}

impl Ranks<'_> {
    /// The most that `rank` holds in `step`, which must be in the same phase.
    pub fn holds(&self, spec: &RunSpec, step: u64, rank: u32) -> MemoryUse {
        holds(spec, spec.dtype_at(step), &self.holder(rank))
    }

    /// What `rank` always holds.
    fn holds_always(&self, spec: &RunSpec, step: u64, rank: u32) -> MemoryUse {
        always(spec, spec.dtype_at(step), &self.holder(rank))
    }

    fn holder(&self, rank: u32) -> RankMemoryUse<'_> {
        let mesh = self.mesh;
        RankMemoryUse {
            rank: mesh.place(Axis::Dp, rank),
            line: &self.places[mesh.place(Axis::Sharing, rank) as usize],
            ranks: self,
            fold: &self.folds[mesh.place(Axis::Tsp, rank) as usize],
        }
    }
}

/// The peak memory of `holder`: while it computes micro-batches, when it has computed them, while it updates its
/// pieces, or while new weights are exchanged.
fn holds(spec: &RunSpec, dtype: Dtype, holder: &RankMemoryUse<'_>) -> MemoryUse {
    let always = always(spec, dtype, holder);
    let Ranks { workers, activations: [most, last], between, .. } = holder.ranks;
    let assigned = holder.part().iter().map(|part| part.end - part.start).sum::<u64>();
    let workers = assigned.min(workers.count() as u64);
    let travelling = GradientsInTransit::new(holder);
    let first = MemoryUse {
        activations: workers * most,
        gradients: travelling.waiting[0] + workers * between,
        ..travelling.on(always, 0)
    };
    let last = MemoryUse {
        activations: workers * last,
        gradients: travelling.waiting[1] + workers * between,
        ..travelling.on(always, 1)
    };
    let handing = MemoryUse { gradients: travelling.waiting[2], ..travelling.on(always, 2) };
    let (updating, sharing) = (updating(always, holder), sharing(spec, dtype, always, holder));
    let moments = [first, last, handing, updating, sharing];
    moments.into_iter().max_by_key(|holds| holds.sum()).unwrap_or(always)
}

/// What is always held: the state.
fn always(spec: &RunSpec, dtype: Dtype, holder: &RankMemoryUse<'_>) -> MemoryUse {
    let (mut masters, mut moments) = (0, 0);
    for piece in holder.shards() {
        let bytes = 4 * piece.length() as u64;
        let narrow = spec.parameters[piece.tensor].kind(dtype) != Kind::Float;
        masters += if narrow || holder.fold.cuts(piece.tensor) { bytes } else { 0 };
        moments += bytes * (1 + u64::from(piece.rule.has_second_moment()));
    }
    let held = |(tensor, parameter): (usize, &ParamSpec)| {
        let cut = holder.fold.length(tensor).map(|length| length as u64);
        width(parameter, dtype) * cut.unwrap_or_else(|| parameter.elements())
    };
    let weights = spec.parameters.iter().enumerate().map(held).sum();
    MemoryUse { weights, masters, moments, ..MemoryUse::default() }
}

/// Bytes of an element of a parameter as the model reads it.
fn width(parameter: &ParamSpec, dtype: Dtype) -> u64 {
    parameter.kind(dtype).elt_size_in_bytes() as u64
}

/// Bytes of a micro-batch's gradient as a device computes it; the embedding's is a sum in f32.
fn leaf_bytes(spec: &RunSpec, dtype: Dtype) -> u64 {
    let bytes = |(at, parameter): (usize, &ParamSpec)| {
        parameter.elements() * if at == 0 { 4 } else { width(parameter, dtype) }
    };
    spec.parameters.iter().enumerate().map(bytes).sum()
}

/// While Muon updates matrices, it needs memory for their directions and iterations in addition to the sum.
fn updating(always: MemoryUse, holder: &RankMemoryUse<'_>) -> MemoryUse {
    if let Some(form) = holder.ranks.together {
        let moved = holder.shards().map(|piece| (piece.rule, &piece.shape[..]));
        return MemoryUse { sums: 4 * holder.length() + together::bytes(moved, form), ..always };
    }
    let matrix = |piece: &&ParamShard| !matches!(piece.rule, OptimizerRule::AdamW { .. });
    let matrices = holder.shards().filter(matrix);
    let bytes = matrices.map(|piece| {
        let [.., rows, columns] = piece.shape[..] else { return 0 };
        4 * (rows * columns) as u64
    });
    let mut bytes: Vec<u64> = bytes.collect();
    bytes.sort_unstable();
    // One matrix at a time for each worker.
    let scratch = 4 * bytes.iter().rev().take(holder.ranks.workers.count()).sum::<u64>();
    MemoryUse { sums: 4 * holder.length() + scratch, ..always }
}

/// While new weights are exchanged each rank has its own packed, and receives those of all others. Meanwhile it updates
/// the pieces of its last message, whose gradients are left. In the forward pass of the next step it releases message
/// after message while activations become more, so that the sum stays below one of both.
fn sharing(
    spec: &RunSpec,
    dtype: Dtype,
    always: MemoryUse,
    holder: &RankMemoryUse<'_>,
) -> MemoryUse {
    if holder.ranks.mesh.world() == 1 {
        return always;
    }
    let bytes =
        |piece: &ParamShard| width(&spec.parameters[piece.tensor], dtype) * piece.length() as u64;
    let cut = |piece: &&ParamShard| holder.fold.cuts(piece.tensor);
    let shards: u64 = holder.shards().filter(cut).map(bytes).sum();
    let owned: u64 = holder.shards().map(bytes).sum();
    // Of the shards of its own pieces a rank keeps its share.
    let kept = owned - shards + shards / u64::from(holder.fold.degree());
    let gradients = 4 * holder.length();
    let sums = updating(always, holder).sums - gradients + gradients / MESSAGES as u64;
    MemoryUse { sent: owned, received: always.weights.saturating_sub(kept), sums, ..always }
}

/// What the ranks of a machine will hold, for any command that computes steps.
#[derive(Clone, Copy)]
pub struct MachineDemand {
    /// How many ranks may share a micro-batch.
    pub degrees: Degrees,
    /// Whether all ranks count as one machine (`--no-hierarchical`).
    pub flat: bool,
    /// How micro-batches are assigned.
    pub grad_reduce: GradReduce,
    /// Micro-batches that each rank computes at once.
    pub workers: Workers,
    /// Whether each rank keeps a replica of another one's state.
    pub replicate: bool,
    /// Additional copies of its own state that each rank holds.
    pub copies: u64,
    /// Bytes that these ranks may hold together.
    pub limit: u64,
}

impl MachineDemand {
    /// Bytes of a rank's largest number of copies of its pieces.
    fn copied(self, pieces: &[ParamShard], rank: u32) -> u64 {
        let owned = pieces.iter().filter(|piece| piece.owner == rank);
        owned.map(ParamShard::kept).sum::<u64>().saturating_mul(self.copies)
    }
}

/// Refuses steps that by the formula need more memory than the machine has, since the operating system would kill them
/// without a message. `names` are the machines of all ranks, `me` is this rank; all ranks of its machine count.
///
/// A device reports itself what does not fit, so for a device only a state that is too large alone is refused: the rest
/// depends on documents and on the allocator, and a failure would come only after minutes of initializing weights.
pub fn refuse(
    spec: &RunSpec,
    demand: MachineDemand,
    names: &[String],
    me: u32,
    device: Device,
) -> Result<()> {
    let pieces = ownership::pieces(&spec.parameters, &spec.rules, names.len() as u32);
    let here = (0u32..).zip(names).filter(|(_, name)| **name == names[me as usize]);
    let here: Vec<u32> = here.map(|(rank, _)| rank).collect();
    let MachineDemand { degrees, flat, grad_reduce, workers, replicate, limit, .. } = demand;
    let replicas = if replicate { Partners::new(names).held(&pieces) } else { Vec::new() };
    for (name, first, _) in spec.segments() {
        let (mut all, mut held) = (0u64, MemoryUse::default());
        let on_device = device != Device::Cpu;
        let ways =
            Parallelism { names, pieces: &pieces, degrees, flat, grad_reduce, workers, on_device };
        let ranks = ways.at(spec, first)?;
        if on_device {
            refuse_state(name, ranks.holds_always(spec, first, me), device)?;
            continue;
        }
        for rank in here.iter().copied() {
            let found = ranks.holds(spec, first, rank);
            let replicated = replicas.get(rank as usize).copied().unwrap_or(0);
            let parts = [found.sum(), replicated, demand.copied(&pieces, rank)];
            all = parts.into_iter().fold(all, u64::saturating_add);
            held = if rank == me { found } else { held };
        }
        if all > limit {
            let copies = demand.copied(&pieces, me);
            let fault = too_large(name, all, limit, held, copies, here.len());
            // What is easiest to give up comes first.
            let snapshots = if demand.copies > 1 { "fewer --snapshots, " } else { "" };
            return Err(fault.hint(format!(
                "give {snapshots}--recompute, fewer --workers, smaller micro-batches, more machines, or --grad-reduce bucketed"
            )));
        }
    }
    Ok(())
}

/// Refuses a state that is too large for a device, if its driver reports its memory.
fn refuse_state(phase: &str, state: MemoryUse, device: Device) -> Result<()> {
    let Some(memory) = kernels::device::memory(device).filter(|memory| state.sum() > *memory)
    else {
        return Ok(());
    };
    let MemoryUse { weights, masters, moments, .. } = state;
    Err(Fault::machine("the state of this run needs more memory than the GPU has")
        .at(format!("phase {phase:?}"))
        .found(format!(
            "{} on this rank: weights {}, moments {}",
            size(state.sum()),
            size(weights + masters),
            size(moments)
        ))
        .wanted(format!("less than {}, which activations and gradients share", size(memory)))
        .hint("more ranks, a GPU for each, share moments and master weights; `ztrain plan` tells what each holds"))
}

fn too_large(
    phase: &str,
    needed: u64,
    limit: u64,
    held: MemoryUse,
    copies: u64,
    ranks: usize,
) -> Fault {
    let MemoryUse { weights, masters, moments, activations, gradients, sent, received, sums } =
        held;
    Fault::machine("this run needs more memory than the machine has, or leaves this job")
        .at(format!("phase {phase:?}"))
        .found(format!(
            "{} for {} on this machine; this rank alone: weights {}, moments {}, activations {}, gradients {}, \
             exchanged {}, copies of the state {}",
            size(needed),
            counted(ranks, "rank"),
            size(weights + masters),
            size(moments),
            size(activations),
            size(gradients),
            size(sent + received + sums),
            size(copies)
        ))
        .wanted(format!("at most {}", size(limit)))
}

/// Address space that libtorch and its libraries need at start: with less they crash where they do not check
/// allocations. With 660 MiB one run of seven crashed, from 690 on none of 81.
const ADDRESSES: u64 = 736 << 20;

/// Refuses a limit (`ulimit -v`) under which libtorch would crash. `limits` is the system's report on this process.
pub fn refuse_limit(limits: &str) -> Result<()> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"));
    let limit = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    match limit.filter(|limit| *limit < ADDRESSES) {
        None => Ok(()),
        Some(limit) => Err(Fault::machine("this process may use too little memory for libtorch")
            .at("ulimit -v")
            .found(format!("{} MiB", limit >> 20))
            .wanted(format!("{} MiB and what the run needs", ADDRESSES >> 20))
            .hint("raise `ulimit -v`, or lift it: `ulimit -v unlimited`")),
    }
}

/// Bytes of gradients of a rank's and other ranks' micro-batches during their reduction.
#[derive(Default)]
struct GradientsInTransit {
    /// Gradients that wait for a partner in this rank's tree: while a micro-batch is at the head, in its backward pass,
    /// and when a block is complete and no micro-batch is running.
    waiting: [u64; 3],
    /// Blocks that this rank sends or keeps for itself, at the same times.
    sent: [u64; 3],
    /// Blocks received from other ranks, at the same times.
    received: [u64; 3],
    /// Partial sums of this rank's pieces.
    sums: u64,
}

impl GradientsInTransit {
    fn new(holder: &RankMemoryUse<'_>) -> GradientsInTransit {
        // Each rank has its slice of a gradient that ranks share.
        let all = holder.line.owned.all();
        let leaf = holder.ranks.leaf.unwrap_or(all);
        let alone = holder.ranks.mesh.world() == 1;
        if holder.ranks.grad_reduce == GradReduce::Bucketed && !alone {
            return GradientsInTransit::streaming(holder);
        }
        // Blocks are computed one after the other: complete ones wait; the last one has a sum at each level, the lowest
        // of a single micro-batch.
        let levels: Vec<u64> = holder.part().iter().flat_map(levels).map(u64::from).collect();
        let most = |of: &dyn Fn(u64) -> u64| -> u64 {
            let blocks = (0u64..).zip(&levels);
            let bytes = blocks.map(|(before, level)| all * before * u64::from(alone) + of(*level));
            bytes.max().unwrap_or(0)
        };
        let waiting = |level: u64| if level == 0 { 0 } else { leaf + all * (level - 1) };
        let sum = |level: u64| if level == 0 { leaf } else { all };
        let workers = holder.ranks.workers.count() as u64;
        let several = workers.min(1 << levels.iter().max().unwrap_or(&0));
        let more = all * (several.saturating_sub(1)).div_ceil(2);
        let at_head = most(&waiting) + more;
        let at_end = most(&|level| waiting(level).max(sum(level))) + more;
        let blocks = levels.len() as u64;
        if alone {
            return GradientsInTransit {
                waiting: [at_head, at_end, 0],
                ..GradientsInTransit::default()
            };
        }
        // A block's payloads are filled while its sum is still alive; earlier blocks may still be being sent.
        let left = all * blocks.saturating_sub(1);
        GradientsInTransit {
            waiting: [at_head, at_end, levels.iter().map(|level| sum(*level)).max().unwrap_or(0)],
            sent: [left, left, all * blocks],
            received: [holder.line.received(holder.rank, &holder.line.owned); 3],
            sums: 0,
        }
    }

    /// With buckets: several consecutive stages are sent and received at a time, of which the largest run counts.
    fn streaming(holder: &RankMemoryUse<'_>) -> GradientsInTransit {
        let RankMemoryUse { rank, line, ranks, .. } = holder;
        let (parts, several) = (holder.part(), line.nodes.count() > 1);
        let whole: Vec<u64> = line.buckets.iter().map(OwnedBytes::all).collect();
        let came = line.buckets.iter().map(|bucket| line.received(*rank, bucket));
        let came: Vec<u64> = came.collect();
        // The stages of all rounds follow each other: the last bucket is followed by the first one of the next round.
        let together = |of: &[u64], count: usize| -> u64 {
            let stages = of.len() * parts.len();
            let from =
                |first: usize| (first..stages.min(first + count)).map(|at| of[at % of.len()]);
            (0..stages).map(|first| from(first).sum::<u64>()).max().unwrap_or(0)
        };
        let computed = parts.iter().map(|part| part.end - part.start);
        let workers = ranks.workers.count() as u64;
        let idle = computed.sum::<u64>().min(workers).saturating_sub(1);
        // A worker waiting for its turn keeps its gradients; each bucket is complete before it is sent.
        let bucket = whole.iter().max().copied().unwrap_or(0);
        let waiting = idle * ranks.leaf.unwrap_or_else(|| whole.iter().sum());
        let late = (1 + usize::from(several)) * gather::BEHIND;
        let (sent, received) = (together(&whole, gather::BEHIND), together(&came, late + 1));
        // At the head: the last ones of a round, and the first one of the next round, which is received ahead.
        let left = whole.iter().rev().take(gather::BEHIND).sum();
        let at_head = came.iter().rev().take(late).chain(came.first()).sum();
        GradientsInTransit {
            waiting: [waiting, waiting + bucket, bucket],
            sent: [if parts.len() > 1 { left } else { 0 }, sent, sent],
            received: [at_head, received, received],
            sums: 4 * holder.length() * u64::from(ranks.pending.max(1)),
        }
    }

    /// Adds these to what is always held, at one of the times.
    fn on(&self, always: MemoryUse, time: usize) -> MemoryUse {
        let GradientsInTransit { sent, received, sums, .. } = *self;
        MemoryUse { sent: sent[time], received: received[time], sums, ..always }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_under_which_libtorch_crashes_is_refused() {
        let of = |limit: &str| {
            format!("Limit  Soft  Hard  Units\nMax address space {limit} unlimited bytes\n")
        };
        for fits in [of("unlimited"), of("4294967296"), String::new()] {
            refuse_limit(&fits).unwrap();
        }
        let fault = refuse_limit(&of("512000000")).unwrap_err();
        assert_eq!(fault.class(), contract::Class::Machine);
        assert!(fault.to_string().contains("488 MiB"), "{fault}");
    }
}
