//! Fear: that a device computes with data that another has not sent yet, or that a step is recorded although its
//! transfers failed.
//!
//! Ranks on stand-in GPUs (`device.rs`), connected by the stand-in library of `transport.rs`. After a failed transfer,
//! later computation reads NaNs.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::pretended::{OnDevice, by_name, contexts, total};
use crate::ranks::Fixture;
use crate::support::{CUT, Ran, SHORT, is_full};
use crate::transport::standin;

/// Ranks with one worker each and direct transfers between devices.
fn carried(on: &OnDevice, out: &str, extra: &[&str]) -> Command {
    let ranks = ["--workers", "1", "--transport", "rccl"];
    let mut command = on.command(out, &[&ranks[..], extra].concat());
    command.env("ZTRAIN_RCCL", standin());
    command
}

#[test]
fn ranks_on_devices_leave_one_ledger_however_they_add() {
    let on = OnDevice::by_libtorch();
    on.finish("alone", &["--workers", "1", "--stop-after", "6"]);
    for [nodes, how] in [["2", "whole"], ["2", "bucketed"], ["1,1", "bucketed"]] {
        let ranks =
            ["--nproc", "2", "--ranks-per-node", nodes, "--grad-reduce", how, "--stop-after", "6"];
        let out = format!("{nodes}-{how}");
        Ran::from(carried(&on, &out, &ranks).output().unwrap()).ok();
        assert_eq!(total(&on.report(&out), "races"), 0, "{out}");
        let held = contexts(&on.report(&out));
        assert_eq!(held.len(), 2, "{out}");
        assert!(held.iter().all(|on| on.is_power_of_two()), "{out}: a rank is on two devices");
        assert!(on.ledger("alone") == on.ledger(&out), "{out}: the ledgers differ");
    }
}

/// The same with our own kernels, which pack the new weights, in f32 and bf16.
#[test]
fn ranks_with_our_own_kernels_leave_one_ledger() {
    let changes: [&[(&str, &str)]; 2] = [&[], &[("dtype = \"f32\"", "dtype = \"bf16\"")]];
    for change in changes {
        let on = OnDevice::by_ours(Fixture::new(change));
        on.finish("alone", &["--workers", "1", "--stop-after", "2"]);
        let two = carried(&on, "two", &["--nproc", "2", "--stop-after", "2"]).output();
        Ran::from(two.unwrap()).ok();
        assert_eq!(total(&on.report("two"), "races"), 0, "{change:?}");
        assert_eq!(contexts(&on.report("two")), [1, 2], "each rank on its own: {change:?}");
        assert!(on.ledger("alone") == on.ledger("two"), "the ledgers differ: {change:?}");
    }
}

/// Computation is ordered after transfers by events, never by a wait of the host.
#[test]
fn streams_wait_for_what_comes_and_the_host_does_not() {
    let on = OnDevice::by_libtorch();
    let two = |out: &str, fault: &str, steps: &str| {
        let mut command = carried(&on, out, &["--nproc", "2", "--stop-after", steps]);
        Ran::from(command.env("STANDIN_FAULT", fault).output().unwrap())
    };
    two("events", "", "3").ok();
    let counted = |what| total(&on.report("events"), what);
    let rounds = by_name(&on.report("events"))["ncclGroup"] as u64;
    println!("{rounds} rounds, waited for {} times by streams", counted("foreign_waits"));
    assert!(rounds > 0 && counted("foreign_waits") >= rounds, "a round is waited for by no stream");
    assert_eq!(counted("foreign_host_waits"), 0, "the host sleeps until something has come");
    assert_eq!(counted("races"), 0);

    // The same holds for groups of ranks that share micro-batches and weight shards.
    let cut = OnDevice::by_libtorch_of(&[CUT]);
    for what in ["--cp", "--tsp"] {
        let mut command = carried(&cut, what, &["--nproc", "2", what, "2", "--stop-after", "2"]);
        Ran::from(command.env("STANDIN_FAULT", "look:0").output().unwrap()).ok();
        let counted = |of| total(&cut.report(what), of);
        assert_eq!([counted("races"), counted("foreign_host_waits")], [0, 0], "{what}");
    }

    // Even if the communication thread never sees a transfer end on the host, events alone keep the order.
    two("deaf", "look:0", "2").ok();
    assert_eq!(total(&on.report("deaf"), "races"), 0, "the host orders what events should");
    for fault in ["look:0,arrival:0", "look:0,arrival:1"] {
        let said = two(&fault.replace([':', ','], "-"), fault, "2").err;
        assert!(said.contains("that ncclGroup wrote is read by"), "{fault} is not found: {said}");
    }
}

/// Two ranks with a fault in the library: they end as with any fault of the environment, and record only steps of
/// `alone`.
fn faulty(on: &OnDevice, fault: &str, patience: &str) -> Ran {
    let out = fault.replace(':', "-");
    let mut command = carried(on, &out, &["--nproc", "2", "--rank-timeout", patience]);
    command.env("STANDIN_FAULT", fault).stdout(Stdio::null()).stderr(Stdio::piped());
    let ran = Ran::from(command.spawn().unwrap().wait_with_output().unwrap());
    assert!(!ran.err.contains("not finite") && !ran.err.contains("panicked"), "{}", ran.err);
    assert!(!ran.err.contains("stand-in:"), "{}", ran.err);
    assert!(on.ledger("alone").starts_with(&on.ledger(&out)), "{fault}: a wrong step is kept");
    ran
}

#[test]
fn a_step_whose_transfers_failed_is_not_written_down() {
    let on = OnDevice::by_libtorch_of(&SHORT);
    on.finish("alone", &["--workers", "1"]);
    // Rounds 1 to 4 have the initial weights. Each step has five: its gradients, and four of new weights. If one fails
    // within the call, no rank waits for it. The record of a step whose new weights do not arrive is right: their
    // owners computed its checksums. The next step reads them, and must not be recorded.
    let more = if is_full() { &[("wrong", 21), ("wrong", 23), ("soon", 25)][..] } else { &[] };
    for (how, round) in [("wrong", 24), ("wrong", 25), ("soon", 24)].iter().chain(more) {
        let ran = faulty(&on, &format!("{how}:1:{round}"), "60");
        let what = ["gathering of gradients", "sharing of new weights"][usize::from(round % 5 > 0)];
        let words = format!("a transfer: system error, on rank 1 in the {what} with ranks 0");
        ran.fails(6, &[&words]);
        let (out, line) = (format!("{how}-1-{round}"), format!("\"step\":{},", (round + 4) / 5));
        assert!(on.ledger("alone").contains(&line) && !on.ledger(&out).contains(&line));
        on.finish(&out, &["--workers", "1"]);
        on.fixture.assert_same("alone", &out);
    }
    let start = Instant::now();
    let said = faulty(&on, "kill:1:24", "300").fails(6, &["a rank has ended: rank 1"]);
    assert!(said.contains("last seen at step"), "{said}");
    assert!(start.elapsed() < Duration::from_secs(150), "nobody waits for the deadline");
    let said = faulty(&on, "stop:1:24", "3").fails(6, &["did not come within 3 s: rank 1"]);
    assert!(said.contains("last seen at step"), "{said}");
    // The thread that computes is blocked in a call that never returns.
    let words = ["rank 1: ", "its device did not come back for another 6 s"];
    faulty(&on, "cling:1:24", "3").fails(6, &words);
}
