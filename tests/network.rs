//! Fear: that a network that drops, delays, reorders or partitions changes a bit, or blocks a run forever.
//!
//! Each rank is on its own machine: network namespaces, connected by `network.py`, which does to packets what the test
//! says. They need root; without it, each test says so in the log.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::python::{skipped, tests_folder};
use crate::ranks::{Fixture, until_lines};
use crate::support::{Ran, arg};

/// Machines and the network that connects them.
struct Network {
    child: Child,
    answers: BufReader<ChildStdout>,
    prefix: String,
    count: usize,
}

impl Drop for Network {
    fn drop(&mut self) {
        // The machines end when this input closes; killing the process would leave them behind.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

impl Network {
    fn of(count: usize, letter: char) -> Option<Network> {
        // A network device's name has at most fifteen letters.
        let prefix = format!("z{letter}{}", std::process::id());
        let mut command = Command::new("python3");
        command.arg(tests_folder().join("network.py")).args([&prefix, &count.to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        if line.trim() != "ready" {
            skipped("network faults", line.trim());
            let _ = child.wait();
            return None;
        }
        Some(Network { child, answers, prefix, count })
    }

    /// Sets the faults that packets meet from now on.
    fn faults(&mut self, words: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{words}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "done");
    }

    /// Starts one rank on each machine.
    fn start(&self, fixture: &Fixture, out: &str, extra: &[&str]) -> Vec<Child> {
        let rank = |rank: usize| {
            let inner = fixture.run(out, extra);
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &format!("{}-{rank}", self.prefix)]);
            command.arg(inner.get_program()).args(inner.get_args());
            for (name, value) in inner.get_envs() {
                match value {
                    Some(value) => command.env(name, value),
                    None => command.env_remove(name),
                };
            }
            command
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", self.count.to_string())
                .env("LOCAL_RANK", "0")
                .env("MASTER_ADDR", "10.77.0.1")
                .env("MASTER_PORT", "29500")
                .env("ZTRAIN_RUN_KEY", "a secret that these machines share")
                .env("GLOO_SOCKET_IFNAME", format!("{}{rank}", self.prefix));
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        (0..self.count).map(rank).collect()
    }
}

fn ended(ranks: Vec<Child>) -> Vec<Output> {
    // Reads all pipes concurrently: a rank with much output must not wait for another to end.
    let threads = ranks.into_iter().map(|rank| std::thread::spawn(|| rank.wait_with_output()));
    let threads: Vec<_> = threads.collect();
    threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
}

#[track_caller]
fn all_done(ranks: Vec<Child>) {
    let outputs = ended(ranks);
    let said: Vec<_> = outputs.iter().map(|o| String::from_utf8_lossy(&o.stderr)).collect();
    assert!(outputs.iter().all(|output| output.status.success()), "{}", said.join("\n--\n"));
}

#[test]
fn a_bad_network_changes_no_bit() {
    let Some(mut network) = Network::of(3, 'a') else { return };
    let fixture = Fixture::new(&[]);
    fixture.finish("alone", &["--nproc", "1"]);
    network.faults("loss 10 delay 2 jitter 4");
    let mut ranks = network.start(&fixture, "far", &["--rank-timeout", "30"]);
    // The network is partitioned for less than any timeout, then recovers.
    until_lines(&fixture.scratch.path("far"), 4, &mut ranks[0]);
    network.faults("cut 1");
    std::thread::sleep(Duration::from_secs(1));
    network.faults("cut -1");
    all_done(ranks);
    fixture.assert_same("alone", "far");
}

#[test]
fn a_network_that_parts_is_an_error_within_the_deadline_and_the_run_goes_on_afterwards() {
    let Some(mut network) = Network::of(3, 'b') else { return };
    let fixture = Fixture::new(&[]);
    fixture.finish("alone", &["--nproc", "1"]);
    let mut ranks = network.start(&fixture, "cut", &["--rank-timeout", "2"]);
    until_lines(&fixture.scratch.path("cut"), 5, &mut ranks[0]);
    network.faults("cut 2");
    let start = Instant::now();
    let outputs = ended(ranks);
    // The deadline, plus the grace period of a rank that does not exit by itself.
    assert!(start.elapsed() < Duration::from_secs(150), "{:?}", start.elapsed());
    for (rank, output) in outputs.into_iter().enumerate() {
        let said = Ran::from(output).fails(6, &["run the same command again"]);
        // Each side reports the other as missing.
        let missed = if rank == 2 { "rank 0" } else { "rank 2" };
        assert!(said.contains(missed), "rank {rank}: {said}");
    }
    let lines = fs::read_to_string(fixture.scratch.path("cut").join("ledger.jsonl")).unwrap();
    assert!(lines.lines().count() < 21, "it was to end before its last step");
    network.faults("cut -1");
    all_done(network.start(&fixture, "cut", &["--rank-timeout", "30"]));
    fixture.assert_same("alone", "cut");
    let run = fixture.scratch.path("cut");
    let verdict = crate::support::ztrain(&["replay", "--run", arg(&run), "--step", "7"]).ok();
    assert!(verdict.contains("same bits"), "{verdict}");
}
