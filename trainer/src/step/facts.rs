//! What ranks exchange about a step before its norm: first labels and data, then the losses of all micro-batches.

use contract::{Digest, Fault, Result};
use kernels::tree;
use loader::Batch;

use super::{MicroBatchSums, StepContext};
use crate::mesh::axes::Axis;
use crate::mesh::team::PhaseMesh;
use crate::mesh::words::{WordReader, WordWriter};
use crate::model;

/// What is known of a step before its first micro-batch.
pub(super) struct StepFacts {
    pub(super) micro_batches: u64,
    pub(super) label_count: u64,
    /// Pairs of a query and a key in its attention.
    pub(super) pairs: u64,
    pub(super) data: Digest,
}

/// Labels and digests of the whole step. Fails if the ranks are not at the same step.
pub(super) fn head(cx: StepContext<'_>, lines: &PhaseMesh<'_>, batch: &Batch) -> Result<StepFacts> {
    let mut message = WordWriter::default();
    let pairs = model::pairs(&cx.spec.model_at(batch.step)?.config, batch);
    message.word(batch.step).word(batch.label_count).word(pairs).word(batch.sequences.len() as u64);
    batch.sequences.iter().for_each(|digest| {
        message.digest(*digest);
    });
    let gathered = cx.team.all_gather("the gathering of labels", &message)?;
    let (mut labels, mut pairs, mut sequences) = (0, 0, Vec::new());
    for (rank, mut gathered) in gathered.readers().into_iter().enumerate() {
        let step = gathered.word()?;
        if step != batch.step {
            return Err(Fault::bug(format!(
                "rank {rank} is at step {step}, we are at {}",
                batch.step
            )));
        }
        let own = [gathered.word()?, gathered.word()?];
        // Ranks that share micro-batches have read the same data, so only one of them counts.
        if lines.mesh.place(Axis::Sharing, rank as u32) == 0 {
            labels += own[0];
            pairs += own[1];
        }
        let count = gathered.word()?;
        let digests = (0..count).map(|_| gathered.digest()).collect::<Result<Vec<_>>>()?;
        sequences
            .push(digests.chunks(batch.micro_batch as usize).map(<[Digest]>::to_vec).collect());
        gathered.end()?;
    }
    let step = cx.spec.plan.step(batch.step)?;
    let micro_batches = step.batch / step.micro_batch;
    let same = |one: Vec<Digest>, other| match one == other {
        true => Ok(one),
        false => Err(Fault::mismatch("ranks that share a micro-batch have read different text")),
    };
    let sequences: Vec<Vec<Digest>> = lines.in_order(micro_batches, sequences, same)?;
    let data = loader::step_digest(sequences.iter().map(Vec::as_slice));
    Ok(StepFacts { micro_batches, label_count: labels, pairs, data })
}

/// What all ranks report of the micro-batches of a step.
pub(super) struct StepLosses {
    /// Sum of token losses, by the tree over micro-batches.
    pub(super) loss: f64,
    /// By micro-batch, in order.
    pub(super) micro_batches: Vec<MicroBatchSums>,
    /// Tokens by layer and router class.
    pub(super) router: Vec<Vec<u64>>,
}

/// Writes this rank's report: its micro-batches, and the router's counts over them.
pub(super) fn write_losses(message: &mut WordWriter, kept: &[MicroBatchSums], router: &[Vec<u64>]) {
    message.word(kept.len() as u64);
    for MicroBatchSums { loss, z_loss, labels, gradient, rows, token_losses: _ } in kept {
        message.float(*loss).float(*z_loss).word(*labels).word(*gradient).word(rows.len() as u64);
        rows.iter().for_each(|(loss, labels)| {
            message.float(*loss).word(*labels);
        });
    }
    message.word(router.len() as u64);
    for counts in router {
        message.word(counts.len() as u64);
        counts.iter().for_each(|count| {
            message.word(*count);
        });
    }
}

/// Losses of all micro-batches in their order, and the router's counts over all ranks, from their reports. Losses of
/// single tokens are not sent: a rank that is alone has them all in `kept`.
pub(super) fn losses(
    lines: &PhaseMesh<'_>,
    micro_batches: u64,
    kept: Vec<MicroBatchSums>,
    heard: &mut [WordReader<'_>],
) -> Result<StepLosses> {
    let (mut said, mut router) = (Vec::new(), Vec::new());
    for heard in heard {
        let mut of_rank = Vec::new();
        for _ in 0..heard.word()? {
            let (loss, z_loss) = (heard.float()?, heard.float()?);
            let (labels, gradient) = (heard.word()?, heard.word()?);
            let rows = (0..heard.word()?).map(|_| Ok((heard.float()?, heard.word()?)));
            let rows = rows.collect::<Result<_>>()?;
            let token_losses = Vec::new();
            of_rank.push(MicroBatchSums { loss, z_loss, labels, gradient, rows, token_losses });
        }
        said.push(of_rank);
        let layers = heard.word()?;
        let layer = |_| {
            let classes = heard.word()?;
            (0..classes).map(|_| heard.word()).collect()
        };
        let counts: Vec<Vec<u64>> = (0..layers).map(layer).collect::<Result<_>>()?;
        // A rank without micro-batches has no counts.
        if !counts.is_empty() {
            add_counts(&mut router, counts);
        }
    }
    said[lines.team.group.rank() as usize] = kept;
    let micro_batches = lines.in_order(micro_batches, said, joined)?;
    Ok(StepLosses {
        loss: tree::total(micro_batches.iter().map(|one| one.loss)),
        micro_batches,
        router,
    })
}

/// Joins the reports of two ranks that share a micro-batch: equal except for checksums of their slices, which add up.
fn joined(one: MicroBatchSums, other: MicroBatchSums) -> Result<MicroBatchSums> {
    let bits = |of: &MicroBatchSums| [of.loss, of.z_loss].map(f64::to_bits);
    if bits(&one) != bits(&other) || one.labels != other.labels {
        return Err(Fault::mismatch("ranks that share a micro-batch found different losses")
            .found(other.loss)
            .wanted(one.loss));
    }
    let token_losses = match one.token_losses.is_empty() {
        true => other.token_losses,
        false => one.token_losses,
    };
    let gradient = one.gradient.wrapping_add(other.gradient);
    Ok(MicroBatchSums { gradient, token_losses, ..one })
}

/// Adds integers, so any order gives the same sum.
pub(crate) fn add_counts(total: &mut Vec<Vec<u64>>, counts: Vec<Vec<u64>>) {
    if total.is_empty() {
        *total = counts;
        return;
    }
    for (total, counts) in total.iter_mut().zip(counts) {
        total.iter_mut().zip(counts).for_each(|(total, count)| *total += count);
    }
}
