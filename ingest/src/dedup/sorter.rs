//! Sorts more records than memory holds.
//!
//! A record is a few numbers, compared from the first to the last; equal records become one. Those in memory that use
//! up their budget are sorted and written as a run. At the end the runs are merged, together with what is in memory.
//! The result depends only on the records, not on the budget.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::binary_heap::{BinaryHeap, PeekMut};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read as _, Write as _};
use std::path::{Path, PathBuf};

use contract::{Fault, Result};
use rayon::slice::ParallelSliceMut as _;
use store::disk::{self, OutputFile};

/// Bytes of records in memory.
pub(super) const BUDGET: usize = 256 << 20;

/// Sorters in memory at the same time: one is read while another is filled.
const SORTERS: usize = 2;

/// Runs merged at the same time.
const RUNS: usize = 256;

/// Bytes of a file that are read at a time.
const READ: usize = 64 << 10;

/// Memory with this budget of records.
pub(super) const MEMORY: u64 = (BUDGET + SORTERS * RUNS * READ) as u64;

/// A folder for records, with a budget for those in memory.
pub(super) struct Scratch {
    folder: PathBuf,
    budget: usize,
    /// Files made so far.
    files: Cell<u64>,
    /// Sorters in memory.
    sorters: Cell<usize>,
}

impl Scratch {
    pub(super) fn new(folder: &Path, budget: usize) -> Self {
        Scratch { folder: folder.to_owned(), budget, files: Cell::new(0), sorters: Cell::new(0) }
    }

    /// A path that was not used yet.
    pub(super) fn path(&self) -> PathBuf {
        self.files.set(self.files.get() + 1);
        self.folder.join(self.files.get().to_string())
    }

    pub(super) fn writer<const N: usize>(&self) -> Result<Writer<N>> {
        let path = self.path();
        let file = BufWriter::new(OutputFile::create(&path)?);
        Ok(Writer { path, file, records: 0 })
    }

    pub(super) fn sorter<const N: usize>(&self) -> Sorter<'_, N> {
        Sorter { scratch: self, memory: Memory::new(self), runs: Vec::new() }
    }
}

/// Writes records to a file.
pub(super) struct Writer<const N: usize> {
    path: PathBuf,
    file: BufWriter<OutputFile>,
    records: u64,
}

impl<const N: usize> Writer<N> {
    pub(super) fn push(&mut self, record: [u64; N]) -> Result<()> {
        self.records += 1;
        let written = self.file.write_all(record.map(u64::to_le_bytes).as_flattened());
        written.map_err(|error| Fault::io("write", &self.path, &error))
    }

    pub(super) fn finish(self) -> Result<Records<N>> {
        let Writer { path, file, records } = self;
        file.into_inner().map_err(|error| Fault::io("write", &path, error.error()))?;
        Ok(Records { path, records })
    }
}

/// A file of records, removed when no longer used.
pub(super) struct Records<const N: usize> {
    path: PathBuf,
    records: u64,
}

impl<const N: usize> Records<N> {
    pub(super) fn read(&self) -> Result<Reader<N>> {
        let file = File::open(&self.path).map_err(|e| Fault::io("read", &self.path, &e))?;
        let file = BufReader::with_capacity(READ, file);
        Ok(Reader { path: self.path.clone(), file, left: self.records })
    }
}

impl<const N: usize> Drop for Records<N> {
    fn drop(&mut self) {
        // The folder is removed at the end, and then a fault is reported.
        let _ = disk::remove(&self.path);
    }
}

/// Reads the records of a file, which may be removed meanwhile.
pub(super) struct Reader<const N: usize> {
    path: PathBuf,
    file: BufReader<File>,
    left: u64,
}

impl<const N: usize> Reader<N> {
    pub(super) fn next(&mut self) -> Result<Option<[u64; N]>> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        let mut bytes = [[0; 8]; N];
        let read = self.file.read_exact(bytes.as_flattened_mut());
        read.map_err(|error| Fault::io("read", &self.path, &error))?;
        Ok(Some(bytes.map(u64::from_le_bytes)))
    }
}

/// Records in memory.
struct Memory<'a, const N: usize> {
    scratch: &'a Scratch,
    records: Vec<[u64; N]>,
    most: usize,
}

impl<'a, const N: usize> Memory<'a, N> {
    fn new(scratch: &'a Scratch) -> Self {
        scratch.sorters.set(scratch.sorters.get() + 1);
        debug_assert!(scratch.sorters.get() <= SORTERS, "each of them has a part of the budget");
        let most = (scratch.budget / SORTERS / size_of::<[u64; N]>()).max(1);
        Memory { scratch, records: Vec::with_capacity(most), most }
    }

    /// Sorts them, the least last.
    fn sort(&mut self) {
        self.records.par_sort_unstable_by(|a, b| b.cmp(a));
        self.records.dedup();
    }
}

impl<const N: usize> Drop for Memory<'_, N> {
    fn drop(&mut self) {
        self.scratch.sorters.set(self.scratch.sorters.get() - 1);
    }
}

/// Takes records in any order.
pub(super) struct Sorter<'a, const N: usize> {
    scratch: &'a Scratch,
    memory: Memory<'a, N>,
    runs: Vec<Records<N>>,
}

impl<'a, const N: usize> Sorter<'a, N> {
    pub(super) fn push(&mut self, record: [u64; N]) -> Result<()> {
        if self.memory.records.len() == self.memory.most {
            self.memory.sort();
            let mut run = self.scratch.writer()?;
            self.memory.records.drain(..).rev().try_for_each(|record| run.push(record))?;
            self.runs.push(run.finish()?);
        }
        self.memory.records.push(record);
        Ok(())
    }

    /// The records in ascending order.
    pub(super) fn finish(mut self) -> Result<Merge<'a, N>> {
        while self.runs.len() > RUNS {
            // The oldest are the shortest: longer ones are read again as seldom as possible.
            let count = (self.runs.len() - RUNS + 1).min(RUNS);
            let mut merged = Merge::of(self.runs.drain(..count))?;
            let mut run = self.scratch.writer()?;
            while let Some(record) = merged.next()? {
                run.push(record)?;
            }
            self.runs.push(run.finish()?);
        }
        self.memory.sort();
        let mut merge = Merge::of(&self.runs)?;
        merge.add(Source::Memory(self.memory))?;
        Ok(merge)
    }
}

/// Where sorted records come from.
enum Source<'a, const N: usize> {
    Memory(Memory<'a, N>),
    File(Reader<N>),
}

impl<const N: usize> Source<'_, N> {
    fn next(&mut self) -> Result<Option<[u64; N]>> {
        match self {
            Source::Memory(memory) => Ok(memory.records.pop()),
            Source::File(file) => file.next(),
        }
    }
}

/// Records of several sorted files, and of memory, in ascending order.
pub(super) struct Merge<'a, const N: usize> {
    sources: Vec<Source<'a, N>>,
    /// The next record of each source.
    heads: BinaryHeap<Reverse<([u64; N], usize)>>,
}

impl<'a, const N: usize> Merge<'a, N> {
    /// The records of `files`, which may be removed as soon as this returns.
    pub(super) fn of<R: std::borrow::Borrow<Records<N>>>(
        files: impl IntoIterator<Item = R>,
    ) -> Result<Self> {
        let mut merge = Merge { sources: Vec::new(), heads: BinaryHeap::new() };
        for file in files {
            merge.add(Source::File(file.borrow().read()?))?;
        }
        Ok(merge)
    }

    fn add(&mut self, mut source: Source<'a, N>) -> Result<()> {
        let head = source.next()?;
        self.heads.extend(head.map(|head| Reverse((head, self.sources.len()))));
        self.sources.push(source);
        Ok(())
    }

    /// The record that is next.
    pub(super) fn peek(&self) -> Option<[u64; N]> {
        self.heads.peek().map(|Reverse((record, _))| *record)
    }

    pub(super) fn next(&mut self) -> Result<Option<[u64; N]>> {
        let next = self.peek();
        while let Some(mut head) = self.heads.peek_mut()
            && Some(head.0.0) == next
        {
            match self.sources[head.0.1].next()? {
                Some(record) => head.0.0 = record,
                None => drop(PeekMut::pop(head)),
            }
        }
        Ok(next)
    }
}

#[cfg(test)]
mod tests;
