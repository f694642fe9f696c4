//! The plan: step -> samples -> phase -> source and ordinal -> text, every arrow with its inverse.
//!
//! A plan stores one [`PhasePlan`] per phase and one [`SourceUse`] per source of a phase: the source's position before,
//! its samples, its position after. Everything else is computed on demand.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::{Fault, Result};

use crate::bans::Bans;
use crate::composition::Composition;
use crate::mixing::Mixing;
use crate::objective::Objective;
use crate::order::Cursor;
use crate::packing::{Order, Segment};
use crate::packs::PackTable;
use crate::reaction::{MixWindow, ReactingSteps};
use crate::sample::{SampleSpec, SourceFacts, StepSpec};
use curriculum::{Curriculum, RemainderRule};

/// The packs of sources, by their names.
pub type PackTables = BTreeMap<String, Arc<dyn PackTable>>;

/// What a run reads, in closed form.
#[derive(Clone, Debug)]
pub struct DataPlan {
    pub(crate) seed: u64,
    pub(crate) phases: Vec<PhasePlan>,
    pub(crate) sources: Vec<SourceFacts>,
    /// One order for each source that some phase uses.
    pub(crate) orders: Vec<Option<Order>>,
    /// By name: the packs of the sources with packed documents.
    pub(crate) packs: PackTables,
    /// For each source: what it asks the model to predict, unless that is each next token.
    pub(crate) objectives: Vec<Option<Arc<Objective>>>,
    pub(crate) bans: Bans,
    /// Of a plan with mixes that react: what it is planned from, buckets in place of sources.
    pub(crate) curriculum: Option<Arc<Curriculum>>,
    /// The steps of those mixes.
    pub(crate) reacting: Vec<ReactingSteps>,
    /// Their windows whose weights are known.
    pub(crate) windows: Vec<MixWindow>,
    pub(crate) fixed_until: u64,
    /// Why the steps after these have no data, if a source has too little text for what losses made of a mix.
    pub(crate) exhausted: Option<Fault>,
}

/// One segment of the run, resolved: a phase, or the part of one between amendments of its mix, changes of its batch
/// and new weights of a mix that reacts.
#[derive(Clone, Debug)]
pub struct PhasePlan {
    /// The phase's name.
    pub name: String,
    /// Index of the phase in the curriculum.
    pub phase: usize,
    /// Its first step.
    pub first_step: u64,
    /// Its steps.
    pub steps: u64,
    /// Its first global sample number.
    pub first_sample: u64,
    /// Sequences in a step.
    pub batch: u64,
    /// Sequences in a micro-batch.
    pub micro_batch: u64,
    /// Parts into which each sequence is cut inside a micro-batch.
    pub context_chunks: u64,
    /// Parts into which the model's widths are cut inside a micro-batch.
    pub weight_shards: u64,
    /// Tokens in a sequence.
    pub seq_len: u32,
    /// How groups opened at another length are served.
    pub remainder: RemainderRule,
    /// The use of each source of the mix, in the order of the sources' names.
    pub uses: Vec<SourceUse>,
    /// Which source each sample comes from; indexes `uses`.
    pub mixing: Mixing,
    /// The key of its mix, for errors.
    pub mix_key: String,
}

/// How a phase uses a source.
#[derive(Clone, Debug)]
pub struct SourceUse {
    /// Index into [`DataPlan::sources`].
    pub source: usize,
    /// Its samples.
    pub samples: u64,
    /// Its tokens, without padding.
    pub tokens: u64,
    /// Tokens that the run has read from it before the phase, repeats included.
    pub tokens_before: u64,
    /// Its position when the phase ends.
    pub after: Cursor,
    pub(crate) segment: Segment,
}

/// A source's state before a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceState {
    /// The position in its order.
    pub cursor: Cursor,
    /// Tokens that the run has read from it, repeats included.
    pub tokens: u64,
}

impl DataPlan {
    /// The phases in order, split into segments where their mix is amended, their batch changes or a mix that reacts
    /// has new weights.
    pub fn phases(&self) -> &[PhasePlan] {
        &self.phases
    }

    /// The sources, in the order given, unused ones included.
    pub fn sources(&self) -> &[SourceFacts] {
        &self.sources
    }

    /// The packs of a source (index into [`DataPlan::sources`]); `None` if its documents are concatenated and cut.
    pub fn packs(&self, source: usize) -> Option<&dyn PackTable> {
        self.packs.get(&self.sources[source].name).map(AsRef::as_ref)
    }

    /// What a source (index into [`DataPlan::sources`]) asks the model to predict; `None`: each next token.
    pub fn objective(&self, source: usize) -> Option<&Objective> {
        self.objectives[source].as_deref()
    }

    /// The last step; steps are 1 to this.
    pub fn steps(&self) -> u64 {
        self.phases.last().map_or(0, |phase| phase.first_step + phase.steps - 1)
    }

    /// Samples of the whole run.
    pub fn samples(&self) -> u64 {
        self.phases.last().map_or(0, |phase| phase.first_sample + phase.samples())
    }

    /// Tokens of all steps up to `step`.
    pub fn tokens_until(&self, step: u64) -> u64 {
        let steps =
            |phase: &PhasePlan| (step + 1).saturating_sub(phase.first_step).min(phase.steps);
        let tokens = |phase: &PhasePlan| steps(phase) * phase.batch * u64::from(phase.seq_len);
        self.phases.iter().map(tokens).sum()
    }

    /// Step `step`.
    pub fn step(&self, step: u64) -> Result<StepSpec> {
        if step == 0 || step > self.steps() {
            return Err(Fault::usage("the plan does not have this step")
                .found(format!("step {step}"))
                .wanted(format!("1 to {}", self.steps())));
        }
        let phase = self.phases.partition_point(|phase| phase.first_step <= step) - 1;
        let PhasePlan { first_step, first_sample, batch, micro_batch, seq_len, .. } =
            self.phases[phase];
        let first_sample = first_sample + (step - first_step) * batch;
        Ok(StepSpec { step, phase, first_sample, batch, micro_batch, seq_len })
    }

    /// The step that global sample `sample` belongs to.
    pub fn step_of(&self, sample: u64) -> Result<u64> {
        let phase = &self.phases[self.phase_of(sample)?];
        Ok(phase.first_step + (sample - phase.first_sample) / phase.batch)
    }

    /// Global sample `sample`; an error if its data is not fixed.
    pub fn sample(&self, sample: u64) -> Result<SampleSpec> {
        let index = self.phase_of(sample)?;
        let phase = &self.phases[index];
        self.check_fixed(phase.first_step + (sample - phase.first_sample) / phase.batch)?;
        let (entry, ordinal) = phase.mixing.pick(sample - phase.first_sample);
        let SourceUse { source, segment, .. } = &phase.uses[entry];
        let (epoch, spans) = segment.text(ordinal)?;
        let (source, seq_len) = (*source, phase.seq_len);
        let banned = self.bans.places(source, sample, &spans);
        let objective = self.objectives[source].clone();
        let phase = index;
        Ok(SampleSpec { sample, phase, source, ordinal, epoch, seq_len, spans, banned, objective })
    }

    /// The state of a source (index into [`DataPlan::sources`]) before step `step`.
    pub fn standing(&self, source: usize, step: u64) -> SourceState {
        let mut cursor = Cursor::default();
        for phase in self.phases.iter().filter(|phase| phase.first_step < step) {
            let of_source = |part: &SourceUse| part.source == source;
            let Some(entry) = phase.uses.iter().position(of_source) else { continue };
            let steps = phase.steps.min(step - phase.first_step);
            let samples = phase.mixing.count(entry, steps * phase.batch);
            cursor = phase.uses[entry].segment.after(samples);
        }
        let tokens = self.orders[source].as_ref().map_or(0, |order| order.tokens_before(&cursor));
        SourceState { cursor, tokens }
    }

    /// The composition of a source's sequences in a phase; `phase` and `entry` index [`DataPlan::phases`] and its
    /// `uses`.
    pub fn composition(&self, phase: usize, entry: usize) -> Composition {
        let SourceUse { segment, samples, .. } = &self.phases[phase].uses[entry];
        segment.composition(*samples)
    }

    fn phase_of(&self, sample: u64) -> Result<usize> {
        if sample >= self.samples() {
            return Err(Fault::usage("the plan does not have this sample")
                .found(format!("sample {sample}"))
                .wanted(format!("0 to {}", self.samples() - 1)));
        }
        Ok(self.phases.partition_point(|phase| phase.first_sample <= sample) - 1)
    }
}

impl PhasePlan {
    /// Its samples.
    pub fn samples(&self) -> u64 {
        self.steps * self.batch
    }

    /// Its last step.
    pub fn last_step(&self) -> u64 {
        self.first_step + self.steps - 1
    }
}
