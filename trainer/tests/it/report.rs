//! Fear: that reports about a run differ from what it did.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};

use contract::Class;
use serde_json::Value;
use tools::report::{NotableEventKind, PageServer, RunView, StepRows, page, payload};

use crate::damage::forge;
use crate::support::{CURRICULUM, Scratch, stop_after};

fn lines(scratch: &Scratch, out: &str) -> Vec<Value> {
    scratch.ledger(out).lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_table_says_what_the_ledger_says() {
    let scratch = Scratch::new();
    scratch.train("run");
    let root = scratch.path("run");
    let mut table = StepRows::open(&root, None, 100).unwrap();
    let mut shown = Vec::new();
    while let Some(row) = table.next_step().unwrap() {
        let text = table.text(&row);
        let last = text.lines().last().unwrap().to_owned();
        shown.push((row.to_json(), text, last));
    }
    let ledger = lines(&scratch, "run");
    assert_eq!((ledger.len(), shown.len()), (10, 10));
    for (line, (row, text, last)) in ledger.iter().zip(&shown) {
        for key in ["step", "phase", "loss", "tokens_per_expert", "batch_digest", "state_digest"] {
            assert_eq!(line[key], row[key], "{key}");
        }
        assert_eq!(line["label_count"], row["labels"]);
        let sources = row["sources"].as_object().unwrap();
        let labels: u64 = sources.values().map(|one| one["labels"].as_u64().unwrap()).sum();
        assert_eq!(labels, line["label_count"].as_u64().unwrap());
        let loss = format!("{:.6}", line["loss"].as_f64().unwrap());
        assert!(last.contains(&loss) && last.contains("web "), "{text}");
        assert_eq!(text.contains("phase long begins"), line["step"] == 7, "{text}");
    }
    let some = StepRows::open(&root, Some(3..5), 1).unwrap().next_step().unwrap().unwrap();
    assert_eq!(some.to_json()["step"], 3);
    assert!(StepRows::open(&root, Some(11..12), 1).is_err());
    assert!(StepRows::open(&scratch.path("none"), None, 1).is_err());
}

/// An edit is reported where it takes effect; earlier reported edits are not repeated.
#[test]
fn changes_of_the_curriculum_are_told_once() {
    let scratch = Scratch::new();
    let amendment = |step: u64, web: u64| {
        format!("\n[[amendment]]\nstep = {step}\nmix = {{ web = {web}, math = 2 }}\n")
    };
    let (first, last) = (amendment(4, 3), amendment(9, 5));
    for (stop, between) in [(2, None), (5, Some("")), (10, Some(amendment(7, 7).as_str()))] {
        let edit = between.map(|between| [&first, between, &last].concat()).unwrap_or_default();
        scratch.write("run.toml", &(CURRICULUM.to_owned() + &edit));
        scratch.run(&scratch.path("run.toml"), "run", stop_after(stop)).unwrap();
    }
    for from in [1, 5] {
        let mut table = StepRows::open(&scratch.path("run"), Some(from..11), 1).unwrap();
        while let Some(row) = table.next_step().unwrap() {
            let text = table.text(&row);
            let changes = text.lines().filter(|line| line.contains("curriculum changes"));
            let changes = changes.collect::<Vec<_>>().join("\n");
            let step = row.to_json()["step"].as_u64().unwrap();
            let told = [4, 7, 9].map(|step| changes.contains(&format!("step = {step}")));
            let wanted = match step {
                4 => [true, false, true],
                7 => [false, true, false],
                _ => [false; 3],
            };
            assert_eq!(told, wanted, "step {step}, from {from}: {changes}");
        }
    }
}

/// The chain is valid, but the loss is forged.
#[test]
fn a_forged_loss_is_not_shown() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(4)).unwrap();
    forge(&scratch.path("run/ledger.jsonl"), 2, |line| line["loss"] = 0.125.into());
    let root = scratch.path("run");
    let mut table = StepRows::open(&root, Some(2..3), 1).unwrap();
    let rows = table.next_step().map(|_| ());
    for answer in [rows, RunView::open(&root).map(|_| ())] {
        let fault = answer.unwrap_err();
        assert_eq!(fault.class(), Class::Mismatch, "{fault}");
        assert!(fault.to_string().contains("its loss is 0.125"), "{fault}");
    }
}

#[test]
fn a_page_has_the_run_its_stop_and_its_going_on() {
    let scratch = Scratch::new();
    let curriculum = scratch.path("run.toml");
    scratch.run(&curriculum, "run", stop_after(4)).unwrap();
    let root = scratch.path("run");
    let mut view = RunView::open(&root).unwrap();
    assert_eq!(view.last_step(), 4);
    scratch.train("run");
    assert!(view.refresh().unwrap() && !view.refresh().unwrap());
    let kinds: Vec<NotableEventKind> = view.log().happenings.iter().map(|one| one.kind).collect();
    let count = |kind| kinds.iter().filter(|one| **one == kind).count();
    assert_eq!(
        (
            count(NotableEventKind::Start),
            count(NotableEventKind::Killed),
            count(NotableEventKind::Stop)
        ),
        (2, 0, 2)
    );
    assert_eq!(count(NotableEventKind::Checkpoint), 5, "after 3, 4, 6, 9 and 10");
    assert_eq!(view.log().memory.len(), 10);
    assert!(view.log().memory.iter().all(|bytes| *bytes > 1e6 || cfg!(not(target_os = "linux"))));
    // Reading everything at once gives the same as reading while the file grows.
    let whole = RunView::open(&root).unwrap();
    let told: Value = serde_json::from_str(&payload(&whole, 0).unwrap()).unwrap();
    assert_eq!(told, serde_json::from_str::<Value>(&payload(&view, 0).unwrap()).unwrap());
    assert_eq!(
        (&told["steps"], &told["planned"], &told["first"]),
        (&10.into(), &10.into(), &1.into())
    );
    assert_eq!(told["sources"]["names"], serde_json::json!(["math", "web"]));
    assert_eq!(told["validation"]["steps"], serde_json::json!([4, 10]));
    let page = page(&[whole], false).unwrap();
    assert!(page.contains("connect-src 'none'") && page.starts_with("<!doctype html>"));
}

/// Sends a request as `host`; returns the status and the body.
fn ask(address: SocketAddr, host: &str, target: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Sets its flag when dropped, so that the server stops however the test ends.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_live_page_is_told_what_is_new_and_nobody_else_is_told_anything() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(4)).unwrap();
    // An explanation that is still being written.
    std::fs::create_dir(scratch.path("run/explained")).unwrap();
    scratch.write("run/explained/step-3.json", "{\"step\": 3, \"sent");
    let watch = PageServer::open(&scratch.path("run"), 0).unwrap();
    let (address, stop) = (watch.address().unwrap(), AtomicBool::new(false));
    assert!(address.ip().is_loopback());
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| watch.serve(&stop));
        let host = address.to_string();
        let (status, page) = ask(address, &host, "/");
        assert!(
            status == 200 && page.contains("connect-src 'self'") && page.contains("\"live\":true")
        );
        let (status, told) = ask(address, &host, "/data?known=0&version=");
        let told: Value = serde_json::from_str(&told).unwrap();
        assert_eq!((status, &told["steps"]), (200, &4.into()));
        let version = told["version"].as_str().unwrap();
        let again = format!("/data?known=4&version={version}");
        assert_eq!(ask(address, &host, &again), (204, String::new()));
        scratch.train("run");
        let (status, told) = ask(address, &host, &again);
        let told: Value = serde_json::from_str(&told).unwrap();
        assert_eq!((status, &told["first"], &told["steps"]), (200, &5.into(), &10.into()));
        let column = told["columns"]["loss"].as_str().unwrap().len();
        assert_eq!(column, (6 * 4usize).div_ceil(3) * 4, "six steps in base64");
        // Another run in the same place is not a continuation, and a missing run is not an idle one.
        let version = told["version"].as_str().unwrap();
        let later = format!("/data?known=10&version={version}");
        std::fs::remove_dir_all(scratch.path("run")).unwrap();
        let (status, why) = ask(address, &host, &later);
        assert!(status == 500 && why.contains("ledger.jsonl"), "{status}: {why}");
        scratch.run(&scratch.path("run.toml"), "run", stop_after(2)).unwrap();
        assert_eq!(ask(address, &host, &later), (205, String::new()));
        let told: Value =
            serde_json::from_str(&ask(address, &host, "/data?known=0&version=").1).unwrap();
        assert_eq!(told["steps"], 2);
        assert_eq!(ask(address, "evil.example", "/").0, 403);
        assert_eq!(ask(address, &host, "/etc/passwd").0, 404);
    });
}
