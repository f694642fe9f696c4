//! Checks a ledger line without computing its step again: by the curriculum and the lines before it (the learning rate,
//! whether the step changed anything, the clip), and by the checkpoints, each of which has the chain.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use contract::{Digest, Fault, Hasher, Packed, Result, SourceSums, StepSums, note};
use curriculum::guard::{Skipped, SpikePolicy, StepMeasure, Windows};
use mixer::Curriculum;
use serde::Deserialize;
use store::{Location, regular};

/// What is read of every other line.
#[derive(Deserialize)]
pub(super) struct Step {
    pub(super) step: u64,
    pub(super) batch_digest: Digest,
    label_count: u64,
    #[serde(deserialize_with = "contract::read_number")]
    loss: f64,
    micro_batch_labels: Vec<u64>,
    micro_batch_losses: Packed,
    sources: BTreeMap<String, SourceSums>,
    tokens_per_expert: Vec<Vec<u64>>,
    norm: Packed,
    layer_gradient_norms: Packed,
    #[serde(default)]
    clip_threshold: Option<Packed>,
    #[serde(default)]
    skipped: Option<Skipped>,
    lr: Packed,
    layer_update_norms: Packed,
    weight_checksums: Packed,
    pub(super) state_digest: Digest,
    /// The curriculum in force from this step on, where it is another than before.
    #[serde(default)]
    pub(super) curriculum: Option<String>,
}

impl Step {
    /// Its labels, by micro-batch and by source.
    pub(super) fn labels(&self) -> Digest {
        let sources = self.sources.iter().map(|(name, sums)| (name.as_str(), sums.labels));
        labels_digest(&self.micro_batch_labels, sources)
    }

    /// Says what does not follow from the rest of the line.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        let sums = StepSums {
            label_count: self.label_count,
            loss: self.loss,
            micro_batch_labels: &self.micro_batch_labels,
            micro_batch_losses: &self.micro_batch_losses,
            sources: &self.sources,
            tokens_per_expert: &self.tokens_per_expert,
            norm: &self.norm,
            layer_gradient_norms: &self.layer_gradient_norms,
        };
        sums.check()
    }
}

/// The rules by which a step follows from those before it.
pub(super) struct Rules {
    curriculum: Curriculum,
    windows: Option<Windows>,
    /// The checksums of the weights after the step before.
    weights: Option<Packed>,
}

impl Rules {
    /// Those of a run that begins with a curriculum.
    pub(super) fn new(curriculum: Curriculum) -> Self {
        Rules { curriculum, windows: None, weights: None }
    }

    /// From the next step on this curriculum is in force.
    pub(super) fn edit(&mut self, curriculum: Curriculum) {
        self.curriculum = curriculum;
    }

    /// Says what of a step's line does not follow.
    pub(super) fn check(&mut self, step: &Step) -> std::result::Result<(), String> {
        let numbers = self.curriculum.numbers_at(step.step);
        let (found, rate) = (step.lr.float(), numbers.rates().rate(step.step));
        if found.to_bits() != rate.to_bits() {
            return Err(format!("its learning rate is {found:e}, the curriculum's {rate:e}"));
        }
        let guard = SpikePolicy::of(&numbers);
        let mut amendments = self.curriculum.amendments.iter();
        let amended = amendments.any(|one| one.step == step.step && one.skip);
        let loss = step.micro_batch_losses.tree_sum() / step.label_count as f64;
        let measure = StepMeasure { labels: step.label_count, loss, norm: step.norm.float() };
        let decision = guard.decide(&mut self.windows, measure, amended);
        if decision.skipped == Some(Skipped::NonFinite) && !guard.skips_non_finite() {
            return Err("its loss or gradient is not finite, which ends a run".to_owned());
        }
        if step.skipped != decision.skipped {
            let words = |skipped: Option<Skipped>| skipped.map_or("nothing", Skipped::words);
            let (found, wanted) = (words(step.skipped), words(decision.skipped));
            return Err(format!("it says {found:?} of skipping, its loss and norm {wanted:?}"));
        }
        let wanted = decision.longest.map(|longest| Packed::floats([longest]));
        if step.clip_threshold != wanted {
            return Err("its clip does not follow from the norms before it".to_owned());
        }
        let stayed = step.layer_update_norms.values().all(|norm| norm == 0.0)
            && self.weights.as_ref().is_none_or(|before| *before == step.weight_checksums);
        if !decision.moves() && !stayed {
            return Err("it moved nothing, and its weights differ from those before it".to_owned());
        }
        self.weights = Some(step.weight_checksums.clone());
        Ok(())
    }
}

/// The labels of a step, by micro-batch and by source, as one digest.
pub(super) fn labels_digest<'a>(
    micro_batches: &[u64],
    sources: impl ExactSizeIterator<Item = (&'a str, u64)>,
) -> Digest {
    let mut hasher = Hasher::new();
    hasher.tag("labels.v1").u64(micro_batches.len() as u64);
    for labels in micro_batches {
        hasher.u64(*labels);
    }
    hasher.u64(sources.len() as u64);
    for (source, labels) in sources {
        hasher.str(source).u64(labels);
    }
    hasher.finish()
}

/// What a checkpoint's manifest says of the ledger.
#[derive(Deserialize)]
struct Kept {
    state: Digest,
    chain: Digest,
}

/// The checkpoints of a run, by their steps.
pub(super) struct Witnesses(BTreeMap<u64, (Location, Option<Kept>)>);

impl Witnesses {
    /// Those that there are: in the run's folder, and where `checkpoints.at` says.
    pub(super) fn find(run: &Path) -> Result<Self> {
        let mut all = BTreeMap::new();
        let mut places = vec![Location::Local(run.join("checkpoints"))];
        match regular::read(&run.join("checkpoints.at")) {
            Ok(text) => {
                // The place, and on a line of its own the word that stands there.
                let text = text.trim_ascii_end();
                let end = text.iter().rposition(|byte| *byte == b'\n').unwrap_or(text.len());
                places.push(storage::locate_written(&text[..end])?);
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(Fault::io("read", &run.join("checkpoints.at"), &error)),
        }
        for (number, place) in places.iter().enumerate() {
            let steps = match steps(place) {
                Ok(steps) => steps,
                Err(error) if number == 0 && error.kind() == std::io::ErrorKind::NotFound => {
                    continue;
                }
                Err(error) => {
                    note!("note: the checkpoints at {place} were not looked at: {error}");
                    continue;
                }
            };
            for step in steps {
                let manifest = place.join(&format!("step-{step}/manifest.json"));
                let bytes = manifest.read().map_err(|error| manifest.fault("read", &error))?;
                let kept: Option<Kept> = serde_json::from_slice(&bytes).ok();
                if kept.is_none() {
                    note!("note: {manifest} cannot be read, and says nothing of the ledger");
                }
                all.insert(step, (manifest, kept));
            }
        }
        Ok(Witnesses(all))
    }

    /// The newest of them.
    pub(super) fn newest(&self) -> Option<u64> {
        self.0.keys().next_back().copied()
    }

    /// How many of them know the chain of a step up to `last`.
    pub(super) fn count(&self, last: u64) -> usize {
        self.0.range(..=last).filter(|(_, (_, kept))| kept.is_some()).count()
    }

    /// The first step up to `last` that none of them knows of; `None` where one knows the chain up to there.
    pub(super) fn first_unseen(&self, last: u64) -> Option<u64> {
        let mut known = self.0.range(..=last).rev().filter(|(_, (_, kept))| kept.is_some());
        let seen = known.next().map_or(0, |(step, _)| *step);
        (seen < last).then_some(seen + 1)
    }

    /// Refuses a ledger that is not the one with which the checkpoint of `step` was kept.
    pub(super) fn check(
        &self,
        step: u64,
        state: Digest,
        chain: Digest,
        place: impl Fn() -> String,
    ) -> Result<()> {
        let Some((manifest, Some(kept))) = self.0.get(&step) else { return Ok(()) };
        if (kept.state, kept.chain) == (state, chain) {
            return Ok(());
        }
        let what = format!("the ledger up to step {step} is not what its checkpoint was kept with");
        Err(Fault::mismatch(what)
            .at(place())
            .found(format!("the chain {chain}, the state {state}"))
            .wanted(format!("the chain {}, the state {}, as {manifest} says", kept.chain, kept.state))
            .hint("restore the ledger from a copy; where the checkpoint is another run's, take it out of this folder"))
    }
}

/// The steps of the whole checkpoints at a place.
fn steps(place: &Location) -> std::io::Result<Vec<u64>> {
    let step = |name: &str| name.strip_prefix("step-")?.parse::<u64>().ok();
    match place {
        Location::Local(folder) => {
            let whole = |path: &Path| path.join("manifest.json").is_file();
            let entries = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
            let entries = entries.collect::<std::io::Result<Vec<_>>>()?.into_iter();
            let entries = entries.filter(|path| whole(path));
            Ok(entries.filter_map(|path| step(path.file_name()?.to_str()?)).collect())
        }
        Location::Object(folder) => {
            let keys = folder.list()?.into_iter();
            Ok(keys.filter_map(|key| step(key.strip_suffix("/manifest.json")?)).collect())
        }
    }
}
