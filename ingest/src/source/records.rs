//! Whole rows of Parquet and Arrow files as JSON: for templates and chats of several fields, including nested ones, and
//! for fields that are kept.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::DataType;
use arrow::util::display::array_value_to_string;
use contract::{Fault, Result, counted};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
    ParquetRecordBatchReaderBuilder,
};
use parquet::errors::ParquetError;
use serde_json::{Map, Value};
use store::pieces::Pieces;

use super::columns::{check_types, guarded_pieces, in_group, only_top};
use super::decompress::Tee;
use super::groups::{Cut, Groups, Layout};
use super::{
    Content, Document, Fields, Input, Limits, Parsed, Records, Row, Slab, TextAt, dropped, kinds,
    names, too_long_to_keep,
};
use crate::disk::Disk;

/// Rows read at a time.
pub(super) const ROWS: usize = 256;

/// The format's name for a group of rows.
const KIND: &str = "row group";

/// Reads the row groups of a file in order.
pub(super) struct Reader {
    path: Arc<Path>,
    limits: Limits,
    file: Pieces,
    metadata: ArrowReaderMetadata,
    columns: Vec<usize>,
    tee: Tee,
    groups: Groups,
    /// The next row group to open.
    group: usize,
    open: Option<(u32, u64, ParquetRecordBatchReader)>,
}

/// Rows, ready for a worker.
pub(super) struct Rows {
    pub(super) path: Arc<Path>,
    /// The format's name for a group of rows.
    pub(super) kind: &'static str,
    pub(super) group: u32,
    pub(super) first: u64,
    pub(super) batch: RecordBatch,
    pub(super) bytes_max: u64,
}

/// The columns among `known` that hold the fields, in file order; all if the text is a whole record without named ones.
pub(super) fn roots(path: &Path, known: &[&str], fields: &Fields) -> Result<Vec<usize>> {
    let root = |path: &String| names::of(path).swap_remove(0);
    let text = match &fields.text {
        TextAt::Record(columns) if columns.is_empty() => return Ok((0..known.len()).collect()),
        TextAt::Record(columns) => columns.clone(),
        TextAt::Path(path) => vec![root(path)],
    };
    let others = fields.id.iter().chain(&fields.keep).map(root);
    let at = |name: String| only_top(path, &name, known);
    let mut columns = text.into_iter().chain(others).map(at).collect::<Result<Vec<_>>>()?;
    columns.sort_unstable();
    columns.dedup();
    Ok(columns)
}

impl Reader {
    pub(super) fn open(
        disk: &dyn Disk,
        path: &Path,
        fields: &Fields,
        limits: Limits,
        cut: Option<&Cut>,
    ) -> Result<Self> {
        let file = disk.pieces(path).map_err(|error| Fault::io("open", path, &error))?;
        let metadata = guarded_pieces(path, &file, || {
            ArrowReaderMetadata::load(&file, ArrowReaderOptions::new())
        })
        .map_err(|fault| kinds::instead(disk, path, fault))?;
        let known: Vec<&str> =
            metadata.schema().fields().iter().map(|f| f.name().as_str()).collect();
        let columns = roots(path, &known, fields)?;
        if !fields.is_record() {
            check_types(path, metadata.schema(), fields)?;
        }
        let layout = Layout::of_metadata(path, &file, metadata.metadata())?;
        let groups = Groups::new(path, layout, metadata.metadata().num_row_groups(), cut)?;
        let (path, tee, group) = (path.into(), groups.tee(disk, path)?, groups.range.start);
        Ok(Reader { path, limits, file, metadata, columns, tee, groups, group, open: None })
    }

    fn next_group(&mut self) -> Result<Option<(u32, u64, ParquetRecordBatchReader)>> {
        if self.group == self.groups.range.end {
            return Ok(None);
        }
        let group = self.group;
        self.group += 1;
        let reader = guarded_pieces(&self.path, &self.file, || {
            let (file, metadata) = (self.file.clone(), self.metadata.clone());
            let builder = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata);
            let schema = builder.parquet_schema();
            let mask = ProjectionMask::roots(schema, self.columns.iter().copied());
            let builder = builder.with_row_groups(vec![group]).with_batch_size(ROWS);
            builder.with_projection(mask).build()
        })
        .map_err(in_group(&self.path, KIND, group))?;
        let number = u32::try_from(group).map_err(|_| {
            Fault::data("the file has too many row groups").at(self.path.display().to_string())
        })?;
        Ok(Some((number, 0, reader)))
    }
}

impl Input for Reader {
    fn next_slab(&mut self) -> Result<Option<Slab>> {
        loop {
            let Some((group, first, mut reader)) = self.open.take() else {
                self.open = self.next_group()?;
                if self.open.is_none() {
                    self.tee.read_to(u64::MAX, &self.path)?;
                    return Ok(None);
                }
                continue;
            };
            let batch = guarded_pieces(&self.path, &self.file, || {
                reader.next().transpose().map_err(ParquetError::from)
            })
            .map_err(in_group(&self.path, KIND, group as usize))?;
            let Some(batch) = batch else { continue };
            self.open = Some((group, first + batch.num_rows() as u64, reader));
            let (path, bytes_max) = (self.path.clone(), self.limits.max_document_bytes);
            let kind = KIND;
            let rows = Rows { path, kind, group, first, batch, bytes_max };
            return Ok(Some(Slab(Records::Objects(rows))));
        }
    }

    fn raw_bytes(&self) -> u64 {
        self.tee.bytes()
    }

    fn content(&self) -> Content {
        self.groups.content(&self.tee, self.groups.range.len() as u64)
    }
}

impl Rows {
    /// Each row as a JSON object.
    pub(super) fn parse(&self, fields: &Fields) -> Vec<Parsed> {
        (0..self.batch.num_rows()).map(|row| self.row(row, fields)).collect()
    }

    fn row(&self, row: usize, fields: &Fields) -> Parsed {
        let number = self.first + row as u64;
        let at = Row { group: Some(self.group), row: number };
        let place = format!("{}: {} {}, row {number}", self.path.display(), self.kind, self.group);
        let mut record = Map::new();
        let schema = self.batch.schema();
        for (field, column) in schema.fields().iter().zip(self.batch.columns()) {
            if let Some(found) = not_utf8(column, row) {
                let fault = Fault::data(format!("column `{}`: invalid UTF-8", field.name()));
                return dropped("invalid UTF-8", at, 0, fault.found(found).at(place));
            }
            record.insert(field.name().clone(), value(column, row));
        }
        let mut record = Value::Object(record);
        let kept: Vec<_> = fields.keep.iter().map(|path| kept(found(&record, path))).collect();
        let id = fields.id.as_deref().and_then(|path| found(&record, path)).cloned();
        let text = match text(&mut record, fields) {
            Ok(text) => text,
            Err((reason, fault)) => return dropped(reason, at, 0, fault.at(place)),
        };
        let bytes = text.len() as u64;
        if bytes > self.bytes_max {
            let fault = Fault::data("the document is too long").found(counted(bytes, "byte"));
            let fault = fault.wanted(format!("at most {}", self.bytes_max)).at(place);
            return dropped("too large", at, bytes, fault);
        }
        if let Some(fault) = too_long_to_keep(&kept, &fields.keep) {
            return dropped("too large", at, bytes, fault.at(place));
        }
        let id = match id {
            None | Some(Value::Null) => None,
            Some(Value::String(id)) => Some(id),
            Some(Value::Number(id)) if !id.is_f64() => Some(id.to_string()),
            Some(_) => {
                let fault =
                    Fault::data("the row's id is neither a string nor an integer").at(place);
                return dropped("malformed", at, bytes, fault);
            }
        };
        Parsed::Document(Document {
            id,
            text,
            row: number,
            group: Some(self.group),
            bytes: None,
            kept,
        })
    }
}

/// The value at a path of a record.
fn found<'a>(record: &'a Value, path: &str) -> Option<&'a Value> {
    names::of(path).iter().try_fold(record, |value, key| value.get(key))
}

/// A kept value: a string as it is, another value as JSON.
fn kept(value: Option<&Value>) -> Option<String> {
    match value? {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

/// The text of a record, or why it has none.
fn text(record: &mut Value, fields: &Fields) -> std::result::Result<String, (&'static str, Fault)> {
    let path = match &fields.text {
        TextAt::Path(path) => path,
        TextAt::Record(_) => {
            // A template's text is that of the record without what is only kept.
            let id = fields.id.as_ref().and_then(|id| names::of(id).into_iter().next());
            let of_text =
                |name: &String| fields.columns().contains(name) || id.as_ref() == Some(name);
            if let (Value::Object(columns), false) = (&mut *record, fields.columns().is_empty()) {
                columns.retain(|name, _| of_text(name));
            }
            return Ok(record.to_string());
        }
    };
    match found(record, path) {
        Some(Value::String(text)) if text.is_empty() => {
            Err(("empty", Fault::data("the document is empty")))
        }
        Some(Value::String(text)) => Ok(text.clone()),
        _ => Err((
            "missing text",
            Fault::data(format!("column `{path}` holds no text")).found("null"),
        )),
    }
}

/// The bytes of a binary value that may hold text; fixed-size ones hold hashes and the like.
fn binary(array: &ArrayRef, row: usize) -> Option<&[u8]> {
    match array.data_type() {
        DataType::Binary => Some(array.as_binary::<i32>().value(row)),
        DataType::LargeBinary => Some(array.as_binary::<i64>().value(row)),
        DataType::BinaryView => Some(array.as_binary_view().value(row)),
        _ => None,
    }
}

fn is_decimal(kind: &DataType) -> bool {
    use DataType::{Decimal32, Decimal64, Decimal128, Decimal256};
    matches!(kind, Decimal32(..) | Decimal64(..) | Decimal128(..) | Decimal256(..))
}

/// Why a value of a binary column is not text.
fn not_utf8(array: &ArrayRef, row: usize) -> Option<String> {
    if array.is_null(row) {
        return None;
    }
    let bytes = binary(array, row)?;
    std::str::from_utf8(bytes).err().map(|error| super::columns::not_utf8(bytes, error))
}

/// One value as JSON; types that JSON lacks become strings, and nested bytes that are not text become null.
fn value(array: &ArrayRef, row: usize) -> Value {
    if array.is_null(row) {
        return Value::Null;
    }
    let list = |values: ArrayRef| (0..values.len()).map(|at| value(&values, at)).collect();
    match array.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => array.as_boolean().value(row).into(),
        DataType::Utf8 => array.as_string::<i32>().value(row).into(),
        DataType::LargeUtf8 => array.as_string::<i64>().value(row).into(),
        DataType::Utf8View => array.as_string_view().value(row).into(),
        DataType::List(_) => Value::Array(list(array.as_list::<i32>().value(row))),
        DataType::LargeList(_) => Value::Array(list(array.as_list::<i64>().value(row))),
        DataType::FixedSizeList(..) => Value::Array(list(array.as_fixed_size_list().value(row))),
        DataType::ListView(_) => Value::Array(list(array.as_list_view::<i32>().value(row))),
        DataType::LargeListView(_) => Value::Array(list(array.as_list_view::<i64>().value(row))),
        DataType::Map(..) => {
            let entries = array.as_map().value(row);
            let key = |at| match value(entries.column(0), at) {
                Value::String(key) => key,
                other => other.to_string(),
            };
            let entry = |at| (key(at), value(entries.column(1), at));
            Value::Object((0..entries.len()).map(entry).collect())
        }
        DataType::Struct(fields) => {
            let columns = array.as_struct().columns();
            let named = fields.iter().zip(columns);
            Value::Object(named.map(|(f, column)| (f.name().clone(), value(column, row))).collect())
        }
        DataType::Dictionary(..) => match array.as_any_dictionary_opt() {
            Some(keyed) if !keyed.values().is_empty() => {
                value(keyed.values(), keyed.normalized_keys()[row])
            }
            _ => Value::Null,
        },
        kind => {
            if let Some(bytes) = binary(array, row) {
                return std::str::from_utf8(bytes).map_or(Value::Null, Value::from);
            }
            let shown = array_value_to_string(array, row).unwrap_or_default();
            // A decimal is not turned into a float: its digits stay.
            let is_number = kind.is_numeric() && !is_decimal(kind);
            let number = is_number.then(|| serde_json::from_str(&shown).ok()).flatten();
            number.unwrap_or(Value::String(shown))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::File;
    use std::path::PathBuf;

    use arrow::array::{Float64Array, Int32Array, ListArray, StringArray, StructArray};
    use arrow::buffer::OffsetBuffer;
    use arrow::datatypes::{Field, Schema};
    use arrow::ipc::writer::{FileWriter, StreamWriter};
    use parquet::arrow::ArrowWriter;
    use parquet::file::properties::WriterProperties;
    use serde_json::json;

    use super::super::{Format, groups, open};
    use super::*;

    /// Three rows of a chat, a number, and an unused column.
    fn rows() -> RecordBatch {
        let role: ArrayRef = Arc::new(StringArray::from(vec!["user", "bot", "user"]));
        let content: ArrayRef = Arc::new(StringArray::from(vec![Some("hi"), Some("yo"), None]));
        let field = |name: &str, kind: DataType| Arc::new(Field::new(name, kind, true));
        let turns = StructArray::from(vec![
            (field("role", DataType::Utf8), role),
            (field("content", DataType::Utf8), content),
        ]);
        let item = field("item", turns.data_type().clone());
        let offsets = OffsetBuffer::from_lengths([2, 0, 1]);
        let chat: ArrayRef = Arc::new(ListArray::new(item, offsets, Arc::new(turns), None));
        let columns: BTreeMap<&str, ArrayRef> = BTreeMap::from([
            ("chat", chat),
            ("id", Arc::new(Int32Array::from(vec![7, 8, -9])) as ArrayRef),
            ("score", Arc::new(Float64Array::from(vec![Some(0.5), None, Some(2.0)])) as ArrayRef),
            ("unused", Arc::new(StringArray::from(vec!["a", "b", "c"])) as ArrayRef),
        ]);
        let fields: Vec<_> = columns.iter().map(|(n, c)| field(n, c.data_type().clone())).collect();
        let schema = Schema::new(fields.iter().map(|f| f.as_ref().clone()).collect::<Vec<_>>());
        RecordBatch::try_new(Arc::new(schema), columns.into_values().collect()).unwrap()
    }

    /// The rows as Parquet, as an Arrow stream and as an Arrow file, each in groups of two rows and one row.
    fn files(folder: &Path) -> [PathBuf; 3] {
        let (all, paths) = (rows(), ["x.parquet", "x.arrows", "x.arrow"].map(|n| folder.join(n)));
        let [parquet, stream, file] = paths.each_ref().map(|path| File::create(path).unwrap());
        let properties = WriterProperties::builder().set_max_row_group_row_count(Some(2)).build();
        let mut parquet = ArrowWriter::try_new(parquet, all.schema(), Some(properties)).unwrap();
        parquet.write(&all).unwrap();
        parquet.close().unwrap();
        let mut stream = StreamWriter::try_new(stream, &all.schema()).unwrap();
        let mut file = FileWriter::try_new(file, &all.schema()).unwrap();
        for (first, count) in [(0, 2), (2, 1)] {
            stream.write(&all.slice(first, count)).unwrap();
            file.write(&all.slice(first, count)).unwrap();
        }
        stream.finish().unwrap();
        file.finish().unwrap();
        paths
    }

    #[test]
    fn bytes_are_text_and_decimals_keep_their_digits() {
        use arrow::array::{BinaryArray, Decimal128Array};

        let bytes: ArrayRef = Arc::new(BinaryArray::from(vec![&b"What is it?"[..], b"a\xffb"]));
        let digits = vec![12_345_678_901_234_567_890_150, 150];
        let decimal = Decimal128Array::from(digits).with_precision_and_scale(38, 2).unwrap();
        let decimal: ArrayRef = Arc::new(decimal);
        let field = |name: &str, array: &ArrayRef| {
            Arc::new(Field::new(name, array.data_type().clone(), true))
        };
        let inner = StructArray::from(vec![(field("b", &bytes), bytes.clone())]);
        let inner: ArrayRef = Arc::new(inner);
        let batch =
            RecordBatch::try_from_iter([("d", decimal.clone()), ("q", bytes), ("s", inner)])
                .unwrap();
        let fields = Fields::record(["d", "q", "s"], None);
        let rows = Rows {
            path: Path::new("x").into(),
            kind: KIND,
            group: 0,
            first: 0,
            batch,
            bytes_max: 100,
        };
        let parsed = rows.parse(&fields);
        let [Parsed::Document(first), Parsed::Dropped { reason, fault, .. }] = &parsed[..] else {
            panic!("{parsed:?}")
        };
        let found: Value = serde_json::from_str(&first.text).unwrap();
        let wanted =
            json!({"d": "123456789012345678901.50", "q": "What is it?", "s": {"b": "What is it?"}});
        assert_eq!(found, wanted);
        assert_eq!(*reason, "invalid UTF-8");
        assert!(fault.to_string().contains("0xff at offset 1"), "{fault}");
        // Invalid bytes in an unused column do no harm.
        assert_eq!(value(rows.batch.column(2), 1), json!({"b": null}));
    }

    #[test]
    fn maps_are_objects_and_views_are_lists() {
        use arrow::array::{Int64Builder, ListViewArray, MapBuilder, StringBuilder};
        use arrow::buffer::ScalarBuffer;

        let mut named = MapBuilder::new(None, StringBuilder::new(), Int64Builder::new());
        named.keys().append_value("a \"b\"");
        named.values().append_value(1);
        named.keys().append_value("c");
        named.values().append_null();
        named.append(true).unwrap();
        named.append(true).unwrap();
        let mut numbered = MapBuilder::new(None, Int64Builder::new(), StringBuilder::new());
        numbered.keys().append_value(7);
        numbered.values().append_value("seven");
        numbered.append(true).unwrap();
        let item = Arc::new(Field::new("item", DataType::Utf8, true));
        let (starts, sizes) = (ScalarBuffer::from(vec![1, 0]), ScalarBuffer::from(vec![2, 1]));
        let words: ArrayRef = Arc::new(StringArray::from(vec!["x", "y", "z"]));
        let views: ArrayRef = Arc::new(ListViewArray::new(item, starts, sizes, words, None));
        let (named, numbered): (ArrayRef, ArrayRef) =
            (Arc::new(named.finish()), Arc::new(numbered.finish()));
        assert_eq!(value(&named, 0).to_string(), r#"{"a \"b\"":1,"c":null}"#);
        assert_eq!(value(&named, 1), json!({}));
        assert_eq!(value(&numbered, 0), json!({"7": "seven"}));
        assert_eq!((value(&views, 0), value(&views, 1)), (json!(["y", "z"]), json!(["x"])));
    }

    /// The same records as JSON Lines, Parquet and Arrow give the same texts and kept values.
    #[test]
    fn kept_fields_are_the_same_from_every_format() {
        let folder = tempfile::tempdir().unwrap();
        let lines = folder.path().join("x.jsonl");
        let chat = r#"[ {"role": "user", "content": "hi"}, {"role":"bot","content":"yo"} ]"#;
        let records = [
            format!(r#"{{"id":7,"score":0.5,"unused":"a","chat":{chat}}}"#),
            r#"{"id":8,"score":null,"unused":"b","chat":[]}"#.to_owned(),
            r#"{"id":-9,"score":2.0,"unused":"c","chat":[{"role":"user","content":null}]}"#
                .to_owned(),
        ];
        std::fs::write(&lines, records.join("\n")).unwrap();
        let keep = ["score", "chat", "unused", "id"].map(str::to_owned).to_vec();
        let read = |path: &Path, fields: &Fields| {
            let format = Format::guess(path).unwrap();
            let mut reader = open(path, format, fields, &Limits::default()).unwrap();
            let mut found = Vec::new();
            while let Some(slab) = reader.next_slab().unwrap() {
                for parsed in slab.parse(fields).unwrap() {
                    let Parsed::Document(document) = parsed else { panic!("{parsed:?}") };
                    found.push((document.id, document.text, document.kept));
                }
            }
            found
        };
        let fields = Fields { keep: keep.clone(), ..Fields::at("unused", Some("id")) };
        let wanted = read(&lines, &fields);
        let first = [
            Some("0.5"),
            Some(r#"[{"role":"user","content":"hi"},{"role":"bot","content":"yo"}]"#),
        ];
        assert_eq!(wanted[0].2[..2], first.map(|it| it.map(str::to_owned)));
        assert_eq!(
            wanted[1].2,
            [None, Some("[]"), Some("b"), Some("8")].map(|it| it.map(str::to_owned))
        );
        let of_record =
            |keep: &[String]| Fields { keep: keep.to_vec(), ..Fields::record(["chat"], None) };
        for path in files(folder.path()) {
            let found = read(&path, &fields);
            let sorted = |value: &Option<String>| {
                value.as_ref().map(|text| match serde_json::from_str::<Value>(text) {
                    Ok(json) => json.to_string(),
                    Err(_) => text.clone(),
                })
            };
            for ((id, text, kept), (wanted_id, wanted_text, wanted_kept)) in
                found.iter().zip(&wanted)
            {
                assert_eq!((id, text), (wanted_id, wanted_text));
                assert!(kept.iter().map(sorted).eq(wanted_kept.iter().map(sorted)), "{kept:?}");
            }
            // What is kept is no part of a text that a template makes.
            let texts = |keep: &[String]| -> Vec<String> {
                read(&path, &of_record(keep)).into_iter().map(|(_, text, _)| text).collect()
            };
            assert_eq!(texts(&keep), texts(&[]));
            let format = Format::guess(&path).unwrap();
            let missing = Fields { keep: vec!["scroe".to_owned()], ..Fields::at("unused", None) };
            let fault = open(&path, format, &missing, &Limits::default()).map(drop).unwrap_err();
            assert!(fault.to_string().contains("`score`"), "{fault}");
            let number = Fields { keep: keep.clone(), ..Fields::at("score", None) };
            let fault = open(&path, format, &number, &Limits::default()).map(drop).unwrap_err();
            assert!(fault.to_string().contains("has the wrong type"), "{fault}");
        }
    }

    #[test]
    fn rows_are_objects_of_the_columns_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let fields = Fields::record(["chat", "score"], Some("id"));
        let turn = |role: &str, content: Option<&str>| json!({"role": role, "content": content});
        let row = |id: i32, score: Option<f64>, chat: Vec<Value>| json!({"id": id, "score": score, "chat": chat});
        let first = row(7, Some(0.5), vec![turn("user", Some("hi")), turn("bot", Some("yo"))]);
        let id = |id: i32| Some(id.to_string());
        let wanted = [
            (id(7), Some(0), 0, first),
            (id(8), Some(0), 1, row(8, None, vec![])),
            (id(-9), Some(1), 0, row(-9, Some(2.0), vec![turn("user", None)])),
        ];
        for path in files(folder.path()) {
            let format = Format::guess(&path).unwrap();
            let open = |fields: &Fields, limits| open(&path, format, fields, &limits);
            let mut reader = open(&fields, Limits::default()).unwrap();
            let mut found = Vec::new();
            while let Some(slab) = reader.next_slab().unwrap() {
                for parsed in slab.parse(&fields).unwrap() {
                    let Parsed::Document(document) = parsed else { panic!("{parsed:?}") };
                    let record: Value = serde_json::from_str(&document.text).unwrap();
                    found.push((document.id, document.group, document.row, record));
                }
            }
            assert_eq!(found, wanted);
            let Content { bytes, sha256, .. } = reader.content();
            assert_eq!((bytes, sha256), groups::content(&path, format, None).unwrap());
            assert_eq!(bytes, std::fs::metadata(&path).unwrap().len());
            let limits = Limits { max_document_bytes: 60, ..Limits::default() };
            let slab = open(&fields, limits).unwrap().next_slab().unwrap().unwrap();
            let Parsed::Dropped { fault, .. } = &slab.parse(&fields).unwrap()[0] else {
                panic!("the first row is longer than 60 bytes")
            };
            let kind = if format == Format::Parquet { "row group" } else { "record batch" };
            assert!(fault.to_string().contains(&format!("{kind} 0, row 0")), "{fault}");
            let missing = Fields::record(["caht"], None);
            let fault = open(&missing, Limits::default()).map(drop).unwrap_err();
            assert!(fault.to_string().contains("`chat`"), "{fault}");
        }
    }
}
