//! Files that are cut at their groups: the store is that of whole files, whatever is killed or read again.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::arrow::array::{ArrayRef, RecordBatch, StringArray};
use ::arrow::ipc::writer::FileWriter;
use ::parquet::arrow::ArrowWriter;
use ::parquet::file::metadata::ParquetMetaDataReader;
use store::{DocumentRecord, Store};

use super::*;
use crate::cluster::{Plan, Runner, Stage, merge, plan};

/// Steps that compare, within a source and across, and one that changes.
const STEPS: &str = "
[[prepare]]
step = \"exact-duplicates\"
[[prepare]]
step = \"length\"
min_words = 3
[[prepare]]
step = \"repeated-substrings\"
sources = [\"web\"]
min_bytes = 40
";

/// Groups of so many documents from `first` on, some without text, as Parquet or Arrow.
fn table(path: &Path, first: u64, groups: &[u64]) {
    let is_parquet = path.extension().is_some_and(|ending| ending == "parquet");
    let mut at = first;
    let batches = groups.iter().map(|rows| {
        let numbers = at..at + rows;
        at += rows;
        let text = |index: u64| (index % 13 != 7).then(|| format!("{} {index}", document(index)));
        let text: ArrayRef = Arc::new(StringArray::from_iter(numbers.clone().map(text)));
        let id: ArrayRef =
            Arc::new(StringArray::from_iter_values(numbers.map(|index| format!("d{index}"))));
        RecordBatch::try_from_iter_with_nullable([("id", id, true), ("text", text, true)]).unwrap()
    });
    let batches: Vec<RecordBatch> = batches.collect();
    let (schema, mut file) = (batches[0].schema(), Vec::new());
    if is_parquet {
        let mut writer = ArrowWriter::try_new(&mut file, schema, None).unwrap();
        for batch in &batches {
            writer.write(batch).unwrap();
            writer.flush().unwrap();
        }
        writer.close().unwrap();
    } else {
        let mut writer = FileWriter::try_new(&mut file, &schema).unwrap();
        batches.iter().for_each(|batch| writer.write(batch).unwrap());
        writer.finish().unwrap();
    }
    fs::write(path, file).unwrap();
}

/// Tables of two sources, and a corpus file whose parts have so many bytes.
fn corpus(bench: &Workbench, part_bytes: u64, steps: &str) -> PathBuf {
    let text = format!(
        "tokenizer = \"tokenizer.json\"\nend = \"<|end|>\"\nunit = 64\nvalidation = \"1/7\"\n\
         on_error = \"skip\"\npart_bytes = {part_bytes}\n\
         [[source]]\nname = \"web\"\nfiles = [\"web/*\"]\nid = \"id\"\n\
         [[source]]\nname = \"math\"\nfiles = [\"math/*\"]\nkeep = [\"id\"]\n{steps}"
    );
    bench.write(&format!("corpus-{part_bytes}.toml"), text)
}

fn tables() -> Workbench {
    let bench = Workbench::new(3);
    for (name, first, groups) in [
        ("web/a.parquet", 0, &[30, 1, 25, 40, 10][..]),
        ("web/b.arrow", 60, &[20, 20, 35]),
        ("web/c.parquet", 300, &[6]),
        ("math/a.arrow", 1000, &[9, 30, 18, 2]),
        ("math/b.parquet", 2000, &[15, 15]),
    ] {
        fs::create_dir_all(bench.path(name).parent().unwrap()).unwrap();
        table(&bench.path(name), first, groups);
    }
    bench.write("web/d.jsonl", json_lines(20, 40));
    bench
}

/// What a store holds, whatever its parts: documents with places, and the list of dropped records.
fn content(store: &Path) -> (Vec<DocumentRecord>, Vec<(String, dropped::Line)>) {
    let opened = Store::open(store).unwrap();
    let (mut documents, mut lines) = (Vec::new(), Vec::new());
    for (number, source) in opened.manifest().sources.iter().enumerate() {
        for split in Split::ALL {
            let stream = opened.stream(number, split);
            let all = 0..source.stream(split).documents;
            documents.extend(stream.documents(&[all]).unwrap());
        }
    }
    dropped::each_of(store, opened.manifest(), |source, line| {
        lines.push((source.name.clone(), line));
        Ok(())
    })
    .unwrap();
    (documents, lines)
}

fn parts(manifest: &Manifest) -> usize {
    manifest.sources.iter().map(|source| source.parts.len()).sum()
}

/// Without steps and with them; of one group each, of some, and of whole files.
#[test]
fn cuts_within_files_leave_no_trace() {
    let bench = tables();
    for steps in ["", STEPS] {
        let mut made = Vec::new();
        for part_bytes in [1, 3000, 9000, 1 << 30] {
            let store = bench.path(&format!("store-{}-{part_bytes}", steps.len()));
            let manifest = built(&corpus(&bench, part_bytes, steps), &store, 3);
            assert_eq!(verify(&store, true).unwrap().damages, []);
            made.push((parts(&manifest), manifest, content(&store)));
            // The same request, of other parts.
            let other = Corpus::read(corpus(&bench, 2000, steps)).unwrap();
            assert!(matches!(build(&other, &store, options(1)).unwrap(), Outcome::UpToDate(_)));
        }
        let (count, whole, wanted) = made.pop().unwrap();
        assert_eq!(count, 2);
        for (parts, manifest, found) in made {
            assert!(parts > count && parts <= 5 + 3 + 1 + 1 + 4 + 2, "{parts}");
            assert_eq!((manifest.digest, manifest.request), (whole.digest, whole.request));
            for (a, b) in manifest.sources.iter().zip(&whole.sources) {
                assert_eq!((&a.inputs, &a.dropped), (&b.inputs, &b.dropped));
                assert_eq!(a.prepared, b.prepared);
            }
            assert!(found == wanted);
        }
    }
}

/// A check reports what is wrong with a file once, and a damaged group is that of a whole file.
#[test]
fn a_damaged_group_is_reported_as_of_a_whole_file() {
    let bench = tables();
    let path = bench.path("web/a.parquet");
    let mut bytes = fs::read(&path).unwrap();
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&fs::File::open(&path).unwrap());
    // The head of a page.
    let (at, _) = metadata.unwrap().row_group(3).column(1).byte_range();
    bytes[at as usize..][..8].fill(0xff);
    fs::write(&path, bytes).unwrap();
    let faults = [1, 1 << 30].map(|part_bytes| {
        let corpus = corpus(&bench, part_bytes, "");
        let fault = refused(&corpus, &bench.path("store"));
        let mut bad = 0;
        let options = crate::check::Options { workers: 2, quiet: true, listed: 9 };
        let checked = crate::check::check(&Corpus::read(&corpus).unwrap(), options, |found| {
            bad += u64::from(found.reason.is_none());
            Ok(())
        });
        assert_eq!((bad, checked.unwrap().stop.is_some()), (1, true));
        fault.to_string()
    });
    assert!(faults[0].contains("a.parquet: row group 3"), "{}", faults[0]);
    assert_eq!(faults[0], faults[1]);
}

/// Kills leave no trace in the parts of a cut file, nor in what is decided of its documents.
#[test]
fn a_killed_build_goes_on_within_a_file() {
    let bench = tables();
    let path = corpus(&bench, 1, STEPS);
    let at_once = built(&path, &bench.path("at-once"), 2);
    let corpus = Corpus::read(&path).unwrap();
    for document in [90, 100, 120] {
        killed_at(&corpus, &bench.path("killed"), document);
    }
    assert_eq!(built(&path, &bench.path("killed"), 2), at_once);
    same(&bench.path("killed"), &bench.path("at-once"));
}

/// A file that changes between its parts, even where its footer does not, becomes no store.
#[test]
fn parts_of_a_cut_file_are_of_one_version() {
    let bench = tables();
    let corpus = Corpus::read(corpus(&bench, 1, "")).unwrap();
    let (path, work, store) = (bench.path("math/a.arrow"), bench.path("work"), bench.path("store"));
    let run = |plan: &Plan, change: &dyn Fn(usize)| {
        let runner = Runner::new(plan, 1).unwrap();
        let missing = plan.missing(Stage::Encode).unwrap();
        for task in &missing {
            change(*task);
            runner.run(Stage::Encode, *task, true).unwrap();
        }
        missing.len()
    };
    let first = plan(&corpus, &work).unwrap();
    let made = run(&first, &|task| {
        // Before the second of the four parts of that file, of which two are behind.
        if task == 5 + 3 + 1 + 1 + 1 {
            let mut bytes = fs::read(&path).unwrap();
            let word = bytes.windows(3).rposition(|bytes| bytes == b"one").unwrap();
            bytes[word..word + 3].copy_from_slice(b"six");
            fs::write(&path, bytes).unwrap();
        }
    });
    assert_eq!(made, 16);
    let fault = merge(&first, &store, true).unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch, "{fault}");
    assert!(fault.to_string().contains("a.arrow"), "{fault}");
    // Planned again, what was read of the old version is read again.
    let again = plan(&corpus, &work).unwrap();
    assert_eq!(run(&again, &|_| ()), 1);
    let manifest = merge(&again, &store, true).unwrap();
    let whole = self::corpus(&bench, 1 << 30, "");
    assert_eq!(manifest.digest, built(&whole, &bench.path("now"), 1).digest);
}

/// Files are looked into on several threads: the fault is that of the first one all the same.
#[test]
fn what_is_wrong_with_inputs_is_said_of_the_first() {
    let bench = tables();
    let corpus = Corpus::read(corpus(&bench, 1, "")).unwrap();
    let wanted = crate::cuts::parts(&corpus).unwrap();
    assert_eq!(crate::cuts::parts(&corpus).unwrap(), wanted);
    for name in ["math/b.parquet", "web/d.jsonl", "web/b.arrow"] {
        fs::remove_file(bench.path(name)).unwrap();
        for _ in 0..20 {
            let fault = crate::cuts::parts(&corpus).unwrap_err().to_string();
            assert!(fault.contains(name), "{fault}");
        }
    }
}
