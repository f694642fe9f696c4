//! Checkpoints of a run: each rank writes the pieces that it owns, beside the steps that follow; rank 0 commits them when it has
//! heard from all. What lies on the disk then is the same whoever wrote it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::{Class, Digest, Fault, Result};
use kernels::device::Unloader;
use kernels::group::{Group, Store};
use serde_json::json;

use super::record::Recorder;
use crate::checkpoint::{BlobRecord, Checkpoints, Layout, Retention, Ring, Saver, Snapshot};
use crate::exec::ExecOptions;
use crate::ledger::StepRecord;
use crate::refusal::lost;
use crate::state::State;
use crate::state::ownership::Piece;

/// What a rank keeps its part of the state with.
pub(super) struct Keeper<'a> {
    comm: &'a Group,
    layout: Arc<Layout>,
    checkpoints: Checkpoints,
    retention: Retention,
    /// The last step that is kept, or will be when the saver is done.
    kept: u64,
    saver: Saver,
    /// What copies it off the device, beside the steps that follow.
    unloader: Unloader,
    /// Its part of recent states.
    ring: Ring,
    /// Whether the loss of a rank may be survived.
    elastic: bool,
}

/// Work for the saver.
type Work = Box<dyn FnOnce() -> Result<()> + Send>;

impl<'a> Keeper<'a> {
    /// Of a run whose state after step `kept` is on the disk.
    pub(super) fn new(
        comm: &'a Group,
        layout: Arc<Layout>,
        checkpoints: Checkpoints,
        exec: &ExecOptions,
        kept: u64,
    ) -> Result<Self> {
        let unloader = Unloader::new(layout.device).map_err(lost)?;
        let (retention, saver, ring) = (exec.retention, Saver::new(), Ring::new(exec.ring));
        let elastic = exec.min_ranks.is_some();
        Ok(Keeper { comm, layout, checkpoints, retention, kept, saver, unloader, ring, elastic })
    }

    /// Takes note of a step: tells of what has been written meanwhile, and if its loss has jumped, all ranks write down what
    /// they have of the state before.
    pub(super) fn remember(
        &mut self,
        state: &State,
        record: &StepRecord,
        recorder: &mut Recorder<'_>,
    ) -> Result<()> {
        recorder.written(self.saver.done()?)?;
        let copy = || Snapshot::beside(state, &self.unloader);
        let before = self.ring.step(record.step, record.loss, copy)?;
        let Some(before) = before else { return Ok(()) };
        self.keep_now(&before, state.owners.pieces(), recorder, true)?;
        recorder.jumped(record.step, before.step())
    }

    /// Keeps the state, whose digest is this, beside the steps that follow.
    pub(super) fn keep(
        &mut self,
        state: &State,
        digest: Digest,
        recorder: &mut Recorder<'_>,
    ) -> Result<()> {
        let step = state.step;
        if self.kept >= step {
            return Ok(());
        }
        let start = Instant::now();
        // One copy at a time: this one may only be made when the one before is written.
        self.finish(recorder)?;
        let digests = recorder.digests(step)?;
        let snapshot = Snapshot::beside(state, &self.unloader)?;
        let work = match digests {
            Some(digests) => self.lead(snapshot, digests, state.owners.pieces().to_vec()),
            None => self.follow(snapshot)?,
        };
        self.saver.start((step, digest, start.elapsed()), work)?;
        self.kept = step;
        Ok(())
    }

    /// Rank 0 writes its part, hears from all others, and commits.
    fn lead(&self, snapshot: Snapshot, digests: (Digest, Digest), pieces: Vec<Piece>) -> Work {
        let (checkpoints, layout) = (self.checkpoints.clone(), Arc::clone(&self.layout));
        let (store, patience, world) = (self.comm.store(), self.comm.timeout(), self.comm.world());
        let retention = self.retention;
        Box::new(move || {
            let mut blobs = checkpoints.write(&layout, &snapshot)?;
            if let Some(store) = store {
                for rank in 1..world {
                    blobs.extend(heard(&store, &key(snapshot.step(), rank), rank, patience)?);
                }
            }
            checkpoints.commit(&snapshot, digests, &layout, &pieces, blobs)?;
            checkpoints.retain(retention)
        })
    }

    /// Another rank writes its part, and says so to rank 0.
    fn follow(&self, snapshot: Snapshot) -> Result<Work> {
        let (checkpoints, layout) = (self.checkpoints.clone(), Arc::clone(&self.layout));
        let store = self.comm.store().ok_or_else(|| Fault::bug("a rank alone is not rank 0"))?;
        let key = key(snapshot.step(), self.comm.rank());
        Ok(Box::new(move || {
            let written = checkpoints.write(&layout, &snapshot);
            store.set(&key, &word(&written)).map_err(lost)?;
            written.map(|_| ())
        }))
    }

    /// Waits for what is being written.
    pub(super) fn finish(&mut self, recorder: &mut Recorder<'_>) -> Result<()> {
        recorder.written(self.saver.wait()?)
    }

    /// Keeps a state at once, all ranks together.
    fn keep_now(
        &mut self,
        snapshot: &Snapshot,
        pieces: &[Piece],
        recorder: &mut Recorder<'_>,
        pinned: bool,
    ) -> Result<()> {
        // The others wait for this rank's word, whatever went wrong here.
        let before = self.finish(recorder);
        let written = before.and_then(|()| self.checkpoints.write(&self.layout, snapshot));
        let blobs = written_by_all(self.comm, &written)?;
        let step = snapshot.step();
        self.kept = self.kept.max(step);
        let Some((state, chain)) = recorder.digests(step)? else { return Ok(()) };
        self.checkpoints.commit(snapshot, (state, chain), &self.layout, pieces, blobs)?;
        if pinned {
            self.checkpoints.pin(step)?;
        }
        self.checkpoints.retain(self.retention)?;
        recorder.event("checkpoint", json!({"step": step, "state": state}))
    }

    /// The step after `state` failed. A run that diverges does so on every rank, before anything moved: together they keep
    /// what there is.
    pub(super) fn failed(
        &mut self,
        fault: Fault,
        state: &State,
        recorder: &mut Recorder<'_>,
    ) -> Fault {
        if self.elastic && self.comm.lost().is_some() {
            // Those who are left write down what they make of it.
            return fault;
        }
        recorder.fault(state.step + 1, &fault);
        if fault.class() != Class::Diverged {
            // What was being written is kept or not, whatever became of the step.
            if let Err(why) = self.finish(recorder) {
                recorder.not_kept(self.kept, &why);
            }
            return fault;
        }
        let mut keep = |own: &mut Self| match own.kept < state.step {
            true => own.keep_now(&Snapshot::of(state)?, state.owners.pieces(), recorder, false),
            false => own.finish(recorder),
        };
        let kept = keep(self);
        let fault = recorder.diverged(fault, state.step, kept);
        if self.comm.rank() == 0 {
            self.comm.report(&fault.to_string());
        }
        // Of two faults the first one matters.
        let _ = self.comm.barrier("the end");
        fault
    }
}

/// What all ranks wrote of a state, each having `written` its part; what went wrong on one of them went wrong on all.
pub(crate) fn written_by_all(
    comm: &Group,
    written: &Result<Vec<BlobRecord>>,
) -> Result<Vec<BlobRecord>> {
    let words = comm.all_gather("the keeping of a state", word(written).as_bytes());
    let mut blobs = Vec::new();
    for (rank, word) in (0..).zip(&words.map_err(lost)?) {
        blobs.extend(spoken(&String::from_utf8_lossy(word), rank)?);
    }
    Ok(blobs)
}

/// Where a rank leaves word of what it wrote.
fn key(step: u64, rank: u32) -> String {
    format!("checkpoint/{step}/{rank}")
}

/// What a rank wrote, in a word to rank 0.
fn word(written: &Result<Vec<BlobRecord>>) -> String {
    let word = match written {
        Ok(blobs) => json!({ "blobs": blobs }),
        Err(fault) => json!({ "fault": fault.to_string() }),
    };
    word.to_string()
}

/// The same, read.
fn spoken(word: &str, rank: u32) -> Result<Vec<BlobRecord>> {
    let unread = |error| Fault::bug(format!("rank {rank} wrote what rank 0 cannot read: {error}"));
    let mut word: serde_json::Value = serde_json::from_str(word).map_err(unread)?;
    if let Some(fault) = word["fault"].as_str() {
        let what = format!("rank {rank} could not write its part of a checkpoint");
        return Err(Fault::machine(what).found(fault));
    }
    serde_json::from_value(word["blobs"].take()).map_err(unread)
}

/// What a rank wrote of a checkpoint, by its own word.
fn heard(store: &Store, key: &str, rank: u32, patience: Duration) -> Result<Vec<BlobRecord>> {
    let missing = || {
        Fault::machine(format!(
            "rank {rank} did not write its part of a checkpoint within {} s",
            patience.as_secs_f64()
        ))
        .hint("run the same command again: it goes on from the checkpoint before")
    };
    match store.wait(key, patience).map_err(lost)? {
        Some(word) => {
            store.forget(key).map_err(lost)?;
            spoken(&word, rank)
        }
        None => {
            let fault = missing();
            store.lose(&[rank], fault.what()).map_err(lost)?;
            Err(fault)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::group::RunKey;

    #[test]
    fn a_slow_rank_and_one_whose_disk_is_full_are_named() {
        let patience = Duration::from_millis(50);
        let store =
            Store::serve("127.0.0.1", 0, "test/", &RunKey::default(), Duration::from_secs(10))
                .unwrap();
        let slow = heard(&store, "checkpoint/6/2", 2, patience).unwrap_err();
        assert_eq!(slow.class(), Class::Machine);
        assert!(
            slow.to_string()
                .contains("rank 2 did not write its part of a checkpoint within 0.05 s")
        );
        store.set("checkpoint/6/3", &word(&Err(Fault::machine("the disk is full")))).unwrap();
        let full = heard(&store, "checkpoint/6/3", 3, patience).unwrap_err();
        assert_eq!(full.class(), Class::Machine);
        assert!(
            full.to_string().contains("rank 3") && full.to_string().contains("the disk is full")
        );
        let blob = BlobRecord { name: "a".to_owned(), bytes: 3, digest: Digest(1) };
        store.set("checkpoint/6/4", &word(&Ok(vec![blob.clone()]))).unwrap();
        assert_eq!(heard(&store, "checkpoint/6/4", 4, patience).unwrap(), [blob]);
        assert_eq!(store.find("checkpoint/6/4").unwrap(), None, "a run has many checkpoints");
    }
}
