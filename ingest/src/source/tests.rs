//! What all formats share: files read back as they were written, whatever the slab size, and damage is an error.

mod accepted;
mod faults;
mod groups;
mod wrong;

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use super::*;
use ::arrow::array::{
    Array, ArrayRef, BinaryArray, DictionaryArray, Int64Array, LargeStringArray, RecordBatch,
    StringArray, StringViewArray, StructArray,
};
use ::arrow::buffer::NullBuffer;
use ::arrow::datatypes::{DataType, Field, Int32Type, Schema};
use ::arrow::ipc::writer::{FileWriter, StreamWriter};
use ::parquet::arrow::ArrowWriter;
use ::parquet::basic::{Compression, ZstdLevel};
use ::parquet::file::properties::{WriterProperties, WriterVersion};
use contract::Class;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use store::location::memory::Memory;

/// A file in its own temporary folder.
pub(super) struct Scratch {
    _folder: tempfile::TempDir,
    pub(super) path: PathBuf,
}

pub(super) fn write(name: &str, bytes: &[u8]) -> Scratch {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    Scratch { _folder: folder, path }
}

pub(super) fn read_with(
    file: &Scratch,
    text: &str,
    id: Option<&str>,
    limits: &Limits,
) -> Result<Vec<Parsed>> {
    let fields = Fields::at(text, id);
    read_on(&Real, file, &fields, limits)
}

fn read_on(
    disk: &dyn Disk,
    file: &Scratch,
    fields: &Fields,
    limits: &Limits,
) -> Result<Vec<Parsed>> {
    let format = Format::guess(&file.path).unwrap();
    let (parsed, content) =
        read_all(open_on(disk, &file.path, format, fields, limits, None)?, fields)?;
    let known = SourceFile::new((&file.path).into(), String::new(), format).content().unwrap();
    assert_eq!((content.bytes, content.sha256), known);
    assert_eq!(content.bytes, std::fs::metadata(&file.path).unwrap().len());
    Ok(parsed)
}

fn read_all(mut input: Box<dyn Input>, fields: &Fields) -> Result<(Vec<Parsed>, Content)> {
    let mut parsed = Vec::new();
    while let Some(slab) = input.next_slab()? {
        parsed.extend(slab.parse(fields)?);
    }
    let content = input.content();
    assert!(input.next_slab()?.is_none(), "an exhausted input stays so");
    Ok((parsed, content))
}

pub(super) fn read(file: &Scratch, text: &str, id: Option<&str>) -> Vec<Parsed> {
    read_with(file, text, id, &Limits::default()).unwrap()
}

pub(super) fn documents(parsed: Vec<Parsed>) -> Vec<Document> {
    let keep = |parsed| match parsed {
        Parsed::Document(document) => Some(document),
        Parsed::Dropped { .. } => None,
    };
    parsed.into_iter().filter_map(keep).collect()
}

#[test]
fn names_and_extensions_say_the_format() {
    for (name, format) in [
        ("a.jsonl", Format::JsonLines),
        ("a.json.gz", Format::JsonLines),
        ("A.JSONL.ZST", Format::JsonLines),
        ("a.parquet", Format::Parquet),
        ("a.arrow", Format::Arrow),
        ("a.jsonlines", Format::JsonLines),
        ("a.jl.gz", Format::JsonLines),
        ("a.md", Format::Text),
        ("book.txt.gz", Format::Text),
    ] {
        assert_eq!(Format::guess(Path::new(name)), Some(format), "{name}");
    }
    for name in ["a.csv", "a.tsv.gz", "a.parq", "a.html", "src/main.rs", "README", ".gz", "txt"] {
        assert_eq!(Format::guess(Path::new(name)), None, "{name}");
    }
}

// Reading what was written.

#[derive(Clone, Debug)]
struct Row {
    text: Option<String>,
    id: Option<String>,
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let text = prop_oneof![
        1 => Just(None),
        1 => Just(Some(String::new())),
        8 => any::<String>().prop_map(Some),
        2 => "[ -~\n\"\\\\]{0,300}".prop_map(Some),
    ];
    let row = (text, prop::option::of("[a-z0-9/]{0,12}"));
    prop::collection::vec(row.prop_map(|(text, id)| Row { text, id }), 0..40)
}

/// Row, group, and either the document or the reason why it was dropped.
type Outcome = (u64, Option<u32>, std::result::Result<(Option<String>, String), &'static str>);

fn expected(rows: &[Row], place: impl Fn(u64) -> (u64, Option<u32>)) -> Vec<Outcome> {
    let outcome = |(number, row): (u64, &Row)| {
        let (at, group) = place(number);
        match row.text.as_deref() {
            None => (0, None, Err("missing text")),
            Some("") => (0, None, Err("empty")),
            Some(text) => (at, group, Ok((row.id.clone(), text.to_owned()))),
        }
    };
    (0..).zip(rows).map(outcome).collect()
}

fn outcomes(parsed: Vec<Parsed>) -> Vec<Outcome> {
    let outcome = |parsed| match parsed {
        Parsed::Document(d) => (d.row, d.group, Ok((d.id, d.text))),
        Parsed::Dropped { reason, .. } => (0, None, Err(reason)),
    };
    parsed.into_iter().map(outcome).collect()
}

/// Compresses in two members or frames, with a skippable frame between those of zstd.
fn compressed(bytes: &[u8], name: &str, cut: usize) -> Vec<u8> {
    let (head, tail) = bytes.split_at(cut);
    if name.ends_with(".gz") {
        let member = |bytes: &[u8]| {
            let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        };
        [member(head), member(tail)].concat()
    } else if name.ends_with(".zst") {
        let frame = |bytes: &[u8]| {
            let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
            encoder.include_checksum(true).unwrap();
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        };
        let skippable = b"\x50\x2a\x4d\x18\x03\0\0\0abc".to_vec();
        [frame(head), skippable, frame(tail)].concat()
    } else {
        bytes.to_vec()
    }
}

fn json_lines(rows: &[Row], ending: &str) -> String {
    let line = |row: &Row| {
        let mut object = serde_json::Map::new();
        object.insert("other".into(), serde_json::json!([1, {"text": "no"}]));
        if let Some(text) = &row.text {
            object.insert("text".into(), text.as_str().into());
        }
        if let Some(id) = &row.id {
            object.insert("meta".into(), serde_json::json!({"id": id}));
        }
        serde_json::Value::Object(object).to_string() + ending
    };
    rows.iter().map(line).collect()
}

/// One column of strings in one of its encodings.
fn strings(values: Vec<Option<&str>>, kind: usize) -> ArrayRef {
    match kind {
        0 => Arc::new(StringArray::from(values)),
        1 => Arc::new(LargeStringArray::from(values)),
        2 => Arc::new(StringViewArray::from(values)),
        3 => Arc::new(values.into_iter().collect::<DictionaryArray<Int32Type>>()),
        _ => Arc::new(BinaryArray::from_iter(values.into_iter().map(|v| v.map(str::as_bytes)))),
    }
}

/// The rows as a batch: `text` next to a number, or `doc.text` in a struct that is itself null for every other null.
fn batch(rows: &[Row], kind: usize, nested: bool) -> RecordBatch {
    let text = strings(rows.iter().map(|row| row.text.as_deref()).collect(), kind);
    let id = strings(rows.iter().map(|row| row.id.as_deref()).collect(), 0);
    let other: ArrayRef = Arc::new(Int64Array::from_iter_values(0..rows.len() as i64));
    let field = |name: &str, array: &ArrayRef| Field::new(name, array.data_type().clone(), true);
    let (name, text) = if nested {
        let parents =
            NullBuffer::from_iter((0..).zip(rows).map(|(i, r)| r.text.is_some() || i % 2 == 0));
        let fields = vec![field("n", &other), field("text", &text)];
        let parent = StructArray::new(fields.into(), vec![other.clone(), text], Some(parents));
        ("doc", Arc::new(parent) as ArrayRef)
    } else {
        ("text", text)
    };
    let schema = Schema::new(vec![field("n", &other), field(name, &text), field("id", &id)]);
    RecordBatch::try_new(Arc::new(schema), vec![other, text, id]).unwrap()
}

fn parquet_file(rows: &[Row], group: usize, kind: usize, nested: bool, variant: usize) -> Vec<u8> {
    let batch = batch(rows, kind, nested);
    let version = [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0][variant % 2];
    let codecs = [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::LZ4_RAW,
    ];
    let properties = WriterProperties::builder()
        .set_writer_version(version)
        .set_dictionary_enabled(variant.is_multiple_of(3))
        .set_compression(codecs[variant % 4])
        .set_data_page_row_count_limit(3)
        .set_write_batch_size(2)
        .set_max_row_group_row_count(Some(group));
    let mut writer =
        ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties.build())).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

fn arrow_file(rows: &[Row], group: usize, kind: usize, nested: bool, variant: usize) -> Vec<u8> {
    let batches: Vec<_> = rows.chunks(group).map(|rows| batch(rows, kind, nested)).collect();
    let schema = batch(&rows[..0], kind, nested).schema();
    let compression = [
        None,
        Some(::arrow::ipc::CompressionType::ZSTD),
        Some(::arrow::ipc::CompressionType::LZ4_FRAME),
    ][variant / 2 % 3];
    let options =
        ::arrow::ipc::writer::IpcWriteOptions::default().try_with_compression(compression).unwrap();
    if variant.is_multiple_of(2) {
        let mut writer = StreamWriter::try_new_with_options(Vec::new(), &schema, options).unwrap();
        batches.iter().for_each(|batch| writer.write(batch).unwrap());
        writer.finish().unwrap();
        writer.into_inner().unwrap()
    } else {
        // A dictionary may be written only once in a file, so all batches must share it.
        let mut writer = FileWriter::try_new_with_options(Vec::new(), &schema, options).unwrap();
        let whole = batch(rows, kind, nested);
        for start in (0..rows.len()).step_by(group) {
            writer.write(&whole.slice(start, group.min(rows.len() - start))).unwrap();
        }
        writer.finish().unwrap();
        writer.into_inner().unwrap()
    }
}

fn limits(slab_bytes: usize) -> Limits {
    Limits { slab_bytes, ..Limits::default() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn json_lines_come_back(
        rows in rows(),
        name in select(vec!["x.jsonl", "x.jsonl.gz", "x.jsonl.zst"]),
        ending in select(vec!["\n", "\r\n", "\n\n \n"]),
        cut: Index,
        slab in prop_oneof![1usize..200, Just(1 << 20)],
    ) {
        let plain = json_lines(&rows, ending);
        let file = write(name, &compressed(plain.as_bytes(), name, cut.index(plain.len() + 1)));
        let parsed = read_with(&file, "text", Some("meta.id"), &limits(slab)).unwrap();
        for parsed in &parsed {
            if let Parsed::Document(Document { text, bytes: Some((start, end)), .. }) = parsed {
                let line = &plain[*start as usize..*end as usize];
                let value: serde_json::Value = serde_json::from_str(line).unwrap();
                prop_assert_eq!(value["text"].as_str(), Some(text.as_str()));
            }
        }
        let lines = ending.matches('\n').count() as u64;
        prop_assert_eq!(outcomes(parsed), expected(&rows, |row| (row * lines + 1, None)));
    }

    #[test]
    fn a_json_array_comes_back(
        rows in rows(),
        name in select(vec!["x.json", "x.json.gz", "x.json.zst"]),
        pretty: bool,
        cut: Index,
        slab in prop_oneof![1usize..200, Just(1 << 20)],
    ) {
        let lines = json_lines(&rows, "\n");
        let values = lines.lines().map(|line| serde_json::from_str(line).unwrap());
        let array = serde_json::Value::Array(values.collect());
        let show = if pretty { serde_json::to_string_pretty } else { serde_json::to_string };
        let plain = show(&array).unwrap();
        let file = write(name, &compressed(plain.as_bytes(), name, cut.index(plain.len() + 1)));
        let parsed = read_with(&file, "text", Some("meta.id"), &limits(slab)).unwrap();
        for parsed in &parsed {
            if let Parsed::Document(Document { text, bytes: Some((start, end)), .. }) = parsed {
                let record = &plain[*start as usize..*end as usize];
                let value: serde_json::Value = serde_json::from_str(record).unwrap();
                prop_assert_eq!(value["text"].as_str(), Some(text.as_str()));
            }
        }
        prop_assert_eq!(outcomes(parsed), expected(&rows, |row| (row + 1, None)));
    }

    #[test]
    fn parquet_comes_back(
        rows in rows(), group in 1usize..50, kind in 0usize..5, nested: bool, variant in 0usize..12,
        slab in prop_oneof![1usize..200, Just(1 << 20)],
    ) {
        let file = write("x.parquet", &parquet_file(&rows, group, kind, nested, variant));
        let text = if nested { "doc.text" } else { "text" };
        let parsed = read_with(&file, text, Some("id"), &limits(slab)).unwrap();
        let place = |row| (row % group as u64, Some((row / group as u64) as u32));
        prop_assert_eq!(outcomes(parsed), expected(&rows, place));
    }

    #[test]
    fn arrow_comes_back(
        rows in rows(), group in 1usize..50, kind in 0usize..5, nested: bool, variant in 0usize..6,
        slab in prop_oneof![1usize..200, Just(1 << 20)],
    ) {
        let file = write("x.arrow", &arrow_file(&rows, group, kind, nested, variant));
        let text = if nested { "doc.text" } else { "text" };
        let parsed = read_with(&file, text, Some("id"), &limits(slab)).unwrap();
        let place = |row| (row % group as u64, Some((row / group as u64) as u32));
        prop_assert_eq!(outcomes(parsed), expected(&rows, place));
    }

    #[test]
    fn text_comes_back(
        text: String, mark: bool, name in select(vec!["x.md", "x.md.gz", "x.txt.zst"]), cut: Index, slab in 1usize..99,
    ) {
        let bytes = [if mark { "\u{feff}" } else { "" }, &text].concat();
        let file = write(name, &compressed(bytes.as_bytes(), name, cut.index(bytes.len() + 1)));
        let parsed = read_with(&file, "", None, &limits(slab)).unwrap();
        let text = text.strip_prefix('\u{feff}').filter(|_| !mark).unwrap_or(&text);
        match &parsed[..] {
            [Parsed::Dropped { reason: "empty", .. }] => prop_assert_eq!(text, ""),
            [Parsed::Document(document)] => {
                let (start, end) = document.bytes.unwrap();
                prop_assert_eq!(&document.text, text);
                prop_assert_eq!(&bytes[start as usize..end as usize], text);
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }
}

// Damage.

/// An intact file of each kind that can detect truncation.
fn sound_files() -> Vec<(&'static str, Vec<u8>)> {
    let row = |i| Row { text: Some(format!("text {i} ").repeat(9)), id: Some(format!("{i}")) };
    let rows: Vec<Row> = (0..20).map(row).collect();
    let plain = json_lines(&rows, "\n");
    let half = plain.len() / 2;
    vec![
        ("x.jsonl.gz", compressed(plain.as_bytes(), ".gz", half)),
        ("x.jsonl.zst", compressed(plain.as_bytes(), ".zst", half)),
        ("x.txt.gz", compressed(plain.as_bytes(), ".gz", half)),
        ("x.txt.zst", compressed(plain.as_bytes(), ".zst", half)),
        ("x.json", format!("[{}]", plain.trim_end().replace('\n', ",")).into_bytes()),
        ("x.parquet", parquet_file(&rows, 7, 0, false, 2)),
        ("x.arrow", arrow_file(&rows, 7, 0, false, 0)),
        ("y.arrow", arrow_file(&rows, 7, 3, false, 1)),
        ("z.arrow", arrow_file(&rows, 7, 2, false, 2)),
    ]
}

/// An object that arrived with wrong bytes is fetched once more before damage is reported, and the wrong bytes are not
/// used.
#[test]
fn a_copy_that_came_wrongly_is_no_damage() {
    let plain = b"{\"text\":\"one\"}\n{\"text\":\"two\"}\n";
    let column: ArrayRef = Arc::new(StringArray::from(vec!["one", "two"]));
    let table = RecordBatch::try_from_iter([("text", column)]).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), table.schema(), None).unwrap();
    writer.write(&table).unwrap();
    let fields = Fields::at("text", None);
    for (name, bytes) in [
        ("x.jsonl", plain.to_vec()),
        ("x.jsonl.gz", compressed(plain, ".gz", plain.len())),
        ("x.jsonl.zst", compressed(plain, ".zst", plain.len())),
        ("x.parquet", writer.into_inner().unwrap()),
    ] {
        let format = Format::guess(Path::new(name)).unwrap();
        let read = |object: &Location| -> Result<Vec<String>> {
            let (mut input, mut texts) =
                (open(object, format, &fields, &Limits::default())?, Vec::new());
            while let Some(slab) = input.next_slab()? {
                for parsed in slab.parse(&fields)? {
                    match parsed {
                        Parsed::Document(document) => texts.push(document.text),
                        Parsed::Dropped { fault, .. } => return Err(fault),
                    }
                }
            }
            Ok(texts)
        };
        let object = Memory::spoiled().holding(&format!("s3://b/{name}"));
        object.write(&bytes).unwrap();
        // Opening is retried; a later read is not, since its data may have been used.
        match read(&object) {
            Ok(texts) => assert!(name != "x.jsonl" && texts == ["one", "two"], "{name}: {texts:?}"),
            Err(fault) => {
                assert!(name == "x.jsonl" && fault.class() == Class::Machine, "{name}: {fault}");
                assert!(fault.to_string().contains("run the same command again"), "{fault}");
            }
        }
        assert_eq!(read(&object).unwrap(), ["one", "two"], "{name}");
        // Bytes that arrive twice are the object's.
        let damaged = Memory::default().holding(&format!("s3://b/{name}"));
        damaged.write(&bytes[1..]).unwrap();
        assert_eq!(read(&damaged).unwrap_err().class(), Class::Data, "{name}");
    }
}

/// Whether `bytes` end where a gzip member or zstd frame does: such a file looks complete.
fn ends_with_a_frame(name: &str, bytes: &[u8]) -> bool {
    if name.ends_with(".gz") {
        std::io::copy(&mut flate2::bufread::MultiGzDecoder::new(bytes), &mut std::io::sink())
            .is_ok()
    } else {
        name.ends_with(".zst") && zstd::decode_all(bytes).is_ok()
    }
}

#[test]
fn files_cut_short_are_refused_by_name() {
    for (name, bytes) in sound_files() {
        assert!(read_with(&write(name, &bytes), "text", None, &limits(100)).is_ok(), "{name}");
        let far = 150;
        let near =
            |length: usize| length < far || length + far > bytes.len() || length.is_multiple_of(11);
        for length in (0..bytes.len()).filter(|&length| near(length)) {
            let cut = &bytes[..length];
            let outcome = read_with(&write(name, cut), "text", None, &limits(100));
            let is_none = length == 0 && name.ends_with(".json");
            if is_none || length > 0 && ends_with_a_frame(name, cut) {
                continue;
            }
            let fault = outcome.expect_err(&format!("{name} cut to {length} bytes was read"));
            assert_eq!(fault.class(), Class::Data);
            assert!(fault.to_string().contains(name), "{fault}");
        }
    }
}

#[test]
fn something_after_the_end_is_refused() {
    for (name, mut bytes) in sound_files() {
        bytes.extend_from_slice(b"x");
        let fault = read_with(&write(name, &bytes), "text", None, &limits(100)).unwrap_err();
        assert_eq!(fault.class(), Class::Data, "{name}");
    }
}

#[test]
fn a_damaged_stream_says_how_far_it_got() {
    let plain = "{\"text\":\"a\"}\n".repeat(1000);
    for name in ["x.jsonl.gz", "x.jsonl.zst"] {
        let bytes = compressed(plain.as_bytes(), name, 5200);
        let cut = &bytes[..bytes.len() - 4];
        let fault = read_with(&write(name, cut), "text", None, &Limits::default()).unwrap_err();
        let message = fault.to_string();
        let words: Vec<&str> = message.split_whitespace().collect();
        let at = words.iter().position(|word| *word == "decompressed").unwrap();
        let offset: usize = words[at - 1].parse().unwrap();
        assert!((5200..=plain.len()).contains(&offset), "{message}");
    }
}

#[test]
fn a_missing_file_and_a_missing_column_are_named() {
    let fields = Fields::at("text", None);
    for format in Format::ALL {
        let fault = open(Path::new("no/such/file"), format, &fields, &Limits::default());
        let fault = fault.map(|_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Data);
        assert!(fault.to_string().contains("no/such/file"));
    }
    let rows = [Row { text: Some("a".into()), id: None }];
    for (name, bytes) in [
        ("x.parquet", parquet_file(&rows, 1, 0, false, 0)),
        ("x.arrow", arrow_file(&rows, 1, 0, false, 0)),
    ] {
        let read = |text| read_with(&write(name, &bytes), text, None, &Limits::default());
        let message = read("txt").unwrap_err().to_string();
        assert!(
            message.contains(name) && message.contains("nearest column is `text`"),
            "{message}"
        );
        let message = read("n").unwrap_err().to_string();
        assert!(message.contains("Int64") || message.contains("INT64"), "{message}");
    }
}

#[test]
fn integer_ids_and_bytes_that_are_no_text() {
    let id: ArrayRef = Arc::new(Int64Array::from(vec![Some(-7), None, Some(1 << 40)]));
    let text: ArrayRef = Arc::new(BinaryArray::from_vec(vec![b"a", b"b\xff", b"c"]));
    let body: ArrayRef = Arc::new(StringArray::from(vec!["x", "y", "z"]));
    let schema = Schema::new(vec![
        Field::new("id", DataType::Int64, true),
        Field::new("text", DataType::Binary, true),
        Field::new("body", DataType::Utf8, true),
    ]);
    let batch = RecordBatch::try_new(Arc::new(schema), vec![id, text, body]).unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let mut arrow = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    arrow.write(&batch).unwrap();
    for (name, bytes) in
        [("x.parquet", parquet.into_inner().unwrap()), ("x.arrow", arrow.into_inner().unwrap())]
    {
        let parsed = read(&write(name, &bytes), "text", Some("id"));
        let Parsed::Dropped { reason: "invalid UTF-8", bytes: 2, fault, .. } = &parsed[1] else {
            panic!("{parsed:?}")
        };
        assert!(fault.to_string().contains("row 1"), "{fault}");
        let ids: Vec<_> = documents(parsed).into_iter().map(|d| d.id.unwrap()).collect();
        assert_eq!(ids, ["-7", "1099511627776"]);
        // Nor is an id made up if its bytes are invalid.
        let parsed = read(&write(name, &bytes), "body", Some("text"));
        let Parsed::Dropped { reason: "invalid UTF-8", fault, .. } = &parsed[1] else {
            panic!("{parsed:?}")
        };
        assert!(fault.to_string().contains("the id is invalid UTF-8"), "{fault}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn random_bytes_never_panic(
        bytes: Vec<u8>,
        name in select(vec!["x.json", "x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.txt", "x.parquet", "x.arrow"]),
        slab in 1usize..99,
    ) {
        let starts: [&[u8]; 5] = [b"", b"[{\"a\":", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"ARROW1\0\0\xff\xff\xff\xff"];
        for start in starts {
            let _ = read_with(&write(name, &[start, &bytes].concat()), "text", None, &limits(slab));
        }
    }

    #[test]
    fn damaged_files_never_panic(
        which: Index, flips in prop::collection::vec((any::<Index>(), any::<u8>()), 1..4), slab in 1usize..999,
    ) {
        let files = sound_files();
        let (name, mut bytes) = files[which.index(files.len())].clone();
        for (at, value) in flips {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let _ = read_with(&write(name, &bytes), "text", Some("id"), &limits(slab));
    }
}
