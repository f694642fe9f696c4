//! Checkpoints of a run: each rank writes the pieces that it owns while training continues; rank 0 commits them when
//! all have reported. The files do not depend on the number of ranks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::{Class, Digest, Fault, Result};
use kernels::device::HostCopier;
use kernels::group::{Group, KeyValueStore};
use serde_json::json;

use super::record::Recorder;
use crate::checkpoint::{
    BlobRecord, Checkpoints, Retention, Saver, Snapshot, Snapshots, StateLayout,
};
use crate::exec::ExecOptions;
use crate::ledger::StepRecord;
use crate::refusal::lost;
use crate::state::State;
use crate::state::ownership::ParamShard;

/// Saves a rank's part of the state.
pub(super) struct CheckpointWriter<'a> {
    comm: &'a Group,
    layout: Arc<StateLayout>,
    checkpoints: Checkpoints,
    retention: Retention,
    /// The last step that is saved, or will be when the saver is done.
    kept: u64,
    saver: Saver,
    /// Copies the state off the device while training continues.
    unloader: HostCopier,
    /// This rank's part of recent states.
    snapshots: Snapshots,
    /// The phase of the last step.
    phase: String,
    /// Whether the run may survive the loss of a rank.
    elastic: bool,
    /// How long the ranks may take to write.
    timeout: Duration,
}

/// Work for the saver; returns why older checkpoints could not be removed.
type SaverTask = Box<dyn FnOnce() -> Result<Option<Fault>> + Send>;

/// While ranks wait for each other's writing, they exchange messages at least this often, however long the timeout of a
/// rank is.
const TURN: Duration = Duration::from_secs(1);

/// The messages of a rank in this exchange.
const IDLE: u8 = 0;
const BUSY: u8 = 1;
const LATE: u8 = 2;

impl<'a> CheckpointWriter<'a> {
    /// For a run whose state after step `kept` is on disk.
    pub(super) fn new(
        comm: &'a Group,
        layout: Arc<StateLayout>,
        checkpoints: Checkpoints,
        exec: &ExecOptions,
        kept: u64,
    ) -> Result<Self> {
        let unloader = HostCopier::new(layout.device).map_err(lost)?;
        let (retention, saver, snapshots) =
            (exec.retention, Saver::new(), Snapshots::new(exec.snapshots));
        let (elastic, timeout) = (exec.min_ranks.is_some(), exec.checkpoint_timeout);
        Ok(CheckpointWriter {
            comm,
            layout,
            checkpoints,
            retention,
            kept,
            saver,
            unloader,
            snapshots,
            phase: String::new(),
            elastic,
            timeout,
        })
    }

    /// Handles a finished step: records a checkpoint that was written meanwhile and, if it begins a spike, all ranks
    /// write their snapshots of the state before.
    pub(super) fn remember(
        &mut self,
        state: &State,
        record: &StepRecord,
        recorder: &mut Recorder<'_>,
    ) -> Result<()> {
        recorder.written(self.saver.done()?)?;
        let copy = || Snapshot::beside(state, &self.unloader);
        if record.curriculum.is_some() || self.phase != record.phase {
            self.phase.clone_from(&record.phase);
            self.snapshots.change();
        }
        let measured = (record.label_count > 0).then(|| [record.loss, record.norm()]);
        let before = self.snapshots.step(record.step, measured, copy)?;
        let Some(before) = before else { return Ok(()) };
        let step = before.step();
        self.keep_now(before, state.owners.pieces(), recorder, true)?;
        recorder.spike(record.step, step)
    }

    /// Saves the state, which has this digest, while training continues.
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
        // Only one copy at a time: the previous one must have been written.
        self.finish(recorder)?;
        let digests = recorder.digests(step)?;
        let snapshot = Snapshot::beside(state, &self.unloader)?;
        let work = match digests {
            Some(digests) => self.lead(snapshot, digests, state.owners.pieces().to_vec(), false),
            None => self.follow(snapshot)?,
        };
        self.saver.start(step, digest, start.elapsed(), work)?;
        self.kept = step;
        Ok(())
    }

    /// Rank 0: writes its part, waits for the reports of all others, and commits.
    fn lead(
        &self,
        snapshot: Snapshot,
        digests: (Digest, Digest),
        pieces: Vec<ParamShard>,
        pinned: bool,
    ) -> SaverTask {
        let (checkpoints, layout) = (self.checkpoints.clone(), Arc::clone(&self.layout));
        let (store, world) = (self.comm.store(), self.comm.world());
        let (retention, patience) = (self.retention, self.timeout);
        Box::new(move || {
            let mut blobs = checkpoints.write(&layout, &snapshot)?;
            if let Some(store) = store {
                for rank in 1..world {
                    blobs.extend(wait_for_report(
                        &store,
                        &key(snapshot.step(), rank),
                        rank,
                        patience,
                    )?);
                }
            }
            // Before the commit, so that the retention knows that it must be kept.
            if pinned {
                checkpoints.pin(snapshot.step())?;
            }
            checkpoints.commit(&snapshot, digests, &layout, &pieces, blobs)?;
            // The checkpoint is valid even if old ones could not be removed.
            Ok(checkpoints.retain(retention).err())
        })
    }

    /// Another rank: writes its part, and reports to rank 0.
    fn follow(&self, snapshot: Snapshot) -> Result<SaverTask> {
        let (checkpoints, layout) = (self.checkpoints.clone(), Arc::clone(&self.layout));
        let store = self.comm.store().ok_or_else(|| Fault::bug("a rank alone is not rank 0"))?;
        let key = key(snapshot.step(), self.comm.rank());
        Ok(Box::new(move || {
            let written = checkpoints.write(&layout, &snapshot);
            store.set(&key, &word(&written)).map_err(lost)?;
            written.map(|_| None)
        }))
    }

    /// Waits until every rank has written its part. They exchange messages meanwhile, so that a rank with a slow disk
    /// or bucket is not taken for lost; the run stops after a separate timeout.
    pub(super) fn finish(&mut self, recorder: &mut Recorder<'_>) -> Result<()> {
        let (start, turn) = (Instant::now(), TURN.min(self.comm.timeout() / 4));
        while self.comm.world() > 1 {
            let late = start.elapsed() > self.timeout;
            let word = match self.saver.is_busy(turn) {
                false => IDLE,
                true if late => LATE,
                true => BUSY,
            };
            let words = self.comm.all_gather("the writing of a checkpoint", &[word]);
            let words = words.map_err(lost)?.concat();
            if let Some(rank) = words.iter().position(|word| *word == LATE) {
                return Err(not_written(rank as u32, self.timeout));
            }
            if words.iter().all(|word| *word == IDLE) {
                break;
            }
        }
        recorder.written(self.saver.wait()?)
    }

    /// Saves a state and waits for it, on all ranks.
    fn keep_now(
        &mut self,
        snapshot: Snapshot,
        pieces: &[ParamShard],
        recorder: &mut Recorder<'_>,
        pinned: bool,
    ) -> Result<()> {
        self.finish(recorder)?;
        let step = snapshot.step();
        let digests = recorder.digests(step)?;
        let state = digests.map_or(Digest(0), |(state, _)| state);
        let work = match digests {
            Some(digests) => self.lead(snapshot, digests, pieces.to_vec(), pinned),
            None => self.follow(snapshot)?,
        };
        self.saver.start(step, state, Duration::ZERO, work)?;
        self.kept = self.kept.max(step);
        self.finish(recorder)
    }

    /// The step after `state` failed. If it diverged, it did so on every rank before the update, so they save the state
    /// together.
    pub(super) fn failed(
        &mut self,
        fault: Fault,
        state: &State,
        recorder: &mut Recorder<'_>,
    ) -> Fault {
        if self.elastic && self.comm.lost().is_some() {
            // The remaining ranks record the loss.
            return fault;
        }
        recorder.fault(state.step + 1, &fault);
        if fault.class() != Class::Diverged {
            // The checkpoint being written may still succeed.
            if let Err(why) = self.saver.wait().and_then(|written| recorder.written(written)) {
                recorder.not_kept(self.kept, &why);
            }
            return fault;
        }
        let mut keep = |own: &mut Self| match own.kept < state.step {
            true => own.keep_now(Snapshot::of(state)?, state.owners.pieces(), recorder, false),
            false => own.finish(recorder),
        };
        let kept = keep(self);
        let fault = recorder.diverged(fault, state.step, kept);
        if self.comm.rank() == 0 {
            self.comm.report(&fault.to_string());
        }
        // The first fault is the one to report.
        let _ = self.comm.barrier("the end");
        fault
    }
}

/// The blobs of all ranks, each of which passes what it has `written`; an error on one rank is returned on all.
pub(crate) fn written_by_all(
    comm: &Group,
    written: &Result<Vec<BlobRecord>>,
) -> Result<Vec<BlobRecord>> {
    let words = comm.all_gather("the keeping of a state", word(written).as_bytes());
    let mut blobs = Vec::new();
    for (rank, word) in (0..).zip(&words.map_err(lost)?) {
        blobs.extend(parse_report(&String::from_utf8_lossy(word), rank)?);
    }
    Ok(blobs)
}

/// The store key for a rank's report.
fn key(step: u64, rank: u32) -> String {
    format!("checkpoint/{step}/{rank}")
}

/// A rank's report to rank 0.
fn word(written: &Result<Vec<BlobRecord>>) -> String {
    let word = match written {
        Ok(blobs) => json!({ "blobs": blobs }),
        Err(fault) => json!({ "fault": fault.to_string() }),
    };
    word.to_string()
}

/// Parses a report.
fn parse_report(word: &str, rank: u32) -> Result<Vec<BlobRecord>> {
    let unread = |error| Fault::bug(format!("rank {rank} wrote what rank 0 cannot read: {error}"));
    let mut word: serde_json::Value = serde_json::from_str(word).map_err(unread)?;
    if let Some(fault) = word["fault"].as_str() {
        let what = format!("rank {rank} could not write its part of a checkpoint");
        return Err(Fault::machine(what).found(fault));
    }
    serde_json::from_value(word["blobs"].take()).map_err(unread)
}

/// Waits for the report of a rank.
fn wait_for_report(
    store: &KeyValueStore,
    key: &str,
    rank: u32,
    patience: Duration,
) -> Result<Vec<BlobRecord>> {
    match store.wait(key, patience).map_err(lost)? {
        Some(word) => {
            store.forget(key).map_err(lost)?;
            parse_report(&word, rank)
        }
        None => Err(not_written(rank, patience)),
    }
}

fn not_written(rank: u32, patience: Duration) -> Fault {
    let seconds = patience.as_secs_f64();
    Fault::machine(format!("rank {rank} did not write its part of a checkpoint within {seconds} s"))
        .at("--checkpoint-timeout")
        .hint("run the same command again: it continues from the checkpoint before")
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels::group::RunKey;

    #[test]
    fn a_slow_rank_and_one_whose_disk_is_full_are_named() {
        let patience = Duration::from_millis(50);
        let store = KeyValueStore::serve(
            "127.0.0.1",
            0,
            "test/",
            &RunKey::default(),
            Duration::from_secs(10),
        )
        .unwrap();
        let slow = wait_for_report(&store, "checkpoint/6/2", 2, patience).unwrap_err();
        assert_eq!(slow.class(), Class::Machine);
        assert!(
            slow.to_string()
                .contains("rank 2 did not write its part of a checkpoint within 0.05 s")
        );
        store.set("checkpoint/6/3", &word(&Err(Fault::machine("the disk is full")))).unwrap();
        let full = wait_for_report(&store, "checkpoint/6/3", 3, patience).unwrap_err();
        assert_eq!(full.class(), Class::Machine);
        assert!(
            full.to_string().contains("rank 3") && full.to_string().contains("the disk is full")
        );
        let blob = BlobRecord { name: "a".to_owned(), bytes: 3, digest: Digest(1) };
        store.set("checkpoint/6/4", &word(&Ok(vec![blob.clone()]))).unwrap();
        assert_eq!(wait_for_report(&store, "checkpoint/6/4", 4, patience).unwrap(), [blob]);
        assert_eq!(store.find("checkpoint/6/4").unwrap(), None, "a run has many checkpoints");
    }
}
