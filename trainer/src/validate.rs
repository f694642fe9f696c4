//! The loss on held-out text: a function of the weights, the store and the length of the sequences, and of nothing else.
//!
//! How often it is taken and over how many windows is a flag, since it decides nothing about the run; so its place is
//! `events.jsonl`, not the ledger. Taken again after a kill it has the same bits.

use std::sync::{Mutex, PoisonError};

use contract::Result;
use loader::validation;
use serde_json::{Value, json};

use crate::mesh::context::Along;
use crate::model::{self, Computing, Folded, Line};
use crate::refusal::lost;
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{Context, FrozenModel, Weights, rows};
use crate::waiting::Waiting;
use crate::workers::Workers;

/// When, and over how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validation {
    /// Steps between two; 0 for none.
    pub every: u64,
    /// Windows of each source, spread evenly over its held-out text; all of them where there are fewer.
    pub windows: u64,
}

/// What one source costs.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceLoss {
    /// The source's name.
    pub source: String,
    /// Sum of token losses, in nats.
    pub loss: f64,
    /// Labels.
    pub labels: u64,
}

impl SourceLoss {
    /// Mean loss of a label.
    pub fn mean(&self) -> f64 {
        self.loss / self.labels.max(1) as f64
    }

    /// All of them as one: every label weighs the same.
    pub fn over(sources: &[SourceLoss]) -> SourceLoss {
        let (loss, labels) = sources
            .iter()
            .fold((0.0, 0), |(loss, labels), one| (loss + one.loss, labels + one.labels));
        SourceLoss { source: "all".to_owned(), loss, labels }
    }

    /// Its fields for the events; `bits` are those of the sum.
    pub fn to_json(&self) -> Value {
        let bits = format!("{:016x}", self.loss.to_bits());
        json!({"loss": self.mean(), "labels": self.labels, "bits": bits})
    }
}

impl Validation {
    /// Whether it is taken after `step`, when the run's last is `last`.
    pub(crate) fn is_due(&self, step: u64, last: u64) -> bool {
        self.every > 0 && (step == last || step.is_multiple_of(self.every))
    }

    /// Takes it as one of the ranks of `cx`: alone as rank 0, which has all weights, or with those who hold them for it. `None`
    /// on ranks other than 0.
    pub(crate) fn take_among(
        &self,
        cx: Context<'_>,
        state: &State,
    ) -> Result<Option<Vec<SourceLoss>>> {
        let Context { spec, team, workers } = cx;
        let cut = spec.model_at(state.step.max(1))?.cut;
        let (lines, first) = (team.lines(cut)?, team.group.rank() == 0);
        if lines.mesh.tsp == 1 {
            return first.then(|| self.take(spec, state, workers)).transpose();
        }
        if lines.data.place != 0 {
            return Ok(None);
        }
        let along = [Along::sharing(&lines)?, Along::folded(&lines)?];
        let [sharing, folded] = along.each_ref().map(|along| along.as_ref().map(Along::begin));
        let (sharing, folded) = (sharing.transpose()?, folded.transpose()?);
        let how = Computing {
            options: workers.options().cut(cut),
            line: sharing.as_ref().map(|line| line as &dyn Line),
            folded: folded.as_ref().map(|line| Folded { fold: &state.fold, line }),
        };
        // What they exchange has one order.
        let found = self.losses(spec, state, workers.one(), how)?;
        for line in [sharing, folded].into_iter().flatten() {
            line.finish()?;
        }
        team.group.settled().map_err(lost)?;
        Ok(first.then_some(found))
    }

    /// Takes it with the weights and balances of `state`, which are whole: sources in the order of the plan, those without
    /// held-out text left out.
    pub fn take(&self, spec: &RunSpec, state: &State, workers: Workers) -> Result<Vec<SourceLoss>> {
        let cut = spec.model_at(state.step.max(1))?.cut;
        self.losses(spec, state, workers, workers.options().cut(cut).into())
    }

    fn losses(
        &self,
        spec: &RunSpec,
        state: &State,
        workers: Workers,
        how: Computing<'_>,
    ) -> Result<Vec<SourceLoss>> {
        let step = state.step;
        let at = spec.plan.step(step.max(1))?;
        let mut pieces = Vec::new();
        for source in spec.plan.sources() {
            for (first, rows) in
                pieces_of(spec, &source.name, at.seq_len, at.micro_batch, self.windows)?
            {
                pieces.push((source.name.clone(), first, rows));
            }
        }
        let model = FrozenModel::at(spec, at.step, state, workers)?;
        let waiting =
            Mutex::new(Waiting::new(format!("validation after step {step}"), pieces.len() as u64));
        let losses = workers.map(pieces, |(source, first, count): (String, u64, u64)| {
            let batch = validation::batch(&spec.data, &source, at.seq_len, first, count)?;
            let place = || format!("validation of {source} after step {step}, window {first}");
            let input = rows(&batch, 0..batch.rows);
            let compute = |Weights { weights, biases }: Weights<'_>| {
                model::losses(how, model.config(), weights, biases, &input)
            };
            let loss = model.read(compute, place)?;
            waiting.lock().unwrap_or_else(PoisonError::into_inner).one();
            Ok((source.clone(), loss, batch.label_count))
        })?;
        let mut sums: Vec<SourceLoss> = Vec::new();
        for (source, loss, labels) in losses {
            match sums.last_mut() {
                Some(sum) if sum.source == source => {
                    (sum.loss, sum.labels) = (sum.loss + loss, sum.labels + labels);
                }
                _ => sums.push(SourceLoss { source, loss, labels }),
            }
        }
        sums.retain(|sum| sum.labels > 0);
        Ok(sums)
    }
}

/// Windows as (first, how many), at most `micro_batch` at a time.
fn pieces_of(
    spec: &RunSpec,
    source: &str,
    seq_len: u32,
    micro_batch: u64,
    windows: u64,
) -> Result<Vec<(u64, u64)>> {
    let total = validation::windows(&spec.data, source, seq_len)?;
    let wanted = windows.min(total);
    let pieces = wanted.div_ceil(micro_batch.max(1));
    // Piece p begins where its share of the text does: its windows end before the next piece's begin.
    let piece = |piece: u64| {
        let rows = micro_batch.min(wanted - piece * micro_batch);
        (piece * micro_batch + piece * (total - wanted) / pieces, rows)
    };
    Ok((0..pieces).map(piece).collect())
}
