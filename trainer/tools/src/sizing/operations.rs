//! Measures the other operations of a micro-batch: what a step computes between the matmuls, which `machine` measures.
//!
//! Each is timed with the table in use and with libtorch's equivalent operators ("reference"), in the same minute and
//! on uncached operands. Its bytes are those of its inputs and outputs, each once, so that its bandwidth shows how far
//! it is from the limit of memory.

use kernels::ops::{
    AdamWStep, ConvShift, CrossEntropy, Dispatch, ExpertRows, OpsTable, QueryKey, REFERENCE,
    ResidualScaling,
};
use tch::Kind::{Float, Int64};
use tch::{Kind, Tensor};

use super::machine::{BenchOptions, Implementation};
use trainer::model::ZayaConfig;

/// The sizes of a micro-batch, and the dtype of its matmuls.
#[derive(Clone, Debug)]
pub struct MicroBatchSizes {
    /// The model's sizes.
    pub config: ZayaConfig,
    /// Tokens of a micro-batch.
    pub tokens: i64,
    /// f32 or bf16.
    pub kind: Kind,
}

/// One operation at these sizes.
pub struct Operation {
    /// Its name.
    pub name: &'static str,
    /// Bytes of its inputs and outputs.
    pub bytes: u64,
    /// Shape and dtype of each operand.
    operands: Vec<(Vec<i64>, Kind)>,
    work: Work,
}

/// What an operation needs besides its operands.
#[derive(Clone, Copy)]
struct OperationInputs<'a> {
    numbers: &'a MicroBatchSizes,
    /// All tokens routed to one expert.
    order: &'a Dispatch,
}

type Work = fn(OpsTable, OperationInputs<'_>, &mut [Tensor]) -> kernels::Result<()>;

/// The largest number of rows by which a table pads an expert.
const FILLED: i64 = 7;

impl Operation {
    /// The narrowest dtype of its operands.
    pub fn kind(&self) -> Kind {
        let narrow = self.operands.iter().any(|(_, kind)| *kind == Kind::BFloat16);
        if narrow { Kind::BFloat16 } else { Float }
    }
}

impl MicroBatchSizes {
    /// All operations, in the order of a step.
    pub fn operations(&self) -> Vec<Operation> {
        let mut all = self.between();
        all.extend(self.of_attention());
        all.extend(self.of_experts());
        all.extend(self.of_the_end());
        all
    }

    /// An operation with these operands and outputs, given as counts by dtype.
    fn operation(
        &self,
        name: &'static str,
        operands: &[(&[i64], Kind)],
        answers: &[(i64, Kind)],
        work: Work,
    ) -> Operation {
        let taken = operands.iter().map(|(shape, kind)| (shape.iter().product::<i64>(), *kind));
        let all = taken.chain(answers.iter().copied());
        let bytes = all.map(|(count, kind)| count as u64 * kind.elt_size_in_bytes() as u64).sum();
        let operands = operands.iter().map(|(shape, kind)| (shape.to_vec(), *kind)).collect();
        Operation { name, bytes, operands, work }
    }

    fn between(&self) -> Vec<Operation> {
        let (n, d, kind) = (self.tokens, self.config.hidden_size, self.kind);
        let (rows, vector) = ([n, d], [d]);
        let vectors = [(&vector[..], Float); 4];
        let norm = [(&rows[..], Float), (&vector, Float)];
        let back = [(&rows[..], Float), (&[n, 1], Float), (&vector, Float), (&rows, kind)];
        let sum =
            [&[(&rows[..], kind), (&rows, Float)], &vectors[..], &[(&vector, Float)]].concat();
        let sum_back =
            [&[(&rows[..], kind), (&rows, Float)], &vectors[..], &[(&rows, Float)]].concat();
        vec![
            self.operation("norm", &norm, &[(n * d, Float)], |ops, by, t| {
                ops.rms_norm(&t[0], &t[1], by.numbers.config.rms_norm_eps, Kind::Float).map(drop)
            }),
            self.operation("norm, back", &back, &[(n * d, Float)], |ops, _, t| {
                ops.rms_norm_backward(&t[0], &t[1], &t[2], &t[3]).map(drop)
            }),
            self.operation(
                "residual and norm",
                &sum,
                &[(n * d, Float), (n * d, kind)],
                |ops, by, t| {
                    let eps = by.numbers.config.rms_norm_eps;
                    ops.residual_norm(&t[0], &t[1], scaling(t), &t[6], eps).map(drop)
                },
            ),
            self.operation(
                "residual, back",
                &sum_back,
                &[(n * d, kind), (n * d, Float)],
                |ops, _, t| ops.residual_backward(&t[0], &t[1], scaling(t), &t[6]).map(drop),
            ),
        ]
    }

    fn of_attention(&self) -> Vec<Operation> {
        let (n, kind, channels) = (self.tokens, self.kind, self.config.conv_size());
        let [heads, width] = self.heads();
        let columns = channels + self.config.key_size();
        let (z, raw, half) = ([n, columns], [heads, n, width], self.angles());
        let (twice, vector) = ([heads, n, 2 * width], [channels]);
        let (values, means) = ([n, self.config.key_size()], [n, channels]);
        let conv: [(&[i64], Kind); 4] =
            [(&z, kind), (&[channels, 1, 2], Float), (&vector, Float), (&[1], Int64)];
        let grads = [(&twice[..], kind), (&values, kind), (&means, Float)];
        let conv_back = [&conv[..], &grads].concat();
        let angles = [n, half];
        let turn: [(&[i64], Kind); 6] = [
            (&z, kind),
            (&raw, kind),
            (&vector, Float),
            (&[self.config.num_key_value_heads], Float),
            (&angles, Float),
            (&angles, Float),
        ];
        let all = n * channels;
        let made = [(2 * all + n * self.config.key_size(), kind)];
        vec![
            self.operation("convolution and shift", &conv, &made, |ops, by, t| {
                ops.conv_shift(&t[0], convolution(by.numbers, t)).map(drop)
            }),
            self.operation(
                "convolution and shift, back",
                &conv_back,
                &[(n * columns, kind)],
                |ops, by, t| {
                    let by = convolution(by.numbers, t);
                    ops.conv_shift_backward(&t[0], by, [&t[4], &t[5]], &t[6]).map(drop)
                },
            ),
            self.operation(
                "queries and keys",
                &turn,
                &[(all, Float), (all, kind)],
                |ops, by, t| {
                    let [z, raw, rest @ ..] = t else { return Ok(()) };
                    let config = &by.numbers.config;
                    let shape =
                        [config.num_attention_heads, config.num_key_value_heads, config.head_dim];
                    let angles = [&rest[2], &rest[3]];
                    let turn = QueryKey { bias: &rest[0], temperature: &rest[1], angles, shape };
                    ops.query_key(z, raw.shallow_clone(), turn).map(drop)
                },
            ),
        ]
    }

    fn of_experts(&self) -> Vec<Operation> {
        let (n, d, kind) = (self.tokens, self.config.hidden_size, self.kind);
        let inner = self.config.moe_intermediate_size;
        let (rows, both, half) = ([n + FILLED, d], [n, 2 * inner], [n, inner]);
        let back = [n, d];
        let gather: [(&[i64], Kind); 2] = [(&rows, kind), (&[n, 1], Float)];
        let gather_back = [&gather[..], &[(&back[..], kind)]].concat();
        vec![
            self.operation("gated unit", &[(&both, kind)], &[(n * inner, kind)], |ops, _, t| {
                ops.swiglu(&t[0]).map(drop)
            }),
            self.operation(
                "gated unit, back",
                &[(&both, kind), (&half, kind)],
                &[(2 * n * inner, kind)],
                |ops, _, t| ops.swiglu_backward(&t[0], &t[1]).map(drop),
            ),
            self.operation("back to tokens", &gather, &[(n * d, Float)], |ops, by, t| {
                let x = t[0].f_narrow(0, 0, by.order.rows)?;
                ops.gather(ExpertRows { x: &x, by: by.order, passed: None, by_token: &t[1] })
                    .map(drop)
            }),
            self.operation(
                "back to tokens, back",
                &gather_back,
                &[(n * d, Float)],
                |ops, by, t| {
                    let x = t[0].f_narrow(0, 0, by.order.rows)?;
                    let rows = ExpertRows { x: &x, by: by.order, passed: None, by_token: &t[1] };
                    ops.gather_backward(rows, &t[2]).map(drop)
                },
            ),
        ]
    }

    fn of_the_end(&self) -> Vec<Operation> {
        let (n, d, kind) = (self.tokens, self.config.hidden_size, self.kind);
        let (vocabulary, inner) = (self.config.vocab_size, self.config.moe_intermediate_size);
        let weights = [vocabulary, d];
        let head: [(&[i64], Kind); 4] =
            [(&[n, d], kind), (&weights, kind), (&[n], Int64), (&[n], Float)];
        let expert = [d, 2 * inner];
        let [two, three, four] = [2, 3, 4].map(|count| vec![(&expert[..], Float); count]);
        let size = d * 2 * inner;
        let answers = [(n * d, kind), (vocabulary * d, Float)];
        vec![
            self.operation("head and loss, both ways", &head, &answers, |ops, by, t| {
                let [hidden, weights, labels, mask] = t else { return Ok(()) };
                // These labels are token numbers, which must become ids of the vocabulary.
                let labels = &labels.f_remainder(by.numbers.config.vocab_size)?;
                let (chunk, shards, part) = (by.numbers.config.loss_chunk, 1, false);
                let z_loss = by.numbers.config.z_loss;
                let by =
                    CrossEntropy { hidden, weights, labels, mask, chunk, shards, part, z_loss };
                ops.cross_entropy_backward(by, 1.0).map(drop)
            }),
            self.operation("AdamW", &four, &[(3 * size, Float)], |ops, _, t| {
                let [weight, first, second, gradient] = t else { return Ok(()) };
                // Second moments must be nonnegative.
                let by = AdamWStep {
                    keep: 1.0,
                    first: 0.1,
                    second: 0.05,
                    root: 1.0,
                    eps: 2.0,
                    rate: 1e-3,
                    scale: 1.0,
                };
                ops.adamw(by, weight, [first, second], gradient)
            }),
            self.operation("Muon's momentum", &two, &[(2 * size, Float)], |ops, _, t| {
                let [momentum, gradient] = t else { return Ok(()) };
                ops.nesterov(momentum, gradient, 0.95, 1.0).map(drop)
            }),
            self.operation("Muon's step", &two, &[(size, Float)], |ops, _, t| {
                let [weight, direction] = t else { return Ok(()) };
                ops.descend(weight, direction, 1.0, 1e-3)
            }),
            self.operation("squares", &three[..1], &[], |ops, _, t| ops.squares(&t[0]).map(drop)),
        ]
    }

    /// Heads of queries and keys together, and their width.
    fn heads(&self) -> [i64; 2] {
        let config = &self.config;
        [config.num_attention_heads + config.num_key_value_heads, config.head_dim]
    }

    /// Pairs of numbers that rotary embedding rotates in a head.
    fn angles(&self) -> i64 {
        (self.config.head_dim as f64 * self.config.partial_rotary_factor / 2.0) as i64
    }
}

/// Operands 2 to 5 of a residual addition.
fn scaling(t: &[Tensor]) -> ResidualScaling<'_> {
    ResidualScaling { scale: &t[2], bias: &t[3], residual_scale: &t[4], residual_bias: &t[5] }
}

/// Operands 1 to 3 of a convolution.
fn convolution<'a>(by: &MicroBatchSizes, t: &'a [Tensor]) -> ConvShift<'a> {
    let (heads, key) = (by.heads(), by.config.key_size());
    let (weights, bias, starts) = (&t[1], &t[2], &t[3]);
    ConvShift { weights, bias, starts, counted: None, heads, values: [key / 2, key - key / 2] }
}

impl BenchOptions {
    /// Seconds of an operation, on one worker while all are busy.
    pub fn operation(
        self,
        numbers: &MicroBatchSizes,
        of: &Operation,
        by: Implementation,
    ) -> contract::Result<f64> {
        let ops = match by {
            Implementation::Ours => self.workers.ops(),
            Implementation::Libtorch => REFERENCE,
        };
        let operand = |(shape, kind): &(Vec<i64>, Kind)| match kind {
            Int64 => Ok(Tensor::f_arange(shape.iter().product::<i64>(), (Int64, self.device))?),
            _ => self.random(shape, *kind),
        };
        let operands = || {
            let choice = Tensor::f_zeros([numbers.tokens], (Int64, self.device))?;
            let all = of.operands.iter().map(operand).collect::<kernels::Result<Vec<_>>>()?;
            Ok((all, ops.dispatch(&choice, 2)?))
        };
        self.time_cold(of.bytes, operands, |(t, order)| {
            (of.work)(ops, OperationInputs { numbers, order }, t)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kernels::ops::CPU;
    use tch::Device;

    use super::*;
    use trainer::workers::Workers;

    #[test]
    fn every_operation_takes_its_operands_in_both_formats() {
        let bench = BenchOptions {
            device: Device::Cpu,
            workers: Workers::new(1).computing_by(CPU),
            seconds: 1e-6,
        };
        let config = ZayaConfig { vocab_size: 96, ..ZayaConfig::preset("zaya1-nano").unwrap() };
        for kind in [Kind::Float, Kind::BFloat16] {
            let numbers = MicroBatchSizes { config: config.clone(), tokens: 7, kind };
            let all = numbers.operations();
            let names: BTreeSet<_> = all.iter().map(|operation| operation.name).collect();
            assert_eq!(names.len(), all.len());
            for operation in &all {
                for by in [Implementation::Ours, Implementation::Libtorch] {
                    let seconds = bench.operation(&numbers, operation, by);
                    assert!(seconds.unwrap() > 0.0, "{}", operation.name);
                }
            }
        }
    }
}
