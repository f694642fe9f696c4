//! Fear: that a build by many machines is another build.
//!
//! Tasks run in any order, twice, killed on the way; the store has every byte of the one built here. `slurm.sh` does the
//! same under a real Slurm; where there is none, its test says so in the log.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use contract::{Key, Permutation};

use crate::python::{skipped, tests_folder};
use crate::resume::{Fire, kills};
use crate::support::{
    Scratch, arg, assert_same_tree, build, corpus, json_lines, zdata, zdata_command,
};

fn planned(scratch: &Scratch, corpus: &Path, name: &str) -> (PathBuf, u64) {
    let work = scratch.path(name);
    let told =
        zdata(&["task", "plan", arg(corpus), "--work", arg(&work), "--task-bytes", "1"]).ok();
    (work, told.trim().parse().unwrap())
}

fn many_files(scratch: &Scratch) -> PathBuf {
    let corpus = corpus(scratch, 80, "shard_tokens = 4096");
    for file in 2..7 {
        scratch.write(&format!("raw/web-{file}.jsonl"), json_lines(10 + file, 30 * file));
    }
    // A source whose last file is empty, and a document that is none.
    scratch.write("raw/web-7.jsonl", "{\"text\": \"\"}\n");
    corpus
}

#[test]
fn tasks_in_any_order_twice_and_killed_make_the_bytes_of_a_local_build() {
    let scratch = Scratch::new();
    let corpus = many_files(&scratch);
    let local = build(&scratch, &corpus, "local");
    let (work, tasks) = planned(&scratch, &corpus, "work");
    assert_eq!(tasks, 9);
    let merge = |out: &Path| zdata(&["task", "merge", "--work", arg(&work), "--out", arg(out)]);
    let out = scratch.path("merged");
    merge(&out).fails(3, &["part-00000", "missing"]);
    let order = Permutation::new(Key::from_seed(3), tasks);
    let mut fire = Fire::new(std::time::Duration::from_millis(200), 0);
    for index in 0..tasks {
        let task = order.forward(index).to_string();
        let words = ["task", "run", "--work", arg(&work), "--index", &task, "--workers", "1"];
        // Killed, run, and run again: a second result is compared with the first.
        fire.kill(zdata_command(&words));
        let first = zdata(&words).ok();
        if index % 3 == 0 {
            assert_eq!(zdata(&words).ok().trim(), format!("{}  again", &first.trim()[..32]));
        }
    }
    let start = Instant::now();
    merge(&out).ok();
    let mut fire = Fire::new(start.elapsed(), 50);
    assert_same_tree(&local, &out);
    while let Some(index) = fire.round(kills()) {
        let out = scratch.path(&format!("merged-{index}"));
        let words = ["task", "merge", "--work", arg(&work), "--out", arg(&out)];
        fire.kill(zdata_command(&words));
        assert!(!out.exists() || out.join("manifest.json").exists());
        zdata(&words).ok();
        assert_same_tree(&local, &out);
    }
    let whole = scratch.path("whole");
    let told = zdata(&[
        "build",
        arg(&corpus),
        "--out",
        arg(&whole),
        "--engine",
        "tasks",
        "--task-bytes",
        "20000",
    ]);
    told.ok();
    assert_same_tree(&local, &whole);
    assert!(!scratch.path("whole.tasks").exists());
}

#[test]
fn a_second_result_that_differs_is_kept_and_stops_the_build() {
    let scratch = Scratch::new();
    let corpus = many_files(&scratch);
    let (work, tasks) = planned(&scratch, &corpus, "work");
    let run = |task: u64| {
        let task = task.to_string();
        zdata(&["task", "run", "--work", arg(&work), "--index", &task])
    };
    for task in 0..tasks {
        run(task).ok();
    }
    let part = |task: u64| work.join(format!("part-{task:06}.bin"));
    let before = fs::read(part(2)).unwrap();
    let file = scratch.path("raw/web-2.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replacen("doc-12-0", "doc-12-x", 1)).unwrap();
    let told = run(2).fails(4, &["task 2", "another result", ".conflict"]);
    assert_eq!(fs::read(part(2)).unwrap(), before, "{told}");
    let conflicts = || {
        let names = fs::read_dir(&work).unwrap().map(|entry| entry.unwrap().path());
        names
            .filter(|path| path.extension().is_some_and(|ending| ending == "conflict"))
            .collect::<Vec<_>>()
    };
    assert_eq!(conflicts().len(), 1);
    let out = scratch.path("out");
    let merge = || zdata(&["task", "merge", "--work", arg(&work), "--out", arg(&out)]);
    merge().fails(4, &["two results"]);
    // The second was right: the first goes, and its task is run again.
    fs::remove_file(part(2)).unwrap();
    fs::remove_file(&conflicts()[0]).unwrap();
    run(2).ok();
    merge().ok();
    assert_same_tree(&build(&scratch, &corpus, "local"), &out);
    // A bit that flips in a part is found before anything is committed.
    let mut bytes = fs::read(part(1)).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(part(1), bytes).unwrap();
    let bad = scratch.path("bad");
    let told = zdata(&["task", "merge", "--work", arg(&work), "--out", arg(&bad)]);
    assert!(matches!(told.code, Some(3 | 4)), "{told:?}");
    assert!(!bad.exists());
    run(1).fails(3, &["part-000001"]);
    // Another corpus is another plan.
    let text = fs::read_to_string(&corpus).unwrap();
    fs::write(&corpus, text.replace("1/50", "1/7")).unwrap();
    run(0).fails(4, &["planned"]);
    zdata(&["task", "plan", arg(&corpus), "--work", arg(&work)]).fails(4, &["planned"]);
}

#[test]
fn a_real_slurm_makes_the_bytes_of_a_local_build() {
    let script = tests_folder().join("slurm.sh");
    let ran = Command::new("bash").arg(script).arg(env!("CARGO_BIN_EXE_zdata")).output().unwrap();
    let told = String::from_utf8_lossy(&ran.stderr);
    match ran.status.code() {
        Some(0) => {
            let out = String::from_utf8_lossy(&ran.stdout);
            assert_eq!(out.matches("every byte as built here").count(), 2, "{out}");
            assert!(out.contains("both kept"), "{out}");
        }
        Some(77) => skipped("Slurm", told.lines().last().unwrap_or_default()),
        code => panic!("{code:?}: {told}"),
    }
}
