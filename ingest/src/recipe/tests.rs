//! Whole builds with steps: what the corpus file may contain, the accounting, and what must have no influence.

use std::fs;
use std::path::Path;

use contract::Fault;
use proptest::prelude::*;
use serde_json::json;
use store::documents::Documents;
use store::{Manifest, Split, open};

use super::Step;
use super::compare::Compare;
use crate::build::{Outcome, build, build_while};
use crate::corpus::Corpus;
use crate::dedup::{Tools, normal};
use crate::filters::words::Text;
use crate::inspect::{self, Accounting, Bytes};
use crate::testing::{IN_PARTS, Workbench, options, tree};
use crate::verify::verify;

pub(crate) fn built(corpus: &Path, store: &Path, workers: usize) -> Manifest {
    match build(&Corpus::read(corpus).unwrap(), store, options(workers)).unwrap() {
        Outcome::Built { manifest, .. } => manifest,
        Outcome::UpToDate(_) => panic!("there was a store already"),
    }
}

fn refused(corpus: &Path) -> Fault {
    Corpus::read(corpus).map(drop).unwrap_err()
}

/// The ids of the documents of a source that were kept.
pub(crate) fn kept(store: &Path, manifest: &Manifest, source: usize) -> Vec<String> {
    let record = &manifest.sources[source];
    let mut ids = Vec::new();
    for split in Split::ALL {
        for shard in &record.stream(split).shards {
            let name = &shard.document_file.name;
            let file = open::part_file(store, &record.name, shard.part, name);
            let rows = Documents::open(&file).unwrap();
            ids.extend(rows.map(|row| row.unwrap().shown_id().into_owned()));
        }
    }
    ids.sort();
    ids
}

#[track_caller]
pub(crate) fn balanced(manifest: &Manifest) {
    for source in &manifest.sources {
        assert_eq!(Accounting::of(source).balance(), 0, "{source:?}");
        if let Some(bytes) = Bytes::of(source) {
            assert_eq!(bytes.balance(), 0, "{source:?}");
        }
    }
}

/// Prose of some length, with a defect chosen by `index`.
fn page(index: u64) -> String {
    let prose = "The river rises in the hills, and it runs for ninety miles to the sea. Its water is clear \
                 and cold, and trout live in it. Two mills used to stand on its banks; both burned down long \
                 ago, and nobody has built another. In summer the children of the village swim there with \
                 their dogs. In winter it freezes, and that is when the old men come out to fish.";
    let text = match index % 6 {
        0 => "Too short to be of use.".to_owned(),
        1 => "never never never again ".repeat(40),
        2 => format!("{prose}\r\nCafe\u{301} number {index}.\r\n"),
        _ => format!("{prose} This is page number {index}."),
    };
    json!({"id": format!("p{index}"), "text": text}).to_string() + "\n"
}

fn pages(bench: &Workbench, count: u64) {
    bench.write("web-0.jsonl", (0..count).map(page).collect::<String>());
    bench.write("web-1.jsonl", (count..count + count / 2).map(page).collect::<String>());
}

const STEPS: &str = "[[prepare]]\nstep = \"clean\"\n[[prepare]]\nstep = \"gopher-quality\"\nsources = [\"web\"]\n\
                     min_words = 40\n[[prepare]]\nstep = \"gopher-repetition\"\nsources = [\"web\"]\n";

#[test]
fn every_document_is_kept_or_dropped_for_a_reason() {
    let bench = Workbench::new(30);
    pages(&bench, 60);
    let corpus = bench.corpus("on_error = \"stop\"\npart_bytes = 4000");
    let text = fs::read_to_string(&corpus).unwrap() + STEPS;
    fs::write(&corpus, text).unwrap();
    let store = bench.path("store");
    let manifest = built(&corpus, &store, 2);
    balanced(&manifest);
    assert_eq!(verify(&store, true).unwrap().damages, []);
    let wanted = (0..90).filter(|index| index % 6 > 1).map(|index| format!("p{index}"));
    let mut wanted: Vec<String> = wanted.collect();
    wanted.sort();
    assert_eq!(kept(&store, &manifest, 0), wanted);
    let dropped: Vec<_> = manifest.sources[0]
        .dropped
        .iter()
        .map(|dropped| (dropped.reason.as_str(), dropped.documents))
        .collect();
    assert_eq!(
        dropped,
        [("gopher-quality: few stop words", 15), ("gopher-quality: too few words", 15)]
    );
    let prepared = manifest.sources[0].prepared.as_ref().unwrap();
    // Cafe + combining mark becomes one letter (one byte less), and two line ends lose a byte each.
    let [change] = &prepared.changes[..] else { panic!("{prepared:?}") };
    assert_eq!((change.step.as_str(), change.documents), ("01 clean", 15));
    assert_eq!((change.added, change.removed), (0, 45));
    let told = inspect::text(&store, &manifest);
    for word in
        ["15 gopher-quality: few stop words", "step 01 clean: changed 15 documents", "balance 0"]
    {
        assert!(told.contains(word), "{told}");
    }
}

#[test]
fn steps_are_part_of_the_identity_and_nothing_else_is() {
    let bench = Workbench::new(40);
    let plain = bench.corpus("");
    let text = fs::read_to_string(&plain).unwrap();
    let mut digests = Vec::new();
    for (index, steps) in [
        "",
        "[[prepare]]\nstep = \"clean\"\n",
        "[[prepare]]\nstep = \"clean\"\nunicode = \"NFC\"\nsources = [\"math\", \"web\"]\n",
        "[[prepare]]\nstep = \"clean\"\nunicode = false\n",
        "[[prepare]]\nstep = \"length\"\nmin_bytes = 1\n",
        "[[prepare]]\nstep = \"length\"\nmin_bytes = 1\nmax_words = false\n",
    ]
    .into_iter()
    .enumerate()
    {
        fs::write(&plain, format!("{text}{steps}")).unwrap();
        let manifest = built(&plain, &bench.path(&format!("store-{index}")), 2);
        balanced(&manifest);
        assert_eq!(manifest.sources[0].prepared.is_some(), index > 0);
        assert_eq!(manifest.sources[0].preparation.contains(" | "), index > 0);
        digests.push((manifest.digest, manifest.request));
    }
    assert_eq!(digests[1], digests[2]);
    assert_eq!(digests[4], digests[5]);
    let different: std::collections::BTreeSet<_> = digests.iter().collect();
    assert_eq!(different.len(), 4);
}

#[test]
fn templates_and_chats_become_text() {
    let bench = Workbench::new(5);
    let row =
        |i: u32| json!({"question": format!("What is {i}?"), "answer": i, "n": null}).to_string();
    bench.write("qa.jsonl", (0..20).map(|i| row(i) + "\n").collect::<String>());
    let chat = |i: u32| {
        json!({"id": i, "chat": [{"role": "user", "content": "hi"},
                                 {"role": "assistant", "content": format!("number {i}")}]})
    };
    bench.write("chat.jsonl", (0..20).map(|i| chat(i).to_string() + "\n").collect::<String>());
    let corpus = bench.write(
        "qa.toml",
        "tokenizer = \"tokenizer.json\"\nvalidation = 0\nunit = 64\n\
         [[source]]\nname = \"qa\"\nfiles = [\"qa.jsonl\"]\ntemplate = \"Q: {question}\\nA: {answer}\"\n\
         [[source]]\nname = \"chat\"\nfiles = [\"chat.jsonl\"]\nchat = \"chat\"\nid = \"id\"\n",
    );
    let store = bench.path("store");
    let manifest = built(&corpus, &store, 2);
    balanced(&manifest);
    let question = |i: u32| format!("Q: What is {i}?\nA: {i}").len() as u64;
    assert_eq!(manifest.sources[0].train.text_bytes, (0..20).map(question).sum::<u64>());
    let chat = |i: u32| format!("<|user|>\nhi\n<|assistant|>\nnumber {i}\n").len() as u64;
    assert_eq!(manifest.sources[1].train.text_bytes, (0..20).map(chat).sum::<u64>());
    // A field that is null makes a record without text: the build stops there, with the place.
    let wrong = fs::read_to_string(&corpus).unwrap().replace("{answer}", "{n}");
    let corpus = bench.write("wrong.toml", wrong);
    let fault =
        build(&Corpus::read(&corpus).unwrap(), &bench.path("other"), options(2)).unwrap_err();
    let fault = fault.to_string();
    assert!(fault.contains("qa.jsonl:1") && fault.contains("`n`"), "{fault}");
}

#[test]
fn wrong_keys_are_refused_with_their_line() {
    let bench = Workbench::new(5);
    let plain = fs::read_to_string(bench.corpus("")).unwrap();
    for (steps, words) in [
        ("[[prepare]]\n", &["no `step`", "gopher-quality"][..]),
        ("[prepare]\nstep = \"clean\"\n", &["a list"]),
        ("[[prepare]]\nstep = \"gopher-qualty\"\n", &["gopher-quality", ":14"]),
        ("[[prepare]]\nstep = \"gopher-quality\"\nmin_wrods = 3\n", &["`min_words`", ":15"]),
        (
            "[[prepare]]\nstep = \"gopher-quality\"\nmin_words = \"many\"\n",
            &["min_words", "false", ":15"],
        ),
        ("[[prepare]]\nstep = \"gopher-quality\"\nmin_words = -1\n", &["min_words"]),
        ("[[prepare]]\nstep = \"clean\"\nunicode = \"NFD\"\n", &["unicode", "NFD"]),
        ("[[prepare]]\nstep = \"clean\"\nline_ends = 1\n", &["line_ends", "true or false"]),
        // Searching for empty markers in a text would never end.
        ("[[prepare]]\nstep = \"trim\"\nopen = \"\"\n", &["`open` is empty", ":15", "<think>"]),
        (
            "[[prepare]]\nstep = \"repeated-substrings\"\n[[prepare]]\nstep = \"exact-duplicates\"\n",
            &["exact-duplicates comes after", "last"],
        ),
        ("[[prepare]]\nstep = \"repeated-substrings\"\nmin_bytes = 0\n", &["min_bytes from 1"]),
        ("[[prepare]]\nstep = \"trim\"\nclose = \"\"\n", &["`close` is empty", ":15"]),
        ("[[prepare]]\nstep = \"clean\"\nsources = [\"wed\"]\n", &["wed", "web"]),
        ("[[prepare]]\nstep = \"clean\"\nsources = [\"web\", \"web\"]\n", &["twice"]),
        (
            "[[source]]\nname = \"x\"\nfiles = [\"math.jsonl\"]\ntemplate = \"text\"\n",
            &["no field"],
        ),
        ("[[source]]\nname = \"x\"\nfiles = [\"math.jsonl\"]\nmessage = \"{a}\"\n", &["chat"]),
        (
            "[[source]]\nname = \"x\"\nfiles = [\"math.jsonl\"]\ntemplate = \"{a}\"\nchat = \"m\"\n",
            &["exclude"],
        ),
        (
            "[[source]]\nname = \"x\"\nfiles = [\"math.jsonl\"]\ntemplate = \"{a}\"\ntext = \"m\"\n",
            &["exclude"],
        ),
        (
            "[[source]]\nname = \"x\"\nfiles = [\"tokenizer.json\"]\nformat = \"text\"\ntemplate = \"{a}\"\n",
            &["JSON Lines"],
        ),
    ] {
        let corpus = bench.write("wrong.toml", format!("{plain}{steps}"));
        let fault = refused(&corpus).to_string();
        for word in words {
            assert!(fault.contains(word), "no {word:?} in {fault}");
        }
    }
}

#[test]
fn no_text_is_a_cliff() {
    let bench = Workbench::new(1);
    bench.write("eval.jsonl", json!({"text": "a ".repeat(3000)}).to_string() + "\n");
    // `trim` is for chats.
    let steps = crate::corpus::STEPS.into_iter().filter(|step| *step != "trim");
    let extra = |step: &str| match step {
        "clean" => "trailing_space = true\nmax_empty_lines = 1\n",
        "decontaminate" => "files = [\"eval.jsonl\"]\n",
        _ => "",
    };
    let tables = |step: &str| format!("[[prepare]]\nstep = \"{step}\"\n{}", extra(step));
    let path = bench.corpus("");
    let text = fs::read_to_string(&path).unwrap() + &steps.map(tables).collect::<String>();
    fs::write(&path, text).unwrap();
    let corpus = Corpus::read(&path).unwrap();
    let tools = Tools::new(&corpus, None).unwrap();
    let signs = [
        "a",
        "-",
        "a-",
        "5-",
        "5--x",
        ".",
        "a.",
        "(",
        "'s",
        "[1",
        "{",
        "...",
        "a ",
        "a\n",
        "\n",
        "- \n",
        "5km",
        "\u{e9}",
        "\u{301}",
        "\u{200d}",
        "\u{1f600}\u{200d}",
        "\u{4e2d}",
        "\u{feff}",
        "\r",
    ];
    let begun = std::time::Instant::now();
    for sign in signs {
        // With quadratic steps such a text would take minutes.
        let text = format!("x{}", sign.repeat(300_000 / sign.len()));
        for (number, step) in &corpus.sources[0].recipe.steps {
            match step {
                Step::Compare(Compare::Near(_)) => {
                    let part = &text[..text.floor_char_boundary(text.len() / 10)];
                    tools.functions(*number).unwrap().bands(&normal::words(part));
                }
                Step::Compare(Compare::Decontaminate(_)) => {
                    drop(tools.index(*number).unwrap().matches(&text));
                }
                Step::Compare(Compare::Exact(_) | Compare::Repeats(_)) => {}
                Step::Filter(filter) => drop(filter.run(&Text::new(&text), None).unwrap()),
            }
        }
    }
    assert!(begun.elapsed().as_secs() < 60, "{:?}", begun.elapsed());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]
    #[test]
    fn workers_and_kills_leave_no_trace(kill in 1usize..200, workers in 1usize..5) {
        let bench = Workbench::new(12);
        pages(&bench, 120);
        let corpus = bench.corpus(IN_PARTS);
        fs::write(&corpus, fs::read_to_string(&corpus).unwrap() + STEPS).unwrap();
        let (whole, killed) = (bench.path("whole"), bench.path("killed"));
        built(&corpus, &whole, 1);
        let request = Corpus::read(&corpus).unwrap();
        let mut left = kill;
        let outcome = build_while(&request, &killed, options(workers), || {
            left = left.saturating_sub(1);
            if left == 0 { Err(Fault::machine("killed")) } else { Ok(()) }
        });
        prop_assert_eq!(outcome.is_err(), left == 0);
        if left == 0 {
            built(&corpus, &killed, workers);
        }
        prop_assert!(tree(&whole) == tree(&killed));
    }
}
