//! Parses a `tokenizer.json` in two thirds of the time of `serde_json`.
//!
//! A vocabulary is sorted by id, so each of its hundred thousand keys is inserted at a random place of the map: finding
//! these places one by one takes most of the parsing time. Here the members of an object are read first, and the map is
//! built from all of them at once. The result is the same as with `serde_json`, which also does the parsing: the last
//! of equal keys counts, and what it refuses is refused.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// Parses a file.
pub(super) fn parse(bytes: &[u8]) -> serde_json::Result<Value> {
    serde_json::from_slice::<Whole>(bytes).map(|whole| whole.0)
}

/// A value whose objects are each built at once.
struct Whole(Value);

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Members).map(Whole)
    }
}

struct Members;

impl<'de> Visitor<'de> for Members {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any valid JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut values: A) -> Result<Value, A::Error> {
        let mut found = Vec::new();
        while let Some(Whole(value)) = values.next_element()? {
            found.push(value);
        }
        Ok(Value::Array(found))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut found: Vec<(String, Value)> = Vec::new();
        while let Some((key, Whole(value))) = members.next_entry()? {
            found.push((key, value));
        }
        Ok(Value::Object(found.into_iter().collect()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 8, |inner| {
            let members = prop::collection::btree_map("[a-d\u{e9}\"]{0,2}", inner.clone(), 0..8);
            prop_oneof![
                prop::collection::vec(inner, 0..8).prop_map(Value::from),
                members.prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_value_is_read_as_serde_json_reads_it(value in value()) {
            let text = value.to_string();
            prop_assert_eq!(parse(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(&text).unwrap());
        }

        #[test]
        fn so_are_equal_keys_and_what_is_no_json(
            text in "[\\[\\]{}:,\"ab01e. -]{0,24}",
            keys in prop::collection::vec("[a-c]", 0..9),
        ) {
            let members: Vec<String> = keys.iter().enumerate().map(|(at, key)| format!("{key:?}:{at}")).collect();
            for text in [text, format!("{{{}}}", members.join(","))] {
                match (parse(text.as_bytes()), serde_json::from_str::<Value>(&text)) {
                    (Ok(ours), Ok(theirs)) => prop_assert_eq!(ours, theirs),
                    (Err(ours), Err(theirs)) => prop_assert_eq!(ours.to_string(), theirs.to_string()),
                    (ours, theirs) => prop_assert!(false, "{:?} and {:?}", ours, theirs),
                }
            }
        }
    }

    #[test]
    fn nesting_ends_where_that_of_serde_json_does() {
        for depth in [1, 127, 128, 129, 100_000] {
            let text = "[".repeat(depth) + &"]".repeat(depth);
            let theirs = serde_json::from_str::<Value>(&text).map_err(|error| error.to_string());
            assert_eq!(parse(text.as_bytes()).map_err(|error| error.to_string()), theirs);
        }
    }
}
