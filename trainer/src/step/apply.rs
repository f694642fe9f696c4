//! The end of a step: owners move their pieces, everybody takes the new weights, and the ledger gets its line.

use std::time::Duration;

use contract::Result;
use kernels::group::Sent;

use super::decide::Decided;
use super::{Context, Gradient};
use crate::ledger::{Packed, StepRecord};
use crate::mesh::share;
use crate::mesh::words::Writer;
use crate::optim::balance::Balance;
use crate::spec::RunSpec;
use crate::state::{State, StateSums};

/// Moves weights, moments and balance, if the step moves anything.
pub(super) fn apply(
    cx: Context<'_>,
    state: &mut State,
    gradient: &mut Gradient,
    decided: &Decided,
) -> Result<()> {
    let own = std::mem::take(&mut gradient.own);
    if decided.decision.moves() {
        state.update(&cx.spec.settings, &own, decided.at, cx.workers)?;
        // Gone before the weights of others come.
        drop(own);
        update_balance(cx.spec, gradient, decided.at.step, &mut state.balance)?;
        share::weights(cx.team, &state.owners, &state.weights)?;
    }
    state.step = gradient.step;
    Ok(())
}

/// Moves the balancing biases by what the whole step counted; `moved` is how often they will have moved with it.
fn update_balance(
    spec: &RunSpec,
    gradient: &Gradient,
    moved: u64,
    balance: &mut [Balance],
) -> Result<()> {
    let lr = spec.model_at(gradient.step)?.balance_lr;
    let layers = balance.iter_mut().zip(&gradient.router);
    layers.for_each(|(balance, counts)| balance.update(moved, counts, lr));
    Ok(())
}

/// What a rank says at the end of a step, and hears of all.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ended {
    /// Whether it was asked to stop; of all: whether any was.
    pub(super) stop: bool,
    /// What it has sent in this step; of all: together.
    pub(super) sent: Sent,
    /// How long it waited for blocks of the gradient when its leaves had been computed; of all: the longest.
    pub(super) waited: Duration,
}

/// The checksums of the whole state after the step, and what all ranks say of its end.
pub(super) fn settle(cx: Context<'_>, state: &State, mine: Ended) -> Result<(StateSums, Ended)> {
    let Ended { stop, sent, waited } = mine;
    let mut words = Writer::default();
    words.word(u64::from(stop)).word(sent.all).word(sent.between_nodes);
    words.word(waited.as_nanos() as u64);
    words.sums(&state.own_sums(cx.workers)?);
    let heard = cx.team.tell("the gathering of checksums", &words)?;
    let (mut heard, mut all) = (heard.readers(), Ended::default());
    for heard in &mut heard {
        all.stop |= heard.word()? != 0;
        all.sent.all += heard.word()?;
        all.sent.between_nodes += heard.word()?;
        all.waited = all.waited.max(Duration::from_nanos(heard.word()?));
    }
    let sums = share::sums(&state.owners, heard)?;
    Ok((state.sums_of(&sums), all))
}

/// The ledger's line of a step; `gradients` are the checksums of the summed gradient's tensors.
pub(super) fn record(
    spec: &RunSpec,
    gradient: &Gradient,
    gradients: Vec<u64>,
    decided: &Decided,
    sums: StateSums,
) -> Result<StepRecord> {
    let (leaves, step) = (&gradient.leaves, gradient.step);
    let Decided { norm, lr, decision, at: _ } = *decided;
    Ok(StepRecord {
        kind: "step".to_owned(),
        step,
        phase: spec.plan.phases()[spec.plan.step(step)?.phase].name.clone(),
        data: gradient.data,
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
