//! Parameters, balancing biases and their initial values.

use tch::Tensor;

use super::kinds::{BalanceKind, FeedForward};
use super::param::{ParamSpec, initial};
use super::zaya::Zaya;
use super::{SkipOutput, ZayaConfig};

/// Every parameter in canonical order.
pub fn parameters(config: &ZayaConfig) -> Vec<ParamSpec> {
    Zaya::new(config).params
}

/// Classes by which each layer counts its tokens: its experts, and last those without one, even where no router skips;
/// 0 without a router.
pub fn router_classes(config: &ZayaConfig) -> Vec<usize> {
    let classes = |kind| if kind == FeedForward::Moe { config.num_experts as usize + 1 } else { 0 };
    config.kinds().map(|(_, kind)| classes(kind)).collect()
}

/// Balancing biases of each layer: one for each class of its router; 0 without a router, and where nothing balances it.
pub(crate) fn balance_sizes(config: &ZayaConfig) -> Vec<usize> {
    let biases = match config.balance {
        BalanceKind::Bias => config.router_classes() as usize,
        BalanceKind::None => 0,
    };
    let layer = |classes: usize| if classes > 0 { biases } else { 0 };
    router_classes(config).into_iter().map(layer).collect()
}

/// The initial balancing biases, one tensor per layer: 0, and -1 for the skip class; empty where there are none.
pub fn init_balance(config: &ZayaConfig) -> Vec<Tensor> {
    let skip = i64::from(config.skip != SkipOutput::None);
    let biases = |classes: usize| {
        let biases = Tensor::zeros([classes as i64], tch::kind::FLOAT_CPU);
        if classes > 0 {
            let _ = biases.narrow(0, classes as i64 - skip, skip).fill_(-1.0);
        }
        biases
    };
    balance_sizes(config).into_iter().map(biases).collect()
}

/// The initial weights, in f32, on CPU.
pub fn init(config: &ZayaConfig, seed: u64) -> kernels::Result<Vec<Tensor>> {
    let whole = |spec: &ParamSpec| {
        Ok(initial(spec, seed, 0..spec.elements())?.f_reshape(spec.shape.as_slice())?)
    };
    parameters(config).iter().map(whole).collect()
}
