//! What is accepted and what is refused, as `ingest/docs/inputs.md` describes it.

use ::arrow::array::{FixedSizeBinaryArray, ListArray, NullArray};
use ::arrow::buffer::OffsetBuffer;

use super::*;

/// The result for each record of a file: its text, `-` and the reason with the place, or `!` and the refusal.
fn verdicts(name: &str, bytes: &[u8], limits: &Limits) -> Vec<String> {
    let file = write(name, bytes);
    let folder = format!("{}/", file.path.parent().unwrap().display());
    let short = |text: String| text.replace(&folder, "");
    match read_with(&file, "text", None, limits) {
        Err(fault) => {
            assert_eq!(fault.class(), Class::Data, "{fault}");
            vec![format!("! {}", short(fault.to_string()))]
        }
        Ok(parsed) => parsed
            .into_iter()
            .map(|parsed| match parsed {
                Parsed::Document(document) => document.text,
                Parsed::Dropped { reason, fault, .. } => {
                    format!("- {reason}: {}", short(fault.to_string()))
                }
            })
            .collect(),
    }
}

/// Compares results with expected texts; one that ends in `...` is a prefix.
#[track_caller]
fn expect(name: &str, bytes: &[u8], wanted: &[&str]) {
    expect_within(name, bytes, wanted, &Limits::default());
}

#[track_caller]
fn expect_within(name: &str, bytes: &[u8], wanted: &[&str], limits: &Limits) {
    let found = verdicts(name, bytes, limits);
    let fits = |(found, wanted): (&String, &&str)| match wanted.strip_suffix("...") {
        Some(start) => found.starts_with(start),
        None => found == wanted,
    };
    let all = found.len() == wanted.len() && found.iter().zip(wanted).all(fits);
    assert!(all, "{name}: {found:#?}\nwanted {wanted:#?}");
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zst(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

const A: &[u8] = b"{\"text\":\"a\"}\n";
const B: &[u8] = b"{\"text\":\"b\"}\n";

#[test]
fn compressed_files() {
    let skippable: &[u8] = b"\x50\x2a\x4d\x18\x03\0\0\0abc";
    expect("x.jsonl.gz", &[gz(A), gz(b""), gz(B)].concat(), &["a", "b"]);
    expect("x.jsonl.gz", &gz(&[A, &B[..6]].concat())[..], &["a", "- malformed: x.jsonl.gz:2: ..."]);
    // A member may end inside a line.
    expect("x.jsonl.gz", &[gz(&A[..6]), gz(&A[6..])].concat(), &["a"]);
    expect(
        "x.jsonl.zst",
        &[skippable, &zst(A), skippable, &zst(b""), &zst(B)].concat(),
        &["a", "b"],
    );
    expect("x.jsonl.zst", &[&zst(A)[..], skippable].concat(), &["a"]);
    for (name, mut bytes) in [("x.jsonl.gz", gz(A)), ("x.jsonl.zst", zst(A))] {
        for tail in [&b"x"[..], b"\0", &[0; 512], b"{\"text\":\"b\"}\n"] {
            let kept = bytes.len();
            bytes.extend_from_slice(tail);
            expect(name, &bytes, &[&format!("! {name}: the ...")]);
            bytes.truncate(kept);
        }
        expect(name, b"", &[&format!("! {name}: the ...")]);
        expect(name, A, &[&format!("! {name}: the ...")]);
    }
    expect("x.jsonl", &gz(A), &["! x.jsonl: this file is compressed by gzip..."]);
    expect("x.jsonl", b"", &[]);
}

#[test]
fn lines_and_their_ends() {
    expect("x.jsonl", b"{\"text\":\"a\"}\r\n\r\n \t\n{\"text\":\"b\"}", &["a", "b"]);
    expect("x.jsonl", "\u{feff}{\"text\":\"a\"}\n".as_bytes(), &["a"]);
    let marked = "{\"text\":\"a\"}\n\u{feff}{\"text\":\"b\"}\n{\"text\":\"c\u{feff}\"}\n";
    expect("x.jsonl", marked.as_bytes(), &["a", "- malformed: x.jsonl:2: ...", "c\u{feff}"]);
    let ends = "{\"text\":\"a\u{2028}b\u{85}c\u{2029}\u{b}\"}\n";
    expect("x.jsonl", ends.replace('\u{b}', "").as_bytes(), &["a\u{2028}b\u{85}c\u{2029}"]);
    expect(
        "x.jsonl",
        b"{\"text\":\"a\rb\"}\n{\"text\":\"c\"}\n",
        &["- malformed: x.jsonl:1: ...", "c"],
    );
    expect("x.jsonl", b"{\"text\":\"a\"}\r{\"text\":\"b\"}\n", &["- malformed: x.jsonl:1: ..."]);
    // UTF-16 is not guessed.
    let wide: Vec<u8> = "{\"text\":\"a\"}\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    expect("x.jsonl", &wide, &["- malformed: x.jsonl:1: ...", "- malformed: x.jsonl:2: ..."]);
    expect(
        "x.jsonl",
        &[&b"\xff\xfe"[..], &wide].concat(),
        &["- invalid UTF-8: x.jsonl:1: ...", "- malformed: x.jsonl:2: ..."],
    );
}

#[test]
fn json_values() {
    for (line, wanted) in [
        ("{\"text\":\"\\u0000\"}", "\0"),
        ("{\"text\":\"\\ud83d\\ude00\"}", "\u{1f600}"),
        ("{\"text\":\"\\ud83d\"}", "- malformed: ..."),
        ("{\"text\":\"\\ude00\\ud83d\"}", "- malformed: ..."),
        ("{\"other\":\"\\ud83d\",\"text\":\"a\"}", "- malformed: ..."),
        ("{\"text\":\"a\",\"text\":\"b\"}", "b"),
        ("{\"text\":\"a\",\"text\":null}", "- missing text: ..."),
        ("{\"text\":\"a\",\"te\\u0078t\":\"b\"}", "b"),
        ("{\"text\":\"a\0b\"}", "- malformed: ..."),
        ("{\"text\":\"a\tb\"}", "- malformed: ..."),
        ("{\"text\":\"a\"}\0", "- malformed: ..."),
        ("{\"text\":\"a\",}", "- malformed: ..."),
        ("{\"text\":\"a\"}{\"text\":\"b\"}", "- malformed: ..."),
        ("{'text':'a'}", "- malformed: ..."),
        ("{\"text\":\"a\",\"n\":NaN}", "- malformed: ..."),
        ("{\"text\":\"a\",\"n\":[1e999,-123456789012345678901234567890]}", "a"),
        ("{\"text\":3}", "- missing text: ..."),
        ("{\"text\":[\"a\"]}", "- missing text: ..."),
        ("[{\"text\":\"a\"}]", "- missing text: ..."),
        ("\"a\"", "- missing text: ..."),
        ("{\"text\":\"\"}", "- empty: ..."),
        ("{\"text\":\" \"}", " "),
    ] {
        let lines = [A, line.as_bytes(), b"\n", B].concat();
        let placed = wanted.replace(": ...", ": x.jsonl:2: ...");
        expect("x.jsonl", &lines, &["a", &placed, "b"]);
    }
}

/// An array of records is read as if each were on its own line.
#[test]
fn arrays_of_records() {
    let (a, b) = ("{\"text\":\"a\"}", "{\"n\": [1, {\"x\": \"],[\"}],\n \"text\":\"\\\"b,\\\\\"}");
    let b_text = "\"b,\\";
    let array = format!(" [\n  {a},\r\n\t{b}\n]\n");
    let long = format!("{}[{a},{b}]", " ".repeat(50));
    for text in [&array, &format!("\u{feff}[{a} ,{b}]"), &long] {
        for slab_bytes in [1, 7, 1000] {
            let limits = Limits { slab_bytes, ..Limits::default() };
            for (name, bytes) in [
                ("x.json", text.as_bytes().to_vec()),
                ("X.JSON.GZ", gz(text.as_bytes())),
                ("x.json.zst", zst(text.as_bytes())),
            ] {
                expect_within(name, &bytes, &["a", b_text], &limits);
            }
        }
    }
    let placed = |text: &str, wanted: &[&str]| expect("x.json", text.as_bytes(), wanted);
    let damaged = "! x.json: this file is not one JSON array of records...";
    let cut = "! x.json: the JSON array of this file is not closed...";
    placed("[]", &[]);
    placed("[ \n ]\n\n", &[]);
    placed(
        &format!("[{a}, 3, {{\"text\": \"\"}}, {a}]"),
        &["a", "- missing text: x.json: record 2: ...", "- empty: x.json: record 3: ...", "a"],
    );
    placed(
        &format!("[{a}, {{\"text\": 'x'}}, {a}]"),
        &["a", "- malformed: x.json: record 2: ...", "a"],
    );
    // A line end inside a string is invalid, as in JSON, and so is a form feed between values.
    placed("[{\"text\": \"a\nb\"}]", &["- malformed: x.json: record 1: ..."]);
    placed("[{\"text\":\u{c}\"a\"}]", &["- malformed: x.json: record 1: ..."]);
    for text in ["[,]", "[{},]", "[{},,{}]", "[{}] {}", "[{}],", "[}]", "[]]"] {
        placed(text, &[damaged]);
    }
    for text in ["[", "[{},", "[{}", "[{\"text\": \"]", "[{\"text\": [}", "[[]"] {
        placed(text, &[cut]);
    }
    // Lines stay lines in files with this extension, and so do arrays on lines in files with another one.
    placed(&format!("{a}\n{a}"), &["a", "a"]);
    expect("x.jsonl", format!("[{a}]\n{a}\n").as_bytes(), &["- missing text: x.jsonl:1: ...", "a"]);
    let told = verdicts("x.jsonl", array.as_bytes(), &Limits::default());
    assert!(told[0].contains("ends in .json"), "{told:?}");
    let limits = Limits { slab_bytes: 16, max_document_bytes: 20 };
    let long = format!("[{a},{{\"text\":\"{}\"}},{a}]", "x".repeat(30));
    let wanted = ["a", "- too large: x.json: record 2: ...", "a"];
    expect_within("x.json", long.as_bytes(), &wanted, &limits);
}

/// A column without any values has a type of its own.
#[test]
fn a_column_of_nulls_is_one_without_text() {
    let nulls: ArrayRef = Arc::new(NullArray::new(3));
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "b", "c"]));
    let batch =
        RecordBatch::try_from_iter_with_nullable([("none", nulls, true), ("text", texts, true)])
            .unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let mut arrow = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    arrow.write(&batch).unwrap();
    for (name, bytes) in
        [("x.parquet", parquet.into_inner().unwrap()), ("x.arrow", arrow.into_inner().unwrap())]
    {
        let file = write(name, &bytes);
        // A path into this column, which is a struct in other shards, finds no text here.
        for path in ["none", "none.text"] {
            let missing = read(&file, path, Some("text"));
            let is_missing =
                |it: &Parsed| matches!(it, Parsed::Dropped { reason: "missing text", .. });
            assert!(missing.len() == 3 && missing.iter().all(is_missing), "{name}: {missing:?}");
            let nameless = documents(read(&file, "text", Some(path)));
            let of: Vec<_> = nameless.iter().map(|it| (it.id.as_deref(), &*it.text)).collect();
            assert_eq!(of, [(None, "a"), (None, "b"), (None, "c")], "{name}");
            let fields = Fields::record(["none", "text"], Some(path));
            let rows = documents(read_on(&Real, &file, &fields, &limits(9)).unwrap());
            assert_eq!(rows[2].text, "{\"none\":null,\"text\":\"c\"}", "{name}");
            assert_eq!(rows[2].id, None);
        }
    }
}

#[test]
fn plain_text() {
    expect("x.txt", b"a\0b\r\nc", &["a\0b\r\nc"]);
    expect("x.txt", "\u{feff}a\u{feff}".as_bytes(), &["a\u{feff}"]);
    expect("x.txt", b"a\xffb", &["- invalid UTF-8: x.txt: ..."]);
    expect("x.txt", b"", &["- empty: x.txt: ..."]);
    expect("x.txt.gz", &[gz(b"a"), gz(b"b")].concat(), &["ab"]);
}

#[test]
fn longer_documents_than_allowed_are_refused_with_file_and_row() {
    let limits = Limits { slab_bytes: 16, max_document_bytes: 20 };
    let long = format!("{{\"text\":\"{}\"}}\n", "x".repeat(21));
    let bytes = [A, long.as_bytes(), B].concat();
    for (name, bytes) in [("x.jsonl", bytes.clone()), ("x.jsonl.gz", gz(&bytes))] {
        let placed = format!("- too large: {name}:2: ...");
        expect_within(name, &bytes, &["a", &placed, "b"], &limits);
    }
    expect_within("x.txt", &[b'x'; 21], &["- too large: x.txt: ..."], &limits);
    let row = |length| Row { text: Some("x".repeat(length)), id: None };
    let rows = [row(3), row(20), row(3), row(21)];
    let wanted = ["xxx", "xxx...", "xxx", "- too large: x.parquet: row group 1, row 0: ..."];
    expect_within("x.parquet", &parquet_file(&rows, 3, 0, false, 0), &wanted, &limits);
    let wanted = wanted.map(|w| w.replace("x.parquet: row group", "x.arrow: record batch"));
    let wanted = wanted.each_ref().map(String::as_str);
    expect_within("x.arrow", &arrow_file(&rows, 3, 0, false, 0), &wanted, &limits);
}

/// A column called `text`, as Parquet and as Arrow.
fn columnar(column: ArrayRef, nullable: bool) -> [(&'static str, Vec<u8>); 2] {
    let field = Field::new("text", column.data_type().clone(), nullable);
    let batch = RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![column]).unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let mut arrow = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    arrow.write(&batch).unwrap();
    [("x.parquet", parquet.into_inner().unwrap()), ("x.arrow", arrow.into_inner().unwrap())]
}

/// Dictionary, large, view, binary, nullable and nested columns are covered by the property tests of the parent module.
#[test]
fn columns() {
    let texts = || Arc::new(StringArray::from(vec!["a", "b\0"])) as ArrayRef;
    for (name, bytes) in columnar(texts(), false) {
        expect(name, &bytes, &["a", "b\0"]);
    }
    let gzip = WriterProperties::builder().set_compression(Compression::GZIP(Default::default()));
    let one = batch(&[Row { text: Some("a".into()), id: None }], 0, false);
    let mut parquet = ArrowWriter::try_new(Vec::new(), one.schema(), Some(gzip.build())).unwrap();
    parquet.write(&one).unwrap();
    expect("x.parquet", &parquet.into_inner().unwrap(), &["a"]);
    let item = Arc::new(Field::new("item", DataType::Utf8, true));
    let list = ListArray::new(item, OffsetBuffer::from_lengths([1, 1]), texts(), None);
    let fixed = FixedSizeBinaryArray::try_from_iter([b"ab", b"cd"].into_iter()).unwrap();
    let number = Int64Array::from(vec![1, 2]);
    for column in [Arc::new(list) as ArrayRef, Arc::new(fixed), Arc::new(number)] {
        for (name, bytes) in columnar(column.clone(), true) {
            let found = verdicts(name, &bytes, &Limits::default());
            let place = format!("! {name}: ");
            assert!(found.len() == 1 && found[0].starts_with(&place), "{found:?}");
            assert!(found[0].contains("text"), "{found:?}");
        }
    }
    let nulls = Arc::new(StringArray::from(vec![Some("a"), None, Some("")]));
    for (name, bytes) in columnar(nulls, true) {
        let group = if name == "x.arrow" { "record batch 0" } else { "row group 0" };
        let missing = format!("- missing text: {name}: {group}, row 1: ...");
        expect(name, &bytes, &["a", &missing, &format!("- empty: {name}: {group}, row 2: ...")]);
    }
    expect("x.parquet", b"", &["! x.parquet: ..."]);
    expect("x.arrow", b"", &["! x.arrow: ..."]);
}

#[test]
fn codecs_of_parquet_pages() {
    let rows = ["a", "b"].map(|text| Row { text: Some(text.repeat(99)), id: None });
    let one = batch(&rows, 0, false);
    let write = |codec| {
        let properties = WriterProperties::builder().set_compression(codec).build();
        let mut writer = ArrowWriter::try_new(Vec::new(), one.schema(), Some(properties)).unwrap();
        writer.write(&one).unwrap();
        writer.into_inner().unwrap()
    };
    let wanted = rows.each_ref().map(|row| row.text.as_deref().unwrap());
    for codec in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(Default::default()),
        Compression::BROTLI(Default::default()),
        Compression::LZ4,
        Compression::ZSTD(Default::default()),
        Compression::LZ4_RAW,
    ] {
        expect("x.parquet", &write(codec), &wanted);
    }
    // The footer's entry for the column: its path, then the codec, of which 1 is snappy (zigzag: 2).
    let snappy = write(Compression::SNAPPY);
    let said: &[u8] = b"\x18\x04text\x15\x02";
    let places: Vec<usize> =
        (0..snappy.len()).filter(|at| snappy[*at..].starts_with(said)).collect();
    assert_eq!(places.len(), 1);
    // LZO, which no reader supports; an undefined number; a negative one.
    for (codec, place) in [(6, "x.parquet: row group 0"), (40, "x.parquet"), (3, "x.parquet")] {
        let mut bytes = snappy.clone();
        bytes[places[0] + said.len() - 1] = codec;
        let told = format!("! {place}: the Parquet file is damaged...");
        expect("x.parquet", &bytes, &[&told]);
    }
}

/// Every eight bytes of a file, replaced by values that sizes, offsets or counts could claim.
#[test]
fn arrow_buffers_that_claim_more_than_they_hold() {
    let rows = ["x", "y", "z"].map(|text| Row { text: Some(text.repeat(700)), id: None });
    for variant in 0..6 {
        let sound = arrow_file(&rows, 2, 0, false, variant);
        expect("x.arrow", &sound, &rows.each_ref().map(|row| row.text.as_deref().unwrap()));
        let (mut refused, mut by_claim) = (0, 0);
        for at in (0..sound.len() - 7).step_by(8) {
            for claim in [1i64 << 20, 1 << 40, i64::MAX] {
                let mut bytes = sound.clone();
                bytes[at..at + 8].copy_from_slice(&claim.to_le_bytes());
                let found = verdicts("x.arrow", &bytes, &Limits::default());
                if found.len() == 1 && found[0].starts_with("! x.arrow: ") {
                    refused += 1;
                    by_claim += u32::from(found[0].contains("a buffer that claims"));
                } else {
                    // Text, padding or an offset within the text was hit: the number of documents is the same, and none
                    // exceeds its batch.
                    assert_eq!(found.len(), rows.len(), "{claim} at {at} of variant {variant}");
                    assert!(found.iter().all(|text| text.len() <= 1400), "{claim} at {at}");
                }
            }
        }
        assert!(refused > 20, "{refused} refused of variant {variant}");
        // Only compressed buffers claim a decompressed size.
        assert_eq!(by_claim > 0, variant / 2 > 0, "{by_claim} of variant {variant}");
    }
}

#[test]
fn json_is_nested_as_deeply_as_serde_json_takes_it() {
    for (lists, accepted) in [(1, true), (126, true), (127, false), (128, false), (100_000, false)]
    {
        let line = format!("{{\"n\":{}{},\"text\":\"b\"}}", "[".repeat(lists), "]".repeat(lists));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&line).is_ok(), accepted, "{lists}");
        let verdict = if accepted { "b" } else { "- malformed: x.jsonl:2: ..." };
        expect("x.jsonl", &[A, line.as_bytes(), b"\n", A].concat(), &["a", verdict, "a"]);
    }
}

#[test]
fn a_text_too_long_is_lost_in_every_format() {
    let row = |length| Row { text: Some("x".repeat(length)), id: None };
    let rows = [row(10), row(11), row(5)];
    for (name, bytes) in [
        ("x.parquet", parquet_file(&rows, 9, 0, false, 0)),
        ("x.arrow", arrow_file(&rows, 9, 0, false, 0)),
    ] {
        let limits = Limits { slab_bytes: 1 << 20, max_document_bytes: 10 };
        let parsed = read_with(&write(name, &bytes), "text", None, &limits).unwrap();
        let dropped = |parsed: &Parsed| {
            matches!(parsed, Parsed::Dropped { reason: "too large", bytes: 11, .. })
        };
        assert_eq!(parsed.iter().map(dropped).collect::<Vec<_>>(), [false, true, false]);
    }
    for (length, dropped) in [(10, false), (11, true)] {
        let limits = Limits { slab_bytes: 3, max_document_bytes: 10 };
        // Neither escapes nor other keys are part of a document.
        let line =
            ["{\"meta\":\"more than ten\",\"text\":\"", &"\\u0078".repeat(length), "\"}"].concat();
        for (name, bytes) in [("x.txt", "x".repeat(length)), ("x.jsonl", line)] {
            let parsed = read_with(&write(name, bytes.as_bytes()), "text", None, &limits).unwrap();
            assert_eq!(matches!(parsed[0], Parsed::Dropped { reason: "too large", .. }), dropped);
        }
    }
}
