//! Fear: that a rank that computes wrongly, or dies at the worst moment, leaves a trace in the bits.
//!
//! The faults are real: a preloaded library (`faulty.cpp`, compiled here) flips bits in one rank's matmuls, makes its
//! clock fail, or kills ranks at a named place. The program takes no part.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use crate::losses::{events, numbers};
use crate::ranks::{Fixture, signal, until_lines};
use crate::supervise::{Supervised, command, of_rank};
use crate::support::{CUT, Ran, SHORT, arg, compiled};

/// Curriculum changes after which all matmuls belong to micro-batches.
const CHANGES: [(&str, &str); 3] = [
    ("batch = 6", "batch = 12"),
    ("batch = 8", "batch = 16"),
    ("kind = \"muon\"", "kind = \"adamw\""),
];

/// Sets these faults for a command.
fn suffer(command: &mut Command, faults: &str) {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| compiled("faulty.cpp", "faulty.so"));
    command.env("LD_PRELOAD", library).env("FAULTY", faults);
}

/// The fixture, with the run `alone`.
fn fixture() -> Fixture {
    fixture_of(&[])
}

/// The same with further changes.
fn fixture_of(more: &[(&str, &str)]) -> Fixture {
    let fixture = Fixture::new(&[&CHANGES[..], more].concat());
    fixture.finish("alone", &["--nproc", "1"]);
    fixture
}

/// A line of the table of places: when it is tested, its name, and the ranks killed there.
struct Place {
    when: &'static str,
    name: &'static str,
    ends: Vec<[&'static str; 3]>,
}

/// The table.
fn places() -> Vec<Place> {
    let lines = include_str!("kills.txt").lines();
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let one = |line: &'static str| {
        let words: Vec<&str> = line.split(';').map(str::trim).collect();
        let ends = words[2..].chunks(3).map(|end| end.try_into().unwrap()).collect();
        Place { when: words[0], name: words[1], ends }
    };
    lines.map(one).collect()
}

impl Place {
    /// Runs three ranks, of which some are killed here and the others finish the run.
    fn try_on(&self, fixture: &Fixture, out: &str, flags: &[&str]) {
        let ranks = ["--nproc", "3", "--min-ranks", "1", "--workers", "1"];
        // So that an old checkpoint is removed before the run ends.
        let few = ["--keep", "2", "--keep-latest"];
        let mut command = fixture.run(out, &[&ranks[..], &few, flags].concat());
        let fault = |[ranks, count, text]: &[&str; 3]| format!("kill {ranks} {count} {text}");
        suffer(&mut command, &self.ends.iter().map(fault).collect::<Vec<_>>().join("\n"));
        let Place { name, .. } = self;
        let ran: Ran = command.output().unwrap().into();
        assert!(!ran.err.contains("panicked"), "{name}: {}", ran.err);
        ran.ok();
        fixture.assert_same("alone", out);
        let wanted = self.ends.iter().flat_map(|[ranks, ..]| ranks.split('+'));
        let wanted: BTreeSet<u64> = wanted.map(|rank| rank.parse().unwrap()).collect();
        let losses = events(fixture, out, "loss");
        let lost: Vec<u64> = losses.iter().flat_map(|one| numbers(&one["lost"])).collect();
        assert_eq!(lost.len(), wanted.len(), "{name}: {losses:?}");
        assert_eq!(lost.into_iter().collect::<BTreeSet<_>>(), wanted, "{name}: {losses:?}");
    }
}

#[test]
fn wherever_ranks_are_killed_the_others_finish_the_step() {
    let fixture = fixture_of(&SHORT);
    for (number, place) in places().iter().enumerate().filter(|(_, it)| it.when == "plain") {
        place.try_on(&fixture, &format!("plain-{number}"), &[]);
    }
}

#[test]
fn so_they_do_with_copies_in_memory() {
    let fixture = fixture_of(&SHORT);
    for (number, place) in places().iter().enumerate().filter(|(_, it)| it.when == "replicate") {
        place.try_on(&fixture, &format!("replicate-{number}"), &["--replicate"]);
    }
}

#[test]
fn the_table_of_places_is_whole() {
    let places = places();
    let count = |when: &str| places.iter().filter(|place| place.when == when).count();
    assert_eq!(count("plain") + count("replicate") + count("long"), places.len());
    assert!(count("plain") + count("replicate") >= 12);
}

/// A supervised run of three ranks, with this fault on rank 1 from some moment on.
fn ready<'a>(
    fixture: &'a Fixture,
    out: &'static str,
    rules: &str,
    fault: &str,
    flags: &[&str],
) -> Supervised<'a> {
    let flags = [&["--nproc", "3", "--workers", "1"], flags].concat();
    let mut command = command(fixture, out, rules, &flags);
    let go = moment(fixture, out);
    suffer(&mut command, &format!("{fault} {}", arg(&go)));
    let mut run = Supervised::of(fixture, out, command);
    run.until(5);
    run
}

/// The same, with the fault already triggered.
fn begin<'a>(
    fixture: &'a Fixture,
    out: &'static str,
    rules: &str,
    fault: &str,
    flags: &[&str],
) -> Supervised<'a> {
    let run = ready(fixture, out, rules, fault, flags);
    std::fs::write(moment(fixture, out), "").unwrap();
    run
}

/// The file that triggers the fault.
fn moment(fixture: &Fixture, out: &str) -> PathBuf {
    fixture.scratch.path(&format!("{out}.go"))
}

/// A rank with wrong bits in its matmuls is found in the same step, and the others finish the step without it.
#[test]
fn a_rank_that_computes_a_micro_batch_otherwise_is_evicted() {
    let fixture = fixture();
    let again = "[[audit]]\ndo = \"restart\"\n";
    for (out, rules, flags, action) in [
        ("evicted", "", &[][..], "evict"),
        (
            "replicated",
            "",
            &["--replicate", "--min-ranks", "1", "--grad-reduce", "bucketed"],
            "evict",
        ),
        ("restarted", again, &[], "restart"),
    ] {
        let flags = [&["--audit", "1/1"], flags].concat();
        let mut run = begin(&fixture, out, rules, "bits 1 60", &flags);
        let said = run.assert_same();
        assert!(!moment(&fixture, out).exists(), "nothing was spoiled");
        assert_eq!(run.done(), [of_rank("audit", 1, action)], "{said}");
        assert!(said.contains("rank 1 computed a micro-batch twice"), "{said}");
        let loss = &events(&fixture, out, "loss")[0];
        assert_eq!((numbers(&loss["lost"]), numbers(&loss["left"])), (vec![1], vec![0, 2]));
    }
}

/// The error of one rank enters the other's computation: neither is evicted for it.
#[test]
fn of_ranks_that_share_micro_batches_none_is_blamed_alone() {
    let fixture = fixture_of(&[CUT]);
    let flags = ["--nproc", "2", "--cp", "2", "--min-ranks", "1", "--workers", "1"];
    let mut command = fixture.run("shared", &[&flags[..], &["--audit", "1/1"]].concat());
    let go = moment(&fixture, "shared");
    suffer(&mut command, &format!("bits 1 60 {}", arg(&go)));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut launcher = command.spawn().unwrap();
    until_lines(&fixture.scratch.path("shared"), 4, &mut launcher);
    std::fs::write(&go, "").unwrap();
    let said = Ran::from(launcher.wait_with_output().unwrap());
    let said = said.fails(6, &["without --cp and --tsp"]);
    assert!(!go.exists(), "nothing was spoiled");
    assert!(said.contains("one of their machines cannot be trusted"), "{said}");
    assert!(!said.contains("this machine cannot be trusted"), "{said}");
    assert!(events(&fixture, "shared", "loss").is_empty(), "{said}");
    fixture.finish("shared", &["--nproc", "1", "--audit", "1/1"]);
    fixture.assert_same("alone", "shared");
}

/// After a rank is lost, ranks are renumbered; messages use the numbers at launch.
#[test]
fn a_rank_is_named_as_it_was_launched() {
    let fixture = fixture();
    let rules = "[[crash]]\ndo = \"evict\"\n";
    let mut run =
        ready(&fixture, "named", rules, "bits 1 60", &["--audit", "1/1", "--min-ranks", "1"]);
    signal("KILL", run.ranks(3)[0]);
    run.until(lines(&fixture, "named") + 2);
    std::fs::write(moment(&fixture, "named"), "").unwrap();
    let said = run.assert_same();
    let done = [of_rank("crash", 0, "evict"), of_rank("audit", 1, "evict")];
    assert_eq!(run.done(), done, "{said}");
    assert!(said.contains("rank 1 computed a micro-batch twice"), "{said}");
    let loss = &events(&fixture, "named", "loss")[1];
    assert_eq!((numbers(&loss["lost"]), numbers(&loss["left"])), (vec![1], vec![2]));
}

/// Without an audit, wrong bits get into the ledger: a step recomputed after a lost rank then differs.
#[test]
fn a_step_that_comes_out_otherwise_is_tried_again_only_where_the_rules_say_so() {
    let mut fixture = fixture();
    fixture.every = "1000";
    let twice = "[[mismatch]]\ndo = \"retry\"\ntimes = 1\n";
    for (out, more, actions) in [("once", "", &["stop"][..]), ("twice", twice, &["retry", "stop"])]
    {
        let rules = format!("[[crash]]\ndo = \"evict\"\n{more}");
        let mut run = begin(&fixture, out, &rules, "bits 1 60", &[]);
        until_gone(&moment(&fixture, out));
        run.until(lines(&fixture, out) + 2);
        signal("KILL", run.ranks(3)[2]);
        let (code, said) = run.end();
        assert_eq!(code, Some(4), "{said}");
        assert!(said.contains("was computed again and its"), "{said}");
        let done = run.done();
        assert_eq!(done[0], of_rank("crash", 2, "evict"), "{said}");
        let told: Vec<&str> = done[1..].iter().map(|(_, _, action)| action.as_str()).collect();
        assert_eq!(told, actions, "{said}");
        assert!(done[1..].iter().all(|(cause, ..)| cause == "mismatch"), "{said}");
    }
}

/// A program error is reported as a bug and passed to the other ranks; all end unless the rules say otherwise.
#[test]
fn a_bug_of_one_rank_ends_all_unless_the_rules_say_otherwise() {
    let fixture = fixture();
    let mut run = begin(&fixture, "stops", "", "clock 1 1", &[]);
    let (code, said) = run.whole_end();
    assert_eq!(code, Some(1), "{said}");
    assert_eq!(run.done(), [of_rank("bug", 1, "stop")], "{said}");
    let rules = "[[bug]]\ndo = \"retry\"\ntimes = 1\n";
    let mut run = begin(&fixture, "retried", rules, "clock 1 1", &[]);
    let (code, said) = run.whole_end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(run.done(), [of_rank("bug", 1, "retry")], "{said}");
    fixture.assert_same("alone", "retried");
}

/// The number of ledger lines so far.
fn lines(fixture: &Fixture, out: &str) -> usize {
    let path = fixture.scratch.path(out).join("ledger.jsonl");
    std::fs::read_to_string(path).unwrap().lines().count()
}

fn until_gone(file: &Path) {
    let start = std::time::Instant::now();
    while file.exists() {
        assert!(start.elapsed() < Duration::from_secs(300), "nothing was spoiled");
        std::thread::sleep(Duration::from_millis(2));
    }
}
