//! The table of a GPU: our own kernels (`device/` of this crate) where we have one, libtorch's operators for matmuls
//! and the rest.
//!
//! Tensors stay on the device, and the host waits only for operations that return a number: `squares`. Operands are
//! checked by [`super::check`], as in every table, and launches check the arguments against the kernel's own
//! parameters.

pub(super) mod choice;
mod finish;
mod flash;
mod grouped;
mod heads;
mod loss;
pub(super) mod newton_schulz;
mod routed;
mod router;
mod rows;
mod spans;
mod step;
mod tokens;
pub(super) mod wide;

use std::ffi::CStr;
use std::sync::OnceLock;

use tch::kind::INT64_CPU;
use tch::{Device, Kind, Tensor};

use super::{
    AdamWStep, Attended, Attention, AttentionGrads, ConvShift, ConvShiftGrads, CrossEntropy,
    CrossEntropyGrads, Dispatch, ExpertInput, ExpertRows, HeadGrads, NewtonSchulz, NormBack, Ops,
    ParamGradient, QueriesAndKeys, QueryKey, QueryKeyGrads, REFERENCE, ResidualGrads,
    ResidualScaling, RouterGrads, RouterSaved, RouterWeights, Routes, Update, UpdateRule, composed,
};
use crate::device::queue::{Argument, Queue};
use crate::{Error, Result};

/// The table; `queue` gives the queue of an operand's device.
#[derive(Debug)]
pub(super) struct DeviceTable {
    queue: fn(Device) -> Result<Queue>,
    /// Whether it uses libtorch's bf16 matmuls of experts where both are possible; `None`: as [`grouped`] chooses.
    grouped: Option<bool>,
    /// The same for attention and [`flash`].
    attention: Option<bool>,
}

impl DeviceTable {
    /// The table for GPUs.
    pub(super) const GPU: DeviceTable =
        DeviceTable { queue: Queue::of, grouped: None, attention: None };

    /// The same with our own or with libtorch's matmuls of experts.
    pub(super) const fn with_grouped(library: bool) -> DeviceTable {
        DeviceTable { grouped: Some(library), ..DeviceTable::GPU }
    }

    /// The same with our own or with libtorch's attention.
    pub(super) const fn with_attention(library: bool) -> DeviceTable {
        DeviceTable { attention: Some(library), ..DeviceTable::GPU }
    }

    /// A table that launches elsewhere.
    #[cfg(test)]
    pub(super) const fn on(
        queue: fn(Device) -> Result<Queue>,
        grouped: Option<bool>,
    ) -> DeviceTable {
        DeviceTable { queue, grouped, ..DeviceTable::GPU }
    }

    fn at(&self, tensor: &Tensor) -> Result<Queue> {
        (self.queue)(tensor.device())
    }
}

/// Maximum number of elements of a matrix with 32-bit indices.
const MOST: i64 = (1 << 32) - 1;

/// Blocks of a kernel with 1,024 elements of a matrix each (`elements.h`), for at most [`MOST`] elements.
fn blocks(rows: i64, width: i64) -> Result<i64> {
    let elements = rows.checked_mul(width).filter(|elements| *elements <= MOST);
    let refuse = || Error::Foreign {
        call: "launch a kernel",
        reason: format!("a matrix of {rows} x {width} has 2^32 elements or more"),
    };
    Ok((elements.ok_or_else(refuse)? + 1023) / 1024)
}

/// Whether libtorch's attention is used if requested.
pub(super) fn takes_attention(queue: &Queue, by: Attention) -> bool {
    flash::takes(queue, Some(true), by)
}

/// Unreachable: a list of one has one result.
fn unreached(operation: &'static str) -> Error {
    Error::Foreign { call: operation, reason: "it has no answer".to_owned() }
}

/// Launches a kernel over each four columns of a matrix; its last parameters are the size.
fn each(queue: &Queue, kernel: &CStr, [rows, width]: [i64; 2], memory: &[Argument]) -> Result<()> {
    let arguments = [memory, &[rows.into(), width.into()]].concat();
    queue.launch(kernel, blocks(rows, (width + 3) / 4 * 4)?, &arguments)
}

/// The kernel for f32 or the one for bf16.
fn by_kind<'a>(tensor: &Tensor, [wide, narrow]: [&'a CStr; 2]) -> &'a CStr {
    if tensor.kind() == Kind::Float { wide } else { narrow }
}

impl Ops for DeviceTable {
    fn name(&self) -> &'static str {
        static NAME: OnceLock<String> = OnceLock::new();
        NAME.get_or_init(|| format!("device 11, kernels {:016x}", crate::device::kernels_digest()))
    }

    fn matmul(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        REFERENCE.matmul(left, right)
    }

    fn matmul_into(&self, out: &Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
        REFERENCE.matmul_into(out, left, right)
    }

    fn matmul_add(&self, out: &mut Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
        REFERENCE.matmul_add(out, left, right)
    }

    fn matmul_part(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        wide::product(left, right)
    }

    fn attention(&self, by: Attention) -> Result<Attended> {
        let queue = self.at(by.query)?;
        match flash::takes(&queue, self.attention, by) {
            true => flash::attention(&queue, by),
            false => spans::attention(&queue, by),
        }
    }

    fn attention_backward(
        &self,
        by: Attention,
        saved: Vec<[Tensor; 2]>,
        grad: &Tensor,
        out: AttentionGrads,
    ) -> Result<()> {
        let queue = self.at(by.query)?;
        match flash::takes(&queue, self.attention, by) {
            true => flash::attention_backward(by, &saved, grad, out),
            false => spans::attention_backward(&queue, by, &saved, grad, out),
        }
    }

    fn attention_backward_whole(
        &self,
        by: Attention,
        saved: Vec<[Tensor; 2]>,
        grad: &Tensor,
    ) -> Result<(HeadGrads, Tensor)> {
        match flash::takes(&self.at(by.query)?, self.attention, by) {
            true => flash::attention_backward_whole(by, &saved, grad),
            false => composed::attention_backward_whole(self, by, saved, grad),
        }
    }

    fn embedding(
        &self,
        table: &Tensor,
        tokens: &Tensor,
        bias: &Tensor,
        scale: &Tensor,
    ) -> Result<[Tensor; 2]> {
        tokens::embedding(&self.at(table)?, table, tokens, bias, scale)
    }

    fn embedding_backward(
        &self,
        tokens: &Tensor,
        embedded: &Tensor,
        scale: &Tensor,
        grad: &Tensor,
        table: &mut Tensor,
    ) -> Result<[ParamGradient; 2]> {
        tokens::embedding_backward(&self.at(grad)?, tokens, embedded, scale, grad, table)
    }

    fn router(
        &self,
        by: RouterWeights,
        x: &Tensor,
        before: Option<&Tensor>,
        balance: &Tensor,
    ) -> Result<(Routes, RouterSaved)> {
        router::router(&self.at(x)?, by, x, before, balance)
    }

    fn router_backward(
        &self,
        by: RouterWeights,
        x: &Tensor,
        saved: RouterSaved,
        weight: &Tensor,
        state: Option<&Tensor>,
    ) -> Result<RouterGrads> {
        router::router_backward(&self.at(x)?, by, x, saved, weight, state)
    }

    fn dispatch(&self, choice: &Tensor, classes: i64) -> Result<Dispatch> {
        tokens::dispatch(&self.at(choice)?, choice, None, classes)
    }

    fn dispatch_routes(&self, routes: &Routes, classes: i64) -> Result<Dispatch> {
        let counts = routes.counts.as_ref();
        tokens::dispatch(&self.at(&routes.choice)?, &routes.choice, counts, classes)
    }

    fn permute(&self, x: &Tensor, by: &Dispatch) -> Result<Tensor> {
        tokens::permute(&self.at(x)?, x, by)
    }

    fn grouped_matmul(&self, rows: &Tensor, weights: &Tensor, by: &Dispatch) -> Result<Tensor> {
        grouped::matmul(&self.at(rows)?, self.grouped, [rows, weights], by)
    }

    fn grouped_matmul_input(
        &self,
        grad: &Tensor,
        weights: &Tensor,
        by: &Dispatch,
    ) -> Result<Tensor> {
        grouped::input(&self.at(grad)?, self.grouped, [grad, weights], by)
    }

    fn grouped_matmul_weights(
        &self,
        grad: &Tensor,
        rows: &ExpertInput,
        by: &Dispatch,
    ) -> Result<ParamGradient> {
        let queue = self.at(grad)?;
        match rows {
            ExpertInput::Tokens(rows) if rows.kind() == Kind::BFloat16 => {
                grouped::weights_of_tokens(&queue, [grad, rows], by)
            }
            rows => grouped::weights(&queue, self.grouped, [grad, &rows.sorted(self, by)?], by),
        }
    }

    fn expert_input(&self, x: &Tensor, by: &Dispatch) -> Result<ExpertInput> {
        match grouped::fuses(&self.at(x)?, self.grouped, x) {
            true => Ok(ExpertInput::Tokens(x.shallow_clone())),
            false => Ok(ExpertInput::Sorted(self.permute(x, by)?)),
        }
    }

    fn grouped_swiglu(
        &self,
        rows: &ExpertInput,
        weights: &Tensor,
        by: &Dispatch,
    ) -> Result<[Tensor; 2]> {
        let queue = self.at(weights)?;
        match grouped::fuses(&queue, self.grouped, weights) {
            true => grouped::swiglu(&queue, rows, weights, by),
            false => composed::grouped_swiglu(self, rows, weights, by),
        }
    }

    fn grouped_swiglu_backward(
        &self,
        grad: &Tensor,
        weights: &Tensor,
        x: &Tensor,
        by: &Dispatch,
    ) -> Result<Tensor> {
        let queue = self.at(grad)?;
        match grouped::fuses(&queue, self.grouped, grad) {
            true => grouped::swiglu_backward(&queue, [grad, weights, x], by),
            false => composed::grouped_swiglu_backward(self, grad, weights, x, by),
        }
    }

    fn unpermute(&self, rows: ExpertRows) -> Result<Tensor> {
        tokens::unpermute(&self.at(rows.x)?, rows)
    }

    fn cross_entropy(&self, by: CrossEntropy) -> Result<Tensor> {
        loss::cross_entropy(&self.at(by.hidden)?, self, by)
    }

    fn cross_entropy_backward(&self, by: CrossEntropy, divisor: f64) -> Result<CrossEntropyGrads> {
        loss::cross_entropy_backward(&self.at(by.hidden)?, self, by, divisor)
    }

    fn rms_norm(
        &self,
        x: &Tensor,
        weight: &Tensor,
        eps: f64,
        kind: Kind,
    ) -> Result<(Tensor, Tensor)> {
        rows::rms_norm(&self.at(x)?, x, weight, eps, kind)
    }

    fn rms_norm_backward(
        &self,
        x: &Tensor,
        factors: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
    ) -> Result<(Tensor, ParamGradient)> {
        rows::rms_norm_backward(&self.at(x)?, x, factors, weight, grad, None)
    }

    fn rms_norm_backward_beside(
        &self,
        x: &Tensor,
        factors: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
        beside: &Tensor,
    ) -> Result<(Tensor, ParamGradient)> {
        rows::rms_norm_backward(&self.at(x)?, x, factors, weight, grad, Some(beside))
    }

    fn finish(&self, all: Vec<ParamGradient>) -> Result<Vec<Tensor>> {
        let Some(first) = all.first() else { return Ok(Vec::new()) };
        finish::finish(&self.at(first.begun())?, all)
    }

    fn residual(&self, branch: &Tensor, residual: &Tensor, by: ResidualScaling) -> Result<Tensor> {
        rows::residual(&self.at(branch)?, branch, residual, by)
    }

    fn residual_norm(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        weight: &Tensor,
        eps: f64,
    ) -> Result<[Tensor; 3]> {
        rows::residual_norm(&self.at(branch)?, branch, residual, by, weight, eps)
    }

    fn residual_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        grad: &Tensor,
    ) -> Result<ResidualGrads> {
        rows::residual_backward(&self.at(branch)?, branch, residual, by, grad)
    }

    fn residual_norm_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        norm: NormBack,
        grad: &Tensor,
    ) -> Result<(ResidualGrads, ParamGradient)> {
        rows::residual_norm_backward(&self.at(branch)?, branch, residual, by, norm, grad)
    }

    fn residual_norm_gathered(
        &self,
        branch: ExpertRows,
        residual: &Tensor,
        by: ResidualScaling,
        weight: &Tensor,
        eps: f64,
    ) -> Result<[Tensor; 3]> {
        if !routed::fits(branch, &[Some(residual)]) {
            return composed::residual_norm_gathered(self, branch, residual, by, weight, eps);
        }
        routed::residual_norm_gathered(&self.at(residual)?, branch, residual, by, weight, eps)
    }

    fn residual_norm_gathered_backward(
        &self,
        branch: ExpertRows,
        residual: &Tensor,
        by: ResidualScaling,
        norm: NormBack,
        grad: &Tensor,
    ) -> Result<(ResidualGrads, ParamGradient)> {
        if !routed::fits(branch, &[Some(residual), Some(grad), norm.beside]) {
            return composed::residual_norm_gathered_backward(
                self, branch, residual, by, norm, grad,
            );
        }
        let queue = self.at(residual)?;
        routed::residual_norm_gathered_backward(&queue, branch, residual, by, norm, grad)
    }

    fn residual_norm_unpermuted_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        norm: NormBack,
        grad: ExpertRows,
    ) -> Result<(ResidualGrads, ParamGradient)> {
        if !routed::fits(grad, &[Some(branch), Some(residual), Some(grad.by_token), norm.beside]) {
            let grad = self.unpermute(grad)?;
            return self.residual_norm_backward(branch, residual, by, norm, &grad);
        }
        let queue = self.at(residual)?;
        routed::residual_norm_unpermuted_backward(&queue, branch, residual, by, norm, grad)
    }

    fn conv_shift(&self, z: &Tensor, by: ConvShift) -> Result<[Tensor; 2]> {
        heads::conv_shift(&self.at(z)?, z, by)
    }

    fn conv_shift_backward(
        &self,
        z: &Tensor,
        by: ConvShift,
        grads: [&Tensor; 2],
        means: &Tensor,
    ) -> Result<ConvShiftGrads> {
        heads::conv_shift_backward(&self.at(z)?, z, by, grads, means)
    }

    fn query_key(&self, z: &Tensor, raw: Tensor, by: QueryKey) -> Result<QueriesAndKeys> {
        heads::query_key(&self.at(z)?, z, &raw, by)
    }

    fn query_key_backward(
        &self,
        raw: &Tensor,
        factors: &Tensor,
        by: QueryKey,
        grad: HeadGrads,
        kind: Kind,
    ) -> Result<QueryKeyGrads> {
        heads::query_key_backward(&self.at(raw)?, raw, factors, by, grad, kind)
    }

    fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        heads::swiglu(&self.at(x)?, x)
    }

    fn swiglu_backward(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        heads::swiglu_backward(&self.at(x)?, x, grad)
    }

    fn gather(&self, rows: ExpertRows) -> Result<Tensor> {
        tokens::gather(&self.at(rows.x)?, rows)
    }

    fn gather_backward(&self, rows: ExpertRows, grad: &Tensor) -> Result<[Tensor; 2]> {
        tokens::gather_backward(&self.at(rows.x)?, rows, grad)
    }

    fn adamw(
        &self,
        by: AdamWStep,
        weight: &mut Tensor,
        [first, second]: [&mut Tensor; 2],
        gradient: &Tensor,
    ) -> Result<()> {
        let rule = UpdateRule::AdamW { by, moments: [first, second] };
        let update = Update { weight, rounded: None, gradient, rule, number: 0, salts: [0; 3] };
        self.update(&mut [update]).map(drop)
    }

    fn nesterov(
        &self,
        momentum: &mut Tensor,
        gradient: &Tensor,
        by: f32,
        scale: f32,
    ) -> Result<Tensor> {
        let all = self.all_nesterov(&mut [(momentum, gradient)], by, scale)?;
        all.into_iter().next().ok_or_else(|| unreached("nesterov"))
    }

    fn descend(&self, weight: &mut Tensor, direction: &Tensor, keep: f32, rate: f32) -> Result<()> {
        let (gradient, rule) = (direction, UpdateRule::Muon { keep, rate, momentum: direction });
        let update = Update { weight, rounded: None, gradient, rule, number: 0, salts: [0; 3] };
        self.update(&mut [update]).map(drop)
    }

    fn newton_schulz(&self, stack: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
        newton_schulz::newton_schulz(&self.at(stack)?, stack, by)
    }

    fn all_newton_schulz(&self, matrices: &[Tensor], by: NewtonSchulz) -> Result<Vec<Tensor>> {
        let Some(first) = matrices.first() else { return Ok(Vec::new()) };
        newton_schulz::all(&self.at(first)?, matrices, by)
    }

    fn squares(&self, x: &Tensor) -> Result<f64> {
        match x.numel() as i64 {
            0 => Ok(0.0),
            whole => {
                Ok(self.chunk_squares(std::slice::from_ref(x), whole)?.f_double_value(&[0])?)
            }
        }
    }

    fn chunk_squares(&self, tensors: &[Tensor], chunk: i64) -> Result<Tensor> {
        let Some(first) = tensors.first() else { return Ok(Tensor::f_from_slice::<f64>(&[])?) };
        let parts: Vec<_> = tensors.iter().map(|tensor| (tensor, 0, 0)).collect();
        let [squares, _] = step::squares(&self.at(first)?, &parts, chunk, false)?;
        Ok(squares)
    }

    fn chunk_sums(&self, parts: &[(&Tensor, u64, u64)], chunk: i64) -> Result<[Tensor; 2]> {
        let Some((first, ..)) = parts.first() else {
            return REFERENCE.chunk_sums(parts, chunk);
        };
        step::squares(&self.at(first)?, parts, chunk, true)
    }

    fn all_rounded(&self, pairs: &mut [[Tensor; 2]]) -> Result<()> {
        let Some([first, _]) = pairs.first() else { return Ok(()) };
        step::rounded(&self.at(first)?, pairs)
    }

    fn all_nesterov(
        &self,
        pairs: &mut [(&mut Tensor, &Tensor)],
        by: f32,
        scale: f32,
    ) -> Result<Vec<Tensor>> {
        let Some((_, first)) = pairs.first() else { return Ok(Vec::new()) };
        step::nesterov(&self.at(first)?, pairs, by, scale)
    }

    fn update(&self, all: &mut [Update]) -> Result<Tensor> {
        let Some(first) = all.first() else { return Ok(Tensor::f_zeros([0, 4], INT64_CPU)?) };
        step::update(&self.at(first.weight)?, all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_whose_elements_cannot_be_counted_is_refused() {
        assert_eq!(blocks(0, 7).unwrap(), 0);
        assert_eq!(blocks(5, 205).unwrap(), 2);
        assert_eq!(blocks(MOST, 1).unwrap(), 1 << 22);
        let widths = [(MOST + 1, 1), (1 << 24, 256), (i64::MAX, 2)];
        for (rows, width) in widths {
            let refused = blocks(rows, width).unwrap_err().to_string();
            assert!(refused.contains("2^32 elements"), "{refused}");
        }
    }
}
