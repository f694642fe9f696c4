//! `zdata build`.

use std::path::{Path, PathBuf};
use std::thread;

use contract::{Fault, Result, note};
use ingest::build::Options;
use ingest::cluster::plan::TASK_BYTES;
use ingest::cluster::{self, Plan, Ran, Stage, slurm};
use ingest::tokenize::Engine;
use ingest::{Corpus, Outcome, inspect};
use storage::publish;
use store::location::Object;
use store::{Location, Manifest, disk, open};

use super::output;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The corpus file: which inputs, which tokenizer.
    #[arg(value_parser = super::place())]
    corpus: Location,
    /// The folder that becomes the store, or s3://bucket/prefix.
    #[arg(long, required_unless_present = "check", value_parser = super::place())]
    out: Option<Location>,
    /// Build nothing: read everything, and list every record that is no document.
    #[arg(long, conflicts_with = "out")]
    check: bool,
    /// An earlier store: sources that did not change since are taken over from it.
    #[arg(long, value_name = "STORE", value_parser = super::place())]
    from: Option<Location>,
    /// Threads that encode [default: one for each core]; never changes a bit.
    #[arg(long, value_parser = super::workers)]
    workers: Option<usize>,
    /// The library that encodes; never changes a bit.
    #[arg(long, value_enum, default_value_t = Encoder::Fastest)]
    encoder: Encoder,
    /// Where the work is done; never changes a bit.
    #[arg(long, value_enum, default_value_t = Place::Local)]
    engine: Place,
    /// The folder of plan and parts, which every machine sees; one that is named is kept, and what a later build needs of
    /// it is not made again [default: OUT.tasks, removed at the end].
    #[arg(long, value_name = "FOLDER", value_parser = super::local(super::task::WORK))]
    work: Option<PathBuf>,
    /// Bytes of input that a task gets; a larger file is a task by itself.
    #[arg(long, default_value_t = TASK_BYTES)]
    task_bytes: u64,
    /// An argument for sbatch, like "--partition=cpu"; again for more.
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    sbatch: Vec<String>,
    /// Tell a program what was built.
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Where the store goes; only a check has no such place.
    fn out(&self) -> Result<&Location> {
        self.out.as_ref().ok_or_else(|| Fault::usage("--out is missing"))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Place {
    /// In this process.
    Local,
    /// In this process, task by task, as a cluster would.
    Tasks,
    /// As a job array of Slurm.
    Slurm,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Encoder {
    /// fastokens where it covers the tokenizer, Hugging Face tokenizers otherwise.
    Fastest,
    /// Hugging Face tokenizers.
    Reference,
}

/// Builds into a folder and tells how it went.
fn build(
    corpus: &Corpus,
    out: &Path,
    from: Option<&Location>,
    options: Options,
) -> Result<Manifest> {
    Ok(match ingest::build_from(corpus, out, from, options, || Ok(()))? {
        Outcome::UpToDate(manifest) => {
            note!("up to date: the store was built from this very request");
            manifest
        }
        Outcome::Built { manifest, summary, audited: (documents, bytes) } => {
            note!("{summary}");
            inspect::notes(&manifest).iter().for_each(|note| note!("{note}"));
            note!(
                "audit: {documents} documents ({bytes} bytes) encoded again by tokenizers, no difference"
            );
            manifest
        }
    })
}

/// Builds on this machine, then puts the store into its bucket.
fn remote_build(
    corpus: &Corpus,
    target: &Object,
    from: Option<&Location>,
    options: Options,
) -> Result<Manifest> {
    let url = Location::Object(target.clone());
    if url.join(open::MANIFEST).is_file()? {
        let manifest = ingest::build::built(corpus, url, options.engine)?;
        note!("up to date: the store was built from this very request");
        return Ok(manifest);
    }
    let scratch = publish::scratch(target)?;
    let manifest = build(corpus, &scratch, from, options)?;
    publish::publish(&scratch, target, &manifest)?;
    // What lies here is the only whole copy until every byte of the other one was read again.
    let found = ingest::verify::verify(&url, options.quiet)?;
    store::verify::fault(&url, &found.damages).map_or(Ok(()), Err)?;
    disk::remove(&scratch)?;
    Ok(manifest)
}

/// Builds by tasks, and merges them.
fn by_tasks(corpus: &Corpus, args: &Args, options: Options) -> Result<Manifest> {
    if args.from.is_some() {
        return Err(Fault::usage("tasks take nothing over from another store")
            .at("--from")
            .hint("name the --work folder of the earlier build, or build with --engine local"));
    }
    let Location::Local(out) = args.out()? else {
        return Err(Fault::usage("tasks merge into a folder of this machine")
            .at("--out")
            .found(args.out()?)
            .wanted("a path")
            .hint("build into a folder, then `zdata publish` it"));
    };
    if out.join(open::MANIFEST).exists() {
        let manifest = ingest::build::built(corpus, out, options.engine)?;
        note!("up to date: the store was built from this very request");
        return Ok(manifest);
    }
    let mut work = out.as_os_str().to_owned();
    work.push(".tasks");
    let work = args.work.clone().unwrap_or_else(|| PathBuf::from(work));
    let _lock = cluster::lock(&work)?;
    let plan = cluster::plan(corpus, &work, args.task_bytes)?;
    for stage in [Stage::Scan, Stage::Encode] {
        let (all, left) = (plan.tasks_of(stage).len(), plan.missing(stage)?.len());
        if all > 0 {
            note!("{}: {left} of {all} tasks to run, in {}", stage.name(), work.display());
        }
    }
    if args.engine == Place::Slurm {
        let program = std::env::current_exe();
        let program = program.map_err(|error| Fault::io("find", Path::new("zdata"), &error))?;
        let sbatch = args.sbatch.clone();
        slurm::run(&plan, out, &slurm::Options { program, sbatch, workers: options.workers })?;
    } else {
        let runner = cluster::Runner::new(&plan, options.workers)?;
        stage(&plan, &runner, Stage::Scan)?;
        cluster::decide(&plan, options.quiet)?;
        stage(&plan, &runner, Stage::Encode)?;
        cluster::merge(&plan, out, options.quiet)?;
    }
    for stage in [Stage::Scan, Stage::Encode] {
        if !plan.tasks_of(stage).is_empty() {
            note!("{}", cluster::tally(&plan, stage)?);
        }
    }
    let manifest = open::manifest(out)?;
    plan.close()?;
    if args.work.is_none() {
        disk::remove(&work)?;
    }
    Ok(manifest)
}

/// Runs the tasks of a stage that are missing.
fn stage(plan: &Plan, runner: &cluster::Runner<'_>, stage: Stage) -> Result<()> {
    let all = plan.tasks();
    for task in plan.missing(stage)? {
        let told = match runner.run(stage, task)? {
            Ran::Reused(_) => "reused",
            Ran::New(_) | Ran::Again(_) => "made",
        };
        note!("{} {task} of {all}: {told}", stage.name());
    }
    Ok(())
}

/// Lists every record that is no document. It is an error where a build would stop at one.
fn check(corpus: &Corpus, json: bool) -> Result<()> {
    let mut first = None;
    let checked = ingest::check::check(corpus, |bad| {
        let place = bad.fault.place().unwrap_or(bad.file);
        let reason = bad.reason.unwrap_or("unreadable");
        let what = bad.fault.what();
        let answer = serde_json::json!({
            "source": bad.source, "file": bad.file, "place": place, "reason": reason, "what": what,
        });
        output::answer(json, &answer, || format!("{}: {reason}: {what}\n", output::plain(place)))?;
        if bad.reason.is_none_or(|reason| ingest::stops(corpus, reason)) {
            first.get_or_insert(bad.fault);
        }
        Ok(())
    })?;
    let ingest::check::Checked { files, documents, bad } = checked;
    note!("{files} files: {documents} documents, {bad} bad records");
    first.map_or(Ok(()), |first| {
        Err(first.hint("a build would stop here; see the whole list above"))
    })
}

/// Does it.
pub(crate) fn exec(args: Args, quiet: bool) -> Result<()> {
    let corpus = Corpus::read(&args.corpus)?;
    if args.check {
        return check(&corpus, args.json);
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let engine = match args.encoder {
        Encoder::Fastest => Engine::Fastest,
        Encoder::Reference => Engine::Reference,
    };
    let options = Options { workers: args.workers.unwrap_or(cores), engine, quiet };
    let manifest = if args.engine != Place::Local {
        by_tasks(&corpus, &args, options)?
    } else {
        match args.out()? {
            Location::Object(target) => remote_build(&corpus, target, args.from.as_ref(), options)?,
            Location::Local(folder) => build(&corpus, folder, args.from.as_ref(), options)?,
        }
    };
    let out = args.out()?;
    let text = || format!("{}  {out}\n", manifest.digest);
    output::answer(args.json, &inspect::json(out, &manifest), text)
}
