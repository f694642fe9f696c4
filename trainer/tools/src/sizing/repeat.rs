//! Checks that a matmul gives the same bits each time it is computed, for every shape in a step of a model.
//!
//! Before each call its output, or memory of the same size, is filled with other values: this finds what a call does
//! not write, and what one call leaves for the next.

use std::collections::BTreeSet;

use kernels::ops::{AttentionSpan, ExpertInput, OpsTable, ParamGradient, REFERENCE};
use kernels::{Result as Computed, checksum, runtime};
use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::attention::{self, Operands};
use super::numbers::numbers;
use super::shapes::{self, MatmulBatching, MatmulShape, ModelMatmul};
use trainer::model::{self, ZayaConfig};
use trainer::optim::muon::QUINTIC;
use trainer::optim::{self, OptimizerRule};
use trainer::refusal::refused;

/// A repeated computation and its result.
#[derive(Clone, Debug, Serialize)]
pub struct Repeated {
    /// Its name in a model.
    pub name: String,
    /// Forward, or backward to the input or to the weights; or Newton-Schulz.
    pub way: &'static str,
    /// The dtype of the operands.
    pub dtype: &'static str,
    /// The shape of a matmul; for experts, rows of all together.
    #[serde(flatten)]
    pub shape: MatmulShape,
    /// The implementation: the table of operations; for experts also a loop over them and libtorch's grouped matmul;
    /// for attention on a device also our own kernels and libtorch's. A term of a sum stays f32.
    pub by: &'static str,
    /// How often it was computed.
    pub times: u32,
    /// The number of different results: 1 if all are equal.
    pub outcomes: usize,
    /// The digest of the first result.
    pub digest: String,
}

/// How to repeat.
#[derive(Clone, Copy, Debug)]
pub struct RepeatOptions {
    /// The table that computes.
    pub ops: OpsTable,
    /// The device of the tensors.
    pub device: Device,
    /// How often each is computed.
    pub times: u32,
}

/// A matmul of a forward pass, and both of its backward pass.
const WAYS: [&str; 3] = ["forward", "to the input", "to the weights"];

impl RepeatOptions {
    /// Repeats all operations of a model's micro-batch of `tokens` with operands of `kind`; Newton-Schulz, which has
    /// only one, is included with f32.
    ///
    /// # Errors
    /// If an operation fails, or memory runs out.
    pub fn of_model(
        self,
        config: &ZayaConfig,
        tokens: i64,
        kind: Kind,
    ) -> contract::Result<Vec<Repeated>> {
        let entered = runtime::enter_thread();
        entered.and_then(|()| self.all(config, tokens, kind)).map_err(refused)
    }

    fn all(self, config: &ZayaConfig, tokens: i64, kind: Kind) -> Computed<Vec<Repeated>> {
        let mut found = Vec::new();
        for ModelMatmul { name, shape, together, wide } in shapes::of_model(config, tokens) {
            let kind = if wide { Kind::Float } else { kind };
            match together {
                MatmulBatching::One => self.product(name, shape, &[], kind, &mut found)?,
                MatmulBatching::Heads(heads) => {
                    self.product(name, shape, &[heads], kind, &mut found)?
                }
                MatmulBatching::Experts => {
                    let shape = MatmulShape { rows: tokens, ..shape };
                    self.grouped(name, shape, config.num_experts, kind, &mut found)?;
                }
            }
        }
        self.attention(config, tokens, kind, &mut found)?;
        if kind == Kind::Float {
            for [rows, columns] in matrices(config) {
                self.newton_schulz([rows, columns], &mut found)?;
            }
        }
        Ok(found)
    }

    /// Repeats a call, and compares the results.
    fn asked(
        self,
        row: Repeated,
        call: impl Fn() -> Computed<Tensor>,
        found: &mut Vec<Repeated>,
    ) -> Computed<()> {
        let (mut outcomes, mut first) = (BTreeSet::new(), None);
        for time in 0..self.times {
            let outcome = call()?;
            // Over all bits of the result.
            let digest = checksum::tensor(&outcome, 1)?;
            first.get_or_insert(digest);
            outcomes.insert(digest);
            // Freed at once, so that the next call gets the memory with these values.
            let other = outcome.f_empty_like()?.f_fill_(f64::from(time))?;
            drop((outcome, other));
        }
        let digest = first.map_or_else(String::new, |digest| format!("{digest:016x}"));
        found.push(Repeated { times: self.times, outcomes: outcomes.len(), digest, ..row });
        Ok(())
    }

    /// One matmul, or a batch of them for `heads`.
    fn product(
        self,
        name: &str,
        shape: MatmulShape,
        heads: &[i64],
        kind: Kind,
        found: &mut Vec<Repeated>,
    ) -> Computed<()> {
        let MatmulShape { rows, inner, columns } = shape;
        let of = |sizes: [i64; 2], by| numbers(&[heads, &sizes].concat(), by, kind, self.device);
        let (x, weight) = (of([rows, inner], 0.7)?, of([columns, inner], 0.9)?);
        let grad = of([rows, columns], 1.1)?;
        let turned = |tensor: &Tensor| tensor.f_transpose(-2, -1);
        let operands = [
            (&x, turned(&weight)?),
            (&grad, weight.shallow_clone()),
            (&turned(&grad)?, x.shallow_clone()),
        ];
        let shapes = [[rows, inner, columns], [rows, columns, inner], [columns, rows, inner]];
        for ((way, (left, right)), shape) in WAYS.into_iter().zip(&operands).zip(shapes) {
            let [rows, inner, columns] = shape;
            let row = |by| row(name, way, kind, MatmulShape { rows, inner, columns }, by);
            if kind == Kind::BFloat16 {
                // As a cut micro-batch multiplies it.
                self.asked(row("a part"), || self.ops.matmul_part(left, right), found)?;
            }
            let row = row("ours");
            if !heads.is_empty() {
                self.asked(row, || self.ops.matmul(left, right), found)?;
                continue;
            }
            let out = Tensor::f_empty([rows, columns], (kind, self.device))?;
            let call = || {
                let mut out = out.shallow_clone();
                let _ = out.f_fill_(f64::NAN)?;
                self.ops.matmul_into(&out, left, right)?;
                Ok(out)
            };
            self.asked(row, call, found)?;
        }
        Ok(())
    }

    /// Grouped matmuls of experts with uneven routing: few rows for one and many for another.
    fn grouped(
        self,
        name: &str,
        shape: MatmulShape,
        experts: i64,
        kind: Kind,
        found: &mut Vec<Repeated>,
    ) -> Computed<()> {
        let MatmulShape { rows, inner, columns } = shape;
        let x = numbers(&[rows, inner], 0.7, kind, self.device)?;
        let weights = numbers(&[experts, columns, inner], 0.9, kind, self.device)?;
        let grad = numbers(&[rows, columns], 1.1, kind, self.device)?;
        // Every expert has a token: a library may leave the result of an empty one undefined.
        let choice: Vec<i64> = (0..rows)
            .map(|row| if row < experts { row } else { row * row / 3 % experts })
            .collect();
        let choice = Tensor::from_slice(&choice).f_to_device(self.device)?;
        for (by, ops) in [("ours", self.ops), ("loop", REFERENCE)] {
            let dispatch = ops.dispatch(&choice, experts + 1)?;
            let [x, grad] = [ops.permute(&x, &dispatch)?, ops.permute(&grad, &dispatch)?];
            // Padding rows are undefined.
            let rows_in_use = |out: Tensor| Ok(out.f_index_select(0, &dispatch.places)?);
            let row = |way| row(name, way, kind, shape, by);
            self.asked(
                row(WAYS[0]),
                || rows_in_use(ops.grouped_matmul(&x, &weights, &dispatch)?),
                found,
            )?;
            let input = || rows_in_use(ops.grouped_matmul_input(&grad, &weights, &dispatch)?);
            self.asked(row(WAYS[1]), input, found)?;
            let operand = ExpertInput::Sorted(x.shallow_clone());
            let to_weights = || made(ops, ops.grouped_matmul_weights(&grad, &operand, &dispatch)?);
            self.asked(row(WAYS[2]), to_weights, found)?;
        }
        if kind == Kind::BFloat16 && [inner, columns].iter().all(|width| width % 8 == 0) {
            let dispatch = REFERENCE.dispatch(&choice, experts + 1)?;
            let x = REFERENCE.permute(&x, &dispatch)?.f_narrow(0, 0, rows)?;
            let ends = dispatch.counts.f_narrow(0, 0, experts)?.f_cumsum(0, Kind::Int)?;
            let weights = weights.f_transpose(1, 2)?;
            let call = || {
                Ok(Tensor::f_internal_grouped_mm(&x, &weights, Some(&ends), None::<&Tensor>, None)?)
            };
            self.asked(row(name, WAYS[0], kind, shape, "_grouped_mm"), call, found)?;
        }
        Ok(())
    }

    /// Attention over two documents, one of which began in an earlier chunk.
    fn attention(
        self,
        config: &ZayaConfig,
        tokens: i64,
        kind: Kind,
        found: &mut Vec<Repeated>,
    ) -> Computed<()> {
        let heads = [config.num_attention_heads, config.num_key_value_heads, config.head_dim];
        let (first, shape) = (tokens / 3, [tokens, config.head_dim, config.query_size()]);
        let [rows, inner, columns] = shape;
        let shape = MatmulShape { rows, inner, columns };
        let begun = AttentionSpan { start: 0, len: first.max(1), before: first };
        let whole = AttentionSpan::whole(begun.len, (tokens - begun.len).max(1));
        let operands = Operands::of(&[begun, whole], heads, kind, self.device)?;
        let others = attention::others(self.ops, &operands)?;
        for (by, ops) in [("ours", self.ops)].into_iter().chain(others) {
            let row = |way| row("attention", way, kind, shape, by);
            self.asked(row(WAYS[0]), || Ok(operands.forward(ops)?.heads), found)?;
            let back = || {
                let all = operands.both(ops)?;
                let flat =
                    |gradient: &Tensor| Ok(gradient.f_to_kind(Kind::Float)?.f_reshape([-1])?);
                Ok(Tensor::f_cat(&all.iter().map(flat).collect::<Computed<Vec<_>>>()?, 0)?)
            };
            self.asked(row(WAYS[1]), back, found)?;
        }
        Ok(())
    }

    fn newton_schulz(self, [rows, columns]: [i64; 2], found: &mut Vec<Repeated>) -> Computed<()> {
        let matrix = numbers(&[rows, columns], 0.7, Kind::Float, self.device)?;
        let shape = MatmulShape { rows, inner: columns, columns };
        let row = row("a matrix", "Newton-Schulz", Kind::Float, shape, "ours");
        self.asked(row, || self.ops.newton_schulz(&matrix, QUINTIC), found)
    }
}

/// The matrices of a model that Muon updates, one of each shape.
fn matrices(config: &ZayaConfig) -> BTreeSet<[i64; 2]> {
    let all = model::parameters(config).into_iter().filter(|parameter| {
        !OptimizerRule::of(optim::MatrixOptimizer::Muon, parameter).has_second_moment()
    });
    all.filter_map(|parameter| parameter.shape.last_chunk().copied()).collect()
}

fn row(
    name: &str,
    way: &'static str,
    kind: Kind,
    shape: MatmulShape,
    by: &'static str,
) -> Repeated {
    let dtype = if kind == Kind::BFloat16 { "bf16" } else { "f32" };
    let (name, digest) = (name.to_owned(), String::new());
    Repeated { name, way, dtype, shape, by, times: 0, outcomes: 0, digest }
}

/// Finishes a gradient's pending computation.
fn made(ops: OpsTable, gradient: ParamGradient) -> Computed<Tensor> {
    let mut all = ops.finish(vec![gradient])?;
    Ok(all.swap_remove(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::ops::CPU;

    const HERE: RepeatOptions = RepeatOptions { ops: CPU, device: Device::Cpu, times: 3 };

    #[test]
    fn every_shape_of_a_model_is_asked_for() {
        let mut config = ZayaConfig::preset("zaya1-nano").unwrap();
        (config.vocab_size, config.num_experts) = (512, 4);
        for kind in [Kind::Float, Kind::BFloat16] {
            let found = HERE.of_model(&config, 48, kind).unwrap();
            assert!(found.iter().all(|row| row.outcomes == 1 && row.times == 3), "{found:?}");
            for ModelMatmul { name, shape, .. } in shapes::of_model(&config, 48) {
                for way in WAYS {
                    let own = found.iter().filter(|row| row.name == name && row.way == way);
                    assert!(own.count() > 0, "{name} {way} {shape:?}");
                }
            }
            let by = |by: &str| found.iter().filter(|row| row.by == by).count();
            assert_eq!(by("loop"), 6, "two products of experts, three ways");
            let digests = |way: &str, by: &str| {
                let own = found.iter().filter(|row| row.name == "head" && row.way == way);
                own.filter(|row| row.by == by).map(|row| row.digest.clone()).next()
            };
            assert_ne!(digests(WAYS[0], "ours"), digests(WAYS[1], "ours"));
            assert_eq!(by("a part") > 0, kind == Kind::BFloat16);
            let attention = found.iter().filter(|row| row.name == "attention").count();
            assert_eq!(attention, 2, "there and back");
        }
    }

    /// A result that changes from call to call is counted.
    #[test]
    fn another_outcome_is_found() {
        let calls = std::cell::Cell::new(0);
        let call = || {
            calls.set(calls.get() + 1);
            Ok(Tensor::from_slice(&[1f32, if calls.get() == 2 { -0.0 } else { 0.0 }]))
        };
        let (mut found, shape) = (Vec::new(), MatmulShape { rows: 1, inner: 1, columns: 1 });
        HERE.asked(row("x", WAYS[0], Kind::Float, shape, "ours"), call, &mut found).unwrap();
        assert_eq!((found[0].outcomes, calls.get()), (2, 3));
    }
}
