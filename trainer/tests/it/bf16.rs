//! Fear: that bf16 or recomputation breaks guarantees that hold in f32.

use std::fs;

use tch::Device;
use trainer::model::ActivationCheckpointing;
use trainer::replay::{Replayer, Verdict};
use trainer::workers::Workers;

use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{Scratch, stop_after, table};

/// A scratch folder whose `run.toml` computes in bf16.
fn in_bf16() -> Scratch {
    let scratch = Scratch::new();
    scratch.edited("run.toml", &[("dtype = \"f32\"", "dtype = \"bf16\"")]);
    scratch
}

fn recomputing(workers: usize) -> impl Fn(&mut trainer::ExecOptions) {
    move |exec| exec.workers = Workers::new(workers).keeping(ActivationCheckpointing::LayerInputs)
}

#[test]
fn workers_ranks_parts_and_recomputation_do_not_show_in_bf16() {
    let scratch = in_bf16();
    let whole = scratch.train("whole");
    let path = scratch.path("run.toml");
    assert_eq!(scratch.run(&path, "workers", recomputing(3)).unwrap(), whole);
    assert_same(&scratch, "whole", "workers");
    for world in [2, 3] {
        let out = format!("ranks-{world}");
        // One rank recomputes activations, the others do not.
        for outcome in train_with(&scratch, &out, world, |rank, exec| {
            if rank == 1 {
                recomputing(2)(exec);
            }
        }) {
            assert_eq!(outcome.unwrap(), whole, "{world} ranks");
        }
        assert_same(&scratch, "whole", &out);
    }
    scratch.run(&path, "parts", stop_after(4)).unwrap();
    scratch.run(&path, "parts", stop_after(8)).unwrap();
    // The state after a kill: steps without a checkpoint, the last line truncated.
    let ledger = scratch.ledger("parts");
    fs::write(scratch.path("parts/ledger.jsonl"), &ledger[..ledger.len() - 300]).unwrap();
    assert_eq!(scratch.run(&path, "parts", recomputing(1)).unwrap(), whole);
    assert_same(&scratch, "whole", "parts");
}

#[test]
fn a_replay_in_bf16_says_same_bits_and_another_kind_does_not() {
    let scratch = in_bf16();
    scratch.train("run");
    let workers = Workers::new(2).keeping(ActivationCheckpointing::LayerInputs);
    let open = || Replayer::open(&scratch.path("run"), &table(), Device::Cpu, workers).unwrap();
    for step in [1, 8] {
        let mut replayer = open();
        let state = replayer.state_after(step - 1).unwrap();
        for micro_batch in 0..3 {
            assert_eq!(
                tools::replay::micro_batch(&replayer, &state, micro_batch)
                    .unwrap()
                    .replayed
                    .verdict,
                Verdict::SameBits
            );
        }
    }
    let wide = Scratch::new();
    wide.train("run");
    let line = |scratch: &Scratch| {
        let ledger = scratch.ledger("run");
        serde_json::from_str::<serde_json::Value>(ledger.lines().nth(1).unwrap()).unwrap()
    };
    let (narrow, wide) = (line(&scratch), line(&wide));
    assert_eq!(narrow["batch_digest"], wide["batch_digest"]);
    assert_ne!(narrow["micro_batch_losses"], wide["micro_batch_losses"]);
    let loss = |line: &serde_json::Value| line["loss"].as_f64().unwrap();
    assert!((loss(&narrow) - loss(&wide)).abs() < 1e-2, "{} and {}", loss(&narrow), loss(&wide));
}

#[test]
fn recomputation_changes_no_bit_in_f32() {
    let scratch = Scratch::new();
    let whole = scratch.train("whole");
    let run = scratch.run(&scratch.path("run.toml"), "again", recomputing(2));
    assert_eq!(run.unwrap(), whole);
    assert_same(&scratch, "whole", "again");
}

#[test]
fn a_model_in_bf16_learns() {
    let scratch = in_bf16();
    scratch.train("run");
    let ledger = scratch.ledger("run");
    let losses: Vec<f64> = ledger
        .lines()
        .skip(1)
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|step| step["loss"].as_f64().unwrap())
        .collect();
    assert!(losses[9] < losses[0] - 0.2, "{losses:?}");
}
