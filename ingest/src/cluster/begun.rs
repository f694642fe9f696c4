//! Begins a plan: results that were made from inputs that have changed since are discarded.

use std::path::Path;

use contract::Result;

use super::plan::{self, Plan};
use super::result::TaskResult;
use super::scan;
use super::stage::Stage;
use crate::cache_dir::Owner;
use crate::corpus::Corpus;
use crate::tokenize::Engine;

/// Plans the build of `corpus` in the folder `work`, to be run task by task, or opens the existing plan.
pub fn plan(corpus: &Corpus, work: &Path) -> Result<Plan> {
    begun(plan::put(corpus, work, Engine::Fastest, Owner::Tasks)?)
}

/// The same for a build that runs the tasks itself, by `engine`, and holds the folder meanwhile.
pub fn plan_build(corpus: &Corpus, work: &Path, engine: Engine) -> Result<Plan> {
    begun(plan::put(corpus, work, engine, Owner::Build)?)
}

fn begun(plan: Plan) -> Result<Plan> {
    refresh(&plan)?;
    Ok(plan)
}

/// Discards what a killed build of this plan did with inputs that have changed since.
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
