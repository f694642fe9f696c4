//! `corpus.toml`: which files become a store, and how. `ingest/README.md` has the schema.
//!
//! Every wrong key or value is refused with its line; a key nobody knows is answered with the nearest known one.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use contract::{Fault, Ratio, Result, fault};
use store::UNIT_TOKENS;
use toml_edit::{Document, Item, TableLike, Value};

use crate::files;
use crate::filters::setting::Setting;
use crate::recipe::{Recipe, config};
use crate::source::{Fields, Format};
use crate::takeover::Taken;

/// Tokens after which a shard is cut, unless `shard_tokens` says otherwise: half a gigabyte of stored u32.
pub const SHARD_TOKENS: u64 = 1 << 27;

/// The largest document, unless `max_document_bytes` says otherwise.
pub const MAX_DOCUMENT_BYTES: u64 = 1 << 30;

const KEYS: &[&str] = &[
    "tokenizer",
    "unit",
    "validation",
    "begin",
    "end",
    "shard_tokens",
    "max_document_bytes",
    "on_error",
    "source",
    "prepare",
];
const SOURCE_KEYS: &[&str] =
    &["name", "files", "text", "id", "format", "template", "chat", "message"];

/// What to do with a record that is no document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnError {
    /// Refuse the build, naming the record.
    Stop,
    /// Leave it out and count it.
    Skip,
}

/// A whole corpus file.
#[derive(Clone, Debug)]
pub struct Corpus {
    /// The file itself.
    pub file: PathBuf,
    /// The tokenizer; training one needs none.
    pub tokenizer: Option<PathBuf>,
    /// Tokens in a unit.
    pub unit: u64,
    /// The share of documents that are held out.
    pub validation: Ratio,
    /// The token put before each document.
    pub begin: Option<String>,
    /// The token put after each document.
    pub end: Option<String>,
    /// Tokens after which a shard is cut: decides files, not content.
    pub shard_tokens: u64,
    /// The largest document.
    pub max_document_bytes: u64,
    /// What to do with a record that is no document.
    pub on_error: OnError,
    /// The sources, in order.
    pub sources: Vec<Source>,
}

/// One `[[source]]`.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its name, also its folder in the store.
    pub name: String,
    /// Its files, sorted.
    pub files: Vec<SourceFile>,
    /// Where text and id stand in a record.
    pub fields: Fields,
    /// What is done to its documents before they are encoded.
    pub recipe: Recipe,
    /// The same source of an earlier store, if it is taken over.
    pub(crate) taken: Option<Box<Taken>>,
}

/// One input file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Where it lies.
    pub path: PathBuf,
    /// Its path from the corpus file's folder, for people.
    pub shown: String,
    /// How it holds documents.
    pub format: Format,
}

impl Corpus {
    /// Reads a corpus file and finds its inputs.
    pub fn read(file: &Path) -> Result<Corpus> {
        let text = fs::read_to_string(file).map_err(|error| Fault::io("read", file, &error))?;
        Corpus::parse(&text, file)
    }

    /// Parses the text of a corpus file and finds its inputs.
    pub fn parse(text: &str, file: &Path) -> Result<Corpus> {
        let places = Places { text, file: file.display().to_string() };
        let document = Document::parse(text).map_err(|error| {
            let place = error.span().map_or(places.file.clone(), |span| places.line(&span));
            Fault::usage(format!("this is no TOML: {}", error.message())).at(place)
        })?;
        let root = Keys::new(&places, document.as_table(), "the corpus", KEYS)?;
        let folder = file.parent().unwrap_or(Path::new(""));
        let corpus = Corpus {
            file: file.to_owned(),
            tokenizer: root.text("tokenizer")?.map(|(name, _)| folder.join(name)),
            unit: root.count("unit", UNIT_TOKENS)?,
            validation: validation(&root)?,
            begin: marker(&root, "begin")?,
            end: marker(&root, "end")?,
            shard_tokens: root.count("shard_tokens", SHARD_TOKENS)?,
            max_document_bytes: root.count("max_document_bytes", MAX_DOCUMENT_BYTES)?,
            on_error: on_error(&root)?,
            sources: sources(&root, folder)?,
        };
        Ok(corpus)
    }
}

fn validation(root: &Keys<'_>) -> Result<Ratio> {
    let wanted = "a share below 1, like \"1/1000\"";
    let Some(item) = root.get("validation") else { return Ok(Ratio::new(1, 1000)) };
    let place = root.places.item(item);
    let text = match item.as_value() {
        Some(Value::String(text)) => text.value().clone(),
        Some(Value::Integer(number)) => number.value().to_string(),
        // The text as written, so that no float decides data.
        Some(Value::Float(_)) => root.places.slice(item).to_owned(),
        _ => {
            return Err(Fault::usage("`validation` is no share").at(place).wanted(wanted));
        }
    };
    let share: Ratio = text.parse().map_err(|error: String| {
        Fault::usage(format!("`validation` is no share: {error}")).at(place.clone()).wanted(wanted)
    })?;
    if share.num() >= share.den() {
        return Err(Fault::usage("`validation` leaves nothing to train on")
            .at(place)
            .found(share)
            .wanted(wanted));
    }
    Ok(share)
}

/// `begin` and `end`: a token, or "none" (also by absence, and as `false`).
fn marker(root: &Keys<'_>, key: &str) -> Result<Option<String>> {
    if let Some(Value::Boolean(value)) = root.get(key).and_then(Item::as_value)
        && !value.value()
    {
        return Ok(None);
    }
    Ok(root.text(key)?.map(|(token, _)| token).filter(|token| token != "none"))
}

fn on_error(root: &Keys<'_>) -> Result<OnError> {
    match root.text("on_error")? {
        None => Ok(OnError::Stop),
        Some((text, place)) => match text.as_str() {
            "stop" => Ok(OnError::Stop),
            "skip" => Ok(OnError::Skip),
            _ => Err(Fault::usage("`on_error` is unknown")
                .at(place)
                .found(text)
                .wanted("\"stop\" or \"skip\"")),
        },
    }
}

fn sources(root: &Keys<'_>, folder: &Path) -> Result<Vec<Source>> {
    let wanted = "at least one [[source]] with `name` and `files`";
    let Some(item) = root.get("source") else {
        return Err(Fault::usage("the corpus has no source")
            .at(root.places.file.clone())
            .wanted(wanted));
    };
    let Some(tables) = item.as_array_of_tables() else {
        return Err(Fault::usage("`source` is no list of tables")
            .at(root.places.item(item))
            .wanted("[[source]], with two brackets"));
    };
    let mut names = BTreeMap::new();
    let mut sources = Vec::new();
    for table in tables {
        let place = table.span().map_or(root.places.file.clone(), |span| root.places.line(&span));
        let keys = Keys::new(root.places, table, "a source", SOURCE_KEYS)?;
        let (name, name_place) = keys.text("name")?.ok_or_else(|| {
            Fault::usage("a source has no `name`").at(place.clone()).wanted(wanted)
        })?;
        check_name(&name, &name_place)?;
        // Folders on some systems ignore case.
        if let Some(before) = names.insert(name.to_lowercase(), name_place.clone()) {
            return Err(Fault::usage(format!("two sources are called {name:?}"))
                .at(name_place)
                .found(format!("the other one at {before}"))
                .hint("give each source its own name"));
        }
        sources.push(source(&keys, name, &place, folder)?);
    }
    let mut recipes: Vec<_> =
        sources.iter_mut().map(|source| (source.name.clone(), &mut source.recipe)).collect();
    config::steps(root, folder, &mut recipes)?;
    Ok(sources)
}

fn source(keys: &Keys<'_>, name: String, place: &str, folder: &Path) -> Result<Source> {
    let stated = match keys.text("format")? {
        None => None,
        Some((name, place)) => Some(Format::from_name(&name).ok_or_else(|| {
            Fault::usage("`format` is unknown")
                .at(place)
                .found(name)
                .wanted(Format::ALL.map(Format::name).join(", "))
        })?),
    };
    let patterns = keys.texts("files")?.ok_or_else(|| {
        Fault::usage(format!("source {name:?} has no `files`"))
            .at(place.to_owned())
            .wanted("files = [\"raw/*.jsonl.zst\"]")
    })?;
    let mut files = Vec::new();
    for found in files::find(folder, &patterns)? {
        let format = stated.unwrap_or_else(|| Format::guess(&found.path));
        files.push(SourceFile { path: found.path, shown: found.shown, format });
    }
    let field = |key: &str| -> Result<Option<String>> {
        let Some((text, place)) = keys.text(key)? else { return Ok(None) };
        if text.split('.').any(str::is_empty) {
            return Err(Fault::usage(format!("`{key}` is no path of fields"))
                .at(place)
                .found(format!("{text:?}"))
                .wanted("names joined by dots, like \"text\" or \"meta.id\""));
        }
        Ok(Some(text))
    };
    let text = field("text")?.unwrap_or_else(|| "text".to_owned());
    let formats: Vec<Format> = files.iter().map(|file| file.format).collect();
    let mapping = config::mapping(keys, &formats)?;
    let fields = config::fields(&mapping, text, field("id")?);
    Ok(Source { name, files, fields, recipe: Recipe { mapping, steps: Vec::new() }, taken: None })
}

/// A name becomes a folder, on any system.
pub(crate) fn check_name(name: &str, place: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let taken = ["manifest.json", "manifest.sum", "tokenizer.json"];
    if !name.is_empty()
        && name.len() <= 100
        && name.chars().all(fits)
        && !name.starts_with('.')
        && !taken.contains(&name.to_lowercase().as_str())
    {
        return Ok(());
    }
    Err(Fault::usage("this name cannot be a source's folder")
        .at(place.to_owned())
        .found(format!("{name:?}"))
        .wanted("letters, digits, '-', '_' and '.', not beginning with '.'"))
}

/// Turns byte ranges of the text into places.
pub(crate) struct Places<'a> {
    text: &'a str,
    file: String,
}

impl Places<'_> {
    fn line(&self, span: &Range<usize>) -> String {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        format!("{}:{}", self.file, before.matches('\n').count() + 1)
    }

    fn item(&self, item: &Item) -> String {
        item.span().map_or(self.file.clone(), |span| self.line(&span))
    }

    fn slice(&self, item: &Item) -> &str {
        item.span().and_then(|span| self.text.get(span)).unwrap_or("")
    }
}

/// A table whose keys are all known.
pub(crate) struct Keys<'a> {
    places: &'a Places<'a>,
    table: &'a dyn TableLike,
}

impl<'a> Keys<'a> {
    fn new(
        places: &'a Places<'a>,
        table: &'a dyn TableLike,
        what: &str,
        known: &[&str],
    ) -> Result<Self> {
        let keys = Keys { places, table };
        keys.only(what, known)?;
        Ok(keys)
    }

    /// A table of the same file, whose keys are checked once it is known which it may have.
    pub(crate) fn open(like: &Keys<'a>, table: &'a dyn TableLike) -> Self {
        Keys { places: like.places, table }
    }

    /// Refuses keys other than `known`.
    pub(crate) fn only(&self, what: &str, known: &[&str]) -> Result<()> {
        for (key, item) in self.table.iter() {
            if known.contains(&key) {
                continue;
            }
            let span = self.table.key(key).and_then(|key| key.span());
            let place = span.map_or_else(|| self.places.item(item), |span| self.places.line(&span));
            let refused = Fault::usage(format!("{what} has no key `{key}`")).at(place);
            return Err(match fault::nearest(key, known.iter().copied()) {
                Some(near) => refused.hint(format!("did you mean `{near}`?")),
                None => refused.wanted(known.join(", ")),
            });
        }
        Ok(())
    }

    /// The tables of a list `[[key]]`, with their places.
    pub(crate) fn tables(&self, key: &str) -> Result<Vec<(&'a dyn TableLike, String)>> {
        let Some(item) = self.get(key) else { return Ok(Vec::new()) };
        let Some(tables) = item.as_array_of_tables() else {
            return Err(Fault::usage(format!("`{key}` is no list of tables"))
                .at(self.places.item(item))
                .wanted(format!("[[{key}]], with two brackets")));
        };
        let place = |span: Option<Range<usize>>| {
            span.map_or(self.places.file.clone(), |span| self.places.line(&span))
        };
        Ok(tables.iter().map(|table| (table as &dyn TableLike, place(table.span()))).collect())
    }

    /// A setting of a step, as it is written; `default` is what a person would write.
    pub(crate) fn setting<T: Setting>(&self, key: &str, default: &str) -> Result<T> {
        let item = self.get(key);
        let text = match item.and_then(Item::as_value) {
            None if item.is_none() => default.to_owned(),
            Some(Value::String(text)) => text.value().clone(),
            Some(Value::Integer(number)) => number.value().to_string(),
            Some(Value::Boolean(value)) => value.value().to_string(),
            // The text as written, so that no float decides data.
            Some(Value::Float(_)) => item.map_or("", |item| self.places.slice(item)).to_owned(),
            _ => String::new(),
        };
        match (T::parse(text.trim()), item) {
            (Some(value), _) => Ok(value),
            (None, Some(item)) => Err(self.wrong(key, item, T::WANTED)),
            (None, None) => Err(Fault::bug(format!("the default of `{key}` is wrong"))),
        }
    }

    fn get(&self, key: &str) -> Option<&'a Item> {
        self.table.get(key)
    }

    fn wrong(&self, key: &str, item: &Item, wanted: &str) -> Fault {
        Fault::usage(format!("`{key}` is of the wrong kind"))
            .at(self.places.item(item))
            .found(self.places.slice(item).trim())
            .wanted(wanted)
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<(String, String)>> {
        let Some(item) = self.get(key) else { return Ok(None) };
        let text = item.as_str().ok_or_else(|| self.wrong(key, item, "a string"))?;
        Ok(Some((text.to_owned(), self.places.item(item))))
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<(String, String)>>> {
        let Some(item) = self.get(key) else { return Ok(None) };
        let wrong = || self.wrong(key, item, "a list of strings");
        let list = item.as_array().ok_or_else(wrong)?;
        let place = |value: &Value| {
            value.span().map_or_else(|| self.places.item(item), |span| self.places.line(&span))
        };
        let texts = list.iter().map(|value| {
            value.as_str().map(|text| (text.to_owned(), place(value))).ok_or_else(wrong)
        });
        let texts: Vec<_> = texts.collect::<Result<_>>()?;
        if texts.is_empty() { Err(self.wrong(key, item, "at least one")) } else { Ok(Some(texts)) }
    }

    fn count(&self, key: &str, default: u64) -> Result<u64> {
        let Some(item) = self.get(key) else { return Ok(default) };
        item.as_integer()
            .and_then(|number| u64::try_from(number).ok())
            .filter(|number| *number > 0)
            .ok_or_else(|| self.wrong(key, item, "a whole number above zero"))
    }
}
