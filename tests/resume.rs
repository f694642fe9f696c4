//! Fear: that a kill leaves a trace.
//!
//! Each test kills a real process with SIGKILL at moments spread over its life, runs the same command again until it
//! ends, and compares every byte with an undisturbed one. `ZSTACK_KILLS` sets how many (default 4).

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use contract::{Key, Purpose, draw};

use crate::support::{Scratch, arg, assert_same_tree, json_lines, zdata, zdata_command};

fn kills() -> u64 {
    std::env::var("ZSTACK_KILLS").map_or(4, |text| text.parse().unwrap())
}

/// Starts `command`, kills it after `life`, and says whether it was still alive then.
fn kill_after(mut command: Command, life: Duration) -> bool {
    let mut child: Child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(life);
    let alive = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    alive
}

/// A moment in the first nine tenths of `whole`, for kill number `index`.
fn moment(whole: Duration, index: u64) -> Duration {
    whole.mul_f64((draw(Key::from_seed(5), Purpose::Generate, index) % 900) as f64 / 1000.0)
}

#[test]
fn a_killed_build_ends_with_the_same_bytes() {
    let scratch = Scratch::new();
    let small = crate::support::corpus(&scratch, 50, "shard_tokens = 65536");
    scratch.write("raw/web-2.jsonl", json_lines(9, 12_000));
    let build =
        |store: &str| ["build", arg(&small), "--out", store, "--workers", "2"].map(str::to_owned);
    let undisturbed = scratch.path("undisturbed");
    let start = Instant::now();
    zdata(&build(arg(&undisturbed)).each_ref().map(String::as_str)).ok();
    let whole = start.elapsed();
    let mut hit = 0;
    for index in 0..kills() {
        let store = scratch.path(&format!("killed-{index}"));
        let command = build(arg(&store));
        let command = command.each_ref().map(String::as_str);
        // Three kills in a row: the second build of a folder has to survive what the first one left, too.
        for life in 0..3 {
            hit += u64::from(kill_after(zdata_command(&command), moment(whole, 3 * index + life)));
            if !store.join("manifest.json").exists() && store.exists() {
                zdata(&["inspect", arg(&store)]).fails(3, &["build"]);
            }
        }
        zdata(&command).ok();
        zdata(&["verify", arg(&store)]).ok();
        assert_same_tree(&undisturbed, &store);
    }
    assert!(hit > 0, "no build was still alive when it was to be killed");
}

#[cfg(feature = "train")]
mod training {
    use super::*;
    use crate::support::{build, corpus, curriculum, ztrain, ztrain_command};
    use std::fs;

    #[test]
    fn a_killed_run_ends_with_the_same_bytes() {
        let scratch = Scratch::new();
        let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
        let curriculum = curriculum(&scratch, &store, "run.toml", &[]);
        let run = |out: &str| {
            ["--curriculum", arg(&curriculum), "--out", out, "--checkpoint-every", "3"]
                .map(str::to_owned)
        };
        let undisturbed = scratch.path("undisturbed");
        let start = Instant::now();
        ztrain(&run(arg(&undisturbed)).each_ref().map(String::as_str)).ok();
        let whole = start.elapsed();
        let mut hit = 0;
        for index in 0..kills() {
            let folder = scratch.path(&format!("killed-{index}"));
            let command = run(arg(&folder));
            let command = command.each_ref().map(String::as_str);
            for life in 0..2 {
                hit += u64::from(kill_after(
                    ztrain_command(&command),
                    moment(whole, 2 * index + life),
                ));
            }
            ztrain(&command).ok();
            let read =
                |run: &std::path::Path| fs::read_to_string(run.join("ledger.jsonl")).unwrap();
            assert!(read(&undisturbed) == read(&folder), "the ledgers of kill {index} differ");
            assert_same_tree(
                &undisturbed.join("checkpoints/step-20"),
                &folder.join("checkpoints/step-20"),
            );
            ztrain(&["compare", arg(&undisturbed), arg(&folder)]).ok();
        }
        assert!(hit > 0, "no run was still alive when it was to be killed");
        for step in ["1", "13", "20"] {
            let verdict = ztrain(&["replay", "--run", arg(&undisturbed), "--step", step]).ok();
            assert!(verdict.contains("same bits"), "{verdict}");
        }
        zdata(&["verify-run", arg(&undisturbed)]).ok();
    }
}
