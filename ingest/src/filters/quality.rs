//! Whether a text reads like prose: the quality rules of Gopher (Rae et al. 2021, A1.1), the custom ones of FineWeb
//! (Penedo et al. 2024, 3.6), and plain bounds of length.
//!
//! Rules are checked in the order of their keys, so the reported reason is the first broken rule.

use contract::Ratio;
use memchr::{memchr_iter, memmem};

use super::Dropped;
use super::repetition::repeated;
use super::setting::{above, below, fewer, more, step};
use super::words::{Tally, Text, chars, is_terminal, lines, strip};

step! {
    /// Bounds of length.
    Length = "length" version 1 {
        /// The minimum of bytes.
        min_bytes: Option<u64> = "false",
        /// The maximum of bytes.
        max_bytes: Option<u64> = "false",
        /// The minimum of characters.
        min_chars: Option<u64> = "false",
        /// The maximum of characters.
        max_chars: Option<u64> = "false",
        /// The minimum of words.
        min_words: Option<u64> = "false",
        /// The maximum of words.
        max_words: Option<u64> = "false",
    }
}

step! {
    /// Gopher's quality rules.
    GopherQuality = "gopher-quality" version 1 {
        /// The minimum of words that hold more than punctuation.
        min_words: Option<u64> = "50",
        /// The maximum of these words.
        max_words: Option<u64> = "100000",
        /// The minimum of the mean word length in characters.
        min_word_chars: Option<Ratio> = "3",
        /// The maximum of the mean.
        max_word_chars: Option<Ratio> = "10",
        /// The maximum of hash signs per word, and of ellipses per word.
        max_symbols: Option<Ratio> = "0.1",
        /// Largest share of lines that begin with a bullet.
        max_bullet_lines: Option<Ratio> = "0.9",
        /// Largest share of lines that end in an ellipsis.
        max_ellipsis_lines: Option<Ratio> = "0.3",
        /// Least share of words with a letter.
        min_letter_words: Option<Ratio> = "0.8",
        /// The minimum of different stop words.
        min_stop_words: Option<u64> = "2",
        /// The stop words, separated by spaces.
        stop_words: String = "the be to of and that have with",
    }
}

step! {
    /// FineWeb's rules.
    FineWeb = "fineweb" version 1 {
        /// Least share of lines that end a sentence.
        min_ended_lines: Option<Ratio> = "0.12",
        /// Largest share of short lines.
        max_short_lines: Option<Ratio> = "0.67",
        /// The maximum of characters in a short line.
        short_line: u64 = "30",
        /// Largest share of characters in repeated lines.
        max_repeated_chars: Option<Ratio> = "0.01",
        /// The maximum of line ends per word.
        max_line_ends: Option<Ratio> = "0.3",
    }
}

/// Checks a number against a limit.
type Bound = fn(Option<u64>, usize, &'static str) -> Option<Dropped>;

impl Length {
    /// The first rule broken.
    pub(crate) fn judge(&self, text: &Text<'_>) -> Option<Dropped> {
        let bytes = text.text.len();
        let rules: [(_, &dyn Fn() -> usize, Bound, _); 6] = [
            (self.min_bytes, &|| bytes, fewer, "length: too few bytes"),
            (self.max_bytes, &|| bytes, more, "length: too many bytes"),
            (self.min_chars, &|| chars(text.text), fewer, "length: too few characters"),
            (self.max_chars, &|| chars(text.text), more, "length: too many characters"),
            (self.min_words, &|| text.words().len(), fewer, "length: too few words"),
            (self.max_words, &|| text.words().len(), more, "length: too many words"),
        ];
        // Numbers without a limit are not computed.
        rules.into_iter().find_map(|(limit, number, broken, reason)| {
            limit.and_then(|_| broken(limit, number(), reason))
        })
    }
}

impl GopherQuality {
    /// The first rule broken.
    pub(crate) fn judge(&self, text: &Text<'_>) -> Option<Dropped> {
        self.judge_words(text).or_else(|| self.judge_lines(text)).or_else(|| self.judge_sense(text))
    }

    fn judge_words(&self, text: &Text<'_>) -> Option<Dropped> {
        let Tally { solid: number, chars: length, .. } = text.tally();
        let (least, most) = (self.min_word_chars, self.max_word_chars);
        fewer(self.min_words, number, "gopher-quality: too few words")
            .or_else(|| more(self.max_words, number, "gopher-quality: too many words"))
            .or_else(|| below(least, length, number, "gopher-quality: short words"))
            .or_else(|| above(most, length, number, "gopher-quality: long words"))
            .or_else(|| self.judge_symbols(text))
    }

    fn judge_symbols(&self, text: &Text<'_>) -> Option<Dropped> {
        let all = text.words().len();
        let bytes = text.text.as_bytes();
        let hashes = memchr_iter(b'#', bytes).count();
        let [dots, signs] = ["...", "\u{2026}"].map(|sign| memmem::find_iter(bytes, sign).count());
        above(self.max_symbols, hashes, all, "gopher-quality: hash signs")
            .or_else(|| above(self.max_symbols, dots + signs, all, "gopher-quality: ellipses"))
    }

    fn judge_lines(&self, text: &Text<'_>) -> Option<Dropped> {
        let (mut all, mut bullets, mut open) = (0, 0, 0);
        for line in lines(text.text) {
            let line = strip(line);
            all += 1;
            bullets += usize::from(line.starts_with(['\u{2022}', '-']));
            open += usize::from(line.ends_with("...") || line.ends_with('\u{2026}'));
        }
        let most = self.max_ellipsis_lines;
        above(self.max_bullet_lines, bullets, all, "gopher-quality: bullet lines")
            .or_else(|| above(most, open, all, "gopher-quality: lines ending in an ellipsis"))
    }

    fn judge_sense(&self, text: &Text<'_>) -> Option<Dropped> {
        let all = text.words().len();
        let letters = text.tally().lettered;
        below(self.min_letter_words, letters, all, "gopher-quality: words without letters")
            .or_else(|| self.judge_stop_words(text))
    }

    fn judge_stop_words(&self, text: &Text<'_>) -> Option<Dropped> {
        self.min_stop_words?;
        // One pass over the words until all stop words are found; the first byte rules out most words.
        let mut missing: Vec<&[u8]> =
            self.stop_words.split_whitespace().map(str::as_bytes).collect();
        let stops = missing.len();
        let mut begins = [false; 256];
        missing.iter().for_each(|stop| begins[usize::from(stop[0])] = true);
        for word in text.words().map(str::as_bytes).filter(|word| begins[usize::from(word[0])]) {
            missing.retain(|stop| *stop != word);
            if missing.is_empty() {
                break;
            }
        }
        let found = stops - missing.len();
        fewer(self.min_stop_words, found, "gopher-quality: few stop words")
    }
}

impl FineWeb {
    /// The first rule broken.
    pub(crate) fn judge(&self, text: &Text<'_>) -> Option<Dropped> {
        let all: Vec<&str> = text.text.split('\n').filter(|line| !strip(line).is_empty()).collect();
        if all.is_empty() {
            return Some(Dropped::new("fineweb: no lines", 0));
        }
        let ended = || all.iter().filter(|line| line.ends_with(is_terminal)).count();
        let short = || all.iter().filter(|line| chars(line) as u64 <= self.short_line).count();
        let twice = || repeated(all.iter().copied()).1;
        let ends = text.text.bytes().filter(|byte| *byte == b'\n').count();
        let solid = || chars(text.text) - ends;
        let (most_short, most_twice) = (self.max_short_lines, self.max_repeated_chars);
        below(self.min_ended_lines, ended(), all.len(), "fineweb: few lines end a sentence")
            .or_else(|| above(most_short, short(), all.len(), "fineweb: short lines"))
            .or_else(|| above(most_twice, twice(), solid(), "fineweb: repeated lines"))
            .or_else(|| {
                let words = text.words().len();
                above(self.max_line_ends, ends, words, "fineweb: a list rather than prose")
            })
    }
}
