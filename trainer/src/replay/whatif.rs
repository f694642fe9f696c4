//! Counterfactuals: a few steps computed with something changed. Marked as such everywhere: this is not a replay.

use std::collections::BTreeSet;
use std::ops::Range;

use contract::{Fault, Result};
use loader::{Batch, explain};
use serde::Serialize;

use super::{Executor as _, Replayer, ThisMachine};
use crate::ledger::StepRecord;
use crate::optim::guard::Skipped;
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{self, Detail};

/// What is changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change {
    /// Ids of documents that are hidden, as if they were banned.
    pub drop: Vec<String>,
    /// A learning rate in place of the schedule's.
    pub lr: Option<f64>,
}

/// A step as it was and as it would have been.
#[derive(Clone, Debug, Serialize)]
pub struct Imagined {
    /// The step.
    pub step: u64,
    /// Labels that did not count.
    pub dropped_labels: u64,
    /// Mean loss and gradient norm in the ledger, if it has the step.
    pub was: Option<(f64, f64)>,
    /// Mean loss and gradient norm with the change.
    pub would_be: (f64, f64),
    /// Whether it would have been skipped, and why; `None` where the curriculum skips no step.
    pub skipped: Option<Skipped>,
}

impl Change {
    /// Whether anything is changed.
    pub fn is_some(&self) -> bool {
        !self.drop.is_empty() || self.lr.is_some()
    }
}

/// Computes `steps` from the true state before them, with `change` from the first on.
pub fn imagine(
    replayer: &mut Replayer,
    steps: Range<u64>,
    change: &Change,
) -> Result<Vec<Imagined>> {
    check_documents(replayer, steps.clone(), &change.drop)?;
    let mut state: State = replayer.state_after(steps.start - 1)?;
    let mut imagined = Vec::new();
    for step in steps {
        let mut batch = replayer.batch(step)?;
        let labels = drop_documents(replayer.spec(), &mut batch, &change.drop)?;
        let record = advance(replayer, &mut state, &batch, change.lr)?;
        let was =
            if step > replayer.recorded() { None } else { Some(replayer.ledger.record(step)?) };
        let was = was.map(|record| (record.loss, record.norm()));
        let would_be = (record.loss, record.norm());
        let (dropped_labels, skipped) = (labels, record.skipped);
        imagined.push(Imagined { step, dropped_labels, was, would_be, skipped });
    }
    Ok(imagined)
}

/// Refuses a document that has no label in any of the steps: before the state is made that they would be computed from.
fn check_documents(replayer: &Replayer, steps: Range<u64>, ids: &[String]) -> Result<()> {
    let mut unseen: BTreeSet<&String> = ids.iter().collect();
    for step in steps.take_while(|_| !ids.is_empty()) {
        let mut batch = replayer.batch(step)?;
        let mut seen = Vec::new();
        for id in &unseen {
            if drop_documents(replayer.spec(), &mut batch, std::slice::from_ref(*id))? > 0 {
                seen.push(*id);
            }
        }
        seen.into_iter().for_each(|id| {
            unseen.remove(id);
        });
        if unseen.is_empty() {
            return Ok(());
        }
    }
    if unseen.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = unseen.into_iter().map(|id| format!("{id:?}")).collect();
    Err(Fault::usage("a document has no label in these steps")
        .at("--drop-doc")
        .found(names.join(", "))
        .hint("the replay of a step lists the ids of its documents"))
}

fn advance(
    replayer: &Replayer,
    state: &mut State,
    batch: &Batch,
    lr: Option<f64>,
) -> Result<StepRecord> {
    let (spec, workers) = (&replayer.spec, replayer.workers);
    let lr = lr.unwrap_or_else(|| spec.settings.schedule.rate(batch.step));
    let mut gradient = ThisMachine.gradient(spec, state, batch, workers, Detail::Sums)?;
    let stepped =
        step::alone(spec, workers, |cx| step::complete(cx, state, &mut gradient, lr, || false));
    stepped.map(|stepped| stepped.record)
}

/// Hides the documents with these ids, as a ban would; returns how many labels they had.
fn drop_documents(spec: &RunSpec, batch: &mut Batch, ids: &[String]) -> Result<u64> {
    if ids.is_empty() {
        return Ok(0);
    }
    let mut dropped = 0;
    for (row, pieces) in explain::pieces(&spec.plan, &spec.data, &batch.samples)?.iter().enumerate()
    {
        for piece in pieces.iter().filter(|piece| ids.contains(&piece.record.id)) {
            dropped += batch.hide(row as u64, piece.place.clone());
        }
    }
    Ok(dropped)
}
