//! Ranks that share the chunks of each micro-batch: they exchange the operands of a layer and reduce the gradients of
//! the chunks. Along `tsp`, a line of their own, ranks also gather each other's weight shards.
//!
//! ```text
//! a chunk's gradient of a parameter --blocks of the chunks here--> each number to the rank of the line on whose line
//! of gradients its owner is --tree over chunks--> the micro-batch's gradient, a slice on each rank of the line
//! ```
//!
//! A rank begins one exchange along the line in a step and closes it at the end, so that all ranks of a line count the
//! same exchanges. Transfers in it follow the order of the computation, which is the same on all of them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use contract::{Fault, Result};
use kernels::addend::Addend;
use kernels::checksum;
use kernels::group::{self, Arrival, Exchange};
use kernels::ops::UsedExperts;
use kernels::tree::{Counter, blocks};
use tch::{Kind, Tensor};

use super::axes::Axis;
use super::slices::Slices;
use super::sum;
use super::team::PhaseMesh;
use crate::model::{
    Assignment, AxisComm, ChunkSum, ExpertNumbers, FirstTerms, GradientSink, GradientTerm, ParamId,
    PendingReceive, ShardedWeights,
};
use crate::refusal::{lost, refused};
use crate::state::{Part, salt};
use crate::timing;

/// The axes' numbers in the group: ranks that share a micro-batch, and ranks that also share its weights.
const SHARING: usize = 1;
const FOLDED: usize = 2;

/// The line of a rank, before a step begins.
pub(crate) struct SharingGroup {
    axis: group::AxisRanks,
    what: &'static str,
    degree: u64,
    place: u64,
}

/// The same during a step.
pub(crate) struct SharingExchange<'a> {
    along: &'a SharingGroup,
    exchange: Mutex<Exchange<'a>>,
    /// How many rounds (transfers that run together) have begun: all positions begin them in the same order.
    rounds: AtomicU64,
    sent: AtomicU64,
}

impl SharingGroup {
    /// The line of the ranks that share micro-batches with this one, if any.
    pub(crate) fn sharing(lines: &PhaseMesh<'_>) -> Result<Option<SharingGroup>> {
        SharingGroup::of(lines, SHARING, Axis::Sharing, "the sharing of micro-batches")
    }

    /// The line of the ranks that shard the weights with this one.
    pub(crate) fn folded(lines: &PhaseMesh<'_>) -> Result<Option<SharingGroup>> {
        SharingGroup::of(lines, FOLDED, Axis::Tsp, "the handing over of shards")
    }

    fn of(
        lines: &PhaseMesh<'_>,
        number: usize,
        axis: Axis,
        what: &'static str,
    ) -> Result<Option<SharingGroup>> {
        let (mesh, rank) = (lines.mesh, lines.team.group.rank());
        let (line, place) = (mesh.line(axis, rank), u64::from(mesh.place(axis, rank)));
        if line.len() == 1 {
            return Ok(None);
        }
        let axis = lines.team.group.axis(number, &line).map_err(lost)?;
        Ok(Some(SharingGroup { axis, what, degree: line.len() as u64, place }))
    }

    /// Begins a step. Every rank of the line must call it, whatever it computes.
    pub(crate) fn begin(&self) -> Result<SharingExchange<'_>> {
        let exchange = self.axis.begin(self.what).map_err(lost)?;
        let exchange = Mutex::new(exchange);
        Ok(SharingExchange {
            along: self,
            exchange,
            rounds: AtomicU64::new(0),
            sent: AtomicU64::new(0),
        })
    }

    /// How `chunks` chunks are assigned to the line.
    pub(crate) fn dealt(&self, chunks: u64) -> Assignment {
        Assignment { chunks, degree: self.degree, place: self.place }
    }
}

impl SharingExchange<'_> {
    /// Ends the step once everything has been sent; returns how many bytes were sent.
    pub(crate) fn finish(self) -> Result<u64> {
        let exchange = self.exchange.into_inner().unwrap_or_else(PoisonError::into_inner);
        exchange.finish().map_err(lost)?;
        Ok(self.sent.into_inner())
    }
}

impl AxisComm for SharingExchange<'_> {
    fn place(&self) -> u64 {
        self.along.place
    }

    fn degree(&self) -> u64 {
        self.along.degree
    }

    fn begin(
        &self,
        _: &'static str,
        give: &[Tensor],
        take: &[i64],
        kind: Kind,
    ) -> kernels::Result<Box<dyn PendingReceive + '_>> {
        let _watch = timing::part(timing::StepPart::Send);
        let mut exchange = self.exchange.lock().unwrap_or_else(PoisonError::into_inner);
        let (members, mut arrivals) = (self.along.axis.members(), Vec::new());
        let round = self.rounds.fetch_add(1, Ordering::Relaxed);
        for (place, (rank, count)) in (0..).zip(members.iter().zip(take)) {
            let count = if place == self.along.place { 0 } else { *count };
            arrivals.push(exchange.receive(round, *rank, kind, count)?);
        }
        for (place, (rank, tensor)) in (0..).zip(members.iter().zip(give)) {
            if place != self.along.place {
                exchange.send(round, *rank, tensor)?;
                let bytes = tensor.numel() * tensor.kind().elt_size_in_bytes();
                self.sent.fetch_add(bytes as u64, Ordering::Relaxed);
            }
        }
        exchange.close(round)?;
        let begun = exchange.begun();
        Ok(Box::new(PendingBlocks { exchange: &self.exchange, arrivals, begun }))
    }
}

/// Transfers under way from each rank of the line.
struct PendingBlocks<'a, 'b> {
    exchange: &'b Mutex<Exchange<'a>>,
    arrivals: Vec<Arrival<'a>>,
    /// How many sends had begun with this round and before it.
    begun: usize,
}

impl PendingReceive for PendingBlocks<'_, '_> {
    fn wait(self: Box<Self>) -> kernels::Result<Vec<Tensor>> {
        let _watch = timing::part(timing::StepPart::Blocks);
        let PendingBlocks { exchange, arrivals, begun } = *self;
        let found = arrivals.into_iter().map(Arrival::wait).collect::<kernels::Result<_>>()?;
        // The others have begun to receive these sends, or are about to, so their memory is released.
        exchange.lock().unwrap_or_else(PoisonError::into_inner).left(begun)?;
        Ok(found)
    }
}

/// How ranks share micro-batches.
#[derive(Clone, Copy)]
pub(crate) struct SharedMicroBatch<'a> {
    pub(crate) line: &'a dyn AxisComm,
    /// Which position has which chunks.
    pub(crate) dealt: Assignment,
    /// Which position adds which numbers.
    pub(crate) slices: &'a Slices,
    /// Which position holds which weight shards; `None` where each has the whole weights.
    pub(crate) folded: Option<ShardedWeights<'a>>,
}

/// The gradient sink of a shared micro-batch: it passes on this rank's slice of each gradient.
pub(crate) struct SharedSink<'a, 'b> {
    shared: SharedMicroBatch<'a>,
    /// Where slices are added, and the micro-batch's number; `None` if only the checksum is needed.
    into: Option<(&'a sum::GradientSum<'b>, u64)>,
    /// Transfers under way, oldest first: one parameter is sent while the next one is computed.
    under_way: VecDeque<PendingParameter<'a>>,
    /// First terms of parameters whose second term is not there yet.
    first: FirstTerms,
    /// The checksum of this rank's slices.
    checksum: checksum::RunningChecksum,
}

/// A parameter's blocks of all chunks, under way to this rank.
struct PendingParameter<'a> {
    id: ParamId,
    term: GradientTerm,
    sums: Vec<ChunkSum>,
    numbers: Box<dyn PendingReceive + 'a>,
    /// For stacked experts: the number of elements, and the experts in the first local block and in each other.
    experts: Option<(i64, UsedExperts, Box<dyn PendingReceive + 'a>)>,
}

impl<'a, 'b> SharedSink<'a, 'b> {
    /// The sink of a micro-batch whose slices are added to `into`.
    pub(crate) fn new(
        shared: SharedMicroBatch<'a>,
        into: Option<(&'a sum::GradientSum<'b>, u64)>,
    ) -> Self {
        let (under_way, first) = (VecDeque::new(), FirstTerms::default());
        SharedSink { shared, into, under_way, first, checksum: Default::default() }
    }

    /// Waits for the transfers under way; returns the checksum of this rank's slices of the micro-batch's gradient.
    pub(crate) fn finish(mut self) -> Result<checksum::RunningChecksum> {
        while let Some(travelling) = self.under_way.pop_front() {
            self.add(travelling)?;
        }
        Ok(self.checksum)
    }

    /// Adds the blocks of all chunks to this rank's slice.
    fn add(&mut self, travelling: PendingParameter<'_>) -> Result<()> {
        let PendingParameter { id, term, sums, numbers, experts } = travelling;
        let SharedMicroBatch { dealt, slices, .. } = self.shared;
        let ranges = slices.of(id.index(), dealt.place);
        let length = slices.length(id.index(), dealt.place);
        let numbers = numbers.wait().map_err(refused)?;
        let experts = match experts {
            Some((elements, like, marks)) => Some((elements, like, marks.wait().map_err(refused)?)),
            None => None,
        };
        let _watch = timing::part(timing::StepPart::Tree);
        let (mut sum, mut sums) = (Counter::new(), sums.into_iter());
        for place in 0..dealt.degree {
            for (at, (level, _)) in (0..).zip(levels(dealt, place)) {
                if place == dealt.place {
                    let sums = sums.next().ok_or_else(missing)?;
                    sum.push_block(level, sums).map_err(refused)?;
                    continue;
                }
                let gradient = numbers[place as usize].f_narrow(0, at * length, length);
                let gradient = gradient.map_err(refused)?;
                let experts = match &experts {
                    Some((elements, like, marks)) => {
                        let count = like.experts() as i64;
                        let marks = marks[place as usize].f_narrow(0, at * count, count);
                        let marks = marks.map_err(refused)?;
                        Some(ExpertNumbers::of(
                            ExpertNumbers::marked(like, &marks)?,
                            *elements,
                            ranges,
                        ))
                    }
                    None => None,
                };
                sum.push_block(level, ChunkSum { gradient, experts }).map_err(refused)?;
            }
        }
        let sum = sum.finish().map_err(refused)?.ok_or_else(missing)?.gradient;
        let Some(sum) = self.first.join(id, term, sum)? else { return Ok(()) };
        let mut at = 0;
        for range in ranges {
            let part = sum.f_narrow(0, at, range.end - range.start).map_err(refused)?;
            at += range.end - range.start;
            let salt = salt(Part::MicroBatchGradient, id.index());
            self.checksum.add(&[(&part, range.start as u64, salt)]).map_err(refused)?;
        }
        self.into.map_or(Ok(()), |(all, micro_batch)| {
            all.add(micro_batch, vec![(id.index(), sum.into())])
        })
    }
}

impl GradientSink for SharedSink<'_, '_> {
    fn gradient(&mut self, id: ParamId, _: Addend) -> Result<()> {
        Err(Fault::bug(format!(
            "parameter {} has a whole gradient on one of several ranks",
            id.index()
        )))
    }

    fn part(&mut self, id: ParamId, term: GradientTerm, parts: Vec<ChunkSum>) -> Result<()> {
        let SharedMicroBatch { line, dealt, slices, .. } = self.shared;
        let sums = parts.iter().map(|part| part.cut(slices.of(id.index(), dealt.place)));
        let sums = sums.collect::<kernels::Result<_>>().map_err(refused)?;
        let give = (0..dealt.degree).map(|place| {
            let other = place != dealt.place;
            let ranges: &[Range<i64>] = if other { slices.of(id.index(), place) } else { &[] };
            ChunkSum::numbers(&parts, ranges)
        });
        let give = give.collect::<kernels::Result<Vec<_>>>().map_err(refused)?;
        let count = |place| levels(dealt, place).len() as i64;
        let length = slices.length(id.index(), dealt.place);
        let take: Vec<i64> = (0..dealt.degree).map(|place| count(place) * length).collect();
        let numbers = line.begin("gradients of chunks", &give, &take, Kind::Float);
        let numbers = numbers.map_err(refused)?;
        let experts = match parts[0].experts.as_ref() {
            Some(used) => {
                let device = parts[0].gradient.device();
                let marks = parts.iter().filter_map(|part| part.experts.as_ref());
                let marks =
                    marks.map(|used| used.marks(device)).collect::<kernels::Result<Vec<_>>>();
                let marks =
                    marks.and_then(|marks| Ok(Tensor::f_cat(&marks, 0)?)).map_err(refused)?;
                let give: Vec<Tensor> = (0..dealt.degree).map(|_| marks.shallow_clone()).collect();
                let experts = used.present.experts() as i64;
                let take = (0..dealt.degree).map(|place| count(place) * experts);
                let take: Vec<i64> = take.collect();
                let coming = line.begin("gradients of chunks", &give, &take, Kind::Uint8);
                let like = used.present.shared();
                Some((parts[0].gradient.numel() as i64, like, coming.map_err(refused)?))
            }
            None => None,
        };
        self.under_way.push_back(PendingParameter { id, term, sums, numbers, experts });
        match self.under_way.len() > 1 {
            true => self.under_way.pop_front().map_or(Ok(()), |travelling| self.add(travelling)),
            false => Ok(()),
        }
    }
}

/// The blocks of the tree over chunks that a position has.
fn levels(dealt: Assignment, place: u64) -> Vec<(u32, u64)> {
    let leaves = dealt.leaves(place);
    blocks(leaves.start, leaves.end)
}

fn missing() -> Fault {
    Fault::bug("a block of a sum over chunks is missing")
}
