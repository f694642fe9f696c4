//! Causal linear attention with decay, built from a table's matmuls and libtorch's operators in every table: tokens
//! update a state and read from it, block by block.
//!
//! ```text
//! f(z) = elu(z) + 1                              features of queries and keys: Katharopoulos et al. 2020, equation 7
//! o_i  = sum over j <= i of g^(i-j) f(q_i).f(k_j) v_j / (eps + sum over j <= i of g^(i-j) f(q_i).f(k_j))
//! out  = o * silu(u)                             an output gate, as in Sun et al. 2023, equation 8
//! ```
//!
//! A column of ones next to the values makes the denominator one more value. States follow
//!
//! ```text
//! S_i = g S_(i-1) + k_i v_i^T      o_i = S_i^T q_i        forward, from the first token of a document
//! R_i = g R_(i+1) + q_i do_i^T     dq_i = S_i do_i    dk_i = R_i v_i    dv_i = R_i^T k_i     backward, from the last
//! ```
//!
//! Within a block of 128 tokens, all pairs of a query and a key are computed; the state carries over between blocks.
//! Shapes: K key heads, J query heads that share each, n tokens, d the width of queries and keys, e that of values. All
//! is f32.

use tch::{Device, Kind, Tensor};

use super::{AttentionSpan, OpsTable};
use crate::shapes::{Work, as_one};
use crate::{Result, device};

/// Tokens per block, within which pairs are computed; affects bits.
const BLOCK: i64 = 128;

/// Added to denominators.
const EPS: f64 = 1e-6;

/// The decay of the state at each token, by key head.
pub struct Recurrence {
    ops: OpsTable,
    rates: Vec<f64>,
    /// `[K, BLOCK + 1]`: powers of the rates, from 0 on.
    powers: Tensor,
    /// `[K, 1, BLOCK, BLOCK]`: decay of a key for a query, 0 for later keys.
    seen: Tensor,
}

/// Queries, keys and values of a chunk: `[K, J, n, d]`, `[K, n, d]`, `[K, n, e]`, f32; or gradients of them.
pub struct Features {
    query: Tensor,
    key: Tensor,
    value: Tensor,
}

/// A state before the first token or after the last one; `None` is zero.
pub type RecurrentState = Option<Tensor>;

impl Recurrence {
    /// For key heads whose states keep a factor of `rates` at each token, computed by `ops` on `device`.
    ///
    /// # Errors
    /// As everywhere in this file: if libtorch or the device refuses, or memory runs out.
    pub fn new(ops: OpsTable, rates: Vec<f64>, device: Device) -> Result<Recurrence> {
        let heads = rates.len() as i64;
        let row = |rate: f64| (0..=BLOCK).map(move |tokens| power(rate, tokens) as f32);
        let powers: Vec<f32> = rates.iter().copied().flat_map(row).collect();
        let powers = Tensor::f_from_slice(&powers)?.f_view([heads, BLOCK + 1])?;
        let apart = |query: i64| (0..BLOCK).map(move |key| (query - key).max(0));
        let apart: Vec<i64> = (0..BLOCK).flat_map(apart).collect();
        let seen = powers.f_index_select(1, &Tensor::f_from_slice(&apart)?)?;
        let seen = seen.f_view([heads, 1, BLOCK, BLOCK])?.f_tril(0)?;
        let (powers, seen) = (powers.f_to_device(device)?, seen.f_to_device(device)?);
        Ok(Recurrence { ops, rates, powers, seen })
    }

    /// `state` after decaying over `tokens`, plus `own`: `[K, d, e]`.
    pub fn join(&self, own: &Tensor, state: &RecurrentState, tokens: i64) -> Result<Tensor> {
        let Some(state) = state else { return Ok(own.shallow_clone()) };
        let left: Vec<f32> = self.rates.iter().map(|rate| power(*rate, tokens) as f32).collect();
        let left = device::floats(own.device(), &left)?.f_view([-1, 1, 1])?;
        Ok(own.f_add(&state.f_mul(&left)?)?)
    }

    /// The state after `span`, given the state `before` it.
    pub fn after(
        &self,
        of: &Features,
        span: AttentionSpan,
        before: &RecurrentState,
    ) -> Result<RecurrentState> {
        as_one(None, || {
            let mut state = copy(before);
            for (first, len) in blocks(span) {
                state = Some(self.after_block(&of.block(first, len)?, &state)?);
            }
            Ok(state)
        })
    }

    fn after_block(&self, block: &Features, before: &RecurrentState) -> Result<Tensor> {
        let Features { key, value, .. } = block;
        let len = key.size()[1];
        let key = key.f_mul(&self.falling(0, len)?)?;
        self.join(&self.ops.matmul(&key.f_transpose(1, 2)?, value)?, before, len)
    }

    /// What the queries of `span` read, by block: `[K, J, n, e]` each.
    pub fn read(
        &self,
        of: &Features,
        span: AttentionSpan,
        before: &RecurrentState,
    ) -> Result<Vec<Tensor>> {
        as_one(Some(of.operations(span)), || self.read_blocks(of, span, before))
    }

    fn read_blocks(
        &self,
        of: &Features,
        span: AttentionSpan,
        before: &RecurrentState,
    ) -> Result<Vec<Tensor>> {
        let (mut state, mut outs) = (copy(before), Vec::new());
        for (first, len) in blocks(span) {
            let block = of.block(first, len)?;
            let scores = self.scores(&block)?;
            let mut out = self.ops.matmul(&rows(&scores)?, &block.value)?;
            if let Some(state) = &state {
                let query = block.query.f_mul(&self.rising(1, len)?.f_unsqueeze(1)?)?;
                out = out.f_add(&self.ops.matmul(&rows(&query)?, state)?)?;
            }
            outs.push(unrows(&out, &block.query)?);
            state = Some(self.after_block(&block, &state)?);
        }
        Ok(outs)
    }

    /// The gradient of the state before `span`, from the gradients of what its queries read and of the state after it.
    pub fn before(
        &self,
        of: &Features,
        grad: &Tensor,
        span: AttentionSpan,
        after: &RecurrentState,
    ) -> Result<RecurrentState> {
        as_one(None, || {
            let mut state = copy(after);
            for (first, len) in blocks(span).rev() {
                let grad = grad.f_narrow(2, first, len)?;
                state = Some(self.before_block(&of.block(first, len)?, &grad, &state)?);
            }
            Ok(state)
        })
    }

    fn before_block(
        &self,
        block: &Features,
        grad: &Tensor,
        after: &RecurrentState,
    ) -> Result<Tensor> {
        let len = grad.size()[2];
        let query = block.query.f_mul(&self.rising(0, len)?.f_unsqueeze(1)?)?;
        let own = self.ops.matmul(&rows(&query)?.f_transpose(1, 2)?, &rows(grad)?)?;
        self.join(&own, after, len)
    }

    /// Gradients of the queries, keys and values of `span`, by block, in order.
    pub fn back(
        &self,
        of: &Features,
        grad: &Tensor,
        span: AttentionSpan,
        before: &RecurrentState,
        after: &RecurrentState,
    ) -> Result<Vec<Features>> {
        as_one(None, || self.back_blocks(of, grad, span, [before, after]))
    }

    fn back_blocks(
        &self,
        of: &Features,
        grad: &Tensor,
        span: AttentionSpan,
        [before, after]: [&RecurrentState; 2],
    ) -> Result<Vec<Features>> {
        let mut states = vec![copy(before)];
        for (first, len) in blocks(span) {
            let next = self.after_block(&of.block(first, len)?, &states[states.len() - 1])?;
            states.push(Some(next));
        }
        let (mut later, mut found) = (copy(after), Vec::new());
        for ((first, len), earlier) in blocks(span).zip(&states).rev() {
            let (block, grad) = (of.block(first, len)?, grad.f_narrow(2, first, len)?);
            found.push(self.block_back(&block, &grad, earlier, &later)?);
            later = Some(self.before_block(&block, &grad, &later)?);
        }
        found.reverse();
        Ok(found)
    }

    fn block_back(
        &self,
        block: &Features,
        grad: &Tensor,
        earlier: &RecurrentState,
        later: &RecurrentState,
    ) -> Result<Features> {
        let (ops, len) = (self.ops, grad.size()[2]);
        let seen = self.seen.f_narrow(2, 0, len)?.f_narrow(3, 0, len)?;
        let (query, reads) = (rows(&block.query)?, rows(grad)?);
        let scores = rows(&self.scores(block)?)?;
        let of_scores = ops.matmul(&reads, &block.value.f_transpose(1, 2)?)?;
        let of_scores = rows(&unrows(&of_scores, grad)?.f_mul(&seen)?)?;
        let mut of_query = unrows(&ops.matmul(&of_scores, &block.key)?, grad)?;
        let mut of_key = ops.matmul(&of_scores.f_transpose(1, 2)?, &query)?;
        let mut of_value = ops.matmul(&scores.f_transpose(1, 2)?, &reads)?;
        if let Some(state) = earlier {
            let read = unrows(&ops.matmul(&reads, &state.f_transpose(1, 2)?)?, grad)?;
            of_query = of_query.f_add(&read.f_mul(&self.rising(1, len)?.f_unsqueeze(1)?)?)?;
        }
        if let Some(state) = later {
            let left = self.falling(1, len)?;
            let key = ops.matmul(&block.value, &state.f_transpose(1, 2)?)?;
            of_key = of_key.f_add(&key.f_mul(&left)?)?;
            let value = ops.matmul(&block.key, state)?;
            of_value = of_value.f_add(&value.f_mul(&left)?)?;
        }
        Ok(Features { query: of_query, key: of_key, value: of_value })
    }

    /// The scores of each query of a block for each of its keys, `[K, J, b, b]`.
    fn scores(&self, block: &Features) -> Result<Tensor> {
        let len = block.key.size()[1];
        let seen = self.seen.f_narrow(2, 0, len)?.f_narrow(3, 0, len)?;
        let scores = self.ops.matmul(&rows(&block.query)?, &block.key.f_transpose(1, 2)?)?;
        Ok(unrows(&scores, &block.query)?.f_mul(&seen)?)
    }

    /// Powers `from`, `from + 1`, ... of the rates, `[K, len, 1]`.
    fn rising(&self, from: i64, len: i64) -> Result<Tensor> {
        Ok(self.powers.f_narrow(1, from, len)?.f_unsqueeze(-1)?)
    }

    /// The same, highest power first.
    fn falling(&self, from: i64, len: i64) -> Result<Tensor> {
        Ok(self.powers.f_narrow(1, from, len)?.f_flip([1])?.f_unsqueeze(-1)?)
    }
}

impl Features {
    /// From the projections of tokens, `[n, K J d]` and twice `[n, K d]`; `shape` is K, J, d.
    pub fn of([query, key, value]: [&Tensor; 3], shape: [i64; 3]) -> Result<Features> {
        let ([keys, each, dim], tokens) = (shape, key.size()[0]);
        let query = positive(query)?.f_view([tokens, keys, each, dim])?;
        let by_key = |of: &Tensor| of.f_view([tokens, keys, dim])?.f_transpose(0, 1);
        let value = by_key(&value.f_to_kind(Kind::Float)?)?;
        let ones = value.f_new_ones([keys, tokens, 1], (Kind::Float, value.device()))?;
        Ok(Features {
            query: query.f_permute([1, 2, 0, 3])?.f_contiguous()?,
            key: by_key(&positive(key)?)?.f_contiguous()?,
            value: Tensor::f_cat(&[value, ones], 2)?,
        })
    }

    /// The gradients of the projections of tokens, from those of their features by block, in `kind`.
    pub fn back(&self, blocks: &[Features], kind: Kind) -> Result<[Tensor; 3]> {
        let all = |part: fn(&Features) -> &Tensor, dim| {
            Tensor::f_cat(&blocks.iter().map(part).collect::<Vec<_>>(), dim)
        };
        // f' is 1 above 0 and f below, where f is at most 1.
        let slope = |of: &Tensor| of.f_clamp_max(1.0);
        let query = all(|block| &block.query, 2)?.f_mul(&slope(&self.query)?)?;
        let key = all(|block| &block.key, 1)?.f_mul(&slope(&self.key)?)?;
        let (tokens, dim) = (key.size()[1], key.size()[2]);
        let value = all(|block| &block.value, 1)?.f_narrow(2, 0, dim)?;
        let flat = |of: Tensor| of.f_reshape([tokens, -1])?.f_to_kind(kind);
        Ok([
            flat(query.f_permute([2, 0, 1, 3])?)?,
            flat(key.f_transpose(0, 1)?)?,
            flat(value.f_transpose(0, 1)?)?,
        ])
    }

    /// Multiplications and additions of the recurrence over a span: for each token, `k v^T` and `S^T q`.
    fn operations(&self, span: AttentionSpan) -> Work {
        let ([keys, each, _, width], values) = (self.shape(), self.value.size()[2]);
        Work::Recurrence((2 * keys * (each + 1) * width * values * span.len) as f64)
    }

    fn shape(&self) -> [i64; 4] {
        [0, 1, 2, 3].map(|dimension| self.query.size()[dimension])
    }

    fn block(&self, first: i64, len: i64) -> Result<Features> {
        Ok(Features {
            query: self.query.f_narrow(2, first, len)?,
            key: self.key.f_narrow(1, first, len)?,
            value: self.value.f_narrow(1, first, len)?,
        })
    }
}

/// The output of heads: `read`, `[K, J, n, d + 1]`, divided by its last column plus 1e-6, as `[n, K J d]`; and this
/// denominator, `[n, K J, 1]`.
pub fn divided(read: &Tensor) -> Result<(Tensor, Tensor)> {
    let (keys, each, tokens, width) = read.size4()?;
    let by_token = read.f_permute([2, 0, 1, 3])?.f_reshape([tokens, keys * each, width])?;
    let below = by_token.f_narrow(2, width - 1, 1)?.f_add_scalar(EPS)?;
    let heads = by_token.f_narrow(2, 0, width - 1)?.f_div(&below)?;
    Ok((heads.f_reshape([tokens, -1])?, below))
}

/// `heads * silu(gate)`, `[n, K J d]`, in `kind`.
pub fn gated(heads: &Tensor, gate: &Tensor, kind: Kind) -> Result<Tensor> {
    let gate = gate.f_to_kind(Kind::Float)?.f_silu()?;
    Ok(heads.f_mul(&gate)?.f_to_kind(kind)?)
}

/// From the gradient of the gated output, f32: the gradient of what heads read, including the denominator, `[K, J, n, d
/// + 1]`, and that of the gate, in `kind`. `heads` and `denominator` are those of [`divided`].
pub fn gated_back(
    grad: &Tensor,
    [heads, denominator, gate]: [&Tensor; 3],
    keys: i64,
    kind: Kind,
) -> Result<(Tensor, Tensor)> {
    let gate = gate.f_to_kind(Kind::Float)?;
    let open = gate.f_sigmoid()?;
    // silu'(u) = s (1 + u (1 - s)), s = sigmoid(u).
    let slope = open.f_neg()?.f_add_scalar(1.0)?.f_mul(&gate)?.f_add_scalar(1.0)?;
    let of_gate = grad.f_mul(heads)?.f_mul(&slope.f_mul(&open)?)?;
    let size = denominator.size();
    let by_head = |of: &Tensor| of.f_view([size[0], size[1], -1]);
    let of_heads = by_head(&grad.f_mul(&gate.f_mul(&open)?)?)?.f_div(denominator)?;
    // o = a / b: da = do / b, db = -(da . o).
    let below = of_heads.f_mul(&by_head(heads)?)?;
    let below = below.f_sum_dim_intlist([-1i64].as_slice(), true, Kind::Float)?.f_neg()?;
    let both = Tensor::f_cat(&[of_heads, below], 2)?;
    let read = both.f_view([size[0], keys, size[1] / keys, -1])?.f_permute([1, 2, 0, 3])?;
    Ok((read.f_contiguous()?, of_gate.f_to_kind(kind)?))
}

/// `elu(z) + 1`, f32.
fn positive(z: &Tensor) -> Result<Tensor> {
    let z = z.f_to_kind(Kind::Float)?;
    Ok(z.f_clamp_min(0.0)?.f_add(&z.f_clamp_max(0.0)?.f_exp()?)?)
}

/// First token and length of each block of a span.
fn blocks(span: AttentionSpan) -> impl DoubleEndedIterator<Item = (i64, i64)> + ExactSizeIterator {
    let count = (span.len + BLOCK - 1) / BLOCK;
    (0..count as usize).map(move |block| {
        let first = block as i64 * BLOCK;
        (span.start + first, BLOCK.min(span.len - first))
    })
}

/// `[K, J, b, x]` as `[K, J b, x]`.
fn rows(of: &Tensor) -> Result<Tensor> {
    let size = of.size();
    Ok(of.f_reshape([size[0], size[1] * size[2], size[3]])?)
}

/// The inverse, for the queries of `like`.
fn unrows(of: &Tensor, like: &Tensor) -> Result<Tensor> {
    let [heads, each, tokens, _] = like.size()[..] else { return Ok(of.shallow_clone()) };
    Ok(of.f_view([heads, each, tokens, -1])?)
}

fn copy(state: &RecurrentState) -> RecurrentState {
    state.as_ref().map(Tensor::shallow_clone)
}

/// By repeated squaring: the same on every machine.
fn power(rate: f64, tokens: i64) -> f64 {
    let (mut left, mut square, mut found) = (tokens, rate, 1.0);
    while left > 0 {
        if left % 2 == 1 {
            found *= square;
        }
        square *= square;
        left /= 2;
    }
    found
}
