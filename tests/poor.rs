//! Fear: that no store can be written to a file system without locks, hard links or syncing of folders.
//!
//! The refusals are real: a preloaded library (`poor.cpp`, compiled here) answers like such a file system.

use std::fs;
use std::process::{Command, Stdio};

use crate::support::{Ran, Scratch, arg, assert_same_tree, build, compiled, corpus, zdata_command};

#[test]
fn a_poor_file_system_takes_every_store_and_one_writer() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 60, "part_bytes = 1");
    let store = build(&scratch, &corpus, "store");
    let library = compiled("poor.cpp", "poor.so");
    let command = |args: &[&str]| {
        let mut command = zdata_command(args);
        command.env("LD_PRELOAD", &library);
        command
    };
    let poor = |args: &[&str]| -> Ran { command(args).output().unwrap().into() };
    let [out, tasks, merged, mds] =
        ["out", "tasks", "merged", "mds"].map(|name| scratch.path(name));
    let built = poor(&["build", arg(&corpus), "--out", arg(&out)]);
    for note in ["knows no locks", "cannot sync folders"] {
        assert_eq!(built.err.matches(note).count(), 1, "{}", built.err);
    }
    built.ok();
    assert_same_tree(&store, &out);
    let plan = poor(&["task", "plan", arg(&corpus), "--cache-dir", arg(&tasks)]);
    let plan = plan.ok().split_whitespace().next().unwrap().to_owned();
    for task in ["0", "1", "2"] {
        let run = ["task", "run", "--cache-dir", arg(&tasks), "--plan", &plan, "--index", task];
        poor(&run).ok();
        // A second result is compared with the first.
        assert!(poor(&run).ok().trim().ends_with("again"));
    }
    let merge =
        ["task", "merge", "--cache-dir", arg(&tasks), "--plan", &plan, "--out", arg(&merged)];
    poor(&merge).ok();
    assert_same_tree(&store, &merged);
    poor(&["export", arg(&store), "--format", "mds", "--out", arg(&mds)]).ok();
    let left = fs::read_dir(scratch.path("")).unwrap().map(|it| it.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains(".lock")).collect();
    assert!(left.is_empty(), "{left:?}");

    // Another process of this machine holds the place, and then ends.
    let place = scratch.path("held");
    let line = |process: u32| {
        let word = |path: &str| fs::read_to_string(path).unwrap().trim().to_owned();
        let stat = word(&format!("/proc/{process}/stat"));
        let began = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap();
        let (host, boot) =
            (word("/proc/sys/kernel/hostname"), word("/proc/sys/kernel/random/boot_id"));
        let realm = fs::read_link("/proc/self/ns/pid").unwrap();
        format!("process {process} since {began}\non {host} {boot} {}\n", realm.display())
    };
    let mut holder = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let lease = scratch.write("held.partial.lock", line(holder.id()));
    let export = ["export", arg(&store), "--format", "mds", "--out", arg(&place)];
    let held = format!("process {}", holder.id());
    poor(&export).fails(6, &["another run is writing this folder", &held, arg(&lease)]);
    drop(holder.stdin.take());
    holder.wait().unwrap();
    poor(&export).ok();
    assert!(!lease.exists());
}
