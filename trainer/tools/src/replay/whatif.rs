//! Counterfactuals: computes a few steps with a change, next to those of the run. The output marks them as such: this
//! is not a replay.
//!
//! A change is an amendment from the first of the steps on, so `ztrain fork` from the step before trains with it.
//! Phases after these steps are not checked against it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::change::{DocumentsBySource, WhatIfChange};
use contract::{Fault, Result};
use loader::{Batch, explain};
use serde::Serialize;
use trainer::ledger::StepRecord;
use trainer::optim::guard::Skipped;
use trainer::replay::Replayer;
use trainer::state::State;
use trainer::waiting::WaitCounter;

/// Loss and gradient norm of a step.
pub type LossAndNorm = (f64, f64);

/// A step of the run, and with the change.
#[derive(Clone, Debug, Serialize)]
pub struct WhatIfStep {
    /// The step.
    pub step: u64,
    /// Labels of the step that the change drops.
    pub dropped_labels: u64,
    /// Mean loss and gradient norm of the run: from its ledger, or computed here after its end; `None` if it diverged.
    pub was: Option<LossAndNorm>,
    /// Mean loss and gradient norm with the change.
    pub would_be: LossAndNorm,
    /// Whether the changed step is skipped, and why; `None` where the curriculum skips no step.
    pub skipped: Option<Skipped>,
}

/// The steps with a change.
#[derive(Clone, Debug, Serialize)]
pub struct WhatIfSteps {
    /// The steps, up to the last that could be completed.
    pub steps: Vec<WhatIfStep>,
    /// Why the next step could not be completed, if it diverged.
    pub diverged: Option<String>,
    /// Why a fork is impossible, if a later phase needs what is dropped.
    pub no_fork: Option<String>,
}

/// Computes `steps` from the true state before them, with `change` from the first on.
pub fn imagine(
    replayer: &mut Replayer,
    steps: Range<u64>,
    change: &WhatIfChange,
) -> Result<WhatIfSteps> {
    let documents = find_documents(replayer, steps.clone(), &change.drop_documents)?;
    let spec = replayer.spec();
    let curriculum = change.amended(spec, steps.clone(), documents.clone())?;
    let on = change.amended(spec, steps.start..spec.plan.steps() + 1, documents);
    let no_fork = on.err().map(|fault| fault.to_string());
    // Parsed from the text that a fork would train.
    let mut amended = replayer.changed(&curriculum, steps.start)?;
    let mut state = replayer.state_after(steps.start - 1)?;
    let before = (steps.end - 1 > replayer.recorded()).then(|| state.copy()).transpose()?;
    let mut answer = WhatIfSteps { steps: Vec::new(), diverged: None, no_fork };
    let count = steps.end - steps.start;
    let mut waiting =
        replayer.is_rank_0().then(|| WaitCounter::new("steps with the change", count));
    let diverged =
        replayer.advance_to(&mut state, steps.end - 1, Some(&mut amended), |record| {
            let (step, skipped) = (record.step, record.skipped);
            let dropped_labels = dropped_labels(replayer, step, change)?;
            let (was, would_be) = (None, (record.loss, record.norm()));
            answer.steps.push(WhatIfStep { step, dropped_labels, was, would_be, skipped });
            waiting.iter_mut().for_each(WaitCounter::one);
            Ok(true)
        })?;
    answer.diverged = diverged.map(|fault| fault.to_string());
    let last = steps.start + answer.steps.len() as u64;
    let original = original(replayer, before, steps.start..last)?;
    for (step, was) in answer.steps.iter_mut().zip(original) {
        step.was = Some(was);
    }
    Ok(answer)
}

/// Loss and norm of the run itself in these steps, up to one that diverges: from its ledger, or computed from the state
/// `before` them after the ledger's end.
fn original(
    replayer: &Replayer,
    before: Option<State>,
    steps: Range<u64>,
) -> Result<Vec<LossAndNorm>> {
    let recorded = replayer.recorded();
    let values = |record: &StepRecord| (record.loss, record.norm());
    let known = steps.start..steps.end.min(recorded + 1);
    let known = known.map(|step| Ok(values(&replayer.ledger().record(step)?)));
    let mut was = known.collect::<Result<Vec<_>>>()?;
    if let Some(mut state) = before.filter(|_| steps.end > recorded + 1) {
        replayer.walk(&mut state, recorded)?;
        replayer.advance_to(&mut state, steps.end - 1, None, |record| {
            was.push(values(&record));
            Ok(true)
        })?;
    }
    Ok(was)
}

/// The numbers of the documents with these ids. Refuses one without labels in all of the steps, before the state for
/// them is computed.
fn find_documents(
    replayer: &Replayer,
    steps: Range<u64>,
    ids: &[String],
) -> Result<DocumentsBySource> {
    let mut found = DocumentsBySource::new();
    let mut sources: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let all = replayer.spec().plan.sources();
    // All steps are searched: another source may have the same id in a later one.
    for step in steps.take_while(|_| !ids.is_empty()) {
        let batch = replayer.batch(step)?;
        each_piece(replayer, &batch, |source, piece, labels| {
            let name = all[source].name.as_str();
            let (whole, id) = (replayer.spec().data.whole(name), piece.record.shown_id());
            let asked = ids.iter().filter(|_| labels > 0);
            for asked in asked.filter(|asked| drops(asked, [name, whole], &id)) {
                found.entry(name.to_owned()).or_default().insert(piece.document);
                sources.entry(asked).or_default().insert(name);
            }
        })?;
    }
    // An id may be that of documents of several sources.
    if let Some((asked, sources)) = sources.iter().find(|(_, sources)| sources.len() > 1) {
        let sources: Vec<_> = sources.iter().copied().collect();
        return Err(Fault::of_several_sources("--drop-doc", asked, &sources));
    }
    let unseen: Vec<&String> = ids.iter().filter(|id| !sources.contains_key(id.as_str())).collect();
    if unseen.is_empty() {
        return Ok(found);
    }
    let names: Vec<String> = unseen.into_iter().map(|id| format!("{id:?}")).collect();
    Err(Fault::usage("a document has no label in these steps")
        .at("--drop-doc")
        .found(names.join(", "))
        .hint("the replay of a step lists the ids of its documents"))
}

/// Whether `asked` names the document `id` of a source, by its name or that of the source that has it as a bucket:
/// `ID`, or `SOURCE:ID` where several sources have that id.
fn drops(asked: &str, names: [&str; 2], id: &str) -> bool {
    let of = |source| asked.strip_prefix(source).and_then(|rest| rest.strip_prefix(':'));
    asked == id || names.map(of).contains(&Some(id))
}

/// The labels of the original step that the change drops.
fn dropped_labels(replayer: &Replayer, step: u64, change: &WhatIfChange) -> Result<u64> {
    let WhatIfChange { drop_documents, drop_sources, .. } = change;
    if drop_documents.is_empty() && drop_sources.is_empty() {
        return Ok(0);
    }
    let (batch, mut dropped) = (replayer.batch(step)?, 0);
    each_piece(replayer, &batch, |source, piece, labels| {
        let name = &replayer.spec().plan.sources()[source].name;
        let (whole, id) = (replayer.spec().data.whole(name), piece.record.shown_id());
        let dropped_document = |asked: &String| drops(asked, [name, whole], &id);
        let dropped_source = |one: &String| [name.as_str(), whole].contains(&one.as_str());
        if drop_documents.iter().any(dropped_document) || drop_sources.iter().any(dropped_source) {
            dropped += labels;
        }
    })?;
    Ok(dropped)
}

/// Iterates over a batch piece by piece: source, piece, labels.
pub(super) fn each_piece(
    replayer: &Replayer,
    batch: &Batch,
    mut each: impl FnMut(usize, &explain::SequencePart, u64),
) -> Result<()> {
    let spec = replayer.spec();
    let rows = explain::pieces(&spec.plan, &spec.data, &batch.samples)?;
    for ((row, sample), pieces) in (0..).zip(&batch.samples).zip(&rows) {
        let mask = batch.row(batch.columns().mask, row);
        for piece in pieces {
            let places = &mask[piece.place.start as usize..piece.place.end as usize];
            let labels = places.iter().filter(|label| **label != 0).count() as u64;
            each(sample.source, piece, labels);
        }
    }
    Ok(())
}
