//! Finds odd steps, each with the reason: a loss (also of one source) or a gradient norm far from those before (in
//! either direction), a collapsed router, a jump of the learning rate, a skipped step, or one that was not completed.
//!
//! Every step is read once, in order, and compared with at most [`LENGTH`] steps before it; no more are stored.
//! Consecutive odd steps are one finding, named by the first.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use curriculum::stats::{self, FAR, GAP, LENGTH, RecentValues};
use trainer::ledger::StepSummaryFields;

/// A source with a smaller share of a step's labels is not checked by itself.
const PART: f64 = 0.05;

/// If nothing is odd, values are worth showing from this distance in spreads.
const NEAR: f64 = 4.0;

/// How many of those are stored.
const NEAREST: usize = 3;

/// A load collapses if its entropy falls below this fraction of what it was.
const COLLAPSED: f64 = 0.6;

/// And if it was at least this before: a load that is already uneven cannot collapse.
const EVEN: f64 = 0.5;

/// A load is permanently uneven if its mean entropy over a window is below this.
const UNEVEN: f64 = 0.3;

/// The maximum number of findings: in a run where every third step is odd, a list of them is useless.
pub(super) const MOST: usize = 10_000;

/// One finding: a step, or several consecutive ones.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OddStep {
    /// The first step.
    pub step: u64,
    /// The last step.
    pub last: u64,
    /// Reasons, in the order in which they were found.
    pub reasons: Vec<OddReason>,
    /// Other events there: a new phase, an amendment, a start of the process.
    pub context: Vec<String>,
}

impl OddStep {
    /// The step to explain: that of the value farthest from usual. Slow steps do not count.
    pub fn farthest(&self) -> u64 {
        let far = |reason: &&OddReason| match reason.kind {
            OddReasonKind::Stopped | OddReasonKind::NotFinite | OddReasonKind::Skipped => {
                f64::INFINITY
            }
            _ => reason.score.map_or(0.0, f64::abs),
        };
        let learned = self.reasons.iter().rev().filter(|reason| reason.kind != OddReasonKind::Slow);
        learned.max_by(|l, r| far(l).total_cmp(&far(r))).map_or(self.step, |reason| reason.step)
    }
}

/// A reason why a step is odd.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OddReason {
    /// Its kind.
    pub kind: OddReasonKind,
    /// The step of the value, the farthest one if there are several.
    pub step: u64,
    /// The value that is farthest from usual, if there is one.
    pub value: Option<f64>,
    /// The usual value.
    pub usual: Option<f64>,
    /// The distance in spreads of the values before; negative if below.
    pub score: Option<f64>,
    /// The layer, for a router.
    pub layer: Option<usize>,
    /// A description for people.
    pub words: String,
}

/// The kind of a reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OddReasonKind {
    /// The step was not completed: it diverged, or the machine failed.
    Stopped,
    /// A value that is not finite.
    NotFinite,
    /// The step was skipped.
    Skipped,
    /// The loss.
    Loss,
    /// The loss of one source.
    Source,
    /// The gradient norm.
    Norm,
    /// The load of a layer's experts.
    Router,
    /// The learning rate.
    LearningRate,
    /// The duration of the step.
    Slow,
}

/// Checks every step in order.
#[derive(Default)]
pub(super) struct Detector {
    loss: RecentValues,
    norm: RecentValues,
    /// Loss and labels of each source.
    sources: BTreeMap<String, [RecentValues; 2]>,
    layers: Vec<LoadHistory>,
    phase: String,
    /// The rates of the last two steps, the older one first.
    rates: VecDeque<f64>,
    found: Vec<OddStep>,
    /// Values that are far but not odd, the farthest first.
    near: Vec<OddReason>,
}

/// The entropy of a layer's load over the last steps.
#[derive(Clone, Debug, Default)]
struct LoadHistory {
    last: VecDeque<f64>,
    sum: f64,
    /// Whether it was already reported as uneven.
    reported: bool,
}

impl Detector {
    /// The findings so far.
    pub(super) fn found(&self) -> &[OddStep] {
        &self.found
    }

    /// The farthest values that are not odd, by step.
    pub(super) fn near(&self) -> Vec<OddStep> {
        let mut reasons = self.near.clone();
        reasons.sort_by_key(|reason| reason.step);
        let mut near = Vec::new();
        for reason in reasons {
            let step = reason.step;
            add(
                &mut near,
                OddStep { step, last: step, reasons: vec![reason], context: Vec::new() },
            );
        }
        near
    }

    /// Checks a step; returns whether it is odd.
    pub(super) fn step(&mut self, seen: &StepSummaryFields) -> bool {
        let mut reasons = Vec::new();
        if let Some(skipped) = seen.skipped() {
            reasons.push(OddReason::words(
                OddReasonKind::Skipped,
                seen.step,
                skipped.words().to_owned(),
            ));
        }
        let context = self.context(seen);
        if !context.is_empty() {
            let windows = self.sources.values_mut().flatten();
            [&mut self.loss, &mut self.norm]
                .into_iter()
                .chain(windows)
                .for_each(RecentValues::change);
        }
        // A step without labels has no loss, and a zero gradient.
        if seen.label_count > 0 {
            let learned = [self.loss(seen), self.source(seen), self.norm(seen)].into_iter();
            reasons.extend(self.far(learned.flatten().collect()));
        }
        reasons.extend(self.rate(seen));
        reasons.extend(self.routers(seen));
        let odd = !reasons.is_empty();
        if odd {
            add(&mut self.found, OddStep { step: seen.step, last: seen.step, reasons, context });
        }
        odd
    }

    /// Other events of a step.
    fn context(&mut self, seen: &StepSummaryFields) -> Vec<String> {
        let mut context = Vec::new();
        if self.phase != seen.phase {
            if !self.phase.is_empty() {
                context.push(format!("phase {} begins", seen.phase));
            }
            self.phase.clone_from(&seen.phase);
        }
        if seen.curriculum.is_some() {
            context.push("the curriculum was amended from here on".to_owned());
        }
        context
    }

    fn loss(&mut self, seen: &StepSummaryFields) -> Option<OddReason> {
        let loss = seen.loss;
        if !loss.is_finite() {
            return Some(OddReason::words(
                OddReasonKind::NotFinite,
                seen.step,
                format!("the loss is {loss}"),
            ));
        }
        let found = self.loss.place_loss(loss)?;
        let (usual, by) = (found.usual, loss - found.usual);
        let words = || format!("loss {loss:.4}, {by:+.4} against the usual {usual:.4}");
        OddReason::value(OddReasonKind::Loss, seen.step, [loss, usual, found.score], words)
    }

    /// The source whose loss is farthest from its usual one.
    fn source(&mut self, seen: &StepSummaryFields) -> Option<OddReason> {
        let mut farthest: Option<OddReason> = None;
        for (name, sum) in &seen.sources {
            let labels = sum.labels as f64;
            let Some(loss) = sum.mean().filter(|loss| loss.is_finite()) else { continue };
            if labels < PART * seen.label_count as f64 {
                continue;
            }
            let [losses, counts] = self.sources.entry(name.clone()).or_default();
            let found = losses.place_loss(loss);
            let usually = counts.median();
            counts.push(labels);
            let (Some(found), Some(usually)) = (found, usually) else { continue };
            // The mean of fewer labels is noisier.
            let score = found.score * (labels / usually.max(1.0)).sqrt().min(1.0);
            if farthest.as_ref().is_none_or(|one| one.score.unwrap_or(0.0).abs() < score.abs()) {
                let (usual, by) = (found.usual, loss - found.usual);
                let words = || {
                    format!(
                        "loss {loss:.4} of source {name}, {by:+.4} against the usual {usual:.4}"
                    )
                };
                let reason =
                    OddReason::value(OddReasonKind::Source, seen.step, [loss, usual, score], words);
                farthest = reason.or(farthest);
            }
        }
        farthest
    }

    /// Checks the norm by its ratio to the usual one.
    fn norm(&mut self, seen: &StepSummaryFields) -> Option<OddReason> {
        let norm = seen.norm();
        if !norm.is_finite() {
            return Some(OddReason::words(
                OddReasonKind::NotFinite,
                seen.step,
                format!("the gradient norm is {norm}"),
            ));
        }
        let found = self.norm.place_norm(norm)?;
        let usual = found.usual;
        let words =
            || format!("gradient norm {norm:.4}, {} the usual {usual:.4}", times(norm / usual));
        OddReason::value(OddReasonKind::Norm, seen.step, [norm, usual, found.score], words)
    }

    /// The values that are odd: those far enough, or both loss and norm together. Records those that nearly are.
    fn far(&mut self, all: Vec<OddReason>) -> Vec<OddReason> {
        let far = |reason: &OddReason| match reason.score {
            // Not finite.
            None => f64::INFINITY,
            Some(score) => score.abs(),
        };
        let of = |norm: bool| {
            let of = all.iter().filter(|reason| (reason.kind == OddReasonKind::Norm) == norm);
            of.map(far).fold(0.0, f64::max)
        };
        let bound = stats::bound(of(false), of(true), FAR);
        let (mut odd, near): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|reason| far(reason) > bound);
        // If the whole loss is odd, its sources are not listed.
        let whole = odd
            .iter()
            .any(|reason| matches!(reason.kind, OddReasonKind::Loss | OddReasonKind::NotFinite));
        odd.retain(|reason| !(whole && reason.kind == OddReasonKind::Source));
        if odd.is_empty() {
            near.into_iter().for_each(|reason| self.note_near(reason));
        }
        odd
    }

    fn note_near(&mut self, reason: OddReason) {
        let score = reason.score.unwrap_or(0.0).abs();
        let least = self.near.get(NEAREST - 1).and_then(|reason| reason.score).unwrap_or(NEAR);
        if score <= least.abs() {
            return;
        }
        let farther = |near: &OddReason| near.score.is_some_and(|near| near.abs() >= score);
        let place = self.near.partition_point(farther);
        self.near.insert(place, reason);
        self.near.truncate(NEAREST);
    }

    /// Detects a rate that changes by more than a tenth, and far more than between the two steps before, as no schedule
    /// does.
    fn rate(&mut self, seen: &StepSummaryFields) -> Option<OddReason> {
        let rate = seen.lr();
        let before: Vec<f64> = self.rates.iter().copied().collect();
        if self.rates.len() == 2 {
            self.rates.pop_front();
        }
        self.rates.push_back(rate);
        let [older, usual] = before[..] else { return None };
        let jumps = (rate - usual).abs() > 4.0 * (usual - older).abs() + 0.1 * usual;
        jumps.then(|| OddReason {
            kind: OddReasonKind::LearningRate,
            step: seen.step,
            value: Some(rate),
            usual: Some(usual),
            score: None,
            layer: None,
            words: format!("learning rate {rate:.3e}, {usual:.3e} at the step before"),
        })
    }

    fn routers(&mut self, seen: &StepSummaryFields) -> Vec<OddReason> {
        self.layers.resize(seen.tokens_per_expert.len(), LoadHistory::default());
        let layers = self.layers.iter_mut().zip(&seen.tokens_per_expert).enumerate();
        layers.filter_map(|(layer, (load, counts))| load.step(seen.step, layer, counts)).collect()
    }
}

impl LoadHistory {
    /// Reports a load that collapses, or was uneven for a whole window: once, until it is even again.
    fn step(&mut self, step: u64, layer: usize, counts: &[u64]) -> Option<OddReason> {
        let value = trainer::metrics::entropy(counts).max(0.0);
        let usual = self.sum / self.last.len().max(1) as f64;
        let collapses = self.last.len() >= LENGTH / 4 && usual >= EVEN && value < COLLAPSED * usual;
        let lasts = self.last.len() == LENGTH && usual < UNEVEN;
        let even = value.min(usual) > EVEN * (1.0 + COLLAPSED) / 2.0;
        if self.last.len() == LENGTH {
            self.sum -= self.last.pop_front().unwrap_or_default();
        }
        self.last.push_back(value);
        self.sum += value;
        if self.reported || !(collapses || lasts) {
            self.reported = self.reported && !even;
            return None;
        }
        self.reported = true;
        let experts = &counts[..counts.len().saturating_sub(1)];
        let total: u64 = experts.iter().sum();
        let most = experts.iter().enumerate().max_by_key(|(_, count)| **count);
        let (expert, most) = most.unwrap_or((0, &0));
        let share = 100.0 * *most as f64 / total.max(1) as f64;
        let since = match collapses {
            true => format!("usually {usual:.2}"),
            false => format!("{usual:.2} on the mean of the {LENGTH} steps before"),
        };
        let words = format!(
            "the router of layer {layer} sends {share:.0} % of its tokens to expert {expert}: evenness {value:.2}, {since}"
        );
        let (kind, layer) = (OddReasonKind::Router, Some(layer));
        Some(OddReason {
            kind,
            step,
            value: Some(value),
            usual: Some(usual),
            score: None,
            layer,
            words,
        })
    }
}

impl OddReason {
    /// A reason with a value, the usual value, and the distance; `None` if that is far from odd.
    fn value(
        kind: OddReasonKind,
        step: u64,
        [value, usual, score]: [f64; 3],
        words: impl FnOnce() -> String,
    ) -> Option<OddReason> {
        let numbers = [value, usual, score].map(Some);
        let [value, usual, score] = numbers;
        let is_near = score.is_some_and(|score| score.abs() > NEAR);
        is_near.then(|| OddReason { kind, step, value, usual, score, layer: None, words: words() })
    }

    /// A reason without numbers.
    pub(super) fn words(kind: OddReasonKind, step: u64, words: String) -> OddReason {
        OddReason { kind, step, value: None, usual: None, score: None, layer: None, words }
    }

    /// Whether `other` is a farther value of the same quantity.
    fn is_of(&self, other: &OddReason) -> bool {
        self.kind == other.kind
            && self.layer == other.layer
            && self.score.is_some() == other.score.is_some()
            && self.score.unwrap_or(0.0) * other.score.unwrap_or(0.0) >= 0.0
    }
}

/// Appends a finding, or merges it into the last one if it continues that.
pub(super) fn add(found: &mut Vec<OddStep>, next: OddStep) {
    let Some(last) = found.last_mut().filter(|last| next.step <= last.last + GAP) else {
        if found.len() < MOST {
            found.push(next);
        }
        return;
    };
    last.last = last.last.max(next.last);
    for reason in next.reasons {
        match last.reasons.iter_mut().find(|known| known.is_of(&reason)) {
            None => last.reasons.push(reason),
            Some(known) if reason.score.unwrap_or(0.0).abs() > known.score.unwrap_or(0.0).abs() => {
                *known = reason;
            }
            Some(_) => (),
        }
    }
    for context in next.context {
        if !last.context.contains(&context) {
            last.context.push(context);
        }
    }
}

/// The findings of both lists, by step.
pub(super) fn merged(a: &[OddStep], b: &[OddStep]) -> Vec<OddStep> {
    let mut all: Vec<&OddStep> = a.iter().chain(b).collect();
    all.sort_by_key(|step| step.step);
    let mut found = Vec::new();
    all.into_iter().for_each(|step| add(&mut found, step.clone()));
    found
}

/// "3.2 times", "a fifth of" as "0.20 times".
fn times(ratio: f64) -> String {
    if ratio >= 10.0 { format!("{ratio:.0} times") } else { format!("{ratio:.2} times") }
}

#[cfg(test)]
#[path = "odd/tests.rs"]
mod tests;
