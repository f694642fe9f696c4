//! The sums by machine equal the sums over all pairs of ranks.

use contract::Result;
use proptest::prelude::*;

use super::*;
use trainer::mesh::team::{self, AxisGroup, NodeLayout};
use trainer::mesh::{GradReduce, Mesh};

/// Sums rank by rank, as they send.
fn one_by_one(sending: &SentInputs<'_>) -> Result<SentInStep> {
    let SentInputs { mesh, ranks_per_node, flat, parts, lengths, weights, shards } = *sending;
    let world = mesh.world();
    let names: Vec<String> = (0..world).map(|rank| (rank / ranks_per_node).to_string()).collect();
    let mut sent = SentInStep::default();
    for rank in 0..world {
        let crosses = |to: u32| names[rank as usize] != names[to as usize];
        let AxisGroup { ranks, place, nodes } = AxisGroup::data(mesh, &names, rank, flat)?;
        let mut gradients = |to: u32, bytes: u64| match crosses(to) {
            true => sent.gradients_between_machines += bytes,
            false => sent.gradients_within_machines += bytes,
        };
        let length = |place: u32| lengths[ranks[place as usize] as usize];
        let here = nodes.ranks(nodes.here());
        let own: u64 = parts[place as usize].iter().map(|part| count(part.start, part.end)).sum();
        for to in here.clone().filter(|to| *to != place) {
            let behind: u64 = nodes.behind(to).map(length).sum();
            gradients(ranks[to as usize], own * (length(to) + behind));
        }
        let joined = |round: usize| {
            let first = parts[here.start as usize][round].start;
            count(first, parts[here.end as usize - 1][round].end)
        };
        let joined: u64 = (0..parts[place as usize].len()).map(joined).sum();
        for owner in nodes.behind(place) {
            gradients(ranks[owner as usize], joined * length(owner));
        }
        let mut weighs = |to: u32, bytes: u64| match crosses(to) {
            true => sent.weights_between_machines += bytes,
            false => sent.weights_within_machines += bytes,
        };
        let nodes = NodeLayout::new(&names, rank, flat)?;
        for to in (0..world).filter(|to| *to != rank) {
            if nodes.relay(to, rank) == rank {
                weighs(to, weights[rank as usize]);
            }
            weighs(to, shards[rank as usize][to as usize % mesh.tsp as usize]);
        }
        for owner in nodes.behind(rank) {
            for to in nodes.ranks(nodes.here()).filter(|to| *to != rank) {
                weighs(to, weights[owner as usize]);
            }
        }
    }
    Ok(sent)
}

proptest! {
    #[test]
    fn sums_by_machine_are_those_of_all_pairs(
        (dp, cp, tsp) in (1u32..12, 1u32..4, 1u32..4), ranks_per_node in 1u32..9, flat: bool, streaming: bool,
        micro_batches in 1u64..40, bytes in prop::collection::vec(0u64..1000, 5 * 99),
    ) {
        let mesh = Mesh { dp, cp, tsp };
        let world = mesh.world() as usize;
        let grad_reduce = if streaming { GradReduce::Bucketed } else { GradReduce::Whole };
        let parts = team::parts(grad_reduce, dp, micro_batches).unwrap();
        let (lengths, rest) = bytes.split_at(world);
        let (weights, rest) = rest.split_at(world);
        let shards: Vec<Vec<u64>> = rest.chunks(tsp as usize).take(world).map(<[u64]>::to_vec).collect();
        let sending = SentInputs { mesh, ranks_per_node, flat, parts: &parts, lengths, weights, shards: &shards };
        prop_assert_eq!(sending.sum().unwrap(), one_by_one(&sending).unwrap());
    }
}
