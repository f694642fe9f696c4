//! Checks that neither a power loss nor a full disk leaves an invalid store, or a folder that cannot be resumed.
//!
//! Each writer runs once with every disk act recorded, then again on folders as crashes may have left them; it must end
//! with the same bytes as the undisturbed run.

use std::fs;
use std::path::{Path, PathBuf};

use contract::{Class, Fault, Ratio, Result};
use storage::crash::{Recording, Tree, tree};
use store::disk::{self, watch};
use store::{Location, open};

use crate::build::build;
use crate::cluster::{Plan, Runner, Stage, decide, merge, plan};
use crate::corpus::Corpus;
use crate::interop::Peer;
use crate::interop::export::{Export, NOTE, export};
use crate::interop::import::{Import, Part, import};
use crate::moved;
use crate::testing::{IN_PARTS, Workbench, options};
use crate::train::{self, Request};
use crate::verify::verify;

/// States tried for each writer; `sh tests/full.sh crashes` tries more.
fn states() -> usize {
    if std::env::var_os("FULL").is_some() { 400 } else { 24 }
}

/// Steps that compare, change and filter.
const STEPS: &str = "
[[prepare]]
step = \"exact-duplicates\"
[[prepare]]
step = \"near-duplicates\"
sources = [\"web\"]
words = 3
bands = 2
rows = 4
[[prepare]]
step = \"length\"
min_words = 3
";

/// The content of `folder/name`.
fn part(folder: &Path, name: &str) -> Tree {
    tree(folder).into_iter().filter(|(path, _)| path.starts_with(name)).collect()
}

/// Runs a writer of `folder/name`; then again after crashes, and on a full disk.
fn survives(
    folder: &Path,
    name: &str,
    run: impl Fn() -> Result<()>,
    is_whole: impl Fn(&Path) -> bool,
) {
    fs::create_dir_all(folder).unwrap();
    let (recording, ran) = Recording::of(folder, &run);
    ran.unwrap();
    let wanted = part(folder, name);
    assert!(is_whole(&folder.join(name)) && recording.acts() > 20);
    let is_as_wanted = || {
        run().unwrap();
        let found = part(folder, name);
        let paths = wanted.keys().chain(found.keys());
        let other: Vec<_> = paths.filter(|path| wanted.get(*path) != found.get(*path)).collect();
        assert!(other.is_empty(), "not what an undisturbed run leaves: {other:?}");
        assert!(!folder.join(format!("{name}.partial")).exists());
    };
    let (mut whole, mut begun) = (0, 0);
    recording.each(states(), |_| {
        let count = if is_whole(&folder.join(name)) { &mut whole } else { &mut begun };
        *count += 1;
        is_as_wanted();
    });
    assert!(whole > 0 && begun > 10, "{whole} whole and {begun} begun");
    for room in (0..6).map(|share| recording.bytes() * share / 6) {
        fs::remove_dir_all(folder).unwrap();
        fs::create_dir(folder).unwrap();
        let full = watch(folder, room);
        let fault = run().unwrap_err();
        assert_eq!(fault.class(), Class::Machine, "{fault}");
        assert!(!fault.to_string().contains("continues"), "{fault}");
        assert!(!folder.join(format!("{name}.partial")).exists(), "{fault}");
        drop(full);
        let _watch = watch(folder, u64::MAX);
        is_as_wanted();
    }
}

/// Whether a folder has a manifest: then it must be a valid store.
fn is_store(store: &Path) -> bool {
    let is_store = store.join(open::MANIFEST).exists();
    if is_store {
        assert_eq!(verify(store, true).unwrap().damages, []);
    }
    is_store
}

fn corpus(bench: &Workbench) -> Corpus {
    bench.own_document();
    let text = fs::read_to_string(bench.corpus(IN_PARTS)).unwrap();
    Corpus::read(bench.write("corpus.toml", text + STEPS)).unwrap()
}

#[test]
fn a_build_survives_crashes() {
    let bench = Workbench::new(24);
    let (corpus, folder) = (corpus(&bench), bench.path("place"));
    let run = || build(&corpus, &folder.join("deep/store"), options(1)).map(drop);
    survives(&folder, "deep/store", run, is_store);
}

/// Runs the missing tasks of a plan, and merges.
fn by_tasks(corpus: &Corpus, work: &Path, store: &Path) -> Result<()> {
    let plan: Plan = plan(corpus, work)?;
    let runner = Runner::new(&plan, 1)?;
    for stage in [Stage::Scan, Stage::Encode] {
        for task in plan.missing(stage)? {
            runner.run(stage, task, true)?;
        }
        decide(&plan, true)?;
    }
    merge(&plan, store, true).map(drop)
}

#[test]
fn tasks_and_their_merge_survive_crashes() {
    let bench = Workbench::new(24);
    let (corpus, folder) = (corpus(&bench), bench.path("place"));
    let run = || by_tasks(&corpus, &folder.join("work"), &folder.join("store"));
    survives(&folder, "store", run, is_store);
}

/// Whatever a crash leaves of a plan being removed: while its description exists, so do all its results.
#[test]
fn a_plan_goes_before_what_was_made_by_it() {
    let bench = Workbench::new(24);
    let (corpus, work) = (corpus(&bench), bench.path("work"));
    by_tasks(&corpus, &work, &bench.path("store")).unwrap();
    let plan: Plan = plan(&corpus, &work).unwrap();
    let runner = Runner::new(&plan, 1).unwrap();
    for stage in [Stage::Scan, Stage::Encode] {
        for task in plan.missing(stage).unwrap() {
            runner.run(stage, task, true).unwrap();
        }
        decide(&plan, true).unwrap();
    }
    let made = || {
        part(&work, "").into_iter().filter(|(path, _)| path.to_string_lossy().starts_with("plan"))
    };
    let (before, mut seen) = (made().count(), [0, 0]);
    let (recording, ran) = Recording::of(&work, || plan.close());
    ran.unwrap();
    // All of them: the plan still exists in few states.
    recording.each(usize::MAX, |_| {
        let planned = work.join(plan.name.to_string()).join("plan.json").exists();
        seen[usize::from(planned)] += 1;
        assert!(!planned || made().count() == before, "half of what was made");
    });
    assert!(before > 5 && seen[0] > 0 && seen[1] > 0, "{before} {seen:?}");
}

#[test]
fn a_trained_tokenizer_survives_crashes() {
    let bench = Workbench::new(24);
    let (corpus, folder) = (corpus(&bench), bench.path("place"));
    fs::create_dir_all(&folder).unwrap();
    let out = folder.join("tokenizer.json");
    let request = Request { vocab: 300, special: Vec::new(), sample: Ratio::new(1, 1) };
    let run = || {
        let options = train::Options { workers: 1, quiet: true };
        train::train(&corpus, &request, options)?.write(&out).map(drop)
    };
    let (recording, ran) = Recording::of(&folder, run);
    ran.unwrap();
    let wanted = fs::read(&out).unwrap();
    let mut seen = [0, 0];
    recording.each(states(), |_| {
        // Nothing or the whole file, at any moment: a partial one would be refused as a conflict forever.
        let is_there = out.exists();
        assert!(!is_there || fs::read(&out).unwrap() == wanted, "a piece");
        seen[usize::from(is_there)] += 1;
        run().unwrap();
        assert_eq!(fs::read(&out).unwrap(), wanted);
    });
    assert!(seen[0] > 1 && seen[1] > 0, "{seen:?}");
    fs::remove_file(&out).unwrap();
    let full = watch(&folder, recording.bytes() / 2);
    assert_eq!(run().unwrap_err().class(), Class::Machine);
    assert!(!out.exists());
    drop(full);
}

/// A store built here for another place stays complete until every byte was verified there, and is removed then.
#[test]
fn a_store_that_moves_is_whole_here_or_there() {
    let bench = Workbench::new(24);
    let (folder, there) = (bench.path("place"), bench.path("there"));
    let here = folder.join("builds/key");
    build(&corpus(&bench), &bench.path("built"), options(1)).unwrap();
    let wanted = tree(&bench.path("built"));
    let put = |to: &Path| {
        let _ = fs::remove_dir_all(to);
        for (name, bytes) in &wanted {
            match bytes {
                None => fs::create_dir_all(to.join(name)).unwrap(),
                Some(bytes) => {
                    fs::create_dir_all(disk::folder_of(&to.join(name))).unwrap();
                    fs::write(to.join(name), bytes).unwrap();
                }
            }
        }
    };
    put(&here);
    let place = Location::from(&there);
    let cut = there.join("web/00000/tokens-train-00000.arrow");
    let harms: [(&dyn Fn(), bool); 3] = [
        (&|| fs::remove_file(there.join(open::MANIFEST)).unwrap(), false),
        (&|| fs::remove_file(&cut).unwrap(), true),
        (&|| fs::write(&cut, vec![0; fs::read(&cut).unwrap().len()]).unwrap(), true),
    ];
    for (harm, unnoticed) in harms {
        let (recording, moved) = Recording::of(&folder, || {
            moved::to(&here, &place, true, || {
                put(&there);
                harm();
                let silent = || Fault::machine("the bucket does not answer");
                if unnoticed { Ok(()) } else { Err(silent()) }
            })
        });
        moved.unwrap_err();
        assert_eq!(recording.acts(), 0, "nothing here is touched before the other one is known");
        // A later run does not trust an unverified copy there either.
        let _ = moved::left(&here, &place, true);
        assert!(tree(&here) == wanted);
    }
    let (recording, moved) = Recording::of(&folder, || {
        moved::to(&here, &place, true, || {
            put(&there);
            Ok(())
        })
    });
    moved.unwrap();
    assert!(recording.acts() > 5 && tree(&folder.join("builds")).is_empty());
    let mut seen = [0, 0];
    recording.each(states(), |_| {
        seen[usize::from(here.exists())] += 1;
        assert!(!here.exists() || tree(&here) == wanted, "half a store is left");
        moved::left(&here, &place, true).unwrap();
        assert!(tree(&folder.join("builds")).is_empty(), "something is left for ever");
    });
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}

fn exported(bench: &Workbench, peer: Peer) -> PathBuf {
    let folder = bench.path(peer.name());
    let request = Export {
        store: bench.path("store").into(),
        out: folder.join("out").into(),
        peer,
        source: None,
        split: None,
        quiet: true,
    };
    survives(&folder, "out", || export(&request).map(drop), |out| out.join(NOTE).exists());
    folder.join("out")
}

#[test]
fn exports_and_imports_survive_crashes() {
    let bench = Workbench::new(24);
    build(&corpus(&bench), &bench.path("store"), options(1)).unwrap();
    let outs = Peer::ALL.map(|peer| exported(&bench, peer));
    let folder = bench.path("imported");
    let path = outs[0].join("web/train").into();
    let part = Part { source: "web".to_owned(), path, held_out: false };
    let request = Import {
        store: folder.join("store"),
        peer: Peer::Megatron,
        tokenizer: bench.path("tokenizer.json").into(),
        parts: vec![part],
        width: None,
        begin: None,
        end: None,
        column: None,
        validation: Ratio::new(1, 7),
        unit: 64,
        part_bytes: 100,
        quiet: true,
    };
    survives(&folder, "store", || import(&request).map(drop), is_store);
}
