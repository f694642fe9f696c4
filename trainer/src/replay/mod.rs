//! Replay: a past step computed again, compared with the ledger quantity by quantity, and explained by its documents.
//!
//! Invariant: nothing in the run's folder is written, not even locked: a run may be replayed while it goes on.

pub mod attribute;
pub mod documents;
mod executor;
pub mod whatif;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use contract::{Class, Fault, Result};
use kernels::runtime::KernelTable;
use loader::{Batch, Opened, RankSlice};
use mixer::Curriculum;
use serde::Serialize;
use store::Location;
use tch::{Device, Tensor};

use crate::checkpoint::Layout;
use crate::events;
use crate::folder::{
    RunFolder, compare_content, compare_curriculum, head, no_run, table_difference,
};
use crate::ledger::{Difference, Ledger, Stage, StepRecord};
use crate::progress::clock;
use crate::spec::RunSpec;
use crate::state::State;
use crate::state::ownership::Ownership;
use crate::step::{self, Context, Detail, Gradient};
use crate::waiting::{self, Waiting};
use crate::workers::Workers;
use documents::DocumentLoss;
pub use executor::{Executor, ThisMachine};

/// What a replay says about a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every quantity as in the ledger: if the loss is odd, look at the data.
    SameBits,
    /// Different, and the same again when repeated, where kernel tables or data differ: they made the difference.
    Repeatable,
    /// Different, and the same again when repeated, although everything is as it was: what the run computed was wrong.
    RunHit,
    /// Different each time: the machine.
    NotRepeatable,
    /// The ledger does not have this step: there is nothing to compare with.
    NotRecorded,
}

/// One replayed step, or micro-batch of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Replayed {
    /// The step.
    pub step: u64,
    /// The micro-batch, if only one was computed.
    pub micro_batch: Option<u64>,
    /// What came out.
    pub verdict: Verdict,
    /// The first quantity that differs: the ledger on the left.
    pub difference: Option<Difference>,
    /// What to look at next.
    pub advice: String,
    /// Why the step could not be completed, where it diverged again.
    pub diverged: Option<String>,
    /// The mean loss of a label.
    pub loss: f64,
    /// The record, if the step could be completed.
    pub record: Option<StepRecord>,
    /// Its documents, worst first.
    pub documents: Vec<DocumentLoss>,
}

/// A replayed step, and what it was computed from.
pub(crate) struct Kept {
    /// What the replay says, with all documents.
    pub(crate) replayed: Replayed,
    /// The step's text.
    pub(crate) batch: Batch,
    /// The summed gradient, before clipping: its pieces in canonical order.
    pub(crate) gradient: Vec<Tensor>,
    /// The loss of each token of the batch.
    pub(crate) token_losses: Vec<f32>,
}

/// A run opened to be replayed.
pub struct Replayer {
    spec: RunSpec,
    folder: RunFolder,
    ledger: Ledger,
    device: Device,
    workers: Workers,
    executor: Box<dyn Executor>,
    /// What differs between the ledger's kernel table and this machine's.
    pub kernels: Option<String>,
    /// Checkpoints that were passed over, and why.
    pub warnings: Vec<String>,
}

impl Replayer {
    /// Opens the run in `root` without touching it.
    pub fn open(
        root: &Path,
        table: &KernelTable,
        device: Device,
        workers: Workers,
    ) -> Result<Self> {
        Replayer::open_with(root, &[], table, device, workers)
    }

    /// The same, with `stores` for the places of the curriculum's stores if there are any.
    pub fn open_with(
        root: &Path,
        stores: &[Location],
        table: &KernelTable,
        device: Device,
        workers: Workers,
    ) -> Result<Self> {
        let folder = RunFolder::new(root);
        let curriculum = folder.curriculum();
        if !curriculum.exists() {
            return Err(no_run(root, "run.toml"));
        }
        let spec = RunSpec::new(&opened(&curriculum, stores)?)?;
        let ledger = Ledger::read(&folder.ledger())?;
        let now = head(&spec, table)?;
        compare_content(ledger.head(), &now, &folder.ledger())?;
        compare_curriculum(&ledger, &spec, &folder.ledger())?;
        let kernels = table_difference(&ledger.head().kernel_table, &now.kernel_table);
        let kernels = kernels.map(|(key, before, after)| {
            format!("the kernel table differs: {key} was {before}, here it is {after}")
        });
        let (executor, warnings) = (Box::new(ThisMachine), Vec::new());
        Ok(Replayer { spec, folder, ledger, device, workers, executor, kernels, warnings })
    }

    /// The same run, its leaves computed by somebody else.
    pub fn computed_by(self, executor: Box<dyn Executor>) -> Self {
        Replayer { executor, ..self }
    }

    /// What is trained.
    pub fn spec(&self) -> &RunSpec {
        &self.spec
    }

    /// What was recorded.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Where it was.
    pub(crate) fn folder(&self) -> &RunFolder {
        &self.folder
    }

    /// Who computes here.
    pub(crate) fn workers(&self) -> Workers {
        self.workers
    }

    /// Steps in the ledger.
    pub fn recorded(&self) -> u64 {
        self.ledger.last_step()
    }

    /// The state after `step`: from the nearest checkpoint, then by computing, each step checked against the ledger.
    pub fn state_after(&mut self, step: u64) -> Result<State> {
        let (last, recorded) = (self.spec.plan.steps(), self.recorded());
        if step >= last || step > recorded {
            return Err(Fault::usage(format!("step {} cannot be replayed", step + 1))
                .at(self.folder.ledger().display().to_string())
                .found(format!("a curriculum of {last} steps, {recorded} of them recorded"))
                .wanted(format!("a step from 1 to {}", last.min(recorded + 1))));
        }
        self.state_at(step)
    }

    /// The same for any recorded step, the last one included: nothing follows it here.
    pub fn state_at(&mut self, step: u64) -> Result<State> {
        let recorded = self.recorded();
        if step > recorded {
            return Err(Fault::usage(format!("there is no state after step {step}"))
                .at(self.folder.ledger().display().to_string())
                .wanted(format!("a step from 0 to {recorded}")));
        }
        let layout = Layout::new(&self.spec, self.device);
        let checkpoints = self.folder.checkpoints()?;
        let chain = |step| self.ledger.chain_at(step);
        let found = checkpoints.newest(step, chain, |reader| {
            let (at, found) = (reader.manifest().step, reader.manifest().state);
            let written = self.ledger.record(at)?.state;
            if found != written {
                let what = "the weights at the start are not those that the ledger says";
                return Err(Fault::data(what)
                    .at(reader.location().to_string())
                    .found(found)
                    .wanted(written));
            }
            reader.whole(&layout, self.workers)
        })?;
        let passed =
            found.passed.iter().map(|(step, fault)| format!("checkpoint step-{step}: {fault}"));
        self.warnings.extend(passed);
        let owners = Ownership::new(&self.spec, 0, 1);
        let begin = || State::begin(&self.spec, self.device, owners, self.workers);
        let mut state = found.state.map_or_else(begin, Ok)?;
        self.say_way(state.step, step);
        let what = format!("computing the state after step {step}");
        let mut waiting = Waiting::new(what, step - state.step);
        while state.step < step {
            let next = self.step(&mut state, Detail::Sums)?;
            if next.verdict != Verdict::SameBits {
                return Err(self.on_the_way(&next));
            }
            waiting.one();
        }
        Ok(state)
    }

    /// Says from where the state after `step` is computed, if by the pace of the run that takes a while.
    fn say_way(&self, from: u64, step: u64) {
        let pace = events::pace(&self.folder.events()).unwrap_or(0.0);
        let time = Duration::from_secs_f64((pace * (step - from) as f64).clamp(0.0, 1e9));
        if time < waiting::SILENCE {
            return;
        }
        let begins = match from {
            0 => "the beginning".to_owned(),
            from => format!("checkpoint step-{from}"),
        };
        contract::note!(
            "steps {} to {step} are computed again from {begins}: about {} at the pace of the run",
            from + 1,
            clock(time)
        );
    }

    fn on_the_way(&self, next: &Replayed) -> Fault {
        let quantity = next.difference.as_ref().map_or("outcome", |found| &found.quantity);
        let fault = Fault::mismatch(format!(
            "step {} on the way came out with {}: its {quantity} differs from the ledger",
            next.step,
            next.verdict.words()
        ))
        .hint(&next.advice);
        let fault = fault.at(self.folder.ledger().display().to_string());
        match &next.difference {
            Some(found) => fault.found(&found.right).wanted(&found.left),
            _ => fault,
        }
    }

    /// Computes the step after `state` as the run did, compares it, and moves the state.
    pub fn step(&self, state: &mut State, detail: Detail) -> Result<Replayed> {
        let batch = self.batch(state.step + 1)?;
        self.replayed(state, &batch, detail, |_| ())
    }

    /// The same, with all that it was computed from.
    pub(crate) fn step_and_keep(&self, state: &mut State) -> Result<Kept> {
        let (batch, mut kept) = (self.batch(state.step + 1)?, None);
        let replayed = self.replayed(state, &batch, Detail::Tokens, |gradient| {
            let own = gradient.own.iter().map(Tensor::shallow_clone).collect();
            let losses = gradient.leaves.iter().flat_map(|leaf| leaf.token_losses.iter().copied());
            kept = Some((own, losses.collect()));
        })?;
        let (gradient, token_losses) =
            kept.ok_or_else(|| Fault::bug("a step was computed without a gradient"))?;
        Ok(Kept { replayed, batch, gradient, token_losses })
    }

    /// Computes the step after `state`; `look` sees its gradient before anything moves.
    fn replayed(
        &self,
        state: &mut State,
        batch: &Batch,
        detail: Detail,
        look: impl FnOnce(&Gradient),
    ) -> Result<Replayed> {
        let (step, before) = (batch.step, state.copy());
        let (gradient, outcome) = self.compute_and_look(&self.spec, state, batch, detail, look)?;
        let (record, diverged) = match outcome {
            Ok(record) => (Some(record), None),
            Err(fault) => (None, Some(fault.to_string())),
        };
        let difference = self.difference(step, record.as_ref())?;
        let verdict = match (&difference, step > self.recorded()) {
            (_, true) => Verdict::NotRecorded,
            (None, false) => Verdict::SameBits,
            (Some(found), false) => self.again(before, batch, record.as_ref(), found)?,
        };
        let documents = match detail {
            Detail::Sums => Vec::new(),
            Detail::Tokens => self.documents(batch, 0..batch.rows, &gradient.leaves)?,
        };
        let found = self.found(step, verdict, difference);
        Ok(Replayed { diverged, loss: gradient.mean(), record, documents, ..found })
    }

    /// Computes one leaf of the step after `state`, and compares that.
    pub fn leaf(&self, state: &State, leaf: u64) -> Result<Replayed> {
        let step = state.step + 1;
        let batch = self.batch(step)?;
        let leaves = batch.rows / batch.micro_batch;
        if leaf >= leaves {
            return Err(no_leaf(step, leaf, leaves));
        }
        let sums = self.executor.leaf(&self.spec, state, &batch, leaf, self.workers)?;
        let difference = if step > self.recorded() {
            None
        } else {
            leaf_difference(&self.ledger.record(step)?, leaf, &sums)
        };
        let verdict = match (&difference, step > self.recorded()) {
            (_, true) => Verdict::NotRecorded,
            (None, false) => Verdict::SameBits,
            (Some(found), false) => {
                let again = self.executor.leaf(&self.spec, state, &batch, leaf, self.workers)?;
                let same =
                    again.gradient == sums.gradient && again.loss.to_bits() == sums.loss.to_bits();
                self.verdict(same, found)
            }
        };
        let rows = leaf * batch.micro_batch..(leaf + 1) * batch.micro_batch;
        let loss = sums.loss / sums.labels.max(1) as f64;
        let documents = self.documents(&batch, rows, &[sums])?;
        let found = self.found(step, verdict, difference);
        Ok(Replayed { micro_batch: Some(leaf), loss, documents, ..found })
    }

    /// What is said of a step that came out so, before its losses and documents.
    fn found(&self, step: u64, verdict: Verdict, difference: Option<Difference>) -> Replayed {
        Replayed {
            step,
            micro_batch: None,
            verdict,
            advice: self.advice(verdict, difference.as_ref()),
            difference,
            diverged: None,
            loss: 0.0,
            record: None,
            documents: Vec::new(),
        }
    }

    /// Refuses a leaf that a step does not have: before the state is made that it would be computed from.
    pub fn check_leaf(&self, step: u64, leaf: u64) -> Result<()> {
        let step = self.spec.plan.step(step)?;
        let leaves = step.batch / step.micro_batch;
        if leaf < leaves { Ok(()) } else { Err(no_leaf(step.step, leaf, leaves)) }
    }

    /// What a difference means that is `same` when the step is computed once more.
    fn verdict(&self, same: bool, difference: &Difference) -> Verdict {
        match (same, &self.kernels, difference.stage) {
            (false, _, _) => Verdict::NotRepeatable,
            (true, None, stage) if stage != Stage::Data => Verdict::RunHit,
            (true, _, _) => Verdict::Repeatable,
        }
    }

    /// What to look at next, by what differs first.
    fn advice(&self, verdict: Verdict, difference: Option<&Difference>) -> String {
        let Some(Difference { quantity, stage, .. }) = difference else {
            return verdict.advice().to_owned();
        };
        match (verdict, stage, &self.kernels) {
            (Verdict::Repeatable, Stage::Data, _) => {
                "the step read other text than the run: look at the stores, with `zdata verify-run`"
                    .to_owned()
            }
            (Verdict::Repeatable, _, Some(kernels)) => {
                format!("software or kernels changed since the run: {kernels}")
            }
            (Verdict::RunHit, stage, _) => format!(
                "{}: {} was hit, from its {quantity} on; look at the machine that computed it then (events.jsonl)",
                verdict.advice(),
                stage.words()
            ),
            _ => verdict.advice().to_owned(),
        }
    }

    /// The text of a step.
    pub(crate) fn batch(&self, step: u64) -> Result<Batch> {
        loader::batch(&self.spec.plan, &self.spec.data, step, RankSlice::WHOLE)
    }

    /// The gradient of a step as `spec` says, and the record unless the step diverges.
    pub(crate) fn compute(
        &self,
        spec: &RunSpec,
        state: &mut State,
        batch: &Batch,
        detail: Detail,
    ) -> Result<(Gradient, Result<StepRecord>)> {
        self.compute_and_look(spec, state, batch, detail, |_| ())
    }

    /// The same; `look` sees the gradient before anything moves.
    fn compute_and_look(
        &self,
        spec: &RunSpec,
        state: &mut State,
        batch: &Batch,
        detail: Detail,
        look: impl FnOnce(&Gradient),
    ) -> Result<(Gradient, Result<StepRecord>)> {
        let workers = self.workers;
        let mut gradient = self.executor.gradient(spec, state, batch, workers, detail)?;
        look(&gradient);
        let complete = |cx: Context<'_>| step::complete(cx, state, &mut gradient, || false);
        match step::alone(spec, workers, complete) {
            Err(fault) if fault.class() != Class::Diverged => Err(fault),
            outcome => Ok((gradient, outcome.map(|stepped| stepped.record))),
        }
    }

    /// Computes a step that came out differently once more.
    fn again(
        &self,
        mut before: State,
        batch: &Batch,
        first: Option<&StepRecord>,
        difference: &Difference,
    ) -> Result<Verdict> {
        let (_, outcome) = self.compute(&self.spec, &mut before, batch, Detail::Sums)?;
        let parameters = &self.ledger.head().parameters;
        let same = match (first, outcome) {
            (Some(first), Ok(second)) => first.difference(&second, parameters).is_none(),
            (None, Err(_)) => true,
            _ => false,
        };
        Ok(self.verdict(same, difference))
    }

    fn difference(&self, step: u64, record: Option<&StepRecord>) -> Result<Option<Difference>> {
        if step > self.recorded() {
            return Ok(None);
        }
        let written = self.ledger.record(step)?;
        Ok(match record {
            Some(record) => written.difference(record, &self.ledger.head().parameters),
            None => Some(Difference {
                quantity: "outcome".to_owned(),
                stage: Stage::Forward,
                left: format!("a loss of {}", written.loss),
                right: "it diverged".to_owned(),
            }),
        })
    }

    fn documents(
        &self,
        batch: &Batch,
        rows: Range<u64>,
        leaves: &[step::LeafSums],
    ) -> Result<Vec<DocumentLoss>> {
        let losses: Vec<f32> =
            leaves.iter().flat_map(|leaf| leaf.token_losses.iter().copied()).collect();
        documents::rank(&self.spec, batch, rows, &losses)
    }

    /// Where the run lies.
    pub fn root(&self) -> PathBuf {
        self.folder.root().to_owned()
    }
}

/// Where a leaf parts from the ledger.
fn leaf_difference(written: &StepRecord, leaf: u64, sums: &step::LeafSums) -> Option<Difference> {
    let index = leaf as usize;
    let differs = |stage: Stage, quantity: &str, left: Option<u64>, right: u64| {
        let left = left.map_or_else(|| "none".to_owned(), |left| format!("{left:016x}"));
        let right = format!("{right:016x}");
        (left != right).then(|| Difference {
            quantity: format!("{quantity} of micro-batch {leaf}"),
            stage,
            left,
            right,
        })
    };
    let (loss, gradient) = (written.leaf_losses.0.get(index), written.leaf_gradients.0.get(index));
    differs(Stage::Data, "labels", written.leaf_labels.get(index).copied(), sums.labels)
        .or_else(|| differs(Stage::Forward, "loss", loss.copied(), sums.loss.to_bits()))
        .or_else(|| differs(Stage::Backward, "gradient", gradient.copied(), sums.gradient))
}

fn no_leaf(step: u64, leaf: u64, leaves: u64) -> Fault {
    Fault::usage(format!("step {step} has no micro-batch {leaf}"))
        .at("--micro-batch")
        .wanted(format!("0 to {}", leaves - 1))
}

/// The curriculum of a run, with `stores` for the places of its stores, in its order, those of amendments last.
pub(crate) fn opened(path: &Path, stores: &[Location]) -> Result<Opened> {
    if stores.is_empty() {
        return Opened::open(path);
    }
    let text = std::fs::read_to_string(path).map_err(|error| Fault::io("read", path, &error))?;
    let mut curriculum = Curriculum::parse(&text, &path.display().to_string())?;
    let added = curriculum.amendments.iter_mut().filter_map(|one| one.store.as_mut());
    let named: Vec<&mut String> =
        curriculum.stores.iter_mut().chain(added.map(|store| &mut store.path)).collect();
    if named.len() != stores.len() {
        return Err(Fault::usage(
            "a store that moved is named for each store of the curriculum, or none is",
        )
        .at("--store")
        .found(stores.len())
        .wanted(format!(
            "{}: {}",
            named.len(),
            named.iter().map(|store| store.as_str()).collect::<Vec<_>>().join(", ")
        )));
    }
    for (named, store) in named.into_iter().zip(stores) {
        *named = store.absolute()?.to_string();
    }
    Opened::open_text(path, curriculum.canonical())
}

impl Stage {
    /// For people.
    fn words(self) -> &'static str {
        match self {
            Stage::Data => "what the step read",
            Stage::Forward => "a weight at the start of the step, or its forward pass,",
            Stage::Backward => "the backward pass of a micro-batch",
            Stage::Sum => "the addition of gradients",
            Stage::Update => "the update of weights and moments",
        }
    }
}

impl Verdict {
    /// For people.
    pub fn words(self) -> &'static str {
        match self {
            Verdict::SameBits => "same bits",
            Verdict::Repeatable | Verdict::RunHit => "different bits, repeatably",
            Verdict::NotRepeatable => "different bits, not repeatably",
            Verdict::NotRecorded => "not in the ledger",
        }
    }

    /// What to look at next.
    pub fn advice(self) -> &'static str {
        match self {
            Verdict::SameBits => {
                "the machine computed this step correctly: an odd loss comes from the data or the weights"
            }
            Verdict::Repeatable => "software, kernels or data changed since the run",
            Verdict::RunHit => {
                "kernel tables and data are those of the run, so the run itself computed this step wrongly"
            }
            Verdict::NotRepeatable => "the hardware does not compute the same twice",
            Verdict::NotRecorded => {
                "the run has not got past this step: there is nothing to compare with"
            }
        }
    }
}
