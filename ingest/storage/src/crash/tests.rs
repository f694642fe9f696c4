//! Checks that the simulated crashes include every crash that a real machine can have.

use std::fs;
use std::io::Write as _;
use std::path::Path;

use proptest::prelude::*;
use store::disk::{self, OutputFile};

use super::*;

/// Every content of `name` that a crash may leave, including none.
fn contents(recording: &Recording, name: &str) -> Vec<Option<Vec<u8>>> {
    let of = |state: CrashState| state.tree.get(Path::new(name)).cloned().flatten();
    let mut contents: Vec<_> = recording.states(usize::MAX).into_iter().map(of).collect();
    contents.sort();
    contents.dedup();
    contents
}

#[test]
fn a_whole_file_is_the_old_one_or_the_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "before").unwrap();
    let (recording, _) = Recording::of(folder.path(), || disk::write_atomic(&path, b"after"));
    assert_eq!(contents(&recording, "file"), [Some(b"after".to_vec()), Some(b"before".to_vec())]);
    let last = recording.after(recording.acts(), UnsyncedLoss::All);
    assert_eq!(last[Path::new("file")], Some(b"after".to_vec()), "the name has to last");
}

#[test]
fn what_is_not_synced_is_lost_torn_or_zero() {
    let folder = tempfile::tempdir().unwrap();
    let (path, other) = (folder.path().join("file"), folder.path().join("other"));
    let (recording, ()) = Recording::of(folder.path(), || {
        let mut file = OutputFile::create(&other).unwrap();
        file.write_all(&[7; 1000]).unwrap();
        disk::rename(&other, &path).unwrap();
        disk::sync_folder(folder.path()).unwrap();
    });
    let contents = contents(&recording, "file");
    assert!(contents.contains(&None) && contents.contains(&Some(Vec::new())));
    assert!(contents.contains(&Some(vec![7; 1000])) && contents.contains(&Some(vec![0; 1000])));
    assert!(contents.iter().flatten().any(|torn| (1..1000).contains(&torn.len())));
}

#[test]
fn a_synced_file_has_no_name_before_its_folder_is_synced() {
    let folder = tempfile::tempdir().unwrap();
    let (recording, ()) = Recording::of(folder.path(), || {
        let deep = folder.path().join("a");
        fs::create_dir(&deep).unwrap();
        fs::remove_dir(&deep).unwrap();
        let mut file = OutputFile::create(&folder.path().join("file")).unwrap();
        file.write_all(b"bytes").unwrap();
        file.sync().unwrap();
    });
    let contents = contents(&recording, "file");
    assert!(contents.contains(&None) && contents.contains(&Some(b"bytes".to_vec())));
    assert!(recording.after(recording.acts(), UnsyncedLoss::All).is_empty());
}

#[test]
#[should_panic = "written past the door"]
fn a_writer_that_goes_past_the_door_is_found_out() {
    let folder = tempfile::tempdir().unwrap();
    let _ = Recording::of(folder.path(), || fs::write(folder.path().join("file"), "x").unwrap());
}

/// Random acts on a few names: impossible ones are skipped.
fn act(root: &Path, kind: u8, from: usize, to: usize) {
    let names = ["a", "b", "c", "a/x", "b/x", "b/y", "c/z/t", "c/z"];
    let [from, to] = [from, to].map(|name| root.join(names[name % names.len()]));
    match kind {
        0 => drop(disk::create_folder(&from)),
        1 => drop(OutputFile::create(&from).map(|mut file| file.write_all(b"some bytes"))),
        2 => drop(disk::write_atomic(&from, b"whole")),
        3 => drop(
            OutputFile::create(&from)
                .map(|mut file| file.write_all(b"other bytes").and_then(|()| file.sync())),
        ),
        4 if !to.starts_with(&from) && !to.exists() => drop(disk::rename(&from, &to)),
        5 => drop(disk::link(&from, &to)),
        6 => drop(disk::remove(&from)),
        _ => drop(disk::sync_folder(&from)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_kill_loses_nothing_and_neither_does_a_crash_after_a_sync(
        acts in prop::collection::vec((0u8..8, 0usize..8, 0usize..8), 1..40),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let (recording, ()) = Recording::of(root, || {
            acts.iter().for_each(|&(kind, from, to)| act(root, kind, from, to));
            for (name, bytes) in tree(root) {
                if let Some(bytes) = bytes {
                    disk::write_atomic(&root.join(name), &bytes).unwrap();
                }
            }
            disk::sync_folders(root).unwrap();
        });
        let there = tree(root);
        use UnsyncedLoss as Loss;
        for loss in [Loss::All, Loss::Bytes, Loss::Zeros, Loss::Names, Loss::Drawn(1), Loss::Drawn(2)] {
            prop_assert_eq!(&recording.after(recording.acts(), loss), &there);
        }
    }
}
