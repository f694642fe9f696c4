//! Fear: that a replay says "same bits" too easily, or explains a step by the wrong documents.

use contract::Class;
use tch::Device;
use trainer::compare::compare;
use trainer::lanes::Lanes;
use trainer::replay::whatif::{Change, Imagined, imagine};
use trainer::replay::{Replayed, Replayer, Verdict};
use trainer::step::Detail;

use crate::damage::forge;
use crate::support::{Scratch, stop_after, table};

fn open(scratch: &Scratch, run: &str) -> Replayer {
    Replayer::open(&scratch.path(run), &table(), Device::Cpu, Lanes::new(2)).unwrap()
}

/// Whether a step would have been as it was, up to the last digit that JSON may lose of a loss.
fn same(step: &Imagined) -> bool {
    let (loss, norm) = step.was.unwrap();
    (loss - step.would_be.0).abs() < 1e-12 && norm == step.would_be.1
}

fn replay(scratch: &Scratch, run: &str, step: u64) -> Replayed {
    let mut replayer = open(scratch, run);
    let mut state = replayer.state_after(step - 1).unwrap();
    replayer.step(&mut state, Detail::Tokens).unwrap()
}

#[test]
fn any_step_comes_back_with_the_same_bits_and_leaves_no_trace() {
    let scratch = Scratch::new();
    scratch.train("run");
    let before = scratch.tree("run");
    for step in [1, 2, 6, 7, 10] {
        let replayed = replay(&scratch, "run", step);
        assert_eq!(replayed.verdict, Verdict::SameBits, "{:?}", replayed.difference);
        let mut replayer = open(&scratch, "run");
        let state = replayer.state_after(step - 1).unwrap();
        for leaf in 0..replayed.record.as_ref().unwrap().leaves() as u64 {
            assert_eq!(replayer.leaf(&state, leaf).unwrap().verdict, Verdict::SameBits);
        }
    }
    assert!(before == scratch.tree("run"), "a replay changed the run's folder");
}

#[test]
fn a_wrong_number_in_the_ledger_is_a_repeatable_difference() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(5)).unwrap();
    forge(&scratch.path("run/ledger.jsonl"), 4, |line| {
        let text = line["leaf_gradients"].as_str().unwrap().to_owned();
        line["leaf_gradients"] =
            format!("{}{}", &text[..16], "0123456789abcdef0123456789abcdef").into();
    });
    let replayed = replay(&scratch, "run", 4);
    assert_eq!(replayed.verdict, Verdict::Repeatable);
    assert_eq!(replayed.difference.unwrap().quantity, "gradient of leaf 1");
    let mut replayer = open(&scratch, "run");
    let state = replayer.state_after(3).unwrap();
    assert_eq!(replayer.leaf(&state, 0).unwrap().verdict, Verdict::SameBits);
    assert_eq!(replayer.leaf(&state, 2).unwrap().verdict, Verdict::Repeatable);
    let fault = replayer.state_after(5).map(|_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch);
    assert!(fault.to_string().contains("step 4"), "{fault}");
}

#[test]
fn documents_account_for_every_label_and_all_of_the_loss() {
    let scratch = Scratch::new();
    scratch.train("run");
    for step in [3, 8] {
        let replayed = replay(&scratch, "run", step);
        let record = replayed.record.unwrap();
        let documents = replayed.documents;
        assert_eq!(documents.iter().map(|document| document.labels).sum::<u64>(), record.divisor);
        let loss: f64 = documents.iter().map(|document| document.loss).sum();
        assert!((loss / record.divisor as f64 - record.loss).abs() < 1e-5, "{loss}");
        assert!(documents.is_sorted_by(|a, b| a.mean >= b.mean), "worst first");
        for document in &documents {
            assert_eq!(document.file, format!("{}.jsonl", document.source));
            assert_eq!(document.id, format!("{}-{}", document.source, document.row - 1));
            assert!(document.tokens >= document.labels && document.tokens > 0);
        }
    }
}

#[test]
fn what_would_have_been_without_a_document() {
    let scratch = Scratch::new();
    scratch.train("run");
    let nothing = imagine(&mut open(&scratch, "run"), 4..7, &Change::default()).unwrap();
    assert!(nothing.iter().all(same), "without a change it is a replay");
    let documents = replay(&scratch, "run", 4).documents;
    let (worst, rest) = documents.split_first().unwrap();
    let change = Change { drop: vec![worst.id.clone()], lr: None };
    let imagined = imagine(&mut open(&scratch, "run"), 4..5, &change).unwrap();
    let labels: u64 = rest.iter().map(|document| document.labels).sum();
    let loss: f64 = rest.iter().map(|document| document.loss).sum();
    assert_eq!(imagined[0].dropped_labels, worst.labels);
    assert!((imagined[0].would_be.0 - loss / labels as f64).abs() < 1e-5, "{imagined:?}");
    let change = Change { drop: vec!["nobody".to_owned()], lr: None };
    let fault = imagine(&mut open(&scratch, "run"), 4..5, &change).unwrap_err();
    assert!(fault.to_string().contains("nobody"), "{fault}");
    let change = Change { drop: Vec::new(), lr: Some(0.0) };
    let imagined = imagine(&mut open(&scratch, "run"), 4..6, &change).unwrap();
    assert!(same(&imagined[0]) && !same(&imagined[1]), "a rate reaches the next step only");
}

#[test]
fn a_step_that_diverged_can_be_looked_at() {
    let scratch = Scratch::new();
    let wild = [
        ("lr = 1e-2", "lr = 1e30"),
        ("\"muon\"", "\"adamw\""),
        ("warmup_steps = 3", "warmup_steps = 0"),
    ];
    let path = scratch.edited("run.toml", &wild);
    scratch.run(&path, "run", |_| ()).unwrap_err();
    let replayed = replay(&scratch, "run", 2);
    assert_eq!(replayed.verdict, Verdict::NotRecorded);
    assert!(replayed.diverged.is_some() && !replayed.documents.is_empty());
    let fault = open(&scratch, "run").state_after(2).map(|_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Usage);
}

#[test]
fn comparing_names_the_first_step_and_quantity() {
    let scratch = Scratch::new();
    scratch.train("run");
    scratch.run(&scratch.path("run.toml"), "part", stop_after(4)).unwrap();
    let answer = compare(&scratch.path("run"), &scratch.path("part")).unwrap();
    assert_eq!((answer.steps, answer.difference), ([10, 4], None));
    let edited = scratch.edited("edited.toml", &[("web = 1, math = 3", "web = 1")]);
    scratch.run(&edited, "edited", |_| ()).unwrap();
    let answer = compare(&scratch.path("run"), &scratch.path("edited")).unwrap();
    let (step, difference) = answer.difference.clone().unwrap();
    assert_eq!((step, difference.quantity.as_str()), (7, "data digest"));
    assert_eq!(answer.notes, ["the runs have different curricula"]);
    assert!(answer.to_string().contains("step 7 is the first to differ"), "{answer}");
}
