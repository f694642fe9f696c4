//! Checkpoints of a run: each rank writes the pieces that it owns, beside the steps that follow; rank 0 commits them when it has
//! heard from all. What lies on the disk then is the same whoever wrote it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::{Class, Digest, Fault, Result};
use kernels::device::Unloader;
use kernels::group::{Group, Store};
use serde_json::json;

use super::record::Recorder;
use crate::checkpoint::{BlobRecord, Checkpoints, Layout, Retention, Saver, Snapshot, Snapshots};
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
    snapshots: Snapshots,
    /// Whether the loss of a rank may be survived.
    elastic: bool,
    /// How long the ranks may take to write.
    timeout: Duration,
}

/// Work for the saver; what it says is why older checkpoints could not be removed.
type Work = Box<dyn FnOnce() -> Result<Option<Fault>> + Send>;

/// Ranks that wait for each other's writing meet so often at least, however long they would wait for a rank that says nothing.
const TURN: Duration = Duration::from_secs(1);

/// What a rank says at such a meeting.
const IDLE: u8 = 0;
const BUSY: u8 = 1;
const LATE: u8 = 2;

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
        let (retention, saver, snapshots) =
            (exec.retention, Saver::new(), Snapshots::new(exec.snapshots));
        let (elastic, timeout) = (exec.min_ranks.is_some(), exec.checkpoint_timeout);
        Ok(Keeper {
            comm,
            layout,
            checkpoints,
            retention,
            kept,
            saver,
            unloader,
            snapshots,
            elastic,
            timeout,
        })
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
        let before = self.snapshots.step(record.step, record.loss, copy)?;
        let Some(before) = before else { return Ok(()) };
        let step = before.step();
        self.keep_now(before, state.owners.pieces(), recorder, true)?;
        recorder.jumped(record.step, step)
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
            Some(digests) => self.lead(snapshot, digests, state.owners.pieces().to_vec(), false),
            None => self.follow(snapshot)?,
        };
        self.saver.start((step, digest, start.elapsed()), work)?;
        self.kept = step;
        Ok(())
    }

    /// Rank 0 writes its part, hears from all others, and commits.
    fn lead(
        &self,
        snapshot: Snapshot,
        digests: (Digest, Digest),
        pieces: Vec<Piece>,
        pinned: bool,
    ) -> Work {
        let (checkpoints, layout) = (self.checkpoints.clone(), Arc::clone(&self.layout));
        let (store, world) = (self.comm.store(), self.comm.world());
        let (retention, patience) = (self.retention, self.timeout);
        Box::new(move || {
            let mut blobs = checkpoints.write(&layout, &snapshot)?;
            if let Some(store) = store {
                for rank in 1..world {
                    blobs.extend(heard(&store, &key(snapshot.step(), rank), rank, patience)?);
                }
            }
            // Of one that is to stay the retention has to know before it sees it.
            if pinned {
                checkpoints.pin(snapshot.step())?;
            }
            checkpoints.commit(&snapshot, digests, &layout, &pieces, blobs)?;
            // What is kept is kept, whether what is old may go or not.
            Ok(checkpoints.retain(retention).err())
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
            written.map(|_| None)
        }))
    }

    /// Waits until every rank has written what it writes. They meet meanwhile, so that nobody takes one whose disk or bucket is
    /// slow for lost; after a time of its own the run ends.
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

    /// Keeps a state at once, all ranks together.
    fn keep_now(
        &mut self,
        snapshot: Snapshot,
        pieces: &[Piece],
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
        self.saver.start((step, state, Duration::ZERO), work)?;
        self.kept = self.kept.max(step);
        self.finish(recorder)
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
    match store.wait(key, patience).map_err(lost)? {
        Some(word) => {
            store.forget(key).map_err(lost)?;
            spoken(&word, rank)
        }
        None => Err(not_written(rank, patience)),
    }
}

fn not_written(rank: u32, patience: Duration) -> Fault {
    let seconds = patience.as_secs_f64();
    Fault::machine(format!("rank {rank} did not write its part of a checkpoint within {seconds} s"))
        .at("--checkpoint-timeout")
        .hint("run the same command again: it goes on from the checkpoint before")
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
