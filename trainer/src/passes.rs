//! Forward passes over sequences that the ranks divide among them: for validation and evaluation.
//!
//! Each sequence has its own pass, so neither `micro_batch` nor the number of ranks affects the shapes of the
//! computation.

use std::sync::{Mutex, PoisonError};

use contract::{Fault, Result};

use crate::mesh::ProcessMesh;
use crate::mesh::context::SharingGroup;
use crate::mesh::team::PhaseMesh;
use crate::mesh::words::WordWriter;
use crate::model::{AxisComm, MicroBatchContext, ShardedWeights};
use crate::refusal::lost;
use crate::state::State;
use crate::step::{FrozenModel, StepContext};
use crate::waiting::WaitCounter;

/// The result of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PassResult {
    /// Sum of token losses, in nats.
    pub(crate) loss: f64,
    /// What else was counted.
    pub(crate) count: u64,
}

/// Sequences, and what is computed of each.
pub(crate) trait Passes: Sync {
    /// A name for all of them, such as "validation after step 4".
    fn title(&self) -> String;

    /// The number of sequences.
    fn count(&self) -> usize;

    /// A name for a sequence in a fault.
    fn place(&self, index: usize) -> String;

    /// Computes a sequence; `how` gathers weights that are sharded.
    fn compute(
        &self,
        index: usize,
        model: &FrozenModel<'_>,
        how: MicroBatchContext<'_>,
    ) -> Result<PassResult>;
}

/// Computes `passes` with the weights of `state` on the ranks of `cx`: each computes its share, alone or with the ranks
/// that shard weights for it, and receives the other results. `None` if a rank was `asked` to stop before the end.
pub(crate) fn divided(
    cx: StepContext<'_>,
    state: &State,
    passes: &dyn Passes,
    asked: &dyn Fn() -> bool,
) -> Result<Option<Vec<PassResult>>> {
    let StepContext { spec, team, workers } = cx;
    let step = state.step.max(1);
    let cut = spec.model_at(step)?.cut;
    let lines = team.lines(cut)?;
    let together = lines.mesh.tsp > 1;
    let (place, places) = match together {
        false => (team.group.rank(), team.group.world()),
        true => (lines.data.place, lines.mesh.dp),
    };
    let mut left = (place as usize..passes.count()).step_by(places as usize);
    let waiting = Mutex::new(WaitCounter::new(passes.title(), left.len() as u64));
    let model = FrozenModel::at(spec, step, state, workers)?;
    let share = Share { cx, passes, model: &model, waiting: &waiting };
    let mut own_results = Vec::new();
    // In rounds: in between, the ranks exchange whether one of them was asked to stop.
    loop {
        let round: Vec<usize> =
            left.by_ref().take(if together { 1 } else { workers.count() }).collect();
        own_results.extend(match (round.is_empty(), together) {
            (true, _) => Vec::new(),
            (_, false) => share.alone(round, workers.options().cut(cut).into())?,
            (_, true) => share.together(round, state, &lines)?,
        });
        match progress(team, asked(), left.len())? {
            Progress::Stopped => return Ok(None),
            Progress::Done => break,
            Progress::Left => {}
        }
    }
    gather(team, passes, &own_results).map(Some)
}

/// A rank's share of the passes.
struct Share<'a> {
    cx: StepContext<'a>,
    passes: &'a dyn Passes,
    model: &'a FrozenModel<'a>,
    waiting: &'a Mutex<WaitCounter>,
}

impl Share<'_> {
    /// Results of numbered sequences.
    fn alone(
        &self,
        round: Vec<usize>,
        how: MicroBatchContext<'_>,
    ) -> Result<Vec<(usize, PassResult)>> {
        let StepContext { team, workers, .. } = self.cx;
        // The exchanges with ranks that hold weights must have one order.
        let workers = if how.folded.is_some() { workers.one() } else { workers };
        workers.map(round, |index| {
            // The passes may take longer than the timeouts for other ranks and for progress.
            team.group.reached(&self.passes.place(index));
            team.group.check().map_err(lost)?;
            let result = self.passes.compute(index, self.model, how)?;
            // Only rank 0 prints progress: all shares are about equal.
            if team.group.rank() == 0 {
                self.waiting.lock().unwrap_or_else(PoisonError::into_inner).one();
            }
            Ok((index, result))
        })
    }

    /// The same, together with the ranks that shard weights for this one.
    fn together(
        &self,
        round: Vec<usize>,
        state: &State,
        lines: &PhaseMesh<'_>,
    ) -> Result<Vec<(usize, PassResult)>> {
        let along = [SharingGroup::sharing(lines)?, SharingGroup::folded(lines)?];
        let [sharing, folded] =
            along.each_ref().map(|along| along.as_ref().map(SharingGroup::begin));
        let (sharing, folded) = (sharing.transpose()?, folded.transpose()?);
        let how = MicroBatchContext {
            line: sharing.as_ref().map(|line| line as &dyn AxisComm),
            folded: folded.as_ref().map(|line| ShardedWeights { fold: &state.fold, line }),
            ..self.cx.workers.options().cut(lines.cut).into()
        };
        let results = self.alone(round, how)?;
        for line in [sharing, folded].into_iter().flatten() {
            line.finish()?;
        }
        self.cx.team.group.settled().map_err(lost)?;
        Ok(results)
    }
}

/// The progress of all ranks together.
enum Progress {
    Left,
    Done,
    /// A rank was asked to stop.
    Stopped,
}

/// Exchanges with the other ranks whether they were asked to stop, and how many sequences they have left.
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

/// The results of all passes.
fn gather(
    team: &ProcessMesh<'_>,
    passes: &dyn Passes,
    own_results: &[(usize, PassResult)],
) -> Result<Vec<PassResult>> {
    let mut words = WordWriter::default();
    words.word(own_results.len() as u64);
    for (index, PassResult { loss, count }) in own_results {
        words.word(*index as u64).float(*loss).word(*count);
    }
    let gathered = team.all_gather("the gathering of losses on held-out text", &words)?;
    let mut all = vec![None; passes.count()];
    for mut gathered in gathered.readers() {
        for _ in 0..gathered.word()? {
            let (index, loss, count) = (gathered.word()?, gathered.float()?, gathered.word()?);
            let unknown = || Fault::bug("a rank computed a sequence that there is not");
            let place = usize::try_from(index).ok().and_then(|index| all.get_mut(index));
            let before = place.ok_or_else(unknown)?.replace(PassResult { loss, count });
            // Ranks that shard weights for each other have all computed it.
            if before.is_some_and(|before: PassResult| before.loss.to_bits() != loss.to_bits()) {
                let what = "ranks that hold weights for each other found different losses";
                return Err(Fault::mismatch(what).at(passes.title()));
            }
        }
        gathered.end()?;
    }
    let all = all.into_iter().collect::<Option<_>>();
    all.ok_or_else(|| Fault::bug("a sequence was left out by every rank"))
}
