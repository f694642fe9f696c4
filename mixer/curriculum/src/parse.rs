//! Parses a curriculum; every mistake is reported with its place.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use contract::Result;
use schemars::{JsonSchema, Schema, schema_for};
use serde::Deserialize;
use settings::{CURRICULUM, File, Spanned, Table, Value};

use super::amendment::{Amendment, AmendmentText, amendments};
use super::batch::{BatchSizes, BatchText};
use super::mix::{Mix, MixText};
use super::numbers::Hyperparameters;
use super::packing::SourceText;
use super::places::{KeySpans, check_numbers, check_windows};
use super::rate::ScheduleOrigin;
use super::{
    AutoClipSpec, Curriculum, Dtype, ModelTable, OptimizerSpec, Phase, PhaseSchedule,
    RemainderRule, ScheduleChange, ScheduleSpec, SkipStepSpec,
};

/// The largest sample number times `seq_len`: far above any run, far below integer overflow.
const TOKENS_MAX: u64 = 1 << 62;

/// What a run trains on, and how: the data, the phases, the model, the optimizer.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Curriculum")]
struct CurriculumText {
    /// Stores, or store stubs without data (for planning); relative to this file. Names of sources are
    /// unique over all of them.
    #[schemars(with = "StoreText", extend("digest" = "-"))]
    store: Spanned<Value>,
    /// Folder with the initial weights, as `ztrain import` writes it; relative to this file. `[model]` may then be
    /// empty; its keys override those of the folder. Without it weights are random.
    #[schemars(with = "Option<String>", extend("digest" = "run, by content"))]
    init_from: Option<Spanned<String>>,
    /// Root of all random numbers: order of the text, initial weights.
    #[serde(default)]
    #[schemars(extend("digest" = "plan, run"))]
    seed: u64,
    /// Number format of the model's computation. Master weights and sums of gradients are f32.
    #[schemars(extend("default" = "f32", "digest" = "run"))]
    dtype: Option<Dtype>,
    /// The phases, in the order of the run; at least one.
    #[serde(default)]
    phase: Vec<PhaseText>,
    /// Settings of single sources, by name.
    #[serde(default)]
    source: BTreeMap<String, SourceText>,
    /// The model.
    #[serde(default)]
    model: ModelTable,
    /// The optimizer.
    #[serde(default)]
    optimizer: OptimizerSpec,
    /// The learning rate's schedule.
    #[serde(default)]
    schedule: ScheduleChange,
    /// Skip steps whose loss or gradient norm jumps; absent: no step is skipped.
    skip_step: Option<SkipStepSpec>,
    /// Clip gradients by the norms of recent steps; absent: only `optimizer.clip` clips.
    auto_clip: Option<AutoClipSpec>,
    /// What changes from a step on, after every step before it has been trained; `zdata amend` appends them.
    #[serde(default)]
    amendment: Vec<AmendmentText>,
}

/// `store`: one path, or a list.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "stands for a value that is read with its place")]
enum StoreText {
    One(String),
    Several(Vec<String>),
}

/// A part of the run: its mix, sequence length and batch.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Phase")]
struct PhaseText {
    /// Unique; for people.
    #[schemars(extend("digest" = "-"))]
    name: String,
    /// Steps of the phase. Give `steps` or `tokens`.
    #[schemars(extend("digest" = "plan, run"))]
    steps: Option<NonZeroU64>,
    /// Tokens of the phase, rounded down to whole steps: `tokens / (seq_len x batch)`.
    #[schemars(extend("digest" = "plan, run"))]
    tokens: Option<NonZeroU64>,
    /// Tokens in a sequence; divides the unit (131,072 unless the store says otherwise) of each source in the mix.
    #[schemars(extend("digest" = "plan, run"))]
    seq_len: NonZeroU64,
    /// Sequences in a step. Or a ramp: `{ from = 64, to = 512, every = 1000 }`. Or a table of steps of the phase:
    /// `{ 1 = 64, 1001 = 128 }`.
    #[schemars(with = "BatchText", extend("digest" = "plan, run"))]
    batch: Spanned<Value>,
    /// Sequences in a forward and backward pass; divides every `batch`.
    #[serde(default = "one")]
    #[schemars(extend("digest" = "plan, run"))]
    micro_batch: NonZeroU64,
    /// Equal parts of every sequence of a micro-batch, which `--cp` shares between ranks; divides `seq_len`. Changes
    /// bits.
    #[serde(default = "one")]
    #[schemars(extend("digest" = "plan, run (where not 1)"))]
    context_chunks: NonZeroU64,
    /// Parts of the heads, of the experts' width and of the vocabulary, which `--tsp` shares between ranks. Changes
    /// bits.
    #[serde(default = "one")]
    #[schemars(extend("digest" = "plan, run (where not 1)"))]
    weight_shards: NonZeroU64,
    /// What becomes of text that a phase with another `seq_len` left in its open group.
    #[serde(default)]
    #[schemars(extend("digest" = "plan, run (where not `\"join\"`)"))]
    remainder: RemainderRule,
    /// Sources and their weights: integers, decimals or `"3/10"`, taken exactly, above zero; only proportions count. Or
    /// a ramp: `{ from = { ... }, to = { ... }, curve = "cosine" }`. Or a rule by which it reacts to the loss:
    /// `{ rule = "learnability", start = { ... }, window = 200 }`.
    #[schemars(with = "MixText", extend("digest" = "plan, run"))]
    mix: Spanned<Table>,
    /// Keys of `[model]` that differ during this phase, such as `rope_theta`; no shapes, no `preset`.
    #[serde(default)]
    #[schemars(extend("digest" = "run"))]
    model: ModelTable,
    /// Peak learning rate of the phase's own schedule; without it, the rate of the step before the phase.
    #[schemars(extend("digest" = "run"))]
    lr: Option<f64>,
    /// A schedule that begins with the phase, in the keys of `[schedule]`. Its steps count from the phase's first, and
    /// its warm-up leads from the rate of the step before. Without it and without `lr` the one before continues.
    #[schemars(extend("digest" = "run"))]
    schedule: Option<ScheduleChange>,
}

fn one() -> NonZeroU64 {
    NonZeroU64::MIN
}

/// The JSON Schema of a curriculum. The keys of `[model]` belong to the trainer: `ztrain schema` adds them.
pub fn schema() -> Schema {
    schema_for!(CurriculumText)
}

impl Curriculum {
    /// Reads a curriculum; `name` is its name in errors.
    pub fn parse(text: &str, name: &str) -> Result<Curriculum> {
        let file = File::new(name, text);
        file.check_kind(CURRICULUM)?;
        let raw: CurriculumText = file.parse()?;
        let places = KeySpans::of(&file);
        raw.model.check(&places, "model")?;
        let phases = phases(&file, &places, raw.phase)?;
        check_optimizer(&places, &raw.optimizer)?;
        check_windows(&places, "", raw.skip_step, raw.auto_clip)?;
        let source = |(name, text): (String, SourceText)| {
            let spec = text.spec(&name, &file, &places)?;
            Ok((name, spec))
        };
        let sources = raw.source.into_iter().map(source).collect::<Result<_>>()?;
        let sources = super::buckets::checked(sources, &places)?;
        if let Some(init_from) =
            raw.init_from.as_ref().filter(|init_from| init_from.get_ref().is_empty())
        {
            return Err(file.wrong("init_from", init_from, "a path, or no such key"));
        }
        let schedule = raw.schedule.apply(&places, "schedule", ScheduleSpec::default())?;
        if let Some(PhaseSchedule { .. }) = phases[0].schedule {
            let key = format!("phase.{}.schedule", phases[0].name);
            let fault = places.fault(&key, "the first phase begins a schedule of its own");
            return Err(fault.wanted("`[optimizer] lr` and `[schedule]`, which begin with the run"));
        }
        let dtype = raw.dtype.unwrap_or(Dtype::F32);
        let numbers = Hyperparameters {
            optimizer: raw.optimizer.clone(),
            schedule,
            origin: ScheduleOrigin::default(),
            skip_step: raw.skip_step,
            auto_clip: raw.auto_clip,
            dtype,
        };
        Ok(Curriculum {
            stores: stores(&file, &raw.store)?,
            init_from: raw.init_from.map(Spanned::into_inner),
            seed: raw.seed,
            dtype,
            amendments: amendments(&file, &places, &phases, (numbers, 0), raw.amendment)?,
            phases,
            sources,
            model: raw.model,
            schedule,
            optimizer: raw.optimizer,
            skip_step: raw.skip_step,
            auto_clip: raw.auto_clip,
            places,
        })
    }
}

/// A file of amendments alone.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AmendmentsText {
    #[serde(default)]
    amendment: Vec<AmendmentText>,
}

impl Curriculum {
    /// The amendments in a text that holds nothing else, checked against this curriculum; `name` is its name in errors.
    pub fn read_amendments(&self, text: &str, name: &str) -> Result<Vec<Amendment>> {
        let file = File::new(name, text);
        let raw: AmendmentsText = file.parse()?;
        let places = KeySpans::of(&file);
        // The numbers in force before the first of them.
        let first = raw.amendment.iter().map(AmendmentText::step).min().unwrap_or(1);
        let numbers = self.numbers_at(first);
        let found = amendments(&file, &places, &self.phases, (numbers, first), raw.amendment)?;
        if found.is_empty() {
            let fault = places.fault("", "the file has no [[amendment]]");
            return Err(fault.wanted("at least one, as `zdata amend` writes them"));
        }
        Ok(found)
    }
}

fn stores(file: &File, store: &Spanned<Value>) -> Result<Vec<String>> {
    let path = |path: &Value| Some(path.as_str()?.to_owned()).filter(|path| !path.is_empty());
    let paths: Option<Vec<String>> = match store.get_ref() {
        Value::Array(paths) if !paths.is_empty() => paths.iter().map(path).collect(),
        one => path(one).map(|path| vec![path]),
    };
    paths.ok_or_else(|| file.wrong("store", store, "a path, or a list of paths"))
}

fn phases(file: &File, places: &KeySpans, all: Vec<PhaseText>) -> Result<Vec<Phase>> {
    let mut phases: Vec<Phase> = Vec::new();
    let mut total = 0u64;
    for raw in all {
        let key = |key: &str| format!("phase.{}.{key}", raw.name);
        if phases.iter().any(|earlier| earlier.name == raw.name) {
            let what = format!("two phases are named {:?}", raw.name);
            return Err(places.fault(&key("name"), what).wanted("a name for each phase"));
        }
        let long = if raw.steps.is_some() { key("steps") } else { key("tokens") };
        let phase = phase(file, places, raw)?;
        total = phase
            .batch
            .samples(phase.steps)
            .and_then(|samples| samples.checked_mul(u64::from(phase.seq_len)))
            .and_then(|tokens| tokens.checked_add(total))
            .filter(|&tokens| tokens <= TOKENS_MAX)
            .ok_or_else(|| {
                let fault = places.fault(&long, "the run is longer than 2^62 tokens");
                fault.wanted("steps, batch and seq_len of all phases that make less")
            })?;
        phases.push(phase);
    }
    if phases.is_empty() {
        return Err(places.fault("", "the curriculum has no [[phase]]").wanted("at least one"));
    }
    Ok(phases)
}

fn phase(file: &File, places: &KeySpans, raw: PhaseText) -> Result<Phase> {
    let path = format!("phase.{}", raw.name);
    let key = |key: &str| format!("{path}.{key}");
    if raw.name.is_empty() {
        return Err(places.fault(&key("name"), "the name of a phase is empty"));
    }
    raw.model.check(places, &key("model"))?;
    let batch = BatchSizes::read(file, &raw.batch, raw.micro_batch.get())?;
    let steps = steps(places, &path, &raw, &batch)?;
    let divides = |name: &str, parts: NonZeroU64, other: &str, whole: u64| {
        if whole.is_multiple_of(parts.get()) {
            return Ok(parts.get());
        }
        Err(places
            .fault(&key(name), format!("`{name}` does not divide `{other}`"))
            .found(format!("{name} = {parts}, {other} = {whole}"))
            .wanted(format!("a divisor of {whole}")))
    };
    let uneven = batch.uneven(raw.micro_batch.get()).unwrap_or_else(|| batch.first());
    let phase = Phase {
        steps,
        seq_len: u32::try_from(raw.seq_len.get())
            .map_err(|_| places.out_of_range(&key("seq_len")).wanted("a number below 2^32"))?,
        batch: batch.clone(),
        micro_batch: divides("micro_batch", raw.micro_batch, "batch", uneven)?,
        context_chunks: divides(
            "context_chunks",
            raw.context_chunks,
            "seq_len",
            raw.seq_len.get(),
        )?,
        weight_shards: raw.weight_shards.get(),
        remainder: raw.remainder,
        mix: Mix::read(file, places, &key("mix"), &raw.mix)?,
        schedule: PhaseSchedule::read(places, &path, raw.lr, raw.schedule)?,
        model: raw.model,
        name: raw.name,
    };
    let samples = batch.samples(phase.steps).unwrap_or(u64::MAX);
    phase.mix.check(samples).map_err(|fault| fault.at(file.place(raw.mix.span())))?;
    Ok(phase)
}

fn steps(places: &KeySpans, path: &str, raw: &PhaseText, batch: &BatchSizes) -> Result<u64> {
    let seq_len = raw.seq_len;
    match (raw.steps, raw.tokens) {
        (Some(steps), None) => Ok(steps.get()),
        (None, Some(tokens)) => {
            let steps = batch.steps(tokens.get() / seq_len);
            if steps > 0 {
                return Ok(steps);
            }
            Err(places
                .fault(&format!("{path}.tokens"), "`tokens` is less than one step")
                .found(tokens)
                .wanted(format!("at least seq_len x batch = {seq_len} x {}", batch.first())))
        }
        (Some(_), Some(_)) => Err(places
            .fault(&format!("{path}.tokens"), "the phase has both `steps` and `tokens`")
            .wanted("one of them")),
        (None, None) => Err(places.missing(path, "steps", "`steps`, or `tokens` for whole steps")),
    }
}

fn check_optimizer(places: &KeySpans, optimizer: &OptimizerSpec) -> Result<()> {
    let OptimizerSpec { lr, betas, eps, momentum, weight_decay, clip, .. } = *optimizer;
    let ([first, second], all) = (betas, f64::INFINITY);
    for (number, group) in (1..).zip(&optimizer.groups) {
        let key = |name: &str| format!("optimizer.group.{number}.{name}");
        let (scale, decay) = (key("lr_scale"), key("weight_decay"));
        let numbers = [
            (scale.as_str(), group.lr_scale, all),
            (decay.as_str(), group.weight_decay.unwrap_or(0.0), all),
        ];
        check_numbers(places, &numbers)?;
        if group.weight_decay.is_none() && group.lr_scale == 1.0 {
            let what = "the group has neither `lr_scale` nor `weight_decay`";
            return Err(places.fault(&key("params"), what));
        }
    }
    // A weight that never had a gradient would be divided by epsilon alone.
    if eps as f32 == 0.0 {
        return Err(places.out_of_range("optimizer.eps").wanted("a number above 0, also in f32"));
    }
    check_numbers(
        places,
        &[
            ("optimizer.lr", lr, all),
            ("optimizer.betas", first, 1.0),
            ("optimizer.betas", second, 1.0),
            ("optimizer.eps", eps, all),
            ("optimizer.momentum", momentum, 1.0),
            ("optimizer.weight_decay", weight_decay, all),
            ("optimizer.clip", clip, all),
        ],
    )
}
