//! The curriculum: the one file that defines what is trained. `curricula/KEYS.md` is the reference of its keys.
//!
//! Everything that affects a bit is a key here. What affects only speed (ranks, workers, threads, device) is a flag.
//! Weights are exact ratios, parsed from the text as typed.

#![forbid(unsafe_code)]

mod amendment;
mod apportion;
mod batch;
mod buckets;
mod canonical;
mod curve;
mod difference;
pub mod guard;
mod mix;
mod model;
mod numbers;
mod objective;
mod packing;
mod parse;
mod places;
pub mod rate;
mod reaction;
mod schedule;
pub mod stats;
mod text;
mod weights;

use std::collections::BTreeMap;
use std::fmt;

use contract::Ratio;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, de};

pub use amendment::{AddedStore, Amendment, PhaseSegment};
pub use apportion::apportion;
pub use batch::BatchSizes;
pub use buckets::{BucketCurve, BucketRule, Buckets, PowerCurve};
pub use curve::{MixCurve, RAMP_ONE};
pub use difference::CurriculumDifference;
pub use mix::{Mix, MixWeights};
pub use model::ModelTable;
pub use numbers::{
    AutoClipChange, ChangedHyperparameter, Hyperparameters, NumbersChange, OptimizerChange,
    SkipStepChange,
};
pub use objective::{Fim, LabelMask, SENTINEL_KEYS, Sentinel};
pub use packing::Packing;
pub use parse::schema;
pub use reaction::{MIX_PARTS, Reaction, ReactionRule};
pub use schedule::{DecayShape, PhaseSchedule, ScheduleChange, ScheduleKind, ScheduleSpec};
pub use weights::{SourceWeights, WEIGHT_MAX};

/// A parsed curriculum, every default filled in.
#[derive(Clone, Debug)]
pub struct Curriculum {
    /// Stores, or descriptions of stores, as written: relative paths start at the curriculum's folder.
    pub stores: Vec<String>,
    /// The initial weights, as written: a folder relative to the curriculum's. `None`: random initialization.
    pub init_from: Option<String>,
    /// The root of all random numbers.
    pub seed: u64,
    /// The number format of the model's computation.
    pub dtype: Dtype,
    /// The phases, in order.
    pub phases: Vec<Phase>,
    /// Settings of single sources; [`Curriculum::max_epochs`] fills in the default.
    pub sources: BTreeMap<String, SourceSpec>,
    /// The model's keys, which only the trainer interprets.
    pub model: ModelTable,
    /// The optimizer.
    pub optimizer: OptimizerSpec,
    /// The learning rate's schedule.
    pub schedule: ScheduleSpec,
    /// The rule for skipping steps; `None`: no step is skipped.
    pub skip_step: Option<SkipStepSpec>,
    /// The clip by a percentile of recent norms; `None`: only [`OptimizerSpec::clip`] clips.
    pub auto_clip: Option<AutoClipSpec>,
    /// The amendments, in the order of their steps.
    pub amendments: Vec<Amendment>,
    places: places::KeySpans,
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

/// What a phase does with what an earlier `seq_len` left of the open group, where its windows are not whole numbers of
/// the phase's sequences (where they are, they are split and served first).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RemainderRule {
    /// Served first, windows joined into longer sequences.
    #[default]
    Join,
    /// Put off until a phase in whose length it fits, or to the end of the epoch.
    Defer,
}

/// A phase: one mix or ramp, one sequence length, and a batch that may change.
#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    /// Its unique name; only for people.
    pub name: String,
    /// Steps, at least one.
    pub steps: u64,
    /// Tokens in a sequence.
    pub seq_len: u32,
    /// Sequences in a step.
    pub batch: BatchSizes,
    /// Sequences in a micro-batch, which is one forward and backward; divides each batch.
    pub micro_batch: u64,
    /// Equal parts into which every sequence is cut inside a micro-batch; divides `seq_len`.
    pub context_chunks: u64,
    /// Parts into which the widths of the model are cut inside a micro-batch.
    pub weight_shards: u64,
    /// How text is served that another `seq_len` left in the open group.
    pub remainder: RemainderRule,
    /// The sources and their weights.
    pub mix: Mix,
    /// The model keys that differ during this phase (`rope_theta` for longer sequences).
    pub model: ModelTable,
    /// The learning rate's schedule that begins with this phase; `None`: the one before continues.
    pub schedule: Option<PhaseSchedule>,
}

/// `[source.NAME]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceSpec {
    /// How many epochs of the source the whole run may read; `None`: one, since repeating text has to be asked for, or
    /// as many as the source that it is a bucket of.
    pub max_epochs: Option<u64>,
    /// How its documents become sequences; `None`: concatenated and cut.
    pub packing: Option<Packing>,
    /// How it is cut into buckets; `None`: it is one.
    pub buckets: Option<Buckets>,
    /// Which pieces are rearranged for fill-in-the-middle; `None`: none, or as the source that it is a bucket of.
    pub fim: Option<Fim>,
    /// Which labels are left out; `None` as for `fim`.
    pub mask: Option<LabelMask>,
    /// What the loss of each of its labels is multiplied by; `None`: 1, or as for `fim`.
    pub loss_weight: Option<Ratio>,
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

/// Parses exactly two numbers. serde would silently ignore further elements of a longer array.
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
    /// Parameters with numbers of their own, by name; the first group that matches a name has it.
    #[serde(rename = "group")]
    #[schemars(extend("digest" = "run"))]
    pub groups: Vec<ParamGroup>,
}

/// `[[optimizer.group]]`: parameters with numbers of their own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Group")]
pub struct ParamGroup {
    /// Names, with `*` for any characters: `"model.layers.*.mlp.*"`. The first line of a ledger lists them.
    #[schemars(extend("digest" = "run"))]
    pub params: String,
    /// What the learning rate of every step is multiplied by, at least 0.
    #[serde(default = "one")]
    #[schemars(extend("digest" = "run (where not 1)"))]
    pub lr_scale: f64,
    /// Weight decay, at least 0; otherwise that of `[optimizer]`, and none for vectors.
    #[serde(default)]
    #[schemars(extend("digest" = "run"))]
    pub weight_decay: Option<f64>,
}

fn one() -> f64 {
    1.0
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
    /// It changes nothing, and the run continues.
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

/// `[auto_clip]`: a gradient is not longer than this percentile of the norms of the `window` steps before it, once half
/// a window lies before it.
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
    /// How many epochs of `source` the run may read: as stated for it or the source that it is a bucket of, or 1.
    pub fn max_epochs(&self, source: &str) -> u64 {
        self.specs(source).into_iter().flatten().find_map(|spec| spec.max_epochs).unwrap_or(1)
    }

    /// How the documents of `source` are packed; `None`: concatenated and cut.
    pub fn packing(&self, source: &str) -> Option<&Packing> {
        self.specs(source).into_iter().flatten().find_map(|spec| spec.packing.as_ref())
    }

    /// The settings of `source`, then those of the source that it is a bucket of.
    fn specs(&self, source: &str) -> [Option<&SourceSpec>; 2] {
        [source, self.whole(source)].map(|name| self.sources.get(name))
    }

    /// The model during a phase (index into `phases`): `[model]`, overridden by the phase's keys.
    pub fn model_at(&self, phase: usize) -> ModelTable {
        let mut model = self.model.clone();
        model.0.extend(self.phases[phase].model.0.clone());
        model
    }

    /// Removes the model's tables and returns them, `[model]` first, then the phases': an identity hashes them by
    /// value.
    pub fn take_models(&mut self) -> Vec<ModelTable> {
        let phases = self.phases.iter_mut().map(|phase| &mut phase.model);
        std::iter::once(&mut self.model).chain(phases).map(std::mem::take).collect()
    }

    /// `file:line:column` of a key (`model.head_dim`, `phase.NAME.mix.SOURCE`), else of its section, else the file; for
    /// error messages.
    pub fn place(&self, key: &str) -> String {
        self.places.place(key)
    }

    /// [`Curriculum::place`] of a source's weight in the mix at `mix_key`; of a ramp or a reaction, that at its start.
    pub fn mix_place(&self, mix_key: &str, source: &str) -> String {
        let key = |name: &str| {
            ["", ".from", ".to", ".start"].map(|side| format!("{mix_key}{side}.{name}"))
        };
        let keys: Vec<String> = [source, self.whole(source)].into_iter().flat_map(key).collect();
        self.place(self.places.first_of(&keys).unwrap_or(&keys[0]))
    }

    /// The value of a key as typed in the file: `0.70`, `"3/10"`.
    pub fn typed(&self, key: &str) -> Option<&str> {
        self.places.typed(key)
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
            groups: Vec::new(),
        }
    }
}

impl Default for SkipStepSpec {
    fn default() -> Self {
        SkipStepSpec { window: window(), sigma: 6.0, non_finite: NonFinite::Stop }
    }
}

/// The default window of `[skip_step]` and `[auto_clip]`.
fn window() -> u64 {
    128
}

impl Phase {
    /// Samples of the phase after its first `steps` steps.
    pub fn samples_after(&self, steps: u64) -> u64 {
        self.samples() - self.batch.samples(steps).unwrap_or_default()
    }

    /// Samples of the phase.
    pub fn samples(&self) -> u64 {
        self.batch.samples(self.steps).expect("checked when the phase was read")
    }
}
