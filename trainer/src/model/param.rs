//! Parameters: each layer declares its own, once, in its own file. Only [`initial`] allocates a weight.
//!
//! The canonical order is the order of declaration. Names and shapes are those of Hugging Face's `ZayaForCausalLM`, so
//! that a checkpoint needs no renaming; each declaration also has the name in Zyphra's older layout.

use std::ops::{Index, Range};

use contract::{Key, Purpose, draw};
use curriculum::Dtype;
use tch::{Kind, Tensor};

use super::ZayaConfig;
use super::normal::standard_normal;
use super::sharding::Sharding;

/// A parameter by its index in the canonical order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId(usize);

impl ParamId {
    /// Its index in any list in canonical order.
    pub fn index(self) -> usize {
        self.0
    }
}

/// Which optimizer updates a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A linear weight: Muon.
    Matrix,
    /// `[experts, rows, columns]`: every expert's matrix is a separate Muon matrix.
    Experts,
    /// Embedding, head and convolutions: AdamW.
    Elementwise,
    /// Biases, norms, scales, temperatures: AdamW without weight decay, since zero is not neutral for them.
    Vector,
}

/// How a parameter is initialized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    /// The same number everywhere.
    Constant(f32),
}

/// The declaration of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Hugging Face's name.
    pub name: String,
    /// Its name in Zyphra's older layout; for stacked experts with `*` for the number of the expert.
    pub zyphra: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Which optimizer updates it.
    pub role: Role,
    /// How it is initialized.
    pub init: Init,
    /// Whether it is an operand of the large matmuls, which take most of the time and whose operands bf16 rounds.
    pub in_large_products: bool,
    /// How it is cut into shards that ranks hold for each other; `None` where each rank holds the whole parameter.
    pub sharding: Option<Sharding>,
    /// Whether it directly follows the previous parameter in memory, so that a matmul reads both as one matrix.
    pub adjoins: bool,
}

impl ParamSpec {
    /// The number of its elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&size| size as u64).product()
    }

    /// The dtype in which the model reads it: under `Bf16` the operands of large matmuls are rounded.
    ///
    /// Vectors, the depthwise convolution and the router's small network stay f32: they are not in large matmuls.
    pub fn kind(&self, dtype: Dtype) -> Kind {
        match dtype {
            Dtype::Bf16 if self.in_large_products => Kind::BFloat16,
            _ => Kind::Float,
        }
    }
}

/// How many numbers of these parameters compute a token: all, but of the experts those that it is routed to.
pub fn active_parameters(config: &ZayaConfig, specs: &[ParamSpec]) -> u64 {
    let active = |spec: &ParamSpec| match spec.role {
        Role::Experts => {
            spec.elements() / config.num_experts as u64 * config.num_experts_per_tok as u64
        }
        _ => spec.elements(),
    };
    specs.iter().map(active).sum()
}

/// Name of an output head that is not the embedding.
pub(crate) const HEAD: &str = "lm_head.weight";

/// Name of the balancing biases of a layer: a buffer, not a parameter.
pub(crate) fn balance_name(layer: i64) -> String {
    format!("model.layers.{layer}.mlp.gate.balancing_biases")
}

/// Where a layer declares its parameters: under a name prefix, in the order of the calls.
pub(super) struct ParamDeclarations<'a> {
    specs: &'a mut Vec<ParamSpec>,
    /// Standard deviation of initial weights.
    deviation: f64,
    name: String,
    zyphra: String,
}

impl<'a> ParamDeclarations<'a> {
    /// At the root of all names.
    pub(super) fn new(config: &ZayaConfig, specs: &'a mut Vec<ParamSpec>) -> ParamDeclarations<'a> {
        let (name, zyphra) = ("model".to_owned(), "model".to_owned());
        ParamDeclarations { specs, deviation: config.initializer_range, name, zyphra }
    }

    /// Under these names: ours, and Zyphra's.
    pub(super) fn inside(&mut self, name: &str, zyphra: &str) -> ParamDeclarations<'_> {
        let (name, zyphra) = (format!("{}.{name}", self.name), format!("{}.{zyphra}", self.zyphra));
        ParamDeclarations { specs: &mut *self.specs, deviation: self.deviation, name, zyphra }
    }

    /// A linear weight, `[rows, columns]`.
    pub(super) fn matrix(&mut self, name: &str, zyphra: &str, shape: [i64; 2]) -> ParamId {
        self.drawn(name, zyphra, &shape, Role::Matrix)
    }

    /// A linear weight of a small network: it stays f32, since a route changed by rounding costs more than f32 does.
    pub(super) fn small_matrix(&mut self, name: &str, zyphra: &str, shape: [i64; 2]) -> ParamId {
        let id = self.matrix(name, zyphra, shape);
        self.in_f32(id)
    }

    /// A matrix for each expert, `[experts, rows, columns]`.
    pub(super) fn experts(&mut self, name: &str, zyphra: &str, shape: [i64; 3]) -> ParamId {
        self.drawn(name, zyphra, &shape, Role::Experts)
    }

    /// The embedding, `[rows, columns]`.
    pub(super) fn embedding(&mut self, name: &str, zyphra: &str, shape: [i64; 2]) -> ParamId {
        self.drawn(name, zyphra, &shape, Role::Elementwise)
    }

    /// An output head that is not the embedding, `[rows, columns]`: outside of the other names, as in Hugging Face.
    pub(super) fn head(&mut self, shape: [i64; 2]) -> ParamId {
        let spec = self.spec("", "", &shape, Role::Elementwise);
        self.push(ParamSpec { name: HEAD.to_owned(), zyphra: HEAD.to_owned(), ..spec })
    }

    /// A convolution that mixes channels, `[channels, inputs, taps]`: a matmul.
    pub(super) fn convolution(&mut self, name: &str, zyphra: &str, shape: [i64; 3]) -> ParamId {
        self.drawn(name, zyphra, &shape, Role::Elementwise)
    }

    /// A depthwise convolution, `[channels, 1, taps]`: not a matmul, so it stays f32.
    pub(super) fn depthwise(&mut self, name: &str, zyphra: &str, shape: [i64; 3]) -> ParamId {
        let id = self.drawn(name, zyphra, &shape, Role::Elementwise);
        self.in_f32(id)
    }

    /// A bias, norm, scale or temperature with the initial value `value`.
    pub(super) fn vector(&mut self, name: &str, zyphra: &str, size: i64, value: f32) -> ParamId {
        let spec = self.spec(name, zyphra, &[size], Role::Vector);
        self.push(ParamSpec { init: Init::Constant(value), in_large_products: false, ..spec })
    }

    fn drawn(&mut self, name: &str, zyphra: &str, shape: &[i64], role: Role) -> ParamId {
        let spec = self.spec(name, zyphra, shape, role);
        self.push(spec)
    }

    fn spec(&self, name: &str, zyphra: &str, shape: &[i64], role: Role) -> ParamSpec {
        ParamSpec {
            name: format!("{}.{name}", self.name),
            zyphra: format!("{}.{zyphra}", self.zyphra),
            shape: shape.to_vec(),
            role,
            init: Init::Normal(self.deviation),
            in_large_products: true,
            sharding: None,
            adjoins: false,
        }
    }

    fn push(&mut self, spec: ParamSpec) -> ParamId {
        self.specs.push(spec);
        ParamId(self.specs.len() - 1)
    }

    /// Sets how a parameter is sharded.
    pub(super) fn cut(&mut self, id: ParamId, sharding: Sharding) -> ParamId {
        self.specs[id.0].sharding = Some(sharding);
        id
    }

    /// Places a parameter directly after the previous one in memory.
    pub(super) fn adjoining(&mut self, id: ParamId) {
        self.specs[id.0].adjoins = true;
    }

    fn in_f32(&mut self, id: ParamId) -> ParamId {
        self.specs[id.0].in_large_products = false;
        id
    }
}

/// The weights of a model in canonical order, by [`ParamId`].
#[derive(Clone, Copy)]
pub(super) struct Weights<'a>(pub(super) &'a [Tensor]);

impl<'a> Weights<'a> {
    /// The weight, for the lifetime of the list.
    pub(super) fn of(self, id: ParamId) -> &'a Tensor {
        &self.0[id.0]
    }
}

impl Index<ParamId> for Weights<'_> {
    type Output = Tensor;

    fn index(&self, id: ParamId) -> &Tensor {
        &self.0[id.0]
    }
}

/// A weight as matmuls read it: rounded to nearest even if they read it in bf16, otherwise the same tensor.
pub fn rounded(spec: &ParamSpec, weight: &Tensor, dtype: Dtype) -> kernels::Result<Tensor> {
    Ok(match spec.kind(dtype) {
        Kind::Float => weight.shallow_clone(),
        kind => weight.f_to_kind(kind)?,
    })
}

/// The elements `part` of a parameter's initial values, flat, in f32, on CPU.
///
/// Every number is sampled from (seed, parameter name, index), so it depends neither on the parameter's shape nor on
/// the rank that samples it.
pub(crate) fn initial(spec: &ParamSpec, seed: u64, part: Range<u64>) -> kernels::Result<Tensor> {
    let key = Key::from_seed(seed).child("init").child(&spec.name);
    let values: Vec<f32> = match spec.init {
        Init::Constant(value) => vec![value; (part.end - part.start) as usize],
        Init::Normal(deviation) => part
            .map(|index| (standard_normal(draw(key, Purpose::Init, index)) * deviation) as f32)
            .collect(),
    };
    Ok(Tensor::f_from_slice(&values)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{init, parameters};

    /// The embedding and head, always the first parameter.
    const EMBEDDING: &str = "model.embed_tokens.weight";

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
        // The published counts of a router exclude its balancing biases, as parameters() does.
        assert_eq!(count(&config, "layers.3.mlp.gate"), 660_992);
        assert_eq!(count(&config, "layers.0.mlp.gate"), 660_736);
    }

    /// The order that checkpoints, digests and Hugging Face rely on, written by hand.
    #[test]
    fn the_canonical_order_stands() {
        let config = ZayaConfig::preset("zaya1-nano").unwrap();
        let names: Vec<_> = parameters(&config).into_iter().map(|spec| spec.name).collect();
        assert_eq!(names[0], EMBEDDING);
        assert_eq!(
            names[1..3],
            ["scale", "bias"].map(|part| format!("model.input_hidden_states_{part}"))
        );
        let residual = |at: &str| {
            ["hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias"]
                .map(|part| format!("{at}_residual_scale.{part}"))
        };
        let linear = |at: &str| [format!("{at}.weight"), format!("{at}.bias")];
        let qkv = ["q_proj", "k_proj", "v_proj_current", "v_proj_delayed"];
        let mut layer = vec!["input_layernorm.weight".to_owned()];
        layer.extend(qkv.map(|part| format!("self_attn.qkv_proj.{part}.weight")));
        layer.extend(linear("self_attn.qkv_proj.conv_qk_depthwise"));
        layer.extend(linear("self_attn.qkv_proj.conv_qk_grouped"));
        layer.extend(["qk_norm.temp", "o_proj.weight"].map(|part| format!("self_attn.{part}")));
        layer.extend(residual("post_attention"));
        layer.push("post_attention_layernorm.weight".to_owned());
        layer.extend(linear("mlp.gate.down_proj"));
        layer.push("mlp.gate.router_states_scale".to_owned());
        layer.push("mlp.gate.router_mlp.norm.weight".to_owned());
        layer.extend(
            ["fc1", "fc2"].iter().flat_map(|part| linear(&format!("mlp.gate.router_mlp.{part}"))),
        );
        layer.push("mlp.gate.router_mlp.out_proj.weight".to_owned());
        layer.extend(["gate_up_proj", "down_proj"].map(|part| format!("mlp.experts.{part}")));
        layer.extend(residual("post_mlp"));
        let layers = (0..config.num_hidden_layers).flat_map(|number| {
            // The first router receives no state.
            let own =
                layer.iter().filter(move |part| number > 0 || !part.contains("router_states"));
            own.map(move |part| format!("model.layers.{number}.{part}"))
        });
        let layers: Vec<String> = layers.collect();
        assert_eq!(names[3..names.len() - 1], layers);
        assert_eq!(names[names.len() - 1], "model.norm.weight");
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
                _ if spec.shape.len() > 1 => Role::Elementwise,
                _ => Role::Vector,
            };
            assert_eq!(spec.role, wanted, "{}", spec.name);
            assert_eq!(spec.shape.len(), if expert { 3 } else { spec.shape.len() });
        }
    }

    /// bf16 rounds the weights of the large matmuls, and leaves small ones in f32.
    #[test]
    fn large_products_are_rounded() {
        for spec in parameters(&ZayaConfig::preset("zaya1-8b").unwrap()) {
            let small = ["router_mlp", "depthwise"].iter().any(|part| spec.name.contains(part));
            assert_eq!(spec.in_large_products, spec.shape.len() > 1 && !small, "{}", spec.name);
        }
    }

    #[test]
    fn weights_are_drawn_by_address() {
        let small = ZayaConfig { vocab_size: 64, ..ZayaConfig::preset("zaya1-nano").unwrap() };
        let large = ZayaConfig { vocab_size: 96, num_hidden_layers: 7, ..small.clone() };
        let (a, b) = (init(&small, 5).unwrap(), init(&large, 5).unwrap());
        assert_eq!(a[0], b[0].narrow(0, 0, 64), "the first rows of an embedding");
        assert_eq!(a[20], b[20]);
        assert_ne!(a[4], init(&small, 6).unwrap()[4]);
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
