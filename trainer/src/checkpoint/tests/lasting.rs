//! What is read of a place, and what happens where nothing can be removed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use contract::Fault;
use store::Location;
use tempfile::TempDir;

use super::super::format::BALANCE;
use super::super::medium::{Folder, Medium};
use super::super::{Checkpoints, Result, Retention, name};
use super::{LANES, layout, newest, save};
use crate::state::ownership::{self, Ownership};

/// A folder from which nothing can be removed, with a list of the files that were read.
#[derive(Debug)]
struct Lasting(Folder, Mutex<Vec<String>>);

impl Medium for Lasting {
    fn put(&self, name: &str, parts: &[&[u8]]) -> Result<store::FileRecord> {
        self.0.put(name, parts)
    }

    fn get(&self, name: &str) -> Result<Vec<u8>> {
        self.1.lock().unwrap().push(name.to_owned());
        self.0.get(name)
    }

    fn list(&self) -> Result<Vec<String>> {
        self.0.list()
    }

    fn remove(&self, _: &str) -> Result<()> {
        Err(Fault::machine("access denied"))
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.0.rename(from, to)
    }

    fn location(&self, name: &str) -> Location {
        self.0.location(name)
    }
}

/// However many ranks read, they read each file once, but for the balancing biases, which every rank holds.
#[test]
fn a_restart_reads_each_file_once() {
    let (layout, folder) = (layout(), TempDir::new().unwrap());
    let medium = Arc::new(Lasting(Folder(folder.path().to_owned()), Mutex::default()));
    let checkpoints = Checkpoints { medium: Arc::clone(&medium) as Arc<dyn Medium> };
    save(&checkpoints, &layout, 3).unwrap();
    let reader = checkpoints.open(3).unwrap();
    let reads = |world: u32| {
        let pieces = ownership::pieces(&layout.parameters, &layout.rules, world);
        medium.1.lock().unwrap().clear();
        for rank in 0..world {
            reader.part(&layout, &Ownership::cut(pieces.clone(), rank), LANES()).unwrap();
        }
        let mut counts = BTreeMap::<String, u64>::new();
        for file in medium.1.lock().unwrap().iter() {
            *counts.entry(file.clone()).or_default() += 1;
        }
        counts
    };
    let blobs = reader.manifest().blobs.iter().map(|blob| name(3, &blob.name));
    for world in [1, 2, 5, 9] {
        let once = |file: String| {
            let count = if file.ends_with(BALANCE) { u64::from(world) } else { 1 };
            (file, count)
        };
        assert_eq!(reads(world), blobs.clone().map(once).collect(), "{world} ranks");
    }
    assert!(blobs.len() > 3, "too few files");
}

#[test]
fn what_may_not_be_removed_stays_and_costs_no_checkpoint() {
    let (layout, retention) = (layout(), Retention { newest: 1, ..Retention::default() });
    let folder = TempDir::new().unwrap();
    let medium = Arc::new(Lasting(Folder(folder.path().to_owned()), Mutex::default()));
    let checkpoints = Checkpoints { medium };
    for step in [3, 6] {
        save(&checkpoints, &layout, step).unwrap();
    }
    let left = checkpoints.retain(Retention { aged: false, ..retention }).unwrap_err();
    assert!(left.to_string().contains("access denied"), "{left}");
    assert_eq!(newest(&checkpoints, &layout), (Some(6), Vec::new()));
}
