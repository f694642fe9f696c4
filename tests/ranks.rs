//! Fear: that a rank that dies, hangs or never starts ends the run, or leaves a trace in the bits.
//!
//! Uses real processes: the launcher and its ranks, killed by SIGKILL or halted by SIGSTOP.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{
    CUT, MIDDLING, SHORT, Scratch, arg, assert_same_tree, build, corpus, curriculum, zdata, ztrain,
    ztrain_command,
};

/// Sends `signal` to a process by its number.
pub(crate) fn signal(name: &str, process: u32) {
    let status = Command::new("kill").args([&format!("-{name}"), &process.to_string()]).status();
    assert!(status.unwrap().success());
}

/// The processes started by `launcher`, by rank.
pub(crate) fn ranks_of(launcher: &Child, count: usize) -> Vec<u32> {
    children_of(launcher.id(), count)
}

/// The children of a process in start order, once there are `count` and each has executed its own program: until then
/// it has its parent's signal handlers.
pub(crate) fn children_of(process: u32, count: usize) -> Vec<u32> {
    let environment = |id: u32| fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
    let start = Instant::now();
    let parent = environment(process);
    loop {
        let found = children_now(process);
        let begun = found.iter().all(|&id| environment(id) != parent);
        if (found.len() == count && begun) || start.elapsed() > Duration::from_secs(120) {
            return found;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The present children of `process`.
pub(crate) fn children_now(process: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
    let text = text.unwrap_or_default();
    text.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

/// Names of a run's folder and its checkpoints may be any bytes; ranks exchange them unchanged.
#[test]
fn places_whose_names_are_no_text_are_found_again() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    let fixture = Fixture::new(&[]);
    let [out, checkpoints, fork] = [&b"r\xff\nn"[..], b"c\xfe", b"f\xfd"]
        .map(|name| fixture.scratch.path("any").with_file_name(OsStr::from_bytes(name)));
    let train = |extra: &[&str]| {
        let mut command = ztrain_command(&["--curriculum", arg(&fixture.curriculum), "--out"]);
        command.arg(&out).args(["--checkpoint-every", "3", "--validate-every", "0"]).args(extra);
        crate::support::Ran::from(command.output().unwrap())
    };
    let mut first = ztrain_command(&["--curriculum", arg(&fixture.curriculum), "--out"]);
    first.arg(&out).args(["--stop-after", "7", "--validate-every", "0", "--checkpoints"]);
    crate::support::Ran::from(first.arg(&checkpoints).output().unwrap()).ok();
    let said = train(&["--nproc", "2", "--stop-after", "9"]);
    assert!(said.err.contains("step 7") || said.out.contains("after step 9"), "{}", said.err);
    said.ok();
    assert!(checkpoints.join("step-9").is_dir(), "it lies where the first start put it");
    let mut command = ztrain_command(&["fork"]);
    command.arg(&out).args(["--step", "8", "--clip", "0.5", "--out"]).arg(&fork);
    let said = crate::support::Ran::from(command.output().unwrap()).ok();
    assert!(said.contains("step 8 will be computed again"), "{said}");
    train(&[]).ok();
    let mut command = ztrain_command(&["report", "--json", "--run"]);
    let said = crate::support::Ran::from(command.arg(&out).output().unwrap()).ok();
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["step_counts"], serde_json::json!([fixture.steps]));
}

/// Between a lost rank and the next step, no other run may take the folder, and no amendment may change it.
#[test]
fn ranks_that_meet_again_keep_their_folder() {
    let fixture = Fixture::new(&[]);
    let run = fixture.scratch.path("run");
    let flags = ["--nproc", "3", "--min-ranks", "1", "--workers", "1", "--rank-timeout", "600"];
    let mut command = fixture.run("run", &flags);
    let mut launcher = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let ranks = ranks_of(&launcher, 3);
    until_lines(&run, 4, &mut launcher);
    // Whether or not rank 1 knows of the loss: it waits for rank 2, and cannot continue until this test allows it.
    signal("STOP", ranks[2]);
    signal("KILL", ranks[0]);
    let curriculum = run.join("run.toml");
    for _ in 0..3 {
        let other = crate::support::Ran::from(fixture.run("run", &[]).output().unwrap());
        other.fails(6, &["another run is using this folder", "process "]);
        zdata(&["amend", arg(&curriculum), "--skip", "19"]).fails(2, &["under way"]);
    }
    signal("KILL", ranks[2]);
    assert_eq!(launcher.wait().unwrap().code(), Some(0));
    fixture.finish("alone", &["--nproc", "1"]);
    fixture.assert_same("alone", "run");
}

/// Ctrl-C in a terminal reaches both ranks and launcher, and the launcher asks the ranks to stop as well.
#[test]
fn a_stop_by_the_launcher_and_by_the_terminal_is_one() {
    let fixture = Fixture::new(&[]);
    let mut command = fixture.run("run", &["--nproc", "2", "--workers", "1"]);
    let mut launcher = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let ranks = ranks_of(&launcher, 2);
    until_lines(&fixture.scratch.path("run"), 4, &mut launcher);
    // All receive it before any reacts.
    let all = [&[launcher.id()], &ranks[..]].concat();
    for name in ["STOP", "INT", "CONT"] {
        all.iter().for_each(|process| signal(name, *process));
    }
    assert_eq!(launcher.wait().unwrap().code(), Some(0));
}

/// Waits until the ledger in `run` has `lines` lines, or the launcher has ended.
pub(crate) fn until_lines(run: &Path, lines: usize, launcher: &mut Child) {
    let path = run.join("ledger.jsonl");
    while launcher.try_wait().unwrap().is_none()
        && fs::read_to_string(&path).map_or(0, |text| text.lines().count()) < lines
    {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A store and a curriculum of twenty steps, or as many as its changes say.
pub(crate) struct Fixture {
    pub(crate) scratch: Scratch,
    pub(crate) steps: u64,
    /// The library that transfers tensors between ranks, if not Gloo.
    pub(crate) library: Option<std::path::PathBuf>,
    /// The maximum delay of that library in milliseconds.
    pub(crate) delay: Option<&'static str>,
    /// Flags for ranks that share micro-batches while some are killed.
    pub(crate) shared: &'static [&'static str],
    /// Steps between checkpoints, as a flag's value.
    pub(crate) every: &'static str,
    pub(crate) curriculum: std::path::PathBuf,
}

impl Fixture {
    /// With this change of the curriculum.
    pub(crate) fn new(change: &[(&str, &str)]) -> Self {
        let scratch = Scratch::new();
        let store = build(&scratch, &corpus(&scratch, 300, ""), "store");
        let curriculum = curriculum(&scratch, &store, "run.toml", change);
        let text = fs::read_to_string(&curriculum).unwrap();
        let steps = text.lines().filter_map(|line| line.strip_prefix("steps = "));
        let steps = steps.map(|steps| steps.parse::<u64>().unwrap()).sum();
        Fixture { scratch, steps, library: None, delay: None, shared: &[], every: "3", curriculum }
    }

    pub(crate) fn run(&self, out: &str, extra: &[&str]) -> Command {
        self.run_by(&[], out, extra)
    }

    /// The same with another command than training.
    pub(crate) fn run_by(&self, command: &[&str], out: &str, extra: &[&str]) -> Command {
        let out = self.scratch.path(out);
        let mut args = command.to_vec();
        args.extend(["--curriculum", arg(&self.curriculum), "--out", arg(&out)]);
        args.extend(["--checkpoint-every", self.every]);
        args.extend(extra);
        if self.library.is_some() {
            args.extend(["--transport", "rccl"]);
        }
        let mut command = ztrain_command(&args);
        command.envs(self.library.iter().map(|library| ("ZTRAIN_RCCL", library)));
        command.envs(self.delay.iter().map(|most| ("STANDIN_DELAY", most)));
        for name in ["RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"] {
            command.env_remove(name);
        }
        command
    }

    #[track_caller]
    pub(crate) fn finish(&self, out: &str, ranks: &[&str]) {
        let ran: crate::support::Ran = self.run(out, ranks).output().unwrap().into();
        let said = ran.ok();
        let steps = self.steps;
        assert!(said.starts_with(&format!("done after step {steps} of {steps}")), "{said}");
        assert_eq!(said.lines().count(), 1, "one rank speaks for all: {said}");
    }

    #[track_caller]
    pub(crate) fn assert_same(&self, a: &str, b: &str) {
        let (a, b) = (self.scratch.path(a), self.scratch.path(b));
        let ledger = |run: &Path| fs::read_to_string(run.join("ledger.jsonl")).unwrap();
        assert!(ledger(&a) == ledger(&b), "the ledgers differ");
        let last = format!("checkpoints/step-{}", self.steps);
        assert_same_tree(&a.join(&last), &b.join(&last));
        ztrain(&["compare", arg(&a), arg(&b)]).ok();
    }
}

/// Starts a run repeatedly with other ranks, nodes and gradient reduction, and kills a rank or the launcher at another
/// moment each time.
pub(crate) fn kill_in_turn(fixture: &Fixture, kills: &[(usize, Option<usize>, &str)]) {
    for (index, (count, victim, nodes)) in kills.iter().copied().enumerate() {
        let how = ["bucketed", "whole"][index % 2];
        let ranks =
            ["--nproc", &count.to_string(), "--ranks-per-node", nodes, "--grad-reduce", how];
        let mut command = fixture.run("killed", &[&ranks[..], fixture.shared].concat());
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut launcher = command.spawn().unwrap();
        let ranks = ranks_of(&launcher, count);
        until_lines(&fixture.scratch.path("killed"), 2 + 4 * index, &mut launcher);
        signal("KILL", victim.map_or(launcher.id(), |rank| ranks[rank]));
        let start = Instant::now();
        let ended = launcher.wait_with_output().unwrap();
        assert!(start.elapsed() < Duration::from_secs(150), "the others notice without waiting");
        let said = String::from_utf8(ended.stderr).unwrap();
        match victim {
            None => assert_eq!(ended.status.code(), None),
            Some(rank) => {
                assert_eq!(ended.status.code(), Some(6), "{said}");
                assert!(said.contains(&format!("rank {rank} was ended from outside")), "{said}");
                assert!(said.contains(&format!("rank {rank}, last seen at")), "{said}");
                assert!(!said.contains("panicked"), "{said}");
            }
        }
        // No rank outlives its launcher.
        let start = Instant::now();
        while ranks.iter().any(|rank| Path::new(&format!("/proc/{rank}/exe")).exists()) {
            assert!(start.elapsed() < Duration::from_secs(300), "a rank lives on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Curriculum changes: in the first phase the mix and the batch grow, over as many sequences.
const RAMPS: [(&str, &str); 2] = [
    (
        "mix = { web = 0.7, math = \"3/10\" }",
        "mix = { from = { web = 0.9, math = 0.1 }, to = { web = 1, math = 1 }, curve = \"cosine\" }",
    ),
    ("batch = 8", "batch = { from = 4, to = 12, every = 4, by = 4 }"),
];

#[test]
fn ranks_that_are_killed_end_with_the_same_bytes_at_any_count() {
    let fixture = Fixture::new(&RAMPS);
    fixture.finish("alone", &["--nproc", "1"]);
    fixture.finish("three", &["--nproc", "3"]);
    fixture.assert_same("alone", "three");
    let kills = [(2, Some(1), "2"), (3, Some(0), "2,1"), (5, Some(4), "3,2"), (2, None, "1,1")];
    kill_in_turn(&fixture, &kills);
    fixture.finish(
        "killed",
        &["--nproc", "5", "--grad-reduce", "bucketed", "--ranks-per-node", "3,2"],
    );
    fixture.assert_same("alone", "killed");
    let run = fixture.scratch.path("killed");
    let verdict = ztrain(&["replay", "--run", arg(&run), "--step", "14"]).ok();
    assert!(verdict.contains("same bits"), "one rank replays what many trained: {verdict}");
    let step = ["replay", "--run", arg(&run), "--step", "14"];
    let several = ztrain(&[&step[..], &["--nproc", "3"]].concat()).ok();
    assert_eq!(several, verdict, "so do several, and one of them says it");
    let alone = ["--attribute", "--steps", "14..15", "--nproc", "2"];
    ztrain(&[&["replay", "--run", arg(&run)], &alone[..]].concat()).fails(2, &["one process"]);
}

#[test]
fn so_do_they_in_bf16() {
    let fixture =
        Fixture::new(&[&MIDDLING[..], &[("dtype = \"f32\"", "dtype = \"bf16\"")]].concat());
    fixture.finish("alone", &["--nproc", "1"]);
    kill_in_turn(&fixture, &[(3, Some(1), "2,1"), (2, Some(0), "2"), (4, None, "2,2")]);
    fixture.finish("killed", &["--nproc", "2"]);
    fixture.assert_same("alone", "killed");
}

/// Whichever rank is killed, the others of its group wait in the middle of a layer.
#[test]
fn so_do_ranks_that_share_micro_batches() {
    let mut fixture = Fixture::new(&[&MIDDLING[..], &[CUT]].concat());
    fixture.finish("alone", &["--nproc", "1"]);
    fixture.shared = &["--cp", "4"];
    kill_in_turn(&fixture, &[(4, Some(2), "2,2"), (6, Some(1), "6"), (2, Some(0), "1,1")]);
    fixture.finish("killed", &["--nproc", "4", "--cp", "2", "--recompute"]);
    fixture.assert_same("alone", "killed");
    let run = fixture.scratch.path("killed");
    let step = ["replay", "--run", arg(&run), "--step", "12"];
    let verdict = ztrain(&step).ok();
    assert!(verdict.contains("same bits"), "one rank replays what shared ones trained: {verdict}");
    let several = ztrain(&[&step[..], &["--nproc", "4", "--cp", "4"]].concat()).ok();
    assert_eq!(several, verdict, "so do those that share, and one of them says it");
}

/// Whichever rank is killed, the others wait for the weight shards that it held.
#[test]
fn so_do_ranks_that_hold_weights_for_each_other() {
    let mut fixture = Fixture::new(&[&SHORT[..], &[CUT]].concat());
    fixture.finish("alone", &["--nproc", "1"]);
    fixture.shared = &["--cp", "2", "--tsp", "2"];
    kill_in_turn(&fixture, &[(4, Some(2), "2,2"), (4, Some(0), "4")]);
    fixture.finish("killed", &["--nproc", "2", "--tsp", "2", "--recompute"]);
    fixture.assert_same("alone", "killed");
    let run = fixture.scratch.path("killed");
    let step = ["replay", "--run", arg(&run), "--step", "8"];
    let verdict = ztrain(&step).ok();
    assert!(verdict.contains("same bits"), "one rank replays what folded ones trained: {verdict}");
    let several = ztrain(&[&step[..], &["--nproc", "4", "--cp", "2", "--tsp", "2"]].concat()).ok();
    assert_eq!(several, verdict, "so do those that hold its weights for each other");
    // From the checkpoint to the step they hold weight shards, and then one of them needs all weights.
    let part = ["replay", "--run", arg(&run), "--step", "6", "--micro-batch", "1"];
    let several = ztrain(&[&part[..], &["--nproc", "2", "--tsp", "2"]].concat()).ok();
    assert!(several.contains("same bits"), "{several}");
    assert_eq!(several, ztrain(&part).ok());
}

#[test]
fn machines_that_do_not_add_up_are_refused_and_steps_are_measured_on_ranks() {
    let fixture = Fixture::new(&[]);
    let wrong =
        fixture.run("wrong", &["--nproc", "2", "--ranks-per-node", "2,1"]).output().unwrap();
    let said = crate::support::Ran::from(wrong).fails(2, &["--ranks-per-node", "2,1", "2 in all"]);
    assert_eq!(said.matches("error:").count(), 1, "{said}");
    let alone = fixture.run("wrong", &["--ranks-per-node", "2,1"]).output().unwrap();
    crate::support::Ran::from(alone).fails(2, &["--ranks-per-node", "2,1", "--nproc"]);
    let needless = ["--replicate", "--transport", "gloo", "--stop-after", "1"];
    let alone = crate::support::Ran::from(fixture.run("alone", &needless).output().unwrap());
    for note in ["--min-ranks and --replicate are for several", "--transport is for several"] {
        assert!(alone.err.contains(note), "{}", alone.err);
    }
    alone.ok();
    let path = arg(&fixture.curriculum);
    let bench = ["bench", "step", "--curriculum", path, "--steps", "2", "--json"];
    let table = |extra: &[&str]| {
        let said = ztrain(&[&bench[..], extra].concat()).ok();
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        said["table"].clone()
    };
    let alone = table(&[]);
    let ranks = table(&["--nproc", "3", "--ranks-per-node", "2,1", "--grad-reduce", "bucketed"]);
    for same in ["tokens", "model_flops"] {
        assert_eq!(alone[same], ranks[same], "{same}");
    }
    let (all, between) = (&ranks["exchanged"]["bytes"], &ranks["exchanged"]["bytes_between_nodes"]);
    assert!(0 < between.as_u64().unwrap() && between.as_u64() < all.as_u64(), "{ranks}");
    let (alone, ranks) = (alone["memory"].as_array().unwrap(), ranks["memory"].as_array().unwrap());
    assert_eq!((alone.len(), ranks.len()), (1, 3));
    let of = |rank: &serde_json::Value, part: &str| rank["formula"][part].as_u64().unwrap();
    let moments: u64 = ranks.iter().map(|rank| of(rank, "moments")).sum();
    assert_eq!(moments, of(&alone[0], "moments"), "the owners' moments are those of the whole");
    assert!(ranks.iter().all(|rank| of(rank, "weights") == of(&alone[0], "weights")));
}

#[test]
fn a_rank_that_hangs_is_named_within_the_deadline() {
    hold_one(&Fixture::new(&[]));
}

/// Halts one of three ranks permanently.
pub(crate) fn hold_one(fixture: &Fixture) {
    let mut command = fixture.run("held", &["--nproc", "3", "--rank-timeout", "2"]);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut launcher = command.spawn().unwrap();
    let ranks = ranks_of(&launcher, 3);
    until_lines(&fixture.scratch.path("held"), 3, &mut launcher);
    signal("STOP", ranks[1]);
    let ended = launcher.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(6), "{said}");
    assert!(said.contains("did not come within 2 s: rank 1, last seen at step"), "{said}");
    assert!(said.contains("missed in the "), "the collective is named: {said}");
    assert!(said.contains("run the same command again"), "{said}");
}

#[test]
fn a_run_that_was_stopped_longer_than_ranks_wait_goes_on() {
    let fixture = Fixture::new(&[]);
    fixture.finish("alone", &["--nproc", "1"]);
    let mut command = fixture.run("paused", &["--nproc", "3", "--rank-timeout", "2"]);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut launcher = command.spawn().unwrap();
    let ranks = ranks_of(&launcher, 3);
    until_lines(&fixture.scratch.path("paused"), 4, &mut launcher);
    let all = [&[launcher.id()], &ranks[..]].concat();
    all.iter().for_each(|process| signal("STOP", *process));
    // This waits for time itself to pass.
    std::thread::sleep(Duration::from_millis(4500));
    all.iter().for_each(|process| signal("CONT", *process));
    let ended = launcher.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(0), "{said}");
    fixture.assert_same("alone", "paused");
}

#[test]
fn a_signal_ends_the_step_and_two_end_the_process() {
    // Steps long enough to be interrupted.
    let fixture = Fixture::new(&[("batch = 6", "batch = 36"), ("batch = 8", "batch = 64")]);
    fixture.finish("alone", &["--nproc", "1"]);
    for count in ["1", "3"] {
        for signals in [&["TERM"][..], &["TERM", "INT"]] {
            let mut command = fixture.run("stopped", &["--nproc", count]);
            let run = fixture.scratch.path("stopped");
            let lines =
                fs::read_to_string(run.join("ledger.jsonl")).map_or(1, |text| text.lines().count());
            command.stdout(Stdio::piped()).stderr(Stdio::null());
            let mut process = command.spawn().unwrap();
            until_lines(&run, lines + 1, &mut process);
            // Both arrive before it does anything else.
            ["STOP"]
                .iter()
                .chain(signals)
                .chain(&["CONT"])
                .for_each(|one| signal(one, process.id()));
            let ran = crate::support::Ran::from(process.wait_with_output().unwrap());
            if signals.len() == 2 {
                assert_eq!(ran.code, Some(130), "{ran:?}");
                continue;
            }
            let said = ran.ok();
            let step =
                said.strip_prefix("stopped after step ").and_then(|rest| rest.split(' ').next());
            let step: u64 = step.unwrap_or_else(|| panic!("{said}")).parse().unwrap();
            let kept = run.join(format!("checkpoints/step-{step}/manifest.json"));
            assert!((1..20).contains(&step) && kept.exists(), "{said}");
        }
    }
    fixture.finish("stopped", &["--nproc", "2"]);
    fixture.assert_same("alone", "stopped");
}

#[test]
fn what_is_wrong_for_all_ranks_is_said_once() {
    let fixture = Fixture::new(&[]);
    let missing = fixture.scratch.path("missing.toml");
    let ran = ztrain(&["--curriculum", arg(&missing), "--nproc", "3"]);
    let said = ran.fails(3, &["missing.toml"]);
    assert_eq!(said.matches("error:").count(), 1, "{said}");
    let mut nested = fixture.run("nested", &["--nproc", "2"]);
    nested.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")]);
    crate::support::Ran::from(nested.output().unwrap()).fails(2, &["--nproc", "launcher"]);
}

#[test]
fn collectives_are_measured_and_right() {
    let scratch = Scratch::new();
    let plot = scratch.path("plot.svg");
    let args = ["bench", "collectives", "--nproc", "3", "--from", "4K", "--to", "64K"];
    let cluster = scratch.path("cluster.toml");
    let rest = ["--seconds", "0.01", "--json", "--plot", arg(&plot), "--out", arg(&cluster)];
    let said = ztrain(&[&args[..], &rest].concat()).ok();
    let mut rows: Vec<serde_json::Value> =
        said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Ranks with equal work still wait for each other, and a plan reads how long.
    let uneven = rows.pop().unwrap()["uneven"].as_f64().unwrap();
    let kept = fs::read_to_string(&cluster).unwrap();
    assert!(uneven > 0.0 && kept.contains(&format!("\nuneven = {uneven:.3}")), "{uneven}: {kept}");
    assert_eq!(rows.len(), 3 * 11);
    for row in rows {
        assert_eq!(row["wrong"], 0, "{row}");
        let (bytes, time) = (row["bytes"].as_f64().unwrap(), row["microseconds"].as_f64().unwrap());
        let share = match row["collective"].as_str().unwrap() {
            "all-reduce" => 4.0 / 3.0,
            "broadcast" => 1.0,
            _ => 2.0 / 3.0,
        };
        let bus = row["bus_gb_per_s"].as_f64().unwrap();
        assert!((bus - bytes / time / 1e3 * share).abs() < 1e-6 * bus, "{row}");
    }
    assert!(fs::read_to_string(plot).unwrap().matches("<polyline").count() == 11);
    ztrain(&["bench", "collectives"]).fails(2, &["--nproc"]);
    let wrong = |args: &[&str]| {
        let said = ztrain(&[&["bench", "collectives", "--nproc", "2"], args].concat());
        let said = said.fails(2, args);
        assert_eq!(said.matches("error:").count(), 1, "{said}");
    };
    wrong(&["--to", "x"]);
    wrong(&["--from", "2K", "--to", "1K"]);
    wrong(&["--seconds", "nan"]);
    let nowhere = scratch.path("no folder/plot.svg");
    let late = ztrain(&["bench", "collectives", "--nproc", "2", "--plot", arg(&nowhere)]);
    assert_eq!(late.out, "", "nothing is measured for a picture that cannot be drawn");
    late.fails(2, &["plot.svg", "does not exist"]);
}
