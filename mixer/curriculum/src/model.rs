//! `[model]` and a phase's overrides: values that only the trainer interprets.
//!
//! No key is known here, so a new field of the model changes the trainer alone.

use std::borrow::Cow;
use std::collections::BTreeMap;

use contract::{Digestible, Hasher, Result};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use settings::Value;

use super::places::KeySpans;
use super::text::{float, inline, key, quoted};

/// A table of model keys without dates. Its digest is over typed values: `1e4` and `10_000.0` are equal, `10_000`
/// differs.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(transparent)]
pub struct ModelTable(pub BTreeMap<String, Value>);

impl JsonSchema for ModelTable {
    fn schema_name() -> Cow<'static, str> {
        "Model".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "object"})
    }
}

impl Digestible for ModelTable {
    fn feed(&self, hasher: &mut Hasher) {
        hasher.tag("model.v1");
        feed_table(self.0.iter(), hasher);
    }
}

/// Hashes the pairs in key order, whatever the order of their map.
fn feed_table<'a>(pairs: impl Iterator<Item = (&'a String, &'a Value)>, hasher: &mut Hasher) {
    let pairs: BTreeMap<_, _> = pairs.collect();
    hasher.u64(pairs.len() as u64);
    for (key, value) in pairs {
        hasher.str(key);
        feed_value(value, hasher);
    }
}

fn feed_value(value: &Value, hasher: &mut Hasher) {
    match value {
        Value::String(text) => hasher.tag("text").str(text),
        Value::Integer(number) => hasher.tag("integer").u64(number.cast_unsigned()),
        Value::Float(number) => hasher.tag("float").u64(number.to_bits()),
        Value::Boolean(truth) => hasher.tag("truth").u64(u64::from(*truth)),
        // Parsing refuses dates: their text would depend on the TOML library.
        Value::Datetime(_) => hasher.tag("date"),
        Value::Array(values) => {
            hasher.tag("list").u64(values.len() as u64);
            values.iter().for_each(|value| feed_value(value, hasher));
            hasher
        }
        Value::Table(table) => {
            hasher.tag("table");
            feed_table(table.iter(), hasher);
            hasher
        }
    };
}

impl ModelTable {
    /// Refuses dates. No model key is one, and their digest would depend on the TOML library.
    pub(super) fn check(&self, places: &KeySpans, path: &str) -> Result<()> {
        let dated = self.0.iter().find(|(_, value)| has_date(value));
        dated.map_or(Ok(()), |(key, value)| {
            Err(places.fault(&format!("{path}.{key}"), "a model has no dates").found(value).wanted(
                "strings, numbers, booleans, lists and tables of them: a date in quotes is a string",
            ))
        })
    }
}

fn has_date(value: &Value) -> bool {
    match value {
        Value::Datetime(_) => true,
        Value::Array(values) => values.iter().any(has_date),
        Value::Table(table) => table.iter().any(|(_, value)| has_date(value)),
        _ => false,
    }
}

/// The canonical text of a value.
pub(super) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => quoted(text),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => float(*number),
        Value::Boolean(truth) => truth.to_string(),
        Value::Datetime(date) => date.to_string(),
        Value::Array(values) => {
            format!("[{}]", values.iter().map(text).collect::<Vec<_>>().join(", "))
        }
        Value::Table(table) => {
            let pairs: BTreeMap<_, _> = table.iter().collect();
            let pair = |(name, value): (&String, _)| format!("{} = {}", key(name), text(value));
            inline(pairs.into_iter().map(pair).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use contract::Digest;

    use super::*;
    use crate::Curriculum;

    fn digest(text: &str) -> Digest {
        Digest::of(&ModelTable(toml::from_str(text).unwrap()))
    }

    #[test]
    fn the_digest_is_that_of_the_values() {
        let one = "a = 1\nb = { x = [1.5, true], y = \"t\" }\n";
        let same = "b.y = 't'\nb.x = [15e-1, true]\na = 0x1\n";
        assert_eq!(digest(one), digest(same));
        let others = [
            "a = 1.0\nb = { x = [1.5, true], y = \"t\" }",
            "a = \"1\"\nb = { x = [1.5, true], y = \"t\" }",
            "a = true\nb = { x = [1.5, true], y = \"t\" }",
            "a = 1\nb = { x = [[1.5, true]], y = \"t\" }",
            "a = 1\nb = { x = [1.5], y = \"t\" }",
            "a = 1\nx = [1.5, true]\ny = \"t\"",
            "a = 1\nc = { x = [1.5, true], y = \"t\" }",
            "a = 1\n",
            "",
        ];
        for (number, other) in others.iter().enumerate() {
            assert_ne!(digest(one), digest(other), "{other}");
            assert!(
                others[..number].iter().all(|before| digest(before) != digest(other)),
                "{other}"
            );
        }
    }

    #[test]
    fn a_date_is_no_value_of_a_model() {
        let curriculum = |model: &str, own: &str| {
            let phase =
                "[[phase]]\nname = \"a\"\nsteps = 1\nseq_len = 8\nbatch = 1\nmix = { x = 1 }\n";
            let text = format!("store = \"s\"\n[model]\n{model}\n{phase}[phase.model]\n{own}\n");
            Curriculum::parse(&text, "c.toml")
        };
        curriculum("born = \"2020-01-01\"", "x = [1, \"12:00:00\"]").unwrap();
        for (model, own, place) in [
            ("born = 2020-01-01", "", "c.toml:3:1"),
            ("born = [{ x = 2020-01-01T10:00:00Z }]", "", "c.toml:3:1"),
            ("", "x = [12:00:00]", "c.toml:11:1"),
        ] {
            let fault = curriculum(model, own).unwrap_err();
            assert_eq!(fault.place(), Some(place), "{fault}");
            assert!(fault.to_string().contains("a model has no dates"), "{fault}");
        }
    }

    #[test]
    fn the_text_of_a_value_is_that_value() {
        let line = "v = [1, 2.5, inf, nan, \"q\\\"\\n\", {}, { a = false, \"b c\" = [] }, 1e300]";
        let value = toml::from_str::<toml::Table>(line).unwrap()["v"].clone();
        let again = toml::from_str::<toml::Table>(&format!("v = {}", text(&value))).unwrap();
        assert_eq!(text(&again["v"]), text(&value));
        let bits = |value: &Value| {
            Digest::of(&ModelTable(BTreeMap::from([("v".to_owned(), value.clone())])))
        };
        assert_eq!(bits(&again["v"]), bits(&value));
    }
}
