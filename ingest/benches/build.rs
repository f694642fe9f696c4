//! The speed of a build compared with its encoder alone, on the same cores and text, in the same run.
//!
//! ```text
//! cargo bench -p ingest --bench build -- [--rounds 5] tokenizer.json raw/*.jsonl.zst
//! ```
//!
//! It runs on one core, two, four and so on, up to all. Each row is a separate process, pinned by `taskset`, since
//! encoders keep caches: `fastokens alone` encodes documents that were read and parsed before, with one thread per
//! core; `zdata build` covers everything from the compressed files to the committed store; `loading` loads the
//! tokenizer. The rows run several times in turns. Reported are the median wall time and the least user CPU time of all
//! threads, which other load affects least; a build without loading, compared with the encoder, is the steady state.

#![expect(clippy::print_stdout, reason = "a benchmark prints its rows")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use contract::{Fault, Result};
use ingest::build::Options;
use ingest::source::{self, Fields, Format, Limits, Parsed};
use ingest::tokenize::{Engine, Tokenizer};
use ingest::{Corpus, Outcome, build};

/// The allocator of `zdata`, for both rows.
#[global_allocator]
static ALLOCATOR: allocator::ExitWithoutMemory = allocator::ExitWithoutMemory;

fn main() {
    // Cargo adds `--bench`.
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let (rounds, args) = match args.split_first() {
        Some((flag, [number, rest @ ..])) if flag == "--rounds" => {
            (number.parse().unwrap_or(0), rest.to_vec())
        }
        _ => (5, args),
    };
    let outcome = match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["row", kind, workers, tokenizer, files @ ..] => row(kind, workers, tokenizer, files),
        [_, _, ..] if rounds > 0 => table(&args, rounds),
        _ => {
            println!(
                "usage: cargo bench -p ingest --bench build -- [--rounds 5] tokenizer.json FILES.jsonl.zst"
            );
            Ok(())
        }
    };
    if let Err(fault) = outcome {
        eprintln!("error: {fault}");
        std::process::exit(1);
    }
}

/// Runs every row, each in its own process.
fn table(args: &[String], rounds: usize) -> Result<()> {
    println!(
        "{:<16} {:>5} {:>10} {:>12} {:>14}",
        "what", "cores", "MB/s text", "M tokens/s", "user's seconds"
    );
    let kinds = [("alone", "fastokens alone"), ("build", "zdata build"), ("load", "loading")];
    let there = std::thread::available_parallelism().map_or(1, usize::from);
    for cores in
        std::iter::successors(Some(1), |cores| Some(2 * cores)).take_while(|cores| *cores <= there)
    {
        let mut runs: [Vec<Row>; 3] = Default::default();
        for _ in 0..rounds {
            for ((kind, _), runs) in kinds.iter().zip(&mut runs) {
                runs.push(spawn(kind, cores, args)?);
            }
        }
        let mut used = [0.0; 3];
        let mut speeds = [0.0; 3];
        for (number, ((_, what), runs)) in kinds.iter().zip(&mut runs).enumerate() {
            runs.sort_by(|a, b| a.text.total_cmp(&b.text));
            let Row { text, tokens, .. } = runs[rounds / 2];
            used[number] = runs.iter().map(|run| run.user).fold(f64::INFINITY, f64::min);
            speeds[number] = text;
            println!("{what:<16} {cores:>5} {text:>10.1} {tokens:>12.1} {:>14.2}", used[number]);
        }
        let [alone, build, load] = used;
        println!("{:<16} {cores:>5} {:>9.0}%", "build / alone", 100.0 * speeds[1] / speeds[0]);
        println!("{:<16} {cores:>5} {:>37.0}%", "steady state", 100.0 * alone / (build - load));
    }
    Ok(())
}

/// The results of a row: MB of text and millions of tokens per second, and seconds of user CPU time.
struct Row {
    text: f64,
    tokens: f64,
    user: f64,
}

/// Runs a row.
fn spawn(kind: &str, cores: usize, args: &[String]) -> Result<Row> {
    let machine = |error: std::io::Error| Fault::machine(format!("cannot start a row: {error}"));
    let program = std::env::current_exe().map_err(machine)?;
    let list = format!("0-{}", cores - 1);
    let workers = cores.to_string();
    let mut command = Command::new("taskset");
    command.args(["-c", &list]).arg(program).args(["row", kind, &workers]).args(args);
    let output = command.output().map_err(machine)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let numbers: Vec<f64> = text.split_whitespace().flat_map(str::parse).collect();
    match numbers[..] {
        [text, tokens, user] => Ok(Row { text, tokens, user }),
        _ => Err(Fault::machine("a row failed").found(String::from_utf8_lossy(&output.stderr))),
    }
}

/// The user CPU time of this process so far, in seconds.
fn user() -> Result<f64> {
    let path = Path::new("/proc/self/stat");
    let stat = std::fs::read_to_string(path).map_err(|e| Fault::io("read", path, &e))?;
    // The program's name, in parentheses, may hold spaces; the 12th number after it is this time, in ticks of 10 ms.
    let ticks = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(11));
    let ticks: Option<f64> = ticks.and_then(|ticks| ticks.parse().ok());
    ticks.map(|ticks| ticks / 100.0).ok_or_else(|| Fault::machine("no time in /proc/self/stat"))
}

fn row(kind: &str, workers: &str, tokenizer: &str, files: &[&str]) -> Result<()> {
    let workers: usize = workers.parse().map_err(|_| Fault::usage("workers is not a number"))?;
    let Measured { bytes, tokens, seconds, user } = match kind {
        "alone" => alone(workers, tokenizer, files)?,
        "load" => loading(tokenizer)?,
        _ => whole(workers, tokenizer, files)?,
    };
    println!("{} {} {user}", bytes as f64 / seconds / 1e6, tokens as f64 / seconds / 1e6);
    Ok(())
}

/// What was encoded, and the wall time and user CPU time it took.
struct Measured {
    bytes: u64,
    tokens: u64,
    seconds: f64,
    user: f64,
}

/// Loads the tokenizer, up to the first text.
fn loading(tokenizer: &str) -> Result<Measured> {
    let (begun, used) = (Instant::now(), user()?);
    let bytes =
        std::fs::metadata(tokenizer).map_err(|e| Fault::io("read", Path::new(tokenizer), &e))?;
    let tokens = Tokenizer::read(Path::new(tokenizer), Engine::Fastest)?.encode("a")?.len() as u64;
    let (seconds, user) = (begun.elapsed().as_secs_f64(), user()? - used);
    Ok(Measured { bytes: bytes.len(), tokens, seconds, user })
}

/// The encoder on documents in memory.
fn alone(workers: usize, tokenizer: &str, files: &[&str]) -> Result<Measured> {
    let tokenizer = Tokenizer::read(Path::new(tokenizer), Engine::Fastest)?;
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
    let (begun, used) = (Instant::now(), user()?);
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
    let (seconds, user) = (begun.elapsed().as_secs_f64(), user()? - used);
    let bytes = texts.iter().map(|text| text.len() as u64).sum();
    Ok(Measured { bytes, tokens, seconds, user })
}

/// A build, from opening the corpus to the committed manifest.
fn whole(workers: usize, tokenizer: &str, files: &[&str]) -> Result<Measured> {
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
    let options = Options { workers, engine: None, quiet: true, work: None };
    let (begun, used) = (Instant::now(), user()?);
    let outcome = build(&corpus, &store.path().join("store"), options)?;
    let (seconds, user) = (begun.elapsed().as_secs_f64(), user()? - used);
    let (Outcome::Built { manifest, .. } | Outcome::UpToDate(manifest)) = outcome;
    let streams = manifest.sources.iter().flat_map(|source| [&source.train, &source.validation]);
    let sum = streams.fold((0, 0), |(bytes, tokens), stream| {
        (bytes + stream.text_bytes, tokens + stream.tokens)
    });
    Ok(Measured { bytes: sum.0, tokens: sum.1, seconds, user })
}
