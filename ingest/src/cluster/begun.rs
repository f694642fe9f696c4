//! How the building of a plan begins: nothing counts that was made of other inputs than there are now.

use std::path::Path;

use contract::Result;

use super::plan::{self, Plan};
use super::result::TaskResult;
use super::scan;
use super::stage::Stage;
use crate::corpus::Corpus;
use crate::tokenize::Engine;

/// Plans the build of `corpus` in the folder `work`, or takes it up there. Parts stay, whatever they were made for.
pub fn plan(corpus: &Corpus, work: &Path, task_bytes: u64) -> Result<Plan> {
    plan_with(corpus, work, task_bytes, Engine::Fastest)
}

/// The same for this process, whose tasks encode by `engine`.
pub(crate) fn plan_with(
    corpus: &Corpus,
    work: &Path,
    task_bytes: u64,
    engine: Engine,
) -> Result<Plan> {
    let plan = plan::put(corpus, work, task_bytes, engine)?;
    refresh(&plan)?;
    Ok(plan)
}

/// Forgets what a killed build of this plan did with other inputs than there are now.
fn refresh(plan: &Plan) -> Result<()> {
    for task in plan.tasks_of(Stage::Scan) {
        forget(plan, Stage::Scan, task)?;
    }
    scan::forget(plan)?;
    plan.tasks_of(Stage::Encode).into_iter().try_for_each(|task| forget(plan, Stage::Encode, task))
}

fn forget(plan: &Plan, stage: Stage, task: usize) -> Result<()> {
    let files = &plan.cut(task)?.sources[0].files;
    match plan.result(stage, task)? {
        Some(result) if result.is_of(files) => Ok(()),
        _ => TaskResult::remove(plan, stage, task),
    }
}
