//! Fear: that a task's score depends on the ranks, on its padding or on what is computed at the same time, or is not
//! that of the model.

use std::sync::Arc;

use contract::{Digest, Key, Purpose, draw};
use serde_json::Value;
use tch::{Device, Tensor};
use trainer::ExecOptions;
use trainer::evaluate::{Choice, Example, Task};
use trainer::mesh::Degrees;
use trainer::model::{MicroBatchInput, ZayaConfig, logits};
use trainer::replay::Replayer;
use trainer::validate::Validation;
use trainer::workers::Workers;

use crate::folded::{events, folded};
use crate::ranks::train_with;
use crate::same_bits::assert_same;
use crate::support::{Scratch, VOCAB, table};

/// Text as the store has it: each token is 7 more than the one before. A choice continues it or not.
fn choice(number: u64, right: bool, scored: usize) -> Choice {
    let length = 2 + draw(Key::from_seed(3).nth(number), Purpose::Generate, 0) as usize % 90;
    let token = |place: usize| {
        let wrong = u32::from(!right && place == length);
        (number as u32 + 7 * place as u32 + 20 * wrong) % VOCAB
    };
    let (tokens, chars) = ((0..length + scored).map(token).collect(), 3 * scored as u64 + 1);
    Choice { tokens, scored, chars }
}

/// Two tasks: three choices of different length, and one or two tokens to be written. Some contexts are too long.
fn tasks() -> Arc<[Task]> {
    let chosen = |number: u64| {
        let answer = (number % 3) as usize;
        let choices = (0..3).map(|at| choice(number, at == answer, at + 1));
        Example { choices: choices.collect(), answer }
    };
    let written = |number: u64| {
        let scored = 1 + number as usize % 2;
        Example { choices: vec![choice(number, number % 5 < 4, scored)], answer: 0 }
    };
    let task = |name: &str, examples| Task { name: name.into(), digest: Digest(1), examples };
    Arc::new([
        task("chosen", (0..9).map(chosen).collect()),
        task("written", (10..24).map(written).collect()),
    ])
}

fn evaluating(exec: &mut ExecOptions) {
    (exec.tasks, exec.validation) = (tasks(), Validation { every: 5, windows: 1 });
}

fn evaluations(scratch: &Scratch, out: &str) -> Vec<(u64, Value)> {
    let all = events(scratch, out, "evaluation").into_iter();
    all.map(|event| (event["step"].as_u64().unwrap(), event["tasks"].clone())).collect()
}

/// The negative log-likelihood of a choice, and whether each of its tokens is the most probable: from all logits of the
/// unpadded sequence.
fn naive(
    config: &ZayaConfig,
    params: &[Tensor],
    biases: &[Tensor],
    choice: &Choice,
) -> (f64, bool) {
    let all: Vec<i32> = choice.tokens.iter().map(|token| *token as i32).collect();
    let all = &all[all.len().saturating_sub(65)..];
    let (ids, labels) = (&all[..all.len() - 1], &all[1..]);
    let positions: Vec<i32> = (0..ids.len() as i32).collect();
    let input = MicroBatchInput {
        tokens: ids,
        labels,
        positions: &positions,
        mask: &vec![1; ids.len()],
        boundaries: &[vec![0]],
        weights: &[],
        rows: 1,
        seq_len: ids.len(),
    };
    let found = logits(config, params, biases, &input).unwrap();
    let (mut loss, mut greedy) = (0.0, true);
    for place in ids.len() - choice.scored..ids.len() {
        let row = Vec::<f32>::try_from(found.get(place as i64)).unwrap();
        let (label, most) =
            (row[labels[place] as usize], row.iter().copied().fold(f32::MIN, f32::max));
        let sum: f64 = row.iter().map(|logit| (f64::from(*logit) - f64::from(most)).exp()).sum();
        loss += sum.ln() + f64::from(most) - f64::from(label);
        greedy &= label == most;
    }
    (loss, greedy)
}

/// Compares the scores after step 10 with those of a naive program.
fn brute_force(scratch: &Scratch, found: &Value) {
    let mut replayer =
        Replayer::open(&scratch.path("alone"), &table(), Device::Cpu, Workers::new(2)).unwrap();
    let state = replayer.state_at(10).unwrap();
    let config = &replayer.spec().model_at(10).unwrap().config;
    let biases: Vec<Tensor> =
        state.balance.iter().map(|layer| Tensor::from_slice(&layer.bias)).collect();
    for task in tasks().iter() {
        let (mut correct, mut norm, mut sum) = (0, 0, 0.0);
        for Example { choices, answer } in &task.examples {
            let scores: Vec<_> = choices
                .iter()
                .map(|choice| naive(config, &state.weights, &biases, choice))
                .collect();
            let best = |by: &dyn Fn(usize) -> f64| {
                (1..choices.len()).fold(0, |best, at| if by(at) < by(best) { at } else { best })
            };
            sum -= scores[*answer].0;
            correct += match choices.len() {
                1 => u64::from(scores[0].1),
                _ => u64::from(best(&|at| scores[at].0) == *answer),
            };
            norm += u64::from(best(&|at| scores[at].0 / choices[at].chars as f64) == *answer);
        }
        let (found, count) = (&found[&task.name], task.examples.len() as f64);
        assert_eq!(found["examples"], task.examples.len());
        assert_eq!(found["accuracy"], correct as f64 / count, "{}", task.name);
        match task.name.as_str() {
            "chosen" => assert_eq!(found["accuracy_norm"], norm as f64 / count),
            _ => assert_eq!(found["accuracy_norm"], Value::Null),
        }
        let mean = found["log_likelihood"].as_f64().unwrap();
        assert!((mean - sum / count).abs() < 1e-5, "{}: {mean}, {}", task.name, sum / count);
    }
}

/// Ranks that divide the choices, that share sequences and that hold weights for each other find the scores of one
/// rank, which are those of a naive program; the run keeps its bits.
#[test]
fn scores_are_those_of_a_naive_program_on_any_ranks() {
    let scratch = folded(&[]);
    scratch.run(&scratch.path("run.toml"), "alone", evaluating).unwrap();
    let alone = evaluations(&scratch, "alone");
    assert_eq!(alone.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [5, 10]);
    assert_ne!(alone[0].1, alone[1].1);
    brute_force(&scratch, &alone[1].1);
    for (out, count, degrees) in
        [("three", 3, Degrees::ALONE), ("folded", 4, Degrees { cp: 2, tsp: 2 })]
    {
        let outcomes = train_with(&scratch, out, count, |_, exec| {
            evaluating(exec);
            exec.degrees = degrees;
        });
        outcomes.into_iter().for_each(|outcome| assert_eq!(outcome.unwrap().step, 10));
        assert_eq!(evaluations(&scratch, out), alone, "{out}");
        assert_same(&scratch, "alone", out);
    }
    scratch.train("without");
    assert!(scratch.ledger("without") == scratch.ledger("alone"));
}

/// The same for layers of other kinds.
#[test]
fn scores_of_other_layers_are_those_of_a_naive_program() {
    for kinds in [
        "layers = [\"linear\", \"gqa\"]",
        "layers = [\"gqa\"]\nfeed_forward = [\"mlp\"]\nresidual = \"plain\"",
    ] {
        let scratch = Scratch::new();
        scratch.edited("run.toml", &[("[model]\n", &format!("[model]\n{kinds}\n"))]);
        scratch.run(&scratch.path("run.toml"), "alone", evaluating).unwrap();
        brute_force(&scratch, &evaluations(&scratch, "alone")[1].1);
    }
}
