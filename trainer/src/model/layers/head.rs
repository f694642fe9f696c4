//! The head and its loss, without ever holding all logits.
//!
//! Logits exist for `loss_chunk` tokens at a time. Their gradient is `softmax (1 + 2 z_loss log(Z)) - one_hot`, with
//! `Z` the sum of their exponentials, so nothing is saved for a backward pass: each such chunk adds its term to the
//! gradient of the embedding, in order, and is freed.

use contract::Result;
use kernels::layout::Parts as _;
use kernels::ops::{CrossEntropy, OpsTable};
use tch::{Kind, Tensor};

use super::embedding::Embedding;
use crate::model::ZayaConfig;
use crate::model::cut::{Chunk, joined};
use crate::model::gradients::{GradientTerm, Gradients};
use crate::model::kinds::LogitsDtype;
use crate::model::layer::Pass;
use crate::model::param::{ParamDeclarations, ParamId};
use crate::refusal::refused;
use crate::timing::{StepPart, part};

/// Logits of the final normed residual, and their cross-entropy.
pub(in crate::model) struct Head {
    /// `[V, D]`: the embedding, or a matrix of its own.
    weight: ParamId,
    /// Whether it is the embedding, whose gradient has a second term.
    tied: bool,
}

/// Losses and gradients.
pub(in crate::model) struct HeadGrads {
    /// `[N]`, in the order of the micro-batch.
    pub(in crate::model) losses: Tensor,
    /// Likewise, the z-loss of each label, if it has a coefficient.
    pub(in crate::model) z_losses: Option<Tensor>,
    /// Gradient of the final normed residual, by chunk.
    pub(in crate::model) hidden: Vec<Tensor>,
    /// Gradient of the embedding as the head, if there is one chunk; otherwise the head's gradient is in the sink
    /// already.
    pub(in crate::model) weights: Option<Tensor>,
}

impl Head {
    pub(in crate::model) fn declare(
        root: &mut ParamDeclarations<'_>,
        config: &ZayaConfig,
        embedding: &Embedding,
    ) -> Head {
        match config.tie_word_embeddings {
            true => Head { weight: embedding.tokens, tied: true },
            false => {
                Head { weight: root.head([config.vocab_size, config.hidden_size]), tied: false }
            }
        }
    }

    /// Losses, and gradients of their weighted sum over `label_count`, each with its z-loss.
    pub(in crate::model) fn backward(
        &self,
        pass: &Pass<'_>,
        hidden: &[Tensor],
        label_count: u64,
        sink: &mut Gradients<'_>,
    ) -> Result<HeadGrads> {
        let _watch = part(StepPart::Head);
        let (table, hidden) = self.widened(pass, hidden).map_err(refused)?;
        let mut weights = None;
        let term = if self.tied { GradientTerm::First } else { GradientTerm::Only };
        let mut found: Vec<_> = hidden.iter().map(|_| None).collect();
        for chunk in pass.chunks.by_leaf() {
            let head = of(pass, pass.chunks.of(chunk), &table, &hidden[chunk]);
            let back =
                pass.ops.cross_entropy_backward(head, label_count as f64).map_err(refused)?;
            match pass.chunks.count() {
                1 if self.tied => weights = Some(back.weights),
                _ => sink.of(chunk).term(self.weight, term, back.weights.into())?,
            }
            let hidden = back.hidden.f_to_kind(pass.kind).map_err(refused)?;
            found[chunk] = Some(((back.losses, back.z_losses), hidden));
        }
        let (losses, hidden): (Vec<_>, Vec<_>) = found.into_iter().flatten().unzip();
        let (losses, z_losses): (Vec<_>, Vec<_>) = losses.into_iter().unzip();
        let losses = pass.chunks.in_sequence(&losses).map_err(refused)?;
        let z_losses: Option<Vec<_>> = z_losses.into_iter().collect();
        let z_losses = z_losses.map(|parts| pass.chunks.in_sequence(&parts)).transpose();
        Ok(HeadGrads { losses, z_losses: z_losses.map_err(refused)?, hidden, weights })
    }

    /// The loss of every token, `[N]`.
    pub(in crate::model) fn losses(&self, pass: &Pass<'_>, hidden: &[Tensor]) -> Result<Tensor> {
        self.by_token(pass, hidden, |head| pass.ops.cross_entropy(head))
    }

    /// 1 where another token is more probable than the label, `[N]`.
    pub(in crate::model) fn misses(&self, pass: &Pass<'_>, hidden: &[Tensor]) -> Result<Tensor> {
        self.by_token(pass, hidden, |head| misses(pass.ops, &head))
    }

    /// Logits of every token in the order of chunks, `[N, V]`, f32.
    pub(in crate::model) fn logits(&self, pass: &Pass<'_>, hidden: &[Tensor]) -> Result<Tensor> {
        let (table, hidden) = self.widened(pass, hidden).map_err(refused)?;
        let logits = |hidden| {
            let logits = pass.ops.matmul(hidden, &table.swapped(0, 1)?)?;
            Ok(logits.f_to_kind(Kind::Float)?)
        };
        let logits = hidden.iter().map(logits).collect::<kernels::Result<Vec<_>>>();
        logits.and_then(|logits| joined(&logits, 0)).map_err(refused)
    }

    /// A number of every token, `[N]`, in the order of the micro-batch.
    fn by_token(
        &self,
        pass: &Pass<'_>,
        hidden: &[Tensor],
        compute: impl Fn(CrossEntropy<'_>) -> kernels::Result<Tensor>,
    ) -> Result<Tensor> {
        let (table, hidden) = self.widened(pass, hidden).map_err(refused)?;
        let chunks = pass.chunks.iter().zip(&hidden);
        let numbers = chunks.map(|(chunk, hidden)| compute(of(pass, chunk, &table, hidden)));
        let numbers = numbers.collect::<kernels::Result<Vec<_>>>();
        numbers.and_then(|numbers| pass.chunks.in_sequence(&numbers)).map_err(refused)
    }

    /// The matrix and its inputs by chunk in the dtype in which they are multiplied.
    fn widened(
        &self,
        pass: &Pass<'_>,
        hidden: &[Tensor],
    ) -> kernels::Result<(Tensor, Vec<Tensor>)> {
        let table = &pass.weights[self.weight];
        let kind = match pass.config.logits_dtype {
            LogitsDtype::Model => table.kind(),
            LogitsDtype::F32 => Kind::Float,
        };
        let hidden = hidden.iter().map(|hidden| Ok(hidden.f_to_kind(kind)?));
        Ok((table.f_to_kind(kind)?, hidden.collect::<kernels::Result<_>>()?))
    }
}

/// The head over the final normed residual `hidden` of a chunk, as
/// [`Ops::cross_entropy`](kernels::ops::Ops::cross_entropy) takes it.
fn of<'a>(
    pass: &Pass<'a>,
    chunk: &'a Chunk,
    weights: &'a Tensor,
    hidden: &'a Tensor,
) -> CrossEntropy<'a> {
    let (labels, mask) = (&chunk.labels, &chunk.mask);
    let (chunk, shards, part) = (pass.config.loss_chunk, pass.shards, pass.chunks.count() > 1);
    let z_loss = pass.config.z_loss;
    CrossEntropy { hidden, weights, labels, mask, chunk, shards, part, z_loss }
}

/// 0 where the label is the most probable token, the lowest of equal ones, `[n]`, else 1. Only the logits of tokens
/// with a label are computed: a sequence that is scored has few.
fn misses(ops: OpsTable, head: &CrossEntropy<'_>) -> kernels::Result<Tensor> {
    let mut misses = head.mask.f_zeros_like()?;
    let weights = head.weights.swapped(0, 1)?;
    let size = weights.size()[1];
    let ids = Tensor::f_arange(size, (Kind::Int64, weights.device()))?;
    let none = Tensor::f_full([1], size, (Kind::Int64, weights.device()))?;
    for places in head.mask.f_nonzero()?.f_view([-1])?.f_split(head.chunk, 0)? {
        let logits = ops.matmul(&head.hidden.f_index_select(0, &places)?, &weights)?;
        let most = logits.f_eq_tensor(&logits.f_amax([1i64], true)?)?;
        let first = ids.f_where_self(&most, &none)?.f_amin([1i64], false)?;
        let missed = first.f_ne_tensor(&head.labels.f_index_select(0, &places)?)?;
        let _ = misses.f_index_copy_(0, &places, &missed.f_to_kind(misses.kind())?)?;
    }
    Ok(misses)
}
