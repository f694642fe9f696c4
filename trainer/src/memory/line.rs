//! Memory for the gradients of other ranks on a line: counted once for all ranks of the line.

use std::borrow::Cow;
use std::ops::Range;

use contract::Result;
use kernels::tree::blocks;

use crate::ledger;
use crate::mesh::behind::OwnedBytes;
use crate::mesh::buckets::Buckets;
use crate::mesh::team::NodeLayout;
use crate::spec::RunSpec;
use crate::state::ownership::ParamShard;

/// A position in the sharing of micro-batches: what is the same for all ranks on its line of gradients.
pub(super) struct SharingPosition<'a> {
    /// The pieces that are reduced along it, owned by positions of the line.
    pub(super) pieces: Cow<'a, [ParamShard]>,
    /// The pieces of each position.
    pub(super) own: Vec<Vec<usize>>,
    /// Which positions share a machine.
    pub(super) nodes: NodeLayout,
    /// The bytes of a whole gradient that each position owns.
    pub(super) owned: OwnedBytes,
    /// The same for each bucket, in the order of sending, where gradients are reduced in buckets.
    pub(super) buckets: Vec<OwnedBytes>,
    /// Counts of the blocks of ranks and machines.
    blocks: Blocks,
}

impl<'a> SharingPosition<'a> {
    pub(super) fn new(
        spec: &RunSpec,
        pieces: Cow<'a, [ParamShard]>,
        nodes: NodeLayout,
        parts: &[Vec<Range<u64>>],
        streams: bool,
    ) -> Result<SharingPosition<'a>> {
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
                buckets.push(OwnedBytes::new(bytes, &nodes));
            }
        }
        let (owned, blocks) = (OwnedBytes::new(bytes, &nodes), Blocks::new(parts, &nodes));
        Ok(SharingPosition { pieces, own, nodes, owned, buckets, blocks })
    }

    /// Bytes of the blocks that a rank receives in a round: from its neighbours for itself and the owners that it
    /// leads, from other machines for itself; `owned` are the bytes of a block by owner.
    pub(super) fn received(&self, rank: u32, owned: &OwnedBytes) -> u64 {
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

/// How many blocks the micro-batches of each round make up.
struct Blocks {
    /// Blocks of each rank.
    ranks: Vec<Vec<u64>>,
    /// By machine: the sum over its ranks.
    near: Vec<Vec<u64>>,
    /// By machine: blocks of all micro-batches of its ranks together.
    joined: Vec<Vec<u64>>,
    /// The sum of these over all machines.
    all: Vec<u64>,
}

impl Blocks {
    fn new(parts: &[Vec<Range<u64>>], nodes: &NodeLayout) -> Blocks {
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

/// The levels of the blocks of a run of micro-batches.
pub(super) fn levels(part: &Range<u64>) -> Vec<u32> {
    blocks(part.start, part.end).into_iter().map(|(level, _)| level).collect()
}
