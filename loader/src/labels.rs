//! Labels that bans hide, and steps without any: amendments ban all of their text.

use std::collections::BTreeSet;

use contract::{Result, counted};
use mixer::{Ban, DataPlan, Objective, SampleSpec};

use crate::batch::Batch;
use crate::{OpenedCurriculum, RankSlice, batch};

/// A visible run longer than this must contain labels, unless its documents are single tokens, or labels of its source
/// are left out.
const SHORT: u32 = 64;

/// How much text a ban hides over the run: tokens, and labels among them. Reads text only of a source with an
/// objective, whose labels the plan alone does not know.
pub fn hidden_by(opened: &OpenedCurriculum, ban: &Ban) -> Result<(u64, u64)> {
    let plan = &opened.plan;
    let (tokens, mut labels) = plan.hidden_by(ban)?;
    let Some(stores) =
        opened.text().filter(|_| plan.objective(ban.source).is_some_and(Objective::changes_text))
    else {
        return Ok((tokens, labels));
    };
    labels = 0;
    let visits = plan.visits(ban.source, ban.tokens.clone())?.into_iter();
    for visit in visits.filter(|visit| visit.sample >= ban.first_sample) {
        let sample = SampleSpec { banned: Vec::new(), ..plan.sample(visit.sample)? };
        let shown = Batch::of_sample(plan, stores, sample)?;
        let place = visit.offset_in_sequence as usize;
        let places = &shown.columns().mask[place..place + visit.tokens as usize];
        labels += places.iter().map(|label| u64::from(*label)).sum::<u64>();
    }
    Ok((tokens, labels))
}

/// The steps without any label, ascending. Reads text only of steps that the plan alone cannot decide.
pub fn steps_without_labels(opened: &OpenedCurriculum) -> Result<Vec<u64>> {
    let plan = &opened.plan;
    let mut steps = BTreeSet::new();
    for ban in plan.bans() {
        let visits = plan.visits(ban.source, ban.tokens.clone())?.into_iter();
        for visit in visits.filter(|visit| visit.sample >= ban.first_sample) {
            steps.insert(plan.step_of(visit.sample)?);
        }
    }
    let mut found = Vec::new();
    for step in steps {
        let none = match longest_shown(plan, step)? {
            0 => true,
            1..=SHORT => {
                let batch = batch(plan, opened.stores()?, step, RankSlice::WHOLE)?;
                batch.label_count == 0
            }
            _ => false,
        };
        found.extend(none.then_some(step));
    }
    Ok(found)
}

/// A line about steps without labels; empty if there are none.
pub fn without_labels(steps: &[u64]) -> String {
    let shown: Vec<String> = steps.iter().take(8).map(u64::to_string).collect();
    let more = if shown.len() < steps.len() { ", ..." } else { "" };
    match steps {
        [] => String::new(),
        [step] => format!("step {step} has no labels: it moves nothing\n"),
        _ => format!(
            "{} have no labels ({}{more}): they move nothing\n",
            counted(steps.len(), "step"),
            shown.join(", ")
        ),
    }
}

/// The longest run of visible text in a step; stops searching once it exceeds [`SHORT`].
fn longest_shown(plan: &DataPlan, step: u64) -> Result<u32> {
    let (spec, mut longest) = (plan.step(step)?, 0);
    for sample in spec.first_sample..spec.first_sample + spec.batch {
        longest = longest.max(shown(&plan.sample(sample)?));
        if longest > SHORT {
            break;
        }
    }
    Ok(longest)
}

/// The longest run of visible text in a sample; at most [`SHORT`] where labels of its source are left out.
fn shown(sample: &SampleSpec) -> u32 {
    let end = sample.spans.iter().map(|span| span.tokens).sum::<u32>();
    let starts = [0].into_iter().chain(sample.banned.iter().map(|place| place.end));
    let ends = sample.banned.iter().map(|place| place.start).chain([end]);
    let runs = starts.zip(ends).map(|(start, end): (u32, u32)| (start..end).len() as u32);
    let longest = runs.max().unwrap_or_default();
    let masked = sample.objective.as_ref().is_some_and(|objective| objective.mask.is_some());
    if masked { longest.min(SHORT) } else { longest }
}
