//! One step on many ranks: the same expression as on one, evaluated where its parts are.
//!
//! ```text
//! 1 head     step, labels, sequence digests              everybody to everybody, small
//! 2 blocks   sums of whole subtrees, as soon as they are done, to the owners of their pieces
//! 3 losses   loss, labels and checksum of each leaf; router counts                     small
//! 4 norm     checksum and chunk squares of each piece of G                             small
//! 5 weights  each owner's new weights to everybody
//! 6 sums     checksums of each piece of the state; whether somebody was asked to stop  small
//! ```
//!
//! Subtree-first: a rank has contiguous leaves, adds the largest aligned blocks among them by itself (one where the
//! number of ranks is a power of two that divides the leaves), and sends only those.

use contract::{Digest, Fault, Result};
use kernels::checksum;
use kernels::group::{Arrival, Exchange, Group};
use kernels::tree::{Counter, blocks};
use loader::{Batch, RankSlice};
use tch::{Kind, Tensor};

use super::lost;
use super::owners::Piece;
use super::shard::{Shard, pack};
use super::words::{Reader, Writer};
use crate::lanes::Lanes;
use crate::ledger::StepRecord;
use crate::model::LeafOutput;
use crate::optim::norm;
use crate::spec::RunSpec;
use crate::state::{Part, StateSums, salt};
use crate::step::{self, Detail, Gradient, LeafSums, Leaves};

/// What a step came to.
pub struct Stepped {
    /// The ledger's line, the same on every rank.
    pub record: StepRecord,
    /// Whether any rank was asked to stop.
    pub stop: bool,
}

/// What is known of a step before its first leaf.
struct Head {
    divisor: u64,
    data: Digest,
}

/// Computes one step: `batch` and `leaves` are this rank's part. `asked` is asked at the end whether to stop.
pub fn advance(
    spec: &RunSpec,
    shard: &mut Shard,
    (batch, leaves): (&Batch, &Leaves),
    (group, lanes): (&Group, Lanes),
    asked: impl Fn() -> bool,
) -> Result<Stepped> {
    let step = shard.step + 1;
    group.reached(&format!("step {step}"));
    let head = head(group, batch)?;
    let (gradient, own) = gradient(spec, shard, (batch, leaves), &head, (group, lanes))?;
    step::check_losses(step, &gradient.leaves)?;
    let (checksums, norm) = norm_of(group, shard, &own, lanes)?;
    step::check_norm(step, norm)?;
    let lr = spec.settings.schedule.rate(step);
    let (decision, at) = step::decide(spec, &mut shard.windows, &gradient, (step, lr, norm));
    if decision.moves() {
        shard.update(&spec.settings, &own, at, lanes)?;
    }
    drop(own);
    if decision.moves() {
        step::update_balance(spec, (step, at.step), &mut shard.balance, &gradient.router)?;
        shard.share_weights(group)?;
    }
    shard.step = step;
    let (sums, stop) = sums(group, shard, lanes, asked())?;
    let moved = (lr, norm, decision, checksums);
    let record = step::record(spec, (step, head.data), &gradient, moved, sums)?;
    Ok(Stepped { record, stop })
}

/// Labels and digests of the whole step. Ranks that are not at the same step are found out here.
fn head(group: &Group, batch: &Batch) -> Result<Head> {
    let mut mine = Writer::default();
    mine.word(batch.step).word(batch.label_count).word(batch.sequences.len() as u64);
    batch.sequences.iter().for_each(|digest| {
        mine.digest(*digest);
    });
    let heard = group.all_gather("the gathering of labels", mine.bytes()).map_err(lost)?;
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
        sequences.push((0..count).map(|_| heard.digest()).collect::<Result<Vec<_>>>()?);
        heard.end()?;
    }
    let data = loader::step_digest(sequences.iter().map(Vec::as_slice));
    Ok(Head { divisor: labels.max(1), data })
}

/// The subtrees of a rank: adds leaves as they come and hands on each block that is complete.
struct Blocks {
    left: std::vec::IntoIter<(u32, u64)>,
    now: Option<(u32, Counter<Vec<Tensor>>)>,
}

impl Blocks {
    fn new(leaves: std::ops::Range<u64>) -> Self {
        Blocks { left: blocks(leaves.start, leaves.end).into_iter(), now: None }
    }

    /// Takes the next leaf; returns the block's sum if that was its last.
    fn push(&mut self, leaf: Vec<Tensor>) -> Option<Vec<Tensor>> {
        let next = || self.left.next().map(|(level, _)| (level, Counter::new()));
        let (level, mut counter) = self.now.take().or_else(next)?;
        counter.push(leaf);
        if counter.leaves() < 1 << level {
            self.now = Some((level, counter));
            return None;
        }
        counter.finish()
    }
}

/// Computes this rank's leaves and adds this rank's pieces of everybody's. The gradient that is returned has no tensors;
/// those of this rank's pieces come beside it.
fn gradient(
    spec: &RunSpec,
    shard: &Shard,
    (batch, leaves): (&Batch, &Leaves),
    head: &Head,
    (group, lanes): (&Group, Lanes),
) -> Result<(Gradient, Vec<Tensor>)> {
    let step = spec.plan.step(batch.step)?;
    let count = step.batch / step.leaf;
    let part = |rank| RankSlice::new(rank, group.world()).map(|slice| slice.leaves(count));
    let own = part(group.rank())?;
    let mut exchange = group.begin("the gathering of gradients").map_err(lost)?;
    // Asked for before anything is computed, so that what is ready travels while leaves are still being computed.
    let arrivals =
        group.others().map(|from| Ok((from, expect(&exchange, shard, from, part(from)?)?)));
    let mut arrivals = arrivals.collect::<Result<std::collections::BTreeMap<_, _>>>()?;
    let (mut subtrees, mut mine) = (Blocks::new(own.clone()), Vec::new());
    let (mut kept, mut router) = (Vec::new(), Vec::new());
    let pieces = shard.pieces();
    let take = |sums: LeafSums, output: LeafOutput| {
        kept.push(sums);
        step::add_counts(&mut router, output.counts);
        if let Some(block) = subtrees.push(output.grads) {
            send(&mut exchange, group, pieces, &block)?;
            mine.push(pack(pieces, group.rank(), &block));
        }
        Ok(())
    };
    let begun = |leaf| group.reached(&format!("step {}, leaf {}", batch.step, own.start + leaf));
    let frozen = (shard.weights.as_slice(), shard.balance.as_slice());
    let detail = (head.divisor, Detail::Sums);
    step::each_leaf(spec, frozen, batch, leaves, lanes, detail, begun, take)?;
    let gradient = losses(group, head.divisor, count, kept, router)?;
    let mut sum = Counter::new();
    for rank in 0..group.world() {
        for (level, _) in blocks(part(rank)?.start, part(rank)?.end) {
            let arrived = match arrivals.get_mut(&rank) {
                Some(arrivals) => arrivals.next().map(Arrival::wait).transpose().map_err(lost)?,
                None => None,
            };
            let block = match arrived {
                Some(block) => block,
                None => mine.remove(0),
            };
            sum.push_block(level, block);
        }
    }
    exchange.finish().map_err(lost)?;
    let sum = sum.finish().ok_or_else(|| Fault::bug("a step had no leaves"))?;
    let sum = sum.to_device(shard.weights[0].device());
    Ok((gradient, shard.unpack(group.rank(), &sum)))
}

/// Begins to receive this rank's pieces of each block of `from`.
fn expect<'a>(
    exchange: &Exchange<'a>,
    shard: &Shard,
    from: u32,
    leaves: std::ops::Range<u64>,
) -> Result<std::vec::IntoIter<Arrival<'a>>> {
    let length = shard.length(exchange.rank());
    let arrival = |_| exchange.receive(from, Kind::Float, length).map_err(lost);
    let arrivals: Vec<_> =
        blocks(leaves.start, leaves.end).into_iter().map(arrival).collect::<Result<_>>()?;
    Ok(arrivals.into_iter())
}

/// Sends everybody their pieces of a block.
fn send(
    exchange: &mut Exchange<'_>,
    group: &Group,
    pieces: &[Piece],
    block: &[Tensor],
) -> Result<()> {
    for to in group.others() {
        exchange.send(to, &pack(pieces, to, block)).map_err(lost)?;
    }
    Ok(())
}

/// Losses of all leaves in leaf order, and the router's counts over all ranks.
fn losses(
    group: &Group,
    divisor: u64,
    leaves: u64,
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
    let heard = group.all_gather("the gathering of losses", mine.bytes()).map_err(lost)?;
    let (mut all, mut router, mut tree) = (Vec::new(), Vec::new(), Counter::new());
    for heard in &heard {
        let mut heard = Reader::new(heard);
        for _ in 0..heard.word()? {
            let (loss, labels, gradient) = (heard.float()?, heard.word()?, heard.word()?);
            tree.push(loss);
            let rows = (0..heard.word()?).map(|_| Ok((heard.float()?, heard.word()?)));
            let rows = rows.collect::<Result<_>>()?;
            all.push(LeafSums { loss, labels, gradient, rows, token_losses: Vec::new() });
        }
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
    if all.len() as u64 != leaves {
        return Err(Fault::bug(format!("{} leaves were computed of {leaves}", all.len())));
    }
    let loss = tree.finish().unwrap_or(0.0);
    Ok(Gradient { divisor, loss, tensors: Vec::new(), leaves: all, router })
}

/// The checksum of each tensor of the summed gradient, and its norm.
fn norm_of(group: &Group, shard: &Shard, own: &[Tensor], lanes: Lanes) -> Result<(Vec<u64>, f64)> {
    let items = shard.of(group.rank()).cloned().zip(own.iter().map(Tensor::shallow_clone));
    let found = lanes.map(items.collect(), |(piece, gradient): (Piece, Tensor)| {
        let salt = salt(Part::Gradient, piece.tensor);
        Ok((checksum::slice(&gradient, piece.first as u64, salt), norm::chunks(&gradient)))
    })?;
    let mut mine = Writer::default();
    for (checksum, squares) in &found {
        mine.word(*checksum);
        squares.iter().for_each(|square| {
            mine.float(*square);
        });
    }
    let heard = group.all_gather("the gathering of norms", mine.bytes()).map_err(lost)?;
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

/// The checksums of the whole state after the step, and whether anybody was asked to stop.
fn sums(group: &Group, shard: &Shard, lanes: Lanes, stop: bool) -> Result<(StateSums, bool)> {
    let mut mine = Writer::default();
    mine.word(u64::from(stop));
    shard.say_sums(&mut mine, lanes)?;
    let heard = group.all_gather("the gathering of checksums", mine.bytes()).map_err(lost)?;
    let mut heard: Vec<_> = heard.iter().map(|heard| Reader::new(heard)).collect();
    let mut stop = false;
    for heard in &mut heard {
        stop |= heard.word()? != 0;
    }
    let sums = shard.hear_sums(&mut heard)?;
    heard.into_iter().try_for_each(Reader::end)?;
    Ok((sums, stop))
}
