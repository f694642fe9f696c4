//! Fear: that workers, threads, stops or kills leave a trace in the bits.

use std::fs;

use loader::PrefetchOptions;
use trainer::checkpoint::{Retention, SnapshotOptions};

use crate::support::{Scratch, stop_after, workers};

/// Asserts that two runs left the same ledger and the same last checkpoint.
#[track_caller]
pub(crate) fn assert_same(scratch: &Scratch, a: &str, b: &str) {
    let ledger = scratch.ledger(a);
    assert!(ledger == scratch.ledger(b), "the ledgers of {a} and {b} differ");
    let (a, b) = (scratch.tree(a), scratch.tree(b));
    let step = |name: &str| -> Option<u64> {
        name.strip_prefix("checkpoints/step-")?.split('/').next()?.parse().ok()
    };
    let trained = ledger.lines().filter(|line| line.contains("\"kind\":\"step\"")).count();
    let newest = a.keys().filter_map(|name| step(name)).max();
    assert_eq!(newest, Some(trained as u64), "the last step has a checkpoint");
    let last = |tree: &std::collections::BTreeMap<String, Vec<u8>>| {
        let files = tree.iter().filter(|(name, _)| step(name) == newest);
        files.map(|(name, bytes)| (name.clone(), bytes.clone())).collect::<Vec<_>>()
    };
    assert!(last(&a) == last(&b), "the last checkpoints differ");
}

#[test]
fn workers_and_loader_threads_do_not_show() {
    let scratch = Scratch::new();
    scratch.train("plain");
    for (index, (count, threads, depth)) in
        [(1, 1, 1), (2, 3, 1), (3, 2, 7)].into_iter().enumerate()
    {
        let out = format!("other-{index}");
        let options = PrefetchOptions { threads, depth };
        let change = |exec: &mut trainer::ExecOptions| {
            workers(count)(exec);
            exec.prefetch = options;
        };
        scratch.run(&scratch.path("run.toml"), &out, change).unwrap();
        assert_same(&scratch, "plain", &out);
    }
}

#[test]
fn a_run_in_parts_is_the_whole_run() {
    let scratch = Scratch::new();
    let whole = scratch.train("whole");
    for last in [1, 4, 4, 6, 9] {
        let part = scratch.run(&scratch.path("run.toml"), "parts", stop_after(last)).unwrap();
        assert_eq!(part.step, last);
    }
    assert_eq!(scratch.train("parts"), whole);
    assert_same(&scratch, "whole", "parts");
    // The same command on a finished run finds nothing to do.
    assert_eq!(scratch.train("parts"), whole);
    assert_same(&scratch, "whole", "parts");
}

#[test]
fn what_a_kill_loses_is_computed_again_with_the_same_bits() {
    let scratch = Scratch::new();
    scratch.train("whole");
    let ledger = scratch.ledger("whole");
    for (index, cut) in
        [ledger.len() - 1, ledger.len() - 700, ledger.len() / 2].into_iter().enumerate()
    {
        let out = format!("killed-{index}");
        scratch.run(&scratch.path("run.toml"), &out, stop_after(8)).unwrap();
        // A kill may truncate the last line anywhere, and leave a checkpoint half written.
        let path = scratch.path(&out).join("ledger.jsonl");
        let torn = &ledger[..cut];
        if torn.len() < scratch.ledger(&out).len() {
            fs::write(&path, torn).unwrap();
        }
        let partial = scratch.path(&out).join("checkpoints/step-7");
        fs::create_dir_all(&partial).unwrap();
        fs::write(partial.join("weights-00000.safetensors.zdata.tmp"), "half").unwrap();
        fs::write(partial.join("moments-00000.safetensors"), "half").unwrap();
        scratch.train(&out);
        assert_same(&scratch, "whole", &out);
        assert!(!partial.exists(), "what was half written is gone");
    }
}

/// Checkpoints next to a ledger with none of their steps: it is unknown what they belong to.
#[test]
fn a_lost_ledger_stops_a_run_until_it_is_told_to_begin_again() {
    let scratch = Scratch::new();
    scratch.train("whole");
    let path = scratch.path("run.toml");
    scratch.run(&path, "lost", stop_after(8)).unwrap();
    let ledger = scratch.path("lost/ledger.jsonl");
    fs::write(&ledger, &scratch.ledger("lost")[..40]).unwrap();
    let fault = scratch.run(&path, "lost", |_| ()).unwrap_err();
    assert_eq!(fault.class(), contract::Class::Data, "{fault}");
    assert!(fault.to_string().contains("--restart"), "{fault}");
    scratch.run(&path, "lost", |exec| exec.restart = true).unwrap();
    assert_same(&scratch, "whole", "lost");
}

#[test]
fn checkpoints_stay_as_told() {
    let scratch = Scratch::new();
    let retention = Retention { newest: 2, every: 4, aged: false, pinned: 8 };
    let change =
        |exec: &mut trainer::ExecOptions| (exec.checkpoint_every, exec.retention) = (1, retention);
    scratch.run(&scratch.path("run.toml"), "kept", change).unwrap();
    let tree = scratch.tree("kept");
    let mut steps: Vec<&str> = tree
        .keys()
        .filter_map(|name| name.strip_prefix("checkpoints/")?.split('/').next())
        .collect();
    steps.dedup();
    assert_eq!(steps, ["step-10", "step-4", "step-8", "step-9"]);
    scratch.train("plain");
    assert_same(&scratch, "plain", "kept");
}

#[test]
fn a_state_before_a_jump_comes_out_of_memory() {
    let scratch = Scratch::new();
    scratch.train("plain");
    // Every loss counts as a spike, since the threshold is a hundred deviations below the mean, once there are eight.
    let change = |exec: &mut trainer::ExecOptions| {
        exec.snapshots = SnapshotOptions { states: 2, every: 2, spike: -100.0 };
        (exec.checkpoint_every, exec.retention) =
            (100, Retention { newest: 1, every: 0, aged: false, pinned: 8 });
    };
    scratch.run(&scratch.path("run.toml"), "ring", change).unwrap();
    assert_same(&scratch, "plain", "ring");
    let kept = |out: &str| {
        let tree = scratch.tree(out);
        tree.into_iter().filter(|(name, _)| name.starts_with("checkpoints")).collect::<Vec<_>>()
    };
    assert!(kept("ring").iter().any(|(name, _)| name == "checkpoints/step-8/manifest.json"));
    // A run resumed from that state alone ends with the same bytes.
    fs::remove_dir_all(scratch.path("ring/checkpoints/step-10")).unwrap();
    scratch.run(&scratch.path("run.toml"), "ring", change).unwrap();
    assert_same(&scratch, "plain", "ring");
    let events = fs::read_to_string(scratch.path("ring/events.jsonl")).unwrap();
    assert!(events.contains("\"from_step\":8") && events.contains("\"spike\""), "{events}");
    for outcome in crate::ranks::train_with(&scratch, "ranks", 3, |_, exec| change(exec)) {
        assert_eq!(outcome.unwrap().step, 10);
    }
    assert!(kept("ranks") == kept("ring"), "ranks keep the same");
}

#[test]
fn the_model_learns_and_the_balance_moves() {
    let scratch = Scratch::new();
    scratch.train("run");
    let ledger = scratch.ledger("run");
    let steps: Vec<serde_json::Value> =
        ledger.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
    let loss = |step: usize| steps[step]["loss"].as_f64().unwrap();
    assert!((loss(0) - 50f64.ln()).abs() < 0.2, "{}", loss(0));
    assert!(loss(9) < loss(0) - 0.2, "{} to {}", loss(0), loss(9));
    // Every layer counted every token of the step: 6 rows of 32 tokens.
    for layer in steps[0]["tokens_per_expert"].as_array().unwrap() {
        let total: u64 =
            layer.as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!(total, 6 * 32);
    }
}
