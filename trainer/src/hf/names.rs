//! Zyphra's older names: layer 2i is an attention, layer 2i + 1 its experts, and each layer scales the residual that enters
//! it, where ours scales the one that leaves the sublayer before. Each parameter is declared with its name there.

use std::collections::BTreeMap;

use crate::model::{self, ParamSpec, Role, ZayaConfig};

/// Where a tensor of the older layout belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// It is a parameter of this name.
    Whole(String),
    /// It is one expert's part of a parameter.
    Expert(String, usize),
}

/// The place of every tensor of the older layout.
pub(super) struct Places(BTreeMap<String, Place>);

impl Places {
    /// Those of a model.
    pub(super) fn new(config: &ZayaConfig) -> Places {
        let mut places = BTreeMap::new();
        for ParamSpec { name, zyphra, role, shape, .. } in model::parameters(config) {
            if role == Role::Experts {
                let expert = |expert: i64| {
                    let place = Place::Expert(name.clone(), expert as usize);
                    (zyphra.replace('*', &expert.to_string()), place)
                };
                places.extend((0..shape[0]).map(expert));
            } else {
                places.insert(zyphra, Place::Whole(name));
            }
        }
        for layer in 0..config.num_hidden_layers {
            let theirs =
                format!("model.layers.{}.zaya_block.router.balancing_biases", 2 * layer + 1);
            places.insert(theirs, Place::Whole(model::balance_name(layer)));
        }
        // Some folders have the final norm under the newer name.
        let norm = "model.norm.weight".to_owned();
        places.insert(norm.clone(), Place::Whole(norm));
        Places(places)
    }

    /// Where `name` belongs; `None` if nothing there has this name.
    pub(super) fn of(&self, name: &str) -> Option<Place> {
        self.0.get(name).cloned()
    }
}
