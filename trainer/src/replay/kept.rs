//! States before replayed steps. They are kept in the run's folder, so that the next question about such a step does
//! not recompute the steps before it.
//!
//! ```text
//! RUN/replays/TABLE/step-N/     checkpoint of the state after step N; TABLE is the digest of the kernel table
//! RUN/replays/lock              held by the replay that writes one
//! ```
//!
//! Invariant: a state is kept and read only if it matches the ledger, by the chain after its step and by its digest; a
//! run never continues from it.

use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};

use contract::{Digest, Fault, Result};
use kernels::group::Group;
use kernels::runtime::KernelTable;
use store::Location;
use store::disk::{self, AppendFile};

use crate::checkpoint::{Checkpoints, Snapshot, StateLayout};
use crate::folder::{self, RunFolder};
use crate::run::keep::written_by_all;
use crate::state::State;

/// How many states are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedStateLimits {
    /// The maximum number; the most recently written are kept. 0: none is written.
    pub states: usize,
    /// The maximum total size in bytes; a larger state is not kept.
    pub bytes: u64,
}

/// The kept states of a run.
pub(super) struct SavedStates {
    /// Folder for all kernel tables.
    root: PathBuf,
    /// Folder for this machine's kernel table.
    table: PathBuf,
    checkpoints: Checkpoints,
    keep: SavedStateLimits,
}

impl SavedStates {
    /// Those of the run in `folder` that were computed with this kernel table.
    pub(super) fn new(
        folder: &RunFolder,
        table: &KernelTable,
        keep: SavedStateLimits,
    ) -> SavedStates {
        let root = folder.replays();
        let table = root.join(Digest::of_bytes(table.fingerprint().as_bytes()).to_string());
        let checkpoints = Checkpoints::new(Location::Local(table.clone()));
        SavedStates { root, table, checkpoints, keep }
    }

    /// The checkpoints that hold them.
    pub(super) fn checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    /// Whether states are written at all.
    pub(super) fn writes(&self) -> bool {
        self.keep.states > 0
    }

    /// Keeps the state that all ranks hold together, and removes older ones over the limits. `digests` are those of the
    /// state and of the ledger's chain after it.
    pub(super) fn put(
        &self,
        comm: &Group,
        layout: &StateLayout,
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
        // No rank may write before rank 0 has the lock.
        written_by_all(comm, &lock.as_ref().map(|_| Vec::new()).map_err(Clone::clone))?;
        let (snapshot, pieces) = (Snapshot::of(state)?, state.owners.pieces());
        let blobs = written_by_all(comm, &self.checkpoints.write(layout, &snapshot))?;
        if comm.rank() == 0 {
            self.checkpoints.commit(&snapshot, digests, layout, pieces, blobs)?;
            self.thin_out(state.step)?;
        }
        Ok(())
    }

    /// Locks the folder for a state of `step`, and removes what a kill or damage has left there.
    fn prepare(&self, step: u64) -> Result<AppendFile> {
        disk::create_folder(&self.root)?;
        let busy = || Fault::machine("another replay of this run keeps one at this moment");
        let lock = folder::try_lock(&self.root)?.ok_or_else(busy)?;
        self.checkpoints.clean()?;
        self.checkpoints.remove(step)?;
        Ok(lock)
    }

    /// Removes states over the limits, the oldest first; never the one of `step`.
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
                // Removed only if this was the last one.
                disk::remove_if_empty(&table);
            }
        }
        Ok(())
    }
}

/// The size of a state in bytes, without its small parts.
fn size(state: &State) -> u64 {
    let of = |rule: crate::optim::OptimizerRule| if rule.has_second_moment() { 12 } else { 8 };
    state.owners.pieces().iter().map(|piece| piece.length() as u64 * of(piece.rule)).sum()
}

/// The time of the last write to a folder's files, and their total size.
fn written(folder: &Path) -> Result<(std::time::SystemTime, u64)> {
    let fault = |error| Fault::io("list", folder, &error);
    let (mut last, mut bytes) = (std::time::UNIX_EPOCH, 0);
    for entry in fs::read_dir(folder).map_err(fault)? {
        let file = entry.and_then(|entry| entry.metadata()).map_err(fault)?;
        (last, bytes) = (last.max(file.modified().map_err(fault)?), bytes + file.len());
    }
    Ok((last, bytes))
}
