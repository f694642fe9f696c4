//! Bytes that ranks send each other for a micro-batch which they share. A test counts what a training run sends.

use curriculum::Dtype;
use kernels::tree::blocks;
use trainer::mesh::Mesh;
use trainer::mesh::slices::Slices;
use trainer::model::{
    ActivationCheckpointing, Assignment, Attention, ChunkGrid, MicroBatchOptions, ParamSpec, Role,
    SharedRows, ZayaConfig,
};

/// Bytes that the ranks of a line send each other for a layer's attention, forward and backward.
fn attention_sent(
    config: &ZayaConfig,
    kind: Attention,
    dtype: Dtype,
    rows: SharedRows,
) -> [u64; 2] {
    let SharedRows { beside, earlier, sums, states } = rows;
    let [key, conv] = [config.key_size(), config.conv_size()].map(i64::cast_unsigned);
    let (both, narrow) = (2 * key, if dtype == Dtype::Bf16 { 2 } else { 4 });
    match kind {
        // Projected queries and keys and both halves of values; keys and values. Gradients at both taps and of values;
        // keys and values again; their gradients, f32.
        Attention::Cca => [
            narrow * (beside * (conv + key) + earlier * both),
            narrow * (beside * (2 * conv + key) + earlier * both) + 4 * sums * both,
        ],
        // Keys and values; both again, and their gradients, f32.
        Attention::Gqa => [narrow * earlier * both, narrow * earlier * both + 4 * sums * both],
        // A state for each chunk and sequence, whatever their length.
        Attention::Linear => [4 * states * key * (config.head_dim + 1).cast_unsigned(); 2],
    }
}

/// Bytes that `degree` ranks send each other in all for a shared micro-batch of `rows` sequences of `seq_len` tokens,
/// each one document: operands of layers, gradients of keys and values, losses of tokens; not gradients of weights.
pub(super) fn operand_bytes(
    config: &ZayaConfig,
    rows: u64,
    seq_len: u64,
    degree: u64,
    options: MicroBatchOptions,
    dtype: Dtype,
) -> u64 {
    let dealt = Assignment { chunks: options.cut.chunks, degree, place: 0 };
    let grid = ChunkGrid::new(rows, seq_len, dealt.chunks);
    let window = (config.sliding_window > 0).then_some(config.sliding_window);
    let [full, sliding] = [None, window].map(|window| grid.shared(dealt, window));
    let layers = config.kinds().zip(config.windows()).map(|((kind, _), window)| {
        let sent = if window.is_some() { sliding } else { full };
        let [forward, back] = attention_sent(config, kind, dtype, sent);
        match options.keep {
            ActivationCheckpointing::Everything => forward + back,
            // Recomputation gathers them again.
            ActivationCheckpointing::LayerInputs => 2 * forward + back,
        }
    });
    layers.sum::<u64>() + 4 * rows * seq_len * (degree - 1)
}

/// Bytes of weight shards that `degree` ranks send each other in all for a micro-batch: each shard once for the forward
/// pass, once for the backward pass, and once more for recomputation.
pub(super) fn folded_bytes(
    parameters: &[ParamSpec],
    degree: u64,
    keep: ActivationCheckpointing,
    dtype: Dtype,
) -> u64 {
    let passes = if keep == ActivationCheckpointing::LayerInputs { 3 } else { 2 };
    let cut = parameters.iter().filter(|one| one.sharding.is_some());
    let bytes = cut.map(|one| one.kind(dtype).elt_size_in_bytes() as u64 * one.elements());
    (degree - 1) * passes * bytes.sum::<u64>()
}

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
