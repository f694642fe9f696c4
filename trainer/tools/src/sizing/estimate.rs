//! Estimates the time of a step on a cluster, part by part.
//!
//! ```text
//! micro-batch   each matmul by the curve of its operations, attention by its own, the rest by bandwidth       x rounds
//! exactness     checksums of each gradient, and of the sum
//! optimizer     the slowest owner: Newton-Schulz by the curve of f32 matmuls, the rest by bandwidth, with checksums
//!               of the state
//! exchange      bytes of `plan` by tier over the tier's bandwidth; gradients overlap with the last backward pass and
//!               with waiting; packing and unpacking by bandwidth; where ranks share micro-batches, how long they
//!               wait for each other (see `standing`); and for the slowest rank, a measured share of the computation
//! ```
//!
//! Not included: reading batches, which is hidden, and, where `[memory]` begins above 4 KB, the fixed costs of calls.

use contract::Result;
use curriculum::Dtype;
use kernels::tree::blocks;
use serde::Serialize;

use super::Curve;
use super::cluster::{Cluster, NetworkLink};
use super::shapes::of_newton_schulz;
pub use super::standing::PlannedRun;
use super::standing::{self, RankArrangement};
use super::{faults, traffic};
use crate::plan::{CheckpointNeeds, PhaseNeeds, SentInStep};
use trainer::costs::{self, MicroBatchShape};
use trainer::mesh::GradReduce;
use trainer::mesh::share::MESSAGES;
use trainer::model::{ActivationCheckpointing, Cut, ParamSpec};
use trainer::optim::OptimizerRule;
use trainer::state::ownership::{self, ParamShard};
use trainer::timing::{EXACTNESS, PARTS, StepPart};

/// The time of a step in a phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepTime {
    /// The phase.
    pub phase: String,
    /// The step, from which on its batch or dtype holds.
    pub first_step: u64,
    /// Micro-batches that the busiest rank computes, and in how many rounds: one micro-batch per worker, or per rank.
    pub micro_batches: u64,
    /// See above.
    pub rounds: u64,
    /// Ranks without a micro-batch.
    pub idle_ranks: u64,
    /// Seconds of each part on the busiest rank, by the names of [`PARTS`]; exchanges only where nothing hides them.
    pub parts: Vec<(&'static str, f64)>,
    /// Seconds of all parts.
    pub seconds: f64,
    /// Seconds of the parts that only serve verification.
    pub exactness: f64,
    /// Seconds of gradient reduction, and how many are hidden by computation or by waiting for the slowest rank.
    pub gradients: f64,
    /// See above.
    pub hidden: f64,
    /// Seconds in which new weights are sent, of which the update and the next forward pass hide some.
    pub weights: f64,
    /// Model FLOPs of a step.
    pub model_flops: f64,
    /// Model FLOPs over what the highest rate of matmuls would allow in the same time.
    pub utilisation: f64,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Days of the whole phase without failures.
    pub days: f64,
}

/// The cost of checkpoints and failures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CheckpointCost {
    /// Seconds for which a checkpoint stops the run: the copy from the device that owns most.
    pub stall: f64,
    /// Seconds to write it during training.
    pub write: f64,
    /// Mean seconds between failures.
    pub between: f64,
    /// The best number of steps between checkpoints: Daly's interval, but no shorter than writing one takes.
    pub every: u64,
    /// The share of the time that becomes saved work.
    pub goodput: f64,
}

/// Seconds by part.
struct SecondsByPart([f64; PARTS.len()]);

impl SecondsByPart {
    fn add(&mut self, part: StepPart, seconds: f64) {
        self.0[part as usize] += seconds;
    }

    fn of(&self, part: StepPart) -> f64 {
        self.0[part as usize]
    }

    fn sum(&self) -> f64 {
        self.0.iter().sum()
    }
}

/// The time of the phase's first step; `needs` has its bytes.
pub fn step(setting: PlannedRun<'_>, needs: &PhaseNeeds) -> Result<StepTime> {
    let PlannedRun { spec, cluster, fleet } = setting;
    let first = needs.first_step;
    let micro_batches = needs.batch / needs.micro_batch;
    let standing = RankArrangement::new(fleet, needs);
    let per_line = micro_batches.div_ceil(standing.lines);
    let rounds = per_line.div_ceil(standing.workers);
    let mut seconds = SecondsByPart([0.0; PARTS.len()]);
    micro_batch(setting, needs, rounds as f64, standing, &mut seconds)?;
    let sum = |parts: [StepPart; 3]| parts.map(|part| seconds.of(part)).iter().sum::<f64>();
    let back = sum([StepPart::ExpertsBack, StepPart::RouterBack, StepPart::AttentionBack]);
    let forward = sum([StepPart::Experts, StepPart::Router, StepPart::Attention]);
    let way_back = (back + seconds.of(StepPart::Head) / 2.0) / rounds as f64;
    let recompute = fleet.workers.keep() == ActivationCheckpointing::LayerInputs;
    let first_forward = forward / rounds as f64 / if recompute { 2.0 } else { 1.0 };
    seconds.add(StepPart::Blocks, standing::waits(setting, needs, per_line, forward + back));
    let pieces = ownership::pieces(&spec.parameters, &spec.rules, fleet.ranks);
    whole_gradients(setting, per_line, standing, &mut seconds);
    owners(setting, first, &pieces, &mut seconds);
    let (gradients, [near, far]) = exchange(setting, needs.sent);
    // Blocks of a bucketed round are sent while the next is computed; all gradients during the last backward pass.
    let covered = match fleet.grad_reduce {
        GradReduce::Whole => way_back,
        GradReduce::Bucketed => way_back + (rounds - 1) as f64 / rounds as f64 * gradients,
    };
    let mut hidden = cluster.overlap * gradients.min(covered);
    if fleet.ranks > 1 {
        let slowest = cluster.between.or(cluster.within).map_or(0.0, |link| link.latency_s);
        // A waiting rank leaves its processors to transfers.
        let waits = cluster.uneven * seconds.sum();
        hidden += waits.min(gradients - hidden);
        // Facts, losses, norms, checksums: each reaches all ranks in as many hops as a tree has levels.
        seconds.add(StepPart::Peers, waits + 4.0 * f64::from(fleet.ranks).log2().ceil() * slowest);
        packing(setting, first, per_line, standing, &mut seconds);
    }
    seconds.add(StepPart::Blocks, gradients - hidden);
    // All messages but the last travel while other pieces are updated. All but the first, which the embedding waits
    // for, travel during the next step's first forward pass, in which the leader of a machine also forwards them.
    let (weights, most) = (near + far, 1.0 - 1.0 / MESSAGES as f64);
    let direct = if far > 0.0 { far } else { near };
    let updating = seconds.of(StepPart::Muon) + seconds.of(StepPart::AdamW);
    let covered = most * direct.min(updating) + first_forward.min(most * weights);
    seconds.add(StepPart::Share, weights - cluster.overlap * weights.min(covered));
    let counts = Counts { per_line, rounds, micro_batches, standing };
    Ok(finish(setting, needs, counts, &seconds, ExchangeSeconds { gradients, hidden, weights }))
}

struct Counts {
    per_line: u64,
    rounds: u64,
    micro_batches: u64,
    standing: RankArrangement,
}

/// Seconds of exchanges, and those that are hidden.
struct ExchangeSeconds {
    gradients: f64,
    hidden: f64,
    weights: f64,
}

fn finish(
    PlannedRun { cluster, fleet, .. }: PlannedRun<'_>,
    needs: &PhaseNeeds,
    counts: Counts,
    seconds: &SecondsByPart,
    ExchangeSeconds { gradients, hidden, weights }: ExchangeSeconds,
) -> StepTime {
    let all = seconds.sum();
    let tokens = needs.batch as f64 * f64::from(needs.seq_len);
    let ranks = f64::from(fleet.ranks);
    let RankArrangement { together, workers, .. } = counts.standing;
    let peak = cluster.bf16.peak().max(cluster.f32.peak()) * workers as f64;
    StepTime {
        phase: needs.name.clone(),
        first_step: needs.first_step,
        micro_batches: counts.per_line,
        rounds: counts.rounds,
        idle_ranks: u64::from(fleet.ranks).saturating_sub(counts.micro_batches * together),
        parts: PARTS.iter().map(|(part, name)| (*name, seconds.of(*part))).collect(),
        seconds: all,
        exactness: EXACTNESS.iter().map(|part| seconds.of(*part)).sum(),
        gradients,
        hidden,
        weights,
        model_flops: needs.model_flops,
        utilisation: needs.model_flops / (all * ranks * peak),
        tokens_per_s: tokens / all,
        days: needs.steps as f64 * all / faults::DAY,
    }
}

/// `rounds` micro-batches, one after the other, on the busiest of the ranks that share them.
fn micro_batch(
    PlannedRun { spec, cluster, fleet }: PlannedRun<'_>,
    needs: &PhaseNeeds,
    rounds: f64,
    standing: RankArrangement,
    seconds: &mut SecondsByPart,
) -> Result<()> {
    let phase = spec.model_at(needs.first_step)?;
    let (config, chunks, together) = (&phase.config, phase.cut.chunks, standing.together);
    let bf16 = spec.dtype_at(needs.first_step) == Dtype::Bf16;
    let all = (needs.micro_batch * u64::from(needs.seq_len)) as i64;
    let (tokens, chunks) = ((all / chunks as i64).max(1), (chunks / together).max(1));
    let all = all / together as i64;
    let keep = fleet.workers.keep();
    let recompute = keep == ActivationCheckpointing::LayerInputs;
    // As many chunks as the rank has, of shorter sequences.
    let whole = MicroBatchShape::whole(needs.micro_batch, u64::from(needs.seq_len) / together);
    let by = MicroBatchShape { keep, cut: Cut { chunks, ..phase.cut }, ..whole };
    for product in &costs::of_micro_batch(config, by)?.matmuls {
        let curve = if bf16 && !product.wide { &cluster.bf16 } else { &cluster.f32 };
        let rate = curve.at(product.shape.operations());
        seconds.add(product.part, rounds * product.operations() / rate);
    }
    let whole = MicroBatchShape::whole(needs.micro_batch, needs.seq_len.into());
    let costs = costs::of_micro_batch(config, whole)?;
    let most = (1.0 + needs.uneven) / together as f64;
    let operations = most * (costs.attention + costs.recurrence);
    // A call covers one sequence in one layer.
    let call = operations / (config.num_hidden_layers as f64 * needs.micro_batch as f64);
    let again = 1.0 + f64::from(u8::from(recompute));
    let [forward, back] = if bf16 { &cluster.attention } else { &cluster.attention_f32 };
    let (forward, back) = (forward.at(call), back.at(call));
    seconds.add(StepPart::Attention, rounds * again * operations / forward);
    seconds.add(StepPart::AttentionBack, rounds * 2.0 * operations / back);
    // The bandwidth is looked up for the size of a pass over a layer's activations.
    let narrow = if bf16 { 2 } else { 4 };
    let size = 3.0 * 4.0 * tokens as f64 * config.hidden_size as f64;
    for (part, bytes) in traffic::of_micro_batch(config, all, narrow) {
        seconds.add(part, rounds * bytes / cluster.stream.at(size));
    }
    let layers = config.num_hidden_layers as f64;
    for (part, calls) in traffic::CALLS {
        let times = if part == StepPart::Head { 1.0 } else { layers };
        seconds.add(part, rounds * chunks as f64 * times * calls * cluster.call_s);
    }
    let chunk = tokens.min(config.loss_chunk);
    let softmax = cluster.softmax.at(traffic::of_softmax(config, chunk));
    seconds.add(StepPart::Head, rounds * traffic::of_softmax(config, all) / softmax);
    for (_, kind) in config.kinds() {
        let [forward, back] = traffic::of_gated_units(config, kind, all);
        let softmax = cluster.softmax.at(forward);
        seconds.add(StepPart::Experts, rounds * again * forward / softmax);
        seconds.add(StepPart::ExpertsBack, rounds * back / softmax);
    }
    Ok(())
}

/// Checksums of the gradients of this rank's micro-batches, and their additions; then the additions of received blocks.
fn whole_gradients(
    PlannedRun { spec, cluster, fleet }: PlannedRun<'_>,
    per_line: u64,
    RankArrangement { together, lines, workers }: RankArrangement,
    seconds: &mut SecondsByPart,
) {
    let f = |count: u64| count as f64;
    let (per_line, ranks, together, lines) =
        (f(per_line), f64::from(fleet.ranks), f(together), f(lines));
    let workers = f(workers);
    // Of a shared gradient a rank has its slice, and adds the chunks of the others on its line. Each tensor is a call.
    let once = |curve: &Curve, width: f64| -> f64 {
        let sizes = spec.parameters.iter().map(|it| width * f(it.elements()) / together);
        sizes.map(|bytes| bytes / curve.at(bytes)).sum()
    };
    let rounds = (per_line / workers).ceil();
    seconds.add(StepPart::MicroBatchSums, rounds * once(&cluster.checksum, 4.0));
    let machines = f64::from(fleet.ranks.div_ceil(fleet.ranks_per_node)).min(lines);
    // A rank adds its own micro-batches, its neighbours' blocks for the owners that it leads, and blocks of machines
    // for itself: in multiples of its slice.
    let near = (lines / machines - 1.0) * together * machines / ranks;
    let far = (machines - 1.0) * together / ranks;
    let added = per_line - 1.0 + per_line * (together - 1.0) + near + far;
    seconds.add(StepPart::Tree, added * once(&cluster.tree, 12.0) / workers);
}

/// Copies for transfers: packing each block's pieces by owner, and packing and unpacking new weights.
fn packing(
    PlannedRun { spec, cluster, fleet }: PlannedRun<'_>,
    first: u64,
    per_line: u64,
    RankArrangement { together, .. }: RankArrangement,
    seconds: &mut SecondsByPart,
) {
    let blocks = match fleet.grad_reduce {
        GradReduce::Whole => blocks(0, per_line).len() as u64,
        GradReduce::Bucketed => per_line,
    };
    // Tensor by tensor, read and written.
    let copied = |bytes: &dyn Fn(&ParamSpec) -> f64| -> f64 {
        let sizes = spec.parameters.iter().map(|it| 2.0 * bytes(it) * it.elements() as f64);
        sizes.map(|bytes| bytes / cluster.stream.at(bytes)).sum()
    };
    seconds.add(StepPart::Send, blocks as f64 * copied(&|_| 4.0 / together as f64));
    let dtype = spec.dtype_at(first);
    let read_as = |it: &ParamSpec| it.kind(dtype).elt_size_in_bytes() as f64;
    seconds.add(StepPart::Share, copied(&read_as));
}

/// The time of the slowest owner.
fn owners(
    PlannedRun { spec, cluster, fleet }: PlannedRun<'_>,
    first: u64,
    pieces: &[ParamShard],
    seconds: &mut SecondsByPart,
) {
    let (workers, dtype) = (fleet.workers.count() as f64, spec.dtype_at(first));
    let mut by_owner = vec![[0.0f64; 3]; fleet.ranks as usize];
    for piece in pieces {
        let seconds_of_owner = &mut by_owner[piece.owner as usize];
        let length = piece.length() as f64;
        let sets = 2.0 + f64::from(u8::from(piece.rule.has_second_moment()));
        let stream = cluster.stream.at(12.0 * length);
        // Moments and weights are updated in place, as in an addition of the tree.
        let in_place = cluster.tree.at(12.0 * length);
        let checksum = |bytes: f64| bytes / cluster.checksum.at(bytes);
        seconds_of_owner[0] += checksum(4.0 * length) + 4.0 * length / stream;
        // Old weights are kept and compared, new ones rounded: in a cache except for what is written.
        let narrow = dtype == Dtype::Bf16 && spec.parameters[piece.tensor].in_large_products;
        let beside = length * if narrow { 14.0 } else { 12.0 } / stream;
        let moved = 28.0 * length / in_place + beside + sets * checksum(4.0 * length);
        match orthogonalized(piece) {
            // The momentum, then the weights by the update direction.
            Some(seconds) => seconds_of_owner[1] += seconds(cluster) + moved,
            None => seconds_of_owner[2] += moved,
        }
    }
    let sum = |of: &[f64; 3]| of.iter().sum::<f64>();
    let most = by_owner.into_iter().max_by(|left, right| sum(left).total_cmp(&sum(right)));
    let parts = [StepPart::Norm, StepPart::Muon, StepPart::AdamW];
    for (part, spent) in parts.into_iter().zip(most.unwrap_or_default()) {
        seconds.add(part, spent / workers);
    }
}

/// Seconds of the Newton-Schulz iterations of a piece, if Muon updates it.
fn orthogonalized(piece: &ParamShard) -> Option<impl Fn(&Cluster) -> f64> {
    let [.., rows, columns] = piece.shape[..] else { return None };
    if !matches!(piece.rule, OptimizerRule::Muon | OptimizerRule::MuonEach) {
        return None;
    }
    let matrices = piece.length() as f64 / (rows * columns) as f64;
    let (short, long) = (rows.min(columns) as f64, rows.max(columns) as f64);
    let operations = of_newton_schulz(rows, columns);
    let rate = move |cluster: &Cluster| match &cluster.newton_schulz {
        Some(curve) => curve.at(operations),
        None => cluster.f32.at(2.0 * short * short * long),
    };
    Some(move |cluster: &Cluster| matrices * operations / rate(cluster))
}

/// Seconds to exchange gradients, one tier after the other, and new weights, within and between machines: the bytes of
/// a rank by tier.
fn exchange(
    PlannedRun { cluster, fleet, .. }: PlannedRun<'_>,
    sent: SentInStep,
) -> (f64, [f64; 2]) {
    let ranks = f64::from(fleet.ranks);
    let near = f64::from(fleet.ranks_per_node.min(fleet.ranks)) - 1.0;
    let far = f64::from(fleet.ranks.div_ceil(fleet.ranks_per_node)) - 1.0;
    let tier = |link: Option<NetworkLink>, bytes: u64, messages: f64| match link {
        Some(NetworkLink { latency_s, bytes_per_s }) if bytes > 0 => {
            messages * latency_s + bytes as f64 / ranks / bytes_per_s
        }
        _ => 0.0,
    };
    let tiers = |within: u64, between: u64| {
        let between = tier(cluster.between.or(cluster.within), between, far);
        [tier(cluster.within, within, near), between]
    };
    let gradients = tiers(sent.gradients_within_machines, sent.gradients_between_machines);
    let weights = tiers(sent.weights_within_machines, sent.weights_between_machines);
    (gradients.iter().sum(), weights)
}

/// The cost of checkpoints and failures for steps of `step` seconds; `None` if the cluster has no failure rate.
pub fn keeping(
    PlannedRun { cluster, fleet, .. }: PlannedRun<'_>,
    needs: &CheckpointNeeds,
    step: f64,
) -> Option<CheckpointCost> {
    let (medium, faults) = (cluster.checkpoint?, cluster.faults?);
    let stall = needs.largest_part as f64 / medium.copy_bytes_per_s;
    let machines = f64::from(fleet.ranks.div_ceil(fleet.ranks_per_node));
    let write = needs.bytes as f64 / machines / medium.write_bytes_per_s;
    let between = faults::between(fleet.ranks, faults.per_rank_hour);
    let every = best_steps(stall, write, between, step);
    let run = faults::FailureModel { step, every, stall, between, restart: faults.restart_s };
    Some(CheckpointCost { stall, write, between, every, goodput: run.goodput() })
}

/// The best number of steps of `step` seconds between checkpoints that stall the run for `stall` seconds and are
/// written in `write` seconds meanwhile, with failures `between` seconds apart. A day if nothing fails.
pub fn best_steps(stall: f64, write: f64, between: f64, step: f64) -> u64 {
    let interval = match between.is_finite() {
        true => faults::best_interval(stall, between),
        false => faults::DAY,
    };
    (interval.max(write) / step).round().max(1.0) as u64
}
