//! Bytes that ranks send each other in a step, summed by machine, so that each rank is visited once.
//!
//! The sums follow the exchanges of a step (`mesh::gather`, `mesh::share`): each block of a rank is sent to the leaders
//! of its machine, each block of a machine from a leader to the owners elsewhere, and each owner's new weights to all
//! ranks, once to each machine.

use std::ops::Range;

use contract::Result;
use kernels::tree::blocks;
use serde::Serialize;

use trainer::mesh::Mesh;
use trainer::mesh::behind::OwnedBytes;
use trainer::mesh::team::NodeLayout;

/// Bytes of gradients and weights that all ranks together send in one step. Labels, losses and checksums, a few
/// kilobytes from each rank to each other, are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SentInStep {
    /// Gradients, between ranks of one machine.
    pub gradients_within_machines: u64,
    /// Gradients, between machines.
    pub gradients_between_machines: u64,
    /// New weights, between ranks of one machine.
    pub weights_within_machines: u64,
    /// New weights, between machines.
    pub weights_between_machines: u64,
}

impl SentInStep {
    /// Bytes sent between machines.
    pub fn between_machines(self) -> u64 {
        self.gradients_between_machines + self.weights_between_machines
    }

    /// All bytes.
    pub fn sum(self) -> u64 {
        self.gradients_within_machines + self.weights_within_machines + self.between_machines()
    }
}

/// The inputs of the sums.
pub(super) struct SentInputs<'a> {
    /// The mesh of the ranks.
    pub(super) mesh: Mesh,
    /// How many of them share a machine; the last may have fewer.
    pub(super) ranks_per_node: u32,
    /// Whether all ranks count as one machine (`--no-hierarchical`).
    pub(super) flat: bool,
    /// The micro-batches of each position on a line of gradients, by round.
    pub(super) parts: &'a [Vec<Range<u64>>],
    /// Bytes of gradients of the pieces that each rank owns.
    pub(super) lengths: &'a [u64],
    /// Bytes of its new weights that are sent to all ranks.
    pub(super) weights: &'a [u64],
    /// Bytes of its new weights that are sharded: by owner and position along the folded axis.
    pub(super) shards: &'a [Vec<u64>],
}

impl SentInputs<'_> {
    /// The sums over all ranks.
    pub(super) fn sum(&self) -> Result<SentInStep> {
        let mut sent = SentInStep::default();
        // Gradients are reduced along lines of ranks at the same position in the sharing of their micro-batches.
        let together = self.mesh.together();
        for sharing in 0..together {
            let ranks = (0..self.mesh.dp).map(|place| place * together + sharing);
            self.line(&ranks.collect::<Vec<_>>(), &mut sent)?;
        }
        self.weights(&mut sent);
        self.shards(&mut sent);
        Ok(sent)
    }

    /// Adds the gradients of a line.
    fn line(&self, ranks: &[u32], sent: &mut SentInStep) -> Result<()> {
        let machine = |rank: &u32| (rank / self.ranks_per_node).to_string();
        let machines: Vec<String> = ranks.iter().map(machine).collect();
        let lengths = ranks.iter().map(|rank| self.lengths[*rank as usize]).collect();
        let nodes = NodeLayout::new(&machines, 0, false)?;
        let owned = OwnedBytes::new(lengths, &nodes);
        for node in 0..nodes.count() {
            let places = nodes.ranks(node);
            let here: u64 = places.clone().map(|place| owned.of(place)).sum();
            for place in places.clone() {
                let parts = self.parts[place as usize].iter();
                let own: u64 = parts.map(|part| count(part.start, part.end)).sum();
                if self.flat {
                    sent.gradients_within_machines += own * (here - owned.of(place));
                    sent.gradients_between_machines += own * (owned.all() - here);
                    continue;
                }
                // Its neighbours receive all blocks except what it owns or forwards itself.
                let kept = owned.of(place) + owned.behind(&nodes, place);
                sent.gradients_within_machines += own * (owned.all() - kept);
            }
            if self.flat {
                continue;
            }
            let joined = |round: usize| {
                let (first, last) = (places.start as usize, places.end as usize - 1);
                count(self.parts[first][round].start, self.parts[last][round].end)
            };
            let joined: u64 = (0..self.parts[places.start as usize].len()).map(joined).sum();
            sent.gradients_between_machines += joined * (owned.all() - here);
        }
        Ok(())
    }

    /// Each owner sends to all ranks of its machine and to one rank of each other machine, which forwards them.
    fn weights(&self, sent: &mut SentInStep) {
        let all: u64 = self.weights.iter().sum();
        let nodes: Vec<&[u64]> = self.weights.chunks(self.ranks_per_node as usize).collect();
        for node in &nodes {
            let (size, here) = (node.len() as u64, node.iter().sum::<u64>());
            let others = if self.flat {
                self.weights.len() as u64 - size
            } else {
                sent.weights_within_machines += (size - 1) * (all - here);
                nodes.len() as u64 - 1
            };
            sent.weights_within_machines += (size - 1) * here;
            sent.weights_between_machines += others * here;
        }
    }

    /// Shards are sent by their owner directly to the ranks that hold them.
    fn shards(&self, sent: &mut SentInStep) {
        let tsp = self.mesh.tsp as usize;
        let of_place = |ranks: Range<usize>| {
            let mut counts = vec![0u64; tsp];
            ranks.for_each(|rank| counts[rank % tsp] += 1);
            counts
        };
        let all = of_place(0..self.shards.len());
        for (node, owners) in self.shards.chunks(self.ranks_per_node as usize).enumerate() {
            let first = node * self.ranks_per_node as usize;
            let here = of_place(first..first + owners.len());
            for (rank, bytes) in (first..).zip(owners) {
                for (place, bytes) in bytes.iter().enumerate() {
                    let own = u64::from(rank % tsp == place);
                    sent.weights_within_machines += bytes * (here[place] - own);
                    sent.weights_between_machines += bytes * (all[place] - here[place]);
                }
            }
        }
    }
}

/// How many blocks a run of micro-batches has.
fn count(first: u64, end: u64) -> u64 {
    blocks(first, end).len() as u64
}

#[cfg(test)]
mod tests;
