//! Operands and results of operations, beyond single tensors.

use std::cell::OnceCell;

use tch::{Kind, Tensor};

use super::call::Call;
use crate::layout::Parts as _;
use crate::{Error, Result};

/// Vectors `[D]`, f32, that scale and shift both sides of a residual addition.
#[derive(Clone, Copy, Debug)]
pub struct ResidualScaling<'a> {
    /// Scale of the branch.
    pub scale: &'a Tensor,
    /// Added to the branch before scaling.
    pub bias: &'a Tensor,
    /// Scale of the residual.
    pub residual_scale: &'a Tensor,
    /// Added to the residual before scaling.
    pub residual_bias: &'a Tensor,
}

/// Gradients of a residual addition.
#[derive(Debug)]
pub struct ResidualGrads {
    /// Of the branch, in its kind: `[N, D]`, or `[P, D]` as by [`super::Ops::gather_backward`] if it has experts' rows.
    pub branch: Tensor,
    /// Of what experts' rows were multiplied by, `[N, 1]`, f32.
    pub gates: Option<Tensor>,
    /// Of the residual, `[N, D]`, f32.
    pub residual: Tensor,
    /// Of the vectors in the order of [`ResidualScaling`], `[D]` each.
    pub scaling: [ParamGradient; 4],
}

/// The gradient of a parameter. [`super::Ops::finish`] completes many of them at once.
#[derive(Debug)]
pub enum ParamGradient {
    /// Complete, float.
    Made(Tensor),
    /// Of a vector: sums over bands of rows, still on the device.
    Banded(BandSums),
    /// Of a stack of experts: from a library, float, valid for experts with rows; the others' gradient is zero.
    Experts(ExpertGradient),
}

impl ParamGradient {
    /// Memory of what it is computed from.
    pub fn bytes(&self) -> usize {
        let of = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        match self {
            ParamGradient::Made(made) => of(made),
            ParamGradient::Banded(banded) => banded.sums.iter().map(|sum| of(&sum.partial)).sum(),
            ParamGradient::Experts(experts) => of(&experts.made),
        }
    }
}

impl From<Tensor> for ParamGradient {
    fn from(made: Tensor) -> Self {
        ParamGradient::Made(made)
    }
}

/// A gradient in which some experts have no rows.
#[derive(Debug)]
pub struct ExpertGradient {
    /// `[E, B, A]`.
    pub(crate) made: Tensor,
    /// `[E]` or more, i32: where the rows of each end.
    pub(crate) ends: Tensor,
}

/// Sums over bands of rows that remain to be added; the columns of several sums are interleaved.
#[derive(Debug)]
pub struct BandSums {
    pub(super) sums: Vec<BandSum>,
    /// Shape of the result.
    pub(super) shape: Vec<i64>,
}

/// One of these sums over bands: times the factor, or plus the factor times the other one.
#[derive(Debug)]
pub(super) struct BandSum {
    /// `[stack, bands, width]`.
    pub(super) partial: Tensor,
    /// Which of the stack.
    pub(super) which: i64,
    /// The other sum, likewise.
    pub(super) other: Option<i64>,
    /// `[width]`.
    pub(super) factor: Option<Tensor>,
}

impl ResidualScaling<'_> {
    /// The gradients of the vectors, from the sums over rows of the gradient, of the gradient times the branch, and of
    /// the gradient times the residual.
    pub(super) fn gradients(
        self,
        all: &Tensor,
        branch: &Tensor,
        residual: &Tensor,
    ) -> Result<[ParamGradient; 4]> {
        let found = [
            branch.f_addcmul(self.bias, all)?,
            all.f_mul(self.scale)?,
            residual.f_addcmul(self.residual_bias, all)?,
            all.f_mul(self.residual_scale)?,
        ];
        Ok(found.map(ParamGradient::Made))
    }
}

/// Operands for the backward pass of a norm over a sum of `[N, D]`, all f32.
#[derive(Clone, Copy, Debug)]
pub struct NormBack<'a> {
    /// The sum, with the bits of the addition: a table may read it, or recompute it from both sides.
    pub x: &'a Tensor,
    /// The norm's factors, `[N, 1]`.
    pub factors: &'a Tensor,
    /// `[D]`.
    pub weight: &'a Tensor,
    /// The gradient of the sum that bypasses the norm, which is added.
    pub beside: Option<&'a Tensor>,
}

/// The operands with which compressed convolutional attention combines a token with the previous one: a depthwise
/// convolution of queries and keys, in `G` heads of `d` channels, and values, some of which are shifted by a token.
#[derive(Clone, Copy, Debug)]
pub struct ConvShift<'a> {
    /// `[G d, 1, 2]`, f32: weights of the previous token and of the token. At the start of a document the previous
    /// token counts as zero.
    pub weights: &'a Tensor,
    /// `[G d]`, f32.
    pub bias: &'a Tensor,
    /// First rows of documents, ascending from 0, i64.
    pub starts: &'a Tensor,
    /// Rows over which gradients of weights and bias are summed, ascending, i64; all rows if absent. The other rows
    /// only provide context for a part of a document; another part counts them.
    pub counted: Option<&'a Tensor>,
    /// `[G, d]`.
    pub heads: [i64; 2],
    /// `[a, b]`: numbers of values that stay with their token, and that move to the next token of its document.
    pub values: [i64; 2],
}

impl ConvShift<'_> {
    /// G d.
    pub(super) fn channels(self) -> i64 {
        self.heads[0] * self.heads[1]
    }

    /// a + b.
    pub(super) fn shifted(self) -> i64 {
        self.values[0] + self.values[1]
    }
}

/// Gradients of a [`ConvShift`].
#[derive(Debug)]
pub struct ConvShiftGrads {
    /// `[N, G d + a + b]`, in the kind of what was convolved.
    pub input: Tensor,
    /// `[G d, 1, 2]`, f32.
    pub weights: ParamGradient,
    /// `[G d]`, f32.
    pub bias: ParamGradient,
}

/// Parameters of queries and keys: H query heads in K groups, then K key heads, G = H + K heads of d dimensions.
#[derive(Clone, Copy, Debug)]
pub struct QueryKey<'a> {
    /// Added to each head, `[G d]`, f32.
    pub bias: &'a Tensor,
    /// Factor of the keys, `[K]`, f32.
    pub temperature: &'a Tensor,
    /// Cosines and sines of each token's angles, `[N, r]`, f32: dimension i rotates with dimension i + r, 2 r <= d.
    pub angles: [&'a Tensor; 2],
    /// `[H, K, d]`.
    pub shape: [i64; 3],
}

/// The result of [`super::Ops::query_key`].
#[derive(Debug)]
pub struct QueriesAndKeys {
    /// `[G, N, d]`, in the kind of what was projected.
    pub out: Tensor,
    /// The same before normalization to length sqrt(d) and rotation, f32.
    pub raw: Tensor,
    /// The factors of the normalization, `[G, N, 1]`, f32.
    pub factors: Tensor,
}

/// Gradients of [`super::Ops::query_key`], f32 except `raw`.
#[derive(Debug)]
pub struct QueryKeyGrads {
    /// Of `raw`, `[G, N, d]`, in the requested kind.
    pub raw: Tensor,
    /// Of `z` through the means, `[N, G d]`.
    pub means: Tensor,
    /// Of the temperature, `[K]`.
    pub temperature: ParamGradient,
    /// Of the bias, `[G d]`.
    pub bias: ParamGradient,
}

/// Keys before every window may be left out of a span in multiples of this number: the blocks of keys of each table
/// begin at the span's first key, and their lengths divide it, so no bit of our own kernels changes.
pub const KEY_BLOCK: i64 = 256;

/// Tokens `start..start + len` that see only each other and the earlier tokens of their document: a document or a part
/// of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSpan {
    /// The first.
    pub start: i64,
    /// How many.
    pub len: i64,
    /// Earlier tokens of the document, for which only keys and values are present. With a window those before it may be
    /// left out, see [`KEY_BLOCK`].
    pub before: i64,
}

impl AttentionSpan {
    /// A whole document.
    pub fn whole(start: i64, len: i64) -> AttentionSpan {
        AttentionSpan { start, len, before: 0 }
    }

    /// Keys that its last token sees.
    pub fn keys(self) -> i64 {
        self.before + self.len
    }
}

/// Operands of causal softmax attention: H query heads in K groups, each of which shares a key head and a value head,
/// of d dimensions.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `[H, N, d]`, float.
    pub query: &'a Tensor,
    /// `[K, M, d]`, in the kind of `query`: for each span its earlier tokens, then its own.
    pub key: &'a Tensor,
    /// `[M, K d]`, in the kind of `query` and in the order of the keys.
    pub value: &'a Tensor,
    /// In order, covering every query. Scores are divided by sqrt(d).
    pub spans: &'a [AttentionSpan],
    /// `[H, K, d]`.
    pub shape: [i64; 3],
    /// How many keys a query sees, that of its own token included: the last ones. `None`: all earlier ones.
    pub window: Option<i64>,
    /// Where a table may cache data derived from the spans, for all layers with the same spans.
    pub kept: Option<&'a OnceCell<Tensor>>,
}

/// The result of attention.
#[derive(Debug)]
pub struct Attended {
    /// `[N, H d]`, in the kind of the operands.
    pub heads: Tensor,
    /// Data for the same table's backward pass.
    pub saved: Vec<[Tensor; 2]>,
}

/// Where to write the gradients of attention, in any layout; each number is written once.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGrads<'a> {
    /// `[H, N, d]`, f32.
    pub query: &'a Tensor,
    /// `[K, M, d]`, f32.
    pub key: &'a Tensor,
    /// `[M, K d]`, f32 or in the kind of the values.
    pub value: &'a Tensor,
}

/// Gradients of all queries and keys of some tokens.
#[derive(Debug)]
pub enum HeadGrads {
    /// `[H + K, N, d]`, f32; the memory may be reused.
    Stacked(Tensor),
    /// Of queries, `[H, N, d]`, and of keys, `[K, N, d]`, bf16.
    Apart([Tensor; 2]),
}

impl HeadGrads {
    /// `[H + K, N, d]`, f32.
    pub fn stacked(self) -> Result<Tensor> {
        match self {
            HeadGrads::Stacked(all) => Ok(all),
            HeadGrads::Apart(parts) => Ok(Tensor::f_cat(&parts, 0)?.f_to_kind(Kind::Float)?),
        }
    }
}

/// The token at each place, in the form that a table's own kernels need.
#[derive(Debug)]
pub(super) enum TokenOrder {
    /// `[P]`, i64, with an arbitrary token in padding; and the places of padding, i64.
    Listed {
        /// The tokens.
        tokens: Tensor,
        /// The places of padding.
        filled: Tensor,
    },
    /// `[P]`, i32: -1 in padding.
    Marked(Tensor),
}

/// Where each token is computed: sorted by expert, followed by tokens without an expert.
#[derive(Debug)]
pub struct Dispatch {
    /// The token at each place.
    pub(super) order: TokenOrder,
    /// `[N]`, i64: the place of each token.
    pub places: Tensor,
    /// `[E + 1]`, i64: tokens of each expert, and those without one.
    pub counts: Tensor,
    /// Experts.
    pub(super) experts: i64,
    /// Number of places: P.
    pub rows: i64,
    /// The first places, which include all places of experts: operands of matmuls. Places without an expert follow, or,
    /// if the host does not know how many there are, are among them.
    pub computed: i64,
    pub(super) groups: ExpertRanges,
}

/// Places of each expert.
#[derive(Debug)]
pub(super) enum ExpertRanges {
    /// Experts with tokens, ascending: the expert, its first place, and its number of places.
    Known(Vec<[i64; 3]>),
    /// `[E + 1]`, i32, on the device: end of the places of each class.
    There(Tensor),
}

/// The rows of experts, as they return to their tokens.
#[derive(Clone, Copy, Debug)]
pub struct ExpertRows<'a> {
    /// `[P, D]` float; undefined for a token without an expert.
    pub x: &'a Tensor,
    /// The place of each token.
    pub by: &'a Dispatch,
    /// For tokens without an expert, `[P, D]` in the kind of `x`; zeros if absent.
    pub passed: Option<&'a Tensor>,
    /// An operand of each token: the factor of its row, `[N, 1]` f32 (`gather`), or what is added to it, `[N, D]` in
    /// the kind of `x` (`unpermute`).
    pub by_token: &'a Tensor,
}

/// Which experts have tokens.
#[derive(Debug)]
pub enum UsedExperts {
    /// By expert.
    Known(Vec<bool>),
    /// `[E]`, i64, on the device: number of tokens of each.
    There(Tensor),
}

impl UsedExperts {
    /// How many experts there are.
    pub fn experts(&self) -> usize {
        match self {
            UsedExperts::Known(used) => used.len(),
            UsedExperts::There(counts) => counts.numel(),
        }
    }

    /// Another handle of the same data; tensors on a device are not copied.
    pub fn shared(&self) -> UsedExperts {
        match self {
            UsedExperts::Known(used) => UsedExperts::Known(used.clone()),
            UsedExperts::There(counts) => UsedExperts::There(counts.shallow_clone()),
        }
    }
}

impl Dispatch {
    /// Which experts have tokens, without a wait of the host.
    pub fn used(&self) -> Result<UsedExperts> {
        match &self.groups {
            ExpertRanges::Known(runs) => {
                let mut used = vec![false; self.experts as usize];
                runs.iter().for_each(|[expert, ..]| used[*expert as usize] = true);
                Ok(UsedExperts::Known(used))
            }
            ExpertRanges::There(_) => {
                Ok(UsedExperts::There(self.counts.part(0, 0, self.experts)?))
            }
        }
    }

    /// The runs of experts, for a table whose `dispatch` returns them.
    pub(super) fn runs(&self, operation: &'static str) -> Result<&[[i64; 3]]> {
        match &self.groups {
            ExpertRanges::Known(runs) => Ok(runs),
            ExpertRanges::There(_) => Err(foreign(operation, "by")),
        }
    }

    /// The ends of the places of each class, for a table whose `dispatch` leaves them on the device.
    pub(super) fn ends(&self, operation: &'static str) -> Result<&Tensor> {
        match &self.groups {
            ExpertRanges::There(ends) => Ok(ends),
            ExpertRanges::Known(_) => Err(foreign(operation, "by")),
        }
    }

    /// The token at each place, and the places of padding, for a table whose `dispatch` lists them.
    pub(super) fn listed(&self, operation: &'static str) -> Result<[&Tensor; 2]> {
        match &self.order {
            TokenOrder::Listed { tokens, filled } => Ok([tokens, filled]),
            TokenOrder::Marked(_) => Err(foreign(operation, "by")),
        }
    }

    /// The token at each place or -1, for a table whose `dispatch` marks them.
    pub(super) fn marked(&self, operation: &'static str) -> Result<&Tensor> {
        match &self.order {
            TokenOrder::Marked(order) => Ok(order),
            TokenOrder::Listed { .. } => Err(foreign(operation, "by")),
        }
    }
}

/// The error for a value that another table made.
pub(super) fn foreign(operation: &'static str, operand: &'static str) -> Error {
    Call(operation).refuse(operand, "another table's".to_owned(), "its own".to_owned())
}

/// Weights of a router with R numbers per token and C classes. Its input is `[N, D]`.
#[derive(Clone, Copy, Debug)]
pub struct RouterWeights<'a> {
    /// `[R, D]`, float.
    pub down: &'a Tensor,
    /// `[R]`; all that follows is f32.
    pub down_bias: &'a Tensor,
    /// `[R]`: factor of the previous router's state; absent if there is none.
    pub decay: Option<&'a Tensor>,
    /// `[R]`: the norm of the state.
    pub norm: &'a Tensor,
    /// `[R, R]`.
    pub fc1: &'a Tensor,
    /// `[R]`.
    pub fc1_bias: &'a Tensor,
    /// `[R, R]`.
    pub fc2: &'a Tensor,
    /// `[R]`.
    pub fc2_bias: &'a Tensor,
    /// `[C, R]`.
    pub out: &'a Tensor,
    /// Of the norm.
    pub eps: f64,
    /// Whether gradients are parts of a sum: that of `down` is then computed in f32, not in its kind.
    pub part: bool,
}

/// The classes of every token, and their weights; k is 1 unless a router chooses several
/// ([`TopK`](super::linear_router::TopK)).
#[derive(Debug)]
pub struct Routes {
    /// `[N k]`, i64: the classes chosen, token by token and ascending; ties go to the lowest.
    pub choice: Tensor,
    /// `[N k, 1]`, f32: their probabilities, or these divided by their sum.
    pub weight: Tensor,
    /// `[N, R]`, f32: the state, for the router after this one; `None` where routers have no state.
    pub state: Option<Tensor>,
    /// `[bands, C]`, i32: tokens of each class in a band of 32 tokens; `None` where no kernel counted them.
    pub counts: Option<Tensor>,
}

/// Data for a router's backward pass.
#[derive(Debug)]
pub struct RouterSaved {
    pub(super) before: Option<Tensor>,
    pub(super) state: Tensor,
    pub(super) factors: Tensor,
    pub(super) hidden: RouterHidden,
    pub(super) probabilities: Tensor,
    pub(super) choice: Tensor,
}

/// What is saved of a router's two hidden layers, f32, as a table's backward pass reads it.
#[derive(Debug)]
pub(super) enum RouterHidden {
    /// `[N, R]` each: what comes to the layers and to the logits, and what both GELUs are of.
    All {
        /// Of the first layer, of the second one, of the logits.
        inputs: [Tensor; 3],
        /// Of the first layer and of the second one, with their biases.
        before: [Tensor; 2],
    },
    /// `[2, N, R]`: what both GELUs are of, without biases; the rest is computed again.
    Before(Tensor),
}

/// Gradients of a router: named as [`RouterWeights`], f32.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names are those of the weights")]
pub struct RouterGrads {
    /// Of its input, `[N, D]`, in its kind.
    pub input: Tensor,
    /// Of the previous router's state, `[N, R]`, if there was one.
    pub before: Option<Tensor>,
    pub down: ParamGradient,
    pub down_bias: ParamGradient,
    pub decay: Option<ParamGradient>,
    pub norm: ParamGradient,
    pub fc1: ParamGradient,
    pub fc1_bias: ParamGradient,
    pub fc2: ParamGradient,
    pub fc2_bias: ParamGradient,
    pub out: ParamGradient,
}

/// Operands of a linear layer over the vocabulary and its cross-entropy, computed a few tokens at a time.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// `[N, D]`, float.
    pub hidden: &'a Tensor,
    /// `[V, D]`, in its kind.
    pub weights: &'a Tensor,
    /// `[N]`, i64.
    pub labels: &'a Tensor,
    /// `[N]`, f32: for tokens with a label, what their loss is multiplied by in the gradient; otherwise 0.
    pub mask: &'a Tensor,
    /// Tokens whose logits exist at once.
    pub chunk: i64,
    /// Parts of the vocabulary, as equal as possible, each with its own matmuls; their results are added in a tree. At
    /// least 1.
    pub shards: i64,
    /// Whether the gradient of the weights is a part of a sum: it is then computed in f32, not in their kind.
    pub part: bool,
    /// The coefficient of z-loss, at least 0: the gradient is that of `loss + z_loss * log(Z)^2` for each label, with Z
    /// the sum of the exponentials of its logits (PaLM, arXiv 2204.02311, section 5). Losses are without it.
    pub z_loss: f64,
}

/// Losses, and gradients of their weighted sum over a divisor.
#[derive(Debug)]
pub struct CrossEntropyGrads {
    /// `[N]`, f32: nats, 0 for tokens without a label.
    pub losses: Tensor,
    /// `[N]`, f32: `z_loss * log(Z)^2`, 0 for tokens without a label; `None` if the coefficient is 0.
    pub z_losses: Option<Tensor>,
    /// `[N, D]`, in the kind of the hidden numbers.
    pub hidden: Tensor,
    /// `[V, D]`, f32.
    pub weights: Tensor,
}

/// A Newton-Schulz iteration towards the nearest orthogonal matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NewtonSchulz {
    /// `a`, `b`, `c` of `X <- P X` with `P = a I + b A + c A A`, `A = X X^T`.
    pub coefficients: [f32; 3],
    /// Number of steps.
    pub steps: usize,
    /// Added to a matrix's length before dividing by it.
    pub eps: f32,
    /// What is iterated, and in which precision.
    pub form: NewtonSchulzIterate,
}

/// What is iterated: equal in exact arithmetic, different in rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewtonSchulzIterate {
    /// `A` only, if a matrix is at least twice as long in one dimension as in the other: polynomials of `A` commute, so
    /// a step takes `A` to `P A P`, and the matrix is multiplied once, by the product of all `P`.
    Gram,
    /// Every matrix itself, in f32.
    Direct,
    /// Every matrix itself, in bf16: `X`, `A` and `b A + c A A` are rounded once each; sums are accumulated in f32.
    Bf16,
}

impl NewtonSchulz {
    /// Whether only the square of a matrix of this size is iterated.
    pub fn by_gram(self, [rows, columns]: [i64; 2]) -> bool {
        self.form == NewtonSchulzIterate::Gram && rows.max(columns) >= 2 * rows.min(columns)
    }
}
