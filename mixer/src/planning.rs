//! Builds a plan from a curriculum segment by segment, and refuses what cannot run.

use contract::{Fault, Result, UNIT_TOKENS_MAX};

use crate::banning;
use crate::bans::Bans;
use crate::limits;
use crate::mixing::Mixing;
use crate::order::Cursor;
use crate::packing::Order;
use crate::packs::PackedLength;
use crate::plan::{DataPlan, PackTables, PhasePlan, SourceUse};
use crate::sample::{SourceFacts, names, unknown};
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
        check_sources(curriculum, facts)?;
        let mut plan = DataPlan {
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
        plan.bans = banning::banned(curriculum, &plan)?;
        limits::check(&plan, curriculum)?;
        Ok(plan)
    }

    /// Plans one segment of a phase and advances the cursors of its sources.
    fn segment_plan(
        &mut self,
        curriculum: &Curriculum,
        segment: &PhaseSegment,
        cursors: &mut [Cursor],
    ) -> Result<PhasePlan> {
        let PhaseSegment { phase: index, spec: phase, mix_key, mix_before, mix_samples, batch } =
            segment;
        let weights = phase.mix.weights().expect("checked when the phase was read");
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
    fn source_of(
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
    for SourceFacts { name, tokens, documents: _, unit } in facts {
        if *tokens > 1 << 62 || !(1..=UNIT_TOKENS_MAX).contains(unit) {
            return Err(Fault::usage(format!("source {name:?} is out of range"))
                .at(store())
                .found(format!("{tokens} tokens in units of {unit}"))
                .wanted("at most 2^62 tokens in units of 1 to 2^40"));
        }
    }
    match curriculum.sources.keys().find(|name| !names.contains(&name.as_str())) {
        Some(name) => Err(unknown(name, names).at(curriculum.place(&format!("source.{name}")))),
        None => Ok(()),
    }
}
