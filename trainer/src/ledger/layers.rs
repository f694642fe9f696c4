//! The layers for which a ledger line has norms, derived from the names of the parameters.

use std::ops::Range;

/// A layer of the model, or the parameters before or after all layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerParameters {
    /// "embedding", "layer 0", "layer 1", ..., "final norm".
    pub name: String,
    /// Its parameters, by index in canonical order.
    pub parameters: Range<usize>,
}

/// Groups parameter names in canonical order by layer: those before the first numbered layer are the embedding, those
/// after the last one the final norm.
pub fn layers(parameters: &[String]) -> Vec<LayerParameters> {
    let mut found: Vec<LayerParameters> = Vec::new();
    let mut numbered = false;
    for (place, parameter) in parameters.iter().enumerate() {
        let number = number(parameter);
        numbered |= number.is_some();
        let name = match number {
            Some(number) => format!("layer {number}"),
            None if numbered => "final norm".to_owned(),
            None => "embedding".to_owned(),
        };
        match found.last_mut().filter(|last| last.name == name) {
            Some(last) => last.parameters.end = place + 1,
            None => found.push(LayerParameters { name, parameters: place..place + 1 }),
        }
    }
    found
}

/// The layer number in a parameter's name.
fn number(parameter: &str) -> Option<u64> {
    let (_, rest) = parameter.split_once("layers.")?;
    rest.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{self, ZayaConfig};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn layers_tile_the_parameters(count in 1i64..14) {
            let preset = ZayaConfig::preset("zaya1-nano").unwrap();
            let config = ZayaConfig { num_hidden_layers: count, ..preset };
            let names: Vec<String> =
                model::parameters(&config).into_iter().map(|parameter| parameter.name).collect();
            let found = layers(&names);
            prop_assert_eq!(found.len() as i64, count + 2);
            let mut next = 0;
            for (place, layer) in found.iter().enumerate() {
                prop_assert_eq!(layer.parameters.start, next);
                next = layer.parameters.end;
                let inside = |name: &String| name.contains(&format!(".layers.{}.", place as i64 - 1));
                prop_assert_eq!(
                    names[layer.parameters.clone()].iter().all(inside),
                    (1..=count).contains(&(place as i64)),
                    "{}", layer.name
                );
            }
            prop_assert_eq!(next, names.len());
        }
    }
}
