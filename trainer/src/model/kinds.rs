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
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
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
        /// Grouped-query attention, as in Llama: rotary embedding and softmax, without convolutions or value shift.
        Gqa = "gqa",
    }
}

kinds! {
    /// Which keys the queries of a layer see; names are those of transformers.
    LayerType {
        /// All earlier ones of the document, and its own token's.
        Full = "full_attention",
        /// The last `sliding_window` of these.
        Sliding = "sliding_attention",
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

kinds! {
    /// How a sublayer's output joins the residual.
    ResidualKind {
        /// The sum of both, each with learned scales and biases, ZAYA1's.
        Scaled = "scaled",
        /// Their sum.
        Plain = "plain",
    }
}

kinds! {
    /// What chooses a token's experts.
    RouterKind {
        /// A small network over a state that runs through the layers, ZAYA1's.
        Mlp = "mlp",
        /// One matrix, from the width of the residual to the classes.
        Linear = "linear",
    }
}

kinds! {
    /// What keeps the load of the experts even.
    BalanceKind {
        /// Biases that are added to the probabilities for the choice, and follow the load, ZAYA1's.
        Bias = "bias",
        /// Nothing.
        None = "none",
    }
}

kinds! {
    /// In which dtype the head multiplies.
    LogitsDtype {
        /// The run's `dtype`.
        Model = "model",
        /// 32-bit floats, as ZAYA1 is trained and served (`zaya_high_prec`): also under bf16, where both factors of
        /// the product are widened first.
        F32 = "f32",
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
