//! Causal softmax attention, document by document, in f32; bf16 operands are converted to f32, and results are rounded
//! once.
//!
//! As in FlashAttention (T. Dao et al. 2022, arXiv 2205.14135; 2023, arXiv 2307.08691), no full matrix of scores is
//! stored: the backward pass recomputes the scores from each query's largest score and softmax sum. [`WIDE`] queries
//! are computed at once, against every key that one of them sees. Their scores are stored as `[keys][WIDE]`, one query
//! per lane, so that a softmax runs down the rows, and the scores are an operand of the next matmul without a
//! transposition ([`super::panels`]).
//!
//! Every number is a chain in a fixed order: scores over dimensions; outputs and gradients of queries over keys;
//! gradients of keys and values over the query heads of their group, and then over queries. What a token does not see
//! adds an exact zero. So a token's bits depend only on what it sees: not on the other tokens of its block, and not on
//! whether its document is computed whole or in parts. With a window, keys that no query of a block sees are skipped.

use std::ops::Range;

use tch::Tensor;

use super::exponential::exp;
use super::panels::{HIGH, Panels, WIDE};
use super::{empty, read, simd, to_f32, write};
use crate::Result;
use crate::ops::call::Call;
use crate::ops::{Attended, Attention, AttentionGrads, AttentionSpan, check};

/// One number for each query of a block.
type Lanes = [f32; WIDE];

pub(super) fn attention(by: Attention) -> Result<Attended> {
    let tokens = check::attention(by)?;
    let [queries, _, width] = by.shape;
    let given = ContiguousOperands::of(by)?;
    let mut heads = empty(&[tokens, queries * width])?;
    let mut stats = empty(&[2, queries, tokens])?;
    let operands = given.read()?;
    let out = (write(&mut heads)?, write(&mut stats)?);
    let (most, part) = out.1.split_at_mut(out.1.len() / 2);
    operands.forward(by.spans, out.0, [most, part]);
    let heads = heads.f_to_kind(by.value.kind())?;
    Ok(Attended { saved: vec![[heads.shallow_clone(), stats]], heads })
}

pub(super) fn attention_backward(
    by: Attention,
    saved: Vec<[Tensor; 2]>,
    grad: &Tensor,
    out: AttentionGrads,
) -> Result<()> {
    check::attention_backward(by, grad, out)?;
    let ([queries, _, _], tokens) = (by.shape, by.query.size()[1]);
    let sizes = [grad.size(), vec![2, queries, tokens]];
    let fits = |one: &&[Tensor; 2]| one.each_ref().map(Tensor::size) == sizes;
    let Some([heads, stats]) = saved.first().filter(fits).filter(|_| saved.len() == 1) else {
        let (call, found) = (Call("attention_backward"), format!("{} pairs", saved.len()));
        return Err(call.refuse("saved", found, "the heads, and two numbers for each".to_owned()));
    };
    let (given, [heads, grad]) = (ContiguousOperands::of(by)?, [dense(heads)?, dense(grad)?]);
    let [mut to_query, mut to_key] = [empty(&by.query.size())?, empty(&by.key.size())?];
    let mut to_value = empty(&by.value.size())?;
    let stats = read(stats)?;
    let (most, part) = stats.split_at(stats.len() / 2);
    let done = ForwardResults { heads: read(&heads)?, grad: read(&grad)?, most, part };
    let into = GradientOutputs {
        query: write(&mut to_query)?,
        key: write(&mut to_key)?,
        value: write(&mut to_value)?,
    };
    given.read()?.backward(by.spans, done, into);
    for (to, from) in [(out.query, to_query), (out.key, to_key), (out.value, to_value)] {
        to.shallow_clone().f_copy_(&from)?;
    }
    Ok(())
}

/// Contiguous, in f32.
fn dense(tensor: &Tensor) -> Result<Tensor> {
    Ok(to_f32(tensor)?.f_contiguous()?)
}

/// The operands, contiguous and in f32.
struct ContiguousOperands {
    operands: [Tensor; 3],
    shape: [usize; 3],
    window: usize,
}

impl ContiguousOperands {
    fn of(by: Attention) -> Result<ContiguousOperands> {
        let operands = [dense(by.query)?, dense(by.key)?, dense(by.value)?];
        let window = by.window.unwrap_or(i64::MAX) as usize;
        Ok(ContiguousOperands { operands, shape: by.shape.map(|size| size as usize), window })
    }

    fn read(&self) -> Result<Operands<'_>> {
        let [query, key, value] = self.operands.each_ref();
        let [tokens, others] = [query.size()[1] as usize, key.size()[1] as usize];
        let (query, key, value) = (read(query)?, read(key)?, read(value)?);
        let ContiguousOperands { shape, window, .. } = *self;
        Ok(Operands { query, key, value, tokens, others, shape, window })
    }
}

/// The input of attention.
#[derive(Clone, Copy)]
struct Operands<'a> {
    /// `[H, N, d]`.
    query: &'a [f32],
    /// `[K, M, d]`.
    key: &'a [f32],
    /// `[M, K d]`.
    value: &'a [f32],
    /// N.
    tokens: usize,
    /// M.
    others: usize,
    /// `[H, K, d]`.
    shape: [usize; 3],
    /// Keys that a query sees.
    window: usize,
}

/// Results of the forward pass, and the gradient of its output.
#[derive(Clone, Copy)]
struct ForwardResults<'a> {
    /// `[N, H d]`.
    heads: &'a [f32],
    /// `[N, H d]`.
    grad: &'a [f32],
    /// `[H, N]`: the largest score of each query.
    most: &'a [f32],
    /// `[H, N]`: one over the sum of its softmax.
    part: &'a [f32],
}

/// Gradients to write, in the layouts of [`Operands`].
struct GradientOutputs<'a> {
    query: &'a mut [f32],
    key: &'a mut [f32],
    value: &'a mut [f32],
}

/// A span's position in the operands.
#[derive(Clone, Copy)]
struct SpanPosition {
    /// Its first query.
    start: usize,
    len: usize,
    before: usize,
    /// Its first key.
    first: usize,
}

impl SpanPosition {
    fn all(spans: &[AttentionSpan]) -> impl Iterator<Item = SpanPosition> {
        spans.iter().scan(0, |end, span| {
            let [start, len, before] = [span.start, span.len, span.before].map(|n| n as usize);
            let first = *end;
            *end += before + len;
            Some(SpanPosition { start, len, before, first })
        })
    }

    fn keys(self) -> usize {
        self.before + self.len
    }

    fn blocks(self, window: usize) -> impl Iterator<Item = Block> {
        (0..self.len).step_by(WIDE).map(move |first| {
            let (queries, base) = (first..self.len.min(first + WIDE), self.before + first);
            // The first key that the first query sees, at the beginning of a tile.
            let start = (base + 1).saturating_sub(window) / HIGH * HIGH;
            let keys = start..self.before + queries.end;
            Block { base: base - start, keys, queries, window }
        })
    }
}

/// Queries of a part that are computed at once.
struct Block {
    queries: Range<usize>,
    /// Keys that one of them sees, from the beginning of a tile on.
    keys: Range<usize>,
    /// The key of the first query among these.
    base: usize,
    window: usize,
}

impl Block {
    /// Its index among the blocks of its part.
    fn number(&self) -> usize {
        self.queries.start / WIDE
    }

    /// Number of its scores, including the padding of tiles.
    fn scores(&self) -> usize {
        self.keys.len().next_multiple_of(HIGH) * WIDE
    }

    /// For each of its queries the number from `all`, which has one per token of a head; 0 in unused lanes.
    fn lanes(&self, start: usize, all: &[f32]) -> Lanes {
        let mut lanes = [0.0; WIDE];
        let own = &all[start + self.queries.start..start + self.queries.end];
        lanes[..own.len()].copy_from_slice(own);
        lanes
    }
}

impl Operands<'_> {
    /// The queries of a part.
    fn queries(&self, head: usize, part: SpanPosition) -> Panels {
        let width = self.shape[2];
        let from = &self.query[(head * self.tokens + part.start) * width..];
        Panels::taken(from, [part.len, width], width)
    }

    /// The keys and values of a part.
    fn keys_and_values(&self, group: usize, part: SpanPosition) -> [Panels; 2] {
        let [_, keys, width] = self.shape;
        let size = [part.keys(), width];
        let key = &self.key[(group * self.others + part.first) * width..];
        let value = &self.value[(part.first * keys + group) * width..];
        [Panels::taken(key, size, width), Panels::taken(value, size, keys * width)]
    }

    /// The rows of a part's queries, in a matrix of all heads, `[N, H d]`.
    fn of_heads(&self, head: usize, part: SpanPosition, all: &[f32]) -> Panels {
        let [queries, _, width] = self.shape;
        let from = &all[(part.start * queries + head) * width..];
        Panels::taken(from, [part.len, width], queries * width)
    }

    /// Each group with its heads.
    fn groups(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let size = self.shape[0] / self.shape[1];
        (0..self.shape[1]).map(move |group| (group, group * size..(group + 1) * size))
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape[2] as f32).sqrt()
    }

    /// Outputs, `[N, H d]`, and for each query of each head the largest score and one over its softmax sum.
    fn forward(
        &self,
        spans: &[AttentionSpan],
        heads: &mut [f32],
        [most, part_of]: [&mut [f32]; 2],
    ) {
        let ([queries, _, width], scale) = (self.shape, self.scale());
        let (mut scores, mut out) = (Vec::new(), Panels::zeros(WIDE, width));
        for part in SpanPosition::all(spans) {
            for (group, own) in self.groups() {
                let [key, value] = self.keys_and_values(group, part);
                for head in own {
                    let query = self.queries(head, part).turned();
                    for block in part.blocks(self.window) {
                        scores.resize(block.scores(), 0.0);
                        let own = query.part(block.number(), &(0..width));
                        key.times(block.keys.start, own, &mut scores);
                        let (mut top, mut share) = ([0.0; WIDE], [0.0; WIDE]);
                        soften(&mut scores, &block, scale, &mut top, &mut share);
                        out.set(&scores, &value, &block.keys);
                        let first = part.start + block.queries.start;
                        let count = block.queries.len();
                        let at = head * self.tokens + first;
                        most[at..at + count].copy_from_slice(&top[..count]);
                        part_of[at..at + count].copy_from_slice(&share[..count]);
                        let to = &mut heads[(first * queries + head) * width..];
                        out.put_scaled(to, queries * width, &share[..count]);
                    }
                }
            }
        }
    }

    fn backward(
        &self,
        spans: &[AttentionSpan],
        done: ForwardResults<'_>,
        into: GradientOutputs<'_>,
    ) {
        let ([_, keys, width], others) = (self.shape, self.others);
        let GradientOutputs { query: to_query, key: to_key, value: to_value } = into;
        for part in SpanPosition::all(spans) {
            for (group, own) in self.groups() {
                let seen = self.keys_and_values(group, part);
                let mut sums = [(); 2].map(|()| Panels::zeros(part.keys(), width));
                for head in own {
                    let first = (head * self.tokens + part.start) * width;
                    let to_query = &mut to_query[first..first + part.len * width];
                    self.head_backward(head, part, done, &seen, &mut sums, to_query);
                }
                let [key, value] = sums;
                key.put(&mut to_key[(group * others + part.first) * width..], width);
                value.put(&mut to_value[(part.first * keys + group) * width..], keys * width);
            }
        }
    }

    /// The gradients of a head's queries; the gradients of its keys and values are added to `sums`.
    fn head_backward(
        &self,
        head: usize,
        part: SpanPosition,
        done: ForwardResults<'_>,
        [key, value]: &[Panels; 2],
        [to_key, to_value]: &mut [Panels; 2],
        to_query: &mut [f32],
    ) {
        let (width, scale, start) = (self.shape[2], self.scale(), head * self.tokens + part.start);
        let query = self.queries(head, part);
        let grad = self.of_heads(head, part, done.grad);
        let along = grad.dots(&self.of_heads(head, part, done.heads));
        let (query_turned, grad_turned) = (query.turned(), grad.turned());
        let (mut scores, mut slopes) = (Vec::new(), Vec::new());
        let mut out = Panels::zeros(WIDE, width);
        for block in part.blocks(self.window) {
            scores.resize(block.scores(), 0.0);
            slopes.resize(block.scores(), 0.0);
            let first = block.keys.start;
            key.times(first, query_turned.part(block.number(), &(0..width)), &mut scores);
            value.times(first, grad_turned.part(block.number(), &(0..width)), &mut slopes);
            let known = SavedSoftmax {
                base: block.base,
                window: block.window,
                scale,
                most: block.lanes(start, done.most),
                part: block.lanes(start, done.part),
                along: block.lanes(0, &along),
            };
            to_slopes(&mut scores, &mut slopes, &known);
            to_value.add(first, &scores, &grad, &block.queries);
            to_key.add(first, &slopes, &query, &block.queries);
            out.set(&slopes, key, &block.keys);
            let count = block.queries.len();
            let to = &mut to_query[block.queries.start * width..block.queries.end * width];
            out.put_scaled(to, width, &[1.0; WIDE][..count]);
        }
    }
}

/// The lanes of a block that see its key `key`, from the first to before the second.
fn lanes_of(key: usize, base: usize, window: usize) -> [i32; 2] {
    [key, key + window].map(|lane| lane.saturating_sub(base).min(WIDE) as i32)
}

/// The keys of a block that all lanes see: most of them.
fn open_keys(base: usize, window: usize) -> Range<usize> {
    (base + WIDE).saturating_sub(window)..base + 1
}

/// Replaces the numbers of lanes that do not see key `key` by `with`.
#[inline(always)]
fn hide(row: &mut Lanes, key: usize, [base, window]: [usize; 2], with: f32) {
    let [first, end] = lanes_of(key, base, window);
    for (lane, number) in (0..).zip(row) {
        *number = if lane >= first && lane < end { *number } else { with };
    }
}

simd! {
    /// Replaces scores `[keys][WIDE]` by e^(scale (score - largest)), 0 where a lane's query does not see the key: lane
    /// q sees keys up to `base + q`, the last of them in its window. Returns the largest score and one over the sum.
    fn soften(scores: &mut [f32], block: &Block, scale: f32, most: &mut Lanes, part: &mut Lanes) {
        let (seen, open) = ([block.base, block.window], open_keys(block.base, block.window));
        let (rows, _) = scores.as_chunks_mut::<WIDE>();
        let mut top = [f32::NEG_INFINITY; WIDE];
        for (key, row) in rows.iter_mut().enumerate() {
            if !open.contains(&key) {
                hide(row, key, seen, f32::NEG_INFINITY);
            }
            for lane in 0..WIDE {
                top[lane] = if row[lane] > top[lane] { row[lane] } else { top[lane] };
            }
        }
        let mut sum = [0f32; WIDE];
        for (key, row) in rows.iter_mut().enumerate() {
            if open.contains(&key) {
                for lane in 0..WIDE {
                    row[lane] = exp(scale * (row[lane] - top[lane]));
                    sum[lane] += row[lane];
                }
                continue;
            }
            for lane in 0..WIDE {
                row[lane] = exp(scale * (row[lane] - top[lane]));
            }
            hide(row, key, seen, 0.0);
            for lane in 0..WIDE {
                sum[lane] += row[lane];
            }
        }
        *most = top;
        *part = sum.map(|sum| 1.0 / sum);
    }
}

/// Saved values of a block's queries.
struct SavedSoftmax {
    base: usize,
    window: usize,
    scale: f32,
    most: Lanes,
    part: Lanes,
    /// The dot product of a head's output and its gradient.
    along: Lanes,
}

simd! {
    /// Replaces scores by the softmax, and the gradient of the softmax by the gradient of the scores.
    fn to_slopes(scores: &mut [f32], slopes: &mut [f32], known: &SavedSoftmax) {
        let SavedSoftmax { base, window, scale, most, part, along } = known;
        let open = open_keys(*base, *window);
        let ((scores, _), (slopes, _)) = (scores.as_chunks_mut::<WIDE>(), slopes.as_chunks_mut::<WIDE>());
        for (key, (score, slope)) in scores.iter_mut().zip(slopes).enumerate() {
            for lane in 0..WIDE {
                let value = exp(scale * (score[lane] - most[lane])) * part[lane];
                let change = value * (slope[lane] - along[lane]) * scale;
                (score[lane], slope[lane]) = (value, change);
            }
            if !open.contains(&key) {
                hide(score, key, [*base, *window], 0.0);
                hide(slope, key, [*base, *window], 0.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A block has every key that one of its queries sees, and few others, however long the document is.
        #[test]
        fn blocks_skip_keys_outside_of_the_window((len, before) in (1usize..300, 0usize..500), window in 1usize..400) {
            let (mut queries, part) = (0, SpanPosition { start: 0, len, before, first: 0 });
            for block in part.blocks(window) {
                prop_assert_eq!(block.queries.start, queries);
                queries = block.queries.end;
                let ends = [block.queries.start, queries - 1].map(|query| before + query + 1);
                prop_assert!(block.keys.start <= ends[0].saturating_sub(window) && block.keys.end == ends[1]);
                prop_assert!(block.keys.len() < window + WIDE + HIGH);
                for (key, query) in block.keys.clone().flat_map(|key| block.queries.clone().map(move |query| (key, query))) {
                    let [first, end] = lanes_of(key - block.keys.start, block.base, window);
                    let lane = (query - block.queries.start) as i32;
                    let seen = key <= before + query && key + window > before + query;
                    prop_assert_eq!(first <= lane && lane < end, seen);
                    let open = open_keys(block.base, window).contains(&(key - block.keys.start));
                    prop_assert_eq!(open, first == 0 && end == WIDE as i32);
                }
            }
            prop_assert_eq!(queries, len);
        }
    }
}
