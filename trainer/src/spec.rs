//! The specification of a run: everything that decides a bit, in one hashed value.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use contract::{Digestible, Fault, Hasher, Identity, Result};
use curriculum::{Dtype, ModelTable, NewtonSchulzForm, OptimizerKind, ParamGroup};
use globset::Glob;
use loader::open::damaged;
use loader::{OpenedCurriculum, Stores};
use mixer::{Curriculum, DataPlan};
use store::Location;

use crate::hf::InitialModel;
use crate::model::{self, Cut, ParamSpec, SkipOutput, ZayaConfig};
use crate::optim::balance::{self, RouterBalance};
use crate::optim::guard::SpikePolicy;
use crate::optim::{MatrixOptimizer, OptimizerRule, OptimizerSettings, ParamScales};

/// The one field of the model that is ours: the learning rate of the balancing biases.
const BALANCE_LR: &str = "balance_lr";

/// The key that names the preset which the other keys modify.
const PRESET: &str = "preset";

/// The most micro-batches of a step: each has numbers in every ledger line, and in the memory of every rank.
const MICRO_BATCHES: u64 = 1 << 20;

/// The data that a run reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunData {
    /// The digests of its initial stores, in the order of the curriculum.
    pub stores: Vec<Identity>,
    /// SHA-256 of their tokenizer.
    pub tokenizer: Identity,
    /// The number of the tokenizer's ids, added ones included.
    pub vocab: u32,
}

/// The model during one phase.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseModel {
    /// Its configuration.
    pub config: ZayaConfig,
    /// The learning rate of the balancing biases.
    pub balance_lr: f64,
    /// Into how many parts a micro-batch is cut.
    pub cut: Cut,
}

/// A run, resolved.
#[derive(Clone)]
pub struct RunSpec {
    /// The curriculum, as read.
    pub curriculum: Curriculum,
    /// What it reads.
    pub content: RunData,
    /// The initial weights, if they are not sampled.
    pub start: Option<InitialModel>,
    /// The model in each phase: the same parameters, some different numbers.
    pub models: Vec<PhaseModel>,
    /// The optimizer's settings at the start of the run; [`RunSpec::settings_at`] has those of a step.
    pub settings: OptimizerSettings,
    /// The parameters in canonical order.
    pub parameters: Vec<ParamSpec>,
    /// How each is updated.
    pub rules: Vec<OptimizerRule>,
    /// The numbers of each alone.
    pub scales: Vec<ParamScales>,
    /// Which text each step reads; where a mix reacts to the loss, as far as losses have fixed it.
    pub plan: Arc<DataPlan>,
    /// The stores of the text.
    pub data: Arc<Stores>,
}

/// Refuses steps with too many micro-batches to keep records of.
fn refuse_many(curriculum: &Curriculum, plan: &DataPlan) -> Result<()> {
    for phase in plan.phases() {
        let found = phase.batch / phase.micro_batch;
        if found > MICRO_BATCHES {
            return Err(Fault::usage("a step has too many micro-batches")
                .at(curriculum.place(&format!("phase.{}.batch", phase.name)))
                .found(format!(
                    "{found}: batch {} by micro_batch {}",
                    phase.batch, phase.micro_batch
                ))
                .wanted(format!("at most {MICRO_BATCHES}"))
                .hint("give a larger micro_batch, or a smaller batch"));
        }
    }
    Ok(())
}

impl RunSpec {
    /// Resolves an opened curriculum; refuses what cannot be trained.
    pub fn new(opened: &OpenedCurriculum) -> Result<Self> {
        // A run's own curriculum is in the folder that also records its start.
        let folder = opened.file.folder();
        RunSpec::of_run(opened, folder.local().unwrap_or(Path::new("")))
    }

    /// The same for the run in the folder `run`: once begun, it does not need its initial model unless something
    /// reads it.
    pub fn of_run(opened: &OpenedCurriculum, run: &Path) -> Result<Self> {
        let data = Arc::clone(opened.stores()?);
        let content = RunData::of(&data, opened.curriculum.stores.len());
        let start = open_start(opened, &data, run)?;
        RunSpec::of(opened, data, content, start)
    }

    /// That of the run in the folder `root`, which began with these stores; `moved` says where they are now, if they
    /// were moved.
    pub fn of_folder(root: &Path, moved: &[Location], begun: &[Identity]) -> Result<Self> {
        RunSpec::new(&OpenedCurriculum::of_run(root, moved, begun)?).map_err(damaged)
    }

    /// The same for a curriculum whose store may be a stub: enough to plan a run. Nothing can be read, and a model that
    /// sets no vocabulary has that of its preset.
    pub fn for_planning(opened: &OpenedCurriculum) -> Result<Self> {
        if opened.text().is_some() || opened.curriculum.init_from.is_some() {
            return RunSpec::new(opened);
        }
        let content = RunData { stores: Vec::new(), tokenizer: Identity([0; 32]), vocab: 0 };
        RunSpec::of(opened, Arc::new(Stores::none()), content, None)
    }

    fn of(
        opened: &OpenedCurriculum,
        data: Arc<Stores>,
        content: RunData,
        start: Option<InitialModel>,
    ) -> Result<Self> {
        let curriculum = opened.curriculum.clone();
        // Without a tokenizer the vocabulary has no required size.
        let vocab = Some(content.vocab).filter(|vocab| *vocab > 0);
        let models = models(&curriculum, vocab, start.as_ref())?;
        let settings = settings(&curriculum, 1);
        let parameters = model::parameters(&models[0].config);
        let rules: Vec<_> = parameters
            .iter()
            .map(|parameter| OptimizerRule::of(settings.kind, parameter))
            .collect();
        let scales = scales(&curriculum, &parameters, &rules)?;
        let plan = Arc::clone(&opened.plan);
        refuse_many(&curriculum, &plan)?;
        Ok(RunSpec {
            curriculum,
            content,
            start,
            models,
            settings,
            parameters,
            rules,
            scales,
            plan,
            data,
        })
    }

    /// The curriculum's canonical text, which depends on content alone: digests replace paths of stores and initial
    /// weights.
    pub fn canonical(&self) -> String {
        self.by_content().canonical()
    }

    /// The curriculum with digests instead of the paths of stores and initial weights.
    fn by_content(&self) -> Curriculum {
        let mut curriculum = self.curriculum.clone();
        curriculum.stores = self.content.stores.iter().map(Identity::to_string).collect();
        let added = curriculum.amendments.iter_mut().filter_map(|one| one.store.as_mut());
        added.for_each(|store| store.path.clone_from(&store.digest));
        curriculum.init_from = self.start.as_ref().map(|start| start.content().to_string());
        curriculum
    }

    /// The configuration with which the weights are initialized: that of the first phase.
    pub fn config(&self) -> &ZayaConfig {
        &self.models[0].config
    }

    /// The phases with their first and last steps, split where an amendment changes the dtype.
    pub fn segments(&self) -> Vec<(&str, u64, u64)> {
        let amended = self.curriculum.amendments.iter().filter(|one| one.numbers.dtype.is_some());
        let cuts: Vec<u64> = amended.map(|one| one.step).collect();
        let phases = self.plan.phases().iter().flat_map(|phase| {
            let within = cuts
                .iter()
                .copied()
                .filter(|at| (phase.first_step + 1..=phase.last_step()).contains(at));
            let firsts: BTreeSet<u64> = within.chain([phase.first_step]).collect();
            let ends = firsts.iter().skip(1).map(|next| next - 1).chain([phase.last_step()]);
            let ends: Vec<u64> = ends.collect();
            let name = phase.name.as_str();
            firsts.into_iter().zip(ends).map(move |(first, last)| (name, first, last))
        });
        phases.collect()
    }

    /// The model during `step`.
    pub fn model_at(&self, step: u64) -> Result<&PhaseModel> {
        let part = self.plan.step(step)?.phase;
        Ok(&self.models[self.plan.phases()[part].phase])
    }

    /// The optimizer's settings in `step`: amendments change some of them.
    pub fn settings_at(&self, step: u64) -> OptimizerSettings {
        settings(&self.curriculum, step)
    }

    /// The dtype in which the model computes in `step`.
    pub fn dtype_at(&self, step: u64) -> Dtype {
        self.curriculum.numbers_at(step).dtype
    }

    /// The steps at which a dtype begins, ascending; the first is 1.
    pub(crate) fn dtypes(&self) -> Vec<(u64, Dtype)> {
        let amended = self.curriculum.amendments.iter().filter(|one| one.numbers.dtype.is_some());
        let mut steps: Vec<u64> = amended.map(|one| one.step).chain([1]).collect();
        steps.sort_unstable();
        steps.into_iter().map(|step| (step, self.dtype_at(step))).collect()
    }

    /// The steps up to `step` that an amendment skips, ascending.
    pub(crate) fn skips_through(&self, step: u64) -> impl Iterator<Item = u64> {
        let amendments = self.curriculum.amendments.iter();
        amendments.filter(move |one| one.skip && one.step <= step).map(|one| one.step)
    }

    /// The initial balancing biases, by layer: empty where there are none.
    pub fn balance(&self) -> Vec<RouterBalance> {
        let config = self.config();
        let skip = config.skip != SkipOutput::None;
        let layer = |biases: usize| match biases {
            0 => RouterBalance::default(),
            _ => RouterBalance::new(config.num_experts as usize, skip),
        };
        model::balance_sizes(config).into_iter().map(layer).collect()
    }

    /// The names of the parameters.
    pub fn names(&self) -> Vec<String> {
        self.parameters.iter().map(|parameter| parameter.name.clone()).collect()
    }
}

impl RunData {
    /// From the first `count` of these stores: amendments name the others by their digests.
    pub fn of(stores: &Stores, count: usize) -> Self {
        let manifests = stores.stores().iter().take(count).map(|store| store.manifest());
        let tokenizer = &stores.stores()[0].manifest().tokenizer;
        RunData {
            stores: manifests.map(|manifest| manifest.digest).collect(),
            tokenizer: tokenizer.sha256,
            vocab: tokenizer.vocab,
        }
    }
}

impl Digestible for RunSpec {
    fn feed(&self, hasher: &mut Hasher) {
        // No `..`: a new field must be considered. Derived values are not hashed again; paths of stores never are.
        let RunSpec {
            curriculum: _,
            content,
            // In the canonical text, by its content.
            start: _,
            models,
            settings: _,
            parameters: _,
            rules: _,
            scales: _,
            plan: _,
            data: _,
        } = self;
        let mut text = self.by_content();
        let tables = text.take_models();
        hasher.tag("run.v2").str(&text.canonical()).u64(tables.len() as u64);
        tables.iter().for_each(|table| table.feed(hasher));
        let RunData { stores, tokenizer, vocab } = content;
        hasher.u64(stores.len() as u64);
        stores.iter().for_each(|store| {
            hasher.bytes(&store.0);
        });
        hasher.bytes(&tokenizer.0).u64(u64::from(*vocab)).u64(models.len() as u64);
        // A cut is in the canonical text.
        for PhaseModel { config, balance_lr, cut: _ } in models {
            config.feed(hasher);
            hasher.u64(balance_lr.to_bits());
        }
    }
}

/// The model of each phase; a phase may change settings, but no parameter.
fn models(
    curriculum: &Curriculum,
    vocab: Option<u32>,
    start: Option<&InitialModel>,
) -> Result<Vec<PhaseModel>> {
    let mut models: Vec<PhaseModel> = Vec::new();
    let place = |field: &str| curriculum.place(&format!("model.{field}"));
    let whole = resolve_model(&curriculum.model, vocab, start, place)?.config;
    for (index, phase) in curriculum.phases.iter().enumerate() {
        let here = |field: &str| curriculum.place(&format!("phase.{}.model.{field}", phase.name));
        let place = |field: &str| match phase.model.0.contains_key(field) {
            true => here(field),
            false => curriculum.place(&format!("model.{field}")),
        };
        if phase.model.0.contains_key(PRESET) {
            return Err(Fault::usage("a phase cannot change `preset`")
                .at(here(PRESET))
                .hint("name the preset under [model], and here the fields that differ"));
        }
        let mut model = resolve_model(&curriculum.model_at(index), vocab, start, place)?;
        model.cut = Cut { chunks: phase.context_chunks, shards: phase.weight_shards };
        let most = model.config.max_position_embeddings;
        if i64::from(phase.seq_len) > most {
            return Err(Fault::usage("sequences are longer than the model has positions")
                .at(curriculum.place(&format!("phase.{}.seq_len", phase.name)))
                .found(phase.seq_len)
                .wanted(format!("at most {most}, the model's max_position_embeddings")));
        }
        let parts = model.config.moe_intermediate_size.min(model.config.vocab_size);
        if phase.weight_shards > parts as u64 {
            return Err(Fault::usage("more shards than there is to cut")
                .at(curriculum.place(&format!("phase.{}.weight_shards", phase.name)))
                .found(phase.weight_shards)
                .wanted(format!("at most {parts}, an expert's width and the vocabulary")));
        }
        if !same_shape(&model.config, &whole) {
            let alone = |field: &&String| {
                let mut table = curriculum.model.clone();
                table.0.insert((*field).clone(), phase.model.0[*field].clone());
                let changed = resolve_model(&table, vocab, start, place);
                changed.is_ok_and(|changed| !same_shape(&changed.config, &whole))
            };
            let mut fields = phase.model.0.keys();
            let field = fields.find(alone).or(phase.model.0.keys().next());
            return Err(Fault::usage("a phase cannot change the structure of the model")
                .at(field.map_or_else(|| place("model"), |field| here(field)))
                .wanted("the value under [model], which all phases share")
                .hint(
                    "between phases may differ: rope_theta, partial_rotary_factor, max_position_embeddings, rms_norm_eps, \
                     initializer_range, document_mask, skip, z_loss, loss_chunk",
                ));
        }
        models.push(model);
    }
    if let Some(start) = start {
        compare_start(start, &models[0].config, || curriculum.place("init_from"))?;
    }
    Ok(models)
}

/// Whether two models differ only in settings that change no tensor, and not in how tensors are cut and joined.
fn same_shape(model: &ZayaConfig, other: &ZayaConfig) -> bool {
    let same = ZayaConfig {
        rms_norm_eps: model.rms_norm_eps,
        initializer_range: model.initializer_range,
        max_position_embeddings: model.max_position_embeddings,
        rope_theta: model.rope_theta,
        partial_rotary_factor: model.partial_rotary_factor,
        skip: model.skip,
        document_mask: model.document_mask,
        loss_chunk: model.loss_chunk,
        z_loss: model.z_loss,
        ..other.clone()
    };
    // The skip class is a row of the router.
    same == *model && model.router_classes() == other.router_classes()
}

/// The initial model that the curriculum names, relative to the curriculum's folder.
fn open_start(
    opened: &OpenedCurriculum,
    data: &Stores,
    run: &Path,
) -> Result<Option<InitialModel>> {
    let Some(path) = &opened.curriculum.init_from else { return Ok(None) };
    let place = || opened.curriculum.place("init_from");
    let folder = storage::resolve(&opened.file.folder(), path);
    let folder = folder.map_err(|fault| fault.or_at(place))?;
    let folder = folder.local().ok_or_else(|| {
        Fault::usage("initial weights are read from this machine")
            .at(place())
            .found(&folder)
            .wanted("a folder that `ztrain import` made")
            .hint("copy it here, and name the copy")
    })?;
    // Its vocabulary was compared with the store's when the run began.
    if let Some(start) = InitialModel::kept(run, folder)? {
        return Ok(Some(start));
    }
    let start = InitialModel::open(folder).map_err(|fault| fault.or_at(place))?;
    start.compare_tokenizer(&data.tokenizer()?, place)?;
    Ok(Some(start))
}

/// Refuses a model whose parameters differ from those of the initial model.
fn compare_start(
    start: &InitialModel,
    config: &ZayaConfig,
    place: impl Fn() -> String,
) -> Result<()> {
    let (given, wanted) = (model::parameters(start.config()), model::parameters(config));
    let shown = |spec: Option<&ParamSpec>| {
        spec.map_or_else(|| "nothing".to_owned(), |spec| format!("{} {:?}", spec.name, spec.shape))
    };
    let shapes = |specs: &[ParamSpec]| {
        specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone())).collect::<Vec<_>>()
    };
    let (left, right) = (shapes(&given), shapes(&wanted));
    if left == right {
        return Ok(());
    }
    let same = left.iter().zip(&right).take_while(|(left, right)| left == right).count();
    Err(Fault::usage("the initial weights have other parameters than the model")
        .at(place())
        .found(shown(given.get(same)))
        .wanted(shown(wanted.get(same)))
        .hint("leave [model] out: the folder brings its own"))
}

/// The model's configuration, and the learning rate of its balancing biases.
fn resolve_model(
    ModelTable(table): &ModelTable,
    vocab: Option<u32>,
    start: Option<&InitialModel>,
    place: impl Fn(&str) -> String,
) -> Result<PhaseModel> {
    let mut fields = BTreeMap::new();
    for (key, value) in table {
        let value = serde_json::to_value(value).map_err(|error| {
            Fault::usage(format!("this value has no meaning here: {error}")).at(place(key))
        })?;
        fields.insert(key.clone(), value);
    }
    let preset = match fields.remove(PRESET) {
        None => None,
        Some(serde_json::Value::String(name)) => Some(name),
        Some(other) => {
            let fault = Fault::usage("`preset` has the wrong kind of value").at(place(PRESET));
            return Err(fault.found(other).wanted("a string"));
        }
    };
    let balance_lr = match fields.remove(BALANCE_LR) {
        None => balance::LR,
        Some(value) => {
            let lr = value.as_f64().filter(|lr| *lr >= 0.0 && lr.is_finite());
            // Nan and inf are the only curriculum values that JSON lacks.
            let found = if value.is_null() { "nan or inf".to_owned() } else { value.to_string() };
            let fault = || Fault::usage("balance_lr is a learning rate: a number from 0");
            lr.ok_or_else(|| fault().at(place(BALANCE_LR)).found(found))?
        }
    };
    // An initial model brings its configuration; keys of the curriculum override it.
    if let (Some(start), None) = (start, &preset)
        && let Ok(serde_json::Value::Object(own)) = serde_json::to_value(start.config())
    {
        for (key, value) in own {
            fields.entry(key).or_insert(value);
        }
    }
    // A preset's vocabulary is for planning; a run uses its tokenizer's unless the curriculum sets more rows.
    if let Some(vocab) = vocab {
        fields.entry("vocab_size".to_owned()).or_insert_with(|| vocab.into());
    }
    let config = ZayaConfig::resolve_at(preset.as_deref(), &fields, &place)?;
    if let Some(vocab) = vocab.filter(|vocab| config.vocab_size < i64::from(*vocab)) {
        return Err(Fault::usage("the model has fewer token ids than the tokenizer")
            .at(place("vocab_size"))
            .found(config.vocab_size)
            .wanted(format!("at least {vocab}"))
            .hint("leave vocab_size out: it then follows the tokenizer"));
    }
    Ok(PhaseModel { config, balance_lr, cut: Cut::WHOLE })
}

/// The numbers of each parameter; an error for a group that has none of them.
fn scales(
    curriculum: &Curriculum,
    parameters: &[ParamSpec],
    rules: &[OptimizerRule],
) -> Result<Vec<ParamScales>> {
    let (optimizer, mut groups) = (&curriculum.optimizer, vec![None; parameters.len()]);
    for (number, group) in (1..).zip(&optimizer.groups) {
        let place = curriculum.place(&format!("optimizer.group.{number}.params"));
        let fault = |what: &str| Fault::usage(what).at(&place).found(&group.params);
        let glob = Glob::new(&group.params);
        let glob = glob
            .map_err(|error| fault("this is no pattern of names").hint(error.kind().to_string()))?;
        let matcher = glob.compile_matcher();
        let named = || (0..parameters.len()).filter(|at| matcher.is_match(&parameters[*at].name));
        if named().next().is_none() {
            let few = parameters.iter().rev().take(4).map(|parameter| parameter.name.as_str());
            let few = few.collect::<Vec<_>>().join(", ");
            return Err(fault("no parameter of the model has such a name")
                .hint(format!("names are as in the first line of a ledger: {few}")));
        }
        if named().all(|at| groups[at].is_some()) {
            return Err(fault("groups before this one have all of its parameters")
                .hint("the first group that matches a name has it: put this one first"));
        }
        for at in named() {
            groups[at].get_or_insert(group);
        }
    }
    let of = |(group, rule): (Option<&ParamGroup>, &OptimizerRule)| {
        ParamScales::of(optimizer, group, *rule)
    };
    Ok(groups.into_iter().zip(rules).map(of).collect())
}

/// The settings of a step. Kind, moments and decay are the same in the whole run.
fn settings(curriculum: &Curriculum, step: u64) -> OptimizerSettings {
    let numbers = curriculum.numbers_at(step);
    let (schedule, guard) = (numbers.rates(), SpikePolicy::of(&numbers));
    let optimizer = numbers.optimizer;
    OptimizerSettings {
        kind: match optimizer.kind {
            OptimizerKind::Muon => MatrixOptimizer::Muon,
            OptimizerKind::AdamW => MatrixOptimizer::AdamW,
        },
        schedule,
        betas: (optimizer.betas[0], optimizer.betas[1]),
        eps: optimizer.eps,
        momentum: optimizer.momentum,
        newton_schulz: match optimizer.newton_schulz {
            NewtonSchulzForm::Gram => kernels::ops::NewtonSchulzIterate::Gram,
            NewtonSchulzForm::Direct => kernels::ops::NewtonSchulzIterate::Direct,
            NewtonSchulzForm::Bf16 => kernels::ops::NewtonSchulzIterate::Bf16,
        },
        clip: optimizer.clip,
        guard,
    }
}
