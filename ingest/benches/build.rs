//! How fast a build is beside its encoder alone, on the same cores and text, in the same run.
//!
//! ```text
//! cargo bench -p ingest --bench build -- tokenizer.json raw/*.jsonl.zst
//! ```
//!
//! Each row is a process of its own, pinned by `taskset`, since encoders keep caches: `fastokens alone` encodes the
//! documents, read and parsed beforehand, with one thread for each core; `zdata build` goes from the compressed files
//! to the committed store. Each pair runs three times, alternating; the median counts.

#![expect(clippy::print_stdout, reason = "a benchmark prints its rows")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use contract::{Fault, Result};
use ingest::build::Options;
use ingest::cluster::plan::TASK_BYTES;
use ingest::source::{self, Fields, Format, Limits, Parsed};
use ingest::tokenize::{Engine, Tokenizer};
use ingest::{Corpus, Outcome, build};

const ROUNDS: usize = 3;

/// That of `zdata`, for both rows.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    // Cargo adds `--bench`.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let outcome = match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["row", kind, workers, tokenizer, files @ ..] => row(kind, workers, tokenizer, files),
        [_, _, ..] => table(&args),
        _ => {
            println!(
                "usage: cargo bench -p ingest --bench build -- tokenizer.json FILES.jsonl.zst"
            );
            Ok(())
        }
    };
    if let Err(fault) = outcome {
        eprintln!("error: {fault}");
        std::process::exit(1);
    }
}

/// Every row, each in its own process.
fn table(args: &[String]) -> Result<()> {
    println!("{:<18} {:>5} {:>10} {:>12}", "what", "cores", "MB/s text", "M tokens/s");
    for cores in [1usize, 2] {
        let mut medians = Vec::new();
        let kinds = ["alone", "build"];
        let mut runs = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (kind, runs) in kinds.iter().zip(&mut runs) {
                runs.push(spawn(kind, cores, args)?);
            }
        }
        for (kind, runs) in ["fastokens alone", "zdata build"].iter().zip(&mut runs) {
            runs.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (text, tokens) = runs[ROUNDS / 2];
            println!("{kind:<18} {cores:>5} {text:>10.1} {tokens:>12.1}");
            medians.push(text);
        }
        println!("{:<18} {cores:>5} {:>9.0}%", "build / alone", 100.0 * medians[1] / medians[0]);
    }
    Ok(())
}

/// MB of text and millions of tokens a second of one row.
fn spawn(kind: &str, cores: usize, args: &[String]) -> Result<(f64, f64)> {
    let machine = |error: std::io::Error| Fault::machine(format!("cannot start a row: {error}"));
    let program = std::env::current_exe().map_err(machine)?;
    let list = format!("0-{}", cores - 1);
    let workers = cores.to_string();
    let mut command = Command::new("taskset");
    command.args(["-c", &list]).arg(program).args(["row", kind, &workers]).args(args);
    let output = command.output().map_err(machine)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut numbers = text.split_whitespace().map(str::parse::<f64>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(text)), Some(Ok(tokens))) => Ok((text, tokens)),
        _ => Err(Fault::machine("a row failed").found(String::from_utf8_lossy(&output.stderr))),
    }
}

fn row(kind: &str, workers: &str, tokenizer: &str, files: &[&str]) -> Result<()> {
    let workers: usize = workers.parse().map_err(|_| Fault::usage("workers is not a number"))?;
    let (bytes, tokens, seconds) = match kind {
        "alone" => alone(workers, tokenizer, files)?,
        _ => whole(workers, tokenizer, files)?,
    };
    println!("{} {}", bytes as f64 / seconds / 1e6, tokens as f64 / seconds / 1e6);
    Ok(())
}

/// The encoder on documents in memory.
fn alone(workers: usize, tokenizer: &str, files: &[&str]) -> Result<(u64, u64, f64)> {
    let bytes =
        std::fs::read(tokenizer).map_err(|e| Fault::io("read", Path::new(tokenizer), &e))?;
    let tokenizer = Tokenizer::new(bytes, Engine::Fastest)?;
    let fields = Fields::at("text", None);
    let mut texts = Vec::new();
    for file in files {
        let mut input =
            source::open(Path::new(file), Format::JsonLines, &fields, &Limits::default())?;
        while let Some(slab) = input.next_slab()? {
            texts.extend(slab.parse(&fields)?.into_iter().filter_map(|parsed| match parsed {
                Parsed::Document(document) => Some(document.text),
                Parsed::Dropped { .. } => None,
            }));
        }
    }
    let next = std::sync::atomic::AtomicUsize::new(0);
    let begun = Instant::now();
    let tokens = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers)
            .map(|_| {
                scope.spawn(|| {
                    let mut tokens = 0;
                    loop {
                        let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        let Some(text) = texts.get(index) else { return Ok(tokens) };
                        tokens += tokenizer.encode(text)?.len() as u64;
                    }
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| {
            thread.join().map_err(|_| Fault::bug("a thread died")).and_then(|tokens| tokens)
        });
        joined.sum::<Result<u64>>()
    })?;
    let seconds = begun.elapsed().as_secs_f64();
    Ok((texts.iter().map(|text| text.len() as u64).sum(), tokens, seconds))
}

/// A build, from opening the corpus to the committed manifest.
fn whole(workers: usize, tokenizer: &str, files: &[&str]) -> Result<(u64, u64, f64)> {
    let path = |path: &str| {
        std::fs::canonicalize(path).map_err(|e| Fault::io("find", Path::new(path), &e))
    };
    let files = files.iter().map(|file| path(file)).collect::<Result<Vec<PathBuf>>>()?;
    let text = format!(
        "tokenizer = {:?}\n[[source]]\nname = \"text\"\nfiles = {files:?}\n",
        path(tokenizer)?
    );
    let store = tempfile::tempdir().map_err(|e| Fault::machine(format!("no scratch: {e}")))?;
    let corpus = store.path().join("corpus.toml");
    std::fs::write(&corpus, text).map_err(|e| Fault::io("write", &corpus, &e))?;
    let corpus = Corpus::read(&corpus)?;
    let (engine, task_bytes) = (Engine::Fastest, TASK_BYTES);
    let options = Options { workers, engine, quiet: true, work: None, task_bytes };
    let begun = Instant::now();
    let outcome = build(&corpus, &store.path().join("store"), options)?;
    let seconds = begun.elapsed().as_secs_f64();
    let (Outcome::Built { manifest, .. } | Outcome::UpToDate(manifest)) = outcome;
    let streams = manifest.sources.iter().flat_map(|source| [&source.train, &source.validation]);
    let sum = streams.fold((0, 0), |(bytes, tokens), stream| {
        (bytes + stream.text_bytes, tokens + stream.tokens)
    });
    Ok((sum.0, sum.1, seconds))
}
