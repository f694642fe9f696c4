//! Whether a text reads like prose: the quality rules of Gopher (Rae et al. 2021, A1.1), the custom ones of FineWeb
//! (Penedo et al. 2024, 3.6), and plain bounds of length.
//!
//! Each rule is judged in the order in which the keys stand, so that the reason why it is dropped is the first rule broken.

use contract::Ratio;
use memchr::{memchr_iter, memmem};

use super::Dropped;
use super::repetition::repeated;
use super::setting::{above, below, share, step};
use super::words::{Tally, Text, chars, is_terminal, lines, strip};

step! {
    /// Bounds of length.
    Length = "length" version 1 {
        /// Fewest bytes.
        min_bytes: Option<u64> = "false",
        /// Most bytes.
        max_bytes: Option<u64> = "false",
        /// Fewest characters.
        min_chars: Option<u64> = "false",
        /// Most characters.
        max_chars: Option<u64> = "false",
        /// Fewest words.
        min_words: Option<u64> = "false",
        /// Most words.
        max_words: Option<u64> = "false",
    }
}

step! {
    /// Gopher's quality rules.
    GopherQuality = "gopher-quality" version 1 {
        /// Fewest words that hold more than punctuation.
        min_words: Option<u64> = "50",
        /// Most of them.
        max_words: Option<u64> = "100000",
        /// Least mean characters of a word.
        min_word_chars: Option<Ratio> = "3",
        /// Largest mean.
        max_word_chars: Option<Ratio> = "10",
        /// Most hash signs, and most ellipses, for each word.
        max_symbols: Option<Ratio> = "0.1",
        /// Largest share of lines that begin with a bullet.
        max_bullet_lines: Option<Ratio> = "0.9",
        /// Largest share of lines that end in an ellipsis.
        max_ellipsis_lines: Option<Ratio> = "0.3",
        /// Least share of words with a letter.
        min_letter_words: Option<Ratio> = "0.8",
        /// Fewest different stop words.
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
        /// Characters of a short line, at most.
        short_line: u64 = "30",
        /// Largest share of characters in repeated lines.
        max_repeated_chars: Option<Ratio> = "0.01",
        /// Most line ends for each word.
        max_line_ends: Option<Ratio> = "0.3",
    }
}

fn count(limit: u64, number: usize, less: bool) -> bool {
    if less { (number as u64) < limit } else { number as u64 > limit }
}

impl Length {
    /// The first rule broken.
    pub(crate) fn judge(&self, text: &Text<'_>) -> Option<Dropped> {
        let bytes = text.text.len();
        let rules: [(_, &dyn Fn() -> usize, _, _); 6] = [
            (self.min_bytes, &|| bytes, true, "length: too few bytes"),
            (self.max_bytes, &|| bytes, false, "length: too many bytes"),
            (self.min_chars, &|| chars(text.text), true, "length: too few characters"),
            (self.max_chars, &|| chars(text.text), false, "length: too many characters"),
            (self.min_words, &|| text.words().len(), true, "length: too few words"),
            (self.max_words, &|| text.words().len(), false, "length: too many words"),
        ];
        for (limit, number, less, reason) in rules {
            let Some(limit) = limit else { continue };
            let number = number();
            if count(limit, number, less) {
                return Some(Dropped::new(reason, number));
            }
        }
        None
    }
}

impl GopherQuality {
    /// The first rule broken.
    pub(crate) fn judge(&self, text: &Text<'_>) -> Option<Dropped> {
        self.judge_words(text).or_else(|| self.judge_lines(text)).or_else(|| self.judge_sense(text))
    }

    fn judge_words(&self, text: &Text<'_>) -> Option<Dropped> {
        let Tally { solid: number, chars: length, .. } = text.tally();
        if self.min_words.is_some_and(|limit| count(limit, number, true)) {
            return Some(Dropped::new("gopher-quality: too few words", number));
        }
        if self.max_words.is_some_and(|limit| count(limit, number, false)) {
            return Some(Dropped::new("gopher-quality: too many words", number));
        }
        if self.min_word_chars.is_some_and(|limit| below(length, number, limit)) {
            return Some(Dropped::new("gopher-quality: short words", share(length, number)));
        }
        if self.max_word_chars.is_some_and(|limit| above(length, number, limit)) {
            return Some(Dropped::new("gopher-quality: long words", share(length, number)));
        }
        let all = text.words().len();
        let bytes = text.text.as_bytes();
        let hashes = memchr_iter(b'#', bytes).count();
        let [dots, signs] = ["...", "\u{2026}"].map(|sign| memmem::find_iter(bytes, sign).count());
        let ellipses = dots + signs;
        let limit = self.max_symbols?;
        if above(hashes, all, limit) {
            return Some(Dropped::new("gopher-quality: hash signs", share(hashes, all)));
        }
        above(ellipses, all, limit)
            .then(|| Dropped::new("gopher-quality: ellipses", share(ellipses, all)))
    }

    fn judge_lines(&self, text: &Text<'_>) -> Option<Dropped> {
        let (mut all, mut bullets, mut open) = (0, 0, 0);
        for line in lines(text.text) {
            let line = strip(line);
            all += 1;
            bullets += usize::from(line.starts_with(['\u{2022}', '-']));
            open += usize::from(line.ends_with("...") || line.ends_with('\u{2026}'));
        }
        if self.max_bullet_lines.is_some_and(|limit| above(bullets, all, limit)) {
            return Some(Dropped::new("gopher-quality: bullet lines", share(bullets, all)));
        }
        self.max_ellipsis_lines
            .is_some_and(|limit| above(open, all, limit))
            .then(|| Dropped::new("gopher-quality: lines ending in an ellipsis", share(open, all)))
    }

    fn judge_sense(&self, text: &Text<'_>) -> Option<Dropped> {
        let all = text.words().len();
        let letters = text.tally().lettered;
        if self.min_letter_words.is_some_and(|limit| below(letters, all, limit)) {
            return Some(Dropped::new(
                "gopher-quality: words without letters",
                share(letters, all),
            ));
        }
        let limit = self.min_stop_words?;
        // One pass over the words, as long as a stop word is missing; most are told from all of them by their first byte.
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
        count(limit, found, true).then(|| Dropped::new("gopher-quality: few stop words", found))
    }
}

impl FineWeb {
    /// The first rule broken.
    pub(crate) fn judge(&self, text: &Text<'_>) -> Option<Dropped> {
        let all: Vec<&str> = text.text.split('\n').filter(|line| !strip(line).is_empty()).collect();
        if all.is_empty() {
            return Some(Dropped::new("fineweb: no lines", 0));
        }
        let ended = all.iter().filter(|line| line.ends_with(is_terminal)).count();
        if self.min_ended_lines.is_some_and(|limit| below(ended, all.len(), limit)) {
            let found = share(ended, all.len());
            return Some(Dropped::new("fineweb: few lines end a sentence", found));
        }
        let short = all.iter().filter(|line| chars(line) as u64 <= self.short_line).count();
        if self.max_short_lines.is_some_and(|limit| above(short, all.len(), limit)) {
            return Some(Dropped::new("fineweb: short lines", share(short, all.len())));
        }
        let (_, twice) = repeated(all.iter().copied());
        let ends = text.text.bytes().filter(|byte| *byte == b'\n').count();
        let solid = chars(text.text) - ends;
        if self.max_repeated_chars.is_some_and(|limit| above(twice, solid, limit)) {
            return Some(Dropped::new("fineweb: repeated lines", share(twice, solid)));
        }
        let words = text.words().len();
        self.max_line_ends
            .is_some_and(|limit| above(ends, words, limit))
            .then(|| Dropped::new("fineweb: a list rather than prose", share(ends, words)))
    }
}
