//! How long a step will take on a cluster, part by part.
//!
//! ```text
//! micro-batch   each product by the curve of its operations, attention by its own, what is left by bandwidth      x rounds
//! exactness     checksums of each gradient, and of the sum
//! optimizer     of the owner that needs longest: Newton-Schulz by the curve of f32 products, the rest by bandwidth, checksums of
//!               the state included
//! exchange      bytes of `plan` by tier over the tier's bandwidth; gradients hide behind the way back of the last round
//!               and behind waiting; what is packed and taken over, by bandwidth; where ranks share micro-batches, what they
//!               wait for each other (see `standing`); and for the slowest rank, a measured share of what is computed
//! ```
//!
//! Left out: what reading batches takes (it hides), and, where `[memory]` begins above 4 KB, what calls cost whatever their size.

use contract::Result;
use curriculum::Dtype;
use kernels::tree::blocks;
use serde::Serialize;

use super::Curve;
use super::cluster::{Cluster, Link};
use super::products::{self, MicroBatch};
pub use super::standing::Setting;
use super::standing::{self, Standing};
use super::{faults, traffic};
use crate::mesh::GradReduce;
use crate::model::{self, Keep, ParamSpec};
use crate::optim::Rule;
use crate::plan::{CheckpointNeeds, PhaseNeeds, SentInStep};
use crate::state::ownership::{self, Piece};
use crate::timing::{EXACTNESS, PARTS, Part};

/// What a step of a phase takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepTime {
    /// The phase.
    pub phase: String,
    /// Micro-batches that the busiest rank computes, and how often it begins one, or one for each worker.
    pub micro_batches: u64,
    /// See above.
    pub rounds: u64,
    /// Ranks without a micro-batch.
    pub idle_ranks: u64,
    /// Seconds of each part on the busiest rank, by the names of [`PARTS`]; exchanges as far as nothing hides them.
    pub parts: Vec<(&'static str, f64)>,
    /// Seconds of all parts.
    pub seconds: f64,
    /// Seconds of the parts that only check bits.
    pub exactness: f64,
    /// Seconds that gradients travel, and how many of them are hidden by computing or waiting for the slowest rank.
    pub gradients: f64,
    /// See above.
    pub hidden: f64,
    /// Seconds that new weights travel.
    pub weights: f64,
    /// Operations of the model in a step.
    pub model_flops: f64,
    /// The model's operations over what the highest rate of products would allow in the same time.
    pub utilisation: f64,
    /// Tokens in a second.
    pub tokens_per_s: f64,
    /// Days of the whole phase without failures.
    pub days: f64,
}

/// What keeping the run costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Keeping {
    /// Seconds for which a checkpoint stops the run: the copy out of the device that holds most of it.
    pub stall: f64,
    /// Seconds that writing it takes beside the steps.
    pub write: f64,
    /// Mean seconds between failures.
    pub between: f64,
    /// Steps after which a checkpoint is best written: by Daly's interval, and not before the last one is written.
    pub every: u64,
    /// The share of the time that becomes work that is kept.
    pub goodput: f64,
}

/// Seconds by part.
struct Seconds([f64; PARTS.len()]);

impl Seconds {
    fn add(&mut self, part: Part, seconds: f64) {
        self.0[part as usize] += seconds;
    }

    fn of(&self, part: Part) -> f64 {
        self.0[part as usize]
    }

    fn sum(&self) -> f64 {
        self.0.iter().sum()
    }
}

/// The step of `phase`, whose bytes `needs` tells.
pub fn step(setting: Setting<'_>, first: u64, needs: &PhaseNeeds) -> Result<StepTime> {
    let Setting { spec, cluster, fleet } = setting;
    let micro_batches = needs.batch / needs.micro_batch;
    let standing = Standing::new(fleet, needs);
    let own = micro_batches.div_ceil(standing.lines);
    let rounds = own.div_ceil(standing.workers);
    let mut seconds = Seconds([0.0; PARTS.len()]);
    micro_batch(setting, first, needs, (rounds as f64, standing), &mut seconds)?;
    let sum = |parts: [Part; 3]| parts.map(|part| seconds.of(part)).iter().sum::<f64>();
    let back = sum([Part::ExpertsBack, Part::RouterBack, Part::AttentionBack]);
    let there = sum([Part::Experts, Part::Router, Part::Attention]);
    let way_back = (back + seconds.of(Part::Head) / 2.0) / rounds as f64;
    seconds.add(Part::Blocks, standing::waits(setting, needs, (own, there + back)));
    let pieces = ownership::pieces(&spec.parameters, &spec.rules, fleet.ranks);
    whole_gradients(setting, own, standing, &mut seconds);
    owners(setting, first, &pieces, &mut seconds);
    let (gradients, weights) = exchange(setting, needs.sent);
    // Blocks of a streaming round travel while the next ones are computed; all gradients while the last way back ends.
    let covered = match fleet.grad_reduce {
        GradReduce::Whole => way_back,
        GradReduce::Bucketed => way_back + (rounds - 1) as f64 / rounds as f64 * gradients,
    };
    let mut hidden = cluster.overlap * gradients.min(covered);
    if fleet.ranks > 1 {
        let slowest = cluster.between.or(cluster.within).map_or(0.0, |link| link.latency_s);
        // Whoever waits leaves its processor to what travels.
        let waits = cluster.uneven * seconds.sum();
        hidden += waits.min(gradients - hidden);
        // Facts, losses, norms, checksums; each goes to everybody in as many hops as a tree has.
        seconds.add(Part::Peers, waits + 4.0 * f64::from(fleet.ranks).log2().ceil() * slowest);
        packing(setting, first, (own, standing), &mut seconds);
    }
    seconds.add(Part::Blocks, gradients - hidden);
    seconds.add(Part::Share, weights);
    let counts = Counts { own, rounds, micro_batches, standing };
    Ok(finish(setting, needs, counts, &seconds, Travel { gradients, hidden, weights }))
}

struct Counts {
    own: u64,
    rounds: u64,
    micro_batches: u64,
    standing: Standing,
}

/// Seconds of exchanges, and those that nobody waits for.
struct Travel {
    gradients: f64,
    hidden: f64,
    weights: f64,
}

fn finish(
    Setting { cluster, fleet, .. }: Setting<'_>,
    needs: &PhaseNeeds,
    counts: Counts,
    seconds: &Seconds,
    Travel { gradients, hidden, weights }: Travel,
) -> StepTime {
    let all = seconds.sum();
    let tokens = needs.batch as f64 * f64::from(needs.seq_len);
    let ranks = f64::from(fleet.ranks);
    let Standing { together, workers, .. } = counts.standing;
    let peak = cluster.bf16.peak().max(cluster.f32.peak()) * workers as f64;
    StepTime {
        phase: needs.name.clone(),
        micro_batches: counts.own,
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

/// `rounds` micro-batches, one after the other, as far as the busiest of those who share them computes them.
fn micro_batch(
    Setting { spec, cluster, fleet }: Setting<'_>,
    first: u64,
    needs: &PhaseNeeds,
    (rounds, standing): (f64, Standing),
    seconds: &mut Seconds,
) -> Result<()> {
    let phase = spec.model_at(first)?;
    let (config, chunks, together) = (&phase.config, phase.cut.chunks, standing.together);
    let bf16 = spec.dtype_at(first) == Dtype::Bf16;
    let all = (needs.micro_batch * u64::from(needs.seq_len)) as i64;
    let (tokens, chunks) = ((all / chunks as i64).max(1), (chunks / together).max(1));
    let all = all / together as i64;
    let routed = products::even(tokens, config.num_experts);
    let recompute = fleet.workers.keep() == Keep::LayerInputs;
    let by = MicroBatch { tokens, chunks, routed: &routed, recompute };
    for product in products::of_micro_batch(config, by) {
        let curve = if bf16 && !product.wide { &cluster.bf16 } else { &cluster.f32 };
        // What is cut into shards is multiplied shard by shard.
        let shards = if product.wide { 1 } else { phase.cut.shards.max(1) };
        let rate = curve.at(product.shape.operations() / shards as f64);
        seconds.add(product.part, rounds * product.operations() / rate);
    }
    let pairs = needs.micro_batch * model::causal_pairs(&[0], needs.seq_len);
    let most = (1.0 + needs.uneven) / together as f64;
    let operations = most * products::of_attention(config, pairs);
    // A call is one sequence in one layer.
    let call = operations / (config.num_hidden_layers as f64 * needs.micro_batch as f64);
    let again = 1.0 + f64::from(u8::from(recompute));
    let [there, back] = if bf16 { &cluster.attention } else { &cluster.attention_f32 };
    let (there, back) = (there.at(call), back.at(call));
    seconds.add(Part::Attention, rounds * again * operations / there);
    seconds.add(Part::AttentionBack, rounds * 2.0 * operations / back);
    // A pass over a layer's activations is what a bandwidth is looked up for.
    let narrow = if bf16 { 2 } else { 4 };
    let size = 3.0 * 4.0 * tokens as f64 * config.hidden_size as f64;
    for (part, bytes) in traffic::of_micro_batch(config, all, narrow) {
        seconds.add(part, rounds * bytes / cluster.stream.at(size));
    }
    let layers = config.num_hidden_layers as f64;
    for (part, calls) in traffic::CALLS {
        let times = if part == Part::Head { 1.0 } else { layers };
        seconds.add(part, rounds * chunks as f64 * times * calls * cluster.call_s);
    }
    let chunk = tokens.min(config.loss_chunk);
    let softmax = cluster.softmax.at(traffic::of_softmax(config, chunk));
    seconds.add(Part::Head, rounds * traffic::of_softmax(config, all) / softmax);
    let [there, back] = traffic::of_gated_units(config, all);
    seconds.add(Part::Experts, rounds * layers * again * there / cluster.softmax.at(there));
    seconds.add(Part::ExpertsBack, rounds * layers * back / cluster.softmax.at(there));
    Ok(())
}

/// Checksums of the gradients of this rank's micro-batches, and their additions; then those of blocks that arrive.
fn whole_gradients(
    Setting { spec, cluster, fleet }: Setting<'_>,
    own: u64,
    Standing { together, lines, workers }: Standing,
    seconds: &mut Seconds,
) {
    let f = |count: u64| count as f64;
    let (own, ranks, together, lines) = (f(own), f64::from(fleet.ranks), f(together), f(lines));
    let workers = f(workers);
    // Of what is shared a rank has its slice, to which the others of its line add their chunks. Each tensor is a call.
    let once = |curve: &Curve, width: f64| -> f64 {
        let sizes = spec.parameters.iter().map(|it| width * f(it.elements()) / together);
        sizes.map(|bytes| bytes / curve.at(bytes)).sum()
    };
    let rounds = (own / workers).ceil();
    seconds.add(Part::MicroBatchSums, rounds * once(&cluster.checksum, 4.0));
    let machines = f64::from(fleet.ranks.div_ceil(fleet.ranks_per_node)).min(lines);
    // A rank adds its own; blocks of the others of its machine for the owners behind it, and those of machines for itself: so
    // many times its slice.
    let near = (lines / machines - 1.0) * together * machines / ranks;
    let far = (machines - 1.0) * together / ranks;
    let added = own - 1.0 + own * (together - 1.0) + near + far;
    seconds.add(Part::Tree, added * once(&cluster.tree, 12.0) / workers);
}

/// What ranks copy to hand it over: each block's pieces by owner, and weights into what is sent and out of what has come.
fn packing(
    Setting { spec, cluster, fleet }: Setting<'_>,
    first: u64,
    (own, Standing { together, .. }): (u64, Standing),
    seconds: &mut Seconds,
) {
    let blocks = match fleet.grad_reduce {
        GradReduce::Whole => blocks(0, own).len() as u64,
        GradReduce::Bucketed => own,
    };
    // Tensor by tensor, read and written.
    let copied = |bytes: &dyn Fn(&ParamSpec) -> f64| -> f64 {
        let sizes = spec.parameters.iter().map(|it| 2.0 * bytes(it) * it.elements() as f64);
        sizes.map(|bytes| bytes / cluster.stream.at(bytes)).sum()
    };
    seconds.add(Part::Send, blocks as f64 * copied(&|_| 4.0 / together as f64));
    let dtype = spec.dtype_at(first);
    let read_as = |it: &ParamSpec| it.kind(dtype).elt_size_in_bytes() as f64;
    seconds.add(Part::Share, copied(&read_as));
}

/// What the owner that needs longest does.
fn owners(
    Setting { spec, cluster, fleet }: Setting<'_>,
    first: u64,
    pieces: &[Piece],
    seconds: &mut Seconds,
) {
    let (workers, dtype) = (fleet.workers.count() as f64, spec.dtype_at(first));
    let mut by_owner = vec![[0.0f64; 3]; fleet.ranks as usize];
    for piece in pieces {
        let own = &mut by_owner[piece.owner as usize];
        let length = piece.length() as f64;
        let sets = 2.0 + f64::from(u8::from(piece.rule.has_second_moment()));
        let stream = cluster.stream.at(12.0 * length);
        // Moments and weights are changed in place, as a sum of the tree is.
        let in_place = cluster.tree.at(12.0 * length);
        let checksum = |bytes: f64| bytes / cluster.checksum.at(bytes);
        own[0] += checksum(4.0 * length) + 4.0 * length / stream;
        // Old weights kept and compared, new ones rounded: in a cache but for what is written.
        let narrow = dtype == Dtype::Bf16 && spec.parameters[piece.tensor].in_large_products;
        let beside = length * if narrow { 14.0 } else { 12.0 } / stream;
        let moved = 28.0 * length / in_place + beside + sets * checksum(4.0 * length);
        match orthogonalized(piece) {
            // The momentum, and the weights by their direction.
            Some(seconds) => own[1] += seconds(cluster) + moved,
            None => own[2] += moved,
        }
    }
    let sum = |of: &[f64; 3]| of.iter().sum::<f64>();
    let most = by_owner.into_iter().max_by(|left, right| sum(left).total_cmp(&sum(right)));
    let parts = [Part::Norm, Part::Muon, Part::AdamW];
    for (part, spent) in parts.into_iter().zip(most.unwrap_or_default()) {
        seconds.add(part, spent / workers);
    }
}

/// Seconds of the Newton-Schulz iterations of a piece, if Muon moves it.
fn orthogonalized(piece: &Piece) -> Option<impl Fn(&Cluster) -> f64> {
    let [.., rows, columns] = piece.shape[..] else { return None };
    if !matches!(piece.rule, Rule::Muon | Rule::MuonEach) {
        return None;
    }
    let matrices = piece.length() as f64 / (rows * columns) as f64;
    let (short, long) = (rows.min(columns) as f64, rows.max(columns) as f64);
    let operations = products::of_newton_schulz(rows, columns);
    let rate = move |cluster: &Cluster| match &cluster.newton_schulz {
        Some(curve) => curve.at(operations),
        None => cluster.f32.at(2.0 * short * short * long),
    };
    Some(move |cluster: &Cluster| matrices * operations / rate(cluster))
}

/// Seconds in which gradients and new weights travel: the bytes of a rank by tier, tiers one after the other.
fn exchange(Setting { cluster, fleet, .. }: Setting<'_>, sent: SentInStep) -> (f64, f64) {
    let ranks = f64::from(fleet.ranks);
    let near = f64::from(fleet.ranks_per_node.min(fleet.ranks)) - 1.0;
    let far = f64::from(fleet.ranks.div_ceil(fleet.ranks_per_node)) - 1.0;
    let tier = |link: Option<Link>, bytes: u64, messages: f64| match link {
        Some(Link { latency_s, bytes_per_s }) if bytes > 0 => {
            messages * latency_s + bytes as f64 / ranks / bytes_per_s
        }
        _ => 0.0,
    };
    let both = |within: u64, between: u64| {
        tier(cluster.within, within, near) + tier(cluster.between.or(cluster.within), between, far)
    };
    (
        both(sent.gradients_within_machines, sent.gradients_between_machines),
        both(sent.weights_within_machines, sent.weights_between_machines),
    )
}

/// What checkpoints and failures cost where a step takes `step` seconds; nothing if the cluster does not say how often it fails.
pub fn keeping(
    Setting { cluster, fleet, .. }: Setting<'_>,
    needs: &CheckpointNeeds,
    step: f64,
) -> Option<Keeping> {
    let (medium, faults) = (cluster.checkpoint?, cluster.faults?);
    let stall = needs.largest_part as f64 / medium.copy_bytes_per_s;
    let machines = f64::from(fleet.ranks.div_ceil(fleet.ranks_per_node));
    let write = needs.bytes as f64 / machines / medium.write_bytes_per_s;
    let between = faults::between(fleet.ranks, faults.per_rank_hour);
    let every = best_steps(stall, write, between, step);
    let run = faults::Failing { step, every, stall, between, restart: faults.restart_s };
    Some(Keeping { stall, write, between, every, goodput: run.goodput() })
}

/// Steps of `step` seconds after which a checkpoint is best written, which stalls the run, takes `write` seconds beside it, and
/// keeps work from failures `between` seconds apart. A day where nothing fails.
pub fn best_steps(stall: f64, write: f64, between: f64, step: f64) -> u64 {
    let interval = match between.is_finite() {
        true => faults::best_interval(stall, between),
        false => faults::DAY,
    };
    (interval.max(write) / step).round().max(1.0) as u64
}
