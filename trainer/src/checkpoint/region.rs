//! Boxes: rectangular parts of a tensor, so that one layout can read what another one wrote.
//!
//! ```text
//! a tensor [4, 6]        its elements 8 .. 22, three boxes          offsets  lengths
//! . . . . . .
//! . . a a a a            a                                         [1, 2]   [1, 4]
//! b b b b b b            b                                         [2, 0]   [1, 6]
//! c c c c . .            c                                         [3, 0]   [1, 4]
//! ```
//!
//! Invariant: a run of elements is few boxes (at most two per dimension), in order and each contiguous in the tensor,
//! so that the run is their concatenation.

use tch::Tensor;

/// A box in a tensor: an offset and a length for each dimension.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Region {
    /// Offsets.
    pub offsets: Vec<i64>,
    /// Lengths.
    pub lengths: Vec<i64>,
}

impl Region {
    /// The box that covers a tensor of this shape.
    pub fn whole(shape: &[i64]) -> Self {
        Region { offsets: vec![0; shape.len()], lengths: shape.to_vec() }
    }

    /// The boxes of the elements `first .. first + length` of a tensor of this shape, in order.
    pub fn run(shape: &[i64], first: i64, length: i64) -> Vec<Region> {
        let mut found = Vec::new();
        if length > 0 {
            let outside = Region { offsets: Vec::new(), lengths: Vec::new() };
            cut(shape, first, first + length, &outside, &mut found);
        }
        found
    }

    /// Number of elements.
    pub(crate) fn volume(&self) -> i64 {
        self.lengths.iter().product()
    }

    /// Whether it lies within a tensor of this shape and is not empty.
    pub fn fits(&self, shape: &[i64]) -> bool {
        let inside = |((offset, length), whole): ((&i64, &i64), &i64)| {
            *offset >= 0
                && *length > 0
                && offset.checked_add(*length).is_some_and(|end| end <= *whole)
        };
        self.offsets.len() == shape.len()
            && self.lengths.len() == shape.len()
            && self.offsets.iter().zip(&self.lengths).zip(shape).all(inside)
    }

    /// Its intersection with a box of the same tensor.
    pub(crate) fn intersect(&self, other: &Region) -> Option<Region> {
        let mut common = Region { offsets: Vec::new(), lengths: Vec::new() };
        let sides = self.offsets.iter().zip(&self.lengths);
        for ((a, a_length), (b, b_length)) in sides.zip(other.offsets.iter().zip(&other.lengths)) {
            let (from, to) = (*a.max(b), (a + a_length).min(b + b_length));
            if from >= to {
                return None;
            }
            common.offsets.push(from);
            common.lengths.push(to - from);
        }
        Some(common)
    }

    /// The view of `inner` in a tensor that holds this box.
    pub fn part(&self, inner: &Region, tensor: &Tensor) -> Tensor {
        let mut part = tensor.shallow_clone();
        for (dimension, (own, offset)) in self.offsets.iter().zip(&inner.offsets).enumerate() {
            part = part.narrow(dimension as i64, offset - own, inner.lengths[dimension]);
        }
        part
    }
}

/// Whether boxes cover a tensor of this shape, each element exactly once.
pub(crate) fn tile(shape: &[i64], boxes: &[Region]) -> bool {
    let whole: i128 = shape.iter().map(|length| i128::from(*length)).product();
    // Checked first: the volumes of boxes that do not fit (from a damaged manifest) mean nothing.
    let volume = || boxes.iter().map(|region| i128::from(region.volume())).sum::<i128>();
    let apart = |(index, one): (usize, &Region)| {
        boxes[..index].iter().all(|other| one.intersect(other).is_none())
    };
    // Disjoint boxes inside the tensor with its total volume leave no hole.
    boxes.iter().all(|region| region.fits(shape))
        && volume() == whole
        && boxes.iter().enumerate().all(apart)
}

/// Appends the boxes of elements `first .. end` of a tensor of this shape, which lies at `at` in a larger one.
fn cut(shape: &[i64], first: i64, end: i64, at: &Region, found: &mut Vec<Region>) {
    let Some((_, inner)) = shape.split_first() else {
        found.push(at.clone());
        return;
    };
    let row: i64 = inner.iter().product();
    let deeper = |offset: i64, length: i64| {
        let mut at = at.clone();
        at.offsets.push(offset);
        at.lengths.push(length);
        at
    };
    // Part of a row, whole rows, part of a row.
    let (head, tail) = (first / row + i64::from(first % row != 0), end / row);
    if first % row != 0 {
        let base = first / row * row;
        cut(inner, first - base, (end - base).min(row), &deeper(first / row, 1), found);
    }
    if head < tail {
        let mut rows = deeper(head, tail - head);
        rows.offsets.resize(rows.offsets.len() + inner.len(), 0);
        rows.lengths.extend(inner);
        found.push(rows);
    }
    if end % row != 0 && tail >= head {
        cut(inner, 0, end % row, &deeper(tail, 1), found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tch::{Kind, kind};

    /// A shape and a run of its elements.
    fn runs() -> impl Strategy<Value = (Vec<i64>, i64, i64)> {
        prop::collection::vec(1i64..7, 0..5).prop_flat_map(|shape| {
            let count: i64 = shape.iter().product();
            (Just(shape), 0..count, 0..count)
                .prop_map(|(shape, a, b)| (shape, a.min(b), a.abs_diff(b).cast_signed() + 1))
        })
    }

    fn numbered(shape: &[i64]) -> Tensor {
        Tensor::arange(shape.iter().product::<i64>(), kind::INT64_CPU).view(shape)
    }

    fn flat(tensor: &Tensor) -> Vec<i64> {
        Vec::try_from(tensor.contiguous().view([-1])).unwrap()
    }

    #[test]
    fn a_box_beyond_all_numbers_covers_nothing() {
        let (offsets, lengths) = (vec![0, 0], vec![1 << 40, 1 << 40]);
        assert!(!tile(&[4, 4], &[Region { offsets, lengths }]));
    }

    proptest! {
        #[test]
        fn a_run_is_its_boxes_one_after_the_other((shape, first, length) in runs()) {
            let (whole, tensor) = (Region::whole(&shape), numbered(&shape));
            let boxes = Region::run(&shape, first, length);
            prop_assert!(boxes.len() <= 2 * shape.len().max(1), "{boxes:?}");
            let mut found = Vec::new();
            for region in &boxes {
                prop_assert!(region.fits(&shape));
                let part = whole.part(region, &tensor);
                prop_assert_eq!(part.numel() as i64, region.volume());
                found.extend(flat(&part));
            }
            prop_assert_eq!(found, (first..first + length).collect::<Vec<_>>());
        }

        #[test]
        fn an_intersection_has_what_both_have(
            (shape, first, length) in runs(),
            cuts: (prop::sample::Index, prop::sample::Index),
        ) {
            // Element by element, on masks.
            let count: i64 = shape.iter().product();
            let (a, b) = (cuts.0.index(count as usize) as i64, cuts.1.index(count as usize) as i64);
            let (left, right) = (
                Region::run(&shape, first, length),
                Region::run(&shape, a.min(b), a.abs_diff(b).cast_signed() + 1),
            );
            let whole = Region::whole(&shape);
            let mask = |region: &Region| {
                let mask = Tensor::zeros(&shape, (Kind::Int64, tch::Device::Cpu));
                let _ = whole.part(region, &mask).fill_(1);
                mask
            };
            for one in &left {
                for other in &right {
                    let both = mask(one) * mask(other);
                    let found = one.intersect(other);
                    let wanted = found.as_ref().map_or_else(|| both.zeros_like(), mask);
                    prop_assert_eq!(flat(&both), flat(&wanted));
                }
            }
        }

        #[test]
        fn boxes_tile_a_tensor_only_as_they_are((shape, first, length) in runs(), which: prop::sample::Index) {
            let count: i64 = shape.iter().product();
            let mut boxes = Region::run(&shape, 0, first);
            boxes.extend(Region::run(&shape, first, length));
            boxes.extend(Region::run(&shape, first + length, count - first - length));
            prop_assert!(tile(&shape, &boxes));
            let which = which.index(boxes.len());
            let mut twice = boxes.clone();
            twice.push(boxes[which].clone());
            prop_assert!(!tile(&shape, &twice));
            let mut missing = boxes.clone();
            missing.remove(which);
            prop_assert!(!tile(&shape, &missing));
            for dimension in 0..shape.len() {
                let mut moved = boxes.clone();
                moved[which].offsets[dimension] += 1;
                prop_assert!(!tile(&shape, &moved));
            }
        }
    }
}
