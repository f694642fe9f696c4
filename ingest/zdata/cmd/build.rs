//! `zdata build`.

use std::path::{Path, PathBuf};

use contract::{Fault, Result, counted, note, words};
use ingest::build::{Forecast, Options, RECORD_FACTOR, SourceForecast};
use ingest::cluster::{self, Stage, slurm};
use ingest::tokenize::Engine;
use ingest::{Corpus, Outcome, check, inspect, moved};
use storage::publish;
use storage::upload::{self, Upload};
use store::location::Object;
use store::{Location, Manifest, open};

use super::digest::default_workers;
use super::output;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Examples: zdata build corpus.toml --check\n          \
    zdata build corpus.toml --out store\n          \
    zdata build corpus.toml --out s3://bucket/store")]
pub(crate) struct Args {
    /// The corpus file: which inputs, which tokenizer.
    #[arg(value_parser = super::place())]
    corpus: Location,
    /// The folder that becomes the store, or a URL, such as s3://bucket/prefix or gs://bucket/prefix.
    #[arg(long, required_unless_present_any = ["check", "dry_run"], value_parser = super::output_place())]
    out: Option<Location>,
    /// Build nothing: read everything, and list the records that are not documents.
    #[arg(long, conflicts_with_all = ["out", "encoder", "executor", "cache_dir", "sbatch"])]
    check: bool,
    /// Build nothing: show parts, bytes, about how many tokens, the size of the store and the memory of a build.
    #[arg(long, conflicts_with_all = ["check", "executor", "cache_dir", "sbatch"])]
    dry_run: bool,
    /// Refused: see `refuse_from`.
    #[arg(long, hide = true, value_name = "STORE", value_parser = super::place())]
    from: Option<Location>,
    /// Threads that parse and encode [default: one for each core]; never changes a bit.
    #[arg(long, value_parser = super::workers)]
    workers: Option<usize>,
    /// The library that encodes; never changes a token or a digest [default: fastest; a store that is there may be of
    /// either].
    #[arg(long, value_enum)]
    encoder: Option<Encoder>,
    /// Where the work is done; never changes a bit.
    #[arg(long, value_enum, default_value_t = Place::Local)]
    executor: Place,
    /// The folder of parts; what is in it is not made again, by this build after a kill or by another one after an
    /// edit. One that is named is kept (`zdata task prune --help`: how it is cleared) [default: OUT.work, removed when
    /// the store is whole].
    #[arg(long, value_name = "FOLDER", value_parser = super::local(super::task::WORK))]
    cache_dir: Option<PathBuf>,
    /// An argument for sbatch, like "--partition=cpu"; again for more.
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    sbatch: Vec<String>,
    /// Tell a program what was built.
    #[arg(long)]
    json: bool,
}

impl Args {
    /// The place of the store; only a check has none.
    fn out(&self) -> Result<&Location> {
        self.out.as_ref().ok_or_else(|| Fault::usage("--out is missing"))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Place {
    /// In this process.
    Local,
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

/// Reports how a build ended, which keeps its parts or not.
fn report(outcome: Outcome, kept: bool) -> Manifest {
    match outcome {
        Outcome::UpToDate(manifest) => up_to_date(manifest),
        Outcome::Built { manifest, summary, tallies, audited: (documents, bytes) } => {
            note!("{summary}");
            tallies.iter().filter(|_| kept).for_each(|tally| note!("{tally}"));
            inspect::notes(&manifest).iter().for_each(|note| note!("{note}"));
            let documents = counted(documents, "document");
            let bytes = counted(bytes, "byte");
            note!("audit: {documents} ({bytes}) encoded again by tokenizers, no difference");
            manifest
        }
    }
}

fn up_to_date(manifest: Manifest) -> Manifest {
    note!("up to date: the store was built from the same corpus file, tokenizer and inputs");
    manifest
}

/// Builds on this machine, and puts parts into the bucket as they are made; the manifest last.
fn remote_build(corpus: &Corpus, target: &Object, options: Options) -> Result<Manifest> {
    let url = Location::Object(target.clone());
    let (scratch, quiet) = (publish::scratch(target)?, options.quiet);
    if url.join(open::MANIFEST).is_file()? {
        let manifest = ingest::build::built(corpus, &url, options.engine)?;
        moved::left(&scratch, &url, quiet)?;
        upload::forget(&scratch)?;
        return Ok(up_to_date(manifest));
    }
    let sources = || corpus.sources.iter().map(|source| source.name.as_str());
    let (mut upload, kept) = (Upload::begin(target, &scratch)?, options.work.is_some());
    // A killed build of other sources has put what is removed later.
    let is_ours = |name: &str| ingest::build::is_of_a_store(sources(), name) || upload.knows(name);
    publish::check_place(target, is_ours)?;
    let mut put = |path: &Path, name: &str| upload.put(path, name);
    let built = ingest::build::build_telling(corpus, &scratch, options, &mut put)?;
    let manifest = report(built, kept);
    let put = || {
        let files = publish::files(&manifest);
        let finish = |passed: &dyn Fn(u64)| upload.finish(&scratch, &manifest, passed);
        super::publish::during(&scratch, &files, quiet, finish)
    };
    moved::to(&scratch, &url, quiet, put)?;
    upload::forget(&scratch)?;
    Ok(manifest)
}

/// Has Slurm run the tasks and their merge.
fn by_slurm(corpus: &Corpus, args: &Args, options: &Options, program: PathBuf) -> Result<Manifest> {
    let Location::Local(out) = args.out()? else {
        return Err(Fault::usage("tasks merge into a folder of this machine")
            .at("--out")
            .found(args.out()?)
            .wanted("a path")
            .hint("build into a folder, then `zdata publish` it"));
    };
    if let Some(manifest) = ingest::build::up_to_date(corpus, out, options)? {
        return Ok(up_to_date(manifest));
    }
    let work = ingest::build::work_folder(out, options)?;
    let (cache, _lock) = ingest::build::hold(out, &work, options)?;
    let engine = options.engine.unwrap_or_default();
    let plan = cluster::plan_build(corpus, &work, engine)?;
    for stage in [Stage::Scan, Stage::Encode] {
        let (all, left) = (plan.tasks_of(stage).len(), plan.missing(stage)?.len());
        if all > 0 {
            let all = counted(all, "task");
            note!("{}: {left} of {all} to run, in {}", stage.name(), work.display());
        }
    }
    let (sbatch, workers) = (args.sbatch.clone(), options.workers);
    slurm::run(&plan, out, &slurm::Options { program, sbatch, workers })?;
    cluster::tallies(&plan)?.iter().for_each(|tally| note!("{tally}"));
    let manifest = open::manifest(out)?;
    inspect::notes(&manifest).iter().for_each(|note| note!("{note}"));
    plan.close()?;
    if options.work.is_none() {
        cache.clear(options.quiet)?;
    }
    Ok(manifest)
}

/// A store is nothing to build from: parts are.
fn refuse_from(from: &Location) -> Fault {
    Fault::usage("`--from` was removed: parts of earlier builds are used again instead of stores")
        .at("--from")
        .found(from)
        .wanted("--cache-dir FOLDER, the same one at every build")
        .hint("what an edit does not concern is found there and not made again")
}

/// Records that a check lists of each file for people.
const LISTED: u64 = 100;

/// Lists the records that are not documents. It is an error where a build would stop: at one of them, or at a source of
/// which nothing is left.
fn check(corpus: &Corpus, json: bool, options: check::Options) -> Result<()> {
    let checked = check::check(corpus, options, |bad| {
        let place = bad.fault.place().unwrap_or(bad.file);
        let reason = bad.reason.unwrap_or("unreadable");
        let what = bad.fault.what();
        let answer = serde_json::json!({
            "source": bad.source, "file": bad.file, "place": place, "reason": reason, "what": what,
        });
        let shown = || format!("{}: {reason}: {}\n", output::plain(place), output::plain(what));
        output::answer(json, &answer, shown)
    })?;
    let check::Checked { files, documents, bad, stop, emptied } = checked;
    let (files, documents) = (counted(files, "file"), counted(documents, "document"));
    note!("{files}: {documents}, {}", counted(bad, "bad record"));
    stop.or(emptied).map_or(Ok(()), |first| {
        Err(first.hint("a build would stop here; standard output lists such records"))
    })
}

/// Shows what a build would read, write and need.
fn dry_run(corpus: &Corpus, json: bool, engine: Option<Engine>, workers: usize) -> Result<()> {
    let forecast = ingest::build::forecast(corpus, engine, workers)?;
    let answer = serde_json::to_value(&forecast)
        .map_err(|error| Fault::bug("a forecast is not JSON").found(error))?;
    output::answer(json, &answer, || shown(&forecast))
}

/// A forecast as text.
fn shown(forecast: &Forecast) -> String {
    let Forecast { sources, part_bytes, store_bytes, workers, .. } = forecast;
    let Forecast { scan_bytes, memory_bytes, max_document_bytes, .. } = forecast;
    let mut text = String::new();
    for SourceForecast {
        source,
        files,
        bytes,
        parts,
        sampled_bytes,
        documents,
        tokens,
        sampled_dropped,
        compared,
    } in sources
    {
        let of = [counted(*files, "file"), words::bytes(*bytes), counted(*parts, "part")];
        let about = if sampled_bytes == bytes { "" } else { "about " };
        let counts = [counted(*documents, "document"), counted(*tokens, "token")];
        let compared = if *compared { ", before documents are compared" } else { "" };
        let dropped = match sampled_dropped {
            0 => String::new(),
            count => format!("; {} of the sample dropped", counted(*count, "record")),
        };
        let (of, counts) = (of.join(", "), counts.join(", "));
        text += &format!("{source}: {of}; {about}{counts}{compared}{dropped}\n");
    }
    let parts: u64 = sources.iter().map(|source| source.parts).sum();
    let (part_bytes, store) = (words::bytes(*part_bytes), words::bytes(*store_bytes));
    let (memory, record) = (words::bytes(*memory_bytes), words::bytes(*max_document_bytes));
    let workers = counted(*workers, "worker");
    text +=
        &format!("parts: {parts}, of about {part_bytes} (part_bytes), or one file or row group\n");
    text += &format!("store: about {store}\n");
    if *scan_bytes > 0 {
        let scan = words::bytes(*scan_bytes);
        text += &format!("dedup scan: at most about {scan} on the disk while it decides\n");
    }
    text += &format!(
        "memory: at most {memory} with {workers}, and {RECORD_FACTOR} times the longest record that each of them \
         reads (max_document_bytes allows documents of {record}, and JSON lines of six times that)\n"
    );
    text
}

/// Does it. Jobs of Slurm run `program`.
pub(crate) fn exec(args: Args, quiet: bool, program: PathBuf) -> Result<()> {
    if let Some(from) = &args.from {
        return Err(refuse_from(from));
    }
    if !args.sbatch.is_empty() && args.executor != Place::Slurm {
        return Err(Fault::usage("only a build under Slurm has a job that takes arguments")
            .at("--sbatch")
            .found(args.sbatch.join(" "))
            .hint("add --executor slurm, or leave --sbatch out"));
    }
    let corpus = Corpus::read(&args.corpus)?;
    let workers = args.workers.unwrap_or_else(default_workers);
    if args.check {
        // A program takes them all.
        let listed = if args.json { u64::MAX } else { LISTED };
        return check(&corpus, args.json, check::Options { workers, quiet, listed });
    }
    let engine = args.encoder.map(|encoder| match encoder {
        Encoder::Fastest => Engine::Fastest,
        Encoder::Reference => Engine::Reference,
    });
    if args.dry_run {
        return dry_run(&corpus, args.json, engine, workers);
    }
    let options = Options { workers, engine, quiet, work: args.cache_dir.clone() };
    let manifest = if args.executor == Place::Slurm {
        by_slurm(&corpus, &args, &options, program)?
    } else {
        match args.out()? {
            Location::Object(target) => remote_build(&corpus, target, options)?,
            Location::Local(folder) => {
                let kept = options.work.is_some();
                report(ingest::build(&corpus, folder, options)?, kept)
            }
        }
    };
    let out = args.out()?;
    let text = || format!("{}  {out}\n", manifest.digest);
    output::answer(args.json, &inspect::json(out, &manifest), text)
}
