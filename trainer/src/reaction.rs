//! The specification of a run whose mix reacts to the loss, as far as losses have fixed its data.
//!
//! Structure (steps, batches, models) is in the specification from the start; only which text a step reads waits for
//! losses. So a step is computed by the specification of its time, and all else by the first.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use contract::{Fault, Result};
use kernels::group::Group;
use loader::recorded::RecordedLosses;
use loader::{GrowingPlan, PlanFeed};
use mixer::{SourceLossSum, WindowLosses};

use crate::ledger::StepRecord;
use crate::mesh::words::{WordReader, WordWriter};
use crate::refusal::lost;
use crate::spec::RunSpec;

/// A specification that losses extend.
pub struct ReactingSpec {
    spec: Arc<RunSpec>,
    /// The losses so far; `None` if no mix reacts.
    losses: Option<WindowLosses>,
    growing: Option<Arc<GrowingPlan>>,
}

impl ReactingSpec {
    /// The specification after the steps up to `through` of this ledger.
    pub(crate) fn recorded(spec: Arc<RunSpec>, ledger: &Path, through: u64) -> Result<Self> {
        let losses = match spec.plan.reacts() {
            true => Some(read(&spec, ledger, through)?),
            false => None,
        };
        ReactingSpec::new(spec, losses)
    }

    /// The same on every rank of `comm`: rank 0 reads its ledger, and sends the losses to the others.
    pub(crate) fn together(
        spec: Arc<RunSpec>,
        ledger: &Path,
        through: u64,
        comm: &Group,
    ) -> Result<Self> {
        if !spec.plan.reacts() || comm.world() == 1 {
            return ReactingSpec::recorded(spec, ledger, through);
        }
        // The others hear why rank 0 refuses its ledger: they would take it for lost.
        let own = (comm.rank() == 0).then(|| read(&spec, ledger, through)).transpose();
        let refusal = own.as_ref().err().map(Fault::to_string).unwrap_or_default();
        let refusals = comm.all_gather("the reading of losses", refusal.as_bytes());
        let refusals = refusals.map_err(lost)?;
        let own = own?;
        if !refusals[0].is_empty() {
            let why = String::from_utf8_lossy(&refusals[0]).into_owned();
            return Err(Fault::mismatch("rank 0 refuses the losses of its ledger").found(why));
        }
        let words = own.as_ref().map(write).unwrap_or_default();
        let gathered = comm.all_gather("the losses of windows", words.bytes()).map_err(lost)?;
        let losses = match own {
            Some(losses) => losses,
            None => received(&spec.plan.losses(), &gathered[0])?,
        };
        ReactingSpec::new(spec, Some(losses))
    }

    fn new(spec: Arc<RunSpec>, losses: Option<WindowLosses>) -> Result<Self> {
        let mut reacting = ReactingSpec { spec, losses, growing: None };
        reacting.extend()?;
        Ok(reacting)
    }

    fn extend(&mut self) -> Result<()> {
        let Some(losses) = &self.losses else { return Ok(()) };
        let plan = Arc::new(self.spec.plan.extended(losses)?);
        self.spec = Arc::new(RunSpec { plan: Arc::clone(&plan), ..RunSpec::clone(&self.spec) });
        self.growing.iter().for_each(|growing| growing.grow(Arc::clone(&plan)));
        Ok(())
    }

    /// The specification with the data that is fixed so far.
    pub(crate) fn spec(&self) -> &RunSpec {
        &self.spec
    }

    /// The plan for readers, which wait for what is not fixed.
    pub(crate) fn feed(&mut self) -> PlanFeed {
        let plan = Arc::clone(&self.spec.plan);
        match self.losses {
            None => plan.into(),
            Some(_) => PlanFeed::Growing(Arc::clone(self.growing.insert(GrowingPlan::new(plan)))),
        }
    }

    /// Takes the losses of the next step.
    pub(crate) fn learn(&mut self, record: &StepRecord) -> Result<()> {
        let Some(losses) = &mut self.losses else { return Ok(()) };
        if record.step != losses.through() + 1 {
            let (step, last) = (record.step, losses.through());
            return Err(Fault::bug(format!(
                "the losses of step {step} follow those of step {last}"
            )));
        }
        let sums = record.sources.iter();
        match losses.add(sums.map(|(name, sums)| (name.as_str(), sums.labels, sums.loss.float()))) {
            true => self.extend(),
            false => Ok(()),
        }
    }
}

/// The losses of a ledger, whose weights must follow from them.
fn read(spec: &RunSpec, ledger: &Path, through: u64) -> Result<WindowLosses> {
    if through == 0 {
        return Ok(spec.plan.losses());
    }
    let recorded = RecordedLosses::read(&spec.plan, ledger, through)?;
    recorded.extend(&spec.plan)?;
    Ok(recorded.losses)
}

fn write(losses: &WindowLosses) -> WordWriter {
    let mut words = WordWriter::default();
    words.word(losses.through()).word(losses.windows().len() as u64);
    for (first, sources) in losses.windows() {
        words.word(*first).word(sources.len() as u64);
        for (name, SourceLossSum { labels, loss }) in sources {
            words.text(name).word(*labels).word(*loss as u64).word((*loss >> 64) as u64);
        }
    }
    words
}

fn received(losses: &WindowLosses, words: &[u8]) -> Result<WindowLosses> {
    let mut words = WordReader::new(words);
    let (through, count) = (words.word()?, words.word()?);
    let mut windows = BTreeMap::new();
    for _ in 0..count {
        let (first, count) = (words.word()?, words.word()?);
        let mut sources = BTreeMap::new();
        for _ in 0..count {
            let (name, labels) = (words.text()?, words.word()?);
            let (low, high) = (words.word()?, words.word()?);
            let loss = (u128::from(low) | u128::from(high) << 64) as i128;
            sources.insert(name, SourceLossSum { labels, loss });
        }
        windows.insert(first, sources);
    }
    words.end()?;
    Ok(losses.restored(through, windows))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn losses_arrive_as_they_were(
            through: u64,
            windows in prop::collection::btree_map(
                any::<u64>(), prop::collection::btree_map("[a-z/]{1,9}", (any::<u64>(), any::<i128>()), 0..4), 0..4,
            ),
        ) {
            let sums = |(name, (labels, loss))| (name, SourceLossSum { labels, loss });
            let windows = windows.into_iter().map(|(at, all)| (at, all.into_iter().map(sums).collect()));
            let losses = WindowLosses::default().restored(through, windows.collect());
            prop_assert_eq!(received(&WindowLosses::default(), write(&losses).bytes()).unwrap(), losses);
        }
    }
}
