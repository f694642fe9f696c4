//! `zdata build --executor slurm`: one job array for each stage of tasks, and a single job for each other step.
//!
//! Plan, parts and store are in folders that every node sees; Slurm may requeue, repeat and reorder freely. Success is
//! judged by the files that exist after a job, never by its exit code, which only gives the class of an error. The same
//! command runs what failed again: finished tasks are not submitted.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use contract::{Class, Fault, Result};
use store::{open, regular};

use super::plan::Plan;
use super::scan;
use super::stage::Stage;
use crate::progress::meanwhile;

/// The time between polls of a job: at first, and at most.
const LOOK_EVERY: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(5)];

/// Polls that may fail in a row before a build gives up: a restarting controller is away for a while.
const LOOKS_FAILED: usize = 60;

/// Tasks of a job array: as many as Slurm takes unless its administrator allows more.
const ARRAY: usize = 1000;

/// Further options for Slurm.
#[derive(Clone, Debug)]
pub struct Options {
    /// This program, at a path that every node sees.
    pub program: PathBuf,
    /// Arguments for `sbatch`: partition, time, memory.
    pub sbatch: Vec<String>,
    /// Threads of a task.
    pub workers: usize,
}

/// Runs the missing tasks, stage by stage, then the merge, and waits for each.
pub fn run(plan: &Plan, store: &Path, options: &Options) -> Result<()> {
    // The arguments that every command shares.
    let of = format!("--cache-dir {} --plan {}", quoted(plan.cache.path())?, plan.name);
    let job = Job { plan, options };
    if !plan.tasks_of(Stage::Scan).is_empty() {
        job.stage(Stage::Scan, &of)?;
        job.once("decide", &format!("decide {of}"), || scan::is_decided(plan))?;
    }
    job.stage(Stage::Encode, &of)?;
    let line = format!("merge {of} --out {}", quoted(store)?);
    job.once("merge", &line, || Ok(store.join(open::MANIFEST).exists()))
}

struct Job<'a> {
    plan: &'a Plan,
    options: &'a Options,
}

impl Job<'_> {
    /// Runs the missing tasks of a stage.
    fn stage(&self, stage: Stage, of: &str) -> Result<()> {
        let missing = self.plan.missing(stage)?;
        if missing.is_empty() {
            return Ok(());
        }
        let verb = match stage {
            Stage::Scan => "scan",
            Stage::Encode => "run",
        };
        let (name, workers) = (stage.name(), self.options.workers);
        let mut jobs = Vec::new();
        for tasks in missing.chunk_by(|a, b| a / ARRAY == b / ARRAY) {
            let first = tasks.first().map_or(0, |task| task / ARRAY * ARRAY);
            let indexes: Vec<usize> = tasks.iter().map(|task| task - first).collect();
            let array = format!("--array={}", ranges(&indexes));
            let words = [array, format!("--cpus-per-task={workers}")];
            let index = format!("$(({first} + SLURM_ARRAY_TASK_ID))");
            let line = format!("{verb} {of} --index {index} --workers {workers}");
            let log = format!("{name}-{first}-%a.log");
            jobs.push((first, self.submit(name, &words, &log, &line)?));
        }
        jobs.iter().try_for_each(|(_, job)| waited(name, job))?;
        let left = self.plan.missing(stage)?;
        let Some(task) = left.first() else { return Ok(()) };
        let what = format!("{} of {} {name} tasks left no part", left.len(), missing.len());
        let (first, index) = (task / ARRAY * ARRAY, task % ARRAY);
        let job = jobs.iter().find(|(of, _)| *of == first);
        let class = job.map_or(Class::Machine, |(_, job)| ended(job, Some(index)));
        Err(self
            .failed(class, what, &format!("{name}-{first}-{index}.log"))
            .hint("read the log, then run the same command again: only these tasks are repeated"))
    }

    /// Runs a single step, unless it is done.
    fn once(&self, name: &str, line: &str, done: impl Fn() -> Result<bool>) -> Result<()> {
        if done()? {
            return Ok(());
        }
        let job = self.submit(name, &[], &format!("{name}.log"), line)?;
        waited(name, &job)?;
        if done()? {
            return Ok(());
        }
        let what = format!("the job zdata-{name} failed");
        Err(self
            .failed(ended(&job, None), what, &format!("{name}.log"))
            .hint("read the log, then run the same command again: what is done is kept"))
    }

    fn failed(&self, class: Class, what: String, log: &str) -> Fault {
        let path = self.plan.folder().join(log);
        Fault::new(class, what).at(path.display().to_string()).found(last_words(&path))
    }

    /// Submits a job and returns its number.
    fn submit(&self, name: &str, words: &[String], log: &str, line: &str) -> Result<String> {
        let output = format!("--output={}", self.plan.folder().join(log).display());
        let line = format!("exec {} task {line}", quoted(&self.options.program)?);
        let mut command = Command::new("sbatch");
        command.args(["--parsable", "--requeue", "--open-mode=append", &output]);
        command.arg(format!("--job-name=zdata-{name}")).args(words);
        command.args(&self.options.sbatch).arg("--wrap").arg(line);
        let ran = command.output().map_err(|error| {
            Fault::machine(format!("sbatch cannot be run: {error}"))
                .hint("run this on a machine that submits jobs, or build with --executor local")
        })?;
        let told = String::from_utf8_lossy(&ran.stderr);
        let number = String::from_utf8_lossy(&ran.stdout);
        // "12" or "12;cluster".
        let number = number.trim().split(';').next().unwrap_or_default();
        if !ran.status.success() || number.is_empty() {
            return Err(Fault::machine("sbatch refused a job of this build")
                .found(told.lines().last().map_or("no message from sbatch", str::trim)));
        }
        Ok(number.to_owned())
    }
}

/// Waits for the end of a job, and reports that.
fn waited(name: &str, job: &str) -> Result<()> {
    meanwhile(name, &format!("waiting for job {job}"), || wait(job))
}

/// The last lines of a log: an error has several.
pub(super) fn last_words(log: &Path) -> String {
    let bytes = regular::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let error = text.rfind("error: ").map(|at| text[at..].trim().replace("\n  ", "; "));
    let last = || text.lines().map(str::trim).rfind(|line| !line.is_empty()).map(str::to_owned);
    error.or_else(last).unwrap_or_else(|| "nothing in its log".to_owned())
}

/// The class of error of a job, or of one of its tasks: from its exit code, if Slurm still knows it and it is one of
/// ours. Any other end is an environment fault: a signal, a limit, a lost node.
fn ended(job: &str, task: Option<usize>) -> Class {
    let ran = Command::new("scontrol").args(["--oneliner", "show", "job", job]).output();
    let told = ran.map(|ran| String::from_utf8_lossy(&ran.stdout).into_owned()).unwrap_or_default();
    class_of(&told, task)
}

/// The class from the output of `scontrol`, which has a line per task.
fn class_of(told: &str, task: Option<usize>) -> Class {
    let task = task.map(|task| format!("ArrayTaskId={task}"));
    let mut lines = told.lines().map(|line| line.split_whitespace());
    let line =
        lines.find(|words| task.as_ref().is_none_or(|task| words.clone().any(|word| word == task)));
    let code = line.and_then(|mut words| words.find_map(|word| word.strip_prefix("ExitCode=")));
    // "3:0": the code, and the signal.
    let code: Option<u8> = code.and_then(|code| code.split(':').next()?.parse().ok());
    let ours = [Class::Bug, Class::Usage, Class::Data, Class::Mismatch];
    ours.into_iter().find(|class| Some(class.exit_code()) == code).unwrap_or(Class::Machine)
}

/// Waits until no task of a job is pending or running. (`sbatch --wait` looks twice a minute at most.)
fn wait(job: &str) -> Result<()> {
    let (mut pause, mut failed) = (LOOK_EVERY[0], 0);
    loop {
        thread::sleep(pause);
        pause = pause.mul_f64(1.2).min(LOOK_EVERY[1]);
        let ran =
            Command::new("squeue").args(["--noheader", "--format=%i", "--jobs", job]).output();
        let ran = ran.map_err(|error| Fault::machine(format!("squeue cannot be run: {error}")))?;
        if ran.status.success() {
            failed = 0;
            if ran.stdout.iter().all(u8::is_ascii_whitespace) {
                return Ok(());
            }
            continue;
        }
        let told = String::from_utf8_lossy(&ran.stderr);
        // Slurm's answer for a job that it has forgotten.
        if told.contains("Invalid job id") {
            return Ok(());
        }
        failed += 1;
        if failed == LOOKS_FAILED {
            return Err(Fault::machine(format!("squeue does not tell what became of job {job}"))
                .found(told.lines().last().map_or("no message from squeue", str::trim))
                .hint("run the same command again once Slurm answers: what is done is kept"));
        }
    }
}

/// Ascending numbers in Slurm's notation: `0-4,7`.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run.iter().map(usize::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(",")
}

/// A path quoted for a shell.
fn quoted(path: &Path) -> Result<String> {
    let absolute = std::path::absolute(path).map_err(|error| Fault::io("find", path, &error))?;
    let text = absolute
        .to_str()
        .ok_or_else(|| Fault::usage("a path is not UTF-8").at(absolute.display().to_string()))?;
    Ok(format!("'{}'", text.replace('\'', "'\\''")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_an_error_is_what_slurm_says_of_the_task() {
        let told = "JobId=7 ArrayJobId=5 ArrayTaskId=1 JobName=zdata-encode JobState=FAILED ExitCode=3:0\n\
                    JobId=6 ArrayJobId=5 ArrayTaskId=0 JobState=COMPLETED ExitCode=0:0\n\
                    JobId=5 ArrayJobId=5 ArrayTaskId=10 JobState=FAILED ExitCode=0:9\n";
        assert_eq!(class_of(told, Some(1)), Class::Data);
        assert_eq!(class_of(told, Some(10)), Class::Machine);
        assert_eq!(class_of(told, Some(2)), Class::Machine);
        assert_eq!(class_of("JobId=8 JobName=zdata-merge ExitCode=4:0", None), Class::Mismatch);
        assert_eq!(class_of("JobId=8 JobName=zdata-merge ExitCode=127:0", None), Class::Machine);
        assert_eq!(
            class_of("slurm_load_jobs error: Invalid job id specified", None),
            Class::Machine
        );
    }
}
