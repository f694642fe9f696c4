//! What a run will need, told before any of it is allocated: memory of each rank by part, bytes sent in a step, the size of
//! a checkpoint, growth of the ledger.
//!
//! Nothing here is measured. Memory is the formula of [`crate::memory`]; the other numbers follow from who owns what and
//! from the blocks of the tree, as the step itself does.

mod sent;

use std::collections::BTreeSet;

use contract::{Digest, Fault, Result};
use mixer::SourceUse;
use serde::Serialize;
use tch::Device;

use crate::checkpoint::{Layout, manifest_bytes};
use crate::ledger::{self, Packed, SourceSums, StepRecord};
use crate::memory::{Holds, Ways};
use crate::mesh::copies::Partners;
use crate::mesh::slices::Slices;
use crate::mesh::team;
use crate::mesh::{Degrees, GradReduce, Mesh, context, copies};
use crate::model::{self, Dealt, Fold};
use crate::optim::balance::Balance;
use crate::optim::guard::Skipped;
use crate::spec::{PhaseModel, RunSpec};
use crate::state::ownership::{self, Piece};
use crate::workers::Workers;
use sent::Sending;
pub use sent::SentInStep;

/// Devices whose memory is known, in GiB; `cpu` is this machine.
/// Sources: AMD Instinct MI300X and MI325X data sheets, NVIDIA H100, H200 and B200 data sheets.
pub const DEVICES: [(&str, u64); 5] =
    [("mi300x", 192), ("mi325x", 256), ("h100", 80), ("h200", 141), ("b200", 180)];

/// The ranks for which a run is planned, and how they work together.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// How many ranks there are.
    pub ranks: u32,
    /// How many of them share a machine; the last machine may have fewer.
    pub ranks_per_node: u32,
    /// Micro-batches that each computes at once, and what is kept of each.
    pub workers: Workers,
    /// How micro-batches are dealt.
    pub grad_reduce: GradReduce,
    /// Whether machines are passed over in exchanges.
    pub flat: bool,
    /// How many ranks may share a micro-batch.
    pub degrees: Degrees,
    /// `cpu`, or one of [`DEVICES`].
    pub device: String,
}

/// What a run needs.
#[derive(Clone, Debug, Serialize)]
pub struct RunNeeds {
    /// How many numbers it trains.
    pub parameters: u64,
    /// How many ranks it is planned for.
    pub ranks: u32,
    /// On so many machines.
    pub machines: u32,
    /// Where it computes.
    pub device: String,
    /// Bytes of memory of a device, or on a CPU of a machine.
    pub device_bytes: u64,
    /// Whether every phase fits into that.
    pub fits: bool,
    /// Each phase.
    pub phases: Vec<PhaseNeeds>,
    /// Steps all of whose text is hidden, as far as the caller looked: [`loader::steps_without_labels`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub without_labels: Vec<u64>,
    /// A checkpoint.
    pub checkpoint: CheckpointNeeds,
    /// What `ztrain --replicate` would take besides.
    pub replicas: ReplicaNeeds,
    /// Bytes of the ledger when the run is done.
    pub ledger_bytes: u64,
}

/// What the steps of one phase need.
#[derive(Clone, Debug, Serialize)]
pub struct PhaseNeeds {
    /// Its name.
    pub name: String,
    /// Its steps.
    pub steps: u64,
    /// Sequences in its first step.
    pub batch: u64,
    /// Sequences in a micro-batch.
    pub micro_batch: u64,
    /// Tokens in a sequence.
    pub seq_len: u32,
    /// The rank that holds most.
    pub largest_rank: u32,
    /// What it holds at most, in bytes.
    pub memory: Holds,
    /// What the ranks of the fullest machine hold together, in bytes.
    pub machine_bytes: u64,
    /// How many ranks share a micro-batch.
    pub context: u32,
    /// How many of them hold its weights for each other.
    pub folded_ranks: u32,
    /// How much more attention the rank with most of it computes than the mean of those that share a micro-batch, of sequences
    /// that are one document each: 0 is none.
    pub uneven: f64,
    /// Bytes that all ranks together send in its first step, along the data-parallel axis.
    pub sent: SentInStep,
    /// The same between ranks that share micro-batches, along the context axis: with every sequence one document.
    pub shared: u64,
    /// Whether all of that stays within machines.
    pub shared_within_machines: bool,
    /// The same of shards of weights, along the folded axis.
    pub folded: u64,
    /// Whether all of that stays within machines.
    pub folded_within_machines: bool,
    /// Operations of its first step: at most, with every token routed to an expert and every sequence one document.
    pub model_flops: f64,
    /// Bytes that its first step adds to the ledger, about.
    pub ledger_bytes: u64,
}

/// What a checkpoint takes. Only who writes what depends on the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CheckpointNeeds {
    /// Bytes of its tensors; headers add some kilobytes.
    pub bytes: u64,
    /// Files.
    pub files: u64,
    /// Of the files, those that the rank with most of them writes.
    pub most_files: u64,
    /// Bytes of the manifest, which is all that is read before it is known which files are needed.
    pub manifest: u64,
    /// Of the bytes, those that the rank with most of them writes.
    pub largest_part: u64,
    /// Bytes of the copies that the ranks of the fullest machine hold in its memory while one is written, pinned where they
    /// compute on devices.
    pub copies: u64,
}

/// What copies of the state in the memory of other ranks take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ReplicaNeeds {
    /// Bytes of the rank that holds most of them.
    pub largest_rank: u64,
    /// Bytes that all ranks together send for them in each step.
    pub sent: u64,
}

/// Plans `spec` for `fleet`; allocates no tensor.
pub fn needs(spec: &RunSpec, fleet: &Fleet) -> Result<RunNeeds> {
    let names = machines(fleet);
    let pieces = ownership::pieces(&spec.parameters, &spec.rules, fleet.ranks);
    let device_bytes = device_bytes(&fleet.device)?;
    let phases = spec.segments().into_iter().map(|(name, first, last)| {
        let shares = Shares { names: &names, pieces: &pieces };
        phase_needs(spec, fleet, &shares, (name.to_owned(), first, last))
    });
    let phases = phases.collect::<Result<Vec<_>>>()?;
    let checkpoint = checkpoint(spec, &pieces, fleet)?;
    let fits = phases.iter().all(|phase| match fleet.device.as_str() {
        "cpu" => phase.machine_bytes + checkpoint.copies <= device_bytes,
        _ => phase.memory.sum() <= device_bytes,
    });
    Ok(RunNeeds {
        parameters: spec.parameters.iter().map(model::ParamSpec::elements).sum(),
        ranks: fleet.ranks,
        machines: fleet.ranks.div_ceil(fleet.ranks_per_node),
        device: fleet.device.clone(),
        device_bytes,
        fits,
        ledger_bytes: phases.iter().map(|phase| phase.steps * phase.ledger_bytes).sum(),
        phases,
        without_labels: Vec::new(),
        checkpoint,
        replicas: replicas(&pieces, &names),
    })
}

fn replicas(pieces: &[Piece], names: &[String]) -> ReplicaNeeds {
    let partners = Partners::new(names);
    let held = partners.all_held(pieces).into_iter();
    let sent = if names.len() == 1 { 0 } else { copies::sent(pieces) };
    ReplicaNeeds { largest_rank: held.max().unwrap_or(0), sent }
}

impl RunNeeds {
    /// Holds what each rank needs against another device's memory.
    pub fn place_on(&mut self, device: &str, bytes: u64) {
        device.clone_into(&mut self.device);
        self.device_bytes = bytes;
        self.fits = self.phases.iter().all(|phase| phase.memory.sum() <= bytes);
    }
}

/// Which ranks are where, and own what.
struct Shares<'a> {
    names: &'a [String],
    pieces: &'a [Piece],
}

/// The machine of each rank.
fn machines(fleet: &Fleet) -> Vec<String> {
    (0..fleet.ranks).map(|rank| (rank / fleet.ranks_per_node).to_string()).collect()
}

fn device_bytes(device: &str) -> Result<u64> {
    if device == "cpu" {
        return Ok(store::memory::limit());
    }
    let known = DEVICES.iter().find(|(name, _)| *name == device);
    known.map(|(_, gib)| gib << 30).ok_or_else(|| {
        let names: Vec<&str> = DEVICES.iter().map(|(name, _)| *name).collect();
        Fault::usage("the memory of this device is not known")
            .at("--device")
            .found(device)
            .wanted(format!("cpu, {}", names.join(", ")))
    })
}

fn phase_needs(
    spec: &RunSpec,
    fleet: &Fleet,
    shares: &Shares<'_>,
    (name, first, last): (String, u64, u64),
) -> Result<PhaseNeeds> {
    let step = spec.plan.step(first)?;
    let (mut largest_rank, mut most) = (0, Holds::default());
    let mut machine_bytes = vec![0; fleet.ranks.div_ceil(fleet.ranks_per_node) as usize];
    let Fleet { degrees, flat, grad_reduce, workers, .. } = *fleet;
    let Shares { names, pieces } = *shares;
    let on_device = fleet.device != "cpu";
    let ways = Ways { names, pieces, degrees, flat, grad_reduce, workers, on_device };
    let ranks = ways.at(spec, first)?;
    for rank in 0..fleet.ranks {
        let holds = ranks.holds(spec, first, rank);
        machine_bytes[(rank / fleet.ranks_per_node) as usize] += holds.sum();
        if holds.sum() > most.sum() {
            (largest_rank, most) = (rank, holds);
        }
    }
    let PhaseModel { config, cut, .. } = spec.model_at(first)?;
    let mesh = Mesh::of(fleet.ranks, degrees, *cut);
    let micro_batches = step.batch / step.micro_batch;
    let tokens = step.batch * u64::from(step.seq_len);
    let pairs = step.batch * model::causal_pairs(&[0], step.seq_len);
    let routed = vec![tokens; config.num_hidden_layers as usize];
    Ok(PhaseNeeds {
        name,
        steps: last + 1 - first,
        batch: step.batch,
        micro_batch: step.micro_batch,
        seq_len: step.seq_len,
        largest_rank,
        memory: most,
        machine_bytes: machine_bytes.into_iter().max().unwrap_or(0),
        context: mesh.together(),
        folded_ranks: mesh.tsp,
        uneven: uneven(mesh, cut.chunks, u64::from(step.seq_len)),
        sent: sent(spec, fleet, (shares, mesh), first)?,
        shared: micro_batches * shared(spec, fleet, (shares, mesh), first)?,
        shared_within_machines: mesh.within_machines(mesh.together(), fleet.ranks_per_node),
        folded: micro_batches * folded(spec, fleet, mesh, first)?,
        folded_within_machines: mesh.within_machines(mesh.tsp, fleet.ranks_per_node),
        model_flops: model::flops(config, tokens, &routed, pairs),
        ledger_bytes: ledger_bytes(spec, first)?,
    })
}

fn uneven(mesh: Mesh, chunks: u64, seq_len: u64) -> f64 {
    let dealt = Dealt { chunks, degree: u64::from(mesh.together()), place: 0 };
    let pairs = dealt.pairs(seq_len / chunks);
    let most = pairs.iter().copied().max().unwrap_or(0);
    most as f64 * pairs.len() as f64 / pairs.iter().sum::<u64>() as f64 - 1.0
}

/// What ranks that share a micro-batch send each other for one: operands of layers, and gradients of their chunks.
fn shared(
    spec: &RunSpec,
    fleet: &Fleet,
    (shares, mesh): (&Shares<'_>, Mesh),
    first: u64,
) -> Result<u64> {
    if mesh.together() == 1 {
        return Ok(0);
    }
    let (PhaseModel { config, cut, .. }, step) = (spec.model_at(first)?, spec.plan.step(first)?);
    let (degree, options) = (u64::from(mesh.together()), fleet.workers.options().cut(*cut));
    let rows = (step.micro_batch, u64::from(step.seq_len));
    let layers = model::shared_bytes(config, rows, degree, options, spec.dtype_at(first));
    let slices = Slices::new(mesh, shares.pieces, spec.parameters.len());
    let dealt = Dealt { chunks: cut.chunks, degree, place: 0 };
    Ok(layers + context::gradient_bytes(&slices, &spec.parameters, dealt))
}

/// What ranks that hold weights for each other send for a micro-batch: each shard from its holder to the others on its line.
fn folded(spec: &RunSpec, fleet: &Fleet, mesh: Mesh, first: u64) -> Result<u64> {
    let (dtype, keep) = (spec.dtype_at(first), fleet.workers.options().keep);
    let line = model::folded_bytes(&spec.parameters, u64::from(mesh.tsp), keep, dtype);
    Ok(u64::from(mesh.cp) * line)
}

/// What all ranks together send in `step`.
fn sent(
    spec: &RunSpec,
    fleet: &Fleet,
    (shares, mesh): (&Shares<'_>, Mesh),
    step: u64,
) -> Result<SentInStep> {
    let (placed, dtype) = (spec.plan.step(step)?, spec.dtype_at(step));
    let parts = team::parts(fleet.grad_reduce, mesh.dp, placed.batch / placed.micro_batch)?;
    let folds = |tensor: usize| mesh.tsp > 1 && spec.parameters[tensor].sharding.is_some();
    let ranks = fleet.ranks as usize;
    let (mut weights, mut lengths) = (vec![0; ranks], vec![0; ranks]);
    for piece in shares.pieces {
        let (owner, length) = (piece.owner as usize, piece.length() as u64);
        lengths[owner] += 4 * length;
        if !folds(piece.tensor) {
            // New weights travel as the model reads them.
            let width = spec.parameters[piece.tensor].kind(dtype).elt_size_in_bytes() as u64;
            weights[owner] += width * length;
        }
    }
    let sending = Sending {
        mesh,
        ranks_per_node: fleet.ranks_per_node,
        flat: fleet.flat,
        parts: &parts,
        lengths: &lengths,
        weights: &weights,
        shards: &shards(spec, shares, mesh, step)?,
    };
    sending.sum()
}

/// Bytes of new weights of which each rank is sent its shards: by owner and place along the folded axis.
fn shards(spec: &RunSpec, shares: &Shares<'_>, mesh: Mesh, step: u64) -> Result<Vec<Vec<u64>>> {
    let (dtype, shards) = (spec.dtype_at(step), spec.model_at(step)?.cut.shards);
    let fold = Fold::new(mesh.tsp, 0, &spec.parameters, shards);
    let places: Vec<Fold> = (0..mesh.tsp).map(|place| fold.at(place)).collect();
    let mut found = vec![vec![0; mesh.tsp as usize]; mesh.world() as usize];
    for piece in shares.pieces.iter().filter(|piece| fold.cuts(piece.tensor)) {
        let width = spec.parameters[piece.tensor].kind(dtype).elt_size_in_bytes() as u64;
        for (fold, sum) in places.iter().zip(&mut found[piece.owner as usize]) {
            let common = fold.common(piece.tensor, piece.first..piece.first + piece.length());
            *sum += width * common.iter().map(|common| common.count() as u64).sum::<u64>();
        }
    }
    Ok(found)
}

/// Each bundle has a file of weights and one of moments; the routers' balance and the manifest have one each.
fn checkpoint(spec: &RunSpec, pieces: &[Piece], fleet: &Fleet) -> Result<CheckpointNeeds> {
    let mut kept = vec![0; fleet.ranks as usize];
    let mut own = vec![BTreeSet::new(); fleet.ranks as usize];
    for piece in pieces {
        kept[piece.owner as usize] += piece.kept();
        own[piece.owner as usize].insert(piece.bundle);
    }
    let machines = kept.chunks(fleet.ranks_per_node as usize);
    let copies = machines.map(|ranks| ranks.iter().sum::<u64>()).max().unwrap_or(0);
    let of_layer = |Balance { bias, first, second }: &Balance| {
        4 * (bias.len() + first.len() + second.len()) as u64
    };
    let balance: u64 = spec.balance().iter().map(of_layer).sum();
    // A model without routers has no such file.
    let others = 1 + u64::from(balance > 0);
    let bundles = pieces.last().map_or(0, |piece| piece.bundle as u64 + 1);
    // The routers' balance and the manifest are rank 0's.
    let files =
        (0u32..).zip(&own).map(|(rank, own)| 2 * own.len() as u64 + others * u64::from(rank == 0));
    Ok(CheckpointNeeds {
        bytes: pieces.iter().map(Piece::kept).sum::<u64>() + balance,
        files: 2 * bundles + others,
        most_files: files.max().unwrap_or(0),
        manifest: manifest_bytes(&Layout::new(spec, Device::Cpu), pieces, spec.plan.steps())?,
        largest_part: kept.iter().copied().max().unwrap_or(0),
        copies,
    })
}

/// The length of a ledger line like that of `step`: every array is as long as it will be, its numbers are about as long. Each
/// micro-batch adds as much to it, so there need not be a number for all of them.
fn ledger_bytes(spec: &RunSpec, step: u64) -> Result<u64> {
    let placed = spec.plan.step(step)?;
    let (one, two) = (line_of(spec, step, 1)?, line_of(spec, step, 2)?);
    Ok(one + (placed.batch / placed.micro_batch - 1) * (two - one))
}

/// The same as if the step had so many micro-batches.
fn line_of(spec: &RunSpec, step: u64, micro_batches: usize) -> Result<u64> {
    let (placed, config) = (spec.plan.step(step)?, &spec.model_at(step)?.config);
    let tokens = placed.batch * u64::from(placed.seq_len);
    let labels = placed.micro_batch * u64::from(placed.seq_len);
    let router = |classes: usize| vec![tokens / classes.max(1) as u64; classes];
    let words = |count: usize| Packed(vec![u64::MAX; count]);
    let guard = &spec.settings.guard;
    let layers = ledger::layers(&spec.names()).len();
    let source = |used: &SourceUse| {
        let name = spec.plan.sources()[used.source].name.clone();
        (name, SourceSums { labels: tokens, loss: words(1) })
    };
    let record = StepRecord {
        kind: "step".to_owned(),
        step,
        phase: spec.plan.phases()[placed.phase].name.clone(),
        batch_digest: Digest(u128::MAX),
        label_count: tokens,
        loss: std::f64::consts::PI,
        micro_batch_labels: vec![labels; micro_batches],
        micro_batch_losses: words(micro_batches),
        sources: spec.plan.phases()[placed.phase].uses.iter().map(source).collect(),
        tokens_per_expert: model::router_classes(config).into_iter().map(router).collect(),
        micro_batch_grad_checksums: words(micro_batches),
        grad_checksums: words(spec.parameters.len()),
        norm: words(1),
        layer_gradient_norms: words(layers),
        clip_threshold: guard.clip.is_some().then(|| words(1)),
        skipped: guard.skip.map(|_| Skipped::No),
        lr: words(1),
        layer_update_norms: words(layers),
        weight_checksums: words(spec.parameters.len()),
        state_digest: Digest(u128::MAX),
        curriculum: None,
    };
    let line = serde_json::to_string(&record).map_err(|error| Fault::bug(error.to_string()))?;
    // `,"chain":"..."` and the end of the line.
    Ok(line.len() as u64 + 44)
}
