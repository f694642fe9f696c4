//! The ZAYA1 model: one micro-batch of sequences in, its losses and gradients out.
//!
//! ```text
//! config     every number that decides the computation     param      parameters, and how a layer declares one
//! kinds      the kinds of layers in a configuration
//! input      tokens of a micro-batch, its documents        layer      the interface of layers
//! sublayer   a layer between its norm and its residual scaling
//! cut        chunks of a micro-batch                       gradients  sums of gradients over chunks, and their sink
//! grid       the layout of its tokens                      line       ranks that share its chunks
//! visible    which keys the queries of a chunk see
//! fold       weights sharded over ranks                    sharding   how they are cut; shards: how they are fetched
//! zaya       the model, top to bottom: read this first     layers/    attention, experts, norms, head
//! activity   statistics of a layer's activations
//! probe      a forward pass with these statistics, to explain a step
//! oracle     the same equations differentiated by libtorch in f64
//! fixtures/  parity with Hugging Face, and its traps
//! ```
//!
//! All computation is in [`kernels::ops`]: the model chooses the operations, a kernel table implements them.
//!
//! Invariant: [`forward_backward`] is a pure function of the weights, the balancing biases, the micro-batch and the
//! kernel table.

mod activity;
mod config;
mod cut;
mod fold;
mod gradients;
mod grid;
mod init;
mod input;
mod kinds;
mod layer;
mod layers;
mod line;
mod normal;
mod param;
mod probe;
mod sharding;
mod shards;
mod stage;
mod sublayer;
mod visible;
mod zaya;

#[cfg(test)]
mod agreement;
#[cfg(test)]
mod baselines;
#[cfg(test)]
mod cuts;
#[cfg(test)]
mod oracle;
#[cfg(test)]
pub(crate) mod parity;

pub use activity::LayerActivity;
pub use config::{Decay, PRESETS, SkipOutput, ZayaConfig, curriculum_schema};
pub use cut::Cut;
pub use fold::{Overlap, ShardedWeights, WeightShards};
pub use gradients::{ChunkSum, CollectedGradients, GradientSink, GradientTerm};
pub(crate) use gradients::{ExpertNumbers, FirstTerms};
pub(crate) use init::balance_sizes;
pub use init::{init, init_balance, parameters, router_classes};
pub use input::{CheckedMicroBatch, MicroBatchInput};
pub use kinds::{
    Attention, BalanceKind, FeedForward, LayerType, LogitsDtype, ResidualKind, RouterKind,
};
pub use line::{Assignment, AxisComm, PendingReceive};
pub(crate) use param::{HEAD, balance_name, initial};
pub use param::{Init, ParamId, ParamSpec, Role, active_parameters, rounded};
pub use probe::probe;
pub use sharding::Sharding;
pub use stage::{BatchBuffer, StagedMicroBatch};

use contract::Result;
use kernels::ops::{self, OpsTable};
use layer::Pass;
use loader::Batch;
use tch::{Kind, Tensor};
use zaya::Zaya;

use crate::refusal::{lost, refused, values};

/// Activation checkpointing: what a micro-batch keeps for its backward pass. Decides memory and time, never bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationCheckpointing {
    /// Every activation that the backward pass reads.
    #[default]
    Everything,
    /// Only the input of each layer; its activations are recomputed, layer by layer, in the backward pass.
    LayerInputs,
}

/// How a micro-batch is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatchOptions {
    /// The kernels; they decide bits, and are part of the kernel table.
    pub ops: OpsTable,
    /// What is kept for the backward pass.
    pub keep: ActivationCheckpointing,
    /// Into how many parts it is cut, which decides bits: set by the phase.
    pub cut: Cut,
}

impl MicroBatchOptions {
    /// The same options with this cut.
    pub fn cut(self, cut: Cut) -> Self {
        MicroBatchOptions { cut, ..self }
    }
}

/// How a micro-batch is computed and which ranks share it: `None` where one process has it all.
#[derive(Clone, Copy)]
pub struct MicroBatchContext<'a> {
    /// The options.
    pub options: MicroBatchOptions,
    /// The ranks that have the other chunks.
    pub line: Option<&'a dyn AxisComm>,
    /// Which ranks hold which weight shards; `None` where each process has the whole weights.
    pub folded: Option<ShardedWeights<'a>>,
    /// The weights that are still on their way; `None` where all are here.
    pub arrival: Option<&'a dyn WeightArrival>,
}

/// Weights on their way from other ranks.
pub trait WeightArrival: Sync {
    /// Waits until the first `weights` weights, in canonical order, have arrived.
    fn wait(&self, weights: usize) -> Result<()>;
}

impl From<MicroBatchOptions> for MicroBatchContext<'_> {
    fn from(options: MicroBatchOptions) -> Self {
        MicroBatchContext { options, line: None, folded: None, arrival: None }
    }
}

impl Default for MicroBatchOptions {
    fn default() -> Self {
        MicroBatchOptions {
            ops: ops::CPU,
            keep: ActivationCheckpointing::default(),
            cut: Cut::WHOLE,
        }
    }
}

/// The results of a micro-batch.
#[derive(Debug)]
pub struct MicroBatchOutput {
    /// Sum of the token losses, in nats.
    pub loss: f64,
    /// Sum of the z-losses of the same tokens; 0 without a coefficient.
    pub z_loss: f64,
    /// Tokens that had a label.
    pub labels: u64,
    /// Gradient of `(loss + z_loss) / label_count`, each row's losses times its weight, for every parameter, in
    /// canonical order, f32; exact zeros where unused.
    pub grads: Vec<Tensor>,
    /// Loss of every token, `[rows * seq_len]`, f32; 0 where there is no label.
    pub token_losses: Tensor,
    /// Tokens by layer and expert, each token once for each of its experts; last those without an expert. Empty for a
    /// layer without a router.
    pub counts: Vec<Vec<u64>>,
}

/// The results of a micro-batch besides its gradients; see [`MicroBatchOutput`].
#[derive(Debug)]
pub struct MicroBatchLosses {
    /// Sum of the token losses, in nats: one f64 on the device.
    pub loss: Tensor,
    /// Sum of the z-losses of the same tokens, likewise; `None` if [`ZayaConfig::z_loss`] is 0.
    pub z_loss: Option<Tensor>,
    /// Tokens that had a label.
    pub labels: u64,
    /// Loss of every token.
    pub token_losses: Tensor,
    /// By layer, if it has a router: tokens by class, i64, on the device.
    pub counts: Vec<Option<Tensor>>,
}

impl MicroBatchLosses {
    /// Tokens by layer and router class; the host waits for them.
    pub(crate) fn read_counts(&self) -> Result<Vec<Vec<u64>>> {
        let read = |counts: &Option<Tensor>| match counts {
            Some(counts) => {
                Ok(values::<i64>(counts)?.into_iter().map(i64::cast_unsigned).collect())
            }
            None => Ok(Vec::new()),
        };
        self.counts.iter().map(read).collect()
    }
}

/// Computes one micro-batch: forward, loss and backward of `sum of weighted token losses / label_count`, where the loss
/// of a token includes its z-loss. Losses are reported without their weights, and z-loss apart from them.
///
/// `params` are in the order of [`parameters`], f32 or rounded by [`rounded`]; `balance` has one tensor of biases per
/// layer, empty where the layer has none. Neither is written, so several threads may compute micro-batches of the
/// same weights at once, each with its own aliases ([`kernels::share`]).
pub fn forward_backward(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &MicroBatchInput,
    label_count: u64,
) -> Result<MicroBatchOutput> {
    let input = input.prepare(config, params[0].device())?;
    collected(config, params, balance, &input, label_count, options_for(params)?)
}

/// Options with the kernels for the device of these weights.
fn options_for(params: &[Tensor]) -> Result<MicroBatchOptions> {
    let ops = ops::choose(params[0].device()).map_err(refused)?;
    Ok(MicroBatchOptions { ops, ..MicroBatchOptions::default() })
}

/// Computes a micro-batch that a prefetcher staged, with these `options`, and passes each gradient to `sink` as soon as
/// it is computed; otherwise as [`forward_backward`].
///
/// The ranks of a line that share it call this at the same time with the same input: losses are those of the whole,
/// counts those of the local chunks, and gradients are passed to [`GradientSink::part`].
pub fn micro_batch<'a>(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    staged: StagedMicroBatch,
    label_count: u64,
    how: impl Into<MicroBatchContext<'a>>,
    sink: &mut dyn GradientSink,
) -> Result<MicroBatchLosses> {
    compute(config, params, balance, &staged.arrive()?, label_count, how.into(), sink)
}

/// The same, with all gradients collected.
#[cfg(test)]
pub(crate) fn forward_backward_staged(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    staged: StagedMicroBatch,
    label_count: u64,
    options: MicroBatchOptions,
) -> Result<MicroBatchOutput> {
    collected(config, params, balance, &staged.arrive()?, label_count, options)
}

fn collected(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &input::DeviceMicroBatch,
    label_count: u64,
    options: MicroBatchOptions,
) -> Result<MicroBatchOutput> {
    let mut gradients = CollectedGradients::default();
    let found =
        compute(config, params, balance, input, label_count, options.into(), &mut gradients)?;
    let (loss, counts) = (number(&found.loss)?, found.read_counts()?);
    let z_loss = found.z_loss.as_ref().map_or(Ok(0.0), number)?;
    let MicroBatchLosses { labels, token_losses, .. } = found;
    let grads = gradients.into_vec()?;
    Ok(MicroBatchOutput { loss, z_loss, labels, grads, token_losses, counts })
}

fn compute(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &input::DeviceMicroBatch,
    label_count: u64,
    how: MicroBatchContext<'_>,
    sink: &mut dyn GradientSink,
) -> Result<MicroBatchLosses> {
    enter()?;
    // A process trains one model, whose parameters it names once and not for each micro-batch.
    static FIRST: std::sync::OnceLock<(ZayaConfig, Zaya)> = std::sync::OnceLock::new();
    let (known, first) = FIRST.get_or_init(|| (config.clone(), Zaya::new(config)));
    let other = (known != config).then(|| Zaya::new(config));
    let model = other.as_ref().unwrap_or(first);
    let train = |pass: &Pass<'_>| model.train(pass, label_count, how.options.keep, sink);
    let found = Pass::over(how, config, params, balance, input, train)?;
    Ok(MicroBatchLosses {
        loss: total(&found.losses)?,
        z_loss: found.z_losses.as_ref().map(total).transpose()?,
        labels: input.label_count,
        token_losses: found.losses,
        counts: found.counts,
    })
}

/// Runs both passes over `rows` sequences of one document each on tensors without numbers ([`kernels::shapes`]).
pub fn over_shapes(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    [rows, seq_len]: [u64; 2],
    how: MicroBatchContext<'_>,
    sink: &mut dyn GradientSink,
) -> Result<()> {
    let device = params[0].device();
    let input = input::DeviceMicroBatch::of_shape(rows as i64, seq_len as i64, device);
    compute(config, params, balance, &input.map_err(refused)?, rows * seq_len, how, sink).map(drop)
}

/// The sum of the token losses of some sequences, in nats: forward only.
///
/// Ranks of a line that share them call this at the same time, as [`micro_batch`]; each gets the whole sum.
pub fn losses<'a>(
    how: impl Into<MicroBatchContext<'a>>,
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &MicroBatchInput,
) -> Result<f64> {
    let losses = over(how, config, params, balance, input, |model, pass| model.losses(pass))?;
    number(&total(&losses)?)
}

/// The same, and whether each label is the most probable token at its place: what greedy decoding would write.
pub fn scores<'a>(
    how: impl Into<MicroBatchContext<'a>>,
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &MicroBatchInput,
) -> Result<(f64, bool)> {
    let [losses, misses] =
        over(how, config, params, balance, input, |model, pass| model.scores(pass))?;
    Ok((number(&total(&losses)?)?, number(&total(&misses)?)? == 0.0))
}

/// Logits of every token, `[rows * seq_len, vocab_size]`: for tests and short texts; training never holds them all.
pub fn logits(
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &MicroBatchInput,
) -> Result<Tensor> {
    let options = options_for(params)?;
    over(options, config, params, balance, input, |model, pass| model.logits(pass))
}

/// Runs `work` as a pass of the model over `input`.
fn over<'a, T>(
    how: impl Into<MicroBatchContext<'a>>,
    config: &ZayaConfig,
    params: &[Tensor],
    balance: &[Tensor],
    input: &MicroBatchInput,
    work: impl FnOnce(&Zaya, &Pass<'_>) -> Result<T>,
) -> Result<T> {
    enter()?;
    let (model, input) = (Zaya::new(config), input.prepare(config, params[0].device())?);
    Pass::over(how.into(), config, params, balance, &input, |pass| work(&model, pass))
}

/// (query, key) pairs that softmax attention sees in the rows of a batch, in all layers.
pub(crate) fn pairs(config: &ZayaConfig, batch: &Batch) -> u64 {
    let row = |starts: &Vec<u32>| match config.document_mask {
        true => attended_pairs(config, starts, batch.seq_len),
        false => attended_pairs(config, &[0], batch.seq_len),
    };
    batch.boundaries.iter().map(row).sum()
}

/// (query, key) pairs that softmax attention sees in all layers, in documents that begin at `starts` in a row of
/// `length` tokens.
pub fn attended_pairs(config: &ZayaConfig, starts: &[u32], length: u32) -> u64 {
    let layers = config.kinds().zip(config.windows());
    let softmax = layers.filter(|((kind, _), _)| *kind != Attention::Linear);
    softmax.map(|(_, window)| causal_pairs(starts, length, window)).sum()
}

/// (query, key) pairs of documents that begin at `starts` in a row of `length` tokens, where a query sees at most
/// `window` keys.
pub fn causal_pairs(starts: &[u32], length: u32, window: Option<i64>) -> u64 {
    let ends = starts.iter().skip(1).copied().chain([length]);
    let lengths = starts.iter().zip(ends).map(|(start, end)| u64::from(end - start));
    let pairs = |n: u64| {
        let seen = window.map_or(n, |window| n.min(window as u64));
        seen * (seen + 1) / 2 + (n - seen) * seen
    };
    lengths.map(pairs).sum()
}

/// The sum of token losses, in f64.
fn total(losses: &Tensor) -> Result<Tensor> {
    losses.f_sum(Kind::Double).map_err(refused)
}

/// The value of a one-element tensor.
fn number(tensor: &Tensor) -> Result<f64> {
    tensor.f_double_value(&[]).map_err(refused)
}

fn enter() -> Result<()> {
    kernels::runtime::enter_thread().map_err(lost)
}

/// Numbers between -1 and 1 that depend only on `seed`.
#[cfg(test)]
pub(crate) fn random(shape: &[i64], seed: u64) -> Tensor {
    let key = contract::Key::from_seed(seed);
    let draw = |index| contract::draw(key, contract::Purpose::Generate, index);
    let count: i64 = shape.iter().product();
    let values =
        (0..count as u64).map(|index| (draw(index) >> 40) as f32 / (1u64 << 23) as f32 - 1.0);
    Tensor::from_slice(&values.collect::<Vec<_>>()).reshape(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_micro_batch_answers_for_every_parameter() {
        let config = ZayaConfig { vocab_size: 97, ..ZayaConfig::preset("zaya1-nano").unwrap() };
        let (params, balance) = (init(&config, 1).unwrap(), init_balance(&config));
        let tokens: Vec<i32> = (0..64).map(|i| i * 37 % 97).collect();
        let labels: Vec<i32> = (1..65).map(|i| i * 37 % 97).collect();
        let positions: Vec<i32> = (0..64).map(|i| i % 32).collect();
        let input = MicroBatchInput {
            tokens: &tokens,
            labels: &labels,
            positions: &positions,
            mask: &[1; 64],
            boundaries: &[vec![0], vec![0]],
            weights: &[],
            rows: 2,
            seq_len: 32,
        };
        let out = forward_backward(&config, &params, &balance, &input, 64).unwrap();
        assert!((out.loss / 64.0 - (97f64).ln()).abs() < 0.3, "{}", out.loss / 64.0);
        for (spec, grad) in parameters(&config).iter().zip(&out.grads) {
            assert_eq!(grad.size(), spec.shape, "{}", spec.name);
            assert!(grad.isfinite().all().int64_value(&[]) == 1, "{}", spec.name);
        }
        let again = forward_backward(&config, &params, &balance, &input, 64).unwrap();
        assert_eq!(out.grads, again.grads);
    }

    /// Copies weights only when a pass waits for them.
    struct Late(std::sync::Mutex<(Vec<Tensor>, Vec<Tensor>, Vec<usize>)>);

    impl WeightArrival for Late {
        fn wait(&self, weights: usize) -> Result<()> {
            let (missing, wanted, calls) = &mut *self.0.lock().unwrap();
            calls.push(weights);
            let arrived = missing.iter_mut().zip(wanted).take(weights);
            tch::no_grad(|| arrived.for_each(|(missing, wanted)| missing.copy_(wanted)));
            Ok(())
        }
    }

    /// Weights that have not arrived are not numbers: a pass that reads one too early has another loss.
    #[test]
    fn a_pass_waits_for_each_weight_before_it_reads_it() {
        let preset = ZayaConfig { vocab_size: 97, ..ZayaConfig::preset("zaya1-nano").unwrap() };
        let linear = vec![Attention::Cca, Attention::Linear];
        let untied = ZayaConfig { tie_word_embeddings: false, ..preset.clone() };
        let layers = preset.num_hidden_layers as usize;
        for config in [ZayaConfig { layers: linear, ..preset.clone() }, untied, preset] {
            let (params, balance) = (init(&config, 1).unwrap(), init_balance(&config));
            let tokens: Vec<i32> = (0..64).map(|i| i * 37 % 97).collect();
            let positions: Vec<i32> = (0..64).collect();
            let input = MicroBatchInput {
                tokens: &tokens,
                labels: &tokens,
                positions: &positions,
                mask: &[1; 64],
                boundaries: &[vec![0]],
                weights: &[],
                rows: 1,
                seq_len: 64,
            };
            let options = options_for(&params).unwrap();
            let wanted = losses(options, &config, &params, &balance, &input).unwrap();
            let missing: Vec<Tensor> =
                params.iter().map(|weight| weight.full_like(f64::NAN)).collect();
            let aliases = |all: &[Tensor]| all.iter().map(Tensor::shallow_clone).collect();
            let late = Late((aliases(&missing), aliases(&params), Vec::new()).into());
            let how = MicroBatchContext { arrival: Some(&late), ..options.into() };
            let found = losses(how, &config, &missing, &balance, &input).unwrap();
            assert_eq!(found.to_bits(), wanted.to_bits());
            let calls = late.0.into_inner().unwrap().2;
            assert_eq!(calls.len(), layers + 2);
            assert!(calls[0] < 6 && calls.is_sorted() && calls[layers + 1] == usize::MAX);
        }
    }

    #[test]
    fn pairs_are_counted_within_documents() {
        for (starts, length) in [(vec![0], 7), (vec![0, 1, 4], 9), (vec![0, 8], 9)] {
            let document = |place: u32| starts.iter().rposition(|start| *start <= place);
            for window in [None, Some(1), Some(3), Some(100)] {
                let mut pairs = 0;
                for query in 0..length {
                    let seen = |key: &u32| {
                        let near = window.is_none_or(|window| i64::from(query - key) < window);
                        near && document(*key) == document(query)
                    };
                    pairs += (0..=query).filter(seen).count() as u64;
                }
                assert_eq!(causal_pairs(&starts, length, window), pairs);
            }
        }
    }
}
