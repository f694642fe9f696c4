//! The ranks of a run: how micro-batches are assigned and which ranks communicate. Nothing here can change a result.

use std::ops::Range;

use contract::{Fault, Result};
use kernels::group::Group;
use loader::RankSlice;
use serde::{Deserialize, Serialize};

use super::axes::{Axis, Degrees, Mesh};
use super::words::{Gathered, WordWriter};
use crate::model::{Cut, ParamSpec, WeightShards};
use crate::refusal::lost;
use crate::timing;

/// How the micro-batches of a step are assigned and their gradients reduced: two schedules of the same sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradReduce {
    /// A rank has a run of micro-batches and adds whole subtrees before it sends anything: the fewest bytes.
    #[default]
    Whole,
    /// In turn s rank r of N computes micro-batch s N + r and sends its pieces to their owners: the least memory.
    Bucketed,
}

impl GradReduce {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            GradReduce::Whole => "whole",
            GradReduce::Bucketed => "bucketed",
        }
    }
}

/// All ranks, as seen by one of them.
pub struct ProcessMesh<'a> {
    /// How they exchange bytes.
    pub group: &'a Group,
    /// How many ranks may share a micro-batch.
    pub degrees: Degrees,
    /// Which ranks share a machine.
    pub nodes: NodeLayout,
    /// How micro-batches are assigned.
    pub grad_reduce: GradReduce,
    /// Whether all ranks count as one machine (`--no-hierarchical`).
    pub flat: bool,
}

/// The ranks in a phase, as seen by one of them: which share micro-batches, and which compute others.
pub struct PhaseMesh<'a> {
    /// All ranks.
    pub team: &'a ProcessMesh<'a>,
    /// How micro-batches are cut.
    pub cut: Cut,
    /// The mesh of the ranks.
    pub mesh: Mesh,
    /// The line along which gradients are reduced: ranks at the same position in the sharing of their micro-batches.
    pub data: AxisGroup,
}

/// Ranks numbered by their positions along an axis.
#[derive(Clone, Debug)]
pub struct AxisGroup {
    /// The rank at each position.
    pub ranks: Vec<u32>,
    /// This rank's position.
    pub place: u32,
    /// Which positions share a machine.
    pub nodes: NodeLayout,
}

impl<'a> ProcessMesh<'a> {
    /// The ranks of `group`, of which up to `degrees` share a micro-batch; with `flat` all ranks count as one machine.
    pub fn new(
        group: &'a Group,
        degrees: Degrees,
        grad_reduce: GradReduce,
        flat: bool,
    ) -> Result<Self> {
        let nodes = NodeLayout::new(group.nodes(), group.rank(), flat)?;
        Ok(ProcessMesh { group, degrees, nodes, grad_reduce, flat })
    }

    /// The lines of the ranks in a phase whose micro-batches are cut by `cut`.
    pub fn lines(&'a self, cut: Cut) -> Result<PhaseMesh<'a>> {
        let (rank, names) = (self.group.rank(), self.group.nodes());
        let mesh = Mesh::of(self.group.world(), self.degrees, cut);
        Ok(PhaseMesh {
            team: self,
            cut,
            mesh,
            data: AxisGroup::data(mesh, names, rank, self.flat)?,
        })
    }

    /// Sends a small message to all ranks, and receives theirs.
    pub fn all_gather(&self, operation: &str, message: &WordWriter) -> Result<Gathered> {
        let _watch = timing::part(timing::StepPart::Peers);
        self.group.all_gather(operation, message.bytes()).map(Gathered).map_err(lost)
    }
}

impl AxisGroup {
    /// The line along which `rank` exchanges gradients; `names` are the machines of all ranks.
    pub fn data(mesh: Mesh, names: &[String], rank: u32, flat: bool) -> Result<AxisGroup> {
        let ranks = mesh.line(Axis::Dp, rank);
        let names: Vec<String> = ranks.iter().map(|rank| names[*rank as usize].clone()).collect();
        let place = mesh.place(Axis::Dp, rank);
        Ok(AxisGroup { nodes: NodeLayout::new(&names, place, flat)?, ranks, place })
    }
}

impl PhaseMesh<'_> {
    /// This rank's part of a step.
    pub fn slice(&self) -> Result<RankSlice> {
        slice(self.team.grad_reduce, self.data.place, self.mesh.dp)
    }

    /// Which weight shards this rank holds.
    pub fn fold(&self, parameters: &[ParamSpec]) -> WeightShards {
        let place = self.mesh.place(Axis::Tsp, self.team.group.rank());
        WeightShards::new(self.mesh.tsp, place, parameters, self.cut.shards)
    }

    /// The micro-batches of each position on the line of gradients in a step of `micro_batches`, by round.
    pub fn parts(&self, micro_batches: u64) -> Result<Vec<Vec<Range<u64>>>> {
        parts(self.team.grad_reduce, self.mesh.dp, micro_batches)
    }

    /// This rank's micro-batches of such a step, in the order in which it computes them.
    pub fn micro_batches(&self, micro_batches: u64) -> Result<Vec<u64>> {
        self.micro_batches_of(self.team.group.rank(), micro_batches)
    }

    /// The micro-batches of `rank` in such a step.
    pub(crate) fn micro_batches_of(&self, rank: u32, micro_batches: u64) -> Result<Vec<u64>> {
        let place = self.mesh.place(Axis::Dp, rank) as usize;
        Ok(self.parts(micro_batches)?[place].iter().cloned().flatten().collect())
    }

    /// The runs of micro-batches of such a step that are this rank's, by round.
    pub fn own(&self, micro_batches: u64) -> Result<Vec<Range<u64>>> {
        Ok(self.parts(micro_batches)?.swap_remove(self.data.place as usize))
    }

    /// Orders by micro-batch what each rank reported about each of its micro-batches. `joined` combines the reports of
    /// ranks that share one.
    pub(crate) fn in_order<T>(
        &self,
        micro_batches: u64,
        reports: Vec<Vec<T>>,
        joined: impl Fn(T, T) -> Result<T>,
    ) -> Result<Vec<T>> {
        let parts = self.parts(micro_batches)?;
        let mut places: Vec<Vec<T>> = Vec::new();
        for (rank, reports) in (0..).zip(reports) {
            if self.mesh.place(Axis::Sharing, rank) == 0 {
                places.push(reports);
                continue;
            }
            let before = places.pop().unwrap_or_default();
            if before.len() != reports.len() {
                return Err(Fault::bug("ranks that share micro-batches have not as many"));
            }
            let both = before.into_iter().zip(reports);
            places.push(both.map(|(one, other)| joined(one, other)).collect::<Result<_>>()?);
        }
        let mut reports: Vec<_> = places.into_iter().map(Vec::into_iter).collect();
        let mut all = Vec::new();
        for round in 0..parts.first().map_or(0, Vec::len) {
            for (part, reports) in parts.iter().zip(&mut reports) {
                all.extend(reports.take((part[round].end - part[round].start) as usize));
            }
        }
        let more = reports.iter_mut().any(|reports| reports.next().is_some());
        if all.len() as u64 != micro_batches || more {
            return Err(Fault::bug(format!(
                "{} micro-batches were computed of {micro_batches}",
                all.len()
            )));
        }
        Ok(all)
    }
}

/// The part of each step that is `rank`'s among `world`.
pub fn slice(grad_reduce: GradReduce, rank: u32, world: u32) -> Result<RankSlice> {
    let slice = RankSlice::new(rank, world)?;
    Ok(if grad_reduce == GradReduce::Bucketed { slice.in_turn() } else { slice })
}

/// The micro-batches of each of `world` ranks, by round.
pub fn parts(
    grad_reduce: GradReduce,
    world: u32,
    micro_batches: u64,
) -> Result<Vec<Vec<Range<u64>>>> {
    (0..world).map(|rank| Ok(slice(grad_reduce, rank, world)?.rounds(micro_batches))).collect()
}

/// Which ranks share a machine. A machine and a rank elsewhere exchange data through one rank of the machine, its
/// leader for that rank: it adds its neighbours' data before it sends, and forwards what it receives.
///
/// Ranks of a machine are consecutive, as launchers number them by default. Where they are not, each run of consecutive
/// ranks counts as a machine of its own here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLayout {
    /// The first rank of each, then the number of all ranks.
    ends: Vec<u32>,
    here: usize,
}

impl NodeLayout {
    /// From the machine name of each rank, as seen by `rank`. With `flat` all ranks count as one machine, so that each
    /// rank sends to every other one directly.
    pub fn new(names: &[String], rank: u32, flat: bool) -> Result<Self> {
        let begins = |rank: &usize| *rank == 0 || (!flat && names[*rank] != names[*rank - 1]);
        let mut ends: Vec<u32> = (0..names.len()).filter(begins).map(|rank| rank as u32).collect();
        let here = ends.iter().rposition(|first| *first <= rank);
        let here = here.ok_or_else(|| Fault::bug("a group without ranks"))?;
        ends.push(names.len() as u32);
        Ok(NodeLayout { ends, here })
    }

    /// How many machines there are.
    pub fn count(&self) -> usize {
        self.ends.len() - 1
    }

    /// How many ranks each has.
    pub fn sizes(&self) -> Vec<u32> {
        self.ends.windows(2).map(|ends| ends[1] - ends[0]).collect()
    }

    /// This rank's machine.
    pub fn here(&self) -> usize {
        self.here
    }

    /// The ranks of `node`.
    pub fn ranks(&self, node: usize) -> Range<u32> {
        self.ends[node]..self.ends[node + 1]
    }

    /// The machine of `rank`.
    pub fn of(&self, rank: u32) -> usize {
        self.ends.partition_point(|first| *first <= rank) - 1
    }

    /// Every machine but this one.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let here = self.here;
        (0..self.count()).filter(move |node| *node != here)
    }

    /// The rank of `node` that communicates with `outside`, a rank elsewhere.
    pub fn leader(&self, node: usize, outside: u32) -> u32 {
        let Range { start, end } = self.ranks(node);
        start + outside % (end - start)
    }

    /// The ranks elsewhere for which `rank` is the leader of its machine.
    pub fn behind(&self, rank: u32) -> impl Iterator<Item = u32> + '_ {
        let node = self.of(rank);
        let all = 0..self.ends[self.count()];
        all.filter(move |other| self.of(*other) != node && self.leader(node, *other) == rank)
    }

    /// The rank that sends `rank` what `owner` sends to all: the owner, or the neighbour that is the leader for it.
    pub fn relay(&self, rank: u32, owner: u32) -> u32 {
        let node = self.of(rank);
        let leader = self.leader(node, owner);
        if self.of(owner) == node || leader == rank { owner } else { leader }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_outside_rank_has_one_gate_and_is_told_once(sizes in prop::collection::vec(1u32..5, 1..5)) {
            let names: Vec<String> = (0..sizes.len())
                .flat_map(|node| vec![node.to_string(); sizes[node] as usize])
                .collect();
            let world = names.len() as u32;
            for rank in 0..world {
                let nodes = NodeLayout::new(&names, rank, false).unwrap();
                prop_assert_eq!(nodes.sizes(), sizes.clone());
                prop_assert_eq!(nodes.here(), nodes.of(rank));
                prop_assert!(nodes.ranks(nodes.here()).contains(&rank));
                let mut behind: Vec<u32> =
                    nodes.ranks(nodes.here()).flat_map(|one| nodes.behind(one)).collect();
                behind.sort_unstable();
                let outside: Vec<u32> =
                    (0..world).filter(|other| nodes.of(*other) != nodes.here()).collect();
                prop_assert_eq!(behind, outside, "each rank elsewhere is behind one rank here");
                for owner in (0..world).filter(|owner| *owner != rank) {
                    let relay = nodes.relay(rank, owner);
                    prop_assert!(relay == owner || nodes.behind(relay).any(|one| one == owner));
                    let crosses = nodes.of(relay) != nodes.here();
                    prop_assert_eq!(crosses, nodes.behind(rank).any(|one| one == owner));
                }
                let flat = NodeLayout::new(&names, rank, true).unwrap();
                prop_assert_eq!((flat.count(), flat.behind(rank).count()), (1, 0));
            }
        }
    }

    #[test]
    fn ranks_dealt_to_machines_like_cards_are_machines_of_their_own() {
        let names = ["a", "b", "a", "b"].map(str::to_owned);
        assert_eq!(NodeLayout::new(&names, 2, false).unwrap().sizes(), [1, 1, 1, 1]);
    }
}
