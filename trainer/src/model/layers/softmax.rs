//! Causal softmax attention over the chunks of a micro-batch: from queries, keys and values to the output projection,
//! and back.
//!
//! A chunk's queries see earlier keys and values. Where ranks share the chunks, keys and values are gathered again in
//! the backward pass, so that no rank saves those of others. Gradients of keys and values are summed over the chunks
//! that see them.

use std::collections::{BTreeMap, BTreeSet};

use kernels::Result;
use kernels::layout::Parts as _;
use kernels::ops::{Attended, Attention, AttentionGrads, HeadGrads};
use kernels::tree::{Counter, TreeNodes, blocks};
use tch::{Kind, Tensor};

use super::heads::shards;
use crate::model::activity::larger;
use crate::model::cut::{Chunk, Chunks, joined};
use crate::model::layer::Pass;
use crate::model::line::{PendingTable, Rows};
use crate::model::param::ParamId;
use crate::model::shards::Shards;
use crate::model::visible::{KeyPart, VisibleKeys};
use crate::refusal::refused;

/// What the backward pass reads of attention.
pub(super) struct SavedSoftmax {
    /// `[K, N, d]`, of the local chunks.
    key: Tensor,
    /// `[N, K d]`, likewise.
    value: Tensor,
    /// By chunk: queries and keys, `[G, n, d]`, and the result.
    chunks: Vec<(Tensor, Attended)>,
    shape: AttentionShape,
}

/// The heads of a shard, and what their queries see.
#[derive(Clone, Copy)]
pub(super) struct AttentionShape {
    /// `[H, K, d]`.
    pub(super) heads: [i64; 3],
    /// How many keys a query sees, its own token's included; `None`: all earlier ones.
    pub(super) window: Option<i64>,
}

/// Gradients from the backward pass of attention, by chunk.
pub(super) struct SoftmaxGrads {
    /// Of queries and keys.
    pub(super) qk: Vec<HeadGrads>,
    /// `[N, K d]`: of values, chunk after chunk.
    pub(super) value: Tensor,
    /// `[D, H d]`.
    pub(super) o_proj: Vec<Tensor>,
}

impl SavedSoftmax {
    /// The output by chunk, times `o_proj`: from queries and keys by chunk, `[G, n, d]`, and the values of all local
    /// chunks, which `values` sends to other ranks.
    pub(super) fn forward(
        pass: &Pass<'_>,
        qk: Vec<Tensor>,
        [value, o_proj]: [&Tensor; 2],
        values: PendingTable<'_>,
        shape: AttentionShape,
    ) -> Result<(Vec<Tensor>, SavedSoftmax)> {
        let [queries, keys, _] = shape.heads;
        let key = qk.iter().map(|qk| qk.part(0, queries, keys));
        let key = joined(&key.collect::<std::result::Result<Vec<_>, _>>()?, 1)?;
        let (seen, values) = (pass.chunks.earlier(shape.window, &key, 1)?.wait()?, values.wait()?);
        let (mut outs, mut chunks) = (Vec::new(), Vec::new());
        for (chunk, qk) in pass.chunks.iter().zip(qk) {
            let seen = QueriesWithKeys::of(chunk, &qk, &seen, &values, shape)?;
            let attended = pass.ops.attention(seen.operands(chunk))?;
            outs.push(pass.of_shard(&attended.heads, &o_proj.swapped(0, 1)?)?);
            chunks.push((qk, attended));
        }
        Ok((outs, SavedSoftmax { key, value: value.shallow_clone(), chunks, shape }))
    }

    /// From the gradient of the output: gradients of queries, keys and values, and of `o_proj`.
    pub(super) fn backward(
        &mut self,
        pass: &Pass<'_>,
        grad: &[Tensor],
        o_proj: &Tensor,
    ) -> Result<SoftmaxGrads> {
        let (ops, AttentionShape { heads: [queries, keys, _], window }) = (pass.ops, self.shape);
        let float = (Kind::Float, self.value.device());
        let earlier = |tensor, dim| pass.chunks.earlier(window, tensor, dim);
        let seen = [earlier(&self.key, 1)?, earlier(&self.value, 0)?];
        let [keys_seen, values_seen] = seen.map(PendingTable::wait);
        let (keys_seen, values_seen) = (keys_seen?, values_seen?);
        let (mut sums, mut outs, mut qk) =
            (KeySums::new(pass.chunks, window), Vec::new(), Vec::new());
        let chunks = pass.chunks.shared().own();
        for (at, ((saved_qk, attended), grad)) in self.chunks.iter_mut().zip(grad).enumerate() {
            let chunk = pass.chunks.of(at);
            outs.push(pass.gradient(&grad.swapped(0, 1)?, &attended.heads)?);
            let heads = ops.matmul(grad, o_proj)?;
            let seen = QueriesWithKeys::of(chunk, saved_qk, &keys_seen, &values_seen, self.shape)?;
            let kept = std::mem::take(&mut attended.saved);
            let by = seen.operands(chunk);
            if pass.chunks.count() == 1 {
                let (qk, value) = ops.attention_backward_whole(by, kept, &heads)?;
                return Ok(SoftmaxGrads { qk: vec![qk], value, o_proj: outs });
            }
            // Terms of sums stay f32.
            let part = |of: &Tensor| Tensor::f_empty(of.size(), float);
            let [all, key, value] = [part(saved_qk)?, part(&seen.key)?, part(&seen.value)?];
            let query = all.part(0, 0, queries)?;
            let out = AttentionGrads { query: &query, key: &key, value: &value };
            ops.attention_backward(by, kept, &heads, out)?;
            sums.add(chunks[at], chunk, &key, &value)?;
            qk.push(all);
        }
        let [key, value] = [&self.key, &self.value].map(|of| Tensor::f_empty(of.size(), float));
        let (key, value) = (key?, value?);
        sums.finish(&key, &value)?;
        let mut first = 0;
        for qk in &qk {
            let tokens = qk.extent(1);
            qk.part(0, queries, keys)?.f_copy_(&key.part(1, first, tokens)?)?;
            first += tokens;
        }
        let qk = qk.into_iter().map(HeadGrads::Stacked).collect();
        Ok(SoftmaxGrads { qk, value: value.f_to_kind(pass.kind)?, o_proj: outs })
    }

    /// The largest logit of a query and a key that it sees.
    fn largest_logit(&self, pass: &Pass<'_>) -> Result<f64> {
        let mut largest = f64::NEG_INFINITY;
        let earlier = |tensor, dim| pass.chunks.earlier(self.shape.window, tensor, dim)?.wait();
        let (key, value) = (earlier(&self.key, 1)?, earlier(&self.value, 0)?);
        for (chunk, (qk, _)) in pass.chunks.iter().zip(&self.chunks) {
            let seen = QueriesWithKeys::of(chunk, qk, &key, &value, self.shape)?;
            largest = larger(largest, seen.largest_logit(chunk)?);
        }
        Ok(largest)
    }
}

/// A chunk's queries with the keys and values that they see.
struct QueriesWithKeys {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: AttentionShape,
}

impl QueriesWithKeys {
    /// From the tables of keys and values.
    fn of(
        chunk: &Chunk,
        qk: &Tensor,
        key: &Tensor,
        value: &Tensor,
        shape: AttentionShape,
    ) -> Result<QueriesWithKeys> {
        let seen = chunk.seen(shape.window);
        let (key, value) = (seen.keys(key, 1)?, seen.keys(value, 0)?);
        Ok(QueriesWithKeys { query: qk.part(0, 0, shape.heads[0])?, key, value, shape })
    }

    /// The largest logit of a query and a key that it sees, as the softmax reads it. Computed in f32, span by span.
    fn largest_logit(&self, chunk: &Chunk) -> Result<f64> {
        let AttentionShape { heads: [queries, keys, width], window } = self.shape;
        let (mut largest, mut first) = (f64::NEG_INFINITY, 0);
        for span in &chunk.seen(window).spans {
            let query = self.query.part(1, span.start, span.len)?.f_to_kind(Kind::Float)?;
            let query = query.f_unflatten(0, [keys, queries / keys])?;
            let key = self.key.part(1, first, span.keys())?.f_to_kind(Kind::Float)?;
            let logits = query.f_matmul(&key.f_unsqueeze(1)?.f_transpose(-1, -2)?)?;
            let (shape, options) = ([span.len, span.keys()], (Kind::Bool, logits.device()));
            let all = Tensor::f_ones(shape, options)?;
            let mut hidden = all.f_triu(span.before + 1)?;
            if let Some(window) = window {
                hidden = hidden.f_logical_or(&all.f_tril(span.before - window)?)?;
            }
            let seen = logits.f_masked_fill(&hidden, f64::NEG_INFINITY)?;
            largest = larger(largest, seen.f_max()?.f_double_value(&[])? / (width as f64).sqrt());
            first += span.keys();
        }
        Ok(largest)
    }

    fn operands<'a>(&'a self, chunk: &'a Chunk) -> Attention<'a> {
        let QueriesWithKeys { query, key, value, shape } = self;
        let AttentionShape { heads: shape, window } = *shape;
        let seen = chunk.seen(window);
        let (spans, kept) = (&seen.spans, Some(&seen.attending));
        Attention { query, key, value, spans, shape, window, kept }
    }
}

/// Gradients of keys and values, for each document's part in a chunk: a tree over the chunks from its own to the last
/// that sees it, in this order. Blocks for keys of another rank are sent there.
struct KeySums<'a> {
    all: &'a Chunks<'a>,
    window: Option<i64>,
    sums: BTreeMap<KeyPart, TreeNodes<Vec<Tensor>>>,
}

/// A block of such a tree: its keys, its first leaf, its level, the sums for keys and values.
type Block = (KeyPart, u64, u32, Vec<Tensor>);

impl<'a> KeySums<'a> {
    fn new(all: &'a Chunks<'a>, window: Option<i64>) -> KeySums<'a> {
        KeySums { all, window, sums: BTreeMap::new() }
    }

    /// Adds the gradients from a local chunk's queries for all keys that they see.
    fn add(&mut self, number: u64, chunk: &Chunk, key: &Tensor, value: &Tensor) -> Result<()> {
        let (all, dealt) = (self.all, self.all.shared());
        for VisibleKeys { key: first, of, len } in chunk.seen(self.window).pieces.iter().copied() {
            let key = key.part(1, first, len)?.f_contiguous()?;
            let value = value.part(0, first, len)?.f_contiguous()?;
            let runs = || TreeNodes::new(&dealt.runs(all.seen_by(self.window, of), dealt.place));
            self.sums.entry(of).or_insert_with(runs).push(number - of.chunk, vec![key, value])?;
        }
        Ok(())
    }

    /// Writes the sums of the local keys to their rows.
    fn finish(mut self, key: &Tensor, value: &Tensor) -> Result<()> {
        let dealt = self.all.shared();
        let of_row = [key.extent(0), key.extent(2), value.extent(1)];
        let mut give: Vec<Vec<Tensor>> = (0..dealt.degree).map(|_| Vec::new()).collect();
        let mut sums = Vec::new();
        for (part, mut sum) in std::mem::take(&mut self.sums) {
            let to = dealt.place_of(part.chunk);
            for (level, first) in self.levels(part, dealt.place) {
                let block = sum.take(first).ok_or_else(missing)?;
                if to == dealt.place {
                    sums.push((part, first, level, block));
                } else {
                    give[to as usize].extend(flat(&block)?);
                }
            }
        }
        let parts: BTreeSet<KeyPart> = sums.iter().map(|(part, ..)| *part).collect();
        sums.extend(self.others(&parts, &give, of_row)?);
        sums.sort_by_key(|(part, first, ..)| (*part, *first));
        let mut blocks = sums.into_iter().peekable();
        for part in parts {
            let mut sum = Counter::new();
            while let Some((.., level, block)) = blocks.next_if(|(of, ..)| *of == part) {
                sum.push_block(level, block)?;
            }
            let (rows, sum) = (self.rows_of(part), sum.finish()?.ok_or_else(missing)?);
            for (dim, (sum, all)) in [1, 0].into_iter().zip(sum.iter().zip([key, value])) {
                all.part(dim, rows.first, rows.len)?.f_copy_(sum)?;
            }
        }
        Ok(())
    }

    /// Sends `give`, and receives the other ranks' blocks for the local keys `parts`. `of_row` are heads, numbers, and
    /// numbers of values in a row.
    fn others(
        &self,
        parts: &BTreeSet<KeyPart>,
        give: &[Vec<Tensor>],
        [heads, width, values]: [i64; 3],
    ) -> Result<Vec<Block>> {
        let (dealt, mut found) = (self.all.shared(), Vec::new());
        let Some(line) = self.all.line() else { return Ok(found) };
        let empty = || Tensor::f_empty([0], (Kind::Float, self.all.of(0).tokens.device()));
        let give = give.iter().map(|blocks| match blocks.is_empty() {
            true => empty(),
            false => Tensor::f_cat(blocks, 0),
        });
        let give = give.collect::<std::result::Result<Vec<_>, _>>()?;
        let expected = |place| {
            let places = parts.iter().filter(move |_| place != dealt.place);
            places.flat_map(move |part| {
                self.levels(*part, place)
                    .into_iter()
                    .map(move |(level, first)| (*part, level, first))
            })
        };
        let numbers = |part| self.rows_of(part).len * (heads * width + values);
        let take = (0..dealt.degree)
            .map(|place| expected(place).map(|(part, ..)| numbers(part)).sum::<i64>());
        let take: Vec<i64> = take.collect();
        let coming = line.begin("gradients of keys and values", &give, &take, Kind::Float)?;
        for (place, flat) in (0..dealt.degree).zip(coming.wait()?) {
            let mut at = 0;
            for (part, level, first) in expected(place) {
                let len = self.rows_of(part).len;
                let key = flat.part(0, at, heads * len * width)?.f_view([heads, len, width])?;
                at += heads * len * width;
                let value = flat.part(0, at, len * values)?.f_view([len, values])?;
                at += len * values;
                found.push((part, first, level, vec![key, value]));
            }
        }
        Ok(found)
    }

    fn rows_of(&self, part: KeyPart) -> Rows {
        self.all.rows_of(self.window, part)
    }

    /// The blocks that `place` has of the sum of a part's keys: level and first leaf.
    fn levels(&self, part: KeyPart, place: u64) -> Vec<(u32, u64)> {
        let runs = self.all.shared().runs(self.all.seen_by(self.window, part), place);
        runs.into_iter().flat_map(|run| blocks(run.start, run.end)).collect()
    }
}

fn flat(block: &[Tensor]) -> Result<Vec<Tensor>> {
    let flat = block.iter().map(|part| part.f_reshape([-1]));
    Ok(flat.collect::<std::result::Result<_, _>>()?)
}

fn missing() -> kernels::Error {
    kernels::Error::Foreign {
        call: "add gradients of keys",
        reason: "a chunk of a sum is missing".to_owned(),
    }
}

/// The largest logit of all shards of heads.
pub(super) fn largest_of<'a>(
    pass: &Pass<'_>,
    shards: impl Iterator<Item = &'a SavedSoftmax>,
) -> contract::Result<Option<f64>> {
    let found = shards.map(|shard| shard.largest_logit(pass)).collect::<Result<Vec<_>>>();
    Ok(found.map_err(refused)?.into_iter().reduce(larger))
}

/// Attention that is a sum over shards, groups of key heads: what a kind does with one of them.
pub(super) trait ShardedAttention<const N: usize> {
    /// What the backward pass reads of a shard.
    type Saved;
    /// Gradients of a shard's weights, of one chunk.
    type Grads;

    /// The parameters that ranks shard.
    fn held(&self) -> [ParamId; N];

    /// A shard's term for the output, by chunk; `came` has its weights where they were received from another rank,
    /// which are not saved.
    fn shard_forward(
        &self,
        pass: &Pass<'_>,
        number: i64,
        came: Option<[Tensor; N]>,
        x: &[Tensor],
    ) -> Result<(Vec<Tensor>, Self::Saved)>;

    /// From the gradient of the output, by chunk: a shard's term for the normed residual, and for its weights.
    fn shard_backward(
        &self,
        pass: &Pass<'_>,
        number: i64,
        came: Option<[Tensor; N]>,
        saved: Self::Saved,
        grad: &[Tensor],
    ) -> Result<(Vec<Tensor>, Vec<Self::Grads>)>;
}

/// Attention over the normed residual of each chunk, and what each shard saves.
pub(super) fn over_shards<A: ShardedAttention<N>, const N: usize>(
    attention: &A,
    pass: &Pass<'_>,
    x: &[Tensor],
) -> Result<(Vec<Tensor>, Vec<A::Saved>)> {
    let (mut outs, mut saved) = (Counter::new(), Vec::new());
    let mut coming = Shards::new(pass, attention.held(), shards(pass))?;
    for number in 0..shards(pass) {
        let (out, of_shard) = attention.shard_forward(pass, number, coming.next()?, x)?;
        outs.push(out)?;
        saved.push(of_shard);
    }
    Ok((in_kind(outs, pass.kind)?, saved))
}

/// One value of each shard of each chunk.
pub(super) type ByChunkAndShard<T> = Vec<Vec<T>>;

/// From the gradient of the output: that of the normed residual by chunk, and those of the weights by chunk and shard.
pub(super) fn back_over_shards<A: ShardedAttention<N>, const N: usize>(
    attention: &A,
    pass: &Pass<'_>,
    saved: Vec<A::Saved>,
    grad: &[Tensor],
) -> Result<(Vec<Tensor>, ByChunkAndShard<A::Grads>)> {
    let (mut inputs, mut gradients) = (Counter::new(), Vec::new());
    grad.iter().for_each(|_| gradients.push(Vec::new()));
    let mut coming = Shards::new(pass, attention.held(), shards(pass))?;
    for (number, saved) in (0..).zip(saved) {
        let came = coming.next()?;
        let (input, of_shard) = attention.shard_backward(pass, number, came, saved, grad)?;
        inputs.push(input)?;
        gradients.iter_mut().zip(of_shard).for_each(|(chunk, one)| chunk.push(one));
    }
    Ok((in_kind(inputs, pass.kind)?, gradients))
}

/// The sum over shards, by chunk, in this kind: a tree in the order of shards.
fn in_kind(shards: Counter<Vec<Tensor>>, kind: Kind) -> Result<Vec<Tensor>> {
    let sum = shards.total()?.into_iter().map(|chunk| chunk.f_to_kind(kind));
    Ok(sum.collect::<std::result::Result<_, _>>()?)
}
