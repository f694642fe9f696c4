//! Fear: that a step is explained by something other than its real cause. Problems are planted, and a command has to
//! name them from the step number alone.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use contract::{Key, Purpose, draw, shell};
use tch::Device;
use tools::explain::{ExplainRequest, Explanation, RunChangeKind, Subject, explain};
use tools::export::export;
use tools::replay::flags::moved as moved_to;
use trainer::World;
use trainer::hf::import::import;
use trainer::ledger::Ledger;
use trainer::mesh::GradReduce;
use trainer::replay::{ReplayParallelism, Replayer, Verdict};
use trainer::step::Detail;
use trainer::workers::Workers;

use crate::ranks::train_with;
use crate::support::{CURRICULUM, Scratch, VOCAB, stop_after, table};

/// A curriculum of one phase, edited by `changes`, in which the model learns its easy text.
fn curriculum(scratch: &Scratch, changes: &[(&str, &str)]) -> PathBuf {
    let (head, _) = CURRICULUM.split_once("[[phase]]").unwrap();
    let mut text = format!(
        "{head}[source.web]\nmax_epochs = 9\n\n[source.math]\nmax_epochs = 9\n\n\
         [[phase]]\nname = \"all\"\nsteps = 24\nseq_len = 64\nbatch = 8\nmicro_batch = 2\nmix = {{ web = 1, math = 1 }}\n"
    );
    for (from, to) in changes {
        assert!(text.contains(from), "no {from:?}");
        text = text.replace(from, to);
    }
    scratch.write("run.toml", &text)
}

fn open(scratch: &Scratch, run: &str) -> Replayer {
    Replayer::open(&scratch.path(run), &table(), Device::Cpu, Workers::new(2)).unwrap()
}

fn explained(scratch: &Scratch, run: &str, step: u64, top: usize) -> Explanation {
    let request = ExplainRequest { step, window: 8, top, tokens: 2 };
    explain(&mut open(scratch, run), request).unwrap()
}

fn subjects(found: &Explanation) -> Vec<Subject> {
    found.findings.iter().map(|finding| finding.subject).collect()
}

/// The documents with the most labels in a step, and the total tokens of each.
fn longest(scratch: &Scratch, run: &str, step: u64, count: usize) -> Vec<(String, u64)> {
    let mut replayer = open(scratch, run);
    let mut state = replayer.state_after(step - 1).unwrap();
    let mut documents =
        tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap().documents;
    documents.sort_by_key(|document| std::cmp::Reverse(document.labels));
    documents.truncate(count);
    documents.into_iter().map(|document| (document.id, document.tokens)).collect()
}

/// A document's planted text: as many tokens, sampled by its id.
fn random(id: &str) -> Vec<u32> {
    let key = Key::from_seed(77).child(id);
    (0..60).map(|place| draw(key, Purpose::Generate, place) as u32 % VOCAB).collect()
}

fn repeated(id: &str) -> Vec<u32> {
    vec![random(id)[0]; 60]
}

/// The generator's text in another order.
fn shuffled(id: &str) -> Vec<u32> {
    let order = random(id);
    let mut words: Vec<(u32, u32)> =
        (0..60).map(|place| (order[place as usize], (order[0] + 7 * place) % VOCAB)).collect();
    words.sort_unstable();
    words.into_iter().map(|(_, word)| word).collect()
}

#[test]
fn three_poisoned_documents_are_named_first() {
    const STEP: u64 = 20;
    let scratch = Scratch::new();
    let path = curriculum(&scratch, &[]);
    scratch.run(&path, "clean", |_| ()).unwrap();
    let named: Vec<String> =
        longest(&scratch, "clean", STEP, 3).into_iter().map(|(id, _)| id).collect();
    let texts = [random(&named[0]), repeated(&named[1]), shuffled(&named[2])];
    let planted: BTreeMap<String, Vec<u32>> = named.iter().cloned().zip(texts).collect();
    scratch.write_planted("store", &planted);
    scratch.run(&path, "run", |_| ()).unwrap();
    let before = scratch.tree("run");
    let found = explained(&scratch, "run", STEP, 5);
    assert!(before == scratch.tree("run"), "an explanation changed the run's folder");
    let mut first: Vec<String> =
        found.documents[..3].iter().map(|one| one.document.id.clone()).collect();
    first.sort();
    let mut wanted = named.clone();
    wanted.sort();
    assert_eq!(first, wanted, "{found}");
    assert_eq!(subjects(&found)[0], Subject::Documents, "{}", found.sentence);
    assert!(named.iter().all(|id| found.sentence.contains(id)), "{}", found.sentence);
    assert!(found.sentence.starts_with("3 documents of sources"), "{}", found.sentence);
    // A repetition is easy to predict: it is last of the three by loss, and first by gradient.
    let (first, others) = found.documents[..3].split_first().unwrap();
    assert_eq!(first.document.id, named[1], "{found}");
    assert!(others.iter().all(|one| one.document.mean > first.document.mean), "{found}");
    assert_eq!(found.verdict, Verdict::SameBits);
    // The documents' gradients add up to the step's, and removing the worst helps as it should.
    assert!(found.unexplained.gradient.abs() < 1e-4, "{:?}", found.unexplained);
    let all = found.removals.last().unwrap();
    assert_eq!((found.removals.len(), all.documents.len()), (6, 5));
    assert!(all.loss < found.loss && all.norm.unwrap() < found.norm, "{found}");
    assert!(
        found.tokens.iter().all(|tokens| tokens.len() == 2 && tokens[0].loss >= tokens[1].loss)
    );
    for (one, removal) in found.documents.iter().zip(&found.removals[..5]) {
        assert_eq!(
            (&removal.documents[0], removal.labels),
            (&one.document.id, one.document.labels)
        );
    }
    // The suggested commands name the run, the documents, and the store's new location.
    let [replay, fork] = &found.next[..] else { panic!("{:?}", found.next) };
    let root = scratch.path("run");
    for next in [replay, fork] {
        assert!(next.contains(&shell::path(&root)) && !next.contains("--store"), "{next}");
        assert!(named.iter().all(|id| next.contains(id)), "{next}");
    }
    let gone = scratch.path("moved store");
    std::fs::rename(scratch.path("store"), &gone).unwrap();
    let world = Arc::new(World::alone(Device::Cpu, table()));
    let stores = [store::Location::from(gone)];
    let (workers, ranks) = (Workers::new(2), ReplayParallelism::default());
    let mut moved = Replayer::open_with(&root, &stores, &world, workers, ranks).unwrap();
    let request = ExplainRequest { step: STEP, window: 8, top: 5, tokens: 2 };
    let (next, flag) = (explain(&mut moved, request).unwrap().next, moved_to(&stores));
    assert!(flag.ends_with("moved store'"), "{flag}");
    assert!(next.len() == 2 && next.iter().all(|next| next.contains(&flag)), "{next:?}");
    // JSON highlights exactly the same documents.
    let json = serde_json::to_value(&found).unwrap();
    assert_eq!(json["documents"][0]["id"], found.documents[0].document.id.as_str());
}

/// If a rate set by an amendment makes a later step diverge, the rate and its step are named. No document is: the step
/// would diverge without any one of them.
#[test]
fn a_step_that_diverges_is_explained_by_what_was_changed() {
    let scratch = Scratch::new();
    let path = curriculum(&scratch, &[("\"muon\"", "\"adamw\"")]);
    let text = std::fs::read_to_string(&path).unwrap();
    scratch.write("run.toml", &(text + "\n[[amendment]]\nstep = 9\noptimizer = { lr = 1e30 }\n"));
    scratch.run(&path, "run", |_| ()).unwrap_err();
    let found = explained(&scratch, "run", 10, 5);
    assert!(found.diverged.is_some() && found.verdict == Verdict::NotRecorded, "{found}");
    let kinds: Vec<RunChangeKind> = found.changes.iter().map(|change| change.kind).collect();
    assert_eq!(kinds, [RunChangeKind::LearningRate, RunChangeKind::Amendment], "{found}");
    assert_eq!(subjects(&found)[0], Subject::LearningRate, "{found}");
    assert!(subjects(&found).contains(&Subject::Update), "the step before went far: {found}");
    assert!(!subjects(&found).contains(&Subject::Documents) && found.next.is_empty(), "{found}");
    let (_, quiet) = found.sentence.rsplit_once("; ").unwrap();
    assert!(quiet.contains("mixture") && !quiet.contains("learning rate"), "{}", found.sentence);
    assert!(!quiet.contains("routers"), "nobody looked at them: {}", found.sentence);
}

/// One process explains a run of several ranks, with the same words and numbers as a run of one rank.
#[test]
fn a_run_of_several_ranks_is_explained_as_one_of_one_is() {
    let scratch = Scratch::new();
    let path = curriculum(&scratch, &[]);
    scratch.run(&path, "one", stop_after(12)).unwrap();
    train_with(&scratch, "two", 2, |_, exec| exec.stop_after = Some(12))
        .into_iter()
        .for_each(|outcome| assert_eq!(outcome.unwrap().step, 12));
    let [mut one, mut two] = ["one", "two"].map(|run| explained(&scratch, run, 11, 3));
    assert_eq!((one.verdict, one.documents.len() > 3), (Verdict::SameBits, true));
    for found in [&mut one, &mut two] {
        // Not part of the steps: the run's location and its speed.
        (found.next, found.speed) = (Vec::new(), None);
    }
    let [one, two] = [one, two].map(|found| serde_json::to_value(found).unwrap());
    assert!(one == two, "{one:#}\n{two:#}");
}

#[test]
fn a_change_of_the_ranks_is_named() {
    let scratch = Scratch::new();
    let path = curriculum(&scratch, &[]);
    scratch.run(&path, "run", stop_after(5)).unwrap();
    for (last, grad_reduce) in [(8, GradReduce::Whole), (10, GradReduce::Bucketed)] {
        let outcomes = train_with(&scratch, "run", 2, |_, exec| {
            (exec.stop_after, exec.grad_reduce) = (Some(last), grad_reduce);
        });
        outcomes.into_iter().for_each(|outcome| assert_eq!(outcome.unwrap().step, last));
    }
    let changes = explained(&scratch, "run", 10, 0).changes;
    let ranks = changes.into_iter().filter(|one| one.kind == RunChangeKind::Ranks);
    assert_eq!(
        ranks.map(|one| one.what).collect::<Vec<_>>(),
        [
            "from step 6 on 2 ranks (whole by gloo) computed, before 1 (none)",
            "from step 9 on 2 ranks (bucketed by gloo) computed, before 2 (whole by gloo)",
        ]
    );
}

/// With the state available, an explanation passes the text through the model only this often: the step; each of its
/// documents separately, padded if its parts differ in length; one forward pass for the layers and one for the next
/// step; two steps per removal.
#[test]
fn an_explanation_computes_three_steps_and_two_for_each_removal() {
    let scratch = Scratch::new();
    let path = curriculum(&scratch, &[]);
    scratch.run(&path, "run", stop_after(12)).unwrap();
    let step = 8 * 64;
    for top in [0, 2] {
        let mut replayer = open(&scratch, "run");
        let request = ExplainRequest { step: 10, window: 8, top, tokens: 2 };
        let found = explain(&mut replayer, request).unwrap();
        let times = replayer.times();
        let removals = found.removals.len() as u64;
        assert_eq!(removals, if top == 2 { 3 } else { 0 });
        let documents = times.backward_tokens - step * (1 + removals);
        let labels: u64 = found.documents.iter().map(|one| one.document.labels).sum();
        assert!((labels..=step * 3 / 2).contains(&documents), "{documents} of {step}");
        assert_eq!(times.forward_tokens, times.backward_tokens + step * (2 + removals));
        for part in ["load", "window", "step", "documents", "layers"] {
            assert!(times.of(part).wall > 0.0, "{part}: {times:?}");
        }
    }
}

/// A rate that rises twenty-fold between two steps is named at the step that suffers.
#[test]
fn a_learning_rate_jump_is_named() {
    let scratch = Scratch::new();
    let path = curriculum(&scratch, &[]);
    scratch.run(&path, "run", stop_after(12)).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let jump = "\n[[amendment]]\nstep = 13\noptimizer = { lr = 2e-1 }\nschedule = { warmup_steps = 0, decay_steps = 0 }\n";
    let path = scratch.write("jump.toml", &(text + jump));
    scratch.run(&path, "run", stop_after(16)).unwrap();
    let rate = |step: u64| open(&scratch, "run").spec().settings_at(step).schedule.rate(step);
    assert!(rate(13) == 2e-1 && rate(12) < 1e-2, "{} {}", rate(12), rate(13));
    let found = explained(&scratch, "run", 14, 1);
    assert_eq!(found.findings[0].subject, Subject::LearningRate, "{}", found.sentence);
    let words = format!("{:.3e} to 2.000e-1 at step 13", rate(12));
    assert!(found.sentence.contains(&words), "{words}: {}", found.sentence);
    assert!(
        found
            .changes
            .iter()
            .any(|change| change.kind == RunChangeKind::Amendment && change.step == 13),
        "{found}"
    );
    // The step before only follows the warm-up.
    let quiet = explained(&scratch, "run", 11, 0);
    assert!(!subjects(&quiet).contains(&Subject::LearningRate), "{}", quiet.sentence);
}

/// Two phases that differ in one thing: `second` is added to the later one, which begins at step 13.
fn two_phases(scratch: &Scratch, mix: &str, second: &str) -> PathBuf {
    let phases = format!(
        "steps = 12\nseq_len = 64\nbatch = 8\nmicro_batch = 2\nmix = {{ web = 1, math = 1 }}\n\n\
         [[phase]]\nname = \"then\"\nsteps = 12\nseq_len = 64\nbatch = 8\nmicro_batch = 2\nmix = {mix}\n{second}"
    );
    let one = "steps = 24\nseq_len = 64\nbatch = 8\nmicro_batch = 2\nmix = { web = 1, math = 1 }\n";
    curriculum(scratch, &[(one, &phases)])
}

#[test]
fn a_mixture_error_is_named() {
    let scratch = Scratch::new();
    let path = two_phases(&scratch, "{ web = 30, math = 1 }", "");
    scratch.run(&path, "run", stop_after(15)).unwrap();
    let found = explained(&scratch, "run", 14, 1);
    assert_eq!(found.findings[0].subject, Subject::Mixture, "{}", found.sentence);
    for words in ["changed at step 13", "web 50 % to 97 %", "math 50 % to 3 %"] {
        assert!(found.sentence.contains(words), "{}", found.sentence);
    }
}

#[test]
fn a_router_collapse_is_named() {
    let scratch = Scratch::new();
    let text = two_phases(&scratch, "{ web = 1, math = 1 }", "model = { balance_lr = 50.0 }\n");
    let text = std::fs::read_to_string(text).unwrap();
    // Weights of this size separate the tokens from the start, so that every expert gets some.
    let apart = "num_experts = 3\nbalance_lr = 0.0\ninitializer_range = 0.5";
    let path = scratch.write("run.toml", &text.replace("num_experts = 3", apart));
    scratch.run(&path, "run", stop_after(16)).unwrap();
    let found = explained(&scratch, "run", 15, 1);
    assert!(subjects(&found).contains(&Subject::Router), "{found}");
    assert!(found.sentence.contains("the router of layer "), "{}", found.sentence);
    let before = explained(&scratch, "run", 12, 0);
    assert!(!subjects(&before).contains(&Subject::Router), "{before}");
}

#[test]
fn an_exploding_temperature_is_named() {
    let scratch = Scratch::new();
    let path = curriculum(&scratch, &[]);
    scratch.run(&path, "run", stop_after(4)).unwrap();
    let mut replayer = open(&scratch, "run");
    let state = replayer.state_at(4).unwrap();
    let parameters = &replayer.spec().parameters;
    let hot = parameters.iter().rposition(|one| one.name.ends_with("qk_norm.temp")).unwrap();
    let _ = tch::no_grad(|| state.weights[hot].shallow_clone().fill_(80.0));
    export(replayer.spec(), &state, &scratch.path("hf")).unwrap();
    import(&scratch.path("hf"), &scratch.path("start")).unwrap();
    let path = curriculum(&scratch, &[("seed = 11", "init_from = \"start\"\nseed = 11")]);
    scratch.run(&path, "hot", stop_after(5)).unwrap();
    let found = explained(&scratch, "hot", 4, 1);
    assert!(subjects(&found).contains(&Subject::Temperature), "{found}");
    assert!(found.sentence.contains("temperature of attention in layer 1"), "{}", found.sentence);
    // In every layer, the largest logit is below the largest possible one; in the hot layer it is large.
    for (there, could) in found.activities.iter().zip(&found.temperatures) {
        assert!(there.largest_logit.unwrap() <= could.largest_logit * 1.001, "{found}");
        assert!(
            there.residual > 0.0 && there.attention > 0.0 && there.feed_forward > 0.0,
            "{found}"
        );
    }
    assert!(found.activities[1].largest_logit.unwrap() > 50.0, "{found}");
    assert!(!subjects(&explained(&scratch, "run", 4, 0)).contains(&Subject::Temperature));
}

/// A run whose memory flips one bit of a weight between two steps, and that continues with it.
#[test]
fn a_flipped_bit_in_a_weight_is_named() {
    let scratch = Scratch::new();
    let path = curriculum(&scratch, &[]);
    scratch.run(&path, "run", stop_after(6)).unwrap();
    let mut replayer = open(&scratch, "run");
    let mut state = replayer.state_after(6).unwrap();
    let mut values = Vec::<f32>::try_from(state.weights[0].reshape([-1])).unwrap();
    values[100] = f32::from_bits(values[100].to_bits() ^ (1 << 29));
    let shape = state.weights[0].size();
    state.weights[0] = tch::Tensor::from_slice(&values).reshape(shape);
    let record =
        tools::replay::step(&replayer, &mut state, Detail::Sums).unwrap().replayed.record.unwrap();
    Ledger::open(&scratch.path("run/ledger.jsonl"))
        .unwrap()
        .unwrap()
        .append(&record, None)
        .unwrap();
    let found = explained(&scratch, "run", 7, 1);
    assert_eq!((found.verdict, found.findings[0].subject), (Verdict::RunHit, Subject::Bits));
    let narrowed = found.bits.as_ref().unwrap();
    assert_eq!(narrowed.losses, [0, 1, 2, 3]);
    assert!(
        found.sentence.contains("a weight or a balancing bias changed in memory"),
        "{}",
        found.sentence
    );
}
