//! Zyphra's older names: layer 2i is an attention, and layer 2i + 1 its experts. There each layer scales the residual
//! at its input, while ours scales it at the output of the sublayer before. Each parameter is declared with its name
//! there.

use std::collections::BTreeMap;

use crate::model::{self, ParamSpec, Role, ZayaConfig};

/// The meaning of a tensor name in the older layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NameMeaning {
    /// A whole parameter.
    Whole(String),
    /// One expert of a parameter.
    Expert(String, usize),
}

/// All tensor names of the older layout.
pub(super) struct TensorNames(BTreeMap<String, NameMeaning>);

impl TensorNames {
    /// The names for a model.
    pub(super) fn new(config: &ZayaConfig) -> TensorNames {
        let mut places = BTreeMap::new();
        for ParamSpec { name, zyphra, role, shape, .. } in model::parameters(config) {
            if role == Role::Experts {
                let expert = |expert: i64| {
                    let place = NameMeaning::Expert(name.clone(), expert as usize);
                    (zyphra.replace('*', &expert.to_string()), place)
                };
                places.extend((0..shape[0]).map(expert));
            } else {
                places.insert(zyphra, NameMeaning::Whole(name));
            }
        }
        for layer in 0..config.num_hidden_layers {
            let name = format!("model.layers.{}.zaya_block.router.balancing_biases", 2 * layer + 1);
            places.insert(name, NameMeaning::Whole(model::balance_name(layer)));
        }
        // Some folders use the newer name for the final norm.
        let norm = "model.norm.weight".to_owned();
        places.insert(norm.clone(), NameMeaning::Whole(norm));
        TensorNames(places)
    }

    /// The meaning of `name`; `None` if there is no such tensor.
    pub(super) fn of(&self, name: &str) -> Option<NameMeaning> {
        self.0.get(name).cloned()
    }
}
