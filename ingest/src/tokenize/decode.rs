//! Ids back to text, for explanations.

use contract::{Fault, Result};

/// Decodes with the tokenizer of a store.
pub struct Decoder(tokenizers::Tokenizer);

impl Decoder {
    /// Reads the bytes of a `tokenizer.json`.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        tokenizers::Tokenizer::from_bytes(bytes).map(Decoder).map_err(|error| {
            Fault::data(format!("the store's tokenizer.json cannot be read: {error}"))
                .hint("`zdata verify STORE` tells whether it is damaged")
        })
    }

    /// The text of `ids`, special tokens shown. A range that cuts a character shows a replacement mark there.
    pub fn text(&self, ids: &[u32]) -> Result<String> {
        self.0.decode(ids, false).map_err(|error| Fault::bug(format!("cannot decode: {error}")))
    }
}
