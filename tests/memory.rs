//! Fear: that the memory formula, by which runs are refused and machines are sized, differs from what a rank uses.
//!
//! Each case runs in its own process, since memory is counted per process.

use crate::support::{Scratch, arg, build, corpus, curriculum, is_full, ztrain};

/// The configuration of a run.
struct Case {
    name: &'static str,
    /// Changes to the curriculum.
    change: &'static [(&'static str, &'static str)],
    ranks: &'static [&'static str],
}

const WIDE: [(&str, &str); 5] = [
    ("hidden_size = 32", "hidden_size = 128"),
    ("moe_intermediate_size = 32", "moe_intermediate_size = 128"),
    ("num_hidden_layers = 2", "num_hidden_layers = 4"),
    ("head_dim = 16", "head_dim = 32"),
    ("steps = 12", "steps = 2"),
];

/// A micro-batch for each of eight ranks, or two for each of four, so that transfers overlap with computation.
const EIGHT: (&str, &str) = ("batch = 8", "batch = 16");

const BF16: (&str, &str) = ("dtype = \"f32\"", "dtype = \"bf16\"");
const CUT: (&str, &str) = ("seq_len = 64", "context_chunks = 4\nweight_shards = 2\nseq_len = 64");

const LONG: (&str, &str) = ("seq_len = 64", "context_chunks = 4\nseq_len = 512");

/// The first are run for every change; all with `FULL=1` (`tests/full.sh`).
const CASES: [Case; 18] = [
    Case { name: "f32", change: &[], ranks: &["1"] },
    Case { name: "f32, recomputed", change: &[], ranks: &["1", "--recompute"] },
    Case { name: "bf16", change: &[BF16], ranks: &["1"] },
    Case { name: "f32, cut", change: &[CUT], ranks: &["1"] },
    Case { name: "bf16, cut", change: &[BF16, CUT], ranks: &["1", "--recompute"] },
    Case { name: "f32, 2 ranks", change: &[], ranks: &["2"] },
    Case {
        name: "f32, 2 ranks, bucketed",
        change: &[],
        ranks: &["2", "--grad-reduce", "bucketed"],
    },
    Case { name: "bf16, 2 ranks", change: &[BF16], ranks: &["2", "--recompute"] },
    Case { name: "f32, cut, 2 ranks fold", change: &[CUT], ranks: &["2", "--tsp", "2"] },
    Case {
        name: "f32, long, 2 ranks share",
        change: &[LONG],
        ranks: &["2", "--cp=2", "--recompute"],
    },
    Case {
        name: "bf16, cut, 4 ranks share and fold",
        change: &[BF16, CUT],
        ranks: &["4", "--cp", "2", "--tsp", "2"],
    },
    Case {
        name: "bf16, 4 ranks, cut",
        change: &[EIGHT, BF16, CUT],
        ranks: &["4", "--grad-reduce", "bucketed"],
    },
    Case {
        name: "bf16, 4 ranks",
        change: &[EIGHT, BF16],
        ranks: &["4", "--grad-reduce", "bucketed", "--recompute"],
    },
    Case { name: "f32, 8 ranks", change: &[EIGHT], ranks: &["8"] },
    Case { name: "bf16, 8 ranks", change: &[EIGHT, BF16], ranks: &["8", "--recompute"] },
    Case { name: "f32, cut, 2 ranks share", change: &[CUT], ranks: &["2", "--cp", "2"] },
    Case { name: "bf16, cut, 4 ranks, 2 fold", change: &[BF16, CUT], ranks: &["4", "--tsp", "2"] },
    Case { name: "bf16, cut, 4 ranks share", change: &[BF16, CUT], ranks: &["4", "--cp", "4"] },
];

/// How many of them are run for every change.
const FEW: usize = 12;

#[test]
fn what_ranks_hold_at_most_is_the_formula() {
    let scratch = Scratch::new();
    let store = build(&scratch, &corpus(&scratch, 200, ""), "store");
    let cases = if is_full() { CASES.len() } else { FEW };
    for Case { name, change, ranks } in CASES.into_iter().take(cases) {
        let path = curriculum(&scratch, &store, "run.toml", &[&WIDE, change].concat());
        let command = ["bench", "step", "--curriculum", arg(&path), "--steps", "1", "--json"];
        let told = ztrain(&[&command[..], &["--workers", "1", "--nproc"], ranks].concat()).ok();
        let told: serde_json::Value = serde_json::from_str(&told).unwrap();
        for rank in told["table"]["memory"].as_array().unwrap() {
            let parts = rank["formula"].as_object().unwrap();
            let formula: u64 = parts.values().map(|part| part.as_u64().unwrap()).sum();
            let measured = rank["tensors"].as_u64().unwrap();
            println!("{name}: {measured} bytes, by the formula {formula}: {}", rank["formula"]);
            let off = formula as f64 / measured as f64 - 1.0;
            assert!(off.abs() < 0.08, "{name}: {off:+.3}: {rank}");
        }
    }
}
