//! Attributes a later loss to the documents of a step: retrains a window of steps without single documents and subsets,
//! and compares with a first-order prediction from gradients.
//!
//! ```text
//! window    steps A .. B - 1, computed from the true state before A with the data, rates and optimizer of the run
//! target    mean loss of the batch of step B, as the run reads it, with the state after the window (not trained on it)
//! actual    target without some documents of step A, minus target with all; they are masked in the whole window
//! predicted -lr <grad target, (sum of g - sum of g_d) / (D - sum of n_d) - sum of g / D>: step A by plain SGD
//!           g_d, n_d, D: gradient of a document's summed loss and its labels in step A, labels of the step;
//!           grad target at the state after the window, g_d at the state before it
//! dot       +lr <grad target, sum of g_d> / D, both gradients at the state before A: as methods with one checkpoint do
//! LDS       Spearman's rank correlation of actual and predicted over random subsets of half of the documents; also of
//!           actual and dot
//! ```

use std::ops::Range;

use crate::change::DocumentsBySource;
use contract::{Fault, Key, Purpose, Result, draw};
use curriculum::Amendment;
use loader::{Batch, explain};
use serde::Serialize;
use tch::{Kind, Tensor};
use trainer::replay::Replayer;
use trainer::state::State;
use trainer::waiting::WaitCounter;

use super::whatif::each_piece;

/// How much to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributionOptions {
    /// Number of documents of the window's first step, those with most labels first.
    pub documents: usize,
    /// Number of random subsets for the LDS.
    pub subsets: u64,
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub struct Attribution {
    /// The first step of the window.
    pub first: u64,
    /// The step whose batch is the target; the window ends before it.
    pub target: u64,
    /// The target with all documents.
    pub loss: f64,
    /// The predicted change of the target by the first step as a whole.
    pub predicted_step: f64,
    /// The documents, sorted by the effect of leaving them out: those that raised the target most first.
    pub documents: Vec<DocumentAttribution>,
    /// The subsets.
    pub subsets: Vec<Subset>,
    /// Spearman's rank correlation over the subsets; `None` for less than two, or where one side does not vary.
    pub lds: Option<f64>,
    /// The same for the dot products of gradients at the state before the window.
    pub lds_dot: Option<f64>,
}

/// One document left out by itself.
#[derive(Clone, Debug, Serialize)]
pub struct DocumentAttribution {
    /// Its source.
    pub source: String,
    /// Its id.
    pub id: String,
    /// Its number in the source's training stream.
    pub document: u64,
    /// Its labels in the window's first step.
    pub labels: u64,
    /// The change of the target without it, by retraining the window.
    pub actual: f64,
    /// The same by the prediction.
    pub predicted: f64,
    /// The same by the dot product of gradients at the state before the window.
    pub dot: f64,
}

/// Some documents left out together.
#[derive(Clone, Debug, Serialize)]
pub struct Subset {
    /// Ids of the documents left out.
    pub dropped: Vec<String>,
    /// The change of the target without them, by retraining the window.
    pub actual: f64,
    /// The same by the prediction.
    pub predicted: f64,
    /// The same by the dot product of gradients at the state before the window.
    pub dot: f64,
}

/// A document of the first step.
struct Candidate {
    source: String,
    document: u64,
    id: String,
    labels: u64,
    /// Dot product of the target's gradient with that of its summed loss.
    product: f64,
    /// The same with the target's gradient at the state before the window.
    before: f64,
}

/// Attributes the loss of step `window.end` to documents of step `window.start`.
pub fn attribute(
    replayer: &mut Replayer,
    window: Range<u64>,
    effort: AttributionOptions,
) -> Result<Attribution> {
    replayer.refuse_ranks("an attribution")?;
    let steps = replayer.spec().plan.steps();
    if window.end > steps {
        return Err(Fault::usage(
            "the target is the step after the window, and the curriculum has none",
        )
        .at("--steps")
        .wanted(format!("A..B with B at most {steps}")));
    }
    let batch = replayer.batch(window.start)?;
    let next = target(replayer, window.end)?;
    let mut candidates = candidates(replayer, &batch, effort.documents)?;
    let before = replayer.state_after(window.start - 1)?;
    let runs = 1 + candidates.len() as u64 + effort.subsets;
    let mut waiting = WaitCounter::new("windows computed anew", runs);
    let mut ending = |dropped: &[&Candidate]| {
        let state = trained(replayer, &before, window.clone(), dropped)?;
        waiting.one();
        Ok::<State, Fault>(state)
    };
    let end = ending(&[])?;
    let (loss, slope) = loss_and_gradient(replayer, &end, &next)?;
    let (_, early) = loss_and_gradient(replayer, &before, &next)?;
    let lr = replayer.spec().settings_at(window.start).schedule.rate(window.start);
    let all = gradient(replayer, &before, &batch)?;
    let product = product(&slope, &all)? * batch.label_count as f64;
    let whole = WholeStep { lr, labels: batch.label_count, product };
    for candidate in &mut candidates {
        let alone = own_gradient(replayer, &before, &batch, candidate)?;
        candidate.product = alone.product(&slope)?;
        candidate.before = alone.product(&early)?;
    }
    let mut without = |dropped: &[&Candidate]| {
        let end = ending(dropped)?;
        let actual = loss_and_gradient(replayer, &end, &next)?.0 - loss;
        Ok::<_, Fault>((actual, whole.predicted(dropped), whole.dot(dropped)))
    };
    let mut documents = Vec::new();
    for candidate in &candidates {
        let (actual, predicted, dot) = without(&[candidate])?;
        let Candidate { source, document, id, labels, .. } = candidate;
        let (source, id) = (source.clone(), id.clone());
        documents.push(DocumentAttribution {
            source,
            id,
            document: *document,
            labels: *labels,
            actual,
            predicted,
            dot,
        });
    }
    documents.sort_by(|a, b| a.actual.total_cmp(&b.actual));
    let mut subsets = Vec::new();
    for number in 0..effort.subsets {
        let dropped = half(&candidates, replayer.spec().curriculum.seed, number);
        let (actual, predicted, dot) = without(&dropped)?;
        let dropped = dropped.iter().map(|candidate| candidate.id.clone()).collect();
        subsets.push(Subset { dropped, actual, predicted, dot });
    }
    let (lds, lds_dot) = correlations(&subsets);
    let predicted_step = -whole.lr * whole.product / whole.labels.max(1) as f64;
    let (first, target) = (window.start, window.end);
    Ok(Attribution { first, target, loss, predicted_step, documents, subsets, lds, lds_dot })
}

/// The LDS of the prediction, and that of the dot products of gradients.
fn correlations(subsets: &[Subset]) -> (Option<f64>, Option<f64>) {
    let of: [fn(&Subset) -> f64; 3] =
        [|subset| subset.actual, |subset| subset.predicted, |subset| subset.dot];
    let [actual, predicted, dot] = of.map(|of| subsets.iter().map(of).collect::<Vec<f64>>());
    (spearman(&actual, &predicted), spearman(&actual, &dot))
}

/// The gradient of a document's mean loss, and its labels.
struct DocumentMeanGradient {
    mean: Vec<Tensor>,
    labels: u64,
}

impl DocumentMeanGradient {
    /// The dot product of the gradient of its summed loss with another gradient.
    fn product(&self, slope: &[Tensor]) -> Result<f64> {
        Ok(product(slope, &self.mean)? * self.labels as f64)
    }
}

/// The gradient of a document in `batch`, at the state before it.
fn own_gradient(
    replayer: &Replayer,
    before: &State,
    batch: &Batch,
    candidate: &Candidate,
) -> Result<DocumentMeanGradient> {
    let alone = alone(replayer, batch, candidate)?;
    Ok(DocumentMeanGradient {
        mean: gradient(replayer, before, &alone)?,
        labels: alone.label_count,
    })
}

/// The first step as a whole, for the prediction.
struct WholeStep {
    lr: f64,
    labels: u64,
    /// Dot product of the target's gradient with that of the step's summed loss.
    product: f64,
}

impl WholeStep {
    /// The predicted change of the target without these documents.
    fn predicted(&self, dropped: &[&Candidate]) -> f64 {
        let rest = self.product - dropped.iter().map(|document| document.product).sum::<f64>();
        let labels = self.labels - dropped.iter().map(|document| document.labels).sum::<u64>();
        -self.lr * (rest / labels.max(1) as f64 - self.product / self.labels.max(1) as f64)
    }

    /// The same by the dot products of gradients at the state before the window.
    fn dot(&self, dropped: &[&Candidate]) -> f64 {
        let sum = dropped.iter().map(|document| document.before).sum::<f64>();
        self.lr * sum / self.labels.max(1) as f64
    }
}

/// The documents of a batch with most labels.
fn candidates(replayer: &Replayer, batch: &Batch, most: usize) -> Result<Vec<Candidate>> {
    let mut found: Vec<Candidate> = Vec::new();
    each_piece(replayer, batch, |source, piece, labels| {
        let name = &replayer.spec().plan.sources()[source].name;
        let known = found
            .iter_mut()
            .find(|candidate| candidate.document == piece.document && candidate.source == *name);
        match known {
            Some(candidate) => candidate.labels += labels,
            None => found.push(Candidate {
                source: name.clone(),
                document: piece.document,
                id: piece.record.shown_id().into_owned(),
                labels,
                product: 0.0,
                before: 0.0,
            }),
        }
    })?;
    found.retain(|candidate| candidate.labels > 0);
    found.sort_by_key(|candidate| std::cmp::Reverse(candidate.labels));
    found.truncate(most);
    Ok(found)
}

/// The state after the window, trained without some documents.
fn trained(
    replayer: &Replayer,
    before: &State,
    window: Range<u64>,
    dropped: &[&Candidate],
) -> Result<State> {
    let mut curriculum = replayer.spec().curriculum.clone();
    let mut ban = DocumentsBySource::new();
    for document in dropped {
        ban.entry(document.source.clone()).or_default().insert(document.document);
    }
    curriculum.amend(vec![Amendment { step: window.start, ban, ..Amendment::default() }]);
    let (mut changed, mut state) = (replayer.changed(&curriculum, window.start)?, before.copy()?);
    let last = window.end - 1;
    let diverged = replayer.advance_to(&mut state, last, Some(&mut changed), |_| Ok(true))?;
    diverged.map_or(Ok(state), Err)
}

/// The step whose mean loss is the target, without the weights by which it would train.
fn target(replayer: &Replayer, step: u64) -> Result<Batch> {
    let mut batch = replayer.batch(step)?;
    batch.weights.clear();
    Ok(batch)
}

/// Mean loss of a batch, and its gradient.
fn loss_and_gradient(
    replayer: &Replayer,
    state: &State,
    batch: &Batch,
) -> Result<(f64, Vec<Tensor>)> {
    let gradient = replayer.gradient(state, batch)?;
    Ok((gradient.mean(), gradient.own))
}

fn gradient(replayer: &Replayer, state: &State, batch: &Batch) -> Result<Vec<Tensor>> {
    loss_and_gradient(replayer, state, batch).map(|(_, gradient)| gradient)
}

/// A batch in which only one document has labels. The other tokens stay, for models where documents attend to each
/// other.
fn alone(replayer: &Replayer, batch: &Batch, candidate: &Candidate) -> Result<Batch> {
    let spec = replayer.spec();
    let apart = spec.model_at(batch.step)?.config.document_mask;
    let mut alone = replayer.batch(batch.step)?;
    let rows = explain::pieces(&spec.plan, &spec.data, &batch.samples)?;
    for ((row, sample), pieces) in (0..).zip(&batch.samples).zip(&rows) {
        let is_it = spec.plan.sources()[sample.source].name == candidate.source;
        for piece in pieces.iter().filter(|piece| !is_it || piece.document != candidate.document) {
            match apart {
                true => alone.hide(row, piece.place.clone())?,
                false => alone.unlabel(row, piece.place.clone())?,
            };
        }
    }
    Ok(alone)
}

/// The dot product of two gradients, tensor by tensor in f64.
fn product(left: &[Tensor], right: &[Tensor]) -> Result<f64> {
    let dot = |(left, right): (&Tensor, &Tensor)| {
        let product = left.f_mul(right).and_then(|product| product.f_sum(Kind::Double));
        let value = product.and_then(|sum| f64::try_from(&sum));
        value.map_err(|error| Fault::bug(format!("two gradients have no product: {error}")))
    };
    left.iter().zip(right).map(dot).sum()
}

/// A random half of the documents: those with the smallest random numbers.
fn half(candidates: &[Candidate], seed: u64, number: u64) -> Vec<&Candidate> {
    let key = Key::from_seed(seed).child("attribution").nth(number);
    let mut drawn: Vec<(u64, &Candidate)> = candidates
        .iter()
        .enumerate()
        .map(|(index, candidate)| (draw(key, Purpose::Generate, index as u64), candidate))
        .collect();
    drawn.sort_by_key(|(draw, _)| *draw);
    drawn.into_iter().take(candidates.len() / 2).map(|(_, candidate)| candidate).collect()
}

/// Spearman's rank correlation: Pearson's of the ranks, equal values sharing the mean of theirs. `None` where a side is
/// constant.
fn spearman(left: &[f64], right: &[f64]) -> Option<f64> {
    let (left, right) = (ranks(left), ranks(right));
    let mean = (left.len() as f64 + 1.0) / 2.0;
    let sum = |a: &[f64], b: &[f64]| -> f64 {
        a.iter().zip(b).map(|(a, b)| (a - mean) * (b - mean)).sum()
    };
    let spread = (sum(&left, &left) * sum(&right, &right)).sqrt();
    (spread > 0.0).then(|| sum(&left, &right) / spread)
}

/// The rank of each value, from 1.
fn ranks(values: &[f64]) -> Vec<f64> {
    let rank = |value: &f64| {
        let below = values.iter().filter(|other| other.total_cmp(value).is_lt()).count();
        let equal = values.iter().filter(|other| other.total_cmp(value).is_eq()).count();
        below as f64 + (equal as f64 + 1.0) / 2.0
    };
    values.iter().map(rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Without ties, it is 1 - 6 sum d^2 / n (n^2 - 1), and invariant under monotone transforms.
        #[test]
        fn a_rank_correlation_is_that_of_the_textbook(
            order in Just((0..12u32).collect::<Vec<_>>()).prop_shuffle(),
        ) {
            let one: Vec<f64> = (0..12).map(|at| f64::from(at).exp()).collect();
            let other: Vec<f64> = order.iter().map(|at| f64::from(*at) - 5.5).collect();
            let squares: f64 = order.iter().zip(0..).map(|(a, b)| f64::from(*a) - f64::from(b)).map(|d| d * d).sum();
            let wanted = 1.0 - 6.0 * squares / (12.0 * 143.0);
            prop_assert!((spearman(&one, &other).unwrap() - wanted).abs() < 1e-12);
        }
    }

    #[test]
    fn ties_share_their_ranks_and_a_constant_has_no_correlation() {
        assert_eq!(ranks(&[3.0, 1.0, 3.0, 2.0]), [3.5, 1.0, 3.5, 2.0]);
        assert_eq!(spearman(&[1.0, 1.0], &[1.0, 2.0]), None);
        assert_eq!(spearman(&[], &[]), None);
    }
}
