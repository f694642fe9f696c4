//! Words of 64 bits, floats by their bits, as text.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

/// 64-bit words as one string of hexadecimal digits, sixteen for each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Packed(pub Vec<u64>);

impl Packed {
    /// The bits of floats.
    pub fn floats(values: impl IntoIterator<Item = f64>) -> Self {
        Packed(values.into_iter().map(f64::to_bits).collect())
    }

    /// The floats whose bits these are.
    pub fn values(&self) -> impl Iterator<Item = f64> + '_ {
        self.0.iter().map(|bits| f64::from_bits(*bits))
    }

    /// The only float.
    pub fn float(&self) -> f64 {
        self.0.first().map_or(f64::NAN, |bits| f64::from_bits(*bits))
    }
}

impl From<Packed> for String {
    fn from(packed: Packed) -> String {
        let mut text = String::with_capacity(packed.0.len() * 16);
        for word in packed.0 {
            let _ = write!(text, "{word:016x}");
        }
        text
    }
}

impl TryFrom<String> for Packed {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || {
            format!(
                "expected sixteen hexadecimal digits for each word, found {} characters",
                text.len()
            )
        };
        if !text.is_ascii() || !text.len().is_multiple_of(16) {
            return Err(wrong());
        }
        let words = text.as_bytes().chunks_exact(16).map(|digits| {
            let digits = std::str::from_utf8(digits).map_err(|_| wrong())?;
            u64::from_str_radix(digits, 16).map_err(|_| wrong())
        });
        words.collect::<Result<_, _>>().map(Packed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packed_words_survive_text(words: Vec<u64>) {
            let text = String::from(Packed(words.clone()));
            prop_assert_eq!(Packed::try_from(text), Ok(Packed(words)));
        }
    }
}
