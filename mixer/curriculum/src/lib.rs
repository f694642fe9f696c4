//! The curriculum: the one file that says what is trained. `curricula/KEYS.md` is the reference of its keys.
//!
//! Whatever decides a bit stands here; whatever only decides speed (ranks, workers, threads, device) is a flag and
//! never does. Weights are exact ratios, taken from the text as typed.

#![forbid(unsafe_code)]

mod amendment;
mod canonical;
mod difference;
pub mod guard;
mod mix;
mod model;
mod numbers;
mod packing;
mod parse;
mod places;
pub mod rate;
mod text;

use std::collections::BTreeMap;
use std::fmt;

use contract::ratio::{Ratio, gcd};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de};

pub use amendment::{AddedStore, Amendment, PhaseSegment};
pub use difference::Difference;
pub use model::ModelTable;
pub use numbers::{
    AutoClipChange, ChangedNumber, Numbers, NumbersChange, OptimizerChange, ScheduleChange,
    SkipStepChange,
};
pub use packing::Packing;
pub use parse::schema;

/// The largest sum of the integer weights of a phase: twice its product with a sample number fits 128 bits.
pub const WEIGHT_MAX: u64 = 1 << 62;

/// A parsed curriculum, every default filled in.
#[derive(Clone, Debug)]
pub struct Curriculum {
    /// Stores, or descriptions of stores, as written: relative paths start at the curriculum's folder.
    pub stores: Vec<String>,
    /// The weights that the run begins with, as written: the folder of a start, relative to the curriculum's. `None`: drawn.
    pub start: Option<String>,
    /// The root of every draw.
    pub seed: u64,
    /// What the model computes in.
    pub dtype: Dtype,
    /// The phases, in order.
    pub phases: Vec<Phase>,
    /// What is said of single sources; [`Curriculum::max_epochs`] knows the default.
    pub sources: BTreeMap<String, SourceSpec>,
    /// The model: what the trainer makes of these values is its own affair.
    pub model: ModelTable,
    /// The optimizer.
    pub optimizer: OptimizerSpec,
    /// The learning rate's schedule.
    pub schedule: ScheduleSpec,
    /// Which steps are skipped; `None`: none is.
    pub skip_step: Option<SkipStepSpec>,
    /// A clip that follows the norms of the steps before; `None`: only [`OptimizerSpec::clip`] clips.
    pub auto_clip: Option<AutoClipSpec>,
    /// What changes from some step on, in the order of their steps.
    pub amendments: Vec<Amendment>,
    places: places::Places,
}

/// What the model computes in; master weights and sums are 32-bit floats either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
}

/// What a phase does with what an earlier `seq_len` left of the open group, where its windows are not whole numbers of the
/// phase's sequences (where they are, they are split and served first).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RemainderRule {
    /// Served first, windows joined into longer sequences.
    #[default]
    Join,
    /// Put off until a phase in whose length it fits, or to the end of the epoch.
    Defer,
}

/// A phase: constant mix, sequence length and batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    /// Its name, unique; names things for people and decides nothing.
    pub name: String,
    /// Steps, at least one.
    pub steps: u64,
    /// Tokens in a sequence.
    pub seq_len: u32,
    /// Sequences in a step.
    pub batch: u64,
    /// Sequences in a micro-batch, which is one forward and backward; divides `batch`.
    pub micro_batch: u64,
    /// Equal parts into which every sequence is cut inside a micro-batch; divides `seq_len`.
    pub context_chunks: u64,
    /// Parts into which the widths of the model are cut inside a micro-batch.
    pub weight_shards: u64,
    /// What becomes of text that is left of a group which was opened at another `seq_len`.
    pub remainder: RemainderRule,
    /// The sources and their weights, all above zero.
    pub mix: BTreeMap<String, Ratio>,
    /// What of the model differs during this phase (`rope_theta` where the sequences grow).
    pub model: ModelTable,
}

/// `[source.NAME]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceSpec {
    /// How many times the source may be gone through in the whole run.
    pub max_epochs: u64,
    /// How its documents become sequences; `None`: they are one text, which is cut.
    pub packing: Option<Packing>,
}

/// Which optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Muon on matrices, AdamW on the rest.
    Muon,
    /// AdamW on everything.
    AdamW,
}

/// What Muon's Newton-Schulz iterates: the same in exact arithmetic, rounded otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NewtonSchulzForm {
    /// The square of the shorter side alone (its Gram matrix), of a matrix at least twice as long one way as the other.
    #[default]
    Gram,
    /// Every matrix itself.
    Direct,
    /// Every matrix itself, in bf16: what a GPU's matrix units are for.
    Bf16,
}

/// Two numbers and no more: of an array that is longer than what is read of it, the rest would be dropped without a word.
fn pair<'de, D: Deserializer<'de>>(text: D) -> std::result::Result<[f64; 2], D::Error> {
    struct Pair;

    impl<'de> de::Visitor<'de> for Pair {
        type Value = [f64; 2];

        fn expecting(&self, words: &mut fmt::Formatter<'_>) -> fmt::Result {
            words.write_str("an array of length 2")
        }

        fn visit_seq<A: de::SeqAccess<'de>>(
            self,
            mut list: A,
        ) -> std::result::Result<Self::Value, A::Error> {
            let mut numbers = Vec::new();
            while let Some(number) = list.next_element::<f64>()? {
                numbers.push(number);
            }
            let count = numbers.len();
            numbers.try_into().map_err(|_| de::Error::invalid_length(count, &self))
        }
    }

    text.deserialize_seq(Pair)
}

/// `[optimizer]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Optimizer")]
pub struct OptimizerSpec {
    /// Which optimizer.
    #[schemars(extend("digest" = "run"))]
    pub kind: OptimizerKind,
    /// Peak learning rate, at least 0.
    #[schemars(extend("digest" = "run"))]
    pub lr: f64,
    /// AdamW's two decays, in 0..1.
    #[serde(deserialize_with = "pair")]
    #[schemars(extend("digest" = "run"))]
    pub betas: [f64; 2],
    /// AdamW's epsilon, above 0.
    #[schemars(extend("digest" = "run"))]
    pub eps: f64,
    /// Muon's momentum, in 0..1.
    #[schemars(extend("digest" = "run"))]
    pub momentum: f64,
    /// What Muon's Newton-Schulz iterates. Rounding differs, so the bits differ.
    #[schemars(extend("digest" = "run (where not `\"gram\"`)"))]
    pub newton_schulz: NewtonSchulzForm,
    /// Decoupled weight decay, at least 0.
    #[schemars(extend("digest" = "run"))]
    pub weight_decay: f64,
    /// Largest global gradient norm; 0 for no clipping.
    #[schemars(extend("digest" = "run"))]
    pub clip: f64,
}

/// `[schedule]`: step `s` has `lr * s / warmup_steps` up to `warmup_steps`, then half a cosine down to `final_lr` over
/// `decay_steps`, then `final_lr`. Never derived from phase lengths. Without `decay_steps` the rate stays at `lr`.
#[derive(Clone, Debug, PartialEq)]
pub struct ScheduleSpec {
    /// Steps of warm-up.
    pub warmup_steps: u64,
    /// Steps of decay after warm-up; 0 for none.
    pub decay_steps: u64,
    /// The rate after decay.
    pub final_lr: f64,
}

/// `[skip_step]`: a step whose loss or gradient norm lies more than `sigma` standard deviations above the mean of the
/// `window` steps before it moves nothing. Steps are judged once half a window lies before them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "SkipStep")]
pub struct SkipStepSpec {
    /// Steps before a step that it is compared with, 4 to 65,536.
    #[schemars(extend("digest" = "run"))]
    pub window: u64,
    /// Standard deviations above their mean, at least 0.
    #[schemars(extend("digest" = "run"))]
    pub sigma: f64,
    /// What happens to a step whose loss or gradient is not finite.
    #[schemars(extend("digest" = "run"))]
    pub non_finite: NonFinite,
}

/// What becomes of a step whose loss or gradient is not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NonFinite {
    /// It ends the run before anything moves.
    #[default]
    Stop,
    /// It moves nothing, and the run goes on.
    Skip,
}

impl NonFinite {
    /// The name in a curriculum.
    pub fn name(self) -> &'static str {
        match self {
            NonFinite::Stop => "stop",
            NonFinite::Skip => "skip",
        }
    }
}

/// `[auto_clip]`: a gradient is not longer than this percentile of the norms of the `window` steps before it, once half a
/// window lies before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "AutoClip")]
pub struct AutoClipSpec {
    /// Steps whose norms the clip is computed from, 4 to 65,536.
    #[serde(default = "window")]
    #[schemars(extend("digest" = "run"))]
    pub window: u64,
    /// Which of the norms, by size: 1 to 100, by the nearest rank.
    #[schemars(extend("digest" = "run"))]
    pub percentile: u64,
}

impl Curriculum {
    /// How many times `source` may be gone through: as stated, or once.
    pub fn max_epochs(&self, source: &str) -> u64 {
        self.sources.get(source).map_or(SourceSpec::default().max_epochs, |spec| spec.max_epochs)
    }

    /// How the documents of `source` are packed; `None`: they are one text, which is cut.
    pub fn packing(&self, source: &str) -> Option<&Packing> {
        self.sources.get(source)?.packing.as_ref()
    }

    /// The model as it is during a phase (index into `phases`): `[model]`, and what the phase says on top.
    pub fn model_at(&self, phase: usize) -> ModelTable {
        let mut model = self.model.clone();
        model.0.extend(self.phases[phase].model.0.clone());
        model
    }

    /// Takes the model's tables out, `[model]` first, then those of the phases: an identity hashes them by their values.
    pub fn take_models(&mut self) -> Vec<ModelTable> {
        let phases = self.phases.iter_mut().map(|phase| &mut phase.model);
        std::iter::once(&mut self.model).chain(phases).map(std::mem::take).collect()
    }

    /// `file:line:column` of a key (`model.head_dim`, `phase.NAME.mix.SOURCE`), or of the section it belongs to, or the
    /// file: the place that a fault about this key names.
    pub fn place(&self, key: &str) -> String {
        self.places.place(key)
    }

    /// The value of a key as typed, where it stands in the file: `0.70`, `"3/10"`.
    pub fn typed(&self, key: &str) -> Option<&str> {
        self.places.typed(key)
    }
}

impl Default for SourceSpec {
    /// Once: repeating text is a decision, so it is written down.
    fn default() -> Self {
        SourceSpec { max_epochs: 1, packing: None }
    }
}

impl Dtype {
    /// The name in a curriculum.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
        }
    }
}

impl RemainderRule {
    /// The name in a curriculum.
    pub fn name(self) -> &'static str {
        match self {
            RemainderRule::Join => "join",
            RemainderRule::Defer => "defer",
        }
    }
}

impl OptimizerKind {
    /// The name in a curriculum.
    pub fn name(self) -> &'static str {
        match self {
            OptimizerKind::Muon => "muon",
            OptimizerKind::AdamW => "adamw",
        }
    }
}

impl NewtonSchulzForm {
    /// The name in a curriculum.
    pub fn name(self) -> &'static str {
        match self {
            NewtonSchulzForm::Gram => "gram",
            NewtonSchulzForm::Direct => "direct",
            NewtonSchulzForm::Bf16 => "bf16",
        }
    }
}

impl Default for OptimizerSpec {
    fn default() -> Self {
        OptimizerSpec {
            kind: OptimizerKind::Muon,
            lr: 6e-4,
            betas: [0.9, 0.95],
            eps: 1e-8,
            momentum: 0.95,
            newton_schulz: NewtonSchulzForm::default(),
            weight_decay: 0.1,
            clip: 1.0,
        }
    }
}

impl Default for SkipStepSpec {
    fn default() -> Self {
        SkipStepSpec { window: window(), sigma: 6.0, non_finite: NonFinite::Stop }
    }
}

/// The steps of the windows of `[skip_step]` and `[auto_clip]`, unless they say so.
fn window() -> u64 {
    128
}

impl Phase {
    /// The weights as integers without a common divisor, in the order of the sources' names: what decides.
    ///
    /// `None` if they are so fine, or so far apart, that their sum does not fit.
    pub fn weights(&self) -> Option<Vec<u64>> {
        whole_weights(&self.mix)
    }

    /// Samples of the phase.
    pub fn samples(&self) -> u64 {
        self.steps * self.batch
    }
}

/// The weights of a mix as integers without a common divisor, in the order of the sources' names.
fn whole_weights(mix: &BTreeMap<String, Ratio>) -> Option<Vec<u64>> {
    let scale = mix.values().try_fold(1u64, |scale, weight| {
        (scale / gcd(scale, weight.den())).checked_mul(weight.den())
    })?;
    let whole = |weight: &Ratio| weight.num().checked_mul(scale / weight.den());
    let weights: Vec<u64> = mix.values().map(whole).collect::<Option<_>>()?;
    let divisor = weights.iter().fold(0, |divisor, &weight| gcd(divisor, weight));
    let weights: Vec<u64> = weights.iter().map(|weight| weight / divisor).collect();
    let total = weights.iter().try_fold(0u64, |sum, &weight| sum.checked_add(weight))?;
    (total <= WEIGHT_MAX).then_some(weights)
}
