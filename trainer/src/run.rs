//! The run: open or resume, then step after step until the end, a signal or a fault.

use std::sync::Arc;

use contract::{Digest, Fault, Result};
use kernels::device::Stager;
use kernels::runtime::KernelTable;
use loader::{Batch, Opened, Prefetcher, RankSlice};
use serde_json::json;

use crate::checkpoint::{Checkpoints, Layout};
use crate::events::Events;
use crate::exec::ExecOptions;
use crate::folder::{OpenRun, RunFolder};
use crate::ledger::{Ledger, StepRecord};
use crate::report::Progress;
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{self, Leaves};

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
    let mut run = Run::open(&spec, opened, exec, table)?;
    let steps = run.state.step + 1..run.last_step() + 1;
    let (plan, data) = (spec.plan.clone(), spec.data.clone());
    let stage = staging(&spec, exec)?;
    let batches = Prefetcher::start(plan, data, steps, RankSlice::WHOLE, exec.prefetch, stage)?;
    for batch in batches {
        let (batch, leaves) = batch?;
        let computed = step::advance(&spec, &mut run.state, &batch, &leaves, exec.lanes);
        let record = computed.map_err(|fault| run.failed(fault))?;
        run.record(&record, batch.rows * u64::from(batch.seq_len))?;
        if exec.stopped() || run.checkpoint_is_due() {
            run.checkpoint(&record)?;
        }
        if exec.stopped() {
            break;
        }
    }
    run.finish()
}

/// The prefetcher's last stage: puts the leaves of each batch on the device while the step before is computed.
fn staging(
    spec: &Arc<RunSpec>,
    exec: &ExecOptions,
) -> Result<impl FnMut(Batch) -> Result<(Batch, Leaves)> + Send + 'static> {
    let stager = Stager::new(exec.device);
    let stager = stager.map_err(|error| Fault::machine(error.to_string()))?;
    let spec = Arc::clone(spec);
    Ok(move |batch: Batch| Leaves::stage(&spec, &batch, &stager).map(|leaves| (batch, leaves)))
}

/// Everything that a run in progress holds.
struct Run<'a> {
    spec: &'a RunSpec,
    exec: &'a ExecOptions,
    open: OpenRun,
    checkpoints: Checkpoints,
    events: Events,
    progress: Progress,
    state: State,
    /// The state digest after the last step.
    digest: Option<Digest>,
    /// The last step that has a checkpoint.
    saved: u64,
}

impl<'a> Run<'a> {
    fn open(
        spec: &'a RunSpec,
        opened: &Opened,
        exec: &'a ExecOptions,
        table: &KernelTable,
    ) -> Result<Self> {
        let folder = RunFolder::new(&exec.out);
        let open = folder.open(spec, &opened.path, table)?;
        let mut events = Events::open(&folder.events())?;
        let (checkpoints, progress) =
            (folder.checkpoints(), Progress::new(spec.plan.steps(), exec.progress));
        checkpoints.clean()?;
        let state = resume(spec, exec, &open.ledger, &checkpoints, &progress, &mut events)?;
        let (saved, digest) = (state.step, last_digest(&open.ledger, state.step)?);
        progress.note(&format!(
            "{} {}",
            if saved == 0 { "begins:" } else { "goes on:" },
            describe(spec, exec, saved)
        ));
        for edit in &open.edits {
            progress.note(&format!("accepted edit of the curriculum: {edit}"));
            events.write("edit", json!({"edit": edit, "recorded": open.ledger.last_step()}))?;
        }
        let fields = json!({
            "from_step": saved, "recorded": open.ledger.last_step(), "run": Digest::of(spec),
            "device": format!("{:?}", exec.device), "lanes": exec.lanes.count(), "pid": std::process::id(),
            "kernels": table.fingerprint(),
        });
        events.write("start", fields)?;
        Ok(Run { spec, exec, open, checkpoints, events, progress, state, digest, saved })
    }

    /// The step after which this process stops by itself.
    fn last_step(&self) -> u64 {
        let last = self.spec.plan.steps();
        self.exec.stop_after.map_or(last, |stop| last.min(stop))
    }

    /// Writes the step down, or checks it against what was written before.
    fn record(&mut self, record: &StepRecord, tokens: u64) -> Result<()> {
        let again = record.step <= self.open.ledger.last_step();
        if again {
            compare(&self.open.ledger, record, &self.open.folder)?;
        } else {
            self.open.ledger.append(record)?;
        }
        self.digest = Some(record.state);
        let seconds = self.progress.step(record, tokens, again).as_secs_f64();
        let rate = tokens as f64 / seconds.max(1e-9);
        let fields = json!({
            "step": record.step, "loss": record.loss, "seconds": (seconds * 1e4).round() / 1e4,
            "tokens_per_second": rate.round(), "again": again,
        });
        self.events.write("step", fields)
    }

    fn checkpoint_is_due(&self) -> bool {
        let step = self.state.step;
        step == self.last_step() || step.is_multiple_of(self.exec.checkpoint_every.max(1))
    }

    fn checkpoint(&mut self, record: &StepRecord) -> Result<()> {
        if self.saved < self.state.step {
            self.save(record.state)?;
        }
        Ok(())
    }

    /// The ledger reaches the disk first: a checkpoint never knows of steps that a power cut can take from the ledger.
    fn save(&mut self, digest: Digest) -> Result<()> {
        let step = self.state.step;
        self.open.ledger.sync()?;
        let chain = self.open.ledger.chain_at(step);
        let chain = chain.ok_or_else(|| Fault::bug(format!("step {step} is not in the ledger")))?;
        self.checkpoints.save(&self.state, &self.spec.parameters, digest, chain)?;
        self.checkpoints.retain(self.exec.retention)?;
        self.saved = step;
        self.events.write("checkpoint", json!({"step": step, "state": digest}))
    }

    /// A step failed before anything moved: keeps what there is, and says how to look at the step.
    fn failed(&mut self, fault: Fault) -> Fault {
        let (step, root) = (self.state.step + 1, self.open.folder.root().display().to_string());
        // The fault at hand matters more than a second one while writing about it.
        let _ = self.events.write("fault", json!({"step": step, "fault": fault.to_string()}));
        if fault.class() != contract::Class::Diverged {
            return fault;
        }
        if let (Some(digest), true) = (self.digest, self.saved < self.state.step) {
            let _ = self.save(digest);
        }
        fault.hint(format!(
            "the state after step {} is kept; see the documents of the step with `ztrain replay --run {root} --step {step}`",
            step - 1
        ))
    }

    fn finish(mut self) -> Result<Outcome> {
        let (step, steps) = (self.state.step, self.spec.plan.steps());
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

/// The state of the newest usable checkpoint, or of the beginning.
fn resume(
    spec: &RunSpec,
    exec: &ExecOptions,
    ledger: &Ledger,
    checkpoints: &Checkpoints,
    progress: &Progress,
    events: &mut Events,
) -> Result<State> {
    let balance = spec.balance();
    let layout = Layout {
        parameters: &spec.parameters,
        rules: &spec.rules,
        balance: &balance,
        device: exec.device,
    };
    let found =
        checkpoints.newest(ledger.last_step(), layout, exec.lanes, |step| ledger.chain_at(step))?;
    for (step, fault) in &found.passed {
        progress.note(&format!("warning: checkpoint step-{step} is passed over: {fault}"));
        events.write("damaged checkpoint", json!({"step": step, "fault": fault.to_string()}))?;
        checkpoints.set_aside(*step)?;
    }
    Ok(found.state.unwrap_or_else(|| step::initial(spec, exec.device)))
}

fn last_digest(ledger: &Ledger, step: u64) -> Result<Option<Digest>> {
    if step == 0 { Ok(None) } else { ledger.record(step).map(|record| Some(record.state)) }
}

fn describe(spec: &RunSpec, exec: &ExecOptions, from: u64) -> String {
    let parameters = step::parameter_count(spec.config());
    format!(
        "run {} | after step {from} of {} | {:.1}M parameters | {} lanes on {:?} | levels D (data), L0 (training bits)",
        Digest::of(spec).short(),
        spec.plan.steps(),
        parameters as f64 / 1e6,
        exec.lanes.count(),
        exec.device,
    )
}
