//! What a run will need, reported before anything is allocated: memory of each rank by part, bytes sent in a step, the
//! size of a checkpoint, growth of the ledger.
//!
//! Nothing here is measured. Memory is the formula of [`trainer::memory`]; the other numbers follow from the ownership
//! of pieces and from the blocks of the tree, as in a step.

mod sent;
mod shared;

use std::collections::BTreeSet;

use contract::{Digest, Fault, Result};
use mixer::SourceUse;
use serde::Serialize;
use tch::Device;

pub use sent::SentInStep;
use sent::SentInputs;
use trainer::checkpoint::{StateLayout, manifest_bytes};
use trainer::costs::{self, MicroBatchShape, RankPlace};
use trainer::ledger::{self, Packed, SourceSums, StepRecord};
use trainer::memory::{MemoryUse, Parallelism};
use trainer::mesh::copies::Partners;
use trainer::mesh::slices::Slices;
use trainer::mesh::team;
use trainer::mesh::{Degrees, GradReduce, Mesh, copies};
use trainer::model::{self, Assignment, WeightShards, ZayaConfig};
use trainer::optim::balance::RouterBalance;
use trainer::optim::guard::Skipped;
use trainer::spec::{PhaseModel, RunSpec};
use trainer::state::ownership::{self, ParamShard};
use trainer::workers::Workers;

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
    /// Micro-batches that each rank computes at once, and activation checkpointing.
    pub workers: Workers,
    /// How micro-batches are assigned.
    pub grad_reduce: GradReduce,
    /// Whether all ranks count as one machine in exchanges (`--no-hierarchical`).
    pub flat: bool,
    /// How many ranks may share a micro-batch.
    pub degrees: Degrees,
    /// `cpu`, or one of [`DEVICES`].
    pub device: String,
}

/// What a run needs.
#[derive(Clone, Debug, Serialize)]
pub struct RunNeeds {
    /// The number of trainable parameters.
    pub parameters: u64,
    /// How many of them compute a token: of the experts those that it is routed to.
    pub active_parameters: u64,
    /// The number of ranks in the plan.
    pub ranks: u32,
    /// The number of machines.
    pub machines: u32,
    /// The device of each rank.
    pub device: String,
    /// Memory of a device, or of a machine with CPUs, in bytes.
    pub device_bytes: u64,
    /// Whether every phase fits into that memory.
    pub fits: bool,
    /// Each phase.
    pub phases: Vec<PhaseNeeds>,
    /// Steps without any label, as far as the caller looked: [`loader::steps_without_labels`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub without_labels: Vec<u64>,
    /// The last step whose data is fixed, where a mix reacts to the loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fixed_until: Option<u64>,
    /// A checkpoint.
    pub checkpoint: CheckpointNeeds,
    /// What `ztrain --replicate` would add.
    pub replicas: ReplicaNeeds,
    /// Bytes of the ledger at the end of the run.
    pub ledger_bytes: u64,
}

/// What the steps of one phase need.
#[derive(Clone, Debug, Serialize)]
pub struct PhaseNeeds {
    /// Its name.
    pub name: String,
    /// Its first step.
    pub first_step: u64,
    /// How many steps it has.
    pub steps: u64,
    /// Sequences in its first step.
    pub batch: u64,
    /// Sequences in a micro-batch.
    pub micro_batch: u64,
    /// Tokens in a sequence.
    pub seq_len: u32,
    /// The rank that needs most memory.
    pub largest_rank: u32,
    /// Its peak memory, in bytes.
    pub memory: MemoryUse,
    /// Memory of all ranks on the fullest machine, in bytes.
    pub machine_bytes: u64,
    /// How many ranks share a micro-batch.
    pub context: u32,
    /// How many of them shard its weights.
    pub folded_ranks: u32,
    /// How much more attention the busiest rank computes than the mean of the ranks that share a micro-batch, if every
    /// sequence is one document: 0 if even.
    pub uneven: f64,
    /// Bytes that all ranks together send in its first step, along the data-parallel axis.
    pub sent: SentInStep,
    /// The same between ranks that share micro-batches, along the context axis, if every sequence is one document.
    pub shared: u64,
    /// Whether these transfers stay within machines.
    pub shared_within_machines: bool,
    /// The same for weight shards, along the folded axis.
    pub folded: u64,
    /// Whether these transfers stay within machines.
    pub folded_within_machines: bool,
    /// Model FLOPs of its first step, at most: with every token routed to an expert and every sequence one document.
    pub model_flops: f64,
    /// About how many bytes its first step adds to the ledger.
    pub ledger_bytes: u64,
}

/// What a checkpoint needs. Only the writers of its files depend on the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CheckpointNeeds {
    /// Bytes of its tensors; headers add some kilobytes.
    pub bytes: u64,
    /// The number of files.
    pub files: u64,
    /// The most files that a rank writes.
    pub most_files: u64,
    /// Bytes of the manifest, which alone is read to find out which files are needed.
    pub manifest: u64,
    /// The most bytes that a rank writes.
    pub largest_part: u64,
    /// Bytes of the copies in main memory on the fullest machine while a checkpoint is written; pinned if the ranks
    /// compute on devices.
    pub copies: u64,
}

/// What replicas of the state in other ranks' memory need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ReplicaNeeds {
    /// Bytes of the rank that holds most replicas.
    pub largest_rank: u64,
    /// Bytes that all ranks together send for replicas in each step.
    pub sent: u64,
}

/// Plans `spec` for `fleet`; allocates no tensor.
pub fn needs(spec: &RunSpec, fleet: &Fleet) -> Result<RunNeeds> {
    let names = machines(fleet);
    let pieces = ownership::pieces(&spec.parameters, &spec.rules, fleet.ranks);
    let device_bytes = device_bytes(&fleet.device)?;
    let phases = spec.segments().into_iter().map(|(name, first, last)| {
        let shares = Shares { names: &names, pieces: &pieces };
        phase_needs(spec, fleet, &shares, name.to_owned(), first, last)
    });
    let phases = phases.collect::<Result<Vec<_>>>()?;
    let checkpoint = checkpoint(spec, &pieces, fleet)?;
    let fits = phases.iter().all(|phase| match fleet.device.as_str() {
        "cpu" => phase.machine_bytes + checkpoint.copies <= device_bytes,
        _ => phase.memory.sum() <= device_bytes,
    });
    Ok(RunNeeds {
        parameters: spec.parameters.iter().map(model::ParamSpec::elements).sum(),
        active_parameters: model::active_parameters(spec.config(), &spec.parameters),
        ranks: fleet.ranks,
        machines: fleet.ranks.div_ceil(fleet.ranks_per_node),
        device: fleet.device.clone(),
        device_bytes,
        fits,
        ledger_bytes: phases.iter().map(|phase| phase.steps * phase.ledger_bytes).sum(),
        phases,
        without_labels: Vec::new(),
        fixed_until: Some(spec.plan.fixed_until()).filter(|last| *last < spec.plan.steps()),
        checkpoint,
        replicas: replicas(&pieces, &names),
    })
}

fn replicas(pieces: &[ParamShard], names: &[String]) -> ReplicaNeeds {
    let partners = Partners::new(names);
    let held = partners.held(pieces).into_iter();
    let sent = if names.len() == 1 { 0 } else { copies::sent(pieces) };
    ReplicaNeeds { largest_rank: held.max().unwrap_or(0), sent }
}

impl RunNeeds {
    /// Compares the needs of each rank with another device's memory.
    pub fn place_on(&mut self, device: &str, bytes: u64) {
        device.clone_into(&mut self.device);
        self.device_bytes = bytes;
        self.fits = self.phases.iter().all(|phase| phase.memory.sum() <= bytes);
    }
}

/// The machine of each rank, and all pieces with their owners.
struct Shares<'a> {
    names: &'a [String],
    pieces: &'a [ParamShard],
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
    name: String,
    first: u64,
    last: u64,
) -> Result<PhaseNeeds> {
    let step = spec.plan.step(first)?;
    let (mut largest_rank, mut most) = (0, MemoryUse::default());
    let mut machine_bytes = vec![0; fleet.ranks.div_ceil(fleet.ranks_per_node) as usize];
    let Fleet { degrees, flat, grad_reduce, workers, .. } = *fleet;
    let Shares { names, pieces } = *shares;
    let on_device = fleet.device != "cpu";
    let ways = Parallelism { names, pieces, degrees, flat, grad_reduce, workers, on_device };
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
    let pairs = step.batch * model::attended_pairs(config, &[0], step.seq_len);
    let routed = tokens * config.num_experts_per_tok as u64;
    let routed = vec![routed; config.num_hidden_layers as usize];
    Ok(PhaseNeeds {
        name,
        first_step: first,
        steps: last + 1 - first,
        batch: step.batch,
        micro_batch: step.micro_batch,
        seq_len: step.seq_len,
        largest_rank,
        memory: most,
        machine_bytes: machine_bytes.into_iter().max().unwrap_or(0),
        context: mesh.together(),
        folded_ranks: mesh.tsp,
        uneven: uneven(config, mesh, cut.chunks, step.seq_len),
        sent: sent(spec, fleet, shares, mesh, first)?,
        shared: micro_batches * shared_bytes(spec, fleet, shares, mesh, first)?,
        shared_within_machines: shared::within_machines(
            mesh,
            mesh.together(),
            fleet.ranks_per_node,
        ),
        folded: micro_batches * folded(spec, fleet, mesh, first)?,
        folded_within_machines: shared::within_machines(mesh, mesh.tsp, fleet.ranks_per_node),
        model_flops: costs::flops(config, tokens, &routed, pairs)?,
        ledger_bytes: ledger_bytes(spec, first)?,
    })
}

fn uneven(config: &ZayaConfig, mesh: Mesh, chunks: u64, seq_len: u32) -> f64 {
    let dealt = Assignment { chunks, degree: u64::from(mesh.together()), place: 0 };
    let pairs = dealt.pairs(config, &[0], seq_len);
    let (most, all) = (pairs.iter().copied().max().unwrap_or(0), pairs.iter().sum::<u64>());
    // Linear attention has no pairs.
    if all == 0 { 0.0 } else { most as f64 * pairs.len() as f64 / all as f64 - 1.0 }
}

/// A micro-batch of the phase that begins with step `first`, on one rank.
fn shape(spec: &RunSpec, fleet: &Fleet, first: u64) -> Result<MicroBatchShape> {
    let step = spec.plan.step(first)?;
    Ok(MicroBatchShape {
        keep: fleet.workers.keep(),
        cut: spec.model_at(first)?.cut,
        dtype: spec.dtype_at(first),
        ..MicroBatchShape::whole(step.micro_batch, step.seq_len.into())
    })
}

/// Bytes that the ranks of a shared micro-batch send each other: operands of layers, and gradients of chunks.
fn shared_bytes(
    spec: &RunSpec,
    fleet: &Fleet,
    shares: &Shares<'_>,
    mesh: Mesh,
    first: u64,
) -> Result<u64> {
    if mesh.together() == 1 {
        return Ok(0);
    }
    let PhaseModel { config, cut, .. } = spec.model_at(first)?;
    let (shape, degree) = (shape(spec, fleet, first)?, u64::from(mesh.together()));
    let sent = |place| {
        let shared = RankPlace { degree, place };
        costs::of_micro_batch(config, MicroBatchShape { shared, ..shape }).map(|one| one.operands)
    };
    let layers = (0..degree).map(sent).sum::<Result<u64>>()?;
    let slices = Slices::new(mesh, shares.pieces, spec.parameters.len());
    let dealt = Assignment { chunks: cut.chunks, degree, place: 0 };
    Ok(layers + shared::gradient_bytes(&slices, &spec.parameters, dealt))
}

/// Bytes of weight shards for a micro-batch: each shard is sent by its holder to the others on its line.
fn folded(spec: &RunSpec, fleet: &Fleet, mesh: Mesh, first: u64) -> Result<u64> {
    if mesh.tsp == 1 {
        return Ok(0);
    }
    let (config, degree) = (&spec.model_at(first)?.config, u64::from(mesh.tsp));
    let shape = shape(spec, fleet, first)?;
    let sent = |place| {
        let folded = RankPlace { degree, place };
        costs::of_micro_batch(config, MicroBatchShape { folded, ..shape }).map(|one| one.shards)
    };
    Ok(u64::from(mesh.cp) * (0..degree).map(sent).sum::<Result<u64>>()?)
}

/// Bytes that all ranks together send in `step`.
fn sent(
    spec: &RunSpec,
    fleet: &Fleet,
    shares: &Shares<'_>,
    mesh: Mesh,
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
            // New weights are sent in the dtype in which the model reads them.
            let width = spec.parameters[piece.tensor].kind(dtype).elt_size_in_bytes() as u64;
            weights[owner] += width * length;
        }
    }
    let sending = SentInputs {
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

/// Bytes of new weights that are sharded: by owner and position along the folded axis.
fn shards(spec: &RunSpec, shares: &Shares<'_>, mesh: Mesh, step: u64) -> Result<Vec<Vec<u64>>> {
    let (dtype, shards) = (spec.dtype_at(step), spec.model_at(step)?.cut.shards);
    let fold = WeightShards::new(mesh.tsp, 0, &spec.parameters, shards);
    let places: Vec<WeightShards> = (0..mesh.tsp).map(|place| fold.at(place)).collect();
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

/// Each bundle has a file of weights and one of moments; the routers' biases and the manifest have one each.
fn checkpoint(spec: &RunSpec, pieces: &[ParamShard], fleet: &Fleet) -> Result<CheckpointNeeds> {
    let mut kept = vec![0; fleet.ranks as usize];
    let mut own = vec![BTreeSet::new(); fleet.ranks as usize];
    for piece in pieces {
        kept[piece.owner as usize] += piece.kept();
        own[piece.owner as usize].insert(piece.bundle);
    }
    let machines = kept.chunks(fleet.ranks_per_node as usize);
    let copies = machines.map(|ranks| ranks.iter().sum::<u64>()).max().unwrap_or(0);
    let of_layer = |RouterBalance { bias, first, second }: &RouterBalance| {
        4 * (bias.len() + first.len() + second.len()) as u64
    };
    let balance: u64 = spec.balance().iter().map(of_layer).sum();
    // A model without routers has no such file.
    let others = 1 + u64::from(balance > 0);
    let bundles = pieces.last().map_or(0, |piece| piece.bundle as u64 + 1);
    // Rank 0 writes the routers' biases and the manifest.
    let files =
        (0u32..).zip(&own).map(|(rank, own)| 2 * own.len() as u64 + others * u64::from(rank == 0));
    Ok(CheckpointNeeds {
        bytes: pieces.iter().map(ParamShard::kept).sum::<u64>() + balance,
        files: 2 * bundles + others,
        most_files: files.max().unwrap_or(0),
        manifest: manifest_bytes(&StateLayout::new(spec, Device::Cpu), pieces, spec.plan.steps())?,
        largest_part: kept.iter().copied().max().unwrap_or(0),
        copies,
    })
}

/// The length of a ledger line like that of `step`: its arrays have their real lengths, its numbers typical ones. Each
/// micro-batch adds the same length, so two lines suffice.
fn ledger_bytes(spec: &RunSpec, step: u64) -> Result<u64> {
    let placed = spec.plan.step(step)?;
    let (one, two) = (line_of(spec, step, 1)?, line_of(spec, step, 2)?);
    Ok(one + (placed.batch / placed.micro_batch - 1) * (two - one))
}

/// The length of a line with `micro_batches` micro-batches.
fn line_of(spec: &RunSpec, step: u64, micro_batches: usize) -> Result<u64> {
    let (placed, config) = (spec.plan.step(step)?, &spec.model_at(step)?.config);
    let tokens = placed.batch * u64::from(placed.seq_len);
    let labels = placed.micro_batch * u64::from(placed.seq_len);
    let routed = tokens * config.num_experts_per_tok as u64;
    let router = |classes: usize| vec![routed / classes.max(1) as u64; classes];
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
        z_loss: (config.z_loss > 0.0).then(|| words(1)),
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
        mix_weights: None,
        curriculum: None,
    };
    let line = serde_json::to_string(&record).map_err(|error| Fault::bug(error.to_string()))?;
    // `,"chain":"..."` and the end of the line.
    Ok(line.len() as u64 + 44)
}
