//! What planning costs: 1,000 sources of 10^13 tokens together, 1.3 million steps, two phases of different length and a
//! ramp.
//!
//! `cargo bench -p mixer`. Each row is the mean over many queries at one place of the run.

#![expect(clippy::print_stdout, reason = "a benchmark prints its rows")]

use std::hint::black_box;
use std::time::Instant;

use mixer::{Curriculum, DataPlan, SourceFacts};

fn main() {
    let facts: Vec<SourceFacts> = (0..1000u64)
        .map(|i| {
            let tokens = 5_000_000_000 + i * 10_010_010;
            SourceFacts {
                name: format!("source-{i:03}"),
                tokens,
                documents: tokens / 900,
                unit: 131_072,
                selection: None,
            }
        })
        .collect();
    let total: u64 = facts.iter().map(|facts| facts.tokens).sum();
    println!("{} sources, {total} tokens", facts.len());
    let text = curriculum();
    let started = Instant::now();
    let curriculum = Curriculum::parse(&text, "bench.toml").expect("the text is fixed");
    println!("{:<44} {:>10.1} us", "Curriculum::parse", started.elapsed().as_secs_f64() * 1e6);
    let started = Instant::now();
    let plan = DataPlan::new(&curriculum, &facts).expect("the curriculum fits its sources");
    println!("{:<44} {:>10.1} us", "Plan::new", started.elapsed().as_secs_f64() * 1e6);
    let before = resident();
    for step in [10, 100_000, 1_000_000, 1_200_000, plan.steps()] {
        questions(&plan, step);
    }
    seeks(&plan);
    println!("resident memory {before} KiB before the questions, {} KiB after", resident());
}

/// Three phases over all sources, their weights far apart; the last is a ramp.
fn curriculum() -> String {
    let mix = |power: u32| -> String {
        let weight = |i: u64| 1 + (i * 7919 % 1000).pow(power);
        (0..1000).map(|i| format!("source-{i:03} = {}", weight(i))).collect::<Vec<_>>().join(", ")
    };
    let limits: String =
        (0..1000).map(|i| format!("[source.source-{i:03}]\nmax_epochs = 1000000\n")).collect();
    format!(
        "store = \"s\"\n{limits}[[phase]]\nname = \"a\"\nsteps = 900_000\nseq_len = 4096\nbatch = 2048\n\
         mix = {{ {} }}\n\
         [[phase]]\nname = \"b\"\nsteps = 200_000\nseq_len = 32_768\nbatch = 256\nmix = {{ {} }}\n\
         [[phase]]\nname = \"c\"\nsteps = 200_000\nseq_len = 4096\nbatch = 2048\n\
         mix = {{ from = {{ {} }}, to = {{ {} }}, curve = \"cosine\" }}\n",
        mix(1),
        mix(2),
        mix(1),
        mix(2)
    )
}

/// The time from a step's number to the text of a micro-batch of eight sequences, at steps all over the run.
fn seeks(plan: &DataPlan) {
    let mut times: Vec<f64> = (0..50_000u64)
        .map(|i| {
            // Multiples of the golden ratio: each step is far from the one before.
            let step = 1 + i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % plan.steps();
            let started = Instant::now();
            let spec = plan.step(step).expect("the step is part of the run");
            let first = spec.first_sample + i % (spec.batch - 8);
            for sample in first..first + 8 {
                black_box(plan.sample(sample).expect("the sample is part of the run"));
            }
            started.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    for (name, share) in [("median", 0.5), ("99th percentile", 0.99), ("slowest", 1.0)] {
        let at = (share * (times.len() - 1) as f64) as usize;
        println!("{:<44} {:>10.3} us", format!("a seek, {name} of {}", times.len()), times[at]);
    }
}

fn questions(plan: &DataPlan, step: u64) {
    let spec = plan.step(step).expect("the step is part of the run");
    let samples = spec.first_sample..spec.first_sample + spec.batch;
    row(&format!("Plan::sample, step {step}"), spec.batch, || {
        for sample in samples.clone() {
            black_box(plan.sample(sample).expect("the sample is part of the run"));
        }
    });
    let spec = plan.sample(spec.first_sample).expect("the sample is part of the run");
    let (source, start) = (spec.source, spec.spans[0].start);
    row(&format!("Plan::visits of 1,000 tokens, step {step}"), 1, || {
        let _ = black_box(plan.visits(source, start..start + 1000));
    });
    row(&format!("Plan::digest_through, step {step}"), 1, || {
        black_box(plan.digest_through(step));
    });
}

/// Runs `ask` for a fifth of a second and prints the mean time of one of its `each` answers.
fn row(name: &str, each: u64, mut ask: impl FnMut()) {
    ask();
    let (started, mut asked) = (Instant::now(), 0);
    while started.elapsed().as_millis() < 200 {
        ask();
        asked += each;
    }
    println!("{name:<44} {:>10.3} us", started.elapsed().as_secs_f64() * 1e6 / asked as f64);
}

/// Resident memory in KiB, if the system reports it.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}
