//! Words of 64 bits, floats by their bits, as text.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error as _};
use serde::{Serialize, Serializer};

/// Hexadecimal digits of a word.
const DIGITS: usize = 16;

/// 64-bit words as one string of hexadecimal digits, sixteen for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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

    /// Sums the floats over a fixed tree: the largest power of two below their count forms the left subtree.
    pub fn tree_sum(&self) -> f64 {
        fn sum(bits: &[u64]) -> f64 {
            match bits {
                [] => 0.0,
                [bits] => f64::from_bits(*bits),
                _ => {
                    let (left, right) = bits.split_at(bits.len().next_power_of_two() / 2);
                    sum(left) + sum(right)
                }
            }
        }
        sum(&self.0)
    }
}

impl fmt::Display for Packed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|word| write!(out, "{word:016x}"))
    }
}

impl FromStr for Packed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digit = |word: u64, digit: &u8| {
            let digit = char::from(*digit).to_digit(16)?;
            Some(word << 4 | u64::from(digit))
        };
        let word = |digits: &[u8]| digits.iter().try_fold(0, digit);
        let (words, rest) = text.as_bytes().as_chunks::<DIGITS>();
        let words: Option<Vec<u64>> = words.iter().map(|digits| word(digits)).collect();
        words.filter(|_| rest.is_empty()).map(Packed).ok_or_else(|| {
            let length = text.len();
            format!("expected sixteen hexadecimal digits for each word, found {length} characters")
        })
    }
}

impl Serialize for Packed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Packed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packed_words_survive_text(words: Vec<u64>) {
            let text = Packed(words.clone()).to_string();
            prop_assert_eq!(text.len(), DIGITS * words.len());
            prop_assert_eq!(text.parse(), Ok(Packed(words)));
        }

        /// Any other text is refused: of another length, or with a character that is not a hexadecimal digit.
        #[test]
        fn what_is_no_word_is_refused(
            words in prop::collection::vec(any::<u64>(), 1..4),
            at: prop::sample::Index,
            other in "[g-zG-Z+ -]|\u{e9}",
        ) {
            let text = Packed(words).to_string();
            let at = at.index(text.len());
            let (before, after) = text.split_at(at);
            for wrong in [before.to_owned() + &other + &after[1..], before.to_owned() + "0" + after, text[1..].to_owned()] {
                prop_assert!(wrong.parse::<Packed>().is_err(), "{}", wrong);
            }
        }
    }

    #[test]
    fn the_tree_is_the_fixed_one() {
        // Of five: ((a + b) + (c + d)) + e.
        let values = [1e16, 1.0, -1e16, 1.0, 1.0];
        assert_eq!(Packed::floats(values).tree_sum(), ((1e16 + 1.0) + (-1e16 + 1.0)) + 1.0);
        assert_eq!(Packed::default().tree_sum(), 0.0);
    }
}
