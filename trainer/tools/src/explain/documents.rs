//! The documents of a step, each with its share of the loss and of the gradient.
//!
//! ```text
//! g_d      gradient of (sum of weighted token losses of document d) / D, D the labels of the step
//! G        the step's gradient, which is the sum of all g_d
//! share    <g_d, G> / |G|^2: what d has in the step's gradient; over all documents they add up to 1
//! excess   loss of d, minus what as many labels of its source cost in the steps before
//! ```
//!
//! Documents do not attend to each other, so `g_d` needs only d's own rows: one forward and one backward pass over its
//! tokens. Each tensor's gradient is reduced to its sum of squares and its dot product with the step's as soon as a
//! layer emits it, and then dropped, so that a second gradient of all weights is never stored.

use std::ops::Range;

use contract::Result;
use kernels::addend::Addend;
use kernels::device::Stager;
use kernels::ops::OpsTable;
use kernels::share::SharedTensors;
use kernels::tree;
use loader::Batch;
use serde::Serialize;
use tch::Tensor;

use crate::replay::documents::{DocumentLoss, DocumentPlace};
use trainer::model::{self, GradientSink, MicroBatchInput, ParamId};
use trainer::optim::norm;
use trainer::refusal::refused;
use trainer::spec::RunSpec;
use trainer::state::State;
use trainer::state::ownership::ParamShard;
use trainer::step::{FrozenModel, Weights, rows};
use trainer::workers::Workers;

/// A document's contribution to the gradient of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DocumentGradient {
    /// The sum of squares of its own gradient.
    pub squares: f64,
    /// Its dot product with the step's gradient.
    pub dot: f64,
}

/// A document of the step, with the evidence against it.
#[derive(Clone, Debug, Serialize)]
pub struct DocumentEvidence {
    /// Its origin and its loss.
    #[serde(flatten)]
    pub document: DocumentLoss,
    /// Its loss, minus what as many labels of its source cost in the steps before, in nats.
    pub excess: f64,
    /// The norm of its gradient.
    pub gradient_norm: f64,
    /// The cosine of its gradient and the step's.
    pub alignment: f64,
    /// Its share of the step's gradient: the dot product of both, divided by the square of the step's. They sum to 1.
    pub gradient_share: f64,
    /// The ranking key: its share of all documents' absolute excess losses plus its share of the squares of all
    /// documents' gradients. They sum to 2.
    pub score: f64,
}

/// The gradient of a step in pieces, in canonical order, all on one rank.
#[derive(Clone, Copy)]
pub(super) struct StepGradient<'a> {
    pub(super) pieces: &'a [ParamShard],
    pub(super) own: &'a [Tensor],
}

/// Reduces each gradient to its sum of squares and its dot product with the step's.
struct GradientComparison<'a> {
    ops: OpsTable,
    pieces: &'a [ParamShard],
    step: &'a [Tensor],
    squares: Vec<f64>,
    dots: Vec<f64>,
}

impl GradientSink for GradientComparison<'_> {
    fn gradient(&mut self, id: ParamId, gradient: Addend) -> Result<()> {
        let (index, gradient) = (id.index(), gradient.wide().map_err(refused)?);
        self.squares[index] = norm::squares(self.ops, &gradient)?;
        if self.squares[index] == 0.0 {
            // Usually experts to which no token of the document was routed.
            return Ok(());
        }
        let of_tensor = self.pieces.iter().zip(self.step);
        let of_tensor = of_tensor.filter(|(piece, _)| piece.tensor == index);
        let products = of_tensor.map(|(piece, step)| product(&piece.of(&gradient), step));
        let products = products.collect::<std::result::Result<Vec<_>, _>>().map_err(refused)?;
        self.dots[index] = tree::total(products);
        Ok(())
    }
}

/// The dot product of two tensors: in f32 by chunk, summed in f64, without a third tensor.
fn product(one: &Tensor, other: &Tensor) -> std::result::Result<f64, tch::TchError> {
    let (one, other) = (one.f_reshape([-1])?, other.f_reshape([-1])?);
    let (length, mut sum) = (one.size()[0], 0.0);
    for start in (0..length).step_by(norm::CHUNK as usize) {
        let size = norm::CHUNK.min(length - start);
        let chunk = one.f_narrow(0, start, size)?.f_dot(&other.f_narrow(0, start, size)?)?;
        sum += chunk.f_double_value(&[])?;
    }
    Ok(sum)
}

/// The spans of one document by themselves, padded to the longest.
struct Isolated {
    tokens: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    mask: Vec<u8>,
    boundaries: Vec<Vec<u32>>,
    weights: Vec<f32>,
    seq_len: usize,
}

impl Isolated {
    /// The spans between the boundaries around the `places` of a document, with only its labels counted. Where the
    /// model lets documents attend to each other, a span is the whole row.
    fn of(
        batch: &MicroBatchInput<'_>,
        places: &[DocumentPlace],
        documents_apart: bool,
    ) -> Isolated {
        let around = |place: &DocumentPlace| match documents_apart {
            true => {
                around(&batch.boundaries[place.row as usize], &place.columns, batch.seq_len as u32)
            }
            false => 0..batch.seq_len as u32,
        };
        let spans: Vec<Range<u32>> = places.iter().map(around).collect();
        let seq_len = spans.iter().map(Range::len).max().unwrap_or(0);
        let mut all = Isolated {
            tokens: Vec::new(),
            labels: Vec::new(),
            positions: Vec::new(),
            mask: Vec::new(),
            boundaries: Vec::new(),
            weights: Vec::new(),
            seq_len,
        };
        for (place, span) in places.iter().zip(spans) {
            all.push(batch, place, span);
        }
        all
    }

    fn push(&mut self, batch: &MicroBatchInput<'_>, place: &DocumentPlace, span: Range<u32>) {
        let row = place.row as usize;
        let first = row * batch.seq_len;
        let columns = first + span.start as usize..first + span.end as usize;
        let whole = self.tokens.len() + self.seq_len;
        self.tokens.extend(&batch.tokens[columns.clone()]);
        self.labels.extend(&batch.labels[columns.clone()]);
        self.positions.extend(&batch.positions[columns.clone()]);
        let masked = span.clone().zip(&batch.mask[columns]);
        let masked = masked.map(|(at, mask)| *mask * u8::from(place.columns.contains(&at)));
        self.mask.extend(masked);
        let inside = batch.boundaries[row].iter().filter(|at| span.contains(at));
        let mut boundaries: Vec<u32> = inside.map(|at| at - span.start).collect();
        // Padding is a document of its own without labels, as in training.
        let padding = self.tokens.len()..whole;
        if !padding.is_empty() {
            boundaries.push(span.len() as u32);
        }
        self.boundaries.push(boundaries);
        self.weights.extend(batch.weights.get(row));
        self.positions.extend((0..).take(padding.len()));
        for column in [&mut self.tokens, &mut self.labels] {
            column.resize(whole, 0);
        }
        self.mask.resize(whole, 0);
    }

    fn input(&self) -> MicroBatchInput<'_> {
        let Isolated { tokens, labels, positions, mask, boundaries, weights, seq_len } = self;
        let (rows, seq_len) = (boundaries.len(), *seq_len);
        MicroBatchInput { tokens, labels, positions, mask, boundaries, weights, rows, seq_len }
    }
}

/// From the last boundary at or before the start of `place` to the first at or after its end.
fn around(boundaries: &[u32], place: &Range<u32>, seq_len: u32) -> Range<u32> {
    let from = boundaries.iter().rev().find(|at| **at <= place.start).copied().unwrap_or(0);
    let to = boundaries.iter().find(|at| **at >= place.end).copied().unwrap_or(seq_len);
    from..to
}

/// The gradient of each of `documents` compared with the step's, and the number of tokens computed for them.
pub(super) fn gradients(
    spec: &RunSpec,
    state: &State,
    batch: &Batch,
    documents: &[DocumentLoss],
    step: StepGradient<'_>,
    workers: Workers,
) -> Result<(Vec<DocumentGradient>, u64)> {
    let model = FrozenModel::at(spec, batch.step, state, workers)?;
    let (shared, config) = (SharedTensors::new(step.own), model.config());
    let whole = rows(batch, 0..batch.rows);
    let label_count = batch.label_count.max(1);
    let work = |document: &DocumentLoss, Weights { weights, biases }: Weights<'_>| {
        if document.labels == 0 {
            return Ok((DocumentGradient::default(), 0));
        }
        let shared = shared.aliases();
        let mut sink = GradientComparison {
            ops: workers.ops(),
            pieces: step.pieces,
            step: &shared,
            squares: vec![0.0; weights.len()],
            dots: vec![0.0; weights.len()],
        };
        let stager = Stager::kept(model.device()).map_err(refused)?;
        let alone = Isolated::of(&whole, &document.places, config.document_mask);
        let staged = alone.input().stage(config, &stager)?;
        let how = workers.options();
        model::micro_batch(config, weights, biases, staged, label_count, how, &mut sink)?;
        let tokens = alone.tokens.len() as u64;
        let (squares, dot) = (norm::sum(&sink.squares), norm::sum(&sink.dots));
        Ok((DocumentGradient { squares, dot }, tokens))
    };
    let found = workers.map(documents.iter().collect(), |document| {
        let place = || format!("step {}, document {:?}", batch.step, document.id);
        model.read(|weights| work(document, weights), place)
    })?;
    let (gradients, tokens): (Vec<_>, Vec<u64>) = found.into_iter().unzip();
    Ok((gradients, tokens.into_iter().sum()))
}

/// Sorts documents, worst first. `cost` is what a label of a source cost before; `squares` is the sum of squares of the
/// step's gradient.
pub(super) fn rank(
    documents: Vec<DocumentLoss>,
    gradients: &[DocumentGradient],
    cost: impl Fn(&str) -> f64,
    squares: f64,
) -> Vec<DocumentEvidence> {
    let excess =
        |document: &DocumentLoss| document.loss - document.labels as f64 * cost(&document.source);
    let odd: f64 = documents.iter().map(|document| finite(excess(document).abs())).sum();
    let all: f64 = gradients.iter().map(|gradient| finite(gradient.squares)).sum();
    let part = |value: f64, of: f64| match value.is_finite() {
        true => {
            if of > 0.0 {
                value / of
            } else {
                0.0
            }
        }
        // A score that is not finite is the worst.
        false => f64::INFINITY,
    };
    let evidence = |(document, gradient): (DocumentLoss, &DocumentGradient)| {
        let excess = excess(&document);
        let gradient_norm = gradient.squares.sqrt();
        let lengths = gradient_norm * squares.sqrt();
        DocumentEvidence {
            excess,
            gradient_norm,
            alignment: if lengths > 0.0 { gradient.dot / lengths } else { 0.0 },
            gradient_share: if squares > 0.0 { gradient.dot / squares } else { 0.0 },
            score: part(excess.abs(), odd) + part(gradient.squares, all),
            document,
        }
    };
    let mut ranked: Vec<_> = documents.into_iter().zip(gradients).map(evidence).collect();
    ranked.sort_by(|a, b| b.score.total_cmp(&a.score));
    ranked
}

fn finite(value: f64) -> f64 {
    if value.is_finite() { value } else { 0.0 }
}

/// How many of the first documents stand out: those before the widest gap in score, if they have at least a quarter of
/// the total; at most `most`, and at most half of all.
pub(super) fn culprits(ranked: &[DocumentEvidence], most: usize) -> usize {
    let wild = ranked.iter().take_while(|one| one.score.is_infinite()).count();
    if wild > 0 {
        return wild.min(most);
    }
    let most = most.min(ranked.len() / 2);
    let gap = |count: usize| ranked[count - 1].score / ranked[count].score.max(f64::MIN_POSITIVE);
    let widest = (1..=most).max_by(|a, b| gap(*a).total_cmp(&gap(*b)).then(b.cmp(a)));
    let of_them = |count: usize| ranked[..count].iter().map(|one| one.score).sum::<f64>();
    widest.filter(|count| gap(*count) >= GAP && of_them(*count) >= 0.5).unwrap_or(0)
}

/// The minimum ratio of scores that counts as a gap.
const GAP: f64 = 2.0;

#[cfg(test)]
#[path = "documents_tests.rs"]
mod tests;
