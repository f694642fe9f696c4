//! What is trained: everything that decides a bit, in one hashed value.

use std::collections::BTreeMap;
use std::sync::Arc;

use contract::{Digestible, Fault, Hasher, Identity, Result};
use loader::{Opened, Stores};
use mixer::curriculum::{Dtype, OptimizerKind};
use mixer::{Curriculum, Plan};

use crate::model::{self, ParamSpec, ZayaConfig};
use crate::optim::balance::{self, Balance};
use crate::optim::schedule::Schedule;
use crate::optim::{Kind, Rule, Settings};

/// The model field that is ours: the learning rate of the balancing biases.
const BALANCE_LR: &str = "balance_lr";

/// The content that a run reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// The digests of the stores, in the order of the curriculum.
    pub stores: Vec<Identity>,
    /// SHA-256 of their tokenizer.
    pub tokenizer: Identity,
    /// Ids of the tokenizer, added ones included.
    pub vocab: u32,
}

/// A run, resolved.
pub struct RunSpec {
    /// The curriculum, as read.
    pub curriculum: Curriculum,
    /// What it reads.
    pub content: Content,
    /// The model.
    pub config: ZayaConfig,
    /// The optimizer's numbers.
    pub settings: Settings,
    /// The parameters in canonical order.
    pub parameters: Vec<ParamSpec>,
    /// How each is updated.
    pub rules: Vec<Rule>,
    /// Which text each step reads.
    pub plan: Arc<Plan>,
    /// Where the text lies.
    pub data: Arc<Stores>,
}

impl RunSpec {
    /// Resolves an opened curriculum; refuses what cannot be trained.
    pub fn new(opened: &Opened) -> Result<Self> {
        let curriculum = opened.curriculum.clone();
        let data = Arc::clone(opened.stores()?);
        let content = Content::of(&data);
        if curriculum.dtype != Dtype::F32 {
            return Err(Fault::usage("the model computes in f32 so far")
                .at(curriculum.place("dtype"))
                .found(format!("{:?}", curriculum.dtype.name()))
                .wanted("\"f32\""));
        }
        let (config, balance_lr) = resolve_model(&curriculum, content.vocab)?;
        let settings = settings(&curriculum, balance_lr);
        let parameters = model::parameters(&config);
        let rules = parameters.iter().map(|parameter| Rule::of(settings.kind, parameter)).collect();
        let plan = Arc::clone(&opened.plan);
        Ok(RunSpec { curriculum, content, config, settings, parameters, rules, plan, data })
    }

    /// The curriculum's canonical text with the stores' digests for their paths: a function of content alone.
    pub fn canonical(&self) -> String {
        let mut curriculum = self.curriculum.clone();
        curriculum.stores = self.content.stores.iter().map(Identity::to_string).collect();
        curriculum.canonical()
    }

    /// The balance before the first step, by layer.
    pub fn balance(&self) -> Vec<Balance> {
        let layer = |_| Balance::new(self.config.num_experts as usize, true);
        (0..self.config.num_hidden_layers).map(layer).collect()
    }

    /// The names of the parameters.
    pub fn names(&self) -> Vec<String> {
        self.parameters.iter().map(|parameter| parameter.name.clone()).collect()
    }
}

impl Content {
    /// What these stores hold.
    pub fn of(stores: &Stores) -> Self {
        let manifests = stores.stores().iter().map(|store| store.manifest());
        let tokenizer = &stores.stores()[0].manifest().tokenizer;
        Content {
            stores: manifests.map(|manifest| manifest.digest).collect(),
            tokenizer: tokenizer.sha256,
            vocab: tokenizer.vocab,
        }
    }
}

impl Digestible for RunSpec {
    fn feed(&self, hasher: &mut Hasher) {
        // No `..`: a new field must choose. What follows from the others is not fed again; paths of stores never are.
        let RunSpec {
            curriculum: _,
            content,
            config,
            settings: _,
            parameters: _,
            rules: _,
            plan: _,
            data: _,
        } = self;
        hasher.tag("run.v1").str(&self.canonical());
        let Content { stores, tokenizer, vocab } = content;
        hasher.u64(stores.len() as u64);
        stores.iter().for_each(|store| {
            hasher.bytes(&store.0);
        });
        hasher.bytes(&tokenizer.0).u64(u64::from(*vocab));
        config.feed(hasher);
    }
}

/// The model's configuration, and the learning rate of its balance.
fn resolve_model(curriculum: &Curriculum, vocab: u32) -> Result<(ZayaConfig, f64)> {
    let mut fields = BTreeMap::new();
    for (key, value) in &curriculum.model.fields {
        let value = serde_json::to_value(value).map_err(|error| {
            Fault::usage(format!("this value has no meaning here: {error}"))
                .at(place(curriculum, key))
        })?;
        fields.insert(key.clone(), value);
    }
    let balance_lr = match fields.remove(BALANCE_LR) {
        None => balance::LR,
        Some(value) => {
            value.as_f64().filter(|lr| *lr >= 0.0 && lr.is_finite()).ok_or_else(|| {
                Fault::usage("a learning rate is a number from 0")
                    .at(place(curriculum, BALANCE_LR))
                    .found(&value)
            })?
        }
    };
    // A preset's vocabulary is for planning; a run has that of its tokenizer unless the curriculum asks for more rows.
    fields.entry("vocab_size".to_owned()).or_insert_with(|| vocab.into());
    let config = ZayaConfig::resolve(curriculum.model.preset.as_deref(), &fields)?;
    if config.vocab_size < i64::from(vocab) {
        return Err(Fault::usage("the model has fewer token ids than the tokenizer")
            .at(place(curriculum, "vocab_size"))
            .found(config.vocab_size)
            .wanted(format!("at least {vocab}"))
            .hint("leave vocab_size out: it then follows the tokenizer"));
    }
    Ok((config, balance_lr))
}

fn place(curriculum: &Curriculum, field: &str) -> String {
    curriculum.place(&format!("model.{field}"))
}

fn settings(curriculum: &Curriculum, balance_lr: f64) -> Settings {
    let optimizer = &curriculum.optimizer;
    let schedule = &curriculum.schedule;
    Settings {
        kind: match optimizer.kind {
            OptimizerKind::Muon => Kind::Muon,
            OptimizerKind::AdamW => Kind::AdamW,
        },
        schedule: Schedule {
            peak: optimizer.lr,
            warmup_steps: schedule.warmup_steps,
            decay_steps: schedule.decay_steps,
            last: schedule.final_lr,
        },
        betas: (optimizer.betas[0], optimizer.betas[1]),
        eps: optimizer.eps,
        momentum: optimizer.momentum,
        weight_decay: optimizer.weight_decay,
        clip: optimizer.clip,
        balance_lr,
    }
}
