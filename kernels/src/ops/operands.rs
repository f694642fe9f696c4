//! What operations take besides a tensor or two, and what they answer with.

use std::cell::OnceCell;

use tch::Tensor;

use super::call::Call;
use crate::{Error, Result};

/// Vectors of `[D]`, f32, by which a residual addition scales and shifts both of its sides.
#[derive(Clone, Copy, Debug)]
pub struct Scaling<'a> {
    /// Of the branch.
    pub scale: &'a Tensor,
    /// Added to the branch first.
    pub bias: &'a Tensor,
    /// Of the residual.
    pub residual_scale: &'a Tensor,
    /// Added to the residual first.
    pub residual_bias: &'a Tensor,
}

/// What comes back through a residual addition.
#[derive(Debug)]
pub struct ResidualGrads {
    /// Of the branch, `[N, D]`, in its kind.
    pub branch: Tensor,
    /// Of the residual, `[N, D]`, f32.
    pub residual: Tensor,
    /// Of the vectors in the order of [`Scaling`], `[D]` each.
    pub scaling: [Gradient; 4],
}

/// The gradient of a parameter. What is left to do for one, [`super::Ops::finish`] does for many at once.
#[derive(Debug)]
pub enum Gradient {
    /// It is made, float.
    Made(Tensor),
    /// Of a vector: a device has made the sums over bands of rows.
    Banded(Banded),
    /// Of a stack of experts: a library has made it, float, of those that have rows; the others' is zero.
    Experts(Experts),
}

impl From<Tensor> for Gradient {
    fn from(made: Tensor) -> Self {
        Gradient::Made(made)
    }
}

/// A gradient of which some experts have no part.
#[derive(Debug)]
pub struct Experts {
    /// `[E, B, A]`.
    pub(crate) made: Tensor,
    /// `[E]` or more, i32: where the rows of each end.
    pub(crate) ends: Tensor,
}

/// Sums over bands of rows that are still to be added: of several, their columns go in turn.
#[derive(Debug)]
pub struct Banded {
    pub(super) sums: Vec<Bands>,
    /// Of the outcome.
    pub(super) shape: Vec<i64>,
}

/// Of one of them: the sum over bands, times the factor, or plus the factor times the other one.
#[derive(Debug)]
pub(super) struct Bands {
    /// `[bands, width]`.
    pub(super) partial: Tensor,
    /// The same of another one.
    pub(super) other: Option<Tensor>,
    /// `[width]`.
    pub(super) factor: Option<Tensor>,
}

impl Scaling<'_> {
    /// The gradients of the vectors, from the sums over rows of the gradient, of the gradient times the branch, and of the
    /// gradient times the residual.
    pub(super) fn gradients(
        self,
        all: &Tensor,
        branch: &Tensor,
        residual: &Tensor,
    ) -> Result<[Gradient; 4]> {
        let found = [
            branch.f_addcmul(self.bias, all)?,
            all.f_mul(self.scale)?,
            residual.f_addcmul(self.residual_bias, all)?,
            all.f_mul(self.residual_scale)?,
        ];
        Ok(found.map(Gradient::Made))
    }
}

/// What comes back to the norm of a sum of `[N, D]`, all f32.
#[derive(Clone, Copy, Debug)]
pub struct NormBack<'a> {
    /// The sum, with the bits that the addition had: a table may read it, or make it again from both sides.
    pub x: &'a Tensor,
    /// The norm's factors, `[N, 1]`.
    pub factors: &'a Tensor,
    /// `[D]`.
    pub weight: &'a Tensor,
    /// The gradient of what the norm came to.
    pub grad: &'a Tensor,
    /// That of the sum as far as it went past the norm, which is added.
    pub beside: Option<&'a Tensor>,
}

/// What a token of compressed convolutional attention has of itself and of the one before it: a depthwise convolution of queries
/// and keys, in `G` heads of `d` channels, and values, of which some are shifted by a token.
#[derive(Clone, Copy, Debug)]
pub struct ConvShift<'a> {
    /// `[G d, 1, 2]`, f32: weights of the token before, and of the token. Where a document begins there is none before it,
    /// and it counts as zero.
    pub weights: &'a Tensor,
    /// `[G d]`, f32.
    pub bias: &'a Tensor,
    /// Rows at which documents begin, ascending from 0, i64.
    pub starts: &'a Tensor,
    /// Rows that gradients of weights and bias are summed over, ascending, i64; all where it is absent. The others only
    /// lend their numbers: they stand beside a part of a document, and another part sums over them.
    pub counted: Option<&'a Tensor>,
    /// `[G, d]`.
    pub heads: [i64; 2],
    /// `[a, b]`: numbers of values that stay with their token, and that go to the next one of its document.
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

/// What comes back through a [`ConvShift`].
#[derive(Debug)]
pub struct ConvShiftGrads {
    /// `[N, G d + a + b]`, in the kind of what was convolved.
    pub input: Tensor,
    /// `[G d, 1, 2]`, f32.
    pub weights: Gradient,
    /// `[G d]`, f32.
    pub bias: Gradient,
}

/// What queries and keys are made with: H query heads in K groups, then K key heads, G = H + K heads of d dimensions.
#[derive(Clone, Copy, Debug)]
pub struct QueryKey<'a> {
    /// Added to each head, `[G d]`, f32.
    pub bias: &'a Tensor,
    /// What keys are multiplied with, `[K]`, f32.
    pub temperature: &'a Tensor,
    /// Cosines and sines of each token's angles, `[N, r]`, f32: dimension i turns with dimension i + r, 2 r <= d.
    pub angles: [&'a Tensor; 2],
    /// `[H, K, d]`.
    pub shape: [i64; 3],
}

/// What [`super::Ops::query_key`] comes to.
#[derive(Debug)]
pub struct QueriesAndKeys {
    /// `[G, N, d]`, in the kind of what was projected.
    pub out: Tensor,
    /// The same before it was made sqrt(d) long and turned, f32.
    pub raw: Tensor,
    /// By what each was made longer, `[G, N, 1]`, f32.
    pub factors: Tensor,
}

/// What comes back through [`super::Ops::query_key`], f32 but for `raw`.
#[derive(Debug)]
pub struct QueryKeyGrads {
    /// Of `raw`, `[G, N, d]`, in the kind that was asked for.
    pub raw: Tensor,
    /// Of `z` through the means, `[N, G d]`.
    pub means: Tensor,
    /// Of the temperature, `[K]`.
    pub temperature: Gradient,
    /// Of the bias, `[G d]`.
    pub bias: Gradient,
}

/// Tokens `start..start + len` that see each other, what came before them in their document, and nothing else: a document, or
/// a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first.
    pub start: i64,
    /// How many.
    pub len: i64,
    /// Tokens of the document before it, of which only keys and values are there.
    pub before: i64,
}

impl Span {
    /// A whole document.
    pub fn whole(start: i64, len: i64) -> Span {
        Span { start, len, before: 0 }
    }

    /// Keys that its last token sees.
    pub fn keys(self) -> i64 {
        self.before + self.len
    }
}

/// Causal softmax attention of H query heads in K groups, each of which shares a key head and a value head, of d dimensions.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `[H, N, d]`, float.
    pub query: &'a Tensor,
    /// `[K, M, d]`, in the kind of `query`: span by span, what came before and then the span's own.
    pub key: &'a Tensor,
    /// `[M, K d]`, in the kind of `query` and in the order of the keys.
    pub value: &'a Tensor,
    /// In order, covering every query. Scores are divided by sqrt(d).
    pub spans: &'a [Span],
    /// `[H, K, d]`.
    pub shape: [i64; 3],
    /// Where a table may keep what it makes of the spans, for all layers that see the same ones.
    pub kept: Option<&'a OnceCell<Tensor>>,
}

/// What attention comes to.
#[derive(Debug)]
pub struct Attended {
    /// `[N, H d]`, in the kind of the operands.
    pub heads: Tensor,
    /// What the same table's backward pass reads.
    pub saved: Vec<[Tensor; 2]>,
}

/// Where the gradients of attention go, in any layout; each number is written once.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGrads<'a> {
    /// `[H, N, d]`, f32.
    pub query: &'a Tensor,
    /// `[K, M, d]`, f32.
    pub key: &'a Tensor,
    /// `[M, K d]`, f32 or in the kind of the values.
    pub value: &'a Tensor,
}

/// Which token is at each place, as a table's own kernels want to know it.
#[derive(Debug)]
pub(super) enum Order {
    /// `[P]`, i64, any token at a place that is filled up; and those places, i64.
    Listed {
        /// The tokens.
        tokens: Tensor,
        /// The places that are filled up.
        filled: Tensor,
    },
    /// `[P]`, i32: -1 at a place that is filled up.
    Marked(Tensor),
}

/// Where each token is computed: sorted by expert, then those that no expert computes.
#[derive(Debug)]
pub struct Dispatch {
    /// The token at each place.
    pub(super) order: Order,
    /// `[N]`, i64: the place of each token.
    pub places: Tensor,
    /// `[E + 1]`, i64: tokens of each expert, and those without one.
    pub counts: Tensor,
    /// Experts.
    pub(super) experts: i64,
    /// Places in all: P.
    pub rows: i64,
    /// The first of them, among which are all places of experts: what products are made of. Places without an expert are behind
    /// them, or, where the host does not know how many there are, among them.
    pub computed: i64,
    pub(super) groups: Groups,
}

/// Places of each expert.
#[derive(Debug)]
pub(super) enum Groups {
    /// Experts with tokens, ascending: which, its first place, and how many it has.
    Known(Vec<[i64; 3]>),
    /// `[E + 1]`, i32, on the device: where the places of each class end.
    There(Tensor),
}

/// Which experts have tokens.
#[derive(Debug)]
pub enum Present {
    /// By expert.
    Known(Vec<bool>),
    /// `[E]`, i64, on the device: how many tokens each has.
    There(Tensor),
}

impl Present {
    /// How many experts there are.
    pub fn experts(&self) -> usize {
        match self {
            Present::Known(used) => used.len(),
            Present::There(counts) => counts.numel(),
        }
    }

    /// The same once more; what stands on a device is not copied.
    pub fn shared(&self) -> Present {
        match self {
            Present::Known(used) => Present::Known(used.clone()),
            Present::There(counts) => Present::There(counts.shallow_clone()),
        }
    }
}

impl Dispatch {
    /// Which experts have tokens: the host asks nobody.
    pub fn used(&self) -> Result<Present> {
        match &self.groups {
            Groups::Known(runs) => {
                let mut used = vec![false; self.experts as usize];
                runs.iter().for_each(|[expert, ..]| used[*expert as usize] = true);
                Ok(Present::Known(used))
            }
            Groups::There(_) => Ok(Present::There(self.counts.f_narrow(0, 0, self.experts)?)),
        }
    }

    /// The runs of experts, for a table whose `dispatch` makes them.
    pub(super) fn runs(&self, operation: &'static str) -> Result<&[[i64; 3]]> {
        match &self.groups {
            Groups::Known(runs) => Ok(runs),
            Groups::There(_) => Err(foreign(operation, "by")),
        }
    }

    /// Where the places of each class end, for a table whose `dispatch` leaves that on the device.
    pub(super) fn ends(&self, operation: &'static str) -> Result<&Tensor> {
        match &self.groups {
            Groups::There(ends) => Ok(ends),
            Groups::Known(_) => Err(foreign(operation, "by")),
        }
    }

    /// The token at each place, and the places that are filled up, for a table whose `dispatch` lists them.
    pub(super) fn listed(&self, operation: &'static str) -> Result<[&Tensor; 2]> {
        match &self.order {
            Order::Listed { tokens, filled } => Ok([tokens, filled]),
            Order::Marked(_) => Err(foreign(operation, "by")),
        }
    }

    /// The token at each place or -1, for a table whose `dispatch` marks them.
    pub(super) fn marked(&self, operation: &'static str) -> Result<&Tensor> {
        match &self.order {
            Order::Marked(order) => Ok(order),
            Order::Listed { .. } => Err(foreign(operation, "by")),
        }
    }
}

/// What another table made cannot be read.
fn foreign(operation: &'static str, operand: &'static str) -> Error {
    Call(operation).refuse(operand, "another table's".to_owned(), "its own".to_owned())
}

/// Weights of a router of R numbers a token, over C classes. Its input is `[N, D]`.
#[derive(Clone, Copy, Debug)]
pub struct RouterWeights<'a> {
    /// `[R, D]`, float.
    pub down: &'a Tensor,
    /// `[R]`; all that follows is f32.
    pub down_bias: &'a Tensor,
    /// `[R]`: what the state before is multiplied with; absent where there is none.
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
    /// Whether gradients are parts of a sum: that of `down` is then made in f32, not in its kind.
    pub part: bool,
}

/// Where every token goes, and with what weight.
#[derive(Debug)]
pub struct Routes {
    /// `[N]`, i64: the class chosen; ties go to the lowest.
    pub choice: Tensor,
    /// `[N, 1]`, f32: its probability.
    pub weight: Tensor,
    /// `[N, R]`, f32: the state, for the router after this one.
    pub state: Tensor,
}

/// What a router's backward pass reads.
#[derive(Debug)]
pub struct RouterSaved {
    pub(super) before: Option<Tensor>,
    pub(super) state: Tensor,
    pub(super) factors: Tensor,
    pub(super) inputs: Inputs,
    pub(super) first: Tensor,
    pub(super) second: Tensor,
    pub(super) second_out: Tensor,
    pub(super) probabilities: Tensor,
    pub(super) choice: Tensor,
}

/// What both hidden layers of a router are given, f32, as a table's backward pass wants it.
#[derive(Debug)]
pub(super) enum Inputs {
    /// `[N, R]` each.
    Apart([Tensor; 2]),
    /// `[2, N, R]`: one product makes the gradients of both layers' weights.
    Stacked(Tensor),
}

impl RouterSaved {
    /// What the hidden layers were given, for a table whose `router` keeps it apart.
    pub(super) fn apart(&self) -> Result<[&Tensor; 2]> {
        match &self.inputs {
            Inputs::Apart(inputs) => Ok(inputs.each_ref()),
            Inputs::Stacked(_) => Err(foreign("router_backward", "saved")),
        }
    }

    /// The same for a table that stacks it.
    pub(super) fn stacked(&self) -> Result<&Tensor> {
        match &self.inputs {
            Inputs::Stacked(inputs) => Ok(inputs),
            Inputs::Apart(_) => Err(foreign("router_backward", "saved")),
        }
    }
}

/// What comes back through a router: named as [`RouterWeights`], f32.
#[derive(Debug)]
#[expect(missing_docs, reason = "the names are those of the weights")]
pub struct RouterGrads {
    /// Of its input, `[N, D]`, in its kind.
    pub input: Tensor,
    /// Of the state before, `[N, R]`, if there was one.
    pub before: Option<Tensor>,
    pub down: Tensor,
    pub down_bias: Gradient,
    pub decay: Option<Gradient>,
    pub norm: Gradient,
    pub fc1: Tensor,
    pub fc1_bias: Gradient,
    pub fc2: Tensor,
    pub fc2_bias: Gradient,
    pub out: Tensor,
}

/// A linear layer over the vocabulary and the cross-entropy of what it answers, a few tokens at a time.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy<'a> {
    /// `[N, D]`, float.
    pub hidden: &'a Tensor,
    /// `[V, D]`, in its kind.
    pub weights: &'a Tensor,
    /// `[N]`, i64.
    pub labels: &'a Tensor,
    /// `[N]`, f32: 1 where there is a label, else 0.
    pub mask: &'a Tensor,
    /// Tokens whose logits exist at once.
    pub chunk: i64,
    /// Parts of the vocabulary, as equal as they can be, of which each has products of its own; what they come to is added in
    /// a tree. At least 1.
    pub shards: i64,
    /// Whether the gradient of the weights is a part of a sum: it is then made in f32, not in their kind.
    pub part: bool,
}

/// Losses, and gradients of their sum over a divisor.
#[derive(Debug)]
pub struct CrossEntropyGrads {
    /// `[N]`, f32: nats, 0 where there is no label.
    pub losses: Tensor,
    /// `[N, D]`, in the kind of what it is of.
    pub hidden: Tensor,
    /// `[V, D]`, f32.
    pub weights: Tensor,
}

/// A Newton-Schulz iteration towards the nearest orthogonal matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NewtonSchulz {
    /// `a`, `b`, `c` of `X <- P X` with `P = a I + b A + c A A`, `A = X X^T`.
    pub coefficients: [f32; 3],
    /// How often.
    pub steps: usize,
    /// Added to a matrix' length before it is divided by it.
    pub eps: f32,
    /// What is iterated, and in which numbers.
    pub form: NewtonSchulzForm,
}

/// What is iterated: the same in exact arithmetic, rounded otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewtonSchulzForm {
    /// `A` alone, of a matrix at least twice as long one way as the other: polynomials of `A` commute, so a step takes `A` to
    /// `P A P`, and the matrix is multiplied once, with the product of all `P`.
    Gram,
    /// Every matrix itself.
    Direct,
    /// Every matrix itself, in bf16: `X`, `A` and `b A + c A A` are rounded, each once; what they are made of is added in f32.
    Bf16,
}

impl NewtonSchulz {
    /// Whether of a matrix of this size the square alone is iterated.
    pub fn by_gram(self, [rows, columns]: [i64; 2]) -> bool {
        self.form == NewtonSchulzForm::Gram && rows.max(columns) >= 2 * rows.min(columns)
    }
}
