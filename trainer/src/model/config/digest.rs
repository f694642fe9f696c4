//! What a digest reads of a configuration.

use contract::{Digestible, Hasher};

use super::{Decay, ZayaConfig};
use crate::model::kinds::{
    Attention, BalanceKind, FeedForward, LayerType, LogitsDtype, ResidualKind, RouterKind,
};

impl Digestible for ZayaConfig {
    fn feed(&self, hasher: &mut Hasher) {
        let Self {
            vocab_size,
            hidden_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            moe_intermediate_size,
            num_experts,
            num_experts_per_tok,
            router_hidden_size,
            cca_time0,
            cca_time1,
            hidden_act,
            rms_norm_eps,
            initializer_range,
            max_position_embeddings,
            rope_theta,
            partial_rotary_factor,
            tie_word_embeddings,
            attention_bias,
            lm_head_bias,
            skip,
            document_mask,
            loss_chunk,
            layers,
            sliding_window,
            layer_types,
            sliding_rope_theta,
            feed_forward,
            linear_decay,
            qk_norm,
            residual,
            router,
            norm_topk_prob,
            num_shared_experts,
            balance,
            logits_dtype,
            z_loss,
        } = self;
        hasher.tag("zaya-config.v1").str(hidden_act);
        let model = [vocab_size, hidden_size, num_hidden_layers, num_attention_heads];
        let heads = [num_key_value_heads, head_dim, moe_intermediate_size, num_experts];
        let rest = [num_experts_per_tok, router_hidden_size, cca_time0, cca_time1];
        let sizes = model.into_iter().chain(heads).chain(rest);
        sizes.chain([max_position_embeddings, loss_chunk]).for_each(|&size| {
            hasher.u64(size as u64);
        });
        let reals = [rms_norm_eps, initializer_range, rope_theta, partial_rotary_factor];
        reals.into_iter().for_each(|real| {
            hasher.u64(real.to_bits());
        });
        for flag in [tie_word_embeddings, attention_bias, lm_head_bias, document_mask] {
            hasher.u64(u64::from(*flag));
        }
        hasher.str(skip.name());
        feed_attention(layers, *linear_decay, hasher);
        feed_feed_forward(feed_forward, hasher);
        feed_baseline(*qk_norm, *residual, *router, hasher);
        feed_experts(*norm_topk_prob, *num_shared_experts, *balance, hasher);
        feed_head(*logits_dtype, *z_loss, hasher);
        feed_window(*sliding_window, layer_types, *sliding_rope_theta, hasher);
    }
}

/// Layers without a window add nothing.
fn feed_window(window: i64, layers: &[LayerType], theta: f64, hasher: &mut Hasher) {
    if window == 0 && *layers == [LayerType::Full] && theta == 0.0 {
        return;
    }
    hasher.tag("zaya-config.window.v1").u64(window as u64).u64(theta.to_bits());
    hasher.u64(layers.len() as u64);
    for layer in layers {
        hasher.str(layer.name());
    }
}

/// The head of the run's dtype without z-loss adds nothing.
fn feed_head(logits_dtype: LogitsDtype, z_loss: f64, hasher: &mut Hasher) {
    if logits_dtype != LogitsDtype::Model {
        hasher.tag("zaya-config.logits-dtype.v1").str(logits_dtype.name());
    }
    if z_loss > 0.0 {
        hasher.tag("zaya-config.z-loss.v1").u64(z_loss.to_bits());
    }
}

/// ZAYA1 itself keeps the digest that it had before other kinds of layers existed.
fn feed_attention(layers: &[Attention], decay: Decay, hasher: &mut Hasher) {
    if *layers == [Attention::Cca] && decay == Decay::Retention {
        return;
    }
    hasher.tag("zaya-config.layers.v1").u64(layers.len() as u64);
    for layer in layers {
        hasher.str(layer.name());
    }
    hasher.str(match decay {
        Decay::None => "none",
        Decay::Retention => "retention",
    });
}

/// Likewise, experts add nothing to the digest.
fn feed_feed_forward(kinds: &[FeedForward], hasher: &mut Hasher) {
    if *kinds != [FeedForward::Moe] {
        hasher.tag("zaya-config.feed-forward.v1").u64(kinds.len() as u64);
        for kind in kinds {
            hasher.str(kind.name());
        }
    }
}

/// Likewise for the other keys of baselines.
fn feed_baseline(qk_norm: bool, residual: ResidualKind, router: RouterKind, hasher: &mut Hasher) {
    if qk_norm {
        hasher.tag("zaya-config.qk-norm.v1");
    }
    if residual != ResidualKind::Scaled {
        hasher.tag("zaya-config.residual.v1").str(residual.name());
    }
    if router != RouterKind::Mlp {
        hasher.tag("zaya-config.router.v1").str(router.name());
    }
}

/// Likewise for experts that ZAYA1 does not have.
fn feed_experts(normalized: bool, shared: i64, balance: BalanceKind, hasher: &mut Hasher) {
    if normalized {
        hasher.tag("zaya-config.norm-topk-prob.v1");
    }
    if shared > 0 {
        hasher.tag("zaya-config.shared-experts.v1").u64(shared as u64);
    }
    if balance != BalanceKind::Bias {
        hasher.tag("zaya-config.balance.v1").str(balance.name());
    }
}
