//! Rows of columnar files: a text column and perhaps an id column, ready for a worker.

use std::error::Error;
use std::fmt::Display;
use std::io;
use std::path::Path;
use std::str::Utf8Error;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::buffer::NullBuffer;
use arrow::datatypes::{DataType, Field, Schema};
use arrow::util::display::array_value_to_string;
use contract::fault::{is_out_of_memory, nearest, tells_of_memory};
use contract::guard::quietly;
use contract::{Class, Fault, Result, counted};
use parquet::data_type::ByteArray;
use store::pieces::Pieces;

use super::{Document, Fields, Parsed, Row, dropped, names};

/// Rows of one group of a file.
pub(super) struct Rows {
    pub(super) path: Arc<Path>,
    /// The format's name for a group of rows.
    pub(super) kind: &'static str,
    pub(super) group: u32,
    /// The index of the first row within its group.
    pub(super) first: u64,
    pub(super) rows: usize,
    pub(super) text: Column,
    pub(super) id: Option<Column>,
    pub(super) bytes_max: u64,
}

/// The values of one column for the rows of a slab.
pub(super) enum Column {
    /// Strings of a Parquet column, not yet checked to be UTF-8.
    Bytes(Vec<Option<ByteArray>>),
    /// Integers of a Parquet column.
    Integers(Vec<Option<i128>>),
    /// An Arrow array, and the nulls of the structs around it.
    Array(ArrayRef, Option<NullBuffer>),
}

impl Rows {
    pub(super) fn parse(&self, fields: &Fields) -> Result<Vec<Parsed>> {
        let text = self.text.cells(self.rows)?;
        let id = self.id.as_ref().map(|id| id.cells(self.rows)).transpose()?;
        (0..self.rows)
            .map(|row| {
                Ok(match id.as_ref().map_or(Ok(Ok(None)), |id| id.text(row))? {
                    Ok(id) => self.row(row, text.bytes(row), id, fields),
                    Err(found) => self.not_utf8(row, "id", text.bytes(row), found),
                })
            })
            .collect()
    }

    fn row(&self, row: usize, text: Option<&[u8]>, id: Option<String>, fields: &Fields) -> Parsed {
        let Some(text) = text else {
            let fault =
                Fault::data(format!("column `{}` holds no text", fields.path())).found("null");
            return self.dropped(row, "missing text", 0, fault);
        };
        let length = text.len() as u64;
        if length > self.bytes_max {
            let fault = Fault::data("the document is too long").found(counted(length, "byte"));
            let fault = fault.wanted(format!("at most {}", self.bytes_max));
            return self.dropped(row, "too large", length, fault);
        }
        match std::str::from_utf8(text) {
            Ok("") => self.dropped(row, "empty", 0, Fault::data("the document is empty")),
            Ok(text) => Parsed::Document(Document {
                id,
                text: text.to_owned(),
                row: self.first + row as u64,
                group: Some(self.group),
                bytes: None,
                kept: Vec::new(),
            }),
            Err(error) => self.not_utf8(row, "text", Some(text), not_utf8(text, error)),
        }
    }

    fn not_utf8(&self, row: usize, what: &str, text: Option<&[u8]>, found: String) -> Parsed {
        let bytes = text.map_or(0, |text| text.len() as u64);
        let fault = Fault::data(format!("the {what} is invalid UTF-8")).found(found);
        self.dropped(row, "invalid UTF-8", bytes, fault)
    }

    fn dropped(&self, row: usize, reason: &'static str, bytes: u64, fault: Fault) -> Parsed {
        let row = self.first + row as u64;
        let place = format!("{}: {} {}, row {row}", self.path.display(), self.kind, self.group);
        dropped(reason, Row { group: Some(self.group), row }, bytes, fault.at(place))
    }
}

impl Column {
    /// The column, looked up once instead of at every row.
    fn cells(&self, rows: usize) -> Result<Cells<'_>> {
        let cells = match self {
            Column::Bytes(values) => Cells::Bytes(values),
            Column::Integers(values) => Cells::Integers(values),
            Column::Array(array, nulls) => {
                let nulls = NullBuffer::union(nulls.as_ref(), array.nulls());
                match array.as_any_dictionary_opt() {
                    // A dictionary without values has only null keys.
                    Some(keyed) if keyed.values().is_empty() => {
                        Cells::Array(keyed.values(), Some(NullBuffer::new_null(rows)), None)
                    }
                    Some(keyed) => {
                        Cells::Array(keyed.values(), nulls, Some(keyed.normalized_keys()))
                    }
                    None => Cells::Array(array, nulls, None),
                }
            }
        };
        if cells.len() < rows {
            return Err(Fault::bug("a column is shorter than its rows"));
        }
        Ok(cells)
    }
}

enum Cells<'a> {
    Bytes(&'a [Option<ByteArray>]),
    Integers(&'a [Option<i128>]),
    Array(&'a ArrayRef, Option<NullBuffer>, Option<Vec<usize>>),
}

impl Cells<'_> {
    fn len(&self) -> usize {
        match self {
            Cells::Bytes(values) => values.len(),
            Cells::Integers(values) => values.len(),
            Cells::Array(array, nulls, keys) => match (nulls, keys) {
                (_, Some(keys)) => keys.len(),
                (Some(nulls), None) => nulls.len(),
                (None, None) => array.len(),
            },
        }
    }

    /// The array and the index of a row's value, unless it is null.
    fn place(&self, row: usize) -> Option<(&ArrayRef, usize)> {
        let Cells::Array(array, nulls, keys) = self else { return None };
        if nulls.as_ref().is_some_and(|nulls| nulls.is_null(row)) {
            return None;
        }
        let place = keys.as_ref().map_or(row, |keys| keys[row]);
        (!array.is_null(place)).then_some((*array, place))
    }

    fn bytes(&self, row: usize) -> Option<&[u8]> {
        if let Cells::Bytes(values) = self {
            return values[row].as_ref().map(ByteArray::data);
        }
        let (array, at) = self.place(row)?;
        match array.data_type() {
            DataType::Utf8 => Some(array.as_string::<i32>().value(at).as_bytes()),
            DataType::LargeUtf8 => Some(array.as_string::<i64>().value(at).as_bytes()),
            DataType::Utf8View => Some(array.as_string_view().value(at).as_bytes()),
            DataType::Binary => Some(array.as_binary::<i32>().value(at)),
            DataType::LargeBinary => Some(array.as_binary::<i64>().value(at)),
            DataType::BinaryView => Some(array.as_binary_view().value(at)),
            _ => None,
        }
    }

    /// Returns the row's id, or why it is not a string.
    fn text(&self, row: usize) -> Result<std::result::Result<Option<String>, String>> {
        match self {
            Cells::Integers(values) => Ok(Ok(values[row].map(|value| value.to_string()))),
            Cells::Array(array, ..) if array.data_type().is_integer() => {
                let Some((array, at)) = self.place(row) else { return Ok(Ok(None)) };
                let shown = array_value_to_string(array, at);
                let shown =
                    shown.map_err(|error| Fault::bug(format!("cannot show an id: {error}")));
                shown.map(|id| Ok(Some(id)))
            }
            _ => {
                let text =
                    |bytes| std::str::from_utf8(bytes).map_err(|error| not_utf8(bytes, error));
                Ok(self.bytes(row).map(text).transpose().map(|id| id.map(str::to_owned)))
            }
        }
    }
}

/// The message for a value that is not UTF-8, with the offset.
pub(super) fn not_utf8(value: &[u8], error: Utf8Error) -> String {
    let at = error.valid_up_to();
    format!("byte 0x{:02x} at offset {at} of the value", value[at])
}

/// Refuses a schema whose text or id has no suitable type.
pub(super) fn check_types(path: &Path, schema: &Schema, fields: &Fields) -> Result<()> {
    check(path, schema, fields.path(), "strings", is_text)?;
    let fits = |kind: &DataType| is_text(kind) || is_integer(kind);
    fields.id.as_ref().map_or(Ok(()), |id| check(path, schema, id, "strings or integers", fits))
}

/// Refuses a schema without a suitable column at a dotted path.
fn check(
    path: &Path,
    schema: &Schema,
    name: &str,
    wanted: &str,
    fits: impl Fn(&DataType) -> bool,
) -> Result<()> {
    let mut leaves = Vec::new();
    schema.fields().iter().for_each(|field| list_leaves(field, "", &mut leaves));
    let names: Vec<&str> = leaves.iter().map(|(leaf, _)| leaf.as_str()).collect();
    let is_null = |index: usize| leaves[index].1 == DataType::Null;
    let (_, kind) = &leaves[only_or_null(path, name, &names, is_null)?];
    if fits(kind) { Ok(()) } else { Err(wrong_column(path, name, kind, wanted)) }
}

fn list_leaves(field: &Field, prefix: &str, leaves: &mut Vec<(String, DataType)>) {
    let name = format!("{prefix}{}", field.name());
    match field.data_type() {
        DataType::Struct(fields) => {
            fields.iter().for_each(|field| list_leaves(field, &format!("{name}."), leaves));
        }
        kind => leaves.push((name, kind.clone())),
    }
}

fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(_, values) => is_text(values),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView => true,
        // A shard in which the column has no values: its rows have no text.
        DataType::Null => true,
        _ => false,
    }
}

fn is_integer(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(_, values) => values.is_integer(),
        kind => kind.is_integer(),
    }
}

/// The index of the only column called `name` in a file: `name` itself, or, if `is_null` tells that it has no values, a
/// column that could contain it.
pub(super) fn only_or_null(
    path: &Path,
    name: &str,
    known: &[&str],
    is_null: impl Fn(usize) -> bool,
) -> Result<usize> {
    let name = &names::joined(name);
    let holds = |known: &str| name.strip_prefix(known).is_some_and(|rest| rest.starts_with('.'));
    let null = || (0..known.len()).find(|index| holds(known[*index]) && is_null(*index));
    match null().filter(|_| !known.contains(&name.as_str())) {
        Some(index) => Ok(index),
        None => only(path, name, known),
    }
}

/// The index of the only column called `name` in a file.
pub(super) fn only(path: &Path, name: &str, known: &[&str]) -> Result<usize> {
    let mut found = known.iter().enumerate().filter(|(_, known)| **known == name);
    match (found.next(), found.next()) {
        (Some((index, _)), None) => Ok(index),
        (None, _) => Err(no_column(path, name, known)),
        (Some(_), Some(_)) => Err(Fault::data(format!("two columns are called `{name}`"))
            .at(path.display().to_string())
            .hint("write the file again with one of them under another name")),
    }
}

/// The same for a top-level column: the message tells a name with a dot from a path.
pub(super) fn only_top(path: &Path, name: &str, known: &[&str]) -> Result<usize> {
    let inner = |known: &&&str| known.strip_prefix(name).is_some_and(|it| it.starts_with('.'));
    match known.iter().find(inner).filter(|_| !known.contains(&name)) {
        Some(column) => Err(Fault::data(format!("no column `{name}`"))
            .at(path.display().to_string())
            .found(format!("the column `{column}`"))
            .hint(names::with_backslash(column))),
        None => only(path, name, known),
    }
}

/// A column that the corpus names and the file lacks.
fn no_column(path: &Path, name: &str, known: &[&str]) -> Fault {
    let within = |known: &&&str| known.strip_prefix(name).is_some_and(|it| it.starts_with('.'));
    let within: Vec<&str> = known.iter().filter(within).copied().collect();
    if let Some(first) = within.first() {
        let found = format!("columns within it: {}", within.join(", "));
        let inner = first.strip_prefix(name).unwrap_or(first);
        return wrong_column(path, name, found, "strings").hint(
            match (inner.starts_with(".list."), inner.starts_with(".key_value.")) {
                (true, _) => format!("name an item of the list, like template = \"{{{name}.0}}\""),
                (_, true) => "write the text of this map into a column of its own".to_owned(),
                _ => format!(
                    "name one of them in corpus.toml, like text = \"{first}\", or several in a `template`"
                ),
            },
        );
    }
    let fault = Fault::data(format!("no column `{name}`")).at(path.display().to_string());
    let fault = match nearest(name, known.iter().copied()) {
        Some(near) => fault.found(format!("the nearest column is `{near}`")),
        None => fault.found(format!("the columns {}", known.join(", "))),
    };
    fault.hint(
        "name the column in corpus.toml as `text` or `id`; parts of a path are separated by dots",
    )
}

/// The fault for a column whose type is neither text nor, for an id, integers.
pub(super) fn wrong_column(path: &Path, name: &str, found: impl Display, wanted: &str) -> Fault {
    Fault::data(format!("column `{name}` has the wrong type"))
        .at(path.display().to_string())
        .found(found)
        .wanted(wanted)
        .hint("name another column in corpus.toml")
}

/// Runs a decoder on untrusted bytes.
///
/// The decoders of these formats use a file's claims about its layout as indices, so a damaged file can make them
/// panic. The panic becomes an error of the file.
pub(super) fn guarded<T, E: Error + 'static>(
    path: &Path,
    format: &str,
    decode: impl FnOnce() -> std::result::Result<T, E>,
) -> Result<T> {
    let damaged = |found: String| {
        // Some libraries' messages have several lines.
        let found = found.lines().map(str::trim).collect::<Vec<_>>().join(", ");
        Fault::data(format!("the {format} file is damaged, cut short or of an unknown kind"))
            .at(path.display().to_string())
            .found(found)
            .hint("fetch or write the file again")
    };
    let short = || Err(Fault::io("read", path, &io::ErrorKind::OutOfMemory.into()));
    match quietly(decode) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) if is_out_of_memory(&error) => short(),
        Ok(Err(error)) => Err(damaged(error.to_string())),
        Err(panic) if tells_of_memory(&panic) => short(),
        Err(_) => Err(damaged("bytes that the decoder could not make sense of".to_owned())),
    }
}

/// Runs a decoder that reads a Parquet file itself; an I/O error takes precedence over its error.
pub(super) fn guarded_pieces<T>(
    path: &Path,
    file: &Pieces,
    decode: impl FnOnce() -> parquet::errors::Result<T>,
) -> Result<T> {
    guarded(path, "Parquet", decode).map_err(|fault| {
        let fault = file.or_machine(path, fault);
        // For encrypted columns with a plain footer, the library gives no reason.
        match fault.class() {
            Class::Data => fault.hint("fetch the file again, or write it without encryption"),
            _ => fault,
        }
    })
}

/// Adds the group of rows to a fault.
pub(super) fn in_group(path: &Path, kind: &str, group: usize) -> impl FnOnce(Fault) -> Fault {
    move |fault| fault.at(format!("{}: {kind} {group}", path.display()))
}
