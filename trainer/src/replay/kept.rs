//! States before steps that were replayed. They stay beside the run, so that the next question about such a step does not
//! compute its way there again.
//!
//! ```text
//! RUN/replays/TABLE/step-N/     a checkpoint of the state after step N; TABLE is the digest of the kernel table that computed it
//! RUN/replays/lock              held by the replay that keeps one
//! ```
//!
//! Invariant: a state is kept and read only as one that the ledger knows, by the chain after its step and by its digest; a
//! run never goes on from it.

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Result};
use kernels::group::Group;
use kernels::runtime::KernelTable;
use store::Location;
use store::disk::{self, Log};

use crate::checkpoint::{Checkpoints, Layout, Snapshot};
use crate::folder::{self, RunFolder};
use crate::run::keep::written_by_all;
use crate::state::State;

/// How many states stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// So many at most, the last written ones; 0: none is written.
    pub states: usize,
    /// And so many bytes together; a larger one is not kept.
    pub bytes: u64,
}

/// The place of a run's kept states.
pub(super) struct Kept {
    /// Of all kernel tables.
    root: PathBuf,
    /// Of this machine's.
    table: PathBuf,
    checkpoints: Checkpoints,
    keep: Keep,
}

impl Kept {
    /// Those of the run in `folder` that machines of this kernel table computed.
    pub(super) fn new(folder: &RunFolder, table: &KernelTable, keep: Keep) -> Kept {
        let root = folder.replays();
        let table = root.join(Digest::of_bytes(table.fingerprint().as_bytes()).to_string());
        let checkpoints = Checkpoints::new(Location::Local(table.clone()));
        Kept { root, table, checkpoints, keep }
    }

    /// Where they lie.
    pub(super) fn checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    /// Whether states are written at all.
    pub(super) fn writes(&self) -> bool {
        self.keep.states > 0
    }

    /// Keeps the state that all ranks hold together, whose digest and the ledger's chain after it are `digests`, and lets go
    /// of those before it that are too many.
    pub(super) fn put(
        &self,
        comm: &Group,
        layout: &Layout,
        state: &State,
        digests: (Digest, Digest),
    ) -> Result<()> {
        let bytes = size(state);
        if bytes > self.keep.bytes {
            return Err(Fault::machine("it is larger than all kept states may be together")
                .at("--keep-gib")
                .found(format!("{bytes} bytes"))
                .wanted(format!("at most {}", self.keep.bytes)));
        }
        let lock = if comm.rank() == 0 { self.prepare(state.step).map(Some) } else { Ok(None) };
        // Nobody writes before rank 0 has the place.
        written_by_all(comm, &lock.as_ref().map(|_| Vec::new()).map_err(Clone::clone))?;
        let (snapshot, pieces) = (Snapshot::of(state)?, state.owners.pieces());
        let blobs = written_by_all(comm, &self.checkpoints.write(layout, &snapshot))?;
        if comm.rank() == 0 {
            self.checkpoints.commit(&snapshot, digests, layout, pieces, blobs)?;
            self.thin_out(state.step)?;
        }
        Ok(())
    }

    /// Takes the place for a state of `step`, without what a kill or damage has left there.
    fn prepare(&self, step: u64) -> Result<Log> {
        disk::create_folder(&self.root)?;
        let busy = || Fault::machine("another replay of this run keeps one at this moment");
        let lock = folder::try_lock(&self.root)?.ok_or_else(busy)?;
        self.checkpoints.clean()?;
        self.checkpoints.remove(step)?;
        Ok(lock)
    }

    /// Removes what is too much, those that were written first before others; never the one of `step`.
    fn thin_out(&self, step: u64) -> Result<()> {
        let mut all = Vec::new();
        for table in disk::entries(&self.root)?.into_iter().filter(|path| path.is_dir()) {
            let place = Checkpoints::new(Location::Local(table.clone()));
            for at in place.steps()? {
                let (written, bytes) = written(&table.join(format!("step-{at}")))?;
                let newest = at == step && table == self.table;
                all.push((Reverse((newest, written)), table.clone(), at, bytes));
            }
        }
        all.sort();
        let (mut states, mut sum) = (0, 0);
        for (Reverse((newest, _)), table, at, bytes) in all {
            (states, sum) = (states + 1, sum + bytes);
            if !newest && (states > self.keep.states || sum > self.keep.bytes) {
                Checkpoints::new(Location::Local(table.clone())).remove(at)?;
                // Only where it was the last one there.
                disk::remove_if_empty(&table);
            }
        }
        Ok(())
    }
}

/// The bytes of a whole state, its small parts left out.
fn size(state: &State) -> u64 {
    let of = |rule: crate::optim::Rule| if rule.has_second_moment() { 12 } else { 8 };
    state.owners.pieces().iter().map(|piece| piece.length() as u64 * of(piece.rule)).sum()
}

/// When the last file of a folder was written, and the bytes of all of them.
fn written(folder: &Path) -> Result<(std::time::SystemTime, u64)> {
    let fault = |error| Fault::io("list", folder, &error);
    let (mut last, mut bytes) = (std::time::UNIX_EPOCH, 0);
    for entry in fs::read_dir(folder).map_err(fault)? {
        let file = entry.and_then(|entry| entry.metadata()).map_err(fault)?;
        (last, bytes) = (last.max(file.modified().map_err(fault)?), bytes + file.len());
    }
    Ok((last, bytes))
}
