//! A change that a run did not have: imagined by a replay, made by a fork.
//!
//! Both make it an amendment of the run's curriculum, so that a fork does what was imagined, bit for bit.

use std::collections::{BTreeMap, BTreeSet};

use contract::{Fault, Result};
use curriculum::{Amendment, Dtype, NumbersChange, OptimizerChange, ScheduleChange};
use mixer::Curriculum;

use crate::spec::RunSpec;

/// What is changed, from a step on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change {
    /// Ids of documents whose text is hidden; everything else keeps its place.
    pub drop_documents: Vec<String>,
    /// Sources that are left out of every mix; text of the others takes their place.
    pub drop_sources: Vec<String>,
    /// The learning rate of the first step; the schedule keeps its shape from there.
    pub lr: Option<f64>,
    /// The largest gradient norm; 0 for no clipping.
    pub clip: Option<f64>,
    /// Whether a bf16 run computes in f32.
    pub fp32: bool,
    /// Whether the first step moves nothing.
    pub skip: bool,
}

/// By source the numbers of documents, counted in its training stream.
pub type Documents = BTreeMap<String, BTreeSet<u64>>;

impl Change {
    /// Whether anything is changed.
    pub fn is_some(&self) -> bool {
        *self != Change::default()
    }

    /// The curriculum of `spec` with this change from `step` on; `documents` are the numbers of those that are dropped.
    pub fn amended(&self, spec: &RunSpec, step: u64, documents: Documents) -> Result<Curriculum> {
        let mut curriculum = spec.curriculum.clone();
        let numbers = self.numbers(spec, step)?;
        let first =
            Amendment { step, ban: documents, numbers, skip: self.skip, ..Amendment::default() };
        if !first.is_empty() {
            curriculum.amend(vec![first]);
        }
        for source in &self.drop_sources {
            if !curriculum.drop_source(source, step)? {
                let sources = spec.plan.sources().iter().map(|facts| facts.name.as_str());
                let what = format!("no mix has source {source:?} from step {step} on");
                return Err(Fault::usage(what)
                    .at("--drop-source")
                    .wanted(format!("one of {}", sources.collect::<Vec<_>>().join(", "))));
            }
        }
        Ok(curriculum)
    }

    fn numbers(&self, spec: &RunSpec, step: u64) -> Result<NumbersChange> {
        let (mut optimizer, mut schedule) = (OptimizerChange::default(), ScheduleChange::default());
        optimizer.clip = self.clip;
        if let Some(lr) = self.lr {
            let now = spec.settings_at(step).schedule;
            let rate = now.rate(step);
            if rate > 0.0 {
                // One factor on peak and floor keeps the shape.
                optimizer.lr = Some(now.peak * (lr / rate));
                schedule.final_lr = (now.decay_steps > 0).then_some(now.last * (lr / rate));
            } else {
                // Nothing that could be scaled: the rate stays from here on.
                optimizer.lr = Some(lr);
                (schedule.warmup_steps, schedule.decay_steps) = (Some(0), Some(0));
            }
        }
        let dtype = self.fp32.then_some(Dtype::F32);
        if self.fp32 && spec.dtype_at(step) == Dtype::F32 {
            return Err(Fault::usage("the run computes in f32 already").at("--fp32"));
        }
        Ok(NumbersChange { optimizer, schedule, dtype })
    }

    /// The change, for people: one phrase for each part.
    pub fn words(&self) -> Vec<String> {
        let Change { drop_documents, drop_sources, lr, clip, fp32, skip } = self;
        let documents = drop_documents.iter().map(|id| format!("without document {id:?}"));
        let sources = drop_sources
            .iter()
            .map(|source| format!("without source {source:?}, whose place the others take"));
        let numbers = [
            lr.map(|lr| {
                format!("with learning rate {lr:e} in the first step, and in proportion later")
            }),
            clip.map(|clip| format!("with gradients clipped at {clip:e}")),
            fp32.then(|| "computed in f32".to_owned()),
            skip.then(|| "with a first step that moves nothing".to_owned()),
        ];
        documents.chain(sources).chain(numbers.into_iter().flatten()).collect()
    }

    /// The change as flags of `ztrain replay` and `ztrain fork`, for a shell.
    pub fn flags(&self) -> String {
        let Change { drop_documents, drop_sources, lr, clip, fp32, skip } = self;
        let documents = drop_documents.iter().map(|id| format!(" --drop-doc {}", quoted(id)));
        let sources = drop_sources.iter().map(|name| format!(" --drop-source {}", quoted(name)));
        let numbers = [
            lr.map(|lr| format!(" --lr {lr:e}")),
            clip.map(|clip| format!(" --clip {clip:e}")),
            fp32.then(|| " --fp32".to_owned()),
            skip.then(|| " --optimizer-skip".to_owned()),
        ];
        documents.chain(sources).chain(numbers.into_iter().flatten()).collect()
    }
}

/// A word as a shell takes it.
pub fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=+,@%".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}
