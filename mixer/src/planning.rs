//! Builds a plan from a curriculum segment by segment, and refuses what cannot run.

use std::sync::Arc;

use contract::{Fault, Result, UNIT_TOKENS_MAX};

use crate::banning;
use crate::bans::Bans;
use crate::dealing;
use crate::limits;
use crate::mixing::Mixing;
use crate::objective::Objective;
use crate::order::Cursor;
use crate::packing::Order;
use crate::packs::PackedLength;
use crate::plan::{DataPlan, PackTables, PhasePlan, SourceUse};
use crate::reaction::WindowLosses;
use crate::sample::{SourceFacts, names, unknown};
use crate::windows::WindowPlanner;
use curriculum::{Curriculum, Phase, PhaseSegment};

impl DataPlan {
    /// Plans `curriculum` over sources without packed documents; an error if it cannot run.
    pub fn new(curriculum: &Curriculum, facts: &[SourceFacts]) -> Result<DataPlan> {
        DataPlan::with_packs(curriculum, facts, PackTables::new())
    }

    /// The same, with the packs of the sources that the curriculum packs.
    pub fn with_packs(
        curriculum: &Curriculum,
        facts: &[SourceFacts],
        packs: PackTables,
    ) -> Result<DataPlan> {
        let curriculum = dealing::dealt(curriculum, facts)?;
        check_sources(&curriculum, facts)?;
        let reacts = curriculum.segments().iter().any(|it| it.spec.mix.reaction().is_some());
        let mut plan = DataPlan {
            seed: curriculum.seed,
            phases: Vec::with_capacity(curriculum.phases.len()),
            sources: facts.to_vec(),
            orders: vec![None; facts.len()],
            packs,
            objectives: names(facts).map(|name| Objective::of(&curriculum, name)).collect(),
            bans: Bans::default(),
            curriculum: None,
            reacting: Vec::new(),
            windows: Vec::new(),
            fixed_until: 0,
            exhausted: None,
        };
        plan.plan_phases(&curriculum, &WindowLosses::default())?;
        limits::check(&plan, &curriculum)?;
        if let Some(fault) = plan.exhausted {
            return Err(fault);
        }
        plan.bans = banning::banned(&curriculum, &plan)?;
        plan.curriculum = reacts.then(|| Arc::new(curriculum.into_owned()));
        Ok(plan)
    }

    /// Plans all phases. Mixes that react have the windows that follow from `losses`.
    pub(crate) fn plan_phases(
        &mut self,
        curriculum: &Curriculum,
        losses: &WindowLosses,
    ) -> Result<()> {
        let mut cursors = vec![Cursor::default(); self.sources.len()];
        (self.phases, self.reacting, self.windows) = (Vec::new(), Vec::new(), Vec::new());
        (self.fixed_until, self.exhausted) = (u64::MAX, None);
        let segments = curriculum.segments();
        let mut windows = WindowPlanner { curriculum, segments: &segments, losses, weights: None };
        for segment in &segments {
            match segment.spec.mix.reaction() {
                Some(reaction) => windows.plan(self, segment, reaction, &mut cursors)?,
                None => {
                    let planned = self.segment_plan(curriculum, segment, &mut cursors)?;
                    self.phases.push(planned);
                }
            }
        }
        self.fixed_until = self.fixed_until.min(self.steps());
        Ok(())
    }

    /// Plans one segment of a phase and advances the cursors of its sources.
    pub(crate) fn segment_plan(
        &mut self,
        curriculum: &Curriculum,
        segment: &PhaseSegment,
        cursors: &mut [Cursor],
    ) -> Result<PhasePlan> {
        let PhaseSegment { phase: index, spec: phase, mix_key, mix_before, mix_samples, batch } =
            segment;
        let weights = phase.mix.exact_weights();
        let weights = weights.map_err(|fault| fault.or_at(|| curriculum.place(mix_key)))?;
        let mixing = Mixing::new(&weights, *mix_samples).after(*mix_before);
        let counts = mixing.counts(phase.steps * batch);
        let mut uses = Vec::with_capacity(counts.len());
        for (name, samples) in phase.mix.sources().into_iter().zip(counts) {
            let source = self.source_of(curriculum, phase, mix_key, name)?;
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
            uses.push(SourceUse { source, samples, tokens, tokens_before, after, segment });
        }
        Ok(PhasePlan {
            name: phase.name.clone(),
            phase: *index,
            first_step: self.steps() + 1,
            steps: phase.steps,
            first_sample: self.samples(),
            batch: *batch,
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

    /// The source that a mix names; an error if it cannot be used.
    pub(crate) fn source_of(
        &self,
        curriculum: &Curriculum,
        phase: &Phase,
        mix_key: &str,
        name: &str,
    ) -> Result<usize> {
        let place = || curriculum.mix_place(mix_key, name);
        let seq_len = || curriculum.place(&format!("phase.{}.seq_len", phase.name));
        let Some(source) = self.sources.iter().position(|facts| facts.name == name) else {
            return Err(unknown(name, names(&self.sources)).at(place()));
        };
        let SourceFacts { tokens, unit, .. } = self.sources[source];
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
                    .found("a store stub")
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

/// Checks that source names are unique, that their size fits, and that limits name existing sources.
fn check_sources(curriculum: &Curriculum, facts: &[SourceFacts]) -> Result<()> {
    let store = || curriculum.place("store");
    let mut names: Vec<&str> = names(facts).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        let what = format!("two stores have a source {:?}", pair[0]);
        return Err(Fault::usage(what).at(store()).wanted("names that are unique over all stores"));
    }
    for SourceFacts { name, tokens, unit, .. } in facts {
        if *tokens > 1 << 62 || !(1..=UNIT_TOKENS_MAX).contains(unit) {
            return Err(Fault::usage(format!("source {name:?} is out of range"))
                .at(store())
                .found(format!("{tokens} tokens in units of {unit}"))
                .wanted("at most 2^62 tokens in units of 1 to 2^40"));
        }
    }
    let mut settings = curriculum.sources.iter();
    match settings.find(|(name, spec)| spec.buckets.is_none() && !names.contains(&name.as_str())) {
        Some((name, _)) => {
            Err(unknown(name, names).at(curriculum.place(&format!("source.{name}"))))
        }
        None => Ok(()),
    }
}
