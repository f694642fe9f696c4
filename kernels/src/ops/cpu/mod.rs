//! Kernels for main memory: a single pass where libtorch would need one for each operator.
//!
//! f32 and f64 arithmetic in the order of the code, without contraction, sums in a fixed number of parts: so the bits
//! depend on the numbers only, not on the instructions that the compiler chose or on how a tensor is split.

#![expect(unsafe_code, reason = "reads and writes contiguous CPU tensors in place")]

mod adamw;
mod attention;
mod conv;
mod dispatch;
mod experts;
mod exponential;
mod memory;
mod muon;
mod newton_schulz;
mod norm;
mod panels;
mod query_key;

use std::ops::Add;

use tch::{Kind, Tensor};

use super::shapes::note_attention;
use super::{
    AdamWStep, Attended, Attention, AttentionGrads, ConvShift, ConvShiftGrads, Dispatch,
    ExpertRows, HeadGrads, NewtonSchulz, NormBack, Ops, ParamGradient, QueriesAndKeys, QueryKey,
    QueryKeyGrads, ResidualGrads, ResidualScaling,
};
use crate::shapes::note_matmul;
use crate::{Result, ahead, product};
#[cfg(test)]
pub(crate) use exponential::exp;
use memory::{apart, empty, integers, read, to_f32, write};

/// The table for main memory. A change of its bits requires a new version.
#[derive(Debug)]
pub(super) struct Cpu;

impl Ops for Cpu {
    fn name(&self) -> &'static str {
        "cpu 5"
    }

    fn matmul(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        note_matmul(left, right, false);
        product::of(left, right)
    }

    fn matmul_into(&self, out: &Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
        note_matmul(left, right, false);
        match left.kind() == out.kind() {
            true => product::into(out, left, right),
            false => Ok(out.shallow_clone().f_copy_(&product::of(left, right)?)?),
        }
    }

    fn matmul_add(&self, out: &mut Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
        note_matmul(left, right, false);
        if left.kind() == out.kind() {
            return product::add(out, left, right);
        }
        let _ = out.f_add_(&product::of(left, right)?)?;
        Ok(())
    }

    fn attention(&self, by: Attention) -> Result<Attended> {
        note_attention(by);
        attention::attention(by)
    }

    fn attention_backward(
        &self,
        by: Attention,
        saved: Vec<[Tensor; 2]>,
        grad: &Tensor,
        out: AttentionGrads,
    ) -> Result<()> {
        attention::attention_backward(by, saved, grad, out)
    }

    fn dispatch(&self, choice: &Tensor, classes: i64) -> Result<Dispatch> {
        dispatch::dispatch(choice, classes)
    }

    fn rms_norm(
        &self,
        x: &Tensor,
        weight: &Tensor,
        eps: f64,
        kind: Kind,
    ) -> Result<(Tensor, Tensor)> {
        norm::rms_norm(x, weight, eps, kind)
    }

    fn rms_norm_backward(
        &self,
        x: &Tensor,
        factors: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
    ) -> Result<(Tensor, ParamGradient)> {
        norm::rms_norm_backward(x, factors, weight, grad)
    }

    fn residual(&self, branch: &Tensor, residual: &Tensor, by: ResidualScaling) -> Result<Tensor> {
        norm::residual(branch, residual, by)
    }

    fn residual_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        grad: &Tensor,
    ) -> Result<ResidualGrads> {
        norm::residual_backward(branch, residual, by, grad)
    }

    fn residual_norm_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        norm: NormBack,
        grad: &Tensor,
    ) -> Result<(ResidualGrads, ParamGradient)> {
        norm::residual_norm_backward(branch, residual, by, norm, grad)
    }

    fn conv_shift(&self, z: &Tensor, by: ConvShift) -> Result<[Tensor; 2]> {
        conv::conv_shift(z, by)
    }

    fn conv_shift_backward(
        &self,
        z: &Tensor,
        by: ConvShift,
        grads: [&Tensor; 2],
        means: &Tensor,
    ) -> Result<ConvShiftGrads> {
        conv::conv_shift_backward(z, by, grads, means)
    }

    fn query_key(&self, z: &Tensor, raw: Tensor, by: QueryKey) -> Result<QueriesAndKeys> {
        query_key::query_key(z, raw, by)
    }

    fn query_key_backward(
        &self,
        raw: &Tensor,
        factors: &Tensor,
        by: QueryKey,
        grad: HeadGrads,
        kind: Kind,
    ) -> Result<QueryKeyGrads> {
        query_key::query_key_backward(raw, factors, by, grad, kind)
    }

    fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        experts::swiglu(x)
    }

    fn swiglu_backward(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        experts::swiglu_backward(x, grad)
    }

    fn gather(&self, rows: ExpertRows) -> Result<Tensor> {
        experts::gather(rows)
    }

    fn gather_backward(&self, rows: ExpertRows, grad: &Tensor) -> Result<[Tensor; 2]> {
        experts::gather_backward(rows, grad)
    }

    fn adamw(
        &self,
        by: AdamWStep,
        weight: &mut Tensor,
        moments: [&mut Tensor; 2],
        gradient: &Tensor,
    ) -> Result<()> {
        adamw::adamw(by, weight, moments, gradient)
    }

    fn nesterov(
        &self,
        momentum: &mut Tensor,
        gradient: &Tensor,
        by: f32,
        scale: f32,
    ) -> Result<Tensor> {
        muon::nesterov(momentum, gradient, by, scale)
    }

    fn descend(&self, weight: &mut Tensor, direction: &Tensor, keep: f32, rate: f32) -> Result<()> {
        muon::descend(weight, direction, keep, rate)
    }

    fn newton_schulz(&self, stack: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
        newton_schulz::newton_schulz(stack, by)
    }

    fn squares(&self, x: &Tensor) -> Result<f64> {
        Ok(sum_of_squares(read(x)?))
    }
}

/// Also compiles a body for the widest instructions available. The choice affects speed only.
macro_rules! simd {
    ($(#[$note:meta])* $public:vis fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $answer:ty)? $body:block) => {
        $(#[$note])*
        $public fn $name($($argument: $kind),*) $(-> $answer)? {
            #[inline(always)]
            fn plain($($argument: $kind),*) $(-> $answer)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($argument: $kind),*) $(-> $answer)? {
                    plain($($argument),*)
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($argument: $kind),*) $(-> $answer)? {
                    plain($($argument),*)
                }
                use std::arch::is_x86_feature_detected as has;
                if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                    // SAFETY: the processor has what the function was compiled for.
                    return unsafe { avx512($($argument),*) };
                }
                if has!("avx2") {
                    // SAFETY: as above.
                    return unsafe { avx2($($argument),*) };
                }
            }
            plain($($argument),*)
        }
    };
}
use simd;

/// Number of partial sums until the end of a sum: twice the lanes of the widest registers.
const PARTS: usize = 16;

/// Adds up the partial sums, neighbours first.
#[inline(always)]
fn together<T: Copy + Add<Output = T>>(mut parts: [T; PARTS]) -> T {
    let mut width = PARTS;
    while width > 1 {
        width /= 2;
        for index in 0..width {
            parts[index] = parts[2 * index] + parts[2 * index + 1];
        }
    }
    parts[0]
}

simd! {
    fn sum_of_squares(values: &[f32]) -> f64 {
        let mut parts = [0f64; PARTS];
        let (whole, rest) = values.as_chunks::<PARTS>();
        for values in whole {
            ahead::ask(values);
            for (part, value) in parts.iter_mut().zip(values) {
                *part += f64::from(*value) * f64::from(*value);
            }
        }
        for (part, value) in parts.iter_mut().zip(rest) {
            *part += f64::from(*value) * f64::from(*value);
        }
        together(parts)
    }
}
