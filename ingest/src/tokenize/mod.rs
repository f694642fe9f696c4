//! Encodes text to ids.
//!
//! `fastokens` encodes if it covers the tokenizer, otherwise Hugging Face `tokenizers`, which is also the oracle.
//! Strings that look like special tokens stay text; other added tokens match as usual; nothing is truncated, padded or
//! added except the begin and end tokens that `corpus.toml` asks for.

pub mod audit;
mod chunks;
pub mod decode;
pub mod encoder;
mod fast;
#[cfg(test)]
mod hard;
mod json;
mod memo;

pub use decode::Decoder;
pub use encoder::{Engine, Tokenizer};

#[cfg(test)]
mod tests;
