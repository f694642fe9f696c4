//! Fear: that transfers between devices change a bit, or that a rank waits forever for a lost one.
//!
//! Without GPUs the library is a stand-in (`rccl.cpp`, compiled here), which copies plain memory and is as hard to use
//! as the real ones: it tests the calls, their order and their deadlines, not their speed. With two GPUs the real
//! library is tested too.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use kernels::group::{Exchange, Group, KeyValueStore, RankAddress, RunKey, Transport};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::ranks::{Fixture, hold_one, kill_in_turn};
use crate::support::{CUT, MIDDLING, Ran, SHORT, compiled, free_port, ztrain_command};

/// The stand-in, compiled once.
pub(crate) fn standin() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| compiled("rccl.cpp", "rccl-standin.so"))
}

/// A fixture whose ranks use the stand-in.
fn carried(change: &[(&str, &str)]) -> Fixture {
    let mut fixture = Fixture::new(change);
    fixture.library = Some(standin().to_owned());
    fixture
}

#[test]
fn carried_tensors_leave_the_ledger_of_one_rank() {
    let fixture = carried(&SHORT);
    fixture.finish("alone", &["--nproc", "1"]);
    let ways = [
        ("2", "2", "whole"),
        ("2", "1,1", "bucketed"),
        ("3", "3", "bucketed"),
        ("3", "2,1", "whole"),
        ("3", "2,1", "bucketed"),
        ("5", "2,3", "bucketed"),
    ];
    for (count, nodes, how) in ways {
        let out = format!("{count}-{nodes}-{how}");
        fixture.finish(&out, &["--nproc", count, "--ranks-per-node", nodes, "--grad-reduce", how]);
        fixture.assert_same("alone", &out);
        let events = fixture.scratch.path(&out).join("events.jsonl");
        let events = std::fs::read_to_string(events).unwrap();
        let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let ranks: Vec<Value> = events.filter(|line| line["event"] == "ranks").collect();
        assert_eq!(ranks[0]["transport"], "rccl", "{ranks:?}");
        assert!(ranks[0]["rccl_release"].as_u64().is_some());
    }
}

/// Transfers within a layer, between ranks that share its micro-batch, and of weight shards use the library too, along
/// with gradients and with delays.
#[test]
fn lines_within_a_micro_batch_are_carried_too() {
    let mut fixture = carried(&[&SHORT[..], &[CUT]].concat());
    fixture.finish("alone", &["--nproc", "1"]);
    let ways = [
        ["2", "--cp=2", "--tsp=1", "whole"],
        ["4", "--cp=2", "--tsp=2", "bucketed"],
        ["4", "--cp=1", "--tsp=2", "whole"],
    ];
    fixture.delay = Some("1");
    for [count, cp, tsp, how] in ways {
        let out = format!("{count}{cp}{tsp}");
        fixture.finish(&out, &["--nproc", count, cp, tsp, "--grad-reduce", how]);
        fixture.assert_same("alone", &out);
    }
    fixture.delay = None;
    fixture.shared = &["--cp", "2"];
    kill_in_turn(&fixture, &[(2, Some(1), "2"), (4, Some(0), "2,2")]);
    fixture.finish("killed", &["--nproc", "2", "--tsp", "2"]);
    fixture.assert_same("alone", "killed");
}

/// Marks the process in which ranks are threads.
const ROLE: &str = "TEST_OF_LARGE_ROUNDS";

/// Tensors that each of two ranks sends to the other one in a large round.
const MANY: i64 = 700;

/// A rank of three: a round of very many transfers with all others, and one between two ranks along an axis.
fn in_large_rounds(rank: u32, port: u16) {
    let (host, name, interface) = ("127.0.0.1".to_owned(), "test/".to_owned(), String::new());
    let (world, rank_0_serves, key, node) = (3, false, RunKey::default(), String::new());
    let place = RankAddress { rank, world, host, port, rank_0_serves, key, name, interface, node };
    let mut group = Group::open(&place, Duration::from_secs(60), &|_| ()).unwrap();
    assert!(group.choose_transport(Device::Cpu, Transport::Rccl).unwrap().rccl);
    let trade = |mut exchange: Exchange<'_>, others: Vec<u32>| {
        let mut arrivals = Vec::new();
        for number in 0..MANY {
            for other in others.iter().copied() {
                arrivals.push((
                    [i64::from(other), number],
                    exchange.receive(0, other, Kind::Int64, 2).unwrap(),
                ));
                let tensor = Tensor::from_slice(&[i64::from(rank), number]);
                exchange.send(0, other, &tensor).unwrap();
            }
        }
        exchange.close(0).unwrap();
        for (wanted, arrival) in arrivals {
            assert_eq!(Vec::<i64>::try_from(arrival.wait().unwrap()).unwrap(), wanted);
        }
        exchange.finish().unwrap();
    };
    trade(group.begin("a large round").unwrap(), group.others().collect());
    if rank != 1 {
        let axis = group.axis(1, &[0, 2]).unwrap();
        trade(axis.begin("a large round of a line").unwrap(), axis.others().collect());
    }
    group.barrier("the end").unwrap();
}

/// As between very many ranks, a round has more transfers than one group call of the library may hold.
#[test]
fn a_large_round_is_several_calls() {
    if std::env::var_os(ROLE).is_some() {
        let (key, patience) = (RunKey::default(), Duration::from_secs(60));
        let store = KeyValueStore::serve("127.0.0.1", 0, "test/", &key, patience).unwrap();
        let port = store.port();
        return std::thread::scope(|scope| {
            for rank in 0..3 {
                // The others would wait for a rank that fails until their deadline.
                scope.spawn(move || {
                    let ended = std::panic::catch_unwind(|| in_large_rounds(rank, port));
                    ended.unwrap_or_else(|_| std::process::exit(101));
                });
            }
        });
    }
    let ran = |fault: &str| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "transport::a_large_round_is_several_calls", "--nocapture"]);
        command.env(ROLE, "").env("ZTRAIN_RCCL", standin()).env("STANDIN_FAULT", fault);
        Ran::from(command.output().unwrap())
    };
    let all = ran("");
    assert_eq!(all.code, Some(0), "{}{}", all.out, all.err);
    // Of three ranks, so many transfers are three calls.
    let third = ran("soon:0:3");
    let words = "a transfer: system error, on rank 0 in a large round with ranks 1, 2";
    assert!(third.code != Some(0) && third.err.contains(words), "{}", third.err);
}

#[test]
fn ranks_that_are_killed_while_they_carry_go_on() {
    let fixture = carried(&MIDDLING);
    fixture.finish("alone", &["--nproc", "1"]);
    kill_in_turn(&fixture, &[(2, Some(1), "2"), (3, Some(0), "2,1"), (2, None, "1,1")]);
    fixture.finish("killed", &["--nproc", "3", "--ranks-per-node", "2,1"]);
    fixture.assert_same("alone", "killed");
}

/// Starts three ranks with a fault in the library, and returns how they ended, within ten seconds after the deadline. A
/// step has five groups or more. What a rank has published is up to a tenth of a second old, so a rank that has to be
/// seen at a step ends some steps after the start.
fn with_fault(fixture: &Fixture, fault: &str, patience: u64) -> Output {
    let patience = patience.to_string();
    let mut command = fixture.run(fault, &["--nproc", "3", "--rank-timeout", &patience]);
    command.env("STANDIN_FAULT", fault).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().unwrap().wait_with_output().unwrap()
}

#[test]
fn a_rank_that_dies_within_a_transfer_is_named_at_once() {
    let start = Instant::now();
    let ended = with_fault(&carried(&[]), "kill:1:60", 300);
    assert!(start.elapsed() < Duration::from_secs(150), "nobody waits for the deadline");
    let said =
        Ran::from(ended).fails(6, &["rank 1 was ended from outside", "a rank has ended: rank 1"]);
    assert!(said.contains("last seen at step"), "{said}");
}

#[test]
fn a_rank_that_hangs_within_a_transfer_is_named_within_the_deadline() {
    let ended = with_fault(&carried(&[]), "stop:1:60", 3);
    let words =
        ["did not come within 3 s: rank 1, last seen at step", "run the same command again"];
    let said = Ran::from(ended).fails(6, &words);
    assert!(!said.contains("rank 2, last seen"), "who waits is not blamed: {said}");
}

#[test]
fn a_rank_that_hangs_between_transfers_is_named_too() {
    hold_one(&carried(&[]));
}

#[test]
fn a_call_that_does_not_return_is_given_up() {
    let ended = with_fault(&carried(&[]), "block:1:9", 3);
    Ran::from(ended).fails(6, &["did not return within 3 s"]);
    let ended = with_fault(&carried(&[]), "join:1:0", 3);
    Ran::from(ended)
        .fails(6, &["open RCCL on every rank", "not all joined within 3 s", "ZTRAIN_RCCL"]);
}

#[test]
fn a_library_on_one_rank_only_is_refused_or_passed_over() {
    let fixture = carried(&[]);
    let port = free_port();
    let rank = |rank: &str| {
        let mut command = fixture.run("one", &[]);
        command.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)]);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        if rank == "1" {
            command.env("ZTRAIN_RCCL", "/nowhere/librccl.so");
        }
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for child in ["0", "1"].map(rank) {
        let ended = child.wait_with_output().unwrap();
        Ran::from(ended).fails(6, &["rank 1: none of /nowhere/librccl.so could be opened"]);
    }
}

#[test]
fn carried_collectives_are_measured_and_right() {
    let mut args = vec!["bench", "collectives", "--nproc", "3", "--from", "4K", "--to", "256K"];
    args.extend(["--seconds", "0.01", "--json", "--transport", "rccl"]);
    let mut command = ztrain_command(&args);
    let said = Ran::from(command.env("ZTRAIN_RCCL", standin()).output().unwrap()).ok();
    let mut rows: Vec<Value> =
        said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(rows.pop().unwrap()["uneven"].as_f64().unwrap() >= 0.0);
    let ours: Vec<_> = rows.iter().filter(|row| row["by"] == "rccl").collect();
    assert_eq!((rows.len(), ours.len()), (4 * 11, 4 * 4));
    assert!(rows.iter().all(|row| row["wrong"] == 0), "{said}");
}

#[test]
fn real_devices_leave_the_ledger_of_one() {
    use std::io::Write as _;

    let fixture = Fixture::new(&[]);
    let on = |out: &str, extra: &[&str]| {
        let args = [&["--device", "cuda"], extra].concat();
        Ran::from(fixture.run(out, &args).output().unwrap())
    };
    for (out, extra) in [
        ("alone", &["--nproc", "1"][..]),
        ("plain", &["--nproc", "2", "--transport", "gloo"]),
        ("carried", &["--nproc", "2", "--transport", "rccl"]),
    ] {
        let ran = on(out, extra);
        if ran.code == Some(6) && ran.err.contains("cannot be used") {
            let line = ran.err.lines().next().unwrap_or_default();
            writeln!(std::io::stderr(), "1 GPU test skipped: two are needed: {line}").unwrap();
            return;
        }
        ran.ok();
    }
    fixture.assert_same("alone", "plain");
    fixture.assert_same("alone", "carried");
}
