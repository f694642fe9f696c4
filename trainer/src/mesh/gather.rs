//! Gradient reduction between ranks: from micro-batches to the owners of pieces, always as the same tree of sums.
//!
//! ```text
//! micro-batches of a rank in a round --add--> its blocks --pieces--> the leaders of its machine, each piece to one
//! leader: blocks of the machine's ranks --add--> blocks of the machine --pieces--> their owners
//! owner: blocks of every machine in the order of micro-batches --add--> its pieces of G
//! ```
//!
//! The leaves of the fixed tree are micro-batches. The blocks of a part are the maximal aligned runs of leaves in it:
//! nodes of the tree, independent of the rank that adds them. Pieces for owners on the same machine take the same path,
//! so a single machine is no special case.
//!
//! Ranks here are positions on the line of gradients (`team::PhaseMesh`): all ranks, unless some share micro-batches.
//! If some do, each has the slice of a gradient that its line owns, and pieces and owners refer to it (`slices`).
//!
//! `whole` has one round, in which each rank has a run of micro-batches, and one bucket that holds every parameter: a
//! block is sent once its micro-batches are computed. `bucketed` has a round for each micro-batch of a rank and a
//! bucket for each layer: the gradients of a layer are sent while the backward pass of the layers below runs. One
//! bucket of one round is a stage. Every rank handles all stages in the same order: it sends its blocks of a stage,
//! then adds what was sent [`BEHIND`] stages before, on several machines twice as many. So peak memory depends on the
//! number of ranks and the largest layer, not on the number of micro-batches or the size of the model.
//!
//! No deadlock: a rank at stage t waits only for what others sent in stages before t, or for messages of layers that it
//! has reached itself. So the rank that is furthest behind never waits.
//!
//! Transfers between devices come in rounds of the exchange (see `kernels::group`), which both ends number alike. First
//! come the blocks of a stage that stay on a machine, the k-th of every rank together; then those that leave it, the
//! k-th of every machine. A rank closes the rounds in that order, each as soon as it has computed or added what it
//! sends: nothing that it must receive before that belongs to a later round. Between CPUs rounds have no effect.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use contract::{Fault, Result};
use kernels::addend;
use kernels::group::{Arrival, Exchange};
use kernels::tree::{self, Blocks, Counter, blocks};
use tch::{Device, Kind, Tensor};

use super::buckets::{self, Buckets};
use super::gradients::{MicroBatchGradients, TOGETHER};
use super::team::{GradReduce, PhaseMesh};
use crate::refusal::{lost, refused};
use crate::state::ownership::ParamShard;
use crate::timing;

/// How many stages sending is ahead of adding.
pub(crate) const BEHIND: usize = 2;

/// The gradient reduction of one step, under way.
pub(crate) struct GradientReduction<'a> {
    lines: &'a PhaseMesh<'a>,
    pieces: &'a [ParamShard],
    buckets: Buckets,
    /// The elements of each bucket that each rank owns.
    lengths: Vec<Vec<i64>>,
    exchange: Exchange<'a>,
    /// The micro-batches of each position, by round.
    parts: Vec<Vec<Range<u64>>>,
    /// This rank's next micro-batch: its round, and its index in it.
    at: (usize, u64),
    /// How many parameters of a bucket have gradients, by micro-batch and bucket.
    came: BTreeMap<(u64, usize), usize>,
    /// The next stage that this rank sends.
    stage: usize,
    /// How many blocks of that stage it has sent.
    sent: u64,
    /// For each stage that may still be under way: how many sends had begun when it was sent.
    leaving: VecDeque<usize>,
    /// This rank's payload for itself, of each of its blocks.
    payloads: VecDeque<Tensor>,
    /// Arrivals from each rank by block: from this machine for this rank as leader, or from a leader elsewhere.
    coming: Vec<VecDeque<Arrival<'a>>>,
    /// This rank's pieces of this machine's blocks.
    joined: VecDeque<Tensor>,
    /// Sums of this rank's pieces, by bucket.
    sums: Vec<Counter<Tensor>>,
    /// The next stage to receive, to join on this machine, and to add as owner.
    next: [usize; 3],
}

impl<'a> GradientReduction<'a> {
    /// Begins a step of `leaves` micro-batches. Receives of the first stages are posted before anything is computed, so
    /// that finished blocks are sent while micro-batches are still being computed.
    pub(crate) fn begin(
        lines: &'a PhaseMesh<'a>,
        pieces: &'a [ParamShard],
        buckets: Buckets,
        leaves: u64,
    ) -> Result<Self> {
        let parts = lines.parts(leaves)?;
        let coming = parts.iter().map(|_| VecDeque::new()).collect();
        let count = buckets.count();
        let lengths = buckets.lengths(pieces, parts.len())?;
        let mut gather = GradientReduction {
            lines,
            pieces,
            buckets,
            lengths,
            exchange: lines.team.group.begin("the gathering of gradients").map_err(lost)?,
            parts,
            at: (0, 0),
            came: BTreeMap::new(),
            stage: 0,
            sent: 0,
            leaving: VecDeque::new(),
            payloads: VecDeque::new(),
            coming,
            joined: VecDeque::new(),
            sums: (0..count).map(|_| Counter::new()).collect(),
            next: [0; 3],
        };
        gather.ask(1)?;
        Ok(gather)
    }

    /// Called when `gradients` has micro-batch `leaf`'s gradient of a parameter. Where each micro-batch is a block,
    /// sends all complete buckets in their order: a bucket waits for those of the micro-batch before.
    pub(crate) fn came(
        &mut self,
        leaf: u64,
        parameter: usize,
        gradients: &MicroBatchGradients,
    ) -> Result<()> {
        if !self.streams() {
            return Ok(());
        }
        let bucket = self.buckets.of(parameter)?;
        *self.came.entry((leaf, bucket)).or_default() += 1;
        while self.stage < self.stages() {
            let (round, bucket) = self.place(self.stage);
            let first = self.parts[self.me() as usize][round].start;
            let whole = self.buckets.parameters(bucket).count();
            if self.came.get(&(first, bucket)).is_none_or(|count| *count < whole) {
                break;
            }
            self.came.remove(&(first, bucket));
            self.turn(self.stage)?;
            self.send(gradients, first)?;
            self.sent_all()?;
        }
        Ok(())
    }

    /// Called when this rank's next micro-batch is computed; sends the block that it completes.
    pub(crate) fn leaf(&mut self, gradients: &MicroBatchGradients) -> Result<()> {
        if self.streams() {
            return Ok(());
        }
        let (round, place) = self.at;
        let part = self.parts[self.me() as usize][round].clone();
        let computed = part.start + place + 1;
        let mut blocks = blocks(part.start, part.end).into_iter();
        if let Some((_, first)) = blocks.find(|(level, first)| first + (1 << level) == computed) {
            self.send(gradients, first)?;
        }
        self.at = (round, place + 1);
        if computed == part.end {
            self.sent_all()?;
        }
        Ok(())
    }

    /// Called when this rank has computed all of its micro-batches. A rank without one in the last round sends nothing
    /// there, but must add its machine's blocks for the others before it waits for them in another exchange.
    pub(crate) fn computed(&mut self) -> Result<()> {
        for stage in self.stage..self.stages() {
            self.turn(stage)?;
        }
        self.stage = self.stages();
        Ok(())
    }

    /// Returns this rank's pieces of the sum, bucket by bucket, once every rank has computed its micro-batches.
    pub(crate) fn finish(mut self) -> Result<Vec<(ParamShard, Tensor)>> {
        let stages = self.stages();
        self.ask(stages)?;
        self.join(stages)?;
        self.add(stages)?;
        let (me, none) = (self.me(), || Fault::bug("a step had no micro-batches"));
        let GradientReduction { exchange, sums, buckets, pieces, .. } = self;
        {
            let _watch = timing::part(timing::StepPart::Blocks);
            exchange.finish().map_err(lost)?;
        }
        let mut found = Vec::new();
        for (bucket, sum) in sums.into_iter().enumerate() {
            let (sum, mut at) = (sum.finish().map_err(refused)?.ok_or_else(none)?, 0);
            for piece in buckets.pieces(bucket, pieces).filter(|piece| piece.owner == me) {
                let part = sum.narrow(0, at, piece.length()).view(piece.shape.as_slice());
                at += piece.length();
                found.push((piece.clone(), part));
            }
        }
        Ok(found)
    }

    /// Whether every micro-batch is a block, whose buckets are sent one by one.
    fn streams(&self) -> bool {
        self.lines.team.grad_reduce == GradReduce::Bucketed
    }

    /// The elements of the pieces of `owner` in a bucket.
    fn length(&self, owner: u32, bucket: usize) -> i64 {
        self.lengths[bucket][owner as usize]
    }

    fn me(&self) -> u32 {
        self.lines.data.place
    }

    /// The rank at a position of the line.
    fn rank(&self, place: u32) -> u32 {
        self.lines.data.ranks[place as usize]
    }

    fn stages(&self) -> usize {
        self.parts.first().map_or(0, Vec::len) * self.lengths.len()
    }

    /// The round and the bucket of a stage.
    fn place(&self, stage: usize) -> (usize, usize) {
        (stage / self.lengths.len(), stage % self.lengths.len())
    }

    /// The micro-batches of a machine in a round: those of its ranks are consecutive.
    fn part_of(&self, node: usize, round: usize) -> Range<u64> {
        let Range { start, end } = self.lines.data.nodes.ranks(node);
        self.parts[start as usize][round].start..self.parts[end as usize - 1][round].end
    }

    /// The owners of the pieces that the ranks of its machine send to `rank`: itself, and the owners elsewhere for
    /// which it leads this machine.
    fn payload(&self, rank: u32) -> Vec<u32> {
        std::iter::once(rank).chain(self.lines.data.nodes.behind(rank)).collect()
    }

    /// Before this rank sends its blocks of `stage`: releases the memory of older sends and adds older arrivals.
    fn turn(&mut self, stage: usize) -> Result<()> {
        self.ask(stage + BEHIND)?;
        let before = |stages: usize| (stage + 1).saturating_sub(stages);
        if self.leaving.len() >= BEHIND {
            let _watch = timing::part(timing::StepPart::Blocks);
            let count = self.leaving.pop_front().unwrap_or(0);
            self.exchange.left(count).map_err(lost)?;
        }
        self.join(before(BEHIND))?;
        // Does not wait for what leaders have only just begun to send.
        self.add(before(if self.lines.data.nodes.count() > 1 { 2 * BEHIND } else { BEHIND }))
    }

    /// Posts the receives of the stages before `end`.
    fn ask(&mut self, end: usize) -> Result<()> {
        let (me, nodes) = (self.me(), &self.lines.data.nodes);
        for stage in self.next[0]..end.min(self.stages()) {
            let (round, bucket) = self.place(stage);
            let payload: i64 =
                self.payload(me).iter().map(|owner| self.length(*owner, bucket)).sum();
            let own = self.length(me, bucket);
            let here = nodes.ranks(nodes.here()).filter(|rank| *rank != me);
            let here = here.map(|rank| {
                (rank, self.parts[rank as usize][round].clone(), payload, near(stage, 0))
            });
            let elsewhere = nodes.others().map(|node| {
                (nodes.leader(node, me), self.part_of(node, round), own, far(stage, 0))
            });
            for (from, part, length, first) in here.chain(elsewhere).collect::<Vec<_>>() {
                for (block, _) in (0..).zip(blocks(part.start, part.end)) {
                    let arrival =
                        self.exchange.receive(first + block, self.rank(from), Kind::Float, length);
                    self.coming[from as usize].push_back(arrival.map_err(lost)?);
                }
            }
            self.next[0] = stage + 1;
        }
        Ok(())
    }

    /// Sends every rank of the machine its payload of this rank's block that begins with micro-batch `first`, of the
    /// current stage.
    fn send(&mut self, gradients: &MicroBatchGradients, first: u64) -> Result<()> {
        let _watch = timing::part(timing::StepPart::Send);
        let round = near(self.stage, self.sent);
        let here = self.lines.data.nodes.ranks(self.lines.data.nodes.here());
        for (to, payload) in here.zip(self.payloads(gradients, first)?) {
            if to == self.me() {
                self.payloads.push_back(payload);
            } else {
                self.exchange.send(round, self.rank(to), &payload).map_err(lost)?;
            }
        }
        self.exchange.close(round).map_err(lost)?;
        self.sent += 1;
        Ok(())
    }

    /// Called when this rank has sent its blocks of its stage.
    fn sent_all(&mut self) -> Result<()> {
        // Closes the rounds of ranks that have more blocks too.
        self.exchange.close(near(self.stage, ALL)).map_err(lost)?;
        self.leaving.push_back(self.exchange.begun());
        (self.stage, self.sent) = (self.stage + 1, 0);
        Ok(())
    }

    /// A block's payload of the stage for each rank of the machine. On a device, bf16 gradients are converted to f32
    /// and checked while they are copied. Parameters are copied and released a few at a time, so that the block is not
    /// held twice.
    fn payloads(&self, gradients: &MicroBatchGradients, first: u64) -> Result<Vec<Tensor>> {
        let (_, bucket) = self.place(self.stage);
        // For each owner: the payload and the offset in it of its next piece.
        let (mut lengths, mut next) = (Vec::new(), BTreeMap::new());
        for (slot, rank) in self.lines.data.nodes.ranks(self.lines.data.nodes.here()).enumerate() {
            let mut end = 0;
            for owner in self.payload(rank) {
                next.insert(owner, (slot, end));
                end += self.length(owner, bucket);
            }
            lengths.push(end);
        }
        let mut payloads: Vec<Tensor> = Vec::new();
        let mut parameters = self.buckets.parameters(bucket);
        while let Some(parameter) = parameters.next() {
            let mut whole = vec![(parameter, gradients.take(parameter, first)?)];
            if whole[0].1.device() != Device::Cpu {
                for parameter in parameters.by_ref().take(TOGETHER - 1) {
                    whole.push((parameter, gradients.take(parameter, first)?));
                }
            }
            if payloads.is_empty() {
                let like = (Kind::Float, whole[0].1.device());
                let payload = |length: &i64| Tensor::f_empty([*length], like);
                let made = lengths.iter().map(payload).collect::<std::result::Result<_, _>>();
                payloads = made.map_err(refused)?;
            }
            let mut parts = Vec::new();
            for (parameter, whole) in &whole {
                for piece in buckets::of_tensor(self.pieces, *parameter) {
                    let (slot, at) = next.get_mut(&piece.owner).ok_or_else(buckets::unknown)?;
                    let (first, length) = (piece.first, piece.length());
                    let into = payloads[*slot].f_narrow(0, *at, length).map_err(refused)?;
                    parts.push((whole, first..first + length, into));
                    *at += length;
                }
            }
            addend::copy(&mut parts).map_err(refused)?;
        }
        Ok(payloads)
    }

    /// Adds what the ranks of this machine sent in the stages before `end`, and forwards it to the owners elsewhere.
    fn join(&mut self, end: usize) -> Result<()> {
        let here = self.lines.data.nodes.here();
        for stage in self.next[1]..end {
            let (round, bucket) = self.place(stage);
            let (mut joined, mut forwarded) = (Blocks::new(self.part_of(here, round)), 0);
            // A rank without micro-batches in this round has not closed its rounds yet.
            self.exchange.close(near(stage + BEHIND - 1, ALL)).map_err(lost)?;
            for rank in self.lines.data.nodes.ranks(here) {
                let part = self.parts[rank as usize][round].clone();
                for (level, _) in blocks(part.start, part.end) {
                    let own_payload =
                        if rank == self.me() { self.payloads.pop_front() } else { None };
                    let payload =
                        own_payload.map_or_else(|| arrived(&mut self.coming[rank as usize]), Ok)?;
                    let complete = {
                        let _watch = timing::part(timing::StepPart::Tree);
                        joined.push_block(level, payload).map_err(refused)?
                    };
                    if let Some((_, sum)) = complete {
                        self.forward(far(stage, forwarded), bucket, sum)?;
                        forwarded += 1;
                    }
                }
            }
            self.exchange.close(far(stage, ALL)).map_err(lost)?;
            self.next[1] = stage + 1;
        }
        Ok(())
    }

    /// Sends a block of this machine to the owners that this leader serves, and keeps this rank's own pieces.
    fn forward(&mut self, round: u64, bucket: usize, sum: Tensor) -> Result<()> {
        let _watch = timing::part(timing::StepPart::Send);
        let owners = self.payload(self.me());
        if owners.len() == 1 {
            self.joined.push_back(sum);
            return Ok(());
        }
        let mut at = 0;
        for to in owners {
            let length = self.length(to, bucket);
            let part = sum.narrow(0, at, length);
            at += length;
            if to == self.me() {
                // A copy: an alias would keep the whole block alive.
                let (kind, device) = (part.kind(), part.device());
                self.joined.push_back(tree::joined(&[part], kind, device).map_err(refused)?);
            } else {
                self.exchange.send(round, self.rank(to), &part).map_err(lost)?;
            }
        }
        self.exchange.close(round).map_err(lost)
    }

    /// Adds this rank's pieces of every machine's blocks of the stages before `end`.
    fn add(&mut self, end: usize) -> Result<()> {
        let nodes = &self.lines.data.nodes;
        for stage in self.next[2]..end {
            let (round, bucket) = self.place(stage);
            for node in 0..nodes.count() {
                let part = self.part_of(node, round);
                let leader = nodes.leader(node, self.me());
                for (level, _) in blocks(part.start, part.end) {
                    let own = if node == nodes.here() { self.joined.pop_front() } else { None };
                    let block =
                        own.map_or_else(|| arrived(&mut self.coming[leader as usize]), Ok)?;
                    let _watch = timing::part(timing::StepPart::Tree);
                    self.sums[bucket].push_block(level, block).map_err(refused)?;
                }
            }
            self.next[2] = stage + 1;
        }
        Ok(())
    }
}

/// More blocks than any part has: at most two for each bit of the number of micro-batches.
const ALL: u64 = 255;

/// The exchange's round for the `block`-th blocks that ranks send to their neighbours in `stage`.
fn near(stage: usize, block: u64) -> u64 {
    stage as u64 * 2 * (ALL + 1) + block
}

/// The same for blocks of machines sent to other machines: a stage's are added after a later stage has been sent.
fn far(stage: usize, block: u64) -> u64 {
    near(stage + BEHIND - 1, block) + ALL + 1
}

/// Waits for the next posted receive.
fn arrived(coming: &mut VecDeque<Arrival<'_>>) -> Result<Tensor> {
    let _watch = timing::part(timing::StepPart::Blocks);
    let next = coming.pop_front().ok_or_else(|| Fault::bug("a block was not asked for"))?;
    next.wait().map_err(lost)
}
