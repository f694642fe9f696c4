//! Makes a text from the fields of a record: templates (`"Q: {question}\nA: {answer}"`) and chats (a list of messages).

use std::collections::BTreeSet;

use contract::Fault;
use contract::framed::quoted;

use super::chat::Rendered;
use super::written::{self, Kind, Malformed};
use crate::source::names;

/// How a record becomes a text, if from more than one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// Fields in a template.
    Template(Template),
    /// The messages of a chat, each in a template.
    Chat {
        /// The path of the list.
        path: String,
        /// The template of a message.
        message: Template,
    },
    /// All messages of a chat in one Hugging Face template, whose control tokens are encoded as tokens.
    Rendered(Rendered),
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
    /// Parses a template: `{path.of.field}`, with `{{` and `}}` for literal brackets.
    pub(crate) fn parse(written: &str) -> Result<Template, String> {
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
            if names::of(path).iter().any(String::is_empty) || path.contains('{') {
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

    /// Whether it contains a token, or both ends of one around a field.
    fn spells(&self, token: &str) -> bool {
        let around = |(before, after): (&str, &str)| {
            token.char_indices().skip(1).any(|(at, _)| {
                let (start, rest) = token.split_at(at);
                let mut ends = rest.char_indices().skip(1).map(|(at, _)| &rest[at..]);
                before.ends_with(start) && ends.any(|end| after.starts_with(end))
            })
        };
        let texts = self.parts.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text.as_str()),
            Part::Field(_) => None,
        });
        let texts: Vec<&str> = texts.collect();
        texts.iter().any(|text| text.contains(token))
            || texts.windows(2).any(|two| around((two[0], two[1])))
    }

    /// Renders the template with the fields of a record.
    ///
    /// A string is inserted as it is, a number or boolean as written. Lists and objects are inserted as JSON only if
    /// `whole` is set: in a message they would be parts that are not text.
    fn render(&self, record: &str, whole: bool, into: &mut String) -> Result<(), Unfit> {
        for part in &self.parts {
            let path = match part {
                Part::Text(text) => {
                    *into += text;
                    continue;
                }
                Part::Field(path) => path,
            };
            let Some(value) = written::at(record, path)? else {
                return Err(Unfit::Missing(path.clone()));
            };
            match written::kind(value) {
                Kind::Null => return Err(Unfit::Missing(path.clone())),
                Kind::List if !whole => return Err(Unfit::NoText(path.clone(), "a list")),
                Kind::Object if !whole => return Err(Unfit::NoText(path.clone(), "an object")),
                Kind::String => *into += &written::text(value)?,
                Kind::Plain => *into += value,
                Kind::List | Kind::Object => written::compact(value, into)?,
            }
        }
        Ok(())
    }
}

/// Why a record does not fit a template.
enum Unfit {
    /// The record has no value at this path.
    Missing(String),
    /// The value at this path has this kind.
    NoText(String, &'static str),
    /// The record is not JSON.
    Malformed(Malformed),
}

impl From<Malformed> for Unfit {
    fn from(why: Malformed) -> Self {
        Unfit::Malformed(why)
    }
}

impl Unfit {
    /// The same as a data fault; paths are relative to `within`.
    fn fault(self, within: &str) -> Fault {
        match self {
            Unfit::Missing(path) => Fault::data(format!("no text at key `{within}{path}`")),
            Unfit::NoText(path, found) => {
                Fault::data(format!("key `{within}{path}` holds no text"))
                    .found(found)
                    .wanted("a string")
            }
            Unfit::Malformed(why) => Fault::data("malformed JSON").found(why),
        }
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
            Mapping::Rendered(chat) => chat.describe(),
        }
    }

    /// The top-level fields of a record that it uses, without repetition, in order.
    pub(crate) fn roots(&self) -> BTreeSet<String> {
        let root = |path: &str| names::of(path).swap_remove(0);
        match self {
            Mapping::Chat { path, .. } => BTreeSet::from([root(path)]),
            Mapping::Rendered(chat) => chat.paths.roots(),
            Mapping::Template(template) => {
                let fields = template.parts.iter().filter_map(|part| match part {
                    Part::Field(path) => Some(root(path)),
                    Part::Text(_) => None,
                });
                fields.collect()
            }
        }
    }

    /// The control tokens that it may write as text, since it is not a chat template.
    pub(crate) fn spells<'a>(&self, controls: &'a [String]) -> Vec<&'a str> {
        let template = match self {
            Mapping::Template(template) | Mapping::Chat { message: template, .. } => template,
            Mapping::Rendered(_) => return Vec::new(),
        };
        controls.iter().map(String::as_str).filter(|control| template.spells(control)).collect()
    }

    /// The text of a record, given as JSON.
    pub(crate) fn text(&self, record: &str) -> contract::Result<String> {
        let mut text = String::new();
        match self {
            Mapping::Template(template) => {
                template.render(record, true, &mut text).map_err(|why| why.fault(""))?;
            }
            Mapping::Chat { path, message } => {
                let malformed = |why| Unfit::Malformed(why).fault("");
                let list = written::messages(record, path)?;
                for (index, value) in
                    written::elements(list).map_err(malformed)?.into_iter().enumerate()
                {
                    message
                        .render(value, false, &mut text)
                        .map_err(|why| why.fault(&format!("{path}.{index}.")))?;
                }
            }
            Mapping::Rendered(chat) => text = chat.text(record)?,
        }
        Ok(text)
    }
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
        let roots: Vec<String> = mapping.roots().into_iter().collect();
        assert_eq!(roots, ["a", "c", "d"]);
        for wrong in ["no field", "{", "}", "{a", "a}", "{}", "{a..b}", "{a{b}"] {
            assert!(Template::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn numbers_are_put_as_they_were_written() {
        let text = |template: &str, record: &str| {
            Mapping::Template(Template::parse(template).unwrap()).text(record).unwrap()
        };
        for number in
            ["12345678901234567890123", "18446744073709551616", "1.50", "-0", "1e2", "0.1", "-7"]
        {
            let record = format!("{{\"n\": {number}, \"l\": [ {number} , {{\"z\": {number}}}]}}");
            assert_eq!(text("{n}", &record), number);
            assert_eq!(text("{l.1.z}", &record), number);
            assert_eq!(text("{l}", &record), format!("[{number},{{\"z\":{number}}}]"));
        }
        // Keys as they are; the last of equal keys counts.
        let record = r#"{"o": {"z": 1, "a": "\u00e9\n", "z": [true, null], "b": {}}, "o\u0032": 1, "o2": "x"}"#;
        assert_eq!(text("{o}", record), "{\"a\":\"\u{e9}\\n\",\"z\":[true,null],\"b\":{}}");
        assert_eq!(text("{o.a}{o2}", record), "\u{e9}\nx");
        let template = Mapping::Template(Template::parse("{a}").unwrap());
        assert!(template.text("{\"b\": 1, ").is_err());
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
        // The parts of a message are not text, and their JSON is never intended.
        for (parts, kind) in [(r#"[{"type": "text", "text": "x"}]"#, "a list"), ("{}", "an object")]
        {
            let record = format!(r#"{{"m": [{{"role": "user", "content": {parts}}}]}}"#);
            let fault = chat.text(&record).unwrap_err().to_string();
            assert!(
                fault.contains("`m.0.content` holds no text") && fault.contains(kind),
                "{fault}"
            );
        }
        let number = chat.text(r#"{"m": [{"role": "user", "content": 1.50}]}"#).unwrap();
        assert_eq!(number, "<|user|>\n1.50\n");
    }

    #[test]
    fn control_tokens_that_a_template_spells_are_known() {
        let controls = ["<|user|>", "<|end|>", "<s>", "</s>"].map(str::to_owned);
        let spells = |template: &str| {
            let mapping = Mapping::Template(Template::parse(template).unwrap());
            mapping.spells(&controls).join(" ")
        };
        assert_eq!(spells("<|{role}|>\n{content}<|end|>\n"), "<|user|> <|end|>");
        assert_eq!(spells("{a} < {b} > {c}"), "");
        assert_eq!(spells("<{a}>"), "<|user|> <|end|> <s> </s>");
        assert_eq!(spells("Q: {a}<s>"), "<s>");
        assert_eq!(spells("{a}"), "");
    }
}
