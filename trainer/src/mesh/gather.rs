//! Gradients of leaves on their way to the owners of their pieces: one expression, whichever way it is walked.
//!
//! ```text
//! leaves of a rank in a round --add--> its blocks --pieces--> the gates of its machine, each piece to one of them
//! gate: blocks of the machine's ranks --add--> blocks of the machine --pieces--> their owners
//! owner: blocks of every machine in the order of leaves --add--> its pieces of G
//! ```
//!
//! The blocks of a part are the maximal aligned runs of leaves in it: nodes of the fixed tree, whoever adds them. What the
//! owners of a machine need of its own ranks takes the same way, so a single machine is no special case.
//!
//! Ranks here are places of the line of gradients (`team::Lines`): all ranks, unless some share micro-batches. Then each has of a
//! gradient what the owners on its line own, and pieces and owners are counted in that (`slices`).
//!
//! Transfers between devices come in rounds of the exchange (see `kernels::group`), which both ends number alike: first the
//! blocks of a round that stay on a machine, the k-th of every rank together, then those that leave it, the k-th of every
//! machine. A rank closes them in that order, each as soon as it has computed or added what it sends: nothing that it waits
//! for before comes in a later one, so no two ranks wait for each other. Between CPUs all of this means nothing.
//!
//! Subtree-first has one round, in which each rank has a run of leaves. Streaming has a round for each turn. A round is
//! received and added up while the next one is computed, on several machines the round before it, so that what is alive at
//! a time depends on the ranks and not on the leaves.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use contract::{Fault, Result};
use kernels::group::{Arrival, Exchange};
use kernels::tree::{Blocks, Counter, blocks};
use tch::{Kind, Tensor};

use super::sink::Gradients;
use super::team::Lines;
use crate::refusal::lost;
use crate::state::ownership::{self, Piece};
use crate::timing;

/// The gradients of one step, under way.
pub(crate) struct Gather<'a> {
    lines: &'a Lines<'a>,
    pieces: &'a [Piece],
    exchange: Exchange<'a>,
    /// The leaves of each place, by round.
    parts: Vec<Vec<Range<u64>>>,
    /// Of this rank's next leaf: its round, and its place in it.
    at: (usize, u64),
    /// How many blocks of that round it has sent.
    sent: u64,
    /// What this rank has for itself of each of its blocks.
    mine: VecDeque<Tensor>,
    /// What comes from each rank, block after block: from here, for the gate that this rank is, or from a gate elsewhere.
    coming: Vec<VecDeque<Arrival<'a>>>,
    /// This rank's pieces of this machine's blocks.
    joined: VecDeque<Tensor>,
    sum: Counter<Tensor>,
    /// The next round to be asked for, to be joined on this machine, and to be added by the owner.
    next: [usize; 3],
}

impl<'a> Gather<'a> {
    /// Begins a step of `leaves` leaves. The first round is asked for before anything is computed, so that what is ready
    /// travels while leaves are still being computed.
    pub(crate) fn begin(lines: &'a Lines<'a>, pieces: &'a [Piece], leaves: u64) -> Result<Self> {
        let parts = lines.parts(leaves)?;
        let coming = parts.iter().map(|_| VecDeque::new()).collect();
        let mut gather = Gather {
            lines,
            pieces,
            exchange: lines.team.group.begin("the gathering of gradients").map_err(lost)?,
            parts,
            at: (0, 0),
            sent: 0,
            mine: VecDeque::new(),
            coming,
            joined: VecDeque::new(),
            sum: Counter::new(),
            next: [0; 3],
        };
        gather.ask(1)?;
        Ok(gather)
    }

    /// Sends what is complete of `gradients` with this rank's next leaf.
    pub(crate) fn leaf(&mut self, gradients: &Gradients) -> Result<()> {
        let (round, place) = self.at;
        if place == 0 && round > 0 {
            self.turn(round)?;
        }
        let part = self.parts[self.me() as usize][round].clone();
        let size = part.end - part.start;
        let computed = part.start + place + 1;
        let mut blocks = blocks(part.start, part.end).into_iter();
        if let Some((_, first)) = blocks.find(|(level, first)| first + (1 << level) == computed) {
            self.send(round, gradients, first)?;
        }
        self.at = (round, place + 1);
        if place + 1 == size {
            (self.at, self.sent) = ((round + 1, 0), 0);
            // What comes from ranks that have more blocks may travel too.
            self.exchange.close(near(round, ALL)).map_err(lost)?;
        }
        Ok(())
    }

    /// This rank's pieces of the sum, one after the other, once every rank has computed its leaves.
    pub(crate) fn finish(mut self) -> Result<Tensor> {
        let rounds = self.rounds();
        self.ask(rounds)?;
        self.join(rounds)?;
        self.add(rounds)?;
        let Gather { exchange, sum, .. } = self;
        {
            let _watch = timing::part(timing::Part::Blocks);
            exchange.finish().map_err(lost)?;
        }
        sum.finish().ok_or_else(|| Fault::bug("a step had no leaves"))
    }

    /// The elements of the pieces of `owner`.
    fn length(&self, owner: u32) -> i64 {
        ownership::length(self.pieces, owner)
    }

    fn me(&self) -> u32 {
        self.lines.data.place
    }

    /// The rank at a place of the line.
    fn rank(&self, place: u32) -> u32 {
        self.lines.data.ranks[place as usize]
    }

    fn rounds(&self) -> usize {
        self.parts.first().map_or(0, Vec::len)
    }

    /// The leaves of a machine in a round: those of its ranks follow each other.
    fn part_of(&self, node: usize, round: usize) -> Range<u64> {
        let Range { start, end } = self.lines.data.nodes.ranks(node);
        self.parts[start as usize][round].start..self.parts[end as usize - 1][round].end
    }

    /// Whose pieces `rank` is handed by the ranks of its machine: its own, and those of the owners elsewhere that it is the
    /// gate to.
    fn bag(&self, rank: u32) -> Vec<u32> {
        std::iter::once(rank).chain(self.lines.data.nodes.behind(rank)).collect()
    }

    /// The first leaf of `round` is computed: what was sent and received of the rounds before, while it was, is let go of
    /// and added before anything new is sent. So there is one round under way at a time.
    fn turn(&mut self, round: usize) -> Result<()> {
        {
            let _watch = timing::part(timing::Part::Blocks);
            self.exchange.left(self.exchange.begun()).map_err(lost)?;
        }
        self.join(round)?;
        // What gates have begun to send in this turn is not waited for before the next one.
        self.add(if self.lines.data.nodes.count() > 1 { round.saturating_sub(1) } else { round })?;
        self.ask(round + 1)
    }

    /// Begins to receive what comes in the rounds before `end`.
    fn ask(&mut self, end: usize) -> Result<()> {
        let (me, nodes) = (self.me(), &self.lines.data.nodes);
        let bag: i64 = self.bag(me).into_iter().map(|owner| self.length(owner)).sum();
        let own = self.length(me);
        for round in self.next[0]..end.min(self.rounds()) {
            let here = nodes.ranks(nodes.here()).filter(|rank| *rank != me);
            let here = here
                .map(|rank| (rank, self.parts[rank as usize][round].clone(), bag, near(round, 0)));
            let elsewhere = nodes
                .others()
                .map(|node| (nodes.gate(node, me), self.part_of(node, round), own, far(round, 0)));
            for (from, part, length, first) in here.chain(elsewhere).collect::<Vec<_>>() {
                for (block, _) in (0..).zip(blocks(part.start, part.end)) {
                    let arrival =
                        self.exchange.receive(first + block, self.rank(from), Kind::Float, length);
                    self.coming[from as usize].push_back(arrival.map_err(lost)?);
                }
            }
            self.next[0] = round + 1;
        }
        Ok(())
    }

    /// Hands every rank here its bag of the block of ours that begins with leaf `first`.
    fn send(&mut self, round: usize, gradients: &Gradients, first: u64) -> Result<()> {
        let _watch = timing::part(timing::Part::Send);
        let here = self.lines.data.nodes.ranks(self.lines.data.nodes.here());
        for (to, bag) in here.zip(self.bags(gradients, first)?) {
            if to == self.me() {
                self.mine.push_back(bag);
            } else {
                self.exchange.send(near(round, self.sent), self.rank(to), &bag).map_err(lost)?;
            }
        }
        self.exchange.close(near(round, self.sent)).map_err(lost)?;
        self.sent += 1;
        Ok(())
    }

    /// A block's bag for each rank here. A parameter is let go of as soon as its pieces are in their bags, so that the block
    /// is not held twice.
    fn bags(&self, gradients: &Gradients, first: u64) -> Result<Vec<Tensor>> {
        // Where the next piece of an owner goes: into which bag, and where in it.
        let (mut lengths, mut next) = (Vec::new(), BTreeMap::new());
        for (slot, rank) in self.lines.data.nodes.ranks(self.lines.data.nodes.here()).enumerate() {
            let mut end = 0;
            for owner in self.bag(rank) {
                next.insert(owner, (slot, end));
                end += self.length(owner);
            }
            lengths.push(end);
        }
        let mut bags = Vec::new();
        let mut pieces = self.pieces.iter().peekable();
        for parameter in 0..gradients.parameters() {
            let whole = gradients.take(parameter, first)?;
            if bags.is_empty() {
                let bag = |length: &i64| Tensor::empty([*length], (Kind::Float, whole.device()));
                bags = lengths.iter().map(bag).collect::<Vec<_>>();
            }
            while let Some(piece) = pieces.next_if(|piece| piece.tensor == parameter) {
                let unknown = || Fault::bug("a piece has no owner here");
                let (slot, at) = next.get_mut(&piece.owner).ok_or_else(unknown)?;
                let length = piece.length();
                bags[*slot].narrow(0, *at, length).copy_(&piece.of(&whole).reshape([-1]));
                *at += length;
            }
        }
        Ok(bags)
    }

    /// Adds what the ranks here have handed over in the rounds before `end`, and sends it on to the owners elsewhere.
    fn join(&mut self, end: usize) -> Result<()> {
        let here = self.lines.data.nodes.here();
        for round in self.next[1]..end {
            let (mut joined, mut forwarded) = (Blocks::new(self.part_of(here, round)), 0);
            // A rank without leaves in this round has closed nothing of it yet.
            self.exchange.close(near(round, ALL)).map_err(lost)?;
            for rank in self.lines.data.nodes.ranks(here) {
                let part = self.parts[rank as usize][round].clone();
                for (level, _) in blocks(part.start, part.end) {
                    let mine = if rank == self.me() { self.mine.pop_front() } else { None };
                    let bag = mine.map_or_else(|| arrived(&mut self.coming[rank as usize]), Ok)?;
                    let complete = {
                        let _watch = timing::part(timing::Part::Tree);
                        joined.push_block(level, bag)
                    };
                    if let Some((_, sum)) = complete {
                        self.forward(far(round, forwarded), sum)?;
                        forwarded += 1;
                    }
                }
            }
            self.exchange.close(far(round, ALL)).map_err(lost)?;
            self.next[1] = round + 1;
        }
        Ok(())
    }

    /// Sends a block of this machine to the owners behind this gate, and keeps what is our own.
    fn forward(&mut self, round: u64, sum: Tensor) -> Result<()> {
        let _watch = timing::part(timing::Part::Send);
        let owners = self.bag(self.me());
        if owners.len() == 1 {
            self.joined.push_back(sum);
            return Ok(());
        }
        let mut at = 0;
        for to in owners {
            let length = self.length(to);
            let part = sum.narrow(0, at, length);
            at += length;
            if to == self.me() {
                // A copy: an alias would keep the whole of the block.
                self.joined.push_back(part.copy());
            } else {
                self.exchange.send(round, self.rank(to), &part).map_err(lost)?;
            }
        }
        self.exchange.close(round).map_err(lost)
    }

    /// Adds this rank's pieces of every machine's blocks of the rounds before `end`.
    fn add(&mut self, end: usize) -> Result<()> {
        let nodes = &self.lines.data.nodes;
        for round in self.next[2]..end {
            for node in 0..nodes.count() {
                let part = self.part_of(node, round);
                let gate = nodes.gate(node, self.me());
                for (level, _) in blocks(part.start, part.end) {
                    let own = if node == nodes.here() { self.joined.pop_front() } else { None };
                    let block = own.map_or_else(|| arrived(&mut self.coming[gate as usize]), Ok)?;
                    let _watch = timing::part(timing::Part::Tree);
                    self.sum.push_block(level, block);
                }
            }
            self.next[2] = round + 1;
        }
        Ok(())
    }
}

/// More than any part has blocks: two for each bit of a number of leaves.
const ALL: u64 = 255;

/// The exchange's round of the `block`-th blocks that ranks hand to their neighbours in `round`.
fn near(round: usize, block: u64) -> u64 {
    round as u64 * 2 * (ALL + 1) + block
}

/// The same for blocks of machines, on their way to other machines.
fn far(round: usize, block: u64) -> u64 {
    near(round, block) + ALL + 1
}

/// The next of what was asked for.
fn arrived(coming: &mut VecDeque<Arrival<'_>>) -> Result<Tensor> {
    let _watch = timing::part(timing::Part::Blocks);
    let next = coming.pop_front().ok_or_else(|| Fault::bug("a block was not asked for"))?;
    next.wait().map_err(lost)
}
