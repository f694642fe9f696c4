//! The run as one of many ranks. Rank 0 alone opens the run's folder and writes to it; the others hold their part of the
//! state, and go where rank 0 begins.

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::{Class, Digest, Fault, Result};
use kernels::group::{Group, Store};
use kernels::runtime::{self, KernelTable};
use loader::{Opened, Prefetcher};
use serde_json::json;

use super::restore::Reading;
use super::shard::Shard;
use super::step::{self, Stepped};
use crate::checkpoint::{BlobRecord, Checkpoints, Layout, Ring, RingOptions, Saver, Snapshot};
use crate::exec::ExecOptions;
use crate::ledger::StepRecord;
use crate::memory;
use crate::mesh::Team;
use crate::mesh::words::{Reader, Writer};
use crate::refusal::lost;
use crate::run::{Opening, Outcome, Run, checkpoint_is_due, last_step, staging, validation_is_due};
use crate::spec::RunSpec;
use crate::state::ownership;

/// Trains what `opened` says as one of `group`'s ranks. The outcome is the same on every rank.
pub fn train_as(
    opened: &Opened,
    exec: &ExecOptions,
    table: &KernelTable,
    group: &Group,
) -> Result<Outcome> {
    let outcome = begin(opened, exec, table, group);
    if let Err(fault) = &outcome {
        // The others would only see a connection close.
        group.report(&fault.to_string());
    }
    outcome
}

fn begin(
    opened: &Opened,
    exec: &ExecOptions,
    table: &KernelTable,
    group: &Group,
) -> Result<Outcome> {
    runtime::enter_thread().map_err(lost)?;
    let spec = Arc::new(RunSpec::new(opened)?);
    agree(&spec, exec, table, group)?;
    memory::refuse(&spec, exec, group.nodes(), group.rank())?;
    let carried = group.carry(exec.device, exec.transport).map_err(lost)?;
    let team = Team::new(group, exec.schedule, exec.flat)?;
    let pieces = ownership::pieces(&spec.parameters, &spec.rules, group.world());
    let layout = Arc::new(Layout::new(&spec, exec.device));
    let reading = Reading { group, layout: &layout, pieces: &pieces, workers: exec.workers };
    let (mut run, (found, checkpoints)) = if group.rank() == 0 {
        let mut opening = Opening::new(&spec, opened, exec, table)?;
        let found = opening.newest_of_all(&reading)?;
        let found = opening.told(found)?;
        let mut run = opening.begin(found.as_ref().map_or(0, |shard| shard.step))?;
        let (schedule, nodes) = (exec.schedule.name(), team.nodes.sizes());
        let transport = if carried.rccl { "rccl" } else { "gloo" };
        run.event("ranks", json!({
            "world": group.world(), "schedule": schedule, "nodes": nodes, "transport": transport,
            "rccl_release": carried.release, "no_rccl_because": carried.reason,
        }))?;
        run.note(&format!("{} ranks, tensors by {}", group.world(), carried.words()));
        idle(&spec, group.world()).iter().for_each(|note| run.note(note));
        let checkpoints = run.checkpoints.clone();
        (Some(run), (found, checkpoints))
    } else {
        (None, reading.follow()?)
    };
    let begin = || Shard::begin(&spec, exec.device, pieces.clone(), group.rank());
    let mut shard = found.map_or_else(begin, Ok)?;
    let (kept, saver, ring) = (shard.step, Saver::new(), Ring::new(exec.ring));
    let mut keeper = Keeper { layout, checkpoints, kept, saver, ring };
    let outcome = steps(&spec, exec, &team, &mut shard, &mut keeper, &mut run)?;
    // Nobody says done before rank 0 has written everything.
    let Some(run) = run else {
        group.barrier("the end").map_err(lost)?;
        return Ok(outcome);
    };
    let outcome = run.finish(outcome.step)?;
    group.barrier("the end").map_err(lost)?;
    Ok(outcome)
}

/// What to say of phases that have not a micro-batch for each rank.
fn idle(spec: &RunSpec, world: u32) -> Vec<String> {
    let few = spec.plan.phases().iter().filter_map(|phase| {
        let step = spec.plan.step(phase.first_step).ok()?;
        let leaves = step.batch / step.micro_batch;
        (leaves < u64::from(world)).then(|| {
            let idle = u64::from(world) - leaves;
            let name = &phase.name;
            format!(
                "note: phase {name:?} has {leaves} micro-batches in a step: {idle} of {world} ranks compute none of them"
            )
        })
    });
    few.collect()
}

/// The loop.
fn steps(
    spec: &Arc<RunSpec>,
    exec: &ExecOptions,
    team: &Team<'_>,
    shard: &mut Shard,
    keeper: &mut Keeper,
    run: &mut Option<Run<'_>>,
) -> Result<Outcome> {
    let steps = shard.step + 1..last_step(spec, exec) + 1;
    let (plan, data) = (spec.plan.clone(), spec.data.clone());
    let (group, slice) = (team.group, team.slice(team.group.rank())?);
    let stage = staging(spec, exec)?;
    let mut digest = None;
    let mut batches = Prefetcher::start(plan, data, steps, slice, exec.prefetch, stage)?;
    loop {
        let batch = match run {
            Some(run) => run.metrics.wait(|| batches.next()),
            None => batches.next(),
        };
        let Some(batch) = batch else { break };
        let (batch, leaves) = batch?;
        let computed =
            step::advance(spec, shard, (&batch, &leaves), (team, exec.workers), || exec.stopped());
        let Stepped { record, stop, sent, waited } = match computed {
            Ok(stepped) => stepped,
            Err(fault) => return Err(keeper.failed(fault, shard, group, run)),
        };
        digest = Some(record.state);
        if let Some(run) = run {
            let step = spec.plan.step(record.step)?;
            run.record(&record, step.batch * u64::from(step.seq_len))?;
            let waited = (waited.as_secs_f64() * 1e6).round() / 1e6;
            let fields = json!({
                "step": record.step, "bytes": sent.all, "bytes_between_nodes": sent.between_nodes,
                "waited_for_blocks": waited,
            });
            run.event("exchange", fields)?;
        }
        keeper.recall(group, shard, run, &record)?;
        if let (Some(run), true) = (run.as_mut(), validation_is_due(spec, exec, shard.step)) {
            // Every rank holds all weights: rank 0 reads the held-out text, the others wait for it at the next step.
            run.validate(shard.step, &shard.weights, &shard.balance)?;
        }
        keeper.saver.done()?;
        if stop || checkpoint_is_due(spec, exec, shard.step) {
            keeper.keep(group, shard, run, &record)?;
        }
        if stop {
            break;
        }
    }
    keeper.saver.wait()?;
    Ok(Outcome { step: shard.step, steps: spec.plan.steps(), state: digest })
}

/// What a rank keeps its part of the state with.
struct Keeper {
    layout: Arc<Layout>,
    checkpoints: Checkpoints,
    /// The last step that is kept, or will be.
    kept: u64,
    /// At work on every rank but rank 0, whose run has its own.
    saver: Saver,
    /// Its part of recent states.
    ring: Ring,
}

impl Keeper {
    /// Keeps the state: each rank writes the pieces that it owns, beside the steps that follow; rank 0 commits them when it
    /// has heard from all. What lies on the disk then is the same whoever wrote it.
    fn keep(
        &mut self,
        group: &Group,
        shard: &Shard,
        run: &mut Option<Run<'_>>,
        record: &StepRecord,
    ) -> Result<()> {
        if run.is_none() {
            // One copy at a time: this one may only be made when the one before is written.
            self.saver.wait()?;
        }
        self.kept = record.step;
        let (start, world, rank) = (Instant::now(), group.world(), group.rank());
        let (store, patience) = (group.store(), group.timeout());
        let (checkpoints, layout) = (self.checkpoints.clone(), Arc::clone(&self.layout));
        let (step, digest) = (record.step, record.state);
        let key = move |rank: u32| format!("checkpoint/{step}/{rank}");
        let Some(run) = run else {
            let snapshot = shard.snapshot();
            return self.saver.start((step, digest, start.elapsed()), move || {
                let written = checkpoints.write(&layout, &snapshot);
                store.set(&key(rank), &word(&written)).map_err(lost)?;
                written.map(|_| ())
            });
        };
        run.checkpoint(record, start, |_, chain| {
            let (snapshot, pieces) = (shard.snapshot(), shard.pieces().to_vec());
            Box::new(move || {
                let mut blobs = checkpoints.write(&layout, &snapshot)?;
                for rank in 1..world {
                    blobs.extend(heard(&store, &key(rank), rank, patience)?);
                }
                checkpoints.commit(&snapshot, (digest, chain), &layout, &pieces, blobs)
            })
        })
    }

    /// Takes note of a step; if its loss has jumped, all ranks write down what they have of the state before.
    fn recall(
        &mut self,
        group: &Group,
        shard: &Shard,
        run: &mut Option<Run<'_>>,
        record: &StepRecord,
    ) -> Result<()> {
        let before = self.ring.step(record.step, record.loss, || shard.snapshot());
        let Some(before) = before else { return Ok(()) };
        self.saver.wait()?;
        match run {
            Some(run) => run.rescue(record.step, before.step(), |_, chain, digest| {
                let blobs = self.together(group, &before)?;
                let digests = (digest, chain);
                self.checkpoints.commit(&before, digests, &self.layout, shard.pieces(), blobs)
            }),
            None => self.together(group, &before).map(drop),
        }
    }

    /// Writes this rank's part at once, while all others write theirs; everybody's records.
    fn together(&self, group: &Group, snapshot: &Snapshot) -> Result<Vec<BlobRecord>> {
        let written = word(&self.checkpoints.write(&self.layout, snapshot));
        let words = group.all_gather("the keeping of a state", written.as_bytes()).map_err(lost)?;
        let mut blobs = Vec::new();
        for (rank, word) in (0..).zip(&words) {
            blobs.extend(spoken(&String::from_utf8_lossy(word), rank)?);
        }
        Ok(blobs)
    }

    /// A run that diverges does so on every rank, before anything moved: together they keep what there is.
    fn failed(
        &mut self,
        fault: Fault,
        shard: &Shard,
        group: &Group,
        run: &mut Option<Run<'_>>,
    ) -> Fault {
        if fault.class() != Class::Diverged {
            return match run {
                Some(run) => run.failed(fault, shard.step, |_, _, _| Ok(())),
                None => fault,
            };
        }
        // Of two faults the first one matters.
        let _ = self.saver.wait();
        let fault = match run {
            Some(run) => run.failed(fault, shard.step, |_, chain, digest| {
                let snapshot = shard.snapshot();
                let blobs = self.together(group, &snapshot)?;
                let digests = (digest, chain);
                self.checkpoints.commit(&snapshot, digests, &self.layout, shard.pieces(), blobs)
            }),
            None => {
                if self.kept < shard.step {
                    let _ = self.together(group, &shard.snapshot());
                }
                fault
            }
        };
        if group.rank() == 0 {
            group.report(&fault.to_string());
        }
        let _ = group.barrier("the end");
        fault
    }
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
            "rank {rank} did not write its part of a checkpoint within {patience:?}"
        ))
        .hint("run the same command again: it goes on from the checkpoint before")
    };
    let word = store.wait(key, patience).map_err(lost)?.ok_or_else(missing)?;
    spoken(&word, rank)
}

/// Refuses ranks that would train something else, compute otherwise, or stop elsewhere than rank 0.
fn agree(spec: &RunSpec, exec: &ExecOptions, table: &KernelTable, group: &Group) -> Result<()> {
    let mut mine = Writer::default();
    mine.digest(Digest::of(spec)).text(&table.fingerprint());
    let options = options(exec);
    options.iter().for_each(|option| {
        mine.text(option);
    });
    let heard = group.all_gather("the first meeting", mine.bytes()).map_err(lost)?;
    let read = |bytes: &[u8]| {
        let mut words = Reader::new(bytes);
        let (run, table) = (words.digest()?, words.text()?);
        let options = options.iter().map(|_| words.text()).collect::<Result<Vec<_>>>()?;
        words.end().map(|()| (run, table, options))
    };
    let first = read(&heard[0])?;
    for (rank, heard) in heard.iter().enumerate() {
        let other = read(heard)?;
        let differs = |what: &str, (found, wanted): (&str, &str), hint: &str| {
            let what = format!("rank {rank} has another {what} than rank 0");
            Err(Fault::mismatch(what).found(found).wanted(wanted).hint(hint))
        };
        if other.0 != first.0 {
            let digests = (other.0.to_string(), first.0.to_string());
            let hint = "start every rank with the same curriculum and stores";
            return differs("run", (digests.0.as_str(), digests.1.as_str()), hint);
        }
        if other.1 != first.1 {
            let hint = "ranks need one device architecture, one libtorch and one C library";
            return differs("kernel table", parted(&other.1, &first.1), hint);
        }
        let parts = other.2.iter().zip(&first.2).find(|(other, first)| other != first);
        if let Some((other, first)) = parts {
            let hint = "give every rank the same options";
            return differs("command line", (other.as_str(), first.as_str()), hint);
        }
    }
    Ok(())
}

/// The options that every rank has to share, as a person gives them.
fn options(exec: &ExecOptions) -> Vec<String> {
    let RingOptions { states, every, spike } = exec.ring;
    let stop = exec.stop_after.map_or_else(|| "none".to_owned(), |step| step.to_string());
    vec![
        format!("--checkpoint-every {}", exec.checkpoint_every),
        format!("--stop-after {stop}"),
        format!("--validate-every {}", exec.validation.every),
        format!("--ring {states}"),
        format!("--ring-every {every}"),
        format!("--ring-spike {spike:e}"),
        format!("--schedule {}", exec.schedule.name()),
        format!("--flat {}", exec.flat),
        format!("--transport {:?}", exec.transport).to_lowercase(),
        format!("--restart {}", exec.restart),
    ]
}

/// The first entry in which the lines of two kernel tables differ.
fn parted<'a>(one: &'a str, other: &'a str) -> (&'a str, &'a str) {
    let mut entries = one.split("; ").zip(other.split("; "));
    entries.find(|(one, other)| one != other).unwrap_or((one, other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_rank_and_one_whose_disk_is_full_are_named() {
        let patience = Duration::from_millis(50);
        let store = Store::serve("127.0.0.1", 0, "test/", Duration::from_secs(10)).unwrap();
        let slow = heard(&store, "checkpoint/6/2", 2, patience).unwrap_err();
        assert_eq!(slow.class(), Class::Machine);
        assert!(
            slow.to_string().contains("rank 2 did not write its part of a checkpoint within 50ms")
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
    }
}
