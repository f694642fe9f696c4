//! Throughput of batches: `cargo bench -p loader`. Each row names its measurement; `loader/README.md` lists the main
//! ones.

#![expect(clippy::unwrap_used, reason = "a failing benchmark may panic")]
#![expect(clippy::print_stdout, reason = "results go to standard output")]

#[path = "../tests/it/support.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod support;

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use contract::{Digest, Hasher};
use loader::{Batch, PrefetchOptions, Prefetcher, RankSlice, Stores, batch};
use mixer::{Curriculum, DataPlan, SourceFacts};
use store::read::ReadCache;
use store::write::ShardWriter;
use store::{BLOCK_TOKENS, PartRecord, SourceRecord, Split, StreamRecord};
use support::{PhaseText, commit_store, curriculum, head, record, scratch};

const SEQ_LEN: u32 = 4096;
const ROWS: u64 = 256;

fn main() {
    let dir = scratch();
    let path = dir.path().join("store");
    std::fs::create_dir(&path).unwrap();
    generate(&path, 16, 4 << 20, 600);
    limits();
    assembly(&path);
    drop(dir);
    first_batch();
    planning();
}

fn row(what: &str, value: f64, unit: &str) {
    println!("{what:<64} {value:>10.2} {unit}");
}

/// A store of `shards` shards of about `tokens` tokens, in documents of about `length`.
fn generate(path: &Path, shards: u64, tokens: u64, length: u64) {
    let head = head(path, "web", Split::Train, 2);
    let mut train = StreamRecord::empty();
    let mut state = 1u64;
    for index in 0..shards {
        let mut shard =
            ShardWriter::create(head.clone(), index as usize, train.tokens, train.documents)
                .unwrap();
        while shard.tokens() < tokens {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let count = 1 + (state >> 40) % (2 * length);
            let token = |i: u64| ((state >> 20).wrapping_mul(i + 1) & 0xffff) as u32;
            let text: Vec<u32> = (0..count).map(token).collect();
            shard.push(&text, &record("web", train.documents, train.tokens, count)).unwrap();
            (train.tokens, train.documents) = (train.tokens + count, train.documents + 1);
        }
        train.shards.push(shard.finish().unwrap());
    }
    let (validation, dropped, inputs) = (StreamRecord::empty(), Vec::new(), Vec::new());
    let (name, preparation) = ("web".to_owned(), String::new());
    let web = SourceRecord {
        name,
        preparation,
        inputs,
        train,
        validation,
        dropped,
        prepared: None,
        removed_file: None,
        keep: Vec::new(),
        parts: vec![PartRecord::default()],
    };
    commit_store(path, vec![web], 2, 131_072);
}

fn plan_over(stores: &Stores, path: &Path, steps: u64) -> DataPlan {
    let text = curriculum(&[path], &["web"], &[PhaseText(steps, SEQ_LEN, ROWS, 1, "web = 1")]);
    support::plan(&text, stores)
}

/// The best of several runs, in seconds of wall clock.
fn best(turns: u32, mut work: impl FnMut()) -> f64 {
    let mut time = || {
        let begin = Instant::now();
        work();
        begin.elapsed()
    };
    (0..turns).map(|_| time()).min().unwrap_or(Duration::MAX).as_secs_f64()
}

/// The best of several runs, in seconds of CPU time of this thread, so other processes do not count. (From the kernel's
/// accounting; wall clock if it has none.)
fn best_core(turns: u32, mut work: impl FnMut()) -> f64 {
    let spent = || -> Option<u64> {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    let mut time = || {
        let (begin, before) = (Instant::now(), spent());
        work();
        match before.zip(spent()) {
            Some((before, after)) => Duration::from_nanos(after - before),
            None => begin.elapsed(),
        }
    };
    (0..turns).map(|_| time()).min().unwrap_or(Duration::MAX).as_secs_f64()
}

/// The machine's limits: copying and hashing.
fn limits() {
    let from = vec![1u8; 256 << 20];
    let mut to = vec![0u8; 256 << 20];
    let copy = best_core(5, || black_box(&mut to).copy_from_slice(black_box(&from)));
    row(
        "copy between two 256 MiB buffers (bytes read + written)",
        2.0 * 0.268_435_456 / copy,
        "GB/s",
    );
    let hash = best_core(5, || {
        for _ in 0..64 {
            black_box(Digest::of_bytes(black_box(&from[..16 << 20])));
        }
    });
    row("xxh3-128 over 16 MiB", 64.0 * 0.016_777_216 / hash, "GB/s");
    let words = vec![7i32; SEQ_LEN as usize];
    let framed = best_core(5, || {
        for _ in 0..10_000 {
            black_box(Hasher::new().i32s(black_box(&words)).finish());
        }
    });
    row("Hasher::i32s over 16 KiB rows", f64::from(SEQ_LEN) * 4e-5 / framed, "GB/s");
}

fn rate(tokens: u64, seconds: f64) -> f64 {
    tokens as f64 / seconds / 1e6
}

fn assembly(path: &Path) {
    let stores = Stores::open(&[path]).unwrap();
    let step_tokens = u64::from(SEQ_LEN) * ROWS;
    let steps = stores.facts()[0].tokens / step_tokens;
    let plan = plan_over(&stores, path, steps);
    let all = |stores: &Stores| {
        for step in 1..=steps {
            black_box(batch(&plan, stores, step, RankSlice::WHOLE).unwrap());
        }
    };
    let first = best_core(1, || all(&stores));
    row(
        "batches + digests, first touch (every block checked), 1 thread",
        rate(steps * step_tokens, first),
        "M tokens/s",
    );
    let warm = best_core(5, || all(&stores));
    row("batches + digests, warm, 1 thread", rate(steps * step_tokens, warm), "M tokens/s");
    row("  that is", warm / (steps * step_tokens) as f64 * 1e9, "ns/token");
    parts(&plan, &stores, path, steps);
    for threads in [1, 2] {
        let (plan, stores) = (Arc::new(plan.clone()), Arc::new(Stores::open(&[path]).unwrap()));
        let run = || {
            let options = PrefetchOptions { threads, depth: 4 };
            let (plan, stores) = (Arc::clone(&plan), Arc::clone(&stores));
            let stream =
                Prefetcher::start(plan, stores, 1..steps + 1, RankSlice::WHOLE, options, Ok);
            let count = stream.unwrap().map(Result::<Batch, _>::unwrap).count();
            assert_eq!(count as u64, steps);
        };
        run();
        let what = format!("prefetcher, warm, {threads} reader thread(s)");
        row(&what, rate(steps * step_tokens, best(3, run)), "M tokens/s");
    }
}

/// How the time with a warm page cache is spent.
fn parts(plan: &DataPlan, stores: &Stores, path: &Path, steps: u64) {
    let samples = steps * ROWS;
    let tokens = (samples * u64::from(SEQ_LEN)) as f64;
    let start = |sample| plan.sample(sample).unwrap().spans[0].start;
    let planned = best_core(3, || {
        for sample in 0..samples {
            black_box(plan.sample(sample).unwrap());
        }
    });
    row("  Plan::sample", planned / tokens * 1e9, "ns/token");
    let stream = stores.stream("web", Split::Train).unwrap();
    let mut ids = Vec::new();
    let read = best_core(3, || {
        for from in (0..samples).map(start) {
            ids.clear();
            let end = stream.tokens().min(from + u64::from(SEQ_LEN));
            stream.read_ids(from..end, &mut ids).unwrap();
        }
    });
    row("  reading tokens", (read - planned) / tokens * 1e9, "ns/token");
    let mut starts = Vec::new();
    let found = best_core(3, || {
        for from in (0..samples).map(start) {
            starts.clear();
            stream.starts_in(from..from + u64::from(SEQ_LEN), &mut starts).unwrap();
        }
    });
    row("  finding document starts", (found - planned) / tokens * 1e9, "ns/token");
    let whole = batch(plan, stores, 1, RankSlice::WHOLE).unwrap();
    let hashed = best_core(5, || {
        for at in (0..20).flat_map(|_| 0..whole.rows) {
            let mut hasher = Hasher::new();
            hasher.tag("sequence.v1").i32s(whole.row(whole.columns().tokens, at));
            hasher
                .i32s(whole.row(whole.columns().positions, at))
                .bytes(whole.row(whole.columns().mask, at));
            black_box(hasher.finish());
        }
    });
    row("  digests", hashed / (20 * whole.columns().tokens.len()) as f64 * 1e9, "ns/token");
    let cold = best_core(3, || {
        let stores = Stores::open(&[path]).unwrap();
        let stream = stores.stream("web", Split::Train).unwrap();
        for block in 0..stream.tokens() / BLOCK_TOKENS {
            ids.clear();
            stream.read_ids(block * BLOCK_TOKENS..(block + 1) * BLOCK_TOKENS, &mut ids).unwrap();
        }
    });
    row("reading and checking blocks in order", rate(stream.tokens(), cold), "M tokens/s");
}

/// Time to the first batch with nothing open, over 1,000 shards.
fn first_batch() {
    let dir = scratch();
    generate(dir.path(), 1000, 80_000, 600);
    for files in [64, 1024] {
        let begin = Instant::now();
        let stores = Stores::open_with(&[dir.path()], ReadCache::new(files)).unwrap();
        let plan = plan_over(&stores, dir.path(), 70);
        let opened = begin.elapsed();
        let first = batch(&plan, &stores, 1, RankSlice::WHOLE).unwrap();
        let what = format!("1,000 shards, {files} open files: open, plan, first batch");
        row(&what, begin.elapsed().as_secs_f64() * 1e3, "ms");
        row("  opening and planning alone", opened.as_secs_f64() * 1e3, "ms");
        black_box(first);
        let rest = || {
            for step in 2..=20 {
                black_box(batch(&plan, &stores, step, RankSlice::WHOLE).unwrap());
            }
        };
        row(
            "  then warm, 1 thread",
            rate(19 * ROWS * u64::from(SEQ_LEN), best(3, rest)),
            "M tokens/s",
        );
    }
}

/// A store stub of 10^13 tokens: every step takes the same time.
fn planning() {
    let (tokens, documents) = (10_000_000_000_000, 10_000_000_000);
    let facts =
        [SourceFacts { name: "web".to_owned(), tokens, documents, unit: 131_072, selection: None }];
    let phases = [PhaseText(2_000_000, SEQ_LEN, 1024, 1, "web = 1")];
    let text = curriculum(&[Path::new("web.toml")], &["web"], &phases);
    let begin = Instant::now();
    let plan = DataPlan::new(&Curriculum::parse(&text, "described").unwrap(), &facts).unwrap();
    row("10^13 tokens: planning", begin.elapsed().as_secs_f64() * 1e3, "ms");
    for step in [10, 1_000_000] {
        let seconds = best(5, || {
            let spec = plan.step(step).unwrap();
            for sample in spec.first_sample..spec.first_sample + spec.batch {
                black_box(plan.sample(sample).unwrap());
            }
        });
        row(&format!("10^13 tokens: the 1,024 samples of step {step}"), seconds * 1e3, "ms");
    }
}
