//! The state before a step: loads the nearest checkpoint, then recomputes the steps after it.

use contract::{Fault, Result, words};

use super::{Replayed, Replayer};
use crate::checkpoint::{self, StateLayout};
use crate::ledger::StepRecord;
use crate::mesh::share;
use crate::reaction::ReactingSpec;
use crate::run::restore::RestoreInputs;
use crate::state::State;
use crate::state::ownership::Ownership;
use crate::step::Detail;
use crate::waiting::{WaitCounter, expected};

impl Replayer {
    /// The state after `step`: from the nearest checkpoint, then by recomputing, with each step checked against the
    /// ledger. It is kept for the next question, if requested.
    pub fn state_after(&mut self, step: u64) -> Result<State> {
        let (last, recorded) = (self.spec.plan.steps(), self.recorded);
        if step >= last || step > recorded {
            return Err(Fault::usage(format!("step {} cannot be replayed", step + 1))
                .at(self.folder.ledger().display().to_string())
                .found(format!("a curriculum of {last} steps, {recorded} of them recorded"))
                .wanted(format!("a step from 1 to {}", last.min(recorded + 1))));
        }
        let (state, computed) = self.state_and_way(step)?;
        if computed > 0 && self.kept.writes() {
            let kept = self.timed("keeping", || self.keep(&state));
            if let Err(fault) = kept {
                let why = fault.to_string().replace('\n', "\n  ");
                self.warnings.push(format!("the state after step {step} is not kept: {why}"));
            }
        }
        Ok(state)
    }

    /// The same for any recorded step, including the last one; the state is not kept.
    pub fn state_at(&mut self, step: u64) -> Result<State> {
        let recorded = self.recorded;
        if step > recorded {
            return Err(Fault::usage(format!("there is no state after step {step}"))
                .at(self.folder.ledger().display().to_string())
                .wanted(format!("a step from 0 to {recorded}")));
        }
        self.state_and_way(step).map(|(state, _)| state)
    }

    /// The state after `step`, and how many steps were recomputed for it.
    fn state_and_way(&mut self, step: u64) -> Result<(State, u64)> {
        let (mut state, passed) = self.timed("load", || self.nearest(step))?;
        self.warnings.extend(passed);
        let from = state.step;
        self.timed("way", || self.walk(&mut state, step))?;
        Ok((state, step - from))
    }

    /// Computes the steps after `state` up to `step`: as the run did, or as `change` says. Calls `each` with the record
    /// of each step, and ends where that returns false. Returns the fault of the step that diverged, if one did.
    pub fn advance_to(
        &self,
        state: &mut State,
        step: u64,
        mut change: Option<&mut ReactingSpec>,
        mut each: impl FnMut(StepRecord) -> Result<bool>,
    ) -> Result<Option<Fault>> {
        while state.step < step {
            let spec = change.as_ref().map_or(&self.spec, |change| change.spec());
            let batch = self.part(spec, state.step + 1)?;
            let record = match self.compute(spec, state, &batch, Detail::Sums)?.1 {
                Ok(record) => record,
                Err(diverged) => return Ok(Some(diverged)),
            };
            change.iter_mut().try_for_each(|change| change.learn(&record))?;
            if !each(record)? {
                break;
            }
        }
        Ok(None)
    }

    /// Recomputes the steps after `state` up to `step`; each must match the ledger.
    pub fn walk(&self, state: &mut State, step: u64) -> Result<()> {
        let speaks = self.world.comm.rank() == 0;
        if speaks {
            self.note_way(state.step, step);
        }
        let what = format!("computing the state after step {step}");
        let mut waiting = speaks.then(|| WaitCounter::new(what, step - state.step));
        let mut odd = None;
        let diverged = self.advance_to(state, step, None, |record| {
            waiting.iter_mut().for_each(WaitCounter::one);
            let difference = self.difference(record.step, Some(&record))?;
            odd = difference.map(|difference| (record.step, Some(record), difference));
            Ok(odd.is_none())
        })?;
        if diverged.is_some() {
            let at = state.step + 1;
            odd = self.difference(at, None)?.map(|difference| (at, None, difference));
        }
        let Some((at, record, difference)) = odd else { return Ok(()) };
        // The state before it is recomputed: copying each state on the way for this rare case would cost more.
        let (before, batch) = (self.anew(at - 1)?, self.part(&self.spec, at)?);
        let verdict = self.again(before.as_ref(), &batch, record.as_ref(), &difference)?;
        Err(self.on_the_way(&self.found(at, verdict, Some(difference))))
    }

    /// Recomputes the state after `step`, which was reproduced the first time; `None` if it is not now.
    fn anew(&self, step: u64) -> Result<Option<State>> {
        let (mut state, _) = self.nearest(step)?;
        let diverged = self.advance_to(&mut state, step, None, |record| {
            Ok(self.difference(record.step, Some(&record))?.is_none())
        })?;
        Ok((diverged.is_none() && state.step == step).then_some(state))
    }

    /// The newest state up to `step` among the run's checkpoints and the states kept by replays; also what was skipped.
    fn nearest(&self, step: u64) -> Result<(State, Vec<String>)> {
        let (comm, device) = (&self.world.comm, self.world.device);
        let layout = StateLayout::new(&self.spec, device);
        let owners = Ownership::new(&self.spec, comm.rank(), comm.world());
        let team = self.team()?;
        let reading =
            RestoreInputs { team: &team, layout: &layout, owners: &owners, workers: self.workers };
        let mut passed = Vec::new();
        let found = if comm.rank() == 0 {
            let places = [&self.folder.checkpoints()?, self.kept.checkpoints()];
            let chain = |step| self.ledger.chain_at(step);
            let found = reading.lead(&places, step, chain, |reader| self.fits(reader))?;
            passed.extend(
                found
                    .passed
                    .into_iter()
                    .map(|(step, fault)| format!("passed over: checkpoint step-{step}: {fault}")),
            );
            found.state
        } else {
            reading.follow()?.0
        };
        let state = match found {
            Some((state, _)) => state,
            None => {
                let state = State::begin(&self.spec, device, owners, self.workers)?;
                share::weights(&team, &state)?;
                state
            }
        };
        Ok((state, passed))
    }

    /// Refuses a checkpoint whose state does not match the ledger.
    fn fits(&self, reader: &checkpoint::CheckpointReader<'_>) -> Result<()> {
        let (at, found) = (reader.manifest().step, reader.manifest().state);
        let written = self.ledger.record(at)?.state_digest;
        if found == written {
            return Ok(());
        }
        Err(Fault::data("the initial weights are not those that the ledger says")
            .at(reader.location().to_string())
            .found(found)
            .wanted(written))
    }

    /// Keeps a state that matches the ledger.
    fn keep(&self, state: &State) -> Result<()> {
        let layout = StateLayout::new(&self.spec, self.world.device);
        let chain = self.ledger.chain_at(state.step);
        let chain = chain.ok_or_else(|| Fault::bug("a state without a step is to be kept"))?;
        let digests = (self.ledger.record(state.step)?.state_digest, chain);
        self.kept.put(&self.world.comm, &layout, state, digests)
    }

    /// Prints where the recomputation for the state after `step` starts, if it takes a while at the run's speed.
    fn note_way(&self, from: u64, step: u64) {
        let Some(time) = expected(&self.folder.events(), step - from) else { return };
        let begins = match from {
            0 => "the beginning".to_owned(),
            from => format!("checkpoint step-{from}"),
        };
        contract::note!(
            "{} again from {begins}: about {time} at the pace of the run",
            words::steps(from + 1, step)
        );
    }

    /// The error for a step on the way that does not match the ledger.
    fn on_the_way(&self, next: &Replayed) -> Fault {
        let quantity = next.difference.as_ref().map_or("outcome", |found| &found.quantity);
        let fault = Fault::mismatch(format!(
            "step {} on the way came out with {}: its {quantity} differs from the ledger",
            next.step,
            next.verdict.words()
        ))
        .hint(&next.advice);
        let fault = fault.at(self.folder.ledger().display().to_string());
        match &next.difference {
            Some(found) => fault.found(&found.right).wanted(&found.left),
            _ => fault,
        }
    }
}
