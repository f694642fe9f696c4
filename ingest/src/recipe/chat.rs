//! Chats with a Hugging Face template: a list of messages rendered like `apply_chat_template` of `transformers`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::ErrorKind;
use std::sync::Arc;

use contract::framed::quoted;
use contract::{Fault, Identity, Result};
use minijinja::Value;
use serde::{Deserialize, Serialize};
use store::Location;

use super::jinja::{Date, Templates};
use super::written::{self, Kind, Malformed};
use crate::source::names;

/// The file with a model's template and special tokens.
const CONFIG: &str = "tokenizer_config.json";

/// The default template, and the one for records with tools.
const DEFAULT: &str = "default";
const WITH_TOOLS: &str = "tool_use";

/// The limit on nested lists and objects in a record.
const DEPTH_MAX: usize = 128;

/// The content of a chat template file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChatFile {
    /// Templates by name.
    templates: BTreeMap<String, String>,
    /// The special tokens, by their names in templates, if a file defines them.
    tokens: Option<BTreeMap<String, String>>,
}

impl ChatFile {
    /// Reads a `tokenizer_config.json`, or a template together with the `tokenizer_config.json` in its folder.
    pub(crate) fn read(file: &Location) -> Result<ChatFile> {
        let text = |file: &Location| {
            let bytes = file.read().map_err(|error| file.fault("read", &error))?;
            String::from_utf8(bytes)
                .map_err(|_| Fault::usage("this is not UTF-8").at(file.to_string()))
        };
        let template = text(file)?;
        if file.name().ends_with(".json") {
            let config = Config::parse(&template).map_err(|fault| fault.at(file.to_string()))?;
            let templates = match config.chat_template {
                Some(Written::One(template)) => BTreeMap::from([(DEFAULT.to_owned(), template)]),
                Some(Written::Named(all)) => {
                    all.into_iter().map(|named| (named.name, named.template)).collect()
                }
                None => {
                    return Err(Fault::usage("this file has no `chat_template`")
                        .at(file.to_string())
                        .hint("newer models have it in a file of its own: name their chat_template.jinja"));
                }
            };
            return Ok(ChatFile { templates, tokens: Some(tokens(config.others)) });
        }
        let beside = file.folder().join(CONFIG);
        let tokens = match beside.size() {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            _ => Some(
                Config::parse(&text(&beside)?)
                    .map(|config| tokens(config.others))
                    .map_err(|fault| fault.at(beside.to_string()))?,
            ),
        };
        Ok(ChatFile { templates: BTreeMap::from([(DEFAULT.to_owned(), template)]), tokens })
    }
}

/// A `tokenizer_config.json`.
#[derive(Deserialize)]
struct Config {
    chat_template: Option<Written>,
    #[serde(flatten)]
    others: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

impl Config {
    fn parse(text: &str) -> Result<Config> {
        serde_json::from_str(text)
            .map_err(|error| Fault::usage(format!("this is not a {CONFIG}: {error}")))
    }
}

/// The special tokens among the keys of a config: each is a string, or an object that contains the string.
fn tokens(keys: BTreeMap<String, serde_json::Value>) -> BTreeMap<String, String> {
    let token = |(name, value): (String, serde_json::Value)| {
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        name.ends_with("_token").then(|| (name.clone(), text.to_owned()))
    };
    keys.into_iter().filter_map(token).collect()
}

/// The paths of a chat in a record.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    /// The list of messages.
    pub(crate) messages: String,
    /// The list of tools.
    pub(crate) tools: Option<String>,
}

impl Paths {
    /// The top-level fields of a record in which the paths begin.
    pub(crate) fn roots(&self) -> BTreeSet<String> {
        let paths = [&self.messages].into_iter().chain(&self.tools);
        paths.map(|path| names::of(path).swap_remove(0)).collect()
    }
}

/// A chat with its template.
#[derive(Clone)]
pub(crate) struct Rendered {
    pub(crate) paths: Paths,
    /// The file of the template.
    pub(crate) file: ChatFile,
    /// The special tokens that the templates use.
    tokens: BTreeMap<String, String>,
    date: Option<Date>,
    templates: Arc<Templates>,
}

impl PartialEq for Rendered {
    fn eq(&self, other: &Self) -> bool {
        self.describe() == other.describe()
    }
}

impl Eq for Rendered {}

impl fmt::Debug for Rendered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}

impl Rendered {
    /// The template of a file, for chats at `paths`.
    pub(crate) fn new(paths: Paths, file: ChatFile, date: Option<Date>) -> Result<Rendered> {
        let texts = file.templates.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        let templates = Templates::new(texts, date)
            .map_err(|why| Fault::usage("this chat template cannot be read").found(why))?;
        if !file.templates.contains_key(DEFAULT) {
            let names: Vec<&str> = file.templates.keys().map(String::as_str).collect();
            return Err(Fault::usage("no chat template is the default one")
                .found(names.join(", "))
                .wanted(DEFAULT)
                .hint("put the one that is meant into a .jinja file, and name that"));
        }
        match (templates.asks_for_date(), date) {
            (true, None) => {
                return Err(Fault::usage(
                    "this chat template asks for today's date, which would make \
                                         another store every day",
                )
                .wanted("chat_date = \"2024-07-26\""));
            }
            (false, Some(_)) => {
                return Err(Fault::usage("this chat template asks for no date")
                    .hint("take `chat_date` out"));
            }
            _ => {}
        }
        let asked = ["bos_token", "eos_token"].iter().find(|token| templates.asks(token));
        if let (Some(token), None) = (asked, &file.tokens) {
            return Err(Fault::usage(format!("this chat template asks for `{token}`"))
                .wanted(format!("a {CONFIG} next to it, which defines that token")));
        }
        let mut tokens = file.tokens.clone().unwrap_or_default();
        tokens.retain(|name, _| templates.asks(name));
        Ok(Rendered { paths, file, tokens, date, templates: Arc::new(templates) })
    }

    /// Everything that determines the text of a record, as canonical text.
    pub(crate) fn describe(&self) -> String {
        let texts = self.file.templates.iter();
        let texts = texts.map(|(name, text)| {
            format!("{}={}", quoted(name), Identity::of_bytes(text.as_bytes()))
        });
        let tokens = self.tokens.iter().map(|(name, token)| format!("{name}={}", quoted(token)));
        let tools = self.paths.tools.as_deref().map_or("none".to_owned(), quoted);
        let date = self.date.map_or("none".to_owned(), |date| date.to_string());
        let (texts, tokens) = (texts.collect::<Vec<_>>(), tokens.collect::<Vec<_>>());
        format!(
            "chat={} tools={tools} templates=[{}] tokens=[{}] date={date}",
            quoted(&self.paths.messages),
            texts.join(" "),
            tokens.join(" ")
        )
    }

    /// The text of a record, given as JSON.
    pub(crate) fn text(&self, record: &str) -> Result<String> {
        let malformed = |why: Malformed| Fault::data("malformed JSON").found(why);
        let path = &self.paths.messages;
        let messages = value(written::messages(record, path)?, 0).map_err(malformed)?;
        if messages.len() == Some(0) {
            return Err(
                Fault::data(format!("key `{path}` holds no messages")).found("an empty list")
            );
        }
        let tools = self.tools(record)?;
        let named = self.file.templates.contains_key(WITH_TOOLS) && !tools.is_none();
        let name = if named { WITH_TOOLS } else { DEFAULT };
        let mut variables: BTreeMap<&str, Value> = BTreeMap::from([
            ("messages", messages),
            ("tools", tools),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(false)),
        ]);
        variables.extend(self.tokens.iter().map(|(name, token)| (name.as_str(), token.into())));
        self.templates
            .render(name, Value::from_pairs(variables))
            .map_err(|why| Fault::data("the chat template refuses this record").found(why))
    }

    /// The tools of a record: a list, or one as a JSON string, which is how tables store lists of differing objects.
    fn tools(&self, record: &str) -> Result<Value> {
        let Some(path) = &self.paths.tools else { return Ok(Value::from(())) };
        let wrong = |found: String| {
            Fault::data(format!("key `{path}` holds no tools"))
                .found(found)
                .wanted("a list, or a text that is one as JSON")
        };
        let Some(found) = written::at(record, path).map_err(wrong)? else {
            return Ok(Value::from(()));
        };
        let inner = match written::kind(found) {
            Kind::Null => return Ok(Value::from(())),
            Kind::String => written::text(found).map_err(wrong)?,
            _ => found.to_owned(),
        };
        let inner = inner.trim();
        match written::kind(inner) {
            Kind::List => value(inner, 0).map_err(wrong),
            _ => Err(wrong(inner.chars().take(40).collect())),
        }
    }
}

/// Parses JSON as Python does: integers stay integers, members keep the order of their first occurrence.
fn value(json: &str, depth: usize) -> std::result::Result<Value, Malformed> {
    if depth > DEPTH_MAX {
        return Err(format!("more than {DEPTH_MAX} lists and objects within each other"));
    }
    Ok(match written::kind(json) {
        Kind::Null => Value::from(()),
        Kind::String => Value::from(written::text(json)?),
        Kind::List => {
            let elements = written::elements(json)?.into_iter();
            let elements = elements.map(|element| value(element, depth + 1));
            Value::from(elements.collect::<std::result::Result<Vec<_>, _>>()?)
        }
        Kind::Object => {
            let members = written::members(json)?.into_iter();
            let members = members.map(|(name, member)| Ok((name, value(member, depth + 1)?)));
            Value::from_pairs(members.collect::<std::result::Result<Vec<_>, Malformed>>()?)
        }
        Kind::Plain => match json {
            "true" | "false" => Value::from(json == "true"),
            _ if json.contains(['.', 'e', 'E']) => {
                let number = json.parse::<f64>().ok().filter(|number| number.is_finite());
                Value::from(number.ok_or_else(|| format!("{json} is not a finite number"))?)
            }
            _ => Value::from(
                json.parse::<i128>().map_err(|_| format!("{json} does not fit in 128 bits"))?,
            ),
        },
    })
}

#[cfg(test)]
mod tests;
