//! The layers of the model at the step: norms against those of the steps before, routers, temperatures.

use contract::Result;
use kernels::tree;
use loader::Batch;
use serde::Serialize;

use super::history::History;
use crate::ledger::{self, Packed, StepRecord};
use crate::metrics::entropy;
use crate::model::{self, LayerActivity, ParamSpec, ZayaConfig};
use crate::optim::norm;
use crate::spec::RunSpec;
use crate::state::State;
use crate::step::{FrozenModel, Weights};
use crate::workers::Workers;

/// A norm, and how it compares with the steps before.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Norm {
    /// Of this step.
    pub norm: f64,
    /// The median over the steps before; `None` where there are none.
    pub median: Option<f64>,
}

impl Norm {
    /// How many times the median it is.
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
    pub gradient: Norm,
    /// Of its update: new weights minus old ones.
    pub update: Norm,
    /// The update that led to these weights, that of the step before, against the steps before it.
    pub update_before: Option<Norm>,
}

/// What goes through a layer, as a root mean square over the tokens and widths of the step.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ActivityEvidence {
    /// The layer.
    pub layer: usize,
    /// Of the residual that enters.
    pub residual: f64,
    /// Of what its attention adds.
    pub attention: f64,
    /// Of what its feed-forward adds.
    pub feed_forward: f64,
    /// The largest logit of its attention.
    pub largest_logit: Option<f64>,
}

/// The router of a layer.
#[derive(Clone, Debug, Serialize)]
pub struct RouterEvidence {
    /// The layer.
    pub layer: usize,
    /// The part of the tokens that each class got, the skip last.
    pub load: Vec<f64>,
    /// Evenness of the load over the experts: 1 even, 0 all to one.
    pub entropy: f64,
    /// Its median over the last sixteen steps before.
    pub median: Option<f64>,
}

/// The temperatures of a layer's attention.
#[derive(Clone, Debug, Serialize)]
pub struct TemperatureEvidence {
    /// The layer.
    pub layer: usize,
    /// The largest of its heads', by magnitude.
    pub temperature: f64,
    /// The largest logit that it allows: queries and keys are normed, so none is larger than the temperature times the root
    /// of the head's dimension.
    pub largest_logit: f64,
}

/// Every layer's norms in `record`, the step after `before`; a step that has none, since it diverges, has no gradient and no
/// update that could be told.
pub(super) fn layers(
    spec: &RunSpec,
    before: &State,
    record: Option<&StepRecord>,
    (history, changed): (&History, u64),
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
        gradient: Norm {
            norm: record.map_or(f64::NAN, |record| gradient(record, index).unwrap_or(0.0)),
            median: history.median(|record| gradient(record, index)),
        },
        update: Norm {
            norm: record.map_or(f64::NAN, |record| update(record, index).unwrap_or(0.0)),
            median: history.median(|record| update(record, index)),
        },
        update_before: last.and_then(|(last, rest)| {
            let rest = rest.iter().filter_map(|record| update(record, index)).collect();
            Some(Norm { norm: update(last, index)?, median: super::history::median(rest) })
        }),
    };
    Ok(ledger::layers(&spec.names()).into_iter().enumerate().map(layer).collect())
}

/// What goes through the layers when the step is computed, by one more forward pass.
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

/// Every router's load, by what the ledger counts; layers without one are left out.
pub(super) fn routers(record: &StepRecord, history: &History) -> Vec<RouterEvidence> {
    let router = |(layer, counts): (usize, &Vec<u64>)| {
        let total: u64 = counts.iter().sum();
        // Added to zero, the entropy of a single expert loses its sign.
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

/// The temperatures of every attention, of the weights that the step was computed with.
pub(super) fn temperatures(
    spec: &RunSpec,
    config: &ZayaConfig,
    before: &State,
) -> Vec<TemperatureEvidence> {
    let named = spec.parameters.iter().zip(&before.weights);
    let evidence = |(parameter, weight): (&ParamSpec, &tch::Tensor)| {
        // Other kinds of attention have none.
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

/// How the temperatures' names end.
const TEMPERATURE: &str = "qk_norm.temp";
