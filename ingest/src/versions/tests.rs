//! Enforces the versions: compares the output of every stage and step for a generated corpus, and `Cargo.lock`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use ::arrow::array::{ArrayRef, RecordBatch, StringArray};
use ::arrow::ipc::writer::StreamWriter;
use ::parquet::arrow::ArrowWriter;
use contract::Digest;
use serde_json::json;
use store::Manifest;

use super::*;
use crate::build::{Outcome, build};
use crate::corpus::Corpus;
use crate::dedup::repeats::EMPTIED;
use crate::dropped::{Line, REMOVED, each_of};
use crate::recipe::is_reason;
use crate::testing::{Workbench, document, options};

const PROSE: &str = "The people of the river town had to be up before the sun, and with the first light that fell on \
    the water they went out to the boats; of the many who went, few came back with more than a basket of fish.";

/// Each step alone, with settings that give it something to do.
const STEPS: [(&str, &str); 11] = [
    ("clean", "unicode = \"NFKC\"\ntrailing_space = true\nmax_empty_lines = 1\n"),
    ("length", "min_words = 4\nmax_chars = 2000\n"),
    ("gopher-quality", "min_words = 20\n"),
    ("gopher-repetition", ""),
    ("c4", "min_sentences = 2\n"),
    ("fineweb", ""),
    ("exact-duplicates", ""),
    ("near-duplicates", "words = 3\nbands = 10\nrows = 4\n"),
    ("repeated-substrings", "min_bytes = 60\n"),
    ("decontaminate", "files = [\"eval.jsonl\"]\nwords = 6\n"),
    ("trim", "context = 120\n"),
];

/// Documents on which every rule has an effect.
fn documents() -> Vec<String> {
    let mut all: Vec<String> = (0..60).map(document).collect();
    let lines = |line: &str, count: usize| vec![line; count].join("\n");
    all.extend([
        PROSE.to_owned(),
        PROSE.to_owned(),
        PROSE.replace("basket", "bucket"),
        format!("{PROSE}\n{PROSE}\n\n{PROSE}"),
        format!("{}\n{PROSE}", lines("- a point of the list that has no end", 12)),
        format!("{PROSE}\n{}", lines("and then, with all of that ...", 4)),
        format!("{PROSE} [12] As was said.[citation needed] It was so.\nno end here\nToo short."),
        format!("{PROSE}\nLorem ipsum dolor sit amet, it is said.\nIt ends."),
        format!("{PROSE}\nPlease enable javascript to go on with the tour.\nRead our terms of use."),
        format!("{PROSE} {{ x }} was the answer to it. That is all."),
        "One. Two. Three. Four. Five words and no more of them.".to_owned(),
        format!("<think>{}</think>The answer is 42.", "so that it is longer ".repeat(20)),
        "e\u{301}t\u{e9} \u{fb01}ne \u{ff21}\u{2460}\r\nline\u{2028}line\u{85}\u{0}\u{7}\u{feff} end \t\n\n\n\nend".to_owned(),
        "\u{6587}\u{5b57}\u{5316}\u{3051}\u{3002}\u{3053}\u{308c}\u{306f}\u{8a66}\u{9a13}\u{3067}\u{3059}\u{3002}".to_owned(),
        "\u{e2a}\u{e27}\u{e31}\u{e2a}\u{e14}\u{e35} \u{645}\u{631}\u{62d}\u{628}\u{627} \u{5e9}\u{5dc}\u{5d5}\u{5dd}".to_owned(),
        "a\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}b \u{1f1e9}\u{1f1ea} x\u{300}\u{301}\u{302} \u{e0fff}".to_owned(),
        lines("The same line over and over, as menus have it.", 9),
        "# # # ... word #hash #tag #more # # # of the kind that with have".to_owned(),
    ]);
    all
}

fn json_lines(texts: &[String]) -> String {
    let line = |(number, text)| json!({"id": format!("n\u{b0}{number}"), "text": text}).to_string();
    texts.iter().enumerate().map(|one| line(one) + "\n").collect()
}

/// Builds one source from these files, with these keys and steps.
fn built(
    bench: &Workbench,
    files: &str,
    keys: &str,
    steps: &str,
) -> (Manifest, std::path::PathBuf) {
    let text = format!(
        "tokenizer = \"tokenizer.json\"\nend = \"<|end|>\"\nvalidation = \"1/9\"\non_error = \"skip\"\n\
         [[source]]\nname = \"mixed\"\nfiles = [\"{files}\"]\n{keys}\n{steps}"
    );
    let corpus = Corpus::read(bench.write("corpus.toml", text)).unwrap();
    let store = bench.path("store");
    let _ = fs::remove_dir_all(&store);
    match build(&corpus, &store, options(2)).unwrap() {
        Outcome::Built { manifest, .. } => (manifest, store),
        Outcome::UpToDate(_) => panic!("the store was removed"),
    }
}

/// The steps that compare documents.
const COMPARE: [&str; 4] =
    ["exact-duplicates", "near-duplicates", "decontaminate", "repeated-substrings"];

/// The result of a build: kept documents with tokens and positions, dropped ones by reason, changes, lists.
fn outcome(built: &(Manifest, std::path::PathBuf)) -> Digest {
    let (manifest, store) = built;
    let mut text = String::new();
    for source in &manifest.sources {
        for stream in [&source.train, &source.validation] {
            let _ = writeln!(text, "{} {} {}", stream.documents, stream.text_bytes, stream.digest);
        }
        for dropped in &source.dropped {
            let _ = writeln!(text, "{} {} {}", dropped.documents, dropped.bytes, dropped.reason);
        }
        let Some(prepared) = &source.prepared else { continue };
        for change in &prepared.changes {
            let _ = writeln!(text, "{} {} {}", change.documents, change.added, change.removed);
        }
        if COMPARE.iter().any(|step| source.preparation.contains(step)) {
            let mut said = Vec::new();
            each_of(store, manifest, |_, line| {
                if is_reason(&line.reason) && line.reason != EMPTIED {
                    // The scan's decision on a record, without the record's id and size.
                    let line = Line { id: None, bytes: None, ..line };
                    said.extend(serde_json::to_vec(&line).unwrap().into_iter().chain(*b"\n"));
                }
                Ok(())
            })
            .unwrap();
            let _ = writeln!(text, "{REMOVED} {}", Digest::of_bytes(&said));
        }
        for file in &prepared.files {
            let bytes = fs::read(store.join(&source.name).join(&file.name)).unwrap();
            // The content of a list, not its compression.
            let plain = zstd::decode_all(&bytes[..]).unwrap_or(bytes);
            let _ = writeln!(text, "{} {}", file.name, Digest::of_bytes(&plain));
        }
    }
    Digest::of_bytes(text.as_bytes())
}

/// The files of all formats with the same documents; JSON Lines also with bad records.
fn inputs(bench: &Workbench, texts: &[String]) {
    let records = "{\"text\": 3}\n{\"text\": \"\"}\n{\n{\"id\": 1.5}\n{\"text\": \"\\ud800\"}\n";
    bench.write("all.jsonl", json_lines(texts) + records);
    bench.write("all.txt", texts.join("\n\n"));
    let column = |values: Vec<String>| Arc::new(StringArray::from(values)) as ArrayRef;
    let ids = (0..texts.len()).map(|number| format!("n\u{b0}{number}")).collect();
    let batch = RecordBatch::try_from_iter([("id", column(ids)), ("text", column(texts.to_vec()))]);
    let batch = batch.unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    bench.write("all.parquet", parquet.into_inner().unwrap());
    let mut arrow = StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    arrow.write(&batch).unwrap();
    bench.write("all.arrow", arrow.into_inner().unwrap());
    let items = [&PROSE[20..120], "document of which nobody ever heard a word before today"];
    let texts: Vec<String> = items.into_iter().map(str::to_owned).collect();
    bench.write("eval.jsonl", json_lines(&texts));
}

/// Every stage and step: its version, and a digest of its output for the corpus.
fn found() -> BTreeMap<String, (u32, Digest)> {
    let bench = Workbench::new(3);
    inputs(&bench, &documents());
    let mut found = BTreeMap::new();
    let stages = BTreeMap::from(STAGES);
    let id = "id = \"id\"";
    for (stage, file, keys) in [
        ("jsonl", "all.jsonl", id),
        ("parquet", "all.parquet", id),
        ("arrow", "all.arrow", id),
        ("text", "all.txt", ""),
        ("mapping", "all.jsonl", "template = \"{id}: {text}\""),
    ] {
        let outcome = outcome(&built(&bench, file, keys, ""));
        found.insert(stage.to_owned(), (stages[stage], outcome));
    }
    let plain = found["jsonl"].1;
    // Encoding has no step of its own: its version is that of every stream above; here with another vocabulary.
    let merged = crate::testing::bytes_tokenizer(|json| {
        json["model"]["vocab"]["th"] = 300.into();
        json["model"]["merges"] = json!(["t h"]);
    });
    let plainly = fs::read(bench.path("tokenizer.json")).unwrap();
    bench.write("tokenizer.json", merged);
    found.insert(
        "encode".to_owned(),
        (stages["encode"], outcome(&built(&bench, "all.jsonl", id, ""))),
    );
    bench.write("tokenizer.json", plainly);
    for (step, settings) in STEPS {
        let steps = format!("[[prepare]]\nstep = \"{step}\"\n{settings}");
        let made = built(&bench, "all.jsonl", id, &steps);
        let preparation = &made.0.sources[0].preparation;
        let said = preparation.split(" | ").nth(1).unwrap();
        let version = said.strip_prefix(&format!("{step} v")).expect("a step says its version");
        let version = version.split(' ').next().unwrap().parse().unwrap();
        let outcome = outcome(&made);
        assert_ne!(outcome, plain, "{step} did nothing");
        found.insert(step.to_owned(), (version, outcome));
    }
    found
}

/// `UPDATE_GOLDEN=1` writes the file again, once the version of what changed was increased.
#[test]
fn what_stages_and_steps_make_changes_only_with_their_versions() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/versions/golden.txt");
    let frozen = fs::read_to_string(&path).unwrap_or_default();
    let found = found();
    for line in frozen.lines() {
        let [name, version, digest] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("a golden line is a name, a version and a digest: {line}")
        };
        let Some((now, outcome)) = found.get(name) else { continue };
        assert!(
            now.to_string() != version || outcome.to_string() == digest,
            "`{name}` gives another output than in version {version}: parts of earlier builds would be used again \
             with the old one. Give it a higher version ({}), then UPDATE_GOLDEN=1, and say [bits].",
            if BTreeMap::from(STAGES).contains_key(name) {
                "STAGES in versions.rs"
            } else {
                "at its `step!`"
            },
        );
    }
    let text: String = found
        .iter()
        .map(|(name, (version, outcome))| format!("{name} {version} {outcome}\n"))
        .collect();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &text).unwrap();
    }
    assert_eq!(
        fs::read_to_string(&path).unwrap(),
        text,
        "UPDATE_GOLDEN=1 writes versions/golden.txt"
    );
}

/// A package of `Cargo.lock`.
struct Package {
    name: String,
    release: String,
    /// Whether it belongs to this workspace.
    ours: bool,
    /// `name`, or `name release` where there are several.
    needs: Vec<String>,
}

fn packages() -> Vec<Package> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.lock");
    let lock: toml::Table = toml::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let text = |value: &toml::Value| value.as_str().unwrap().to_owned();
    let packages = lock["package"].as_array().unwrap().iter();
    let package = packages.map(|package| Package {
        name: text(&package["name"]),
        release: text(&package["version"]),
        ours: package.get("source").is_none(),
        needs: package
            .get("dependencies")
            .map_or(Vec::new(), |needs| needs.as_array().unwrap().iter().map(text).collect()),
    });
    package.collect()
}

/// A library in this crate's dependencies either affects bytes, and is in LIBRARIES, or it is in `neutral.txt`, and
/// then its own dependencies do not affect bytes either.
#[test]
fn every_library_that_is_linked_is_in_the_cache_keys_or_decides_nothing() {
    let neutral: Vec<&str> = include_str!("neutral.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .flat_map(|line| line.split_once(": ").expect("a reason, then names").1.split(' '))
        .collect();
    let packages = packages();
    let (mut open, mut seen) = (vec!["ingest".to_owned()], BTreeSet::new());
    while let Some(need) = open.pop() {
        let (name, release) = need.split_once(' ').map_or((&*need, None), |(n, r)| (n, Some(r)));
        let fits = |it: &&Package| it.name == name && release.is_none_or(|is| it.release == is);
        for package in packages.iter().filter(fits) {
            let is_new = seen.insert((package.name.as_str(), package.release.as_str()));
            let ends = neutral.contains(&name) || (package.ours && name != "ingest");
            if is_new && !ends {
                open.extend(package.needs.iter().cloned());
            }
        }
    }
    let ours: Vec<&str> = packages.iter().filter(|it| it.ours).map(|it| it.name.as_str()).collect();
    let decides = |(name, _): &&(&str, &str)| !ours.contains(name) && !neutral.contains(name);
    let linked: Vec<(&str, &str)> = seen.iter().filter(decides).copied().collect();
    assert_eq!(
        linked,
        libraries(),
        "Cargo.lock has other libraries: write them into LIBRARIES, so that parts of earlier builds are made again, or into \
         versions/neutral.txt, with the reason why they decide no byte",
    );
    let stale = |name: &&&str| seen.iter().all(|(seen, _)| seen != *name);
    let stale: Vec<&&str> = neutral.iter().filter(stale).collect();
    assert!(stale.is_empty(), "versions/neutral.txt names what is not linked: {stale:?}");
}
