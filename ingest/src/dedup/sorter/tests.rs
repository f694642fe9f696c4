//! Compares sorting on disk with a set in memory, and what is left on a full disk with its promise.

use std::collections::BTreeSet;
use std::fs;

use contract::Class;
use proptest::prelude::*;
use store::disk::watch;

use super::*;

fn all<const N: usize>(mut merge: Merge<'_, N>) -> Vec<[u64; N]> {
    let mut found = Vec::new();
    while let Some(record) = merge.next().unwrap() {
        assert_ne!(merge.peek(), Some(record));
        found.push(record);
    }
    found
}

/// Sorts records with a budget of so many in memory.
fn sorted(records: &[[u64; 2]], held: usize) -> Vec<[u64; 2]> {
    let folder = tempfile::tempdir().unwrap();
    let size = size_of::<[u64; 2]>();
    let scratch = Scratch::new(folder.path(), SORTERS * held * size);
    let mut sorter = scratch.sorter();
    for record in records {
        sorter.push(*record).unwrap();
        assert!(sorter.memory.records.len() <= held && sorter.memory.records.capacity() == held);
    }
    let merge = sorter.finish().unwrap();
    // The files are open, but their names are free.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let found = all(merge);
    assert_eq!(scratch.sorters.get(), 0);
    found
}

proptest! {
    #[test]
    fn any_budget_sorts_as_a_set(
        records in prop::collection::vec((prop_oneof![0u64..5, any::<u64>()], 0u64..5), 0..80),
        held in 1usize..50,
    ) {
        let records: Vec<_> = records.into_iter().map(|(a, b)| [a, b]).collect();
        let set: Vec<_> = BTreeSet::from_iter(records.clone()).into_iter().collect();
        prop_assert_eq!(sorted(&records, held), set);
    }
}

/// More runs than are merged at the same time.
#[test]
fn runs_are_merged_in_several_rounds() {
    for count in [RUNS, RUNS + 1, RUNS + 2, 3 * RUNS] {
        let records: Vec<_> = (0..count as u64).map(|n| [n.wrapping_mul(BIG) % 1009, n]).collect();
        let mut wanted = records.clone();
        wanted.sort_unstable();
        assert_eq!(sorted(&records, 1), wanted);
    }
}

const BIG: u64 = 0x9e37_79b9_7f4a_7c15;

/// Fills a sorter until it has been written to the disk several times, and reads it.
fn fill(folder: &Path) -> Result<u64> {
    let scratch = Scratch::new(folder, 1 << 10);
    let mut sorter = scratch.sorter::<3>();
    for n in 0..500 {
        sorter.push([n, n, n])?;
    }
    let (mut merge, mut count) = (sorter.finish()?, 0);
    while merge.next()?.is_some() {
        count += 1;
    }
    Ok(count)
}

#[test]
fn a_disk_that_is_full_or_missing_is_a_fault_that_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(fill(folder.path()), Ok(500));
    for room in [0, 100, 5_000, 10_000] {
        let full = watch(folder.path(), room);
        let fault = fill(folder.path()).unwrap_err();
        let place = folder.path().display().to_string();
        assert!(fault.class() == Class::Machine && fault.to_string().contains(&place), "{fault}");
        drop(full);
    }
    let missing = folder.path().join("missing");
    let fault = fill(&missing).unwrap_err().to_string();
    assert!(fault.contains("missing/1: cannot create it"), "{fault}");
}

#[test]
fn a_file_that_was_shortened_is_a_fault_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let scratch = Scratch::new(folder.path(), 1 << 10);
    let mut writer = scratch.writer().unwrap();
    (0..10).for_each(|n| writer.push([n, n]).unwrap());
    let records = writer.finish().unwrap();
    fs::write(&records.path, [0; 90]).unwrap();
    let mut reader = records.read().unwrap();
    let fault = (0..10).find_map(|_| reader.next().err()).unwrap().to_string();
    assert!(fault.contains(&records.path.display().to_string()), "{fault}");
    fs::remove_file(&records.path).unwrap();
    assert!(records.read().is_err());
}
