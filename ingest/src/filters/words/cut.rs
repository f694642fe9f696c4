//! Cuts the text between two spaces into words.
//!
//! There are two implementations with one result: by characters, which is the reference, and by bytes for ASCII text,
//! which is nearly all text. The second one looks bytes up in a table of classes, and skips rules that cannot apply to
//! ASCII. Tested by `bytes_and_characters_cut_the_same_words`.

use super::{Tally, Words, chars, is_punctuation};

/// Class of a byte: a letter.
pub(super) const LETTER: u8 = 1;
/// A digit.
const DIGIT: u8 = 2;
/// A sign at which the inside of a word may be cut.
const INNER: u8 = 4;
/// A sign that is always cut from both ends of a word.
const EDGE: u8 = 8;
/// An apostrophe.
const APOSTROPHE: u8 = 16;
/// Separates words, and has no other class.
pub(super) const SPACE: u8 = 32;
/// A byte of a character beyond ASCII, and no other class.
pub(super) const WIDE: u8 = 64;
/// None of these.
const OTHER: u8 = 128;

/// The classes of each byte.
pub(super) const CLASSES: [u8; 256] = classes();

const fn classes() -> [u8; 256] {
    let mut classes = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        classes[byte] = match byte as u8 {
            b'a'..=b'z' | b'A'..=b'Z' => LETTER,
            b'0'..=b'9' => DIGIT,
            b'\t'..=b'\r' | 0x1c..=0x1f | b' ' => SPACE,
            b',' | b':' | b'<' | b'>' | b'*' => EDGE | INNER,
            b';' | b'!' | b'?' | b'(' | b')' | b'[' | b']' | b'{' | b'}' | b'_' | b'#' | b'&' => {
                EDGE
            }
            b'"' | b'`' => EDGE,
            b'\'' => EDGE | APOSTROPHE,
            b'.' | b'+' | b'^' | b'-' | b'~' | b'=' | b'/' => INNER,
            0x80.. => WIDE,
            _ => OTHER,
        };
        byte += 1;
    }
    classes
}

fn is(byte: u8, class: u8) -> bool {
    CLASSES[usize::from(byte)] & class != 0
}

/// The words of a text, as far as it was cut.
pub(super) struct CutWords<'a> {
    text: &'a str,
    pub(super) words: Words,
    /// What was cut from the end of the current word, last piece first.
    after: Vec<(usize, usize)>,
}

impl<'a> CutWords<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        let spans = Vec::with_capacity(text.len() / 5);
        let words = Words { spans, tally: Tally::default() };
        CutWords { text, words, after: Vec::new() }
    }

    /// Cuts the text between two spaces; `classes` is the union of its bytes' classes.
    pub(super) fn chunk(&mut self, start: usize, end: usize, classes: u8) {
        if classes == LETTER {
            self.words.spans.push((start, end));
            let tally = &mut self.words.tally;
            tally.solid += 1;
            tally.chars += end - start;
            tally.lettered += 1;
        } else if classes & WIDE == 0 {
            self.bytes(start, end, classes);
        } else {
            self.characters(start, end);
        }
    }

    fn word(&mut self, start: usize, end: usize) {
        self.words.spans.push((start, end));
        let bytes = &self.text.as_bytes()[start..end];
        let classes = bytes.iter().fold(0, |classes, byte| classes | CLASSES[usize::from(*byte)]);
        let tally = &mut self.words.tally;
        if classes & WIDE != 0 {
            let word = &self.text[start..end];
            let solid = !word.chars().all(is_punctuation);
            tally.solid += usize::from(solid);
            tally.chars += if solid { chars(word) } else { 0 };
            tally.lettered += usize::from(word.chars().any(char::is_alphabetic));
        } else if classes & (LETTER | DIGIT) != 0 {
            // All other ASCII signs are punctuation.
            tally.solid += 1;
            tally.chars += bytes.len();
            tally.lettered += usize::from(classes & LETTER != 0);
        }
    }

    /// Adds the pieces that were cut from the end.
    fn ends(&mut self) {
        while let Some((start, end)) = self.after.pop() {
            self.word(start, end);
        }
    }

    /// The implementation by characters.
    fn characters(&mut self, mut start: usize, mut end: usize) {
        let mut whole = false;
        while start < end {
            let rest = &self.text[start..end];
            whole = is_whole(rest.as_bytes());
            if whole {
                break;
            }
            if let Some(length) = prefix(rest) {
                self.word(start, start + length);
                start += length;
            } else if let Some(length) = suffix(rest) {
                self.after.push((end - length, end));
                end -= length;
            } else {
                break;
            }
        }
        if start < end {
            let rest = &self.text[start..end];
            if whole || rest.contains("://") {
                self.word(start, end);
            } else {
                self.inside(start, end);
            }
        }
        self.ends();
    }

    /// The implementation by bytes, for ASCII only.
    fn bytes(&mut self, mut start: usize, mut end: usize, classes: u8) {
        let mut whole = false;
        while start < end {
            let rest = &self.text.as_bytes()[start..end];
            whole = is_whole(rest);
            if whole {
                break;
            }
            if let Some(length) = bytes_prefix(rest) {
                // Signs that are all punctuation, so nothing is counted.
                self.words.spans.push((start, start + length));
                start += length;
            } else if let Some(length) = bytes_suffix(rest, classes) {
                self.after.push((end - length, end));
                end -= length;
            } else {
                break;
            }
        }
        if start < end {
            let rest = &self.text.as_bytes()[start..end];
            if whole || classes & INNER == 0 || rest.windows(3).any(|three| three == b"://") {
                self.word(start, end);
            } else {
                self.bytes_inside(start, end);
            }
        }
        self.ends();
    }

    /// Cuts inside a word: at hyphens, between two sentences, at signs between letters.
    fn inside(&mut self, offset: usize, end: usize) {
        let word = &self.text[offset..end];
        // No other byte can cause a split.
        let sign = |byte: &u8| is(*byte, INNER | WIDE);
        let (mut start, mut at) = (0, 0);
        while let Some(ahead) = word.as_bytes()[at..].iter().position(sign) {
            at += ahead;
            let tail = &word[at..];
            let Some(c) = tail.chars().next() else { break };
            // A run of signs is examined once, whether it splits or not.
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
                    self.word(offset + start, offset + at);
                }
                self.word(offset + at, offset + at + length);
                start = at + length;
            }
            at += length;
        }
        if start < word.len() {
            self.word(offset + start, end);
        }
    }

    /// The same by bytes, for ASCII only.
    fn bytes_inside(&mut self, mut start: usize, end: usize) {
        let bytes = self.text.as_bytes();
        let (first, mut at) = (start, start);
        while at < end {
            let sign = bytes[at];
            if !is(sign, INNER) {
                at += 1;
                continue;
            }
            let mut length = 1;
            if sign == b'-' || sign == b'.' {
                length = bytes[at..end].iter().take_while(|byte| **byte == sign).count();
            }
            let next = at + length;
            if at > first && next < end && bytes_split(bytes[at - 1], sign, length, bytes[next]) {
                if start < at {
                    self.word(start, at);
                }
                self.word(at, next);
                start = next;
            }
            at = next;
        }
        if start < end {
            self.word(start, end);
        }
    }
}

/// [`prefix`] for a word in ASCII.
fn bytes_prefix(word: &[u8]) -> Option<usize> {
    match word {
        [b'.', b'.', ..] => Some(word.iter().take_while(|byte| **byte == b'.').count()),
        [b'+', b'0'..=b'9', ..] => None,
        [b'+' | b'%' | b'=' | b'$', ..] => Some(1),
        [first, ..] => is(*first, EDGE).then_some(1),
        [] => None,
    }
}

/// [`suffix`] for a word in ASCII, part of a chunk with these classes.
fn bytes_suffix(word: &[u8], classes: u8) -> Option<usize> {
    let (last, before) = word.split_last()?;
    let digit = before.last().is_some_and(u8::is_ascii_digit);
    let cut = match last {
        // Contractions and units end only in these.
        b'a'..=b'z' | b'A'..=b'Z' => {
            let contracted = if classes & APOSTROPHE != 0 { contraction(word) } else { None };
            return match contracted {
                None if classes & DIGIT != 0 => unit(word),
                contracted => contracted,
            };
        }
        b'.' => match before {
            [.., b'.'] => {
                return Some(word.iter().rev().take_while(|byte| **byte == b'.').count());
            }
            [.., previous, b'A'..=b'Z'] => previous.is_ascii_uppercase(),
            [b'A'..=b'Z'] | [] => false,
            [.., c] => is(*c, LETTER | DIGIT) || b"%-+'\"`)".contains(c),
        },
        b'+' | b'$' => digit,
        b'%' => digit || before.is_empty(),
        last => is(*last, EDGE),
    };
    cut.then_some(1)
}

/// [`splits`] for ASCII.
fn bytes_split(previous: u8, sign: u8, length: usize, next: u8) -> bool {
    let letter = |byte: u8| is(byte, LETTER);
    let quote = |byte: u8| matches!(byte, b'\'' | b'"' | b'`');
    let number = |byte: u8| byte.is_ascii_digit() || byte == b'-';
    match sign {
        b'.' if length > 1 => true,
        b'.' => {
            let lower = previous.is_ascii_lowercase() || quote(previous);
            lower && (next.is_ascii_uppercase() || quote(next))
        }
        b'+' | b'*' | b'^' => previous.is_ascii_digit() && number(next),
        b'-' if previous.is_ascii_digit() && length == 1 => number(next),
        b',' | b'-' | b'~' => letter(previous) && letter(next),
        _ => is(previous, LETTER | DIGIT) && letter(next),
    }
}

/// Words that are never split, such as abbreviations with their period.
#[inline]
fn is_whole(word: &[u8]) -> bool {
    const WHOLE: &[&str] = &[
        "Adm.", "Bros.", "Co.", "Corp.", "D.C.", "Dr.", "E.g.", "Gen.", "Gov.", "I.e.", "Inc.",
        "Jr.", "Ltd.", "Messrs.", "Mr.", "Mrs.", "Ms.", "Mt.", "Ph.D.", "Prof.", "Rep.", "Rev.",
        "Sen.", "Sr.", "St.", "a.m.", "and/or", "c'm", "e.g.", "i.e.", "p.m.", "v.s.", "vs.",
        "w/o", "w/",
    ];
    // The last byte, or the lack of a sign, rules out most words.
    let signs = || word.iter().any(|byte| matches!(byte, b'/' | b'\''));
    let looks_so = word.len() <= 7
        && match word.last() {
            Some(b'.' | b'/') => true,
            Some(b'm' | b'o' | b'r') => signs(),
            _ => false,
        };
    looks_so && WHOLE.binary_search_by(|whole| whole.as_bytes().cmp(word)).is_ok()
}

/// The length of the piece to cut from the front of a word, if any.
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

/// The length of the piece to cut from the end of a word, if any.
fn suffix(word: &str) -> Option<usize> {
    let last = word.chars().next_back()?;
    if last.is_ascii_alphanumeric() {
        return contraction(word.as_bytes()).or_else(|| unit(word.as_bytes()));
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
    contraction(word.as_bytes()).or_else(|| unit(word.as_bytes()))
}

/// Whether a period after `word` ends a sentence rather than an abbreviation.
fn ends_sentence(word: &str) -> bool {
    let mut back = word.chars().rev();
    match back.next() {
        Some(c) if c.is_uppercase() => back.next().is_some_and(char::is_uppercase),
        Some(c) => c.is_alphanumeric() || "%\u{b2}-+".contains(c) || is_quote(c) || c == ')',
        None => false,
    }
}

/// The length of a contracted word at the end: `'s`, `n't`, `'ll`.
fn contraction(bytes: &[u8]) -> Option<usize> {
    // On bytes, since this may cut inside a character.
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
fn unit(bytes: &[u8]) -> Option<usize> {
    const UNITS: &[&str] = &[
        "km", "m", "cm", "mm", "ha", "kg", "g", "mg", "lb", "oz", "km/h", "mph", "Pa", "kb", "KB",
        "mb", "MB", "gb", "GB", "tb", "TB", "T", "G", "M", "K",
    ];
    let number = bytes.iter().rposition(|byte| !byte.is_ascii_alphabetic() && *byte != b'/')?;
    let length = bytes.len() - number - 1;
    (bytes[number].is_ascii_digit()
        && UNITS.iter().any(|unit| unit.as_bytes() == &bytes[number + 1..]))
    .then_some(length)
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
    matches!(c, '!' | '#' | '&' | '('..='*' | ',' | ':' | ';' | '<' | '>' | '?' | '[' | ']' | '_' | '{' | '}'
        | '\u{a1}' | '\u{b7}' | '\u{bf}' | '\u{60c}' | '\u{61b}' | '\u{61f}' | '\u{66a}' | '\u{6d4}' | '\u{964}'
        | '\u{2026}' | '\u{3001}'..='\u{3002}' | '\u{ff01}' | '\u{ff0c}' | '\u{ff1a}'..='\u{ff1b}' | '\u{ff1f}'
        | '\u{ff5e}')
}

fn is_quote(c: char) -> bool {
    matches!(c, '\'' | '"' | '`' | '\u{ab}' | '\u{b4}' | '\u{bb}' | '\u{2018}'..='\u{201e}'
        | '\u{2329}' | '\u{232a}' | '\u{27e6}' | '\u{27e7}' | '\u{3008}'..='\u{3011}'
        | '\u{3014}' | '\u{3015}' | '\u{ff08}' | '\u{ff09}')
}

fn is_currency(c: char) -> bool {
    matches!(c, '$' | '\u{a3}' | '\u{a5}' | '\u{e3f}' | '\u{20a0}'..='\u{20bf}' | '\u{fdfc}')
}

/// Emoji and other symbols, which count as words.
fn is_icon(c: char) -> bool {
    matches!(c, '\u{a6}' | '\u{a9}' | '\u{ae}' | '\u{2100}'..='\u{214f}' | '\u{2190}'..='\u{21ff}'
        | '\u{2300}'..='\u{23ff}' | '\u{2500}'..='\u{27bf}' | '\u{2b00}'..='\u{2bff}'
        | '\u{1f000}'..='\u{1faff}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The words of a text without spaces, by both implementations.
    fn both(text: &str) -> [Words; 2] {
        let classes = text.bytes().fold(0, |classes, byte| classes | CLASSES[usize::from(byte)]);
        let (mut bytes, mut characters) = (CutWords::new(text), CutWords::new(text));
        bytes.chunk(0, text.len(), classes);
        characters.characters(0, text.len());
        [bytes.words, characters.words]
    }

    #[test]
    fn bytes_and_characters_cut_every_short_word_the_same() {
        // One character of each kind that the rules distinguish, at every position of up to four.
        let kinds = b"aKms1.,+-*%$'\"(/:=~@";
        for length in 1..=4u32 {
            for number in 0..kinds.len().pow(length) {
                let at = |place: u32| kinds[number / kinds.len().pow(place) % kinds.len()];
                let text = String::from_utf8((0..length).map(at).collect()).unwrap();
                let [bytes, characters] = both(&text);
                assert_eq!(bytes, characters, "{text:?}");
            }
        }
    }

    #[test]
    fn every_byte_is_what_the_rules_of_characters_say() {
        for byte in 0..=0x7f {
            let c = char::from(byte);
            assert_eq!(is(byte, SPACE), super::super::is_space(c), "{c:?}");
            let between = [format!("a{c}b"), format!("1{c}2"), format!("a{c}B"), format!("1{c}b")];
            for text in [format!("{c}"), format!("{c}a"), format!("a{c}"), format!("5{c}")]
                .into_iter()
                .chain(between)
            {
                if !is(byte, SPACE) {
                    let [bytes, characters] = both(&text);
                    assert_eq!(bytes, characters, "{text:?}");
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]
        #[test]
        fn bytes_and_characters_cut_the_same_words(
            words in prop::collection::vec(
                prop_oneof![
                    "[!-~]{1,12}",
                    "[a-zA-Z]{1,6}[.,:/'\\-]{0,3}[a-zA-Z0-9]{0,6}[).,'st]{0,3}",
                    "[0-9]{1,3}(km|m|/h|%|\\$|GB)?[.+]{0,2}",
                    "(Mr|e\\.g|and/or|Ph\\.D)\\.?[,)]?",
                ],
                1..4,
            ),
        ) {
            let text = words.concat();
            let [bytes, characters] = both(&text);
            prop_assert_eq!(bytes, characters);
        }

        #[test]
        fn what_is_counted_is_what_the_words_hold(text in "[a-zA-Z0-9.,'\u{2019}\u{e9}/+%\u{4e2d}\u{1f600}\u{ab}]{1,40}") {
            let [found, _] = both(&text);
            let words = || found.spans.iter().map(|(start, end)| &text[*start..*end]);
            let solid = || words().filter(|word| !word.chars().all(is_punctuation));
            let lettered = words().filter(|word| word.chars().any(char::is_alphabetic)).count();
            let tally = Tally { solid: solid().count(), chars: solid().map(chars).sum(), lettered };
            prop_assert_eq!(found.tally, tally);
        }
    }
}
