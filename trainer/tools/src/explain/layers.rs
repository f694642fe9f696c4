//! The layers of the model at a step: norms compared with those of the steps before, routers, temperatures.

use contract::Result;
use curriculum::stats;
use kernels::tree;
use loader::Batch;
use serde::Serialize;

use super::history::PreviousSteps;
use trainer::ledger::{self, Packed, StepRecord};
use trainer::metrics::entropy;
use trainer::model::{self, LayerActivity, ParamSpec, ZayaConfig};
use trainer::optim::norm;
use trainer::spec::RunSpec;
use trainer::state::State;
use trainer::step::{FrozenModel, Weights};
use trainer::workers::Workers;

/// A norm, and how it compares with the steps before.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct NormEvidence {
    /// Of this step.
    pub norm: f64,
    /// The median over the steps before; `None` where there are none.
    pub median: Option<f64>,
}

impl NormEvidence {
    /// Its ratio to the median.
    pub fn times(&self) -> Option<f64> {
        self.median.filter(|median| *median > 0.0).map(|median| self.norm / median)
    }
}

/// The embedding, a layer, or the final norm.
#[derive(Clone, Debug, Serialize)]
pub struct LayerEvidence {
    /// "embedding", "layer 0", ..., "final norm".
    pub name: String,
    /// The norm of its weights before the step.
    pub weights: f64,
    /// Of its gradient, before clipping.
    pub gradient: NormEvidence,
    /// Of its update: new weights minus old ones.
    pub update: NormEvidence,
    /// The update of the step before, which led to these weights, compared with the steps before that.
    pub update_before: Option<NormEvidence>,
}

/// Activations of a layer, as root mean squares over the tokens and dimensions of the step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ActivityEvidence {
    /// The layer.
    pub layer: usize,
    /// Of the residual at its input.
    pub residual: f64,
    /// Of the output of its attention.
    pub attention: f64,
    /// Of the output of its feed-forward.
    pub feed_forward: f64,
    /// The largest logit of its attention.
    pub largest_logit: Option<f64>,
}

/// The router of a layer.
#[derive(Clone, Debug, Serialize)]
pub struct RouterEvidence {
    /// The layer.
    pub layer: usize,
    /// The share of the tokens of each class, the skip class last.
    pub load: Vec<f64>,
    /// Normalized entropy of the load over the experts: 1 if even, 0 if one expert gets all tokens.
    pub entropy: f64,
    /// Its median over the last sixteen steps.
    pub median: Option<f64>,
}

/// The temperatures of a layer's attention.
#[derive(Clone, Debug, Serialize)]
pub struct TemperatureEvidence {
    /// The layer.
    pub layer: usize,
    /// The largest of its heads, by magnitude.
    pub temperature: f64,
    /// The largest logit that it allows: queries and keys are normalized, so a logit is at most the temperature times
    /// the square root of the head dimension.
    pub largest_logit: f64,
}

/// The norms of every layer in `record`, the step after `before`. A step that diverges has no record, so gradient and
/// update are unknown.
pub(super) fn layers(
    spec: &RunSpec,
    before: &State,
    record: Option<&StepRecord>,
    history: &PreviousSteps,
    changed: u64,
    workers: Workers,
) -> Result<Vec<LayerEvidence>> {
    let weights = before.own().map(|(piece, weight, _)| (piece.tensor, weight)).collect();
    let squares = workers.map(weights, |(tensor, weight): (usize, tch::Tensor)| {
        Ok((tensor, norm::squares(workers.ops(), &weight)?))
    })?;
    let mut pieces = vec![Vec::new(); spec.parameters.len()];
    squares.into_iter().for_each(|(tensor, squares)| pieces[tensor].push(squares));
    let squares: Vec<f64> = pieces.into_iter().map(tree::total).collect();
    let at = |packed: &Packed, layer: usize| packed.0.get(layer).map(|bits| f64::from_bits(*bits));
    let gradient = |record: &StepRecord, layer| at(&record.layer_gradient_norms, layer);
    let update = |record: &StepRecord, layer| at(&record.layer_update_norms, layer);
    let last = history.since(changed).split_last();
    let layer = |(index, layer): (usize, ledger::LayerParameters)| LayerEvidence {
        name: layer.name,
        weights: norm::norm(&squares[layer.parameters]),
        gradient: NormEvidence {
            norm: record.map_or(f64::NAN, |record| gradient(record, index).unwrap_or(0.0)),
            median: history.median(|record| gradient(record, index)),
        },
        update: NormEvidence {
            norm: record.map_or(f64::NAN, |record| update(record, index).unwrap_or(0.0)),
            median: history.median(|record| update(record, index)),
        },
        update_before: last.and_then(|(last, rest)| {
            let rest = rest.iter().filter_map(|record| update(record, index));
            Some(NormEvidence { norm: update(last, index)?, median: stats::median(rest) })
        }),
    };
    Ok(ledger::layers(&spec.names()).into_iter().enumerate().map(layer).collect())
}

/// The activations of the layers at the step, from one more forward pass.
pub(super) fn activities(
    spec: &RunSpec,
    before: &State,
    batch: &Batch,
    workers: Workers,
) -> Result<Vec<ActivityEvidence>> {
    let model = FrozenModel::at(spec, batch.step, before, workers)?;
    let config = model.config();
    let found = model.map(batch, |input, Weights { weights, biases }| {
        model::probe(workers.options(), config, weights, biases, input)
    })?;
    let together = |a: Vec<LayerActivity>, b: Vec<LayerActivity>| {
        a.into_iter().zip(b).map(|(a, b)| a.and(b)).collect()
    };
    let all = found.into_iter().reduce(together).unwrap_or_default();
    let numbers = (batch.rows * u64::from(batch.seq_len)) as f64 * config.hidden_size as f64;
    let root = |squares: f64| (squares / numbers).sqrt();
    let evidence = |(layer, found): (usize, LayerActivity)| ActivityEvidence {
        layer,
        residual: root(found.residual),
        attention: root(found.attention),
        feed_forward: root(found.feed_forward),
        largest_logit: found.largest_logit,
    };
    Ok(all.into_iter().enumerate().map(evidence).collect())
}

/// The load of every router, from the ledger's counts; layers without a router are omitted.
pub(super) fn routers(record: &StepRecord, history: &PreviousSteps) -> Vec<RouterEvidence> {
    let router = |(layer, counts): (usize, &Vec<u64>)| {
        let total: u64 = counts.iter().sum();
        // Adding zero turns the -0.0 of a single expert into 0.0.
        let before = |record: &StepRecord| {
            record.tokens_per_expert.get(layer).map(|counts| entropy(counts) + 0.0)
        };
        RouterEvidence {
            layer,
            load: counts.iter().map(|count| *count as f64 / total.max(1) as f64).collect(),
            entropy: entropy(counts) + 0.0,
            median: history.lately(before),
        }
    };
    let there =
        record.tokens_per_expert.iter().enumerate().filter(|(_, counts)| !counts.is_empty());
    there.map(router).collect()
}

/// The temperatures of every attention, in the weights before the step.
pub(super) fn temperatures(
    spec: &RunSpec,
    config: &ZayaConfig,
    before: &State,
) -> Vec<TemperatureEvidence> {
    let named = spec.parameters.iter().zip(&before.weights);
    let evidence = |(parameter, weight): (&ParamSpec, &tch::Tensor)| {
        // Other kinds of attention have no temperature.
        let layer = parameter
            .name
            .strip_suffix(TEMPERATURE)?
            .split('.')
            .find_map(|part| part.parse().ok())?;
        let temperature = weight.abs().max().double_value(&[]);
        let largest_logit = temperature * (config.head_dim as f64).sqrt();
        Some(TemperatureEvidence { layer, temperature, largest_logit })
    };
    named.filter_map(evidence).collect()
}

/// The suffix of the temperatures' names.
const TEMPERATURE: &str = "qk_norm.temp";
