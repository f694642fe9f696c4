//! Compressed convolutional attention, backward: from the gradient of a shard's output to its input and weights.
//!
//! Gradients of keys and values are summed over the chunks that see them. Gradients of rows that adjacent chunks read
//! are computed where the rows are, from those chunks' gradients.

use std::collections::{BTreeMap, BTreeSet};

use kernels::Result;
use kernels::ops::AttentionGrads;
use kernels::tree::{Counter, TreeNodes, blocks};
use tch::{Kind, Tensor};

use super::cca::{QueriesWithKeys, Saved};
use super::heads::HeadsGrads;
use crate::model::cut::{Chunk, Chunks, KeyPart, VisibleKeys, joined};
use crate::model::layer::Pass;
use crate::model::line::PendingTable;

/// Gradients from the backward pass of attention, by chunk.
struct AttentionBack {
    /// `[G, n, d]`, f32: of queries and keys.
    qk: Vec<Tensor>,
    /// `[N, K d]`: of values, chunk after chunk.
    value: Tensor,
    o_proj: Vec<Tensor>,
}

impl Saved {
    /// From the gradient of the output, by chunk: this shard's term for the normed residual, and for its weights.
    pub(super) fn backward(
        mut self,
        pass: &Pass<'_>,
        grad: &[Tensor],
    ) -> Result<(Vec<Tensor>, Vec<HeadsGrads>)> {
        let ops = pass.ops;
        let AttentionBack { qk, value, o_proj } = self.attention(pass, grad)?;
        let (mut taps, mut turned) = (Vec::new(), Vec::new());
        for ((chunk, saved), qk) in pass.chunks.iter().zip(&self.chunks).zip(qk) {
            let turned_heads = self.heads.turned(chunk);
            let (raw, factor) = (&saved.raw, &saved.factor);
            let back = ops.query_key_backward(raw, factor, turned_heads, qk, pass.kind)?;
            let grouped = pass.gradient(&back.raw.f_transpose(1, 2)?, &saved.taps)?;
            taps.push(ops.matmul(&back.raw, &self.heads.kernel)?);
            let grouped = grouped.f_view([-1, pass.config.head_dim, 2])?;
            turned.push((back.means, grouped, back.bias, back.temperature));
        }
        let (taps, value) =
            (pass.chunks.beside(&joined(&taps, 1)?, 1)?, pass.chunks.beside(&value, 0)?);
        let (taps, value) = (taps.wait()?, value.wait()?);
        let (mut inputs, mut gradients) = (Vec::new(), Vec::new());
        for (number, (of_chunk, o_proj)) in turned.into_iter().zip(o_proj).enumerate() {
            let (means, grouped, grouped_bias, temp) = of_chunk;
            let (chunk, x) = (pass.chunks.of(number), &self.chunks[number].x);
            let around = chunk.around(&self.projected, 0)?;
            let grads = [chunk.around(&taps, 1)?, chunk.around(&value, 0)?];
            let by = self.heads.convolution(chunk);
            let conv = ops.conv_shift_backward(&around, by, grads.each_ref(), &means)?;
            let projected = chunk.own(&conv.input, 0)?;
            let input = pass.of_shard(&projected, &self.heads.proj)?;
            gradients.push(HeadsGrads {
                proj: pass.gradient(&projected.f_tr()?, x)?,
                values: self.heads.values,
                depthwise: conv.weights,
                depthwise_bias: conv.bias,
                grouped,
                grouped_bias,
                temp,
                o_proj,
            });
            inputs.push(input);
        }
        Ok((inputs, gradients))
    }

    /// Gradients of queries, keys and values: those of a key are summed over the chunks that see it.
    fn attention(&mut self, pass: &Pass<'_>, grad: &[Tensor]) -> Result<AttentionBack> {
        let (ops, [queries, keys, _]) = (pass.ops, self.heads.shape);
        let alone = pass.chunks.count() == 1;
        let float = (Kind::Float, self.value.device());
        // Terms of sums stay f32.
        let value = match alone {
            true => self.value.f_empty_like()?,
            false => Tensor::f_empty(self.value.size(), float)?,
        };
        let seen = [pass.chunks.earlier(&self.key, 1)?, pass.chunks.earlier(&self.value, 0)?];
        let [keys_seen, values_seen] = seen.map(PendingTable::wait);
        let (keys_seen, values_seen) = (keys_seen?, values_seen?);
        let (mut sums, mut o_proj, mut back) = (KeySums::default(), Vec::new(), Vec::new());
        let chunks = pass.chunks.shared().own();
        for (at, (saved, grad)) in self.chunks.iter_mut().zip(grad).enumerate() {
            let chunk = pass.chunks.of(at);
            o_proj.push(pass.gradient(&grad.f_tr()?, &saved.attended.heads)?);
            let heads = ops.matmul(grad, &self.heads.o_proj)?;
            let seen =
                QueriesWithKeys::of(chunk, &saved.qk, &keys_seen, &values_seen, self.heads.shape)?;
            let qk = Tensor::f_empty(saved.qk.size(), float)?;
            let [query, key] = [qk.f_narrow(0, 0, queries)?, qk.f_narrow(0, queries, keys)?];
            let kept = std::mem::take(&mut saved.attended.saved);
            let by = seen.operands(chunk);
            if alone {
                let out = AttentionGrads { query: &query, key: &key, value: &value };
                ops.attention_backward(by, kept, &heads, out)?;
            } else {
                let part = |of: &Tensor| Tensor::f_empty(of.size(), float);
                let [key, value] = [part(&seen.key)?, part(&seen.value)?];
                let out = AttentionGrads { query: &query, key: &key, value: &value };
                ops.attention_backward(by, kept, &heads, out)?;
                sums.add(pass.chunks, chunks[at], chunk, &key, &value)?;
            }
            back.push(qk);
        }
        if !alone {
            let key = Tensor::f_empty(self.key.size(), float)?;
            sums.finish(pass.chunks, &key, &value)?;
            let mut first = 0;
            for qk in &back {
                let tokens = qk.size()[1];
                qk.f_narrow(0, queries, keys)?.f_copy_(&key.f_narrow(1, first, tokens)?)?;
                first += tokens;
            }
        }
        Ok(AttentionBack { qk: back, value: value.f_to_kind(pass.kind)?, o_proj })
    }
}

/// Gradients of keys and values, for each document's part in a chunk: a tree over the chunks from its own to the last
/// that sees it, in this order. Blocks for keys of another rank are sent there.
#[derive(Default)]
struct KeySums(BTreeMap<KeyPart, TreeNodes<Vec<Tensor>>>);

/// A block of such a tree: its keys, its first leaf, its level, the sums for keys and values.
type Block = (KeyPart, u64, u32, Vec<Tensor>);

impl KeySums {
    /// Adds the gradients from a local chunk's queries for all keys that they see.
    fn add(
        &mut self,
        all: &Chunks<'_>,
        number: u64,
        chunk: &Chunk,
        key: &Tensor,
        value: &Tensor,
    ) -> Result<()> {
        let dealt = all.shared();
        for VisibleKeys { key: first, of, len } in chunk.pieces().iter().copied() {
            let key = key.f_narrow(1, first, len)?.f_contiguous()?;
            let value = value.f_narrow(0, first, len)?.f_contiguous()?;
            let runs = || TreeNodes::new(&dealt.runs(all.seen_by(of), dealt.place));
            self.0.entry(of).or_insert_with(runs).push(number - of.chunk, vec![key, value])?;
        }
        Ok(())
    }

    /// Writes the sums of the local keys to their rows.
    fn finish(self, all: &Chunks<'_>, key: &Tensor, value: &Tensor) -> Result<()> {
        let (dealt, of_row) = (all.shared(), [key.size()[0], key.size()[2], value.size()[1]]);
        let mut give: Vec<Vec<Tensor>> = (0..dealt.degree).map(|_| Vec::new()).collect();
        let mut sums = Vec::new();
        for (part, mut sum) in self.0 {
            let to = dealt.place_of(part.chunk);
            for (level, first) in levels(all, part, dealt.place) {
                let block = sum.take(first).ok_or_else(missing)?;
                if to == dealt.place {
                    sums.push((part, first, level, block));
                } else {
                    give[to as usize].extend(flat(&block)?);
                }
            }
        }
        let parts: BTreeSet<KeyPart> = sums.iter().map(|(part, ..)| *part).collect();
        sums.extend(KeySums::others(all, &parts, &give, of_row)?);
        sums.sort_by_key(|(part, first, ..)| (*part, *first));
        let mut blocks = sums.into_iter().peekable();
        for part in parts {
            let mut sum = Counter::new();
            while let Some((.., level, block)) = blocks.next_if(|(of, ..)| *of == part) {
                sum.push_block(level, block)?;
            }
            let (rows, sum) = (all.rows_of(part), sum.finish()?.ok_or_else(missing)?);
            for (dim, (sum, all)) in [1, 0].into_iter().zip(sum.iter().zip([key, value])) {
                all.f_narrow(dim, rows.first, rows.len)?.f_copy_(sum)?;
            }
        }
        Ok(())
    }

    /// Sends `give`, and receives the other ranks' blocks for the local keys `parts`. `of_row` are heads, numbers, and
    /// numbers of values in a row.
    fn others(
        all: &Chunks<'_>,
        parts: &BTreeSet<KeyPart>,
        give: &[Vec<Tensor>],
        [heads, width, values]: [i64; 3],
    ) -> Result<Vec<Block>> {
        let (dealt, mut found) = (all.shared(), Vec::new());
        let Some(line) = all.line() else { return Ok(found) };
        let empty = || Tensor::f_empty([0], (Kind::Float, all.of(0).tokens.device()));
        let give = give.iter().map(|blocks| match blocks.is_empty() {
            true => empty(),
            false => Tensor::f_cat(blocks, 0),
        });
        let give = give.collect::<std::result::Result<Vec<_>, _>>()?;
        let expected = |place| {
            let places = parts.iter().filter(move |_| place != dealt.place);
            places.flat_map(move |part| {
                levels(all, *part, place)
                    .into_iter()
                    .map(move |(level, first)| (*part, level, first))
            })
        };
        let numbers = |part| all.rows_of(part).len * (heads * width + values);
        let take = (0..dealt.degree)
            .map(|place| expected(place).map(|(part, ..)| numbers(part)).sum::<i64>());
        let take: Vec<i64> = take.collect();
        let coming = line.begin("gradients of keys and values", &give, &take, Kind::Float)?;
        for (place, flat) in (0..dealt.degree).zip(coming.wait()?) {
            let mut at = 0;
            for (part, level, first) in expected(place) {
                let len = all.rows_of(part).len;
                let key = flat.f_narrow(0, at, heads * len * width)?.f_view([heads, len, width])?;
                at += heads * len * width;
                let value = flat.f_narrow(0, at, len * values)?.f_view([len, values])?;
                at += len * values;
                found.push((part, first, level, vec![key, value]));
            }
        }
        Ok(found)
    }
}

/// The blocks that `place` has of the sum of a part's keys: level and first leaf.
fn levels(all: &Chunks<'_>, part: KeyPart, place: u64) -> Vec<(u32, u64)> {
    let runs = all.shared().runs(all.seen_by(part), place);
    runs.into_iter().flat_map(|run| blocks(run.start, run.end)).collect()
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
