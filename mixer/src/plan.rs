//! The plan: step -> samples -> phase -> source and ordinal -> text, every arrow with its inverse.
//!
//! What a plan holds is one [`PhasePlan`] for each phase and one [`SourceUse`] for each source of a phase: where the
//! source stood, how many samples it gives, where it stands afterwards. Everything else is computed when asked.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::fault::nearest;
use contract::{Fault, Result, UNIT_TOKENS_MAX};

use crate::bans::Bans;
use crate::mixing::Mixing;
use crate::order::Cursor;
use crate::packing::{Order, Segment};
use crate::packs::{PackTable, PackedLength};
use crate::sample::{SampleSpec, SourceFacts, StepSpec};
use curriculum::{Curriculum, Phase, PhaseSegment, RemainderRule};

/// The packs of sources, by their names.
pub type PackTables = BTreeMap<String, Arc<dyn PackTable>>;

/// What a run reads, in closed form.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) seed: u64,
    pub(crate) phases: Vec<PhasePlan>,
    pub(crate) sources: Vec<SourceFacts>,
    /// One for each source that some phase uses.
    pub(crate) orders: Vec<Option<Order>>,
    /// Of the sources whose documents are packed, by name.
    pub(crate) packs: PackTables,
    pub(crate) bans: Bans,
}

/// One segment of the run, resolved: a phase, or a part of one between amendments of its mix.
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
    /// Parts of every sequence inside a micro-batch.
    pub context_chunks: u64,
    /// Parts of the model's widths inside a micro-batch.
    pub weight_shards: u64,
    /// Tokens in a sequence.
    pub seq_len: u32,
    /// What becomes of groups that are open at another length.
    pub remainder: RemainderRule,
    /// What each source of the mix gives, in the order of the sources' names.
    pub uses: Vec<SourceUse>,
    /// Which source each sample comes from; numbered as `uses`.
    pub mixing: Mixing,
    /// What faults know its mix by.
    pub(crate) mix_key: String,
}

/// What a source gives to a phase.
#[derive(Clone, Debug)]
pub struct SourceUse {
    /// Index into [`Plan::sources`].
    pub source: usize,
    /// Its integer weight.
    pub weight: u64,
    /// Its samples.
    pub samples: u64,
    /// Its tokens, padding left out.
    pub tokens: u64,
    /// Tokens that had been taken from it in the whole run before the phase, repeats included.
    pub tokens_before: u64,
    /// Where it stands when the phase ends.
    pub after: Cursor,
    pub(crate) segment: Segment,
}

/// Where a source stands before a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The place in its order.
    pub cursor: Cursor,
    /// Tokens that the run has taken from it, repeats included.
    pub tokens: u64,
}

impl Plan {
    /// Plans `curriculum` over sources of which none is packed, and refuses what cannot run.
    pub fn new(curriculum: &Curriculum, facts: &[SourceFacts]) -> Result<Plan> {
        Plan::with_packs(curriculum, facts, PackTables::new())
    }

    /// The same with the packs of those sources that the curriculum packs.
    pub fn with_packs(
        curriculum: &Curriculum,
        facts: &[SourceFacts],
        packs: PackTables,
    ) -> Result<Plan> {
        check_sources(curriculum, facts)?;
        let mut plan = Plan {
            seed: curriculum.seed,
            phases: Vec::with_capacity(curriculum.phases.len()),
            sources: facts.to_vec(),
            orders: vec![None; facts.len()],
            packs,
            bans: Bans::default(),
        };
        let mut cursors = vec![Cursor::default(); facts.len()];
        for segment in &curriculum.segments() {
            let planned = plan.segment_plan(curriculum, segment, &mut cursors)?;
            plan.phases.push(planned);
        }
        plan.bans = Bans::new(curriculum, &plan)?;
        crate::limits::check(&plan, curriculum)?;
        Ok(plan)
    }

    /// The phases in order, in segments where their mix is amended.
    pub fn phases(&self) -> &[PhasePlan] {
        &self.phases
    }

    /// The sources, in the order given; also those that no phase uses.
    pub fn sources(&self) -> &[SourceFacts] {
        &self.sources
    }

    /// The packs of a source (index into [`Plan::sources`]); `None` where its documents are one text, which is cut.
    pub fn packs(&self, source: usize) -> Option<&dyn PackTable> {
        self.packs.get(&self.sources[source].name).map(AsRef::as_ref)
    }

    /// The last step; steps are 1 to this.
    pub fn steps(&self) -> u64 {
        self.phases.last().map_or(0, |phase| phase.first_step + phase.steps - 1)
    }

    /// Samples of the whole run.
    pub fn samples(&self) -> u64 {
        self.phases.last().map_or(0, |phase| phase.first_sample + phase.samples())
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

    /// Global sample `sample`.
    pub fn sample(&self, sample: u64) -> Result<SampleSpec> {
        let index = self.phase_of(sample)?;
        let phase = &self.phases[index];
        let (entry, ordinal) = phase.mixing.pick(sample - phase.first_sample);
        let SourceUse { source, segment, .. } = &phase.uses[entry];
        let (epoch, spans) = segment.text(ordinal)?;
        let (source, seq_len) = (*source, phase.seq_len);
        let banned = self.bans.places(source, sample, &spans);
        Ok(SampleSpec { sample, phase: index, source, ordinal, epoch, seq_len, spans, banned })
    }

    /// Where a source (index into [`Plan::sources`]) stands before step `step`.
    pub fn standing(&self, source: usize, step: u64) -> Standing {
        let mut cursor = Cursor::default();
        for phase in self.phases.iter().filter(|phase| phase.first_step < step) {
            let of_source = |part: &SourceUse| part.source == source;
            let Some(entry) = phase.uses.iter().position(of_source) else { continue };
            let steps = phase.steps.min(step - phase.first_step);
            let samples = phase.mixing.count(entry, steps * phase.batch);
            cursor = phase.uses[entry].segment.after(samples);
        }
        let tokens = self.orders[source].as_ref().map_or(0, |order| order.tokens_before(&cursor));
        Standing { cursor, tokens }
    }

    fn phase_of(&self, sample: u64) -> Result<usize> {
        if sample >= self.samples() {
            return Err(Fault::usage("the plan does not have this sample")
                .found(format!("sample {sample}"))
                .wanted(format!("0 to {}", self.samples() - 1)));
        }
        Ok(self.phases.partition_point(|phase| phase.first_sample <= sample) - 1)
    }

    /// Plans one segment of a phase and moves the cursors of its sources.
    fn segment_plan(
        &mut self,
        curriculum: &Curriculum,
        PhaseSegment { phase: index, spec: phase, mix_key }: &PhaseSegment,
        cursors: &mut [Cursor],
    ) -> Result<PhasePlan> {
        let weights = phase.weights().expect("checked when the phase was read");
        let mixing = Mixing::new(&weights);
        let counts = mixing.counts(phase.samples());
        let mut uses = Vec::with_capacity(weights.len());
        for ((name, weight), samples) in phase.mix.keys().zip(weights).zip(counts) {
            let source = self.source_of(curriculum, phase, (mix_key, name))?;
            let facts = &self.sources[source];
            let packs = self.packs.get(&facts.name);
            let order = self.orders[source]
                .get_or_insert_with(|| Order::new(curriculum.seed, facts, packs));
            let start = std::mem::take(&mut cursors[source]);
            let segment = order.segment(start, phase)?;
            let after = segment.after(samples);
            let tokens_before = order.tokens_before(segment.start());
            let tokens = order.tokens_before(&after) - tokens_before;
            cursors[source] = after.clone();
            uses.push(SourceUse { source, weight, samples, tokens, tokens_before, after, segment });
        }
        Ok(PhasePlan {
            name: phase.name.clone(),
            phase: *index,
            first_step: self.steps() + 1,
            steps: phase.steps,
            first_sample: self.samples(),
            batch: phase.batch,
            micro_batch: phase.micro_batch,
            context_chunks: phase.context_chunks,
            weight_shards: phase.weight_shards,
            seq_len: phase.seq_len,
            remainder: phase.remainder,
            uses,
            mixing,
            mix_key: mix_key.clone(),
        })
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

impl Plan {
    /// The source that a mix names, checked.
    fn source_of(
        &self,
        curriculum: &Curriculum,
        phase: &Phase,
        (mix_key, name): (&str, &str),
    ) -> Result<usize> {
        let place = || curriculum.place(&format!("{mix_key}.{name}"));
        let seq_len = || curriculum.place(&format!("phase.{}.seq_len", phase.name));
        let Some(source) = self.sources.iter().position(|facts| facts.name == name) else {
            return Err(unknown(name, &self.sources).at(place()));
        };
        let SourceFacts { name: _, tokens, documents: _, unit } = self.sources[source];
        if tokens == 0 {
            return Err(
                Fault::usage(format!("source {name:?} has no text to train on")).at(place())
            );
        }
        if let Some(packing) = curriculum.packing(name) {
            let Some(packs) = self.packs.get(name) else {
                let what = format!("source {name:?} is to be packed, which needs its documents");
                return Err(Fault::usage(what)
                    .at(curriculum.place(&format!("source.{name}.packing")))
                    .found("a store that is only described")
                    .wanted("a store"));
            };
            let of_phase = |length: &&PackedLength| length.seq_len == phase.seq_len;
            return match packs.lengths().iter().find(of_phase).map(PackedLength::packs) {
                Some(1..) => Ok(source),
                Some(0) => {
                    Err(Fault::usage(format!("no document of {name:?} is packed at this length"))
                        .at(seq_len())
                        .found(format!("seq_len {}", phase.seq_len))
                        .hint("the source has too few documents for so many lengths"))
                }
                None => Err(Fault::usage(format!("source {name:?} is not packed at this length"))
                    .at(seq_len())
                    .found(format!("seq_len {}", phase.seq_len))
                    .wanted(format!("one of its `lengths`: {:?}", packing.lengths.keys()))),
            };
        }
        if unit % u64::from(phase.seq_len) != 0 {
            return Err(Fault::usage("`seq_len` does not divide the unit of a source")
                .at(seq_len())
                .found(format!("seq_len {}", phase.seq_len))
                .wanted(format!("a divisor of {unit}, the unit of {name:?}")));
        }
        Ok(source)
    }
}

pub(crate) fn unknown(name: &str, facts: &[SourceFacts]) -> Fault {
    let fault = Fault::usage(format!("no store has a source {name:?}"));
    let names = || facts.iter().map(|facts| facts.name.as_str());
    match nearest(name, names()) {
        Some(near) => fault.hint(format!("did you mean {near:?}?")),
        None => fault.wanted(names().take(20).collect::<Vec<_>>().join(", ")),
    }
}

/// Checks that sources are told apart, that their size fits, and that limits name some source.
fn check_sources(curriculum: &Curriculum, facts: &[SourceFacts]) -> Result<()> {
    let store = || curriculum.place("store");
    let mut names: Vec<&str> = facts.iter().map(|facts| facts.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        let what = format!("two stores have a source {:?}", pair[0]);
        return Err(Fault::usage(what).at(store()).wanted("names that are unique over all stores"));
    }
    for SourceFacts { name, tokens, documents: _, unit } in facts {
        if *tokens > 1 << 62 || !(1..=UNIT_TOKENS_MAX).contains(unit) {
            return Err(Fault::usage(format!("source {name:?} is out of range"))
                .at(store())
                .found(format!("{tokens} tokens in units of {unit}"))
                .wanted("at most 2^62 tokens in units of 1 to 2^40"));
        }
    }
    match curriculum.sources.keys().find(|name| !names.contains(&name.as_str())) {
        Some(name) => Err(unknown(name, facts).at(curriculum.place(&format!("source.{name}")))),
        None => Ok(()),
    }
}
