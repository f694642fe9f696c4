//! Fear: that a build by many machines gives another result.
//!
//! Tasks run in any order, twice, and are killed; the store has to equal a local build byte for byte. `slurm.sh` does
//! the same under a real Slurm; without one, its test says so in the log.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use contract::{Key, Permutation};

use crate::prepare::prepared;
use crate::python::{skipped, tests_folder};
use crate::resume::{Fire, kills};
use crate::support::{
    Ran, Scratch, arg, assert_same_tree, build, corpus, json_lines, zdata, zdata_command,
};

/// A plan with one task per file.
struct Planned {
    work: PathBuf,
    name: String,
    tasks: u64,
}

impl Planned {
    fn new(scratch: &Scratch, corpus: &Path, work: &str) -> Planned {
        let work = scratch.path(work);
        let words = ["task", "plan", arg(corpus), "--cache-dir", arg(&work)];
        let told = zdata(&words).ok();
        let (name, tasks) = told.trim().split_once("  ").unwrap();
        Planned { name: name.to_owned(), tasks: tasks.parse().unwrap(), work }
    }

    /// The arguments of a command.
    fn words<'a>(&'a self, verb: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        [&["task", verb, "--cache-dir", arg(&self.work), "--plan", &self.name], more].concat()
    }

    fn run(&self, task: u64) -> Ran {
        zdata(&self.words("run", &["--index", &task.to_string()]))
    }

    fn merge(&self, out: &Path) -> Ran {
        zdata(&self.words("merge", &["--out", arg(out)]))
    }

    fn folder(&self) -> PathBuf {
        self.work.join(&self.name)
    }

    /// Runs every task in a random order: killed, run, and sometimes run again, when the second result is compared.
    fn under_fire(&self, verb: &str) {
        let order = Permutation::new(Key::from_seed(3), self.tasks);
        let mut fire = Fire::new(std::time::Duration::from_millis(200), 0);
        for index in 0..self.tasks {
            let task = order.forward(index).to_string();
            let words = self.words(verb, &["--index", &task, "--workers", "1"]);
            fire.kill(zdata_command(&words));
            let first = zdata(&words).ok();
            if index % 3 == 0 {
                assert_eq!(zdata(&words).ok().trim(), format!("{}  again", &first.trim()[..32]));
            }
        }
    }
}

fn many_files(scratch: &Scratch) -> PathBuf {
    let corpus = corpus(scratch, 80, "part_bytes = 1");
    for file in 2..7 {
        scratch.write(&format!("raw/web-{file}.jsonl"), json_lines(10 + file, 30 * file));
    }
    // A source whose last file is empty, and an empty document.
    scratch.write("raw/web-7.jsonl", "{\"text\": \"\"}\n");
    corpus
}

#[test]
fn tasks_in_any_order_twice_and_killed_make_the_bytes_of_a_local_build() {
    let scratch = Scratch::new();
    let corpus = many_files(&scratch);
    let local = build(&scratch, &corpus, "local");
    let plan = Planned::new(&scratch, &corpus, "work");
    assert_eq!(plan.tasks, 9);
    let out = scratch.path("merged");
    plan.merge(&out).fails(3, &["encode task 0", "missing"]);
    // No step compares documents, so no task has anything to scan: a job array over all of them succeeds.
    assert_eq!(zdata(&plan.words("scan", &["--index", "8"])).ok(), "nothing to scan in task 8\n");
    zdata(&plan.words("scan", &["--index", "9"])).fails(2, &["no such task", "below 9"]);
    plan.under_fire("run");
    let start = Instant::now();
    plan.merge(&out).ok();
    let mut fire = Fire::new(start.elapsed(), 50);
    assert_same_tree(&local, &out);
    while let Some(index) = fire.round(kills()) {
        let out = scratch.path(&format!("merged-{index}"));
        let words = plan.words("merge", &["--out", arg(&out)]);
        fire.kill(zdata_command(&words));
        assert!(!out.exists() || out.join("manifest.json").exists());
        zdata(&words).ok();
        assert_same_tree(&local, &out);
    }
    assert!(!scratch.path("local.work").exists());
}

#[test]
fn a_second_result_that_differs_is_kept_and_stops_the_build() {
    let scratch = Scratch::new();
    let corpus = many_files(&scratch);
    let plan = Planned::new(&scratch, &corpus, "work");
    let (work, tasks) = (&plan.work, plan.tasks);
    let run = |task: u64| plan.run(task);
    for task in 0..tasks {
        run(task).ok();
    }
    let receipt = |task: u64| plan.folder().join(format!("encode-{task:06}.json"));
    let before = fs::read(receipt(2)).unwrap();
    let file = scratch.path("raw/web-2.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replacen("doc-12-0", "doc-12-x", 1)).unwrap();
    let told = run(2).fails(4, &["task 2", "another result", ".conflict"]);
    assert_eq!(fs::read(receipt(2)).unwrap(), before, "{told}");
    let parts = files(&work.join("parts"), |name| name.ends_with(".json"));
    assert_eq!(parts.len() as u64, tasks + 1);
    let conflicts = || files(&plan.folder(), |name| name.ends_with(".conflict"));
    assert_eq!(conflicts().len(), 1);
    let out = scratch.path("out");
    plan.merge(&out).fails(4, &["two results"]);
    // The second result was right: the first is removed, and its task is run again.
    fs::remove_file(receipt(2)).unwrap();
    fs::remove_file(&conflicts()[0]).unwrap();
    run(2).ok();
    plan.merge(&out).ok();
    assert_same_tree(&build(&scratch, &corpus, "local"), &out);
    // A flipped bit in a part is detected before anything is committed.
    let said: serde_json::Value = serde_json::from_slice(&fs::read(receipt(0)).unwrap()).unwrap();
    let part = work.join(format!("parts/{}.json", said["part"].as_str().unwrap()));
    let mut bytes = fs::read(&part).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&part, bytes).unwrap();
    let bad = scratch.path("bad");
    let told = plan.merge(&bad);
    assert!(matches!(told.code, Some(3 | 4)), "{told:?}");
    let name = part.file_name().unwrap().to_str().unwrap();
    assert!(told.err.contains(name) && !bad.exists(), "{told:?}");
    // Editing the corpus makes another plan. Tasks of this plan still do what was planned, wherever they run.
    let text = fs::read_to_string(&corpus).unwrap();
    fs::write(&corpus, text.replace("1/50", "1/7")).unwrap();
    assert!(run(0).ok().contains("again"));
    fs::remove_file(&corpus).unwrap();
    let elsewhere = Command::new(env!("CARGO_BIN_EXE_zdata"))
        .args(plan.words("run", &["--index", "0"]))
        .current_dir("/")
        .output();
    assert!(elsewhere.unwrap().status.success());
    let tokenizer = scratch.path("tokenizer.json");
    let bytes = fs::read(&tokenizer).unwrap();
    fs::write(&tokenizer, [&bytes[..], b"\n"].concat()).unwrap();
    run(0).fails(4, &["tokenizer changed", "planned"]);
    fs::write(&tokenizer, bytes).unwrap();
    let file = plan.folder().join("plan.json");
    let text = fs::read_to_string(&file).unwrap();
    let versions = text.split("\"versions\": \"").nth(1).unwrap()[..64].to_owned();
    fs::write(file, text.replace(&versions, &"0".repeat(64))).unwrap();
    run(0).fails(2, &["another version", "plan again"]);
}

/// The files in a folder whose name is `wanted`, sorted.
fn files(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let named = |path: &PathBuf| wanted(path.file_name().unwrap().to_str().unwrap());
    let mut found: Vec<PathBuf> = names.filter(named).collect();
    found.sort();
    found
}

#[test]
fn prepared_documents_by_tasks_are_those_of_a_local_build() {
    let scratch = Scratch::new();
    let corpus = prepared(&scratch);
    let local = build(&scratch, &corpus, "local");
    let plan = Planned::new(&scratch, &corpus, "work");
    let out = scratch.path("merged");
    plan.run(0).fails(3, &["scan"]);
    let decide = plan.words("decide", &[]);
    zdata(&decide).fails(3, &["scan task 0", "missing"]);
    plan.under_fire("scan");
    plan.merge(&out).fails(3, &["missing"]);
    let mut fire = Fire::new(std::time::Duration::from_millis(100), 0);
    while fire.round(1).is_some() {
        fire.kill(zdata_command(&decide));
    }
    zdata(&decide).ok();
    zdata(&decide).ok();
    plan.under_fire("run");
    plan.merge(&out).ok();
    assert_same_tree(&local, &out);
    zdata(&["verify", arg(&out)]).ok();
}

#[test]
fn after_an_edit_only_what_changed_is_made_again() {
    let scratch = Scratch::new();
    let corpus = prepared(&scratch);
    let text = fs::read_to_string(&corpus).unwrap();
    fs::write(&corpus, format!("part_bytes = 1\n{text}")).unwrap();
    for file in 2..7 {
        scratch.write(&format!("raw/web-{file}.jsonl"), json_lines(10 + file, 20));
    }
    let work = scratch.path("work");
    let again = |name: &str| {
        let out = scratch.path(name);
        let words = ["build", arg(&corpus), "--out", arg(&out)];
        let words = [&words[..], &["--cache-dir", arg(&work)]].concat();
        if name == "first" {
            let mut fire = Fire::new(std::time::Duration::from_millis(800), 3);
            while fire.round(2).is_some() {
                fire.kill(zdata_command(&words));
            }
        }
        let told = zdata(&words);
        assert_eq!(told.code, Some(0), "{told:?}");
        assert_same_tree(&build(&scratch, &corpus, &format!("{name}-local")), &out);
        told.err
    };
    again("first");
    let told = again("second");
    for stage in ["scan", "encode"] {
        assert!(told.contains(&format!("{stage}: made 0 of 10 parts (0 files, 0 B)")), "{told}");
    }
    let file = scratch.path("raw/web-4.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text + &json_lines(99, 1)).unwrap();
    let told = again("edited");
    assert!(
        !told.contains("reused 10") && told.matches("reused 9 parts (9 files,").count() > 0,
        "{told}"
    );
    let text = fs::read_to_string(&corpus).unwrap();
    fs::write(&corpus, text.replace("context = 300", "context = 250")).unwrap();
    let told = again("setting");
    assert!(told.contains("scan: made 0 of 10 parts"), "{told}");
    assert!(told.contains("reused 9 parts (9 files,"), "{told}");
    let prune =
        |more: &[&str]| zdata(&[&["task", "prune", "--cache-dir", arg(&work)], more].concat());
    let is_known = |name: &str| name.ends_with(".bin") || name.ends_with(".json");
    let parts = || files(&work.join("parts"), is_known).len();
    let all = parts();
    assert!(prune(&["--unused-days", "1"]).ok().contains("removed 0 parts"));
    let told = prune(&["--unused-days", "0", "--dry-run"]).ok();
    assert!(told.contains(&format!("would remove {all} parts")) && parts() == all, "{told}");
    prune(&["--unused-days", "0"]).ok();
    assert_eq!(parts(), 0);
    prune(&[]).fails(2, &["--unused-days"]);
    // The build has ended and removed its plan.
    let plan = format!("build-{}", "0".repeat(32));
    let run = ["task", "run", "--cache-dir", arg(&work), "--index", "0", "--plan"];
    zdata(&[&run[..], &[&plan]].concat()).fails(3, &["no such plan", "task plan"]);
    zdata(&[&run[..], &["0"]].concat()).fails(2, &["--plan", "plan-DIGEST"]);
}

/// Other files in a folder are kept, and results of one plan are never used by another.
#[test]
fn a_folder_of_parts_is_known_by_its_marker_and_a_plan_by_its_name() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 20, "");
    let mine = ["mine/plan.json", "mine/parts/.git", "mine/parts/.env", "mine/parts/x.bin"];
    let mine = mine.map(|name| scratch.write(name, "mine"));
    let (folder, out) = (scratch.path("mine"), scratch.path("out"));
    let work = ["--cache-dir", arg(&folder)];
    let build = ["build", arg(&corpus), "--out", arg(&out)];
    let refused: [&[&str]; 3] =
        [&build, &["task", "plan", arg(&corpus)], &["task", "prune", "--unused-days", "0"]];
    for words in refused {
        zdata(&[words, &work].concat()).fails(2, &["in the way", "parts", "--cache-dir"]);
        assert!(mine.iter().all(|file| file.exists()) && !out.exists());
    }
    zdata(&[&build[..], &["--cache-dir", arg(&out)]].concat())
        .fails(2, &["a folder each", "--cache-dir"]);
    assert!(!out.exists());
    let first = Planned::new(&scratch, &corpus, "work");
    (0..first.tasks).for_each(|task| drop(first.run(task).ok()));
    let text = fs::read_to_string(&corpus).unwrap();
    let second = scratch.write("second.toml", text.replace("1/50", "1/3"));
    let second = Planned::new(&scratch, &second, "work");
    (0..second.tasks).for_each(|task| drop(second.run(task).ok()));
    zdata(&["build", arg(&corpus), "--out", arg(&out), "--cache-dir", arg(&first.work)]).ok();
    let [one, two] = ["one", "two"].map(|name| scratch.path(name));
    first.merge(&one).ok();
    second.merge(&two).ok();
    assert_same_tree(&out, &one);
    let digest = |store: &Path| zdata(&["verify", arg(store)]).ok();
    assert_ne!(digest(&one)[..64], digest(&two)[..64]);
}

/// A Slurm job's exit code becomes the build's: here a merge finds a source with nothing left.
#[test]
fn an_error_of_a_job_is_an_error_of_its_kind_here() {
    let scratch = Scratch::new();
    let corpus = corpus(&scratch, 20, "");
    let text = fs::read_to_string(&corpus).unwrap();
    let strict = "[[prepare]]\nstep = \"length\"\nsources = [\"math\"]\nmin_words = 1000000\n";
    let strict = scratch.write("strict.toml", text + strict);
    let bin = scratch.path("bin");
    fs::create_dir(&bin).unwrap();
    for name in ["sbatch", "squeue", "scontrol"] {
        symlink(tests_folder().join("fake_slurm.sh"), bin.join(name)).unwrap();
    }
    let path = format!("{}:{}", arg(&bin), std::env::var("PATH").unwrap());
    let slurm = |corpus: &Path, out: &Path| -> Ran {
        let args = ["build", arg(corpus), "--out", arg(out), "--executor", "slurm"];
        let mut command = zdata_command(&args);
        command.env("PATH", &path).env("FAKE_SLURM", scratch.path("jobs"));
        command.env("FAKE_SLURM_SLOW", if out.ends_with("slow") { "3" } else { "0" });
        command.output().unwrap().into()
    };
    let [local, cluster, none] = ["local", "cluster", "none"].map(|name| scratch.path(name));
    zdata(&["build", arg(&corpus), "--out", arg(&local)]).ok();
    // Another file in the folder for parts is kept, and the build is refused.
    let mine = scratch.write("cluster.work/mine", "mine");
    slurm(&corpus, &cluster).fails(2, &["in the way", "mine", "--cache-dir"]);
    assert!(mine.exists() && !cluster.exists());
    fs::remove_file(&mine).unwrap();
    slurm(&corpus, &cluster).ok();
    assert_same_tree(&local, &cluster);
    let work = scratch.path("cluster.work");
    assert!(!work.exists());
    // Parts left by a kill at the very end are removed by the next command that finds the store complete.
    let other = scratch.path("other");
    zdata(&["build", arg(&corpus), "--out", arg(&other), "--cache-dir", arg(&work)]).ok();
    assert!(work.join("parts").exists());
    slurm(&corpus, &cluster).ok();
    assert!(!work.exists());
    let here = zdata(&["build", arg(&strict), "--out", arg(&none)]).fails(3, &["math"]);
    let there = slurm(&strict, &none).fails(3, &["zdata-merge failed", "merge.log", "math"]);
    assert!(!here.contains("zdata-merge") && there.contains("run the same command again"));
    // After a wait of more than two seconds, the output says for what.
    let slow = slurm(&corpus, &scratch.path("slow"));
    assert!(slow.err.contains("encode: waiting for job 7, 2 s so far"), "{slow:?}");
    slow.ok();
}

#[test]
fn a_real_slurm_makes_the_bytes_of_a_local_build() {
    let script = tests_folder().join("slurm.sh");
    let ran = Command::new("bash").arg(script).arg(env!("CARGO_BIN_EXE_zdata")).output().unwrap();
    let (out, told) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    match ran.status.code() {
        Some(0) => {
            assert_eq!(out.matches("every byte as built here").count(), 3, "{out}");
            assert!(out.contains("both kept"), "{out}");
        }
        Some(77) => skipped("Slurm", told.lines().last().unwrap_or_default()),
        // What it did last stands at the end: an output that is long is cut in its middle.
        code => panic!("{code:?}: {told}\n{out}"),
    }
}
