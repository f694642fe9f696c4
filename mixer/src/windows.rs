//! Plans a mix that reacts to the loss: window after window as far as their losses are known, and the rest as a
//! projection.
//!
//! A window is constant weights over whole steps, so each query has the closed form that it has elsewhere. While the
//! weights stay the same, windows are one segment of the plan. A source whose text runs out has at most the
//! weight that its rest allows, and then none; the others share what it leaves. That follows from the plan itself, at
//! the first step of the window and for a whole window, even if the phase ends within it: a longer phase changes no
//! step.

use contract::{Fault, Ratio, Result};
use curriculum::{Curriculum, MIX_PARTS, Mix, Phase, PhaseSegment, Reaction, apportion};

use crate::limits;
use crate::order::Cursor;
use crate::packing::Order;
use crate::plan::{DataPlan, PhasePlan};
use crate::reaction::{MixWindow, ReactingSteps, WindowLosses, WindowWeights};

/// How far two prefixes of a window's mix deviate from its weights together.
const DEVIATION: u64 = 4;

impl DataPlan {
    /// The last step whose data is fixed. Later data follows from losses that are not known: what the plan says about
    /// it is a projection with the last weights.
    pub fn fixed_until(&self) -> u64 {
        self.fixed_until
    }

    /// Whether planning has passed what is fixed.
    fn is_projection(&self) -> bool {
        self.fixed_until < u64::MAX
    }

    /// Whether some step is in a mix that reacts to the loss.
    pub fn reacts(&self) -> bool {
        !self.reacting.is_empty()
    }

    /// The windows whose weights are known, in order.
    pub fn windows(&self) -> &[MixWindow] {
        &self.windows
    }

    /// The window that begins at `step`, if one does.
    pub fn window_at(&self, step: u64) -> Option<&MixWindow> {
        let at = self.windows.binary_search_by_key(&step, |window| window.first_step);
        at.ok().map(|at| &self.windows[at])
    }

    /// No losses yet; [`DataPlan::extended`] takes them once there are some.
    pub fn losses(&self) -> WindowLosses {
        WindowLosses::new(&self.reacting)
    }

    /// The same plan with the windows that follow from `losses`. Where a source then runs out, nothing later is fixed,
    /// and [`DataPlan::check_fixed`] says why: the steps before stay readable.
    pub fn extended(&self, losses: &WindowLosses) -> Result<DataPlan> {
        let mut plan = self.clone();
        if let Some(curriculum) = self.curriculum.clone() {
            plan.plan_phases(&curriculum, losses)?;
            if let Some((step, fault)) = limits::first_short(&plan, &curriculum) {
                plan.fixed_until = plan.fixed_until.min(step - 1);
                plan.exhausted = Some(fault.hint(EXHAUSTED));
            }
        }
        Ok(plan)
    }

    /// Whether losses can fix later steps.
    pub fn can_grow(&self) -> bool {
        self.exhausted.is_none() && self.fixed_until < self.steps()
    }

    /// By source of the mix that reacts at `mix_key`: the greatest weight (in parts of [`MIX_PARTS`]), in its steps
    /// that are not fixed, with which enough text is left for later phases; `None` if each weight leaves enough. Packed
    /// sources are not looked at.
    pub fn weights_for_later(&self, mix_key: &str) -> Vec<Option<u64>> {
        let Some(curriculum) = self.curriculum.as_deref() else { return Vec::new() };
        let segments = curriculum.segments();
        let of_mix = segments.iter().find(|segment| segment.mix_key == mix_key);
        let Some(reaction) = of_mix.and_then(|segment| segment.spec.mix.reaction()) else {
            return Vec::new();
        };
        let last = self.phases.iter().rfind(|phase| phase.mix_key == mix_key);
        let end = last.map_or(0, PhasePlan::last_step);
        let fixed = self.fixed_until.min(end);
        let open = u128::from(self.tokens_until(end) - self.tokens_until(fixed));
        let most = |(name, share): (&str, Ratio)| {
            let source = self.sources.iter().position(|facts| facts.name == name)?;
            if share.is_zero() || self.packs(source).is_some() {
                return None;
            }
            let whole =
                u128::from(curriculum.max_epochs(name)) * u128::from(self.sources[source].tokens);
            let later = self.phases.iter().filter(|phase| phase.first_step > end);
            let later = later.flat_map(|phase| &phase.uses).filter(|part| part.source == source);
            let later: u64 = later.map(|part| part.tokens).sum();
            if later == 0 {
                return None;
            }
            let taken = self.standing(source, fixed + 1).tokens;
            let left = whole.saturating_sub(u128::from(taken) + u128::from(later));
            let parts = left.saturating_mul(u128::from(MIX_PARTS) * u128::from(share.den()));
            u64::try_from(parts / (open * u128::from(share.num())).max(1)).ok()
        };
        let bounds = reaction.members().map(|members| members.into_iter().filter_map(most).min());
        bounds.map(|bound| bound.filter(|bound| *bound < MIX_PARTS)).collect()
    }

    /// Samples of the steps whose data is fixed.
    pub(crate) fn fixed_samples(&self) -> u64 {
        match self.step(self.fixed_until + 1) {
            Ok(step) => step.first_sample,
            Err(_) => self.samples(),
        }
    }

    /// Refuses a plan in which a source runs out, by the losses so far.
    pub fn check_lasting(&self) -> Result<()> {
        self.exhausted.clone().map_or(Ok(()), Err)
    }

    /// Refuses a query of data that is not fixed.
    pub fn check_fixed(&self, step: u64) -> Result<()> {
        if step <= self.fixed_until {
            return Ok(());
        }
        if let Some(fault) = &self.exhausted {
            return Err(fault.clone());
        }
        let mut mixes = self.reacting.iter().rev();
        let window =
            mixes.find(|steps| steps.first <= self.fixed_until).map_or(1, |steps| steps.window);
        Err(Fault::usage(format!(
            "the data of step {step} is not fixed: the mix reacts to the loss"
        ))
        .found(format!("weights up to step {}", self.fixed_until))
        .wanted(format!(
            "the losses of the steps up to {}, from the ledger of a run",
            self.fixed_until.saturating_sub(window)
        ))
        .hint("name a run that has trained so far: --run RUN, in Python Plan(..., run=RUN)"))
    }
}

/// What helps where a source runs out.
const EXHAUSTED: &str = "give the phase fewer steps, or amend its mix; before the run begins, raise max_epochs of some \
                         source under [source.NAME]";

/// Plans the segments of mixes that react, in the order of the run.
pub(crate) struct WindowPlanner<'a> {
    pub(crate) curriculum: &'a Curriculum,
    pub(crate) segments: &'a [PhaseSegment],
    pub(crate) losses: &'a WindowLosses,
    /// The windows of the mix that is planned.
    pub(crate) weights: Option<WindowWeights>,
}

impl WindowPlanner<'_> {
    /// Plans a segment, and advances the cursors of its sources.
    pub(crate) fn plan(
        &mut self,
        plan: &mut DataPlan,
        segment: &PhaseSegment,
        reaction: &Reaction,
        cursors: &mut [Cursor],
    ) -> Result<()> {
        let mut weights = match self.weights.take().filter(|_| segment.mix_before > 0) {
            Some(weights) => weights,
            None => self.begin(plan, segment, reaction, cursors)?,
        };
        let mut left = segment.spec.steps;
        while left > 0 {
            let into = (plan.steps() + 1 - weights.first) % reaction.window;
            if into == 0 && !plan.is_projection() {
                self.begin_window(plan, segment, &mut weights, cursors)?;
            }
            let steps = match plan.is_projection() {
                true => left,
                false => left.min(reaction.window - into),
            };
            let mix = Mix::Constant(weights.reaction.weights(&weights.parts)?);
            let spec = Phase { steps, mix, ..segment.spec.clone() };
            let mut piece = PhaseSegment { spec, mix_before: weights.unchanged, ..segment.clone() };
            let same = |last: &mut PhasePlan| {
                weights.unchanged > 0
                    && last.mix_key == segment.mix_key
                    && last.batch == segment.batch
            };
            if let Some(last) = plan.phases.pop_if(same) {
                piece.spec.steps += last.steps;
                piece.mix_before -= last.samples();
                for part in last.uses {
                    cursors[part.source] = part.segment.start().clone();
                }
            }
            let planned = plan.segment_plan(self.curriculum, &piece, cursors)?;
            plan.phases.push(planned);
            weights.unchanged += steps * segment.batch;
            left -= steps;
        }
        self.weights = Some(weights);
        Ok(())
    }

    /// Begins a mix; refuses one whose sources have less text than it takes, whatever its weights become.
    fn begin(
        &self,
        plan: &mut DataPlan,
        segment: &PhaseSegment,
        reaction: &Reaction,
        cursors: &[Cursor],
    ) -> Result<WindowWeights> {
        let of_mix = self.segments.iter().filter(|one| one.mix_key == segment.mix_key);
        let (steps, samples) = of_mix.fold((0, 0), |(steps, samples), one| {
            (steps + one.spec.steps, samples + one.spec.steps * one.batch)
        });
        let first = plan.steps() + 1;
        let span = ReactingSteps { first, end: first + steps, window: reaction.window };
        if !plan.is_projection() {
            let left = self.samples_left(plan, segment, reaction, cursors)?;
            let left: u64 = left.into_iter().flatten().fold(0, u64::saturating_add);
            if left < samples {
                let what = "the sources of a mix that reacts run out, whatever its weights become";
                return Err(self.exhausted(segment, what).found(format!(
                    "{left} sequences of text for {samples} of steps {first} to {}",
                    span.end - 1
                )));
            }
        }
        plan.reacting.push(span);
        Ok(WindowWeights::new(reaction, first))
    }

    /// Settles the weights of the window that begins with the next step, or ends what is fixed.
    fn begin_window(
        &self,
        plan: &mut DataPlan,
        segment: &PhaseSegment,
        weights: &mut WindowWeights,
        cursors: &[Cursor],
    ) -> Result<()> {
        let (at, steps) = (plan.steps() + 1, weights.reaction.window);
        let Some(masses) = weights.masses((at - weights.first) / steps, self.losses) else {
            plan.fixed_until = at - 1;
            return Ok(());
        };
        let of_phase = plan.phases.iter().find(|phase| phase.phase == segment.phase);
        let before = of_phase.map_or(0, |phase| at - phase.first_step);
        let samples = |steps: u64| segment.spec.batch.samples(steps).unwrap_or(u64::MAX);
        let left = self.samples_left(plan, segment, &weights.reaction, cursors)?;
        let floors = weights.reaction.floor_parts();
        let samples = samples(before.saturating_add(steps)) - samples(before);
        let members = weights.reaction.members().zip(&left).zip(&floors);
        let bounds = members.map(|((members, left), floor)| {
            let most = members.iter().zip(left).filter(|((_, share), _)| !share.is_zero());
            let most = most.map(|((_, share), left)| most_parts(*left, *share, samples));
            let most = most.min().unwrap_or_default();
            [(*floor).min(most), most]
        });
        let bounds: Vec<[u64; 2]> = bounds.collect();
        let span = plan.reacting[plan.reacting.len() - 1];
        let Some(parts) = apportion(&masses, &bounds, MIX_PARTS) else {
            let what =
                format!("the sources of a mix that reacts run out in the window of step {at}");
            plan.fixed_until = at - 1;
            plan.exhausted = Some(self.exhausted(segment, &what));
            return Ok(());
        };
        if parts != weights.parts {
            (weights.parts, weights.unchanged) = (parts, 0);
        }
        let names = weights.reaction.start.keys().cloned();
        plan.windows.push(MixWindow {
            first_step: at,
            last_step: (at + steps).min(span.end) - 1,
            mix_key: segment.mix_key.clone(),
            weights: names.zip(weights.parts.iter().copied()).collect(),
        });
        Ok(())
    }

    /// By source of the mix, the samples of each of its members until their text runs out.
    fn samples_left(
        &self,
        plan: &mut DataPlan,
        segment: &PhaseSegment,
        reaction: &Reaction,
        cursors: &[Cursor],
    ) -> Result<Vec<Vec<u64>>> {
        let PhaseSegment { spec, mix_key, .. } = segment;
        let members = reaction.members().map(|members| {
            let left = members.into_iter().map(|(name, share)| {
                if share.is_zero() {
                    return Ok(0);
                }
                let source = plan.source_of(self.curriculum, spec, mix_key, name)?;
                let (facts, packs) = (&plan.sources[source], plan.packs.get(name));
                let order = plan.orders[source]
                    .get_or_insert_with(|| Order::new(self.curriculum.seed, facts, packs));
                let text = order.segment(cursors[source].clone(), spec)?;
                Ok(text.samples_within(self.curriculum.max_epochs(name)))
            });
            left.collect()
        });
        members.collect()
    }

    fn exhausted(&self, segment: &PhaseSegment, what: &str) -> Fault {
        Fault::usage(what).at(self.curriculum.place(&segment.mix_key)).hint(EXHAUSTED)
    }
}

/// The largest weight with which a member of a source has text for a window of `samples` samples; `share` is its share
/// of the source's samples.
fn most_parts(left: u64, share: Ratio, samples: u64) -> u64 {
    let left = u128::from(left.saturating_sub(DEVIATION));
    let taken = u128::from(samples) * u128::from(share.num());
    // A source deals its samples in at most 2^30 parts: 128 bits are enough.
    let parts = left * u128::from(share.den()) * u128::from(MIX_PARTS) / taken.max(1);
    u64::try_from(parts).map_or(MIX_PARTS, |parts| parts.min(MIX_PARTS))
}
