//! Fear: that a verdict is headed by something unrelated to the step. Many kinds of problems are planted in runs with a
//! history and with text that cannot be learned completely. Ordinary steps of runs in which something changed long
//! before must have no head.
//!
//! Four cases run here; `tests/full.sh verdicts` runs all and prints a table.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use contract::{Key, Purpose, draw};
use serde_json::Value;
use tch::Device;
use tools::explain::{ExplainRequest, Explanation, Subject, explain};
use trainer::checkpoint::Retention;
use trainer::ledger::Ledger;
use trainer::replay::Replayer;
use trainer::step::Detail;
use trainer::workers::Workers;

use crate::support::{CURRICULUM, Scratch, Text, VOCAB, is_full, table};

/// The expected head of a verdict.
enum Wanted {
    /// These documents, with no other finding before them.
    Documents(Vec<String>),
    Subject(Subject),
    /// No head at all.
    Nothing,
}

/// A step with a known verdict.
struct Case {
    kind: &'static str,
    run: String,
    step: u64,
    wanted: Wanted,
}

/// Runs in a scratch folder.
struct Study {
    scratch: Scratch,
    cases: Vec<Case>,
}

/// A phase with this many steps.
fn phase(name: &str, steps: u64, mix: &str, more: &str) -> String {
    let batch = if more.contains("batch") { "" } else { "batch = 8\nmicro_batch = 2\n" };
    format!(
        "[[phase]]\nname = \"{name}\"\nsteps = {steps}\nseq_len = 64\n{batch}mix = {{ {mix} }}\n{more}\n"
    )
}

const EVEN: &str = "web = 1, math = 1";

/// As many tokens as a document has at most, sampled by its id.
fn drawn(id: &str) -> Vec<u32> {
    let key = Key::from_seed(77).child(id);
    (0..60).map(|place| draw(key, Purpose::Generate, place) as u32 % VOCAB).collect()
}

/// The tokens of a planted document, by kind.
fn planted(what: &str, id: &str) -> Vec<u32> {
    let drawn = drawn(id);
    let by = |of: fn(u32) -> u32| (0..60).map(|place| (drawn[0] + of(place)) % VOCAB).collect();
    match what {
        "any tokens" => drawn,
        "one token" => by(|_| 0),
        "two tokens in turns" => by(|place| 23 * (place % 2)),
        "backwards" => by(|place| 43 * place),
        other => panic!("no {other}"),
    }
}

const PLANTED: [&str; 4] = ["any tokens", "one token", "two tokens in turns", "backwards"];

impl Study {
    fn new() -> Study {
        Study { scratch: Scratch::new(), cases: Vec::new() }
    }

    fn curriculum(&self, name: &str, seed: u64, changes: &[(&str, &str)], tail: &str) -> PathBuf {
        let (head, _) = CURRICULUM.split_once("[[phase]]").unwrap();
        let mut text = format!("{head}{tail}");
        self.write_store(name, BTreeMap::new());
        let (seed, store) = (format!("seed = {seed}"), format!("\"{name}-store\""));
        for (from, to) in changes.iter().chain([
            &("decay_steps = 30", "decay_steps = 300"),
            &("seed = 11", seed.as_str()),
            &("\"store\"", store.as_str()),
        ]) {
            assert!(text.contains(from), "no {from:?}");
            text = text.replace(from, to);
        }
        self.scratch.write(&format!("{name}.toml"), &text)
    }

    fn write_store(&self, run: &str, planted: BTreeMap<String, Vec<u32>>) {
        let text = Text { documents: 2_000, noise: [15, 50], planted };
        self.scratch.write_text(&format!("{run}-store"), &text);
    }

    /// Trains to the run's end, or until it diverges.
    fn train(&self, path: &Path, run: &str, until: u64) {
        let outcome = self.scratch.run(path, run, |exec| {
            (exec.checkpoint_every, exec.stop_after) = (1, Some(until));
            exec.retention = Retention { newest: 1_000, every: 0, aged: false, pinned: 8 };
        });
        let diverged =
            outcome.as_ref().is_err_and(|fault| fault.class() == contract::Class::Diverged);
        assert!(outcome.is_ok() || diverged, "{outcome:?}");
    }

    fn open(&self, run: &str) -> Replayer {
        Replayer::open(&self.scratch.path(run), &table(), Device::Cpu, Workers::new(2)).unwrap()
    }

    fn explained(&self, run: &str, step: u64) -> Explanation {
        explain(&mut self.open(run), ExplainRequest { step, window: 64, top: 8, tokens: 1 })
            .unwrap()
    }

    /// The documents with the most labels in a step.
    fn longest(&self, run: &str, step: u64, count: usize) -> Vec<String> {
        let mut replayer = self.open(run);
        let mut state = replayer.state_after(step - 1).unwrap();
        let mut documents =
            tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap().documents;
        documents.sort_by_key(|document| std::cmp::Reverse(document.labels));
        documents.into_iter().take(count).map(|document| document.id).collect()
    }

    fn case(&mut self, kind: &'static str, run: &str, step: u64, wanted: Wanted) {
        self.cases.push(Case { kind, run: run.to_owned(), step, wanted });
    }

    /// Runs this curriculum, and again with documents planted at some steps: their kind, and how many.
    fn plant(&mut self, kind: &'static str, run: &str, path: &Path, steps: &[(u64, &str, usize)]) {
        let last = steps.iter().map(|(step, _, _)| *step).max().unwrap();
        let clean = format!("{run}-clean");
        self.train(path, &clean, last);
        let mut all = BTreeMap::new();
        for (step, what, count) in steps {
            let ids = self.longest(&clean, *step, *count);
            all.extend(ids.iter().map(|id| (id.clone(), planted(what, id))));
            self.case(kind, run, *step, Wanted::Documents(ids));
        }
        self.write_store(run, all);
        self.train(path, run, last);
    }

    /// The result by kind of case: how many there are, how many are right, and which are not.
    fn told(&self) -> BTreeMap<&'static str, (usize, Vec<String>)> {
        let mut kinds: BTreeMap<&'static str, (usize, Vec<String>)> = BTreeMap::new();
        for Case { kind, run, step, wanted } in &self.cases {
            let found = self.explained(run, *step);
            let head = found.findings.iter().find(|finding| !finding.context);
            let holds = match wanted {
                Wanted::Nothing => head.is_none(),
                Wanted::Subject(subject) => head.is_some_and(|head| head.subject == *subject),
                Wanted::Documents(ids) => head.is_some_and(|head| {
                    head.subject == Subject::Documents
                        && ids.iter().all(|id| head.words.contains(id))
                }),
            };
            let (count, failed) = kinds.entry(*kind).or_default();
            *count += 1;
            if !holds {
                let of = |one: Option<f64>| one.map_or("-".to_owned(), |one| format!("{one:+.1}"));
                let (loss, norm) = (found.moved.loss, found.moved.norm);
                let scores = [loss, norm].map(|one| of(one.map(|one| one.score)));
                let sources: Vec<String> =
                    found.moved.sources.values().map(|one| of(Some(one.score))).collect();
                let top: Vec<String> = found
                    .documents
                    .iter()
                    .take(4)
                    .map(|one| format!("{} {:.2}", one.document.id, one.score))
                    .collect();
                let wanted = match wanted {
                    Wanted::Documents(ids) => ids.join(", "),
                    Wanted::Subject(subject) => format!("{subject:?}"),
                    Wanted::Nothing => "nothing".to_owned(),
                };
                failed.push(format!(
                    "{run} {step}, wanted {wanted}: {} [loss, norm {scores:?}, sources {sources:?}, update {:?}, {top:?}]",
                    found.sentence, found.moved.update
                ));
            }
        }
        kinds
    }
}

/// After a rate that was amended some 15 steps before: three kinds of planted documents, and an ordinary step.
#[test]
fn an_old_change_heads_no_verdict() {
    let mut study = Study::new();
    let amended = format!(
        "{}[[amendment]]\nstep = 25\noptimizer = {{ lr = 2e-2 }}\n",
        phase("all", 60, EVEN, "")
    );
    let path = study.curriculum("run", 11, &[], &amended);
    let steps = [(40, "one token", 1), (43, "any tokens", 2), (46, "two tokens in turns", 1)];
    study.plant("documents after an old rate", "run", &path, &steps);
    study.case("ordinary", "run", 38, Wanted::Nothing);
    let told = study.told();
    assert!(told.values().all(|(_, failed)| failed.is_empty()), "{told:#?}");
    let quiet = study.explained("run", 38).sentence;
    assert!(quiet.starts_with("nothing stands out: loss"), "{quiet}");
    assert!(quiet.contains("; context: the learning rate went from"), "{quiet}");
}

#[test]
fn planted_trouble_of_every_kind_heads_its_verdict() {
    if !is_full() {
        return;
    }
    let mut study = Study::new();
    documents(&mut study);
    changes(&mut study);
    machines(&mut study);
    let told = study.told();
    let (mut all, mut held) = (0, 0);
    println!("| planted | cases | named first |\n|---|---|---|");
    for (kind, (count, failed)) in &told {
        println!("| {kind} | {count} | {} |", count - failed.len());
        (all, held) = (all + count, held + count - failed.len());
    }
    println!("| all | {all} | {held} |");
    told.values().flat_map(|(_, failed)| failed).for_each(|failed| println!("failed: {failed}"));
    assert!(all >= 40 && held * 40 >= all * 36, "{held} of {all}");
}

#[test]
fn ordinary_steps_have_no_head() {
    if !is_full() {
        return;
    }
    let mut study = Study::new();
    let whole = phase("all", 120, EVEN, "");
    let rate = format!("{whole}[[amendment]]\nstep = 40\noptimizer = {{ lr = 2e-2 }}\n");
    let mixed = phase("one", 40, EVEN, "") + &phase("two", 80, "web = 1, math = 9", "");
    let runs = [
        ("plain", 11, &whole, 41..=100),
        ("seed", 12, &whole, 51..=90),
        ("rate", 13, &rate, 55..=104),
        ("mix", 14, &mixed, 55..=104),
    ];
    for (run, seed, tail, steps) in runs {
        let path = study.curriculum(run, seed, &[], tail);
        study.train(&path, run, *steps.end());
        steps.for_each(|step| study.case("ordinary", run, step, Wanted::Nothing));
    }
    let told = study.told();
    let (all, failed) = &told["ordinary"];
    println!("{} of {all} ordinary steps have a head", failed.len());
    failed.iter().for_each(|failed| println!("failed: {failed}"));
    assert!(*all == 200 && failed.len() <= 4, "{} of {all}", failed.len());
}

/// Documents in a plain run, after an old change of rate, and after an old change of mixture.
fn documents(study: &mut Study) {
    let whole = phase("all", 110, EVEN, "");
    for (kind, run, what, seed) in [
        ("a document of any tokens", "any", PLANTED[0], 21),
        ("a document of one token", "one", PLANTED[1], 22),
        ("a document of two tokens", "two", PLANTED[2], 23),
        ("a document backwards", "back", PLANTED[3], 24),
    ] {
        let path = study.curriculum(run, seed, &[], &whole);
        study.plant(kind, run, &path, &[50, 62, 75, 88].map(|step| (step, what, 1)));
    }
    let path = study.curriculum("three", 25, &[], &whole);
    let three =
        [(50, PLANTED[0], 3), (62, PLANTED[1], 3), (75, PLANTED[3], 3), (88, PLANTED[2], 3)];
    study.plant("three documents", "three", &path, &three);
    let rate = format!("{whole}[[amendment]]\nstep = 45\noptimizer = {{ lr = 2e-2 }}\n");
    let path = study.curriculum("rate", 26, &[], &rate);
    let steps = [(60, PLANTED[1], 1), (70, PLANTED[0], 1), (80, PLANTED[2], 1)];
    study.plant("a document 15 steps after a rate", "rate", &path, &steps);
    let mixed = phase("one", 40, EVEN, "") + &phase("two", 70, "web = 9, math = 1", "");
    let path = study.curriculum("mix", 27, &[], &mixed);
    let steps = [(77, PLANTED[1], 1), (85, PLANTED[0], 1), (93, PLANTED[2], 1)];
    study.plant("a document 37 steps after a mixture", "mix", &path, &steps);
}

/// Changes right before a step.
fn changes(study: &mut Study) {
    let amended = |step: u64, lr: &str| {
        format!(
            "{}[[amendment]]\nstep = {step}\noptimizer = {{ lr = {lr} }}\n",
            phase("all", 110, EVEN, "")
        )
    };
    let path = study.curriculum("jump", 31, &[], &amended(60, "2e-1"));
    study.train(&path, "jump", 66);
    for step in [60, 61, 62, 64] {
        study.case(
            "a rate twenty times as high",
            "jump",
            step,
            Wanted::Subject(Subject::LearningRate),
        );
    }
    let path = study.curriculum("wild", 32, &[], &amended(60, "1e38"));
    study.train(&path, "wild", 66);
    let first =
        study.curriculum("first", 33, &[("lr = 1e-2", "lr = 1e38")], &phase("all", 110, EVEN, ""));
    study.train(&first, "first", 9);
    for run in ["wild", "first"] {
        let diverges = study.open(run).recorded() + 1;
        study.case("a rate of 1e38", run, diverges, Wanted::Subject(Subject::LearningRate));
    }
    let hard = phase("one", 60, "web = 1", "") + &phase("two", 50, "web = 1, math = 9", "");
    let path = study.curriculum("hard", 34, &[], &hard);
    study.train(&path, "hard", 66);
    for step in [61, 62, 63] {
        study.case("a mixture that is harder", "hard", step, Wanted::Subject(Subject::Mixture));
    }
    let small = phase("one", 60, EVEN, "") + &phase("two", 50, EVEN, "batch = 1\nmicro_batch = 1");
    let path = study.curriculum("small", 35, &[], &small);
    study.train(&path, "small", 66);
    for step in [61, 62] {
        study.case("a batch an eighth as large", "small", step, Wanted::Subject(Subject::Changed));
    }
    let apart = ("num_experts = 3", "num_experts = 3\nbalance_lr = 0.0\ninitializer_range = 0.5");
    let pulled =
        phase("one", 60, EVEN, "") + &phase("two", 50, EVEN, "model = { balance_lr = 50.0 }");
    let path = study.curriculum("router", 36, &[apart], &pulled);
    study.train(&path, "router", 66);
    for step in [63, 64] {
        let kind = "a phase that pulls a router to one expert";
        study.case(kind, "router", step, Wanted::Subject(Subject::Changed));
    }
}

/// Faults of a machine: a bit, and slow steps.
fn machines(study: &mut Study) {
    let path = study.curriculum("slow", 41, &[], &phase("all", 110, EVEN, ""));
    study.train(&path, "slow", 66);
    let events = study.scratch.path("slow/events.jsonl");
    let mut lines = Vec::new();
    for line in std::fs::read_to_string(&events).unwrap().lines() {
        let mut event: Value = serde_json::from_str(line).unwrap();
        let step = event["step"].as_u64().unwrap_or(0);
        if event["event"] == "step" {
            // As on an otherwise idle machine, except for three steps.
            let seconds = if [50, 55, 60].contains(&step) { 1.0 } else { 0.1 };
            (event["seconds"], event["tokens_per_second"]) =
                (seconds.into(), (512.0 / seconds).into());
            event["stall"] = (seconds - 0.1).into();
        }
        lines.push(event.to_string() + "\n");
    }
    std::fs::write(&events, lines.concat()).unwrap();
    for step in [50, 55, 60] {
        study.case("a slow step", "slow", step, Wanted::Subject(Subject::Speed));
    }
    for (run, seed) in [("bit", 42), ("other bit", 43)] {
        let path = study.curriculum(run, seed, &[], &phase("all", 110, EVEN, ""));
        study.train(&path, run, 50);
        let mut replayer = study.open(run);
        let mut state = replayer.state_after(50).unwrap();
        let mut values = Vec::<f32>::try_from(state.weights[0].reshape([-1])).unwrap();
        values[100] = f32::from_bits(values[100].to_bits() ^ (1 << 29));
        let shape = state.weights[0].size();
        state.weights[0] = tch::Tensor::from_slice(&values).reshape(shape);
        let record = tools::replay::step(&replayer, &mut state, Detail::Sums)
            .unwrap()
            .replayed
            .record
            .unwrap();
        let ledger = study.scratch.path(run).join("ledger.jsonl");
        Ledger::open(&ledger).unwrap().unwrap().append(&record, None).unwrap();
        study.case("a bit of a weight", run, 51, Wanted::Subject(Subject::Bits));
    }
}
