//! What a build reused from earlier ones, for users.

use contract::{Result, counted};
use indicatif::HumanBytes;

use super::known::results;
use super::plan::Plan;
use super::stage::Stage;

/// A line for each stage: how many parts were made, and how many were reused.
pub fn tallies(plan: &Plan) -> Result<Vec<String>> {
    let stages = [Stage::Scan, Stage::Encode].into_iter();
    stages
        .filter(|stage| !plan.tasks_of(*stage).is_empty())
        .map(|stage| tally(plan, stage))
        .collect()
}

fn tally(plan: &Plan, stage: Stage) -> Result<String> {
    let (mut made, mut reused) = ((0, 0, 0), (0, 0, 0));
    for result in results(plan, stage)? {
        let side = if result.reused { &mut reused } else { &mut made };
        side.0 += 1;
        side.1 += result.inputs.len();
        side.2 += result.inputs.iter().map(|input| input.bytes).sum::<u64>();
    }
    let told = |(_, files, bytes): (u64, usize, u64), parts: String| {
        format!("{parts} ({}, {})", counted(files, "file"), HumanBytes(bytes))
    };
    let all = format!("{} of {}", made.0, counted(made.0 + reused.0, "part"));
    let (made, reused) = (told(made, all), told(reused, counted(reused.0, "part")));
    Ok(format!("{}: made {made}, reused {reused}", stage.name()))
}
