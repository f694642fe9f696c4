//! `zdata build --engine slurm`: one job array of tasks, then one job that merges.
//!
//! The plan, its parts and the store lie in a folder that every node sees; Slurm may requeue, repeat and reorder as it
//! likes. What failed is run again by the same command: tasks whose parts are there are not submitted.

use std::path::Path;
use std::process::Command;

use contract::{Fault, Result};

use super::plan::Plan;

/// What Slurm is told besides.
#[derive(Clone, Debug)]
pub struct Options {
    /// This program, where every node finds it.
    pub program: std::path::PathBuf,
    /// Arguments for `sbatch`: partition, time, memory.
    pub sbatch: Vec<String>,
    /// Threads of a task.
    pub workers: usize,
}

/// Runs the tasks that are missing, then the merge, and waits for both.
pub fn run(plan: &Plan, store: &Path, options: &Options) -> Result<()> {
    let missing = plan.missing();
    let program = quoted(&options.program)?;
    let work = quoted(&plan.work)?;
    if !missing.is_empty() {
        let array = missing.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let line = format!(
            "exec {program} task run --work {work} --index $SLURM_ARRAY_TASK_ID --workers {}",
            options.workers
        );
        let threads = format!("--cpus-per-task={}", options.workers);
        let words = [format!("--array={array}"), threads, "--job-name=zdata-tasks".to_owned()];
        let outcome = submit(plan, options, &words, "task-%a.log", &line);
        let left = plan.missing();
        if let Some(task) = left.first() {
            let what = format!("{} of {} tasks left no part", left.len(), plan.tasks());
            let log = plan.work.join(format!("task-{task}.log"));
            let fault = Fault::machine(what).at(log.display().to_string());
            let fault =
                fault.found(outcome.err().map_or("no error".to_owned(), |error| error.to_string()));
            return Err(fault.hint(
                "read the log, then run the same command again: only these tasks are repeated",
            ));
        }
    }
    let line = format!("exec {program} task merge --work {work} --out {}", quoted(store)?);
    submit(plan, options, &["--job-name=zdata-merge".to_owned()], "merge.log", &line)
}

/// Submits a job and waits for its end.
fn submit(plan: &Plan, options: &Options, words: &[String], log: &str, line: &str) -> Result<()> {
    let output = format!("--output={}", plan.work.join(log).display());
    let mut command = Command::new("sbatch");
    command.args(["--wait", "--requeue", "--open-mode=append", &output]).args(words);
    command.args(&options.sbatch).arg("--wrap").arg(line);
    let ran = command.output().map_err(|error| {
        Fault::machine(format!("sbatch cannot be run: {error}"))
            .hint("run this on a machine that submits jobs, or build with --engine local")
    })?;
    if ran.status.success() {
        return Ok(());
    }
    let told = String::from_utf8_lossy(&ran.stderr);
    Err(Fault::machine("a job of this build failed")
        .at(plan.work.join(log.replace("-%a", "-N")).display().to_string())
        .found(told.lines().last().map_or("no message from sbatch", str::trim))
        .hint("read the log, then run the same command again: what is done is kept"))
}

/// A path as a word of a shell.
fn quoted(path: &Path) -> Result<String> {
    let absolute = std::path::absolute(path).map_err(|error| Fault::io("find", path, &error))?;
    let text = absolute
        .to_str()
        .ok_or_else(|| Fault::usage("a path is no UTF-8").at(absolute.display().to_string()))?;
    Ok(format!("'{}'", text.replace('\'', "'\\''")))
}
