//! From the curriculum's text to its meaning, with a place for every mistake.

use std::collections::BTreeMap;

use contract::{Ratio, Result};
use toml_edit::Value;

use super::amendment::amendments;
use super::{
    AutoClipSpec, Curriculum, Dtype, ModelTable, OptimizerKind, OptimizerSpec, Phase, Places,
    ScheduleSpec, Section, SkipStepSpec, SourceLimits, Text,
};

const ROOT_KEYS: &[&str] = &[
    "store",
    "start",
    "seed",
    "dtype",
    "phase",
    "source",
    "model",
    "optimizer",
    "schedule",
    "skip_step",
    "auto_clip",
    "amendment",
];
const PHASE_KEYS: &[&str] = &[
    "name",
    "steps",
    "tokens",
    "seq_len",
    "batch",
    "micro_batch",
    "context_chunks",
    "weight_shards",
    "mix",
    "model",
];
const OPTIMIZER_KEYS: &[&str] = &["kind", "lr", "betas", "eps", "momentum", "weight_decay", "clip"];
const SCHEDULE_KEYS: &[&str] = &["warmup_steps", "decay_steps", "final_lr"];
/// The largest sample number times `seq_len`: far above any run, far below where integers end.
const TOKENS_MAX: u64 = 1 << 62;

impl Curriculum {
    /// Reads a curriculum; `file` names it in faults.
    pub fn parse(text: &str, file: &str) -> Result<Curriculum> {
        let text = Text::new(text, file);
        let document = text.document()?;
        let root = Section::root(&text, document.as_table());
        root.only(ROOT_KEYS)?;
        let mut places = Places::new(file);
        let stores = stores(&root)?;
        places.insert("store".to_owned(), root.place_of("store"));
        let start = start(&root, &mut places)?;
        let optimizer = optimizer(&root, &mut places)?;
        let phases = phases(&root, &mut places)?;
        let amendments = amendments(&root, &phases, &mut places)?;
        Ok(Curriculum {
            stores,
            start,
            seed: root.whole("seed", 0)?.unwrap_or(0),
            dtype: root.choice("dtype", &Dtype::ALL)?.unwrap_or(Dtype::F32),
            phases,
            sources: sources(&root, &mut places)?,
            model: model_of(&root, "model", &mut places)?,
            schedule: schedule(&root, &optimizer, &mut places)?,
            optimizer,
            skip_step: skip_step(&root, &mut places)?,
            auto_clip: auto_clip(&root, &mut places)?,
            amendments,
            places,
        })
    }
}

fn stores(root: &Section) -> Result<Vec<String>> {
    let wanted = "a path, or a list of paths";
    let value = root.value("store")?.ok_or_else(|| root.missing("store", wanted))?;
    let paths: Option<Vec<String>> = match value {
        Value::String(path) => Some(vec![path.value().clone()]),
        Value::Array(paths) => paths.iter().map(|path| Some(path.as_str()?.to_owned())).collect(),
        _ => None,
    };
    match paths {
        Some(paths) if !paths.is_empty() && paths.iter().all(|path| !path.is_empty()) => Ok(paths),
        _ => Err(root.fault("store", "`store` names no store").wanted(wanted)),
    }
}

fn start(root: &Section, places: &mut Places) -> Result<Option<String>> {
    let Some(path) = root.string("start")? else { return Ok(None) };
    if path.is_empty() {
        return Err(root
            .fault("start", "`start` names no folder")
            .wanted("a path, or no such key"));
    }
    places.insert("start".to_owned(), root.place_of("start"));
    Ok(Some(path.to_owned()))
}

fn phases(root: &Section, places: &mut Places) -> Result<Vec<Phase>> {
    let mut phases: Vec<Phase> = Vec::new();
    let mut total = 0u64;
    for section in root.sections("phase")? {
        let phase = phase(&section, places)?;
        if phases.iter().any(|earlier| earlier.name == phase.name) {
            let what = format!("two phases are named {:?}", phase.name);
            return Err(section.fault("name", what).wanted("a name for each phase"));
        }
        total = phase
            .steps
            .checked_mul(phase.batch)
            .and_then(|samples| samples.checked_mul(u64::from(phase.seq_len)))
            .and_then(|tokens| tokens.checked_add(total))
            .filter(|&tokens| tokens <= TOKENS_MAX)
            .ok_or_else(|| {
                let key = if section.has("steps") { "steps" } else { "tokens" };
                section.fault(key, "the run is longer than 2^62 tokens")
            })?;
        phases.push(phase);
    }
    if phases.is_empty() {
        return Err(root.missing("phase", "at least one [[phase]]"));
    }
    Ok(phases)
}

fn phase(section: &Section, places: &mut Places) -> Result<Phase> {
    if section.has("leaf") {
        let fault = section.fault("leaf", "`leaf` is called `micro_batch`");
        return Err(fault.hint("rename the key: its value means what it meant"));
    }
    section.only(PHASE_KEYS)?;
    let name = section.string("name")?.filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| section.missing("name", "name = \"...\""))?.to_owned();
    let seq_len = section.whole("seq_len", 1)?;
    let seq_len = seq_len.ok_or_else(|| section.missing("seq_len", "tokens in a sequence"))?;
    let batch = section.whole("batch", 1)?;
    let batch = batch.ok_or_else(|| section.missing("batch", "sequences in a step"))?;
    let micro_batch = divisor(section, "micro_batch", ("batch", batch))?;
    let context_chunks = divisor(section, "context_chunks", ("seq_len", seq_len))?;
    let steps = steps(section, seq_len, batch)?;
    let seq_len = u32::try_from(seq_len).map_err(|_| {
        section.fault("seq_len", "`seq_len` is out of range").found(seq_len).wanted("below 2^32")
    })?;
    let path = format!("phase.{name}");
    record(section, &path, places);
    let phase = Phase {
        mix: mix_of(section, &path, places)?,
        model: model_of(section, &format!("{path}.model"), places)?,
        name,
        steps,
        seq_len,
        batch,
        micro_batch,
        context_chunks,
        weight_shards: section.whole("weight_shards", 1)?.unwrap_or(1),
    };
    if phase.weights().is_none() {
        return Err(section
            .fault("mix", "these weights are too fine for each other")
            .wanted("as integers without a common divisor they sum to at most 2^62"));
    }
    Ok(phase)
}

/// The value of `key`, 1 if it is absent, which divides the value of another key.
fn divisor(section: &Section, key: &str, (other, whole): (&str, u64)) -> Result<u64> {
    let parts = section.whole(key, 1)?.unwrap_or(1);
    if !whole.is_multiple_of(parts) {
        return Err(section
            .fault(key, format!("`{key}` does not divide `{other}`"))
            .found(format!("{key} = {parts}, {other} = {whole}"))
            .wanted(format!("a divisor of {whole}")));
    }
    Ok(parts)
}

fn steps(section: &Section, seq_len: u64, batch: u64) -> Result<u64> {
    match (section.whole("steps", 1)?, section.whole("tokens", 1)?) {
        (Some(steps), None) => Ok(steps),
        (None, Some(tokens)) => {
            let step = seq_len.checked_mul(batch).filter(|&step| step <= tokens);
            step.map(|step| tokens / step).ok_or_else(|| {
                section
                    .fault("tokens", "`tokens` is less than one step")
                    .found(tokens)
                    .wanted(format!("at least seq_len x batch = {seq_len} x {batch}"))
            })
        }
        (Some(_), Some(_)) => Err(section
            .fault("tokens", "the phase has both `steps` and `tokens`")
            .wanted("one of them")),
        (None, None) => Err(section.missing("steps", "`steps`, or `tokens` for whole steps")),
    }
}

/// The `mix` of a section that is known as `path`, and where its keys stand.
pub(super) fn mix_of(
    section: &Section,
    path: &str,
    places: &mut Places,
) -> Result<BTreeMap<String, Ratio>> {
    let wanted = "mix = { source = weight }";
    let mix = section.section("mix")?.ok_or_else(|| section.missing("mix", wanted))?;
    record(&mix, &format!("{path}.mix"), places);
    let mut weights = BTreeMap::new();
    for source in mix.keys() {
        weights.insert(source.to_owned(), mix.weight(source)?);
    }
    if weights.is_empty() {
        return Err(section.fault("mix", "the mix is empty").wanted(wanted));
    }
    Ok(weights)
}

fn sources(root: &Section, places: &mut Places) -> Result<BTreeMap<String, SourceLimits>> {
    let Some(all) = root.section("source")? else { return Ok(BTreeMap::new()) };
    let mut limits = BTreeMap::new();
    for name in all.keys() {
        let Some(section) = all.section(name)? else { continue };
        section.only(&["max_epochs"])?;
        let max_epochs = section.whole("max_epochs", 1)?;
        let limit =
            max_epochs.map_or_else(SourceLimits::default, |max_epochs| SourceLimits { max_epochs });
        limits.insert(name.to_owned(), limit);
        record(&section, &format!("source.{name}"), places);
    }
    Ok(limits)
}

/// The `model` table of a section, and where its keys stand.
pub(super) fn model_of(section: &Section, path: &str, places: &mut Places) -> Result<ModelTable> {
    let Some(inner) = section.section("model")? else { return Ok(ModelTable::default()) };
    record(&inner, path, places);
    Ok(ModelTable(inner.values()?))
}

fn optimizer(root: &Section, places: &mut Places) -> Result<OptimizerSpec> {
    let mut spec = OptimizerSpec {
        kind: OptimizerKind::Muon,
        lr: 6e-4,
        betas: [0.9, 0.95],
        eps: 1e-8,
        momentum: 0.95,
        weight_decay: 0.1,
        clip: 1.0,
    };
    let Some(section) = root.section("optimizer")? else { return Ok(spec) };
    section.only(OPTIMIZER_KEYS)?;
    record(&section, "optimizer", places);
    let OptimizerSpec { kind, lr, betas, eps, momentum, weight_decay, clip } = &mut spec;
    set(kind, section.choice("kind", &OptimizerKind::ALL)?);
    set(lr, section.number("lr", 0.0, f64::INFINITY)?);
    set(eps, section.number("eps", 0.0, f64::INFINITY)?);
    set(momentum, section.number("momentum", 0.0, 1.0)?);
    set(weight_decay, section.number("weight_decay", 0.0, f64::INFINITY)?);
    set(clip, section.number("clip", 0.0, f64::INFINITY)?);
    if let Some(value) = section.value("betas")? {
        let pair: Vec<&Value> = value.as_array().into_iter().flatten().collect();
        let [first, second] = pair[..] else {
            return Err(section.fault("betas", "`betas` is not a pair").wanted("[0.9, 0.95]"));
        };
        *betas = [
            section.number_in("betas", first, 0.0, 1.0)?,
            section.number_in("betas", second, 0.0, 1.0)?,
        ];
    }
    Ok(spec)
}

fn schedule(
    root: &Section,
    optimizer: &OptimizerSpec,
    places: &mut Places,
) -> Result<ScheduleSpec> {
    let mut spec = ScheduleSpec { warmup_steps: 0, decay_steps: 0, final_lr: optimizer.lr };
    let Some(section) = root.section("schedule")? else { return Ok(spec) };
    section.only(SCHEDULE_KEYS)?;
    record(&section, "schedule", places);
    let ScheduleSpec { warmup_steps, decay_steps, final_lr } = &mut spec;
    set(warmup_steps, section.whole("warmup_steps", 0)?);
    set(decay_steps, section.whole("decay_steps", 0)?);
    set(final_lr, section.number("final_lr", 0.0, f64::INFINITY)?);
    match (section.has("final_lr"), *decay_steps) {
        (false, 1..) => {
            Err(section.missing("final_lr", "the learning rate that `decay_steps` leads to"))
        }
        (true, 0) => {
            let what = "`final_lr` is never reached: there are no `decay_steps`";
            Err(section.fault("final_lr", what).hint("set `decay_steps`, or leave both out"))
        }
        _ => Ok(spec),
    }
}

/// The steps of the windows of `[skip_step]` and `[auto_clip]`, unless they say so.
const WINDOW: u64 = 128;

fn skip_step(root: &Section, places: &mut Places) -> Result<Option<SkipStepSpec>> {
    let Some(section) = root.section("skip_step")? else { return Ok(None) };
    section.only(&["window", "sigma"])?;
    record(&section, "skip_step", places);
    let window = window(&section)?;
    let sigma = section.number("sigma", 0.0, f64::INFINITY)?.unwrap_or(6.0);
    Ok(Some(SkipStepSpec { window, sigma }))
}

fn auto_clip(root: &Section, places: &mut Places) -> Result<Option<AutoClipSpec>> {
    let Some(section) = root.section("auto_clip")? else { return Ok(None) };
    section.only(&["window", "percentile"])?;
    record(&section, "auto_clip", places);
    let window = window(&section)?;
    let wanted = "which of 100 norms, by size, is the longest that passes: 1 to 100";
    let percentile = section.whole("percentile", 1)?;
    match percentile.ok_or_else(|| section.missing("percentile", wanted))? {
        percentile @ 1..=100 => Ok(Some(AutoClipSpec { window, percentile })),
        other => {
            let fault = section.fault("percentile", "`percentile` is out of range");
            Err(fault.found(other).wanted(wanted))
        }
    }
}

/// Windows are part of every checkpoint, so they stay small.
fn window(section: &Section) -> Result<u64> {
    match section.whole("window", 4)?.unwrap_or(WINDOW) {
        window if window <= 1 << 16 => Ok(window),
        other => {
            let fault = section.fault("window", "`window` is out of range").found(other);
            Err(fault.wanted("at most 65536 steps"))
        }
    }
}

fn set<T>(slot: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *slot = value;
    }
}

/// Remembers where a section and its keys stand.
pub(super) fn record(section: &Section, path: &str, places: &mut Places) {
    places.insert(path.to_owned(), section.place().to_owned());
    for key in section.keys() {
        places.insert(format!("{path}.{key}"), section.place_of(key));
    }
}
