//! The data of a run for its page, as one JSON object. Numbers are in columns (`bins`), texts are plain.
//!
//! ```text
//! first, steps                       the first step of the columns (1, or the first new one), and the ledger's last
//! columns: loss, norm, lr, speed     f32 of each step        columns: stall   bytes, 255 is the whole step; with speed
//! memory, router, layers, sources    bins of `width` steps, lane by lane within a bin
//! phases, plan, skipped, curricula, happenings, validation, evaluation, odd, lines, explained
//! ```

use std::collections::{BTreeMap, BTreeSet};

use contract::Result;
use curriculum::{Curriculum, MIX_PARTS, PhaseSegment};
use serde_json::{Map, Value, json};

use super::bins::{Bins, Merge, f32s, shares};
use super::view::RunView;
use super::{commands, explain_command, log};
use crate::fork::Origin;
use trainer::ledger::StepSummaryFields;

/// The maximum size of all expert loads in bytes.
const LOADS: usize = 250_000;

/// The maximum number of values in a heat map by layer.
const LAYER_NUMBERS: usize = 24_000;

/// The maximum number of listed events of one kind: only the last ones are.
const HAPPENINGS: usize = 2_000;

/// The maximum number of listed odd steps: the first ones.
const ODD: usize = 1_000;

/// The data for a page that already has `known` steps.
pub(super) fn run(view: &RunView, known: u64) -> Result<Value> {
    let steps = view.last_step();
    let curriculum = view.curriculum()?;
    let odd = view.odd();
    let root = view.folder().root();
    let listed = odd.iter().take(ODD);
    let odd_lines: Vec<Value> = listed
        .map(|one| {
            let mut value = json!(one);
            value["farthest"] = json!(one.farthest());
            value["command"] = json!(explain_command(root, one.farthest()));
            value
        })
        .collect();
    let name = root.file_name().or_else(|| root.parent()?.file_name());
    Ok(json!({
        "name": name.map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned()),
        "place": root.display().to_string(),
        "head": head(view),
        "origin": Origin::read(root)?,
        "version": view.version(),
        "first": known + 1,
        "steps": steps,
        "planned": curriculum.phases.iter().map(|phase| phase.steps).sum::<u64>(),
        "running": view.log().running(),
        "columns": columns(view, known as usize),
        "memory": memory(view),
        "router": router(view),
        "layers": layers(view),
        "sources": sources(view, &curriculum),
        "labels": view.labels,
        "phases": view.phases,
        "plan": plan(&curriculum, &view.windows),
        "skipped": view.skipped.iter().map(|(step, why)| json!([step, why.words()])).collect::<Vec<_>>(),
        "curricula": curricula(view),
        "happenings": happenings(view.log()),
        "validation": validation(view.log()),
        "evaluation": evaluation(view.log()),
        "odd": odd_lines,
        "odd_count": odd.len(),
        "lines": lines(view),
        "explained": view.explained()?,
        "commands": commands(root),
    }))
}

fn head(view: &RunView) -> Value {
    let head = view.head();
    json!({
        "stores": head.stores, "tokenizer": head.tokenizer, "levels": head.levels, "kernel_table": head.kernel_table,
        "parameters": head.parameters.len(), "format": head.format,
    })
}

fn columns(view: &RunView, known: usize) -> Value {
    let log = view.log();
    let rest = |column: &[f32]| f32s(column.iter().skip(known).copied());
    // Events may have fewer steps than the ledger, or more if a step was recorded just now.
    let steps = view.last_step() as usize;
    let known_to_log = |column: &[f32]| {
        let padded = column.iter().copied().chain(std::iter::repeat(f32::NAN));
        padded.take(steps).skip(known).collect::<Vec<f32>>()
    };
    json!({
        "loss": rest(&view.loss), "norm": rest(&view.norm), "lr": rest(&view.lr),
        "speed": f32s(known_to_log(&log.speed).into_iter()),
        "stall": shares(known_to_log(&log.stall).into_iter().map(|share| f64::from(share.max(0.0)))),
    })
}

/// The maximum of each bin; null if no step has a value.
fn memory(view: &RunView) -> Value {
    let memory = &view.log().memory;
    if memory.iter().all(|bytes| !bytes.is_finite()) {
        return Value::Null;
    }
    let mut bins = Bins::new(Merge::Most, 1024);
    memory.iter().for_each(|bytes| bins.push(&[f64::from(bytes.max(0.0))]));
    // A bin without any value is a gap.
    let known = |bytes: &f64| if *bytes > 0.0 { *bytes as f32 } else { f32::NAN };
    json!({"width": bins.width(), "bytes": f32s(bins.values().iter().map(known))})
}

/// The share of a layer's tokens in each class.
fn router(view: &RunView) -> Value {
    let all: usize = view.classes.iter().sum();
    if all == 0 {
        return Value::Null;
    }
    let bins = view.router.at_most((LOADS / all).max(16));
    let classes = view.classes.iter().copied();
    let shares_of = bins.values().chunks(bins.lanes()).flat_map(|bin| {
        let mut rest = bin;
        let layers = classes.clone().map(move |count| {
            let (layer, after) = rest.split_at(count.min(rest.len()));
            rest = after;
            layer
        });
        layers.flat_map(|layer| {
            let total: f64 = layer.iter().sum();
            layer.iter().map(move |count| count / total.max(1.0))
        })
    });
    let evenness = view.unevenness.at_most(LAYER_NUMBERS / view.classes.len().max(1));
    json!({
        "classes": view.classes, "width": bins.width(), "shares": shares(shares_of),
        "uneven_width": evenness.width(), "uneven": shares(evenness.values().iter().copied()),
    })
}

/// The largest norms of each bin, by layer.
fn layers(view: &RunView) -> Value {
    let lanes = view.gradients.lanes();
    if lanes == 0 || view.gradients.values().iter().all(|value| *value == 0.0) {
        return Value::Null;
    }
    let most = (LAYER_NUMBERS / lanes).max(16);
    let (gradients, updates) = (view.gradients.at_most(most), view.updates.at_most(most));
    json!({
        "names": view.layer_names(), "width": gradients.width(),
        "gradients": numbers(&gradients), "updates": numbers(&updates),
    })
}

/// Mean loss per label and share of the labels, by source, and the source that each is a bucket of, or itself.
fn sources(view: &RunView, curriculum: &Curriculum) -> Value {
    let count = view.sources.len();
    if count == 0 {
        return Value::Null;
    }
    let bins = view.by_source.at_most(view.source_bins());
    let lanes = bins.lanes().max(2);
    let of = |lane: usize| bins.values().chunks(lanes).map(move |bin| (bin, lane));
    let loss = |(bin, lane): (&[f64], usize)| (bin[lane + 1] / bin[lane]) as f32;
    let share = |(bin, lane): (&[f64], usize)| {
        let all: f64 = bin.iter().step_by(2).sum();
        bin[lane] / all.max(1.0)
    };
    let each = |source: usize| 2 * source;
    let losses: Vec<Value> = (0..count).map(|one| f32s(of(each(one)).map(loss))).collect();
    let seen: Vec<Value> = (0..count).map(|one| shares(of(each(one)).map(share))).collect();
    let wholes: Vec<&str> = view.sources.iter().map(|name| curriculum.whole(name)).collect();
    json!({"names": view.sources, "wholes": wholes, "width": bins.width(), "loss": losses, "share": seen})
}

/// Parts of constant mixture that a ramp is shown as, at most.
const RAMP_PARTS: u64 = 64;

/// The plan of the curriculum, in parts of constant mixture: first step, phase, tokens per step, share by source. A
/// ramp is shown as stairs, a mix that reacts by its windows in the ledger.
fn plan(curriculum: &Curriculum, windows: &[(u64, BTreeMap<String, u64>)]) -> Vec<Value> {
    let (mut first, mut parts, mut mix_begins) = (1, Vec::new(), 1);
    for segment in curriculum.segments() {
        let PhaseSegment { spec, mix_before, mix_samples, batch, .. } = &segment;
        if let Some(reaction) = spec.mix.reaction() {
            mix_begins = if *mix_before == 0 { first } else { mix_begins };
            // Where the run has not come to it: as it begins.
            let names = reaction.start.keys().cloned();
            let start = (mix_begins, names.zip(reaction.start_parts()).collect());
            let of_mix = windows.iter().filter(|(step, _)| *step >= mix_begins);
            let windows: Vec<_> = std::iter::once(&start).chain(of_mix).collect();
            parts.extend(windows_of(&segment, first, &windows));
            first += spec.steps;
            continue;
        }
        let Some(weights) = spec.mix.weights() else { continue };
        let count = if spec.mix.is_ramp() { RAMP_PARTS.min(spec.steps) } else { 1 };
        let begins =
            |part: u64| (u128::from(spec.steps) * u128::from(part) / u128::from(count)) as u64;
        for (begin, end) in (0..count).map(|part| (begins(part), begins(part + 1))) {
            let middle = *mix_before as f64 + (begin + end) as f64 / 2.0 * *batch as f64;
            let position = middle / *mix_samples as f64;
            let share = |(source, name): (usize, &String)| {
                (name.clone(), json!(weights.share(source, position)))
            };
            let mix: Map<String, Value> =
                spec.mix.sources().into_iter().enumerate().map(share).collect();
            parts.push(part(&segment, first + begin, end - begin, mix));
        }
        first += spec.steps;
    }
    parts
}

/// A part of constant mixture.
fn part(segment: &PhaseSegment, first: u64, steps: u64, mix: Map<String, Value>) -> Value {
    let PhaseSegment { spec, batch, .. } = segment;
    json!({
        "first": first, "steps": steps, "phase": spec.name, "seq_len": spec.seq_len,
        "batch": batch, "micro_batch": spec.micro_batch, "tokens": batch * u64::from(spec.seq_len),
        "mix": mix,
    })
}

/// The parts of a segment whose mix reacts: windows with their first steps, the last one to the segment's end.
fn windows_of(
    segment: &PhaseSegment,
    first: u64,
    windows: &[&(u64, BTreeMap<String, u64>)],
) -> Vec<Value> {
    let end = first + segment.spec.steps;
    let inside = windows.iter().rev().find(|(step, _)| *step <= first).into_iter();
    let inside = inside.chain(windows.iter().filter(|(step, _)| (first + 1..end).contains(step)));
    let begins: Vec<_> = inside.map(|(step, weights)| ((*step).max(first), weights)).collect();
    let ends = begins.iter().skip(1).map(|(next, _)| *next).chain([end]);
    let part = |((begin, weights), end): (&(u64, &BTreeMap<String, u64>), u64)| {
        let share =
            |(name, part): (&String, &u64)| (name.clone(), json!(*part as f64 / MIX_PARTS as f64));
        self::part(segment, *begin, end - begin, weights.iter().map(share).collect())
    };
    begins.iter().zip(ends).map(part).collect()
}

/// The curriculum at the start, and its later changes.
fn curricula(view: &RunView) -> Vec<Value> {
    let mut before: Option<Curriculum> = None;
    let listed = view.curricula.iter().map(|(step, text)| {
        let now = Curriculum::parse(text, "the ledger").ok();
        let changes: Vec<String> = match (&before, &now) {
            (Some(before), Some(now)) => {
                before.difference(now).iter().map(ToString::to_string).collect()
            }
            _ => Vec::new(),
        };
        before = now;
        json!({"step": step, "changes": changes, "text": text})
    });
    listed.collect()
}

fn happenings(log: &log::EventLog) -> Vec<Value> {
    let all = &log.happenings;
    let last = all.len().saturating_sub(HAPPENINGS);
    all.iter().skip(last).map(|one| json!(one)).collect()
}

fn validation(log: &log::EventLog) -> Value {
    let losses = &log.validation;
    let mut names: Vec<&String> = losses.values().flat_map(|one| one.sources.keys()).collect();
    names.sort();
    names.dedup();
    let of = |name: &String| {
        losses.values().map(|one| one.sources.get(name).copied()).collect::<Vec<_>>()
    };
    json!({
        "steps": losses.keys().collect::<Vec<_>>(), "all": losses.values().map(|one| one.all).collect::<Vec<_>>(),
        "names": names, "sources": names.iter().map(|name| of(name)).collect::<Vec<_>>(),
    })
}

/// The accuracy of each task.
fn evaluation(log: &log::EventLog) -> Value {
    let scores = &log.evaluation;
    let tasks = scores.values().flat_map(BTreeMap::keys);
    let tasks: BTreeSet<_> = tasks.filter_map(|name| name.strip_prefix("accuracy/")).collect();
    let of = |task: &&str| {
        let accuracy =
            |scores: &BTreeMap<String, f64>| scores.get(&format!("accuracy/{task}")).copied();
        scores.values().map(accuracy).collect::<Vec<_>>()
    };
    json!({
        "steps": scores.keys().collect::<Vec<_>>(), "names": tasks,
        "accuracy": tasks.iter().map(of).collect::<Vec<_>>(),
    })
}

/// The complete lines of odd steps.
fn lines(view: &RunView) -> Map<String, Value> {
    let line = |seen: &StepSummaryFields| {
        let sources = seen
            .sources
            .iter()
            .map(|(name, sum)| (name.clone(), json!({"labels": sum.labels, "loss": sum.mean()})));
        json!({
            "loss": seen.loss, "norm": seen.norm(), "lr": seen.lr(), "data": seen.batch_digest, "state": seen.state_digest,
            "sources": sources.collect::<Map<_, _>>(),
        })
    };
    view.details.iter().map(|(step, seen)| (step.to_string(), line(seen))).collect()
}

fn numbers(bins: &Bins) -> Value {
    f32s(bins.values().iter().map(|value| *value as f32))
}
