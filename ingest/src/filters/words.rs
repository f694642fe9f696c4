//! Words, lines and sentences, as the published filters count them.
//!
//! The thresholds of Gopher and FineWeb were set on words of a linguistic tokenizer: punctuation stands alone, `don't`
//! is two words, a hyphen splits. The rules here are those of spaCy's blank English tokenizer without its long list of
//! exceptions. Space, lines and ends of lines are Python's, which the reference implementations are written in.

use std::cell::OnceCell;

/// A text and what was found in it so far.
pub(crate) struct Text<'a> {
    pub(crate) text: &'a str,
    words: OnceCell<Vec<(usize, usize)>>,
}

impl<'a> Text<'a> {
    /// A text; its words are cut when they are first asked for.
    #[cfg(test)]
    pub(crate) fn new(text: &'a str) -> Self {
        Text { text, words: OnceCell::new() }
    }

    /// Its words.
    pub(crate) fn words(&self) -> impl ExactSizeIterator<Item = &'a str> + Clone {
        let spans = self.words.get_or_init(|| words(self.text));
        spans.iter().map(|(start, end)| &self.text[*start..*end])
    }

    /// The words cut so far, for the same text at the next step.
    pub(crate) fn into_words(self) -> Option<Vec<(usize, usize)>> {
        self.words.into_inner()
    }

    /// A text whose words are known.
    pub(crate) fn with_words(text: &'a str, words: Option<Vec<(usize, usize)>>) -> Self {
        Text { text, words: words.map_or_else(OnceCell::new, OnceCell::from) }
    }
}

/// What Python's `str.isspace` says of a character.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// What Python's `str.strip` leaves.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// What Python's `str.splitlines` gives: more ends of lines than one would think, and none after the last.
pub(crate) fn lines(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let bytes = rest.as_bytes();
        // By bytes: U+0085, U+2028 and U+2029 are the only ends of lines beyond ASCII.
        let ends = |at: &usize| match bytes[*at] {
            b'\n'..=b'\r' | 0x1c..=0x1e => true,
            0xc2 => bytes[at + 1] == 0x85,
            0xe2 => bytes[at + 1] == 0x80 && matches!(bytes[at + 2], 0xa8 | 0xa9),
            _ => false,
        };
        let end = (0..bytes.len()).find(ends);
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

/// The number of characters, which is what the published rules call length.
pub(crate) fn chars(text: &str) -> usize {
    if text.is_ascii() { text.len() } else { text.chars().count() }
}

/// The words of a text, as byte ranges.
pub(crate) fn words(text: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::with_capacity(text.len() / 5);
    let bytes = text.as_bytes();
    let mut after = Vec::new();
    let (mut start, mut at) = (0, 0);
    while at < bytes.len() {
        // Most characters are ASCII: only others are decoded.
        let (space, length) = match bytes[at] {
            byte @ ..0x80 => (matches!(byte, b'\t'..=b'\r' | 0x1c..=0x1f | b' '), 1),
            _ => text[at..].chars().next().map_or((false, 1), |c| (is_space(c), c.len_utf8())),
        };
        at += length;
        if space {
            if start < at - length {
                chunk(text, start, at - length, &mut found, &mut after);
            }
            start = at;
        }
    }
    if start < at {
        chunk(text, start, at, &mut found, &mut after);
    }
    found
}

/// Cuts what stands between two spaces. `after` is empty before and afterwards.
fn chunk(
    text: &str,
    mut start: usize,
    mut end: usize,
    found: &mut Vec<(usize, usize)>,
    after: &mut Vec<(usize, usize)>,
) {
    if text.as_bytes()[start..end].iter().all(u8::is_ascii_alphabetic) {
        found.push((start, end));
        return;
    }
    let mut whole = false;
    while start < end {
        let rest = &text[start..end];
        whole = is_whole(rest);
        if whole {
            break;
        }
        if let Some(length) = prefix(rest) {
            found.push((start, start + length));
            start += length;
        } else if let Some(length) = suffix(rest) {
            after.push((end - length, end));
            end -= length;
        } else {
            break;
        }
    }
    if start < end {
        let rest = &text[start..end];
        let colon = || memchr::memchr(b':', rest.as_bytes());
        if whole || colon().is_some_and(|at| rest[at..].contains("://")) {
            found.push((start, end));
        } else {
            inside(rest, start, found);
        }
    }
    found.extend(after.drain(..).rev());
}

/// Abbreviations that keep their point.
fn is_whole(word: &str) -> bool {
    const WHOLE: &[&str] = &[
        "Adm.", "Bros.", "Co.", "Corp.", "D.C.", "Dr.", "E.g.", "Gen.", "Gov.", "I.e.", "Inc.",
        "Jr.", "Ltd.", "Messrs.", "Mr.", "Mrs.", "Ms.", "Mt.", "Ph.D.", "Prof.", "Rep.", "Rev.",
        "Sen.", "Sr.", "St.", "a.m.", "and/or", "c'm", "e.g.", "i.e.", "p.m.", "v.s.", "vs.",
        "w/o", "w/",
    ];
    // Most words are told apart by their last byte, or hold no sign.
    let signs = || word.bytes().any(|byte| matches!(byte, b'/' | b'\''));
    let looks_so = word.len() <= 7
        && match word.as_bytes().last() {
            Some(b'.' | b'/') => true,
            Some(b'm' | b'o' | b'r') => signs(),
            _ => false,
        };
    looks_so && WHOLE.binary_search(&word).is_ok()
}

/// The length of what is cut from the front of a word, if anything is.
fn prefix(word: &str) -> Option<usize> {
    let first = word.chars().next()?;
    if first.is_ascii_alphanumeric() {
        return None;
    }
    if word.starts_with("..") {
        return Some(word.len() - word.trim_start_matches('.').len());
    }
    let next_is_digit = || word[1..].starts_with(|c: char| c.is_ascii_digit());
    let cut = match first {
        '+' => !next_is_digit(),
        '%' | '=' | '\u{a7}' | '\u{2013}' | '\u{2014}' => true,
        _ => is_mark(first) || is_quote(first) || is_currency(first) || is_icon(first),
    };
    cut.then(|| first.len_utf8())
}

/// The length of what is cut from the end of a word, if anything is.
fn suffix(word: &str) -> Option<usize> {
    let last = word.chars().next_back()?;
    if last.is_ascii_alphanumeric() {
        return contraction(word).or_else(|| unit(word));
    }
    if word.ends_with("..") {
        return Some(word.len() - word.trim_end_matches('.').len());
    }
    let before = &word[..word.len() - last.len_utf8()];
    let previous = before.chars().next_back();
    let digit = previous.is_some_and(|c| c.is_ascii_digit());
    let cut = match last {
        '\u{2013}' | '\u{2014}' => true,
        '.' => ends_sentence(before),
        '+' => digit,
        '%' if digit => true,
        _ => {
            is_mark(last)
                || is_quote(last)
                || is_icon(last)
                || (is_currency(last) && digit)
                || (last == '%' && previous.is_none())
        }
    };
    if cut {
        return Some(last.len_utf8());
    }
    contraction(word).or_else(|| unit(word))
}

/// Whether a point after `word` ends a sentence rather than an abbreviation.
fn ends_sentence(word: &str) -> bool {
    let mut back = word.chars().rev();
    match back.next() {
        Some(c) if c.is_uppercase() => back.next().is_some_and(char::is_uppercase),
        Some(c) => c.is_alphanumeric() || "%\u{b2}-+".contains(c) || is_quote(c) || c == ')',
        None => false,
    }
}

/// The length of a contracted word at the end: `'s`, `n't`, `'ll`.
fn contraction(word: &str) -> Option<usize> {
    // Bytes: nothing here may cut a character.
    let bytes = word.as_bytes();
    let end = &bytes[bytes.len().saturating_sub(5)..];
    if !end.iter().any(|byte| matches!(byte, b'\'' | 0xe2)) {
        return None;
    }
    let ends_in = |end: &[u8]| {
        let at = bytes.len().checked_sub(end.len())?;
        bytes[at..].eq_ignore_ascii_case(end).then_some(at)
    };
    const ENDS: [(&[u8], bool); 7] = [
        (b"s", false),
        (b"m", false),
        (b"d", false),
        (b"t", true),
        (b"ll", false),
        (b"re", false),
        (b"ve", false),
    ];
    for (end, negated) in ENDS {
        let Some(at) = ends_in(end) else { continue };
        let apostrophe = match &bytes[..at] {
            [.., b'\''] => 1,
            [.., 0xe2, 0x80, 0x99] => 3,
            _ => continue,
        };
        let before = at - apostrophe;
        let cut = match negated {
            false => before,
            true if matches!(bytes[..before].last(), Some(b'n' | b'N')) => before - 1,
            true => continue,
        };
        if cut > 0 {
            return Some(bytes.len() - cut);
        }
    }
    None
}

/// The length of a unit after a number: `5km`.
fn unit(word: &str) -> Option<usize> {
    const UNITS: &[&str] = &[
        "km", "m", "cm", "mm", "ha", "kg", "g", "mg", "lb", "oz", "km/h", "mph", "Pa", "kb", "KB",
        "mb", "MB", "gb", "GB", "tb", "TB", "T", "G", "M", "K",
    ];
    let bytes = word.as_bytes();
    let number = bytes.iter().rposition(|byte| !byte.is_ascii_alphabetic() && *byte != b'/')?;
    let length = bytes.len() - number - 1;
    (bytes[number].is_ascii_digit() && UNITS.contains(&&word[number + 1..])).then_some(length)
}

/// Cuts within a word: at hyphens, between a sentence's end and the next, at signs between letters.
fn inside(word: &str, offset: usize, found: &mut Vec<(usize, usize)>) {
    // Nothing else can split, whatever stands beside it.
    let sign = |byte: &u8| !byte.is_ascii() || b".,+*^-~:<>=/".contains(byte);
    let (mut start, mut at) = (0, 0);
    while let Some(ahead) = word.as_bytes()[at..].iter().position(sign) {
        at += ahead;
        let tail = &word[at..];
        let Some(c) = tail.chars().next() else { break };
        // A run of signs is looked at once, whether it splits or not.
        let mut length = c.len_utf8();
        if tail.starts_with("..") {
            length = tail.len() - tail.trim_start_matches('.').len();
        } else if c == '-' {
            length = tail.len() - tail.trim_start_matches('-').len();
        }
        let previous = word[..at].chars().next_back();
        let next = tail[length..].chars().next();
        if previous.is_some() && next.is_some() && splits(previous, c, length, next) {
            if start < at {
                found.push((offset + start, offset + at));
            }
            found.push((offset + at, offset + at + length));
            start = at + length;
        }
        at += length;
    }
    if start < word.len() {
        found.push((offset + start, offset + word.len()));
    }
}

fn splits(previous: Option<char>, sign: char, length: usize, next: Option<char>) -> bool {
    let is = |c: Option<char>, test: &dyn Fn(char) -> bool| c.is_some_and(test);
    let letter = |c: char| c.is_alphabetic();
    let digit = |c: char| c.is_ascii_digit();
    let lower = |c: char| c.is_lowercase() || is_quote(c);
    let upper = |c: char| c.is_uppercase() || is_quote(c);
    match sign {
        '.' if length > 1 => true,
        '.' => is(previous, &lower) && is(next, &upper),
        ',' => is(previous, &letter) && is(next, &letter),
        '+' | '*' | '^' => is(previous, &digit) && is(next, &|c| c.is_ascii_digit() || c == '-'),
        '-' if is(previous, &digit) && length == 1 => is(next, &|c| c.is_ascii_digit() || c == '-'),
        '-' | '\u{2013}' | '\u{2014}' | '~' => is(previous, &letter) && is(next, &letter),
        ':' | '<' | '>' | '=' | '/' => {
            is(previous, &|c| letter(c) || digit(c)) && is(next, &letter)
        }
        _ => is_icon(sign),
    }
}

fn is_mark(c: char) -> bool {
    matches!(
        c,
        ',' | ':'
            | ';'
            | '!'
            | '?'
            | '('
            | ')'
            | '['
            | ']'
            | '{'
            | '}'
            | '<'
            | '>'
            | '_'
            | '#'
            | '*'
            | '&'
            | '\u{a1}'
            | '\u{b7}'
            | '\u{bf}'
            | '\u{60c}'
            | '\u{61b}'
            | '\u{61f}'
            | '\u{66a}'
            | '\u{6d4}'
            | '\u{964}'
            | '\u{2026}'
            | '\u{3001}'
            | '\u{3002}'
            | '\u{ff01}'
            | '\u{ff0c}'
            | '\u{ff1a}'
            | '\u{ff1b}'
            | '\u{ff1f}'
            | '\u{ff5e}'
    )
}

fn is_quote(c: char) -> bool {
    matches!(c, '\'' | '"' | '`' | '\u{ab}' | '\u{b4}' | '\u{bb}' | '\u{2018}'..='\u{201e}'
        | '\u{2329}' | '\u{232a}' | '\u{27e6}' | '\u{27e7}' | '\u{3008}'..='\u{3011}'
        | '\u{3014}' | '\u{3015}' | '\u{ff08}' | '\u{ff09}')
}

fn is_currency(c: char) -> bool {
    matches!(c, '$' | '\u{a3}' | '\u{a5}' | '\u{e3f}' | '\u{20a0}'..='\u{20bf}' | '\u{fdfc}')
}

/// Pictures and other symbols, which stand for words.
fn is_icon(c: char) -> bool {
    matches!(c, '\u{a6}' | '\u{a9}' | '\u{ae}' | '\u{2100}'..='\u{214f}' | '\u{2190}'..='\u{21ff}'
        | '\u{2300}'..='\u{23ff}' | '\u{2500}'..='\u{27bf}' | '\u{2b00}'..='\u{2bff}'
        | '\u{1f000}'..='\u{1faff}')
}

/// Punctuation other than ends of sentences, and control characters: a word of nothing else is no word.
const PUNCTUATION: &[(u32, u32)] = &[
    (0x0, 0x8),
    (0xb, 0x1f),
    (0x22, 0x2d),
    (0x2f, 0x2f),
    (0x3a, 0x3e),
    (0x40, 0x40),
    (0x5b, 0x60),
    (0x7b, 0x9f),
    (0xab, 0xab),
    (0xb4, 0xb4),
    (0xbb, 0xbb),
    (0x2013, 0x2014),
    (0x2019, 0x2019),
    (0x201c, 0x201e),
    (0x2026, 0x2026),
    (0x2236, 0x2236),
    (0x2501, 0x2501),
    (0x25ba, 0x25ba),
    (0x3001, 0x3001),
    (0x3008, 0x300d),
    (0x3010, 0x3011),
    (0xff05, 0xff05),
    (0xff08, 0xff09),
    (0xff0c, 0xff0c),
    (0xff11, 0xff11),
    (0xff1a, 0xff1b),
    (0xff5e, 0xff5e),
];

/// Ends of sentences in all scripts (Unicode's Sentence_Terminal).
const TERMINAL: &[(u32, u32)] = &[
    (0x21, 0x21),
    (0x2e, 0x2e),
    (0x3f, 0x3f),
    (0x589, 0x589),
    (0x61d, 0x61f),
    (0x6d4, 0x6d4),
    (0x700, 0x702),
    (0x7f9, 0x7f9),
    (0x837, 0x837),
    (0x839, 0x839),
    (0x83d, 0x83e),
    (0x964, 0x965),
    (0x104a, 0x104b),
    (0x1362, 0x1362),
    (0x1367, 0x1368),
    (0x166e, 0x166e),
    (0x1735, 0x1736),
    (0x17d4, 0x17d6),
    (0x17d9, 0x17da),
    (0x1803, 0x1803),
    (0x1809, 0x1809),
    (0x1944, 0x1945),
    (0x1aa8, 0x1aab),
    (0x1b5a, 0x1b5b),
    (0x1b5e, 0x1b5f),
    (0x1b7d, 0x1b7e),
    (0x1c3b, 0x1c3c),
    (0x1c7e, 0x1c7f),
    (0x203c, 0x203d),
    (0x2047, 0x2049),
    (0x2e2e, 0x2e2e),
    (0x2e3c, 0x2e3c),
    (0x2e53, 0x2e54),
    (0x3002, 0x3002),
    (0xa4ff, 0xa4ff),
    (0xa60e, 0xa60f),
    (0xa6f3, 0xa6f3),
    (0xa6f7, 0xa6f7),
    (0xa876, 0xa877),
    (0xa8ce, 0xa8cf),
    (0xa92f, 0xa92f),
    (0xa9c8, 0xa9c9),
    (0xaa5d, 0xaa5f),
    (0xaaf0, 0xaaf1),
    (0xabeb, 0xabeb),
    (0xfe52, 0xfe52),
    (0xfe56, 0xfe57),
    (0xff01, 0xff01),
    (0xff0e, 0xff0e),
    (0xff1f, 0xff1f),
    (0xff61, 0xff61),
    (0x10a56, 0x10a57),
    (0x10f55, 0x10f59),
    (0x10f86, 0x10f89),
    (0x11047, 0x11048),
    (0x110be, 0x110c1),
    (0x11141, 0x11143),
    (0x111c5, 0x111c6),
    (0x111cd, 0x111cd),
    (0x111de, 0x111df),
    (0x11238, 0x11239),
    (0x1123b, 0x1123c),
    (0x112a9, 0x112a9),
    (0x1144b, 0x1144c),
    (0x115c2, 0x115c3),
    (0x115c9, 0x115d7),
    (0x11641, 0x11642),
    (0x1173c, 0x1173e),
    (0x11944, 0x11944),
    (0x11946, 0x11946),
    (0x11a42, 0x11a43),
    (0x11a9b, 0x11a9c),
    (0x11c41, 0x11c42),
    (0x11ef7, 0x11ef8),
    (0x11f43, 0x11f44),
    (0x16a6e, 0x16a6f),
    (0x16af5, 0x16af5),
    (0x16b37, 0x16b38),
    (0x16b44, 0x16b44),
    (0x16e98, 0x16e98),
    (0x1bc9f, 0x1bc9f),
    (0x1da88, 0x1da88),
];

fn within(c: char, ranges: &[(u32, u32)]) -> bool {
    let code = u32::from(c);
    let after = ranges.partition_point(|(first, _)| *first <= code);
    after > 0 && code <= ranges[after - 1].1
}

/// Whether a character ends a sentence.
pub(crate) fn is_terminal(c: char) -> bool {
    within(c, TERMINAL)
}

/// Whether a character is punctuation or control.
pub(crate) fn is_punctuation(c: char) -> bool {
    match c {
        // The tables' part below 0x80, ends of sentences included.
        '\0'..='\u{8}' | '\u{b}'..='\u{1f}' | '!'..='/' | ':'..='@' | '['..='`' => true,
        '{'..='\u{7f}' => true,
        c if c.is_ascii() => false,
        c => within(c, PUNCTUATION) || is_terminal(c),
    }
}

/// The number of sentences: one begins with the first word, and with each that follows the end of another.
pub(crate) fn sentences(text: &str) -> usize {
    let (mut count, mut ended) = (0, true);
    for (start, end) in words(text) {
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
        words(text).into_iter().map(|(start, end)| &text[start..end]).collect()
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
            let found = words(&text);
            prop_assert!(found.iter().all(|(start, end)| start < end));
            prop_assert!(found.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            let joined: String = found.iter().map(|(start, end)| &text[*start..*end]).collect();
            let solid: String = text.chars().filter(|c| !is_space(*c)).collect();
            prop_assert_eq!(joined, solid);
        }
    }
}
