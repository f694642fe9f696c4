//! Compares batches with the most obvious program: one token at a time, over plain vectors.

use std::collections::BTreeMap;

use crate::support::{PhaseText, Text, curriculum, plan, scratch, write_store};
use contract::Digest;
use loader::{Batch, RankSlice, Stores, batch, step_digest, validation};
use mixer::{DataPlan, SampleSpec, Span};
use proptest::prelude::*;

/// A stream as plain vectors: each token, and the number of the document that it belongs to.
pub(crate) struct Plain {
    pub(crate) tokens: Vec<u32>,
    pub(crate) document: Vec<usize>,
}

impl Plain {
    pub(crate) fn new(documents: &[Vec<u32>]) -> Self {
        let numbered = documents.iter().enumerate();
        let document = numbered.flat_map(|(number, tokens)| vec![number; tokens.len()]).collect();
        Plain { tokens: documents.concat(), document }
    }

    fn same_document(&self, a: usize, b: usize) -> bool {
        b < self.tokens.len() && self.document[a] == self.document[b]
    }
}

/// A row: tokens, labels, positions, mask, boundaries.
#[derive(Debug, Default, PartialEq)]
struct Row(Vec<i32>, Vec<i32>, Vec<i32>, Vec<u8>, Vec<u32>);

fn naive_row(plain: &Plain, spans: &[Span], seq_len: u32) -> Row {
    let mut row = Row::default();
    let mut position = 0;
    let mut push = |row: &mut Row, boundary: bool, token: u32, label: Option<u32>| {
        if boundary {
            row.4.push(row.0.len() as u32);
            position = 0;
        }
        row.0.push(token as i32);
        row.1.push(label.map_or(0, |label| label as i32));
        row.2.push(position);
        row.3.push(u8::from(label.is_some()));
        position += 1;
    };
    for span in spans {
        for at in span.start as usize..(span.start + u64::from(span.tokens)) as usize {
            let boundary = at as u64 == span.start || !plain.same_document(at - 1, at);
            let label = plain.same_document(at, at + 1).then(|| plain.tokens[at + 1]);
            push(&mut row, boundary, plain.tokens[at], label);
        }
    }
    let filled = row.0.len();
    for at in filled..seq_len as usize {
        push(&mut row, at == filled, 0, None);
    }
    row
}

/// Writes out the bytes that define the digest.
fn naive_digest(Row(tokens, _, positions, mask, boundaries): &Row) -> Digest {
    let mut bytes = Vec::new();
    let mut part = |count: usize, part: Vec<u8>| {
        bytes.extend((count as u64).to_le_bytes());
        bytes.extend(part);
    };
    part(11, b"sequence.v1".to_vec());
    part(tokens.len(), tokens.iter().flat_map(|token| token.to_le_bytes()).collect());
    part(positions.len(), positions.iter().flat_map(|position| position.to_le_bytes()).collect());
    part(boundaries.len(), boundaries.iter().flat_map(|start| start.to_le_bytes()).collect());
    part(mask.len(), mask.clone());
    Digest::of_bytes(&bytes)
}

fn naive_step_digest(sequences: &[Digest]) -> Digest {
    let mut bytes = 7u64.to_le_bytes().to_vec();
    bytes.extend(b"step.v1");
    bytes.extend((sequences.len() as u64).to_le_bytes());
    bytes.extend(sequences.iter().flat_map(|digest| digest.0.to_le_bytes()));
    Digest::of_bytes(&bytes)
}

pub(crate) fn check_rows(found: &Batch, plain: impl Fn(&SampleSpec) -> Plain) {
    for row in 0..found.rows {
        let sample = &found.samples[row as usize];
        let wanted = naive_row(&plain(sample), &sample.spans, found.seq_len);
        let got = Row(
            found.row(found.columns().tokens, row).to_vec(),
            found.row(found.columns().labels, row).to_vec(),
            found.row(found.columns().positions, row).to_vec(),
            found.row(found.columns().mask, row).to_vec(),
            found.boundaries[row as usize].clone(),
        );
        assert_eq!(found.sequences[row as usize], naive_digest(&wanted));
        assert_eq!(got, wanted, "row {row}: {sample:?}");
    }
    assert_eq!(found.digest(), naive_step_digest(&found.sequences));
    assert_eq!(
        found.label_count,
        found.columns().mask.iter().filter(|label| **label == 1).count() as u64
    );
}

fn texts() -> impl Strategy<Value = Vec<Text>> {
    let lengths = || prop::collection::vec(prop_oneof![4 => 1u64..30, 1 => 1u64..700], 1..60);
    let text = (lengths(), lengths(), 1u64..2000);
    prop::collection::vec(text, 1..4).prop_map(|texts| {
        let named = texts.into_iter().zip(["web", "math", "code"]);
        named
            .map(|((train, held, shard_tokens), name)| {
                let validation = Text::generate(&format!("{name} held"), &held, 60_000).train;
                Text { validation, shard_tokens, ..Text::generate(name, &train, 60_000) }
            })
            .collect()
    })
}

fn open_all(texts: &[Text], wide: bool, unit: u64) -> (tempfile::TempDir, Stores) {
    let dir = scratch();
    // One store per source: several stores act as one.
    let paths: Vec<_> =
        texts.iter().map(|text| dir.path().join(format!("store-{}", text.name))).collect();
    for (text, path) in texts.iter().zip(&paths) {
        std::fs::create_dir(path).unwrap();
        write_store(path, std::slice::from_ref(text), if wide { 4 } else { 2 }, unit);
    }
    let stores = Stores::open(&paths).unwrap();
    (dir, stores)
}

fn three_phases(texts: &[Text]) -> String {
    let names: Vec<&str> = texts.iter().map(|text| text.name.as_str()).collect();
    let mix: Vec<String> = names.iter().zip([5, 2, 1]).map(|(n, w)| format!("{n} = {w}")).collect();
    let mix = mix.join(", ");
    let phases = [
        PhaseText(7, 32, 12, 2, &mix),
        PhaseText(5, 128, 6, 1, &mix),
        PhaseText(9, 64, 8, 4, &mix),
    ];
    curriculum(&[], &names, &phases).replace("store = []", "store = \"s\"")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every row of every step equals the naive one, including padding, joints and changes of length. The ranks' parts
    /// of any world make up the step.
    #[test]
    fn batches_are_those_of_the_naive_program(texts in texts(), wide: bool) {
        let (_dir, stores) = open_all(&texts, wide, 256);
        let plan = plan(&three_phases(&texts), &stores);
        for step in 1..=plan.steps() {
            let whole = batch(&plan, &stores, step, RankSlice::WHOLE).unwrap();
            check_rows(&whole, |sample| {
                let name = &plan.sources()[sample.source].name;
                Plain::new(&texts.iter().find(|text| text.name == *name).unwrap().train)
            });
            for world in [1, 2, 3, 4, 5, 6, 7, 8, 12, 64] {
                check_world(&plan, &stores, &whole, world);
            }
        }
    }

    /// The held-out split is read once, completely and in order.
    #[test]
    fn validation_windows_are_the_split(texts in texts(), seq_len in 1u32..300, rows in 1u64..9) {
        let (_dir, stores) = open_all(&texts, false, 256);
        for text in &texts {
            let (mut seen, mut first) = (0, 0);
            while first < validation::windows(&stores, &text.name, seq_len).unwrap() {
                let found = validation::batch(&stores, &text.name, seq_len, first, rows).unwrap();
                check_rows(&found, |_| Plain::new(&text.validation));
                for sample in &found.samples {
                    prop_assert_eq!(sample.spans[0].start, seen);
                    seen += u64::from(sample.spans[0].tokens);
                }
                first += found.rows;
            }
            prop_assert_eq!(seen, text.validation.concat().len() as u64);
            prop_assert_eq!(validation::batch(&stores, &text.name, seq_len, first, rows).unwrap().rows, 0);
        }
    }

    /// Each adjacent pair of tokens inside a document is a label exactly once per whole epoch, across cuts of windows
    /// and units and a change of length. The pair across two documents never is.
    #[test]
    fn every_pair_is_a_label_once_in_an_epoch(texts in texts()) {
        let (_dir, stores) = open_all(&texts[..1], false, 256);
        let plain = Plain::new(&texts[0].train);
        let phases = [PhaseText(40, 32, 4, 1, "web = 1"), PhaseText(30, 128, 2, 1, "web = 1")];
        let text = curriculum(&[], &["web"], &phases).replace("store = []", "store = \"s\"");
        let plan = plan(&text, &stores);
        let mut seen: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        for step in 1..=plan.steps() {
            let whole = batch(&plan, &stores, step, RankSlice::WHOLE).unwrap();
            for (row, sample) in whole.samples.iter().enumerate() {
                let counts = seen.entry(sample.epoch).or_insert_with(|| vec![0; plain.tokens.len()]);
                let places = sample.spans.iter().flat_map(|s| s.start..s.start + u64::from(s.tokens));
                for (offset, at) in places.enumerate() {
                    counts[at as usize] += u32::from(whole.row(whole.columns().mask, row as u64)[offset]);
                }
            }
        }
        let last = *seen.keys().max().unwrap();
        for (epoch, counts) in seen {
            for (at, count) in counts.into_iter().enumerate() {
                let pair = u32::from(plain.same_document(at, at + 1));
                prop_assert!(count == pair || epoch == last && count == 0, "epoch {epoch}, token {at}: {count}");
            }
        }
    }
}

pub(crate) fn check_world(plan: &DataPlan, stores: &Stores, whole: &Batch, world: u32) {
    let part =
        |rank| batch(plan, stores, whole.step, RankSlice::new(rank, world).unwrap()).unwrap();
    let parts: Vec<Batch> = (0..world).map(part).collect();
    let digests: Vec<&[Digest]> = parts.iter().map(|part| part.sequences.as_slice()).collect();
    assert_eq!(step_digest(digests), whole.digest(), "world {world}");
    let joined: Vec<i32> = parts.iter().flat_map(|part| part.columns().labels.to_vec()).collect();
    assert_eq!(joined, whole.columns().labels);
    assert_eq!(parts.iter().map(|part| part.label_count).sum::<u64>(), whole.label_count);
    let spec = plan.step(whole.step).unwrap();
    for rank in 0..world {
        let slice = RankSlice::new(rank, world).unwrap().in_turn();
        let part = batch(plan, stores, whole.step, slice).unwrap();
        assert_eq!(part.rows, slice.rows(&spec).count() as u64);
        for (number, row) in slice.rows(&spec).enumerate() {
            assert_eq!(row / spec.micro_batch % u64::from(world), u64::from(rank));
            assert_eq!(part.sequences[number], whole.sequences[row as usize], "rank {rank}");
            assert_eq!(
                part.row(part.columns().tokens, number as u64),
                whole.row(whole.columns().tokens, row)
            );
        }
    }
    let mut next = whole.first_sample;
    for part in parts.iter().filter(|part| part.rows > 0) {
        assert_eq!((part.first_sample, part.rows % part.micro_batch), (next, 0));
        next += part.rows;
    }
}
