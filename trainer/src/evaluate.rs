//! Evaluation on tasks while training: multiple choice, and answers to be written, scored by log-likelihood.
//!
//! A task is a JSON Lines file. `{"context": "...", "choices": ["...", "..."], "answer": 1}` is right if the choice
//! `answer`, counted from 0, has the greatest log-likelihood after the context. `{"context": "...", "answer": "..."}`
//! is right if each token of the answer is the most probable one at its place. Choices and answers follow their context
//! without a space in between. Tokens and scores are those of EleutherAI's lm-evaluation-harness (`loglikelihood`,
//! `acc`, `acc_norm`): spaces at the end of a context belong to what follows, and what follows is the tokens of both
//! texts together without as many as the context alone has.
//!
//! Tasks decide no bit of a run: results are in `events.jsonl`, not in the ledger.

use std::collections::BTreeSet;

use contract::{Digest, Fault, Result, counted};
use loader::OpenedCurriculum;
use serde::Deserialize;
use serde_json::{Value, json};
use store::Location;
use tokenizers::Tokenizer;

use crate::model::{self, MicroBatchContext, MicroBatchInput};
use crate::passes::{self, PassResult, Passes};
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{FrozenModel, StepContext, Weights};

/// Sequences are padded to a multiple of this, so that a device meets few shapes.
const PADDED: usize = 64;

/// What a line of a task may be.
const WANTED: &str = "{\"context\": \"...\", \"choices\": [\"...\", \"...\"], \"answer\": 0} or \
                      {\"context\": \"...\", \"answer\": \"...\"}";

/// A task.
#[derive(Clone, Debug)]
pub struct Task {
    /// Its name: the file's without its extension.
    pub name: String,
    /// The digest of its file.
    pub digest: Digest,
    /// Its examples, at least one.
    pub examples: Vec<Example>,
}

/// An example of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// The choices; a single one if the answer is to be written.
    pub choices: Vec<Choice>,
    /// Index of the right choice.
    pub answer: usize,
}

/// A choice after its context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The tokens of context and choice.
    pub tokens: Vec<u32>,
    /// How many of them are the choice's, the last ones: at least one, and not all.
    pub scored: usize,
    /// Characters of the choice.
    pub chars: u64,
}

/// The result of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskScore {
    /// Its name.
    pub task: String,
    /// Examples.
    pub examples: u64,
    /// How many are right.
    pub correct: u64,
    /// How many are right if log-likelihoods are divided by the characters of their choices; `None` if no example has a
    /// choice.
    pub correct_norm: Option<u64>,
    /// The sum of the log-likelihoods of right answers, in nats.
    pub log_likelihood: f64,
}

impl TaskScore {
    /// The share of right examples.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.examples as f64
    }

    /// The same with log-likelihoods by character.
    pub fn accuracy_norm(&self) -> Option<f64> {
        Some(self.correct_norm? as f64 / self.examples as f64)
    }

    /// The mean log-likelihood of a right answer.
    pub fn mean(&self) -> f64 {
        self.log_likelihood / self.examples as f64
    }

    /// Its fields for the events; `bits` are those of the sum.
    pub fn to_json(&self) -> Value {
        let bits = format!("{:016x}", self.log_likelihood.to_bits());
        json!({
            "examples": self.examples, "accuracy": self.accuracy(), "accuracy_norm": self.accuracy_norm(),
            "log_likelihood": self.mean(), "bits": bits,
        })
    }
}

/// An example as it is written.
#[derive(Deserialize)]
#[serde(expecting = "an object with `context` and `answer`")]
struct ExampleText {
    context: String,
    #[serde(default)]
    choices: Option<Vec<String>>,
    answer: AnswerText,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "`answer` is neither the number of a choice nor a text")]
enum AnswerText {
    Number(i64),
    Text(String),
}

/// Encodes text as documents of the run's store begin.
struct Encoder {
    tokenizer: Tokenizer,
    /// The token before each document, or else the one after.
    first: Option<u32>,
    /// Whether `first` is put before every context, not before an empty one alone.
    always: bool,
}

impl Encoder {
    fn new(opened: &OpenedCurriculum) -> Result<Encoder> {
        let stores = opened.stores()?;
        let unread = |error: tokenizers::Error| {
            Fault::usage(format!("the store's tokenizer cannot encode the text of tasks: {error}"))
                .at("--eval")
        };
        let mut tokenizer = Tokenizer::from_bytes(stores.tokenizer()?).map_err(unread)?;
        tokenizer.with_truncation(None).map_err(unread)?;
        tokenizer.with_padding(None);
        // As in documents: text that looks like a special token is text.
        tokenizer.set_encode_special_tokens(true);
        let record = &stores.stores()[0].manifest().tokenizer;
        let (first, always) = (record.begin.or(record.end), record.begin.is_some());
        Ok(Encoder { tokenizer, first, always })
    }

    fn encode(&self, text: &str) -> std::result::Result<Vec<u32>, String> {
        let encoding = self.tokenizer.encode_fast(text, false);
        Ok(encoding.map_err(|error| error.to_string())?.get_ids().to_vec())
    }

    /// A choice after its context; an error says what is wrong with it.
    fn choice(&self, context: &str, choice: &str) -> std::result::Result<Choice, String> {
        let trimmed = context.trim_end();
        let mut before = self.encode(trimmed)?;
        let mut tokens = self.encode(&format!("{context}{choice}"))?;
        let scored = tokens.len().saturating_sub(before.len());
        if scored == 0 {
            return Err(format!("{choice:?} has no token of its own after its context"));
        }
        if self.always || before.is_empty() {
            let missing = "the context is empty, and the store's documents have no begin or end token to stand for it";
            let first = self.first.ok_or(missing)?;
            before.insert(0, first);
            tokens.insert(0, first);
        }
        Ok(Choice { tokens, scored, chars: choice.chars().count() as u64 })
    }

    fn example(&self, text: ExampleText) -> std::result::Result<Example, String> {
        let ExampleText { context, choices, answer } = text;
        let (choices, answer) = match (choices, answer) {
            (None, AnswerText::Text(answer)) => (vec![answer], 0),
            (Some(choices), AnswerText::Number(answer)) => match usize::try_from(answer) {
                Ok(place) if place < choices.len() && choices.len() > 1 => (choices, place),
                _ => {
                    return Err(format!("answer {answer} of {}", counted(choices.len(), "choice")));
                }
            },
            (Some(_), AnswerText::Text(_)) => {
                return Err("`answer` is a text, and there are `choices`".into());
            }
            (None, AnswerText::Number(_)) => {
                return Err("`answer` is a number without `choices`".into());
            }
        };
        let choices = choices.iter().map(|choice| self.choice(&context, choice));
        Ok(Example { choices: choices.collect::<std::result::Result<_, _>>()?, answer })
    }
}

impl Task {
    /// Reads task files for the run of a curriculum, whose tokenizer encodes them.
    pub fn read(files: &[Location], opened: &OpenedCurriculum) -> Result<Vec<Task>> {
        if files.is_empty() {
            return Ok(Vec::new());
        }
        let (encoder, mut names) = (Encoder::new(opened)?, BTreeSet::new());
        let shortest = opened.plan.phases().iter().map(|phase| phase.seq_len).min().unwrap_or(0);
        let tasks = files.iter().map(|file| {
            let task = Task::read_one(file, &encoder, shortest as usize)?;
            if !names.insert(task.name.clone()) {
                return Err(Fault::usage("two tasks have one name")
                    .at(file.to_string())
                    .found(&task.name)
                    .hint("curves and events know a task by its file's name"));
            }
            Ok(task)
        });
        tasks.collect()
    }

    fn read_one(file: &Location, encoder: &Encoder, shortest: usize) -> Result<Task> {
        let bytes = file.read().map_err(|error| file.fault("read", &error))?;
        let (mut examples, mut cropped) = (Vec::new(), 0);
        for (number, line) in (1..).zip(bytes.split(|byte| *byte == b'\n')) {
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let refused = |why: String| {
                Fault::usage("this line is no example of a task")
                    .at(format!("{file}:{number}"))
                    .found(why)
                    .wanted(WANTED)
            };
            let text = serde_json::from_slice(line).map_err(|error| refused(error.to_string()))?;
            let example = encoder.example(text).map_err(refused)?;
            if let Some(long) = example.choices.iter().find(|choice| choice.scored > shortest) {
                return Err(refused(format!("an answer of {} tokens", long.scored))
                    .wanted(format!("at most {shortest}, the shortest seq_len of the run")));
            }
            let longer = |choice: &Choice| choice.tokens.len() > shortest + 1;
            cropped += usize::from(example.choices.iter().any(longer));
            examples.push(example);
        }
        let name = file.name();
        let name = name.split_once('.').map_or(name.as_str(), |(stem, _)| stem).to_owned();
        if examples.is_empty() || name.is_empty() {
            return Err(Fault::usage("a task needs a name and an example").at(file.to_string()));
        }
        if cropped > 0 {
            contract::note!(
                "note: {cropped} of {} of task {name} are longer than {shortest} tokens: their contexts lose their first tokens",
                counted(examples.len(), "example")
            );
        }
        Ok(Task { name, digest: Digest::of_bytes(&bytes), examples })
    }

    /// Scores tasks with the weights of `state` on the ranks of `cx`, which divide the choices among them. `None` if a
    /// rank was `asked` to stop before the end.
    pub fn score(
        tasks: &[Task],
        cx: StepContext<'_>,
        state: &State,
        asked: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<TaskScore>>> {
        let examples =
            tasks.iter().flat_map(|task| (1..).zip(&task.examples).map(move |it| (task, it)));
        let choices = examples.flat_map(|(task, (number, example))| {
            example.choices.iter().map(move |choice| (task.name.as_str(), number, choice))
        });
        let choices = Choices { spec: cx.spec, step: state.step, all: choices.collect() };
        let Some(results) = passes::divided(cx, state, &choices, asked)? else { return Ok(None) };
        let mut results = results.as_slice();
        Ok(Some(tasks.iter().map(|task| task.total(&mut results)).collect()))
    }

    /// Takes the results of its choices from the first of `results`.
    fn total(&self, results: &mut &[PassResult]) -> TaskScore {
        let (mut correct, mut correct_norm, mut log_likelihood) = (0, None, 0.0);
        for Example { choices, answer } in &self.examples {
            let (own, rest) = results.split_at(choices.len());
            *results = rest;
            log_likelihood -= own[*answer].loss;
            // Where a score is no number, no choice is the best.
            let scored = own.iter().all(|result| result.loss.is_finite());
            if let [written] = own {
                correct += written.count;
                continue;
            }
            let by = |length: &dyn Fn(&Choice) -> f64| {
                let losses =
                    own.iter().zip(choices).map(|(result, choice)| result.loss / length(choice));
                // The first of equals.
                let best = losses.enumerate().min_by(|(_, one), (_, other)| one.total_cmp(other));
                u64::from(scored && best.map(|(index, _)| index) == Some(*answer))
            };
            correct += by(&|_| 1.0);
            *correct_norm.get_or_insert(0) += by(&|choice| choice.chars.max(1) as f64);
        }
        let (task, examples) = (self.name.clone(), self.examples.len() as u64);
        TaskScore { task, examples, correct, correct_norm, log_likelihood }
    }
}

/// The choices of all tasks, to be scored after a step: task, number of the example, and choice.
struct Choices<'a> {
    spec: &'a RunSpec,
    step: u64,
    all: Vec<(&'a str, usize, &'a Choice)>,
}

impl Passes for Choices<'_> {
    fn title(&self) -> String {
        format!("evaluation after step {}", self.step)
    }

    fn count(&self) -> usize {
        self.all.len()
    }

    fn place(&self, index: usize) -> String {
        let (task, number, _) = self.all[index];
        format!("evaluation of {task} after step {}, example {number}", self.step)
    }

    fn compute(
        &self,
        index: usize,
        model: &FrozenModel<'_>,
        how: MicroBatchContext<'_>,
    ) -> Result<PassResult> {
        let step = self.step.max(1);
        let (seq_len, chunks) =
            (self.spec.plan.step(step)?.seq_len, self.spec.model_at(step)?.cut.chunks);
        let (_, _, choice) = self.all[index];
        let sequence = Sequence::new(choice, seq_len as usize, chunks as usize)?;
        let compute = |Weights { weights, biases }: Weights<'_>| {
            model::scores(how, model.config(), weights, biases, &sequence.input())
        };
        let (loss, greedy) = model.read(compute, || self.place(index))?;
        Ok(PassResult { loss, count: u64::from(greedy && loss.is_finite()) })
    }
}

/// A choice and its context as the model reads them.
struct Sequence {
    tokens: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    mask: Vec<u8>,
    boundaries: [Vec<u32>; 1],
}

impl Sequence {
    /// The last `seq_len` tokens before the last one, with labels where the choice is predicted. Padded behind, which
    /// no token before can see, to a length that can be cut into `chunks`.
    fn new(choice: &Choice, seq_len: usize, chunks: usize) -> Result<Sequence> {
        let number = |id: &u32| {
            i32::try_from(*id).map_err(|_| Fault::bug("a token with an id beyond 31 bits"))
        };
        let read = (choice.tokens.len() - 1).min(seq_len);
        let last = choice.tokens.len() - read - 1;
        let ids = choice.tokens[last..].iter().map(number).collect::<Result<Vec<i32>>>()?;
        let length = read.next_multiple_of(PADDED.next_multiple_of(chunks)).min(seq_len);
        let padded = |ids: &[i32]| [ids, &vec![0; length - read]].concat();
        let (tokens, mut labels, mut mask) =
            (padded(&ids[..read]), padded(&ids[1..]), vec![0; length]);
        // A device reads labels where there are none, too.
        labels[..read - choice.scored].fill(0);
        mask[read - choice.scored..read].fill(1);
        Ok(Sequence {
            tokens,
            labels,
            positions: (0..length as i32).collect(),
            mask,
            boundaries: [vec![0]],
        })
    }

    fn input(&self) -> MicroBatchInput<'_> {
        let Sequence { tokens, labels, positions, mask, boundaries } = self;
        let (rows, seq_len) = (1, tokens.len());
        MicroBatchInput { tokens, labels, positions, mask, boundaries, weights: &[], rows, seq_len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes as tokens, and merges that join words with the space before them.
    fn encoder(first: Option<u32>, always: bool) -> Encoder {
        let words = ["\u{120}", "a", "b", "c", "\u{120}a", "\u{120}ab", "bc"];
        let vocab: Vec<String> =
            words.iter().enumerate().map(|(id, word)| format!("{word:?}: {id}")).collect();
        let json = format!(
            r#"{{"version": "1.0", "added_tokens": [{{"id": 7, "content": "<end>", "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false}}],
                "normalizer": null, "post_processor": null, "decoder": null,
                "pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}},
                "model": {{"type": "BPE", "vocab": {{{}}}, "merges": ["\u0120 a", "\u0120a b", "b c"]}}}}"#,
            vocab.join(", ")
        );
        let tokenizer = Tokenizer::from_bytes(json.as_bytes()).unwrap();
        Encoder { tokenizer, first, always }
    }

    /// Spaces at the end of a context belong to the choice; the choice has the tokens behind as many as the context
    /// alone has, even if a token crosses the border; documents begin as in the store.
    #[test]
    fn a_choice_has_the_tokens_of_the_harness() {
        let plain = encoder(Some(9), false);
        let cases: [(&str, &str, &[u32], usize); 5] = [
            ("a", " ab", &[1, 5], 1),
            ("a ", "ab", &[1, 5], 1),
            // "bc" is one token: alone, the context has two.
            ("ab", "cb", &[1, 6, 2], 1),
            ("", "ab", &[9, 1, 2], 2),
            (" ", "ab", &[9, 5], 1),
        ];
        for (context, choice, tokens, scored) in cases {
            let found = plain.choice(context, choice).unwrap();
            let chars = choice.len() as u64;
            assert_eq!(found, Choice { tokens: tokens.to_vec(), scored, chars }, "{context:?}");
        }
        let begun = encoder(Some(9), true).choice("a", " ab").unwrap();
        assert_eq!((begun.tokens, begun.scored), (vec![9, 1, 5], 1));
        let error = plain.choice("ab", "").unwrap_err();
        assert!(error.contains("no token of its own"), "{error}");
        let error = encoder(None, false).choice("", "a").unwrap_err();
        assert!(error.contains("the context is empty"), "{error}");
    }

    #[test]
    fn a_sequence_has_labels_where_its_choice_is_predicted() {
        let choice =
            |length: u32, scored| Choice { tokens: (0..length).collect(), scored, chars: 1 };
        for (length, scored, seq_len, chunks) in
            [(2, 1, 32, 1), (10, 3, 64, 4), (33, 32, 32, 2), (200, 5, 128, 1), (129, 1, 192, 3)]
        {
            let choice = choice(length, scored);
            let Sequence { tokens, labels, mask, .. } =
                Sequence::new(&choice, seq_len, chunks).unwrap();
            assert!(tokens.len() <= seq_len && tokens.len().is_multiple_of(chunks));
            let read = seq_len.min(length as usize - 1);
            let first = length as i32 - 1 - read as i32;
            assert_eq!(tokens[..read], (first..length as i32 - 1).collect::<Vec<_>>());
            let of = |place: usize| (read - scored..read).contains(&place);
            for place in 0..tokens.len() {
                assert_eq!(mask[place], u8::from(of(place)));
                assert_eq!(labels[place], if of(place) { first + place as i32 + 1 } else { 0 });
            }
        }
    }
}
