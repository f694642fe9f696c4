//! Measures the matmuls of a layer's experts on a device, with each implementation: does training use the fastest?

use contract::Result;
use kernels::ops::{DEVICE, Dispatch, EXPERTS, ExpertInput, OpsTable, REFERENCE};
use serde::Serialize;
use tch::{Kind, Tensor};

use super::machine::{BenchOptions, COLD};
use super::shapes::MatmulShape;

/// The matmuls of a layer's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertMatmuls {
    /// The number of experts.
    pub count: i64,
    /// The shape of a matmul; rows of all experts together.
    pub shape: MatmulShape,
    /// Whether these are all matmuls of a layer, as one with the columns of gate, up and down, and what else the layer
    /// does between tokens and rows of results: sorting them, and SwiGLU.
    pub layer: bool,
}

/// Operations of matmuls per second, by implementation. Rows are already sorted by expert, except for a whole layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExpertRates {
    /// The one that training uses.
    pub trained: f64,
    /// Our own kernels, where they exist.
    pub own: Option<f64>,
    /// libtorch's grouped matmul, where it supports the operands.
    pub library: Option<f64>,
    /// One matmul per expert.
    #[serde(rename = "loop")]
    pub one_by_one: f64,
    /// One batched matmul, padded to the rows of the expert with most. Only real rows count as operations.
    pub padded: f64,
}

impl ExpertRates {
    /// The implementations that training could use, by name.
    pub fn alternatives(&self) -> [(&'static str, Option<f64>); 4] {
        let ExpertRates { own, library, one_by_one, padded, .. } = *self;
        [("own", own), ("library", library), ("loop", Some(one_by_one)), ("padded", Some(padded))]
    }

    /// The rate of training relative to the fastest.
    pub fn of_best(&self) -> f64 {
        let rates = self.alternatives().into_iter().filter_map(|(_, rate)| rate);
        self.trained / rates.fold(f64::MIN_POSITIVE, f64::max)
    }
}

/// Forward, or backward to rows and weights.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ExpertPass {
    Forward,
    Backward,
}

/// Operands of a matmul, of its backward pass, and where the rows of each expert are.
struct Operands {
    rows: Tensor,
    grad: Tensor,
    weights: Tensor,
    by: Dispatch,
}

impl ExpertMatmuls {
    /// The expert of each row: unrelated between neighbouring rows, and nearly even, as with a balanced router.
    fn choice(self) -> Vec<i64> {
        let mixed = |row: i64| {
            let mut word = row.cast_unsigned().wrapping_mul(0x9E37_79B9_7F4A_7C15);
            word ^= word >> 29;
            (word.wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 33).cast_signed()
        };
        (0..self.shape.rows).map(|row| mixed(row) % self.count).collect()
    }

    /// The number of rows of the expert with most.
    fn most(self) -> i64 {
        let mut counts = vec![0i64; self.count as usize];
        self.choice().into_iter().for_each(|expert| counts[expert as usize] += 1);
        counts.into_iter().max().unwrap_or_default()
    }

    /// Bytes of an operand set; at least [`COLD`] / 8, so that few sets are made of small operands.
    fn bytes(self, kind: Kind) -> u64 {
        let MatmulShape { rows, inner, columns } = self.shape;
        let numbers = rows * (inner + columns) + self.count * inner * columns;
        (numbers as u64 * kind.elt_size_in_bytes() as u64).max(COLD / 8)
    }
}

impl BenchOptions {
    /// The rates of all implementations, forward and backward; a backward pass has twice the operations.
    ///
    /// # Errors
    /// If an operation fails, or memory runs out.
    pub fn experts(self, of: ExpertMatmuls, kind: Kind) -> Result<[ExpertRates; 2]> {
        let widths = [of.shape.inner, of.shape.columns];
        let has_own = self.workers.ops().name() == DEVICE.name();
        let has_library =
            has_own && kind == Kind::BFloat16 && widths.iter().all(|width| width % 8 == 0);
        let operations = of.shape.operations();
        let rate = |way, seconds: f64| match way {
            ExpertPass::Forward => operations / seconds,
            ExpertPass::Backward => 2.0 * operations / seconds,
        };
        let rates = |way| -> Result<ExpertRates> {
            let by = |ops: OpsTable| -> Result<f64> {
                let seconds = match of.layer {
                    true => self.layer(of, kind, ops, way)?,
                    false => self.grouped(of, kind, ops, way)?,
                };
                Ok(rate(way, seconds))
            };
            let [own, library] = EXPERTS;
            Ok(ExpertRates {
                trained: by(self.workers.ops())?,
                own: has_own.then(|| by(own)).transpose()?,
                library: has_library.then(|| by(library)).transpose()?,
                one_by_one: by(REFERENCE)?,
                padded: rate(way, self.padded(of, kind, way)?),
            })
        };
        Ok([rates(ExpertPass::Forward)?, rates(ExpertPass::Backward)?])
    }

    /// Seconds of a layer's experts by a table.
    fn layer(self, of: ExpertMatmuls, kind: Kind, ops: OpsTable, way: ExpertPass) -> Result<f64> {
        let MatmulShape { rows, inner: hidden, columns } = of.shape;
        let inner = columns / 3;
        let one = || {
            let choice = Tensor::f_from_slice(&of.choice())?.f_to_device(self.device)?;
            let by = ops.dispatch(&choice, of.count + 1)?;
            let [x, grad] = [0, 1].map(|_| self.random(&[rows, hidden], kind));
            let gate_up = self.random(&[of.count, 2 * inner, hidden], kind)?;
            let down = self.random(&[of.count, hidden, inner], kind)?;
            let input = ops.expert_input(&x?, &by)?;
            let made = ops.grouped_swiglu(&input, &gate_up, &by)?;
            Ok((input, ops.permute(&grad?, &by)?, [gate_up, down], made, by))
        };
        let work = |own: &mut (ExpertInput, Tensor, [Tensor; 2], [Tensor; 2], Dispatch)| {
            let (input, grad, [gate_up, down], [both, product], by) = own;
            if way == ExpertPass::Forward {
                let (ExpertInput::Sorted(x) | ExpertInput::Tokens(x)) = input;
                let tokens = x.f_narrow(0, 0, rows)?;
                let input = ops.expert_input(&tokens, by)?;
                let [_, product] = ops.grouped_swiglu(&input, gate_up, by)?;
                return ops.grouped_matmul(&product, down, by).map(drop);
            }
            let both = ops.grouped_swiglu_backward(grad, down, both, by)?;
            let product = ExpertInput::Sorted(product.shallow_clone());
            drop(ops.grouped_matmul_weights(grad, &product, by)?);
            drop(ops.grouped_matmul_input(&both, gate_up, by)?);
            ops.grouped_matmul_weights(&both, input, by).map(drop)
        };
        self.time_cold(of.bytes(kind), one, work)
    }

    /// Seconds of a table's grouped matmul.
    fn grouped(self, of: ExpertMatmuls, kind: Kind, ops: OpsTable, way: ExpertPass) -> Result<f64> {
        let MatmulShape { rows, inner, columns } = of.shape;
        let one = || {
            let choice = Tensor::f_from_slice(&of.choice())?.f_to_device(self.device)?;
            let by = ops.dispatch(&choice, of.count + 1)?;
            let sorted = |width| ops.permute(&self.random(&[rows, width], kind)?, &by);
            let weights = self.random(&[of.count, columns, inner], kind)?;
            Ok(Operands { rows: sorted(inner)?, grad: sorted(columns)?, weights, by })
        };
        let work = |own: &mut Operands| {
            let Operands { rows, grad, weights, by } = own;
            if way == ExpertPass::Forward {
                return ops.grouped_matmul(rows, weights, by).map(drop);
            }
            drop(ops.grouped_matmul_input(grad, weights, by)?);
            let rows = ExpertInput::Sorted(rows.shallow_clone());
            ops.grouped_matmul_weights(grad, &rows, by).map(drop)
        };
        self.time_cold(of.bytes(kind), one, work)
    }

    /// Seconds of a padded batched matmul.
    fn padded(self, of: ExpertMatmuls, kind: Kind, way: ExpertPass) -> Result<f64> {
        let (MatmulShape { inner, columns, .. }, most) = (of.shape, of.most());
        let one = || {
            let rows = self.random(&[of.count, most, inner], kind)?;
            let grad = self.random(&[of.count, most, columns], kind)?;
            Ok([rows, grad, self.random(&[of.count, columns, inner], kind)?])
        };
        let work = |[rows, grad, weights]: &mut [Tensor; 3]| {
            if way == ExpertPass::Forward {
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
        let shape = MatmulShape { rows: 4096, inner: 8, columns: 8 };
        let of = ExpertMatmuls { count: 16, shape, layer: false };
        assert_eq!(of.choice().len(), 4096);
        assert!((257..320).contains(&of.most()), "{} rows of 256 in the mean", of.most());
        let few = ExpertMatmuls { count: 4, shape: MatmulShape { rows: 3, ..shape }, ..of };
        assert!((1..=3).contains(&few.most()));
    }

    #[test]
    fn what_is_reached_is_held_against_the_fastest() {
        let rates = ExpertRates {
            trained: 9.0,
            own: Some(9.0),
            library: None,
            one_by_one: 3.0,
            padded: 10.0,
        };
        assert!((rates.of_best() - 0.9).abs() < 1e-12);
        assert!(ExpertRates { library: Some(18.0), ..rates }.of_best() < 0.51);
    }
}
