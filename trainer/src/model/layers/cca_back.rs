//! Compressed convolutional attention, backward: from the gradient of a shard's output to its input and weights.
//!
//! Gradients of rows that adjacent chunks read are computed where the rows are, from those chunks' gradients.

use kernels::Result;
use kernels::layout::Parts as _;
use tch::Tensor;

use super::cca::Saved;
use super::heads::HeadsGrads;
use super::softmax::SoftmaxGrads;
use crate::model::cut::joined;
use crate::model::layer::Pass;

impl Saved {
    /// From the gradient of the output, by chunk: this shard's term for the normed residual, and for its weights.
    pub(super) fn backward(
        mut self,
        pass: &Pass<'_>,
        grad: &[Tensor],
    ) -> Result<(Vec<Tensor>, Vec<HeadsGrads>)> {
        let ops = pass.ops;
        let o_proj = &self.heads.o_proj;
        let SoftmaxGrads { qk, value, o_proj } = self.softmax.backward(pass, grad, o_proj)?;
        let (mut taps, mut turned) = (Vec::new(), Vec::new());
        for ((chunk, saved), qk) in pass.chunks.iter().zip(&self.chunks).zip(qk) {
            let turned_heads = self.heads.turned(chunk);
            let (raw, factor) = (&saved.raw, &saved.factor);
            let back = ops.query_key_backward(raw, factor, turned_heads, qk, pass.kind)?;
            let grouped = pass.gradient(&back.raw.swapped(1, 2)?, &saved.taps)?;
            taps.push(ops.matmul(&back.raw, &self.heads.kernel)?);
            let grouped = grouped.f_view([-1, pass.config.head_dim, 2])?;
            turned.push((back.means, grouped, back.bias, back.temperature));
        }
        let (taps, value) =
            (pass.chunks.beside(&joined(&taps, 1)?, 1)?, pass.chunks.beside(&value, 0)?);
        let (taps, value) = (taps.wait()?, value.wait()?);
        let (mut inputs, mut gradients) = (Vec::new(), Vec::new());
        for (number, (of_chunk, o_proj)) in turned.into_iter().zip(o_proj).enumerate() {
            let (means, grouped, grouped_bias, temp) = of_chunk;
            let (chunk, x) = (pass.chunks.of(number), &self.chunks[number].x);
            let around = chunk.around(&self.projected, 0)?;
            let grads = [chunk.around(&taps, 1)?, chunk.around(&value, 0)?];
            let by = self.heads.convolution(chunk);
            let conv = ops.conv_shift_backward(&around, by, grads.each_ref(), &means)?;
            let projected = chunk.own(&conv.input, 0)?;
            let input = pass.of_shard(&projected, &self.heads.proj)?;
            gradients.push(HeadsGrads {
                proj: pass.gradient(&projected.swapped(0, 1)?, x)?,
                values: self.heads.values,
                depthwise: conv.weights,
                depthwise_bias: conv.bias,
                grouped,
                grouped_bias,
                temp,
                o_proj,
            });
            inputs.push(input);
        }
        Ok((inputs, gradients))
    }
}
