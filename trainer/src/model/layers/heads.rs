//! The weights of attention as a shard of its heads reads them, and gradients of shards put together again.
//!
//! A shard is a group of key heads, whole with their query heads, means, convolutions and temperatures. One shard reads the
//! weights as they are.

use std::ops::Range;

use kernels::Result;
use tch::Tensor;

use super::cca::Cca;
use crate::model::ZayaConfig;
use crate::model::cut::Cut;
use crate::model::fold::share;
use crate::model::layer::Pass;

/// Heads of attention that are computed together.
pub(super) struct Heads {
    /// `[C', D]`: query and key projections, one below the other.
    pub(super) qk_proj: Tensor,
    /// `[a, D]` and `[b, D]`, `a + b = K' d`: of a shard, either may have no rows.
    pub(super) v_proj: [Tensor; 2],
    /// `[C', 1, 2]`.
    pub(super) depthwise: Tensor,
    /// `[C']`.
    pub(super) depthwise_bias: Tensor,
    /// `[G', d, 2 d]`: the second convolution, as one matrix per head over both taps.
    pub(super) kernel: Tensor,
    /// `[C']`.
    pub(super) grouped_bias: Tensor,
    /// `[K']`.
    pub(super) temp: Tensor,
    /// `[D, H' d]`.
    pub(super) o_proj: Tensor,
    /// `[H', K', d]`.
    pub(super) shape: [i64; 3],
}

/// Gradients of the same, of one chunk; the second convolution as it is stored.
pub(super) struct HeadsGrads {
    pub(super) qk_proj: Tensor,
    pub(super) v_proj: [Tensor; 2],
    pub(super) depthwise: Tensor,
    pub(super) depthwise_bias: Tensor,
    pub(super) grouped: Tensor,
    pub(super) grouped_bias: Tensor,
    pub(super) temp: Tensor,
    pub(super) o_proj: Tensor,
}

/// Shards of attention: no more than key heads.
pub(super) fn shards(pass: &Pass<'_>) -> i64 {
    pass.shards.min(pass.config.num_key_value_heads)
}

impl Heads {
    /// Shard number `shard`; of the projections what came from another process, where they are not whole.
    pub(super) fn of(
        layer: &Cca,
        pass: &Pass<'_>,
        shard: i64,
        came: Option<[Tensor; 5]>,
    ) -> Result<Heads> {
        let (w, config) = (pass.weights, pass.config);
        let (keys, dim, group) = (config.num_key_value_heads, config.head_dim, config.group());
        let own = share(keys, shards(pass), shard);
        let query = own.start * group * dim..own.end * group * dim;
        let key = own.start * dim..own.end * dim;
        let channels =
            [query.clone(), config.query_size() + key.start..config.query_size() + key.end];
        let channels = |weight: &Tensor| rows(weight, &channels);
        let half = config.key_size() / 2;
        let current = key.start.min(half)..key.end.min(half);
        let delayed = key.start.max(half) - half..key.end.max(half) - half;
        let [q_proj, k_proj, current, delayed, o_proj] = match came {
            Some(came) => came,
            None => [
                rows(&w[layer.q_proj], std::slice::from_ref(&query))?,
                rows(&w[layer.k_proj], &[key])?,
                rows(&w[layer.v_proj_current], &[current])?,
                rows(&w[layer.v_proj_delayed], &[delayed])?,
                columns(&w[layer.o_proj], query)?,
            ],
        };
        let by_tap = channels(&w[layer.conv_grouped])?.f_view([-1, dim, dim, 2])?;
        Ok(Heads {
            qk_proj: Tensor::f_cat(&[q_proj, k_proj], 0)?,
            v_proj: [current, delayed],
            depthwise: channels(&w[layer.conv_depthwise])?,
            depthwise_bias: channels(&w[layer.conv_depthwise_bias])?,
            kernel: by_tap.f_permute([0, 1, 3, 2])?.f_reshape([-1, dim, 2 * dim])?,
            grouped_bias: channels(&w[layer.conv_grouped_bias])?,
            temp: rows(&w[layer.temp], std::slice::from_ref(&own))?,
            o_proj,
            shape: [(own.end - own.start) * group, own.end - own.start, dim],
        })
    }
}

impl Heads {
    /// Lets go of what came from another process: it comes again for the way back.
    pub(super) fn let_go(&mut self) {
        self.qk_proj = Tensor::new();
        self.v_proj = [Tensor::new(), Tensor::new()];
        self.o_proj = Tensor::new();
    }
}

impl HeadsGrads {
    /// The gradients of all heads from those of each shard.
    pub(super) fn joined(config: &ZayaConfig, shards: &[HeadsGrads]) -> Result<[Tensor; 10]> {
        let query = config.num_attention_heads / config.num_key_value_heads;
        // Of a shard's channels, those of queries come first: as many for each of keys as there are query heads to a key head.
        let side = |of: &Tensor, keys: bool| {
            let all = of.size()[0];
            let queries = all / (query + 1) * query;
            match keys {
                false => of.f_narrow(0, 0, queries),
                true => of.f_narrow(0, queries, all - queries),
            }
        };
        let sides = |of: &dyn Fn(&HeadsGrads) -> &Tensor, keys: bool| {
            let parts = shards.iter().map(|shard| side(of(shard), keys));
            together(&parts.collect::<std::result::Result<Vec<_>, _>>()?, 0)
        };
        let channels = |of: &dyn Fn(&HeadsGrads) -> &Tensor| match shards {
            [whole] => Result::Ok(of(whole).shallow_clone()),
            _ => Ok(Tensor::f_cat(&[sides(of, false)?, sides(of, true)?], 0)?),
        };
        let all = |of: &dyn Fn(&HeadsGrads) -> &Tensor, dim| {
            let parts: Vec<_> = shards.iter().map(|shard| of(shard).shallow_clone()).collect();
            together(&parts, dim)
        };
        Ok([
            sides(&|own| &own.qk_proj, false)?,
            sides(&|own| &own.qk_proj, true)?,
            all(&|own| &own.v_proj[0], 0)?,
            all(&|own| &own.v_proj[1], 0)?,
            channels(&|own| &own.depthwise)?,
            channels(&|own| &own.depthwise_bias)?,
            channels(&|own| &own.grouped)?,
            channels(&|own| &own.grouped_bias)?,
            all(&|own| &own.temp, 0)?,
            all(&|own| &own.o_proj, 1)?,
        ])
    }
}

/// Some rows, one range below the other, in memory of their own unless they are all.
fn rows(weight: &Tensor, ranges: &[Range<i64>]) -> Result<Tensor> {
    let count: i64 = ranges.iter().map(|range| range.end - range.start).sum();
    if count == weight.size()[0] {
        return Ok(weight.shallow_clone());
    }
    let parts = ranges.iter().map(|range| weight.f_narrow(0, range.start, range.end - range.start));
    Ok(Tensor::f_cat(&parts.collect::<std::result::Result<Vec<_>, _>>()?, 0)?)
}

/// Some columns, side by side in memory: a product's bits may depend on where its rows lie.
pub(super) fn columns(weight: &Tensor, range: Range<i64>) -> Result<Tensor> {
    Ok(weight.f_narrow(1, range.start, range.end - range.start)?.f_contiguous()?)
}

/// What shards have, one beside the other along `dim`.
pub(super) fn together(parts: &[Tensor], dim: i64) -> Result<Tensor> {
    match parts {
        [whole] => Ok(whole.shallow_clone()),
        parts => Ok(Tensor::f_cat(parts, dim)?),
    }
}

/// Bytes of the weights that attention copies for a micro-batch, in each layer: queries' and keys' projections one below the
/// other, the second convolution turned; of several shards all of its weights, and those of a shard of the experts.
pub(in crate::model) fn weight_copies(config: &ZayaConfig, narrow: u64, cut: Cut) -> u64 {
    let size = |size: i64| size as u64;
    let (width, conv, dim) =
        (size(config.hidden_size), size(config.conv_size()), size(config.head_dim));
    let copied = narrow * (conv * width + 2 * conv * dim);
    if cut.shards == 1 {
        return copied;
    }
    let others = narrow * width * size(config.key_size() + config.query_size());
    let inner = 3 * width * size(config.moe_intermediate_size * config.num_experts);
    copied + others + narrow * inner / cut.shards
}
