//! Fear: that a replay reports "same bits" too easily, or explains a step by the wrong documents.

use std::cell::Cell;
use std::sync::Arc;

use contract::{Class, Result};
use loader::{Batch, OpenedCurriculum};
use tch::{Device, Tensor};
use tools::change::{WhatIfChange, rate_at};
use tools::compare::compare;
use tools::replay::ExplainedReplay;
use tools::replay::attribute::{AttributionOptions, attribute};
use tools::replay::whatif::{WhatIfStep, imagine};
use trainer::replay::{Executor, ReplayParallelism, Replayer, ThisMachine, Verdict};
use trainer::state::State;
use trainer::step::{ComputedMicroBatches, Detail, MicroBatchSums, StepContext};
use trainer::workers::Workers;
use trainer::{RunSpec, World};

use crate::damage::forge;
use crate::support::{Scratch, stop_after, table};

fn open(scratch: &Scratch, run: &str) -> Replayer {
    Replayer::open(&scratch.path(run), &table(), Device::Cpu, Workers::new(2)).unwrap()
}

/// Whether a step is unchanged, up to the last digit of the loss in JSON.
fn same(step: &WhatIfStep) -> bool {
    let (loss, norm) = step.was.unwrap();
    (loss - step.would_be.0).abs() < 1e-12 && norm == step.would_be.1
}

pub(crate) fn dropping(ids: &[&str]) -> WhatIfChange {
    WhatIfChange {
        drop_documents: ids.iter().map(ToString::to_string).collect(),
        ..WhatIfChange::default()
    }
}

fn replay(scratch: &Scratch, run: &str, step: u64) -> ExplainedReplay {
    let mut replayer = open(scratch, run);
    let mut state = replayer.state_after(step - 1).unwrap();
    tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap()
}

#[test]
fn any_step_comes_back_with_the_same_bits_and_leaves_no_trace() {
    let scratch = Scratch::new();
    scratch.train("run");
    let before = scratch.tree("run");
    for step in [1, 2, 6, 7, 10] {
        let replayed = replay(&scratch, "run", step).replayed;
        assert_eq!(replayed.verdict, Verdict::SameBits, "{:?}", replayed.difference);
        let mut replayer = open(&scratch, "run");
        let state = replayer.state_after(step - 1).unwrap();
        for micro_batch in 0..replayed.record.as_ref().unwrap().micro_batches() as u64 {
            assert_eq!(
                tools::replay::micro_batch(&replayer, &state, micro_batch)
                    .unwrap()
                    .replayed
                    .verdict,
                Verdict::SameBits
            );
        }
    }
    assert!(before == scratch.tree("run"), "a replay changed the run's folder");
}

#[test]
fn a_wrong_number_in_the_ledger_is_the_runs_own() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(5)).unwrap();
    forge(&scratch.path("run/ledger.jsonl"), 4, |line| {
        let text = line["micro_batch_grad_checksums"].as_str().unwrap().to_owned();
        line["micro_batch_grad_checksums"] =
            format!("{}{}", &text[..16], "0123456789abcdef0123456789abcdef").into();
    });
    let replayed = replay(&scratch, "run", 4).replayed;
    assert_eq!(replayed.verdict, Verdict::RunHit);
    assert_eq!(replayed.difference.unwrap().quantity, "gradient of micro-batch 1");
    for words in [
        "the run itself",
        "the backward pass of a micro-batch was hit",
        "gradient of micro-batch 1",
    ] {
        assert!(replayed.advice.contains(words), "{}", replayed.advice);
    }
    let mut replayer = open(&scratch, "run");
    let state = replayer.state_after(3).unwrap();
    assert_eq!(
        tools::replay::micro_batch(&replayer, &state, 0).unwrap().replayed.verdict,
        Verdict::SameBits
    );
    assert_eq!(
        tools::replay::micro_batch(&replayer, &state, 2).unwrap().replayed.verdict,
        Verdict::RunHit
    );
    let fault = replayer.state_after(5).map(|_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch);
    assert!(fault.to_string().contains("step 4"), "{fault}");
}

/// A machine that computes correctly at first, and then gets one bit wrong.
struct Failing {
    /// How many results are correct before the first failure.
    right: usize,
    /// Whether the error is the same each time.
    steady: bool,
    answers: Cell<usize>,
}

impl Failing {
    fn new(right: usize, steady: bool) -> Box<Failing> {
        Box::new(Failing { right, steady, answers: Cell::new(0) })
    }

    /// Which bit of this result is wrong.
    fn wrong_bit(&self) -> Option<u32> {
        let answer = self.answers.replace(self.answers.get() + 1);
        let wrong = if self.steady { 0 } else { answer as u32 % 20 };
        (answer >= self.right).then_some(wrong)
    }
}

impl Executor for Failing {
    fn compute(
        &self,
        cx: StepContext<'_>,
        state: &State,
        batch: &Batch,
        detail: Detail,
    ) -> Result<ComputedMicroBatches> {
        let mut gradient = ThisMachine.compute(cx, state, batch, detail)?;
        if let Some(bit) = self.wrong_bit() {
            let mut values = Vec::<f32>::try_from(gradient.own[3].reshape([-1])).unwrap();
            values[5] = f32::from_bits(values[5].to_bits() ^ (1 << bit));
            let damaged = Tensor::from_slice(&values).reshape(gradient.own[3].size());
            gradient.own[3] = damaged;
        }
        Ok(gradient)
    }

    fn micro_batch(
        &self,
        spec: &RunSpec,
        state: &State,
        batch: &Batch,
        micro_batch: u64,
        workers: Workers,
    ) -> Result<MicroBatchSums> {
        let mut sums = ThisMachine.micro_batch(spec, state, batch, micro_batch, workers)?;
        if let Some(bit) = self.wrong_bit() {
            sums.gradient ^= 1 << bit;
        }
        Ok(sums)
    }
}

#[test]
fn a_machine_that_errs_is_told_from_one_that_is_other() {
    let scratch = Scratch::new();
    scratch.train("run");
    let cases = [
        // Wrong in different places, wrong in the same place, never wrong.
        (Failing::new(0, false), Verdict::NotRepeatable),
        (Failing::new(0, true), Verdict::RunHit),
        (Failing::new(usize::MAX, false), Verdict::SameBits),
    ];
    for (machine, wanted) in cases {
        let mut replayer = open(&scratch, "run");
        let mut state = replayer.state_after(4).unwrap();
        let replayer = replayer.computed_by(machine);
        let found = tools::replay::micro_batch(&replayer, &state, 1).unwrap();
        assert_eq!(found.replayed.verdict, wanted);
        let quantity =
            (wanted != Verdict::SameBits).then(|| "gradient of micro-batch 1".to_owned());
        assert_eq!(found.replayed.difference.map(|found| found.quantity), quantity);
        let found = tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap();
        assert_eq!(found.replayed.verdict, wanted);
        let name = &replayer.spec().parameters[3].name;
        let quantity = (wanted != Verdict::SameBits).then(|| format!("summed gradient of {name}"));
        assert_eq!(found.replayed.difference.map(|found| found.quantity), quantity);
        assert!(!found.documents.is_empty());
    }
    // On the way to the requested step it is an error with the same words.
    let fault = open(&scratch, "run").computed_by(Failing::new(1, false)).state_after(8);
    let fault = fault.map(|_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Mismatch);
    for word in ["step 8", "not repeatably"] {
        assert!(fault.to_string().contains(word), "{fault}");
    }
    // Without a record to compare with, an error of the machine gives no verdict.
    scratch.run(&scratch.path("run.toml"), "part", stop_after(3)).unwrap();
    let mut replayer = open(&scratch, "part");
    let mut state = replayer.state_after(3).unwrap();
    let replayer = replayer.computed_by(Failing::new(0, false));
    assert_eq!(
        tools::replay::micro_batch(&replayer, &state, 0).unwrap().replayed.verdict,
        Verdict::NotRecorded
    );
    assert_eq!(
        tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed.verdict,
        Verdict::NotRecorded
    );
}

/// A run in whose memory a weight's bit flipped, seen from a correct machine, and from one with other kernels.
#[test]
fn what_differs_first_decides_what_a_replay_says() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(5)).unwrap();
    let ledger = scratch.path("run/ledger.jsonl");
    let whole = std::fs::read(&ledger).unwrap();
    let flip = |field: &'static str| {
        move |line: &mut serde_json::Value| {
            let text = line[field].as_str().unwrap().to_owned();
            let last = if text.ends_with('0') { "1" } else { "0" };
            line[field] = format!("{}{last}", &text[..text.len() - 1]).into();
        }
    };
    let cases = [
        ("batch_digest", Verdict::Repeatable, "other text than the run"),
        ("grad_checksums", Verdict::RunHit, "the addition of gradients was hit"),
        ("weight_checksums", Verdict::RunHit, "the update of weights and moments was hit"),
    ];
    for (field, verdict, words) in cases {
        std::fs::write(&ledger, &whole).unwrap();
        forge(&ledger, 4, flip(field));
        let replayed = replay(&scratch, "run", 4).replayed;
        assert_eq!(replayed.verdict, verdict, "{field}");
        assert!(replayed.advice.contains(words), "{field}: {}", replayed.advice);
        let mut other = table();
        other.libtorch = "another".to_owned();
        let mut replayer =
            Replayer::open(&scratch.path("run"), &other, Device::Cpu, Workers::new(2)).unwrap();
        let mut state = replayer.state_after(3).unwrap();
        let replayed = tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed;
        assert_eq!(replayed.verdict, Verdict::Repeatable, "{field}");
        let kernels = replayed.advice.contains("software or kernels changed since the run: ");
        assert_eq!(kernels, field != "batch_digest", "{}", replayed.advice);
    }
}

#[test]
fn a_store_that_moved_is_named() {
    let scratch = Scratch::new();
    scratch.run(&scratch.path("run.toml"), "run", stop_after(2)).unwrap();
    std::fs::rename(scratch.path("store"), scratch.path("moved")).unwrap();
    let open = |stores: &[std::path::PathBuf]| {
        let stores: Vec<_> = stores.iter().map(store::Location::from).collect();
        let world = Arc::new(World::alone(Device::Cpu, table()));
        let root = scratch.path("run");
        Replayer::open_with(&root, &stores, &world, Workers::new(2), ReplayParallelism::default())
    };
    let gone = open(&[]).map(|_| ()).unwrap_err();
    assert!(gone.class() == Class::Data && gone.to_string().contains("--store"), "{gone}");
    let mut replayer = open(&[scratch.path("moved")]).unwrap();
    let mut state = replayer.state_after(1).unwrap();
    assert_eq!(
        tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed.verdict,
        Verdict::SameBits
    );
    let two = [scratch.path("moved"), scratch.path("moved")];
    assert_eq!(open(&two).map(|_| ()).unwrap_err().class(), Class::Usage);
    scratch.write_other_store("other", ["web", "math"], 9);
    // A store is identified by its digest, whether its sources have the same names or not.
    scratch.write_other_store("strange", ["news", "code"], 9);
    for other in ["other", "strange"] {
        let fault = open(&[scratch.path(other)]).map(|_| ()).unwrap_err();
        assert_eq!(fault.class(), Class::Mismatch, "{other}: {fault}");
        let digests = [scratch.store_digest(other), scratch.store_digest("moved")];
        let told = fault.to_string();
        assert!(told.contains("its digest is not the run's"), "{told}");
        assert!(digests.iter().all(|digest| told.contains(digest)), "{told}");
    }
    std::fs::rename(scratch.path("strange"), scratch.path("store")).unwrap();
    assert_eq!(open(&[]).map(|_| ()).unwrap_err().class(), Class::Mismatch, "at the old place");
}

#[test]
fn what_a_step_does_not_have_is_refused_before_anything_is_computed() {
    let scratch = Scratch::new();
    scratch.train("run");
    // Without checkpoints the state has to be computed, on a faulty machine.
    std::fs::remove_dir_all(scratch.path("run/checkpoints")).unwrap();
    let open = || open(&scratch, "run").computed_by(Failing::new(0, true));
    let change = dropping(&["web-1", "nobody"]);
    let fault = imagine(&mut open(), 9..10, &change).unwrap_err();
    assert_eq!(fault.class(), Class::Usage, "{fault}");
    assert!(fault.to_string().contains("\"nobody\""), "{fault}");
    assert_eq!(open().check_micro_batch(9, 5).unwrap_err().class(), Class::Usage);
    open().check_micro_batch(9, 4).unwrap();
}

#[test]
fn documents_account_for_every_label_and_all_of_the_loss() {
    let scratch = Scratch::new();
    scratch.train("run");
    for step in [3, 8] {
        let ExplainedReplay { replayed, documents, .. } = replay(&scratch, "run", step);
        let record = replayed.record.unwrap();
        assert_eq!(
            documents.iter().map(|document| document.labels).sum::<u64>(),
            record.label_count
        );
        let loss: f64 = documents.iter().map(|document| document.loss).sum();
        assert!((loss / record.label_count as f64 - record.loss).abs() < 1e-5, "{loss}");
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
    let nothing = imagine(&mut open(&scratch, "run"), 4..7, &WhatIfChange::default()).unwrap();
    assert!(nothing.steps.iter().all(same), "without a change it is a replay");
    let documents = replay(&scratch, "run", 4).documents;
    let (worst, rest) = documents.split_first().unwrap();
    let change = dropping(&[&worst.id]);
    let imagined = imagine(&mut open(&scratch, "run"), 4..5, &change).unwrap().steps;
    let labels: u64 = rest.iter().map(|document| document.labels).sum();
    let loss: f64 = rest.iter().map(|document| document.loss).sum();
    assert_eq!(imagined[0].dropped_labels, worst.labels);
    assert!((imagined[0].would_be.0 - loss / labels as f64).abs() < 1e-5, "{imagined:?}");
    let change = dropping(&["nobody"]);
    let fault = imagine(&mut open(&scratch, "run"), 4..5, &change).unwrap_err();
    assert!(fault.to_string().contains("nobody"), "{fault}");
    let change = WhatIfChange { lr: Some(0.0), ..WhatIfChange::default() };
    let imagined = imagine(&mut open(&scratch, "run"), 4..6, &change).unwrap().steps;
    assert!(same(&imagined[0]) && !same(&imagined[1]), "a rate reaches the next step only");
}

/// Each document is left out as by an amendment, and the next step uses the run's own batch.
#[test]
fn documents_are_left_out_of_a_window_exactly() {
    let scratch = Scratch::new();
    scratch.train("run");
    let effort = AttributionOptions { documents: 5, subsets: 4 };
    let found = attribute(&mut open(&scratch, "run"), 6..8, effort).unwrap();
    let line = scratch.ledger("run").lines().nth(8).unwrap().to_owned();
    let eighth: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert!(
        (found.loss - eighth["loss"].as_f64().unwrap()).abs() < 1e-12,
        "with all it is the run"
    );
    assert_eq!((found.documents.len(), found.subsets.len()), (5, 4));
    assert!(found.documents.is_sorted_by(|a, b| a.actual <= b.actual));
    assert!(found.lds.is_some_and(|lds| (-1.0..=1.0).contains(&lds)), "{:?}", found.lds);
    let mut seen = 0;
    for one in &found.documents {
        let imagined = imagine(&mut open(&scratch, "run"), 6..9, &dropping(&[&one.id])).unwrap();
        assert_eq!(imagined.steps[0].dropped_labels, one.labels);
        // If the target has none of the document's text, its loss is that of the step after the window.
        if imagined.steps[2].dropped_labels == 0 {
            let would = imagined.steps[2].would_be.0 - found.loss;
            assert!((would - one.actual).abs() < 1e-12, "{one:?}: {would}");
            seen += 1;
        }
        assert!(one.actual != 0.0 && one.predicted != 0.0 && one.predicted.is_finite(), "{one:?}");
    }
    assert!(seen > 0, "the test looks at nothing");
    for subset in &found.subsets {
        assert_eq!(subset.dropped.len(), 2);
        let ids: Vec<&str> = subset.dropped.iter().map(String::as_str).collect();
        let imagined = imagine(&mut open(&scratch, "run"), 6..9, &dropping(&ids)).unwrap();
        if imagined.steps[2].dropped_labels == 0 {
            assert!((imagined.steps[2].would_be.0 - found.loss - subset.actual).abs() < 1e-12);
        }
    }
    let fault = attribute(&mut open(&scratch, "run"), 6..11, effort).unwrap_err();
    assert_eq!(fault.class(), Class::Usage, "no step follows this window");
}

/// The parts of a step's gradient from single documents add up to the whole, derived from the predictions. This holds
/// even if the documents of a row attend to each other.
#[test]
fn gradients_of_single_documents_add_up_to_that_of_the_step() {
    let scratch = Scratch::new();
    scratch.train("run");
    let seen = ("preset = \"zaya1-nano\"", "preset = \"zaya1-nano\"\ndocument_mask = false");
    scratch.run(&scratch.edited("seen.toml", &[seen]), "seen", |_| ()).unwrap();
    let weighed = ("\n[optimizer]\n", "\n[source.web]\nloss_weight = 3\n\n[optimizer]\n");
    scratch.run(&scratch.edited("weighed.toml", &[weighed]), "weighed", |_| ()).unwrap();
    for run in ["run", "seen", "weighed"] {
        let all = AttributionOptions { documents: usize::MAX, subsets: 0 };
        let found = attribute(&mut open(&scratch, run), 6..7, all).unwrap();
        assert_eq!(found.lds, None);
        let record = replay(&scratch, run, 6).replayed.record.unwrap();
        let (labels, lr) = (record.label_count as f64, record.lr());
        assert_eq!(found.documents.iter().map(|one| one.labels).sum::<u64>(), record.label_count);
        // predicted = -lr ((whole - own) / (labels - n) - whole / labels), solved for own.
        let whole = -found.predicted_step / lr * labels;
        let own = found.documents.iter().map(|one| {
            whole - (labels - one.labels as f64) * (whole / labels - one.predicted / lr)
        });
        let (sum, size) = own.fold((0.0, 0.0), |(sum, size), own| (sum + own, size + own.abs()));
        assert!((sum - whole).abs() < 1e-4 * size, "{run}: {sum} is not {whole}, of {size}");
        assert!(found.documents.len() > 3 && size > 0.0);
    }
}

/// If a step hardly changes the weights, the target's gradient is the same before and after. Then dot products of
/// gradients and predictions differ only by the number of labels.
#[test]
fn products_of_gradients_are_what_is_predicted_where_nothing_moves() {
    let scratch = Scratch::new();
    let still = [
        ("lr = 1e-2", "lr = 1e-9"),
        ("final_lr = 1e-3", "final_lr = 1e-9"),
        ("num_experts = 3", "num_experts = 3\nbalance_lr = 0.0"),
    ];
    let path = scratch.edited("run.toml", &still);
    scratch.run(&path, "run", stop_after(8)).unwrap();
    let effort = AttributionOptions { documents: 6, subsets: 3 };
    let found = attribute(&mut open(&scratch, "run"), 6..7, effort).unwrap();
    let record = replay(&scratch, "run", 6).replayed.record.unwrap();
    let (labels, lr) = (record.label_count as f64, record.lr());
    let whole = -found.predicted_step / lr * labels;
    for one in &found.documents {
        let own = one.dot / lr * labels;
        let wanted = -lr * ((whole - own) / (labels - one.labels as f64) - whole / labels);
        let size = lr * (whole.abs() + own.abs()) / labels;
        assert!((wanted - one.predicted).abs() < 1e-3 * size, "{one:?}: {wanted}");
        assert!(one.dot != 0.0);
    }
    for subset in &found.subsets {
        let of = |id: &String| found.documents.iter().find(|one| one.id == *id).unwrap().dot;
        let sum: f64 = subset.dropped.iter().map(of).sum();
        assert!((sum - subset.dot).abs() < 1e-9 * sum.abs().max(subset.dot.abs()), "they add up");
    }
    // Weights multiply the gradient of the step, and not the loss that is predicted.
    let weights =
        "\n[source.web]\nloss_weight = 2\n\n[source.math]\nloss_weight = 2\n\n[optimizer]\n";
    let weighed = [&still[..], &[("\n[optimizer]\n", weights)]].concat();
    scratch.run(&scratch.edited("weighed.toml", &weighed), "weighed", stop_after(8)).unwrap();
    let twice = attribute(&mut open(&scratch, "weighed"), 6..7, effort).unwrap();
    let ratio = twice.predicted_step / found.predicted_step;
    assert!((ratio - 2.0).abs() < 1e-3, "{ratio}");
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
    let ExplainedReplay { replayed, documents, .. } = replay(&scratch, "run", 2);
    assert_eq!(replayed.verdict, Verdict::NotRecorded);
    assert!(replayed.diverged.is_some() && !documents.is_empty());
    let fault = open(&scratch, "run").state_after(2).map(|_| ()).unwrap_err();
    assert_eq!(fault.class(), Class::Usage);
}

/// The run's own curriculum is data, whichever key is damaged; a number that the step has already is a flag.
#[test]
fn a_damaged_curriculum_of_a_run_is_data_and_a_change_of_nothing_is_a_flag() {
    let scratch = Scratch::new();
    scratch.train("run");
    let spec = RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap();
    let lr = Some(rate_at(&spec, 5));
    for (change, flag) in [
        (WhatIfChange { lr, ..WhatIfChange::default() }, "--lr"),
        (WhatIfChange { clip: Some(0.5), ..WhatIfChange::default() }, "--clip"),
    ] {
        let fault = imagine(&mut open(&scratch, "run"), 5..6, &change).map(drop).unwrap_err();
        assert_eq!((fault.class(), fault.place()), (Class::Usage, Some(flag)), "{fault}");
    }
    let path = scratch.path("run/run.toml");
    let good = std::fs::read_to_string(&path).unwrap();
    for (key, wrong) in
        [("dtype", "dtyqe"), ("head_dim", "head_dym"), ("head_dim = 8", "head_dim = \"x\"")]
    {
        std::fs::write(&path, good.replacen(key, wrong, 1)).unwrap();
        let opened = Replayer::open(&scratch.path("run"), &table(), Device::Cpu, Workers::new(2));
        let fault = opened.map(drop).unwrap_err();
        assert_eq!(fault.class(), Class::Data, "{fault}");
        assert!(fault.to_string().contains("restore the file"), "{fault}");
    }
}

#[test]
fn comparing_names_the_first_step_and_quantity() {
    let scratch = Scratch::new();
    scratch.train("run");
    scratch.run(&scratch.path("run.toml"), "part", stop_after(4)).unwrap();
    let answer = compare(&scratch.path("run"), &scratch.path("part")).unwrap();
    assert_eq!((answer.steps, &answer.difference), ([10, 4], &None));
    let told = answer.to_json()["notes"].to_string();
    assert!(told.contains("10 and 4 steps; the first 4"), "{told}");
    // A ledger without steps has nothing to compare.
    let bare = scratch.path("bare");
    std::fs::create_dir(&bare).unwrap();
    let head = scratch.ledger("run").lines().next().unwrap().to_owned() + "\n";
    std::fs::write(bare.join("ledger.jsonl"), head).unwrap();
    let fault = compare(&scratch.path("run"), &bare).unwrap_err();
    assert!(fault.class() == Class::Usage && fault.to_string().contains("bare"), "{fault}");
    let edited = scratch.edited("edited.toml", &[("web = 1, math = 3", "web = 1")]);
    scratch.run(&edited, "edited", |_| ()).unwrap();
    let answer = compare(&scratch.path("run"), &scratch.path("edited")).unwrap();
    let (step, difference) = answer.difference.clone().unwrap();
    assert_eq!((step, difference.quantity.as_str()), (7, "data digest"));
    let [note] = &answer.notes[..] else { panic!("{:?}", answer.notes) };
    for word in ["different curricula", ".mix.", " is ", " and "] {
        assert!(note.contains(word), "{note}");
    }
    assert!(answer.to_string().contains("step 7 is the first to differ"), "{answer}");
}
