//! Layers whose queries see a window of keys, and their rotary frequencies.

use contract::Result;

use super::{ZayaConfig, wrong};
use crate::model::kinds::{Attention, LayerType};

/// The types of layers of these kinds where every one slides that can.
pub(super) fn all_sliding(layers: &[Attention]) -> Vec<LayerType> {
    let kind = |layer: &Attention| match layer {
        Attention::Linear => LayerType::Full,
        Attention::Cca | Attention::Gqa => LayerType::Sliding,
    };
    match layers.contains(&Attention::Linear) {
        true => layers.iter().map(kind).collect(),
        false => vec![LayerType::Sliding],
    }
}

impl ZayaConfig {
    /// Checks what layers with a window require.
    pub(super) fn validate_window(&self, place: impl Fn(&str) -> String) -> Result<()> {
        let (window, theta) = (self.sliding_window, self.sliding_rope_theta);
        let slides = self.layer_types.contains(&LayerType::Sliding);
        let sliding = self.kinds().zip(self.layer_types.iter().cycle());
        let mut sliding = sliding.filter(|(_, layer)| **layer == LayerType::Sliding);
        let linear = sliding.any(|((kind, _), _)| kind == Attention::Linear);
        let names: Vec<_> = self.layer_types.iter().map(|one| one.name()).collect();
        let checks = [
            (
                "sliding_window",
                !(0..=1 << 31).contains(&window) || slides != (window > 0),
                window.to_string(),
                match slides {
                    true => "1 to 2147483648 tokens, for layer_types has \"sliding_attention\"",
                    false => "0, or layer_types with \"sliding_attention\"",
                },
            ),
            (
                "layer_types",
                linear,
                format!("{names:?}"),
                "\"full_attention\" for layers of linear attention, which have no window",
            ),
            (
                "sliding_rope_theta",
                theta != 0.0 && !(slides && theta.is_finite() && theta >= 1.0),
                theta.to_string(),
                "0, which is rope_theta; or 1 or more, with a layer that slides",
            ),
        ];
        match checks.into_iter().find(|(_, odd, ..)| *odd) {
            None => Ok(()),
            Some((name, _, found, wanted)) => Err(wrong(name, place(name), found, wanted)),
        }
    }

    /// How many keys a query of each layer sees, its own token's included; `None`: all earlier ones.
    pub fn windows(&self) -> impl Iterator<Item = Option<i64>> + '_ {
        let types = self.layer_types.iter().cycle().take(self.num_hidden_layers as usize);
        types.map(|layer| (*layer == LayerType::Sliding).then_some(self.sliding_window))
    }

    /// The base of the rotary frequencies, in layers with a window or without.
    pub(crate) fn theta(&self, slides: bool) -> f64 {
        if slides && self.sliding_rope_theta > 0.0 {
            self.sliding_rope_theta
        } else {
            self.rope_theta
        }
    }
}
