//! Records a run on rank 0: the ledger, events, curves, and lines for people.

use std::sync::atomic::Ordering;
use std::time::Duration;

use contract::{Digest, Fault, Result, shell};
use kernels::group::{Group, Rendezvous};
use serde_json::{Value, json};

use super::World;
use super::recover::Recovery;
use crate::checkpoint::WrittenCheckpoint;
use crate::evaluate::{Task, TaskScore};
use crate::events::{self, Events};
use crate::exec::ExecOptions;
use crate::folder::{OpenRun, RunFolder};
use crate::ledger::{Ledger, StepRecord};
use crate::metrics::{Metrics, StepSpeed};
use crate::progress::ProgressPrinter;
use crate::refusal::lost;
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{StepContext, StepResult};
use crate::validate::SourceLoss;

/// Writes on rank 0; does nothing on other ranks.
pub(super) struct Recorder<'a>(pub(super) Option<RunRecords<'a>>);

/// The run's folder, opened by rank 0.
pub(super) struct RunRecords<'a> {
    pub(super) spec: &'a RunSpec,
    pub(super) exec: &'a ExecOptions,
    pub(super) open: OpenRun,
    pub(super) events: Events,
    pub(super) metrics: Metrics,
    pub(super) progress: ProgressPrinter,
    /// A recovery after which no new step has been recorded yet, and whether the state came from memory.
    pub(super) recovery: Option<(Recovery, bool)>,
    /// Number of steps recomputed since this process opened the folder.
    pub(super) again: u64,
    /// Peak FLOP/s of this rank's device, if known.
    pub(super) peak: Option<f64>,
}

impl Recorder<'_> {
    /// The next batch; measures how long it took.
    pub(super) fn wait<T>(&mut self, next: impl FnOnce() -> Option<T>) -> Option<T> {
        match &mut self.0 {
            Some(book) => book.metrics.wait(next),
            None => next(),
        }
    }

    /// Records the step, or compares it with the existing record.
    pub(super) fn record(&mut self, stepped: &StepResult) -> Result<()> {
        self.0.as_mut().map_or(Ok(()), |book| book.record(stepped))
    }

    /// Computes the validation loss and scores the tasks, all ranks together. Returns whether that was completed: a
    /// rank may be asked to stop meanwhile.
    pub(super) fn validate(
        &mut self,
        cx: StepContext<'_>,
        exec: &ExecOptions,
        state: &State,
    ) -> Result<bool> {
        let (step, asked) = (state.step, || exec.stopped());
        let sources = exec.validation.take(cx, state, &asked)?;
        if !self
            .completed("validation", step, sources, |book, sources| book.validated(step, sources))?
        {
            return Ok(false);
        }
        if exec.tasks.is_empty() {
            return Ok(true);
        }
        let scores = Task::score(&exec.tasks, cx, state, &asked)?;
        self.completed("evaluation", step, scores, |book, scores| book.evaluated(step, scores))
    }

    /// Whether a validation or an evaluation after `step` was broken off, as rank 0 says.
    pub(super) fn owes(&self, comm: &Group, exec: &ExecOptions, step: u64) -> Result<bool> {
        let lacks = |name| events::lacks(&RunFolder::new(&exec.out).events(), name, step);
        let own = self.0.is_some()
            && (lacks("validation") || (!exec.tasks.is_empty() && lacks("evaluation")));
        let said = comm.all_gather("what was broken off", &[u8::from(own)]).map_err(lost)?;
        Ok(said[0][..] == [1])
    }

    /// Records results, if they are complete. Returns whether they are.
    fn completed<T>(
        &mut self,
        what: &str,
        step: u64,
        results: Option<Vec<T>>,
        record: impl FnOnce(&mut RunRecords<'_>, &[T]) -> Result<()>,
    ) -> Result<bool> {
        match (&mut self.0, &results) {
            (None, _) => {}
            (Some(book), Some(results)) => record(book, results)?,
            (Some(book), None) => book.progress.note(&format!(
                "{what} after step {step} is broken off: the run was asked to stop"
            )),
        }
        Ok(results.is_some())
    }

    /// Records a checkpoint that was written.
    pub(super) fn written(&mut self, written: Option<WrittenCheckpoint>) -> Result<()> {
        let Some(WrittenCheckpoint { step, state, stall, writing, left }) = written else {
            return Ok(());
        };
        self.event("checkpoint", json!({
            "step": step, "state": state, "stall_seconds": seconds(stall), "writing_seconds": seconds(writing),
        }))?;
        left.map_or(Ok(()), |why| self.left(step, &why))
    }

    /// Records that the checkpoint of `step` was written, but older ones could not be removed.
    fn left(&mut self, step: u64, why: &Fault) -> Result<()> {
        let Some(book) = &mut self.0 else { return Ok(()) };
        book.progress.note(&format!(
            "warning: old checkpoints cannot be removed, and take disk space: {why}"
        ));
        self.event("not removed", json!({"step": step, "fault": why.to_string()}))
    }

    /// Records new connections to the ranks' stores without the run's key; prints a line for the first.
    pub(super) fn record_unauthenticated(&mut self, world: &World) -> Result<()> {
        world.rendezvous.iter().for_each(Rendezvous::report_unauthenticated);
        let Some(book) = &mut self.0 else { return Ok(()) };
        let unauthenticated = world.comm.unauthenticated();
        // After a loss it may be another store, with its own count.
        let before = world.unauthenticated.swap(unauthenticated.refused, Ordering::Relaxed);
        if unauthenticated.refused == before {
            return Ok(());
        }
        let Some(words) = unauthenticated.words() else { return Ok(()) };
        if before == 0 {
            book.progress.note(&format!("note: {words}"));
        }
        let step = book.open.ledger.last_step();
        let fields =
            json!({"step": step, "refused": unauthenticated.refused, "last": unauthenticated.last});
        book.events.write("unauthenticated", fields)
    }

    /// Writes an event.
    pub(super) fn event(&mut self, event: &str, fields: serde_json::Value) -> Result<()> {
        self.0.as_mut().map_or(Ok(()), |book| book.events.write(event, fields))
    }

    /// The digest of the state after `step`, and the ledger's chain; `None` on the other ranks. Syncs the ledger first,
    /// so that a checkpoint never contains steps that a power loss can remove from the ledger.
    pub(super) fn digests(&self, step: u64) -> Result<Option<(Digest, Digest)>> {
        let Some(RunRecords { open: OpenRun { ledger, .. }, .. }) = &self.0 else {
            return Ok(None);
        };
        ledger.sync()?;
        let chain = ledger.chain_at(step);
        let chain = chain.ok_or_else(|| Fault::bug(format!("step {step} is not in the ledger")))?;
        Ok(Some((ledger.record(step)?.state_digest, chain)))
    }

    /// Records that a spike begins at `step`, and that the state after `before` was saved for a replay.
    pub(super) fn spike(&mut self, step: u64, before: u64) -> Result<()> {
        let Some(book) = &mut self.0 else { return Ok(()) };
        book.events.write("spike", json!({"step": step, "kept": before}))?;
        let look = book.replay(step);
        book.progress.note(&format!(
            "step {step} is a spike: the state after step {before} is kept for {look}"
        ));
        Ok(())
    }

    /// Records that `step` failed. Errors while writing are ignored: the original fault matters more.
    pub(super) fn fault(&mut self, step: u64, fault: &Fault) {
        let _ = self.event("fault", json!({"step": step, "fault": fault.to_string()}));
    }

    /// Adds hints about the diverged step after `last`, and whether the state before it was saved.
    pub(super) fn diverged(&mut self, fault: Fault, last: u64, kept: Result<()>) -> Fault {
        let Some(book) = &mut self.0 else { return fault };
        let (step, replay) = (last + 1, book.replay(last + 1));
        let look = format!(
            "see the documents of the step with {replay}; `zdata amend CURRICULUM --skip {step}` passes it, \
             `skip_step.non_finite = \"skip\"` all such steps"
        );
        match kept {
            Ok(()) => fault.hint(format!("the state after step {last} is kept; {look}")),
            Err(second) => {
                book.not_kept(last, &second);
                let why = second.to_string().replace('\n', "\n  ");
                fault
                    .hint(format!("the state after step {last} could not be kept: {why}\n  {look}"))
            }
        }
    }

    /// Records that the state after `step` could not be saved, in a run that ends with another fault.
    pub(super) fn not_kept(&mut self, step: u64, why: &Fault) {
        let Some(book) = &mut self.0 else { return };
        book.not_kept(step, why);
        book.progress.note(&format!("warning: the state after step {step} was not kept: {why}"));
    }

    /// Records the end of the run.
    pub(super) fn finish(&mut self, step: u64) -> Result<()> {
        let Some(book) = &mut self.0 else { return Ok(()) };
        let stall = book.metrics.stall();
        book.progress.end(&stall);
        book.events.write(
            "stop",
            json!({
                "step": step, "signal": book.exec.stopped(), "stall_first": seconds(stall.first),
                "stall": seconds(stall.waited), "seconds": seconds(stall.taken),
            }),
        )
    }
}

impl RunRecords<'_> {
    /// Errors here are ignored: the fault that ends the run is reported.
    fn not_kept(&mut self, step: u64, why: &Fault) {
        let _ = self.events.write("not kept", json!({"step": step, "fault": why.to_string()}));
    }

    /// Records how long a recovery took, once the run is where it was.
    fn recovered(&mut self, step: u64) -> Result<()> {
        let Some((Recovery { since, generation, .. }, from_memory)) = self.recovery.take() else {
            return Ok(());
        };
        let fields = json!({
            "step": step,
            "generation": generation,
            "from": if from_memory { "memory" } else { "disk" },
            "again": self.again,
            "seconds": seconds(since.elapsed()),
        });
        self.events.write("recovered", fields)
    }

    fn record(&mut self, stepped: &StepResult) -> Result<()> {
        let StepResult { record, asked: _, sent, shared, folded, waited, ranks, model_flops } =
            stepped;
        let again = record.step <= self.open.ledger.last_step();
        if again {
            compare(&self.open.ledger, record, &self.open.folder)?;
            self.again += 1;
        } else {
            let changed = self.open.changes_from.take_if(|first| *first <= record.step);
            let curriculum = changed.map(|_| self.spec.canonical());
            self.open.ledger.append(record, curriculum)?;
            self.recovered(record.step)?;
        }
        let step = self.spec.plan.step(record.step)?;
        let tokens = step.batch * u64::from(step.seq_len);
        let taken = self.progress.step(record, tokens, self.metrics.waited(), again);
        let speed = StepSpeed {
            taken,
            waited: self.metrics.waited(),
            tokens,
            all_tokens: self.spec.plan.tokens_until(record.step),
            flops: model_flops / f64::from(*ranks),
            peak: self.peak,
            memory: storage::process::resident().0,
        };
        self.metrics.step(self.spec, record, &speed, again)?;
        let fields = json!({
            "step": record.step, "loss": record.loss, "seconds": seconds(taken),
            "tokens_per_second": speed.rate().round(), "again": again, "stall": seconds(speed.waited),
            "memory": speed.memory, "tokens": speed.all_tokens, "tflops": speed.tflops(), "mfu": speed.mfu(),
        });
        self.events.write("step", fields)?;
        if *ranks == 1 {
            return Ok(());
        }
        let waited = (waited.as_secs_f64() * 1e6).round() / 1e6;
        let fields = json!({
            "step": record.step, "bytes": sent.all, "bytes_between_nodes": sent.between_nodes,
            "bytes_shared": shared, "bytes_folded": folded,
            "waited_for_blocks": waited,
        });
        self.events.write("exchange", fields)
    }

    fn validated(&mut self, step: u64, sources: &[SourceLoss]) -> Result<()> {
        if sources.is_empty() {
            return Ok(());
        }
        self.progress.validation(step, sources);
        let all = SourceLoss::over(sources);
        let by_source: serde_json::Map<_, _> =
            sources.iter().map(|one| (one.source.clone(), one.to_json())).collect();
        let fields = json!({"step": step, "all": all.to_json(), "sources": by_source});
        self.between("validation", step, fields)
    }

    fn evaluated(&mut self, step: u64, scores: &[TaskScore]) -> Result<()> {
        self.progress.evaluation(step, scores);
        let tasks: serde_json::Map<_, _> =
            scores.iter().map(|one| (one.task.clone(), one.to_json())).collect();
        self.between("evaluation", step, json!({"step": step, "tasks": tasks}))
    }

    /// Writes an event, then its curves, which are read from it.
    fn between(&mut self, name: &str, step: u64, fields: Value) -> Result<()> {
        self.events.write(name, fields.clone())?;
        self.metrics.between(step, name, &fields)
    }

    /// The command that replays `step`.
    fn replay(&self, step: u64) -> String {
        format!("`ztrain replay --run {} --step {step}`", shell::path(self.open.folder.root()))
    }
}

/// Seconds for an event, rounded to a tenth of a millisecond.
fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 1e4
}

/// Compares a recomputed step with the ledger.
fn compare(ledger: &Ledger, record: &StepRecord, folder: &RunFolder) -> Result<()> {
    let written = ledger.record(record.step)?;
    match written.difference(record, &ledger.head().parameters) {
        None => Ok(()),
        Some(difference) => Err(Fault::mismatch(format!(
            "step {} was computed again and its {} differs from the ledger",
            record.step, difference.quantity
        ))
        .at(folder.ledger().display().to_string())
        .found(difference.right)
        .wanted(difference.left)
        .hint(format!(
            "find out whether it is repeatable: `ztrain replay --run {} --step {}`",
            shell::path(folder.root()),
            record.step
        ))),
    }
}
