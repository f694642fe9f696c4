//! Fear: that a bucket has other documents than its rule says, in another order, or that a sequence differs from
//! one of a source that has only these documents; that a damaged file of a bucket is used.

use std::fs;
use std::path::{Path, PathBuf};

use contract::{Class, Result};
use loader::{OpenedCurriculum, RankSlice, batch, explain, validation};
use mixer::{Curriculum, DataPlan, SourceFacts};
use proptest::prelude::*;
use store::Split;

use crate::naive::{Plain, check_rows};
use crate::support::{PhaseText, Text, curriculum, scratch, write_store};

const MIX: &str = "web = 5, math = 2";
const RULE: &str = "column = \"quality\", edges = [0.25, 0.5], none = \"none\"";

/// The documents of a bucket by brute force: its numbers among all, and the documents.
type Picked = (Vec<usize>, Vec<Vec<u32>>);

fn phases(mix: &str) -> [PhaseText<'_>; 3] {
    [PhaseText(7, 32, 6, 2, mix), PhaseText(3, 128, 4, 1, mix), PhaseText(5, 64, 5, 1, mix)]
}

fn text(store: &Path, rule: &str, curve: &str, mix: &str) -> String {
    let text = curriculum(&[store], &["web", "math"], &phases(mix));
    text.replace("[source.web]\n", &format!("[source.web]\nbuckets = {{ {rule} }}\n{curve}\n"))
}

fn open(store: &Path, rule: &str, curve: &str, mix: &str) -> Result<OpenedCurriculum> {
    OpenedCurriculum::open_text(store.with_file_name("run.toml"), text(store, rule, curve, mix))
}

/// A store in a folder of its own, so that selections can be stored next to it.
fn store(web: &Text) -> (tempfile::TempDir, PathBuf) {
    let dir = scratch();
    let path = dir.path().join("store");
    fs::create_dir(&path).unwrap();
    write_store(&path, &[web.clone(), Text::generate("math", &[900], 60_000)], 2, 128);
    (dir, path)
}

/// Which bucket a value belongs to, by the most obvious program.
fn bucket(value: Option<&String>) -> usize {
    match value.map(|value| value.parse::<f64>().unwrap()) {
        None => 3,
        Some(quality) if quality < 0.25 => 0,
        Some(quality) if quality < 0.5 => 1,
        Some(_) => 2,
    }
}

fn picked(documents: &[Vec<u32>], values: &[Option<String>], at: usize) -> Picked {
    let numbered = documents.iter().zip(values).enumerate();
    let of = numbered.filter(|(_, (_, value))| bucket(value.as_ref()) == at);
    of.map(|(number, (document, _))| (number, document.clone())).unzip()
}

fn web() -> impl Strategy<Value = Text> {
    let value = prop_oneof![
        4 => (0u32..100).prop_map(|hundredths| Some((f64::from(hundredths) / 100.0).to_string())),
        1 => Just(Some("0.25".to_owned())),
        1 => Just(None),
    ];
    let documents = |count| prop::collection::vec((1u64..60, value.clone()), count);
    // Runs of neighbours in one bucket, too.
    (documents(40..120), documents(1..30), 1u64..2000, 1usize..4).prop_map(
        |(train, held, shard_tokens, run)| {
            let lengths =
                |of: &[(u64, Option<String>)]| of.iter().map(|one| one.0).collect::<Vec<_>>();
            let validation = Text::generate("held", &lengths(&held), 60_000).train;
            let value = |of: &[(u64, Option<String>)], at: usize| of[at / run * run].1.clone();
            let kept = (0..train.len()).map(|at| value(&train, at));
            let kept = kept.chain((0..held.len()).map(|at| value(&held, at))).collect();
            let web = Text::generate("web", &lengths(&train), 60_000);
            Text { validation, shard_tokens, kept, ..web }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Buckets are the plan and the rows of sources that have only their documents.
    #[test]
    fn a_bucket_is_a_source_of_its_documents(web in web()) {
        let (_dir, path) = store(&web);
        let trained = |at| picked(&web.train, &web.kept, at);
        prop_assume!((0..4).all(|at| !trained(at).0.is_empty()));
        let opened = open(&path, RULE, "curve = { weights = [0, 1, 3] }", "web = 5, \"web/none\" = 1, math = 2").unwrap();
        let (plan, stores) = (&opened.plan, opened.stores().unwrap());
        // The same as sources of their own: 5 is 5/4 and 15/4.
        let mix = "\"web/1\" = 5, \"web/2\" = 15, \"web/none\" = 4, math = 8";
        let names = ["\"web/1\"", "\"web/2\"", "\"web/none\"", "math"];
        let plain = Curriculum::parse(&curriculum(&[Path::new("s")], &names, &phases(mix)), "plain").unwrap();
        let tokens = |at| trained(at).1.concat().len() as u64;
        let fact = |name: &str, tokens, documents| SourceFacts {
            name: name.to_owned(), tokens, documents, unit: 128, selection: None,
        };
        let mut facts: Vec<_> = ["web/0", "web/1", "web/2", "web/none"].iter().enumerate()
            .map(|(at, name)| fact(name, tokens(at), trained(at).0.len() as u64)).collect();
        facts.push(fact("math", 900, 1));
        let found: Vec<_> = stores.facts().into_iter().map(|facts| SourceFacts { selection: None, ..facts }).collect();
        prop_assert_eq!(found, facts.clone());
        let naive = DataPlan::new(&plain, &facts).unwrap();
        prop_assert_eq!(naive.samples(), plan.samples());
        let math = Text::generate("math", &[900], 60_000).train;
        for step in 1..=plan.steps() {
            let rows = batch(plan, stores, step, RankSlice::WHOLE).unwrap();
            check_rows(&rows, |sample| match sample.source {
                4 => Plain::new(&math),
                at => Plain::new(&trained(at).1),
            });
            let pieces = explain::pieces(plan, stores, &rows.samples).unwrap();
            for (sample, pieces) in rows.samples.iter().zip(pieces) {
                prop_assert_eq!(&naive.sample(sample.sample).unwrap(), sample);
                for piece in pieces.iter().filter(|_| sample.source < 4) {
                    let (numbers, documents) = trained(sample.source);
                    let at = piece.document as usize;
                    let before: usize = documents[..at].iter().map(Vec::len).sum();
                    prop_assert_eq!(piece.record.first_token, before as u64);
                    prop_assert_eq!(piece.record.tokens, documents[at].len() as u64);
                    prop_assert_eq!(piece.record.id.as_ref().unwrap(), &format!("web-{}", numbers[at]));
                }
            }
        }
    }

    /// Documents are found by their ids in their buckets alone, and held-out text is divided by the same rule.
    #[test]
    fn every_document_is_in_its_bucket(web in web()) {
        let (_dir, path) = store(&web);
        let all: Vec<_> = (0..4).map(|at| picked(&web.train, &web.kept, at)).collect();
        prop_assume!(all[..3].iter().any(|(numbers, _)| !numbers.is_empty()));
        let opened = open(&path, RULE, "", MIX).unwrap();
        let stores = opened.stores().unwrap();
        for (at, name) in ["web/0", "web/1", "web/2", "web/none"].iter().enumerate() {
            let (numbers, _) = &all[at];
            let stream = stores.stream(name, Split::Train).unwrap();
            for number in (0..web.train.len()).step_by(7) {
                let place = numbers.iter().position(|one| *one == number).map(|place| place as u64);
                prop_assert_eq!(stream.find(&format!("web-{number}")).unwrap(), place.into_iter().collect::<Vec<_>>());
            }
            let held = picked(&web.validation, &web.kept[web.train.len()..], at).1;
            let windows = validation::windows(stores, name, 50).unwrap();
            prop_assert_eq!(windows, (held.concat().len() as u64).div_ceil(50));
            check_rows(&validation::batch(stores, name, 50, 0, windows).unwrap(), |_| Plain::new(&held));
        }
    }
}

/// A source of three buckets, whose documents alternate.
fn alternating() -> Text {
    let lengths: Vec<u64> = (0..1500).map(|i| 1 + i * 7 % 90).collect();
    let kept = (0..1500).map(|i| Some((f64::from(i % 10) / 10.0).to_string())).collect();
    Text { kept, ..Text::generate("web", &lengths, 60_000) }
}

fn files(store: &Path) -> Vec<PathBuf> {
    let found = fs::read_dir(store.with_file_name("store.buckets")).unwrap();
    let mut found: Vec<_> = found.map(|it| it.unwrap().path()).collect();
    found.sort();
    found
}

#[test]
fn selections_are_kept_and_never_believed_without_their_digest() {
    let (_dir, path) = store(&alternating());
    // Reads every run of every bucket: a page of a file is checked when it is read.
    let digest = || -> Result<_> {
        let opened = open(&path, RULE, "", MIX)?;
        let stores = opened.stores().unwrap();
        for (name, split) in
            ["0", "1", "2", "none"].iter().flat_map(|name| Split::ALL.map(|split| (name, split)))
        {
            stores.stream(&format!("web/{name}"), split)?.block_tokens()?;
        }
        Ok(opened.plan.digest_through(opened.plan.steps()))
    };
    let made = digest().unwrap();
    let kept = files(&path);
    assert_eq!(kept.len(), 8, "a file for each bucket and split");
    let content: Vec<_> = kept.iter().map(|file| fs::read(file).unwrap()).collect();
    assert_eq!(digest().unwrap(), made, "read");
    fs::remove_file(&kept[3]).unwrap();
    assert_eq!(digest().unwrap(), made, "made again");
    fs::remove_dir_all(path.with_file_name("store.buckets")).unwrap();
    assert_eq!(digest().unwrap(), made, "made again");
    assert_eq!(files(&path), kept);
    assert!(kept.iter().zip(&content).all(|(file, bytes)| fs::read(file).unwrap() == *bytes));
    let (file, bytes) = kept.iter().zip(&content).max_by_key(|(_, bytes)| bytes.len()).unwrap();
    for at in (0..bytes.len()).step_by(bytes.len() / 40) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(file, damaged).unwrap();
        let fault = digest().unwrap_err();
        assert_eq!(fault.class(), Class::Data, "byte {at}: {fault}");
        assert!(fault.to_string().contains("remove it"), "{fault}");
    }
    for length in [0, 15, 16, 47, bytes.len() - 1] {
        fs::write(file, &bytes[..length]).unwrap();
        assert_eq!(digest().unwrap_err().class(), Class::Data, "cut to {length}");
    }
    // A complete file, but of another bucket: its name does not match its key.
    let other = kept.iter().position(|one| one != file).unwrap();
    fs::write(file, &content[other]).unwrap();
    let fault = digest().unwrap_err();
    assert!(fault.to_string().contains("not what its name says"), "{fault}");
    fs::write(file, bytes).unwrap();
    assert_eq!(digest().unwrap(), made);
    // Another edge is another plan, though the names are the same.
    let other = RULE.replace("0.5", "0.6");
    let other = open(&path, &other, "", MIX).unwrap().plan;
    assert_ne!(other.digest_through(other.steps()), made);
}

#[test]
fn processes_that_select_at_once_keep_the_same_files() {
    let (_dir, path) = store(&alternating());
    std::thread::scope(|scope| {
        let open = || open(&path, RULE, "", MIX).unwrap().plan.digest_through(15);
        let opened: Vec<_> = (0..6).map(|_| scope.spawn(open)).collect();
        let digests: Vec<_> = opened.into_iter().map(|one| one.join().unwrap()).collect();
        assert!(digests.windows(2).all(|two| two[0] == two[1]));
    });
    assert_eq!(files(&path).len(), 8, "nothing else is left");
}

/// A bucket is packed as a source of its documents is.
#[test]
fn buckets_are_packed() {
    let web = alternating();
    let (_dir, path) = store(&web);
    let curve = "packing = \"best-fit\"\nlengths = { 32 = 1, 64 = 1, 128 = 2 }\ncurve = { weights = [1, 0, 1] }";
    let opened = open(&path, RULE, curve, MIX).unwrap();
    let (plan, stores) = (&opened.plan, opened.stores().unwrap());
    for step in 1..=plan.steps() {
        let rows = batch(plan, stores, step, RankSlice::WHOLE).unwrap();
        check_rows(&rows, |sample| match plan.sources()[sample.source].name.as_str() {
            "web/0" => Plain::new(&picked(&web.train, &web.kept, 0).1),
            "web/2" => Plain::new(&picked(&web.train, &web.kept, 2).1),
            _ => Plain::new(&Text::generate("math", &[900], 60_000).train),
        });
        for sample in &rows.samples {
            for span in &sample.spans {
                let visits = plan.visits(sample.source, span.start..span.start + 1).unwrap();
                assert!(visits.iter().any(|visit| visit.sample == sample.sample));
            }
        }
    }
}

#[test]
fn what_cannot_be_cut_is_refused_with_its_place() {
    let mut web = alternating();
    let (_dir, path) = store(&web);
    let refused = |path: &Path, rule: &str, mix: &str| {
        let fault = open(path, rule, "", mix).err().unwrap();
        assert_eq!(fault.class(), Class::Usage, "{fault}");
        fault.to_string()
    };
    let shown = refused(&path, "column = \"score\", edges = [1]", MIX);
    assert!(shown.contains("does not keep the column \"score\""), "{shown}");
    assert!(shown.contains("run.toml:") && shown.contains("keep = [\"score\"]"), "{shown}");
    let shown = refused(&path, "column = \"quality\", edges = [0.5, 3]", "\"web/2\" = 1");
    assert!(shown.contains("source \"web/2\" has no text to train on"), "{shown}");
    let shown = refused(&path, RULE, "\"web/3\" = 1");
    assert!(shown.contains("web/none") || shown.contains("web/0"), "{shown}");
    web.kept[77] = Some("good".to_owned());
    let (_dir, path) = store(&web);
    let shown = refused(&path, RULE, MIX);
    assert!(shown.contains("\"quality\" of document \"web-77\" is not a number"), "{shown}");
    assert!(shown.contains("found:  \"good\""), "{shown}");
    assert!(files(&path).is_empty(), "nothing is left of a pass that failed");
}
