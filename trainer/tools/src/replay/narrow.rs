//! Narrows down where a recorded step differs from its replay: micro-batches, parameters and layers, and the rank that
//! computed them. `hit` finds the element if the run left a checkpoint.

use contract::Result;
use serde::Serialize;
use trainer::ledger::{StepDifference, StepRecord, StepStage, layers};
use trainer::mesh::Mesh;
use trainer::mesh::axes::Axis;
use trainer::mesh::team::parts;
use trainer::replay::{Replayed, ReplayedBatch, Replayer, Verdict};
use trainer::state::State;
use trainer::state::ownership::Ownership;

use super::hit::{self, CorruptedElement};
use super::ranks::{Ranks, ranks_at};

/// The differences between a ledger line and the recomputed step.
#[derive(Clone, Debug, Serialize)]
pub struct LocatedDifference {
    /// The first quantity that differs, in the order in which a step computes them.
    pub first: StepDifference,
    /// Micro-batches whose loss differs.
    pub losses: Vec<usize>,
    /// Micro-batches whose loss is the same and whose gradient differs.
    pub gradients: Vec<usize>,
    /// Parameters whose summed gradient differs, by name.
    pub summed: Vec<String>,
    /// Parameters whose new weights differ, by name.
    pub weights: Vec<String>,
    /// The number of ranks that trained the step; `None` if events.jsonl does not say.
    pub ranks: Option<u32>,
    /// The rank that computed or owned all that differs first, if it is a single one.
    pub rank: Option<u32>,
    /// The element that was hit, if a checkpoint of the run shows it.
    pub hit: Option<CorruptedElement>,
    /// The conclusion, for people.
    pub words: String,
}

/// Narrows down the difference between the run and its replay from `before` to `after`, if both have a record.
pub(super) fn narrow(
    replayer: &Replayer,
    again: &ReplayedBatch,
    before: &State,
    after: &State,
) -> Result<Option<LocatedDifference>> {
    let ReplayedBatch { replayed: Replayed { difference, record, verdict, .. }, batch, .. } = again;
    let (Some(first), Some(record)) = (difference, record) else { return Ok(None) };
    let (spec, ledger) = (replayer.spec(), replayer.ledger());
    let written = ledger.record(record.step)?;
    let ranks = ranks_at(&replayer.folder().events(), record.step);
    let pieces = ranks.map(|ranks| Ownership::new(spec, 0, ranks.world));
    let cut = spec.model_at(record.step)?.cut;
    let mesh = ranks.map(|ranks| Mesh::of(ranks.world, ranks.degrees, cut));
    let parameters = &ledger.head().parameters;
    let parts = WorkAssignment { parameters, ranks, mesh, owners: pieces.as_ref() };
    let mut found = located(first, &written, record, parts);
    let (alone, hit) = (replayer.world().comm.world() == 1, *verdict == Verdict::RunHit);
    if alone && hit && matches!(first.stage, StepStage::Forward | StepStage::Update) {
        let (stage, losses, ranks) = (first.stage, &*found.losses, found.ranks);
        let written = &written;
        let from = hit::CorruptionEvidence { stage, losses, ranks, written, before, after, batch };
        // A checkpoint that cannot be read does not invalidate the rest.
        let (hit, words) = hit::find(replayer, from, pieces.as_ref()).unwrap_or_else(|fault| {
            let why = fault.to_string().replace('\n', "; ");
            (None, format!("no checkpoint behind it could be looked at: {why}"))
        });
        found.words = format!("{}; {words}", found.words);
        if let (None, Some(hit)) = (found.rank, &hit) {
            found.rank = hit.owner;
        }
        found.hit = hit;
    }
    Ok(Some(found))
}

/// The assignment of a step's work to ranks.
#[derive(Clone, Copy)]
struct WorkAssignment<'a> {
    parameters: &'a [String],
    ranks: Option<Ranks>,
    /// Their mesh.
    mesh: Option<Mesh>,
    owners: Option<&'a Ownership>,
}

/// Narrows a difference down by the checksums of both sides.
fn located(
    first: &StepDifference,
    written: &StepRecord,
    again: &StepRecord,
    parts: WorkAssignment<'_>,
) -> LocatedDifference {
    let parameters = parts.parameters;
    let named = |indices: &[usize]| -> Vec<String> {
        let name = |index: &usize| parameters.get(*index).cloned().unwrap_or_default();
        indices.iter().map(name).collect()
    };
    let losses = differ(&written.micro_batch_losses.0, &again.micro_batch_losses.0);
    let mut gradients =
        differ(&written.micro_batch_grad_checksums.0, &again.micro_batch_grad_checksums.0);
    gradients.retain(|micro_batch| !losses.contains(micro_batch));
    let sums = differ(&written.grad_checksums.0, &again.grad_checksums.0);
    let moved = differ(&written.weight_checksums.0, &again.weight_checksums.0);
    let (summed, weights) = (named(&sums), named(&moved));
    let micro_batches = written.micro_batches();
    let (rank, whose) = match first.stage {
        StepStage::Data => (None, String::new()),
        StepStage::Forward => parts.computed(&losses, micro_batches),
        StepStage::Backward => parts.computed(&gradients, micro_batches),
        StepStage::Sum => parts.owned(&sums),
        StepStage::Update => parts.owned(&moved),
    };
    let words = match first.stage {
        StepStage::Data => format!("the run read other text: {}", first.quantity),
        StepStage::Forward if losses.len() == micro_batches => {
            "every micro-batch had another loss: a weight or a balancing bias changed in memory after the step \
             before was recorded"
                .to_owned()
        }
        StepStage::Forward if losses.is_empty() => format!("{} differs, and no loss does", first.quantity),
        StepStage::Forward => format!(
            "only {} had another loss: the forward pass there, or one rank's copy of the weights",
            numbered(&losses)
        ),
        StepStage::Backward => format!("the backward pass of {} came out otherwise", numbered(&gradients)),
        StepStage::Sum if summed.is_empty() => format!("the gradients agree, and the {} does not", first.quantity),
        StepStage::Sum => format!(
            "every micro-batch agrees, the sum does not: {} ({})",
            listed(&summed),
            of_layers(&summed, parameters)
        ),
        StepStage::Update if weights.is_empty() => {
            format!("weights agree, and the {} does not: moments, balancing biases or windows", first.quantity)
        }
        StepStage::Update => format!(
            "the gradients agree, new weights do not: {} ({})",
            listed(&weights),
            of_layers(&weights, parameters)
        ),
    };
    let words = format!("{words}{whose}{}", routers(first.stage, written, again));
    let ranks = parts.ranks.map(|ranks| ranks.world);
    LocatedDifference {
        first: first.clone(),
        losses,
        gradients,
        summed,
        weights,
        ranks,
        rank,
        hit: None,
        words,
    }
}

/// The indices at which two lists differ.
fn differ(left: &[u64], right: &[u64]) -> Vec<usize> {
    let pairs = left.iter().zip(right).enumerate();
    pairs.filter(|(_, (left, right))| left != right).map(|(index, _)| index).collect()
}

impl WorkAssignment<'_> {
    /// The rank that computed these of `micro_batches` micro-batches, and a description. Of ranks that shared them none
    /// is named, since a ledger does not record chunks.
    fn computed(self, differing: &[usize], micro_batches: usize) -> (Option<u32>, String) {
        let (Some(Ranks { world, grad_reduce, .. }), Some(mesh)) = (self.ranks, self.mesh) else {
            return (None, unknown());
        };
        let parts = parts(grad_reduce, mesh.dp, micro_batches as u64).unwrap_or_default();
        let of = |rank: u32| -> Vec<usize> {
            let own = parts.get(mesh.place(Axis::Dp, rank) as usize);
            own.into_iter()
                .flatten()
                .cloned()
                .flatten()
                .map(|micro_batch| micro_batch as usize)
                .collect()
        };
        let has = |rank: &u32| differing.iter().all(|micro_batch| of(*rank).contains(micro_batch));
        let found: Vec<u32> = (0..world).filter(has).collect();
        let Some(own) = found.first().map(|rank| of(*rank)) else {
            return (None, format!("; several of {world} ranks computed them"));
        };
        let (alone, subject) = match found.as_slice() {
            [rank] => (Some(*rank), format!("rank {rank} of {world} computed")),
            several => {
                let several: Vec<String> = several.iter().map(u32::to_string).collect();
                (None, format!("ranks {} of {world} shared", joined(&several)))
            }
        };
        match own.len() == differing.len() {
            _ if world == 1 || differing.is_empty() => (None, String::new()),
            true => (alone, format!("; {subject} {}, and no other", numbered(&own))),
            false => (alone, format!("; {subject} it, as {} in all", numbered(&own))),
        }
    }

    /// The rank that owned these parameters, and a description.
    fn owned(self, tensors: &[usize]) -> (Option<u32>, String) {
        let (Some(owners), Some(Ranks { world, .. })) = (self.owners, self.ranks) else {
            return (None, unknown());
        };
        let pieces = owners.pieces().iter().filter(|piece| tensors.contains(&piece.tensor));
        let mut ranks: Vec<u32> = pieces.map(|piece| piece.owner).collect();
        ranks.sort_unstable();
        ranks.dedup();
        match ranks.as_slice() {
            _ if world == 1 => (None, String::new()),
            [] => (None, String::new()),
            [rank] => (Some(*rank), format!("; rank {rank} of {world} owned that")),
            several => {
                let several: Vec<String> = several.iter().map(u32::to_string).collect();
                (None, format!("; ranks {} of {world} owned parts of that", joined(&several)))
            }
        }
    }
}

fn unknown() -> String {
    "; events.jsonl does not say which ranks computed it".to_owned()
}

/// The first layer with different router counts: the hit is in it or before.
fn routers(stage: StepStage, written: &StepRecord, again: &StepRecord) -> String {
    let mut layers = written.tokens_per_expert.iter().zip(&again.tokens_per_expert);
    match layers.position(|(left, right)| left != right).filter(|_| stage == StepStage::Forward) {
        Some(layer) => {
            format!(
                "; routers differ from layer {layer} on, so what was hit is the embedding or in layers 0 to {layer}"
            )
        }
        None => String::new(),
    }
}

/// "micro-batch 3", "micro-batches 1 and 4".
fn numbered(micro_batches: &[usize]) -> String {
    let numbers: Vec<String> = micro_batches.iter().map(usize::to_string).collect();
    let word = if numbers.len() == 1 { "micro-batch" } else { "micro-batches" };
    format!("{word} {}", joined(&numbers))
}

/// Up to three names.
fn listed(names: &[String]) -> String {
    match names {
        [first, second, third, rest @ ..] if !rest.is_empty() => {
            format!("{first}, {second}, {third} and {} more", rest.len())
        }
        _ => joined(names),
    }
}

/// "a, b and c".
pub fn joined(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [word] => word.clone(),
        [words @ .., last] => format!("{} and {last}", words.join(", ")),
    }
}

/// The layers of the parameters with these names.
fn of_layers(names: &[String], parameters: &[String]) -> String {
    let has = |range: &std::ops::Range<usize>| {
        parameters[range.clone()].iter().any(|parameter| names.contains(parameter))
    };
    let found = layers(parameters).into_iter().filter(|layer| has(&layer.parameters));
    listed(&found.map(|layer| layer.name).collect::<Vec<_>>())
}
