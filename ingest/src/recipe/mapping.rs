//! From the fields of a record to a text: templates (`"Q: {question}\nA: {answer}"`) and chats (a list of messages).

use std::collections::BTreeSet;

use contract::framed::quoted;
use contract::{Fault, Result};
use serde_json::Value;

/// How a record becomes a text, where one field is not enough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// Fields put into a template.
    Template(Template),
    /// The messages of a chat, each put into a template of its own.
    Chat {
        /// Where the list stands.
        path: String,
        /// What a message becomes.
        message: Template,
    },
}

/// Text with fields in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Template {
    written: String,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Field(String),
}

impl Template {
    /// Reads a template: `{path.of.field}`, and `{{` and `}}` for the brackets themselves.
    pub(crate) fn parse(written: &str) -> std::result::Result<Template, String> {
        let mut parts = Vec::new();
        let mut text = String::new();
        let mut rest = written;
        while let Some(at) = rest.find(['{', '}']) {
            text += &rest[..at];
            let from = &rest[at..];
            if from.starts_with("{{") || from.starts_with("}}") {
                text.push_str(&from[..1]);
                rest = &from[2..];
                continue;
            }
            let end = from.find('}').filter(|end| *end > 0);
            let (true, Some(end)) = (from.starts_with('{'), end) else {
                return Err(format!("a bracket stands alone: {from:?}"));
            };
            let path = &from[1..end];
            if path.split('.').any(str::is_empty) || path.contains('{') {
                return Err(format!("{path:?} is not a path of fields"));
            }
            parts.push(Part::Text(std::mem::take(&mut text)));
            parts.push(Part::Field(path.to_owned()));
            rest = &from[end + 1..];
        }
        text += rest;
        parts.push(Part::Text(text));
        if parts.len() == 1 {
            return Err("it names no field".to_owned());
        }
        Ok(Template { written: written.to_owned(), parts })
    }

    fn render(&self, record: &Value, into: &mut String) -> std::result::Result<(), String> {
        for part in &self.parts {
            match part {
                Part::Text(text) => *into += text,
                Part::Field(path) => match at(record, path) {
                    Some(Value::String(text)) => *into += text,
                    Some(Value::Null) | None => return Err(path.clone()),
                    Some(other) => *into += &other.to_string(),
                },
            }
        }
        Ok(())
    }
}

impl Mapping {
    /// The mapping as canonical text.
    pub(crate) fn describe(&self) -> String {
        match self {
            Mapping::Template(template) => format!("template={}", quoted(&template.written)),
            Mapping::Chat { path, message } => {
                format!("chat={} message={}", quoted(path), quoted(&message.written))
            }
        }
    }

    /// The fields of a record that it starts from, each once, in order.
    pub(crate) fn roots(&self) -> BTreeSet<&str> {
        let root = |path: &'_ str| path.split('.').next().unwrap_or_default().len();
        match self {
            Mapping::Chat { path, .. } => BTreeSet::from([&path[..root(path)]]),
            Mapping::Template(template) => {
                let fields = template.parts.iter().filter_map(|part| match part {
                    Part::Field(path) => Some(&path[..root(path)]),
                    Part::Text(_) => None,
                });
                fields.collect()
            }
        }
    }

    /// The text of a record, given as JSON.
    pub(crate) fn text(&self, record: &str) -> Result<String> {
        let record: Value = serde_json::from_str(record)
            .map_err(|error| Fault::data("malformed JSON").found(error))?;
        let mut text = String::new();
        let missing = |path: String| Fault::data(format!("no text at key `{path}`"));
        match self {
            Mapping::Template(template) => {
                template.render(&record, &mut text).map_err(missing)?;
            }
            Mapping::Chat { path, message } => {
                let list = at(&record, path).and_then(Value::as_array);
                let list = list.ok_or_else(|| {
                    Fault::data(format!("key `{path}` holds no messages")).wanted("a list")
                })?;
                for (index, value) in list.iter().enumerate() {
                    message
                        .render(value, &mut text)
                        .map_err(|key| missing(format!("{path}.{index}.{key}")))?;
                }
            }
        }
        Ok(text)
    }
}

/// What stands at a path of keys.
fn at<'a>(record: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(record, |value, key| match value {
        Value::Array(list) => list.get(key.parse::<usize>().ok()?),
        value => value.get(key),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_put_where_they_are_named() {
        let template = Template::parse("Q: {a.b}\n{{{c}}} {d.1}").unwrap();
        let mapping = Mapping::Template(template);
        let text = mapping.text(r#"{"a": {"b": "why?"}, "c": 7.5, "d": [1, true]}"#).unwrap();
        assert_eq!(text, "Q: why?\n{7.5} true");
        let fault = mapping.text(r#"{"a": {"b": "why?"}, "c": null}"#).unwrap_err().to_string();
        assert!(fault.contains("`c`"), "{fault}");
        let roots: Vec<&str> = mapping.roots().into_iter().collect();
        assert_eq!(roots, ["a", "c", "d"]);
        for wrong in ["no field", "{", "}", "{a", "a}", "{}", "{a..b}", "{a{b}"] {
            assert!(Template::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_chat_is_its_messages_in_order() {
        let message = Template::parse("<|{role}|>\n{content}\n").unwrap();
        let chat = Mapping::Chat { path: "m".to_owned(), message };
        let text = chat.text(
            r#"{"m": [{"role": "user", "content": "hi"}, {"role": "bot", "content": "yo"}]}"#,
        );
        assert_eq!(text.unwrap(), "<|user|>\nhi\n<|bot|>\nyo\n");
        let fault = chat.text(r#"{"m": [{"role": "user"}]}"#).unwrap_err().to_string();
        assert!(fault.contains("`m.0.content`"), "{fault}");
        assert!(chat.text(r#"{"m": "x"}"#).is_err());
    }
}
