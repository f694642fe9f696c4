//! Names of tensors in files. Ours are those of `transformers` in memory; a file may store a parameter in parts:
//!
//! ```text
//! Zyphra      layer 2i is an attention, and layer 2i + 1 its experts: one tensor for each expert. There each layer
//!             scales the residual at its input, while ours scales it at the output of the sublayer before. Each
//!             parameter is declared with its name there.
//! mixtral     block_sparse_moe.experts.E.w1, w3 and w2: gate, up and down of expert E
//! qwen3_moe   mlp.experts.E.gate_proj, up_proj and down_proj
//! ```
//!
//! The rows of the parts, one after the other, are the rows of the parameter.

use std::collections::BTreeMap;

use super::config::HfLayout;
use super::family::HfModel;
use crate::model::{self, ParamSpec, Role, ZayaConfig};

/// The meaning of a tensor's name in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NameMeaning {
    /// A whole parameter.
    Whole(String),
    /// A part of a parameter, by its number.
    Part(String, usize),
}

/// All tensor names of a folder that differ from ours.
pub(super) struct TensorNames(BTreeMap<String, NameMeaning>);

impl TensorNames {
    /// The names for a model.
    pub(super) fn new(config: &ZayaConfig, layout: HfLayout) -> TensorNames {
        let mut places = BTreeMap::new();
        for spec in model::parameters(config) {
            let names = part_names(config, layout, &spec);
            let whole = !are_parts(&spec, &names);
            let whole = whole.then(|| NameMeaning::Whole(spec.name.clone()));
            places.extend((0..).zip(names).map(|(part, name)| {
                let part = || NameMeaning::Part(spec.name.clone(), part);
                (name, whole.clone().unwrap_or_else(part))
            }));
        }
        if layout == HfLayout::Zyphra {
            for layer in 0..config.num_hidden_layers {
                let name =
                    format!("model.layers.{}.zaya_block.router.balancing_biases", 2 * layer + 1);
                places.insert(name, NameMeaning::Whole(model::balance_name(layer)));
            }
            // Some folders use the newer name for the final norm.
            let norm = "model.norm.weight".to_owned();
            places.insert(norm.clone(), NameMeaning::Whole(norm));
        }
        TensorNames(places)
    }

    /// The meaning of `name`; `None` if it is not a name of this layout.
    pub(super) fn of(&self, name: &str) -> Option<NameMeaning> {
        self.0.get(name).cloned()
    }
}

/// Whether the names are of single experts rather than of the whole parameter; there may be one expert.
pub(super) fn are_parts(spec: &ParamSpec, names: &[String]) -> bool {
    spec.role == Role::Experts && names[0] != spec.name
}

/// The names under which a parameter is stored, in the order of its rows.
pub(super) fn part_names(config: &ZayaConfig, layout: HfLayout, spec: &ParamSpec) -> Vec<String> {
    let experts = 0..config.num_experts;
    let names = match (layout, HfModel::like(config)) {
        (HfLayout::Zyphra, _) if spec.role == Role::Experts => {
            return experts.map(|expert| spec.zyphra.replace('*', &expert.to_string())).collect();
        }
        (HfLayout::Zyphra, _) => return vec![spec.zyphra.clone()],
        (_, HfModel::Mixtral) => ["w1", "w3", "w2"],
        (_, HfModel::Qwen3Moe) => ["gate_proj", "up_proj", "down_proj"],
        _ => return vec![spec.name.clone()],
    };
    let (name, [gate, up, down]) = (spec.name.as_str(), names);
    let name = match HfModel::like(config) {
        HfModel::Mixtral => name.replace(".mlp.", ".block_sparse_moe."),
        _ => name.to_owned(),
    };
    let of = |base: &str, sides: &[&str]| {
        let sides = |expert| sides.iter().map(move |side| format!("{base}.{expert}.{side}.weight"));
        experts.flat_map(sides).collect()
    };
    match (name.strip_suffix(".gate_up_proj"), name.strip_suffix(".down_proj")) {
        (Some(base), _) => of(base, &[gate, up]),
        (_, Some(base)) => of(base, &[down]),
        _ => vec![name],
    }
}
