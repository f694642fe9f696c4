//! Words, lines and sentences, as the published filters count them.
//!
//! The thresholds of Gopher and FineWeb were set on words of a linguistic tokenizer: punctuation stands alone, `don't`
//! is two words, a hyphen splits. The rules here are those of spaCy's blank English tokenizer without its long list of
//! exceptions. White space and line ends are Python's, since the reference implementations are written in Python.

mod cut;

use std::cell::OnceCell;

use cut::CutWords;

/// A text with its words, once they are known.
pub(crate) struct Text<'a> {
    pub(crate) text: &'a str,
    words: OnceCell<Words>,
}

/// The words of a text, as byte ranges, and counts over them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Words {
    spans: Vec<(usize, usize)>,
    tally: Tally,
}

/// Counts over words, updated while they are cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Words that hold more than punctuation.
    pub(crate) solid: usize,
    /// The characters of these words.
    pub(crate) chars: usize,
    /// Words with a letter.
    pub(crate) lettered: usize,
}

impl<'a> Text<'a> {
    /// A text; its words are cut at their first use.
    #[cfg(test)]
    pub(crate) fn new(text: &'a str) -> Self {
        Text { text, words: OnceCell::new() }
    }

    /// Its words.
    pub(crate) fn words(&self) -> impl ExactSizeIterator<Item = &'a str> + Clone {
        self.cut().spans.iter().map(|(start, end)| &self.text[*start..*end])
    }

    /// The counts over its words.
    pub(crate) fn tally(&self) -> Tally {
        self.cut().tally
    }

    fn cut(&self) -> &Words {
        self.words.get_or_init(|| words(self.text))
    }

    /// The words, if they were cut, for the next step on the same text.
    pub(crate) fn into_words(self) -> Option<Words> {
        self.words.into_inner()
    }

    /// A text whose words are known.
    pub(crate) fn with_words(text: &'a str, words: Option<Words>) -> Self {
        Text { text, words: words.map_or_else(OnceCell::new, OnceCell::from) }
    }
}

/// Python's `str.isspace` for a character.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Python's `str.strip`.
pub(crate) fn strip(text: &str) -> &str {
    match text.as_bytes() {
        // Most lines begin and end with a visible ASCII character.
        [b'!'..=b'~'] | [b'!'..=b'~', .., b'!'..=b'~'] => text,
        _ => text.trim_matches(is_space),
    }
}

/// Python's `str.splitlines`: it has unusual line ends too, and no empty line after the last one.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = line_end(rest.as_bytes());
        let Some(end) = end else { return Some(std::mem::take(&mut rest)) };
        let (line, tail) = rest.split_at(end);
        let skip = if tail.starts_with("\r\n") {
            2
        } else {
            tail.chars().next().map_or(0, char::len_utf8)
        };
        rest = &tail[skip..];
        Some(line)
    })
}

/// The position of the first line end in a text.
fn line_end(bytes: &[u8]) -> Option<usize> {
    // On bytes: U+0085, U+2028 and U+2029 are the only line ends beyond ASCII.
    let ends = |at: usize| match bytes[at] {
        b'\n'..=b'\r' | 0x1c..=0x1e => true,
        0xc2 => bytes[at + 1] == 0x85,
        0xe2 => bytes[at + 1] == 0x80 && matches!(bytes[at + 2], 0xa8 | 0xa9),
        _ => false,
    };
    let mut at = 0;
    while at < bytes.len() {
        if let Some(next) = bytes[at..].first_chunk::<16>()
            // All bytes without a branch: neither control characters nor bytes beyond ASCII.
            && next.iter().fold(true, |plain, byte| plain & (b' '..0x80).contains(byte))
        {
            at += next.len();
            continue;
        }
        let end = bytes.len().min(at + 16);
        if let Some(found) = (at..end).find(|at| ends(*at)) {
            return Some(found);
        }
        at = end;
    }
    None
}

/// The number of characters, which the published rules call length.
pub(crate) fn chars(text: &str) -> usize {
    if text.is_ascii() { text.len() } else { text.chars().count() }
}

/// The words of a text.
fn words(text: &str) -> Words {
    let mut found = CutWords::new(text);
    let bytes = text.as_bytes();
    let (mut start, mut at) = (0, 0);
    while at < bytes.len() {
        let (mut classes, mut space) = (0, 0);
        // Most characters are ASCII: only others are decoded.
        while let Some(&byte) = bytes.get(at) {
            let class = cut::CLASSES[usize::from(byte)];
            if class == cut::SPACE {
                space = 1;
                break;
            }
            let mut length = 1;
            if class == cut::WIDE {
                let c = text[at..].chars().next().unwrap_or_default();
                length = c.len_utf8();
                if is_space(c) {
                    space = length;
                    break;
                }
            }
            classes |= class;
            at += length;
        }
        if start < at {
            found.chunk(start, at, classes);
        }
        at += space;
        start = at;
    }
    found.words
}

/// Punctuation other than sentence ends, and control characters: a word of nothing else is not counted. Like the next
/// one, a table of first and last characters.
const PUNCTUATION: &[u32] = &[
    0x0, 0x8, 0xb, 0x1f, 0x22, 0x2d, 0x2f, 0x2f, 0x3a, 0x3e, 0x40, 0x40, 0x5b, 0x60, 0x7b, 0x9f,
    0xab, 0xab, 0xb4, 0xb4, 0xbb, 0xbb, 0x2013, 0x2014, 0x2019, 0x2019, 0x201c, 0x201e, 0x2026,
    0x2026, 0x2236, 0x2236, 0x2501, 0x2501, 0x25ba, 0x25ba, 0x3001, 0x3001, 0x3008, 0x300d, 0x3010,
    0x3011, 0xff05, 0xff05, 0xff08, 0xff09, 0xff0c, 0xff0c, 0xff11, 0xff11, 0xff1a, 0xff1b, 0xff5e,
    0xff5e,
];

/// Sentence ends in all scripts (Unicode's Sentence_Terminal).
const TERMINAL: &[u32] = &[
    0x21, 0x21, 0x2e, 0x2e, 0x3f, 0x3f, 0x589, 0x589, 0x61d, 0x61f, 0x6d4, 0x6d4, 0x700, 0x702,
    0x7f9, 0x7f9, 0x837, 0x837, 0x839, 0x839, 0x83d, 0x83e, 0x964, 0x965, 0x104a, 0x104b, 0x1362,
    0x1362, 0x1367, 0x1368, 0x166e, 0x166e, 0x1735, 0x1736, 0x17d4, 0x17d6, 0x17d9, 0x17da, 0x1803,
    0x1803, 0x1809, 0x1809, 0x1944, 0x1945, 0x1aa8, 0x1aab, 0x1b5a, 0x1b5b, 0x1b5e, 0x1b5f, 0x1b7d,
    0x1b7e, 0x1c3b, 0x1c3c, 0x1c7e, 0x1c7f, 0x203c, 0x203d, 0x2047, 0x2049, 0x2e2e, 0x2e2e, 0x2e3c,
    0x2e3c, 0x2e53, 0x2e54, 0x3002, 0x3002, 0xa4ff, 0xa4ff, 0xa60e, 0xa60f, 0xa6f3, 0xa6f3, 0xa6f7,
    0xa6f7, 0xa876, 0xa877, 0xa8ce, 0xa8cf, 0xa92f, 0xa92f, 0xa9c8, 0xa9c9, 0xaa5d, 0xaa5f, 0xaaf0,
    0xaaf1, 0xabeb, 0xabeb, 0xfe52, 0xfe52, 0xfe56, 0xfe57, 0xff01, 0xff01, 0xff0e, 0xff0e, 0xff1f,
    0xff1f, 0xff61, 0xff61, 0x10a56, 0x10a57, 0x10f55, 0x10f59, 0x10f86, 0x10f89, 0x11047, 0x11048,
    0x110be, 0x110c1, 0x11141, 0x11143, 0x111c5, 0x111c6, 0x111cd, 0x111cd, 0x111de, 0x111df,
    0x11238, 0x11239, 0x1123b, 0x1123c, 0x112a9, 0x112a9, 0x1144b, 0x1144c, 0x115c2, 0x115c3,
    0x115c9, 0x115d7, 0x11641, 0x11642, 0x1173c, 0x1173e, 0x11944, 0x11944, 0x11946, 0x11946,
    0x11a42, 0x11a43, 0x11a9b, 0x11a9c, 0x11c41, 0x11c42, 0x11ef7, 0x11ef8, 0x11f43, 0x11f44,
    0x16a6e, 0x16a6f, 0x16af5, 0x16af5, 0x16b37, 0x16b38, 0x16b44, 0x16b44, 0x16e98, 0x16e98,
    0x1bc9f, 0x1bc9f, 0x1da88, 0x1da88,
];

fn within(c: char, table: &[u32]) -> bool {
    let (code, ranges) = (u32::from(c), table.as_chunks::<2>().0);
    let after = ranges.partition_point(|[first, _]| *first <= code);
    after > 0 && code <= ranges[after - 1][1]
}

/// Whether a character ends a sentence.
pub(crate) fn is_terminal(c: char) -> bool {
    within(c, TERMINAL)
}

/// Whether a character is punctuation or control.
pub(crate) fn is_punctuation(c: char) -> bool {
    match c {
        // The tables' entries below 0x80, sentence ends included.
        '\0'..='\u{8}' | '\u{b}'..='\u{1f}' | '!'..='/' | ':'..='@' | '['..='`' => true,
        '{'..='\u{7f}' => true,
        c if c.is_ascii() => false,
        c => within(c, PUNCTUATION) || is_terminal(c),
    }
}

/// The number of sentences: one begins with the first word, and with each word that follows a sentence end.
pub(crate) fn sentences(text: &str) -> usize {
    let (mut count, mut ended) = (0, true);
    for (start, end) in words(text).spans {
        let word = &text[start..end];
        let mut chars = word.chars();
        let terminal = chars.next().is_some_and(is_terminal) && chars.next().is_none();
        if ended && (count == 0 || !word.chars().all(is_punctuation)) {
            count += 1;
            ended = false;
        }
        ended |= terminal;
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(text: &str) -> Vec<&str> {
        words(text).spans.into_iter().map(|(start, end)| &text[start..end]).collect()
    }

    #[test]
    fn words_are_cut_as_by_the_reference() {
        // Output of spaCy 3.8.18, blank English.
        let text = "I don't think-so, Mr. Smith's 5km... (e.g. http) foo/bar 3.14% x=y self.foo() U.S.A. and/or \
                    well-known $5 a.b.c end.Next";
        let wanted = [
            "I", "do", "n't", "think", "-", "so", ",", "Mr.", "Smith", "'s", "5", "km", "...", "(",
            "e.g.", "http", ")", "foo", "/", "bar", "3.14", "%", "x", "=", "y", "self.foo", "(",
            ")", "U.S.A.", "and/or", "well", "-", "known", "$", "5", "a.b.c", "end", ".", "Next",
        ];
        assert_eq!(cut(text), wanted);
        let sentences = |text| super::sentences(text);
        assert_eq!(sentences("Hello there. I am Mr. Smith! 3.14 is pi... Really? Yes.) no"), 5);
        assert_eq!(sentences(""), 0);
    }

    #[test]
    fn lines_are_pythons() {
        let found: Vec<&str> = lines("a\r\nb\n\nc\u{85}d\u{2028}e\x0bf\x1cg\n").collect();
        assert_eq!(found, ["a", "b", "", "c", "d", "e", "f", "g"]);
        assert_eq!(lines("").count(), 0);
    }

    #[test]
    fn runs_of_signs_stay_together() {
        assert_eq!(
            cut("a---b 5--x a-- --b a....b"),
            ["a", "---", "b", "5--x", "a--", "--b", "a", "....", "b"]
        );
    }

    proptest! {
        #[test]
        fn words_hold_all_but_space(text in "[ a-zA-Z0-9.,'\u{2019}\u{e9}/+%$()\\-\u{4e2d}\u{1f600}\n]{0,80}") {
            let found = words(&text).spans;
            prop_assert!(found.iter().all(|(start, end)| start < end));
            prop_assert!(found.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            let joined: String = found.iter().map(|(start, end)| &text[*start..*end]).collect();
            let solid: String = text.chars().filter(|c| !is_space(*c)).collect();
            prop_assert_eq!(joined, solid);
        }
    }
}
