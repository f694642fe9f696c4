//! The kinds of layers that a configuration names.
//!
//! A new kind is a file in `layers/` and a line here: its name in curricula, faults and digests follows from that. The
//! compiler then requires the line in `layers/mod.rs` that constructs it.

use contract::Fault;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A list of kinds, each with its name.
macro_rules! kinds {
    ($(#[$what:meta])* $table:ident { $($(#[$doc:meta])* $kind:ident = $name:tt,)+ }) => {
        $(#[$what])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
        pub enum $table {
            $(
                $(#[$doc])*
                #[serde(rename = $name)]
                $kind,
            )+
        }

        impl $table {
            /// As a curriculum writes it, and a digest reads it.
            pub fn name(self) -> &'static str {
                match self {
                    $($table::$kind => $name,)+
                }
            }
        }
    };
}

kinds! {
    /// A kind of attention.
    Attention {
        /// Compressed convolutional attention, ZAYA1's.
        Cca = "cca",
        /// Linear attention: a state of fixed size in place of keys and values.
        Linear = "linear",
    }
}

kinds! {
    /// A kind of feed-forward.
    FeedForward {
        /// A router and the experts that it chooses, ZAYA1's.
        Moe = "moe",
        /// One gated unit for every token, as wide inside as an expert.
        Mlp = "mlp",
    }
}

/// The fault for a value that the field `key` cannot have. What is allowed follows from the field's value in a preset
/// and from serde's error.
pub(super) fn unfit(key: &str, before: &Value, found: &Value, error: &serde_json::Error) -> Fault {
    let error = error.to_string();
    let wanted = match before {
        Value::Number(number) if number.is_f64() => "a number",
        Value::Number(_) => "a whole number",
        Value::Bool(_) => "true or false",
        Value::Array(_) if error.ends_with("expected a sequence") => "a list",
        _ => error.split_once(", expected ").map_or(&*error, |(_, expected)| expected),
    };
    Fault::usage(format!("`{key}` has the wrong kind of value")).found(found).wanted(wanted)
}
