//! The packs of a source: computed once from its document starts, and stored next to the store.
//!
//! The file is `STORE.packs/KEY.packs`, where the key is a digest of the text and the settings. For a store in a bucket
//! or in a read-only folder, it is in the cache (`ZDATA_CACHE`). A file is only used if its digest matches, and is
//! recomputed if missing. So a lost file costs a moment, and ranks that write the same file concurrently write the same
//! bytes.

mod table;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use contract::{Digest, Fault, Hasher, Result};
use curriculum::{Curriculum, Packing};
use mixer::fit::{BLOCK, FittedPacks, Lengths};
use mixer::{PackTable, PackTables};
use store::{Location, Split, StreamReader, disk};

use self::table::Table;
use crate::Stores;

/// The version of the packing rules and of the file format.
const VERSION: u64 = 1;

/// How many tokens' document starts are read at a time.
const READ_TOKENS: u64 = 1 << 26;

/// The packs of all sources that the curriculum packs and some phase reads.
pub(crate) fn tables(curriculum: &Curriculum, stores: &Stores) -> Result<PackTables> {
    let mut tables = PackTables::new();
    for (source, spec) in &curriculum.sources {
        let in_phase = curriculum.segments().iter().any(|segment| segment.spec.mix.has(source));
        if let Some(packing) = spec.packing.as_ref().filter(|_| in_phase)
            && stores.number(source).is_some()
        {
            let place = || curriculum.place(&format!("source.{source}.packing"));
            let table = open(source, packing, stores).map_err(|fault| fault.or_at(place))?;
            tables.insert(source.clone(), table);
        }
    }
    Ok(tables)
}

/// The packs of one source: read from the file, or computed and written.
fn open(source: &str, packing: &Packing, stores: &Stores) -> Result<Arc<dyn PackTable>> {
    let stream = stores.stream(source, Split::Train)?;
    let key = key(source, packing, stream.record().digest);
    let name = format!("{key}.packs");
    let folders = folders(stores.root_of(source)?);
    for folder in &folders {
        table::clear(folder);
        let path = folder.join(&name);
        // Not a link: it may lead anywhere.
        if path.symlink_metadata().is_ok_and(|found| found.is_file()) {
            return Ok(Arc::new(Table::open(&path, key)?));
        }
    }
    let fitted = fitted(source, packing, stream)?;
    let lengths: Vec<u32> = packing.lengths.keys().copied().collect();
    let mut refused = None;
    for folder in &folders {
        match table::write(folder, &name, key, &lengths, &fitted) {
            Ok(path) => return Ok(Arc::new(Table::open(&path, key)?)),
            Err(fault) => refused = refused.or(Some(fault)),
        }
    }
    let none = || Fault::machine("no folder is known to keep packs in");
    let fault = refused.unwrap_or_else(none);
    Err(fault.hint("make room beside the store, or name a folder that takes files as ZDATA_CACHE"))
}

/// The digest of what the packs depend on.
fn key(source: &str, packing: &Packing, stream: Digest) -> Digest {
    let Packing { lengths, documents } = packing;
    let mut hasher = Hasher::new();
    hasher.tag("packs").u64(VERSION).str(source).digest(stream).u64(lengths.len() as u64);
    for (length, weight) in lengths {
        hasher.u64(u64::from(*length)).u64(*weight);
    }
    hasher.u64(u64::from(*documents)).u64(BLOCK as u64);
    hasher.finish()
}

/// Where the packs of a store may be stored, the preferred folder first.
fn folders(store: &Location) -> Vec<PathBuf> {
    let beside = |path: &Path| {
        // A store named as `.` has no name to derive the folder from.
        let path = std::fs::canonicalize(path).ok()?;
        path.file_name()?;
        Some(disk::beside(&path, ".packs"))
    };
    let beside = match store {
        Location::Local(path) => beside(path),
        Location::Object(_) => None,
    };
    beside.into_iter().chain(storage::kept("packs")).collect()
}

/// Packs all documents of a stream; the packs of each length, in ascending order.
fn fitted(source: &str, packing: &Packing, stream: &StreamReader) -> Result<Vec<FittedPacks>> {
    let lengths: Vec<u32> = packing.lengths.keys().copied().collect();
    let draws = Lengths::new(source, packing);
    let mut packs = vec![FittedPacks::default(); lengths.len()];
    let mut waiting: Vec<Vec<(u64, u64)>> = vec![Vec::new(); lengths.len()];
    let (mut number, mut begun, mut starts) = (0, None, Vec::new());
    let mut take = |start: u64, end: u64| {
        let at = draws.of(number);
        number += 1;
        waiting[at].push((start, end - start));
        if waiting[at].len() == BLOCK {
            packs[at].add(&std::mem::take(&mut waiting[at]), lengths[at], packing.documents);
        }
    };
    let all = stream.record().tokens;
    for from in (0..all).step_by(READ_TOKENS as usize) {
        starts.clear();
        stream.starts_in(from..all.min(from + READ_TOKENS), &mut starts)?;
        for start in &starts {
            // If two documents begin at the same token, the first is empty and appears in no sequence.
            if let Some(begun) = begun.replace(*start) {
                take(begun, *start);
            }
        }
    }
    if let Some(begun) = begun {
        take(begun, all);
    }
    for ((packs, waiting), length) in packs.iter_mut().zip(waiting).zip(lengths) {
        packs.add(&waiting, length, packing.documents);
    }
    Ok(packs)
}
