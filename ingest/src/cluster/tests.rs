//! A part is read back as it was written, or refused; and existing parts are reused.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::Duration;

use contract::fault::Class;
use contract::{Identity, Result};
use serde_json::json;
use store::disk;

use super::known::results_telling;
use super::output;
use super::part::{PartReader, digest_at_end, is_whole};
use super::result::TaskResult;
use super::slurm::last_words;
use super::{Plan, Pruned, Ran, Runner, Stage, decide, merge, plan, prune};
use crate::build::Options;
use crate::corpus::Corpus;
use crate::made;
use crate::testing::{IN_PARTS, Workbench, bytes_tokenizer, document, json_lines, options, tree};

mod damaged;
mod plans;

/// Steps of every kind that matters here: one that changes, one that filters, comparing ones, one after them.
const STEPS: &str = "
[[prepare]]
step = \"clean\"
[[prepare]]
step = \"length\"
min_words = 3
[[prepare]]
step = \"exact-duplicates\"
[[prepare]]
step = \"near-duplicates\"
sources = [\"web\"]
words = 3
bands = 10
rows = 4
[[prepare]]
step = \"decontaminate\"
files = [\"eval.jsonl\"]
words = 6
[[prepare]]
step = \"repeated-substrings\"
sources = [ \"math\" ]
min_bytes = 12
[[prepare]]
step = \"trim\"
sources = [\"math\"]
context = 180
";

/// A corpus of eight files of web, one of math, and steps.
fn prepared(bench: &Workbench) -> PathBuf {
    bench.own_document();
    for file in 2..8 {
        bench.write(&format!("web-{file}.jsonl"), json_lines(40 * file, 12 + file));
    }
    let dirty = json!({"id": "dirty", "text": format!("{}\r\n\u{0}", document(5))});
    bench.write("web-8.jsonl", format!("{dirty}\n"));
    let items = [document(60), document(200)].map(|text| json!({"text": text}).to_string() + "\n");
    bench.write("eval.jsonl", items.concat());
    let text = fs::read_to_string(bench.corpus(IN_PARTS)).unwrap();
    bench.write("corpus.toml", text + STEPS)
}

/// Runs the missing tasks, last one first; returns how many parts each stage made.
fn run(plan: &Plan) -> [usize; 2] {
    let runner = Runner::new(plan, 2).unwrap();
    [Stage::Scan, Stage::Encode].map(|stage| {
        let missing = plan.missing(stage).unwrap();
        let made = missing.into_iter().rev().filter(|task| {
            let ran = runner.run(stage, *task, true).unwrap();
            matches!(runner.run(stage, *task, true).unwrap(), Ran::Again(_))
                && matches!(ran, Ran::New(_))
        });
        let made = made.count();
        if stage == Stage::Scan {
            decide(plan, true).unwrap();
        }
        made
    })
}

/// Builds by tasks in `work`, with the same bytes as a local build; returns what was made.
fn made(bench: &Workbench, corpus: &Path, work: &str) -> [usize; 2] {
    let corpus = Corpus::read(corpus).unwrap();
    let (local, store) = (bench.path("local"), bench.path("by-tasks"));
    for folder in [&local, &store] {
        let _ = fs::remove_dir_all(folder);
    }
    crate::build(&corpus, &local, options(2)).unwrap();
    let plan = plan(&corpus, &bench.path(work)).unwrap();
    let made = run(&plan);
    merge(&plan, &store, true).unwrap();
    plan.close().unwrap();
    assert!(tree(&store) == tree(&local), "another store: {work}");
    made
}

fn result(plan: &Plan, task: usize) -> TaskResult {
    TaskResult::read(plan, Stage::Encode, task).unwrap().unwrap()
}

/// The files by which the parts in this folder are known.
fn known(parts: &Path) -> Vec<PathBuf> {
    let all = disk::entries(parts).unwrap().into_iter();
    all.filter(|path| path.extension().is_some_and(|it| it == "bin" || it == "json")).collect()
}

fn read(path: &Path, key: Identity) -> contract::Result<usize> {
    let mut part = PartReader::open(path, key)?;
    let mut entries = 0;
    while part.next()?.is_some() {
        entries += 1;
    }
    Ok(entries)
}

#[test]
fn every_flipped_bit_and_every_cut_of_a_part_is_found() {
    let bench = Workbench::new(4);
    let file = bench.corpus(IN_PARTS);
    let steps = "[[prepare]]\nstep = \"exact-duplicates\"\n[[prepare]]\nstep = \"length\"\nmin_words = 9\n\
                 [[prepare]]\nstep = \"near-duplicates\"\nbands = 2\n";
    bench.write("corpus.toml", fs::read_to_string(&file).unwrap() + steps);
    let corpus = Corpus::read(&file).unwrap();
    let plan = plan(&corpus, &bench.path("work")).unwrap();
    assert_eq!(plan.tasks(), 3);
    run(&plan);
    for stage in [Stage::Scan, Stage::Encode] {
        let key = TaskResult::read(&plan, stage, 0).unwrap().unwrap().part;
        let path = plan.known_by(stage, key);
        let looked = |path: &Path| match stage {
            Stage::Scan => read(path, key).map(|entries| assert_eq!(entries, 4 + 1)),
            Stage::Encode => output::whole_digest(&plan.cache, key).map(drop),
        };
        looked(&path).unwrap();
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            fs::write(&path, &bad).unwrap();
            let fault = looked(&path).expect_err("a flipped bit");
            assert!(fault.to_string().contains(&key.to_string()), "{fault}");
            fs::write(&path, &good[..at]).unwrap();
            let tail = match stage {
                Stage::Scan => digest_at_end(&path, key).err(),
                Stage::Encode => looked(&path).err(),
            };
            for fault in [looked(&path).err(), tail] {
                let fault = fault.expect("a cut").to_string();
                assert!(fault.contains("delete this part"), "cut at {at}: {fault}");
            }
        }
        // An intact part under another's name is found too.
        let other = TaskResult::read(&plan, stage, 1).unwrap().unwrap().part;
        fs::copy(plan.known_by(stage, other), &path).unwrap();
        assert!(looked(&path).is_err());
        fs::write(&path, good).unwrap();
    }
    // A file of an encoded part that is cut or missing; its bytes are checked by readers of the store.
    let key = result(&plan, 0).part;
    let (part, _) = output::read(&plan.cache, key).unwrap().unwrap();
    for file in output::files(&part) {
        let path = plan.cache.part_folder(key).join(&file.name);
        let good = fs::read(&path).unwrap();
        for bad in [None, Some(&good[1..])] {
            fs::remove_file(&path).unwrap();
            bad.into_iter().for_each(|bad| fs::write(&path, bad).unwrap());
            let fault = output::whole_digest(&plan.cache, key).unwrap_err();
            assert!(fault.to_string().contains(&file.name), "{fault}");
            fs::write(&path, &good).unwrap();
        }
    }
}

#[test]
fn tasks_of_any_size_make_the_store_of_a_local_build() {
    let bench = Workbench::new(30);
    for (number, keys) in ["", "on_error = \"skip\""].into_iter().enumerate() {
        bench.write(
            "web-2.jsonl",
            if number == 1 { "{\"text\": 3}\n{\"text\": \"a\"}\n" } else { "" },
        );
        for bytes in [1, 5_000, 1u64 << 60] {
            let corpus = bench.corpus(&format!("part_bytes = {bytes}\n{keys}"));
            made(&bench, &corpus, &format!("work-{number}-{bytes}"));
        }
    }
    let bench = Workbench::new(30);
    let corpus = prepared(&bench);
    let text = fs::read_to_string(&corpus).unwrap();
    for bytes in [1, 5_000, 1u64 << 60] {
        fs::write(&corpus, text.replace(IN_PARTS, &format!("part_bytes = {bytes}"))).unwrap();
        let [scan, encode] = made(&bench, &corpus, &format!("prepared-{bytes}"));
        assert!(scan == encode && scan > 1, "{bytes}: {scan} {encode}");
    }
}

#[test]
fn an_edit_makes_anew_what_it_concerns_and_nothing_else() {
    let bench = Workbench::new(30);
    let corpus = prepared(&bench);
    let text = fs::read_to_string(&corpus).unwrap();
    let again = |edited: String| {
        fs::write(&corpus, edited).unwrap();
        made(&bench, &corpus, "work")
    };
    assert_eq!(again(text.clone()), [10, 10]);
    assert_eq!(again(text.clone()), [0, 0]);
    // A setting after the scan, one of the scan, and a new step in front, each of one source.
    let edited = text.replace("context = 180", "context = 90");
    assert_eq!(again(edited.clone()), [0, 1]);
    let edited = edited.replace("sources = [\"math\"]", "sources = [\"math\", \"web\"]");
    assert_eq!(again(edited), [0, 9]);
    let front = "[[prepare]]\nstep = \"length\"\nsources = [\"math\"]\nmax_words = 20\n";
    let edited = text.replacen("[[prepare]]", &format!("{front}[[prepare]]"), 1);
    assert_eq!(again(edited), [1, 1]);
    // An edit that affects all documents.
    assert_eq!(again(text.replace("1/7", "1/9")), [0, 10]);
    let edited = text.replace("min_words = 3", "min_words = 4");
    assert_eq!(again(edited)[0], 10);
    // A source's name is in the files of the store, not in what the scan sees.
    let edited = text.replace("unit = 64", "unit = 32");
    assert_eq!(again(edited.replace("\"math\"", "\"arithmetic\"")), [0, 1]);
    // Edits that affect no document: the files' names.
    fs::rename(bench.path("web-3.jsonl"), bench.path("web-33.jsonl")).unwrap();
    assert_eq!(again(text.clone()), [0, 0]);
    // One file among many, and another one in the middle, with content that no other file has.
    let line = |text: &str| json!({"id": text, "text": format!("{text} is new here")}).to_string();
    let file = bench.path("web-4.jsonl");
    fs::write(&file, fs::read_to_string(&file).unwrap() + &line("this") + "\n").unwrap();
    assert_eq!(again(text.clone()), [1, 1]);
    bench.write("web-44.jsonl", line("that") + "\n");
    assert_eq!(again(text.clone()), [1, 1]);
    // A new first file that makes documents of later files duplicates: these are encoded again, but not scanned again.
    bench.write("web-!.jsonl", json_lines(85, 2));
    let [scan, encode] = again(text.clone());
    assert!(scan == 1 && (2..6).contains(&encode), "{encode}");
    fs::remove_file(bench.path("web-!.jsonl")).unwrap();
    assert_eq!(again(text), [0, 0]);
}

#[test]
fn an_edit_moves_only_the_cuts_beside_it() {
    let bench = Workbench::new(3);
    for file in 0..300 {
        bench.write(&format!("web-{file:03}.jsonl"), json_lines(file, 1 + file % 3));
    }
    let corpus = bench.corpus("part_bytes = 3000");
    let cuts = || {
        let plan = plan(&Corpus::read(&corpus).unwrap(), &bench.path("work")).unwrap();
        let text = plan.text;
        let names = |part: &crate::corpus::PartInputs| {
            let files = &text.found.sources[part.source].files[part.files.clone()];
            files.iter().map(|file| file.shown.clone()).collect::<Vec<_>>()
        };
        text.tasks.iter().map(names).collect::<Vec<_>>()
    };
    let before = cuts();
    assert!(before.len() > 30 && before.iter().any(|files| files.len() > 3), "{before:?}");
    bench.write("web-100.jsonl", json_lines(7, 9));
    bench.write("web-0100.jsonl", json_lines(8, 1));
    let after = cuts();
    let moved = after.iter().filter(|files| !before.contains(files)).count();
    assert!((1..8).contains(&moved), "{moved} of {} ranges moved", after.len());
}

#[test]
fn a_second_result_that_differs_is_kept_beside_the_first() {
    let bench = Workbench::new(9);
    let corpus = Corpus::read(bench.corpus(IN_PARTS)).unwrap();
    let plan = plan(&corpus, &bench.path("work")).unwrap();
    run(&plan);
    let key = result(&plan, 1).part;
    let path = plan.cache.part_record(key);
    // As a machine that computes wrongly would: one digest differs, and the part is intact.
    let (mut part, _) = output::read(&plan.cache, key).unwrap().unwrap();
    part.inputs[0].segments[0][0].0 ^= 1;
    let (text, _) = output::described(key, &part).unwrap();
    fs::write(&path, &text).unwrap();
    let runner = Runner::new(&plan, 1).unwrap();
    let fault = runner.run(Stage::Encode, 1, true).unwrap_err();
    assert!(fault.class() == Class::Mismatch, "{fault}");
    assert!(fault.to_string().contains("another result"), "{fault}");
    assert_eq!(fs::read_to_string(&path).unwrap(), text);
    let fault = merge(&plan, &bench.path("store"), true).unwrap_err();
    assert!(fault.to_string().contains("two results"), "{fault}");
    let kept = super::result::conflicts(&plan.cache.parts_folder()).unwrap();
    assert_eq!(kept.len(), 1);
    // The user found out which one is wrong: the first.
    fs::remove_dir_all(plan.cache.part_folder(key)).unwrap();
    fs::remove_file(&path).unwrap();
    fs::rename(&kept[0], bench.path("right")).unwrap();
    runner.run(Stage::Encode, 1, true).unwrap();
    assert!(tree(&bench.path("right")) == tree(&plan.cache.part_folder(key)));
    merge(&plan, &bench.path("store"), true).unwrap();
    crate::build(&corpus, &bench.path("local"), options(1)).unwrap();
    assert!(tree(&bench.path("store")) == tree(&bench.path("local")));
}

#[test]
fn what_an_interrupted_build_did_with_other_inputs_is_done_again() {
    let bench = Workbench::new(20);
    let path = prepared(&bench);
    let corpus = Corpus::read(&path).unwrap();
    let work = bench.path("work");
    let first = plan(&corpus, &work).unwrap();
    run(&first);
    let fault = Runner::new(&first, 1).unwrap().run(Stage::Encode, 99, true).unwrap_err();
    assert!(fault.to_string().contains("has no such task"), "{fault}");
    // The same plan, since the names and sizes of all files are the same.
    let file = bench.path("web-3.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("one", "six").replace("two", "ten")).unwrap();
    let again = plan(&corpus, &work).unwrap();
    assert_eq!(again.name, first.name);
    assert_eq!(again.missing(Stage::Scan).unwrap().len(), 1);
    assert!(merge(&again, &bench.path("early"), true).is_err() && !bench.path("early").exists());
    assert!(made(&bench, &path, "work")[0] == 1);
}

#[test]
fn dropped_records_that_one_build_skips_stop_another_that_says_so() {
    let bench = Workbench::new(9);
    bench.write("web-2.jsonl", "{\"text\": 3}\n{\"text\": \"a\"}\n");
    for (steps, all) in [("", 4), ("[[prepare]]\nstep = \"exact-duplicates\"\n", 8)] {
        let work = format!("work-{all}");
        let stop = fs::read_to_string(bench.corpus(IN_PARTS)).unwrap() + steps;
        let skip = fs::read_to_string(bench.corpus("part_bytes = 1\non_error = \"skip\"")).unwrap()
            + steps;
        let corpus = bench.write("corpus.toml", &skip);
        assert_eq!(made(&bench, &corpus, &work).iter().sum::<usize>(), all);
        bench.write("corpus.toml", stop);
        let request = Corpus::read(&corpus).unwrap();
        let plan = plan(&request, &bench.path(&work)).unwrap();
        let runner = Runner::new(&plan, 1).unwrap();
        for stage in [Stage::Scan, Stage::Encode] {
            for task in plan.missing(stage).unwrap() {
                assert!(matches!(runner.run(stage, task, true).unwrap(), Ran::Reused(_)));
            }
            decide(&plan, true).unwrap();
        }
        let out = bench.path("stopped");
        let fault = merge(&plan, &out, true).unwrap_err();
        // At the same place that a build from scratch names.
        let local = crate::build(&request, &bench.path(&format!("local-stop-{all}")), options(1));
        let local = local.unwrap_err();
        let place = local.place().unwrap();
        assert!(place.ends_with("web-2.jsonl:1"), "{local}");
        assert_eq!((fault.class(), fault.place()), (Class::Data, Some(place)), "{fault}");
        assert!(!out.exists());
        // The other way round: what was done before the record that stopped the build is not done again.
        let empty = bench.path(&format!("empty-{all}"));
        let plan = super::plan(&request, &empty).unwrap();
        let runner = Runner::new(&plan, 1).unwrap();
        let stage = if steps.is_empty() { Stage::Encode } else { Stage::Scan };
        let ran: Vec<bool> = (0..4).map(|task| runner.run(stage, task, true).is_ok()).collect();
        assert_eq!(ran, [true, true, false, true]);
        bench.write("corpus.toml", &skip);
        let name = empty.file_name().unwrap().to_str().unwrap();
        assert_eq!(made(&bench, &corpus, name)[usize::from(steps.is_empty())], 1);
    }
}

#[test]
fn pruning_takes_what_no_build_used_for_long_and_nothing_else() {
    let bench = Workbench::new(20);
    let corpus = bench.corpus(IN_PARTS);
    let (work, parts) = (bench.path("work"), bench.path("work/parts"));
    let day = Duration::from_secs(86_400);
    let age = || {
        for path in known(&parts) {
            let part = fs::File::open(path).unwrap();
            let used = part.metadata().unwrap().modified().unwrap();
            part.set_modified(used - 3 * day).unwrap();
        }
    };
    let bytes = |tree: &[(PathBuf, Vec<u8>)]| tree.iter().map(|(_, b)| b.len() as u64).sum::<u64>();
    assert_eq!(made(&bench, &corpus, "work"), [0, 3]);
    let file = bench.path("web-1.jsonl");
    fs::write(&file, fs::read_to_string(&file).unwrap() + &json_lines(5_000, 2)).unwrap();
    age();
    // Two parts are reused, one is new, one is no longer of use.
    assert_eq!(made(&bench, &corpus, "work"), [0, 1]);
    let before = tree(&parts);
    let told = prune(&work, day, true).unwrap();
    assert_eq!((told.removed.0, told.kept.0), (1, 3));
    assert!(tree(&parts) == before, "a look removed something");
    assert_eq!(prune(&work, day, false).unwrap(), told);
    let after = tree(&parts);
    assert_eq!((known(&parts).len(), bytes(&after)), (3, told.kept.1));
    assert_eq!(told.removed.1 + told.kept.1, bytes(&before));
    assert_eq!(made(&bench, &corpus, "work"), [0, 0]);
    // An unfinished build keeps its parts, however old they are; parts it never used are removed.
    let plan = plan(&Corpus::read(&corpus).unwrap(), &work).unwrap();
    let runner = Runner::new(&plan, 1).unwrap();
    assert!(matches!(runner.run(Stage::Encode, 1, true).unwrap(), Ran::Reused(_)));
    age();
    assert_eq!(prune(&work, day, false).unwrap().removed.0, 2);
    assert!(plan.holds(Stage::Encode, result(&plan, 1).part));
    run(&plan);
    merge(&plan, &bench.path("after"), true).unwrap();
    // While a build works there, pruning is refused; and a folder without parts is not a cache.
    let held = disk::lock(&work).unwrap();
    assert_eq!(prune(&work, day, false).unwrap_err().class(), Class::Machine);
    drop(held);
    // The store of this plan is complete; another plan may be unfinished, until it is planned again.
    assert_eq!(prune(&work, Duration::ZERO, true).unwrap().kept, (0, 0));
    let again = super::plan(&Corpus::read(&corpus).unwrap(), &work).unwrap();
    assert_eq!(prune(&work, Duration::ZERO, true).unwrap().removed, (0, 0));
    // A merge that was killed once its store was complete.
    merge(&again, &bench.path("after"), true).unwrap();
    assert_eq!(prune(&work, Duration::ZERO, true).unwrap().kept, (0, 0));
    merge(&again, &bench.path("again"), true).unwrap();
    assert_eq!(prune(&work, Duration::ZERO, false).unwrap().kept, (0, 0));
    assert_eq!(prune(&work, Duration::ZERO, false).unwrap(), Pruned::default());
    assert_eq!(prune(&bench.path("none"), day, false).unwrap_err().class(), Class::Usage);
    assert!(!bench.path("none").exists());
}
