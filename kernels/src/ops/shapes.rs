//! The table for tensors without numbers ([`crate::shapes`]): each operation makes what the CPU's table would make, and
//! reports its arithmetic.
//!
//! Experts have equally many tokens, and every token has one.

use tch::{Device, Kind, Tensor};

use super::operands::{ExpertRanges, TokenOrder};
use super::{
    AdamWStep, Attended, Attention, AttentionGrads, ConvShift, ConvShiftGrads, Dispatch,
    ExpertInput, ExpertRows, HeadGrads, NewtonSchulz, Ops, ParamGradient, QueriesAndKeys, QueryKey,
    QueryKeyGrads, REFERENCE, ResidualGrads, ResidualScaling, RouterGrads, RouterSaved,
    RouterWeights, Routes, check, composed,
};
use crate::shapes::{self, Work, note, note_matmul};
use crate::{Error, Result};

/// The table.
#[derive(Debug)]
pub(super) struct Shapes {
    /// Whether the rows of its matmuls are those of an expert.
    pub(super) routed: bool,
}

/// The same for the rows of an expert.
const ROUTED: Shapes = Shapes { routed: true };

const FLOAT: (Kind, Device) = (Kind::Float, shapes::DEVICE);

fn empty(shape: &[i64]) -> Result<Tensor> {
    Ok(Tensor::f_empty(shape, FLOAT)?)
}

/// Vectors of so many numbers, as gradients.
fn vectors<const N: usize>(width: i64) -> Result<[ParamGradient; N]> {
    let made = (0..N).map(|_| empty(&[width]).map(ParamGradient::Made));
    let made: Vec<_> = made.collect::<Result<_>>()?;
    made.try_into().map_err(|_| Error::Foreign {
        call: "make vectors",
        reason: "another number of them".to_owned(),
    })
}

fn wide(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.f_to_kind(Kind::Float)?)
}

/// Reports the arithmetic of attention.
pub(super) fn note_attention(by: Attention) {
    let [queries, _, width] = by.shape;
    note(|| Work::Attention(4.0 * (queries * width) as f64 * pairs(by) as f64));
}

/// Pairs of a query and a key that see each other.
fn pairs(by: Attention) -> i64 {
    let seen = |keys: i64| by.window.map_or(keys, |window| keys.min(window));
    // 1 + 2 + ... up to the window, and as many as the window from there on.
    let sum = |keys: i64| seen(keys) * (seen(keys) + 1) / 2 + (keys - seen(keys)) * seen(keys);
    by.spans.iter().map(|span| sum(span.keys()) - sum(span.before)).sum()
}

impl Ops for Shapes {
    fn name(&self) -> &'static str {
        "shapes"
    }

    fn matmul(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        note_matmul(left, right, self.routed);
        REFERENCE.matmul(left, right)
    }

    fn matmul_into(&self, out: &Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
        note_matmul(left, right, self.routed);
        REFERENCE.matmul_into(out, left, right)
    }

    fn matmul_add(&self, out: &mut Tensor, left: &Tensor, right: &Tensor) -> Result<()> {
        note_matmul(left, right, self.routed);
        REFERENCE.matmul_add(out, left, right)
    }

    fn matmul_part(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        note_matmul(left, right, self.routed);
        REFERENCE.matmul(&wide(left)?, &wide(right)?)
    }

    fn attention(&self, by: Attention) -> Result<Attended> {
        let ([queries, _, width], tokens) = (by.shape, check::attention(by)?);
        note_attention(by);
        let [_query, _key, _value] = [wide(by.query)?, wide(by.key)?, wide(by.value)?];
        let heads = empty(&[tokens, queries * width])?.f_to_kind(by.value.kind())?;
        let stats = empty(&[2, queries, tokens])?;
        Ok(Attended { saved: vec![[heads.shallow_clone(), stats]], heads })
    }

    fn attention_backward(
        &self,
        by: Attention,
        _saved: Vec<[Tensor; 2]>,
        grad: &Tensor,
        out: AttentionGrads,
    ) -> Result<()> {
        check::attention_backward(by, grad, out)?;
        let read = [by.query, by.key, by.value, grad, grad].map(wide);
        let made = [by.query, by.key, by.value].map(|of| empty(&of.size()));
        made.into_iter().chain(read).try_for_each(|tensor| tensor.map(drop))
    }

    fn router(
        &self,
        by: RouterWeights,
        x: &Tensor,
        before: Option<&Tensor>,
        balance: &Tensor,
    ) -> Result<(Routes, RouterSaved)> {
        let made = composed::router(self, by, x, before, balance)?;
        let weights = [by.fc1, by.fc2, by.out];
        note_matmul(x, &by.down.f_tr()?, self.routed);
        weights.iter().try_for_each(|weight| -> Result<()> {
            note_matmul(&made.1.state, &weight.f_tr()?, self.routed);
            Ok(())
        })?;
        Ok(made)
    }

    fn router_backward(
        &self,
        by: RouterWeights,
        x: &Tensor,
        saved: RouterSaved,
        weight: &Tensor,
        state: Option<&Tensor>,
    ) -> Result<RouterGrads> {
        let (hidden, probabilities) =
            (saved.state.shallow_clone(), saved.probabilities.shallow_clone());
        let narrow = hidden.f_to_kind(x.kind())?;
        let by_output = [(&probabilities, by.out), (&hidden, by.fc2), (&hidden, by.fc1)];
        for (grad, weight) in by_output {
            note_matmul(grad, weight, self.routed);
            note_matmul(&grad.f_tr()?, &hidden, self.routed);
        }
        note_matmul(&narrow, by.down, self.routed);
        if !by.part {
            note_matmul(&narrow.f_tr()?, x, self.routed);
        }
        composed::router_backward(self, by, x, saved, weight, state)
    }

    fn dispatch(&self, choice: &Tensor, classes: i64) -> Result<Dispatch> {
        check::dispatch(choice, classes)?;
        let (rows, experts) = (choice.size()[0], classes - 1);
        let list = |count| Tensor::f_empty([count], (Kind::Int64, shapes::DEVICE));
        let end = |expert: i64| rows * expert / experts;
        let runs = (0..experts).map(|expert| [expert, end(expert), end(expert + 1) - end(expert)]);
        Ok(Dispatch {
            order: TokenOrder::Listed { tokens: list(rows)?, filled: list(0)? },
            places: list(rows)?,
            counts: list(classes)?,
            rows,
            computed: rows,
            experts,
            groups: ExpertRanges::Known(runs.filter(|[.., count]| *count > 0).collect()),
        })
    }

    fn grouped_matmul(&self, rows: &Tensor, weights: &Tensor, by: &Dispatch) -> Result<Tensor> {
        composed::grouped_matmul(&ROUTED, rows, weights, by)
    }

    fn grouped_matmul_input(
        &self,
        grad: &Tensor,
        weights: &Tensor,
        by: &Dispatch,
    ) -> Result<Tensor> {
        composed::grouped_matmul_input(&ROUTED, grad, weights, by)
    }

    fn grouped_matmul_weights(
        &self,
        grad: &Tensor,
        rows: &ExpertInput,
        by: &Dispatch,
    ) -> Result<ParamGradient> {
        let rows = rows.sorted(self, by)?;
        Ok(composed::grouped_matmul_weights(&ROUTED, grad, &rows, by)?.into())
    }

    fn rms_norm(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _eps: f64,
        kind: Kind,
    ) -> Result<(Tensor, Tensor)> {
        let [rows, width] = check::rms_norm(x, weight)?;
        Ok((empty(&[rows, width])?.f_to_kind(kind)?, empty(&[rows, 1])?))
    }

    fn rms_norm_backward(
        &self,
        x: &Tensor,
        factors: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
    ) -> Result<(Tensor, ParamGradient)> {
        let [rows, width] = check::rms_norm_backward(x, factors, weight, grad)?;
        let _grad = wide(grad)?;
        Ok((empty(&[rows, width])?, empty(&[width])?.into()))
    }

    fn residual(&self, branch: &Tensor, residual: &Tensor, by: ResidualScaling) -> Result<Tensor> {
        let _branch = wide(branch)?;
        empty(&check::residual(branch, residual, by)?)
    }

    fn residual_backward(
        &self,
        branch: &Tensor,
        residual: &Tensor,
        by: ResidualScaling,
        grad: &Tensor,
    ) -> Result<ResidualGrads> {
        let shape = check::residual_backward(branch, residual, by, grad)?;
        let (_branch, to_branch, residual) = (wide(branch)?, empty(&shape)?, empty(&shape)?);
        let scaling = vectors(shape[1])?;
        Ok(ResidualGrads {
            branch: to_branch.f_to_kind(branch.kind())?,
            gates: None,
            residual,
            scaling,
        })
    }

    fn conv_shift(&self, z: &Tensor, by: ConvShift) -> Result<[Tensor; 2]> {
        let ([rows, _], [count, width]) = (check::conv_shift(z, by)?, by.heads);
        let (_z, both) = (wide(z)?, empty(&[count, rows, 2 * width])?);
        let values = Tensor::f_empty([rows, by.shifted()], (z.kind(), shapes::DEVICE))?;
        Ok([both.f_to_kind(z.kind())?, values])
    }

    fn conv_shift_backward(
        &self,
        z: &Tensor,
        by: ConvShift,
        grads: [&Tensor; 2],
        means: &Tensor,
    ) -> Result<ConvShiftGrads> {
        let [rows, columns] = check::conv_shift_backward(z, by, grads, means)?;
        let (_z, _grad, input) = (wide(z)?, wide(grads[0])?, empty(&[rows, columns])?);
        Ok(ConvShiftGrads {
            input: input.f_to_kind(z.kind())?,
            weights: empty(&[by.channels(), 1, 2])?.into(),
            bias: empty(&[by.channels()])?.into(),
        })
    }

    fn query_key(&self, z: &Tensor, raw: Tensor, by: QueryKey) -> Result<QueriesAndKeys> {
        let (_, [heads, tokens, width]) = check::query_key(z, &raw, by)?;
        let raw = wide(&raw)?;
        let (factors, out) = (empty(&[heads, tokens, 1])?, empty(&[heads, tokens, width])?);
        Ok(QueriesAndKeys { out: out.f_to_kind(z.kind())?, raw, factors })
    }

    fn query_key_backward(
        &self,
        raw: &Tensor,
        factors: &Tensor,
        by: QueryKey,
        grad: HeadGrads,
        kind: Kind,
    ) -> Result<QueryKeyGrads> {
        let grad = grad.stacked()?;
        let (_, [heads, tokens, width]) = check::query_key_backward(raw, factors, by, &grad)?;
        Ok(QueryKeyGrads {
            means: empty(&[tokens, heads * width])?,
            raw: grad.f_to_kind(kind)?,
            temperature: empty(&[by.shape[1]])?.into(),
            bias: empty(&[heads * width])?.into(),
        })
    }

    fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        let shape = check::swiglu(x)?;
        Ok(Tensor::f_empty(shape, (x.kind(), shapes::DEVICE))?)
    }

    fn swiglu_backward(&self, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
        check::swiglu_backward(x, grad)?;
        Ok(x.f_empty_like()?)
    }

    fn gather(&self, rows: ExpertRows) -> Result<Tensor> {
        let _rows = wide(rows.x)?;
        Ok(empty(&check::gather(rows)?)?.f_to_kind(rows.x.kind())?)
    }

    fn gather_backward(&self, rows: ExpertRows, grad: &Tensor) -> Result<[Tensor; 2]> {
        let [tokens, width] = check::gather_backward(rows, grad)?;
        let (_rows, _grad) = (wide(rows.x)?, wide(grad)?);
        Ok([empty(&[rows.by.rows, width])?.f_to_kind(rows.x.kind())?, empty(&[tokens, 1])?])
    }

    fn adamw(
        &self,
        by: AdamWStep,
        weight: &mut Tensor,
        moments: [&mut Tensor; 2],
        gradient: &Tensor,
    ) -> Result<()> {
        REFERENCE.adamw(by, weight, moments, gradient)
    }

    fn nesterov(
        &self,
        momentum: &mut Tensor,
        gradient: &Tensor,
        by: f32,
        scale: f32,
    ) -> Result<Tensor> {
        REFERENCE.nesterov(momentum, gradient, by, scale)
    }

    fn descend(&self, weight: &mut Tensor, direction: &Tensor, keep: f32, rate: f32) -> Result<()> {
        REFERENCE.descend(weight, direction, keep, rate)
    }

    fn newton_schulz(&self, stack: &Tensor, by: NewtonSchulz) -> Result<Tensor> {
        REFERENCE.newton_schulz(stack, by)
    }

    fn squares(&self, x: &Tensor) -> Result<f64> {
        REFERENCE.squares(x)
    }
}
