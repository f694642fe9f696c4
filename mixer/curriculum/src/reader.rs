//! TOML read with its places: every value knows its line, every table its known keys.

use std::collections::BTreeMap;
use std::ops::Range;

use contract::fault::nearest;
use contract::{Fault, Ratio, Result};
use toml_edit::{Document, Item, TableLike, Value};

/// The text of a file, for places and for values as typed.
pub struct Text<'a> {
    text: &'a str,
    file: &'a str,
    /// Where each line begins.
    lines: Vec<usize>,
}

/// Where each key of a file stands.
#[derive(Clone, Debug, Default)]
pub struct Places {
    file: String,
    found: BTreeMap<String, String>,
}

/// A table and where it stands.
type Spanned<'a> = (&'a dyn TableLike, Option<Range<usize>>);

/// A table with its name, for faults.
pub struct Section<'a> {
    text: &'a Text<'a>,
    table: &'a dyn TableLike,
    /// The table's key, dotted; empty for the file itself.
    path: String,
    place: String,
}

impl<'a> Text<'a> {
    /// The text of `file`, whose name every mistake carries.
    pub fn new(text: &'a str, file: &'a str) -> Self {
        let after_breaks = text.match_indices('\n').map(|(at, _)| at + 1);
        Text { text, file, lines: std::iter::once(0).chain(after_breaks).collect() }
    }

    /// Parses it.
    pub fn document(&self) -> Result<Document<&'a str>> {
        Document::parse(self.text).map_err(|error| {
            let message = error.message().trim().replace('\n', ", ");
            Fault::usage(format!("not valid TOML: {message}"))
                .at(self.place(error.span()))
                .hint("https://toml.io shows the syntax")
        })
    }

    /// `file:line:column` of a span's start.
    pub fn place(&self, span: Option<Range<usize>>) -> String {
        let Some(before) = span.and_then(|span| self.text.get(..span.start)) else {
            return self.file.to_owned();
        };
        let line = self.lines.partition_point(|&start| start <= before.len());
        let column = before[self.lines[line - 1]..].chars().count() + 1;
        format!("{}:{line}:{column}", self.file)
    }

    /// A value as typed.
    pub fn raw(&self, value: &Value) -> &'a str {
        value.span().and_then(|span| self.text.get(span)).unwrap_or_default()
    }
}

impl Places {
    /// No places of `file` yet.
    pub fn new(file: &str) -> Self {
        Places { file: file.to_owned(), found: BTreeMap::new() }
    }

    /// The place of `key`, or of the nearest section above it.
    pub fn of(&self, key: &str) -> String {
        let mut key = key;
        loop {
            match (self.found.get(key), key.rsplit_once('.')) {
                (Some(place), _) => return place.clone(),
                (None, Some((above, _))) => key = above,
                (None, None) => return self.file.clone(),
            }
        }
    }

    /// Remembers where `key` stands.
    pub fn insert(&mut self, key: String, place: String) {
        self.found.insert(key, place);
    }
}

impl<'a> Section<'a> {
    /// The file itself.
    pub fn root(text: &'a Text<'a>, table: &'a dyn TableLike) -> Self {
        Section { text, table, path: String::new(), place: text.file.to_owned() }
    }

    /// A table inside, if it is there.
    pub fn section(&self, key: &str) -> Result<Option<Section<'a>>> {
        let Some((_, item)) = self.table.get_key_value(key) else { return Ok(None) };
        let path = self.join(key);
        let Some(table) = item.as_table_like() else {
            return Err(self.wrong(key, item, format!("a table: [{path}]")));
        };
        Ok(Some(Section { text: self.text, table, place: self.place_of(key), path }))
    }

    /// The tables of an array, `[[key]]`.
    pub fn sections(&self, key: &str) -> Result<Vec<Section<'a>>> {
        let Some(item) = self.table.get(key) else { return Ok(Vec::new()) };
        let tables: Option<Vec<Spanned>> = match item {
            Item::ArrayOfTables(array) => {
                Some(array.iter().map(|table| (table as &dyn TableLike, table.span())).collect())
            }
            Item::Value(Value::Array(array)) => array
                .iter()
                .map(|value| Some((value.as_inline_table()? as &dyn TableLike, value.span())))
                .collect(),
            _ => None,
        };
        let Some(tables) = tables else {
            return Err(self.wrong(key, item, format!("tables: [[{key}]]")));
        };
        let section = |(table, span)| {
            let (path, place) = (self.join(key), self.text.place(span));
            Section { text: self.text, table, path, place }
        };
        Ok(tables.into_iter().map(section).collect())
    }

    /// Refuses a key that is not `known`.
    pub fn only(&self, known: &[&str]) -> Result<()> {
        for (key, _) in self.table.iter() {
            if !known.contains(&key) {
                return Err(self.unknown(key, known.iter().copied()));
            }
        }
        Ok(())
    }

    /// The fault of an unknown key.
    pub fn unknown<'k>(
        &self,
        key: &str,
        known: impl IntoIterator<Item = &'k str> + Clone,
    ) -> Fault {
        let hint = match nearest(key, known.clone()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known here: {}", known.into_iter().collect::<Vec<_>>().join(", ")),
        };
        let table = if self.path.is_empty() { String::new() } else { format!(" of {}", self.path) };
        Fault::usage(format!("unknown key `{key}`{table}")).at(self.place_of(key)).hint(hint)
    }

    /// The keys, in the order of the text.
    pub fn keys(&self) -> Vec<&'a str> {
        self.table.iter().map(|(key, _)| key).collect()
    }

    /// Whether the key is there.
    pub fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Where this section begins.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// Where `key` stands.
    pub fn place_of(&self, key: &str) -> String {
        match self.table.key(key).and_then(|key| key.span()) {
            Some(span) => self.text.place(Some(span)),
            None => self.place.clone(),
        }
    }

    /// A fault about `key`.
    pub fn fault(&self, key: &str, what: impl Into<String>) -> Fault {
        Fault::usage(what).at(self.place_of(key))
    }

    /// The fault of a key that is not there.
    pub fn missing(&self, key: &str, wanted: &str) -> Fault {
        let table = if self.path.is_empty() { "the file".to_owned() } else { self.path.clone() };
        Fault::usage(format!("{table} has no `{key}`")).at(self.place.clone()).wanted(wanted)
    }

    fn join(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn wrong(&self, key: &str, item: &Item, wanted: String) -> Fault {
        let found = match item {
            Item::Value(value) => self.text.raw(value).to_owned(),
            other => format!("a {}", other.type_name()),
        };
        let what = format!("`{key}` has the wrong kind of value");
        self.fault(key, what).found(found).wanted(wanted)
    }

    /// Every value of this table, typed, without its spelling.
    pub(crate) fn values(&self) -> Result<BTreeMap<String, toml::Value>> {
        let pair = |(key, item): (&str, &Item)| match typed(item) {
            Some(value) => Ok((key.to_owned(), value)),
            None => {
                let wanted = "numbers, strings, truth values, lists and tables of these";
                Err(self.wrong(key, item, wanted.to_owned()))
            }
        };
        self.table.iter().map(pair).collect()
    }

    /// The plain value of `key`, if it is there.
    pub fn value(&self, key: &str) -> Result<Option<&'a Value>> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Item::Value(value)) => Ok(Some(value)),
            Some(item) => Err(self.wrong(key, item, "a plain value".to_owned())),
        }
    }

    /// A string.
    pub fn string(&self, key: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.value(key)? else { return Ok(None) };
        match value.as_str() {
            Some(text) => Ok(Some(text)),
            None => Err(self
                .wrong(key, &Item::Value(value.clone()), "a string".to_owned())
                .found(self.text.raw(value))),
        }
    }

    /// A whole number from `least` to 2^63 - 1.
    pub fn whole(&self, key: &str, least: u64) -> Result<Option<u64>> {
        let Some(value) = self.value(key)? else { return Ok(None) };
        match value.as_integer().and_then(|number| u64::try_from(number).ok()) {
            Some(number) if number >= least => Ok(Some(number)),
            _ => Err(self
                .fault(key, format!("`{key}` is out of range"))
                .found(self.text.raw(value))
                .wanted(format!("a whole number of at least {least}"))),
        }
    }

    /// A number in `least..below`, for the trainer: it decides no data.
    pub fn number(&self, key: &str, least: f64, below: f64) -> Result<Option<f64>> {
        let Some(value) = self.value(key)? else { return Ok(None) };
        self.number_in(key, value, least, below).map(Some)
    }

    /// A finite number in `least..below`.
    pub fn number_in(&self, key: &str, value: &Value, least: f64, below: f64) -> Result<f64> {
        let whole = || value.as_integer().and_then(|whole| i32::try_from(whole).ok());
        let number = value.as_float().or_else(|| whole().map(Into::into));
        match number {
            Some(number) if least <= number && number < below => Ok(number),
            _ => Err(self
                .fault(key, format!("`{key}` is out of range"))
                .found(self.text.raw(value))
                .wanted(if below.is_finite() {
                    format!("a number from {least} to below {below}")
                } else {
                    format!("a number of at least {least}")
                })),
        }
    }

    /// A ratio above zero, exactly as typed: an integer, a decimal or a string like "3/10".
    pub fn weight(&self, key: &str) -> Result<Ratio> {
        let item = self.table.get(key);
        let value = item.and_then(Item::as_value);
        let raw = value.map_or("a table", |value| self.text.raw(value));
        let typed = value.and_then(Value::as_str).unwrap_or(raw);
        let typed = typed.strip_prefix('+').unwrap_or(typed);
        let above_zero = || {
            self.fault(key, format!("the weight of {key} is not above zero"))
                .found(raw)
                .wanted("a number above zero")
                .hint("leave the source out of the mix to give it no weight")
        };
        if typed.trim_start().starts_with('-') {
            return Err(above_zero());
        }
        let ratio: Ratio = typed.parse().map_err(|reason: String| {
            self.fault(key, format!("the weight of {key} is not a number"))
                .found(raw)
                .wanted("an integer, a decimal or a ratio like \"3/10\"")
                .hint(format!("it is taken exactly as typed: {reason}"))
        })?;
        if ratio.is_zero() { Err(above_zero()) } else { Ok(ratio) }
    }

    /// One of a few words.
    pub fn choice<T: Copy>(&self, key: &str, known: &[(&str, T)]) -> Result<Option<T>> {
        let Some(word) = self.string(key)? else { return Ok(None) };
        match known.iter().find(|(name, _)| *name == word) {
            Some((_, choice)) => Ok(Some(*choice)),
            None => {
                let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
                let fault =
                    self.fault(key, format!("unknown {key} {word:?}")).wanted(names.join(" or "));
                Err(match nearest(word, names) {
                    Some(near) => fault.hint(format!("did you mean {near:?}?")),
                    None => fault,
                })
            }
        }
    }
}

/// The value itself; `None` where there is a date in it.
fn typed(item: &Item) -> Option<toml::Value> {
    let table = |table: &dyn TableLike| {
        let pair = |(key, item): (&str, &Item)| Some((key.to_owned(), typed(item)?));
        table.iter().map(pair).collect::<Option<_>>().map(toml::Value::Table)
    };
    Some(match item {
        Item::Value(Value::String(text)) => toml::Value::String(text.value().clone()),
        Item::Value(Value::Integer(number)) => toml::Value::Integer(*number.value()),
        Item::Value(Value::Float(number)) => toml::Value::Float(*number.value()),
        Item::Value(Value::Boolean(truth)) => toml::Value::Boolean(*truth.value()),
        Item::Value(Value::Array(values)) => {
            let value = |value: &Value| typed(&Item::Value(value.clone()));
            toml::Value::Array(values.iter().map(value).collect::<Option<_>>()?)
        }
        Item::Value(Value::InlineTable(inline)) => table(inline)?,
        Item::Table(whole) => table(whole)?,
        Item::ArrayOfTables(all) => {
            toml::Value::Array(all.iter().map(|one| table(one)).collect::<Option<_>>()?)
        }
        Item::Value(Value::Datetime(_)) | Item::None => return None,
    })
}
