//! Parameters by the place where they are used, from the canonical list.

use tch::Tensor;

use super::ZayaConfig;
use super::attention::Attention;
use super::experts::Experts;
use super::norm::{Residual, RmsNorm};
use super::params::{HEAD_PARAMS, LAYER_PARAMS};
use super::router::Router;

/// Parameters outside the layers.
pub(super) struct Outer<'a> {
    pub(super) embedding: &'a Tensor,
    pub(super) input_scale: &'a Tensor,
    pub(super) input_bias: &'a Tensor,
    pub(super) norm: RmsNorm<'a>,
}

/// Parameters of one layer.
pub(super) struct Layer<'a> {
    pub(super) attention_norm: RmsNorm<'a>,
    pub(super) attention: Attention<'a>,
    pub(super) attention_residual: Residual<'a>,
    pub(super) mlp_norm: RmsNorm<'a>,
    pub(super) router: Router<'a>,
    pub(super) experts: Experts<'a>,
    pub(super) mlp_residual: Residual<'a>,
}

/// Reads the canonical list; a test compares its order with [`super::parameters`].
pub(super) fn split<'a>(config: &ZayaConfig, params: &'a [Tensor]) -> (Outer<'a>, Vec<Layer<'a>>) {
    let layers = config.num_hidden_layers as usize;
    assert_eq!(params.len(), HEAD_PARAMS + layers * LAYER_PARAMS, "one tensor per parameter");
    let mut next = params.iter();
    let mut take = || next.next().expect("the length was checked");
    let (embedding, input_scale, input_bias) = (take(), take(), take());
    let layers = (0..layers).map(|layer| read_layer(config, layer, &mut take)).collect();
    let norm = RmsNorm { weight: take(), eps: config.rms_norm_eps };
    (Outer { embedding, input_scale, input_bias, norm }, layers)
}

fn read_layer<'a>(
    config: &ZayaConfig,
    layer: usize,
    take: &mut impl FnMut() -> &'a Tensor,
) -> Layer<'a> {
    let eps = config.rms_norm_eps;
    Layer {
        attention_norm: RmsNorm { weight: take(), eps },
        attention: Attention {
            wq: take(),
            wk: take(),
            v_current: take(),
            v_delayed: take(),
            w0: take(),
            b0: take(),
            w1: take(),
            b1: take(),
            temp: take(),
            wo: take(),
        },
        attention_residual: read_residual(take),
        mlp_norm: RmsNorm { weight: take(), eps },
        router: Router {
            down: take(),
            down_bias: take(),
            decay: (layer > 0).then(&mut *take),
            norm: RmsNorm { weight: take(), eps },
            fc1: take(),
            fc1_bias: take(),
            fc2: take(),
            fc2_bias: take(),
            out: take(),
        },
        experts: Experts { gate_up: take(), down: take(), skip: config.skip },
        mlp_residual: read_residual(take),
    }
}

fn read_residual<'a>(take: &mut impl FnMut() -> &'a Tensor) -> Residual<'a> {
    Residual {
        hidden_scale: take(),
        hidden_bias: take(),
        residual_scale: take(),
        residual_bias: take(),
    }
}
