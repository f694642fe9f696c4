//! Where a build stores its files, which encoder it uses, and which bytes it read.

use std::fs;
use std::os::unix::fs::symlink;

use contract::{Class, Result};

use super::*;
use crate::testing::{IN_PARTS, Workbench, json_lines, options, tree};

/// A store and its parts in one folder are refused before any work, whether the folders exist or not.
#[test]
fn a_store_and_its_parts_lie_apart() {
    let bench = Workbench::new(9);
    let corpus = Corpus::read(bench.corpus("")).unwrap();
    symlink(".", bench.path("link")).unwrap();
    let refused = |store: &str, work: &str| {
        let options = Options { work: Some(bench.path(work)), ..options(1) };
        let fault = build(&corpus, &bench.path(store), options).map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Usage, "{store} {work}: {fault}");
        assert!(!bench.path("x").exists() && !bench.path("x.partial").exists());
    };
    for (store, work) in [
        ("x", "x"),
        ("x", "link/x"),
        ("x", "y/../x"),
        ("x", "x/parts"),
        ("x/store", "x"),
        ("x", "x.partial"),
    ] {
        refused(store, work);
    }
    // A store, this one or another, cannot be the folder of parts, even if there is nothing to do.
    build(&corpus, &bench.path("store"), options(1)).unwrap();
    let before = tree(&bench.path("store"));
    for (store, work) in [("store", "store"), ("x", "store"), ("x", "store/web")] {
        refused(store, work);
    }
    assert!(tree(&bench.path("store")) == before);
}

/// One of two encoders may be wrong: a user who names one gets its result.
#[test]
fn an_encoder_that_is_named_has_encoded() {
    let bench = Workbench::new(30);
    let corpus = Corpus::read(bench.corpus("")).unwrap();
    let by = |engine: Option<Engine>, store: &str| {
        let work = Some(bench.path("work"));
        build(&corpus, &bench.path(store), Options { engine, work, ..options(1) })
    };
    let told = |outcome: Result<Outcome>| match outcome.unwrap() {
        Outcome::Built { manifest, tallies, .. } => (manifest, tallies.concat()),
        Outcome::UpToDate(manifest) => (manifest, "up to date".to_owned()),
    };
    let (fast, _) = told(by(None, "fast"));
    let (slow, made) = told(by(Some(Engine::Reference), "slow"));
    assert!(made.contains("made 2 of 2 parts"), "{made}");
    assert!(slow.tokenizer.encoder.starts_with("tokenizers "), "{}", slow.tokenizer.encoder);
    assert!(fast.tokenizer.encoder.starts_with("fastokens "), "{}", fast.tokenizer.encoder);
    assert_eq!(slow.digest, fast.digest);
    // Each encoder's own parts are reused.
    for (engine, like) in [(Engine::Reference, &slow), (Engine::Fastest, &fast)] {
        let (manifest, made) = told(by(Some(engine), &format!("again-{engine:?}")));
        assert!(made.contains("made 0 of 2 parts"), "{made}");
        assert_eq!(manifest, *like);
    }
    for (engine, store) in [(Engine::Reference, "fast"), (Engine::Fastest, "slow")] {
        let fault = by(Some(engine), store).map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Usage);
        assert!(fault.to_string().contains("another encoder"), "{fault}");
    }
    for (engine, store) in [(None, "slow"), (None, "fast"), (Some(Engine::Reference), "slow")] {
        assert_eq!(told(by(engine, store)).1, "up to date");
    }
}

/// A file that is written while the build reads it: what was read is not a file that ever existed.
#[test]
fn nothing_is_kept_of_a_file_that_changes_under_a_first_build() {
    let bench = Workbench::new(9);
    // Longer than the read-ahead, so that its end is not read before its first document is processed.
    let long = |n: u64| {
        let pad = "x".repeat(400_000);
        format!("{}\n", serde_json::json!({"text": format!("number {n}"), "pad": pad}))
    };
    let file = bench.write("web-0.jsonl", (0..12).map(long).collect::<String>());
    for steps in ["", "[[prepare]]\nstep = \"exact-duplicates\"\n"] {
        let text = fs::read_to_string(bench.corpus(IN_PARTS)).unwrap() + steps;
        let corpus = Corpus::read(bench.write("corpus.toml", text)).unwrap();
        let (store, work) = (bench.path("store"), bench.path(&format!("work-{}", steps.len())));
        let with_parts = || Options { work: Some(work.clone()), ..options(1) };
        let mut first = true;
        let fault = build_while(&corpus, &store, with_parts(), || {
            if !std::mem::take(&mut first) {
                return Ok(());
            }
            let mut file = fs::File::options().append(true).open(&file).unwrap();
            std::io::Write::write_all(&mut file, long(99).as_bytes()).unwrap();
            Ok(())
        });
        let fault = fault.map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Mismatch, "{fault}");
        assert!(fault.to_string().contains("web-0.jsonl"), "{fault}");
        assert!(!store.exists());
        assert_eq!(fs::read_dir(work.join("parts")).unwrap().count(), 0);
        build(&corpus, &store, with_parts()).unwrap();
        build(&corpus, &bench.path("fresh"), options(1)).unwrap();
        assert!(tree(&store) == tree(&bench.path("fresh")));
        for store in [store, bench.path("fresh")] {
            fs::remove_dir_all(store).unwrap();
        }
    }
}

/// Files of equal content make parts of one name, by several workers at the same time.
#[test]
fn equal_parts_may_be_made_at_once() {
    for _ in 0..12 {
        let bench = Workbench::new(9);
        let lines = json_lines(0, 9);
        (0..6).for_each(|file| drop(bench.write(&format!("web-{file}.jsonl"), &lines)));
        let corpus = Corpus::read(bench.corpus(IN_PARTS)).unwrap();
        let Outcome::Built { manifest, .. } =
            build(&corpus, &bench.path("store"), options(4)).unwrap()
        else {
            panic!("built before");
        };
        assert_eq!(manifest.sources[0].parts.len(), 6);
        assert!(crate::verify::verify(bench.path("store"), true).unwrap().damages.is_empty());
    }
}
