//! Buckets: parameters whose gradients are sent together, in the order of sending.
//!
//! Invariant: a bucket has whole parameters, and every parameter is in one bucket.

use std::ops::Range;

use contract::{Fault, Result};

use crate::state::ownership::ParamShard;

/// The buckets of a step, in the order in which every rank sends them.
pub(crate) struct Buckets(Vec<Vec<Range<usize>>>);

impl Buckets {
    /// One bucket for all parameters.
    pub(crate) fn whole(parameters: usize) -> Self {
        Buckets(vec![std::iter::once(0..parameters).collect()])
    }

    /// One bucket for each layer, given by its parameters' indices in the canonical order. The last layer comes first,
    /// because its gradients are computed first; the final norm, which follows it in the canonical order, shares its
    /// bucket.
    pub(crate) fn by_layer(layers: &[Range<usize>]) -> Self {
        let mut layers: Vec<_> = layers.iter().rev().map(|layer| vec![layer.clone()]).collect();
        if layers.len() > 2 {
            let behind = layers.remove(0);
            layers[0].extend(behind);
        }
        Buckets(layers)
    }

    /// The number of buckets.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// The bucket of a parameter.
    pub(crate) fn of(&self, parameter: usize) -> Result<usize> {
        let has = |bucket: &Vec<Range<usize>>| bucket.iter().any(|one| one.contains(&parameter));
        self.0.iter().position(has).ok_or_else(unknown)
    }

    /// The parameters of a bucket, in its order.
    pub(crate) fn parameters(&self, bucket: usize) -> impl Iterator<Item = usize> + '_ {
        self.0[bucket].iter().cloned().flatten()
    }

    /// The pieces of a bucket, in the same order.
    pub(crate) fn pieces<'a>(
        &'a self,
        bucket: usize,
        pieces: &'a [ParamShard],
    ) -> impl Iterator<Item = &'a ParamShard> {
        self.parameters(bucket).flat_map(move |parameter| of_tensor(pieces, parameter))
    }

    /// The elements of each bucket that each of `world` ranks owns.
    pub(crate) fn lengths(&self, pieces: &[ParamShard], world: usize) -> Result<Vec<Vec<i64>>> {
        let mut lengths = vec![vec![0; world]; self.count()];
        for piece in pieces {
            let owned = lengths[self.of(piece.tensor)?].get_mut(piece.owner as usize);
            *owned.ok_or_else(unknown)? += piece.length();
        }
        Ok(lengths)
    }
}

/// The pieces of a tensor; `pieces` has those of all tensors in canonical order.
pub(super) fn of_tensor(pieces: &[ParamShard], tensor: usize) -> &[ParamShard] {
    let first = pieces.partition_point(|piece| piece.tensor < tensor);
    let count = pieces[first..].partition_point(|piece| piece.tensor == tensor);
    &pieces[first..first + count]
}

pub(super) fn unknown() -> Fault {
    Fault::bug("a gradient of an unknown parameter, or a piece of an unknown owner")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::tests::layout;
    use crate::state::ownership;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_piece_is_in_one_bucket(cuts in prop::collection::btree_set(1usize..5, 0..5), world in 1u32..9) {
            let layout = layout();
            let pieces = ownership::pieces(&layout.parameters, &layout.rules, world);
            let ends: Vec<usize> = [0].into_iter().chain(cuts).chain([layout.parameters.len()]).collect();
            let layers: Vec<_> = ends.windows(2).map(|ends| ends[0]..ends[1]).collect();
            for buckets in [Buckets::whole(layout.parameters.len()), Buckets::by_layer(&layers)] {
                let mut found: Vec<ParamShard> =
                    (0..buckets.count()).flat_map(|one| buckets.pieces(one, &pieces)).cloned().collect();
                found.sort_by_key(|piece| (piece.tensor, piece.first));
                prop_assert_eq!(&found, &pieces);
                let lengths = buckets.lengths(&pieces, world as usize).unwrap();
                let all: i64 = lengths.iter().flatten().sum();
                prop_assert_eq!(all, pieces.iter().map(ParamShard::length).sum::<i64>());
                for parameter in 0..layout.parameters.len() {
                    let bucket = buckets.of(parameter).unwrap();
                    prop_assert!(buckets.parameters(bucket).any(|one| one == parameter));
                }
                prop_assert!(buckets.of(layout.parameters.len()).is_err());
            }
        }
    }
}
