//! Whether a text repeats itself: the rules of Gopher (Rae et al. 2021, A1.2).
//!
//! Lines and paragraphs that occurred before; the share of the most frequent 2- to 4-gram of words; the share of 5- to
//! 10-grams that occurred before, counting each character once.

use contract::Ratio;
use xxhash_rust::xxh3::xxh3_64;

use super::Dropped;
use super::setting::{above, step};
use super::words::{Text, chars, strip};

step! {
    /// Gopher's repetition rules.
    GopherRepetition = "gopher-repetition" version 1 {
        /// Largest share of paragraphs that occurred before.
        max_paragraphs: Option<Ratio> = "0.3",
        /// Largest share of characters in them.
        max_paragraph_chars: Option<Ratio> = "0.2",
        /// Largest share of lines that occurred before.
        max_lines: Option<Ratio> = "0.3",
        /// Largest share of characters in them.
        max_line_chars: Option<Ratio> = "0.2",
        /// Largest share of characters in the most frequent pair of words.
        max_top_2: Option<Ratio> = "0.2",
        /// The same of three words.
        max_top_3: Option<Ratio> = "0.18",
        /// The same of four.
        max_top_4: Option<Ratio> = "0.16",
        /// Largest share of characters in runs of five words that occurred before.
        max_repeated_5: Option<Ratio> = "0.15",
        /// The same of six.
        max_repeated_6: Option<Ratio> = "0.14",
        /// The same of seven.
        max_repeated_7: Option<Ratio> = "0.13",
        /// The same of eight.
        max_repeated_8: Option<Ratio> = "0.12",
        /// The same of nine.
        max_repeated_9: Option<Ratio> = "0.11",
        /// The same of ten.
        max_repeated_10: Option<Ratio> = "0.1",
    }
}

impl GopherRepetition {
    /// The first rule broken.
    pub(crate) fn judge(&self, text: &Text<'_>) -> Option<Dropped> {
        self.judge_lines(text.text).or_else(|| self.judge_words(text))
    }

    fn judge_lines<'a>(&self, text: &'a str) -> Option<Dropped> {
        let whole = chars(text);
        let rules: [(_, _, &dyn Fn() -> Vec<&'a str>, _, _); 2] = [
            (
                self.max_paragraphs,
                self.max_paragraph_chars,
                &|| split_at_ends(strip(text), 2),
                "gopher-repetition: paragraphs",
                "gopher-repetition: characters in paragraphs",
            ),
            (
                self.max_lines,
                self.max_line_chars,
                &|| split_at_ends(text, 1),
                "gopher-repetition: lines",
                "gopher-repetition: characters in lines",
            ),
        ];
        for (max_parts, max_chars, parts, by_part, by_char) in rules {
            if max_parts.is_none() && max_chars.is_none() {
                continue;
            }
            let parts = parts();
            let (again, length) = repeated(parts.iter().copied());
            let dropped = above(max_parts, again, parts.len(), by_part);
            let dropped = dropped.or_else(|| above(max_chars, length, whole, by_char));
            if dropped.is_some() {
                return dropped;
            }
        }
        None
    }

    fn judge_words(&self, text: &Text<'_>) -> Option<Dropped> {
        let whole = chars(text.text);
        let mut grams = Grams::new(text);
        let rules = [
            (2, self.max_top_2, "gopher-repetition: most frequent 2 words"),
            (3, self.max_top_3, "gopher-repetition: most frequent 3 words"),
            (4, self.max_top_4, "gopher-repetition: most frequent 4 words"),
            (5, self.max_repeated_5, "gopher-repetition: runs of 5 words"),
            (6, self.max_repeated_6, "gopher-repetition: runs of 6 words"),
            (7, self.max_repeated_7, "gopher-repetition: runs of 7 words"),
            (8, self.max_repeated_8, "gopher-repetition: runs of 8 words"),
            (9, self.max_repeated_9, "gopher-repetition: runs of 9 words"),
            (10, self.max_repeated_10, "gopher-repetition: runs of 10 words"),
        ];
        rules.into_iter().find_map(|(n, limit, reason)| {
            limit?;
            let length = if n < 5 { grams.top(n) } else { grams.repeated(n) };
            above(limit, length, whole, reason)
        })
    }
}

/// The parts of a text between runs of at least `least` line ends.
fn split_at_ends(text: &str, least: usize) -> Vec<&str> {
    let (mut parts, mut start, mut at) = (Vec::new(), 0, 0);
    let bytes = text.as_bytes();
    while let Some(found) = memchr::memchr(b'\n', &bytes[at..]) {
        let first = at + found;
        let run = bytes[first..].iter().take_while(|byte| **byte == b'\n').count();
        at = first + run;
        if run >= least {
            parts.push(&text[start..first]);
            start = at;
        }
    }
    parts.push(&text[start..]);
    parts
}

/// How many parts occurred before, and their characters.
pub(crate) fn repeated<'a>(parts: impl ExactSizeIterator<Item = &'a str>) -> (usize, usize) {
    let mut seen = Seen::default();
    seen.empty(parts.len());
    let (mut again, mut length) = (0, 0);
    for part in parts {
        if seen.insert(xxh3_64(part.as_bytes())).is_err() {
            again += 1;
            length += chars(part);
        }
    }
    (again, length)
}

/// The words of a text joined without spaces, so that a run of words is a range of bytes.
struct Grams {
    solid: String,
    /// Where each word ends in `solid`, in bytes and in characters.
    ends: Vec<(usize, usize)>,
    /// The hash of each word.
    words: Vec<u64>,
    /// One set, reused for all lengths of runs: new ones would allocate memory nine times per document.
    seen: Seen,
}

impl Grams {
    fn new(text: &Text<'_>) -> Self {
        let mut solid = String::with_capacity(text.text.len());
        let (mut ends, mut words) = (vec![(0, 0)], Vec::new());
        let mut length = 0;
        for word in text.words() {
            solid += word;
            length += chars(word);
            ends.push((solid.len(), length));
            words.push(xxh3_64(word.as_bytes()));
        }
        Grams { solid, ends, words, seen: Seen::default() }
    }

    fn bytes(&self, first: usize, n: usize) -> &[u8] {
        &self.solid.as_bytes()[self.ends[first].0..self.ends[first + n].0]
    }

    fn chars(&self, first: usize, n: usize) -> usize {
        self.ends[first + n].1 - self.ends[first].1
    }

    /// Characters in all occurrences of the most frequent run of `n` words, spaces between them included.
    ///
    /// Of equally frequent runs the first one counts, as in the reference.
    fn top(&mut self, n: usize) -> usize {
        let count = self.ends.len().saturating_sub(n);
        self.seen.empty(count);
        let mut times: Vec<(usize, usize)> = Vec::new();
        for first in 0..count {
            // Hashes of words, not of joined bytes: "a bc" is not "ab c".
            let hash = self.words[first..first + n]
                .iter()
                .fold(n as u64, |hash, word| (hash ^ word).wrapping_mul(MIX).rotate_left(29));
            match self.seen.insert(hash) {
                Ok(()) => times.push((1, first)),
                Err(slot) => times[slot].0 += 1,
            }
        }
        let best = times.iter().max_by_key(|(times, first)| (*times, std::cmp::Reverse(*first)));
        best.map_or(0, |(times, first)| times * (self.chars(*first, n) + n - 1))
    }

    /// Characters in runs of `n` words that occurred before, each character counted once.
    fn repeated(&mut self, n: usize) -> usize {
        let count = self.ends.len().saturating_sub(n);
        self.seen.empty(count);
        let (mut length, mut first) = (0, 0);
        while first < count {
            let hash = xxh3_64(self.bytes(first, n));
            if self.seen.insert(hash).is_ok() {
                first += 1;
            } else {
                length += self.chars(first, n);
                first += n;
            }
        }
        length
    }
}

/// An odd constant with well-mixed bits (2^64 over the golden ratio).
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

/// A set of hashes in order of insertion: open addressing, at most half full.
#[derive(Default)]
struct Seen {
    slots: Vec<(u64, u32)>,
    count: u32,
}

impl Seen {
    /// Clears the set and reserves space for `most` hashes.
    fn empty(&mut self, most: usize) {
        self.slots.clear();
        self.slots.resize((2 * most + 1).next_power_of_two(), (0, u32::MAX));
        self.count = 0;
    }

    /// Adds a hash, or returns the position of the earlier one.
    fn insert(&mut self, hash: u64) -> Result<(), usize> {
        let mask = self.slots.len() - 1;
        let mut at = (hash.wrapping_mul(MIX) >> 32) as usize & mask;
        loop {
            match self.slots[at] {
                (_, u32::MAX) => break,
                (found, order) if found == hash => return Err(order as usize),
                _ => at = (at + 1) & mask,
            }
        }
        self.slots[at] = (hash, self.count);
        self.count += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// The reference implementation: strings instead of hashes.
    fn slow_repeated(words: &[&str], n: usize) -> usize {
        let (mut seen, mut length, mut at) = (std::collections::BTreeSet::new(), 0, 0);
        while at + n <= words.len() {
            let gram: String = words[at..at + n].concat();
            if seen.contains(&gram) {
                length += gram.chars().count();
                at += n;
            } else {
                seen.insert(gram);
                at += 1;
            }
        }
        length
    }

    fn slow_top(words: &[&str], n: usize) -> usize {
        let mut times: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        for (at, gram) in words.windows(n).enumerate() {
            times.entry(gram.join(" ")).or_insert((0, at)).0 += 1;
        }
        let best = times.iter().max_by_key(|(_, (times, at))| (*times, usize::MAX - at));
        best.map_or(0, |(gram, (times, _))| gram.chars().count() * times)
    }

    proptest! {
        #[test]
        fn grams_are_counted_as_strings(words in prop::collection::vec("(a|ab|b|c\u{e9}|\u{4e2d})", 0..60)) {
            let text = words.join(" ");
            let text = Text::new(&text);
            let words: Vec<&str> = text.words().collect();
            let mut grams = Grams::new(&text);
            for n in 2..=10 {
                prop_assert_eq!(grams.repeated(n), slow_repeated(&words, n));
                prop_assert_eq!(grams.top(n), slow_top(&words, n));
            }
        }

        #[test]
        fn splits_are_those_of_the_expression(text in "[ab\n]{0,30}") {
            // The reference splits at "\n{2,}" and at "\n+".
            let joined = |parts: Vec<&str>| parts.join("|");
            let (mut pairs, mut singles) = (String::new(), String::new());
            let mut run = 0;
            for c in text.chars().chain(['\0']) {
                if c == '\n' {
                    run += 1;
                    continue;
                }
                pairs += match run { 0 => "", 1 => "\n", _ => "|" };
                singles += if run > 0 { "|" } else { "" };
                run = 0;
                if c != '\0' {
                    pairs.push(c);
                    singles.push(c);
                }
            }
            prop_assert_eq!(joined(split_at_ends(&text, 2)), pairs);
            prop_assert_eq!(joined(split_at_ends(&text, 1)), singles);
        }
    }

    #[test]
    fn a_repetitive_text_is_told_from_prose() {
        let rules = GopherRepetition::default();
        let prose = "The river rises in the hills and runs for ninety miles to the sea. Its water is clear, \
                     and trout live in it. Two mills used to stand on its banks; both burned down long ago.";
        assert_eq!(rules.judge(&Text::new(prose)), None);
        let chant = "more and more ".repeat(30);
        assert!(rules.judge(&Text::new(&chant)).is_some());
        let lines = format!("{prose}\n").repeat(3);
        assert_eq!(rules.judge(&Text::new(&lines)).unwrap().reason, "gopher-repetition: lines");
    }
}
