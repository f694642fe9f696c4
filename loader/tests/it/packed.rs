//! Fear: that a packed document is lost, seen twice, cut although it fits, or joined to another; that a damaged file of
//! packs is used.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use contract::{Class, Result};
use loader::{OpenedCurriculum, RankSlice, batch, explain};
use proptest::prelude::*;

use crate::naive::{Plain, check_rows};
use crate::support::{PhaseText, Text, curriculum, scratch, write_store};

const LENGTHS: [u32; 3] = [16, 32, 64];

fn open(store: &Path, seed: u64) -> Result<OpenedCurriculum> {
    let phases: Vec<PhaseText> =
        LENGTHS.iter().map(|length| PhaseText(40, *length, 3, 1, "a = 1, b = 1")).collect();
    let text = curriculum(&[store], &["a", "b"], &phases)
        .replace(
            "[source.a]\n",
            "[source.a]\npacking = \"best-fit\"\nlengths = { 16 = 3, 32 = 1, 64 = 1 }\n",
        )
        .replace("seed = 7", &format!("seed = {seed}"));
    OpenedCurriculum::open_text(store.with_file_name("run.toml"), text)
}

/// A store in a folder of its own, so that packs can be stored next to it.
fn store(lengths: &[u64]) -> (tempfile::TempDir, PathBuf, Vec<Text>) {
    let texts = vec![Text::generate("a", lengths, 60_000), Text::generate("b", &[500], 60_000)];
    let dir = scratch();
    let path = dir.path().join("store");
    fs::create_dir(&path).unwrap();
    write_store(&path, &texts, 2, 128);
    (dir, path, texts)
}

/// The only file of packs next to a store.
fn kept(store: &Path) -> PathBuf {
    let mut names =
        fs::read_dir(store.with_file_name("store.packs")).unwrap().map(|it| it.unwrap().path());
    let found = names.next().unwrap();
    assert_eq!(names.next(), None, "nothing else is left");
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn every_document_is_in_one_length_once_an_epoch_and_whole_where_it_fits(
        lengths in prop::collection::vec(prop_oneof![4 => 1u64..40, 1 => 1u64..200], 30..90), seed: u32,
    ) {
        let (_dir, path, texts) = store(&lengths);
        let opened = open(&path, u64::from(seed));
        prop_assume!(opened.is_ok(), "no document is packed at one of the lengths");
        let opened = opened.unwrap();
        let (plan, stores) = (&opened.plan, opened.stores().unwrap());
        let plain: Vec<Plain> = texts.iter().map(|text| Plain::new(&text.train)).collect();
        // By length and epoch: how often each document's tokens were seen.
        let mut seen: BTreeMap<(u32, u64), BTreeMap<u64, u64>> = BTreeMap::new();
        for step in 1..=plan.steps() {
            let found = batch(plan, stores, step, RankSlice::WHOLE).unwrap();
            check_rows(&found, |sample| {
                let name = &plan.sources()[sample.source].name;
                let of = texts.iter().position(|text| text.name == *name).unwrap();
                Plain { tokens: plain[of].tokens.clone(), document: plain[of].document.clone() }
            });
            let pieces = explain::pieces(plan, stores, &found.samples).unwrap();
            for (sample, pieces) in found.samples.iter().zip(pieces) {
                if plan.sources()[sample.source].name != "a" {
                    continue;
                }
                prop_assert_eq!(sample.spans.len(), pieces.len(), "a span is of one document");
                let of_epoch = seen.entry((found.seq_len, sample.epoch)).or_default();
                for piece in pieces {
                    let (size, part) = (piece.record.tokens, piece.tokens.end - piece.tokens.start);
                    let whole = size <= u64::from(found.seq_len);
                    let cut = part == u64::from(found.seq_len) || piece.tokens.end == piece.record.first_token + size;
                    prop_assert!(if whole { part == size } else { cut }, "{} of {}", part, size);
                    *of_epoch.entry(piece.document).or_default() += part;
                }
            }
        }
        let mut home: BTreeMap<u64, u32> = BTreeMap::new();
        for ((length, epoch), documents) in &seen {
            let ended = seen.contains_key(&(*length, epoch + 1));
            for (document, tokens) in documents {
                prop_assert_eq!(*home.entry(*document).or_insert(*length), *length, "one length for each document");
                let size = lengths[*document as usize];
                prop_assert!(if ended { *tokens == size } else { *tokens <= size }, "no token twice in an epoch");
            }
            if ended {
                let all = plan.packs(plan.sources().iter().position(|it| it.name == "a").unwrap()).unwrap();
                let of_length = all.lengths().iter().find(|it| it.seq_len == *length).unwrap();
                prop_assert_eq!(documents.len() as u64, of_length.documents, "an epoch has every document");
                prop_assert_eq!(documents.values().sum::<u64>(), of_length.tokens());
            }
        }
    }
}

#[test]
fn packs_are_kept_and_never_believed_without_their_digest() {
    let lengths: Vec<u64> = (0..200).map(|i| 1 + i * 7 % 90).collect();
    let (_dir, path, _) = store(&lengths);
    // Reads every pack, and finds the packs of every token: a page of the file is checked when it is read.
    let digest = || -> Result<_> {
        let opened = open(&path, 1)?;
        let plan = &opened.plan;
        (0..plan.samples()).try_for_each(|sample| plan.sample(sample).map(|_| ()))?;
        let source = plan.sources().iter().position(|it| it.name == "a").unwrap();
        plan.visits(source, 0..plan.sources()[source].tokens)?;
        Ok(plan.digest_through(plan.steps()))
    };
    let made = digest().unwrap();
    let file = kept(&path);
    let bytes = fs::read(&file).unwrap();
    assert_eq!(digest().unwrap(), made, "read");
    assert_eq!(fs::read(&file).unwrap(), bytes);
    fs::remove_file(&file).unwrap();
    assert_eq!(digest().unwrap(), made, "made again");
    assert_eq!(fs::read(kept(&path)).unwrap(), bytes, "by the same bytes");
    // Another seed permutes the same packs differently.
    assert_ne!(
        open(&path, 2).unwrap().plan.sample(0).unwrap(),
        open(&path, 1).unwrap().plan.sample(0).unwrap()
    );
    assert_eq!(kept(&path), file);
    for at in (0..bytes.len()).step_by(bytes.len() / 40) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(&file, damaged).unwrap();
        let fault = digest().unwrap_err();
        assert_eq!(fault.class(), Class::Data, "byte {at}: {fault}");
        assert!(fault.to_string().contains("remove it"), "{fault}");
    }
    for length in [0, 15, 16, 100, bytes.len() - 1] {
        fs::write(&file, &bytes[..length]).unwrap();
        assert_eq!(digest().unwrap_err().class(), Class::Data, "cut to {length}");
    }
    // A complete file, but of another source: its name does not match its key.
    fs::write(&file, &bytes).unwrap();
    let (_other_dir, other, _) = store(&lengths[..150]);
    open(&other, 1).unwrap();
    fs::copy(kept(&other), &file).unwrap();
    let fault = digest().unwrap_err();
    assert!(fault.to_string().contains("not what its name says"), "{fault}");
}

#[test]
fn ranks_that_make_packs_at_once_keep_one_file() {
    let lengths: Vec<u64> = (0..3000).map(|i| 1 + i * 7 % 90).collect();
    let (_dir, path, _) = store(&lengths);
    std::thread::scope(|scope| {
        let opened: Vec<_> = (0..6).map(|_| scope.spawn(|| open(&path, 1).unwrap())).collect();
        let digests: Vec<_> =
            opened.into_iter().map(|one| one.join().unwrap().plan.digest_through(120)).collect();
        assert!(digests.windows(2).all(|two| two[0] == two[1]));
    });
    kept(&path);
}
