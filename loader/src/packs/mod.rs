//! The packs of a source: computed once from its document starts, and stored next to the store (`sealed.rs`). The key
//! of the file is a digest of the text and the settings.
//!
//! Documents are packed block by block, and a block is written before the next ones are read: memory is bounded
//! whatever the number of documents. Each thread packs a block of its own.

mod table;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use contract::{Digest, Hasher, Result};
use curriculum::{Curriculum, Packing, PhaseSegment};
use mixer::fit::{BLOCK, FittedPacks, Lengths};
use mixer::{PackTable, PackTables};
use store::Split;

use self::table::{Table, TableWriter};
use crate::Stores;
use crate::sealed::Kind;
use crate::stream::SourceStream;

/// The version of the packing rules and of the file format.
const VERSION: u64 = 2;

/// How many tokens' document starts are read at a time.
const READ_TOKENS: u64 = 1 << 26;

/// At most as many blocks are packed at the same time: each needs about 150 MB.
const THREADS: usize = 8;

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
    let write = |folder: &Path| write(folder, &name, key, source, packing, stream);
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

/// Packs all documents of a stream into the file `name` in `folder`.
fn write(
    folder: &Path,
    name: &str,
    key: Digest,
    source: &str,
    packing: &Packing,
    stream: &SourceStream,
) -> Result<PathBuf> {
    let lengths: Vec<u32> = packing.lengths.keys().copied().collect();
    let mut writer = TableWriter::create(folder, name, key, &lengths)?;
    let threads = thread::available_parallelism().map_or(1, |all| all.get().min(THREADS));
    let mut full = Vec::with_capacity(threads);
    blocks(source, packing, stream, |block| {
        full.push(block);
        if full.len() == threads { add(&mut writer, &mut full, packing) } else { Ok(()) }
    })?;
    add(&mut writer, &mut full, packing)?;
    writer.commit()
}

/// Documents that are packed together at one length.
struct Block {
    /// Index of the length.
    length: usize,
    /// Their tokens.
    documents: Vec<Range<u64>>,
}

/// Calls `take` with each block of documents of a stream.
fn blocks(
    source: &str,
    packing: &Packing,
    stream: &SourceStream,
    mut take: impl FnMut(Block) -> Result<()>,
) -> Result<()> {
    let draws = Lengths::new(source, packing);
    let mut waiting: Vec<Vec<Range<u64>>> = vec![Vec::new(); packing.lengths.len()];
    let mut number = 0;
    let mut add = |document: Range<u64>| {
        let length = draws.of(number);
        number += 1;
        waiting[length].push(document);
        if waiting[length].len() < BLOCK {
            return Ok(());
        }
        take(Block { length, documents: std::mem::take(&mut waiting[length]) })
    };
    let (mut begun, mut starts) = (None, Vec::new());
    let all = stream.tokens();
    for from in (0..all).step_by(READ_TOKENS as usize) {
        starts.clear();
        stream.starts_in(from..all.min(from + READ_TOKENS), &mut starts)?;
        for start in &starts {
            // If two documents begin at the same token, the first is empty and appears in no sequence.
            if let Some(begun) = begun.replace(*start) {
                add(begun..*start)?;
            }
        }
    }
    begun.map_or(Ok(()), |begun| add(begun..all))?;
    for (length, documents) in waiting.into_iter().enumerate() {
        take(Block { length, documents })?;
    }
    Ok(())
}

/// Packs these blocks, each on a thread of its own, and writes them in their order.
fn add(writer: &mut TableWriter, full: &mut Vec<Block>, packing: &Packing) -> Result<()> {
    let lengths: Vec<u32> = packing.lengths.keys().copied().collect();
    let fit =
        |block: &Block| FittedPacks::of(&block.documents, lengths[block.length], packing.documents);
    let fitted: Vec<FittedPacks> = thread::scope(|scope| {
        let begin = |block| thread::Builder::new().spawn_scoped(scope, move || fit(block));
        let begun: Vec<_> = full.iter().map(|block| (block, begin(block))).collect();
        let ended = begun.into_iter().map(|(block, thread)| {
            // If no thread can be started, this thread does the work.
            thread.ok().and_then(|thread| thread.join().ok()).unwrap_or_else(|| fit(block))
        });
        ended.collect()
    });
    for (block, packs) in full.drain(..).zip(fitted) {
        writer.add(block.length, &block.documents, &packs)?;
    }
    Ok(())
}
