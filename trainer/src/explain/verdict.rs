//! The verdict: one sentence from the evidence, causes before symptoms.

use contract::terminal;
use serde::Serialize;

use super::changes::{Change, Kind, number};
use super::text::short;
use super::{Explanation, RouterEvidence, documents};
use crate::replay::Verdict;
use crate::replay::narrow::joined;
use crate::usual::FEW;

/// Of what a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// The bits differ: the machine, the software or the stores.
    Bits,
    /// The learning rate.
    LearningRate,
    /// The mixture of sources.
    Mixture,
    /// A router that sends its tokens to few experts.
    Router,
    /// A temperature of attention.
    Temperature,
    /// The size of the update that led to the step's weights.
    Update,
    /// Documents of the step.
    Documents,
    /// Anything else that was changed.
    Changed,
    /// What was as odd all through the steps before.
    Lasting,
    /// It moved nothing.
    Skipped,
    /// Loss or gradient norm, where no reason is found.
    Symptom,
    /// The time that it took.
    Speed,
}

/// Something that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Of what.
    pub subject: Subject,
    /// In words.
    pub words: String,
    /// Whether it is no reason of what the step is: it was so before, or what it moves is as it was.
    pub context: bool,
}

/// What can be looked at and found unchanged, by its subject.
const LOOKED_AT: [(Subject, &str); 6] = [
    (Subject::LearningRate, "learning rate"),
    (Subject::Mixture, "mixture"),
    (Subject::Router, "routers"),
    (Subject::Temperature, "temperatures"),
    (Subject::Update, "updates"),
    (Subject::Bits, "bits"),
];

/// A router whose evenness is below this has collapsed long since.
const EVEN: f64 = 0.35;

/// One that lost this much of it has collapsed now.
const LOST: f64 = 0.3;

/// Logits above this leave nothing of the softmax but its largest entry (the bound of MuonClip, arXiv 2507.20534).
const LOGIT: f64 = 100.0;

/// An update this many times the median is a spike.
const SPIKE: f64 = 4.0;

/// Spreads from which on a symptom is told.
const WORTH: f64 = 3.0;

/// A rate above this moves any weight by more than weights are: every optimizer here moves them by about its rate.
const WILD: f64 = 1.0;

/// Documents with this part of the squares of all gradients are the step's gradient.
const MOST: f64 = 0.5;

/// And make it so many times as long as usual, where it is by no measure of noise that it has moved.
const LONGER: f64 = 1.5;

/// So many documents at most, each with so many times the score of the next, stand out in any step.
const FEW_DOCUMENTS: usize = 3;
const APART: f64 = 3.3;

/// What stands in the way of a sentence's head: the lower, the nearer to it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Bits,
    Rate,
    /// Documents that are most of the gradient, where nothing was changed at this very step.
    Dominant,
    Changed,
    Router,
    Temperature,
    Update,
    Documents,
    Skipped,
    Symptom,
    Speed,
    /// No reason of anything: what else is so.
    Context,
}

/// All that was found: what stands out, causes first, then what is context alone.
pub(super) fn findings(found: &Explanation) -> Vec<Finding> {
    let moved = found.diverged.is_some() || found.moved.learned();
    let or_context = |leads: bool, place| if leads { place } else { Place::Context };
    let mut all: Vec<(Place, Subject, String)> = Vec::new();
    if let Some(words) = bits(found) {
        all.push((Place::Bits, Subject::Bits, words));
    }
    let spike = update(found);
    for change in &found.changes {
        let place = or_context(leads(change, found, moved), Place::Changed);
        let is_rate = change.kind == Kind::LearningRate && place != Place::Context;
        let far = is_rate && (spike.is_some() || found.diverged.is_some());
        all.push((if far { Place::Rate } else { place }, subject(change), change.what.clone()));
    }
    let rate = found.moved.rates.into_iter().fold(0.0, f64::max);
    if rate > WILD && !all.iter().any(|(place, _, _)| *place == Place::Rate) {
        let words =
            format!("the learning rate is {}: no weight outlives such an update", number(rate));
        let place = or_context(moved || found.moved.updated(), Place::Rate);
        all.push((place, Subject::LearningRate, words));
    }
    if let Some((share, words)) = culprits(found) {
        let at_once = |change: &Change| change.step == found.step && change.kind.moves();
        let dominant = share >= MOST && !found.changes.iter().any(at_once);
        let longer = found.moved.norm.is_some_and(|norm| found.norm > LONGER * norm.usual);
        if moved || dominant && longer || is_apart(found) {
            let place = if dominant { Place::Dominant } else { Place::Documents };
            all.push((place, Subject::Documents, words));
        }
    }
    let (now, lasting): (Vec<_>, Vec<_>) = found
        .routers
        .iter()
        .partition(|one| one.median.is_some_and(|median| median - one.entropy > LOST));
    if let Some(words) = router(&now) {
        all.push((or_context(moved, Place::Router), Subject::Router, words));
    }
    let lasting: Vec<_> = lasting.into_iter().filter(|one| one.entropy < EVEN).collect();
    if let Some(words) = router(&lasting) {
        let before = lasting.iter().any(|one| one.median.is_some());
        let words = format!("{}{words}", if before { "as before, " } else { "" });
        all.push((Place::Context, Subject::Lasting, words));
    }
    if let Some(words) = temperature(found) {
        all.push((or_context(moved, Place::Temperature), Subject::Temperature, words));
    }
    if let Some(words) = spike {
        all.push((Place::Update, Subject::Update, words));
    }
    if let Some(why) = found.moved.skipped {
        all.push((Place::Skipped, Subject::Skipped, format!("it moved nothing: {}", why.words())));
    }
    if found.window > 0 && found.moved.learned() && all.iter().all(|one| one.0 == Place::Context) {
        all.extend(symptom(found).map(|words| (Place::Symptom, Subject::Symptom, words)));
    }
    if let Some(speed) = found.speed.as_ref().filter(|speed| speed.is_slow()) {
        all.push((Place::Speed, Subject::Speed, speed.words()));
    }
    all.sort_by_key(|(place, subject, _)| (*place, *subject));
    let finding = |(place, subject, words): (Place, Subject, String)| Finding {
        subject,
        words,
        context: place == Place::Context,
    };
    all.into_iter().map(finding).collect()
}

/// Whether a change is a reason of what the step is: it came lately, and what it moves has moved since. A rate that makes a run
/// diverge may have done so for a while.
fn leads(change: &Change, found: &Explanation, moved: bool) -> bool {
    let lately = found.step - change.step < FEW as u64;
    match change.kind {
        Kind::LearningRate => {
            found.diverged.is_some() || lately && (moved || found.moved.updated())
        }
        _ => change.kind.moves() && lately && moved,
    }
}

fn subject(change: &Change) -> Subject {
    match change.kind {
        Kind::LearningRate => Subject::LearningRate,
        Kind::Mixture => Subject::Mixture,
        Kind::Phase | Kind::Amendment | Kind::Kernels | Kind::Ranks | Kind::Skipped => {
            Subject::Changed
        }
    }
}

/// One sentence.
pub(super) fn sentence(findings: &[Finding], found: &Explanation) -> String {
    let seen = |subject| match subject {
        Subject::Bits => found.verdict != Verdict::NotRecorded,
        // Everything else is held against the steps before.
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

/// What is not as it was, where no reason is found.
fn symptom(found: &Explanation) -> Option<String> {
    let far = |name: String, value: f64, usual: f64, score: f64| {
        (score, format!("{name} {value:.4} against a usual {usual:.4} ({score:+.0} spreads)"))
    };
    let mut all = Vec::new();
    all.extend(
        found.moved.loss.map(|one| far("loss".to_owned(), found.loss, one.usual, one.score)),
    );
    let norm = found.moved.norm;
    all.extend(norm.map(|one| far("gradient norm".to_owned(), found.norm, one.usual, one.score)));
    for (name, one) in &found.moved.sources {
        let documents = found.documents.iter().map(|one| &one.document);
        let of = documents.filter(|one| one.source == *name);
        let (loss, labels) =
            of.fold((0.0, 0), |(loss, labels), one| (loss + one.loss, labels + one.labels));
        let name = format!("loss of source {}", terminal::name(name));
        all.push(far(name, loss / (labels as f64).max(1.0), one.usual, one.score));
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

/// The worst of some routers, in words.
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
        .filter(|one| one.largest_logit > LOGIT || !one.largest_logit.is_finite());
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

/// Whether a few documents lie so far from all others that they stand out in a step that is as usual.
fn is_apart(found: &Explanation) -> bool {
    let count = found.culprits();
    let next = found.documents.get(count).map_or(0.0, |one| one.score);
    (1..=FEW_DOCUMENTS).contains(&count) && found.documents[count - 1].score > APART * next
}

/// The documents that stand apart: their part of the squares of all gradients, and words.
fn culprits(found: &Explanation) -> Option<(f64, String)> {
    let count = found.culprits();
    let named = &found.documents[..count];
    if named.is_empty() {
        return None;
    }
    let source_of =
        |one: &documents::DocumentEvidence| terminal::name(&one.document.source).into_owned();
    let mut sources: Vec<String> = named.iter().map(source_of).collect();
    sources.sort();
    sources.dedup();
    let ids: Vec<String> = named.iter().map(|one| short(&one.document.id)).collect();
    let noun = if count == 1 { "document" } else { "documents" };
    let source = if sources.len() == 1 { "source" } else { "sources" };
    let squares = |one: &documents::DocumentEvidence| one.gradient_norm * one.gradient_norm;
    let all: f64 = found.documents.iter().map(squares).sum();
    let share = named.iter().map(squares).sum::<f64>() / all.max(f64::MIN_POSITIVE);
    let excess: f64 = named.iter().map(|one| one.excess).sum();
    // Where others are cheaper than usual, these may have more than all of it.
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
