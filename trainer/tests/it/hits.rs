//! Fear: that a flipped bit is attributed to the wrong parameter, element or rank.

use std::fs::OpenOptions;
use std::io::Write as _;

use kernels::device::Stager;
use kernels::group::Transport;
use loader::{Batch, OpenedCurriculum};
use serde_json::json;
use tch::{Device, Tensor};
use tools::replay::narrow::LocatedDifference;
use trainer::RunSpec;
use trainer::checkpoint::{Checkpoints, Snapshot, StateLayout, TensorSet};
use trainer::ledger::{Ledger, StepRecord};
use trainer::mesh::share::WeightSharing;
use trainer::mesh::{Degrees, GradReduce, ProcessMesh};
use trainer::model::Cut;
use trainer::replay::{Replayer, Verdict, meet};
use trainer::state::State;
use trainer::state::ownership::{Ownership, ParamShard};
use trainer::step::{self, Detail, StagedBatch, StepContext};
use trainer::workers::Workers;

use crate::ranks::{on_ranks, train_with};
use crate::support::{Scratch, table};

/// A bit flips before this step. It has five micro-batches; the second of two ranks computes the last three.
const STEP: u64 = 7;

fn spec(scratch: &Scratch) -> RunSpec {
    RunSpec::new(&OpenedCurriculum::open(scratch.path("run.toml")).unwrap()).unwrap()
}

/// A run of two ranks up to the step before.
fn begun() -> Scratch {
    let scratch = Scratch::new();
    let outcomes = train_with(&scratch, "run", 2, |_, exec| exec.stop_after = Some(STEP - 1));
    assert!(outcomes.iter().all(Result::is_ok));
    scratch
}

/// Faults on a rank: in its state before the first step, in its batches in memory, in a step's record.
struct Harm<'a> {
    state: &'a (dyn Fn(u32, &mut State) + Sync),
    text: &'a (dyn Fn(u32, &mut Batch) + Sync),
    record: &'a (dyn Fn(&mut StepRecord) + Sync),
}

/// No fault.
const NONE: Harm<'_> = Harm { state: &|_, _| (), text: &|_, _| (), record: &|_| () };

/// Trains to step `last` with `ranks` ranks; `harm` changes their state before the first of these steps.
fn harmed(scratch: &Scratch, ranks: u32, last: u64, harm: impl Fn(u32, &mut State) + Sync) {
    harmed_by(scratch, ranks, last, Harm { state: &harm, ..NONE });
}

/// Trains to step `last` with `ranks` ranks like a run: ledger, events, and a checkpoint after the last.
fn harmed_by(scratch: &Scratch, ranks: u32, last: u64, harm: Harm<'_>) {
    let checkpoints = Checkpoints::new(scratch.path("run/checkpoints").as_path());
    let layout = StateLayout::new(&spec(scratch), Device::Cpu);
    let mut parts = on_ranks(&[ranks], |mut world| {
        meet(&mut world, Transport::Auto).unwrap();
        let (spec, rank, workers) = (spec(scratch), world.comm.rank(), Workers::new(1));
        let owners = Ownership::new(&spec, rank, ranks);
        let reader = checkpoints.open(STEP - 1).unwrap();
        let mut state = reader.part(&layout, &owners, workers).unwrap();
        // As if the other ranks had sent their weights.
        let all = reader.whole(&layout, workers).unwrap().weights;
        let copy = |(mut own, whole): (Tensor, &Tensor)| tch::no_grad(|| own.copy_(whole));
        state.weights.iter().map(Tensor::shallow_clone).zip(&all).for_each(copy);
        (harm.state)(rank, &mut state);
        let team = ProcessMesh::new(&world.comm, Degrees::ALONE, GradReduce::Whole, false).unwrap();
        let (cx, slice) = (
            StepContext { spec: &spec, team: &team, workers },
            team.lines(Cut::WHOLE).unwrap().slice().unwrap(),
        );
        let (mut records, sharing) = (Vec::new(), WeightSharing::new(&team));
        while state.step < last {
            let mut batch = loader::batch(&spec.plan, &spec.data, state.step + 1, slice).unwrap();
            (harm.text)(rank, &mut batch);
            let micro_batches =
                StagedBatch::stage(&spec, &batch, &Stager::new(Device::Cpu).unwrap()).unwrap();
            let asked = step::Requests::default;
            let stepped =
                step::advance(cx, &mut state, &batch, &micro_batches, &sharing, asked).unwrap();
            let mut record = stepped.record;
            (harm.record)(&mut record);
            records.push(record);
        }
        sharing.finish().unwrap();
        let snapshot = Snapshot::of(&state).unwrap();
        let blobs = checkpoints.write(&layout, &snapshot).unwrap();
        world.comm.barrier("the end").unwrap();
        (records, snapshot, blobs, owners.pieces().to_vec())
    });
    let blobs = parts.iter_mut().flat_map(|part| std::mem::take(&mut part.2)).collect();
    let (records, snapshot, _, pieces) = &parts[0];
    let mut ledger = Ledger::open(&scratch.path("run/ledger.jsonl")).unwrap().unwrap();
    let events = OpenOptions::new().append(true).open(scratch.path("run/events.jsonl"));
    let mut events = events.unwrap();
    writeln!(events, "{}", json!({"event": "start"})).unwrap();
    if ranks > 1 {
        let said = json!({
            "event": "ranks", "world": ranks, "cp": 1, "tsp": 1,
            "grad_reduce": "whole", "transport": "gloo",
        });
        writeln!(events, "{said}").unwrap();
    }
    for record in records {
        ledger.append(record, None).unwrap();
        let said = json!({"event": "step", "step": record.step, "again": false});
        writeln!(events, "{said}").unwrap();
    }
    let digests = (records.last().unwrap().state_digest, ledger.chain_at(last).unwrap());
    checkpoints.commit(snapshot, digests, &layout, pieces, blobs).unwrap();
}

/// Flips `bit` of an element.
fn flip(tensor: &Tensor, element: i64, bit: u32) {
    let mut place = tensor.view([-1]).narrow(0, element, 1);
    let value = place.double_value(&[0]) as f32;
    let wrong = f32::from_bits(value.to_bits() ^ (1 << bit));
    assert!(wrong.is_finite());
    let _ = tch::no_grad(|| place.fill_(f64::from(wrong)));
}

/// A matrix owned by `rank` of two ranks, and its index among the pieces of that rank.
fn owned(scratch: &Scratch, rank: u32) -> (usize, ParamShard) {
    let owners = Ownership::new(&spec(scratch), rank, 2);
    let mut own = owners.own().cloned().enumerate();
    own.find(|(_, piece)| !piece.rule.has_second_moment() && piece.shape.len() == 2).unwrap()
}

/// The element of a piece with the largest weight, which is below an eighth: flipping one bit multiplies it by sixteen.
fn largest(scratch: &Scratch, piece: &ParamShard) -> i64 {
    let root = scratch.path("run");
    let mut replayer = Replayer::open(&root, &table(), Device::Cpu, Workers::new(1)).unwrap();
    let state = replayer.state_at(STEP - 1).unwrap();
    let own = piece.of(&state.weights[piece.tensor]).reshape([-1]).abs();
    let element = own.argmax(None, false).int64_value(&[]);
    let value = own.double_value(&[element]);
    assert!((0.0079..0.125).contains(&value), "{value}");
    piece.first + element
}

fn narrowed(scratch: &Scratch) -> LocatedDifference {
    let root = scratch.path("run");
    let mut replayer = Replayer::open(&root, &table(), Device::Cpu, Workers::new(2)).unwrap();
    let mut state = replayer.state_after(STEP - 1).unwrap();
    let found = tools::replay::step(&replayer, &mut state, Detail::Tokens).unwrap();
    assert_eq!(found.replayed.verdict, Verdict::RunHit, "{:?}", found.replayed.difference);
    found.narrowed.unwrap()
}

fn name(scratch: &Scratch, piece: &ParamShard) -> String {
    spec(scratch).names()[piece.tensor].clone()
}

/// Flipping this bit multiplies values between 1/128 and 1/8 by sixteen.
const BIT: u32 = 25;

#[test]
fn a_bit_of_a_weight_is_found_on_the_rank_that_owns_it() {
    for (ranks, last) in [(2, STEP), (2, STEP + 2), (1, STEP)] {
        let scratch = begun();
        let (_, piece) = owned(&scratch, 1);
        let element = largest(&scratch, &piece);
        harmed(&scratch, ranks, last, |rank, state| {
            if rank + 1 == ranks {
                flip(&state.weights[piece.tensor], element, BIT);
            }
        });
        let found = narrowed(&scratch);
        let losses: &[usize] = if ranks == 2 { &[2, 3, 4] } else { &[0, 1, 2, 3, 4] };
        assert_eq!(found.losses, losses, "{}", found.words);
        assert_eq!(found.ranks, Some(ranks));
        let hit = found.hit.as_ref().unwrap_or_else(|| panic!("{}", found.words));
        assert_eq!((&hit.parameter, hit.set), (&name(&scratch, &piece), TensorSet::Weights));
        assert_eq!((hit.element, hit.bit, hit.checkpoint), (element, Some(BIT), last));
        if ranks == 2 {
            assert_eq!((found.rank, hit.owner), (Some(1), Some(1)), "{}", found.words);
            let words = "rank 1 of 2 computed micro-batches 2, 3 and 4, and no other";
            assert!(found.words.contains(words), "{}", found.words);
        } else {
            assert_eq!((found.rank, hit.owner), (Some(0), Some(0)), "{}", found.words);
        }
    }
}

#[test]
fn a_bit_of_a_copy_is_found_on_its_rank_and_said_to_be_gone() {
    let scratch = begun();
    let (_, piece) = owned(&scratch, 0);
    let element = largest(&scratch, &piece);
    harmed(&scratch, 2, STEP, |rank, state| {
        if rank == 1 {
            flip(&state.weights[piece.tensor], element, BIT);
        }
    });
    let found = narrowed(&scratch);
    assert_eq!((found.losses.as_slice(), found.rank), (&[2, 3, 4][..], Some(1)), "{}", found.words);
    assert!(found.hit.is_none(), "{}", found.words);
    assert!(found.words.contains("rank 1 of 2 computed"), "{}", found.words);
    assert!(found.words.contains("checkpoint step-7"), "{}", found.words);
}

#[test]
fn a_bit_of_what_a_micro_batch_computes_with_is_found_in_it() {
    let scratch = begun();
    // The batch digest was computed before the bit flipped, so the text matches the run, but the results do not.
    let text = |rank, batch: &mut Batch| {
        if rank == 1 {
            let second = batch.micro_batch as usize * batch.seq_len as usize;
            batch.columns_mut().unwrap().tokens[second + 1] ^= 1;
        }
    };
    harmed_by(&scratch, 2, STEP, Harm { text: &text, ..NONE });
    let found = narrowed(&scratch);
    assert_eq!((found.losses.as_slice(), found.rank), (&[3][..], Some(1)), "{}", found.words);
    assert!(found.words.contains("only micro-batch 3 had another loss"), "{}", found.words);
    assert!(found.words.contains("rank 1 of 2 computed it"), "{}", found.words);
    assert!(found.words.contains("what was hit is the embedding"), "{}", found.words);
}

#[test]
fn a_bit_of_a_gradient_is_found_in_its_micro_batch() {
    let scratch = begun();
    // The recorded loss is right and the gradient's checksum is wrong, as with a bit flip in the gradient.
    let record = |record: &mut StepRecord| record.micro_batch_grad_checksums.0[1] ^= 1;
    harmed_by(&scratch, 2, STEP, Harm { record: &record, ..NONE });
    let found = narrowed(&scratch);
    assert_eq!((found.losses.as_slice(), found.gradients.as_slice()), (&[][..], &[1][..]));
    assert_eq!(found.rank, Some(0), "{}", found.words);
    assert!(found.words.contains("rank 0 of 2 computed it"), "{}", found.words);
}

#[test]
fn a_bit_of_a_moment_is_found_on_its_owner() {
    for (last, told) in [(STEP, true), (STEP + 1, false)] {
        let scratch = begun();
        let (number, piece) = owned(&scratch, 0);
        harmed(&scratch, 2, last, |rank, state| {
            if rank == 0 {
                flip(&state.owned[number].first, 11, BIT);
            }
        });
        let found = narrowed(&scratch);
        // The ledger alone identifies the parameter and its owner.
        assert_eq!(found.weights, [name(&scratch, &piece)], "{}", found.words);
        assert_eq!(found.rank, Some(0), "{}", found.words);
        assert!(found.words.contains("rank 0 of 2 owned that"), "{}", found.words);
        match &found.hit {
            Some(hit) if told => {
                assert_eq!((hit.set, hit.element), (TensorSet::First, piece.first + 11));
                assert_eq!((hit.owner, hit.bit), (Some(0), None));
            }
            None if !told => {
                assert!(found.words.contains("a checkpoint of step 7 itself"), "{}", found.words);
            }
            other => panic!("{other:?}: {}", found.words),
        }
    }
}
