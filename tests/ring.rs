//! Fear: that a buffer is rewritten while a device or the host still reads it; that a thread for one device takes
//! memory of another.
//!
//! Tests the ring of `kernels::device` alone, on the stand-in of `device.rs`: the test starts its own program a second
//! time, which takes, sends and drops buffers.

use std::process::Command;
use std::time::Duration;

use kernels::device::{HostCopier, PendingCopies, Stager, StagingBuffer};
use tch::{Device, Kind, Tensor};

use crate::pretended::{contexts, pretend, total};
use crate::support::{Ran, Scratch};

/// Marks the process on the stand-in.
const ROLE: &str = "TEST_OF_THE_RING";

/// A buffer filled with `value`.
fn written(stager: &Stager, value: u8) -> StagingBuffer {
    let mut buffer = stager.buffers().take(300, 1000).unwrap();
    let (flags, words) = buffer.parts_mut().unwrap();
    flags.fill(value);
    words.fill(value.into());
    buffer
}

/// Uses the buffers of the ring in turn.
fn at_work() {
    let stager = Stager::new(kernels::device::open("cuda").unwrap()).unwrap();
    let place = |buffer: &StagingBuffer| buffer.parts().1.as_ptr();
    let mut first = written(&stager, 1);
    let at = place(&first);
    let sent = stager.send(&mut first, 1000).unwrap();
    let second = written(&stager, 2);
    assert_ne!(place(&second), at, "the host still has the first");
    assert!(first.parts().1.iter().all(|word| *word == 1), "it may be read while it is copied");
    drop(first);
    let mut third = written(&stager, 3);
    assert_eq!(place(&third), at, "its copy was waited for");
    let (flags, words) = sent.arrive().unwrap();
    assert_eq!(
        (flags.sum(Kind::Float).double_value(&[]), words.max().int64_value(&[])),
        (300.0, 1)
    );
    // Writing a buffer that was sent waits for its copy, and the sent data stays as it was.
    let sent = stager.send(&mut third, 500).unwrap();
    third.parts_mut().unwrap().1.fill(4);
    let words = sent.arrive().unwrap().1;
    assert_eq!((words.numel(), words.min().int64_value(&[])), (500, 3));
    drop((second, third));
    // Two threads write, a third sends, and sent buffers are dropped in another order.
    std::thread::scope(|scope| {
        let (full, take) = std::sync::mpsc::sync_channel(2);
        for thread in 0..2 {
            let (full, buffers) = (full.clone(), stager.buffers().clone());
            scope.spawn(move || {
                for round in 0..50 {
                    let mut buffer = buffers.take(64, 64 + round).unwrap();
                    buffer.parts_mut().unwrap().1.fill((round + thread) as i32);
                    full.send((buffer, round + thread)).unwrap();
                }
            });
        }
        drop(full);
        let mut kept = Vec::new();
        for (number, (mut buffer, value)) in take.iter().enumerate() {
            let sent = stager.send(&mut buffer, 64).unwrap();
            kept.push(buffer);
            if number % 5 == 4 {
                kept.drain(..).rev().for_each(drop);
                std::thread::sleep(Duration::from_micros(50));
            }
            assert_eq!(sent.arrive().unwrap().1.max().int64_value(&[]), value as i64);
        }
    });
}

/// Runs `work` on a new thread that has not used a device.
fn apart<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join().unwrap())
}

/// Copies a buffer to the second device and its words back, each step on another thread. If `both`, also allocates on
/// the first device.
fn at_the_second(both: bool) {
    let device = kernels::device::open("cuda:1").unwrap();
    let stager = apart(|| Stager::new(device).unwrap());
    let buffers = stager.buffers().clone();
    let mut buffer = apart(|| buffers.take(64, 64).unwrap());
    buffer.parts_mut().unwrap().1.fill(5);
    let sent = apart(|| stager.send(&mut buffer, 64).unwrap());
    let buffer = apart(move || {
        buffer.parts_mut().unwrap().1.fill(6);
        buffer
    });
    let words = apart(|| sent.arrive().unwrap().1);
    let copies = apart(move || {
        let (unloader, departures) = (HostCopier::new(device).unwrap(), PendingCopies::default());
        let copies = unloader.copies(&[words], &departures).unwrap();
        departures.order_after(device).unwrap();
        copies
    });
    let sum = apart(move || copies.bytes().unwrap()[0].iter().copied().map(u64::from).sum::<u64>());
    assert_eq!(sum, 5 * 64);
    apart(move || drop(buffer));
    let kept = [(); 2].map(|()| apart(|| Stager::kept(device).unwrap()));
    assert!(std::sync::Arc::ptr_eq(&kept[0], &kept[1]), "each time another stream");
    if both {
        let _ = Tensor::zeros([1], (Kind::Float, Device::Cuda(0)));
    }
}

#[test]
fn a_thread_makes_no_context_on_another_device() {
    if let Some(role) = std::env::var_os(ROLE) {
        return at_the_second(role == "both");
    }
    let scratch = Scratch::new();
    let ran = |role: &str| {
        let report = scratch.path(role);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "ring::a_thread_makes_no_context_on_another_device"]);
        command.arg("--nocapture").env(ROLE, role);
        pretend(&mut command, &report);
        let ran = Ran::from(command.output().unwrap());
        assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
        contexts(&report)
    };
    assert_eq!(ran("second"), [2]);
    assert_eq!(ran("both"), [3], "what is made on another one is seen");
}

#[test]
fn a_buffer_is_free_when_it_was_copied_and_dropped() {
    if std::env::var_os(ROLE).is_some() {
        return at_work();
    }
    let scratch = Scratch::new();
    let ran = |fault: &str| {
        let report = scratch.path(fault);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "ring::a_buffer_is_free_when_it_was_copied_and_dropped"]);
        command.arg("--nocapture").env(ROLE, "").env("STANDIN_FAULT", fault);
        pretend(&mut command, &report);
        let ran = Ran::from(command.output().unwrap());
        assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
        (total(&report, "races"), total(&report, "from_host"), ran.err)
    };
    let (races, copies, said) = ran("none:0");
    assert_eq!((races, copies), (0, 2 + 100), "one copy each: {said}");
    // Without the check of the copy, a buffer is returned too early.
    for fault in ["host:1", "host:2", "host:0"] {
        let (races, _, said) = ran(fault);
        assert!(
            races > 0 && said.contains("the host wrote pinned memory that a copy"),
            "{fault}: {said}"
        );
    }
}
