//! What is guessed from folders, and what is left alone.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use contract::Class;
use parquet::arrow::ArrowWriter;

use super::*;
use crate::build::{Outcome, build};
use crate::check;
use crate::corpus::Corpus;
use crate::testing::{Workbench, json_lines, options};

fn parquet(names: [&str; 2], rows: &[[&str; 2]]) -> Vec<u8> {
    let column = |at: usize| rows.iter().map(|row| row[at]).collect::<Vec<_>>();
    let arrays = [0, 1].map(|at| Arc::new(StringArray::from(column(at))) as ArrayRef);
    let batch = RecordBatch::try_from_iter(names.into_iter().zip(arrays)).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

/// A folder of everything that a newcomer may have.
fn folder() -> Workbench {
    let bench = Workbench::new(0);
    for name in ["web-0.jsonl", "web-1.jsonl", "math.jsonl"] {
        fs::remove_file(bench.path(name)).unwrap();
    }
    let rows = [["a", "long enough to be the text"], ["b", "and one more of these"]];
    bench.write("wiki/en/0.parquet", parquet(["title", "page"], &rows));
    bench.write("web/a.jsonl", json_lines(0, 9));
    bench.write("web/more/b.jsonl", json_lines(20, 9));
    let turn = "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n";
    bench.write("chat [1]/c.jsonl", turn.repeat(3));
    bench.write("notes.md", "one note");
    bench.write("table.csv", "a,b\n");
    bench.write(".hidden/x.jsonl", "nonsense");
    bench
}

#[test]
fn what_is_found_builds_as_it_is_written() {
    let bench = folder();
    let begun = init(&bench.path("")).unwrap();
    assert_eq!(begun.files.len(), 2);
    let corpus = Corpus::read(bench.path(CORPUS)).unwrap();
    let named = |source: &crate::corpus::Source| (source.name.clone(), source.files.len());
    let sources: Vec<_> = corpus.sources.iter().map(named).collect();
    let wanted = [("text", 1), ("chat--1-", 1), ("web", 2), ("wiki", 1)];
    assert_eq!(sources, wanted.map(|(name, files)| (name.to_owned(), files)));
    assert_eq!(corpus.sources[3].fields, Fields::at("page", None));
    assert_eq!(corpus.sources[2].fields, Fields::at("text", Some("id")));
    assert!(begun.notes.iter().any(|note| note.contains("`page`")), "{:?}", begun.notes);
    let outcome = build(&corpus, &bench.path("store"), options(1)).unwrap();
    let Outcome::Built { manifest, .. } = outcome else { panic!("nothing was there") };
    let read: u64 = manifest.sources.iter().flat_map(|s| &s.inputs).map(|i| i.documents).sum();
    assert_eq!(read, 1 + 3 + 18 + 2);
    // The store itself is no text.
    let before = fs::read(bench.path(CORPUS)).unwrap();
    fs::remove_file(bench.path(CORPUS)).unwrap();
    fs::remove_file(bench.path(CURRICULUM)).unwrap();
    init(&bench.path("")).unwrap();
    assert_eq!(fs::read(bench.path(CORPUS)).unwrap(), before);
}

#[test]
fn a_column_of_times_is_not_taken_for_text() {
    use arrow::array::TimestampMicrosecondArray;

    let bench = Workbench::new(0);
    let titles: ArrayRef = Arc::new(StringArray::from(vec!["short"; 3]));
    let times: ArrayRef = Arc::new(TimestampMicrosecondArray::from(vec![1_700_000_000_000_001; 3]));
    let batch = RecordBatch::try_from_iter([("created", times), ("headline", titles)]).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    bench.write("own/news.parquet", writer.into_inner().unwrap());
    init(&bench.path("own")).unwrap();
    let corpus = Corpus::read(bench.path("own").join(CORPUS)).unwrap();
    assert_eq!(corpus.sources[0].fields, Fields::at("headline", None));
}

/// What these programs made is no text, however its files end; a folder that only has a file of the same name is.
#[test]
fn what_these_programs_made_is_passed_over() {
    let bench = folder();
    let made = [
        ("old/store", "manifest.json", "manifest.sum"),
        ("export", "export.json", "tokenizer.json"),
        ("run", "ledger.jsonl", "run.toml"),
        ("new.partial", ".build/staging", "web/tokens-00000.arrow"),
    ];
    for (top, one, other) in made {
        bench.write(&format!("{top}/{one}"), "no text");
        bench.write(&format!("{top}/{other}"), "");
        bench.write(&format!("{top}/notes.md"), "a note");
    }
    bench.write("-mine/manifest.json", json_lines(0, 3));
    let told = init(&bench.path("")).unwrap().notes.join("\n");
    assert!(
        told.contains("export (an export), new.partial (unfinished), old/store (a store)"),
        "{told}"
    );
    let corpus = Corpus::read(bench.path(CORPUS)).unwrap();
    let names: Vec<&str> = corpus.sources.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["text", "mine", "chat--1-", "web", "wiki"]);
}

/// Names that become one, fields that no path can say, and what no source is made of.
#[test]
fn what_is_odd_is_named_apart_or_said() {
    let bench = folder();
    for top in ["a b", "a-b", "A?b"] {
        bench.write(&format!("{top}/x.jsonl"), json_lines(0, 3));
        bench.write(&format!("{top}/y.md"), "a note");
    }
    bench.write(
        "dots/x.jsonl",
        "{\"a.b\": \"the longest of them all\", \"c\": {\"d\": \"text\"}}\n",
    );
    assert!(Command::new("mkfifo").arg(bench.path("web/p.jsonl")).status().unwrap().success());
    let begun = init(&bench.path("")).unwrap();
    let told = begun.notes.join("\n");
    assert!(told.contains("table.csv (no known ending), web/p.jsonl (a FIFO)"), "{told}");
    fs::remove_file(bench.path("web/p.jsonl")).unwrap();
    let corpus = Corpus::read(bench.path(CORPUS)).unwrap();
    let names: BTreeSet<&str> = corpus.sources.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names.len(), 4 + 6 + 1, "{names:?}");
    let options = check::Options { workers: 1, quiet: true };
    let checked = check::check(&corpus, options, |bad| Err(bad.fault)).unwrap();
    assert_eq!(checked.documents, 1 + 3 + 18 + 2 + 3 * 4 + 1);
    symlink("nothing", bench.path("web/z.png")).unwrap();
    symlink("nothing", bench.path("web/z.jsonl")).unwrap();
    for name in [CORPUS, CURRICULUM] {
        fs::remove_file(bench.path(name)).unwrap();
    }
    let fault = init(&bench.path("")).unwrap_err();
    assert_eq!(fault.class(), Class::Machine, "{fault}");
    fs::remove_file(bench.path("web/z.jsonl")).unwrap();
    let told = init(&bench.path("")).unwrap().notes.join("\n");
    assert!(told.contains("web/z.png (leads nowhere)"), "{told}");
}

/// A file of two names is text once; what the corpus file says builds, and names nothing else.
#[test]
fn a_file_of_two_names_is_taken_once() {
    let bench = folder();
    symlink("a.jsonl", bench.path("web/b.jsonl")).unwrap();
    symlink("../web/a.jsonl", bench.path("wiki/0.jsonl")).unwrap();
    symlink("../wiki", bench.path("web/wiki")).unwrap();
    fs::hard_link(bench.path("notes.md"), bench.path("other.md")).unwrap();
    bench.write("away/[1].jsonl", json_lines(40, 3));
    bench.write("elsewhere.gone", json_lines(50, 3));
    fs::rename(bench.path("elsewhere.gone"), bench.path(".blob")).unwrap();
    symlink("../.blob", bench.path("away/link.jsonl")).unwrap();
    symlink("[1].jsonl", bench.path("away/copy.jsonl")).unwrap();
    let told = init(&bench.path("")).unwrap().notes.join("\n");
    let passed_over = told.lines().next().unwrap();
    assert!(passed_over.contains(" and 1 more"), "{told}");
    let seen = Seen::below(&bench.path("")).unwrap().passed_over.join(", ");
    for one in [
        "web/b.jsonl (a link to web/a.jsonl)",
        "wiki/0.jsonl (a link to web/a.jsonl)",
        "web/wiki (a link to a folder)",
        "other.md (the same file as notes.md)",
        "away/copy.jsonl (a link to away/[1].jsonl)",
    ] {
        assert!(seen.contains(one), "{seen}");
    }
    let corpus = Corpus::read(bench.path(CORPUS)).unwrap();
    let files = corpus.sources.iter().map(|source| (source.name.as_str(), source.files.len()));
    let wanted = [("text", 1), ("away", 2), ("chat--1-", 1), ("web", 2), ("wiki", 1)];
    assert_eq!(files.collect::<Vec<_>>(), wanted);
    let options = check::Options { workers: 1, quiet: true };
    let checked = check::check(&corpus, options, |bad| Err(bad.fault)).unwrap();
    assert_eq!(checked.documents, 1 + 6 + 3 + 18 + 2);
}

#[test]
fn nothing_is_overwritten_and_an_empty_folder_says_what_it_lacks() {
    for name in [CORPUS, CURRICULUM] {
        let bench = folder();
        bench.write(name, "mine");
        let fault = init(&bench.path("")).unwrap_err();
        assert!(fault.class() == Class::Usage && fault.to_string().contains(name), "{fault}");
        assert_eq!(fs::read(bench.path(name)).unwrap(), b"mine");
        assert_eq!([CORPUS, CURRICULUM].iter().filter(|it| bench.path(it).exists()).count(), 1);
    }
    let empty = tempfile::tempdir().unwrap();
    let fault = init(empty.path()).unwrap_err();
    assert!(fault.class() == Class::Data && fault.to_string().contains(".jsonl"), "{fault}");
    assert!(fs::read_dir(empty.path()).unwrap().next().is_none());
}

/// What a kill leaves between the two files: the same command writes the other one, and only where its own text stands there.
#[test]
fn one_file_of_a_killed_run_is_gone_on_with() {
    let bench = folder();
    init(&bench.path("")).unwrap();
    let both = [CORPUS, CURRICULUM].map(|name| fs::read(bench.path(name)).unwrap());
    for name in [CORPUS, CURRICULUM] {
        fs::remove_file(bench.path(name)).unwrap();
        init(&bench.path("")).unwrap();
        assert!(both == [CORPUS, CURRICULUM].map(|name| fs::read(bench.path(name)).unwrap()));
    }
    let fault = init(&bench.path("")).unwrap_err();
    assert!(fault.class() == Class::Usage && fault.to_string().contains(CORPUS), "{fault}");
    fs::remove_file(bench.path(CURRICULUM)).unwrap();
    bench.write(CORPUS, [&both[0][..], b"# mine"].concat());
    assert_eq!(init(&bench.path("")).unwrap_err().class(), Class::Usage);
    assert!(!bench.path(CURRICULUM).exists());
}
