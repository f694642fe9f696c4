//! Values of a record as they were written: numbers keep their digits instead of becoming floats, and objects keep the
//! order of their keys.

use std::borrow::Cow;
use std::collections::BTreeSet;

use contract::Fault;
use sonic_rs::{LazyValue, to_array_iter, to_object_iter};

use crate::source::names;

/// Why a text is not JSON.
pub(super) type Malformed = String;

/// The kind of a JSON value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text.
    String,
    /// Keys with values.
    Object,
    /// Values.
    List,
    /// Null.
    Null,
    /// A number or a boolean, whose text is its value.
    Plain,
}

/// The kind of a value, known from its first character.
pub(super) fn kind(value: &str) -> Kind {
    match value.bytes().next() {
        Some(b'"') => Kind::String,
        Some(b'{') => Kind::Object,
        Some(b'[') => Kind::List,
        Some(b'n') | None => Kind::Null,
        Some(_) => Kind::Plain,
    }
}

/// The value at a path of keys and indexes, if any.
pub(super) fn at<'a>(value: &'a str, path: &str) -> Result<Option<&'a str>, Malformed> {
    let mut value = value.trim();
    for key in names::of(path) {
        let inner = match (kind(value), key.parse::<usize>()) {
            // The last of equal keys counts.
            (Kind::Object, _) => members(value)?.into_iter().rfind(|(name, _)| *name == key),
            (Kind::List, Ok(index)) => elements(value)?.get(index).map(|it| (String::new(), *it)),
            _ => None,
        };
        let Some((_, inner)) = inner else { return Ok(None) };
        value = inner;
    }
    Ok(Some(value))
}

/// The list of messages at a path of a record.
pub(super) fn messages<'a>(record: &'a str, path: &str) -> contract::Result<&'a str> {
    let list = at(record, path).map_err(|why| Fault::data("malformed JSON").found(why))?;
    list.filter(|list| kind(list) == Kind::List)
        .ok_or_else(|| Fault::data(format!("key `{path}` holds no messages")).wanted("a list"))
}

/// The elements of a list.
pub(super) fn elements(list: &str) -> Result<Vec<&str>, Malformed> {
    to_array_iter(list).map(|element| raw(&element.map_err(|error| error.to_string())?)).collect()
}

/// The members of an object, including repeated keys.
pub(super) fn members(object: &str) -> Result<Vec<(String, &str)>, Malformed> {
    let members = to_object_iter(object).map(|member| {
        let (name, value) = member.map_err(|error| error.to_string())?;
        Ok((name.to_string(), raw(&value)?))
    });
    members.collect()
}

/// The text of a value, which is a slice of the record's.
fn raw<'a>(value: &LazyValue<'a>) -> Result<&'a str, Malformed> {
    match value.as_raw_cow() {
        Cow::Borrowed(text) => Ok(text),
        Cow::Owned(_) => Err("a value was copied".to_owned()),
    }
}

/// The text of a string.
pub(super) fn text(string: &str) -> Result<String, Malformed> {
    serde_json::from_str(string).map_err(|error| error.to_string())
}

/// Appends a value to `into` as JSON without spaces, its numbers and key order as written.
pub(super) fn compact(value: &str, into: &mut String) -> Result<(), Malformed> {
    match kind(value) {
        Kind::String => *into += &serde_json::Value::String(text(value)?).to_string(),
        Kind::Null | Kind::Plain => *into += value,
        Kind::List => {
            into.push('[');
            for (index, element) in elements(value)?.into_iter().enumerate() {
                *into += if index > 0 { "," } else { "" };
                compact(element, into)?;
            }
            into.push(']');
        }
        Kind::Object => {
            // The last of equal keys counts.
            let mut members = members(value)?;
            let mut seen = BTreeSet::new();
            members.reverse();
            members.retain(|(name, _)| seen.insert(name.clone()));
            into.push('{');
            for (index, (name, inner)) in members.into_iter().rev().enumerate() {
                *into += if index > 0 { "," } else { "" };
                *into += &serde_json::Value::String(name).to_string();
                into.push(':');
                compact(inner, into)?;
            }
            into.push('}');
        }
    }
    Ok(())
}
