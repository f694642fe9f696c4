//! What a replay is asked about: the documents behind a step's loss, what was wrong in the run, and counterfactuals.
//!
//! - [`documents`] ranks the documents of a step by their loss, [`texts`] shows them as the step read them.
//! - [`narrow`] finds the part of a step that the run computed wrongly, `hit` the element, `ranks` who computed it.
//! - [`whatif`] computes steps with a change, which [`flags`] describes; [`attribute`] assigns a later loss to
//!   documents.
//!
//! Invariant: as in [`trainer::replay`], nothing is written that a run reads.

pub mod attribute;
pub mod documents;
pub mod flags;
mod hit;
pub mod narrow;
mod ranks;
pub mod texts;
pub mod whatif;

use contract::Result;
use loader::Batch;
use serde::Serialize;

use documents::DocumentLoss;
pub use hit::CorruptedElement;
use narrow::LocatedDifference;
use trainer::replay::{Replayed, ReplayedBatch, Replayer};
use trainer::state::State;
use trainer::step::{Detail, ReducedGradient};

/// A replayed step, or micro-batch of a step, and what explains its result.
#[derive(Clone, Debug, Serialize)]
pub struct ExplainedReplay {
    /// The result.
    #[serde(flatten)]
    pub replayed: Replayed,
    /// What was wrong in the run, as far as the ledger, the events and the run's checkpoints show; if both sides have a
    /// record.
    pub narrowed: Option<LocatedDifference>,
    /// Its documents, worst first; only on rank 0, and with [`Detail::Tokens`].
    pub documents: Vec<DocumentLoss>,
}

/// Computes the step after `state` as the run did, and updates the state.
pub fn step(replayer: &Replayer, state: &mut State, detail: Detail) -> Result<ExplainedReplay> {
    let before = state.copy()?;
    let (found, ..) = step_from(replayer, &before, state, detail, |_| ())?;
    Ok(found)
}

/// The same with `state`, a copy of `before`; calls `look` with the gradient before the update. Also returns this
/// rank's part of the batch, and the loss of each token.
pub(crate) fn step_from(
    replayer: &Replayer,
    before: &State,
    state: &mut State,
    detail: Detail,
    look: impl FnOnce(&ReducedGradient),
) -> Result<(ExplainedReplay, Batch, Vec<f32>)> {
    let again = replayer.step(before, state, detail, look)?;
    let narrowed = narrow::narrow(replayer, &again, before, state)?;
    let documents = match detail {
        Detail::Sums => Vec::new(),
        Detail::Tokens => of_step(replayer, &again)?,
    };
    let ReplayedBatch { replayed, batch, token_losses } = again;
    Ok((ExplainedReplay { replayed, narrowed, documents }, batch, token_losses))
}

/// Computes one micro-batch of the step after `state`. One rank does it alone, with all weights.
pub fn micro_batch(
    replayer: &Replayer,
    state: &State,
    micro_batch: u64,
) -> Result<ExplainedReplay> {
    let ReplayedBatch { replayed, batch, token_losses } =
        replayer.micro_batch(state, micro_batch)?;
    let rows = micro_batch * batch.micro_batch..(micro_batch + 1) * batch.micro_batch;
    let documents = || documents::rank(replayer.spec(), &batch, rows, &token_losses);
    let documents = replayer.timed("documents", documents)?;
    Ok(ExplainedReplay { replayed, narrowed: None, documents })
}

/// The documents of a whole step, which only rank 0 has.
fn of_step(replayer: &Replayer, again: &ReplayedBatch) -> Result<Vec<DocumentLoss>> {
    let ReplayedBatch { batch, token_losses, .. } = again;
    let rank = || match (replayer.is_rank_0(), replayer.world().comm.world()) {
        (true, 1) => documents::rank(replayer.spec(), batch, 0..batch.rows, token_losses),
        (true, _) => {
            let whole = replayer.batch(batch.step)?;
            documents::rank(replayer.spec(), &whole, 0..whole.rows, token_losses)
        }
        (false, _) => Ok(Vec::new()),
    };
    replayer.timed("documents", rank)
}
