//! Forged manifests with agreeing digests, and links and pipes in place of files: nothing panics, nothing outside the
//! folder is read, and a store that `verify` accepts can be opened.

use std::os::unix::fs::symlink;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::{Value, json};

use super::*;
use contract::Result;

/// Reads everything in a store, as the commands do.
fn read(folder: &Path) -> Result<()> {
    let store = Store::open(folder)?;
    store.tokenizer()?;
    for source in 0..store.manifest().sources.len() {
        for split in Split::ALL {
            let stream = store.stream(source, split);
            let StreamRecord { tokens, documents, .. } = *stream.record();
            let (mut ids, mut starts) = (Vec::new(), Vec::new());
            for record in stream.documents(std::slice::from_ref(&(0..documents)))? {
                let range = record.first_token..record.first_token + record.tokens;
                stream.read_tokens(range, &mut ids)?;
            }
            stream.starts_in(0..tokens, &mut starts)?;
            if tokens > 0 {
                stream.document(stream.document_of_token(tokens - 1)?)?;
            }
            stream.find("doc-3")?;
        }
    }
    Ok(())
}

/// The paths of a value's leaves and lists.
fn places(value: &Value, at: &str, out: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(key, inner)| places(inner, &format!("{at}/{key}"), out));
        }
        Value::Array(list) => {
            out.push(at.to_owned());
            (0..)
                .zip(list)
                .for_each(|(i, inner): (usize, _)| places(inner, &format!("{at}/{i}"), out));
        }
        _ => out.push(at.to_owned()),
    }
}

/// What a forger may put in place of a value.
fn forgeries(value: &Value) -> Vec<Value> {
    let mut all = vec![Value::Null, json!(0), json!(u64::MAX), json!(""), json!([])];
    match value {
        Value::Number(number) => {
            let number = number.as_u64().unwrap();
            let near = [number.wrapping_sub(1), number + 1, number * 2, 1, 7, 1 << 33];
            all.extend(near.map(|number| json!(number)));
            all.extend([1u64 << 52, 1 << 62, u64::MAX - 7].map(|number| json!(number)));
        }
        Value::String(_) => {
            let names =
                ["..", ".", "/etc/passwd", "../outside", "web/../..", "a\u{1b}[31m", "a\0b"];
            all.extend(names.map(|name| json!(name)));
            all.extend(
                ["manifest.json", "train", "tokens-train-00000.sums"].map(|name| json!(name)),
            );
            all.extend([json!("0".repeat(32)), json!("f".repeat(64)), json!("x".repeat(300))]);
        }
        Value::Array(list) => {
            let reversed = list.iter().rev().cloned().collect();
            all.extend([Value::Array([&list[..], &list[..]].concat()), Value::Array(reversed)]);
        }
        _ => {}
    }
    all
}

/// Replaces the store's manifest, with digests that agree.
fn forge(folder: &Path, value: &Value) {
    let path = folder.join(open::MANIFEST);
    match serde_json::from_value::<Manifest>(value.clone()) {
        Ok(mut manifest) => {
            manifest.digest = manifest.identity();
            open::commit(folder, &manifest).unwrap();
        }
        Err(_) => {
            let bytes = serde_json::to_vec(value).unwrap();
            fs::write(folder.join(open::MANIFEST_SUM), format!("{}\n", Digest::of_bytes(&bytes)))
                .unwrap();
            fs::write(path, bytes).unwrap();
        }
    }
}

#[test]
fn a_forged_manifest_ends_in_a_fault_or_in_what_was_written() {
    let (folder, manifest) = store(2, &[5, 7], 40);
    // The target of a name that leads out of the store.
    fs::write(folder.path().parent().unwrap().join("outside"), "").unwrap();
    let honest = serde_json::to_value(&manifest).unwrap();
    let mut all = Vec::new();
    places(&honest, "", &mut all);
    let (mut refused, mut passed) = (0, 0);
    for place in &all {
        for forged in forgeries(honest.pointer(place).unwrap()) {
            let mut value = honest.clone();
            *value.pointer_mut(place).unwrap() = forged.clone();
            forge(folder.path(), &value);
            let damages = damages(folder.path());
            match read(folder.path()) {
                Ok(()) => passed += 1,
                Err(fault) => {
                    assert_eq!(fault.class(), Class::Data, "{place} = {forged}: {fault}");
                    assert!(!damages.is_empty(), "{place} = {forged} passes, yet: {fault}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > passed && passed > 20, "{refused} refused, {passed} passed");
}

/// Forged bytes in a file of a library's format, with every digest made to agree: the decoder is the first to notice,
/// and must not crash the process.
#[test]
fn forged_files_with_agreeing_digests_end_in_a_fault_or_in_what_was_read() {
    let (folder, manifest) = store(2, &[5], 40);
    let stream = open::part_folder(folder.path(), "web", 0);
    let shard = &manifest.sources[0].train.shards[0];
    let (mut refused, mut passed) = (0, 0);
    for name in [&shard.document_file.name, &shard.start_file.name] {
        let path = stream.join(name);
        let honest = fs::read(&path).unwrap();
        // The metadata, with all offsets, is at the end: test every byte there, and a sample of the bytes before.
        let places = (0..honest.len()).filter(|at| at % 7 == 0 || honest.len() - at < 600);
        for (number, at) in places.enumerate() {
            let mut bytes = honest.clone();
            bytes[at] = [!bytes[at], 0x7f, 0, 0xff, bytes[at] ^ 1][number % 5];
            fs::write(&path, &bytes).unwrap();
            let mut forged = manifest.clone();
            let shard = &mut forged.sources[0].train.shards[0];
            let record = match *name == shard.start_file.name {
                true => &mut shard.start_file,
                false => &mut shard.document_file,
            };
            record.digest = Digest::of_bytes(&bytes);
            forged.digest = forged.identity();
            open::commit(folder.path(), &forged).unwrap();
            damages(folder.path());
            match read(folder.path()) {
                Ok(()) => passed += 1,
                Err(fault) => {
                    assert_eq!(fault.class(), Class::Data, "{name}, byte {at}: {fault}");
                    refused += 1;
                }
            }
        }
        fs::write(&path, &honest).unwrap();
    }
    assert!(refused > 100 && passed > 10, "{refused} refused, {passed} passed");
}

/// A sparse file takes no disk space, and reading it would take all memory.
#[test]
fn a_forged_hole_ends_in_a_fault_of_its_file() {
    let (folder, manifest) = store(2, &[5], 40);
    let stream = open::part_folder(folder.path(), "web", 0);
    let files: [fn(&mut ShardRecord) -> &mut FileRecord; 2] =
        [|shard| &mut shard.start_file, |shard| &mut shard.sum_file];
    for file in files {
        let mut forged = manifest.clone();
        let record = file(&mut forged.sources[0].train.shards[0]);
        let path = stream.join(&record.name);
        let honest = fs::read(&path).unwrap();
        // As large as this file system allows.
        let holed = fs::OpenOptions::new().write(true).open(&path).unwrap();
        let mut sizes = (30..60).rev().map(|power| 1 << power);
        record.bytes = sizes.find(|bytes| holed.set_len(*bytes).is_ok()).unwrap();
        forged.digest = forged.identity();
        open::commit(folder.path(), &forged).unwrap();
        let fault = read(folder.path()).unwrap_err();
        assert_eq!(fault.class(), Class::Data, "{fault}");
        assert!(fault.to_string().contains(name(&path)), "{fault}");
        fs::write(&path, honest).unwrap();
    }
}

#[test]
fn a_link_or_a_pipe_in_a_files_place_is_refused_and_named() {
    let (folder, _) = store(2, &[5, 7], 40);
    let elsewhere = tempfile::tempdir().unwrap();
    for path in files(folder.path()) {
        let copy = elsewhere.path().join(name(&path));
        fs::copy(&path, &copy).unwrap();
        fs::remove_file(&path).unwrap();
        for pipe in [false, true] {
            match pipe {
                true => mknodat(CWD, &path, FileType::Fifo, Mode::RWXU, 0).unwrap(),
                false => symlink(&copy, &path).unwrap(),
            }
            let fault = read(folder.path()).unwrap_err();
            assert_eq!(fault.class(), Class::Data, "{fault}");
            assert!(fault.to_string().contains(name(&path)), "{fault}");
            let found = damages(folder.path());
            let word = if pipe { "regular file" } else { "link" };
            assert!(
                found.iter().any(|what| what.contains(name(&path)) && what.contains(word)),
                "{found:?}"
            );
            fs::remove_file(&path).unwrap();
        }
        fs::copy(&copy, &path).unwrap();
    }
    assert_eq!(damages(folder.path()), Vec::<String>::new());
}

#[test]
fn a_folder_that_is_a_link_is_refused_and_the_store_itself_may_be_one() {
    let (folder, _) = store(2, &[5, 7], 40);
    let elsewhere = tempfile::tempdir().unwrap();
    let link = elsewhere.path().join("link");
    symlink(folder.path(), &link).unwrap();
    read(&link).unwrap();
    assert_eq!(damages(&link), Vec::<String>::new());
    for inner in ["web/00000", "web"] {
        let (path, moved) = (folder.path().join(inner), elsewhere.path().join("moved"));
        fs::rename(&path, &moved).unwrap();
        symlink(&moved, &path).unwrap();
        let fault = read(folder.path()).unwrap_err();
        assert!(fault.class() == Class::Data && fault.to_string().contains("link"), "{fault}");
        assert!(damages(folder.path()).iter().all(|what| what.contains("is a link")));
        fs::remove_file(&path).unwrap();
        fs::rename(&moved, &path).unwrap();
    }
    read(folder.path()).unwrap();
}

#[test]
fn a_manifest_without_its_sum_is_no_path_that_was_mistyped() {
    let (folder, _) = store(2, &[5, 7], 40);
    fs::remove_file(folder.path().join(open::MANIFEST_SUM)).unwrap();
    let fault = open::manifest(folder.path()).unwrap_err();
    assert_eq!(fault.class(), Class::Data);
    assert!(fault.to_string().contains("has no digest file next to it"), "{fault}");
}
