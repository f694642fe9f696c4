//! Where each key of a curriculum is in the file, for errors found after parsing.

use std::collections::BTreeMap;
use std::ops::Range;

use contract::{Fault, Result};
use settings::{File, Spanned, Table, Value};
use toml::de::{DeTable, DeValue};

use super::{AutoClipSpec, SkipStepSpec};

/// The spans of keys and values by path; a table in a list is identified by its `name`, else by its number from 1. A
/// name may look like the path of a key: the path then leads to the key, whose value is read as typed.
#[derive(Clone, Debug)]
pub(super) struct KeySpans {
    file: File,
    spans: BTreeMap<String, [Range<usize>; 2]>,
}

impl KeySpans {
    /// Indexes `file`; empty if it is not valid TOML.
    pub(super) fn of(file: &File) -> Self {
        let mut places = KeySpans { file: file.clone(), spans: BTreeMap::new() };
        places.walk("", DeTable::parse_recoverable(file.text()).0.get_ref());
        places
    }

    fn walk(&mut self, above: &str, table: &DeTable) {
        for (key, value) in table {
            let path = if above.is_empty() { key.to_string() } else { format!("{above}.{key}") };
            let spans = [key.span(), value.span()];
            match value.get_ref() {
                DeValue::Table(inner) => {
                    self.spans.entry(path.clone()).or_insert(spans);
                    self.walk(&path, inner);
                }
                DeValue::Array(list) => {
                    self.spans.insert(path.clone(), spans);
                    self.walk_list(&path, list.iter());
                }
                _ => _ = self.spans.insert(path, spans),
            }
        }
    }

    fn walk_list<'a>(&mut self, above: &str, list: impl Iterator<Item = &'a Spanned<DeValue<'a>>>) {
        for (number, value) in (1..).zip(list) {
            let Some(table) = value.get_ref().as_table() else { continue };
            let name = table.get("name").and_then(|name| name.get_ref().as_str());
            let path =
                format!("{above}.{}", name.map_or_else(|| number.to_string(), str::to_owned));
            self.spans.entry(path.clone()).or_insert([value.span(), value.span()]);
            self.walk(&path, table);
        }
    }

    /// The place of `key`, or of the nearest table above it.
    pub(super) fn place(&self, key: &str) -> String {
        let mut key = key;
        loop {
            match (self.spans.get(key), key.rsplit_once('.')) {
                (Some([span, _]), _) => return self.file.place(span.clone()),
                (None, Some((above, _))) => key = above,
                (None, None) => return self.file.name().to_owned(),
            }
        }
    }

    /// The value of `key` as typed.
    pub(super) fn typed(&self, key: &str) -> Option<&str> {
        self.spans.get(key).map(|[_, value]| self.file.typed(value.clone()))
    }

    /// A table at `key`, its keys and values with their places.
    pub(super) fn spanned(&self, key: &str, table: &toml::Table) -> Table {
        let nowhere = [0..0, 0..0];
        let place = |(name, value): (&String, &Value)| {
            let [of_name, of_value] =
                self.spans.get(&format!("{key}.{name}")).unwrap_or(&nowhere).clone();
            (Spanned::new(of_name, name.clone()), Spanned::new(of_value, value.clone()))
        };
        table.iter().map(place).collect()
    }

    /// The first of these keys that is in the file.
    pub(super) fn first_of<'a>(&self, keys: &'a [String]) -> Option<&'a String> {
        keys.iter().find(|key| self.spans.contains_key(*key))
    }

    /// An error about `key`.
    pub(super) fn fault(&self, key: &str, what: impl Into<String>) -> Fault {
        Fault::usage(what).at(self.place(key))
    }

    /// The error for a value out of range, shown as typed.
    pub(super) fn out_of_range(&self, key: &str) -> Fault {
        let name = key.rsplit('.').next().unwrap_or_default();
        let typed = self.typed(key).unwrap_or_default();
        self.fault(key, format!("`{name}` is out of range")).found(typed)
    }

    /// The error for a table that lacks a required key.
    pub(super) fn missing(&self, table: &str, key: &str, wanted: &str) -> Fault {
        let kind = table.split('.').next().unwrap_or_default();
        self.fault(table, format!("[{kind}] has no `{key}`")).wanted(wanted)
    }
}

/// Refuses numbers below zero, or not below their limit.
pub(super) fn check_numbers(places: &KeySpans, numbers: &[(&str, f64, f64)]) -> Result<()> {
    let outside = |(_, number, below): &&(&str, f64, f64)| !(0.0..*below).contains(number);
    match numbers.iter().find(outside) {
        None => Ok(()),
        Some((key, _, below)) => {
            let fault = places.out_of_range(key);
            Err(match below.is_finite() {
                true => fault.wanted(format!("a number from 0 to below {below}")),
                false => fault.wanted("a finite number of at least 0"),
            })
        }
    }
}

/// Refuses invalid windows; `above` is the prefix of their sections' names.
pub(super) fn check_windows(
    places: &KeySpans,
    above: &str,
    skip: Option<SkipStepSpec>,
    clip: Option<AutoClipSpec>,
) -> Result<()> {
    let key = |name: &str| format!("{above}{name}");
    if let Some(SkipStepSpec { window, sigma, non_finite: _ }) = skip {
        check_window(places, &key("skip_step.window"), window)?;
        check_numbers(places, &[(&key("skip_step.sigma"), sigma, f64::INFINITY)])?;
    }
    if let Some(AutoClipSpec { window, percentile }) = clip {
        check_window(places, &key("auto_clip.window"), window)?;
        if !(1..=100).contains(&percentile) {
            return Err(places
                .out_of_range(&key("auto_clip.percentile"))
                .wanted("which of 100 norms, by size, is the longest that passes: 1 to 100"));
        }
    }
    Ok(())
}

/// Windows are saved in every checkpoint, so they have to be small.
fn check_window(places: &KeySpans, key: &str, window: u64) -> Result<()> {
    match window {
        4..=65_536 => Ok(()),
        _ => Err(places.out_of_range(key).wanted("at least 4 and at most 65536 steps")),
    }
}
