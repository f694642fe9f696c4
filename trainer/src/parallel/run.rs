//! The run as one of many ranks. Rank 0 alone opens the run's folder and writes to it; the others hold their part of the
//! state, and go where rank 0 begins.

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::{Class, Digest, Fault, Hasher, Result};
use kernels::group::{Group, Store};
use kernels::runtime::{self, KernelTable};
use loader::{Opened, Prefetcher, RankSlice};
use serde_json::json;

use super::shard::{self, Shard};
use super::step::{self, Stepped};
use super::words::{Reader, Writer};
use super::{lost, owners};
use crate::checkpoint::{self, FileRecord, Saver};
use crate::exec::ExecOptions;
use crate::folder::RunFolder;
use crate::ledger::StepRecord;
use crate::run::{Outcome, Run, checkpoint_is_due, last_step, staging, validation_is_due};
use crate::spec::RunSpec;
use crate::step::initial;

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
    let (mut run, state) = if group.rank() == 0 {
        let (run, state) = Run::open(&spec, opened, exec, table)?;
        (Some(run), state)
    } else {
        (None, initial(&spec, exec.device)?)
    };
    let pieces = owners::pieces(&spec.parameters, &spec.rules, group.world());
    let mut shard = shard::deal(group, state, pieces)?;
    if let Some(run) = &mut run {
        run.event("ranks", json!({"world": group.world(), "schedule": "subtree-first"}))?;
    }
    let outcome = steps(&spec, exec, group, &mut shard, &mut run)?;
    // Nobody says done before rank 0 has written everything.
    let Some(run) = run else {
        group.barrier("the end").map_err(lost)?;
        return Ok(outcome);
    };
    let outcome = run.finish(outcome.step)?;
    group.barrier("the end").map_err(lost)?;
    Ok(outcome)
}

/// The loop.
fn steps(
    spec: &Arc<RunSpec>,
    exec: &ExecOptions,
    group: &Group,
    shard: &mut Shard,
    run: &mut Option<Run<'_>>,
) -> Result<Outcome> {
    let steps = shard.step + 1..last_step(spec, exec) + 1;
    let (plan, data) = (spec.plan.clone(), spec.data.clone());
    let slice = RankSlice::new(group.rank(), group.world())?;
    let stage = staging(spec, exec)?;
    let (mut digest, mut saver) = (None, Saver::new());
    let mut batches = Prefetcher::start(plan, data, steps, slice, exec.prefetch, stage)?;
    loop {
        let batch = match run {
            Some(run) => run.metrics.wait(|| batches.next()),
            None => batches.next(),
        };
        let Some(batch) = batch else { break };
        let (batch, leaves) = batch?;
        let computed =
            step::advance(spec, shard, (&batch, &leaves), (group, exec.lanes), || exec.stopped());
        let Stepped { record, stop } = match computed {
            Ok(stepped) => stepped,
            Err(fault) => return Err(failed(fault, shard, group, run)),
        };
        digest = Some(record.state);
        if let Some(run) = run {
            let step = spec.plan.step(record.step)?;
            run.record(&record, step.batch * u64::from(step.seq_len))?;
        }
        if let (Some(run), true) = (run.as_mut(), validation_is_due(spec, exec, shard.step)) {
            // Every rank holds all weights: rank 0 reads the held-back text, the others wait for it at the next step.
            run.validate(shard.step, &shard.weights, &shard.balance)?;
        }
        saver.done()?;
        if stop || checkpoint_is_due(spec, exec, shard.step) {
            keep(spec, exec, group, shard, run, &mut saver, &record)?;
        }
        if stop {
            break;
        }
    }
    saver.wait()?;
    Ok(Outcome { step: shard.step, steps: spec.plan.steps(), state: digest })
}

/// Keeps the state: each rank writes its share of the blobs, beside the steps that follow; rank 0 commits them when it has
/// heard from all. What lies on the disk then is the same whoever wrote it.
fn keep(
    spec: &RunSpec,
    exec: &ExecOptions,
    group: &Group,
    shard: &Shard,
    run: &mut Option<Run<'_>>,
    saver: &mut Saver,
    record: &StepRecord,
) -> Result<()> {
    let (start, world, rank) = (Instant::now(), group.world() as usize, group.rank() as usize);
    let [weights, first, second] =
        checkpoint::writers(&shard.without_moments(), &spec.parameters, world);
    let writer = |set: usize, tensor: usize| [&first, &second][set][tensor] as u32;
    let mut state = shard.gather(group, writer)?;
    for (weight, writer) in state.weights.iter_mut().zip(weights) {
        if writer == rank {
            *weight = weight.copy();
        }
    }
    let folder = RunFolder::new(&exec.out).checkpoints();
    let (store, parameters, patience) = (group.store(), spec.parameters.clone(), group.timeout());
    let key = move |rank: usize| format!("checkpoint/{}/{rank}", state.step);
    let (step, digest) = (record.step, record.state);
    let part = {
        let (folder, parameters) = (folder.clone(), parameters.clone());
        move || folder.write_part(&state, &parameters, (rank, world))
    };
    let Some(run) = run else {
        saver.wait()?;
        return saver.start((step, digest, start.elapsed()), move || {
            let written = part();
            let word = match &written {
                Ok(files) => json!({ "files": files }),
                Err(fault) => json!({ "fault": fault.to_string() }),
            };
            store.set(&key(rank), &word.to_string()).map_err(lost)?;
            written.map(|_| ())
        });
    };
    run.checkpoint_by(record, start, |_, chain| {
        Box::new(move || {
            let mut parts = vec![part()?];
            for rank in 1..world {
                parts.push(heard(&store, &key(rank), rank, patience)?);
            }
            folder.commit((step, digest, chain), &parameters, parts)
        })
    })
}

/// What a rank wrote of a checkpoint, by its own word.
fn heard(store: &Store, key: &str, rank: usize, patience: Duration) -> Result<Vec<FileRecord>> {
    let missing = || {
        Fault::machine(format!(
            "rank {rank} did not write its part of a checkpoint within {patience:?}"
        ))
        .hint("run the same command again: it goes on from the checkpoint before")
    };
    let word = store.wait(key, patience).map_err(lost)?.ok_or_else(missing)?;
    let unread = |error| Fault::bug(format!("rank {rank} wrote what rank 0 cannot read: {error}"));
    let mut word: serde_json::Value = serde_json::from_str(&word).map_err(unread)?;
    if let Some(fault) = word["fault"].as_str() {
        return Err(Fault::machine(format!(
            "rank {rank} could not write its part of a checkpoint"
        ))
        .found(fault));
    }
    serde_json::from_value(word["files"].take()).map_err(unread)
}

/// A run that diverges does so on every rank, before anything moved: together they keep what there is.
fn failed(fault: Fault, shard: &Shard, group: &Group, run: &mut Option<Run<'_>>) -> Fault {
    if fault.class() != Class::Diverged {
        if let Some(run) = run {
            let fields = json!({"step": shard.step + 1, "fault": fault.to_string()});
            // The fault at hand matters more than a second one while writing about it.
            let _ = run.event("fault", fields);
        }
        return fault;
    }
    let Ok(whole) = shard.gather(group, |_, _| 0) else { return fault };
    let fault = match run {
        Some(run) => run.failed(fault, &whole),
        None => fault,
    };
    if group.rank() == 0 {
        group.report(&fault.to_string());
    }
    let _ = group.barrier("the end");
    fault
}

/// Refuses ranks that would train something else, compute otherwise, or stop elsewhere than rank 0.
fn agree(spec: &RunSpec, exec: &ExecOptions, table: &KernelTable, group: &Group) -> Result<()> {
    let stop_after = exec.stop_after.unwrap_or(u64::MAX);
    let mut mine = Writer::default();
    mine.digest(Digest::of(spec)).digest(Hasher::new().str(&table.fingerprint()).finish());
    mine.word(exec.checkpoint_every).word(stop_after).word(exec.validation.every);
    let heard = group.all_gather("the first meeting", mine.bytes()).map_err(lost)?;
    let read = |bytes: &[u8]| {
        let mut words = Reader::new(bytes);
        let what = (words.digest()?, words.digest()?);
        let when = (words.word()?, words.word()?, words.word()?);
        words.end().map(|()| (what, when))
    };
    let first = read(&heard[0])?;
    for (rank, heard) in heard.iter().enumerate() {
        let other = read(heard)?;
        let differs = |what: &str, hint: &str| {
            let what = format!("rank {rank} has another {what} than rank 0");
            Err(Fault::mismatch(what)
                .found(format!("{other:?}"))
                .wanted(format!("{first:?}"))
                .hint(hint))
        };
        if other.0.0 != first.0.0 {
            return differs("run", "start every rank with the same curriculum and stores");
        }
        if other.0.1 != first.0.1 {
            return differs("kernel table", "ranks need one device architecture and one libtorch");
        }
        if other.1 != first.1 {
            return differs("command line", "give every rank the same options");
        }
    }
    Ok(())
}
