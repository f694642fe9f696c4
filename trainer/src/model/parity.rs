//! Parity with Hugging Face's zaya on the fixtures of `fixtures/parity.py`, tensor by tensor.
//!
//! `cargo test -p trainer parity -- --nocapture` prints the table.

use std::collections::BTreeMap;

use curriculum;
use safetensors::{Dtype, SafeTensors};
use tch::{Kind, Tensor};

use super::{
    MicroBatchInput, MicroBatchOutput, ParamSpec, SkipOutput, ZayaConfig, balance_name,
    forward_backward, logits, parameters, rounded,
};

/// The largest relative error allowed, for every tensor.
const BOUND: f64 = 1e-4;

pub(crate) struct Fixture {
    name: &'static str,
    pub(crate) tensors: BTreeMap<String, Tensor>,
    pub(crate) config: ZayaConfig,
    pub(crate) rows: usize,
    pub(crate) seq_len: usize,
    /// `|a - b| / |b|` of Hugging Face's own bf16 against its f32, by tensor.
    bf16: BTreeMap<String, f64>,
}

/// Owned arrays for a micro-batch to borrow.
pub(crate) struct Arrays {
    pub(crate) tokens: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    mask: Vec<u8>,
    boundaries: Vec<Vec<u32>>,
    rows: usize,
    seq_len: usize,
}

impl Arrays {
    /// From rows of tokens and the starts of their documents; the last token of a document has no label.
    pub(crate) fn new(tokens: Vec<i32>, rows: usize, boundaries: Vec<Vec<u32>>) -> Arrays {
        let (count, seq_len) = (tokens.len(), tokens.len() / rows);
        let labels: Vec<i32> = tokens[1..].iter().copied().chain([0]).collect();
        let (mut positions, mut mask) = (vec![0; count], vec![1; count]);
        for (row, starts) in boundaries.iter().enumerate() {
            for (index, &start) in starts.iter().enumerate() {
                let end = starts.get(index + 1).map_or(seq_len, |&next| next as usize);
                for place in start as usize..end {
                    positions[row * seq_len + place] = (place - start as usize) as i32;
                }
                mask[row * seq_len + end - 1] = 0;
            }
        }
        Arrays { tokens, labels, positions, mask, boundaries, rows, seq_len }
    }

    pub(crate) fn input(&self) -> MicroBatchInput<'_> {
        MicroBatchInput {
            tokens: &self.tokens,
            labels: &self.labels,
            positions: &self.positions,
            mask: &self.mask,
            boundaries: &self.boundaries,
            weights: &[],
            rows: self.rows,
            seq_len: self.seq_len,
        }
    }

    pub(crate) fn label_count(&self) -> u64 {
        self.mask.iter().map(|&mask| u64::from(mask)).sum()
    }
}

impl Fixture {
    pub(crate) fn read(name: &'static str) -> Fixture {
        let path = format!("{}/src/model/fixtures/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |view: &safetensors::tensor::TensorView| {
            let shape: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
            let kind = match view.dtype() {
                Dtype::F32 => Kind::Float,
                Dtype::I32 => Kind::Int,
                other => panic!("{other:?}"),
            };
            Tensor::from_data_size(view.data(), &shape, kind)
        };
        let tensors =
            file.tensors().iter().map(|(name, view)| (name.clone(), tensor(view))).collect();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let metadata = header.metadata().as_ref().unwrap();
        let bf16 = serde_json::from_str(&metadata["bf16"]).unwrap();
        let mut fields: BTreeMap<String, serde_json::Value> =
            serde_json::from_str(&metadata["shape"]).unwrap();
        let mut size = |name: &str| fields.remove(name).unwrap().as_u64().unwrap() as usize;
        let (rows, seq_len) = (size("rows"), size("seq_len"));
        let config = ZayaConfig::resolve(Some("zaya1-8b"), &fields).unwrap();
        Fixture { name, tensors, config, rows, seq_len, bf16 }
    }

    pub(crate) fn params(&self) -> Vec<Tensor> {
        let named = |name: &str| self.tensors[&format!("param.{name}")].copy();
        parameters(&self.config).iter().map(|spec| named(&spec.name)).collect()
    }

    pub(crate) fn balance(&self) -> Vec<Tensor> {
        let named = |layer| self.tensors[&format!("param.{}", balance_name(layer))].copy();
        (0..self.config.num_hidden_layers).map(named).collect()
    }

    pub(crate) fn arrays(&self) -> Arrays {
        let tokens = Vec::<i32>::try_from(self.tensors["input_ids"].reshape([-1])).unwrap();
        Arrays::new(tokens, self.rows, vec![vec![0]; self.rows])
    }

    /// Token losses without the last token of each row, which has none.
    fn losses(&self, out: &MicroBatchOutput) -> Tensor {
        let rows = out.token_losses.view([self.rows as i64, self.seq_len as i64]);
        rows.narrow(1, 0, self.seq_len as i64 - 1)
    }
}

/// `|a - b| / |b|`.
pub(crate) fn relative(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
    let (apart, size) = ((a - &b).norm().double_value(&[]), b.norm().double_value(&[]));
    if apart == 0.0 { 0.0 } else { apart / size }
}

/// Asserts that gradients are those of f64, `exact`, within 2e-5 of their length, but those of temperatures within
/// `temperatures`; returns the largest `|a - b| / |b|`.
pub(super) fn assert_gradients(
    specs: &[ParamSpec],
    found: &[Tensor],
    exact: &[Tensor],
    temperatures: f64,
    what: &dyn std::fmt::Debug,
) -> f64 {
    assert_eq!((found.len(), exact.len()), (specs.len(), specs.len()));
    let mut worst = 0f64;
    for ((spec, a), b) in specs.iter().zip(found).zip(exact) {
        let error = relative(a, b);
        worst = worst.max(error);
        let most = if spec.name.ends_with(".temp") { temperatures } else { 2e-5 };
        assert!(error < most, "{what:?} {}: {error:e}", spec.name);
    }
    worst
}

/// The part of a parameter's name that all layers share.
fn family(name: &str) -> String {
    name.split('.').filter(|part| part.parse::<u32>().is_err()).collect::<Vec<_>>().join(".")
}

/// Every weight as matmuls read it.
pub(crate) fn all_rounded(
    specs: &[ParamSpec],
    weights: &[Tensor],
    dtype: curriculum::Dtype,
) -> Vec<Tensor> {
    specs.iter().zip(weights).map(|(spec, weight)| rounded(spec, weight, dtype).unwrap()).collect()
}

/// Errors against Hugging Face's f32, by the names of the fixture, with the weights rounded to `dtype`.
fn errors(
    fixture: &Fixture,
    dtype: curriculum::Dtype,
) -> (BTreeMap<String, f64>, MicroBatchOutput) {
    let Fixture { tensors, config, .. } = fixture;
    let (specs, balance, arrays) = (parameters(config), fixture.balance(), fixture.arrays());
    let params = all_rounded(&specs, &fixture.params(), dtype);
    let out =
        forward_backward(config, &params, &balance, &arrays.input(), arrays.label_count()).unwrap();
    let logits = logits(config, &params, &balance, &arrays.input()).unwrap();
    let loss = Tensor::from_slice(&[out.loss / out.labels as f64]).to_kind(Kind::Float);
    let mut found = BTreeMap::from([
        ("logits".to_owned(), logits.view([-1, config.vocab_size])),
        ("token_losses".to_owned(), fixture.losses(&out)),
        ("loss".to_owned(), loss),
    ]);
    let named = specs.iter().zip(&out.grads);
    found.extend(named.map(|(spec, grad)| (format!("grad.{}", spec.name), grad.shallow_clone())));
    let of = |(name, tensor): (String, Tensor)| {
        assert_eq!(tensor.kind(), Kind::Float, "{name} leaves the model in f32");
        let error = relative(&tensor, &tensors[&name].view_as(&tensor));
        (name, error)
    };
    (found.into_iter().map(of).collect(), out)
}

/// In bf16 no tensor is more than twice as far from Hugging Face's f32 as Hugging Face's own bf16 is.
///
/// The error of the mean loss is chance, because it is one number: the losses of all tokens are compared instead.
/// Likewise temperatures, one number per key head, are compared over all layers together.
fn check_bf16(fixture: &Fixture) {
    let (found, out) = errors(fixture, curriculum::Dtype::Bf16);
    let counts: Vec<i32> = out.counts.iter().flatten().map(|&count| count as i32).collect();
    assert_eq!(Tensor::from_slice(&counts), fixture.tensors["counts"].reshape([-1]));
    println!("{} in bf16: |a - b| / |b| of ours, of Hugging Face's, ratio", fixture.name);
    for (name, ours) in &found {
        let reference = fixture.bf16.get(name).copied().unwrap_or_default();
        println!("  {ours:.1e}  {reference:.1e}  {:.2}  {name}", ours / reference);
        assert!(*ours > BOUND || reference == 0.0 || name == "loss", "{name}: that was not bf16");
    }
    let mut temperatures = [0.0; 2];
    for (name, ours) in found.iter().filter(|(name, _)| *name != "loss") {
        let reference = fixture.bf16.get(name).copied().unwrap_or_default();
        if name.ends_with(".temp") {
            let length = fixture.tensors[name].norm().double_value(&[]);
            for (sum, error) in temperatures.iter_mut().zip([*ours, reference]) {
                *sum += (error * length).powi(2);
            }
            continue;
        }
        assert!(*ours <= 2.0 * reference, "{name}: {ours:e}, Hugging Face's {reference:e}");
    }
    let [ours, reference] = temperatures.map(f64::sqrt);
    assert!(ours <= 2.0 * reference, "temperatures: {ours:e}, Hugging Face's {reference:e}");
}

#[test]
fn parity_in_bf16() {
    check_bf16(&Fixture::read("wide"));
    check_bf16(&Fixture::read("narrow"));
}

fn check(fixture: &Fixture) {
    let Fixture { name, tensors, .. } = fixture;
    let (found, out) = errors(fixture, curriculum::Dtype::F32);
    let mut table = BTreeMap::new();
    for (tensor, error) in found {
        let entry = table.entry(family(&tensor)).or_insert(0.0);
        *entry = f64::max(*entry, error);
    }
    println!("{name}: largest |a - b| / |b| over layers, bound {BOUND:e}");
    for (tensor, error) in &table {
        println!("  {error:.1e}  {tensor}");
    }
    for (tensor, error) in &table {
        assert!(*error <= BOUND, "{name}: {tensor} differs by {error:e}");
    }
    let counts: Vec<i32> = out.counts.iter().flatten().map(|&count| count as i32).collect();
    assert_eq!(Tensor::from_slice(&counts), tensors["counts"].reshape([-1]));
}

#[test]
fn parity_wide() {
    check(&Fixture::read("wide"));
}

#[test]
fn parity_narrow() {
    check(&Fixture::read("narrow"));
}

/// z-loss, at the weights nearest to the logits: the embedding, which is also the head, and the final norm.
#[test]
fn parity_with_z_loss() {
    for name in ["wide", "narrow"] {
        let fixture = Fixture::read(name);
        let config = ZayaConfig { z_loss: 0.01, ..fixture.config.clone() };
        let (params, balance, arrays) = (fixture.params(), fixture.balance(), fixture.arrays());
        let out =
            forward_backward(&config, &params, &balance, &arrays.input(), arrays.label_count())
                .unwrap();
        let wanted = fixture.tensors["z_loss"].double_value(&[0]);
        assert!((out.z_loss - wanted).abs() <= BOUND * wanted, "{} and {wanted}", out.z_loss);
        let mut compared = 0;
        for (spec, grad) in parameters(&config).iter().zip(&out.grads) {
            let of = |kind: &str| fixture.tensors.get(&format!("{kind}.{}", spec.name));
            let Some(wanted) = of("z_grad") else { continue };
            let error = relative(grad, wanted);
            assert!(error <= BOUND, "{name} {}: {error:e}", spec.name);
            let without = relative(of("grad").unwrap(), wanted);
            assert!(without > 100.0 * BOUND, "{name} {}: z-loss adds {without:e}", spec.name);
            println!("{name} {}: {error:.1e}, of which z-loss is {without:.1e}", spec.name);
            compared += 1;
        }
        assert_eq!(compared, 2);
    }
}

/// An expert without a token has exact zeros, not small numbers.
#[test]
fn idle_experts_have_exact_zeros() {
    let mut idle = 0;
    for fixture in [Fixture::read("wide"), Fixture::read("narrow")] {
        let arrays = fixture.arrays();
        let out = forward_backward(
            &fixture.config,
            &fixture.params(),
            &fixture.balance(),
            &arrays.input(),
            7,
        )
        .unwrap();
        for (spec, grad) in parameters(&fixture.config).iter().zip(&out.grads) {
            let Some(rest) = spec.name.strip_prefix("model.layers.") else { continue };
            if !rest.contains(".mlp.experts.") {
                continue;
            }
            let layer: usize = rest.split('.').next().unwrap().parse().unwrap();
            for expert in 0..fixture.config.num_experts {
                let bits = Vec::<f32>::try_from(grad.get(expert).reshape([-1])).unwrap();
                let zero = bits.iter().all(|value| value.to_bits() == 0);
                assert_eq!(zero, out.counts[layer][expert as usize] == 0, "{} {expert}", spec.name);
                idle += u32::from(zero);
            }
        }
    }
    assert!(idle >= 2, "the fixtures have idle experts");
}

/// Documents packed in a row give the losses and gradients that each gives alone.
#[test]
fn documents_in_a_row_are_documents_alone() {
    for skip in [SkipOutput::Zero, SkipOutput::Identity] {
        for name in ["wide", "narrow"] {
            let fixture = Fixture::read(name);
            let config = ZayaConfig { skip, ..fixture.config.clone() };
            let (params, balance, tokens) =
                (fixture.params(), fixture.balance(), fixture.arrays().tokens);
            let starts: Vec<Vec<u32>> =
                [vec![0, 1, 3, 11], vec![0], vec![0, 5, 6]][..fixture.rows].to_vec();
            let together = Arrays::new(tokens.clone(), fixture.rows, starts.clone());
            let label_count = together.label_count();
            let whole =
                forward_backward(&config, &params, &balance, &together.input(), label_count)
                    .unwrap();
            let (mut losses, mut grads, mut counts) = (Vec::new(), Vec::new(), 0);
            for (row, starts) in starts.iter().enumerate() {
                for (index, &start) in starts.iter().enumerate() {
                    let end = starts.get(index + 1).map_or(fixture.seq_len, |&next| next as usize);
                    let range = row * fixture.seq_len + start as usize..row * fixture.seq_len + end;
                    let alone = Arrays::new(tokens[range].to_vec(), 1, vec![vec![0]]);
                    let out =
                        forward_backward(&config, &params, &balance, &alone.input(), label_count)
                            .unwrap();
                    losses.push(out.token_losses);
                    grads.push(out.grads);
                    counts += out.counts.iter().flatten().sum::<u64>();
                }
            }
            assert_eq!(counts, whole.counts.iter().flatten().sum::<u64>());
            assert!(relative(&whole.token_losses, &Tensor::cat(&losses, 0)) < 1e-5);
            for (index, spec) in parameters(&config).iter().enumerate() {
                let sum = grads.iter().map(|grads| grads[index].to_kind(Kind::Double));
                let error = relative(&whole.grads[index], &sum.sum::<Tensor>());
                assert!(error < 1e-5, "{name} {}: {error:e}", spec.name);
            }
        }
    }
}

/// With `document_mask = false` boundaries and positions are ignored: that is the reference's packing.
#[test]
fn the_reference_behaviour_ignores_boundaries() {
    let fixture = Fixture::read("wide");
    let config = ZayaConfig { document_mask: false, ..fixture.config.clone() };
    let (params, balance) = (fixture.params(), fixture.balance());
    let whole = fixture.arrays();
    let cut = Arrays { boundaries: vec![vec![0, 7]; fixture.rows], ..fixture.arrays() };
    let cut = Arrays { positions: (0..48).map(|i| i % 5).collect(), ..cut };
    let compute = |config: &ZayaConfig, arrays: &Arrays| {
        forward_backward(config, &params, &balance, &arrays.input(), 46).unwrap().token_losses
    };
    assert_eq!(compute(&config, &cut), compute(&fixture.config, &whole));
    assert_ne!(compute(&fixture.config, &cut), compute(&fixture.config, &whole));
}
