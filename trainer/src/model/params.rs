//! Every parameter: name, shape, who updates it, how it begins. Nothing here allocates a weight except [`init`].
//!
//! Names and shapes are those of Hugging Face's `ZayaForCausalLM`, so that a checkpoint needs no renaming.

use contract::{Key, Purpose, draw};
use curriculum::Dtype;
use tch::{Kind, Tensor};

use super::ZayaConfig;
use super::normal::standard_normal;

/// Which optimizer owns a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A linear weight: Muon.
    Matrix,
    /// `[experts, rows, columns]`: every expert's matrix is a Muon matrix by itself.
    Experts,
    /// Everything else: AdamW.
    Elementwise,
}

/// How a parameter begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    /// The same number everywhere.
    Constant(f32),
}

/// A parameter before it exists.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Hugging Face's name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Who updates it.
    pub role: Role,
    /// How it begins.
    pub init: Init,
}

impl ParamSpec {
    /// Numbers in it.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&size| size as u64).product()
    }

    /// Whether it is an operand of the products that most of the time goes into.
    pub(crate) fn in_large_products(&self) -> bool {
        let small = self.name.contains(".router_mlp.") || self.name.contains("conv_qk_depthwise");
        self.shape.len() > 1 && !small
    }
}

/// The embedding and head, always the first parameter.
pub const EMBEDDING: &str = "model.embed_tokens.weight";

/// Parameters outside the layers that come first: embedding, input scale, input bias.
pub(super) const HEAD_PARAMS: usize = 3;

/// Parameters of a layer with a router state from the layer before; the first layer has one less.
pub(super) const LAYER_PARAMS: usize = 31;

/// Name of the balancing biases of a layer: a buffer, not a parameter.
pub fn balance_name(layer: i64) -> String {
    format!("model.layers.{layer}.mlp.gate.balancing_biases")
}

/// Every parameter in canonical order.
pub fn parameters(config: &ZayaConfig) -> Vec<ParamSpec> {
    let mut list = List { config, specs: Vec::new() };
    let hidden = config.hidden_size;
    list.normal("model.embed_tokens.weight", &[config.vocab_size, hidden], Role::Elementwise);
    list.constant("model.input_hidden_states_scale", hidden, 1.0);
    list.constant("model.input_hidden_states_bias", hidden, 0.0);
    for layer in 0..config.num_hidden_layers {
        list.attention(layer);
        list.router(layer);
        list.experts(layer);
    }
    list.constant("model.norm.weight", hidden, 1.0);
    list.specs
}

struct List<'a> {
    config: &'a ZayaConfig,
    specs: Vec<ParamSpec>,
}

impl List<'_> {
    fn normal(&mut self, name: &str, shape: &[i64], role: Role) {
        let init = Init::Normal(self.config.initializer_range);
        self.specs.push(ParamSpec { name: name.to_owned(), shape: shape.to_vec(), role, init });
    }

    fn constant(&mut self, name: &str, size: i64, value: f32) {
        let (role, init) = (Role::Elementwise, Init::Constant(value));
        self.specs.push(ParamSpec { name: name.to_owned(), shape: vec![size], role, init });
    }

    fn residual(&mut self, prefix: &str) {
        for (part, value) in [
            ("hidden_states_scale", 1.0),
            ("hidden_states_bias", 0.0),
            ("residual_scale", 1.0),
            ("residual_bias", 0.0),
        ] {
            self.constant(&format!("{prefix}.{part}"), self.config.hidden_size, value);
        }
    }

    fn attention(&mut self, layer: i64) {
        let config = self.config;
        let (hidden, dim) = (config.hidden_size, config.head_dim);
        let (query, key, conv) = (config.query_size(), config.key_size(), config.conv_size());
        let at = format!("model.layers.{layer}");
        let qkv = format!("{at}.self_attn.qkv_proj");
        self.constant(&format!("{at}.input_layernorm.weight"), hidden, 1.0);
        for (part, rows) in [
            ("q_proj", query),
            ("k_proj", key),
            ("v_proj_current", key / 2),
            ("v_proj_delayed", key / 2),
        ] {
            self.normal(&format!("{qkv}.{part}.weight"), &[rows, hidden], Role::Matrix);
        }
        let depthwise = format!("{qkv}.conv_qk_depthwise");
        self.normal(&format!("{depthwise}.weight"), &[conv, 1, 2], Role::Elementwise);
        self.constant(&format!("{depthwise}.bias"), conv, 0.0);
        let grouped = format!("{qkv}.conv_qk_grouped");
        self.normal(&format!("{grouped}.weight"), &[conv, dim, 2], Role::Elementwise);
        self.constant(&format!("{grouped}.bias"), conv, 0.0);
        // Hugging Face starts at 0, a placeholder for a checkpoint: keys would be 0 and attention uniform.
        self.constant(&format!("{at}.self_attn.qk_norm.temp"), config.num_key_value_heads, 1.0);
        self.normal(&format!("{at}.self_attn.o_proj.weight"), &[hidden, query], Role::Matrix);
        self.residual(&format!("{at}.post_attention_residual_scale"));
    }

    fn router(&mut self, layer: i64) {
        let (hidden, router) = (self.config.hidden_size, self.config.router_hidden_size);
        let classes = self.config.router_classes();
        let gate = format!("model.layers.{layer}.mlp.gate");
        let mlp = format!("{gate}.router_mlp");
        let norm = format!("model.layers.{layer}.post_attention_layernorm.weight");
        self.constant(&norm, hidden, 1.0);
        self.normal(&format!("{gate}.down_proj.weight"), &[router, hidden], Role::Matrix);
        self.constant(&format!("{gate}.down_proj.bias"), router, 0.0);
        if layer > 0 {
            self.constant(&format!("{gate}.router_states_scale"), router, 1.0);
        }
        self.constant(&format!("{mlp}.norm.weight"), router, 1.0);
        for part in ["fc1", "fc2"] {
            self.normal(&format!("{mlp}.{part}.weight"), &[router, router], Role::Matrix);
            self.constant(&format!("{mlp}.{part}.bias"), router, 0.0);
        }
        self.normal(&format!("{mlp}.out_proj.weight"), &[classes, router], Role::Matrix);
    }

    fn experts(&mut self, layer: i64) {
        let (hidden, inner) = (self.config.hidden_size, self.config.moe_intermediate_size);
        let (count, at) = (self.config.num_experts, format!("model.layers.{layer}"));
        let experts = format!("{at}.mlp.experts");
        self.normal(&format!("{experts}.gate_up_proj"), &[count, 2 * inner, hidden], Role::Experts);
        self.normal(&format!("{experts}.down_proj"), &[count, hidden, inner], Role::Experts);
        self.residual(&format!("{at}.post_mlp_residual_scale"));
    }
}

/// A weight as products see it: under `Bf16` a matrix is rounded to it, to nearest even; anything else is the same tensor.
///
/// Vectors, the depthwise convolution and the router's small network stay f32: they are no large products, and a route
/// that flips by rounding costs more than they do.
pub fn rounded(spec: &ParamSpec, weight: &Tensor, dtype: Dtype) -> Tensor {
    match dtype {
        Dtype::Bf16 if spec.in_large_products() => weight.to_kind(Kind::BFloat16),
        _ => weight.shallow_clone(),
    }
}

/// The weights a run begins with, in f32, on CPU.
///
/// Every number is drawn at (seed, parameter name, index), so none depends on another's shape or place.
pub fn init(config: &ZayaConfig, seed: u64) -> Vec<Tensor> {
    let key = Key::from_seed(seed).child("init");
    parameters(config).iter().map(|spec| init_one(spec, key.child(&spec.name))).collect()
}

fn init_one(spec: &ParamSpec, key: Key) -> Tensor {
    let values: Vec<f32> = match spec.init {
        Init::Constant(value) => vec![value; spec.elements() as usize],
        Init::Normal(deviation) => (0..spec.elements())
            .map(|index| (standard_normal(draw(key, Purpose::Init, index)) * deviation) as f32)
            .collect(),
    };
    Tensor::from_slice(&values).reshape(&spec.shape)
}

/// The balancing biases a run begins with, one tensor per layer: 0, and -1 for the skip class.
pub fn init_balance(config: &ZayaConfig) -> Vec<Tensor> {
    let mut values = vec![0f32; config.num_experts as usize];
    values.push(-1.0);
    (0..config.num_hidden_layers).map(|_| Tensor::from_slice(&values)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(config: &ZayaConfig, name: &str) -> u64 {
        let named = |spec: &&ParamSpec| spec.name.contains(name);
        parameters(config).iter().filter(named).map(ParamSpec::elements).sum()
    }

    #[test]
    fn zaya1_8b_has_the_published_counts() {
        let config = ZayaConfig::preset("zaya1-8b").unwrap();
        let all = count(&config, "");
        assert_eq!(count(&config, EMBEDDING), 537_133_056);
        assert_eq!(all - count(&config, EMBEDDING), 8_303_355_728);
        assert_eq!(count(&config, "layers.3.self_attn"), 5_575_682);
        assert_eq!(count(&config, "layers.3.mlp.experts"), 201_326_592);
        // The published counts of a router leave its balancing biases out, as parameters() does.
        assert_eq!(count(&config, "layers.3.mlp.gate"), 660_992);
        assert_eq!(count(&config, "layers.0.mlp.gate"), 660_736);
    }

    #[test]
    fn layers_stand_where_the_model_looks_for_them() {
        let config = ZayaConfig::preset("zaya1-nano").unwrap();
        let specs = parameters(&config);
        let layers = config.num_hidden_layers as usize;
        assert_eq!(specs.len(), HEAD_PARAMS + layers * LAYER_PARAMS - 1 + 1);
        for layer in 0..layers {
            let first = HEAD_PARAMS + layer * LAYER_PARAMS - usize::from(layer > 0);
            assert_eq!(specs[first].name, format!("model.layers.{layer}.input_layernorm.weight"));
        }
        let names: std::collections::BTreeSet<_> = specs.iter().map(|spec| &spec.name).collect();
        assert_eq!(names.len(), specs.len());
    }

    #[test]
    fn muon_takes_linear_weights_and_nothing_else() {
        for spec in parameters(&ZayaConfig::preset("zaya1-8b").unwrap()) {
            let linear = spec.name.contains("proj.weight")
                || spec.name.contains("v_proj_")
                || (spec.name.contains(".fc") && spec.name.ends_with(".weight"));
            let expert = spec.name.contains(".experts.");
            let wanted = match (linear, expert) {
                (true, _) => Role::Matrix,
                (_, true) => Role::Experts,
                _ => Role::Elementwise,
            };
            assert_eq!(spec.role, wanted, "{}", spec.name);
            assert_eq!(spec.shape.len(), if expert { 3 } else { spec.shape.len() });
        }
    }

    #[test]
    fn weights_are_drawn_by_address() {
        let small = ZayaConfig { vocab_size: 64, ..ZayaConfig::preset("zaya1-nano").unwrap() };
        let large = ZayaConfig { vocab_size: 96, num_hidden_layers: 7, ..small.clone() };
        let (a, b) = (init(&small, 5), init(&large, 5));
        assert_eq!(a[0], b[0].narrow(0, 0, 64), "the first rows of an embedding");
        assert_eq!(a[20], b[20]);
        assert_ne!(a[4], init(&small, 6)[4]);
        for (spec, tensor) in parameters(&small).iter().zip(&a) {
            assert_eq!(spec.shape, tensor.size(), "{}", spec.name);
            if let (Init::Normal(deviation), 10_000..) = (spec.init, spec.elements()) {
                let (mean, std) = (tensor.mean(tch::Kind::Double), tensor.std(true));
                let bound = 5.0 * deviation / (spec.elements() as f64).sqrt();
                assert!(mean.double_value(&[]).abs() < bound, "{}", spec.name);
                assert!((std.double_value(&[]) - deviation).abs() < bound, "{}", spec.name);
            }
        }
    }
}
