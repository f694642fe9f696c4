//! Whole builds: workers, kills, cuts, refusals, and the accounting.

use std::fs;
use std::path::Path;

use contract::{Class, Fault, Result};
use proptest::prelude::*;
use store::documents::Documents;
use store::{Manifest, Split, open};

use crate::build::{Options, Outcome, build, build_while};
use crate::corpus::Corpus;
use crate::dropped;
use crate::inspect::{self, Accounting};
use crate::testing::{IN_PARTS, Workbench, document, json_lines, options, tree};
use crate::tokenize::{Engine, Tokenizer};
use crate::verify::verify;

mod cut;
mod kept;

fn built(corpus: &Path, store: &Path, workers: usize) -> Manifest {
    match build(&Corpus::read(corpus).unwrap(), store, options(workers)).unwrap() {
        Outcome::Built { manifest, .. } => manifest,
        Outcome::UpToDate(_) => panic!("there was a store already"),
    }
}

fn refused(corpus: &Path, store: &Path) -> Fault {
    match Corpus::read(corpus).and_then(|corpus| build(&corpus, store, options(1))) {
        Ok(_) => panic!("this build should have been refused"),
        Err(fault) => fault,
    }
}

#[track_caller]
fn same(a: &Path, b: &Path) {
    let (a, b) = (tree(a), tree(b));
    let names = |tree: &[(std::path::PathBuf, Vec<u8>)]| {
        tree.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&a), names(&b));
    for ((name, left), (_, right)) in a.iter().zip(&b) {
        assert!(left == right, "{} differs", name.display());
    }
}

/// The stored tokens of a stream, read by the Arrow library.
fn tokens(store: &Path, manifest: &Manifest, source: usize, split: Split) -> Vec<u32> {
    use arrow::array::AsArray as _;
    let record = &manifest.sources[source];
    let stream = if split == Split::Train { &record.train } else { &record.validation };
    let mut all = Vec::new();
    for shard in &stream.shards {
        let folder = open::part_folder(store, &record.name, shard.part);
        let path = folder.join(&shard.token_file.name);
        let file = fs::File::open(path).unwrap();
        for batch in arrow::ipc::reader::FileReader::try_new(file, None).unwrap() {
            let batch = batch.unwrap();
            let column = batch.column(0).as_primitive::<arrow::datatypes::UInt16Type>();
            all.extend(column.values().iter().map(|id| u32::from(*id)));
        }
    }
    all
}

#[test]
fn workers_leave_no_trace() {
    let bench = Workbench::new(900);
    let corpus = bench.corpus(IN_PARTS);
    let stores = [1, 2, 7].map(|workers| {
        let store = bench.path(&format!("store-{workers}"));
        built(&corpus, &store, workers);
        assert_eq!(verify(&store, true).unwrap().damages, []);
        store
    });
    same(&stores[0], &stores[1]);
    same(&stores[0], &stores[2]);
}

#[test]
fn the_store_holds_what_the_tokenizer_gives() {
    let bench = Workbench::new(200);
    let store = bench.path("store");
    let manifest = built(&bench.corpus(IN_PARTS), &store, 2);
    let bytes = fs::read(bench.path("tokenizer.json")).unwrap();
    let reference = Tokenizer::new(bytes, Engine::Reference).unwrap();
    // The documents of a source in input order, split as their provenance says.
    for (source, first, count) in [(0, 0u64, 300u64), (1, 1_000_000, 66)] {
        let record = &manifest.sources[source];
        let mut seen = Vec::new();
        for (split, stream) in
            [(Split::Train, &record.train), (Split::Validation, &record.validation)]
        {
            let (mut wanted, mut end) = (Vec::new(), 0);
            for shard in &stream.shards {
                let name = &shard.document_file.name;
                let file = open::part_file(&store, &record.name, shard.part, name);
                for row in Documents::open(&file).unwrap() {
                    let row = row.unwrap();
                    let index = match source {
                        0 => row.id.unwrap()[1..].parse::<u64>().unwrap(),
                        _ => first + row.row - 1,
                    };
                    assert_eq!(shard.first_token + row.first_token, end);
                    end += row.tokens;
                    wanted.extend(reference.encode(&document(index)).unwrap());
                    wanted.push(256);
                    seen.push(index);
                }
            }
            assert_eq!(tokens(&store, &manifest, source, split), wanted);
        }
        seen.sort_unstable();
        assert_eq!(seen, (first..first + count).collect::<Vec<_>>());
    }
}

/// A user's own folder with the name of the folder of parts.
#[test]
fn what_lies_where_parts_belong_is_not_removed() {
    let bench = Workbench::new(30);
    let corpus = Corpus::read(bench.corpus(IN_PARTS)).unwrap();
    let (store, work) = (bench.path("store"), bench.path("store.work"));
    fs::create_dir(&work).unwrap();
    let thesis = work.join("thesis.txt");
    fs::write(&thesis, "years of work").unwrap();
    let fault = build(&corpus, &store, options(1)).unwrap_err();
    assert_eq!(fault.class(), contract::Class::Usage);
    assert!(fault.to_string().contains("thesis.txt"), "{fault}");
    assert!(thesis.exists() && !store.exists());
    // A folder becomes a cache only while it is empty, even if its entries have our names.
    for name in ["plan.json", "parts/.git", "parts/x.bin"] {
        let file = bench.write(&format!("store.work/{name}"), "mine");
        fs::rename(&thesis, bench.path("thesis")).unwrap();
        for work in [None, Some(work.clone())] {
            let refused = build(&corpus, &store, Options { work, ..options(1) }).unwrap_err();
            assert_eq!(refused.class(), contract::Class::Usage, "{refused}");
        }
        assert!(file.exists() && !store.exists());
        fs::remove_dir_all(&work).unwrap();
        bench.write("store.work/thesis.txt", "years of work");
    }
    // A build that was killed at its end left its parts, and the user put files next to them.
    fs::remove_file(&thesis).unwrap();
    assert_eq!(killed_at(&corpus, &store, 40), 1);
    let left = fs::read_dir(work.join("parts")).unwrap().next().unwrap().unwrap().path();
    fs::write(&thesis, "years of work").unwrap();
    let own = [thesis, work.join("plan-b.txt"), work.join("parts/x.bin"), work.join("parts/.env")];
    own.iter().for_each(|file| fs::write(file, "mine").unwrap());
    build(&corpus, &store, options(1)).unwrap();
    assert!(own.iter().all(|file| file.exists()) && !left.exists());
    fs::copy(bench.path("web-0.jsonl"), &left).unwrap();
    assert!(matches!(build(&corpus, &store, options(1)).unwrap(), Outcome::UpToDate(_)));
    assert!(own.iter().all(|file| file.exists()) && !left.exists());
    own.iter().for_each(|file| fs::remove_file(file).unwrap());
    build(&corpus, &store, options(1)).unwrap();
    assert!(!work.exists(), "an own folder goes");
}

/// A store appears by a rename, which a link would prevent: this is reported before the work.
#[test]
fn a_link_is_no_place_for_a_store() {
    use std::os::unix::fs::symlink;

    let bench = Workbench::new(30);
    let corpus = Corpus::read(bench.corpus("")).unwrap();
    let link = bench.path("link");
    for target in ["real", "nowhere"] {
        fs::create_dir_all(bench.path("real")).unwrap();
        symlink(target, &link).unwrap();
        let fault = build(&corpus, &link, options(1)).map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Usage);
        let told = fault.to_string();
        assert!(told.contains("a link to") && told.contains(target), "{told}");
        assert!(!bench.path("link.work").exists() && !bench.path("link.partial").exists());
        fs::remove_file(&link).unwrap();
    }
    // A link to an existing store is followed.
    build(&corpus, &bench.path("store"), options(1)).unwrap();
    symlink("store", &link).unwrap();
    assert!(matches!(build(&corpus, &link, options(1)).unwrap(), Outcome::UpToDate(_)));
}

#[test]
fn the_cut_leaves_no_trace_in_the_digest() {
    let bench = Workbench::new(300);
    let mut digests = Vec::new();
    for (index, cut) in ["", IN_PARTS, "part_bytes = 40000"].into_iter().enumerate() {
        let manifest = built(&bench.corpus(cut), &bench.path(&index.to_string()), 2);
        assert_eq!(manifest.sources[0].train.shards.len() > 1, index > 0);
        digests.push((manifest.digest, manifest.request));
    }
    assert!(digests.iter().all(|pair| *pair == digests[0]), "{digests:?}");
}

#[test]
fn equal_documents_are_on_one_side() {
    let bench = Workbench::new(700);
    let store = bench.path("store");
    let manifest = built(&bench.corpus(""), &store, 2);
    // Ninety-seven different texts, each several times, in both sources.
    let mut sides = std::collections::BTreeMap::new();
    for source in &manifest.sources {
        for split in Split::ALL {
            let name = format!("documents-{}-00000.parquet", split.name());
            let file = open::part_file(&store, &source.name, 0, &name);
            for row in Documents::open(&file).unwrap() {
                let row = row.unwrap();
                let text = match row.shown_id().strip_prefix('d') {
                    Some(index) => index.parse::<u64>().unwrap() % 97,
                    None => (1_000_000 + row.row - 1) % 97,
                };
                assert_eq!(*sides.entry(text).or_insert(split), split, "{}", row.shown_id());
            }
        }
    }
    assert_eq!(sides.len(), 97);
    assert!(sides.values().any(|side| *side == Split::Validation));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn kills_leave_no_trace(moments in prop::collection::vec(0u32..900, 1..4), cut in 3000u32..30_000) {
        let bench = Workbench::new(500);
        let corpus = bench.corpus(&format!("part_bytes = {cut}"));
        let corpus = Corpus::read(&corpus).unwrap();
        let (whole, killed) = (bench.path("whole"), bench.path("killed"));
        build(&corpus, &whole, options(2)).unwrap();
        for moment in moments {
            let mut left = moment;
            let stop = || -> Result<()> {
                left = left.checked_sub(1).ok_or_else(|| Fault::machine("killed"))?;
                Ok(())
            };
            match build_while(&corpus, &killed, options(2), stop) {
                Ok(_) => break,
                Err(fault) => prop_assert_eq!(fault, Fault::machine("killed")),
            }
            prop_assert!(!killed.exists());
        }
        build(&corpus, &killed, options(1)).unwrap();
        prop_assert_eq!(tree(&whole), tree(&killed));
        prop_assert!(!bench.path("killed.work").exists());
    }
}

/// Kills a build at a document; returns how many parts it leaves.
fn killed_at(corpus: &Corpus, store: &Path, document: usize) -> usize {
    let mut left = document;
    let stopped = build_while(corpus, store, options(1), || {
        left -= 1;
        if left == 0 { Err(Fault::machine("killed")) } else { Ok(()) }
    });
    assert_eq!(stopped.unwrap_err(), Fault::machine("killed"));
    let parts = fs::read_dir(crate::build::work_of(store).join("parts")).unwrap();
    let whole = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().ends_with(".json");
    parts.map(|entry| entry.unwrap()).filter(whole).count()
}

#[test]
fn what_is_in_a_part_is_not_done_again() {
    let bench = Workbench::new(600);
    let corpus = Corpus::read(bench.corpus(IN_PARTS)).unwrap();
    let (store, whole) = (bench.path("store"), bench.path("whole"));
    // 600, 300 and 200 documents in three files: the second file is open.
    assert_eq!(killed_at(&corpus, &store, 700), 1);
    let mut again = 0;
    let outcome = build_while(&corpus, &store, options(1), || {
        again += 1;
        Ok(())
    });
    assert_eq!(again, 300 + 200);
    // The summary counts what the store holds, not what was left to do.
    let Outcome::Built { summary, .. } = outcome.unwrap() else { panic!("it was there") };
    assert!(summary.starts_with("1100 documents"), "{summary}");
    build(&corpus, &whole, options(2)).unwrap();
    same(&whole, &store);
}

#[test]
fn an_input_that_changed_under_a_killed_build_is_read_as_it_is_now() {
    for (file, changed) in
        [("web-0.jsonl", json_lines(5, 600)), ("web-1.jsonl", json_lines(9, 300))]
    {
        let bench = Workbench::new(600);
        let corpus = Corpus::read(bench.corpus(IN_PARTS)).unwrap();
        let (store, whole) = (bench.path("store"), bench.path("whole"));
        assert_eq!(killed_at(&corpus, &store, 750), 1);
        bench.write(file, changed);
        build(&corpus, &store, options(1)).unwrap();
        build(&corpus, &whole, options(1)).unwrap();
        same(&whole, &store);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]
    #[test]
    fn what_earlier_builds_made_leaves_no_trace(
        edits in prop::collection::vec((1usize..400, 0..3, 0u64..50), 1..4),
        last: bool,
    ) {
        // Each build in one folder of parts ends or is killed; then a file, a step or the cut changes.
        let bench = Workbench::new(120);
        let options = Options { work: Some(bench.path("work")), ..options(2) };
        let mut keys = IN_PARTS.to_owned();
        for (number, (moment, what, seed)) in edits.into_iter().enumerate() {
            let request = Corpus::read(bench.corpus(&keys)).unwrap();
            let mut left = moment;
            let store = bench.path(&format!("store-{number}"));
            let _ = build_while(&request, &store, options.clone(), || {
                left = left.saturating_sub(1);
                if left == 0 { Err(Fault::machine("killed")) } else { Ok(()) }
            });
            match what {
                0 => drop(bench.write("math.jsonl", json_lines(2_000_000 + seed, 40))),
                1 => drop(bench.write("web-1.jsonl", json_lines(seed, 60))),
                _ => keys = format!("part_bytes = {}", 1 + seed),
            }
        }
        let request = Corpus::read(bench.corpus(&keys)).unwrap();
        let (store, fresh) = (bench.path("last"), bench.path("fresh"));
        let used = build(&request, &store, options.clone()).unwrap();
        let Outcome::Built { tallies, .. } = used else { panic!("a store was there") };
        prop_assert_eq!(tallies.len(), 1);
        build(&request, &fresh, crate::testing::options(1 + usize::from(last))).unwrap();
        same(&fresh, &store);
        // Another build makes no part.
        let again = build_while(&request, &bench.path("again"), options, || Err(Fault::bug("made")));
        prop_assert!(again.is_ok(), "{:?}", again);
    }
}

#[test]
fn a_store_answers_only_to_its_own_request() {
    let bench = Workbench::new(90);
    let store = bench.path("store");
    let plain = bench.corpus("");
    let built = built(&plain, &store, 1);
    let again = build(&Corpus::read(&plain).unwrap(), &store, options(3)).unwrap();
    assert!(matches!(again, Outcome::UpToDate(manifest) if manifest == built));
    // Another cut, or skipping errors where there are none, is the same request.
    for same in ["part_bytes = 99", "on_error = \"skip\""] {
        let again = build(&Corpus::read(bench.corpus(same)).unwrap(), &store, options(1)).unwrap();
        assert!(matches!(again, Outcome::UpToDate(_)));
    }
    let key = |from: &str, to: &str| {
        let text = fs::read_to_string(bench.corpus("")).unwrap();
        assert!(text.contains(from));
        bench.write("other.toml", text.replace(from, to))
    };
    for (from, to, words) in [
        ("unit = 64", "unit = 128", ["unit", "128"]),
        ("1/7", "1/8", ["validation", "1/8"]),
        ("end = \"<|end|>\"\n", "", ["end", "none"]),
        ("name = \"math\"", "name = \"maths\"", ["source", "maths"]),
        ("id = \"id\"\n", "", ["web", "id="]),
    ] {
        let fault = refused(&key(from, to), &store);
        assert_eq!(fault.class(), Class::Usage, "{fault}");
        assert!(words.iter().all(|word| fault.to_string().contains(word)), "{fault}");
    }
    bench.write("math.jsonl", json_lines(1, 30));
    let fault = refused(&bench.corpus(""), &store);
    assert!(
        fault.class() == Class::Mismatch && fault.to_string().contains("math.jsonl"),
        "{fault}"
    );
    bench.write("math.jsonl", json_lines(1_000_000, 30));
    bench.write("web-2.jsonl", "");
    let fault = refused(&bench.corpus(""), &store);
    assert_eq!(fault.class(), Class::Mismatch, "{fault}");
    assert!(
        ["3 files", "\"web-2.jsonl\" was added"].iter().all(|it| fault.to_string().contains(it))
    );
    fs::remove_file(bench.path("web-2.jsonl")).unwrap();
    fs::rename(bench.path("web-1.jsonl"), bench.path("kept")).unwrap();
    let fault = refused(&bench.corpus(""), &store).to_string();
    assert!(fault.contains("\"web-1.jsonl\" was taken away"), "{fault}");
    fs::rename(bench.path("kept"), bench.path("web-1.jsonl")).unwrap();
    bench.write(
        "tokenizer.json",
        crate::testing::bytes_tokenizer(|json| json["added_tokens"][1]["lstrip"] = true.into()),
    );
    let fault = refused(&bench.corpus(""), &store);
    assert!(fault.class() == Class::Mismatch && fault.to_string().contains("tokenizer"), "{fault}");
}

#[test]
fn a_store_beside_its_text_is_none_of_it() {
    let bench = Workbench::new(9);
    let text = fs::read_to_string(bench.corpus("")).unwrap();
    let corpus = bench.write("in/corpus.toml", text.replace("tokenizer.json", "../tokenizer.json"));
    let text = fs::read_to_string(&corpus).unwrap().replace("\"web-*.jsonl\"", "\"**/*.json*\"");
    fs::write(&corpus, text.replace("id = \"id\"\n", "format = \"text\"\n")).unwrap();
    fs::copy(bench.path("web-0.jsonl"), bench.path("in/web.jsonl")).unwrap();
    fs::copy(bench.path("math.jsonl"), bench.path("in/math.jsonl")).unwrap();
    let store = bench.path("in/store");
    let digest = built(&corpus, &store, 1).digest;
    let again = build(&Corpus::read(&corpus).unwrap(), &store, options(1)).unwrap();
    assert!(matches!(again, Outcome::UpToDate(_)), "the store itself is no input");
    assert_eq!(built(&corpus, &bench.path("other"), 1).digest, digest);
}

#[test]
fn two_builds_do_not_share_a_folder() {
    let bench = Workbench::new(60);
    let corpus = Corpus::read(bench.corpus("")).unwrap();
    let store = bench.path("store");
    let mut tried = false;
    build_while(&corpus, &store, options(1), || {
        if !std::mem::replace(&mut tried, true) {
            let fault = build(&corpus, &store, options(1)).unwrap_err();
            assert_eq!(fault.class(), Class::Machine, "{fault}");
        }
        Ok(())
    })
    .unwrap();
    assert!(tried);
    let foreign = bench.path("foreign");
    bench.write("foreign/thesis.tex", "years of work");
    let fault = build(&corpus, &foreign, options(1)).unwrap_err();
    assert!(fault.class() == Class::Usage && fault.to_string().contains("thesis.tex"), "{fault}");
    assert!(foreign.join("thesis.tex").exists());
}

#[test]
fn losses_are_counted_and_balance() {
    let bench = Workbench::new(30);
    let lines = [
        json_lines(0, 10),
        "{\"text\": \"\"}\n{\"text\": 7}\nnonsense\n{\"text\": \"\"}\n".to_owned(),
        format!("{{\"text\": \"{}\"}}\n", "x".repeat(2000)),
        json_lines(40, 5),
    ];
    bench.write("web-0.jsonl", lines.concat());
    let keys = "max_document_bytes = 1500";
    let stop = refused(&bench.corpus(keys), &bench.path("stop"));
    assert_eq!(stop.class(), Class::Data);
    assert!(stop.to_string().contains("web-0.jsonl:12"), "{stop}");
    let skip = bench.corpus(&format!("on_error = \"skip\"\n{keys}"));
    let store = bench.path("store");
    let manifest = built(&skip, &store, 2);
    let web = &manifest.sources[0];
    let dropped: Vec<_> = web.dropped.iter().map(|l| (l.reason.as_str(), l.documents)).collect();
    assert_eq!(dropped, [("empty", 2), ("malformed", 1), ("missing text", 1), ("too large", 1)]);
    let accounting = Accounting::of(web);
    assert_eq!((accounting.read, accounting.dropped, accounting.balance()), (35, 5, 0));
    let told = inspect::text(&store, &manifest);
    assert!(told.contains("2 empty") && told.contains("balance 0"), "{told}");
    let json = inspect::json(&store, &manifest);
    assert_eq!(json["sources"][0]["accounting"]["balance"], 0);
    // A corpus that now stops at a dropped record is not the one that this store was built from.
    let fault = refused(&bench.corpus(keys), &store);
    assert!(fault.class() == Class::Usage && fault.to_string().contains("skip"), "{fault}");
}

#[test]
fn every_dropped_record_is_listed_with_its_place_and_reason() {
    let bench = Workbench::new(60);
    let bad = "{\"id\": \"e\", \"text\": \"\"}\n{\"text\": 7}\nnonsense\n{\"id\":\"last\",\"text\":\"a\"}\n";
    let long = format!("{{\"id\": \"long\", \"text\": \"{}\"}}\n", "x".repeat(2000));
    bench.write("web-0.jsonl", [&json_lines(0, 40), &long, bad, &json_lines(90, 9)].concat());
    bench.own_document();
    let steps = "[[prepare]]\nstep = \"length\"\nmin_words = 4\n[[prepare]]\nstep = \"exact-duplicates\"\n\
                 [[prepare]]\nstep = \"repeated-substrings\"\nmin_bytes = 12\n[[prepare]]\nstep = \"length\"\nmax_words = 50\n";
    let corpus = bench.corpus("part_bytes = 1\non_error = \"skip\"\nmax_document_bytes = 1500");
    let corpus = bench.write("corpus.toml", fs::read_to_string(corpus).unwrap() + steps);
    let store = bench.path("store");
    let manifest = built(&corpus, &store, 2);
    let mut counts = std::collections::BTreeMap::<(String, String), (u64, u64)>::new();
    let mut cut = 0;
    dropped::each_of(&store, &manifest, |source, line| {
        let raw = fs::read_to_string(bench.path(&source.inputs[line.file].path)).unwrap();
        let record = raw.lines().nth(line.row as usize - 1).unwrap();
        if !line.spans.is_empty() {
            cut += 1;
            return Ok(());
        }
        // The record at this position has the listed id, and is bad for the listed reason.
        if let Some(id) = &line.id {
            assert!(record.contains(&format!("\"id\":{id:?}")), "{line:?} {record}");
        }
        match line.reason.as_str() {
            "malformed" => assert_eq!(record, "nonsense"),
            "missing text" => assert!(record.contains("\"text\": 7")),
            "empty" => assert!(record.contains("\"text\": \"\"")),
            "too large" => assert!(record.len() > 1500),
            reason => {
                assert!(reason.contains(": ") && (line.id.is_some() || source.name == "math"))
            }
        }
        assert_eq!(line.kept.is_some(), line.reason.starts_with("exact-duplicates"), "{line:?}");
        let count = counts.entry((source.name.clone(), line.reason)).or_default();
        *count = (count.0 + 1, count.1 + line.bytes.unwrap());
        Ok(())
    })
    .unwrap();
    let told = manifest.sources.iter().flat_map(|source| {
        let key = |reason: &str| (source.name.clone(), reason.to_owned());
        source.dropped.iter().map(move |told| (key(&told.reason), (told.documents, told.bytes)))
    });
    assert_eq!(counts, told.collect());
    let reasons: Vec<&str> = counts.keys().map(|(_, reason)| reason.as_str()).collect();
    for reason in [
        "malformed",
        "missing text",
        "too large",
        "length: too few words",
        "exact-duplicates: of an earlier document",
    ] {
        assert!(reasons.contains(&reason), "no {reason} in {reasons:?}");
    }
    assert!(cut > 0);
    // Parts of one file each, and a resumed build, give the same bytes.
    killed_at(&Corpus::read(&corpus).unwrap(), &bench.path("parts"), 150);
    build(&Corpus::read(&corpus).unwrap(), &bench.path("parts"), options(3)).unwrap();
    same(&store, &bench.path("parts"));
}

#[test]
fn a_sample_places_dropped_records() {
    let bench = Workbench::new(9);
    bench.write("web-0.jsonl", json_lines(0, 3) + "nonsense\n{\"text\": 7}\n");
    let corpus = bench.corpus("on_error = \"skip\"");
    let store = bench.path("store");
    let manifest = built(&corpus, &store, 1);
    let corpus = Corpus::read(&corpus).unwrap();
    let sampled = crate::sample::sample(&corpus, &store.into(), &manifest, 100, 1).unwrap();
    let dropped = sampled.iter().filter(|one| one.outcome.starts_with("dropped"));
    let told: Vec<_> = dropped.map(|one| (one.row, one.outcome.as_str())).collect();
    assert!(
        matches!(told[..], [(4, "dropped: malformed: malformed JSON"), (5, text)] if text.contains("missing text")),
        "{told:?}"
    );
    // As many lines and bytes, but another text than the store's.
    let sample = || crate::sample::sample(&corpus, &bench.path("store").into(), &manifest, 100, 1);
    bench.write("web-0.jsonl", json_lines(0, 3) + "nonsense\n{\"text\": 8}\n");
    let fault = sample().unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch);
    assert!(fault.to_string().contains("web-0.jsonl: this input changed"), "{fault}");
}

#[test]
fn a_loss_that_stopped_a_build_can_be_skipped_on_the_way() {
    let bench = Workbench::new(300);
    let lines = json_lines(0, 299) + "nonsense\n";
    bench.write("web-0.jsonl", lines);
    let (whole, stopped) = (bench.path("whole"), bench.path("stopped"));
    refused(&bench.corpus(IN_PARTS), &stopped);
    let skip = bench.corpus("part_bytes = 1\non_error = \"skip\"");
    built(&skip, &whole, 1);
    built(&skip, &stopped, 1);
    same(&whole, &stopped);
}

#[test]
fn streams_without_documents_are_stores_too() {
    let bench = Workbench::new(0);
    let store = bench.path("store");
    let manifest = built(&bench.corpus(""), &store, 1);
    assert_eq!(manifest.sources[0].train.tokens, 0);
    assert_eq!(verify(&store, true).unwrap().damages, []);
}

#[test]
fn a_long_document_takes_time_in_proportion() {
    let bench = Workbench::new(0);
    let sentence = "the river of tokens runs through every shard and no step is lost. ";
    let mut seconds = Vec::new();
    for megabytes in [4, 16] {
        let text = sentence.repeat((megabytes << 20) / sentence.len());
        bench.write("web-0.jsonl", format!("{{\"text\": \"{text}\"}}\n"));
        let begun = std::time::Instant::now();
        let manifest = built(&bench.corpus(""), &bench.path(&megabytes.to_string()), 1);
        seconds.push(begun.elapsed().as_secs_f64());
        assert_eq!(
            manifest.sources[0].train.documents + manifest.sources[0].validation.documents,
            1
        );
    }
    // Four times the text: quadratic work would take sixteen times as long.
    assert!(seconds[1] < 10.0 * seconds[0] + 0.5, "{seconds:?}");
}
