//! Where the bits of a recorded step part from those of its replay: which micro-batches, which parameters, which layers.

use serde::Serialize;

use crate::ledger::{Difference, Stage, StepRecord, layers};

/// What differs between a ledger line and the same step computed again.
#[derive(Clone, Debug, Serialize)]
pub struct Narrowed {
    /// The first quantity that differs, in the order in which a step computes them.
    pub first: Difference,
    /// Micro-batches whose loss differs.
    pub losses: Vec<usize>,
    /// Micro-batches whose loss is the same and whose gradient differs.
    pub gradients: Vec<usize>,
    /// Parameters whose summed gradient differs, by name.
    pub summed: Vec<String>,
    /// Parameters whose new weights differ, by name.
    pub weights: Vec<String>,
    /// What that means, for people.
    pub words: String,
}

/// Narrows a difference down by the checksums of both sides.
pub(super) fn narrow(
    first: &Difference,
    written: &StepRecord,
    again: &StepRecord,
    parameters: &[String],
) -> Narrowed {
    let differ = |left: &[u64], right: &[u64]| -> Vec<usize> {
        let pairs = left.iter().zip(right).enumerate();
        pairs.filter(|(_, (left, right))| left != right).map(|(index, _)| index).collect()
    };
    let named = |indices: Vec<usize>| -> Vec<String> {
        let name = |index: usize| parameters.get(index).cloned().unwrap_or_default();
        indices.into_iter().map(name).collect()
    };
    let losses = differ(&written.leaf_losses.0, &again.leaf_losses.0);
    let mut gradients = differ(&written.leaf_gradients.0, &again.leaf_gradients.0);
    gradients.retain(|leaf| !losses.contains(leaf));
    let summed = named(differ(&written.gradients.0, &again.gradients.0));
    let weights = named(differ(&written.weights.0, &again.weights.0));
    let leaves = written.leaves();
    let words = match first.stage {
        Stage::Data => format!("the run read other text: {}", first.quantity),
        Stage::Forward if losses.len() == leaves => {
            "every micro-batch had another loss: a weight or a balancing bias changed in memory after the step \
             before was recorded"
                .to_owned()
        }
        Stage::Forward if losses.is_empty() => format!("{} differs, and no loss does", first.quantity),
        Stage::Forward => format!(
            "only {} had another loss: the forward pass there, or one rank's copy of the weights",
            numbered(&losses)
        ),
        Stage::Backward => format!("the backward pass of {} came out otherwise", numbered(&gradients)),
        Stage::Sum if summed.is_empty() => format!("the gradients agree, and the {} does not", first.quantity),
        Stage::Sum => format!(
            "every micro-batch agrees, the sum does not: {} ({})",
            listed(&summed),
            of_layers(&summed, parameters)
        ),
        Stage::Update if weights.is_empty() => {
            format!("weights agree, and the {} does not: moments, balancing biases or windows", first.quantity)
        }
        Stage::Update => format!(
            "the gradients agree, new weights do not: {} ({})",
            listed(&weights),
            of_layers(&weights, parameters)
        ),
    };
    Narrowed { first: first.clone(), losses, gradients, summed, weights, words }
}

/// "micro-batch 3", "micro-batches 1 and 4".
fn numbered(leaves: &[usize]) -> String {
    let numbers: Vec<String> = leaves.iter().map(usize::to_string).collect();
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
pub(super) fn joined(words: &[String]) -> String {
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
