//! Files that look like text but are not: refused, with the place and the reason.

use std::sync::Arc;

use ::arrow::record_batch::RecordBatch;
use ::parquet::data_type::ByteArrayType;
use ::parquet::file::reader::{FileReader as _, SerializedFileReader};
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use contract::fault::is_out_of_memory;

use super::*;

/// A Parquet file of this schema, each of whose columns holds the same two binary values.
fn binary_columns(schema: &str) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    while let Some(mut column) = group.next_column().unwrap() {
        let values = ["one".into(), "two".into()];
        column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.into_inner().unwrap()
}

fn refusal(name: &str, bytes: &[u8], fields: &Fields) -> String {
    let file = write(name, bytes);
    let fault = read_on(&Real, &file, fields, &Limits::default()).map(drop).unwrap_err();
    assert_eq!(fault.class(), Class::Data);
    let told = fault.to_string();
    assert!(told.starts_with(file.path.to_str().unwrap()), "{told}");
    told
}

#[test]
fn numbers_and_dates_in_bytes_are_no_text() {
    for kind in ["DECIMAL(9,2)", "BSON"] {
        let bytes = binary_columns(&format!("message m {{ required binary text ({kind}); }}"));
        let told = refusal("x.parquet", &bytes, &Fields::at("text", None));
        assert!(told.contains("column `text` has the wrong type"), "{told}");
        let sound = binary_columns("message m { required binary text (UTF8); required binary n; }");
        let file = write("x.parquet", &sound);
        assert_eq!(documents(read(&file, "text", Some("n"))).len(), 2);
    }
}

/// By the format's own word for it.
#[test]
fn the_type_of_an_id_that_is_neither_text_nor_a_number_is_named() {
    for (kind, named) in [("TIMESTAMP(MICROS,true)", "timestamp"), ("DECIMAL(9,2)", "decimal")] {
        let schema =
            format!("message m {{ required binary text (UTF8); required int64 id ({kind}); }}");
        let schema = Arc::new(parse_message_type(&schema).unwrap());
        let writer = SerializedFileWriter::new(Vec::new(), schema, Default::default()).unwrap();
        let bytes = writer.into_inner().unwrap();
        let told = refusal("x.parquet", &bytes, &Fields::at("text", Some("id")));
        assert!(told.contains("column `id` has the wrong type"), "{told}");
        assert!(told.contains(&format!("found:  INT64 of type {named}\n")), "{told}");
    }
}

#[test]
fn of_two_columns_with_one_name_none_is_taken() {
    let twice = "message m { required binary text (UTF8); required binary text (UTF8); }";
    let array: ArrayRef = Arc::new(StringArray::from(vec!["one"]));
    let field = Field::new("text", array.data_type().clone(), false);
    let schema = Arc::new(Schema::new(vec![field.clone(), field]));
    let batch = RecordBatch::try_new(schema.clone(), vec![array.clone(), array]).unwrap();
    let mut arrow = StreamWriter::try_new(Vec::new(), &schema).unwrap();
    arrow.write(&batch).unwrap();
    arrow.finish().unwrap();
    let files = [("x.parquet", binary_columns(twice)), ("x.arrow", arrow.into_inner().unwrap())];
    for (name, bytes) in files {
        for fields in [Fields::at("text", None), Fields::record(["text"], None)] {
            let told = refusal(name, &bytes, &fields);
            assert!(told.contains("two columns are called `text`"), "{name}: {told}");
        }
    }
}

/// A file's kind is recognized by its first bytes; text that only begins with such letters is accepted.
#[test]
fn files_of_another_kind_are_named() {
    let sound = parquet_file(&[Row { text: Some("a".into()), id: None }], 1, 0, false, 0);
    let arrow = arrow_file(&[Row { text: Some("a".into()), id: None }], 1, 0, false, 1);
    let encrypted = [&b"PARE"[..], &[9, 0, 0, 0, 1, 2, 3, 4], &[8, 0, 0, 0], b"PARE"].concat();
    let feather = [&b"FEA1\0\0\0\0"[..], &[7; 60], b"FEA1"].concat();
    let fields = [Fields::at("text", None), Fields::record(["text"], None)];
    for (name, bytes, is, next) in [
        ("x.jsonl", &b"BZh91AY&SY\x01\x02\x03"[..], "bzip2", "gzip or zstd"),
        ("x.txt", b"\xfd7zXZ\0\0\x04\xe6\xd6", "xz", "gzip or zstd"),
        ("x.json", b"\x04\"M\x18`@\x82\x05\0\0", "lz4", "gzip or zstd"),
        ("x.jsonl", b"PK\x03\x04\x14\0\0\0\x08\0", "a zip archive", "unpack"),
        ("x.jsonl", &sound, "a Parquet file", ".parquet"),
        ("x.jsonl", &arrow, "an Arrow file", ".arrow"),
        ("x.parquet", &arrow, "an Arrow file", ".arrow"),
        ("x.arrow", &sound, "a Parquet file", ".parquet"),
        ("x.parquet", &encrypted, "an encrypted Parquet file", "without encryption"),
        ("x.arrow", &feather, "Feather version 1", "write_feather"),
        ("x.jsonl.bz2", b"BZh91AY&SY\x01\x02\x03", "bzip2", "gzip or zstd"),
    ] {
        for fields in &fields {
            let file = write(name, bytes);
            let format = Format::guess(&file.path).unwrap_or(Format::JsonLines);
            let opened = open_on(&Real, &file.path, format, fields, &Limits::default(), None);
            let fault = opened.and_then(|mut input| input.next_slab()).map(drop).unwrap_err();
            let told = fault.to_string();
            assert!(told.contains(is) && told.contains(next), "{name}: {told}");
            assert!(told.starts_with(file.path.to_str().unwrap()), "{told}");
        }
    }
    for text in ["PAR1 is a mark", "BZhello to you", "ARROW1", "FEA1\n\n\t", "PK\u{3}", "ORC"] {
        assert_eq!(documents(read(&write("x.txt", text.as_bytes()), "", None))[0].text, text);
    }
}

/// A struct, a list or an object in place of text: the message names its fields.
#[test]
fn what_holds_fields_is_no_text() {
    let rows = [Row { text: Some("a".into()), id: None }];
    for (name, bytes) in [
        ("x.parquet", parquet_file(&rows, 1, 0, true, 0)),
        ("x.arrow", arrow_file(&rows, 1, 0, true, 0)),
    ] {
        let told = refusal(name, &bytes, &Fields::at("doc", None));
        for word in ["`doc` has the wrong type", "doc.n, doc.text", "like text = \"doc.n\""] {
            assert!(told.contains(word), "{told}");
        }
    }
    let file = write("x.jsonl", b"{\"doc\": {\"a.b\": \"x\", \"c\": 1}}");
    let [Parsed::Dropped { fault, .. }] = &read(&file, "doc", None)[..] else { panic!("no text") };
    assert!(fault.to_string().contains("text = \"doc.a\\.b\""), "{fault}");
}

/// A key with a dot is distinguished from a path, and can be named.
#[test]
fn a_dot_of_a_name_has_a_backslash_before_it() {
    let line = b"{\"a.b\": \"x\", \"m\": {\"c.d\": 7, \"c\": {\"d\": 8}}}";
    let file = write("x.jsonl", line);
    let found = &documents(read(&file, "a\\.b", Some("m.c\\.d")))[0];
    assert_eq!((&*found.text, found.id.as_deref()), ("x", Some("7")));
    let [Parsed::Dropped { fault, .. }] = &read(&file, "a.b", None)[..] else { panic!("no key") };
    assert!(fault.to_string().contains("'a\\.b'"), "{fault}");
    let array: ArrayRef = Arc::new(StringArray::from(vec!["one"]));
    let batch = RecordBatch::try_from_iter([("a.b", array)]).unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let mut arrow = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    arrow.write(&batch).unwrap();
    for (name, bytes) in
        [("x.parquet", parquet.into_inner().unwrap()), ("x.arrow", arrow.into_inner().unwrap())]
    {
        for path in ["a.b", "a\\.b"] {
            assert_eq!(documents(read(&write(name, &bytes), path, None))[0].text, "one", "{name}");
        }
        let rows = read_on(&Real, &write(name, &bytes), &Fields::record(["a.b"], None), &limits(9));
        assert_eq!(documents(rows.unwrap())[0].text, "{\"a.b\":\"one\"}");
        let told = refusal(name, &bytes, &Fields::record(["a"], None));
        assert!(told.contains("'a\\.b'"), "{told}");
    }
}

#[test]
fn damage_names_its_row_group() {
    let row = |number| Row { text: Some(format!("{number}").repeat(90)), id: None };
    let rows: Vec<Row> = (0..30).map(row).collect();
    // Version 1 pages, zstd: the decoder detects a flipped byte.
    let sound = parquet_file(&rows, 10, 0, false, 2);
    let file = write("x.parquet", &sound);
    let reader = SerializedFileReader::new(std::fs::File::open(&file.path).unwrap()).unwrap();
    let (start, length) = reader.metadata().row_group(1).column(1).byte_range();
    for fields in [Fields::at("text", None), Fields::record(["text"], None)] {
        let mut bytes = sound.clone();
        let middle = (start + length / 2) as usize;
        bytes[middle..middle + 8].fill(0xaa);
        let told = refusal("x.parquet", &bytes, &fields);
        assert!(told.contains("x.parquet: row group 1: "), "{told}");
    }
}

/// Also in its first batch, and where the header of its message is damaged.
#[test]
fn damage_names_its_record_batch_in_one_line() {
    let batch = |number: u32| {
        let column: ArrayRef = Arc::new(StringArray::from(vec![format!("{number}").repeat(90)]));
        RecordBatch::try_from_iter([("text", column)]).unwrap()
    };
    let mut writer = StreamWriter::try_new(Vec::new(), &batch(0).schema()).unwrap();
    let mut starts = Vec::new();
    for number in 0..2 {
        writer.flush().unwrap();
        starts.push(writer.get_ref().len());
        writer.write(&batch(number)).unwrap();
    }
    let sound = writer.into_inner().unwrap();
    for (number, start) in starts.into_iter().enumerate() {
        for (offset, bytes) in [(8, [0xff; 4]), (4, [0xff; 4])] {
            let mut damaged = sound.clone();
            damaged[start + offset..start + offset + 4].copy_from_slice(&bytes);
            let told = refusal("x.arrow", &damaged, &Fields::at("text", None));
            assert!(told.contains(&format!("x.arrow: record batch {number}: ")), "{told}");
            assert_eq!(told.lines().count(), 3, "{told}");
        }
    }
}

#[test]
fn a_field_with_a_comma_is_one_field() {
    let array: ArrayRef = Arc::new(StringArray::from(vec!["one"]));
    let batch = RecordBatch::try_from_iter([("a,b", array)]).unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let file = write("x.parquet", &parquet.into_inner().unwrap());
    let parsed = read_on(&Real, &file, &Fields::record(["a,b"], None), &Limits::default());
    assert_eq!(documents(parsed.unwrap())[0].text, "{\"a,b\":\"one\"}");
}

#[test]
fn too_little_memory_is_not_damage() {
    // zstd's message for a failed allocation, by its own error number.
    let words = zstd::zstd_safe::get_error_name(-64_isize as usize);
    assert!(is_out_of_memory(&std::io::Error::other(words)), "{words}");
    assert!(!is_out_of_memory(&std::io::Error::other("Data corruption detected")));
}
