//! Odd steps, found by themselves, each with the reason: a loss (of a source, too) or a gradient norm far from those before it
//! (either way), a router whose load has collapsed, a learning rate that jumps, a step that was skipped, one that did not end.
//!
//! Every step is looked at once, in order, against at most [`window::LENGTH`] steps before it; nothing is held of the rest.
//! Odd steps in a row are one finding, named by its first.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use crate::ledger::Seen;
use crate::usual::{LENGTH, Window};

/// Spreads from what was to be expected at which a value is odd. A spread that is estimated from 32 steps may be half of the true
/// one, and noise has heavier tails than a normal distribution.
const FAR: f64 = 8.0;

/// Spreads at which a loss and a gradient norm are odd where both are: by chance they seldom are at once.
const FAR_TOGETHER: f64 = 5.0;

/// A source with less than this part of a step's labels is not looked at by itself.
const PART: f64 = 0.05;

/// Spreads from which on a value is worth a look where nothing is odd.
const NEAR: f64 = 4.0;

/// Steps that are kept of those.
const NEAREST: usize = 3;

/// The least spread of a loss, as a share of it: noise below that is no noise of training.
const LOSS_FLOOR: f64 = 2e-3;

/// The least spread of the logarithm of a gradient norm.
const NORM_FLOOR: f64 = 0.05;

/// Steps between two odd ones of the same finding, at most.
const GAP: u64 = 3;

/// A load collapses where its evenness falls below this share of what it was.
const COLLAPSED: f64 = 0.6;

/// And was no less than this before: what is uneven already cannot collapse.
const EVEN: f64 = 0.5;

/// A load is uneven all the time where the mean of its evenness over a window lies below this.
const UNEVEN: f64 = 0.3;

/// Findings that are kept, at most: a run whose every third step is odd needs no list of them.
pub(super) const MOST: usize = 10_000;

/// One finding: a step, or several in a row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OddStep {
    /// The first of them.
    pub step: u64,
    /// The last of them.
    pub last: u64,
    /// What is odd, in the order in which it was found.
    pub reasons: Vec<Reason>,
    /// What else happened there: a new phase, an amendment, a start of the process.
    pub context: Vec<String>,
}

impl OddStep {
    /// The step to look at: where what is farthest from usual lies. How fast a step was computed says nothing about it.
    pub fn farthest(&self) -> u64 {
        let far = |one: &&Reason| match one.kind {
            Kind::Stopped | Kind::NotFinite | Kind::Skipped => f64::INFINITY,
            _ => one.score.map_or(0.0, f64::abs),
        };
        let learned = self.reasons.iter().rev().filter(|one| one.kind != Kind::Slow);
        learned.max_by(|l, r| far(l).total_cmp(&far(r))).map_or(self.step, |one| one.step)
    }
}

/// What is odd.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reason {
    /// Of what kind.
    pub kind: Kind,
    /// The step of the value: of the farthest one where there are several.
    pub step: u64,
    /// The value that is farthest from usual, where there is one.
    pub value: Option<f64>,
    /// What it was before.
    pub usual: Option<f64>,
    /// How far that is, in spreads of the values before; negative below.
    pub score: Option<f64>,
    /// The layer, for a router.
    pub layer: Option<usize>,
    /// For people.
    pub words: String,
}

/// Of what kind a reason is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The step did not end: it diverged, or the machine failed.
    Stopped,
    /// A value that is not finite.
    NotFinite,
    /// The step moved nothing.
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
    /// The time that the step took.
    Slow,
}

/// Looks at every step in turn.
#[derive(Default)]
pub(super) struct Detector {
    loss: Window,
    norm: Window,
    /// Of each source the loss and the labels.
    sources: BTreeMap<String, [Window; 2]>,
    layers: Vec<Load>,
    phase: String,
    /// The rates of the last two steps, the older first.
    rates: VecDeque<f64>,
    found: Vec<OddStep>,
    /// The farthest of what is not odd, the farthest first.
    near: Vec<Reason>,
}

/// The evenness of a layer's load over the last steps.
#[derive(Clone, Debug, Default)]
struct Load {
    last: VecDeque<f64>,
    sum: f64,
    /// Whether it was said that it is uneven.
    told: bool,
}

impl Detector {
    /// The findings so far.
    pub(super) fn found(&self) -> &[OddStep] {
        &self.found
    }

    /// What lies farthest from usual without being odd, by step.
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

    /// Looks at a step; whether it is odd.
    pub(super) fn step(&mut self, seen: &Seen) -> bool {
        let mut reasons = Vec::new();
        if let Some(skipped) = seen.skipped() {
            reasons.push(Reason::words(Kind::Skipped, seen.step, skipped.words().to_owned()));
        }
        let context = self.context(seen);
        if !context.is_empty() {
            let windows = self.sources.values_mut().flatten();
            [&mut self.loss, &mut self.norm].into_iter().chain(windows).for_each(Window::change);
        }
        // A step without labels has no loss, and a gradient of 0.
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

    /// What else a step brings.
    fn context(&mut self, seen: &Seen) -> Vec<String> {
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

    fn loss(&mut self, seen: &Seen) -> Option<Reason> {
        let loss = seen.loss;
        if !loss.is_finite() {
            return Some(Reason::words(Kind::NotFinite, seen.step, format!("the loss is {loss}")));
        }
        let found = self.loss.position(loss, LOSS_FLOOR * loss.abs());
        self.loss.push(loss);
        let found = found?;
        let (usual, by) = (found.usual, loss - found.usual);
        let words = || format!("loss {loss:.4}, {by:+.4} against the usual {usual:.4}");
        Reason::value(Kind::Loss, seen.step, [loss, usual, found.score], words)
    }

    /// The source whose loss lies farthest from its own.
    fn source(&mut self, seen: &Seen) -> Option<Reason> {
        let mut farthest: Option<Reason> = None;
        for (name, sum) in &seen.sources {
            let labels = sum.labels as f64;
            let Some(loss) = sum.mean().filter(|loss| loss.is_finite()) else { continue };
            if labels < PART * seen.label_count as f64 {
                continue;
            }
            let [losses, counts] = self.sources.entry(name.clone()).or_default();
            let found = losses.position(loss, LOSS_FLOOR * loss.abs());
            let usually = counts.median();
            losses.push(loss);
            counts.push(labels);
            let (Some(found), Some(usually)) = (found, usually) else { continue };
            // The mean of fewer labels spreads wider.
            let score = found.score * (labels / usually.max(1.0)).sqrt().min(1.0);
            if farthest.as_ref().is_none_or(|one| one.score.unwrap_or(0.0).abs() < score.abs()) {
                let (usual, by) = (found.usual, loss - found.usual);
                let words = || {
                    format!(
                        "loss {loss:.4} of source {name}, {by:+.4} against the usual {usual:.4}"
                    )
                };
                let reason = Reason::value(Kind::Source, seen.step, [loss, usual, score], words);
                farthest = reason.or(farthest);
            }
        }
        farthest
    }

    /// Norms are compared by their ratio.
    fn norm(&mut self, seen: &Seen) -> Option<Reason> {
        let norm = seen.norm();
        if !norm.is_finite() {
            return Some(Reason::words(
                Kind::NotFinite,
                seen.step,
                format!("the gradient norm is {norm}"),
            ));
        }
        let log = norm.max(f64::MIN_POSITIVE).ln();
        let found = self.norm.position(log, NORM_FLOOR);
        self.norm.push(log);
        let found = found?;
        let usual = found.usual.exp();
        let words =
            || format!("gradient norm {norm:.4}, {} the usual {usual:.4}", times(norm / usual));
        Reason::value(Kind::Norm, seen.step, [norm, usual, found.score], words)
    }

    /// What of all this is odd: what lies that far, or loss and norm together. Of what nearly is, note is taken.
    fn far(&mut self, all: Vec<Reason>) -> Vec<Reason> {
        let far = |reason: &Reason| match reason.score {
            // What is not finite.
            None => f64::INFINITY,
            Some(score) => score.abs(),
        };
        let of = |norm: bool| {
            let of = all.iter().filter(|reason| (reason.kind == Kind::Norm) == norm);
            of.map(far).fold(0.0, f64::max)
        };
        let together = of(true).min(of(false)) > FAR_TOGETHER;
        let bound = if together { FAR_TOGETHER } else { FAR };
        let (mut odd, near): (Vec<_>, Vec<_>) = all.into_iter().partition(|one| far(one) > bound);
        // What the whole loss tells, its sources need not.
        let whole = odd.iter().any(|one| matches!(one.kind, Kind::Loss | Kind::NotFinite));
        odd.retain(|one| !(whole && one.kind == Kind::Source));
        if odd.is_empty() {
            near.into_iter().for_each(|one| self.note_near(one));
        }
        odd
    }

    fn note_near(&mut self, reason: Reason) {
        let score = reason.score.unwrap_or(0.0).abs();
        let least = self.near.get(NEAREST - 1).and_then(|reason| reason.score).unwrap_or(NEAR);
        if score <= least.abs() {
            return;
        }
        let farther = |one: &Reason| one.score.is_some_and(|one| one.abs() >= score);
        let place = self.near.partition_point(farther);
        self.near.insert(place, reason);
        self.near.truncate(NEAREST);
    }

    /// A rate that changes by more than a tenth, and far more than between the two steps before: no schedule does.
    fn rate(&mut self, seen: &Seen) -> Option<Reason> {
        let rate = seen.lr();
        let before: Vec<f64> = self.rates.iter().copied().collect();
        if self.rates.len() == 2 {
            self.rates.pop_front();
        }
        self.rates.push_back(rate);
        let [older, usual] = before[..] else { return None };
        let jumps = (rate - usual).abs() > 4.0 * (usual - older).abs() + 0.1 * usual;
        jumps.then(|| Reason {
            kind: Kind::LearningRate,
            step: seen.step,
            value: Some(rate),
            usual: Some(usual),
            score: None,
            layer: None,
            words: format!("learning rate {rate:.3e}, {usual:.3e} at the step before"),
        })
    }

    fn routers(&mut self, seen: &Seen) -> Vec<Reason> {
        self.layers.resize(seen.tokens_per_expert.len(), Load::default());
        let layers = self.layers.iter_mut().zip(&seen.tokens_per_expert).enumerate();
        layers.filter_map(|(layer, (load, counts))| load.step(seen.step, layer, counts)).collect()
    }
}

impl Load {
    /// Says so where the load collapses, or was uneven for a whole window: once, until it is even again.
    fn step(&mut self, step: u64, layer: usize, counts: &[u64]) -> Option<Reason> {
        let value = crate::metrics::entropy(counts).max(0.0);
        let usual = self.sum / self.last.len().max(1) as f64;
        let collapses = self.last.len() >= LENGTH / 4 && usual >= EVEN && value < COLLAPSED * usual;
        let lasts = self.last.len() == LENGTH && usual < UNEVEN;
        let even = value.min(usual) > EVEN * (1.0 + COLLAPSED) / 2.0;
        if self.last.len() == LENGTH {
            self.sum -= self.last.pop_front().unwrap_or_default();
        }
        self.last.push_back(value);
        self.sum += value;
        if self.told || !(collapses || lasts) {
            self.told = self.told && !even;
            return None;
        }
        self.told = true;
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
        let (kind, layer) = (Kind::Router, Some(layer));
        Some(Reason {
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

impl Reason {
    /// One of a value, what it usually is, and how far it lies from there; `None` where that is nowhere near odd.
    fn value(
        kind: Kind,
        step: u64,
        [value, usual, score]: [f64; 3],
        words: impl FnOnce() -> String,
    ) -> Option<Reason> {
        let numbers = [value, usual, score].map(Some);
        let [value, usual, score] = numbers;
        let is_near = score.is_some_and(|score| score.abs() > NEAR);
        is_near.then(|| Reason { kind, step, value, usual, score, layer: None, words: words() })
    }

    /// One without numbers.
    pub(super) fn words(kind: Kind, step: u64, words: String) -> Reason {
        Reason { kind, step, value: None, usual: None, score: None, layer: None, words }
    }

    /// Whether `other` is a farther value of the same thing.
    fn is_of(&self, other: &Reason) -> bool {
        self.kind == other.kind
            && self.layer == other.layer
            && self.score.is_some() == other.score.is_some()
            && self.score.unwrap_or(0.0) * other.score.unwrap_or(0.0) >= 0.0
    }
}

/// Adds a finding behind the others, or to the last one where it goes on with that.
pub(super) fn add(found: &mut Vec<OddStep>, next: OddStep) {
    let Some(last) = found.last_mut().filter(|last| next.step <= last.last + GAP) else {
        if found.len() < MOST {
            found.push(next);
        }
        return;
    };
    last.last = last.last.max(next.last);
    for reason in next.reasons {
        match last.reasons.iter_mut().find(|one| one.is_of(&reason)) {
            None => last.reasons.push(reason),
            Some(one) if reason.score.unwrap_or(0.0).abs() > one.score.unwrap_or(0.0).abs() => {
                *one = reason;
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
    all.sort_by_key(|one| one.step);
    let mut found = Vec::new();
    all.into_iter().for_each(|one| add(&mut found, one.clone()));
    found
}

/// "3.2 times", "a fifth of" as "0.20 times".
fn times(ratio: f64) -> String {
    if ratio >= 10.0 { format!("{ratio:.0} times") } else { format!("{ratio:.2} times") }
}

#[cfg(test)]
#[path = "odd/tests.rs"]
mod tests;
