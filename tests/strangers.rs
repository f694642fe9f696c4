//! Fear: that a process that reaches the ports of a run can take part in it, or that its key leaks.

use std::fs;
use std::io::Write as _;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::ranks::{Fixture, ranks_of, until_lines};
use crate::support::{Ran, free_port};

/// One of two ranks started by hand, with these additional variables.
fn rank(fixture: &Fixture, rank: &str, port: u16, more: &[(&str, &str)]) -> Child {
    let mut command = fixture.run("by-hand", &["--rank-timeout", "4"]);
    command.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)]);
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.env_remove("ZTRAIN_RUN_KEY").env_remove("ZTRAIN_RUN_KEY_FILE");
    command.envs(more.iter().copied());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn ran(child: Child) -> Ran {
    child.wait_with_output().unwrap().into()
}

#[test]
fn a_rank_with_another_key_is_refused_and_one_with_the_same_is_not() {
    let fixture = Fixture::new(&[]);
    let file = fixture.scratch.write("run.key", "the secret of this run, in a file\n");
    let mode = |mode: &str| Command::new("chmod").arg(mode).arg(&file).status().unwrap();
    let named = [("ZTRAIN_RUN_KEY_FILE", file.to_str().unwrap())];
    mode("644");
    ran(rank(&fixture, "0", free_port(), &named)).fails(2, &["run.key", "644", "chmod 600"]);
    mode("600");
    let port = free_port();
    let first = rank(&fixture, "0", port, &named);
    let other = rank(&fixture, "1", port, &[("ZTRAIN_RUN_KEY", "the secret of another run")]);
    let said = ran(other).fails(2, &["refused this rank's run key", "ZTRAIN_RUN_KEY"]);
    assert!(!said.contains("secret of"), "{said}");
    let missing = ["missing is rank 1", "1 connection was refused for want of this run's key"];
    ran(first).fails(6, &missing);
    let port = free_port();
    let both = [
        rank(&fixture, "0", port, &named),
        rank(&fixture, "1", port, &[("ZTRAIN_RUN_KEY", "the secret of this run, in a file")]),
    ];
    for one in both {
        ran(one).ok();
    }
    let mut far = fixture.run("far", &[]);
    far.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "node7.invalid")]);
    far.env_remove("ZTRAIN_RUN_KEY").env_remove("ZTRAIN_RUN_KEY_FILE");
    Ran::from(far.output().unwrap()).fails(2, &["key", "ZTRAIN_RUN_KEY_FILE"]);
}

/// Every file below `folder`.
fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// The ports at which a process listens.
fn listening(process: u32) -> Vec<u16> {
    let links = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let links = links.filter_map(|link| fs::read_link(link.unwrap().path()).ok());
    let sockets: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let table = fs::read_to_string(format!("/proc/{process}/net/tcp")).unwrap();
    let lines = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    let here = lines
        .filter(|words| words[3] == "0A" && sockets.contains(&format!("socket:[{}]", words[9])));
    here.map(|words| u16::from_str_radix(words[1].split_once(':').unwrap().1, 16).unwrap())
        .collect()
}

#[test]
fn strangers_are_counted_change_no_bit_and_the_key_is_written_nowhere() {
    let fixture = Fixture::new(&[]);
    fixture.finish("alone", &["--nproc", "1"]);
    let mut command = fixture.run("pestered", &["--nproc", "3"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut launcher = command.spawn().unwrap();
    let ranks = ranks_of(&launcher, 3);
    until_lines(&fixture.scratch.path("pestered"), 2, &mut launcher);
    let environment = fs::read(format!("/proc/{}/environ", ranks[0])).unwrap();
    let environment = String::from_utf8_lossy(&environment);
    let of = |name: &str| {
        let all = environment.split('\0').filter_map(|entry| entry.split_once('='));
        all.clone().find(|(key, _)| *key == name).unwrap().1.to_owned()
    };
    let (port, key) = (of("MASTER_PORT").parse().unwrap(), of("ZTRAIN_RUN_KEY"));
    assert_eq!(key.len(), 64);
    let transfers: Vec<u16> = ranks.iter().flat_map(|rank| listening(*rank)).collect();
    assert!(transfers.len() >= 3 && !transfers.contains(&port), "{transfers:?}");
    let mut open = Vec::new();
    for round in 0..100 {
        for port in [port, transfers[round % transfers.len()]] {
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            let _ = stream.write_all(&vec![7; [0, 9, 64, 1 << 12][round % 4]]);
            open.extend(Some(stream).filter(|_| round % 3 > 0));
        }
    }
    let ended = launcher.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert!(ended.status.success(), "{said}");
    fixture.assert_same("alone", "pestered");
    let run = fixture.scratch.path("pestered");
    let events = fs::read_to_string(run.join("events.jsonl")).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let strangers: Vec<_> = events.filter(|event| event["event"] == "unauthenticated").collect();
    let refused = strangers.last().unwrap()["refused"].as_u64().unwrap();
    assert!((1..=100).contains(&refused), "{strangers:?}");
    assert_eq!(said.matches("refused for want of this run's key").count(), 1, "{said}");
    assert!(!said.contains(&key));
    for path in files(&run) {
        let bytes = fs::read(&path).unwrap();
        let holds = bytes.windows(key.len()).any(|window| window == key.as_bytes());
        assert!(!holds, "{} holds the key", path.display());
    }
}
