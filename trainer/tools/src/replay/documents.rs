//! The documents that a step's loss came from.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;

use contract::Result;
use loader::{Batch, Infill, explain};
use serde::Serialize;
use store::{DocumentRecord, Split};
use trainer::spec::RunSpec;

/// The position of a part of a document in a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocumentPlace {
    /// The row.
    pub row: u64,
    /// Its columns there.
    pub columns: Range<u32>,
    /// The first token, counted in the document.
    pub first_token: u64,
    /// How it is rearranged for fill-in-the-middle, if it is.
    pub infill: Option<Infill>,
}

/// One document of a step, and its share of the loss.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DocumentLoss {
    /// The source's name.
    pub source: String,
    /// The document's id.
    pub id: String,
    /// The input file it came from.
    pub file: String,
    /// Line (from 1), or row (from 0) of its row group.
    pub row: u64,
    /// Row group or record batch of columnar input.
    pub group: Option<u32>,
    /// Its byte range in that file, decompressed, if known.
    pub bytes: Option<(u64, u64)>,
    /// The fields that its source keeps.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub kept: BTreeMap<String, String>,
    /// The sequences of the step that contain a part of the document.
    pub sequences: Vec<u64>,
    /// The positions of its parts in the batch.
    #[serde(skip)]
    pub places: Vec<DocumentPlace>,
    /// What the losses of its labels are multiplied by in the gradient, unless that is 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_weight: Option<String>,
    /// Its tokens in this step.
    pub tokens: u64,
    /// Its labels in this step.
    pub labels: u64,
    /// Sum of its token losses, in nats.
    pub loss: f64,
    /// Mean loss of a label.
    pub mean: f64,
}

/// Documents of `rows` with their losses, worst first. `losses` has one value for each token of these rows.
pub fn rank(
    spec: &RunSpec,
    batch: &Batch,
    rows: Range<u64>,
    mut losses: &[f32],
) -> Result<Vec<DocumentLoss>> {
    let mut sums: BTreeMap<(usize, u64), DocumentLoss> = BTreeMap::new();
    let width = batch.seq_len as usize;
    let samples = &batch.samples[rows.start as usize..rows.end as usize];
    let pieces = explain::pieces(&spec.plan, &spec.data, samples)?;
    for ((row, sample), pieces) in rows.zip(samples).zip(pieces) {
        let mask = batch.row(batch.columns().mask, row);
        let (own, rest) = losses.split_at(width);
        losses = rest;
        for piece in pieces {
            let entry = match sums.entry((sample.source, piece.document)) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(describe(spec, sample.source, &piece.record)?),
            };
            if entry.sequences.last() != Some(&row) {
                entry.sequences.push(row);
            }
            entry.places.push(DocumentPlace {
                row,
                columns: piece.place.clone(),
                first_token: piece.in_document().start,
                infill: piece.infill.clone(),
            });
            let places = piece.place.start as usize..piece.place.end as usize;
            entry.tokens += places.len() as u64;
            for place in places.filter(|place| mask[*place] != 0) {
                entry.labels += 1;
                entry.loss += f64::from(own[place]);
            }
        }
    }
    let mut ranked: Vec<_> = sums.into_values().collect();
    for document in &mut ranked {
        document.mean = document.loss / document.labels.max(1) as f64;
    }
    ranked.sort_by(|a, b| worse(a.mean, b.mean));
    Ok(ranked)
}

/// NaN is the worst.
fn worse(a: f64, b: f64) -> Ordering {
    let key = |value: f64| if value.is_nan() { f64::INFINITY } else { value };
    key(b).total_cmp(&key(a))
}

/// A document without its losses.
fn describe(spec: &RunSpec, source: usize, record: &DocumentRecord) -> Result<DocumentLoss> {
    let name = &spec.plan.sources()[source].name;
    let stream = spec.data.stream(name, Split::Train)?;
    let file = stream.source().inputs.get(record.file as usize);
    Ok(DocumentLoss {
        source: name.clone(),
        id: record.shown_id().into_owned(),
        file: file.map_or_else(|| format!("input {}", record.file), |input| input.path.clone()),
        row: record.row,
        group: record.group,
        bytes: record.bytes,
        kept: stream.source().kept(record),
        loss_weight: spec
            .plan
            .objective(source)
            .map(|objective| objective.loss_weight.to_string())
            .filter(|weight| weight != "1"),
        places: Vec::new(),
        sequences: Vec::new(),
        tokens: 0,
        labels: 0,
        loss: 0.0,
        mean: 0.0,
    })
}
