//! Fear: that a network that loses, delays, reorders or parts changes a bit, or holds a run for ever.
//!
//! Ranks on machines of their own: network namespaces, joined by `network.py`, which does to packets what the test says.
//! Where they cannot be made (they need root), each test says so in the log.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::python::{skipped, tests_folder};
use crate::ranks::{Fixture, until_lines};
use crate::support::{Ran, arg};

/// Machines and the network between them.
struct Network {
    child: Child,
    answers: BufReader<ChildStdout>,
    prefix: String,
    count: usize,
}

impl Drop for Network {
    fn drop(&mut self) {
        // Its input ends, with it the machines; a killed one would leave them behind.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

impl Network {
    fn of(count: usize, letter: char) -> Option<Network> {
        // A device's name has at most fifteen letters.
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

    /// From now on, packets meet these faults.
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
    // All pipes at once: a rank that says much must not wait for one that has not ended.
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
    // The network parts for a while, shorter than anyone's patience, and comes back.
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
    // The deadline, and the grace that a rank gets which does not end by itself.
    assert!(start.elapsed() < Duration::from_secs(150), "{:?}", start.elapsed());
    for (rank, output) in outputs.into_iter().enumerate() {
        let said = Ran::from(output).fails(6, &["run the same command again"]);
        // Each side misses the other.
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
