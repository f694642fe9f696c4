//! Words in normal form, used to compare documents.
//!
//! Letters and digits make words, everything else separates them; case, accents and other combining marks do not count.
//! In scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) each character is a word.

use unicode_normalization::char::{
    canonical_combining_class, decompose_canonical, is_combining_mark,
};
use xxhash_rust::xxh3::xxh3_64;

/// A word: the hash of its normal form, and its range in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) hash: u64,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// The words of a text.
pub(crate) fn words(text: &str) -> Vec<Word> {
    let mut found = Vec::with_capacity(text.len() / 5);
    let mut word = Vec::with_capacity(32);
    let mut start = 0;
    let mut push = |word: &mut Vec<u8>, start: usize, end: usize| {
        if !word.is_empty() {
            found.push(Word { hash: xxh3_64(word), start, end });
            word.clear();
        }
    };
    for (at, c) in text.char_indices() {
        if c.is_ascii_alphanumeric() {
            if word.is_empty() {
                start = at;
            }
            word.push(c.to_ascii_lowercase() as u8);
        } else if c.is_ascii() {
            push(&mut word, start, at);
        } else if canonical_combining_class(c) != 0 {
            // It belongs to the letter before, if there is one.
        } else if is_whole(c) {
            push(&mut word, start, at);
            normal(c, &mut word);
            push(&mut word, at, at + c.len_utf8());
        } else if c.is_alphanumeric() || is_combining_mark(c) {
            if word.is_empty() {
                start = at;
            }
            normal(c, &mut word);
        } else {
            push(&mut word, start, at);
        }
    }
    push(&mut word, start, text.len());
    found
}

/// Adds the normal form of a character.
fn normal(c: char, word: &mut Vec<u8>) {
    let mut bytes = [0; 4];
    for lower in c.to_lowercase() {
        decompose_canonical(lower, |part| {
            if canonical_combining_class(part) == 0 {
                word.extend_from_slice(part.encode_utf8(&mut bytes).as_bytes());
            }
        });
    }
}

/// Whether a character is a word by itself.
fn is_whole(c: char) -> bool {
    matches!(u32::from(c),
        0xe00..=0xeff | 0x1000..=0x109f | 0x1780..=0x17ff | 0x3040..=0x30ff | 0x31f0..=0x31ff
        | 0x3400..=0x4dbf | 0x4e00..=0x9fff | 0xf900..=0xfaff | 0xff66..=0xff9d | 0x20000..=0x3ffff)
        && c.is_alphanumeric()
}

/// An odd constant with well-mixed bits (2^64 over the golden ratio).
const BASE: u64 = 0x9e37_79b9_7f4a_7c15;

/// The hashes of all runs of `n` words, in constant time each: one for each word except the last `n - 1`.
pub(crate) fn grams(words: &[Word], n: usize) -> impl Iterator<Item = u64> + '_ {
    let n = n.max(1);
    let power = (1..n).fold(1u64, |power, _| power.wrapping_mul(BASE));
    let mut hash = 0u64;
    words.iter().enumerate().filter_map(move |(at, word)| {
        if at >= n {
            hash = hash.wrapping_sub(words[at - n].hash.wrapping_mul(power));
        }
        hash = hash.wrapping_mul(BASE).wrapping_add(word.hash);
        (at + 1 >= n).then(|| mixed(hash))
    })
}

/// Mixes the upper bits of a product into all bits.
pub(crate) fn mixed(hash: u64) -> u64 {
    let hash = (hash ^ (hash >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    hash ^ (hash >> 32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shown(text: &str) -> Vec<&str> {
        words(text).iter().map(|word| &text[word.start..word.end]).collect()
    }

    #[test]
    fn words_are_letters_and_digits() {
        assert_eq!(shown("Don't stop; it's 3.14!"), ["Don", "t", "stop", "it", "s", "3", "14"]);
        assert_eq!(
            shown("caf\u{e9} \u{4e2d}\u{6587}x"),
            ["caf\u{e9}", "\u{4e2d}", "\u{6587}", "x"]
        );
        assert_eq!(shown(" \n--"), Vec::<&str>::new());
        let same = |a: &str, b: &str| {
            let hashes = |text| words(text).iter().map(|word| word.hash).collect::<Vec<_>>();
            assert_eq!(hashes(a), hashes(b), "{a} {b}");
        };
        same("CAF\u{c9} \u{130}", "cafe\u{301} i");
        same("\u{c5}ngstr\u{f6}m", "angstrom");
        same("a,b--c", "A b\nC");
    }

    proptest! {
        #[test]
        fn grams_depend_on_their_words_alone(words in prop::collection::vec(0u64..4, 0..40), n in 1usize..9) {
            let words: Vec<Word> =
                words.into_iter().map(|hash| Word { hash: hash * 77 + 5, start: 0, end: 0 }).collect();
            let rolled: Vec<u64> = grams(&words, n).collect();
            prop_assert_eq!(rolled.len(), (words.len() + 1).saturating_sub(n));
            for (window, hash) in words.windows(n).zip(&rolled) {
                prop_assert_eq!(grams(window, n).next(), Some(*hash));
            }
            for (a, window) in words.windows(n).enumerate() {
                for (b, other) in words.windows(n).enumerate() {
                    let same = window.iter().zip(other).all(|(a, b)| a.hash == b.hash);
                    prop_assert_eq!(same, rolled[a] == rolled[b]);
                }
            }
        }

        #[test]
        fn spans_are_whole_words(text in "[aZ9 .'\u{e9}e\u{301}\u{4e2d}\u{e01}\u{e34}\u{915}\u{93f}\u{ac00}]{0,50}") {
            let found = words(&text);
            prop_assert!(found.iter().all(|word| word.start < word.end && text.is_char_boundary(word.end)));
            prop_assert!(found.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }
}
