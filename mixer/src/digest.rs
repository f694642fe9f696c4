//! The plan digest up to a step: covers only what affects the steps up to it.
//!
//! It does not change if a phase is lengthened, a later phase is added, or a source is added that is not used by then.
//! Only a ramp is another one in a longer phase, which stretches it.

use contract::{Digest, Digestible, Fault, Hasher, Result};
use curriculum::RemainderRule;

use crate::plan::{DataPlan, PhasePlan};
use crate::sample::SourceFacts;

/// The version of the rules that turn a curriculum into a plan. A run can only continue under the version that it began
/// with. 2: a group is at most a sixteenth of its source; windows of a remainder are split one by one where possible.
pub const PLAN_VERSION: u32 = 2;

/// Refuses a run that began under another version.
pub fn check_version(begun: u32) -> Result<()> {
    if begun == PLAN_VERSION {
        return Ok(());
    }
    Err(Fault::mismatch("the text of this run was put in order by other rules")
        .found(format!("version {begun} of the plan"))
        .wanted(format!("version {PLAN_VERSION}"))
        .hint("use the release that began it, or train it anew with another --out"))
}

/// The part of a plan up to `step`.
struct PlanPrefix<'a> {
    plan: &'a DataPlan,
    step: u64,
}

impl DataPlan {
    /// The digest of everything that affects steps 1 to `step`; steps after the plan's last, and steps whose data is
    /// not fixed, add nothing.
    pub fn digest_through(&self, step: u64) -> Digest {
        Digest::of(&PlanPrefix { plan: self, step: step.min(self.fixed_until) })
    }
}

impl Digestible for PlanPrefix<'_> {
    fn feed(&self, hasher: &mut Hasher) {
        let DataPlan {
            seed,
            phases,
            sources,
            orders: _,
            packs,
            objectives,
            bans,
            // The weights that follow from losses are in the phases.
            curriculum: _,
            reacting: _,
            windows: _,
            fixed_until: _,
            exhausted: _,
        } = self.plan;
        let begun = phases.iter().take_while(|phase| phase.first_step <= self.step);
        hasher
            .tag("plan")
            .u64(u64::from(PLAN_VERSION))
            .u64(*seed)
            .u64(begun.clone().count() as u64);
        let mut used = vec![false; sources.len()];
        for phase in begun {
            let steps = phase.steps.min(self.step - phase.first_step + 1);
            feed_phase(phase, steps, sources, hasher);
            let counts = phase.mixing.counts(steps * phase.batch);
            for (part, count) in phase.uses.iter().zip(counts) {
                used[part.source] |= count > 0;
            }
        }
        // A source that has served nothing yet affects no step so far.
        let all = sources.iter().zip(objectives).zip(used);
        let mut facts: Vec<_> = all.filter_map(|(source, used)| used.then_some(source)).collect();
        facts.sort_by(|(one, _), (other, _)| one.name.cmp(&other.name));
        hasher.u64(facts.len() as u64);
        for (SourceFacts { name, tokens, documents: _, unit, selection }, objective) in facts {
            hasher.str(name).u64(*tokens).u64(*unit);
            if let Some(selection) = selection {
                hasher.tag("selection.v1").digest(*selection);
            }
            if let Some(packs) = packs.get(name) {
                hasher.tag("packs.v1").digest(packs.digest());
            }
            if let Some(objective) = objective {
                objective.feed(hasher);
            }
        }
        bans.feed(self.step, sources, hasher);
    }
}

/// Hashes the first `steps` steps of a phase. Its name affects nothing; its start and its cursors follow from the rest.
fn feed_phase(phase: &PhasePlan, steps: u64, sources: &[SourceFacts], hasher: &mut Hasher) {
    let PhasePlan {
        name: _,
        phase: _,
        first_step: _,
        steps: _,
        first_sample: _,
        batch,
        micro_batch,
        context_chunks,
        weight_shards,
        seq_len,
        remainder,
        uses,
        mixing,
        mix_key: _,
    } = phase;
    hasher.u64(steps).u64(*batch).u64(*micro_batch).u64(u64::from(*seq_len));
    mixing.feed(uses.iter().map(|part| sources[part.source].name.as_str()), hasher);
    // Uncut micro-batches add nothing: digests stay those from before cuts existed.
    if (*context_chunks, *weight_shards) != (1, 1) {
        hasher.tag("cut.v1").u64(*context_chunks).u64(*weight_shards);
    }
    if *remainder == RemainderRule::Defer {
        hasher.tag("defer");
    }
}
