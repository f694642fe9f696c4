//! Fear: that losing a rank ends a run that could continue, or leaves a trace in the bits of the rest.
//!
//! Uses real processes, killed by SIGKILL or halted by SIGSTOP at some step; none is restarted.

use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::ranks::{Fixture, ranks_of, signal, until_lines};
use crate::support::{CUT, MIDDLING, free_port};

/// Ranks lost during a run.
struct Case {
    /// Ranks at the start.
    count: usize,
    /// Further flags of the command.
    flags: &'static [&'static str],
    /// After this many ledger lines, these ranks (as numbered at launch) get this signal.
    losses: &'static [(usize, &'static [usize], &'static str)],
}

/// Losses in the first steps, in the middle, and around a checkpoint: of rank 0, of others, of two at once.
const CASES: [Case; 6] = [
    Case { count: 2, flags: &[], losses: &[(2, &[0], "KILL")] },
    Case {
        count: 3,
        flags: &["--grad-reduce", "bucketed"],
        losses: &[(4, &[1], "KILL"), (11, &[0], "KILL")],
    },
    Case {
        count: 4,
        flags: &["--ranks-per-node", "2,2"],
        losses: &[(1, &[3], "KILL"), (7, &[0, 2], "KILL")],
    },
    Case {
        count: 4,
        flags: &[],
        losses: &[(5, &[0], "KILL"), (9, &[1], "KILL"), (17, &[2], "KILL")],
    },
    Case { count: 3, flags: &["--rank-timeout", "5"], losses: &[(5, &[0], "STOP")] },
    Case {
        count: 4,
        flags: &["--rank-timeout", "5"],
        losses: &[(8, &[2], "STOP"), (14, &[0], "KILL")],
    },
];

/// Kills the launcher when dropped, however the test ends.
struct Launched(Child);

impl Drop for Launched {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

impl Case {
    /// Runs the case and compares the result with the run `alone`.
    fn try_on(&self, fixture: &Fixture, out: &str, more: &[&str]) {
        let count = self.count.to_string();
        let ranks = ["--nproc", &count, "--min-ranks", "1"];
        let mut command = fixture.run(out, &[&ranks[..], self.flags, more].concat());
        let error = fs::File::create(fixture.scratch.path(&format!("{out}.err"))).unwrap();
        command.stdout(Stdio::piped()).stderr(error);
        let mut launcher = Launched(command.spawn().unwrap());
        let ranks = ranks_of(&launcher.0, self.count);
        assert_eq!(ranks.len(), self.count);
        for (lines, victims, name) in self.losses {
            until_lines(&fixture.scratch.path(out), *lines, &mut launcher.0);
            victims.iter().for_each(|rank| signal(name, ranks[*rank]));
        }
        let start = Instant::now();
        while launcher.0.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(300), "{out}: the run hangs");
            let now = children(&launcher.0);
            assert!(now.iter().all(|one| ranks.contains(one)), "a process was started again");
            std::thread::sleep(Duration::from_millis(20));
        }
        let said = fs::read_to_string(fixture.scratch.path(&format!("{out}.err"))).unwrap();
        assert!(launcher.0.wait().unwrap().success(), "{out}: {said}");
        assert!(!said.contains("panicked"), "{said}");
        fixture.assert_same("alone", out);
        self.assert_told(fixture, out);
    }

    /// The events have every lost rank, the ranks that were left, and each recovery.
    fn assert_told(&self, fixture: &Fixture, out: &str) {
        let of = |name: &str| events(fixture, out, name);
        let (losses, recovered) = (of("loss"), of("recovered"));
        let mut lost: Vec<u64> = losses.iter().flat_map(|one| numbers(&one["lost"])).collect();
        lost.sort_unstable();
        let mut wanted: Vec<u64> = self
            .losses
            .iter()
            .flat_map(|(_, ranks, _)| ranks.iter().map(|rank| *rank as u64))
            .collect();
        wanted.sort_unstable();
        assert_eq!(lost, wanted, "{out}: {losses:?}");
        assert!(recovered.iter().all(|one| one["seconds"].as_f64().unwrap() > 0.0));
        let left = numbers(&losses.last().unwrap()["left"]);
        assert_eq!(left.len() + lost.len(), self.count, "{out}: {losses:?}");
    }
}

/// The processes started by `launcher` that are still running.
fn children(launcher: &Child) -> Vec<u32> {
    let path = format!("/proc/{0}/task/{0}/children", launcher.id());
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

pub(crate) fn numbers(list: &Value) -> Vec<u64> {
    list.as_array().unwrap().iter().map(|rank| rank.as_u64().unwrap()).collect()
}

/// The events of that name.
pub(crate) fn events(fixture: &Fixture, out: &str, name: &str) -> Vec<Value> {
    let text = fs::read_to_string(fixture.scratch.path(out).join("events.jsonl")).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == name).collect()
}

#[test]
fn those_who_are_left_finish_the_run_with_the_same_bytes() {
    let fixture = Fixture::new(&[("batch = 6", "batch = 12"), ("batch = 8", "batch = 16")]);
    fixture.finish("alone", &["--nproc", "1"]);
    for (index, case) in CASES.iter().enumerate() {
        case.try_on(&fixture, &format!("case-{index}"), &[]);
    }
}

#[test]
fn with_copies_in_memory_no_step_before_the_running_one_is_computed_again() {
    let changes = [("batch = 6", "batch = 12"), ("batch = 8", "batch = 16")];
    for (dtype, cases) in [("f32", &CASES[1..4]), ("bf16", &CASES[1..2])] {
        let dtype = format!("dtype = \"{dtype}\"");
        let fixture = Fixture::new(&[&changes[..], &[("dtype = \"f32\"", &dtype)]].concat());
        fixture.finish("alone", &["--nproc", "1"]);
        let mut recalled = 0;
        for (index, case) in cases.iter().enumerate() {
            let out = format!("case-{index}");
            case.try_on(&fixture, &out, &["--replicate"]);
            let again = |event: &Value| event["again"].as_u64().unwrap();
            for event in events(&fixture, &out, "recovered") {
                let losses = events(&fixture, &out, "loss");
                let loss = losses.iter().find(|loss| loss["generation"] == event["generation"]);
                // If two of the four are lost, they may be a rank and the one with its replica.
                let single = numbers(&loss.unwrap()["lost"]).len() == 1;
                // If a rank is lost before the first replica is made, the run has no steps yet.
                assert!(!single || again(&event) <= 1, "{out}: {event}");
                recalled += usize::from(event["from"] == "memory");
            }
        }
        assert!(recalled > 0, "nothing came from memory");
    }
}

/// Three ranks as started by srun. Rank 0, which hosts the rendezvous store, is lost, then the rank that hosts the next
/// store. The remaining ranks get all weights, or shard them among fewer ranks, from replicas in memory.
#[test]
fn so_do_ranks_that_hold_weights_for_each_other() {
    let fixture = Fixture::new(&[&MIDDLING[..], &[CUT]].concat());
    fixture.finish("alone", &["--nproc", "1"]);
    let case = Case {
        count: 4,
        flags: &["--cp", "2", "--tsp", "2"],
        losses: &[(5, &[1, 2], "KILL"), (10, &[0], "KILL")],
    };
    case.try_on(&fixture, "folded", &["--replicate"]);
    fixture.assert_same("alone", "folded");
}

#[test]
fn so_do_ranks_that_nobody_watches_and_whose_store_is_lost() {
    let fixture = Fixture::new(&[("batch = 6", "batch = 12"), ("batch = 8", "batch = 16")]);
    fixture.finish("alone", &["--nproc", "1"]);
    let port = free_port().to_string();
    let start = |rank: u32| {
        let mut command = fixture.run("unwatched", &["--min-ranks", "1", "--replicate"]);
        let rank = rank.to_string();
        command.envs([("RANK", rank.as_str()), ("WORLD_SIZE", "3"), ("LOCAL_RANK", &rank)]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
        let error = fixture.scratch.path(&format!("{rank}.err"));
        command.stdout(Stdio::null()).stderr(fs::File::create(error).unwrap());
        Launched(command.spawn().unwrap())
    };
    let mut ranks = [0, 1, 2].map(start);
    let run = fixture.scratch.path("unwatched");
    let [first, second, third] = &mut ranks;
    for (lines, rank) in [(5, first), (10, second)] {
        until_lines(&run, lines, &mut third.0);
        rank.0.kill().unwrap();
    }
    let start = Instant::now();
    while third.0.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(300), "the last rank hangs");
        std::thread::sleep(Duration::from_millis(20));
    }
    let said = [0, 1, 2].map(|rank| {
        let text = fs::read_to_string(fixture.scratch.path(&format!("{rank}.err"))).unwrap();
        format!("rank {rank}: {text}")
    });
    let said = said.join("\n");
    assert!(third.0.wait().unwrap().success(), "{said}");
    fixture.assert_same("alone", "unwatched");
    let lost: Vec<Vec<u64>> =
        events(&fixture, "unwatched", "loss").iter().map(|loss| numbers(&loss["lost"])).collect();
    assert_eq!(lost, [[0], [1]], "{said}");
}

#[test]
fn too_few_ranks_end_and_the_same_command_goes_on() {
    let fixture = Fixture::new(&[]);
    fixture.finish("alone", &["--nproc", "1"]);
    let mut command = fixture.run("few", &["--nproc", "3", "--min-ranks", "3"]);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut launcher = command.spawn().unwrap();
    let ranks = ranks_of(&launcher, 3);
    until_lines(&fixture.scratch.path("few"), 4, &mut launcher);
    signal("KILL", ranks[1]);
    let ended = launcher.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(6), "{said}");
    assert!(
        said.contains("too few ranks are left to go on: 2 of 3 (ranks 0,2), wanted 3"),
        "{said}"
    );
    fixture.finish("few", &["--nproc", "2"]);
    fixture.assert_same("alone", "few");
}

/// An error that every rank would repeat is not a lost rank.
#[test]
fn what_is_wrong_with_the_run_itself_ends_all_ranks() {
    let fixture = Fixture::new(&[("lr = 1e-2", "lr = 1e38")]);
    let ran: crate::support::Ran =
        fixture.run("wild", &["--nproc", "3", "--min-ranks", "1"]).output().unwrap().into();
    let said = ran.fails(5, &["not finite"]);
    assert!(!said.contains("go on"), "{said}");
}

#[test]
fn neither_no_rank_nor_more_than_there_are_can_be_left() {
    let fixture = Fixture::new(&[]);
    let ran: crate::support::Ran =
        fixture.run("zero", &["--nproc", "2", "--min-ranks", "0"]).output().unwrap().into();
    ran.fails(2, &["--min-ranks"]);
    let ran: crate::support::Ran =
        fixture.run("more", &["--nproc", "2", "--min-ranks", "3"]).output().unwrap().into();
    ran.fails(2, &["--min-ranks", "at most 2"]);
}
