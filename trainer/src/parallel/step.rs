//! One step on many ranks: the same expression as on one, evaluated where its parts are.
//!
//! ```text
//! 1 head     step, labels, sequence digests              everybody to everybody, small
//! 2 blocks   sums of whole subtrees, as soon as they are done, to the owners of their pieces: see `gather`
//! 3 losses   loss, labels and checksum of each leaf; router counts                     small
//! 4 norm     checksum and chunk squares of each piece of G                             small
//! 5 weights  each owner's new weights to everybody
//! 6 sums     checksums of each piece of the state; whether somebody was asked to stop  small
//! ```

use std::time::{Duration, Instant};

use contract::{Digest, Fault, Result};
use kernels::checksum;
use kernels::group::{Group, Sent};
use kernels::tree::Counter;
use loader::Batch;
use tch::Tensor;

use super::shard::Shard;
use crate::ledger::StepRecord;
use crate::mesh::Team;
use crate::mesh::gather::Gather;
use crate::mesh::words::{Reader, Writer};
use crate::model::LeafOutput;
use crate::optim::norm;
use crate::refusal::lost;
use crate::spec::RunSpec;
use crate::state::ownership::Piece;
use crate::state::{Part, StateSums, salt};
use crate::step::{self, Detail, Gradient, LeafSums, Leaves};
use crate::timing;
use crate::workers::Workers;

/// What a step came to.
pub struct Stepped {
    /// The ledger's line, the same on every rank.
    pub record: StepRecord,
    /// Whether any rank was asked to stop.
    pub stop: bool,
    /// What all ranks together have sent, up to the last small exchange.
    pub sent: Sent,
    /// The longest that a rank waited for blocks of the gradient when all leaves had been computed.
    pub waited: Duration,
}

/// What is known of a step before its first leaf.
struct Head {
    leaves: u64,
    divisor: u64,
    data: Digest,
}

/// Computes one step: `batch` and `leaves` are this rank's part. `asked` is asked at the end whether to stop.
pub fn advance(
    spec: &RunSpec,
    shard: &mut Shard,
    (batch, leaves): (&Batch, &Leaves),
    (team, workers): (&Team<'_>, Workers),
    asked: impl Fn() -> bool,
) -> Result<Stepped> {
    let (step, group) = (shard.step + 1, team.group);
    let before = group.sent();
    group.reached(&format!("step {step}"));
    let head = head(spec, team, batch)?;
    let (gradient, own, waited) = gradient(spec, shard, (batch, leaves), &head, (team, workers))?;
    step::check_losses(step, &gradient.leaves)?;
    let (checksums, norm) = norm_of(group, shard, &own, workers)?;
    step::check_norm(step, norm)?;
    let lr = spec.settings.schedule.rate(step);
    let (decision, at) = step::decide(spec, &mut shard.windows, &gradient, (step, lr, norm));
    if decision.moves() {
        shard.update(&spec.settings, &own, at, workers)?;
    }
    drop(own);
    if decision.moves() {
        step::update_balance(spec, (step, at.step), &mut shard.balance, &gradient.router)?;
        shard.share_weights(team)?;
    }
    shard.step = step;
    let sent = group.sent();
    let between_nodes = sent.between_nodes - before.between_nodes;
    let sent = Sent { all: sent.all - before.all, between_nodes };
    let (sums, stop, (sent, waited)) = sums(group, shard, workers, (asked(), sent, waited))?;
    let moved = (lr, norm, decision, checksums);
    let record = step::record(spec, (step, head.data), &gradient, moved, sums)?;
    Ok(Stepped { record, stop, sent, waited })
}

/// Labels and digests of the whole step. Ranks that are not at the same step are found out here.
fn head(spec: &RunSpec, team: &Team<'_>, batch: &Batch) -> Result<Head> {
    let mut mine = Writer::default();
    mine.word(batch.step).word(batch.label_count).word(batch.sequences.len() as u64);
    batch.sequences.iter().for_each(|digest| {
        mine.digest(*digest);
    });
    let heard = team.group.all_gather("the gathering of labels", mine.bytes()).map_err(lost)?;
    let (mut labels, mut sequences) = (0, Vec::new());
    for (rank, heard) in heard.iter().enumerate() {
        let mut heard = Reader::new(heard);
        let step = heard.word()?;
        if step != batch.step {
            return Err(Fault::bug(format!(
                "rank {rank} is at step {step}, we are at {}",
                batch.step
            )));
        }
        labels += heard.word()?;
        let count = heard.word()?;
        let digests = (0..count).map(|_| heard.digest()).collect::<Result<Vec<_>>>()?;
        sequences
            .push(digests.chunks(batch.micro_batch as usize).map(<[Digest]>::to_vec).collect());
        heard.end()?;
    }
    let step = spec.plan.step(batch.step)?;
    let leaves = step.batch / step.micro_batch;
    let sequences: Vec<Vec<Digest>> = team.in_order(leaves, sequences)?;
    let data = loader::step_digest(sequences.iter().map(Vec::as_slice));
    Ok(Head { leaves, divisor: labels.max(1), data })
}

/// Computes this rank's leaves and adds this rank's pieces of everybody's. The gradient that is returned has no tensors;
/// those of this rank's pieces come beside it, and how long they were waited for after the last leaf of all.
fn gradient(
    spec: &RunSpec,
    shard: &Shard,
    (batch, leaves): (&Batch, &Leaves),
    head: &Head,
    (team, workers): (&Team<'_>, Workers),
) -> Result<(Gradient, Vec<Tensor>, Duration)> {
    let mut gather = Gather::begin(team, shard.pieces(), head.leaves)?;
    let own = gather.leaves();
    let (mut kept, mut router) = (Vec::new(), Vec::new());
    let take = |sums: LeafSums, output: LeafOutput| {
        kept.push(sums);
        step::add_counts(&mut router, output.counts);
        gather.leaf(output.grads)
    };
    let begun = |leaf: u64| {
        team.group.reached(&format!("step {}, micro-batch {}", batch.step, own[leaf as usize]));
    };
    let frozen = (shard.weights.as_slice(), shard.balance.as_slice());
    let detail = (head.divisor, Detail::Sums);
    step::each_leaf(spec, frozen, batch, leaves, workers, detail, begun, take)?;
    let gradient = losses(team, head, kept, router)?;
    let start = Instant::now();
    let sum = gather.finish()?;
    let waited = start.elapsed();
    Ok((gradient, shard.unpack(team.group.rank(), &sum), waited))
}

/// Losses of all leaves in leaf order, and the router's counts over all ranks.
fn losses(
    team: &Team<'_>,
    head: &Head,
    kept: Vec<LeafSums>,
    router: Vec<Vec<u64>>,
) -> Result<Gradient> {
    let mut mine = Writer::default();
    mine.word(kept.len() as u64);
    for LeafSums { loss, labels, gradient, rows, token_losses: _ } in &kept {
        mine.float(*loss).word(*labels).word(*gradient).word(rows.len() as u64);
        rows.iter().for_each(|(loss, labels)| {
            mine.float(*loss).word(*labels);
        });
    }
    mine.word(router.len() as u64);
    for counts in &router {
        mine.word(counts.len() as u64);
        counts.iter().for_each(|count| {
            mine.word(*count);
        });
    }
    let heard = {
        let _watch = timing::part(timing::Part::Peers);
        team.group.all_gather("the gathering of losses", mine.bytes()).map_err(lost)?
    };
    let (mut said, mut router) = (Vec::new(), Vec::new());
    for heard in &heard {
        let (mut heard, mut of_rank) = (Reader::new(heard), Vec::new());
        for _ in 0..heard.word()? {
            let (loss, labels, gradient) = (heard.float()?, heard.word()?, heard.word()?);
            let rows = (0..heard.word()?).map(|_| Ok((heard.float()?, heard.word()?)));
            let rows = rows.collect::<Result<_>>()?;
            of_rank.push(LeafSums { loss, labels, gradient, rows, token_losses: Vec::new() });
        }
        said.push(of_rank);
        let layers = heard.word()?;
        let layer = |_| {
            let classes = heard.word()?;
            (0..classes).map(|_| heard.word()).collect()
        };
        let counts: Vec<Vec<u64>> = (0..layers).map(layer).collect::<Result<_>>()?;
        // A rank without leaves has counted nothing.
        if !counts.is_empty() {
            step::add_counts(&mut router, counts);
        }
        heard.end()?;
    }
    let (leaves, mut tree) = (team.in_order(head.leaves, said)?, Counter::new());
    leaves.iter().for_each(|leaf| tree.push(leaf.loss));
    let loss = tree.finish().unwrap_or(0.0);
    Ok(Gradient { divisor: head.divisor, loss, tensors: Vec::new(), leaves, router })
}

/// The checksum of each tensor of the summed gradient, and its norm.
fn norm_of(
    group: &Group,
    shard: &Shard,
    own: &[Tensor],
    workers: Workers,
) -> Result<(Vec<u64>, f64)> {
    let items = shard.of(group.rank()).cloned().zip(own.iter().map(Tensor::shallow_clone));
    let found = workers.map(items.collect(), |(piece, gradient): (Piece, Tensor)| {
        let _watch = timing::part(timing::Part::Norm);
        let salt = salt(Part::Gradient, piece.tensor);
        let squares = norm::chunks(workers.ops(), &gradient)?;
        Ok((checksum::slice(&gradient, piece.first as u64, salt), squares))
    })?;
    let mut mine = Writer::default();
    for (checksum, squares) in &found {
        mine.word(*checksum);
        squares.iter().for_each(|square| {
            mine.float(*square);
        });
    }
    let heard = {
        let _watch = timing::part(timing::Part::Peers);
        group.all_gather("the gathering of norms", mine.bytes()).map_err(lost)?
    };
    let mut heard: Vec<_> = heard.iter().map(|heard| Reader::new(heard)).collect();
    let mut checksums = vec![0u64; shard.weights.len()];
    let mut squares = vec![Vec::new(); shard.weights.len()];
    for piece in shard.pieces() {
        let heard = &mut heard[piece.owner as usize];
        checksums[piece.tensor] = checksums[piece.tensor].wrapping_add(heard.word()?);
        for _ in 0..piece.chunks() {
            squares[piece.tensor].push(heard.float()?);
        }
    }
    heard.into_iter().try_for_each(Reader::end)?;
    let squares: Vec<f64> = squares.iter().map(|chunks| norm::sum(chunks)).collect();
    Ok((checksums, norm::norm(&squares)))
}

/// The checksums of the whole state after the step; whether anybody was asked to stop; what all have sent, and the longest
/// wait.
fn sums(
    group: &Group,
    shard: &Shard,
    workers: Workers,
    (stop, sent, waited): (bool, Sent, Duration),
) -> Result<(StateSums, bool, (Sent, Duration))> {
    let mut mine = Writer::default();
    mine.word(u64::from(stop)).word(sent.all).word(sent.between_nodes);
    mine.word(waited.as_nanos() as u64);
    shard.say_sums(&mut mine, workers)?;
    let heard = {
        let _watch = timing::part(timing::Part::Peers);
        group.all_gather("the gathering of checksums", mine.bytes()).map_err(lost)?
    };
    let mut heard: Vec<_> = heard.iter().map(|heard| Reader::new(heard)).collect();
    let (mut stop, mut sent, mut waited) = (false, Sent::default(), Duration::ZERO);
    for heard in &mut heard {
        stop |= heard.word()? != 0;
        sent.all += heard.word()?;
        sent.between_nodes += heard.word()?;
        waited = waited.max(Duration::from_nanos(heard.word()?));
    }
    let sums = shard.hear_sums(&mut heard)?;
    heard.into_iter().try_for_each(Reader::end)?;
    Ok((sums, stop, (sent, waited)))
}
