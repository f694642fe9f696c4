//! What the ranks of a line of gradients hold of each other's: counted once for all of them.

use std::borrow::Cow;
use std::ops::Range;

use contract::Result;
use kernels::tree::blocks;

use crate::ledger;
use crate::mesh::behind::Owned;
use crate::mesh::buckets::Buckets;
use crate::mesh::team::Nodes;
use crate::spec::RunSpec;
use crate::state::ownership::Piece;

/// A place in the sharing of micro-batches: the line of gradients of the ranks that have it, as far as it is the same to all of
/// them.
pub(super) struct Place<'a> {
    /// What travels along it, owned by the places of the line.
    pub(super) pieces: Cow<'a, [Piece]>,
    /// Which of these are each one's.
    pub(super) own: Vec<Vec<usize>>,
    /// Which share a machine.
    pub(super) nodes: Nodes,
    /// What each owns of a whole gradient, in bytes.
    pub(super) owned: Owned,
    /// Of the buckets of a gradient, in the order in which they leave: where blocks are streamed.
    pub(super) buckets: Vec<Owned>,
    /// Blocks of ranks and machines.
    blocks: Blocks,
}

impl<'a> Place<'a> {
    pub(super) fn new(
        spec: &RunSpec,
        pieces: Cow<'a, [Piece]>,
        nodes: Nodes,
        parts: &[Vec<Range<u64>>],
        streams: bool,
    ) -> Result<Place<'a>> {
        let (mut own, mut bytes) = (vec![Vec::new(); parts.len()], vec![0; parts.len()]);
        for (at, piece) in pieces.iter().enumerate() {
            own[piece.owner as usize].push(at);
            bytes[piece.owner as usize] += 4 * piece.length() as u64;
        }
        let mut buckets = Vec::new();
        if streams {
            let layers = ledger::layers(&spec.names()).into_iter().map(|layer| layer.parameters);
            let lengths = Buckets::by_layer(&layers.collect::<Vec<_>>());
            for lengths in lengths.lengths(&pieces, parts.len())? {
                let bytes = lengths.into_iter().map(|length| 4 * length as u64).collect();
                buckets.push(Owned::new(bytes, &nodes));
            }
        }
        let (owned, blocks) = (Owned::new(bytes, &nodes), Blocks::new(parts, &nodes));
        Ok(Place { pieces, own, nodes, owned, buckets, blocks })
    }

    /// Bytes of the blocks of a round that come to a rank: from its neighbours for itself and the owners behind it, from other
    /// machines for itself; `owned` is what of a block each owner gets.
    pub(super) fn received(&self, rank: u32, owned: &Owned) -> u64 {
        let payload = owned.of(rank) + owned.behind(&self.nodes, rank);
        let Blocks { ranks, near, joined, all } = &self.blocks;
        let node = self.nodes.of(rank);
        let by_round = |round: usize| {
            let neighbours = near[node][round] - ranks[rank as usize][round];
            payload * neighbours + owned.of(rank) * (all[round] - joined[node][round])
        };
        (0..all.len()).map(by_round).max().unwrap_or(0)
    }
}

/// How many blocks the leaves of each round make up.
struct Blocks {
    /// Those of each rank.
    ranks: Vec<Vec<u64>>,
    /// Of each machine, those of its ranks added up.
    near: Vec<Vec<u64>>,
    /// Of each machine, those of the leaves of its ranks together.
    joined: Vec<Vec<u64>>,
    /// These of all machines.
    all: Vec<u64>,
}

impl Blocks {
    fn new(parts: &[Vec<Range<u64>>], nodes: &Nodes) -> Blocks {
        let count = |part: Range<u64>| levels(&part).len() as u64;
        let rounds = parts.first().map_or(0, Vec::len);
        let ranks = parts.iter().map(|parts| parts.iter().cloned().map(count).collect()).collect();
        let (mut near, mut joined) = (Vec::new(), Vec::new());
        for node in 0..nodes.count() {
            let Range { start, end } = nodes.ranks(node);
            let of = |ranks: &Vec<Vec<u64>>, round: usize| -> u64 {
                ranks[start as usize..end as usize].iter().map(|counts| counts[round]).sum()
            };
            let whole = |round: usize| {
                count(parts[start as usize][round].start..parts[end as usize - 1][round].end)
            };
            near.push((0..rounds).map(|round| of(&ranks, round)).collect());
            joined.push((0..rounds).map(whole).collect::<Vec<u64>>());
        }
        let all = (0..rounds).map(|round| joined.iter().map(|counts| counts[round]).sum());
        let all = all.collect();
        Blocks { ranks, near, joined, all }
    }
}

/// The levels of the blocks of a run of leaves.
pub(super) fn levels(part: &Range<u64>) -> Vec<u32> {
    blocks(part.start, part.end).into_iter().map(|(level, _)| level).collect()
}
