//! Checks cut micro-batches against autograd, against their parts computed alone, and against themselves.

use curriculum::Dtype;
use kernels::device::Stager;
use kernels::ops::{CPU, REFERENCE};
use kernels::share::SharedTensors;
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

use super::agreement::{middling_of, same_bits};
use super::cut::Chunks;
use super::layer::{Layer, LayerPlace, Pass};
use super::layers::cca::Cca;
use super::param::{ParamDeclarations, Weights};
use super::parity::{Arrays, all_rounded, assert_gradients, relative};
use super::{
    ActivationCheckpointing, Attention, Cut, Decay, MicroBatchInput, MicroBatchOptions,
    MicroBatchOutput, SkipOutput, ZayaConfig, forward_backward_staged, losses, oracle, parameters,
    random,
};

/// The model of a test.
pub(super) struct Model {
    pub(super) config: ZayaConfig,
    params: Vec<Tensor>,
    balance: Vec<Tensor>,
}

impl Model {
    pub(super) fn micro_batch(
        &self,
        input: &MicroBatchInput<'_>,
        options: MicroBatchOptions,
    ) -> MicroBatchOutput {
        let staged = input.stage(&self.config, &Stager::new(Device::Cpu).unwrap()).unwrap();
        forward_backward_staged(&self.config, &self.params, &self.balance, staged, 200, options)
            .unwrap()
    }

    /// Asserts that losses and gradients match autograd in f64.
    pub(super) fn assert_differentiated(&self, arrays: &Arrays, options: MicroBatchOptions) {
        let prepared = arrays.input().prepare(&self.config, Device::Cpu).unwrap();
        let specs = parameters(&self.config);
        let ([losses, z_losses], grads) = oracle::forward_backward(
            &self.config,
            &specs,
            &self.params,
            &self.balance,
            &prepared,
            200,
        );
        let out = self.micro_batch(&arrays.input(), options);
        assert!(relative(&out.token_losses, &losses) < 1e-6, "{options:?}");
        let z_loss = z_losses.sum(Kind::Double).double_value(&[]);
        assert!((out.z_loss - z_loss).abs() <= 1e-6 * z_loss, "{options:?}");
        // A temperature's gradient is one sum over all tokens, whose terms cancel: 2.4e-5 on one processor.
        let worst = assert_gradients(&specs, &out.grads, &grads, 5e-5, &options);
        println!("{options:?}: largest |a - b| / |b| against f64: {worst:.1e}");
    }
}

fn model(skip: SkipOutput) -> (Model, Arrays) {
    model_of(ZayaConfig { skip, ..ZayaConfig::preset("zaya1-nano").unwrap() })
}

pub(super) fn model_of(config: ZayaConfig) -> (Model, Arrays) {
    let (config, params, balance, arrays) = middling_of(config);
    (Model { config, params, balance }, arrays)
}

fn cut(chunks: u64) -> MicroBatchOptions {
    both(chunks, 1)
}

pub(super) fn both(chunks: u64, shards: u64) -> MicroBatchOptions {
    MicroBatchOptions::default().cut(Cut { chunks, shards })
}

/// Documents cross every boundary, down to chunks of two tokens and of one, where convolutions reach over two chunks.
#[test]
fn chunks_have_the_gradients_of_automatic_differentiation() {
    let (model, arrays) = model(SkipOutput::Identity);
    for chunks in [2, 4, 64, 128] {
        model.assert_differentiated(&arrays, cut(chunks));
    }
    model.assert_differentiated(&arrays, MicroBatchOptions { ops: REFERENCE, ..cut(8) });
    let config = ZayaConfig { document_mask: false, ..model.config.clone() };
    Model { config, ..model }
        .assert_differentiated(&arrays, MicroBatchOptions { ops: CPU, ..cut(16) });
}

/// A layer of each kind, with and without decay. Documents begin and end within chunks and cross several of them; some
/// have one token.
#[test]
fn linear_layers_have_the_gradients_of_automatic_differentiation() {
    for linear_decay in [Decay::None, Decay::Retention] {
        let layers = vec![Attention::Cca, Attention::Linear];
        let preset = ZayaConfig::preset("zaya1-nano").unwrap();
        let (model, arrays) = model_of(ZayaConfig { layers, linear_decay, ..preset });
        for chunks in [1, 2, 4, 128] {
            model.assert_differentiated(&arrays, cut(chunks));
        }
        model.assert_differentiated(&arrays, MicroBatchOptions { ops: REFERENCE, ..both(4, 2) });
        let config = ZayaConfig { document_mask: false, ..model.config.clone() };
        Model { config, ..model }.assert_differentiated(&arrays, cut(8));
    }
}

/// Sequences longer than a block, one of them with short documents; a chunk does not depend on later tokens.
#[test]
fn linear_layers_go_from_block_to_block() {
    let layers = vec![Attention::Linear];
    let preset = ZayaConfig::preset("zaya1-nano").unwrap();
    let (model, short) = model_of(ZayaConfig { layers, ..preset });
    let arrays = Arrays::new(short.tokens.clone(), 1, vec![vec![0, 3]]);
    for chunks in [1, 2] {
        model.assert_differentiated(&arrays, cut(chunks));
    }
    let before = model.micro_batch(&arrays.input(), cut(4)).token_losses;
    let mut tokens = arrays.tokens.clone();
    tokens[192..].iter_mut().for_each(|token| *token = (*token + 1) % 331);
    let after = model
        .micro_batch(&MicroBatchInput { tokens: &tokens, ..arrays.input() }, cut(4))
        .token_losses;
    assert_eq!(before.narrow(0, 0, 191), after.narrow(0, 0, 191));
    assert_ne!(before, after);
}

/// Shards alone and with chunks: as many heads as shards, more and fewer; unequal parts everywhere.
#[test]
fn shards_have_the_gradients_of_automatic_differentiation() {
    let preset = ZayaConfig::preset("zaya1-nano").unwrap();
    let config = ZayaConfig { skip: SkipOutput::Identity, z_loss: 0.1, ..preset.clone() };
    let (plain, arrays) = model_of(config);
    plain.assert_differentiated(&arrays, both(1, 2));
    plain.assert_differentiated(&arrays, MicroBatchOptions { ops: REFERENCE, ..both(4, 7) });
    let (queries, width) =
        (preset.num_attention_heads / preset.num_key_value_heads, preset.head_dim / 2);
    let shape = ZayaConfig {
        num_attention_heads: 4 * queries,
        num_key_value_heads: 4,
        head_dim: width,
        moe_intermediate_size: 50,
        ..preset
    };
    let (other, arrays) = model_of(ZayaConfig { skip: SkipOutput::Zero, ..shape });
    other.assert_differentiated(&arrays, both(2, 3));
    other.assert_differentiated(&arrays, both(1, 50));
}

/// A group of heads does not depend on the others: zeroing the others' output weights leaves its part as it was, and
/// the sum of both parts is the whole, bit for bit.
#[test]
fn a_shard_of_heads_knows_nothing_of_the_others() {
    let (Model { config, .. }, arrays) = model(SkipOutput::Zero);
    let mut specs = Vec::new();
    let place = LayerPlace { layer: 0, state: false, window: None };
    let layer = Cca::declare(&mut ParamDeclarations::new(&config, &mut specs), &config, place);
    let params: Vec<_> =
        specs.iter().zip(0..).map(|(spec, seed)| random(&spec.shape, seed)).collect();
    let x = random(&[256, config.hidden_size], 100);
    let input = arrays.input().prepare(&config, Device::Cpu).unwrap();
    let chunks = Chunks::new(&config, &input, 1, None).unwrap();
    let out = |params: &[Tensor]| {
        let pass = Pass {
            ops: CPU,
            config: &config,
            chunks: &chunks,
            shards: 2,
            weights: Weights(params),
            folded: None,
            arrival: None,
            balance: &[],
            neutral: None,
            kind: Kind::Float,
        };
        let made = layer.forward(&pass, std::slice::from_ref(&x), None).unwrap();
        made.out[0].gathered(CPU).unwrap()
    };
    let half = config.query_size() / 2;
    let shut = |first: i64| {
        let mut params: Vec<_> = params.iter().map(Tensor::copy).collect();
        let _ = params.last_mut().unwrap().narrow(1, first, half).zero_();
        out(&params)
    };
    let (left, right) = (shut(half), shut(0));
    assert_ne!(left, right);
    assert_eq!(out(&params), left + right);
}

/// Where every chunk begins with a document, each chunk is a separate micro-batch: the losses have the same bits, and
/// the gradients are the sum of theirs in the order of the tree.
#[test]
fn chunks_of_whole_documents_are_micro_batches() {
    let (model, arrays) = model(SkipOutput::Identity);
    let tokens = arrays.tokens.clone();
    let starts = [[0, 5, 31].as_slice(), &[0], &[0, 1, 2], &[0, 17]];
    let all =
        starts.iter().zip(0..).flat_map(|(own, chunk)| own.iter().map(move |at| at + 32 * chunk));
    let all: Vec<u32> = all.collect();
    let whole = Arrays::new(tokens.clone(), 2, vec![all.clone(), all]);
    let whole = model.micro_batch(&whole.input(), cut(4));
    let part = |chunk: usize| {
        let rows = [0, 128].map(|row| tokens[row + 32 * chunk..][..32].to_vec());
        let own = starts[chunk].to_vec();
        let arrays = Arrays::new(rows.concat(), 2, vec![own.clone(), own]);
        model.micro_batch(&arrays.input(), MicroBatchOptions::default())
    };
    let parts = [part(0), part(1), part(2), part(3)];
    for (chunk, part) in (0i64..).zip(&parts) {
        let found = whole.token_losses.view([2, 4, 32]).select(1, chunk);
        assert_eq!(found.reshape([-1]), part.token_losses);
    }
    let counts = |layer: usize, class: usize| {
        parts.iter().map(move |part| part.counts[layer][class]).sum::<u64>()
    };
    for (layer, found) in whole.counts.iter().enumerate() {
        let wanted: Vec<u64> = (0..found.len()).map(|class| counts(layer, class)).collect();
        assert_eq!(*found, wanted);
    }
    for (index, spec) in parameters(&model.config).iter().enumerate() {
        let [a, b, c, d] = parts.each_ref().map(|part| &part.grads[index]);
        let wanted = (a + d) + (b + c);
        // The gradients of head and embedding rows are two sums here, and one sum in a separate micro-batch.
        match index {
            0 => assert!(relative(&whole.grads[0], &wanted) < 1e-6),
            _ => assert_eq!(whole.grads[index], wanted, "{}", spec.name),
        }
    }
}

/// Later chunks do not change the bits of earlier ones: another rank may compute them.
#[test]
fn a_chunk_knows_nothing_of_later_ones() {
    let (model, arrays) = model(SkipOutput::Zero);
    let input = arrays.input();
    let before = model.micro_batch(&input, cut(4)).token_losses.view([2, 4, 32]);
    for later in 1..4usize {
        let mut tokens = input.tokens.to_vec();
        for row in tokens.chunks_mut(128) {
            row[32 * later..].iter_mut().for_each(|token| *token = (*token + 1) % 331);
        }
        let after = model.micro_batch(&MicroBatchInput { tokens: &tokens, ..input }, cut(4));
        let after = after.token_losses.view([2, 4, 32]);
        let earlier = |losses: &Tensor| losses.narrow(1, 0, later as i64).contiguous();
        assert_eq!(earlier(&before), earlier(&after));
        assert_ne!(before, after);
    }
}

/// Neither recomputation nor other threads change a bit, in either dtype; validation gives the losses of training.
#[test]
fn cuts_have_their_bits_wherever_they_are_computed() {
    let layers = vec![Attention::Cca, Attention::Linear];
    let preset = ZayaConfig::preset("zaya1-nano").unwrap();
    let (whole, arrays) = model_of(ZayaConfig { skip: SkipOutput::Identity, layers, ..preset });
    let cuts = [cut(4), both(1, 3), both(4, 2)];
    let cases =
        [Dtype::F32, Dtype::Bf16].into_iter().flat_map(|dtype| cuts.map(|how| (dtype, how)));
    for (dtype, how) in cases {
        let params = all_rounded(&parameters(&whole.config), &whole.params, dtype);
        let balance = whole.balance.iter().map(Tensor::shallow_clone).collect();
        let model = Model { config: whole.config.clone(), params, balance };
        let found = model.micro_batch(&arrays.input(), how);
        let again = MicroBatchOptions { keep: ActivationCheckpointing::LayerInputs, ..how };
        assert!(same_bits(&found, &model.micro_batch(&arrays.input(), again)), "{dtype:?}");
        let plain = model.micro_batch(&arrays.input(), cut(1));
        assert!(!same_bits(&found, &plain), "a cut decides bits");
        assert!((found.loss / plain.loss - 1.0).abs() < 1e-2, "{} {}", found.loss, plain.loss);
        assert!(found.grads.iter().all(|grad| grad.kind() == Kind::Float));
        let Model { config, params, balance } = &model;
        let alone = losses(how, config, params, balance, &arrays.input()).unwrap();
        assert_eq!(alone.to_bits(), found.loss.to_bits());
        let (params, balance) = (SharedTensors::new(params), SharedTensors::new(balance));
        let grads = SharedTensors::new(&found.grads);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let (params, balance) = (params.aliases(), balance.aliases());
                    let model = Model { config: config.clone(), params, balance };
                    assert_eq!(model.micro_batch(&arrays.input(), how).grads, grads.aliases());
                });
            }
        });
    }
}

/// Tokens without a label have no loss and no gradient, also where they fill whole chunks.
#[test]
fn padded_tails_have_no_effect() {
    let (model, arrays) = model(SkipOutput::Zero);
    let input = arrays.input();
    let mut mask = input.mask.to_vec();
    mask[180..].fill(0);
    let (mut tokens, mut labels) = (input.tokens.to_vec(), input.labels.to_vec());
    let a = model.micro_batch(&MicroBatchInput { mask: &mask, ..input }, cut(4));
    tokens[181..].fill(5);
    labels[180..].fill(-1);
    let other = MicroBatchInput { mask: &mask, tokens: &tokens, labels: &labels, ..input };
    let b = model.micro_batch(&other, cut(4));
    assert!(relative(&a.token_losses, &b.token_losses) < 1e-6);
    for ((spec, a), b) in parameters(&model.config).iter().zip(&a.grads).zip(&b.grads) {
        assert!(relative(a, b) < 1e-5, "{}", spec.name);
    }
}

#[test]
fn sequences_that_do_not_divide_are_refused() {
    let (model, arrays) = model(SkipOutput::Zero);
    let prepared = arrays.input().prepare(&model.config, Device::Cpu).unwrap();
    for chunks in [0, 3, 256] {
        let fault = Chunks::new(&model.config, &prepared, chunks, None).err().unwrap();
        assert_eq!(fault.class(), contract::Class::Usage);
        assert!(fault.to_string().contains("a divisor of seq_len"), "{fault}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every chunk sees its documents up to its own end, and up to two adjacent rows on both sides of each part.
    #[test]
    fn chunks_read_their_documents(
        (rows, chunks, width) in (1usize..4, 1usize..7, 1usize..6),
        cuts in prop::collection::vec(any::<bool>(), 3 * 6 * 5),
    ) {
        let length = chunks * width;
        let boundary = |row: usize| (0..length).filter(|at| *at == 0 || cuts[row * 30 + at]).map(|at| at as u32).collect();
        let tokens: Vec<i32> = (0..(rows * length) as i32).collect();
        let arrays = Arrays::new(tokens, rows, (0..rows).map(boundary).collect());
        let config = ZayaConfig { vocab_size: 1 << 20, ..ZayaConfig::preset("zaya1-nano").unwrap() };
        let prepared = arrays.input().prepare(&config, Device::Cpu).unwrap();
        let found = Chunks::new(&config, &prepared, chunks as u64, None).unwrap();
        let list = |tensor: &Tensor| Vec::<i64>::try_from(tensor).unwrap();
        let parts: Vec<_> = found.iter().map(|chunk| chunk.tokens.shallow_clone()).collect();
        let (all, sequence) = (super::cut::joined(&parts, 0).unwrap(), found.in_sequence(&parts).unwrap());
        prop_assert_eq!(list(&sequence), (0..(rows * length) as i64).collect::<Vec<_>>());
        for (number, chunk) in found.iter().enumerate() {
            let (mut own, mut keys, mut around, mut lengths) = (vec![], vec![], vec![], vec![]);
            for row in 0..rows {
                for at in number * width..(number + 1) * width {
                    let starts = arrays.input().boundaries[row].iter().map(|start| *start as usize);
                    let first = starts.clone().rev().find(|start| *start <= at).unwrap_or(0);
                    let end = starts.clone().find(|start| *start > at).unwrap_or(length);
                    let token = |at: usize| (row * length + at) as i64;
                    own.push(token(at));
                    let (left, right) = (number * width, (number + 1) * width);
                    // Checked at the first token of each part.
                    if at == first.max(left) {
                        keys.extend((first..end.min(right)).map(token));
                        around.extend((first.max(at.saturating_sub(2))..end.min(right + 2)).map(token));
                        lengths.push([end.min(right) - at, at - first]);
                    }
                }
            }
            prop_assert_eq!(list(&chunk.tokens), own.clone());
            prop_assert_eq!(list(&chunk.own(&chunk.around(&all, 0).unwrap(), 0).unwrap()), own);
            if chunks > 1 {
                prop_assert_eq!(list(&chunk.around(&all, 0).unwrap()), around);
            }
            let seen = chunk.seen(None);
            prop_assert_eq!(list(&seen.keys(&all, 0).unwrap()), keys.clone());
            prop_assert_eq!(&seen.spans, &chunk.spans);
            let spans: Vec<_> = chunk.spans.iter().map(|span| [span.len as usize, span.before as usize]).collect();
            prop_assert_eq!(spans, lengths);
            for piece in seen.pieces.iter().copied() {
                let rows = found.rows_of(None, piece.of);
                let there = list(&all.narrow(0, rows.first, piece.len));
                prop_assert_eq!(&there[..], &keys[piece.key as usize..(piece.key + piece.len) as usize]);
            }
        }
    }
}
