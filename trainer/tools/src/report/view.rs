//! A run for display: its ledger and its events, read once from the beginning, then followed.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use contract::{Fault, Result, note};
use curriculum::Curriculum;
use loader::open::no_run;
use serde_json::Value;
use store::regular;

use super::bins::{Bins, Merge};
use super::log::{EventLog, ValidationPoint};
use super::odd::{Detector, OddStep, merged};
use super::open_metrics::{self, RunStatus};
use trainer::folder::RunFolder;
use trainer::ledger::{Follower, LedgerHead, StepSummaryFields, layers};
use trainer::metrics::{self, entropy};
use trainer::optim::guard::Skipped;

/// The maximum number of bins for plots by layer.
const LAYER_BINS: usize = 1024;

/// The maximum number of values for all sources together.
const SOURCE_NUMBERS: usize = 200_000;

/// The maximum number of bins by source, before the number of sources is known.
const SOURCE_BINS: usize = 1 << 16;

/// The maximum number of odd steps whose line is stored.
const DETAILS: usize = 2_000;

/// A run for display.
pub struct RunView {
    folder: RunFolder,
    head: LedgerHead,
    follower: Follower,
    log: EventLog,
    /// How often the ledger was replaced by another.
    replaced: u64,
    detector: Detector,
    pub(super) loss: Vec<f32>,
    pub(super) norm: Vec<f32>,
    pub(super) lr: Vec<f32>,
    /// The first step and the name of each phase.
    pub(super) phases: Vec<(u64, String)>,
    /// Labels per step, each from a step on.
    pub(super) labels: Vec<(u64, u64)>,
    pub(super) skipped: Vec<(u64, Skipped)>,
    /// The weights of windows, each with its first step.
    pub(super) windows: Vec<(u64, BTreeMap<String, u64>)>,
    /// The curricula in force, each with its first step.
    pub(super) curricula: Vec<(u64, String)>,
    pub(super) sources: Vec<String>,
    /// Two lanes per source: labels, and sum of their losses.
    pub(super) by_source: Bins,
    /// Tokens by layer and class, layer by layer.
    pub(super) router: Bins,
    /// Classes of each layer, the skip included.
    pub(super) classes: Vec<usize>,
    /// The unevenness of each layer's load: 1 minus its entropy.
    pub(super) unevenness: Bins,
    pub(super) gradients: Bins,
    pub(super) updates: Bins,
    /// The newest step.
    pub(super) last: Option<StepSummaryFields>,
    /// The lines of odd steps.
    pub(super) details: BTreeMap<u64, StepSummaryFields>,
    /// Warnings about explanations, each of which is printed once.
    warned: RefCell<BTreeSet<String>>,
}

/// The explanation of `step` in a file, or why it is none.
fn explanation(path: &Path, step: u64) -> std::result::Result<Value, String> {
    let text = regular::read(path).map_err(|error| error.to_string())?;
    let value: Value = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    match value["step"] == step {
        true => Ok(value),
        false => Err(format!("it explains step {}, not step {step}", value["step"])),
    }
}

impl RunView {
    /// Reads the run in a folder, without writing to it.
    pub fn open(root: &Path) -> Result<RunView> {
        let folder = RunFolder::new(root);
        if !folder.ledger().exists() {
            return Err(no_run(root, "ledger.jsonl"));
        }
        let (head, follower) = Follower::open(&folder.ledger())?;
        let curriculum = head.curriculum.clone();
        let by_layer = |fold| Bins::new(fold, LAYER_BINS);
        let mut view = RunView {
            log: EventLog::new(&folder.events(), &folder.ledger()),
            folder,
            head,
            follower,
            replaced: 0,
            detector: Detector::default(),
            loss: Vec::new(),
            norm: Vec::new(),
            lr: Vec::new(),
            phases: Vec::new(),
            labels: Vec::new(),
            skipped: Vec::new(),
            windows: Vec::new(),
            curricula: vec![(1, curriculum)],
            sources: Vec::new(),
            by_source: Bins::new(Merge::Sum, SOURCE_BINS),
            router: by_layer(Merge::Sum),
            classes: Vec::new(),
            unevenness: by_layer(Merge::Most),
            gradients: by_layer(Merge::Most),
            updates: by_layer(Merge::Most),
            last: None,
            details: BTreeMap::new(),
            warned: RefCell::default(),
        };
        view.refresh()?;
        Ok(view)
    }

    /// Reads new lines, or starts over if the run was replaced by another.
    pub fn follow(&mut self) -> Result<()> {
        if self.follower.replaced()? {
            *self = RunView { replaced: self.replaced + 1, ..RunView::open(self.folder.root())? };
            return Ok(());
        }
        self.refresh().map(drop)
    }

    /// Reads new lines; returns whether there were any.
    pub fn refresh(&mut self) -> Result<bool> {
        let before = self.follower.step();
        while let Some(seen) = self.follower.next_step::<StepSummaryFields>()? {
            self.add(seen);
        }
        let events = self.log.refresh()?;
        Ok(self.follower.step() > before || events > 0)
    }

    /// Changes whenever there is new data; the part before the first `-` counts replacements of the run.
    pub(super) fn version(&self) -> String {
        format!("{}-{}-{}", self.replaced, self.last_step(), self.log.bytes())
    }

    /// The run's folder.
    pub fn folder(&self) -> &RunFolder {
        &self.folder
    }

    /// Line 0 of its ledger.
    pub fn head(&self) -> &LedgerHead {
        &self.head
    }

    /// Its events.
    pub fn log(&self) -> &EventLog {
        &self.log
    }

    /// The last step of the ledger.
    pub fn last_step(&self) -> u64 {
        self.follower.step()
    }

    /// The newest values as OpenMetrics text.
    pub fn open_metrics(&self) -> String {
        let at = (self.last_step() as usize).wrapping_sub(1);
        let newest = |column: &[f32]| column.get(at).map(|value| f64::from(*value));
        let EventLog { speed, stall, memory, tflops, mfu, tokens, validation, evaluation, .. } =
            &self.log;
        let speeds = [
            ("speed/tokens_per_second", newest(speed)),
            ("speed/data_stall", newest(stall)),
            ("speed/memory", newest(memory)),
            ("speed/tflops", newest(tflops)),
            ("speed/mfu", newest(mfu)),
            ("data/tokens", tokens.map(|tokens| tokens as f64)),
        ];
        let speeds = speeds.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        let mut curves: Vec<_> = speeds.filter(|(_, value)| value.is_finite()).collect();
        if let Some(seen) = &self.last {
            curves.extend(metrics::curves(seen, &self.layer_names(), None));
        }
        if let Some((_, ValidationPoint { all, sources })) = validation.last_key_value() {
            curves.push(("total/validation".to_owned(), *all));
            curves.extend(sources.iter().map(|(name, loss)| (format!("validation/{name}"), *loss)));
        }
        let scores = evaluation.last_key_value().into_iter().flat_map(|(_, scores)| scores);
        curves.extend(scores.map(|(name, value)| (name.clone(), *value)));
        let root = self.folder.root();
        let name =
            root.file_name().map_or_else(String::new, |it| it.to_string_lossy().into_owned());
        let standing = RunStatus {
            run: name,
            step: self.last_step(),
            starts: self.log.starts() as u64,
            odd: self.odd().len() as u64,
            running: self.log.running(),
        };
        open_metrics::text(&standing, &curves)
    }

    /// Odd steps, from the ledger and the events, in order.
    pub fn odd(&self) -> Vec<OddStep> {
        let mut found = merged(self.detector.found(), self.log.odd());
        for one in &mut found {
            let near = |step: u64| step + 1 >= one.step && step <= one.last;
            let began = self.log.happenings.iter().filter(|happening| near(happening.step));
            let telling = began.filter(|happening| happening.kind.is_context());
            one.context.extend(telling.map(|happening| happening.words.clone()));
        }
        found
    }

    /// Steps of the ledger that are nearly odd, in order: the three values farthest from usual.
    pub fn near(&self) -> Vec<OddStep> {
        self.detector.near()
    }

    /// The names of the layers in [`StepSummaryFields::layer_gradient_norms`].
    pub(super) fn layer_names(&self) -> Vec<String> {
        layers(&self.head.parameters).into_iter().map(|layer| layer.name).collect()
    }

    /// The maximum number of bins by source.
    pub(super) fn source_bins(&self) -> usize {
        (SOURCE_NUMBERS / (2 * self.sources.len().max(1))).max(256)
    }

    /// The curriculum in force at the end.
    pub fn curriculum(&self) -> Result<Curriculum> {
        let text = self.curricula.last().map_or("", |(_, text)| text);
        Curriculum::parse(text, &format!("the curriculum in {}", self.folder.ledger().display()))
    }

    /// Saved explanations by step: the files `explained/step-N.json` of the run's folder. One that is still being
    /// written, or is not of its step, is left out with a warning.
    pub fn explained(&self) -> Result<BTreeMap<u64, Value>> {
        let folder = self.folder.explained();
        let mut found = BTreeMap::new();
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
            Err(error) => return Err(Fault::io("list", &folder, &error)),
        };
        for entry in entries {
            let path = entry.map_err(|error| Fault::io("list", &folder, &error))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let step = name.strip_prefix("step-").and_then(|name| name.strip_suffix(".json"));
            let Some(step) = step.and_then(|step| step.parse().ok()) else { continue };
            match explanation(&path, step) {
                Ok(value) => {
                    found.insert(step, value);
                }
                Err(why) => {
                    let warning = format!("warning: {}: left out: {why}", path.display());
                    if self.warned.borrow_mut().insert(warning.clone()) {
                        note!("{warning}");
                    }
                }
            }
        }
        Ok(found)
    }

    fn add(&mut self, seen: StepSummaryFields) {
        self.loss.push(seen.loss as f32);
        self.norm.push(seen.norm() as f32);
        self.lr.push(seen.lr() as f32);
        if self.phases.last().is_none_or(|(_, name)| *name != seen.phase) {
            self.phases.push((seen.step, seen.phase.clone()));
        }
        if self.labels.last().is_none_or(|(_, labels)| *labels != seen.label_count) {
            self.labels.push((seen.step, seen.label_count));
        }
        if let Some(skipped) = seen.skipped() {
            self.skipped.push((seen.step, skipped));
        }
        if let Some(weights) = &seen.mix_weights {
            self.windows.push((seen.step, weights.clone()));
        }
        if let Some(text) = &seen.curriculum {
            self.curricula.push((seen.step, text.clone()));
        }
        self.add_sources(&seen);
        self.add_layers(&seen);
        if self.detector.step(&seen) && self.details.len() < DETAILS {
            self.details.insert(seen.step, seen.clone());
        }
        self.last = Some(seen);
    }

    fn add_sources(&mut self, seen: &StepSummaryFields) {
        let mut values = vec![0.0; 2 * self.sources.len()];
        for (name, sum) in &seen.sources {
            let at = self.sources.iter().position(|one| one == name).unwrap_or_else(|| {
                self.sources.push(name.clone());
                values.extend([0.0; 2]);
                self.sources.len() - 1
            });
            (values[2 * at], values[2 * at + 1]) = (sum.labels as f64, sum.loss.float());
        }
        self.by_source.push(&values);
    }

    fn add_layers(&mut self, seen: &StepSummaryFields) {
        if self.classes.is_empty() {
            self.classes = seen.tokens_per_expert.iter().map(Vec::len).collect();
        }
        let counts = seen.tokens_per_expert.iter().flatten().map(|count| *count as f64);
        self.router.push(&counts.collect::<Vec<_>>());
        let uneven: Vec<f64> =
            seen.tokens_per_expert.iter().map(|counts| 1.0 - entropy(counts)).collect();
        self.unevenness.push(&uneven);
        self.gradients.push(&seen.layer_gradient_norms());
        self.updates.push(&seen.layer_update_norms());
    }
}
