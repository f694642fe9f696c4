//! Finds the element that a bit flip hit, from the next checkpoint of the run.
//!
//! A flip before the forward pass affects everything within a step, but the element itself still differs more than all
//! that followed from it. The proof is to flip the bit in the true state: then a micro-batch has the loss and the
//! gradient that the ledger has.

use contract::Result;
use loader::Batch;
use serde::Serialize;
use tch::{Kind, Tensor};
use trainer::checkpoint::{StateLayout, TensorSet};
use trainer::ledger::{StepRecord, StepStage};
use trainer::refusal::refused;
use trainer::replay::Replayer;
use trainer::state::State;
use trainer::state::ownership::{Ownership, ParamShard};

/// The element of the state that was hit.
#[derive(Clone, Debug, Serialize)]
pub struct CorruptedElement {
    /// The parameter.
    pub parameter: String,
    /// Its weight, or one of its moments.
    pub set: TensorSet,
    /// The index of the element in the tensor.
    pub element: i64,
    /// The rank that owned it, if events.jsonl says how many ranks there were.
    pub owner: Option<u32>,
    /// The step of the checkpoint that shows it.
    pub checkpoint: u64,
    /// How many times more it differs than anything in other parameters; `None` if those do not differ.
    pub times: Option<f64>,
    /// The flipped bit, from 0, of a weight that was hit before the forward pass: with it, a micro-batch matches the
    /// ledger.
    pub bit: Option<u32>,
}

/// The evidence to find it by.
#[derive(Clone, Copy)]
pub(super) struct CorruptionEvidence<'a> {
    /// The first stage that differs.
    pub(super) stage: StepStage,
    /// Micro-batches whose loss differs.
    pub(super) losses: &'a [usize],
    /// The number of ranks that trained the step, if known.
    pub(super) ranks: Option<u32>,
    pub(super) written: &'a StepRecord,
    pub(super) before: &'a State,
    pub(super) after: &'a State,
    pub(super) batch: &'a Batch,
}

/// A checkpoint is used only if it is within this many steps after the hit.
const NEAR: u64 = 64;

/// An element stands out if it differs this many times more than anything in other parameters.
const STANDS_OUT: f64 = 4.0;

/// The element of a tensor that differs most.
struct LargestDifference<'a> {
    piece: &'a ParamShard,
    set: TensorSet,
    element: i64,
    distance: f64,
}

/// Finds the element; the text says what was found, or what could show it.
pub(super) fn find(
    replayer: &Replayer,
    traces: CorruptionEvidence<'_>,
    owners: Option<&Ownership>,
) -> Result<(Option<CorruptedElement>, String)> {
    let step = traces.written.step;
    let Some(checkpoint) = checkpoint_after(replayer, step)? else {
        let words = format!(
            "no checkpoint of the run follows within {NEAR} steps: it could tell the element"
        );
        return Ok((None, words));
    };
    let (stage, name) = (traces.stage, format!("checkpoint step-{checkpoint}"));
    if stage == StepStage::Update && checkpoint > step {
        return Ok((
            None,
            format!(
                "a checkpoint of step {step} itself could tell the element; the next is {name}"
            ),
        ));
    }
    let Some(ours) = true_state(replayer, traces.after, checkpoint)? else {
        return Ok((None, format!("the true run diverges before {name}")));
    };
    let layout = StateLayout::new(replayer.spec(), replayer.world().device);
    let checkpoints = replayer.folder().checkpoints()?;
    let checkpointed = checkpoints.open(checkpoint)?.whole(&layout, replayer.workers())?;
    let all = distances(&ours, &checkpointed)?;
    let hit = match stage {
        StepStage::Update => directly(&all),
        _ => standing_out(&all),
    };
    let Some((farthest, times)) = hit else {
        let copied = traces.ranks.is_some_and(|ranks| ranks > 1);
        let words = match copied {
            true => format!(
                "nothing stands out in {name}: a rank's copy of a weight is replaced by its owner's with the step, and no \
                 checkpoint has it; `ztrain --audit` finds a rank that computes otherwise within the step"
            ),
            false => format!(
                "nothing stands out in {name}: the element moved no farther than a step moves others"
            ),
        };
        return Ok((None, words));
    };
    let LargestDifference { piece, set, element, distance } = farthest;
    let parameter = replayer.spec().parameters[piece.tensor].name.clone();
    let bit = match stage {
        StepStage::Forward => prove(replayer, traces, piece.tensor, element, distance)?,
        _ => None,
    };
    if stage == StepStage::Forward && bit.is_none() {
        let words = format!(
            "in {name} element {element} of {parameter} is farthest off, but no flipped bit explains what the ledger says of a \
             micro-batch"
        );
        return Ok((None, words));
    }
    let owner = owners.and_then(|owners| owner(owners, piece.tensor, element));
    let hit = CorruptedElement { parameter, set, element, owner, checkpoint, times, bit };
    let words = hit.words(traces.ranks);
    Ok((Some(hit), words))
}

/// The first checkpoint of the run from `step` on that matches the ledger, if it is near.
fn checkpoint_after(replayer: &Replayer, step: u64) -> Result<Option<u64>> {
    let checkpoints = replayer.folder().checkpoints()?;
    let near = step..=replayer.recorded().min(step + NEAR);
    for at in checkpoints.steps()?.into_iter().filter(|at| near.contains(at)) {
        let chain = replayer.ledger().chain_at(at);
        if checkpoints.open(at).is_ok_and(|reader| Some(reader.manifest().chain) == chain) {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// The state after `step` without the hit; `None` if it diverges on the way.
fn true_state(replayer: &Replayer, after: &State, step: u64) -> Result<Option<State>> {
    let mut state = after.copy()?;
    let diverged = replayer.advance_to(&mut state, step, None, |_| Ok(true))?;
    Ok(diverged.is_none().then_some(state))
}

/// The element that differs most, for each piece and set with a difference.
fn distances<'a>(ours: &'a State, checkpointed: &State) -> Result<Vec<LargestDifference<'a>>> {
    let mut all = Vec::new();
    for ((piece, weight, moments), (_, other, others)) in ours.own().zip(checkpointed.own()) {
        let second = moments.second.as_ref().zip(others.second.as_ref());
        let sets = [
            Some((TensorSet::Weights, &weight, &other)),
            Some((TensorSet::First, &moments.first, &others.first)),
            second.map(|(recomputed, other)| (TensorSet::Second, recomputed, other)),
        ];
        for (set, recomputed, other) in sets.into_iter().flatten() {
            let (element, distance) = farthest(recomputed, other).map_err(refused)?;
            if distance > 0.0 {
                all.push(LargestDifference {
                    piece,
                    set,
                    element: piece.first + element,
                    distance,
                });
            }
        }
    }
    Ok(all)
}

/// The element in which two tensors differ most, and by how much; NaN is the largest.
fn farthest(recomputed: &Tensor, other: &Tensor) -> std::result::Result<(i64, f64), tch::TchError> {
    let apart = other.f_sub(recomputed)?.f_abs()?.f_reshape([-1])?;
    let element = apart.f_argmax(None, false)?.f_int64_value(&[])?;
    let distance = apart.f_double_value(&[element])?;
    Ok((element, if distance.is_nan() { f64::INFINITY } else { distance }))
}

/// For a difference in the update only: the moment that was hit changes the weight, too.
fn directly<'a>(all: &[LargestDifference<'a>]) -> Option<(LargestDifference<'a>, Option<f64>)> {
    let of = |set: TensorSet| {
        let of_set = all.iter().filter(move |one| one.set == set);
        of_set.max_by(|a, b| a.distance.total_cmp(&b.distance))
    };
    let found = of(TensorSet::Second)
        .or_else(|| of(TensorSet::First))
        .or_else(|| of(TensorSet::Weights))?;
    let LargestDifference { piece, set, element, distance } = *found;
    let other = all.iter().any(|one| one.piece.tensor != piece.tensor);
    (!other).then_some((LargestDifference { piece, set, element, distance }, None))
}

/// The weight that differs much more than any of other parameters.
fn standing_out<'a>(all: &[LargestDifference<'a>]) -> Option<(LargestDifference<'a>, Option<f64>)> {
    let weights = || all.iter().filter(|one| one.set == TensorSet::Weights);
    let found = weights().max_by(|a, b| a.distance.total_cmp(&b.distance))?;
    let LargestDifference { piece, set, element, distance } = *found;
    let others = weights().filter(|one| one.piece.tensor != piece.tensor);
    let next = others.map(|one| one.distance).fold(0.0, f64::max);
    let times = (next > 0.0).then_some(distance / next);
    let stands = times.is_none_or(|times| times >= STANDS_OUT);
    stands.then_some((LargestDifference { piece, set, element, distance }, times))
}

/// The bit of a weight with which a differing micro-batch matches the ledger.
fn prove(
    replayer: &Replayer,
    traces: CorruptionEvidence<'_>,
    tensor: usize,
    element: i64,
    distance: f64,
) -> Result<Option<u32>> {
    let CorruptionEvidence { losses, written, before, batch, .. } = traces;
    // If the bit flipped in the middle of the step, the last of them is affected.
    let Some(micro_batch) = losses.last().copied() else { return Ok(None) };
    let flipped = before.copy()?;
    // In bf16, only the owner has the f32 value that was hit.
    let Some(mut place) = wide_place(&flipped, tensor, element) else { return Ok(None) };
    let mut read = flipped.weights[tensor].view([-1]).narrow(0, element, 1);
    let right = place.double_value(&[0]) as f32;
    for bit in (0..32).rev() {
        let wrong = f32::from_bits(right.to_bits() ^ (1 << bit));
        let moved = f64::from((wrong - right).abs());
        // Later steps change it further, a little.
        if !(distance / 8.0..=distance * 8.0).contains(&moved) {
            continue;
        }
        // In f32, and where the model reads it.
        for place in [&mut place, &mut read] {
            let filled = tch::no_grad(|| place.f_fill_(f64::from(wrong)));
            filled.map(drop).map_err(refused)?;
        }
        let sums = replayer.micro_batch_sums(&flipped, batch, micro_batch as u64)?;
        let written = (
            written.micro_batch_losses.0.get(micro_batch),
            written.micro_batch_grad_checksums.0.get(micro_batch),
        );
        if written == (Some(&sums.loss.to_bits()), Some(&sums.gradient)) {
            return Ok(Some(bit));
        }
    }
    Ok(None)
}

/// An alias of one weight in f32; `None` where only another rank has it in f32.
fn wide_place(state: &State, tensor: usize, element: i64) -> Option<Tensor> {
    let read = &state.weights[tensor];
    if read.kind() == Kind::Float {
        return Some(read.view([-1]).narrow(0, element, 1));
    }
    let has = |piece: &ParamShard| {
        piece.tensor == tensor && (piece.first..piece.first + piece.length()).contains(&element)
    };
    let (piece, weight, _) = state.own().find(|(piece, ..)| has(piece))?;
    Some(weight.view([-1]).narrow(0, element - piece.first, 1))
}

/// The rank that owned an element.
fn owner(owners: &Ownership, tensor: usize, element: i64) -> Option<u32> {
    let has = |piece: &&ParamShard| {
        let elements = piece.first..piece.first + piece.length();
        piece.tensor == tensor && elements.contains(&element)
    };
    owners.pieces().iter().find(has).map(|piece| piece.owner)
}

impl CorruptedElement {
    /// A description for people.
    fn words(&self, ranks: Option<u32>) -> String {
        let CorruptedElement { parameter, set, element, owner, checkpoint, times: _, bit } = self;
        let what = match set {
            TensorSet::Weights => "element",
            TensorSet::First => "the first moment of element",
            TensorSet::Second => "the second moment of element",
        };
        let sure = match bit {
            Some(bit) => {
                format!(
                    "bit {bit} flipped before the step: with it a micro-batch comes out as in the ledger"
                )
            }
            None => "all other parameters are as they should be".to_owned(),
        };
        let whose = match (owner, ranks.filter(|ranks| *ranks > 1)) {
            (Some(owner), Some(ranks)) => format!("; rank {owner} of {ranks} owned it"),
            _ => String::new(),
        };
        format!(
            "by checkpoint step-{checkpoint} it is {what} {element} of {parameter}, {sure}{whose}"
        )
    }
}
