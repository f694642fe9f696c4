//! Products of all experts of a layer on a device, each way that they could be computed: whether training uses the fastest.

use contract::Result;
use kernels::ops::{DEVICE, Dispatch, EXPERTS, REFERENCE, Table};
use serde::Serialize;
use tch::{Kind, Tensor};

use super::machine::{Bench, COLD};
use super::shapes::Shape;

/// Products of a layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// How many there are.
    pub count: i64,
    /// Of a product; rows of all of them together.
    pub shape: Shape,
}

/// Operations in a second, by who computes. Rows lie sorted by expert already, as training has them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// As training computes it.
    pub trained: f64,
    /// By our own kernels, where there are any.
    pub own: Option<f64>,
    /// By libtorch's grouped product, where it takes such operands.
    pub library: Option<f64>,
    /// By a product for each expert.
    #[serde(rename = "loop")]
    pub one_by_one: f64,
    /// By one product of a stack, in which each expert has as many rows as the one with most. Operations are those of rows that
    /// there are.
    pub padded: f64,
}

impl Rates {
    /// Of the ways that training could go, by name.
    pub fn alternatives(&self) -> [(&'static str, Option<f64>); 4] {
        let Rates { own, library, one_by_one, padded, .. } = *self;
        [("own", own), ("library", library), ("loop", Some(one_by_one)), ("padded", Some(padded))]
    }

    /// What training reaches of the fastest of them.
    pub fn of_best(&self) -> f64 {
        let rates = self.alternatives().into_iter().filter_map(|(_, rate)| rate);
        self.trained / rates.fold(f64::MIN_POSITIVE, f64::max)
    }
}

/// Forward, or back to rows and weights.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Forward,
    Backward,
}

/// Operands of a product, of its way back, and where the rows of each expert are.
struct Operands {
    rows: Tensor,
    grad: Tensor,
    weights: Tensor,
    by: Dispatch,
}

impl Experts {
    /// The expert of each row: neighbours have nothing in common, and none has many more than another, as a router that is
    /// balanced leaves them.
    fn choice(self) -> Vec<i64> {
        let mixed = |row: i64| {
            let mut word = row.cast_unsigned().wrapping_mul(0x9E37_79B9_7F4A_7C15);
            word ^= word >> 29;
            (word.wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 33).cast_signed()
        };
        (0..self.shape.rows).map(|row| mixed(row) % self.count).collect()
    }

    /// Rows of the expert that has most.
    fn most(self) -> i64 {
        let mut counts = vec![0i64; self.count as usize];
        self.choice().into_iter().for_each(|expert| counts[expert as usize] += 1);
        counts.into_iter().max().unwrap_or_default()
    }

    /// Of the operands, which calls go round: a few sets where they are small, for a layer that anybody trains has more.
    fn bytes(self, kind: Kind) -> u64 {
        let Shape { rows, inner, columns } = self.shape;
        let numbers = rows * (inner + columns) + self.count * inner * columns;
        (numbers as u64 * kind.elt_size_in_bytes() as u64).max(COLD / 8)
    }
}

impl Bench {
    /// How fast all of them are, forward and backward; a way back has twice the operations.
    ///
    /// # Errors
    /// Where an operation refuses, or memory ends.
    pub fn experts(self, of: Experts, kind: Kind) -> Result<[Rates; 2]> {
        let widths = [of.shape.inner, of.shape.columns];
        let has_own = self.workers.ops().name() == DEVICE.name();
        let has_library =
            has_own && kind == Kind::BFloat16 && widths.iter().all(|width| width % 8 == 0);
        let operations = of.shape.operations();
        let rate = |way, seconds: f64| match way {
            Way::Forward => operations / seconds,
            Way::Backward => 2.0 * operations / seconds,
        };
        let rates = |way| -> Result<Rates> {
            let by =
                |ops: Table| -> Result<f64> { Ok(rate(way, self.grouped(of, kind, ops, way)?)) };
            let [own, library] = EXPERTS;
            Ok(Rates {
                trained: by(self.workers.ops())?,
                own: has_own.then(|| by(own)).transpose()?,
                library: has_library.then(|| by(library)).transpose()?,
                one_by_one: by(REFERENCE)?,
                padded: rate(way, self.padded(of, kind, way)?),
            })
        };
        Ok([rates(Way::Forward)?, rates(Way::Backward)?])
    }

    /// Seconds of a table's own operation.
    fn grouped(self, of: Experts, kind: Kind, ops: Table, way: Way) -> Result<f64> {
        let Shape { rows, inner, columns } = of.shape;
        let one = || {
            let choice = Tensor::f_from_slice(&of.choice())?.f_to_device(self.device)?;
            let by = ops.dispatch(&choice, of.count + 1)?;
            let sorted = |width| ops.permute(&self.random(&[rows, width], kind)?, &by);
            let weights = self.random(&[of.count, columns, inner], kind)?;
            Ok(Operands { rows: sorted(inner)?, grad: sorted(columns)?, weights, by })
        };
        let work = |own: &mut Operands| {
            let Operands { rows, grad, weights, by } = own;
            if way == Way::Forward {
                return ops.grouped_matmul(rows, weights, by).map(drop);
            }
            drop(ops.grouped_matmul_input(grad, weights, by)?);
            ops.grouped_matmul_weights(grad, rows, by).map(drop)
        };
        self.time_cold(of.bytes(kind), one, work)
    }

    /// Seconds of products of a stack.
    fn padded(self, of: Experts, kind: Kind, way: Way) -> Result<f64> {
        let (Shape { inner, columns, .. }, most) = (of.shape, of.most());
        let one = || {
            let rows = self.random(&[of.count, most, inner], kind)?;
            let grad = self.random(&[of.count, most, columns], kind)?;
            Ok([rows, grad, self.random(&[of.count, columns, inner], kind)?])
        };
        let work = |[rows, grad, weights]: &mut [Tensor; 3]| {
            if way == Way::Forward {
                drop(rows.f_bmm(&weights.f_transpose(1, 2)?)?);
            } else {
                drop(grad.f_bmm(weights)?);
                drop(grad.f_transpose(1, 2)?.f_bmm(rows)?);
            }
            Ok(())
        };
        self.time_cold(of.bytes(kind), one, work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_spread_as_a_balanced_router_spreads_them() {
        let of = Experts { count: 16, shape: Shape { rows: 4096, inner: 8, columns: 8 } };
        assert_eq!(of.choice().len(), 4096);
        assert!((257..320).contains(&of.most()), "{} rows of 256 in the mean", of.most());
        let few = Experts { count: 4, shape: Shape { rows: 3, inner: 8, columns: 8 } };
        assert!((1..=3).contains(&few.most()));
    }

    #[test]
    fn what_is_reached_is_held_against_the_fastest() {
        let rates =
            Rates { trained: 9.0, own: Some(9.0), library: None, one_by_one: 3.0, padded: 10.0 };
        assert!((rates.of_best() - 0.9).abs() < 1e-12);
        assert!(Rates { library: Some(18.0), ..rates }.of_best() < 0.51);
    }
}
