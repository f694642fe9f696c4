//! Parses one JSON record: the wanted fields, and a check of all the others.
//!
//! This drives `sonic_rs`'s parser by hand, because its lazy `get` stops at the wanted field and so misses errors in
//! the rest of the line; its checked skip recurses without limit, and checks neither the digits of escapes nor lone
//! surrogates. Here every string is decoded and every number parsed.
//!
//! It accepts what `serde_json` accepts, including its limit on nesting, and also numbers of any size; the last of
//! repeated keys counts, as there and in Python.

use std::borrow::Cow;

use sonic_rs::parser::{Parser, Reference};
use sonic_rs::{Read, to_object_iter};

use super::names;

/// The limit on nested arrays and objects: a hostile line must not exhaust the stack.
const DEPTH_MAX: u32 = 127;

/// A longer string with escapes is moved out of the scratch buffer instead of copied, so memory holds it only once.
const MOVED_BYTES: usize = 1 << 20;

/// The start of the message for a value that is not complete at the end of its line.
pub(super) const ENDS_WITHIN: &str = "the line ends within";

/// The fields wanted, as paths of keys.
pub(super) struct Wanted {
    text: Vec<String>,
    id: Vec<String>,
}

impl Wanted {
    /// Paths with their parts separated by dots.
    pub(super) fn new(text: &str, id: Option<&str>) -> Self {
        Wanted { text: names::of(text), id: id.map(names::of).unwrap_or_default() }
    }
}

/// The values of the wanted fields.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FieldValues {
    /// The value at the text's path, if any.
    pub(super) text: Option<Value>,
    /// The value at the id's path, if any.
    pub(super) id: Option<Value>,
}

/// A value at a wanted path.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// A string.
    String(String),
    /// An integer, as written.
    Integer(String),
    /// Anything else, by its kind.
    Other(&'static str),
}

/// How many parts of each wanted path lead to the current value; `None` once a key differed.
#[derive(Clone, Copy)]
struct Trail {
    text: Option<usize>,
    id: Option<usize>,
}

const ASIDE: Trail = Trail { text: None, id: None };

/// Parses the whole `line` as one JSON value.
pub(super) fn read(
    line: &str,
    wanted: &Wanted,
    scratch: &mut Vec<u8>,
) -> Result<FieldValues, String> {
    let mut walk = Walk {
        line,
        parser: Parser::new(Read::from(line)),
        wanted,
        found: FieldValues::default(),
        scratch,
    };
    let id = if wanted.id.is_empty() { None } else { Some(0) };
    walk.value(Trail { text: Some(0), id }, 0)?;
    match walk.parser.skip_space() {
        None => Ok(walk.found),
        Some(_) => Err(walk.wrong("something after the end of the record")),
    }
}

struct Walk<'a, 'w> {
    line: &'a str,
    parser: Parser<Read<'a>>,
    wanted: &'w Wanted,
    found: FieldValues,
    scratch: &'w mut Vec<u8>,
}

impl Walk<'_, '_> {
    fn value(&mut self, trail: Trail, depth: u32) -> Result<(), String> {
        let first = self.parser.skip_space();
        self.value_from(first, trail, depth)
    }

    fn value_from(&mut self, first: Option<u8>, trail: Trail, depth: u32) -> Result<(), String> {
        match first {
            Some(b'"') => self.string(trail),
            Some(b'{') => self.object(trail, depth + 1),
            Some(b'[') => self.array(trail, depth + 1),
            Some(digit @ (b'-' | b'0'..=b'9')) => self.number(digit, trail),
            Some(b't') => self.literal("rue", "a boolean", trail),
            Some(b'f') => self.literal("alse", "a boolean", trail),
            Some(b'n') => self.literal("ull", "null", trail),
            Some(_) => Err(self.wrong("no JSON value")),
            None => Err(self.wrong(&format!("{ENDS_WITHIN} a record"))),
        }
    }

    fn string(&mut self, trail: Trail) -> Result<(), String> {
        let (is_text, is_id) = reached(self.wanted, trail);
        let copy = match self.parser.parse_str(self.scratch) {
            Err(error) => return Err(described(&error)),
            Ok(_) if !is_text && !is_id => return Ok(()),
            Ok(Reference::Copied(text)) if text.len() >= MOVED_BYTES => None,
            Ok(text) => Some(text.to_owned()),
        };
        let text = match copy {
            Some(text) => text,
            None => String::from_utf8(std::mem::take(self.scratch)).map_err(|e| e.to_string())?,
        };
        if is_id {
            self.found.id = Some(Value::String(text.clone()));
        }
        if is_text {
            self.found.text = Some(Value::String(text));
        }
        Ok(())
    }

    fn number(&mut self, first: u8, trail: Trail) -> Result<(), String> {
        let start = self.parser.offset() - 1;
        // Not parsed: a number outside the range of floats is accepted.
        self.parser.skip_number(first).map_err(|error| described(&error))?;
        let written = &self.line[start..self.parser.offset()];
        if written.contains(['.', 'e', 'E']) {
            self.note(trail, || Value::Other("a number with a fraction"));
        } else {
            self.note(trail, || Value::Integer(written.to_owned()));
        }
        Ok(())
    }

    fn literal(&mut self, rest: &str, kind: &'static str, trail: Trail) -> Result<(), String> {
        self.parser.parse_literal(rest).map_err(|error| described(&error))?;
        self.note(trail, || Value::Other(kind));
        Ok(())
    }

    fn array(&mut self, trail: Trail, depth: u32) -> Result<(), String> {
        self.descend(depth)?;
        self.note(trail, || Value::Other("an array"));
        let mut first = self.parser.skip_space();
        if first == Some(b']') {
            return Ok(());
        }
        loop {
            self.value_from(first, ASIDE, depth)?;
            match self.parser.skip_space() {
                Some(b']') => return Ok(()),
                Some(b',') => first = self.parser.skip_space(),
                Some(_) => return Err(self.wrong("neither a comma nor the end of the array")),
                None => return Err(self.wrong(&format!("{ENDS_WITHIN} an array"))),
            }
        }
    }

    fn object(&mut self, trail: Trail, depth: u32) -> Result<(), String> {
        self.descend(depth)?;
        self.note(trail, || Value::Other("an object"));
        let mut first = self.parser.skip_space();
        if first == Some(b'}') {
            return Ok(());
        }
        loop {
            if first != Some(b'"') {
                return Err(self.wrong("no key where one was due"));
            }
            let member = self.key(trail)?;
            if self.parser.skip_space() != Some(b':') {
                return Err(self.wrong("no colon after a key"));
            }
            self.value(member, depth)?;
            match self.parser.skip_space() {
                Some(b'}') => return Ok(()),
                Some(b',') => first = self.parser.skip_space(),
                Some(_) => return Err(self.wrong("neither a comma nor the end of the object")),
                None => return Err(self.wrong(&format!("{ENDS_WITHIN} an object"))),
            }
        }
    }

    /// Reads a key, and returns how far it matches each path. The value of an earlier equal key is discarded.
    fn key(&mut self, trail: Trail) -> Result<Trail, String> {
        let key = match self.parser.parse_str(self.scratch) {
            Ok(key) => key,
            Err(error) => return Err(described(&error)),
        };
        let step = |path: &[String], at: Option<usize>| {
            at.filter(|&at| path.get(at).is_some_and(|name| *name == *key)).map(|at| at + 1)
        };
        let member = Trail {
            text: step(&self.wanted.text, trail.text),
            id: step(&self.wanted.id, trail.id),
        };
        if member.text.is_some() {
            self.found.text = None;
        }
        if member.id.is_some() {
            self.found.id = None;
        }
        Ok(member)
    }

    fn note(&mut self, trail: Trail, value: impl Fn() -> Value) {
        let (text, id) = reached(self.wanted, trail);
        if text {
            self.found.text = Some(value());
        }
        if id {
            self.found.id = Some(value());
        }
    }

    fn descend(&self, depth: u32) -> Result<(), String> {
        if depth > DEPTH_MAX {
            return Err(self.wrong("arrays and objects nested too deeply"));
        }
        Ok(())
    }

    fn wrong(&self, what: &str) -> String {
        format!("{what}, column {}", self.parser.offset().max(1))
    }
}

fn reached(wanted: &Wanted, trail: Trail) -> (bool, bool) {
    (trail.text == Some(wanted.text.len()), trail.id == Some(wanted.id.len()))
}

/// The first line of the parser's message; the other lines show the place in the text.
fn described(error: &sonic_rs::Error) -> String {
    let message = error.to_string();
    let message = message.lines().next().unwrap_or_default();
    let reason = message.split(" at line ").next().unwrap_or_default();
    format!("{reason}, column {}", error.column())
}

/// The values at these paths of a line that was parsed: strings as they are, other values without white space, none
/// where there is null or nothing. As everywhere, the last of equal keys counts.
pub(super) fn kept(line: &str, paths: &[String]) -> Vec<Option<String>> {
    let at = |path: &String| {
        let raw = names::of(path).iter().try_fold(line.trim(), |at, name| {
            let members = to_object_iter(at).filter_map(Result::ok);
            let named = members.filter(|(key, _)| *key == **name);
            named.last().and_then(|(_, value)| match value.as_raw_cow() {
                Cow::Borrowed(text) => Some(text.trim()),
                Cow::Owned(_) => None,
            })
        })?;
        match raw.as_bytes().first()? {
            b'"' => serde_json::from_str(raw).ok(),
            b'n' => None,
            _ => Some(compact(raw)),
        }
    };
    paths.iter().map(at).collect()
}

/// A JSON value without the white space outside its strings.
fn compact(raw: &str) -> String {
    let (mut in_string, mut escaped) = (false, false);
    let mut stays = |c: char| {
        let is_quote = c == '"' && !escaped;
        escaped = in_string && c == '\\' && !escaped;
        in_string ^= is_quote;
        in_string || is_quote || !c.is_ascii_whitespace()
    };
    raw.chars().filter(|c| stays(*c)).collect()
}

/// The keys of the object that lacks the last part of `path`, and the missing part. Only for messages.
pub(super) fn keys_beside(line: &str, path: &str) -> (Vec<String>, String) {
    let mut at = line.trim();
    for name in names::of(path) {
        let members = to_object_iter(at).filter_map(Result::ok);
        let mut members: Vec<(String, &str)> = members
            .filter_map(|(key, value)| match value.as_raw_cow() {
                Cow::Borrowed(text) => Some((key.to_string(), text)),
                Cow::Owned(_) => None,
            })
            .collect();
        match members.iter().rfind(|(key, _)| *key == name) {
            Some((_, inner)) => at = inner,
            None => return (members.drain(..).map(|(key, _)| key).collect(), name),
        }
    }
    (Vec::new(), path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::sample::{Index, select};

    fn ours(line: &str, text: &str, id: Option<&str>) -> Result<FieldValues, String> {
        read(line, &Wanted::new(text, id), &mut Vec::new())
    }

    /// What `serde_json` finds at a path, in our terms.
    fn theirs(line: &str, path: &str) -> Result<Option<Value>, bool> {
        let out_of_range = |error: serde_json::Error| error.to_string().contains("out of range");
        let mut at: serde_json::Value = serde_json::from_str(line).map_err(out_of_range)?;
        for part in path.split('.') {
            match at.get_mut(part) {
                Some(next) => at = next.take(),
                None => return Ok(None),
            }
        }
        Ok(Some(match at {
            serde_json::Value::String(text) => Value::String(text),
            serde_json::Value::Null => Value::Other("null"),
            serde_json::Value::Bool(_) => Value::Other("a boolean"),
            serde_json::Value::Array(_) => Value::Other("an array"),
            serde_json::Value::Object(_) => Value::Other("an object"),
            // The text of a number is lost there, so only the fact that it is a number is compared.
            serde_json::Value::Number(_) => Value::Integer(String::new()),
        }))
    }

    fn agree(line: &str) -> Result<(), TestCaseError> {
        for (text, id) in [("a", "b.c"), ("a.b", "a"), ("c", "c"), ("a.a.a", "b")] {
            let found = ours(line, text, Some(id)).map_err(|_| false);
            let wanted = theirs(line, text).and_then(|text| Ok((text, theirs(line, id)?)));
            // `serde_json` refuses a number outside the range of floats, which is accepted here.
            if wanted == Err(true) {
                continue;
            }
            let found = found.map(|found| (found.text, found.id));
            let same = |value| match value {
                Value::Integer(_) | Value::Other("a number with a fraction") => {
                    Value::Integer(String::new())
                }
                value => value,
            };
            let found = found.map(|(text, id)| (text.map(same), id.map(same)));
            prop_assert_eq!(found, wanted, "{:?}", line);
        }
        Ok(())
    }

    fn value() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<f64>().prop_map(Into::into),
            any::<String>().prop_map(Into::into),
            "[ -~]{0,80}".prop_map(Into::into),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            let key =
                prop_oneof![select(vec!["a", "b", "c"]).prop_map(str::to_owned), any::<String>()];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(serde_json::Value::from),
                prop::collection::btree_map(key, inner, 0..4)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    /// Pieces of JSON, and invalid ones.
    fn pieces() -> impl Strategy<Value = String> {
        let piece = select(vec![
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"",
            "\"a\"",
            "\"b\"",
            "\"c\"",
            "\"a\":",
            "\"b\":",
            "1",
            "-",
            "0",
            ".5",
            "e9",
            "E+",
            "e999",
            "1e400",
            "99999999999999999999",
            "true",
            "false",
            "null",
            "nul",
            "t",
            " ",
            "\t",
            "\r",
            "\\",
            "\\u",
            "\\ud834",
            "\\udd1e",
            "\\u00e9",
            "\\u00",
            "\\n",
            "\\x",
            "\u{7f}",
            "\u{0}",
            "\u{1f}",
            "\u{e9}",
            "\u{2028}",
            "NaN",
            "'",
            "/",
            "\"\"",
            "{}",
            "[]",
        ]);
        prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn values_are_read_as_serde_json_reads_them(value in value(), pretty: bool) {
            let shown = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) };
            agree(&shown.unwrap())?;
        }

        #[test]
        fn values_are_kept_as_serde_json_writes_them(value in value(), pretty: bool) {
            // Floats are written by the same library, so that their text is the same.
            let shown = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) };
            let shown = shown.unwrap();
            let paths = [vec!["a"], vec!["b", "c"], vec!["a", "b", "c"]];
            let named: Vec<String> = paths.iter().map(|path| path.join(".")).collect();
            let wanted: Vec<_> = paths.iter().map(|path| kept_by_serde(&value, path)).collect();
            prop_assert_eq!(kept(&shown, &named), wanted, "{:?}", shown);
        }

        #[test]
        fn broken_values_are_judged_as_serde_json_judges_them(
            value in value(), edits in prop::collection::vec((any::<Index>(), pieces(), any::<bool>()), 1..3),
        ) {
            let mut line: Vec<char> = value.to_string().chars().collect();
            for (at, piece, replace) in edits {
                let at = at.index(line.len() + 1);
                let end = (at + usize::from(replace)).min(line.len());
                line.splice(at..end, piece.chars());
            }
            agree(&line.into_iter().collect::<String>())?;
        }

        #[test]
        fn escapes_are_decoded_as_serde_json_decodes_them(
            pieces in prop::collection::vec(
                prop_oneof![
                    "[ a-z\u{e9}\u{4e2d}\u{1f600}]{0,20}|\u{0}|\t|\u{7f}",
                    "\\\\[\"\\\\/bfnrtuxU0]|\\\\u[0-9a-fA-FG]{4}",
                    "\\\\u[dD][89abAB][0-9]{2}\\\\u[dD][c-fC-F][0-9]{2}",
                ],
                0..12,
            ),
            end in select(vec!["\"}", "\" }", "\"", "}", "\",\"a\":1}", "\\"]),
        ) {
            agree(&format!("{{\"a\":\"{}{end}", pieces.concat()))?;
        }

        #[test]
        fn nonsense_is_judged_as_serde_json_judges_it(line in pieces()) {
            agree(&line)?;
            agree(&format!("{{\"a\":{line}}}"))?;
            agree(&format!("{{\"a\":\"{line}\",\"b\":{{\"c\":\"{line}\"}}}}"))?;
        }
    }

    /// What `serde_json` finds at a path, as it is kept.
    fn kept_by_serde(value: &serde_json::Value, path: &[&str]) -> Option<String> {
        let at = path.iter().try_fold(value, |value, key| value.get(key))?;
        match at {
            serde_json::Value::Null => None,
            serde_json::Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        }
    }

    #[test]
    fn kept_numbers_and_lists_stay_as_they_are_written() {
        let line = r#" {"n": 1e999, "l": [1.50, "a \" b\\", { "k" : null } ], "s": "\u00e9 x", "z": null, "s2": "" } "#;
        let paths = ["n", "l", "s", "z", "s2", "none", "l.k", "s.x"].map(str::to_owned);
        let found = kept(line, &paths);
        let wanted = [
            Some("1e999"),
            Some(r#"[1.50,"a \" b\\",{"k":null}]"#),
            Some("\u{e9} x"),
            None,
            Some(""),
        ];
        let wanted = wanted.into_iter().chain([None; 3]).map(|it| it.map(str::to_owned));
        assert_eq!(found, wanted.collect::<Vec<_>>());
        let twice = kept(r#"{"a":{"b":1},"a":{"b":2,"b":3}}"#, &["a.b".to_owned()]);
        assert_eq!(twice, [Some("3".to_owned())]);
    }

    #[test]
    fn the_last_of_equal_keys_counts() {
        let found = ours(r#"{"a":{"b":"x"},"a":{"b":"y","b":"z"}}"#, "a.b", None).unwrap();
        assert_eq!(found.text, Some(Value::String("z".to_owned())));
        let found = ours(r#"{"a":{"b":"x"},"a":{}}"#, "a.b", None).unwrap();
        assert_eq!(found.text, None);
    }

    #[test]
    fn a_number_of_any_size_stands_beside_a_text() {
        for number in [
            "1e999",
            "-1E+400",
            "0.1e-9999",
            &"9".repeat(5000),
            &format!("-0.{}e7", "1".repeat(999)),
        ] {
            let line = format!("{{\"n\":{number},\"t\":\"x\",\"l\":[{number} ,{number}]}}");
            assert_eq!(ours(&line, "t", None).unwrap().text, Some(Value::String("x".to_owned())));
        }
        for wrong in ["1e", "01", "-", "1.", ".1", "1e+", "--1", "1.e5", "+1", "1e9.5", "1.2.3"] {
            assert!(ours(&format!("{{\"n\":{wrong},\"t\":\"x\"}}"), "t", None).is_err(), "{wrong}");
        }
    }

    #[test]
    fn integers_keep_every_digit() {
        for written in ["0", "-12", "18446744073709551616", "123456789012345678901234567890"] {
            let found = ours(&format!("{{\"id\": {written} }}"), "t", Some("id")).unwrap();
            assert_eq!(found.id, Some(Value::Integer(written.to_owned())));
        }
    }

    #[test]
    fn nesting_is_bounded_where_serde_json_bounds_it() {
        for depth in [126, 127, 128, 129] {
            agree(&format!("{}{}", "[".repeat(depth), "]".repeat(depth))).unwrap();
            agree(&format!("{}1{}", "{\"a\":".repeat(depth), "}".repeat(depth))).unwrap();
        }
        for opening in ["[", "{\"a\":"] {
            assert!(ours(&opening.repeat(1_000_000), "t", None).is_err());
        }
    }
}
