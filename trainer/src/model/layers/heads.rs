//! The weights of attention as a shard of its heads reads them, and the joining of the shards' gradients.
//!
//! A shard is a group of key heads with their query heads, means, convolutions and temperatures. A single shard reads
//! the weights in place.

use std::ops::Range;

use kernels::Result;
use kernels::layout::Parts as _;
use kernels::ops::{OpsTable, ParamGradient};
use tch::Tensor;

use crate::model::ZayaConfig;
use crate::model::cut::joined;
use crate::model::layer::Pass;

/// Heads of attention that are computed together.
pub(super) struct Heads {
    /// `[C' + K' d, D]`: projections of queries, keys, and both halves of values, one below the other.
    pub(super) proj: Tensor,
    /// How many of its rows belong to each half of the values: a shard may have none of one half.
    pub(super) values: [i64; 2],
    /// `[C', 1, 2]`.
    pub(super) depthwise: Tensor,
    /// `[C']`.
    pub(super) depthwise_bias: Tensor,
    /// `[G', d, 2 d]`: the second convolution, as one matrix per head over both taps of each channel.
    pub(super) kernel: Tensor,
    /// `[C']`.
    pub(super) grouped_bias: Tensor,
    /// `[K']`.
    pub(super) temp: Tensor,
    /// `[D, H' d]`.
    pub(super) o_proj: Tensor,
    /// `[H', K', d]`.
    pub(super) shape: [i64; 3],
    /// How many keys a query sees; `None`: all earlier ones.
    pub(super) window: Option<i64>,
}

/// Gradients of these weights, of one chunk; the second convolution as it is stored.
pub(super) struct HeadsGrads {
    pub(super) proj: Tensor,
    pub(super) values: [i64; 2],
    pub(super) depthwise: ParamGradient,
    pub(super) depthwise_bias: ParamGradient,
    pub(super) grouped: Tensor,
    pub(super) grouped_bias: ParamGradient,
    pub(super) temp: ParamGradient,
    pub(super) o_proj: Tensor,
}

/// Gradients of all heads, of one chunk.
pub(super) struct CcaGrads {
    /// Of the projections of queries and keys, and of both halves of values.
    pub(super) projections: [Tensor; 4],
    /// Of the depthwise convolution and its bias, the bias of the grouped one, temperatures.
    pub(super) vectors: [ParamGradient; 4],
    pub(super) grouped: Tensor,
    pub(super) o_proj: Tensor,
}

/// The number of shards of attention: at most one for each key head.
pub(super) fn shards(pass: &Pass<'_>) -> i64 {
    pass.shards.min(pass.config.num_key_value_heads)
}

impl Heads {
    /// Frees weights received from another rank: they are fetched again for the backward pass.
    pub(super) fn reshard(&mut self) {
        self.proj = Tensor::new();
        self.o_proj = Tensor::new();
    }
}

impl HeadsGrads {
    /// The gradients of all heads from those of each shard.
    pub(super) fn joined(
        config: &ZayaConfig,
        ops: OpsTable,
        mut shards: Vec<HeadsGrads>,
    ) -> Result<CcaGrads> {
        let query = config.num_attention_heads / config.num_key_value_heads;
        let vectors = match &mut shards[..] {
            [whole] => whole.vectors(),
            several => {
                let made = several.iter_mut().map(|shard| ops.finish(shard.vectors().into()));
                let made = made.collect::<Result<Vec<_>>>()?;
                let all = |which: usize| made.iter().map(move |shard| shard[which].shallow_clone());
                let channels = |which| channels(&all(which).collect::<Vec<_>>(), query);
                let temp = Tensor::f_cat(&all(3).collect::<Vec<_>>(), 0)?;
                [channels(0)?, channels(1)?, channels(2)?, temp].map(ParamGradient::Made)
            }
        };
        let rows = |which| {
            let parts = shards.iter().map(|shard| {
                let [current, delayed] = shard.values;
                let [queries, keys] = split(shard.proj.extent(0) - current - delayed, query);
                let rows = [queries, keys, current, delayed];
                shard.proj.part(0, rows[..which].iter().sum(), rows[which])
            });
            joined(&parts.collect::<std::result::Result<Vec<_>, _>>()?, 0)
        };
        let all = |of: fn(&HeadsGrads) -> &Tensor| {
            shards.iter().map(|shard| of(shard).shallow_clone()).collect::<Vec<_>>()
        };
        Ok(CcaGrads {
            projections: [rows(0)?, rows(1)?, rows(2)?, rows(3)?],
            vectors,
            grouped: channels(&all(|own| &own.grouped), query)?,
            o_proj: joined(&all(|own| &own.o_proj), 1)?,
        })
    }

    /// The depthwise convolution with its bias, the bias of the grouped one, temperatures.
    fn vectors(&mut self) -> [ParamGradient; 4] {
        let HeadsGrads { depthwise, depthwise_bias, grouped_bias, temp, .. } = self;
        [depthwise, depthwise_bias, grouped_bias, temp]
            .map(|sum| std::mem::replace(sum, ParamGradient::Made(Tensor::new())))
    }
}

/// Splits a shard's channels, or their count, into those of queries and keys. Queries come first, `query` times as
/// many, one for each query head of a key head.
fn split(channels: i64, query: i64) -> [i64; 2] {
    let queries = channels / (query + 1) * query;
    [queries, channels - queries]
}

/// Joins the channels of shards: all queries, then all keys.
fn channels(parts: &[Tensor], query: i64) -> Result<Tensor> {
    if let [whole] = parts {
        return Ok(whole.shallow_clone());
    }
    let side = |keys: bool| {
        parts.iter().map(move |part| {
            let [queries, others] = split(part.extent(0), query);
            match keys {
                false => part.part(0, 0, queries),
                true => part.part(0, queries, others),
            }
        })
    };
    let sides = side(false).chain(side(true)).collect::<std::result::Result<Vec<_>, _>>()?;
    Ok(Tensor::f_cat(&sides, 0)?)
}

/// Stacks matrices: an alias where they are adjacent in memory, as one layer's projections are.
pub(super) fn below(parts: &[Tensor]) -> Result<Tensor> {
    let bytes = |part: &Tensor| part.numel() * part.kind().elt_size_in_bytes();
    let follows = |pair: &[&Tensor]| {
        pair.iter().all(|part| part.is_contiguous())
            && pair[0].data_ptr() as usize + bytes(pair[0]) == pair[1].data_ptr() as usize
    };
    // A part without rows has no address.
    let filled: Vec<&Tensor> = parts.iter().filter(|part| part.numel() > 0).collect();
    if let (true, [first, ..]) = (filled.windows(2).all(follows), &filled[..]) {
        let rows: i64 = parts.iter().map(|part| part.extent(0)).sum();
        let width = first.extent(1);
        // Refused where the first one's storage ends earlier: then they are adjacent by chance.
        if let Ok(all) = first.f_as_strided([rows, width], [width, 1], None) {
            return Ok(all);
        }
    }
    Ok(Tensor::f_cat(parts, 0)?)
}

/// Some ranges of rows, stacked: copied unless they are all rows.
pub(super) fn rows(weight: &Tensor, ranges: &[Range<i64>]) -> Result<Tensor> {
    let count: i64 = ranges.iter().map(|range| range.end - range.start).sum();
    if count == weight.extent(0) {
        return Ok(weight.shallow_clone());
    }
    let parts = ranges.iter().map(|range| weight.part(0, range.start, range.end - range.start));
    Ok(Tensor::f_cat(&parts.collect::<std::result::Result<Vec<_>, _>>()?, 0)?)
}

/// Some columns, contiguous: a matmul's bits may depend on the layout of its rows.
pub(super) fn columns(weight: &Tensor, range: Range<i64>) -> Result<Tensor> {
    Ok(weight.part(1, range.start, range.end - range.start)?.f_contiguous()?)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    /// Neighbours in one allocation are read in place; others, even if adjacent, are copied.
    #[test]
    fn neighbours_are_one_matrix() {
        let all = Tensor::arange(24, (Kind::Float, Device::Cpu));
        let part = |first: i64, rows: i64| all.narrow(0, 3 * first, 3 * rows).view([rows, 3]);
        let parts = [part(1, 2), part(3, 1), part(4, 0), part(4, 3)];
        let whole = below(&parts).unwrap();
        assert_eq!(whole.data_ptr(), parts[0].data_ptr());
        assert_eq!(whole, part(1, 6));
        let apart = [part(1, 2), part(3, 1).copy(), part(4, 0), part(4, 3)];
        let copied = below(&apart).unwrap();
        assert!(copied.data_ptr() != apart[0].data_ptr() && copied == whole);
        let turned = [part(3, 1), part(1, 2), part(4, 0), part(4, 3)];
        assert_eq!(below(&turned).unwrap(), Tensor::cat(&turned, 0));
    }
}
