//! What is guessed from folders, and what is skipped.

use std::collections::BTreeSet;
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
use crate::source::Fields;
use crate::testing::{Workbench, bytes_tokenizer, json_lines, options};

fn parquet(names: [&str; 2], rows: &[[&str; 2]]) -> Vec<u8> {
    let column = |at: usize| rows.iter().map(|row| row[at]).collect::<Vec<_>>();
    let arrays = [0, 1].map(|at| Arc::new(StringArray::from(column(at))) as ArrayRef);
    let batch = RecordBatch::try_from_iter(names.into_iter().zip(arrays)).unwrap();
    let mut writer = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.into_inner().unwrap()
}

/// A folder with everything that a newcomer may have.
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
    // The store itself is not used as text.
    let before = fs::read_to_string(bench.path(CORPUS)).unwrap();
    fs::remove_file(bench.path(CORPUS)).unwrap();
    fs::remove_file(bench.path(CURRICULUM)).unwrap();
    init(&bench.path("")).unwrap();
    let after = fs::read(bench.path(CORPUS)).unwrap();
    assert_eq!(String::from_utf8(after).unwrap().replace("#   store (a store)\n", ""), before);
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

/// Our own outputs are not used as text, whatever their file names; a folder that only has a file of the same name is.
/// A killed run may have been writing the corpus file, the curriculum or a tokenizer.
#[test]
fn what_a_killed_run_left_changes_no_text() {
    let texts = |bench: &Workbench| {
        [CORPUS, CURRICULUM].map(|name| fs::read_to_string(bench.path(name)).unwrap())
    };
    let undisturbed = folder();
    init(&undisturbed.path("")).unwrap();
    let killed = folder();
    killed.write("corpus.toml.zdata.tmp", "# What");
    killed.write("tokenizer.json.zdata.tmp", "{");
    init(&killed.path("")).unwrap();
    assert_eq!(texts(&killed), texts(&undisturbed));
    let between = folder();
    between.write(CORPUS, fs::read(undisturbed.path(CORPUS)).unwrap());
    between.write("curriculum.toml.zdata.tmp", "");
    init(&between.path("")).unwrap();
    assert_eq!(texts(&between), texts(&undisturbed));
}

#[test]
fn what_these_programs_made_is_passed_over() {
    let bench = folder();
    let made = [
        ("old/store", "manifest.json", "manifest.sum"),
        ("export", "export.json", "tokenizer.json"),
        ("run", "ledger.jsonl", "run.toml"),
        ("new.partial", ".build/staging", "web/tokens-train-00000.arrow"),
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

/// Names that become one, fields that no path can express, and files from which no source is made.
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
    let options = check::Options { workers: 1, quiet: true, listed: 9 };
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

/// A file with two names is used once; the written corpus file builds, and matches nothing else.
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
    let options = check::Options { workers: 1, quiet: true, listed: 9 };
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

/// After a kill between the two files, the same command writes the other one, if the first has exactly its own text.
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

/// The corpus that `init` writes for a folder: its sources, with their files and fields, after every record was read.
fn read_whole(bench: &Workbench, folder: &str) -> (Corpus, u64) {
    let begun = init(&bench.path(folder)).unwrap();
    let corpus = Corpus::read(bench.path(folder).join(CORPUS)).unwrap();
    let options = check::Options { workers: 1, quiet: true, listed: 9 };
    let checked = check::check(&corpus, options, |bad| Err(bad.fault));
    let checked = checked.unwrap_or_else(|fault| panic!("{fault}\n{:?}", begun.notes));
    (corpus, checked.documents)
}

/// Removes the written files, so that they are written again.
fn forget(bench: &Workbench, folder: &str) {
    for name in [CORPUS, CURRICULUM] {
        fs::remove_file(bench.path(folder).join(name)).unwrap();
    }
}

/// The same text has the same weight, however it is compressed.
#[test]
fn weights_are_of_text_and_not_of_bytes_on_the_disk() {
    use std::io::Write as _;

    let bench = Workbench::new(0);
    let texts: Vec<String> =
        (0..400).map(|i| format!("the very same words, {i} times over ").repeat(20)).collect();
    let lines = |range: std::ops::Range<usize>| -> String {
        texts[range].iter().map(|text| format!("{{\"text\": {}}}\n", quoted(text))).collect()
    };
    bench.write("own/plain/a.jsonl", lines(0..400));
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gz.write_all(lines(0..400).as_bytes()).unwrap();
    bench.write("own/gz/a.jsonl.gz", gz.finish().unwrap());
    let rows: Vec<[&str; 2]> = texts.iter().map(|text| ["x", text.as_str()]).collect();
    bench.write("own/parquet/a.parquet", parquet(["n", "text"], &rows));
    bench.write("own/twice/a.txt", texts.concat());
    bench.write("own/twice/b.txt", texts.concat());
    let (corpus, _) = read_whole(&bench, "own");
    assert_eq!(corpus.sources.len(), 4);
    let curriculum = fs::read_to_string(bench.path("own").join(CURRICULUM)).unwrap();
    let mix = "mix = { \"gz\" = 1, \"parquet\" = 1, \"plain\" = 1, \"twice\" = 2 }";
    assert!(curriculum.contains(mix), "{curriculum}");
}

/// One bad file does not make a folder fail, and files about the data are skipped.
#[test]
fn each_file_gets_a_verdict_of_its_own() {
    let bench = Workbench::new(0);
    bench.write("own/a.jsonl", json_lines(0, 5));
    bench.write(
        "own/array.json",
        "[{\"text\": \"one\", \"id\": 1},\n {\"text\": \"two\", \"id\": 2}]",
    );
    bench.write("own/chat.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n");
    bench.write("own/notes.md", "a note");
    let odd = [
        ("numbers.json", "[1, 2, 3]", "no record that is a JSON object"),
        ("counts.json", "{\"n\": 7}", "holds text"),
        ("one.json", "{\n  \"text\": \"over lines\"\n}", "no record that is a JSON object"),
        ("tokenizer_config.json", "{\"model_max_length\": 7}", "describes data"),
        ("dataset_infos.json", "{\"default\": {}}", "describes data"),
        ("state.json", "{}", "describes data"),
        ("README.md", "# What this is", "describes data"),
        ("LICENSE.txt", "MIT", "describes data"),
        ("torn.jsonl.gz", "no gzip", "the gzip stream is damaged"),
        ("old.jsonl.bz2", "BZh9", "packed by bzip2"),
        ("hidden.jsonl", "BZh91AY&SY\u{1}\u{2}", "compressed by bzip2"),
        ("none.jsonl", "", "empty"),
    ];
    for (name, text, _) in odd {
        bench.write(&format!("own/{name}"), text);
    }
    let (corpus, documents) = read_whole(&bench, "own");
    let text = fs::read_to_string(bench.path("own").join(CORPUS)).unwrap();
    for (name, _, why) in odd {
        let line = text.lines().find(|line| line.starts_with(&format!("#   {name} (")));
        assert!(line.is_some_and(|line| line.contains(why)), "{name}: {text}");
    }
    assert_eq!(documents, 5 + 2 + 1 + 1);
    let sources: Vec<_> = corpus.sources.iter().map(|it| (&*it.name, it.files.len())).collect();
    assert_eq!(sources, [("text", 2), ("text-jsonl", 1), ("text-text", 1)]);
    // In a folder without data every file is reported.
    bench.write("none/README.md", "# What this is");
    let told = init(&bench.path("none")).unwrap_err().to_string();
    assert!(told.contains("README.md (describes data"), "{told}");
}

/// Layouts of published data sets get the right keys, and every record is a document.
#[test]
fn common_layouts_are_known() {
    let template = |text: &str| vec![("template", text.to_owned())];
    let chat = |path: &str| vec![("chat", path.to_owned())];
    let cases = [
        (
            r#"{"instruction": "do", "input": "", "output": "done"}"#,
            template(
                "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n{output}\n",
            ),
        ),
        (
            r#"{"instruction": "do", "context": "", "response": "done", "category": "a long name"}"#,
            template(
                "### Instruction:\n{instruction}\n\n### Context:\n{context}\n\n### Response:\n{response}\n",
            ),
        ),
        (
            r#"{"instruction": "do", "input": null, "output": "done"}"#,
            template("### Instruction:\n{instruction}\n\n### Response:\n{output}\n"),
        ),
        (
            r#"{"question": "why?", "answer": "so"}"#,
            template("Question: {question}\nAnswer: {answer}\n"),
        ),
        (r#"{"prompt": "a b", "completion": " c"}"#, template("{prompt}{completion}")),
        (r#"{"prompt": "a b", "response": "c"}"#, template("{prompt}\n{response}\n")),
        (r#"{"messages": [{"role": "user", "content": "hi"}]}"#, chat("messages")),
        (
            r#"{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}"#,
            [chat("conversations"), vec![("message", "<|{from}|>\n{value}\n".to_owned())]].concat(),
        ),
        (
            r#"{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"name": "f"}]}]}"#,
            template("{messages}"),
        ),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "text"}]}]}"#,
            template("{messages}"),
        ),
        (r#"{"a.b": "what holds the most", "c": "less"}"#, vec![("text", "a\\.b".to_owned())]),
        (
            r#"{"doc": {"text": "t", "title": "longer than it"}, "meta": {"n": 3, "url": "u"}}"#,
            vec![("text", "doc.text".to_owned()), ("id", "meta.url".to_owned())],
        ),
        (
            r#"{"text": "t", "id": 1.5, "meta": {"info": {"uuid": "x"}, "doc_id": null}}"#,
            vec![("text", "text".to_owned()), ("id", "meta.info.uuid".to_owned())],
        ),
    ];
    let bench = Workbench::new(0);
    for (number, (record, keys)) in cases.iter().enumerate() {
        let folder = format!("layout{number}");
        bench.write(&format!("{folder}/a.jsonl"), format!("{record}\n").repeat(3));
        let (_, documents) = read_whole(&bench, &folder);
        assert_eq!(documents, 3, "{record}");
        let text = fs::read_to_string(bench.path(&folder).join(CORPUS)).unwrap();
        let table = text.split("files = ").nth(1).unwrap().lines().skip(1);
        let found: Vec<&str> = table.take_while(|line| !line.is_empty()).collect();
        let wanted: Vec<String> =
            keys.iter().map(|(key, value)| format!("{key} = {}", quoted(value))).collect();
        assert_eq!(found, wanted, "{record}");
    }
}

/// With a model's chat template in the folder, chats use it, including tool calls and null content.
#[test]
fn chats_beside_a_model_go_through_its_template() {
    let answer = r#"{"role": "assistant", "content": null, "tool_calls": [{"name": "f"}]}"#;
    let user = r#"{"role": "user", "content": "hi"}"#;
    let call = format!(r#"{{"messages": [{user}, {answer}], "tools": [{{"name": "f"}}]}}"#);
    let others = r#"{"conversations": [{"from": "human", "value": "hi"}]}"#;
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content or m.tool_calls|tojson }}<|end|>{% endfor %}";
    let config = |template: &str| serde_json::json!({"chat_template": template}).to_string();
    let refuses = format!("{{% if tools %}}{{{{ raise_exception('no') }}}}{{% endif %}}{template}");
    let dated = format!("{{{{ strftime_now('%Y') }}}}{template}");
    let cases = [
        ("tokenizer_config.json", config(template), true),
        ("chat_template.jinja", template.to_owned(), true),
        ("tokenizer_config.json", config(&refuses), false),
        ("tokenizer_config.json", config(&dated), false),
        ("tokenizer_config.json", config("{% if %}"), false),
        ("tokenizer_config.json", "{}".to_owned(), false),
    ];
    for (file, text, is_taken) in cases {
        let bench = Workbench::new(0);
        bench.write("all/tokenizer.json", bytes_tokenizer(|_| ()));
        bench.write("all/chats/a.jsonl", format!("{call}\n").repeat(3));
        bench.write("all/others/b.jsonl", format!("{others}\n").repeat(3));
        bench.write(&format!("all/{file}"), &text);
        assert_eq!(read_whole(&bench, "all").1, 6, "{text}");
        let written = fs::read_to_string(bench.path("all").join(CORPUS)).unwrap();
        let keys = format!("chat = \"messages\"\nchat_template = \"{file}\"\ntools = \"tools\"\n");
        assert_eq!(written.contains(&keys), is_taken, "{written}");
        assert!(written.contains("message = \"<|{from}|>"), "{written}");
    }
}

#[test]
fn numbered_folders_are_one_source() {
    let bench = Workbench::new(0);
    for number in 0..12 {
        bench.write(&format!("own/part-{number}/a.jsonl"), json_lines(number, 2));
        bench.write(&format!("own/part-{number}/deep/b.jsonl"), json_lines(50 + number, 1));
        bench.write(&format!("own/{number:03}/a.jsonl"), json_lines(100 + number, 1));
    }
    bench.write("own/v1/a.jsonl", json_lines(200, 1));
    bench.write("own/v2/a.jsonl", json_lines(201, 1));
    // An odd file among them is reported, and no pattern matches it.
    bench.write("own/part-3/odd.jsonl", "[1]\n");
    let (corpus, documents) = read_whole(&bench, "own");
    let sources: Vec<_> = corpus.sources.iter().map(|it| (&*it.name, it.files.len())).collect();
    assert_eq!(sources, [("own", 12), ("part", 24), ("v1", 1), ("v2", 1)]);
    assert_eq!(documents, 12 + 36 + 2);
    let text = fs::read_to_string(bench.path("own").join(CORPUS)).unwrap();
    assert!(text.contains("files = [\"[0-9][0-9][0-9]/*.jsonl\"]"), "{text}");
    fs::remove_file(bench.path("own/part-3/odd.jsonl")).unwrap();
    forget(&bench, "own");
    read_whole(&bench, "own");
    let text = fs::read_to_string(bench.path("own").join(CORPUS)).unwrap();
    let part = "files = [\"part-[0-9]/**/*.jsonl\", \"part-[0-9][0-9]/**/*.jsonl\"]";
    assert!(text.contains(part), "{text}");
}

/// Folders of `save_to_disk` and of the hub: test splits and caches are not used as text.
#[test]
fn data_sets_of_hugging_face_are_known_by_their_metadata() {
    let bench = Workbench::new(0);
    let rows = |text: &'static str| {
        let column: ArrayRef = Arc::new(StringArray::from(vec![text; 3]));
        let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
        let mut writer =
            arrow::ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
        writer.write(&batch).unwrap();
        writer.finish().unwrap();
        writer.into_inner().unwrap()
    };
    let state = "{\"_data_files\": [{\"filename\": \"data-00000-of-00001.arrow\"}]}";
    bench.write("saved/dataset_dict.json", "{\"splits\": [\"train\", \"test\"]}");
    for split in ["train", "test"] {
        bench.write(&format!("saved/{split}/state.json"), state);
        bench.write(&format!("saved/{split}/dataset_info.json"), "{}");
        bench.write(&format!("saved/{split}/data-00000-of-00001.arrow"), rows("one"));
        bench.write(&format!("saved/{split}/cache-0123.arrow"), rows("two"));
    }
    let (corpus, documents) = read_whole(&bench, "saved");
    assert_eq!((documents, &*corpus.sources[0].name), (3, "saved"));
    let card = "---\ndataset_info:\n  features: []\n---\n# A set\n";
    bench.write("hub/README.md", card);
    for split in ["train", "validation", "test"] {
        let name = format!("hub/data/{split}-00000-of-00001.parquet");
        bench.write(&name, parquet(["id", "text"], &[["1", "one"], ["2", "two"]]));
    }
    let (corpus, documents) = read_whole(&bench, "hub");
    assert_eq!((documents, &*corpus.sources[0].name), (2, "hub"));
    // Without a card these are not known to be splits.
    fs::remove_file(bench.path("hub/README.md")).unwrap();
    forget(&bench, "hub");
    assert_eq!(read_whole(&bench, "hub").1, 6);
}
