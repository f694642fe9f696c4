//! The tokens of C++ source, so that the digest of our kernels ignores comments and white space.

/// Punctuators of several characters, longest first; every other one is a character.
const PUNCTUATORS: [&str; 26] = [
    "<<=", ">>=", "...", "->*", "<=>", "##", "<<", ">>", "<=", ">=", "==", "!=", "&&", "||", "++",
    "--", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "->", "::",
];

/// The token at the end of a directive.
const END: &[u8] = b"\n\0";

/// Appends the preprocessing tokens of `source`, which has no raw strings, with a zero after each.
///
/// A newline is a token where it ends a directive. A macro's parenthesis belongs to its name if nothing separates them,
/// since `F(x)` and `F (x)` are defined differently.
pub(super) fn append(source: &str, out: &mut Vec<u8>) {
    let joined = source.replace("\\\n", "");
    let (mut rest, mut last) = (joined.as_str(), "");
    let (mut line_start, mut directive) = (true, false);
    while !rest.is_empty() {
        if rest.starts_with('\n') && std::mem::take(&mut directive) {
            out.extend(END);
        }
        let blank = blank(rest);
        if blank > 0 {
            line_start |= rest.starts_with('\n');
            rest = &rest[blank..];
            continue;
        }
        let mut length = token(rest);
        directive |= std::mem::take(&mut line_start) && rest.starts_with('#');
        if directive && last == "define" && rest[length..].starts_with('(') {
            length += 1;
        }
        (last, rest) = rest.split_at(length);
        out.extend(last.bytes().chain([0]));
    }
    if directive {
        out.extend(END);
    }
}

/// Length of the comment or the character of white space at the start.
fn blank(text: &str) -> usize {
    let until = |end: &str| text[2..].find(end).map_or(text.len(), |place| 2 + place);
    match text {
        _ if text.starts_with("//") => until("\n"),
        _ if text.starts_with("/*") => (until("*/") + 2).min(text.len()),
        _ => usize::from(text.starts_with(|first: char| first.is_ascii_whitespace())),
    }
}

/// Length of the token at the start.
fn token(text: &str) -> usize {
    let in_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii();
    let bytes = text.as_bytes();
    let word = |from: usize| bytes[from..].iter().take_while(|byte| in_word(**byte)).count();
    let digit = usize::from(bytes[0] == b'.');
    if bytes.get(digit).is_some_and(u8::is_ascii_digit) {
        return number(bytes, in_word);
    }
    let prefix = word(0);
    let quote = bytes.get(prefix).copied().filter(|byte| matches!(byte, b'"' | b'\''));
    match quote {
        Some(quote) if matches!(&text[..prefix], "" | "u8" | "u" | "U" | "L") => {
            let end = literal(bytes, prefix + 1, quote);
            end + word(end)
        }
        _ if prefix > 0 => prefix,
        _ => PUNCTUATORS.iter().find(|known| text.starts_with(**known)).map_or(1, |it| it.len()),
    }
}

/// Length of a number, with its suffix, the signs of its exponent and its separators.
fn number(bytes: &[u8], in_word: impl Fn(u8) -> bool) -> usize {
    let belongs = |place: &usize| match bytes[*place] {
        b'+' | b'-' => matches!(bytes[place - 1], b'e' | b'E' | b'p' | b'P'),
        b'\'' => bytes.get(place + 1).is_some_and(|next| in_word(*next)),
        byte => byte == b'.' || in_word(byte),
    };
    1 + (1..bytes.len()).take_while(belongs).count()
}

/// Where a string or character literal ends, whose content starts at `start`: at the latest with its line.
fn literal(bytes: &[u8], start: usize, quote: u8) -> usize {
    let mut place = start;
    while let Some(byte) = bytes.get(place) {
        match *byte {
            b'\\' => place += 2,
            b'\n' => return place,
            byte if byte == quote => return place + 1,
            _ => place += 1,
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::append;
    use crate::device::own::SOURCES;

    fn tokens(source: &str) -> Vec<String> {
        let mut out = Vec::new();
        append(source, &mut out);
        let text = String::from_utf8(out).unwrap();
        text.split_terminator('\0').map(str::to_owned).collect()
    }

    fn texts() -> impl Iterator<Item = &'static str> {
        SOURCES.iter().map(|(_, text)| text.to_str().unwrap())
    }

    /// The source without comments, by a rule that holds only for our sources, and is asserted.
    fn without_comments(text: &str) -> String {
        assert!(!["/*", "R\"", "\t", "\r"].iter().any(|form| text.contains(form)));
        assert!(
            text.lines().all(|line| line.split("//").next().unwrap().matches('"').count() % 2 == 0)
        );
        let code = |line: &str| line.split("//").next().unwrap().trim_end().to_owned() + "\n";
        text.lines().map(code).collect()
    }

    #[test]
    fn tokens_are_those_of_the_language() {
        for (source, wanted) in [
            ("a+b ++c // x\n/* y\n */d", &["a", "+", "b", "++", "c", "d"][..]),
            ("a+ +b>>=c->d::e", &["a", "+", "+", "b", ">>=", "c", "->", "d", "::", "e"]),
            ("1.e+5f-.5-0x1'0u..", &["1.e+5f", "-", ".5", "-", "0x1'0u.."]),
            (
                "\"a // \\\" /*\"'\"' L\"x\" L \"y\"",
                &["\"a // \\\" /*\"", "'\"'", "L\"x\"", "L", "\"y\""],
            ),
            ("#define F(x) \\\n  x\ny\nz", &["#", "define", "F(", "x", ")", "x", "\n", "y", "z"]),
            ("# define F (x)\n", &["#", "define", "F", "(", "x", ")", "\n"]),
            (" /* */ #if A // b\nx #\n#y", &["#", "if", "A", "\n", "x", "#", "#", "y", "\n"]),
            ("\"open\n'x", &["\"open", "'x"]),
        ] {
            assert_eq!(tokens(source), wanted, "{source:?}");
        }
    }

    #[test]
    fn comments_are_not_tokens() {
        for text in texts() {
            assert_eq!(tokens(&without_comments(text)), tokens(text));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Lines and indentation, wherever a line begins that continues no other; and anything between tokens.
        #[test]
        fn comments_and_white_space_are_free(
            file in any::<Index>(),
            places in prop::collection::vec((any::<Index>(), 0usize..5), 1..40),
        ) {
            let text = texts().nth(file.index(SOURCES.len())).unwrap();
            let wanted = tokens(text);
            let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
            for (place, kind) in &places {
                let place = place.index(lines.len());
                if place > 0 && lines[place - 1].ends_with('\\') {
                    continue;
                }
                let added = ["", "  // it's \"new", "/* a\n\"#b */", "   ", "\t/**/ "][*kind];
                match kind {
                    0..3 => lines.insert(place, added.to_owned()),
                    _ => lines[place].insert_str(0, added),
                }
            }
            prop_assert_eq!(&tokens(&lines.join("\n")), &wanted);
            let (mut rebuilt, mut directive, mut kinds) = (String::new(), false, places.iter().cycle());
            for (number, token) in wanted.iter().enumerate() {
                directive &= token != "\n";
                directive |= token == "#" && (number == 0 || rebuilt.trim_end_matches(' ').ends_with('\n'));
                rebuilt += token;
                let kind = kinds.next().unwrap().1;
                rebuilt += match (token == "\n", directive, kind) {
                    (true, ..) => "",
                    (_, true, _) => [" ", " /*\n*/", " \\\n", "  ", " /* \" */"][kind],
                    _ => [" ", "\n  ", " /* ' */", " // \"\n", " // '\n/* # */"][kind],
                };
                // A directive begins a line.
                if wanted.get(number + 1).is_some_and(|next| next == "#") && !directive {
                    rebuilt += "\n";
                }
            }
            prop_assert_eq!(tokens(&rebuilt), wanted);
        }

        /// Without any one character of code, or with another one in its place, the tokens are others.
        #[test]
        fn every_character_of_code_counts(file in any::<Index>(), place in any::<Index>(), by in "[a-z0-9;(]") {
            let code = without_comments(texts().nth(file.index(SOURCES.len())).unwrap());
            let visible = |(_, found): &(usize, char)| !found.is_whitespace() && *found != '\\';
            let places: Vec<_> = code.char_indices().filter(visible).collect();
            let (place, found) = places[place.index(places.len())];
            let (before, after) = (&code[..place], &code[place + found.len_utf8()..]);
            prop_assert_ne!(tokens(&format!("{before}{after}")), tokens(&code));
            if !by.starts_with(found) {
                prop_assert_ne!(tokens(&format!("{before}{by}{after}")), tokens(&code));
            }
        }
    }
}
