//! Compressed convolutional attention, back: from the gradient of a shard's output to those of its input and weights.
//!
//! Gradients of keys and values are summed over the chunks that see them; those of rows beside a chunk are computed where
//! the rows are, from the gradients beside it.

use std::collections::BTreeMap;

use kernels::Result;
use kernels::ops::AttentionGrads;
use kernels::tree::Counter;
use tch::{Kind, Tensor};

use super::cca::{Saved, Seen};
use super::heads::HeadsGrads;
use crate::model::cut::{Chunk, joined};
use crate::model::layer::Pass;

/// What the backward pass of attention leaves, by chunk.
struct AttentionBack {
    /// `[G, n, d]`, f32: of queries and keys.
    qk: Vec<Tensor>,
    /// `[N, K d]`: of values, by chunk one below the other.
    value: Tensor,
    o_proj: Vec<Tensor>,
}

impl Saved {
    /// From the gradient of the output, by chunk: that of the normed residual, f32, and those of the weights.
    pub(super) fn backward(
        mut self,
        pass: &Pass<'_>,
        grad: &[Tensor],
    ) -> Result<(Vec<Tensor>, Vec<HeadsGrads>)> {
        let (ops, dim) = (pass.ops, pass.config.head_dim);
        let AttentionBack { qk, value, o_proj } = self.attention(pass, grad)?;
        let (mut taps, mut mixed) = (Vec::new(), Vec::new());
        for ((chunk, saved), qk) in pass.chunks.iter().zip(&self.chunks).zip(qk) {
            let own = self.heads.turned(chunk);
            let back = ops.query_key_backward(&saved.raw, &saved.factor, own, qk)?;
            let raw = back.raw.f_to_kind(pass.kind)?;
            let weight = pass.gradient(&raw.f_transpose(1, 2)?, &saved.taps)?;
            let weight = weight.f_view([-1, dim, 2, dim])?.f_permute([0, 1, 3, 2])?;
            taps.push(ops.matmul(&raw, &self.heads.kernel)?);
            mixed.push((back, weight.f_reshape([-1, dim, 2])?));
        }
        let taps = joined(&taps, 1)?;
        let (mut inputs, mut gradients) = (Vec::new(), Vec::new());
        for (number, ((back, grouped), o_proj)) in mixed.into_iter().zip(o_proj).enumerate() {
            let (chunk, x) = (pass.chunks.of(number), &self.chunks[number].x);
            let around = [chunk.around(&self.projected, 0)?, chunk.around(&taps, 1)?];
            let by = self.heads.convolution(chunk);
            let conv = ops.depthwise_conv_backward(&around[0], by, &around[1])?;
            let mut projected = chunk.own(&conv.input, 0)?;
            ops.means_backward(&back.raw, self.heads.shape, &mut projected)?;
            let projected = projected.f_to_kind(pass.kind)?;
            let (value, halves) = (chunk.around(&value, 0)?, self.heads.v_proj.each_ref());
            let current = halves[0].size()[0];
            let value = ops.value_shift_backward(value, current, chunk.starts())?;
            let value = chunk.own(&value, 0)?;
            let mut input =
                pass.of_shard(&projected, &self.heads.qk_proj)?.f_to_kind(Kind::Float)?;
            let v_proj = pass.gradient(&value.f_tr()?, x)?;
            let mut side = |first: i64, weight: &Tensor| {
                let rows = weight.size()[0];
                let own = value.f_narrow(1, first, rows)?;
                match (rows, pass.shards) {
                    (0, _) => {}
                    (_, 1) => ops.matmul_add(&mut input, &own, weight)?,
                    _ => drop(input.f_add_(&ops.matmul_part(&own, weight)?)?),
                }
                Result::Ok(v_proj.f_narrow(0, first, rows)?)
            };
            let v_proj = [side(0, halves[0])?, side(current, halves[1])?];
            gradients.push(HeadsGrads {
                qk_proj: pass.gradient(&projected.f_tr()?, x)?,
                v_proj,
                depthwise: conv.weights,
                depthwise_bias: conv.bias,
                grouped,
                grouped_bias: back.bias,
                temp: back.temperature,
                o_proj,
            });
            inputs.push(input);
        }
        Ok((inputs, gradients))
    }

    /// Back to queries, keys and values: those of a key are summed over the chunks that see it.
    fn attention(&mut self, pass: &Pass<'_>, grad: &[Tensor]) -> Result<AttentionBack> {
        let (ops, [queries, keys, _]) = (pass.ops, self.heads.shape);
        let alone = self.chunks.len() == 1;
        let float = (Kind::Float, self.value.device());
        // Parts of sums stay f32.
        let value = match alone {
            true => self.value.f_empty_like()?,
            false => Tensor::f_empty(self.value.size(), float)?,
        };
        let (mut sums, mut o_proj, mut back) = (KeySums::default(), Vec::new(), Vec::new());
        for ((chunk, saved), grad) in pass.chunks.iter().zip(&mut self.chunks).zip(grad) {
            o_proj.push(pass.gradient(&grad.f_tr()?, &saved.attended.heads)?);
            let heads = ops.matmul(grad, &self.heads.o_proj)?;
            let seen = Seen::of(chunk, &saved.qk, &self.key, &self.value, self.heads.shape)?;
            let qk = Tensor::f_empty(saved.qk.size(), float)?;
            let [query, key] = [qk.f_narrow(0, 0, queries)?, qk.f_narrow(0, queries, keys)?];
            let kept = std::mem::take(&mut saved.attended.saved);
            let by = seen.operands(chunk);
            if alone {
                let out = AttentionGrads { query: &query, key: &key, value: &value };
                ops.attention_backward(by, kept, &heads, out)?;
            } else {
                let part = |of: &Tensor| Tensor::f_empty(of.size(), float);
                let [key, value] = [part(&seen.key)?, part(&seen.value)?];
                let out = AttentionGrads { query: &query, key: &key, value: &value };
                ops.attention_backward(by, kept, &heads, out)?;
                sums.add(chunk, &key, &value)?;
            }
            back.push(qk);
        }
        if !alone {
            let key = Tensor::f_empty(self.key.size(), float)?;
            sums.finish(&key, &value)?;
            let mut first = 0;
            for qk in &back {
                let tokens = qk.size()[1];
                qk.f_narrow(0, queries, keys)?.f_copy_(&key.f_narrow(1, first, tokens)?)?;
                first += tokens;
            }
        }
        Ok(AttentionBack { qk: back, value: value.f_to_kind(pass.kind)?, o_proj })
    }
}

/// Gradients of keys and values: of each document's part in a chunk, a tree over the chunks from its own to the last that sees
/// it, given in this order. By the first row of each part.
#[derive(Default)]
struct KeySums(BTreeMap<i64, Counter<Vec<Tensor>>>);

impl KeySums {
    fn add(&mut self, chunk: &Chunk, key: &Tensor, value: &Tensor) -> Result<()> {
        for piece in chunk.pieces() {
            let key = key.f_narrow(1, piece.key, piece.len)?.f_contiguous()?;
            let value = value.f_narrow(0, piece.key, piece.len)?.f_contiguous()?;
            self.0.entry(piece.row).or_default().push(vec![key, value]);
        }
        Ok(())
    }

    /// Writes the sums, each where its rows are.
    fn finish(self, key: &Tensor, value: &Tensor) -> Result<()> {
        for (row, sum) in self.0 {
            for (dim, (sum, all)) in
                [1, 0].into_iter().zip(sum.finish().into_iter().flatten().zip([key, value]))
            {
                all.f_narrow(dim, row, sum.size()[dim as usize])?.f_copy_(&sum)?;
            }
        }
        Ok(())
    }
}
