//! The end of a step: owners update their pieces and send the new weights, and the ledger gets its record.

use std::collections::BTreeMap;
use std::time::Duration;

use contract::Result;
use kernels::group::SentBytes;
use kernels::tree;
use mixer::MixWindow;

use super::decide::StepDecision;
use super::norm;
use super::{ReducedGradient, Requests, StepContext};
use crate::ledger::{Packed, SourceSums, StepRecord};
use crate::mesh::share::{self, WeightSharing};
use crate::mesh::words::WordWriter;
use crate::optim::balance::RouterBalance;
use crate::spec::RunSpec;
use crate::state::{State, StateSums, Updated};

/// Updates weights, moments and balancing biases, unless the step is skipped; returns the results. New weights are sent
/// to the other ranks while the next ones are computed; those of other ranks are received later.
pub(super) fn apply(
    cx: StepContext<'_>,
    state: &mut State,
    gradient: &mut ReducedGradient,
    decided: &StepDecision,
    sharing: &WeightSharing<'_>,
) -> Result<Option<Updated>> {
    let own = std::mem::take(&mut gradient.own);
    let mut moved = None;
    if decided.decision.moves() {
        update_balance(cx.spec, gradient, decided.at.step, &mut state.balance)?;
        sharing.begin(state)?;
        let by = (&decided.settings, &cx.spec.scales[..]);
        let done = |pieces| sharing.done(pieces);
        moved = Some(state.update(by, own, decided.at, cx.workers, done)?);
        sharing.updated(state)?;
    }
    state.step = gradient.step;
    Ok(moved)
}

/// Makes the state hold the weights as the model reads them in `step`: an amendment may have changed their dtype, or a
/// phase their sharding.
pub(crate) fn cast_weights(
    cx: StepContext<'_>,
    state: &mut State,
    step: u64,
    sharing: &WeightSharing<'_>,
) -> Result<()> {
    let StepContext { spec, team, workers } = cx;
    let (fold, dtype) =
        (team.lines(spec.model_at(step)?.cut)?.fold(&spec.parameters), spec.dtype_at(step));
    if state.holds(&spec.parameters, dtype, &fold) {
        return Ok(());
    }
    sharing.finish()?;
    match state.cast_weights(&spec.parameters, dtype, fold, workers)? {
        true => share::weights(team, state),
        false => Ok(()),
    }
}

/// Updates the balancing biases by the counts of the whole step, as update number `moved`.
fn update_balance(
    spec: &RunSpec,
    gradient: &ReducedGradient,
    moved: u64,
    balance: &mut [RouterBalance],
) -> Result<()> {
    let lr = spec.model_at(gradient.step)?.balance_lr;
    let layers = balance.iter_mut().zip(&gradient.router);
    layers.for_each(|(balance, counts)| balance.update(moved, counts, lr));
    Ok(())
}

/// What a rank sends to all at the end of a step, or the combination of all ranks' reports.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepEnd {
    /// Requests to this rank; combined: requests to any rank.
    pub(super) asked: Requests,
    /// What it has sent in this step; combined: the sum.
    pub(super) sent: SentBytes,
    /// Bytes sent to the ranks that share micro-batches with it, and bytes of weight shards.
    pub(super) shared: [u64; 2],
    /// How long it waited for gradient blocks after it had computed its micro-batches; combined: the longest.
    pub(super) waited: Duration,
}

/// What all ranks report of the state after the step.
pub(super) struct StepSums {
    /// The checksums of the state.
    sums: StateSums,
    /// By layer, the norm of new weights minus old ones.
    updates: Vec<f64>,
}

/// Exchanges the checksums of the whole state after the step, the update norms of its layers, and the ranks' reports;
/// `moved` has the results of [`apply`] for this rank's pieces, which are read here.
pub(super) fn settle(
    cx: StepContext<'_>,
    state: &State,
    end: StepEnd,
    moved: Option<Updated>,
) -> Result<(StepSums, StepEnd)> {
    let StepEnd { asked, sent, shared, waited } = end;
    let mut words = WordWriter::default();
    words
        .word(asked.word())
        .word(sent.all)
        .word(sent.between_nodes)
        .word(shared[0])
        .word(shared[1]);
    words.word(waited.as_nanos() as u64);
    let (squares, sums): (Vec<f64>, Vec<_>) = match moved {
        Some(moved) => moved.read()?.into_iter().unzip(),
        None => state.own_sums(cx.workers)?.into_iter().map(|sums| (0.0, sums)).unzip(),
    };
    squares.into_iter().for_each(|squares| {
        words.float(squares);
    });
    words.sums(&sums);
    let heard = cx.team.all_gather("the gathering of checksums", &words)?;
    let (mut heard, mut all) = (heard.readers(), StepEnd::default());
    for heard in &mut heard {
        all.asked = all.asked.or(heard.word()?);
        all.sent.all += heard.word()?;
        all.sent.between_nodes += heard.word()?;
        all.shared[0] += heard.word()?;
        all.shared[1] += heard.word()?;
        all.waited = all.waited.max(Duration::from_nanos(heard.word()?));
    }
    // By tensor, in the order of its pieces, on all ranks.
    let mut squares = vec![Vec::new(); state.weights.len()];
    for piece in state.owners.pieces() {
        squares[piece.tensor].push(heard[piece.owner as usize].float()?);
    }
    let squares: Vec<f64> = squares.into_iter().map(tree::total).collect();
    let sums = state.sums_of(&share::sums(&state.owners, heard)?);
    Ok((StepSums { sums, updates: norm::by_layer(cx, &squares) }, all))
}

/// Labels and losses of a step by source. A row has one source; the rows of a source are added by the tree, in the
/// order of the batch.
fn by_source(spec: &RunSpec, gradient: &ReducedGradient) -> Result<BTreeMap<String, SourceSums>> {
    let first = spec.plan.step(gradient.step)?.first_sample;
    let rows = gradient.micro_batches.iter().flat_map(|one| &one.rows);
    let mut sums: BTreeMap<usize, (u64, Vec<f64>)> = BTreeMap::new();
    for (sample, (loss, labels)) in (first..).zip(rows) {
        let source = spec.plan.sample(sample)?.source;
        let (all, losses) = sums.entry(source).or_default();
        *all += labels;
        losses.push(*loss);
    }
    let named = |(source, (labels, losses)): (usize, (u64, Vec<f64>))| {
        let loss = Packed::floats([tree::total(losses)]);
        (spec.plan.sources()[source].name.clone(), SourceSums { labels, loss })
    };
    Ok(sums.into_iter().map(named).collect())
}

/// The ledger's record of a step.
pub(super) fn record(
    spec: &RunSpec,
    gradient: &ReducedGradient,
    decided: &StepDecision,
    settled: StepSums,
) -> Result<StepRecord> {
    let (micro_batches, step) = (&gradient.micro_batches, gradient.step);
    let StepDecision { norm, lr, decision, .. } = *decided;
    let StepSums { sums, updates } = settled;
    let z_loss = || tree::total(micro_batches.iter().map(|one| one.z_loss));
    let z_loss = || z_loss() / gradient.label_count.max(1) as f64;
    let has_z_loss = spec.model_at(step)?.config.z_loss > 0.0;
    Ok(StepRecord {
        kind: "step".to_owned(),
        step,
        phase: spec.plan.phases()[spec.plan.step(step)?.phase].name.clone(),
        batch_digest: gradient.data,
        label_count: gradient.label_count,
        loss: gradient.mean(),
        z_loss: has_z_loss.then(|| Packed::floats([z_loss()])),
        micro_batch_labels: micro_batches.iter().map(|one| one.labels).collect(),
        micro_batch_losses: Packed::floats(micro_batches.iter().map(|one| one.loss)),
        sources: by_source(spec, gradient)?,
        tokens_per_expert: gradient.router.clone(),
        micro_batch_grad_checksums: Packed(micro_batches.iter().map(|one| one.gradient).collect()),
        grad_checksums: Packed(gradient.norms.checksums.clone()),
        norm: Packed::floats([norm]),
        layer_gradient_norms: Packed::floats(gradient.norms.by_layer.iter().copied()),
        clip_threshold: decision.longest.map(|longest| Packed::floats([longest])),
        skipped: decision.skipped,
        lr: Packed::floats([lr]),
        layer_update_norms: Packed::floats(updates),
        weight_checksums: Packed(sums.weights),
        state_digest: sums.digest,
        mix_weights: spec.plan.window_at(step).map(MixWindow::by_source),
        curriculum: None,
    })
}
