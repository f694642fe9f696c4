//! Compares the scan with brute-force searches: the same documents are kept, whatever the order of reading.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use contract::{Class, Fault, Key, Purpose, draw};
use proptest::prelude::*;
use serde_json::{Value, json};
use store::{Manifest, open};

use crate::build::{Options, build_while};
use crate::corpus::Corpus;
use crate::dedup::matches::{MATCHES_MAX, TEXT_MAX};
use crate::dedup::minhash::Functions;
use crate::dedup::normal;
use crate::dropped::each_of;
use crate::recipe::compare::Near;
use crate::recipe::tests::{balanced, built, kept};
use crate::sample;
use crate::testing::{IN_PARTS, Workbench, options, tree};
use crate::verify::verify;

/// Documents, many of which are copies of others, exact or with some words changed.
fn texts(seed: u64, count: u64) -> Vec<String> {
    let key = Key::from_seed(seed);
    let pick = |at: u64, of: u64| draw(key, Purpose::Generate, at) % of;
    let mut texts: Vec<String> = Vec::new();
    for index in 0..count {
        let at = index * 1000;
        let text = if index > 0 && pick(at, 3) > 0 {
            let original = texts[pick(at + 1, index) as usize].clone();
            let mut words: Vec<String> = original.split(' ').map(str::to_owned).collect();
            for edit in 0..[0, 1, 2, 8, 30][pick(at + 2, 5) as usize] {
                let place = pick(at + 10 + edit, words.len() as u64) as usize;
                words[place] = format!("new{}", pick(at + 500 + edit, 10_000));
            }
            words.join(" ")
        } else {
            let length = [3, 40, 80, 120][pick(at + 3, 4) as usize];
            let word = |i| format!("w{}", pick(at + 10 + i, 3000));
            (0..length).map(word).collect::<Vec<_>>().join(" ")
        };
        texts.push(text);
    }
    texts
}

fn lines(texts: &[String], first: usize) -> String {
    let line =
        |(at, text)| json!({"id": format!("d{:04}", first + at), "text": text}).to_string() + "\n";
    texts.iter().enumerate().map(line).collect()
}

/// The workbench's three files with `texts` in them, and a corpus with `steps`.
fn corpus(bench: &Workbench, texts: &[String], steps: &str) -> std::path::PathBuf {
    let (a, b) = (texts.len() / 2, texts.len() * 3 / 4);
    bench.write("web-0.jsonl", lines(&texts[..a], 0));
    bench.write("web-1.jsonl", lines(&texts[a..b], a));
    bench.write("math.jsonl", lines(&texts[b..], b));
    let path = bench.corpus(IN_PARTS);
    let text = fs::read_to_string(&path).unwrap();
    let text = text.replace("files = [\"math.jsonl\"]", "files = [\"math.jsonl\"]\nid = \"id\"");
    bench.write("corpus.toml", text + steps)
}

fn numbers(store: &Path, manifest: &Manifest) -> BTreeSet<usize> {
    let ids = [0, 1].map(|source| kept(store, manifest, source)).concat();
    ids.iter().map(|id| id[1..].parse().unwrap()).collect()
}

/// Which of `candidates` are kept if each component of `same` keeps its first.
fn firsts(candidates: &BTreeSet<usize>, same: impl Fn(usize, usize) -> bool) -> BTreeSet<usize> {
    let mut left = candidates.clone();
    let mut firsts = BTreeSet::new();
    while let Some(first) = left.pop_first() {
        firsts.insert(first);
        let mut open = vec![first];
        while let Some(next) = open.pop() {
            let found: Vec<usize> =
                left.iter().copied().filter(|other| same(next, *other)).collect();
            for found in found {
                left.remove(&found);
                open.push(found);
            }
        }
    }
    firsts
}

const BOTH: &str = "[[prepare]]\nstep = \"length\"\nmin_words = 10\n[[prepare]]\nstep = \"exact-duplicates\"\n\
                    [[prepare]]\nstep = \"near-duplicates\"\nwords = 3\nbands = 10\nrows = 4\n";

/// The step that removes bytes of kept documents.
const REPEATS: &str =
    "[[prepare]]\nstep = \"repeated-substrings\"\nmin_bytes = 30\npartition_bytes = 30000\n";

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]
    #[test]
    fn what_stays_is_what_a_search_says(seed: u64, across: bool, workers in 1usize..4) {
        let texts = texts(seed, 120);
        let bench = Workbench::new(1);
        let steps = BOTH.replace("exact-duplicates\"", &format!("exact-duplicates\"\nacross = {across}"));
        let steps = steps + &format!("across = {across}\n");
        let store = bench.path("store");
        let manifest = built(&corpus(&bench, &texts, &steps), &store, workers);
        balanced(&manifest);
        prop_assert_eq!(verify(&store, true).unwrap().damages, []);

        let source = |document: usize| usize::from(document >= texts.len() * 3 / 4);
        let comparable = |a, b| across || source(a) == source(b);
        let long: BTreeSet<usize> =
            (0..texts.len()).filter(|at| texts[*at].split(' ').count() >= 10).collect();
        let unique = firsts(&long, |a, b| comparable(a, b) && texts[a] == texts[b]);
        let near = Near { words: 3, bands: 10, rows: 4, seed: 1, across };
        let functions = Functions::new(&near);
        let bands: Vec<_> =
            texts.iter().map(|text| functions.bands(&normal::words(text)).unwrap()).collect();
        let close = |a: usize, b: usize| {
            comparable(a, b) && bands[a].iter().zip(&bands[b]).any(|(a, b)| a == b)
        };
        prop_assert_eq!(numbers(&store, &manifest), firsts(&unique, close));
        // The list names each, with the document that was kept instead.
        let listed: usize = ["web", "math"].iter().map(|name| removed(&store, name).len()).sum();
        prop_assert_eq!(listed, texts.len() - numbers(&store, &manifest).len());
    }

    #[test]
    fn kills_and_workers_leave_no_trace(kill in 1usize..400, workers in 1usize..4) {
        let texts = texts(5, 150);
        let bench = Workbench::new(1);
        let path = corpus(&bench, &texts, &[BOTH, REPEATS].concat());
        let (whole, killed) = (bench.path("whole"), bench.path("killed"));
        built(&path, &whole, 1);
        let request = Corpus::read(&path).unwrap();
        let mut left = kill;
        let outcome = build_while(&request, &killed, options(workers), || {
            left = left.saturating_sub(1);
            if left == 0 { Err(Fault::machine("killed")) } else { Ok(()) }
        });
        if outcome.is_err() {
            built(&path, &killed, workers);
        }
        prop_assert!(tree(&whole) == tree(&killed));
    }
}

/// The dropped records of a source.
fn removed(store: &Path, source: &str) -> Vec<Value> {
    let mut lines = Vec::new();
    each_of(store, &open::manifest(store).unwrap(), |of, line| {
        lines.extend((of.name == source).then(|| serde_json::to_value(line).unwrap()));
        Ok(())
    })
    .unwrap();
    lines
}

/// Runs of `n` words.
fn runs(text: &str, n: usize) -> BTreeSet<String> {
    let words: Vec<&str> = text.split(' ').collect();
    words.windows(n).map(|run| run.join(" ")).collect()
}

/// The Jaccard similarity of two sets.
fn jaccard(a: &BTreeSet<String>, b: &BTreeSet<String>) -> f64 {
    let both = a.intersection(b).count();
    both as f64 / (a.len() + b.len() - both).max(1) as f64
}

#[test]
fn similar_documents_go_and_others_stay() {
    let texts = texts(11, 400);
    let bench = Workbench::new(1);
    let steps = "[[prepare]]\nstep = \"near-duplicates\"\n";
    let store = bench.path("store");
    let manifest = built(&corpus(&bench, &texts, steps), &store, 2);
    let stay = numbers(&store, &manifest);
    let sets: Vec<_> = texts.iter().map(|text| runs(text, 5)).collect();
    let (mut missed, mut pairs, mut lonely) = (0, 0, 0);
    for b in (0..texts.len()).filter(|b| !sets[*b].is_empty()) {
        let similar: Vec<f64> = sets.iter().map(|other| jaccard(other, &sets[b])).collect();
        for (a, similarity) in similar[..b].iter().enumerate().filter(|(_, s)| **s >= 0.9) {
            pairs += 1;
            missed += usize::from(stay.contains(&a) && stay.contains(&b) && *similarity >= 0.9);
        }
        let others = similar.iter().enumerate().filter(|(a, _)| *a != b).map(|(_, s)| *s);
        let closest = others.fold(0.0, f64::max);
        lonely += usize::from(!stay.contains(&b) && closest < 0.5);
    }
    // By the formula, a pair of similarity 0.9 is missed once in 2,600, one of 0.5 is found once in 19.
    assert!(pairs > 20 && missed == 0, "{missed} of {pairs} similar pairs stay");
    assert!(lonely <= 2, "{lonely} documents went that resemble nothing");
}

#[test]
fn evaluation_items_are_found_and_reported() {
    let bench = Workbench::new(1);
    let question = "How many apples does Mary have left if she gives three of her twelve apples to John today?";
    let items = [json!({"q": question, "a": "nine"}), json!({"q": "What is this?", "a": "short"})];
    bench.write("eval/set.jsonl", items.iter().map(|item| format!("{item}\n")).collect::<String>());
    let texts = [
        "Nothing in common with any question of the set, however long it may go on and on."
            .to_owned(),
        format!("Exercise 7. {} Think first.", question.to_uppercase().replace(' ', "\n")),
        "How many apples does Mary have left if she gives two of her pears away?".to_owned(),
        format!("{question} nine"),
        "Of apples and pears nothing more is said here.".to_owned(),
    ];
    let steps = "[[prepare]]\nstep = \"decontaminate\"\nfiles = [\"eval/*.jsonl\"]\ntemplate = \"{q} {a}\"\n";
    let path = corpus(&bench, &texts, steps);
    let store = bench.path("store");
    let manifest = built(&path, &store, 2);
    balanced(&manifest);
    assert_eq!(numbers(&store, &manifest), BTreeSet::from([0, 2, 4]));
    let hits = fs::read_to_string(store.join("web/contaminated.jsonl")).unwrap();
    let [hit] = &hits.lines().collect::<Vec<_>>()[..] else { panic!("{hits}") };
    let hit: Value = serde_json::from_str(hit).unwrap();
    assert_eq!((&hit["id"], &hit["row"], &hit["file"]), (&json!("d0001"), &json!(2), &json!(0)));
    assert_eq!(
        (&hit["set"], &hit["item"], &hit["runs"]),
        (&json!("eval/set.jsonl"), &json!(1), &json!(6))
    );
    let shared = question.to_uppercase().replace(' ', "\n");
    assert_eq!(hit["text"], shared.trim_end_matches('?'));
    assert_eq!(
        fs::read_to_string(store.join("math/contaminated.jsonl")).unwrap().lines().count(),
        1
    );
    assert_eq!(
        manifest.sources[0].dropped[0].reason,
        "decontaminate: shared with an evaluation set"
    );
    // Another item makes another request; the same item in another file does not.
    fs::rename(bench.path("eval/set.jsonl"), bench.path("eval/renamed.jsonl")).unwrap();
    let again = |name: &str| built(&path, &bench.path(name), 1).digest;
    assert_eq!(again("renamed"), manifest.digest);
    bench.write("eval/renamed.jsonl", "{\"q\": \"another\", \"a\": \"set\"}\n");
    assert_ne!(again("changed"), manifest.digest);
    // An invalid item stops a build, whatever `on_error` says, and so does a step that could find nothing.
    for (set, told, help) in [
        ("{\"q\": \"no answer\"}\n", "renamed.jsonl:1: ", "`template` names the fields"),
        ("no item\n", "renamed.jsonl:1: ", "remove this evaluation item"),
        ("{\"q\": \"\", \"a\": \"\"}\n", "renamed.jsonl:1: ", "remove this evaluation item"),
        ("\n", "renamed.jsonl: ", "hold no item"),
    ] {
        bench.write("eval/renamed.jsonl", set);
        let request = Corpus::read(&path).unwrap();
        let fault = build_while(&request, &bench.path("x"), options(1), || Ok(())).unwrap_err();
        let (class, fault) = (fault.class(), fault.to_string());
        assert!(fault.contains(told) && fault.contains(help), "{fault}");
        assert_eq!(class, Class::Data);
    }
}

#[test]
fn what_is_told_of_matches_is_bounded() {
    let bench = Workbench::new(1);
    let shared = |item: usize| (0..20).map(|word| format!("i{item}w{word} ")).collect::<String>();
    let items = MATCHES_MAX + 20;
    let set = (0..items).map(|item| json!({"text": shared(item)}).to_string() + "\n");
    let long = "again ".repeat(TEXT_MAX);
    let long_item = json!({"text": long}).to_string() + "\n";
    bench.write("eval.jsonl", long_item + &set.collect::<String>());
    let clean = |name: &str| format!("clean {name}");
    let dirty = long + &(0..items).map(shared).collect::<String>();
    let texts = [dirty, clean("one"), clean("two"), clean("three")];
    let steps = "[[prepare]]\nstep = \"decontaminate\"\nfiles = [\"eval.jsonl\"]\n";
    let store = bench.path("store");
    built(&corpus(&bench, &texts, steps), &store, 2);
    let told = fs::read_to_string(store.join("web/contaminated.jsonl")).unwrap();
    let lines: Vec<Value> = told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // The first items, in order.
    let told: Vec<u64> = lines.iter().map(|line| line["item"].as_u64().unwrap()).collect();
    assert_eq!(told, (1..=MATCHES_MAX as u64).collect::<Vec<_>>());
    let longest = lines.iter().map(|line| line["text"].as_str().unwrap().len()).max();
    assert_eq!(longest, Some(TEXT_MAX));
}

#[test]
fn a_decision_that_cannot_be_read_is_no_reason_for_another() {
    let bench = Workbench::new(1);
    let path = corpus(&bench, &texts(3, 40), BOTH);
    let (store, work) = (bench.path("store"), bench.path("work"));
    let request = Corpus::read(&path).unwrap();
    // Killed while encoding, after every document was scanned and the decision was made.
    let mut left = 42;
    let options = Options { work: Some(work.clone()), ..options(1) };
    build_while(&request, &store, options.clone(), || {
        left -= 1;
        if left == 0 { Err(Fault::machine("killed")) } else { Ok(()) }
    })
    .unwrap_err();
    let plan = fs::read_dir(&work).unwrap().map(|entry| entry.unwrap().path());
    let plan = plan.filter(|path| path.join("decided").is_dir()).collect::<Vec<_>>();
    let decision = plan[0].join("decided/scan.json");
    // A folder in its place can be opened, but not read.
    fs::remove_file(&decision).unwrap();
    fs::create_dir(&decision).unwrap();
    let fault = build_while(&request, &store, options, || Ok(())).unwrap_err();
    let fault = fault.to_string();
    assert!(fault.contains("scan.json") && fault.contains("cannot read"), "{fault}");
}

#[test]
fn a_sample_tells_what_became_of_each_document() {
    let bench = Workbench::new(1);
    let mut texts = texts(9, 120);
    texts[7] += " \r\n\0";
    let steps = [BOTH, REPEATS].concat();
    let steps = steps.replacen("[[prepare]]", "[[prepare]]\nstep = \"clean\"\n[[prepare]]", 1);
    let path = corpus(&bench, &texts, &steps);
    let store = bench.path("store");
    let manifest = built(&path, &store, 2);
    let request = Corpus::read(&path).unwrap();
    let draw =
        |count, seed| sample::sample(&request, &(&store).into(), &manifest, count, seed).unwrap();
    let all = draw(1000, 0);
    assert_eq!(all.len(), texts.len());
    let dropped = |reason: &str| {
        all.iter().filter(|s| s.outcome.starts_with(&format!("dropped: {reason}"))).count()
    };
    for source in &manifest.sources {
        let outcome = |outcome: &str| {
            let own = all.iter().filter(|sampled| sampled.source == source.name);
            own.filter(|sampled| sampled.outcome == outcome).count() as u64
        };
        assert_eq!(outcome("train"), source.train.documents);
        assert_eq!(outcome("validation"), source.validation.documents);
    }
    for reason in ["exact", "near", "length"] {
        let counts = manifest.sources.iter().flat_map(|source| &source.dropped);
        let counted = counts
            .filter(|dropped| dropped.reason.starts_with(reason))
            .map(|dropped| dropped.documents);
        assert_eq!(dropped(reason) as u64, counted.sum::<u64>(), "{reason}");
        assert!(dropped(reason) > 0, "{reason}");
    }
    let tokens: usize = all.iter().filter_map(|sampled| sampled.tokens).sum();
    let stored = manifest.sources.iter().flat_map(|source| [&source.train, &source.validation]);
    assert_eq!(tokens as u64, stored.map(|stream| stream.tokens).sum::<u64>());
    let told = sample::text(&all);
    let changes = manifest.sources.iter().filter_map(|source| source.prepared.as_ref());
    let cut =
        |change: &store::Change| change.step == "05 repeated-substrings" && change.removed > 0;
    assert!(changes.flat_map(|prepared| &prepared.changes).any(cut));
    balanced(&manifest);
    for word in ["01 clean", "changed", "05 repeated", "(web web-0.jsonl row ", "= train, "] {
        assert!(told.contains(word), "no {word:?} in {told}");
    }
    // Sampling is keyed: the same again, and other records with another seed.
    let places = |sample: &[sample::Sampled]| {
        sample.iter().map(|s| (s.file.clone(), s.row)).collect::<Vec<_>>()
    };
    assert_eq!(places(&draw(9, 3)), places(&draw(9, 3)));
    assert_ne!(places(&draw(9, 3)), places(&draw(9, 4)));
    assert_eq!(draw(9, 3).len(), 9);
    let other = Corpus::read(bench.corpus("")).unwrap();
    assert!(sample::sample(&other, &(&store).into(), &manifest, 1, 0).is_err());
}

#[test]
fn a_record_that_is_none_stops_the_scan_or_is_counted() {
    let bench = Workbench::new(1);
    let texts = texts(3, 40);
    let path = corpus(&bench, &texts, BOTH);
    bench.write("web-1.jsonl", lines(&texts[20..30], 20) + "{\"text\": 7}\n");
    let request = Corpus::read(&path).unwrap();
    let store = bench.path("store");
    let fault = build_while(&request, &store, options(2), || Ok(())).unwrap_err().to_string();
    assert!(fault.contains("web-1.jsonl:11"), "{fault}");
    let text = fs::read_to_string(&path).unwrap();
    let path = bench.write("skip.toml", format!("on_error = \"skip\"\n{text}"));
    let manifest = built(&path, &bench.path("skipped"), 2);
    balanced(&manifest);
    assert!(manifest.sources[0].dropped.iter().any(|dropped| dropped.reason == "missing text"));
}

#[test]
fn a_damaged_list_is_found() {
    let bench = Workbench::new(1);
    let store = bench.path("store");
    built(&corpus(&bench, &texts(3, 40), BOTH), &store, 1);
    let path = store.join("web/00000/dropped.jsonl.zst");
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();
    let damages = verify(&store, true).unwrap().damages;
    assert_eq!(damages.len(), 1);
    assert_eq!(damages[0].file, "web/00000/dropped.jsonl.zst");
    fs::remove_file(&path).unwrap();
    assert_eq!(verify(&store, true).unwrap().damages.len(), 1);
}

#[test]
fn an_input_that_changes_after_the_scan_is_noticed() {
    let bench = Workbench::new(1);
    let texts = texts(3, 40);
    let path = corpus(&bench, &texts, BOTH);
    let store = bench.path("store");
    let request = Corpus::read(&path).unwrap();
    let mut left = 42;
    let outcome = build_while(&request, &store, options(1), || {
        left -= 1;
        if left == 0 {
            bench.write("math.jsonl", lines(&texts[..3], 0));
            bench.own_document();
        }
        Ok(())
    });
    let fault = outcome.unwrap_err();
    assert!(
        fault.class() == Class::Mismatch && fault.to_string().contains("math.jsonl"),
        "{fault}"
    );
    // The same command again scans it anew.
    built(&path, &store, 1);
    built(&path, &bench.path("fresh"), 1);
    assert!(tree(&store) == tree(&bench.path("fresh")));
}
