//! The table in libtorch's operators: defines each operation, for any device; the kernels of other tables are tested
//! against it.
//!
//! Sums and intermediate values are f32; bf16 results are rounded once, when written.

mod attention;
mod dispatch;
mod experts;
mod newton_schulz;
mod norm;
mod query_key;

use tch::kind::INT64_CPU;
use tch::{Device, Kind, Tensor};

use super::{
    AdamWStep, Attended, Attention, AttentionGrads, CHUNK, ConvShift, ConvShiftGrads, Dispatch,
    ExpertRows, HeadGrads, NewtonSchulz, Ops, ParamGradient, QueriesAndKeys, QueryKey,
    QueryKeyGrads, ResidualGrads, ResidualScaling, Update, UpdateRule, check, chunks, update,
};
use crate::{Result, checksum, layout};

/// The table of libtorch's operators. A change of its bits requires a new version.
#[derive(Debug)]
pub(super) struct Reference;

impl Ops for Reference {
    fn name(&self) -> &'static str {
        "reference 4"
    }

    fn matmul(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        layout::matmul(left, right)
    }

    fn matmul_into(&self, out: &Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
        if left.kind() != out.kind() {
            return Ok(out.shallow_clone().f_copy_(&left.f_matmul(right)?)?);
        }
        let _ = match left.dim() {
            2 => left.f_mm_out(out, right)?,
            _ => left.f_bmm_out(out, right)?,
        };
        Ok(())
    }

    fn matmul_add(&self, out: &mut Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
        let _ = match left.kind() == out.kind() {
            true => out.f_addmm_(left, right)?,
            false => out.f_add_(&left.f_matmul(right)?)?,
        };
        Ok(())
    }

    fn attention(&self, by: Attention) -> Result<Attended> {
        attention::attention(by)
    }

    fn attention_backward(
        &self,
        by: Attention,
        saved: Vec<[Tensor; 2]>,
        grad: &Tensor,
        out: AttentionGrads,
    ) -> Result<()> {
        attention::attention_backward(by, &saved, grad, out)
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

    fn conv_shift(&self, z: &Tensor, by: ConvShift) -> Result<[Tensor; 2]> {
        query_key::conv_shift(z, by)
    }

    fn conv_shift_backward(
        &self,
        z: &Tensor,
        by: ConvShift,
        grads: [&Tensor; 2],
        means: &Tensor,
    ) -> Result<ConvShiftGrads> {
        query_key::conv_shift_backward(z, by, grads, means)
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
        [first, second]: [&mut Tensor; 2],
        gradient: &Tensor,
    ) -> Result<()> {
        check::adamw(weight, [&*first, &*second], gradient)?;
        let _ = weight.f_mul_scalar_(f64::from(by.keep))?;
        let gradient = gradient.f_mul_scalar(f64::from(by.scale))?;
        let _ = first.f_lerp_(&gradient, f64::from(by.first))?;
        let _ = second.f_lerp_(&gradient.f_square()?, f64::from(by.second))?;
        let root = second.f_sqrt()?.f_div_scalar(f64::from(by.root))?;
        let step = first.f_div(&root.f_add_scalar(f64::from(by.eps))?)?;
        let _ = weight.f_sub_(&step.f_mul_scalar(f64::from(by.rate))?)?;
        Ok(())
    }

    fn nesterov(
        &self,
        momentum: &mut Tensor,
        gradient: &Tensor,
        by: f32,
        scale: f32,
    ) -> Result<Tensor> {
        check::nesterov(momentum, gradient)?;
        let gradient = gradient.f_mul_scalar(f64::from(scale))?;
        let _ = momentum.f_mul_scalar_(f64::from(by))?.f_add_(&gradient)?;
        Ok(gradient.f_add(&momentum.f_mul_scalar(f64::from(by))?)?)
    }

    fn descend(&self, weight: &mut Tensor, direction: &Tensor, keep: f32, rate: f32) -> Result<()> {
        check::descend(weight, direction)?;
        let step = direction.f_mul_scalar(f64::from(rate))?;
        let _ = weight.f_mul_scalar_(f64::from(keep))?.f_sub_(&step)?;
        Ok(())
    }

    fn newton_schulz(&self, stack: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
        newton_schulz::newton_schulz(stack, by)
    }

    fn squares(&self, x: &Tensor) -> Result<f64> {
        Ok(squares(x)?.f_double_value(&[])?)
    }

    fn chunk_squares(&self, tensors: &[Tensor], chunk: i64) -> Result<Tensor> {
        let mut all = Vec::new();
        for tensor in tensors {
            for chunk in chunks(tensor, chunk)? {
                all.push(squares(&chunk)?);
            }
        }
        match all[..] {
            [] => Ok(Tensor::f_from_slice::<f64>(&[])?),
            _ => Ok(Tensor::f_stack(&all, 0)?),
        }
    }

    /// The first chunk of a part has its checksum.
    fn chunk_sums(&self, parts: &[(&Tensor, u64, u64)], chunk: i64) -> Result<[Tensor; 2]> {
        let tensors: Vec<Tensor> =
            parts.iter().map(|(tensor, ..)| tensor.shallow_clone()).collect();
        let squares = self.chunk_squares(&tensors, chunk)?;
        let count = |tensor: &Tensor| (tensor.numel() as i64 + chunk - 1) / chunk;
        let firsts = (0..).zip(parts).map(|(part, (tensor, ..))| (Some(part), count(tensor)));
        let sums = at_firsts(&checksum::slices(parts)?, &firsts.collect::<Vec<_>>())?;
        Ok([squares, sums])
    }

    fn update(&self, all: &mut [Update]) -> Result<Tensor> {
        all.iter().try_for_each(check::update)?;
        match all.iter().all(|one| one.weight.device() == Device::Cpu) {
            true => update::in_chunks(self, all),
            false => whole(self, all),
        }
    }
}

/// On a device a whole tensor at a time, since every operator is a launch: its checksums are in the first of its rows.
fn whole(ops: &Reference, all: &mut [Update]) -> Result<Tensor> {
    let mut squared = Vec::new();
    for one in all.iter_mut() {
        let mut old = one.weight.f_empty_like()?;
        old.f_copy_(one.weight)?;
        match &mut one.rule {
            UpdateRule::AdamW { by, moments: [first, second] } => {
                ops.adamw(*by, one.weight, [first, second], one.gradient)?;
            }
            UpdateRule::Muon { keep, rate, .. } => {
                ops.descend(one.weight, one.gradient, *keep, *rate)?;
            }
        }
        let new = one.weight.f_view([-1])?;
        if let Some((rounded, first)) = &one.rounded {
            rounded.f_view([-1])?.f_narrow(0, *first, new.size()[0])?.f_copy_(&new)?;
        }
        for chunk in chunks(&old.f_sub_(one.weight)?, CHUNK)? {
            squared.push(squares(&chunk)?);
        }
    }
    if squared.is_empty() {
        return Ok(Tensor::f_zeros([0, 4], INT64_CPU)?);
    }
    let (mut parts, mut firsts) = (Vec::new(), [(); 3].map(|()| Vec::new()));
    for one in all.iter() {
        let count = (one.weight.numel() as i64 + CHUNK - 1) / CHUNK;
        for ((part, salt), firsts) in one.parts().into_iter().zip(one.salts).zip(&mut firsts) {
            firsts.push((part.map(|_| parts.len() as i64), count));
            parts.extend(part.map(|part| (part, one.number, salt)));
        }
    }
    let known = checksum::slices(&parts)?;
    let mut columns = vec![Tensor::f_stack(&squared, 0)?.f_view_dtype(Kind::Int64)?];
    for firsts in &firsts {
        columns.push(at_firsts(&known, firsts)?);
    }
    Ok(Tensor::f_stack(&columns, 1)?)
}

/// For each entry so many numbers in a row: the first one is the entry of `known` with this index, the others are 0.
fn at_firsts(known: &Tensor, firsts: &[(Option<i64>, i64)]) -> Result<Tensor> {
    let most = firsts.iter().map(|(_, count)| *count).max().unwrap_or(0);
    let zeros = Tensor::f_zeros([most], (Kind::Int64, known.device()))?;
    let mut all = vec![zeros.f_narrow(0, 0, 0)?];
    for (index, count) in firsts.iter().filter(|(_, count)| *count > 0) {
        let zeros_from = |from: i64| zeros.f_narrow(0, from, count - from);
        match index {
            Some(index) => all.extend([known.f_narrow(0, *index, 1)?, zeros_from(1)?]),
            None => all.push(zeros_from(0)?),
        }
    }
    Ok(Tensor::f_cat(&all, 0)?)
}

/// The sum of squares, f64, on the tensor's device.
fn squares(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(Kind::Double)?.f_square()?.f_sum(Kind::Double)?)
}

fn to_f32(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(Kind::Float)?)
}

/// The sum over rows.
fn columns(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_sum_dim_intlist(0, false, Kind::Float)?)
}
