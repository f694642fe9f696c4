//! The packs of a source: computed once from its document starts, and stored next to the store (`sealed.rs`). The key
//! of the file is a digest of the text and the settings.

mod table;

use std::path::Path;
use std::sync::Arc;

use contract::{Digest, Hasher, Result};
use curriculum::{Curriculum, Packing, PhaseSegment};
use mixer::fit::{BLOCK, FittedPacks, Lengths};
use mixer::{PackTable, PackTables};
use store::Split;

use self::table::Table;
use crate::Stores;
use crate::sealed::Kind;
use crate::stream::SourceStream;

/// The version of the packing rules and of the file format.
const VERSION: u64 = 1;

/// How many tokens' document starts are read at a time.
const READ_TOKENS: u64 = 1 << 26;

/// The packs of all sources that the curriculum packs and some phase reads.
pub(crate) fn tables(curriculum: &Curriculum, stores: &Stores) -> Result<PackTables> {
    let mut tables = PackTables::new();
    for source in stores.names() {
        let whole = curriculum.whole(source);
        let in_phase =
            |segment: &PhaseSegment| [source, whole].iter().any(|name| segment.spec.mix.has(name));
        if let Some(packing) = curriculum.packing(source)
            && curriculum.segments().iter().any(in_phase)
        {
            let place = || curriculum.place(&format!("source.{source}.packing"));
            let table = open(source, packing, stores).map_err(|fault| fault.or_at(place))?;
            tables.insert(source.to_owned(), table);
        }
    }
    Ok(tables)
}

/// The packs of one source: read from the file, or computed and written.
fn open(source: &str, packing: &Packing, stores: &Stores) -> Result<Arc<dyn PackTable>> {
    let stream = stores.stream(source, Split::Train)?;
    let key = key(source, packing, stream.digest());
    let (name, folders) = (Kind::Packs.file(key), Kind::Packs.folders(stores.root_of(source)?));
    if let Some(path) = Kind::Packs.find(&folders, &name) {
        return Ok(Arc::new(Table::open(&path, key)?));
    }
    let fitted = fitted(source, packing, stream)?;
    let lengths: Vec<u32> = packing.lengths.keys().copied().collect();
    let write = |folder: &Path| table::write(folder, &name, key, &lengths, &fitted);
    let path = Kind::Packs.first_writable(&folders, write)?;
    Ok(Arc::new(Table::open(&path, key)?))
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

/// Packs all documents of a stream; the packs of each length, in ascending order.
fn fitted(source: &str, packing: &Packing, stream: &SourceStream) -> Result<Vec<FittedPacks>> {
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
    let all = stream.tokens();
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
