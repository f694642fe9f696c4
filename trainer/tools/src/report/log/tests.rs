//! Events as written by a run, including incomplete ones.

use std::io::Write as _;

use serde_json::json;

use super::*;
use trainer::events::Events;

fn step(step: u64, speed: f64) -> Value {
    json!({"step": step, "seconds": 2.0, "stall": 0.5, "tokens_per_second": speed, "memory": 1024})
}

/// A log next to a ledger of at most a hundred steps.
fn log_of(path: &Path) -> EventLog {
    let ledger = path.with_file_name("ledger.jsonl");
    std::fs::write(&ledger, [b' '; 100 * LINE as usize]).unwrap();
    EventLog::new(path, &ledger)
}

#[test]
fn a_kill_is_told_from_an_end_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.jsonl");
    let mut log = log_of(&path);
    assert_eq!(log.refresh().unwrap(), 0, "a run without events");
    let mut events = Events::open(&path).unwrap();
    let mut write = |event: &str, fields: Value| events.write(event, fields).unwrap();
    write("start", json!({"from_step": 0, "recorded": 0, "device": "cpu", "workers": 2}));
    (1..=7).for_each(|number| write("step", step(number, 100.0)));
    write("checkpoint", json!({"step": 5, "stall_seconds": 0.1, "writing_seconds": 1.0}));
    write("start", json!({"from_step": 5, "recorded": 7, "device": "cpu", "workers": 2}));
    write("stop", json!({"step": 8, "signal": true}));
    write("start", json!({"from_step": 8, "recorded": 8, "device": "cpu", "workers": 1}));
    let lines = log.refresh().unwrap();
    assert_eq!((lines, log.unreadable, log.starts(), log.running()), (12, 0, 3, true));
    let kinds: Vec<(NotableEventKind, u64)> =
        log.happenings.iter().map(|one| (one.kind, one.step)).collect();
    let wanted = [
        (NotableEventKind::Start, 0),
        (NotableEventKind::Checkpoint, 5),
        (NotableEventKind::Killed, 7),
        (NotableEventKind::Start, 5),
        (NotableEventKind::Stop, 8),
        (NotableEventKind::Start, 8),
    ];
    assert_eq!(kinds, wanted);
    assert!(log.happenings[3].words.contains("steps 6 to 7 again"), "{:?}", log.happenings[3]);
    assert_eq!((log.seconds.len(), log.stall[0], log.memory[6]), (7, 0.25, 1024.0));
}

#[test]
fn a_torn_line_is_read_once_it_is_whole_and_one_in_the_middle_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.jsonl");
    let mut file = File::create(&path).unwrap();
    let line =
        json!({"event": "step", "step": 1, "seconds": 1.0, "tokens_per_second": 5.0}).to_string();
    let (begin, rest) = line.split_at(20);
    file.write_all(begin.as_bytes()).unwrap();
    let mut log = log_of(&path);
    assert_eq!((log.refresh().unwrap(), log.seconds.len()), (0, 0));
    file.write_all(format!("{rest}\n{{\"event\": \"st\n").as_bytes()).unwrap();
    assert_eq!((log.refresh().unwrap(), log.seconds.len(), log.unreadable), (2, 1, 1));
    // Values that no run writes.
    for (number, seconds) in [(0u64, 1.0), (u64::MAX, 1.0), (1 << 32, 1.0), (101, 1.0), (2, -1e300)]
    {
        let line = json!({"event": "step", "step": number, "seconds": seconds, "stall": 1e300});
        file.write_all(format!("{line}\n").as_bytes()).unwrap();
    }
    assert_eq!((log.refresh().unwrap(), log.seconds.len()), (5, 2));
}

#[test]
fn a_slow_step_and_a_fault_are_odd_and_the_first_step_of_a_process_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.jsonl");
    let mut events = Events::open(&path).unwrap();
    let start = || json!({"from_step": 0, "recorded": 0, "device": "cpu", "workers": 1});
    events.write("start", start()).unwrap();
    for number in 1..=60 {
        let speed = if number == 1 || number == 50 { 5.0 } else { 100.0 };
        events.write("step", step(number, speed)).unwrap();
    }
    events.write("start", start()).unwrap();
    events.write("step", step(61, 5.0)).unwrap();
    events.write("fault", json!({"step": 62, "fault": "the loss is not finite\n  more"})).unwrap();
    let mut log = log_of(&path);
    log.refresh().unwrap();
    let odd: Vec<(u64, OddReasonKind)> =
        log.odd().iter().map(|one| (one.step, one.reasons[0].kind)).collect();
    assert_eq!(odd, [(50, OddReasonKind::Slow), (62, OddReasonKind::Stopped)]);
    assert!(!log.running());
}

#[test]
fn a_loss_that_is_survived_is_neither_a_kill_nor_an_odd_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.jsonl");
    let mut log = log_of(&path);
    let mut events = Events::open(&path).unwrap();
    let mut write = |event: &str, fields: Value| events.write(event, fields).unwrap();
    write("start", json!({"from_step": 0, "recorded": 0, "device": "cpu", "workers": 2}));
    (1..=7).for_each(|number| write("step", step(number, 100.0)));
    write("loss", json!({"step": 7, "lost": [0, 3], "left": [1, 2], "seconds": 0.1}));
    write("start", json!({"from_step": 6, "recorded": 7, "device": "cpu", "workers": 2}));
    write("recovered", json!({"step": 8, "seconds": 0.4, "again": 1}));
    write("unauthenticated", json!({"step": 8, "refused": 3, "last": "10.0.0.7:4242 (a proof)"}));
    log.refresh().unwrap();
    let kinds: Vec<(NotableEventKind, u64)> =
        log.happenings.iter().map(|one| (one.kind, one.step)).collect();
    let wanted = [
        (NotableEventKind::Start, 0),
        (NotableEventKind::Loss, 7),
        (NotableEventKind::Start, 6),
        (NotableEventKind::Recovered, 8),
        (NotableEventKind::Unauthenticated, 8),
    ];
    assert_eq!(kinds, wanted);
    assert!(log.happenings[1].words.contains("0, 3") && log.happenings[4].words.contains("far: 3"));
    assert!(log.odd().is_empty() && log.running());
}
