//! Which numbers of each gradient a rank adds where several share micro-batches: those of the owners on its own line of
//! gradients, so that the sum needs only transfers along that line.

use std::ops::Range;

use super::axes::{Axis, Mesh};
use crate::state::ownership::ParamShard;

/// The numbers of each parameter that each position of a sharing line adds.
#[derive(Debug)]
pub struct Slices {
    mesh: Mesh,
    /// By parameter and position: ranges of its numbers, ascending.
    ranges: Vec<Vec<Vec<Range<i64>>>>,
}

impl Slices {
    /// For a model with `parameters` parameters, cut into `pieces`.
    pub fn new(mesh: Mesh, pieces: &[ParamShard], parameters: usize) -> Slices {
        let places = || (0..mesh.together()).map(|_| Vec::new()).collect();
        let mut ranges: Vec<Vec<Vec<Range<i64>>>> = (0..parameters).map(|_| places()).collect();
        for piece in pieces {
            let place = mesh.place(Axis::Sharing, piece.owner) as usize;
            ranges[piece.tensor][place].push(piece.first..piece.first + piece.length());
        }
        Slices { mesh, ranges }
    }

    /// The ranges of a parameter that `place` adds.
    pub fn of(&self, parameter: usize, place: u64) -> &[Range<i64>] {
        &self.ranges[parameter][place as usize]
    }

    /// The total length of these ranges.
    pub fn length(&self, parameter: usize, place: u64) -> i64 {
        self.of(parameter, place).iter().map(|range| range.end - range.start).sum()
    }

    /// The pieces on the line of gradients of the ranks at `place`: owners are positions on that line, and offsets
    /// count within the ranges of [`Slices::of`], one after the other.
    pub fn pieces(&self, pieces: &[ParamShard], place: u32) -> Vec<ParamShard> {
        let (mut tensor, mut at) = (usize::MAX, 0);
        let own =
            pieces.iter().filter(|piece| self.mesh.place(Axis::Sharing, piece.owner) == place);
        own.map(|piece| {
            at = if piece.tensor == tensor { at } else { 0 };
            tensor = piece.tensor;
            let (first, owner) = (at, self.mesh.place(Axis::Dp, piece.owner));
            at += piece.length();
            ParamShard { first, owner, ..piece.clone() }
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::tests::layout;
    use crate::state::ownership;
    use proptest::prelude::*;

    proptest! {
        /// Every number belongs to one position, and the pieces of a line are those of the whole.
        #[test]
        fn slices_are_a_partition((dp, cp, tsp) in (1u32..4, 1u32..4, 1u32..3)) {
            let layout = layout();
            let mesh = Mesh { dp, cp, tsp };
            let pieces = ownership::pieces(&layout.parameters, &layout.rules, mesh.world());
            let slices = Slices::new(mesh, &pieces, layout.parameters.len());
            for (tensor, parameter) in layout.parameters.iter().enumerate() {
                let mut all: Vec<_> = (0..mesh.together()).flat_map(|place| slices.of(tensor, place.into()).to_vec()).collect();
                all.sort_by_key(|range| range.start);
                let end = all.iter().try_fold(0, |end, range| (range.start == end).then_some(range.end));
                prop_assert_eq!(end, Some(parameter.elements() as i64));
            }
            for rank in 0..mesh.world() {
                let place = mesh.place(Axis::Sharing, rank);
                let line = slices.pieces(&pieces, place);
                let owner = mesh.place(Axis::Dp, rank);
                let own = line.iter().filter(|piece| piece.owner == owner);
                for (piece, whole) in own.zip(pieces.iter().filter(|piece| piece.owner == rank)) {
                    prop_assert_eq!((piece.tensor, &piece.shape), (whole.tensor, &whole.shape));
                    // The same numbers: those of the ranges before it are skipped.
                    let (mut skip, mut found) = (piece.first, None);
                    for range in slices.of(piece.tensor, place.into()) {
                        let len = range.end - range.start;
                        if skip < len { found = Some(range.start + skip); break; }
                        skip -= len;
                    }
                    prop_assert_eq!(found, Some(whole.first));
                }
                prop_assert_eq!(ownership::length(&line, owner), ownership::length(&pieces, rank));
            }
        }
    }
}
