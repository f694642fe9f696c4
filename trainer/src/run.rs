//! The run: open or resume, then step after step until the end, a signal or a fault.

use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::{Digest, Fault, Result};
use kernels::device::Stager;
use kernels::runtime::KernelTable;
use loader::{Batch, Opened, Prefetcher, RankSlice};
use serde_json::json;
use tch::Tensor;

use crate::checkpoint::{Checkpoints, Found, Layout, Reader, Ring, Saver, Snapshot, Written};
use crate::events::Events;
use crate::exec::ExecOptions;
use crate::folder::{OpenRun, RunFolder, levels};
use crate::ledger::{Ledger, StepRecord};
use crate::memory;
use crate::metrics::Metrics;
use crate::optim::balance::Balance;
use crate::parallel::restore::Reading;
use crate::parallel::shard::Shard;
use crate::report::Progress;
use crate::spec::RunSpec;
use crate::state::ownership;
use crate::step::{self, Leaves};
use crate::validate::SourceLoss;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The last step computed.
    pub step: u64,
    /// The last step of the curriculum.
    pub steps: u64,
    /// The state digest after it; `None` before the first step.
    pub state: Option<Digest>,
}

/// Trains what `opened` says, from wherever the folder stands, until its last step.
pub fn train(opened: &Opened, exec: &ExecOptions, table: &KernelTable) -> Result<Outcome> {
    let spec = Arc::new(RunSpec::new(opened)?);
    memory::refuse(&spec, exec, &[String::new()], 0)?;
    let mut opening = Opening::new(&spec, opened, exec, table)?;
    let layout = Layout::new(&spec, exec.device);
    let found = opening.newest(|reader| reader.state(&layout, exec.workers))?;
    let found = opening.told(found)?;
    let mut state = found.map_or_else(|| step::initial(&spec, exec.device), Ok)?;
    let mut run = opening.begin(state.step)?;
    let pieces = ownership::pieces(&spec.parameters, &spec.rules, 1);
    let mut ring = Ring::new(exec.ring);
    let steps = state.step + 1..last_step(&spec, exec) + 1;
    let (plan, data) = (spec.plan.clone(), spec.data.clone());
    let stage = staging(&spec, exec)?;
    let mut batches = Prefetcher::start(plan, data, steps, RankSlice::WHOLE, exec.prefetch, stage)?;
    while let Some(batch) = run.metrics.wait(|| batches.next()) {
        let (batch, leaves) = batch?;
        let computed = step::advance(&spec, &mut state, &batch, &leaves, exec.workers);
        let record = computed.map_err(|fault| {
            run.failed(fault, state.step, |run, chain, digest| {
                run.checkpoints.save(&layout, &Snapshot::whole(&state, &pieces), digest, chain)
            })
        })?;
        run.record(&record, batch.rows * u64::from(batch.seq_len))?;
        let copy = || Snapshot::whole(&state, &pieces);
        if let Some(before) = ring.step(record.step, record.loss, copy) {
            run.rescue(record.step, before.step(), |run, chain, digest| {
                run.checkpoints.save(&layout, &before, digest, chain)
            })?;
        }
        if validation_is_due(&spec, exec, state.step) {
            run.validate(state.step, &state.weights, &state.balance)?;
        }
        let stopped = exec.stopped();
        if stopped || checkpoint_is_due(&spec, exec, state.step) {
            let start = Instant::now();
            run.checkpoint(&record, start, |run, chain| {
                let (checkpoints, layout) = (run.checkpoints.clone(), layout.clone());
                let snapshot = Snapshot::whole(&state, &pieces);
                Box::new(move || checkpoints.save(&layout, &snapshot, record.state, chain))
            })?;
        }
        if stopped {
            break;
        }
    }
    run.finish(state.step)
}

/// The step after which this process stops by itself.
pub(crate) fn last_step(spec: &RunSpec, exec: &ExecOptions) -> u64 {
    let last = spec.plan.steps();
    exec.stop_after.map_or(last, |stop| last.min(stop))
}

/// Whether the state after `step` is to be kept.
pub(crate) fn checkpoint_is_due(spec: &RunSpec, exec: &ExecOptions, step: u64) -> bool {
    step == last_step(spec, exec) || step.is_multiple_of(exec.checkpoint_every.max(1))
}

/// Whether the loss on held-out text is taken after `step`.
pub(crate) fn validation_is_due(spec: &RunSpec, exec: &ExecOptions, step: u64) -> bool {
    exec.validation.is_due(step, last_step(spec, exec))
}

/// The prefetcher's last stage: puts the leaves of each batch on the device while the step before is computed.
pub(crate) fn staging(
    spec: &Arc<RunSpec>,
    exec: &ExecOptions,
) -> Result<impl FnMut(Batch) -> Result<(Batch, Leaves)> + Send + 'static> {
    let stager = Stager::new(exec.device);
    let stager = stager.map_err(|error| Fault::machine(error.to_string()))?;
    let spec = Arc::clone(spec);
    Ok(move |batch: Batch| Leaves::stage(&spec, &batch, &stager).map(|leaves| (batch, leaves)))
}

/// A run's folder that was taken, before it is known where the run goes on.
pub(crate) struct Opening<'a> {
    spec: &'a RunSpec,
    exec: &'a ExecOptions,
    table: &'a KernelTable,
    open: OpenRun,
    checkpoints: Checkpoints,
    events: Events,
    progress: Progress,
    /// Checkpoints of steps that the ledger does not have.
    beyond: Passed,
}

/// Everything that a run in progress holds beside its state: what writes to its folder.
pub(crate) struct Run<'a> {
    spec: &'a RunSpec,
    exec: &'a ExecOptions,
    open: OpenRun,
    pub(crate) checkpoints: Checkpoints,
    events: Events,
    pub(crate) metrics: Metrics,
    progress: Progress,
    /// The state digest after the last step.
    digest: Option<Digest>,
    /// The last step that has a checkpoint, or will have when the saver is done.
    saved: u64,
    saver: Saver,
}

/// Checkpoints that cannot be used: steps, and why.
type Passed = Vec<(u64, Fault)>;

impl<'a> Opening<'a> {
    /// Takes the folder.
    pub(crate) fn new(
        spec: &'a RunSpec,
        opened: &Opened,
        exec: &'a ExecOptions,
        table: &'a KernelTable,
    ) -> Result<Self> {
        let folder = RunFolder::new(&exec.out);
        let open = folder.open(spec, &opened.file, table)?;
        let events = Events::open(&folder.events())?;
        let recorded = open.ledger.last_step();
        let checkpoints = folder.take_checkpoints(exec.checkpoints.as_ref(), recorded)?;
        let progress = Progress::new(spec.plan.steps(), exec.progress);
        checkpoints.clean()?;
        let beyond = checkpoints.steps()?.into_iter().filter(|step| *step > recorded).map(|step| {
            let what = format!("the ledger beside it ends with step {recorded}");
            (step, Fault::data(what).at(checkpoints.location(step).to_string()))
        });
        let beyond = beyond.collect();
        Ok(Opening { spec, exec, table, open, checkpoints, events, progress, beyond })
    }

    /// The newest checkpoint that `read` can read.
    pub(crate) fn newest<T>(&self, read: impl FnMut(&Reader<'_>) -> Result<T>) -> Result<Found<T>> {
        let ledger = &self.open.ledger;
        self.checkpoints.newest(ledger.last_step(), |step| ledger.chain_at(step), read)
    }

    /// The same, read by all ranks together.
    pub(crate) fn newest_of_all(&self, reading: &Reading<'_>) -> Result<Found<Shard>> {
        let ledger = &self.open.ledger;
        reading.lead(&self.checkpoints, ledger.last_step(), |step| ledger.chain_at(step))
    }

    /// Says what was passed over, and takes it out of the way: the retention must not take it for the newest. Where nothing
    /// else is left, everything stays as it is, and the run stops unless it was told to begin again.
    pub(crate) fn told<T>(&mut self, found: Found<T>) -> Result<Option<T>> {
        let mut passed = std::mem::take(&mut self.beyond);
        passed.extend(found.passed);
        let newest = passed.iter().max_by_key(|(step, _)| *step);
        if let (None, Some((newest, fault)), false) = (&found.state, newest, self.exec.restart) {
            let all: Vec<String> = passed.iter().map(|(step, _)| format!("step-{step}")).collect();
            return Err(Fault::data(format!("none of this run's checkpoints can be used: {}", all.join(", ")))
                .at(self.checkpoints.place().to_string())
                .found(format!("step-{newest}: {}", fault.to_string().replace('\n', "\n  ")))
                .hint(
                    "restore ledger.jsonl and the checkpoints from a copy; or give --restart: every step is computed again \
                     from the first, and held against the ledger",
                ));
        }
        for (step, fault) in &passed {
            self.pass_over(*step, fault)?;
        }
        Ok(found.state)
    }

    fn pass_over(&mut self, step: u64, fault: &Fault) -> Result<()> {
        self.progress.note(&format!("warning: checkpoint step-{step} is passed over: {fault}"));
        let fields = json!({"step": step, "fault": fault.to_string()});
        self.events.write("damaged checkpoint", fields)?;
        self.checkpoints.set_aside(step)
    }

    /// Begins, or goes on after step `from`.
    pub(crate) fn begin(self, from: u64) -> Result<Run<'a>> {
        let Opening { spec, exec, table, open, checkpoints, mut events, progress, beyond: _ } =
            self;
        let metrics = Metrics::open(&open.folder.metrics(), from)?;
        let digest = last_digest(&open.ledger, from)?;
        let word = if from == 0 { "begins:" } else { "goes on:" };
        let id = open.ledger.id();
        progress.note(&format!("{word} {}", describe(spec, exec, table, (id, from))));
        let recorded = open.ledger.last_step();
        if from < recorded {
            let (steps, they) = match from + 1 {
                first if first == recorded => (format!("step {first} is"), "it is"),
                first => (format!("steps {first} to {recorded} are"), "they are"),
            };
            let note = format!("{steps} in the ledger: {they} computed again, to the same bits");
            progress.note(&note);
        }
        for edit in &open.edits {
            progress.note(&format!("accepted edit of the curriculum: {edit}"));
            events.write("edit", json!({"edit": edit, "recorded": open.ledger.last_step()}))?;
        }
        let fields = json!({
            "from_step": from, "recorded": open.ledger.last_step(), "run": id,
            "device": format!("{:?}", exec.device), "workers": exec.workers.count(), "pid": std::process::id(),
            "kernels": table.fingerprint(),
        });
        events.write("start", fields)?;
        let (saver, saved) = (Saver::new(), from);
        Ok(Run { spec, exec, open, checkpoints, events, metrics, progress, digest, saved, saver })
    }
}

impl Run<'_> {
    /// Writes down where this run's parts are.
    pub(crate) fn event(&mut self, event: &str, fields: serde_json::Value) -> Result<()> {
        self.events.write(event, fields)
    }

    /// Tells whoever watches.
    pub(crate) fn note(&mut self, text: &str) {
        self.progress.note(text);
    }

    /// Writes the step down, or checks it against what was written before.
    pub(crate) fn record(&mut self, record: &StepRecord, tokens: u64) -> Result<()> {
        let again = record.step <= self.open.ledger.last_step();
        if again {
            compare(&self.open.ledger, record, &self.open.folder)?;
        } else {
            let changed = self.open.changes_from.take_if(|first| *first <= record.step);
            let curriculum = changed.map(|_| self.spec.canonical());
            self.open.ledger.append(record, curriculum)?;
        }
        self.digest = Some(record.state);
        let written = self.saver.done()?;
        self.tell(written)?;
        let taken = self.progress.step(record, tokens, again);
        self.metrics.step(self.spec, record, tokens, taken)?;
        let seconds = taken.as_secs_f64();
        let rate = tokens as f64 / seconds.max(1e-9);
        let fields = json!({
            "step": record.step, "loss": record.loss, "seconds": (seconds * 1e4).round() / 1e4,
            "tokens_per_second": rate.round(), "again": again,
            "stall": (self.metrics.waited().as_secs_f64() * 1e4).round() / 1e4,
        });
        self.events.write("step", fields)
    }

    /// Takes the loss on held-out text with the weights and balances after `step`.
    pub(crate) fn validate(
        &mut self,
        step: u64,
        weights: &[Tensor],
        balance: &[Balance],
    ) -> Result<()> {
        let (validation, workers) = (self.exec.validation, self.exec.workers);
        let sources = validation.take(self.spec, step, weights, balance, workers)?;
        if sources.is_empty() {
            return Ok(());
        }
        self.progress.validation(step, &sources);
        self.metrics.validation(step, &sources)?;
        let all = SourceLoss::over(&sources);
        let by_source: serde_json::Map<_, _> =
            sources.iter().map(|one| (one.source.clone(), one.to_json())).collect();
        self.events
            .write("validation", json!({"step": step, "all": all.to_json(), "sources": by_source}))
    }

    /// Keeps the state after `record` beside the steps that follow, by what `work` makes of the ledger's chain; `start`
    /// is when the run began to stand still for it.
    pub(crate) fn checkpoint(
        &mut self,
        record: &StepRecord,
        start: Instant,
        work: impl FnOnce(&Self, Digest) -> Box<dyn FnOnce() -> Result<()> + Send>,
    ) -> Result<()> {
        if self.saved >= record.step {
            return Ok(());
        }
        let written = self.saver.wait()?;
        self.tell(written)?;
        let chain = self.chain(record.step)?;
        let work = work(self, chain);
        let (checkpoints, retention) = (self.checkpoints.clone(), self.exec.retention);
        let what = (record.step, record.state, start.elapsed());
        self.saver.start(what, move || work().and_then(|()| checkpoints.retain(retention)))?;
        self.saved = record.step;
        Ok(())
    }

    /// Writes down a checkpoint that is on the disk.
    fn tell(&mut self, written: Option<Written>) -> Result<()> {
        let Some(Written { step, state, stall, writing }) = written else { return Ok(()) };
        let seconds = |time: Duration| (time.as_secs_f64() * 1e4).round() / 1e4;
        let fields = json!({
            "step": step, "state": state, "stall_seconds": seconds(stall), "writing_seconds": seconds(writing),
        });
        self.events.write("checkpoint", fields)
    }

    /// The ledger reaches the disk first: a checkpoint never knows of steps that a power cut can take from the ledger.
    fn chain(&self, step: u64) -> Result<Digest> {
        self.open.ledger.sync()?;
        let chain = self.open.ledger.chain_at(step);
        chain.ok_or_else(|| Fault::bug(format!("step {step} is not in the ledger")))
    }

    /// A step after `last` failed before anything moved: keeps what there is by `save`, which gets the ledger's chain and
    /// the state's digest, and says how to look at the step.
    pub(crate) fn failed(
        &mut self,
        fault: Fault,
        last: u64,
        save: impl FnOnce(&Self, Digest, Digest) -> Result<()>,
    ) -> Fault {
        let (step, root) = (last + 1, self.open.folder.root().display().to_string());
        // The fault at hand matters more than a second one while writing about it.
        let _ = self.events.write("fault", json!({"step": step, "fault": fault.to_string()}));
        if fault.class() != contract::Class::Diverged {
            return fault;
        }
        let kept = match self.digest {
            Some(digest) if self.saved < last => self.keep(last, digest, save),
            _ => self.saver.wait().and_then(|written| self.tell(written)),
        };
        let look = format!(
            "see the documents of the step with `ztrain replay --run {root} --step {step}`"
        );
        match kept {
            Ok(()) => fault.hint(format!("the state after step {last} is kept; {look}")),
            Err(second) => {
                let fields = json!({"step": last, "fault": second.to_string()});
                let _ = self.events.write("not kept", fields);
                let why = second.to_string().replace('\n', "\n  ");
                fault
                    .hint(format!("the state after step {last} could not be kept: {why}\n  {look}"))
            }
        }
    }

    /// Keeps the state after `step` at once.
    fn keep(
        &mut self,
        step: u64,
        digest: Digest,
        save: impl FnOnce(&Self, Digest, Digest) -> Result<()>,
    ) -> Result<()> {
        let written = self.saver.wait()?;
        self.tell(written)?;
        let chain = self.chain(step)?;
        save(self, chain, digest)?;
        self.checkpoints.retain(self.exec.retention)?;
        self.saved = self.saved.max(step);
        self.events.write("checkpoint", json!({"step": step, "state": digest}))
    }

    /// The loss of `step` has jumped: keeps the state after `before`, out of memory, for whoever replays the step.
    pub(crate) fn rescue(
        &mut self,
        step: u64,
        before: u64,
        save: impl FnOnce(&Self, Digest, Digest) -> Result<()>,
    ) -> Result<()> {
        let digest = self.open.ledger.record(before)?.state;
        self.keep(before, digest, |run, chain, digest| {
            save(run, chain, digest)?;
            run.checkpoints.pin(before)
        })?;
        self.events.write("spike", json!({"step": step, "kept": before}))?;
        let root = self.open.folder.root().display();
        self.progress.note(&format!(
            "the loss of step {step} jumped: the state after step {before} is kept for `ztrain replay --run {root} --step {step}`"
        ));
        Ok(())
    }

    /// Says how the run ended.
    pub(crate) fn finish(mut self, step: u64) -> Result<Outcome> {
        let steps = self.spec.plan.steps();
        let written = self.saver.wait()?;
        self.tell(written)?;
        self.events.write("stop", json!({"step": step, "signal": self.exec.stopped()}))?;
        Ok(Outcome { step, steps, state: self.digest })
    }
}

/// Checks a recomputed step against the ledger.
pub(crate) fn compare(ledger: &Ledger, record: &StepRecord, folder: &RunFolder) -> Result<()> {
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
            folder.root().display(),
            record.step
        ))),
    }
}

fn last_digest(ledger: &Ledger, step: u64) -> Result<Option<Digest>> {
    if step == 0 { Ok(None) } else { ledger.record(step).map(|record| Some(record.state)) }
}

fn describe(
    spec: &RunSpec,
    exec: &ExecOptions,
    table: &KernelTable,
    (id, from): (Digest, u64),
) -> String {
    let parameters = step::parameter_count(spec.config());
    format!(
        "run {} | after step {from} of {} | {:.1}M parameters | {} workers on {:?} | levels {}",
        id.short(),
        spec.plan.steps(),
        parameters as f64 / 1e6,
        exec.workers.count(),
        exec.device,
        levels(table).join(", "),
    )
}
