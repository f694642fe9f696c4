//! Bytes that ranks send each other for a micro-batch which they share. A test counts what a training run sends.

use kernels::tree::blocks;
use trainer::mesh::Mesh;
use trainer::mesh::slices::Slices;
use trainer::model::{Assignment, ParamSpec, Role};

/// Bytes of weight gradients that the ranks of a line send each other for a micro-batch.
pub(super) fn gradient_bytes(slices: &Slices, parameters: &[ParamSpec], dealt: Assignment) -> u64 {
    let places = || 0..dealt.degree;
    let of = |(index, parameter): (usize, &ParamSpec)| {
        // The embedding has two terms: the head's gradient and that of the rows looked up.
        let terms = if index == 0 { 2 } else { 1 };
        let experts = match parameter.role {
            Role::Experts => parameter.shape[0] as u64,
            _ => 0,
        };
        let sent = places().map(|from| {
            let others = places().filter(|to| *to != from);
            let each = others.map(|to| 4 * terms * slices.length(index, to) as u64 + experts);
            count(dealt, from) * each.sum::<u64>()
        });
        sent.sum::<u64>()
    };
    parameters.iter().enumerate().map(of).sum()
}

/// How many blocks of the tree over chunks a position has.
fn count(dealt: Assignment, place: u64) -> u64 {
    let leaves = dealt.leaves(place);
    blocks(leaves.start, leaves.end).len() as u64
}

/// Whether each group of `group` neighbours shares a machine, with `ranks_per_node` ranks on each machine.
pub(super) fn within_machines(mesh: Mesh, group: u32, ranks_per_node: u32) -> bool {
    let first = |rank: u32| rank / group * group;
    (0..mesh.world()).all(|rank| first(rank) / ranks_per_node == rank / ranks_per_node)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use trainer::mesh::axes::Axis;

    use super::*;

    proptest! {
        #[test]
        fn lines_are_within_machines_where_none_crosses(dp in 1u32..6, cp in 1u32..5, tsp in 1u32..5, node in 1u32..9) {
            let mesh = Mesh { dp, cp, tsp };
            for (axis, group) in [(Axis::Tsp, tsp), (Axis::Sharing, cp * tsp)] {
                let apart = |line: Vec<u32>| line.iter().any(|rank| rank / node != line[0] / node);
                let crosses = (0..mesh.world()).any(|rank| apart(mesh.line(axis, rank)));
                prop_assert_eq!(within_machines(mesh, group, node), !crosses);
            }
        }
    }
}
