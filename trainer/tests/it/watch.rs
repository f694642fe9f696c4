//! Fear: that what is shown while a run is active differs from what it computed.

use std::collections::BTreeMap;
use std::fs;

use loader::{OpenedCurriculum, validation};
use tch::{Device, Tensor};
use trainer::RunSpec;
use trainer::ledger::Ledger;
use trainer::model::{MicroBatchInput, forward_backward};
use trainer::replay::Replayer;
use trainer::state::State;
use trainer::state::ownership::Ownership;
use trainer::step::{self, Detail};
use trainer::validate::Validation;
use trainer::workers::Workers;

use crate::ranks::train_with;
use crate::support::{Scratch, stop_after, table, workers};

/// One point of a curve.
#[derive(Debug, PartialEq)]
struct Point {
    step: u64,
    tag: String,
    value: f32,
}

/// The fields of a protocol-buffer message: number, and the value as a number or as bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, Vec<u8>)> {
    let mut found = Vec::new();
    fn varint(bytes: &mut &[u8]) -> u64 {
        let (mut value, mut shift) = (0, 0);
        loop {
            let (first, rest) = bytes.split_first().unwrap();
            *bytes = rest;
            value |= u64::from(first & 0x7f) << shift;
            shift += 7;
            if first & 0x80 == 0 {
                return value;
            }
        }
    }
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let (number, length) = match key & 7 {
            0 => (varint(&mut bytes), 0),
            1 => (0, 8),
            2 => (0, varint(&mut bytes) as usize),
            5 => (0, 4),
            kind => panic!("field kind {kind}"),
        };
        let (value, rest) = bytes.split_at(length);
        bytes = rest;
        found.push((key >> 3, number, value.to_vec()));
    }
    found
}

/// CRC-32C bit by bit from its polynomial, then masked as the format requires.
fn sum(bytes: &[u8]) -> u32 {
    let mut sum = u32::MAX;
    for bit in bytes.iter().flat_map(|byte| (0..8).map(move |bit| u32::from(byte >> bit & 1))) {
        let carry = (sum ^ bit) & 1;
        sum = (sum >> 1) ^ (carry * 0x82f6_3b78);
    }
    let sum = !sum;
    sum.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The curves as a reader sees them: files in order of name, and each start of a session discards later steps.
fn curves(scratch: &Scratch, run: &str) -> Vec<Point> {
    let mut files: Vec<_> = fs::read_dir(scratch.path(run).join("metrics"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let mut points: Vec<Point> = Vec::new();
    for path in files {
        assert!(path.to_str().unwrap().contains("tfevents"), "the name by which readers know it");
        let bytes = fs::read(path).unwrap();
        let (mut rest, mut events) = (&bytes[..], 0);
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let word = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
            let message = &rest[12..12 + length];
            assert_eq!((word(8), word(12 + length)), (sum(&rest[..8]), sum(message)));
            rest = &rest[16 + length..];
            let event = fields(message);
            let step = event.iter().find(|(number, ..)| *number == 2).unwrap().1;
            for (number, _, value) in &event {
                match (number, events) {
                    (1, _) => assert!(f64::from_le_bytes(value[..].try_into().unwrap()) > 1.7e9),
                    (2, _) => {}
                    (3, 0) => assert_eq!(value, b"brain.Event:2"),
                    (7, 1) => points.retain(|point| point.step < step),
                    (5, 2..) => points.extend(fields(value).into_iter().map(|(_, _, one)| {
                        let one = fields(&one);
                        let tag = String::from_utf8(one[0].2.clone()).unwrap();
                        let value = f32::from_le_bytes(one[1].2[..].try_into().unwrap());
                        Point { step, tag, value }
                    })),
                    other => panic!("an event with {other:?}"),
                }
            }
            events += 1;
        }
    }
    points
}

fn at(points: &[Point], tag: &str) -> BTreeMap<u64, f32> {
    points.iter().filter(|point| point.tag == tag).map(|point| (point.step, point.value)).collect()
}

#[test]
fn curves_show_what_the_ledger_says_also_across_stops() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(5)).unwrap();
    // The newest checkpoint is lost, so steps 4 and 5 are recomputed and their points written again.
    fs::remove_dir_all(scratch.path("run/checkpoints/step-5")).unwrap();
    scratch.train("run");
    let points = curves(&scratch, "run");
    let ledger = Ledger::read(&scratch.path("run/ledger.jsonl")).unwrap();
    let whole = (1..=10).map(|step| ledger.record(step).unwrap());
    let whole: Vec<_> = whole.collect();
    let curve = |value: fn(&trainer::ledger::StepRecord) -> f64| -> BTreeMap<u64, f32> {
        whole.iter().map(|record| (record.step, value(record) as f32)).collect()
    };
    assert_eq!(at(&points, "total/loss"), curve(|record| record.loss));
    assert_eq!(at(&points, "optimizer/gradient_norm"), curve(|record| record.norm()));
    assert_eq!(at(&points, "optimizer/lr"), curve(|record| record.lr()));
    let count = points.iter().filter(|point| point.tag == "total/loss").count();
    assert_eq!(count, 10, "a step that was computed again is there once");
    for tag in ["speed/tokens_per_second", "speed/data_stall", "router/entropy", "router/skipped"] {
        assert_eq!(at(&points, tag).len(), 10, "{tag}");
    }
    assert!(at(&points, "router/entropy").values().all(|value| (0.0..=1.0001).contains(value)));
    assert!(at(&points, "speed/data_stall").values().all(|value| (0.0..=1.0).contains(value)));
}

#[test]
fn losses_by_source_are_those_of_its_documents() {
    let scratch = Scratch::new();
    scratch.train("run");
    let points = curves(&scratch, "run");
    let path = scratch.path("run");
    for step in [2, 8] {
        let mut replayer = Replayer::open(&path, &table(), Device::Cpu, Workers::new(2)).unwrap();
        let mut state = replayer.state_after(step - 1).unwrap();
        let replayed = tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap();
        for source in ["web", "math"] {
            let own = replayed.documents.iter().filter(|document| document.source == source);
            let (loss, labels) = own.fold((0.0, 0), |(loss, labels), document| {
                (loss + document.loss, labels + document.labels)
            });
            let found = at(&points, &format!("loss/{source}"))[&step];
            let wanted = loss / labels as f64;
            assert!((f64::from(found) - wanted).abs() < 1e-5, "{source}: {found} {wanted}");
        }
    }
}

/// Every validation in a run's events: step, source (or "all"), bits, labels, mean.
fn validations(scratch: &Scratch, run: &str) -> BTreeMap<(u64, String), (String, u64, f64)> {
    let text = fs::read_to_string(scratch.path(run).join("events.jsonl")).unwrap();
    let mut found = BTreeMap::new();
    for line in text.lines() {
        let event: serde_json::Value = serde_json::from_str(line).unwrap();
        if event["event"] != "validation" {
            continue;
        }
        let mut sources = event["sources"].as_object().unwrap().clone();
        sources.insert("all".to_owned(), event["all"].clone());
        for (source, one) in sources {
            let bits = one["bits"].as_str().unwrap().to_owned();
            let one = (bits, one["labels"].as_u64().unwrap(), one["loss"].as_f64().unwrap());
            let key = (event["step"].as_u64().unwrap(), source);
            let before = found.insert(key, one.clone());
            assert!(before.is_none_or(|before| before == one), "taken again, it is the same");
        }
    }
    found
}

#[test]
fn the_loss_on_held_out_text_is_a_function_of_the_state() {
    let scratch = Scratch::new();
    let change = |count: usize, last: Option<u64>| {
        move |exec: &mut trainer::ExecOptions| {
            workers(count)(exec);
            exec.validation = Validation { every: 4, windows: 100 };
            exec.stop_after = last;
        }
    };
    scratch.run(&scratch.path("run.toml"), "run", change(2, None)).unwrap();
    let found = validations(&scratch, "run");
    let steps: Vec<u64> = found.keys().map(|(step, _)| *step).collect();
    assert_eq!(steps, [4, 4, 4, 8, 8, 8, 10, 10, 10]);
    // Workers and stops have no effect, except that a stop adds a validation at its step.
    scratch.run(&scratch.path("run.toml"), "parts", change(1, Some(5))).unwrap();
    fs::remove_dir_all(scratch.path("parts/checkpoints/step-5")).unwrap();
    scratch.run(&scratch.path("run.toml"), "parts", change(3, None)).unwrap();
    let mut parts = validations(&scratch, "parts");
    parts.retain(|(step, _), _| *step != 5);
    assert_eq!(parts, found);
    // Validation does not affect training.
    scratch.run(&scratch.path("run.toml"), "none", |exec| exec.validation.every = 0).unwrap();
    assert!(scratch.ledger("none") == scratch.ledger("run"));
    assert!(validations(&scratch, "none").is_empty());
    brute_force(&scratch, &found);
    let points = curves(&scratch, "run");
    for ((step, source), (_, _, loss)) in &found {
        let tag = match source.as_str() {
            "all" => "total/validation".to_owned(),
            _ => format!("validation/{source}"),
        };
        assert_eq!(at(&points, &tag)[step], *loss as f32);
    }
}

/// Evaluates every window separately, through training's forward and backward pass.
fn brute_force(scratch: &Scratch, found: &BTreeMap<(u64, String), (String, u64, f64)>) {
    let spec = RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap();
    let path = scratch.path("run");
    let replayer = Replayer::open(&path, &table(), Device::Cpu, Workers::new(2));
    let state = replayer.unwrap().state_at(8).unwrap();
    let bias = |layer: &trainer::optim::balance::RouterBalance| Tensor::from_slice(&layer.bias);
    let biases: Vec<Tensor> = state.balance.iter().map(bias).collect();
    let config = &spec.model_at(8).unwrap().config;
    let (mut all, mut all_labels) = (0.0, 0);
    for source in ["web", "math"] {
        let (mut sum, mut labels) = (0.0, 0);
        let windows = validation::windows(&spec.data, source, 64).unwrap();
        assert!(windows > 2, "something is held out");
        for window in 0..windows {
            let batch = validation::batch(&spec.data, source, 64, window, 1).unwrap();
            let input = MicroBatchInput {
                tokens: batch.columns().tokens,
                labels: batch.columns().labels,
                positions: batch.columns().positions,
                mask: batch.columns().mask,
                boundaries: &batch.boundaries,
                weights: &[],
                rows: 1,
                seq_len: 64,
            };
            let out = forward_backward(config, &state.weights, &biases, &input, 1).unwrap();
            (sum, labels) = (sum + out.loss, labels + out.labels);
        }
        let (_, found_labels, mean) = &found[&(8, source.to_owned())];
        assert_eq!(*found_labels, labels);
        assert!((mean - sum / labels as f64).abs() < 1e-6, "{source}: {mean}");
        (all, all_labels) = (all + sum, all_labels + labels);
    }
    let (_, labels, mean) = &found[&(8, "all".to_owned())];
    assert_eq!(*labels, all_labels);
    assert!((mean - all / all_labels as f64).abs() < 1e-6);
}

#[test]
fn few_windows_are_spread_and_never_twice() {
    let scratch = Scratch::new();
    scratch.train("run");
    let spec = RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap();
    let path = scratch.path("run");
    let replayer = Replayer::open(&path, &table(), Device::Cpu, Workers::new(2));
    let state = replayer.unwrap().state_at(3).unwrap();
    let take = |windows| {
        let validation = Validation { every: 1, windows };
        step::alone(&spec, Workers::new(2), |cx| validation.take(cx, &state, &|| false))
            .unwrap()
            .unwrap()
    };
    let whole = take(1000);
    let labels: Vec<u64> = (1..=20).map(|windows| take(windows)[0].labels).collect();
    assert!(labels.is_sorted(), "{labels:?}");
    assert!(labels[0] < labels[19] && labels[19] <= whole[0].labels);
    // Every count of windows that covers the text is the whole text once.
    let windows = validation::windows(&spec.data, "web", 32).unwrap();
    assert_eq!(take(windows)[0], whole[0]);
}

/// The cut of a step into micro-batches matters only to training.
#[test]
fn micro_batches_do_not_show_in_the_loss_on_held_out_text() {
    let scratch = Scratch::new();
    let path = scratch.edited("run.toml", &[("num_hidden_layers = 2", "num_hidden_layers = 1")]);
    let text = fs::read_to_string(&path).unwrap();
    let taken = [1, 2, 3, 6].map(|micro_batch| {
        let text = text.replacen("micro_batch = 2", &format!("micro_batch = {micro_batch}"), 1);
        let path = scratch.write("run.toml", &text);
        let spec = RunSpec::new(&OpenedCurriculum::open(path).unwrap()).unwrap();
        let owners = Ownership::new(&spec, 0, 1);
        let state = State::begin(&spec, Device::Cpu, owners, Workers::new(1)).unwrap();
        let validation = Validation { every: 1, windows: 7 };
        step::alone(&spec, Workers::new(2), |cx| validation.take(cx, &state, &|| false))
            .unwrap()
            .unwrap()
    });
    assert!(taken.iter().all(|one| *one == taken[0]), "{taken:?}");
}

/// Several ranks write the same curves and the same validation loss.
#[test]
fn ranks_do_not_show_in_what_one_looks_at() {
    let scratch = Scratch::new();
    let validation = Validation { every: 5, windows: 100 };
    scratch.run(&scratch.path("run.toml"), "alone", |exec| exec.validation = validation).unwrap();
    let outcomes = train_with(&scratch, "ranks", 3, |_, exec| exec.validation = validation);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(validations(&scratch, "ranks"), validations(&scratch, "alone"));
    let decided = |run: &str| {
        let mut points = curves(&scratch, run);
        points.retain(|point| !point.tag.starts_with("speed/"));
        points
    };
    let (ranks, alone) = (decided("ranks"), decided("alone"));
    assert!(ranks.iter().any(|point| point.tag == "loss/math"));
    assert_eq!(ranks, alone);
}
