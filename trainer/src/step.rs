//! One step: leaves, the fixed tree, norm, clip, update. A pure function of the state and the batch.

use std::ops::Range;
use std::sync::Mutex;

use contract::{Digest, Fault, Result};
use kernels::device::Stager;
use kernels::share::Frozen;
use kernels::{checksum, tree::Counter};
use loader::Batch;
use tch::Tensor;

use crate::ledger::{Packed, StepRecord};
use crate::model::{self, LeafInput, LeafOutput, StagedLeaf, ZayaConfig};
use crate::optim::balance::Balance;
use crate::optim::guard::{Decision, Windows};
use crate::optim::{self, norm};
use crate::refusal::{caught, values};
use crate::spec::RunSpec;
use crate::state::{Part, State, StateSums, salt};
use crate::timing;
use crate::workers::Workers;

/// What the leaves of a step say before anything moves.
pub struct Gradient {
    /// Labels in the step.
    pub divisor: u64,
    /// Sum of token losses over the step.
    pub loss: f64,
    /// The summed gradient, by parameter.
    pub tensors: Vec<Tensor>,
    /// What the ledger keeps of each leaf.
    pub leaves: Vec<LeafSums>,
    /// Tokens by layer and router class.
    pub router: Vec<Vec<u64>>,
}

impl Gradient {
    /// The mean loss of a label.
    pub fn mean(&self) -> f64 {
        self.loss / self.divisor as f64
    }
}

/// What the ledger keeps of a leaf, and what explains it.
#[derive(Clone, Debug)]
pub struct LeafSums {
    /// Sum of its token losses.
    pub loss: f64,
    /// Its labels.
    pub labels: u64,
    /// Checksum of its gradient.
    pub gradient: u64,
    /// Sum of token losses and labels of each of its rows: not in the ledger, for the curves by source.
    pub rows: Vec<(f64, u64)>,
    /// The loss of each of its tokens, only where asked for.
    pub token_losses: Vec<f32>,
}

/// How much is kept of a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// What the ledger needs.
    Sums,
    /// The loss of each token as well.
    Tokens,
}

/// The leaves of one step on their way to the device; each is taken once.
///
/// The prefetcher's last stage makes them, so that on a GPU the copy runs beside the step before.
pub struct Leaves(Vec<Mutex<Option<StagedLeaf>>>);

impl Leaves {
    /// Checks every leaf of `batch` and starts moving it.
    pub fn stage(spec: &RunSpec, batch: &Batch, stager: &Stager) -> Result<Leaves> {
        let config = &spec.model_at(batch.step)?.config;
        let staged = |leaf| input(batch, leaf).stage(config, stager).map(Some).map(Mutex::new);
        (0..batch.rows / batch.micro_batch).map(staged).collect::<Result<_>>().map(Leaves)
    }

    fn take(&self, leaf: u64) -> Result<StagedLeaf> {
        let slot = self.0.get(leaf as usize).and_then(|slot| slot.lock().ok()?.take());
        slot.ok_or_else(|| Fault::bug(format!("leaf {leaf} was not staged, or taken twice")))
    }
}

/// Computes one step and moves the state.
pub fn advance(
    spec: &RunSpec,
    state: &mut State,
    batch: &Batch,
    leaves: &Leaves,
    workers: Workers,
) -> Result<StepRecord> {
    let gradient = gradient_of(spec, state, batch, leaves, workers, Detail::Sums)?;
    apply(spec, state, batch, &gradient, workers)
        .map_err(|fault| fault.or_at(|| format!("step {}", batch.step)))
}

/// Computes the leaves of a step and adds them up. The state stays as it is.
pub fn gradient(
    spec: &RunSpec,
    state: &State,
    batch: &Batch,
    workers: Workers,
    detail: Detail,
) -> Result<Gradient> {
    gradient_of(spec, state, batch, &Leaves::stage(spec, batch, &stager(state)?)?, workers, detail)
}

/// The leaves of `batch`, on their way to `device`.
pub(crate) fn stage(spec: &RunSpec, batch: &Batch, device: tch::Device) -> Result<Leaves> {
    let stager = Stager::new(device).map_err(|error| Fault::machine(error.to_string()))?;
    Leaves::stage(spec, batch, &stager)
}

fn stager(state: &State) -> Result<Stager> {
    Stager::new(state.weights[0].device()).map_err(|error| Fault::machine(error.to_string()))
}

fn gradient_of(
    spec: &RunSpec,
    state: &State,
    batch: &Batch,
    leaves: &Leaves,
    workers: Workers,
    detail: Detail,
) -> Result<Gradient> {
    let (mut sum, mut losses) = (Counter::new(), Counter::new());
    let (mut kept, mut router) = (Vec::new(), Vec::new());
    let take = |sums: LeafSums, output: LeafOutput| {
        losses.push(sums.loss);
        add_counts(&mut router, output.counts);
        let _watch = timing::part(timing::Part::Tree);
        sum.push(output.grads);
        kept.push(sums);
        Ok(())
    };
    let divisor = batch.label_count.max(1);
    let frozen = (state.weights.as_slice(), state.balance.as_slice());
    each_leaf(spec, frozen, batch, leaves, workers, (divisor, detail), |_| (), take)?;
    let (tensors, loss) = (sum.finish().unwrap_or_default(), losses.finish().unwrap_or(0.0));
    Ok(Gradient { divisor, loss, tensors, leaves: kept, router })
}

/// Computes every leaf of `batch` with these weights and balances; `begun` hears of each leaf before it is computed,
/// `take` gets what came out, in leaf order.
#[expect(
    clippy::too_many_arguments,
    reason = "what a leaf is a function of, and where its outcome goes"
)]
pub(crate) fn each_leaf(
    spec: &RunSpec,
    (weights, balance): (&[Tensor], &[Balance]),
    batch: &Batch,
    leaves: &Leaves,
    workers: Workers,
    (divisor, detail): (u64, Detail),
    begun: impl Fn(u64) + Sync,
    mut take: impl FnMut(LeafSums, LeafOutput) -> Result<()> + Send,
) -> Result<()> {
    let (weights, biases) = (products(spec, weights, workers)?, bias_tensors(weights, balance));
    let (weights, biases) = (Frozen::new(&weights), Frozen::new(&biases));
    let config = &spec.model_at(batch.step)?.config;
    let work = |leaf: u64| {
        begun(leaf);
        let (weights, biases) = (weights.aliases(), biases.aliases());
        let compute = || {
            let staged = leaves.take(leaf)?;
            let how = workers.options();
            let output = model::staged_leaf(config, &weights, &biases, staged, divisor, how)?;
            Ok((sums(&output, &input(batch, leaf), detail)?, output))
        };
        caught(compute).map_err(|fault| fault.or_at(|| place(spec, batch, leaf)))
    };
    workers.fold(batch.rows / batch.micro_batch, work, |_, (sums, output)| take(sums, output))
}

/// Computes one leaf by itself, with the loss of each token.
pub fn leaf(
    spec: &RunSpec,
    state: &State,
    batch: &Batch,
    leaf: u64,
    workers: Workers,
) -> Result<LeafSums> {
    let biases = bias_tensors(&state.weights, &state.balance);
    let weights = products(spec, &state.weights, workers)?;
    let (weights, biases) = (Frozen::new(&weights), Frozen::new(&biases));
    let config = &spec.model_at(batch.step)?.config;
    let input = input(batch, leaf);
    let staged = input.stage(config, &stager(state)?)?;
    let (divisor, how) = (batch.label_count.max(1), workers.options());
    // On a worker of its own, as in the run.
    let mut found = workers.map(vec![staged], |staged| {
        let (weights, biases) = (weights.aliases(), biases.aliases());
        let compute = || {
            let output = model::staged_leaf(config, &weights, &biases, staged, divisor, how)?;
            sums(&output, &input, Detail::Tokens)
        };
        caught(compute).map_err(|fault| fault.or_at(|| place(spec, batch, leaf)))
    })?;
    found.pop().ok_or_else(|| Fault::bug("a leaf had no outcome"))
}

/// Clips, moves weights, moments and balance, and writes down what happened.
pub fn apply(
    spec: &RunSpec,
    state: &mut State,
    batch: &Batch,
    gradient: &Gradient,
    workers: Workers,
) -> Result<StepRecord> {
    apply_at(spec, state, batch, gradient, workers, None)
}

/// The same, with a learning rate in place of the schedule's: for questions of what would have been.
pub(crate) fn apply_at(
    spec: &RunSpec,
    state: &mut State,
    batch: &Batch,
    gradient: &Gradient,
    workers: Workers,
    lr: Option<f64>,
) -> Result<StepRecord> {
    let lr = lr.unwrap_or_else(|| spec.settings.schedule.rate(state.step + 1));
    let step = state.step + 1;
    check_losses(step, &gradient.leaves)?;
    let parts = parts(&gradient.tensors, workers)?;
    let norm = norm::norm(&parts.iter().map(|(_, square)| *square).collect::<Vec<_>>());
    check_norm(step, norm)?;
    let (decision, at) = decide(spec, &mut state.windows, gradient, (step, lr, norm));
    if decision.moves() {
        optim::update(&spec.settings, &spec.rules, state, &gradient.tensors, at, workers)?;
        update_balance(spec, (step, at.step), &mut state.balance, &gradient.router)?;
    }
    state.step = step;
    let sums = state.sums(workers)?;
    let checksums = parts.into_iter().map(|(checksum, _)| checksum).collect();
    record(spec, (step, batch.digest()), gradient, (lr, norm, decision, checksums), sums)
}

/// A loss that is no number ends the run before anything moves.
pub(crate) fn check_losses(step: u64, leaves: &[LeafSums]) -> Result<()> {
    let Some(leaf) = leaves.iter().position(|leaf| !leaf.loss.is_finite()) else { return Ok(()) };
    let found = format!("{} in micro-batch {leaf}", leaves[leaf].loss);
    Err(diverged("the loss is not finite", step).found(found))
}

/// So does a gradient that is none.
pub(crate) fn check_norm(step: u64, norm: f64) -> Result<()> {
    if norm.is_finite() {
        return Ok(());
    }
    Err(diverged("the gradient is not finite", step).found(format!("a norm of {norm}")))
}

/// Whether the step moves anything, and by which numbers: a function of it and of the losses and norms before it.
pub(crate) fn decide(
    spec: &RunSpec,
    windows: &mut Option<Windows>,
    gradient: &Gradient,
    (step, lr, norm): (u64, f64, f64),
) -> (Decision, optim::At) {
    let settings = &spec.settings;
    let decision = settings.guard.decide(windows, gradient.mean(), norm);
    let scale = norm::scale(norm, decision.clip(settings.clip));
    let step = step - windows.as_ref().map_or(0, |windows| windows.skipped);
    (decision, optim::At { step, lr, scale })
}

/// Moves the balancing biases by what the whole step counted; `moved` is how often they will have moved with it.
pub(crate) fn update_balance(
    spec: &RunSpec,
    (step, moved): (u64, u64),
    balance: &mut [Balance],
    router: &[Vec<u64>],
) -> Result<()> {
    let lr = spec.model_at(step)?.balance_lr;
    balance.iter_mut().zip(router).for_each(|(balance, counts)| balance.update(moved, counts, lr));
    Ok(())
}

/// The ledger's line of a step whose batch has the digest `data`.
pub(crate) fn record(
    spec: &RunSpec,
    (step, data): (u64, Digest),
    gradient: &Gradient,
    (lr, norm, decision, gradients): (f64, f64, Decision, Vec<u64>),
    sums: StateSums,
) -> Result<StepRecord> {
    let leaves = &gradient.leaves;
    Ok(StepRecord {
        kind: "step".to_owned(),
        step,
        phase: spec.plan.phases()[spec.plan.step(step)?.phase].name.clone(),
        data,
        divisor: gradient.divisor,
        loss: gradient.mean(),
        leaf_labels: leaves.iter().map(|leaf| leaf.labels).collect(),
        leaf_losses: Packed::floats(leaves.iter().map(|leaf| leaf.loss)),
        router: gradient.router.clone(),
        leaf_gradients: Packed(leaves.iter().map(|leaf| leaf.gradient).collect()),
        gradients: Packed(gradients),
        norm: Packed::floats([norm]),
        longest: decision.longest.map(|longest| Packed::floats([longest])),
        skipped: decision.skipped,
        lr: Packed::floats([lr]),
        weights: Packed(sums.weights),
        state: sums.digest,
        curriculum: None,
        rows: leaves.iter().flat_map(|leaf| leaf.rows.iter().copied()).collect(),
    })
}

/// Leaf number `leaf` of a batch.
fn input(batch: &Batch, leaf: u64) -> LeafInput<'_> {
    rows(batch, leaf * batch.micro_batch..(leaf + 1) * batch.micro_batch)
}

/// Some rows of a batch, as a leaf.
pub(crate) fn rows(batch: &Batch, rows: Range<u64>) -> LeafInput<'_> {
    let (first, width) = (rows.start as usize, batch.seq_len as usize);
    let rows = (rows.end - rows.start) as usize;
    let tokens = first * width..(first + rows) * width;
    LeafInput {
        tokens: &batch.tokens[tokens.clone()],
        labels: &batch.labels[tokens.clone()],
        positions: &batch.positions[tokens.clone()],
        mask: &batch.mask[tokens],
        boundaries: &batch.boundaries[first..first + rows],
        rows,
        seq_len: width,
    }
}

fn sums(output: &LeafOutput, input: &LeafInput<'_>, detail: Detail) -> Result<LeafSums> {
    let _watch = timing::part(timing::Part::LeafSums);
    let checksums = output.grads.iter().enumerate();
    let checksums =
        checksums.map(|(index, tensor)| checksum::tensor(tensor, salt(Part::LeafGradient, index)));
    let token_losses = match detail {
        Detail::Tokens => values(&output.token_losses.flatten(0, -1))?,
        Detail::Sums => Vec::new(),
    };
    let gradient = checksums.fold(0, u64::wrapping_add);
    let by_row = output.token_losses.view([input.rows as i64, -1]);
    let by_row = by_row.sum_dim_intlist(1, false, tch::Kind::Double);
    let labels = |mask: &[u8]| mask.iter().map(|mask| u64::from(*mask != 0)).sum();
    let rows = values::<f64>(&by_row)?
        .into_iter()
        .zip(input.mask.chunks(input.seq_len).map(labels))
        .collect();
    Ok(LeafSums { loss: output.loss, labels: output.labels, gradient, rows, token_losses })
}

/// The weights as the products of a step see them: rounded once, for all of its leaves.
pub(crate) fn products(
    spec: &RunSpec,
    weights: &[Tensor],
    workers: Workers,
) -> Result<Vec<Tensor>> {
    let dtype = spec.curriculum.dtype;
    let items: Vec<_> =
        spec.parameters.iter().zip(weights.iter().map(Tensor::shallow_clone)).collect();
    workers.map(items, |(parameter, weight)| {
        let _watch = timing::part(timing::Part::Round);
        Ok(model::rounded(parameter, &weight, dtype))
    })
}

/// The balancing biases as tensors beside the weights.
pub(crate) fn bias_tensors(weights: &[Tensor], balance: &[Balance]) -> Vec<Tensor> {
    let device = weights.first().map_or(tch::Device::Cpu, Tensor::device);
    balance.iter().map(|layer| Tensor::from_slice(&layer.bias).to_device(device)).collect()
}

/// Checksum and sum of squares of each tensor.
fn parts(tensors: &[Tensor], workers: Workers) -> Result<Vec<(u64, f64)>> {
    let items: Vec<_> = tensors.iter().map(Tensor::shallow_clone).enumerate().collect();
    workers.map(items, |(index, tensor)| {
        let _watch = timing::part(timing::Part::Norm);
        let squares = norm::squares(workers.ops(), &tensor)?;
        Ok((checksum::tensor(&tensor, salt(Part::Gradient, index)), squares))
    })
}

/// Integers: any order gives the same sum.
pub(crate) fn add_counts(total: &mut Vec<Vec<u64>>, counts: Vec<Vec<u64>>) {
    if total.is_empty() {
        *total = counts;
        return;
    }
    for (total, counts) in total.iter_mut().zip(counts) {
        total.iter_mut().zip(counts).for_each(|(total, count)| *total += count);
    }
}

/// How a fault names a leaf: counted in the step, whatever part of it `batch` is.
fn place(spec: &RunSpec, batch: &Batch, leaf: u64) -> String {
    let begins = spec.plan.step(batch.step).map_or(batch.first_sample, |step| step.first_sample);
    let sample =
        batch.samples.get((leaf * batch.micro_batch) as usize).map_or(begins, |row| row.sample);
    format!("step {}, micro-batch {}", batch.step, (sample - begins) / batch.micro_batch)
}

fn diverged(what: &str, step: u64) -> Fault {
    Fault::diverged(what).at(format!("step {step}"))
}

/// Weights and balancing biases before the first step: drawn, or those of the start.
pub(crate) fn beginning(
    spec: &RunSpec,
    device: tch::Device,
) -> Result<(Vec<Tensor>, Vec<Balance>)> {
    let mut balance = spec.balance();
    let weights = match &spec.start {
        None => model::init(spec.config(), spec.curriculum.seed),
        Some(start) => {
            let (weights, biases) = start.read()?;
            balance.iter_mut().zip(biases).for_each(|(layer, bias)| layer.bias = bias);
            weights
        }
    };
    let weights = weights.into_iter().map(|tensor| tensor.to_device(device)).collect();
    Ok((weights, balance))
}

/// The state before the first step.
pub fn initial(spec: &RunSpec, device: tch::Device) -> Result<State> {
    let (weights, balance) = beginning(spec, device)?;
    let zeros = |tensor: &Tensor| tensor.zeros_like();
    let second = weights.iter().zip(&spec.rules);
    let second =
        second.map(|(tensor, rule)| rule.has_second_moment().then(|| zeros(tensor))).collect();
    let first = weights.iter().map(zeros).collect();
    let windows = spec.settings.guard.windows();
    Ok(State { step: 0, first, second, balance, windows, weights })
}

/// How many numbers a configuration trains.
pub fn parameter_count(config: &ZayaConfig) -> u64 {
    model::parameters(config).iter().map(model::ParamSpec::elements).sum()
}
