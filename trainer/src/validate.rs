//! The validation loss: a function of weights, text, `seq_len`, chunks, shards, number format and kernel table only.
//! Each sequence has its own forward pass, so `micro_batch` does not affect the shapes of the computation.
//!
//! The interval and the number of windows are flags, since they do not affect the run; so the results are in
//! `events.jsonl`, not in the ledger. Computed again after a kill, they have the same bits.

use std::sync::{Mutex, PoisonError};

use contract::{Fault, Result};
use loader::validation;
use serde_json::{Value, json};

use crate::mesh::ProcessMesh;
use crate::mesh::context::SharingGroup;
use crate::mesh::team::PhaseMesh;
use crate::mesh::words::WordWriter;
use crate::model::{self, AxisComm, MicroBatchContext, ShardedWeights};
use crate::refusal::lost;
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{FrozenModel, StepContext, Weights, rows};
use crate::waiting::WaitCounter;

/// The interval and size of validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validation {
    /// Steps between two validations; 0 for none.
    pub every: u64,
    /// Windows per source, spread evenly over its held-out text; all windows if there are fewer.
    pub windows: u64,
}

/// The loss of one source.
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
    /// Mean loss per label.
    pub fn mean(&self) -> f64 {
        self.loss / self.labels.max(1) as f64
    }

    /// The total over sources: every label has the same weight.
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
    /// Whether to validate after `step`, if the run's last step is `last`.
    pub(crate) fn is_due(&self, step: u64, last: u64) -> bool {
        self.every > 0 && (step == last || step.is_multiple_of(self.every))
    }

    /// Validates on the ranks of `cx`, which divide the text among them: each computes its share, alone or with the
    /// ranks that shard weights for it, and receives the other losses. The sources are in the order of the plan,
    /// without those that have no held-out text. `None` if a rank was `asked` to stop before the end.
    pub fn take(
        &self,
        cx: StepContext<'_>,
        state: &State,
        asked: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<SourceLoss>>> {
        let StepContext { spec, team, .. } = cx;
        let cut = spec.model_at(state.step.max(1))?.cut;
        let lines = team.lines(cut)?;
        let (place, places) = match lines.mesh.tsp {
            1 => (team.group.rank(), team.group.world()),
            _ => (lines.data.place, lines.mesh.dp),
        };
        let windows = self.windows_of(spec, state.step)?;
        let dealt = (place as usize..windows.len()).step_by(places as usize);
        let mut left = dealt.map(|index| (index, windows[index].clone()));
        let what = format!("validation after step {}", state.step);
        let waiting = Mutex::new(WaitCounter::new(what, left.len() as u64));
        let mut own_losses = Vec::new();
        // In rounds: in between, the ranks exchange whether one of them was asked to stop.
        loop {
            let together = lines.mesh.tsp > 1;
            let round = if together { 1 } else { cx.workers.count() };
            let round: Vec<_> = left.by_ref().take(round).collect();
            own_losses.extend(match (round.is_empty(), together) {
                (true, _) => Vec::new(),
                (_, false) => {
                    computed(cx, state, round, cx.workers.options().cut(cut).into(), &waiting)?
                }
                (_, true) => computed_together(cx, state, &lines, round, &waiting)?,
            });
            match progress(team, asked(), left.len())? {
                Progress::Stopped => return Ok(None),
                Progress::Done => break,
                Progress::Left => {}
            }
        }
        let losses = gather_losses(team, windows.len(), &own_losses)?;
        let mut sums: Vec<SourceLoss> = Vec::new();
        for (Window { source, .. }, Loss { loss, labels }) in windows.into_iter().zip(losses) {
            match sums.last_mut() {
                Some(sum) if sum.source == source => {
                    (sum.loss, sum.labels) = (sum.loss + loss, sum.labels + labels);
                }
                _ => sums.push(SourceLoss { source, loss, labels }),
            }
        }
        sums.retain(|sum| sum.labels > 0);
        Ok(Some(sums))
    }

    /// The windows to validate on after `step`.
    fn windows_of(&self, spec: &RunSpec, step: u64) -> Result<Vec<Window>> {
        let seq_len = spec.plan.step(step.max(1))?.seq_len;
        let mut all = Vec::new();
        for source in spec.plan.sources() {
            let total = validation::windows(&spec.data, &source.name, seq_len)?;
            let spread = spread(total, self.windows);
            all.extend(spread.map(|number| Window { source: source.name.clone(), number }));
        }
        Ok(all)
    }
}

/// The progress of all ranks together.
enum Progress {
    Left,
    Done,
    /// A rank was asked to stop.
    Stopped,
}

/// Exchanges with the other ranks whether they were asked to stop, and how many windows they have left.
fn progress(team: &ProcessMesh<'_>, asked: bool, left: usize) -> Result<Progress> {
    let mut words = WordWriter::default();
    words.word(u64::from(asked)).word(left as u64);
    let gathered = team.all_gather("the progress on held-out text", &words)?;
    let (mut stopped, mut done) = (false, true);
    for mut gathered in gathered.readers() {
        stopped |= gathered.word()? != 0;
        done &= gathered.word()? == 0;
        gathered.end()?;
    }
    Ok(match (done, stopped) {
        (true, _) => Progress::Done,
        (false, true) => Progress::Stopped,
        (false, false) => Progress::Left,
    })
}

/// A sequence of a source's held-out text.
#[derive(Clone)]
struct Window {
    source: String,
    number: u64,
}

/// Its loss.
#[derive(Clone, Copy)]
struct Loss {
    loss: f64,
    labels: u64,
}

/// The losses of numbered windows; `how` gathers weights that are sharded.
fn computed(
    StepContext { spec, team, workers }: StepContext<'_>,
    state: &State,
    windows: Vec<(usize, Window)>,
    how: MicroBatchContext<'_>,
    waiting: &Mutex<WaitCounter>,
) -> Result<Vec<(usize, Loss)>> {
    let step = state.step;
    let at = spec.plan.step(step.max(1))?;
    let model = FrozenModel::at(spec, at.step, state, workers)?;
    workers.map(windows, |(index, Window { source, number }): (usize, Window)| {
        let place = || format!("validation of {source} after step {step}, window {number}");
        // Validation may take longer than the timeouts for other ranks and for progress.
        team.group.reached(&place());
        team.group.check().map_err(lost)?;
        let batch = validation::batch(&spec.data, &source, at.seq_len, number, 1)?;
        let input = rows(&batch, 0..batch.rows);
        let compute = |Weights { weights, biases }: Weights<'_>| {
            model::losses(how, model.config(), weights, biases, &input)
        };
        let loss = model.read(compute, place)?;
        // Only rank 0 prints progress: all shares are about equal.
        if team.group.rank() == 0 {
            waiting.lock().unwrap_or_else(PoisonError::into_inner).one();
        }
        Ok((index, Loss { loss, labels: batch.label_count }))
    })
}

/// The same, together with the ranks that shard weights for this one.
fn computed_together(
    cx: StepContext<'_>,
    state: &State,
    lines: &PhaseMesh<'_>,
    windows: Vec<(usize, Window)>,
    waiting: &Mutex<WaitCounter>,
) -> Result<Vec<(usize, Loss)>> {
    let along = [SharingGroup::sharing(lines)?, SharingGroup::folded(lines)?];
    let [sharing, folded] = along.each_ref().map(|along| along.as_ref().map(SharingGroup::begin));
    let (sharing, folded) = (sharing.transpose()?, folded.transpose()?);
    let how = MicroBatchContext {
        options: cx.workers.options().cut(lines.cut),
        line: sharing.as_ref().map(|line| line as &dyn AxisComm),
        folded: folded.as_ref().map(|line| ShardedWeights { fold: &state.fold, line }),
    };
    // One worker, since the exchanges must have one order.
    let found =
        computed(StepContext { workers: cx.workers.one(), ..cx }, state, windows, how, waiting)?;
    for line in [sharing, folded].into_iter().flatten() {
        line.finish()?;
    }
    cx.team.group.settled().map_err(lost)?;
    Ok(found)
}

/// The losses of all `windows`; `mine` are this rank's.
fn gather_losses(
    team: &ProcessMesh<'_>,
    windows: usize,
    own_losses: &[(usize, Loss)],
) -> Result<Vec<Loss>> {
    let mut words = WordWriter::default();
    words.word(own_losses.len() as u64);
    for (index, Loss { loss, labels }) in own_losses {
        words.word(*index as u64).float(*loss).word(*labels);
    }
    let gathered = team.all_gather("the gathering of losses on held-out text", &words)?;
    let mut all = vec![None; windows];
    for mut gathered in gathered.readers() {
        for _ in 0..gathered.word()? {
            let (index, loss, labels) = (gathered.word()?, gathered.float()?, gathered.word()?);
            let unknown = || Fault::bug("a rank computed held-out text that there is not");
            let place = usize::try_from(index).ok().and_then(|index| all.get_mut(index));
            let before = place.ok_or_else(unknown)?.replace(Loss { loss, labels });
            // Ranks that shard weights for each other have all computed it.
            if before.is_some_and(|before: Loss| before.loss.to_bits() != loss.to_bits()) {
                let what = "ranks that hold weights for each other found different losses";
                return Err(Fault::mismatch(what).at("validation"));
            }
        }
        gathered.end()?;
    }
    let all = all.into_iter().collect::<Option<_>>();
    all.ok_or_else(|| Fault::bug("nobody computed some of the held-out text"))
}

/// At most `wanted` of `total` windows, spread evenly: each is the first of its share of the text.
fn spread(total: u64, wanted: u64) -> impl Iterator<Item = u64> {
    let wanted = wanted.min(total);
    (0..wanted).map(move |index| index + index * (total - wanted) / wanted)
}
