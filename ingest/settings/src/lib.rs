//! Config files: TOML read by serde; every error has the place, what was found and what was wanted.
//!
//! A file's tables are structs with `#[serde(deny_unknown_fields)]`; what has to be named in a later fault is a
//! [`Spanned`], and an exact number is a `Spanned<Value>` whose text is taken as typed, so that no float decides data.
//!
//! ```
//! use settings::{File, Spanned};
//!
//! #[derive(Debug, serde::Deserialize)]
//! #[serde(deny_unknown_fields)]
//! struct Phase {
//!     steps: Spanned<u64>,
//! }
//!
//! let file = File::new("mix.toml", "steps = 7");
//! let phase: Phase = file.parse()?;
//! assert_eq!(file.place(phase.steps.span()), "mix.toml:1:9");
//!
//! let fault = File::new("mix.toml", "stesp = 7").parse::<Phase>().unwrap_err();
//! let message = "mix.toml:1:1: unknown key `stesp`\n  hint:   did you mean `steps`?";
//! assert_eq!(fault.to_string(), message);
//! # Ok::<(), contract::Fault>(())
//! ```

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde_path_to_error::{Path, Segment};
pub use toml::{Spanned, Value};

use contract::{Fault, Ratio, Result};

/// A table whose keys depend on one of its values.
pub type Table = BTreeMap<Spanned<String>, Spanned<Value>>;

/// A file that is built into a store.
pub const CORPUS: &str = "a corpus file";
/// A file that is trained on.
pub const CURRICULUM: &str = "a curriculum";
/// A file that replaces a store that does not exist yet.
pub const DESCRIPTION: &str = "a store stub";

/// The text of a file, and its name for error messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    name: String,
    text: String,
}

impl File {
    /// A file with this text; `name` is what faults call it.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        File { name: name.into(), text: text.into() }
    }

    /// A file as it was read. One that is not UTF-8 is a usage error, since no retry helps.
    pub fn from_bytes(name: impl Into<String>, bytes: Vec<u8>) -> Result<Self> {
        let name = name.into();
        match String::from_utf8(bytes) {
            Ok(text) => Ok(File { name, text }),
            Err(error) => {
                let at = error.utf8_error().valid_up_to();
                let line = error.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
                Err(Fault::usage("this is not a text file")
                    .at(format!("{name}:{line}"))
                    .found(format!("byte 0x{:02x} at offset {at}", error.as_bytes()[at]))
                    .wanted("TOML in UTF-8"))
            }
        }
    }

    /// What faults call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Reads it.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        let toml = toml::Deserializer::parse(&self.text).map_err(|error| {
            let message = error.message().trim().replace('\n', ", ");
            Fault::usage(format!("this is not valid TOML: {message}"))
                .at(self.at(error.span()))
                .hint("https://toml.io shows the syntax")
        })?;
        serde_path_to_error::deserialize(toml).map_err(|error| {
            let path = keys(error.path());
            self.refused(&path, error.inner().message(), error.inner().span())
        })
    }

    /// Refuses a file whose keys are those of another kind: [`CURRICULUM`], [`CORPUS`] or [`DESCRIPTION`]. Otherwise
    /// its first unknown key would be reported as a typo.
    pub fn check_kind(&self, wanted: &str) -> Result<()> {
        let Some(found) = self.kind().filter(|found| *found != wanted) else { return Ok(()) };
        let reader = match found {
            CORPUS => "`zdata build` reads it",
            CURRICULUM => "`zdata plan` and `ztrain` read it",
            _ => "a curriculum names it as its `store`",
        };
        Err(Fault::usage(format!("this is {found}, and {wanted} is wanted here"))
            .at(self.name.clone())
            .hint(reader))
    }

    /// The kind of the file, where its keys leave no doubt.
    fn kind(&self) -> Option<&'static str> {
        let keys: toml::Table = self.text.parse().ok()?;
        let sources = keys.get("source").and_then(Value::as_array);
        let has = |key: &str| sources.is_some_and(|all| all.iter().any(|it| it.get(key).is_some()));
        let kinds = [
            (CORPUS, has("files")),
            (DESCRIPTION, has("tokens")),
            (CURRICULUM, keys.contains_key("phase")),
        ];
        kinds.into_iter().find(|(_, is)| *is).map(|(kind, _)| kind)
    }

    /// `file:line:column` of the start of a span.
    pub fn place(&self, span: Range<usize>) -> String {
        let Some(before) = self.text.get(..span.start) else { return self.name.clone() };
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        format!("{}:{line}:{column}", self.name)
    }

    /// The text at a span, as typed.
    pub fn typed(&self, span: Range<usize>) -> &str {
        self.text.get(span).unwrap_or_default()
    }

    /// A value as users would write it: a string without its quotes, anything else as typed.
    pub fn plain<'a>(&'a self, value: &'a Spanned<Value>) -> &'a str {
        match value.get_ref() {
            Value::String(text) => text,
            _ => self.typed(value.span()),
        }
    }

    /// A number exactly as typed (`0.3`, `3`, `"3/10"`), or why it is not a number.
    pub fn ratio(&self, value: &Spanned<Value>) -> std::result::Result<Ratio, String> {
        match value.get_ref() {
            Value::String(_) | Value::Integer(_) | Value::Float(_) => {
                let typed = self.plain(value);
                typed.strip_prefix('+').unwrap_or(typed).replace('_', "").parse()
            }
            Value::Array(_) => Err("a number was expected, not an array".to_owned()),
            other => Err(format!("a number was expected, not a {}", other.type_str())),
        }
    }

    /// A fault about a key or a value.
    pub fn fault<T>(&self, about: &Spanned<T>, what: impl Into<String>) -> Fault {
        Fault::usage(what).at(self.place(about.span()))
    }

    /// The fault for a value that `key` cannot have, shown as typed.
    pub fn wrong<T>(&self, key: &str, value: &Spanned<T>, wanted: &str) -> Fault {
        self.fault(value, format!("`{key}` cannot have this value"))
            .found(brief(self.typed(value.span())))
            .wanted(wanted)
    }

    /// The fault for a key that `table` (empty for the file itself) does not have.
    pub fn unknown_key<'a>(
        &self,
        key: &Spanned<String>,
        table: &str,
        known: impl IntoIterator<Item = &'a str>,
    ) -> Fault {
        let word = key.get_ref();
        unknown(word, table).at(self.place(key.span())).one_of(word, known)
    }

    /// The key whose value begins at this byte, where both stand on one line.
    fn key_before(&self, at: usize) -> Option<&str> {
        let before = self.text.get(..at)?.trim_end().strip_suffix('=')?.trim_end();
        let from = before.rfind(|c: char| c.is_whitespace() || "{,".contains(c));
        Some(&before[from.map_or(0, |from| from + 1)..]).filter(|key| !key.is_empty())
    }

    fn at(&self, span: Option<Range<usize>>) -> String {
        span.map_or_else(|| self.name.clone(), |span| self.place(span))
    }

    /// Turns serde's message about the value at `path` into a fault.
    fn refused(&self, path: &[String], message: &str, span: Option<Range<usize>>) -> Fault {
        let (table, key) = match path.split_last() {
            Some((key, table)) => (table.join("."), key.as_str()),
            None => (String::new(), ""),
        };
        let typed = span.clone().map_or("", |span| self.typed(span));
        let (said, expected) = message.split_once(", expected ").unwrap_or((message, ""));
        let word = quoted(said).next().unwrap_or(typed);
        let known = quoted(expected);
        let fault = if said.starts_with("unknown field") {
            unknown(word, &table).one_of(word, known)
        } else if said.starts_with("unknown variant") {
            // There are few allowed values: all are listed, even if one is near.
            let all: Vec<&str> = known.collect();
            Fault::usage(format!("`{key}` cannot have this value"))
                .found(typed)
                .one_of(word, all.iter().copied())
                .wanted(all.join(", "))
        } else if said.starts_with("missing field") {
            let path = path.join(".");
            let whole = if path.is_empty() { "the file".to_owned() } else { format!("[{path}]") };
            Fault::usage(format!("{whole} has no `{word}`"))
        } else if let Some(limit) = limit(typed, expected) {
            Fault::usage(format!("`{key}` is too large")).found(brief(typed)).wanted(limit)
        } else if message == "u64 value was too large" {
            // A generic value holds one bit less than the unsigned integer that is wanted.
            let key = span.as_ref().and_then(|span| self.key_before(span.start)).unwrap_or(key);
            let wanted = format!("a whole number of at most {}", i64::MAX);
            Fault::usage(format!("`{key}` is too large")).found(brief(typed)).wanted(wanted)
        } else if message.ends_with("number overflowed") || expected == "any valid TOML value" {
            // The only valid TOML that no value can hold is a number with too many digits.
            let key = span.as_ref().and_then(|span| self.key_before(span.start)).unwrap_or(key);
            let wanted = "a number that 64 bits hold";
            Fault::usage(format!("`{key}` is too large")).found(brief(typed)).wanted(wanted)
        } else if typed.starts_with(&format!("[{key}]")) && expected == "a sequence" {
            let what = format!("`{key}` has the wrong kind of value");
            let wanted = format!("a list: [[{key}]], once for each");
            Fault::usage(what).found(brief(typed)).wanted(wanted)
        } else if said.starts_with("invalid") {
            let what = format!("`{key}` has the wrong kind of value");
            Fault::usage(what).found(brief(typed)).wanted(words(expected))
        } else if message == "wanted string or table" {
            let what = format!("`{key}` has the wrong kind of value");
            Fault::usage(what).found(brief(typed)).wanted("a string")
        } else {
            Fault::usage(format!("`{key}`: {message}")).found(brief(typed))
        };
        fault.at(self.at(span))
    }
}

/// The largest whole number, where a larger one was typed.
fn limit(typed: &str, expected: &str) -> Option<String> {
    let largest = match expected.trim_start_matches("a nonzero ") {
        "u32" => u64::from(u32::MAX),
        "u64" | "usize" => u64::MAX,
        _ => return None,
    };
    let digits = typed.trim().trim_start_matches('+').replace('_', "");
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let fits = digits.parse::<u64>().is_ok_and(|number| number <= largest);
    (is_number && !fits).then(|| format!("a whole number of at most {largest}"))
}

fn unknown(key: &str, table: &str) -> Fault {
    let table = if table.is_empty() { String::new() } else { format!(" of {table}") };
    Fault::usage(format!("unknown key `{key}`{table}"))
}

/// The keys on the path to a value, without list indices: the place already tells which item it is.
fn keys(path: &Path) -> Vec<String> {
    let key = |segment: &Segment| match segment {
        // What `Spanned` wraps values in.
        Segment::Map { key } if key.starts_with("$__") => None,
        Segment::Map { key } => Some(key.clone()),
        _ => None,
    };
    path.iter().filter_map(key).collect()
}

/// The words between backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The first line of what was typed.
fn brief(typed: &str) -> String {
    match typed.trim().split_once('\n') {
        Some((first, _)) => format!("{} ...", first.trim_end()),
        None => typed.trim().to_owned(),
    }
}

/// The user's word for what serde calls a type.
fn words(expected: &str) -> String {
    match expected {
        "u64" | "u32" | "usize" => "a whole number, not negative",
        "i64" | "i32" => "a whole number",
        "a nonzero u64" | "a nonzero u32" | "a nonzero usize" => "a whole number above zero",
        "f64" | "f32" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "a table",
        other if other.starts_with("struct ") => "a table",
        other => other,
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Whole {
        seed: Option<u64>,
        unit: Option<NonZeroU64>,
        share: Option<Spanned<Value>>,
        kind: Option<Kind>,
        files: Option<Vec<Spanned<String>>>,
        #[serde(default)]
        phase: Vec<Spanned<Phase>>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Kind {
        Stop,
        Skip,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Phase {
        name: String,
        mix: Option<Table>,
    }

    /// Every kind of mistake, with its place, message and hint.
    #[test]
    fn every_mistake_is_told_with_its_place() {
        let cases = [
            ("a =", "1:4", "not valid TOML", "hint:"),
            ("seed = 1\nseed = 2", "2:1", "not valid TOML: duplicate key", "hint:"),
            ("sead = 1", "1:1", "unknown key `sead`\n", "did you mean `seed`?"),
            ("zzzzzz = 1", "1:1", "unknown key `zzzzzz`\n", "seed, unit, share"),
            ("\n[[phase]]\nnam = 1", "3:1", "unknown key `nam` of phase", "did you mean `name`?"),
            ("[[phase]]\nmix = {}", "1:1", "[phase] has no `name`", ""),
            ("[phase]\nname = \"\"", "1:1", "found:  [phase]", "wanted: a list"),
            ("seed = -3", "1:8", "found:  -3", "a whole number, not negative"),
            ("seed = \"x\"", "1:8", "found:  \"x\"", "a whole number, not negative"),
            ("unit = 0", "1:8", "found:  0", "a whole number above zero"),
            ("unit = 1.50", "1:8", "found:  1.50", "a whole number above zero"),
            (
                "seed = 18446744073709551616",
                "1:8",
                "`seed` is too large",
                "at most 18446744073709551615",
            ),
            (
                "unit = 340282366920938463463374607431768211456",
                "1:8",
                "`unit` is too large",
                "64 bits",
            ),
            ("[phase]\nname = \"\"", "1:1", "found:  [phase]", "[[phase]], once for each"),
            ("kind = \"sikp\"", "1:8", "wanted: stop, skip", "did you mean `skip`?"),
            ("kind = 3", "1:8", "found:  3", "wanted: a string"),
            ("files = [\"a\",\n 1]", "2:2", "`files` has the wrong kind", "wanted: a string"),
            ("[[phase]]\nname = \"x\"\nmix = 3", "3:7", "found:  3", "wanted: a table"),
            (
                "[[phase]]\nname = \"x\"\nmix = { a = 9223372036854775808 }",
                "3:13",
                "`a` is too large",
                "at most 9223372036854775807",
            ),
        ];
        for (text, place, said, help) in cases {
            let fault = File::new("c.toml", text).parse::<Whole>().map(drop).unwrap_err();
            let told = fault.to_string();
            assert_eq!(fault.class(), contract::Class::Usage);
            assert!(told.starts_with(&format!("c.toml:{place}: ")), "{text:?}: {told}");
            assert!(told.contains(said) && told.contains(help), "{text:?}: {told}");
        }
    }

    #[test]
    fn a_right_file_is_read_and_numbers_are_exact() {
        let text = "seed = 7\nunit = 1\nshare = 0.10\nkind = \"skip\"\nfiles = [\"a\"]\n\
                    [[phase]]\nname = \"x\"\nmix = { web = 1e-1, math = \"3/10\" }";
        let file = File::new("c.toml", text);
        let Whole { seed, unit, share, kind, files, phase } = file.parse().unwrap();
        assert_eq!((seed, unit.map(NonZeroU64::get)), (Some(7), Some(1)));
        assert!(matches!(kind, Some(Kind::Skip)) && files.unwrap()[0].get_ref() == "a");
        let share = share.unwrap();
        assert_eq!(file.ratio(&share), Ok(Ratio::new(1, 10)));
        assert_eq!((file.plain(&share), file.place(share.span())), ("0.10", "c.toml:3:9".into()));
        let Phase { name, mix } = phase[0].get_ref();
        let weights: Vec<_> =
            mix.iter().flatten().map(|(k, v)| (k.get_ref().as_str(), file.ratio(v))).collect();
        let tenths = |tenths| Ok(Ratio::new(tenths, 10));
        assert_eq!((name.as_str(), weights), ("x", vec![("math", tenths(3)), ("web", tenths(1))]));
    }

    #[test]
    fn a_file_that_is_not_text_is_wrong_use() {
        let fault = File::from_bytes("c.toml", b"a = 1\nb = \xff".to_vec()).unwrap_err();
        assert_eq!(fault.class(), contract::Class::Usage);
        assert!(fault.to_string().contains("c.toml:2") && fault.to_string().contains("0xff"));
    }
}
