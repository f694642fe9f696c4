//! Every byte of a store flipped, every file truncated at many lengths and removed: each is found, with its file.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use contract::{Class, Digest, Key, Purpose, draw};
use store::documents::Documents;
use store::write::block_offset;
use store::{BLOCK_TOKENS, Manifest, Split, open};

use crate::build::{Outcome, build};
use crate::corpus::Corpus;
use crate::testing::{Workbench, options};
use crate::verify::verify;

/// The findings of `verify`: damages or a fault, as text, with the reported documents.
fn said(store: &Path) -> Vec<(String, Option<u64>, Option<String>)> {
    match verify(store, true) {
        Ok(report) => report
            .damages
            .into_iter()
            .map(|damage| (damage.to_string(), damage.block, damage.documents))
            .collect(),
        Err(fault) => {
            assert_eq!(fault.class(), Class::Data, "{fault}");
            vec![(fault.to_string(), None, None)]
        }
    }
}

/// A small store with everything that a store can hold: two splits, and the lists that steps write.
fn whole(bench: &Workbench) -> (PathBuf, Manifest) {
    // Pairs of equal documents, with words that no other has.
    let text = |i: u64| (0..9).map(|word| format!("word{}x{word} ", i / 2)).collect::<String>();
    let line = |i: u64| serde_json::json!({"id": format!("d{i}"), "text": text(i)}).to_string();
    let lines: Vec<String> = (0..24).map(line).collect();
    bench.write("few.jsonl", lines.join("\n"));
    let item = serde_json::json!({"text": text(6)}).to_string();
    bench.write("eval.jsonl", item + "\n");
    let corpus = bench.write(
        "few.toml",
        "tokenizer = \"tokenizer.json\"\nend = \"<|end|>\"\nunit = 64\nvalidation = \"1/4\"\n\
         [[source]]\nname = \"web\"\nfiles = [\"few.jsonl\"]\nid = \"id\"\n\
         [[prepare]]\nstep = \"exact-duplicates\"\n\
         [[prepare]]\nstep = \"decontaminate\"\nfiles = [\"eval.jsonl\"]\nwords = 4\n",
    );
    let store = bench.path("store");
    match build(&Corpus::read(&corpus).unwrap(), &store, options(1)).unwrap() {
        Outcome::Built { manifest, .. } => (store, manifest),
        Outcome::UpToDate(_) => panic!("there was a store already"),
    }
}

/// A command checks that all files exist before it reports that there is nothing to do.
#[test]
fn a_store_that_is_not_whole_is_not_up_to_date() {
    let bench = Workbench::new(1);
    let (store, manifest) = whole(&bench);
    let corpus = Corpus::read(bench.path("few.toml")).unwrap();
    let again = || build(&corpus, &store, options(1));
    assert!(matches!(again().unwrap(), Outcome::UpToDate(_)));
    for file in manifest.files() {
        if [open::MANIFEST, open::MANIFEST_SUM].contains(&file.path.as_str()) {
            continue;
        }
        let path = store.join(&file.path);
        let bytes = fs::read(&path).unwrap();
        let damaged = |what: &str| {
            let fault = again().map(drop).unwrap_err();
            assert_eq!(fault.class(), Class::Data, "{fault}");
            let told = fault.to_string();
            assert!(told.contains(&file.path) && told.contains(what), "{told}");
            assert!(told.contains("remove the folder and build"), "{told}");
        };
        fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        damaged(if file.record.is_some() { "truncated" } else { "changed" });
        fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
        damaged(if file.record.is_some() { "too long" } else { "changed" });
        fs::remove_file(&path).unwrap();
        damaged("missing");
        fs::write(&path, &bytes).unwrap();
    }
    assert!(matches!(again().unwrap(), Outcome::UpToDate(_)));
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

#[test]
fn the_manifest_lists_every_file_of_its_store() {
    let bench = Workbench::new(1);
    let (store, manifest) = whole(&bench);
    let mut listed: Vec<_> = manifest.files().iter().map(|file| store.join(&file.path)).collect();
    assert_eq!(listed.last(), Some(&store.join(open::MANIFEST)));
    for file in manifest.files() {
        let bytes = fs::read(store.join(&file.path)).unwrap();
        let found = (bytes.len() as u64, Digest::of_bytes(&bytes));
        assert!(file.record.is_none_or(|record| (record.bytes, record.digest) == found));
    }
    listed.sort();
    assert_eq!(listed, files(&store));
    // Both lists: what the steps removed, and what an evaluation set shares with the text.
    assert_eq!(manifest.sources[0].lists().count(), 2);
}

/// The range of a token file's values, and the ids of the documents in its only block.
fn values(store: &Path, manifest: &Manifest, path: &Path) -> Option<(Range<usize>, Vec<String>)> {
    Split::ALL.into_iter().find_map(|split| {
        let shard = &manifest.sources[0].stream(split).shards[0];
        let folder = open::part_folder(store, "web", shard.part);
        if path != folder.join(&shard.token_file.name) {
            return None;
        }
        assert!(shard.tokens < BLOCK_TOKENS);
        let start = block_offset(2 * BLOCK_TOKENS, 0) as usize;
        let file = open::part_file(store, "web", shard.part, &shard.document_file.name);
        let documents = Documents::open(&file).unwrap();
        let ids = documents.map(|document| document.unwrap().shown_id().into_owned()).collect();
        Some((start..start + 2 * shard.tokens as usize, ids))
    })
}

fn name(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

#[test]
fn a_flipped_bit_in_any_byte_is_found_and_named() {
    let bench = Workbench::new(1);
    let (store, manifest) = whole(&bench);
    assert_eq!(said(&store), []);
    let all = files(&store);
    assert_eq!(all.len(), 3 + 2 * 4 + 3, "{all:?}");
    let (mut flips, mut texts) = (0, 0);
    for path in &all {
        let bytes = fs::read(path).unwrap();
        let values = values(&store, &manifest, path);
        let file = fs::File::options().write(true).open(path).unwrap();
        let key = Key::from_seed(21).child(name(path));
        // In other files, one byte in five, unless all are requested.
        let every = std::env::var_os("FULL").is_some() || values.is_some();
        for at in (0..bytes.len()).step_by(if every { 1 } else { 5 }) {
            let bit = draw(key, Purpose::Generate, at as u64) % 8;
            file.write_all_at(&[bytes[at] ^ 1 << bit], at as u64).unwrap();
            let found = said(&store);
            assert!(
                found.len() == 1 && found[0].0.contains(name(path)),
                "{} byte {at} bit {bit}: {found:?}",
                path.display()
            );
            if let Some((_, ids)) = values.as_ref().filter(|(range, _)| range.contains(&at)) {
                let (_, block, documents) = &found[0];
                assert_eq!(*block, Some(0));
                let wanted = format!(
                    "{}: {}",
                    contract::counted(ids.len(), "document"),
                    ids[..ids.len().min(4)].join(", ")
                );
                assert!(
                    documents.as_ref().is_some_and(|d| d.starts_with(&wanted)),
                    "{documents:?}"
                );
                texts += 1;
            }
            file.write_all_at(&bytes[at..=at], at as u64).unwrap();
            flips += 1;
        }
    }
    assert_eq!(said(&store), []);
    let tokens = manifest.sources[0].train.tokens + manifest.sources[0].validation.tokens;
    assert_eq!(texts, 2 * tokens);
    eprintln!("{flips} flips in {} files, {texts} of them in tokens", all.len());
}

#[test]
fn a_file_cut_anywhere_or_gone_or_grown_is_found_and_named() {
    let bench = Workbench::new(1);
    let (store, _) = whole(&bench);
    let mut cases = 0;
    for path in files(&store) {
        let bytes = fs::read(&path).unwrap();
        let spread = (0..bytes.len()).step_by((bytes.len() / 24).max(1));
        let edges = (0..bytes.len().min(12)).chain(bytes.len().saturating_sub(12)..bytes.len());
        let mut damaged: Vec<Option<Vec<u8>>> =
            spread.chain(edges).map(|length| Some(bytes[..length].to_vec())).collect();
        damaged.extend([None, Some([&bytes[..], b"\0"].concat()), Some(bytes.repeat(2))]);
        for damaged in damaged {
            match &damaged {
                Some(bytes) => fs::write(&path, bytes).unwrap(),
                None => fs::remove_file(&path).unwrap(),
            }
            let length = damaged.map(|bytes| bytes.len());
            // A folder without a manifest is not a store, and is reported by its own name.
            let wanted = match (name(&path), length) {
                ("manifest.json", None) => "no manifest.json",
                (name, _) => name,
            };
            let found = said(&store);
            assert!(
                found.iter().any(|(what, ..)| what.contains(wanted)),
                "{} as {length:?} bytes: {found:?}",
                path.display()
            );
            cases += 1;
        }
        fs::write(&path, bytes).unwrap();
    }
    assert_eq!(said(&store), []);
    eprintln!("{cases} cuts, removals and additions");
}
