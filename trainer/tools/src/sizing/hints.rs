//! Hints on what to change before paying for a cluster: one for each rule of thumb that a run breaks.
//!
//! The rules are those of the ZAYA1 paper (arXiv 2511.17127, section III) where it has one: dimensions that are
//! multiples of 64, matmuls large enough for the peak, degrees that span a machine or are unused, and gradient
//! reduction during computation.

use contract::Result;

use super::estimate::{CheckpointCost, PlannedRun, StepTime};
use super::shapes::ALIGNMENT;
use crate::plan::PhaseNeeds;
use trainer::costs::{self, MatmulCount, MicroBatchShape};
use trainer::model::{Cut, ZayaConfig};

/// The share of the peak that matmuls should reach.
const ENOUGH: f64 = 0.8;

/// Rules that the model's shapes break, on any cluster.
pub fn of_shapes(config: &ZayaConfig) -> Vec<String> {
    let sizes = [
        ("head_dim", config.head_dim),
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.hidden_size),
        ("moe_intermediate_size", config.moe_intermediate_size),
    ];
    let off = sizes.into_iter().filter(|(_, size)| size % ALIGNMENT != 0);
    off.map(|(name, size)| {
        let next = (size / ALIGNMENT + 1) * ALIGNMENT;
        format!("{name} is {size}, not a multiple of {ALIGNMENT}: its matmuls are slower than those of {next}")
    })
    .collect()
}

/// Rules that a phase breaks on the cluster.
pub fn of_phase(
    setting: PlannedRun<'_>,
    needs: &PhaseNeeds,
    time: &StepTime,
    keeping: Option<&CheckpointCost>,
) -> Result<Vec<String>> {
    let mut hints = Vec::new();
    hints.extend(memory(setting, needs));
    hints.extend(ranks(setting, needs, time));
    hints.extend(small_products(setting, needs)?);
    if time.gradients > time.hidden {
        hints.push(format!(
            "sending gradients takes {}, of which computation hides {}: use more micro-batches a rank with --grad-reduce \
             bucketed, larger micro-batches, or fewer ranks",
            seconds(time.gradients),
            seconds(time.hidden)
        ));
    }
    if let Some(keeping) =
        keeping.filter(|keeping| keeping.write > keeping.every as f64 * time.seconds * 0.99)
    {
        hints.push(format!(
            "writing a checkpoint takes {}, longer than the {} steps that failures ask for: the medium decides the \
             interval",
            seconds(keeping.write),
            keeping.every
        ));
    }
    Ok(hints)
}

fn memory(PlannedRun { cluster, fleet, .. }: PlannedRun<'_>, needs: &PhaseNeeds) -> Option<String> {
    let (held, available) = (needs.memory.sum(), cluster.memory_bytes);
    (held > available).then(|| {
        let more = match fleet.workers.keep() {
            trainer::model::ActivationCheckpointing::Everything => "--recompute, ",
            trainer::model::ActivationCheckpointing::LayerInputs => "",
        };
        format!(
            "memory does not fit: a rank holds {} ({:.1} GB) of {}: give {more}a smaller micro-batch, or a \
             device with more",
            contract::words::bytes(held),
            held as f64 / 1e9,
            contract::words::bytes(available)
        )
    })
}

fn ranks(
    PlannedRun { fleet, .. }: PlannedRun<'_>,
    needs: &PhaseNeeds,
    time: &StepTime,
) -> Vec<String> {
    let (ranks, per_node) = (u64::from(fleet.ranks), u64::from(fleet.ranks_per_node));
    let (all, lines) = (needs.batch / needs.micro_batch, ranks / u64::from(needs.context.max(1)));
    let mut hints = Vec::new();
    if time.idle_ranks > 0 {
        hints.push(format!(
            "{} of {ranks} ranks are idle: the phase has {all} micro-batches a step; give smaller micro-batches, a larger \
             batch, or context_chunks and --cp, by which ranks share a micro-batch",
            time.idle_ranks
        ));
    } else if !all.is_multiple_of(lines) {
        hints.push(format!(
            "{all} micro-batches do not divide among {ranks} ranks: a rank waits for {:.0} % of the time that others compute",
            100.0 * (1.0 - all as f64 / (lines * time.micro_batches) as f64)
        ));
    }
    if ranks > per_node && !ranks.is_multiple_of(per_node) {
        hints.push(format!(
            "{ranks} ranks do not fill their machines of {per_node}: on the last one fewer share what travels between machines; \
             degrees should span whole machines"
        ));
    }
    hints
}

/// A hint that names the largest of the matmuls that are too small for the peak, if they take a notable share.
fn small_products(
    PlannedRun { spec, cluster, fleet: _ }: PlannedRun<'_>,
    needs: &PhaseNeeds,
) -> Result<Option<String>> {
    let phase = spec.model_at(needs.first_step)?;
    let chunks = phase.cut.chunks.max(1);
    let whole = MicroBatchShape::whole(needs.micro_batch, needs.seq_len.into());
    let by = MicroBatchShape { cut: Cut { chunks, ..phase.cut }, ..whole };
    let all = &costs::of_micro_batch(&phase.config, by)?.matmuls;
    let bf16 = spec.dtype_at(needs.first_step) == curriculum::Dtype::Bf16;
    let curve = if bf16 { &cluster.bf16 } else { &cluster.f32 };
    let (peak, sum) = (curve.peak(), all.iter().map(MatmulCount::operations).sum::<f64>());
    let slow = |it: &&MatmulCount| !it.wide && curve.at(it.shape.operations()) < ENOUGH * peak;
    let below: Vec<&MatmulCount> = all.iter().filter(slow).collect();
    let share = below.iter().map(|it| it.operations()).sum::<f64>() / sum;
    let largest = below.into_iter().max_by(|l, r| l.operations().total_cmp(&r.operations()));
    Ok(largest.filter(|_| share > 0.1).map(|it| {
        let shape = it.shape;
        format!(
            "{:.0} % of the arithmetic is in matmuls too small for {:.0} % of the peak, which takes {:.3} GFLOP here, mostly \
             in {} x {} x {} ({:.3} GFLOP, {:.0} % of the peak); larger micro-batches help",
            100.0 * share,
            100.0 * ENOUGH,
            curve.reaches(ENOUGH) / 1e9,
            shape.rows,
            shape.inner,
            shape.columns,
            shape.operations() / 1e9,
            100.0 * curve.at(shape.operations()) / peak
        )
    }))
}

/// Formats a time for people.
pub fn seconds(value: f64) -> String {
    match value {
        value if value >= 2.0 * 86_400.0 => format!("{:.1} days", value / 86_400.0),
        value if value >= 7_200.0 => format!("{:.1} h", value / 3_600.0),
        value if value >= 120.0 => format!("{:.1} min", value / 60.0),
        value if value >= 1.0 => format!("{value:.2} s"),
        value if value >= 1e-3 => format!("{:.2} ms", value * 1e3),
        value => format!("{:.1} us", value * 1e6),
    }
}
