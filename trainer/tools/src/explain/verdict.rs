//! The verdict: one sentence from the evidence, causes before symptoms.

use contract::terminal;
use serde::Serialize;

use super::changes::{RunChange, RunChangeKind, number};
use super::text::short;
use super::{Explanation, RouterEvidence, documents};
use crate::replay::narrow::joined;
use curriculum::stats::FEW;
use trainer::replay::Verdict;

/// The subject of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// Different bits: the machine, the software or the stores.
    Bits,
    /// The learning rate.
    LearningRate,
    /// The mixture of sources.
    Mixture,
    /// A router that sends its tokens to a few experts.
    Router,
    /// A temperature of attention.
    Temperature,
    /// The size of the update that led to the step's weights.
    Update,
    /// Documents of the step.
    Documents,
    /// Any other change.
    Changed,
    /// Something that was as unusual in all of the steps before.
    Lasting,
    /// The step was skipped.
    Skipped,
    /// Loss or gradient norm without a known cause.
    Symptom,
    /// Its duration.
    Speed,
}

/// A finding.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Its subject.
    pub subject: Subject,
    /// In words.
    pub words: String,
    /// Whether it explains nothing: it was so before, or what it affects has not changed.
    pub context: bool,
}

/// Subjects that can be examined and found unchanged.
const LOOKED_AT: [(Subject, &str); 6] = [
    (Subject::LearningRate, "learning rate"),
    (Subject::Mixture, "mixture"),
    (Subject::Router, "routers"),
    (Subject::Temperature, "temperatures"),
    (Subject::Update, "updates"),
    (Subject::Bits, "bits"),
];

/// A router with a lower entropy has collapsed, now or earlier.
const EVEN: f64 = 0.35;

/// One that lost this much entropy collapsed recently.
const LOST: f64 = 0.3;

/// With logits above this, softmax keeps only the largest entry (the bound of MuonClip, arXiv 2507.20534).
const LOGIT: f64 = 100.0;

/// An update this many times the median is a spike.
const SPIKE: f64 = 4.0;

/// The distance in spreads from which a symptom is reported.
const WORTH: f64 = 3.0;

/// Every optimizer here changes a weight by about the rate: a larger rate exceeds the weights themselves.
const WILD: f64 = 1.0;

/// Documents with this share of the squares of all gradients dominate the step.
const MOST: f64 = 0.5;

/// And make the gradient this much longer than usual, where the norm has not moved by the noise measure.
const LONGER: f64 = 1.5;

/// A few documents, at most this many and each with this many times the score of the next, stand out even in a usual
/// step.
const FEW_DOCUMENTS: usize = 3;
const APART: f64 = 3.3;

/// The order of findings: the lowest leads the sentence.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    Bits,
    Rate,
    /// Documents that dominate the gradient, where nothing changed at this very step.
    Dominant,
    Changed,
    Router,
    Temperature,
    Update,
    Documents,
    Skipped,
    Symptom,
    Speed,
    /// Not a cause of anything.
    Context,
}

/// All findings: what stands out, causes first; then context.
pub(super) fn findings(found: &Explanation) -> Vec<Finding> {
    let moved = found.diverged.is_some() || found.moved.learned();
    let or_context = |leads: bool, place| if leads { place } else { Order::Context };
    let mut all: Vec<(Order, Subject, String)> = Vec::new();
    if let Some(words) = bits(found) {
        all.push((Order::Bits, Subject::Bits, words));
    }
    let spike = update(found);
    for change in &found.changes {
        let place = or_context(leads(change, found, moved), Order::Changed);
        let is_rate = change.kind == RunChangeKind::LearningRate && place != Order::Context;
        let far = is_rate && (spike.is_some() || found.diverged.is_some());
        all.push((if far { Order::Rate } else { place }, subject(change), change.what.clone()));
    }
    let rate = found.moved.rates.into_iter().fold(0.0, f64::max);
    if rate > WILD && !all.iter().any(|(place, _, _)| *place == Order::Rate) {
        let words =
            format!("the learning rate is {}: no weight outlives such an update", number(rate));
        let place = or_context(moved || found.moved.updated(), Order::Rate);
        all.push((place, Subject::LearningRate, words));
    }
    if let Some((share, words)) = culprits(found) {
        let at_once = |change: &RunChange| change.step == found.step && change.kind.moves();
        let dominant = share >= MOST && !found.changes.iter().any(at_once);
        let longer = found.moved.norm.is_some_and(|norm| found.norm > LONGER * norm.usual);
        if moved || dominant && longer || is_apart(found) {
            let place = if dominant { Order::Dominant } else { Order::Documents };
            all.push((place, Subject::Documents, words));
        }
    }
    let (now, lasting): (Vec<_>, Vec<_>) = found
        .routers
        .iter()
        .partition(|router| router.median.is_some_and(|median| median - router.entropy > LOST));
    if let Some(words) = router(&now) {
        all.push((or_context(moved, Order::Router), Subject::Router, words));
    }
    let lasting: Vec<_> = lasting.into_iter().filter(|router| router.entropy < EVEN).collect();
    if let Some(words) = router(&lasting) {
        let before = lasting.iter().any(|router| router.median.is_some());
        let words = format!("{}{words}", if before { "as before, " } else { "" });
        all.push((Order::Context, Subject::Lasting, words));
    }
    if let Some(words) = temperature(found) {
        all.push((or_context(moved, Order::Temperature), Subject::Temperature, words));
    }
    if let Some(words) = spike {
        all.push((Order::Update, Subject::Update, words));
    }
    if let Some(why) = found.moved.skipped {
        all.push((Order::Skipped, Subject::Skipped, format!("it moved nothing: {}", why.words())));
    }
    if found.window > 0
        && found.moved.learned()
        && all.iter().all(|finding| finding.0 == Order::Context)
    {
        all.extend(symptom(found).map(|words| (Order::Symptom, Subject::Symptom, words)));
    }
    if let Some(speed) = found.speed.as_ref().filter(|speed| speed.is_slow()) {
        all.push((Order::Speed, Subject::Speed, speed.words()));
    }
    all.sort_by_key(|(place, subject, _)| (*place, *subject));
    let finding = |(place, subject, words): (Order, Subject, String)| Finding {
        subject,
        words,
        context: place == Order::Context,
    };
    all.into_iter().map(finding).collect()
}

/// Whether a change is a cause: it is recent, and what it affects has moved since. A learning rate that makes a run
/// diverge may be older.
fn leads(change: &RunChange, found: &Explanation, moved: bool) -> bool {
    let lately = found.step - change.step < FEW as u64;
    match change.kind {
        RunChangeKind::LearningRate => {
            found.diverged.is_some() || lately && (moved || found.moved.updated())
        }
        _ => change.kind.moves() && lately && moved,
    }
}

fn subject(change: &RunChange) -> Subject {
    match change.kind {
        RunChangeKind::LearningRate => Subject::LearningRate,
        RunChangeKind::Mixture => Subject::Mixture,
        RunChangeKind::Phase
        | RunChangeKind::Amendment
        | RunChangeKind::Kernels
        | RunChangeKind::Ranks
        | RunChangeKind::Skipped => Subject::Changed,
    }
}

/// The verdict in one sentence.
pub(super) fn sentence(findings: &[Finding], found: &Explanation) -> String {
    let seen = |subject| match subject {
        Subject::Bits => found.verdict != Verdict::NotRecorded,
        // All other subjects are compared with the steps before.
        _ if found.window == 0 => false,
        Subject::Router => !found.routers.is_empty(),
        Subject::Temperature => !found.temperatures.is_empty(),
        Subject::Update => found.layers.iter().any(|layer| layer.update_before.is_some()),
        _ => true,
    };
    let quiet = LOOKED_AT.iter().filter(|(subject, _)| {
        seen(*subject) && findings.iter().all(|finding| finding.subject != *subject)
    });
    let quiet: Vec<&str> = quiet.map(|(_, word)| *word).collect();
    let of = |context: bool| {
        let of = findings.iter().filter(|finding| finding.context == context);
        of.map(|finding| finding.words.as_str()).collect::<Vec<_>>()
    };
    let mut sentence = match of(false).split_first() {
        None if found.diverged.is_some() => {
            "it diverges, and nothing that was looked at stands out".to_owned()
        }
        None => match (found.moved.loss, found.moved.norm) {
            (Some(_), Some(_)) if found.moved.updated() => {
                "nothing stands out: loss and gradient norm are at their usual".to_owned()
            }
            (Some(_), Some(_)) => {
                "nothing stands out: loss, gradient norm and updates are at their usual".to_owned()
            }
            _ => "nothing stands out".to_owned(),
        },
        Some((first, [])) => (*first).to_owned(),
        Some((first, rest)) => format!("{first}; also: {}", rest.join("; ")),
    };
    let context = of(true);
    if !context.is_empty() {
        sentence += &format!("; context: {}", context.join("; "));
    }
    if !quiet.is_empty() {
        sentence += &format!("; {}: no change", quiet.join(", "));
    }
    if found.window == 0 {
        sentence += "; no step before was looked at";
    }
    sentence
}

/// What is unusual without a known cause.
fn symptom(found: &Explanation) -> Option<String> {
    let far = |name: String, value: f64, usual: f64, score: f64| {
        (score, format!("{name} {value:.4} against a usual {usual:.4} ({score:+.0} spreads)"))
    };
    let mut all = Vec::new();
    all.extend(
        found.moved.loss.map(|part| far("loss".to_owned(), found.loss, part.usual, part.score)),
    );
    let norm = found.moved.norm;
    all.extend(
        norm.map(|part| far("gradient norm".to_owned(), found.norm, part.usual, part.score)),
    );
    for (name, part) in &found.moved.sources {
        let documents = found.documents.iter().map(|evidence| &evidence.document);
        let of = documents.filter(|document| document.source == *name);
        let (loss, labels) = of.fold((0.0, 0), |(loss, labels), document| {
            (loss + document.loss, labels + document.labels)
        });
        let name = format!("loss of source {}", terminal::name(name));
        all.push(far(name, loss / (labels as f64).max(1.0), part.usual, part.score));
    }
    all.retain(|(score, _)| score.abs() > WORTH);
    all.sort_by(|a, b| b.0.abs().total_cmp(&a.0.abs()));
    let words: Vec<String> = all.into_iter().map(|(_, words)| words).collect();
    (!words.is_empty()).then(|| format!("{}, and no reason stands out", words.join(", ")))
}

fn bits(found: &Explanation) -> Option<String> {
    let narrowed = found.bits.as_ref();
    let where_ = narrowed.map_or_else(|| found.advice.clone(), |narrowed| narrowed.words.clone());
    match found.verdict {
        Verdict::SameBits | Verdict::NotRecorded => None,
        Verdict::RunHit => Some(format!("the run itself computed this step wrongly: {where_}")),
        Verdict::Repeatable => Some(format!("{}; {where_}", found.advice)),
        Verdict::NotRepeatable => {
            Some(format!("the hardware here does not compute the same twice: {where_}"))
        }
    }
}

/// The worst of these routers, in words.
fn router(collapsed: &[&RouterEvidence]) -> Option<String> {
    let worst = collapsed.iter().min_by(|a, b| a.entropy.total_cmp(&b.entropy))?;
    let experts = &worst.load[..worst.load.len().saturating_sub(1)];
    let all: f64 = experts.iter().sum();
    let most = experts.iter().copied().fold(0.0, f64::max) / all.max(f64::MIN_POSITIVE);
    let before = worst.median.map_or_else(String::new, |median| format!(", {median:.2} before"));
    let others = match collapsed.len() {
        1 => String::new(),
        count => format!(" (and {} more)", count - 1),
    };
    Some(format!(
        "the router of layer {}{others} collapsed: one expert got {:.0} % of its tokens (evenness {:.2}{before})",
        worst.layer,
        100.0 * most,
        worst.entropy
    ))
}

fn temperature(found: &Explanation) -> Option<String> {
    let hot = found
        .temperatures
        .iter()
        .filter(|layer| layer.largest_logit > LOGIT || !layer.largest_logit.is_finite());
    let worst = hot.max_by(|a, b| a.largest_logit.total_cmp(&b.largest_logit))?;
    Some(format!(
        "the temperature of attention in layer {} is {:.3e}: logits up to {:.3e}",
        worst.layer, worst.temperature, worst.largest_logit
    ))
}

fn update(found: &Explanation) -> Option<String> {
    let spikes = found.layers.iter().filter_map(|layer| {
        let times = layer.update_before.as_ref()?.times()?;
        (times > SPIKE).then_some((times, layer))
    });
    let (times, layer) = spikes.max_by(|a, b| a.0.total_cmp(&b.0))?;
    let times = if times < 1e6 { format!("{times:.1}") } else { format!("{times:.1e}") };
    Some(format!("the update of the step before was {times} times its median in {}", layer.name))
}

/// Whether a few documents stand out so far that they matter even in a usual step.
fn is_apart(found: &Explanation) -> bool {
    let count = found.culprits();
    let next = found.documents.get(count).map_or(0.0, |document| document.score);
    (1..=FEW_DOCUMENTS).contains(&count) && found.documents[count - 1].score > APART * next
}

/// The documents that stand out: their share of the squares of all gradients, and a description.
fn culprits(found: &Explanation) -> Option<(f64, String)> {
    let count = found.culprits();
    let named = &found.documents[..count];
    if named.is_empty() {
        return None;
    }
    let source_of = |document: &documents::DocumentEvidence| {
        terminal::name(&document.document.source).into_owned()
    };
    let mut sources: Vec<String> = named.iter().map(source_of).collect();
    sources.sort();
    sources.dedup();
    let ids: Vec<String> = named.iter().map(|document| short(&document.document.id)).collect();
    let noun = if count == 1 { "document" } else { "documents" };
    let source = if sources.len() == 1 { "source" } else { "sources" };
    let squares =
        |document: &documents::DocumentEvidence| document.gradient_norm * document.gradient_norm;
    let all: f64 = found.documents.iter().map(squares).sum();
    let share = named.iter().map(squares).sum::<f64>() / all.max(f64::MIN_POSITIVE);
    let excess: f64 = named.iter().map(|document| document.excess).sum();
    // If other documents cost less than usual, these may have more than the whole excess.
    let of_excess = match excess > 0.0 && excess <= found.unexplained.excess {
        true => {
            format!("{:.0} % of the excess loss and ", 100.0 * excess / found.unexplained.excess)
        }
        false => format!("{excess:+.1} nats against what their source costs and "),
    };
    let words = format!(
        "{count} {noun} of {source} {} ({}): {of_excess}{:.0} % of the squares of all documents' gradients",
        joined(&sources),
        joined(&ids),
        100.0 * share
    );
    Some((share, words))
}
