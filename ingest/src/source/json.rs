//! One JSON record: the fields asked for, and a check of all the others.
//!
//! This walks `sonic_rs`'s parser by hand instead of using its lazy `get`, which stops at the field it was asked for
//! and so never sees that the rest of the line is broken; its checked skip in turn recurses without a bound and looks
//! at neither the digits of an escape nor at lone surrogates. Here every string is decoded and every number parsed.
//!
//! What is accepted is what `serde_json` accepts, the depth of nesting included, and of a repeated key the last
//! counts, as there and in Python.

use sonic_rs::Read;
use sonic_rs::parser::Parser;

/// Arrays and objects within each other: a hostile line must not exhaust the stack.
const DEPTH_MAX: u32 = 127;

/// The fields wanted, as paths of keys.
pub(super) struct Wanted<'a> {
    text: Vec<&'a str>,
    id: Vec<&'a str>,
}

impl<'a> Wanted<'a> {
    /// Paths with their parts separated by dots.
    pub(super) fn new(text: &'a str, id: Option<&'a str>) -> Self {
        let id = id.map(|id| id.split('.').collect());
        Wanted { text: text.split('.').collect(), id: id.unwrap_or_default() }
    }
}

/// The fields found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// What stands at the text's path, if anything.
    pub(super) text: Option<Value>,
    /// What stands at the id's path, if anything.
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

/// How much of each wanted path leads to the value at hand; `None` once a key differed.
#[derive(Clone, Copy)]
struct Trail {
    text: Option<usize>,
    id: Option<usize>,
}

const ASIDE: Trail = Trail { text: None, id: None };

/// Reads the whole of `line` as one JSON value.
pub(super) fn read(
    line: &str,
    wanted: &Wanted<'_>,
    scratch: &mut Vec<u8>,
) -> Result<Found, String> {
    let mut walk = Walk {
        line,
        parser: Parser::new(Read::from(line)),
        wanted,
        found: Found::default(),
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
    wanted: &'w Wanted<'w>,
    found: Found,
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
            None => Err(self.wrong("the line ends within a record")),
        }
    }

    fn string(&mut self, trail: Trail) -> Result<(), String> {
        let text = match self.parser.parse_str(self.scratch) {
            Ok(text) => text,
            Err(error) => return Err(described(&error)),
        };
        let value = |reached| if reached { Some(Value::String(text.to_owned())) } else { None };
        let reached = reached(self.wanted, trail);
        if let Some(value) = value(reached.0) {
            self.found.text = Some(value);
        }
        if let Some(value) = value(reached.1) {
            self.found.id = Some(value);
        }
        Ok(())
    }

    fn number(&mut self, first: u8, trail: Trail) -> Result<(), String> {
        let start = self.parser.offset() - 1;
        self.parser.parse_number(first).map_err(|error| described(&error))?;
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
                None => return Err(self.wrong("the line ends within an array")),
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
                None => return Err(self.wrong("the line ends within an object")),
            }
        }
    }

    /// Reads a key and says how much of each path it leads along. What an equal key held before is forgotten.
    fn key(&mut self, trail: Trail) -> Result<Trail, String> {
        let key = match self.parser.parse_str(self.scratch) {
            Ok(key) => key,
            Err(error) => return Err(described(&error)),
        };
        let step = |path: &[&str], at: Option<usize>| {
            at.filter(|&at| path.get(at) == Some(&&*key)).map(|at| at + 1)
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

fn reached(wanted: &Wanted<'_>, trail: Trail) -> (bool, bool) {
    (trail.text == Some(wanted.text.len()), trail.id == Some(wanted.id.len()))
}

/// The first line of the parser's message; the others draw the place with characters of the text itself.
fn described(error: &sonic_rs::Error) -> String {
    let message = error.to_string();
    let message = message.lines().next().unwrap_or_default();
    let reason = message.split(" at line ").next().unwrap_or_default();
    format!("{reason}, column {}", error.column())
}

/// The keys of the object that should have held the last part of `path`, and the missing part.
///
/// Only for messages: it parses the line again, with a parser that keeps everything.
pub(super) fn keys_beside(line: &str, path: &str) -> (Vec<String>, String) {
    let mut at: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
    for part in path.split('.') {
        let keys = at.as_object().map(|map| map.keys().cloned().collect()).unwrap_or_default();
        match at.get_mut(part) {
            Some(next) => at = next.take(),
            None => return (keys, part.to_owned()),
        }
    }
    (Vec::new(), path.to_owned())
}
