//! Files that are cut at their groups: their parts are the whole, and no cut moves an identity.

use ::parquet::data_type::ByteArrayType;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use contract::Framed;

use super::*;

/// A table of groups of these rows, and where each group ends, as its writer counts. In Parquet, a group without rows
/// stores nothing.
fn table(format: Format, groups: &[usize]) -> (Scratch, Vec<usize>) {
    let rows = |group: usize, count: usize| -> Vec<Row> {
        let text = |row: usize| format!("text {group} {row} ").repeat(1 + 7 * (row % 3));
        let row = |row| Row { text: (row % 5 != 4).then(|| text(row)), id: Some(row.to_string()) };
        (0..count).map(row).collect()
    };
    let groups: Vec<_> =
        groups.iter().enumerate().map(|(group, count)| rows(group, *count)).collect();
    let mut ends = Vec::new();
    let bytes = match format {
        Format::Parquet => {
            let schema =
                "message m { optional binary text (STRING); optional binary id (STRING); }";
            let schema = Arc::new(parse_message_type(schema).unwrap());
            let properties = WriterProperties::builder().set_dictionary_enabled(false).build();
            let mut writer =
                SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties)).unwrap();
            for rows in &groups {
                let mut group = writer.next_row_group().unwrap();
                for column in [|row: &Row| row.text.clone(), |row: &Row| row.id.clone()] {
                    let levels: Vec<i16> =
                        rows.iter().map(|row| i16::from(column(row).is_some())).collect();
                    let values = rows.iter().filter_map(column);
                    let values: Vec<_> = values.map(|text| text.as_str().into()).collect();
                    let mut writer = group.next_column().unwrap().unwrap();
                    let typed = writer.typed::<ByteArrayType>();
                    typed.write_batch(&values, Some(&levels), None).unwrap();
                    writer.close().unwrap();
                }
                group.close().unwrap();
                ends.push(writer.bytes_written());
            }
            writer.into_inner().unwrap()
        }
        _ => {
            let batches: Vec<_> = groups.iter().map(|rows| batch(rows, 0, false)).collect();
            let schema = batches[0].schema();
            let mut writer = FileWriter::try_new_buffered(Vec::new(), &schema).unwrap();
            for batch in &batches {
                writer.write(batch).unwrap();
                writer.flush().unwrap();
                ends.push(writer.get_ref().get_ref().len());
            }
            writer.finish().unwrap();
            writer.into_inner().unwrap().into_inner().unwrap()
        }
    };
    (write(&format!("x.{}", format.name()), &bytes), ends)
}

fn source_file(file: &Scratch, cut: Option<Cut>) -> SourceFile {
    let format = Format::guess(&file.path).unwrap();
    SourceFile { cut, ..SourceFile::new((&file.path).into(), "x".to_owned(), format) }
}

fn layout(file: &Scratch) -> Option<Layout> {
    let of = source_file(file, None);
    Layout::of(&of.path, of.format).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_parts_of_a_file_are_the_file(
        format in select(vec![Format::Parquet, Format::Arrow]),
        groups in prop::collection::vec(prop_oneof![1 => Just(0), 3 => 1usize..40], 1..9),
        part_bytes in 1u64..20_000,
        whole_rows: bool,
    ) {
        let (file, _) = table(format, &groups);
        let mut fields = Fields::at("text", Some("id"));
        if whole_rows {
            fields.keep = vec!["id".to_owned()];
        }
        let read = |cut| read_all(source_file(&file, cut).open(&fields, &limits(300)).unwrap(), &fields).unwrap();
        let shown = |parsed: &[Parsed]| parsed.iter().map(|one| format!("{one:?}")).collect::<Vec<_>>();
        let (parsed, content) = read(None);
        prop_assert_eq!(content.segments as usize, groups.len());
        let cuts = layout(&file).unwrap().cuts(part_bytes);
        prop_assert!(cuts.len() <= content.bytes.div_ceil(part_bytes) as usize);
        let (mut found, mut bytes, mut segments, mut hashes) = (Vec::new(), 0, 0, None::<GroupHashes>);
        for cut in &cuts {
            let (parsed, part) = read(Some(cut.clone()));
            let known = source_file(&file, Some(cut.clone())).content().unwrap();
            prop_assert_eq!((part.bytes, part.sha256), known);
            prop_assert_eq!(part.bytes, cut.bytes);
            prop_assert!(part.sha256 != content.sha256);
            found.extend(parsed);
            (bytes, segments) = (bytes + part.bytes, segments + part.segments);
            match (&mut hashes, part.hashes) {
                (Some(all), Some(next)) => prop_assert!(all.extend(next)),
                (all, next) => *all = next,
            }
        }
        if let Some(hashes) = hashes {
            prop_assert_eq!(shown(&found), shown(&parsed));
            prop_assert_eq!((bytes, segments), (content.bytes, content.segments));
            prop_assert_eq!(hashes.identity(), content.sha256);
        }
    }
}

/// By what the writers say of their bytes, and not by the footer.
#[test]
fn an_identity_is_of_the_hashes_of_groups_and_footer() {
    let tables: [&[usize]; 3] = [&[4, 1, 7], &[0, 3, 0, 0, 2, 0], &[0]];
    for (format, groups) in [Format::Parquet, Format::Arrow]
        .into_iter()
        .flat_map(|format| tables.map(|groups| (format, groups)))
    {
        let (file, mut ends) = table(format, groups);
        let bytes = std::fs::read(&file.path).unwrap();
        let tail = bytes.len() - if format == Format::Parquet { 8 } else { 10 };
        let length = u32::from_le_bytes(bytes[tail..tail + 4].try_into().unwrap());
        let footer = tail - length as usize;
        let of = |range: std::ops::Range<usize>| Identity::of_bytes(&bytes[range]);
        // What is between the last bytes of a group and the footer belongs to that group.
        let last = *ends.last().unwrap();
        ends.iter_mut().filter(|end| **end == last).for_each(|end| *end = footer);
        let starts = [0].into_iter().chain(ends.iter().copied());
        let hashes: Vec<Identity> = starts.zip(&ends).map(|(start, end)| of(start..*end)).collect();
        let mut wanted = Framed::new("zdata groups", 1);
        wanted.field(&0u32).field(&hashes[..]).field(&of(footer..bytes.len()));
        let wanted = (bytes.len() as u64, wanted.finish());
        assert_eq!(source_file(&file, None).content().unwrap(), wanted, "{}", format.name());
        // Every byte is in one of them.
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 0x10;
            let flipped = write(&format!("y.{}", format.name()), &other);
            assert_ne!(source_file(&flipped, None).content().unwrap(), wanted, "byte {at}");
        }
    }
}

/// What has no groups that follow each other is not cut: streams, dictionaries, half a file, another format.
#[test]
fn a_file_without_a_layout_is_one_piece() {
    let row = |i: usize| Row { text: Some(format!("text {i}")), id: None };
    let rows: Vec<Row> = (0..20).map(row).collect();
    let (parquet, _) = table(Format::Parquet, &[3, 3]);
    let half = std::fs::read(&parquet.path).unwrap();
    let files = [
        ("s.arrow", arrow_file(&rows, 7, 0, false, 0)),
        ("d.arrow", arrow_file(&rows, 7, 3, false, 1)),
        ("h.parquet", half[..half.len() - 1].to_vec()),
        ("e.parquet", Vec::new()),
        ("p.arrow", half),
    ];
    for (name, bytes) in files {
        let file = write(name, &bytes);
        assert_eq!(layout(&file), None, "{name}");
        let wanted = (bytes.len() as u64, Identity::of_bytes(&bytes));
        assert_eq!(source_file(&file, None).content().unwrap(), wanted, "{name}");
    }
}

/// A part of a file whose groups are now elsewhere reads nothing.
#[test]
fn a_cut_of_another_version_is_refused() {
    for format in [Format::Parquet, Format::Arrow] {
        let (file, _) = table(format, &[9, 9, 9]);
        let cut = layout(&file).unwrap().cuts(1).remove(1);
        for groups in [&[9, 20, 9][..], &[9, 9, 9, 9], &[9]] {
            let (other, _) = table(format, groups);
            let cut = source_file(&other, Some(cut.clone()));
            let fields = Fields::at("text", None);
            let fault = cut.open(&fields, &Limits::default()).map(drop).unwrap_err();
            assert_eq!(fault.class(), Class::Mismatch, "{fault}");
        }
    }
}
