//! The verdict: one sentence from the evidence, causes before symptoms.

use contract::terminal;
use serde::Serialize;

use super::changes::{Change, Kind};
use super::text::short;
use super::{Explanation, RouterEvidence, documents};
use crate::replay::Verdict;
use crate::replay::narrow::joined;

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
}

/// Something that stands out.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Of what.
    pub subject: Subject,
    /// In words.
    pub words: String,
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

/// All that stands out, causes first.
pub(super) fn findings(found: &Explanation) -> Vec<Finding> {
    let mut all = Vec::new();
    let mut say = |subject, words| all.push(Finding { subject, words });
    if let Some(words) = bits(found) {
        say(Subject::Bits, words);
    }
    for change in &found.changes {
        say(subject(change), change.what.clone());
    }
    let (now, lasting): (Vec<_>, Vec<_>) = found
        .routers
        .iter()
        .partition(|one| one.median.is_some_and(|median| median - one.entropy > LOST));
    if let Some(words) = router(&now) {
        say(Subject::Router, words);
    }
    let lasting: Vec<_> = lasting.into_iter().filter(|one| one.entropy < EVEN).collect();
    if let Some(words) = router(&lasting) {
        let before = lasting.iter().any(|one| one.median.is_some());
        say(Subject::Lasting, format!("{}{words}", if before { "as before, " } else { "" }));
    }
    if let Some(words) = temperature(found) {
        say(Subject::Temperature, words);
    }
    if let Some(words) = update(found) {
        say(Subject::Update, words);
    }
    if let Some(words) = culprits(found) {
        say(Subject::Documents, words);
    }
    all.sort_by_key(|finding| finding.subject);
    all
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
    let quiet: Vec<String> = quiet.map(|(_, word)| (*word).to_owned()).collect();
    let quiet = match quiet.is_empty() {
        true => String::new(),
        false => format!("; {}: no change", quiet.join(", ")),
    };
    let alone = if found.window == 0 { "; no step before was looked at" } else { "" };
    let quiet = quiet + alone;
    let words: Vec<&str> = findings.iter().map(|finding| finding.words.as_str()).collect();
    match words.split_first() {
        None if found.diverged.is_some() => {
            format!("it diverges, and nothing that was looked at stands out{quiet}")
        }
        None => format!("nothing stands out{quiet}"),
        Some((first, [])) => format!("{first}{quiet}"),
        Some((first, rest)) => format!("{first}; also: {}{quiet}", rest.join("; ")),
    }
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

fn culprits(found: &Explanation) -> Option<String> {
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
    let of_excess = match found.unexplained.excess > 0.0 && excess > 0.0 {
        true => format!(
            "{:.0} % of the excess loss and ",
            (100.0 * excess / found.unexplained.excess).min(999.0)
        ),
        false => format!("{excess:+.1} nats against what their source costs and "),
    };
    Some(format!(
        "{count} {noun} of {source} {} ({}): {of_excess}{:.0} % of the squares of all documents' gradients",
        joined(&sources),
        joined(&ids),
        100.0 * share
    ))
}
