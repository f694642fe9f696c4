//! Explains a step: one sentence, then the evidence for it.
//!
//! ```text
//! replay       recomputes the step and compares bits                               crate::replay::narrow
//! documents    excess loss, gradient and alignment of each; the worst first       documents, tokens
//! removal      the step without the worst of them, exactly                        removal
//! moved        how far loss, norm, updates and speed are from usual               moved, speed
//! layers       norms compared with the steps before, routers, temperatures        layers
//! changes      what the curriculum, the ranks and the machine changed             changes
//! verdict      what stands out of all this, causes before symptoms                verdict
//! ```
//!
//! Invariant: nothing in the run's folder is written. Every number is computed from the run: by replaying the step,
//! from its ledger, or by a counterfactual, which is labelled as such.

mod changes;
mod documents;
mod history;
mod layers;
mod moved;
mod removal;
mod speed;
mod text;
mod tokens;
mod verdict;

use contract::{Fault, Result, shell};
use kernels::tree;
use loader::Batch;
use serde::Serialize;
use tch::Tensor;

pub use changes::{RunChange, RunChangeKind};
pub use documents::{DocumentEvidence, DocumentGradient};
pub use layers::{
    ActivityEvidence, LayerEvidence, NormEvidence, RouterEvidence, TemperatureEvidence,
};
pub use moved::Deviations;
pub use removal::Removal;
pub use speed::SpeedEvidence;
pub use tokens::WorstToken;
pub use verdict::{Finding, Subject};

use documents::StepGradient;
use history::PreviousSteps;
use removal::RemovalReplay;

use crate::change::rate_at;
use crate::replay::documents::DocumentLoss;
use crate::replay::flags::{flag, moved};
use crate::replay::narrow::LocatedDifference;
use crate::replay::texts::TextDecoder;
use crate::replay::{ExplainedReplay, step_from};
use trainer::ledger::StepRecord;
use trainer::optim::norm;
use trainer::replay::{Replayer, Verdict, tokens as tokens_of};
use trainer::spec::RunSpec;
use trainer::state::State;
use trainer::step::{Detail, ReducedGradient};

/// The step to explain, and how much to compute.
#[derive(Clone, Copy, Debug)]
pub struct ExplainRequest {
    /// The step.
    pub step: u64,
    /// The number of steps before it to compare with.
    pub window: u64,
    /// Documents to remove, and to show the worst tokens of.
    pub top: usize,
    /// Worst tokens to show of each.
    pub tokens: usize,
}

/// The part of the loss and the gradient that the named documents do not explain.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Unexplained {
    /// The step's loss minus what as many labels of each source cost before, in nats over the whole step.
    pub excess: f64,
    /// The same without the top documents.
    pub excess_left: f64,
    /// The step's gradient minus the sum of its documents', projected on the former and relative to it: rounding error,
    /// if every label belongs to a document.
    pub gradient: f64,
    /// The same minus the sum of the top documents.
    pub gradient_left: f64,
}

/// The explanation of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// The step.
    pub step: u64,
    /// One sentence.
    pub sentence: String,
    /// The findings: what stands out, causes first; then context.
    pub findings: Vec<Finding>,
    /// How far the step is from usual.
    pub moved: Deviations,
    /// How fast it was computed, if the events say.
    pub speed: Option<SpeedEvidence>,
    /// The result of the replay: whether its bits match.
    pub verdict: Verdict,
    /// What that means.
    pub advice: String,
    /// Where its bits differ from the ledger.
    pub bits: Option<LocatedDifference>,
    /// Why the step cannot be completed, if it diverges.
    pub diverged: Option<String>,
    /// The mean loss of a label.
    pub loss: f64,
    /// Its median over the steps before.
    pub loss_before: Option<f64>,
    /// The gradient norm before clipping.
    pub norm: f64,
    /// Its median over the steps before.
    pub norm_before: Option<f64>,
    /// The mean loss of the next step with the weights after this one; `None` if there is none with labels.
    pub next_loss: Option<f64>,
    /// The number of steps before it that it was compared with.
    pub window: u64,
    /// The requested number of top documents.
    pub top: usize,
    /// Every document of the step, worst first.
    pub documents: Vec<DocumentEvidence>,
    /// The worst tokens of each of the top documents.
    pub tokens: Vec<Vec<WorstToken>>,
    /// Counterfactuals: the step without each of the top documents, and without all of them.
    pub removals: Vec<Removal>,
    /// What the top documents do not explain.
    pub unexplained: Unexplained,
    /// Norms by layer.
    pub layers: Vec<LayerEvidence>,
    /// Routers by layer.
    pub routers: Vec<RouterEvidence>,
    /// Activations by layer.
    pub activities: Vec<ActivityEvidence>,
    /// Temperatures of attention by layer.
    pub temperatures: Vec<TemperatureEvidence>,
    /// Changes in the window.
    pub changes: Vec<RunChange>,
    /// Commands to continue with if documents are named: a replay and a fork without them.
    pub next: Vec<String>,
}

/// Explains a step of a run.
pub fn explain(replayer: &mut Replayer, request: ExplainRequest) -> Result<Explanation> {
    let ExplainRequest { step, window, top, tokens } = request;
    if step == 0 {
        return Err(Fault::usage("steps are counted from 1").at("--step"));
    }
    replayer.refuse_ranks("an explanation")?;
    let before = replayer.state_after(step - 1)?;
    let replayer = &*replayer;
    let history = || PreviousSteps::read(replayer.ledger(), step, window);
    let history = replayer.timed("window", history)?;
    let mut after = before.copy()?;
    let mut gradient = Vec::new();
    let look = |reduced: &ReducedGradient| {
        gradient.extend(reduced.own.iter().map(Tensor::shallow_clone));
    };
    let again = step_from(replayer, &before, &mut after, Detail::Tokens, look)?;
    let (ExplainedReplay { replayed, narrowed: bits, documents: found }, batch, losses) = again;
    let (spec, workers) = (replayer.spec(), replayer.workers());
    let squares = squares(&gradient, workers)?;
    let cost = |source: &str| history.cost(source).unwrap_or(replayed.loss);
    let step_gradient = StepGradient { pieces: before.owners.pieces(), own: &gradient };
    let gradients = gradients(replayer, &before, &batch, &found, step_gradient)?;
    let ranked = documents::rank(found, &gradients, cost, squares);
    let named = &ranked[..top.min(ranked.len())];
    let worst = worst_tokens(spec, &batch, named, &losses, tokens)?;
    let next = batch_after(replayer, step)?;
    let without = RemovalReplay { replayer, before: &before, batch: &batch, next: next.as_ref() };
    let removals = replayer.timed("removals", || removals(without, named))?;
    let next = next.as_ref().filter(|_| replayed.record.is_some());
    let next_loss = || next.map(|next| removal::loss_of(spec, &after, next, workers)).transpose();
    let next_loss = replayer.timed("next step", next_loss)?;
    replayer.passed(next.map_or(0, tokens_of), false);
    let activities = || layers::activities(spec, &before, &batch, workers);
    let activities = replayer.timed("layers", activities)?;
    replayer.passed(tokens_of(&batch), false);
    let unexplained = unexplained(&ranked, named.len());
    let mut explanation = Explanation {
        step,
        sentence: String::new(),
        findings: Vec::new(),
        moved: Deviations::default(),
        speed: SpeedEvidence::read(replayer.folder(), step)?,
        verdict: replayed.verdict,
        advice: replayed.advice,
        bits,
        diverged: replayed.diverged,
        loss: replayed.loss,
        loss_before: history.median(|record| Some(record.loss)),
        norm: replayed.record.as_ref().map_or_else(|| squares.sqrt(), StepRecord::norm),
        norm_before: history.median(|record| Some(record.norm())),
        next_loss,
        window: history.records.len() as u64,
        top,
        documents: ranked,
        tokens: worst,
        removals,
        unexplained,
        layers: Vec::new(),
        routers: Vec::new(),
        activities,
        temperatures: layers::temperatures(spec, &spec.model_at(step)?.config, &before),
        changes: Vec::new(),
        next: Vec::new(),
    };
    explanation.by_the_ledger(replayer, &before, &history, replayed.record.as_ref())?;
    explanation.next = next_commands(&explanation, replayer);
    explanation.findings = verdict::findings(&explanation);
    explanation.sentence = verdict::sentence(&explanation.findings, &explanation);
    Ok(explanation)
}

/// The batch of the step after `step`, if there is one with labels.
fn batch_after(replayer: &Replayer, step: u64) -> Result<Option<Batch>> {
    let steps = replayer.spec().plan.steps();
    let next = (step < steps).then(|| replayer.batch(step + 1)).transpose()?;
    Ok(next.filter(|batch| batch.label_count > 0))
}

/// The worst `count` tokens of each of these documents.
fn worst_tokens(
    spec: &RunSpec,
    batch: &Batch,
    named: &[DocumentEvidence],
    losses: &[f32],
    count: usize,
) -> Result<Vec<Vec<WorstToken>>> {
    let decoder = TextDecoder::of(spec)?;
    let worst =
        |one: &DocumentEvidence| tokens::worst(batch, &one.document, losses, count, &decoder);
    named.iter().map(worst).collect()
}

/// The gradient of each document, compared with the step's.
fn gradients(
    replayer: &Replayer,
    before: &State,
    batch: &Batch,
    found: &[DocumentLoss],
    step: StepGradient<'_>,
) -> Result<Vec<DocumentGradient>> {
    let (spec, workers) = (replayer.spec(), replayer.workers());
    let all = || documents::gradients(spec, before, batch, found, step, workers);
    let (gradients, passed) = replayer.timed("documents", all)?;
    replayer.passed(passed, true);
    Ok(gradients)
}

impl Explanation {
    /// Adds what follows from the ledger. The run's own record is used first, also where the replay differs, since it
    /// is what has to be explained. A diverged step has no record, so only the steps before it show the cause.
    fn by_the_ledger(
        &mut self,
        replayer: &Replayer,
        before: &State,
        history: &PreviousSteps,
        again: Option<&StepRecord>,
    ) -> Result<()> {
        let (step, spec, workers) = (self.step, replayer.spec(), replayer.workers());
        let recorded = step <= replayer.recorded();
        let written = recorded.then(|| replayer.ledger().record(step)).transpose()?;
        let record = written.as_ref().or(again);
        self.changes = changes::changes(spec, replayer.folder(), history, step, record)?;
        let changed = changes::last(&self.changes);
        self.layers = layers::layers(spec, before, record, history, changed, workers)?;
        self.routers = record.map_or_else(Vec::new, |record| layers::routers(record, history));
        self.moved = Deviations::of(history, &self.changes, self.loss, self.norm, record);
        self.moved.rates = [step, step - 1].map(|at| if at > 0 { rate_at(spec, at) } else { 0.0 });
        Ok(())
    }
}

impl Explanation {
    /// How many of the first documents stand out; 0 if the step diverges without them, too.
    fn culprits(&self) -> usize {
        let diverges = self.diverged.is_some() || !(self.loss + self.norm).is_finite();
        let in_vain = |all: &Removal| diverges && all.norm.is_none_or(|norm| !norm.is_finite());
        match self.removals.last().is_some_and(in_vain) {
            true => 0,
            false => documents::culprits(&self.documents, self.top),
        }
    }
}

/// The commands to run next about the documents that stand out.
fn next_commands(found: &Explanation, replayer: &Replayer) -> Vec<String> {
    let count = found.culprits();
    // Ids by file and row are unique only within a source.
    let drop = |evidence: &DocumentEvidence| match by_row(&evidence.document.id) {
        true => {
            flag("--drop-doc", &format!("{}:{}", evidence.document.source, evidence.document.id))
        }
        false => flag("--drop-doc", &evidence.document.id),
    };
    let drops: String = found.documents[..count].iter().map(drop).collect();
    if drops.is_empty() {
        return Vec::new();
    }
    let (run, step) = (shell::path(&replayer.root()), found.step);
    let moved = moved(replayer.stores());
    vec![
        format!("ztrain replay --run {run} --step {step}{moved}{drops}"),
        format!("ztrain fork {run} --step {} --out NEW{moved}{drops}", step - 1),
    ]
}

/// Whether an id was generated by a store for a document without one: `FILE#ROW`.
fn by_row(id: &str) -> bool {
    id.split_once('#')
        .is_some_and(|parts| [parts.0, parts.1].iter().all(|part| part.parse::<u64>().is_ok()))
}

/// The sum of squares of a gradient in pieces.
fn squares(gradient: &[Tensor], workers: trainer::workers::Workers) -> Result<f64> {
    let pieces = gradient.iter().map(Tensor::shallow_clone).collect();
    let squares = workers.map(pieces, |piece: Tensor| norm::squares(workers.ops(), &piece))?;
    Ok(tree::total(squares))
}

/// The step without each of the top documents that have labels, and without all of them.
fn removals(without: RemovalReplay<'_>, named: &[DocumentEvidence]) -> Result<Vec<Removal>> {
    let named: Vec<&DocumentEvidence> =
        named.iter().filter(|evidence| evidence.document.labels > 0).collect();
    let mut found = Vec::new();
    for evidence in &named {
        found.push(without.remove(std::slice::from_ref(evidence))?);
    }
    if named.len() > 1 {
        found.push(without.remove(&named)?);
    }
    Ok(found)
}

fn unexplained(documents: &[DocumentEvidence], named: usize) -> Unexplained {
    let sum = |of: &[DocumentEvidence], value: fn(&DocumentEvidence) -> f64| -> f64 {
        of.iter().map(value).sum()
    };
    let (named, rest) = documents.split_at(named);
    let excess_left = sum(rest, |evidence| evidence.excess);
    let shares = |of| sum(of, |evidence| evidence.gradient_share);
    Unexplained {
        excess: sum(named, |evidence| evidence.excess) + excess_left,
        excess_left,
        gradient: 1.0 - shares(documents),
        gradient_left: 1.0 - shares(named),
    }
}
