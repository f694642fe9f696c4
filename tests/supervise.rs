//! Fear: that a supervisor misses a failure, breaks its rules, or leaves a trace in the bits.
//!
//! Each fault is real: processes killed, halted or slowed down, a loss that is not finite, files that cannot grow.
//! Faulty machines and program errors are in `faulty.rs`.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::losses::{events, numbers};
use crate::python::{skipped, tests_folder};
use crate::ranks::{Fixture, children_now, children_of, signal, until_lines};
use crate::support::{Ran, arg, ztrain};

/// Curriculum changes for a run of some seconds: a restarted rank rejoins in time.
const LONG: [(&str, &str); 5] = [
    ("batch = 6", "batch = 12"),
    ("batch = 8", "batch = 16"),
    ("num_hidden_layers = 2", "num_hidden_layers = 4"),
    ("\nhidden_size = 32", "\nhidden_size = 64"),
    ("moe_intermediate_size = 32", "moe_intermediate_size = 128"),
];

/// A supervised run that is killed when the test ends.
pub(crate) struct Supervised<'a> {
    fixture: &'a Fixture,
    out: &'static str,
    guard: Child,
}

impl Drop for Supervised<'_> {
    fn drop(&mut self) {
        let _ = self.guard.kill();
    }
}

impl<'a> Supervised<'a> {
    fn begin(fixture: &'a Fixture, out: &'static str, rules: &str, extra: &[&str]) -> Self {
        Supervised::of(fixture, out, command(fixture, out, rules, extra))
    }

    /// A supervised run of this command.
    pub(crate) fn of(fixture: &'a Fixture, out: &'static str, mut command: Command) -> Self {
        Supervised { fixture, out, guard: command.spawn().unwrap() }
    }

    /// Waits until the ledger has `lines` lines (its head and the steps).
    pub(crate) fn until(&mut self, lines: usize) {
        until_lines(&self.fixture.scratch.path(self.out), lines, &mut self.guard);
    }

    /// Waits until the run says or does something.
    fn until_it(&mut self, what: &str, does: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !does(self) {
            assert!(start.elapsed() < Duration::from_secs(300), "it never {what}: {}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The process that started the ranks.
    fn launcher(&self) -> u32 {
        children_of(self.guard.id(), 1)[0]
    }

    pub(crate) fn ranks(&self, count: usize) -> Vec<u32> {
        children_of(self.launcher(), count)
    }

    /// Waits for the end: the exit code and the output.
    pub(crate) fn end(&mut self) -> (Option<i32>, String) {
        let (code, said) = self.whole_end();
        assert!(!said.contains("panicked"), "{said}");
        (code, said)
    }

    /// The same for a run in which something may panic.
    pub(crate) fn whole_end(&mut self) -> (Option<i32>, String) {
        let start = Instant::now();
        while self.guard.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(300), "{}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
        (self.guard.wait().unwrap().code(), self.said())
    }

    fn said(&self) -> String {
        fs::read_to_string(self.fixture.scratch.path(&format!("{}.err", self.out))).unwrap()
    }

    /// The supervisor's actions: cause, rank, action.
    pub(crate) fn done(&self) -> Vec<(String, Option<u64>, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let all = events(self.fixture, self.out, "supervisor");
        all.iter()
            .map(|one| (text(&one["cause"]), one["rank"].as_u64(), text(&one["action"])))
            .collect()
    }

    /// Asserts that it ends well, with the same result as the run `alone`.
    pub(crate) fn assert_same(&mut self) -> String {
        let (code, said) = self.end();
        assert_eq!(code, Some(0), "{said}");
        self.fixture.assert_same("alone", self.out);
        said
    }
}

/// `ztrain supervise` with these rules, for the run `out`.
pub(crate) fn command(fixture: &Fixture, out: &str, rules: &str, extra: &[&str]) -> Command {
    let file = fixture.scratch.write(&format!("{out}.toml"), rules);
    let mut command = fixture.run_by(&["supervise", "--rules", arg(&file)], out, extra);
    let error = fs::File::create(fixture.scratch.path(&format!("{out}.err"))).unwrap();
    command.stdout(Stdio::null()).stderr(error);
    command
}

pub(crate) fn of_rank(cause: &str, rank: u64, action: &str) -> (String, Option<u64>, String) {
    (cause.to_owned(), Some(rank), action.to_owned())
}

/// A killed rank is restarted while the others continue, and rejoins, as often as the rules allow. The second time, the
/// run continues without it until it can rejoin.
#[test]
fn a_rank_that_is_killed_is_started_again_and_joins_the_others() {
    let fixture = Fixture::new(&LONG);
    fixture.finish("alone", &["--nproc", "1"]);
    let rules = "[[crash]]\ndo = \"restart\"\ntimes = 1\n[[crash]]\ndo = \"evict\"\nagain = 0.1\n";
    for (out, flags) in [
        ("killed", &["--nproc", "3"][..]),
        ("replicated", &["--nproc", "3", "--min-ranks", "1", "--replicate"]),
    ] {
        let mut run = Supervised::begin(&fixture, out, rules, flags);
        let first = run.ranks(3);
        run.until(4);
        kill_and_await(&mut run, first[1], 1, 1);
        let second = *run.ranks(3).last().unwrap();
        // Rank 0 writes the ledger.
        kill_and_await(&mut run, first[0], 0, 1);
        kill_and_await(&mut run, second, 1, 2);
        let said = run.assert_same();
        let wanted = [(1, "restart"), (0, "restart"), (1, "evict")];
        let wanted = wanted.map(|(rank, action)| of_rank("crash", rank, action));
        assert_eq!(run.done(), wanted, "{said}");
        let ranks = events(&fixture, out, "ranks");
        let worlds: Vec<u64> = ranks.iter().map(|one| one["world"].as_u64().unwrap()).collect();
        // Two ranks continue after each loss, unless the third is back before they have met.
        let whole = worlds.iter().filter(|world| **world == 3).count();
        assert_eq!((whole, worlds.last()), (4, Some(&3)), "{worlds:?}: {said}");
        assert!(worlds.iter().all(|world| [2, 3].contains(world)), "{worlds:?}: {said}");
        let page = fixture.scratch.path(&format!("{out}.html"));
        ztrain(&["report", "--run", arg(&fixture.scratch.path(out)), "--out", arg(&page)]).ok();
        let page = fs::read_to_string(page).unwrap();
        assert!(page.contains("crash of rank 1") && page.contains("ranks that joined: 0"));
    }
}

/// Kills a rank's process, and waits until that rank has joined `times` times and all have finished a new step.
fn kill_and_await(run: &mut Supervised<'_>, process: u32, rank: u64, times: usize) {
    signal("KILL", process);
    let (fixture, out) = (run.fixture, run.out);
    let joined = || {
        let joined = events(fixture, out, "joined");
        let last =
            joined.iter().filter(|one| numbers(&one["joined"]).contains(&rank)).nth(times - 1);
        let recovered = events(fixture, out, "recovered");
        last.is_some_and(|one| recovered.iter().any(|it| it["generation"] == one["generation"]))
    };
    let start = Instant::now();
    while !joined() && run.guard.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(300), "{}", run.said());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// At least half of the ranks have to remain, unless another number is set.
#[test]
fn a_run_is_not_shrunk_below_half_of_its_ranks_unasked() {
    let fixture = Fixture::new(&LONG);
    let rules = "[[crash]]\ndo = \"evict\"\n";
    let mut run = Supervised::begin(&fixture, "half", rules, &["--nproc", "3"]);
    let ranks = run.ranks(3);
    run.until(4);
    signal("KILL", ranks[2]);
    run.until_it("goes on", |run| !events(run.fixture, "half", "recovered").is_empty());
    signal("KILL", ranks[1]);
    let (code, said) = run.end();
    assert_eq!(code, Some(6), "{said}");
    assert_eq!(run.done(), [of_rank("crash", 2, "evict"), of_rank("crash", 1, "stop")], "{said}");
}

/// Two are killed at once and come back, possibly before the others have met: both are reported as lost, and as joined.
#[test]
fn ranks_that_are_killed_at_once_are_all_told() {
    let fixture = Fixture::new(&LONG);
    fixture.finish("alone", &["--nproc", "1"]);
    let rules = "[[crash]]\ndo = \"restart\"\n";
    let mut run = Supervised::begin(&fixture, "pair", rules, &["--nproc", "3"]);
    let ranks = run.ranks(3);
    run.until(4);
    // Running ranks have read the curriculum: an amendment applies only when the run is started again.
    let amended = fs::read_to_string(&fixture.curriculum).unwrap();
    let amended = amended + "\n[[amendment]]\nstep = 20\nskip = true\n";
    fs::write(&fixture.curriculum, amended).unwrap();
    [ranks[0], ranks[2]].into_iter().for_each(|rank| signal("KILL", rank));
    let said = run.assert_same();
    for (event, list) in [("loss", "lost"), ("joined", "joined")] {
        let events = events(&fixture, "pair", event);
        let mut told: Vec<u64> = events.iter().flat_map(|one| numbers(&one[list])).collect();
        told.sort_unstable();
        assert_eq!(told, [0, 2], "{events:?}: {said}");
    }
}

/// Killed at the start: nothing of the run exists yet, and the others have not met.
#[test]
fn a_rank_that_is_killed_as_a_run_starts_is_started_again() {
    let fixture = Fixture::new(&[]);
    fixture.finish("alone", &["--nproc", "1"]);
    let rules = "[[crash]]\ndo = \"restart\"\ntimes = 3\n";
    let mut run = Supervised::begin(&fixture, "new", rules, &["--nproc", "3"]);
    signal("KILL", run.ranks(3)[1]);
    let said = run.assert_same();
    assert!(said.contains("supervisor: crash of rank 1"), "{said}");
    assert!(said.contains("): restart"), "{said}");
}

/// Halted: otherwise unnoticed until `--rank-timeout`.
#[test]
fn a_rank_that_hangs_is_ended_and_started_again() {
    let fixture = Fixture::new(&LONG);
    fixture.finish("alone", &["--nproc", "1"]);
    let rules = "hang_seconds = 4\n[[hang]]\ndo = \"restart\"\n";
    let mut run = Supervised::begin(&fixture, "hung", rules, &["--nproc", "3"]);
    let ranks = run.ranks(3);
    run.until(4);
    signal("STOP", ranks[2]);
    run.assert_same();
    assert_eq!(run.done(), [of_rank("hang", 2, "restart")]);
}

/// Slowed down: logged, or evicted.
#[test]
fn a_straggler_is_found_and_dealt_with_as_the_rules_say() {
    let fixture = Fixture::new(&LONG);
    fixture.finish("alone", &["--nproc", "1"]);
    for (out, action) in [("noted", "note"), ("evicted", "evict")] {
        let rules = format!(
            "slow = {{ times = 1.5, score = 1.0, steps = 3 }}\n[[straggler]]\ndo = {action:?}\n"
        );
        let mut run = Supervised::begin(&fixture, out, &rules, &["--nproc", "3", "--workers", "1"]);
        let ranks = run.ranks(3);
        let script = format!(
            "while kill -STOP {0}; do sleep 0.05; kill -CONT {0}; sleep 0.005; done",
            ranks[1]
        );
        let mut brake =
            Command::new("bash").args(["-c", &script]).stderr(Stdio::null()).spawn().unwrap();
        run.assert_same();
        brake.kill().unwrap();
        brake.wait().unwrap();
        assert!(run.done().contains(&of_rank("straggler", 1, action)), "{}", run.said());
        let lost = events(&fixture, out, "loss")
            .iter()
            .flat_map(|one| numbers(&one["lost"]))
            .collect::<Vec<_>>();
        assert_eq!(lost.contains(&1), action == "evict", "{lost:?}");
    }
}

/// Of two ranks one has no micro-batch: the other one is not slow.
#[test]
fn a_rank_that_works_alone_is_no_straggler() {
    let whole = [
        ("batch = 8\nmicro_batch = 2", "batch = 16\nmicro_batch = 16"),
        ("batch = 6\nmicro_batch = 2", "batch = 12\nmicro_batch = 12"),
    ];
    let fixture = Fixture::new(&[&whole[..], &LONG[2..]].concat());
    fixture.finish("alone", &["--nproc", "1"]);
    let rules = "slow = { times = 1.5, score = 1.0, steps = 3 }\n[[straggler]]\ndo = \"evict\"\n";
    let mut run = Supervised::begin(&fixture, "apart", rules, &["--nproc", "2"]);
    run.assert_same();
    assert_eq!(run.done(), []);
}

/// The launcher is killed or halted: all ranks end with it, and all are restarted.
#[test]
fn a_launcher_that_is_gone_or_held_is_started_again() {
    let fixture = Fixture::new(&LONG);
    fixture.finish("alone", &["--nproc", "1"]);
    let rules = "hang_seconds = 3\n[[launcher]]\ndo = \"retry\"\n";
    for (out, how) in [("gone", "KILL"), ("held", "STOP")] {
        let mut run = Supervised::begin(&fixture, out, rules, &["--nproc", "2"]);
        run.until(4);
        signal(how, run.launcher());
        run.assert_same();
        assert_eq!(
            run.done(),
            [("launcher".to_owned(), None, "retry".to_owned())],
            "{}",
            run.said()
        );
    }
}

/// The supervisor is killed: the run ends cleanly with a checkpoint, and continues under another supervisor.
#[test]
fn a_run_whose_supervisor_is_gone_ends_in_good_order() {
    let fixture = Fixture::new(&LONG);
    fixture.finish("alone", &["--nproc", "1"]);
    let mut run = Supervised::begin(&fixture, "orphan", "", &["--nproc", "2"]);
    run.until(5);
    let launcher = run.launcher();
    run.guard.kill().unwrap();
    let start = Instant::now();
    while fs::metadata(format!("/proc/{launcher}/exe")).is_ok() {
        assert!(
            start.elapsed() < Duration::from_secs(300),
            "the run goes on without its supervisor"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(run.said().contains("the supervisor has ended"), "{}", run.said());
    let stop = events(&fixture, "orphan", "stop");
    assert_eq!(stop.len(), 1);
    let step = stop[0]["step"].as_u64().unwrap();
    assert!(fixture.scratch.path(&format!("orphan/checkpoints/step-{step}")).is_dir());
    Supervised::begin(&fixture, "orphan", "", &["--nproc", "3"]).assert_same();
}

/// A single rank is killed: the supervisor waits for the machine. Then the user stops the run, and nothing is
/// restarted.
#[test]
fn a_run_waits_for_what_its_rules_name_and_stops_when_asked() {
    let fixture = Fixture::new(&LONG);
    fixture.finish("alone", &["--nproc", "1"]);
    let [spare, asked] = ["spare", "asked"].map(|name| fixture.scratch.path(name));
    let until = format!("echo >> '{}'; test -e '{}'", arg(&asked), arg(&spare));
    let rules = format!("[[crash]]\ndo = \"wait\"\npause = 0.05\nuntil = \"{until}\"\n");
    let mut run = Supervised::begin(&fixture, "waits", &rules, &[]);
    run.until(4);
    signal("KILL", run.launcher());
    let times = || fs::read_to_string(&asked).unwrap_or_default().lines().count();
    run.until_it("asks again and again", |_| times() > 3);
    assert!(children_of_now(run.guard.id()).is_empty(), "nothing is started before");
    fs::write(&spare, "").unwrap();
    run.until(10);
    signal("TERM", run.guard.id());
    let (code, said) = run.end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(events(&fixture, "waits", "stop").len(), 1, "{said}");
    fixture.finish("waits", &[]);
    fixture.assert_same("alone", "waits");
}

/// The running processes of ranks, without the shells of a rule: such a shell is first a copy of its parent, arguments
/// included.
fn children_of_now(process: u32) -> Vec<u32> {
    let arguments = |id: u32| fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
    let is_ours = |id: &u32| {
        fs::read_link(format!("/proc/{id}/exe")).is_ok_and(|exe| exe.ends_with("ztrain"))
            && arguments(*id) != arguments(process)
    };
    children_now(process).into_iter().filter(is_ours).collect()
}

/// Files cannot grow, until space is freed.
#[test]
fn a_full_disk_is_waited_for() {
    let fixture = Fixture::new(&[]);
    fixture.finish("alone", &["--nproc", "1"]);
    let inner = command(&fixture, "full", "[[disk]]\ndo = \"wait\"\npause = 0.1\n", &[]);
    // The soft limit can be raised later, like freeing disk space.
    let script = "ulimit -S -f 2; exec \"$0\" \"$@\"";
    let mut outer = Command::new("bash");
    outer.args(["-c", script]).arg(inner.get_program()).args(inner.get_args());
    let error = fs::File::create(fixture.scratch.path("full.err")).unwrap();
    let guard = outer.stdin(Stdio::null()).stdout(Stdio::null()).stderr(error).spawn().unwrap();
    let mut run = Supervised { fixture: &fixture, out: "full", guard };
    let start = Instant::now();
    while !run.said().contains("wait") {
        assert!(start.elapsed() < Duration::from_secs(300), "{}", run.said());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(run.said().contains("supervisor: disk"), "{}", run.said());
    let id = run.guard.id().to_string();
    let raised = Command::new("prlimit").args(["--pid", &id, "--fsize=unlimited"]).status();
    assert!(raised.unwrap().success());
    run.assert_same();
}

/// An error that would recur ends the run, unless the rules ask to try again.
#[test]
fn a_run_that_diverges_is_tried_again_only_where_the_rules_say_so() {
    let fixture = Fixture::new(&[("lr = 1e-2", "lr = 1e38")]);
    for (out, rules, actions) in [
        ("once", "", &["stop"][..]),
        ("twice", "[[diverged]]\ndo = \"retry\"\ntimes = 1\n", &["retry", "stop"]),
    ] {
        let mut run = Supervised::begin(&fixture, out, rules, &["--nproc", "2"]);
        let (code, said) = run.end();
        assert_eq!(code, Some(5), "{said}");
        let done: Vec<String> = run
            .done()
            .into_iter()
            .map(|(cause, _, action)| {
                assert_eq!(cause, "diverged");
                action
            })
            .collect();
        assert_eq!(done, actions, "{said}");
    }
}

/// Under another launcher: what it starts is tried again, and the job is returned to Slurm without the faulty machine.
#[test]
fn another_launcher_is_supervised_and_a_job_is_given_back() {
    let fixture = Fixture::new(&LONG);
    fixture.finish("alone", &["--nproc", "1"]);
    let log = fixture.scratch.path("scontrol.log");
    let script = format!(
        "#!/bin/sh\necho \"$*\" >> '{}'\n[ \"$1\" = show ] && echo 'JobId=7 ExcNodeList=bad1 X=y'\nexit 0\n",
        arg(&log)
    );
    let program = fixture.scratch.write("bin/scontrol", script);
    Command::new("chmod").args(["+x", arg(&program)]).status().unwrap();
    let rules = "[[crash]]\ndo = \"retry\"\ntimes = 1\n[[crash]]\ndo = \"requeue\"\n";
    let mut inner = command(&fixture, "launched", rules, &["--launch", "env A=b"]);
    let path = format!("{}:{}", arg(program.parent().unwrap()), std::env::var("PATH").unwrap());
    inner.env("PATH", path).env("SLURM_JOB_ID", "7");
    let mut run = Supervised { fixture: &fixture, out: "launched", guard: inner.spawn().unwrap() };
    for (before, lines) in [4, 10].into_iter().enumerate() {
        run.until(lines);
        signal("KILL", run.launcher());
        run.until_it("does what its rules say", |run| run.done().len() > before);
    }
    let (code, said) = run.end();
    assert_eq!(code, Some(6), "{said}");
    let actions: Vec<String> = run.done().into_iter().map(|(_, _, action)| action).collect();
    assert_eq!(actions, ["retry", "requeue"], "{said}");
    assert_eq!(fs::read_to_string(&log).unwrap(), "requeue 7\n");
    fixture.finish("launched", &["--nproc", "2"]);
    fixture.assert_same("alone", "launched");
}

/// In Slurm itself machines have names other than their host names, and a running job cannot be changed.
#[test]
fn a_real_slurm_runs_a_job_again_without_the_machine_at_fault() {
    let fixture = Fixture::new(&LONG);
    let script = tests_folder().join("slurm_train.sh");
    let mut command = Command::new("bash");
    command.arg(script).arg(env!("CARGO_BIN_EXE_ztrain")).arg(&fixture.curriculum);
    let ran = command.output().unwrap();
    let [out, told] = [&ran.stdout, &ran.stderr].map(|text| String::from_utf8_lossy(text));
    match ran.status.code() {
        Some(0) => assert!(out.contains("the ledger that of one rank"), "{out}"),
        Some(77) => skipped("Slurm", told.lines().last().unwrap_or_default()),
        code => panic!("{code:?}: {out}{told}"),
    }
}

#[test]
fn what_cannot_be_supervised_is_refused_before_anything_starts() {
    let fixture = Fixture::new(&[]);
    let wrong: Ran = {
        let file = fixture.scratch.write("wrong.toml", "[[crash]]\ndo = \"evcit\"\n");
        fixture.run_by(&["supervise", "--rules", arg(&file)], "x", &[]).output().unwrap().into()
    };
    wrong.fails(2, &["wrong.toml:2:6", "evict"]);
    let mut inside = fixture.run_by(&["supervise"], "x", &[]);
    inside.envs([
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("LOCAL_RANK", "0"),
    ]);
    let inside: Ran = inside.output().unwrap().into();
    inside.fails(2, &["one supervisor", "--launch"]);
    assert!(!fixture.scratch.path("x").exists());
}

/// Nothing is tried again, or reported as done, if nothing began; a folder with another run is left alone.
#[test]
fn what_never_began_is_neither_done_nor_tried_again() {
    let fixture = Fixture::new(&LONG);
    for (number, line) in ["true", "no-such-launcher", "false"].iter().enumerate() {
        // A folder inside a missing folder.
        let out = format!("none-{number}/deeper/run");
        let none = fixture.run_by(&["supervise", "--launch", line], &out, &[]).output().unwrap();
        let said = Ran::from(none).fails(2, &["before any rank began", "--launch", line]);
        assert!(!said.contains("retry"), "{said}");
    }
    let mut first = Supervised::begin(&fixture, "first", "", &["--nproc", "2"]);
    first.until(3);
    let second = fixture.run_by(&["supervise"], "first", &["--nproc", "2"]).output().unwrap();
    let said = Ran::from(second).fails(6, &["another run is using this folder"]);
    assert!(!said.contains("supervisor:"), "{said}");
    let (code, said) = first.end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(first.done(), [], "{said}");
}
