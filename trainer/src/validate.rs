//! The loss on held-out text: a function of the weights, the store and the length of the sequences, and of nothing else.
//!
//! How often it is taken and over how many windows is a flag, since it decides nothing about the run; so its place is
//! `events.jsonl`, not the ledger. Taken again after a kill it has the same bits.

use std::sync::{Mutex, PoisonError};

use contract::{Fault, Result};
use loader::validation;
use serde_json::{Value, json};

use crate::mesh::Team;
use crate::mesh::context::Along;
use crate::mesh::team::Lines;
use crate::mesh::words::Writer;
use crate::model::{self, Computing, Folded, Line};
use crate::refusal::lost;
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{Context, FrozenModel, Weights, rows};
use crate::waiting::Waiting;

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

    /// Takes it as one of the ranks of `cx`, which deal the text among them: each computes its share by itself, or with those who
    /// hold weights for it, and hears of the others'. Sources in the order of the plan, those without held-out text left out.
    pub fn take(&self, cx: Context<'_>, state: &State) -> Result<Vec<SourceLoss>> {
        let Context { spec, team, .. } = cx;
        let cut = spec.model_at(state.step.max(1))?.cut;
        let lines = team.lines(cut)?;
        let (place, places) = match lines.mesh.tsp {
            1 => (team.group.rank(), team.group.world()),
            _ => (lines.data.place, lines.mesh.dp),
        };
        let pieces = self.pieces(spec, state.step)?;
        let dealt = (place as usize..pieces.len()).step_by(places as usize);
        let dealt: Vec<_> = dealt.map(|index| (index, pieces[index].clone())).collect();
        let mine = match lines.mesh.tsp {
            1 => computed(cx, state, dealt, cx.workers.options().cut(cut).into())?,
            _ => computed_together(cx, state, &lines, dealt)?,
        };
        let losses = told(team, pieces.len(), &mine)?;
        let mut sums: Vec<SourceLoss> = Vec::new();
        for (Piece { source, .. }, Loss { loss, labels }) in pieces.into_iter().zip(losses) {
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

    /// What it is taken over after `step`.
    fn pieces(&self, spec: &RunSpec, step: u64) -> Result<Vec<Piece>> {
        let at = spec.plan.step(step.max(1))?;
        let mut pieces = Vec::new();
        for source in spec.plan.sources() {
            let found = pieces_of(spec, &source.name, at.seq_len, at.micro_batch, self.windows)?;
            let named = |(first, rows)| Piece { source: source.name.clone(), first, rows };
            pieces.extend(found.into_iter().map(named));
        }
        Ok(pieces)
    }
}

/// Windows of a source that are computed at once.
#[derive(Clone)]
struct Piece {
    source: String,
    first: u64,
    rows: u64,
}

/// What they cost.
#[derive(Clone, Copy)]
struct Loss {
    loss: f64,
    labels: u64,
}

/// The losses of numbered pieces, with weights that are whole or that `how` says how to get.
fn computed(
    Context { spec, team, workers }: Context<'_>,
    state: &State,
    pieces: Vec<(usize, Piece)>,
    how: Computing<'_>,
) -> Result<Vec<(usize, Loss)>> {
    let step = state.step;
    let at = spec.plan.step(step.max(1))?;
    let model = FrozenModel::at(spec, at.step, state, workers)?;
    let what = format!("validation after step {step}");
    let waiting = Mutex::new(Waiting::new(what, pieces.len() as u64));
    workers.map(pieces, |(index, Piece { source, first, rows: count }): (usize, Piece)| {
        let place = || format!("validation of {source} after step {step}, window {first}");
        // Held-out text may take longer than a rank is waited for, or watched without a sign of life.
        team.group.reached(&place());
        team.group.check().map_err(lost)?;
        let batch = validation::batch(&spec.data, &source, at.seq_len, first, count)?;
        let input = rows(&batch, 0..batch.rows);
        let compute = |Weights { weights, biases }: Weights<'_>| {
            model::losses(how, model.config(), weights, biases, &input)
        };
        let loss = model.read(compute, place)?;
        // One voice is enough: shares are alike.
        if team.group.rank() == 0 {
            waiting.lock().unwrap_or_else(PoisonError::into_inner).one();
        }
        Ok((index, Loss { loss, labels: batch.label_count }))
    })
}

/// The same, with those who hold weights for this rank, all at once.
fn computed_together(
    cx: Context<'_>,
    state: &State,
    lines: &Lines<'_>,
    pieces: Vec<(usize, Piece)>,
) -> Result<Vec<(usize, Loss)>> {
    let along = [Along::sharing(lines)?, Along::folded(lines)?];
    let [sharing, folded] = along.each_ref().map(|along| along.as_ref().map(Along::begin));
    let (sharing, folded) = (sharing.transpose()?, folded.transpose()?);
    let how = Computing {
        options: cx.workers.options().cut(lines.cut),
        line: sharing.as_ref().map(|line| line as &dyn Line),
        folded: folded.as_ref().map(|line| Folded { fold: &state.fold, line }),
    };
    // What they exchange has one order.
    let found = computed(Context { workers: cx.workers.one(), ..cx }, state, pieces, how)?;
    for line in [sharing, folded].into_iter().flatten() {
        line.finish()?;
    }
    cx.team.group.settled().map_err(lost)?;
    Ok(found)
}

/// The losses of all `pieces`, of which `mine` are this rank's.
fn told(team: &Team<'_>, pieces: usize, mine: &[(usize, Loss)]) -> Result<Vec<Loss>> {
    let mut words = Writer::default();
    words.word(mine.len() as u64);
    for (index, Loss { loss, labels }) in mine {
        words.word(*index as u64).float(*loss).word(*labels);
    }
    let heard = team.tell("the gathering of losses on held-out text", &words)?;
    let mut all = vec![None; pieces];
    for mut heard in heard.readers() {
        for _ in 0..heard.word()? {
            let (index, loss, labels) = (heard.word()?, heard.float()?, heard.word()?);
            let unknown = || Fault::bug("a rank computed held-out text that there is not");
            let place = usize::try_from(index).ok().and_then(|index| all.get_mut(index));
            let before = place.ok_or_else(unknown)?.replace(Loss { loss, labels });
            // Those who hold weights for each other have all computed it.
            if before.is_some_and(|before: Loss| before.loss.to_bits() != loss.to_bits()) {
                let what = "ranks that hold weights for each other found different losses";
                return Err(Fault::mismatch(what).at("validation"));
            }
        }
        heard.end()?;
    }
    let all = all.into_iter().collect::<Option<_>>();
    all.ok_or_else(|| Fault::bug("nobody computed some of the held-out text"))
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
