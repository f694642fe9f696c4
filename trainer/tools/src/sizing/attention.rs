//! Measures attention alone: how fast each table computes it, and whether its bits are reproducible.

use contract::Result;
use kernels::Result as Computed;
use kernels::ops::{
    ATTENTIONS, Attended, Attention, AttentionGrads, AttentionSpan, DEVICE, OpsTable,
    library_attends,
};
use tch::{Device, Kind, Tensor};

use super::machine::BenchOptions;
use super::numbers::numbers;
use trainer::refusal::refused;

/// Operands of a forward and a backward call, over tokens of documents.
pub(super) struct Operands {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    spans: Vec<AttentionSpan>,
    /// `[H, K, d]`.
    heads: [i64; 3],
}

impl Operands {
    /// Random operands.
    pub(super) fn of(
        spans: &[AttentionSpan],
        heads: [i64; 3],
        kind: Kind,
        device: Device,
    ) -> Computed<Operands> {
        let [queries, keys, width] = heads;
        let tokens = spans.iter().map(|span| span.len).sum();
        let others = spans.iter().map(|span| span.keys()).sum();
        let of = |shape: &[i64], by| numbers(shape, by, kind, device);
        Ok(Operands {
            query: of(&[queries, tokens, width], 0.7)?,
            key: of(&[keys, others, width], 0.9)?,
            value: of(&[others, keys * width], 1.1)?,
            grad: of(&[tokens, queries * width], 1.3)?,
            spans: spans.to_vec(),
            heads,
        })
    }

    fn by(&self) -> Attention<'_> {
        let Operands { query, key, value, spans, heads, .. } = self;
        Attention { query, key, value, spans, shape: *heads, window: None, kept: None }
    }

    pub(super) fn forward(&self, ops: OpsTable) -> Computed<Attended> {
        ops.attention(self.by())
    }

    /// Forward and backward: gradients of queries, keys and values.
    pub(super) fn both(&self, ops: OpsTable) -> Computed<[Tensor; 3]> {
        let saved = self.forward(ops)?.saved;
        let float = (Kind::Float, self.query.device());
        let query = Tensor::f_empty(self.query.size(), float)?;
        let key = Tensor::f_empty(self.key.size(), float)?;
        let value = self.value.f_empty_like()?;
        let into = AttentionGrads { query: &query, key: &key, value: &value };
        ops.attention_backward(self.by(), saved, &self.grad, into)?;
        Ok([query, key, value])
    }
}

/// Other tables whose kernels can compute attention over these operands, with their names. Empty on a CPU, and where
/// libtorch's kernels do not support the operands.
pub(super) fn others(trains: OpsTable, of: &Operands) -> Computed<Vec<(&'static str, OpsTable)>> {
    match trains.name() == DEVICE.name() && library_attends(of.by())? {
        true => Ok(["own", "library"].into_iter().zip(ATTENTIONS).collect()),
        false => Ok(Vec::new()),
    }
}

/// Operations per second of a call over one document.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct AttentionRates {
    /// Of the forward pass.
    pub forward: f64,
    /// Of the backward pass, which has twice as many operations.
    pub backward: f64,
}

/// Measurements of a call over one document.
#[derive(Clone, Debug)]
pub struct AttentionTiming {
    /// Operations of the forward pass that the causal mask leaves.
    pub operations: f64,
    /// With the kernels that training uses.
    pub trained: AttentionRates,
    /// With our own kernels and with libtorch's, where both exist.
    pub others: Vec<(&'static str, AttentionRates)>,
}

impl BenchOptions {
    /// Measures a causal call over one document of `tokens`, with every table that can compute it: on one worker while
    /// all workers run it. `heads` are `[H, K, d]`.
    ///
    /// # Errors
    /// If an operation fails, or memory runs out.
    pub fn attention(self, tokens: i64, heads: [i64; 3], kind: Kind) -> Result<AttentionTiming> {
        let trains = self.workers.ops();
        let pairs = trainer::model::causal_pairs(&[0], tokens as u32, None) as f64;
        let operations = 4.0 * (heads[0] * heads[2]) as f64 * pairs;
        let prepare = || Operands::of(&[AttentionSpan::whole(0, tokens)], heads, kind, self.device);
        let rates = |ops: OpsTable| -> Result<AttentionRates> {
            let there = self.time(prepare, |own| own.forward(ops).map(drop))?;
            let both = self.time(prepare, |own| own.both(ops).map(drop))?;
            let back = (both - there).max(0.05 * both);
            Ok(AttentionRates { forward: operations / there, backward: 2.0 * operations / back })
        };
        let others = prepare().and_then(|own| others(trains, &own)).map_err(refused)?.into_iter();
        let others =
            others.map(|(name, ops)| Ok((name, rates(ops)?))).collect::<Result<Vec<_>>>()?;
        Ok(AttentionTiming { operations, trained: rates(trains)?, others })
    }
}
