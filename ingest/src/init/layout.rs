//! Which fields of a record are its text: by the names in published corpora, otherwise by size.

use std::collections::BTreeMap;

use serde_json::Value;

use super::model::Model;
use crate::recipe::chat::{Paths, Rendered};
use crate::source::names;

/// Fields that hold the text in published corpora, most likely first.
const TEXTS: [&str; 8] =
    ["text", "content", "raw_content", "body", "document", "markdown", "article", "passage"];
/// Fields that hold a chat.
const CHATS: [&str; 5] = ["messages", "conversations", "conversation", "dialog", "chosen"];
/// The fields of a message: who speaks, and what.
const TURNS: [[&str; 2]; 4] =
    [["role", "content"], ["from", "value"], ["role", "value"], ["speaker", "text"]];
/// Sets of fields that make a text together, most likely first; a set comes before its subsets.
const SETS: [&[&str]; 16] = [
    &["instruction", "input", "output"],
    &["instruction", "context", "response"],
    &["instruction", "output"],
    &["instruction", "response"],
    &["prompt", "completion"],
    &["prompt", "response"],
    &["prompt", "chosen"],
    &["question", "answer"],
    &["question", "response"],
    &["question", "solution"],
    &["problem", "solution"],
    &["problem", "answer"],
    &["query", "response"],
    &["query", "answer"],
    &["inputs", "targets"],
    &["input", "output"],
];
/// Fields that hold an id.
const IDS: [&str; 9] =
    ["id", "uid", "doc_id", "url", "uuid", "_id", "document_id", "prompt_id", "warc_record_id"];
/// The depth to which strings are searched for in a record.
const DEPTH: usize = 3;

/// The text of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Text {
    /// The whole file.
    File,
    /// The string at a path.
    At(String),
    /// Several fields in a template.
    Fields { paths: Vec<String>, template: String },
    /// The messages of a chat, each with who speaks and what.
    Chat { path: String, turn: [&'static str; 2] },
    /// A chat whose messages are not plain text, as JSON.
    ChatJson(String),
    /// A chat rendered by a model's chat template, from a file.
    Rendered { chat: Rendered, file: &'static str },
}

/// A guess.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) text: Text,
    pub(super) id: Option<String>,
    pub(super) why: String,
}

/// Records and their bytes.
pub(super) type Records = [(Value, u64)];

/// The value at a path.
fn at<'a>(record: &'a Value, path: &str) -> Option<&'a Value> {
    names::of(path).iter().try_fold(record, |value, name| value.get(name))
}

fn is_string(record: &Value, path: &str) -> bool {
    at(record, path).is_some_and(Value::is_string)
}

impl Text {
    /// The keys of a `[[source]]` for this layout.
    pub(super) fn keys(&self) -> Vec<(&'static str, String)> {
        match self {
            Text::File => Vec::new(),
            Text::At(path) => vec![("text", path.clone())],
            Text::Fields { template, .. } => vec![("template", template.clone())],
            Text::Chat { path, turn: ["role", "content"] } => vec![("chat", path.clone())],
            Text::Chat { path, turn: [who, what] } => {
                vec![("chat", path.clone()), ("message", format!("<|{{{who}}}|>\n{{{what}}}\n"))]
            }
            Text::ChatJson(path) => vec![("template", format!("{{{path}}}"))],
            Text::Rendered { chat: Rendered { paths, .. }, file } => {
                let tools = paths.tools.iter().map(|tools| ("tools", tools.clone()));
                let chat =
                    [("chat", paths.messages.clone()), ("chat_template", (*file).to_owned())];
                chat.into_iter().chain(tools).collect()
            }
        }
    }

    /// Whether most records have this layout.
    pub(super) fn fits(&self, records: &Records) -> bool {
        let fits = records.iter().filter(|(record, _)| match self {
            Text::File => false,
            Text::At(path) => is_string(record, path),
            Text::Fields { paths, .. } => paths.iter().all(|path| is_string(record, path)),
            Text::Chat { path, turn } => {
                turns(record, path, *turn).is_some_and(|turns| turns.iter().all(is_spoken(*turn)))
            }
            Text::ChatJson(path) => TURNS.iter().any(|turn| turns(record, path, *turn).is_some()),
            Text::Rendered { chat, .. } => chat.text(&record.to_string()).is_ok(),
        });
        fits.count() * 2 > records.len()
    }

    /// The share of text in a file's records: text bytes and all bytes.
    pub(super) fn share(&self, records: &Records) -> (u64, u64) {
        let length = |record: &Value, path: &str| match at(record, path) {
            Some(Value::String(text)) => text.len() as u64,
            _ => 0,
        };
        let text = records.iter().map(|(record, bytes)| match self {
            Text::File => *bytes,
            Text::At(path) => length(record, path),
            Text::Fields { paths, .. } => paths.iter().map(|path| length(record, path)).sum(),
            Text::Chat { path, turn } => {
                let turns = turns(record, path, *turn).into_iter().flatten();
                turns.map(|message| length(message, turn[1])).sum()
            }
            Text::ChatJson(path) => {
                at(record, path).map_or(0, |chat| chat.to_string().len() as u64)
            }
            Text::Rendered { chat, .. } => {
                chat.text(&record.to_string()).map_or(0, |text| text.len() as u64)
            }
        });
        (text.sum(), records.iter().map(|(_, bytes)| bytes).sum())
    }
}

/// The messages of a chat; none if the value is something else.
fn turns<'a>(record: &'a Value, path: &str, turn: [&str; 2]) -> Option<&'a Vec<Value>> {
    let turns = at(record, path)?.as_array()?;
    let first = turns.first()?.as_object()?;
    first.contains_key(turn[0]).then_some(turns)
}

/// Checks that a message has both fields as text.
fn is_spoken(turn: [&'static str; 2]) -> impl Fn(&Value) -> bool {
    move |message| turn.iter().all(|key| message.get(key).is_some_and(Value::is_string))
}

/// The text of these records, and why; `holds_text` tells whether a build would accept the text from a path. Chats are
/// rendered by the template of a `model`, if it accepts all of them.
pub(super) fn text(
    records: &Records,
    model: Option<&Model>,
    holds_text: impl Fn(&str) -> bool,
) -> Option<(Text, String)> {
    let mut strings = strings(records);
    // A row as JSON shows a time as a string, but its column is not a text column.
    strings.retain(|path, _| holds_text(path));
    if let Some(path) = TEXTS.iter().find(|path| strings.contains_key(**path)) {
        return Some((Text::At((*path).to_owned()), format!("the text is `{path}`, by its name")));
    }
    if let Some((text, why)) = chat(records) {
        let by_model = model.and_then(|model| rendered(records, &text, model));
        return Some(by_model.unwrap_or((text, why)));
    }
    if let Some(found) = set(records, &strings) {
        return Some(found);
    }
    let last = |path: &String| names::of(path).pop().unwrap_or_default();
    let named = |name: &&str| strings.keys().find(|path| last(path) == **name).cloned();
    if let Some(path) = TEXTS.iter().find_map(named) {
        let why = format!("the text is `{path}`, by its name");
        return Some((Text::At(path), why));
    }
    let (path, _) = strings.iter().max_by_key(|(_, bytes)| **bytes)?;
    let why = format!("the text is `{path}`, which holds the most: check this");
    Some((Text::At(path.clone()), why))
}

fn chat(records: &Records) -> Option<(Text, String)> {
    let all = CHATS.iter().flat_map(|path| TURNS.iter().map(move |turn| (*path, *turn)));
    let is_it = |(path, turn): &(&str, _)| {
        records.iter().any(|(record, _)| turns(record, path, *turn).is_some())
    };
    let (path, turn) = all.into_iter().find(is_it)?;
    let mut chats = records.iter().filter_map(|(record, _)| turns(record, path, turn));
    let path = path.to_owned();
    if chats.all(|turns| turns.iter().all(is_spoken(turn))) {
        let why = format!("`{path}` holds chats of `{}` and `{}`", turn[0], turn[1]);
        return Some((Text::Chat { path, turn }, why));
    }
    let why = format!(
        "`{path}` holds chats with messages that are not text alone (calls of tools, parts, null), put as JSON: check this"
    );
    Some((Text::ChatJson(path), why))
}

/// The same chats, rendered by the template of a model.
fn rendered(records: &Records, found: &Text, model: &Model) -> Option<(Text, String)> {
    let (Text::Chat { path, .. } | Text::ChatJson(path)) = found else { return None };
    let has_tools = records.iter().any(|(record, _)| record.get(TOOLS).is_some_and(is_list));
    let tools = has_tools.then(|| TOOLS.to_owned());
    let chat = model.rendered(Paths { messages: path.clone(), tools })?;
    let mut chats = records.iter().filter(|(record, _)| turns(record, path, TURNS[0]).is_some());
    // A model's template accepts only messages of its own roles.
    if !chats.all(|(record, _)| chat.text(&record.to_string()).is_ok()) {
        return None;
    }
    let why = format!("`{path}` holds chats, put as {} says", model.file);
    let text = Text::Rendered { chat, file: model.file };
    text.fits(records).then_some((text, why))
}

/// The field of chat records that holds the available tools.
const TOOLS: &str = "tools";

/// Whether this is a list, or a string that holds one as JSON.
fn is_list(value: &Value) -> bool {
    value.is_array() || value.as_str().is_some_and(|text| text.trim_start().starts_with('['))
}

/// A set of fields that make a text together.
fn set(records: &Records, strings: &BTreeMap<String, u64>) -> Option<(Text, String)> {
    let there = |set: &&&[&str]| set.iter().all(|path| strings.contains_key(*path));
    let every = |set: &&&[&str]| {
        records.iter().all(|(record, _)| set.iter().all(|path| is_string(record, path)))
    };
    // A set that every record has is preferred.
    let found = SETS.iter().filter(there).find(every).or_else(|| SETS.iter().find(there))?;
    let paths: Vec<String> = found.iter().map(|path| (*path).to_owned()).collect();
    let template = match **found {
        ["prompt", second] if is_glued(records, second) => format!("{{prompt}}{{{second}}}"),
        ["prompt", second] => format!("{{prompt}}\n{{{second}}}\n"),
        ["instruction", ..] => {
            let part = |path: &&str| match *path {
                "output" => "### Response:\n{output}\n".to_owned(),
                path => format!("### {}:\n{{{path}}}\n", label(path)),
            };
            found.iter().map(part).collect::<Vec<_>>().join("\n")
        }
        _ => found.iter().map(|path| format!("{}: {{{path}}}\n", label(path))).collect(),
    };
    let why = format!("`{}` make the text together", paths.join("`, `"));
    Some((Text::Fields { paths, template }, why))
}

fn label(name: &str) -> String {
    name[..1].to_uppercase() + &name[1..]
}

/// Whether prompt and continuation already have a space between them.
fn is_glued(records: &Records, second: &str) -> bool {
    let text = |record: &Value, path: &str| at(record, path)?.as_str().map(str::to_owned);
    let glued = records.iter().filter(|(record, _)| {
        let ends = text(record, "prompt").is_some_and(|text| text.ends_with(char::is_whitespace));
        ends || text(record, second).is_some_and(|text| text.starts_with(char::is_whitespace))
    });
    glued.count() * 2 > records.len()
}

/// The path of an id: a known name whose value is a string or an integer wherever it is present, outermost first.
pub(super) fn id(records: &Records, holds_id: impl Fn(&str) -> bool) -> Option<String> {
    let mut paths: BTreeMap<(usize, usize, String), bool> = BTreeMap::new();
    for (record, _) in records {
        walk(record, &mut Vec::new(), &mut |path, value| {
            let Some(rank) = path.last().and_then(|name| IDS.iter().position(|id| id == name))
            else {
                return;
            };
            let fits = value.is_string() || value.is_i64() || value.is_u64();
            let key = (path.len(), rank, joined(path));
            *paths.entry(key).or_insert(true) &= fits || value.is_null();
        });
    }
    // A field that is null in all records is not an id.
    let some = |path: &str| {
        records.iter().any(|(record, _)| at(record, path).is_some_and(|value| !value.is_null()))
    };
    let mut paths = paths.into_iter().filter(|(_, fits)| *fits).map(|((.., path), _)| path);
    paths.find(|path| some(path) && holds_id(path))
}

/// The size of each field of strings, including those inside objects.
fn strings(records: &Records) -> BTreeMap<String, u64> {
    let mut bytes = BTreeMap::new();
    for (record, _) in records {
        walk(record, &mut Vec::new(), &mut |path, value| {
            if let Value::String(text) = value {
                *bytes.entry(joined(path)).or_default() += text.len() as u64;
            }
        });
    }
    bytes
}

fn joined(path: &[String]) -> String {
    path.iter().map(|name| names::escaped(name)).collect::<Vec<_>>().join(".")
}

/// Visits every value of a record that is not an object, with its path. A path cannot express an empty name, or one
/// that ends in a backslash.
fn walk(value: &Value, path: &mut Vec<String>, each: &mut impl FnMut(&[String], &Value)) {
    match value {
        Value::Object(members) if path.len() < DEPTH => {
            for (name, value) in
                members.iter().filter(|(name, _)| !name.is_empty() && !name.ends_with('\\'))
            {
                path.push(name.clone());
                walk(value, path, each);
                path.pop();
            }
        }
        value => each(path, value),
    }
}
