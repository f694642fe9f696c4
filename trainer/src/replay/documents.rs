//! Which documents a step's loss came from.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Range;

use contract::Result;
use contract::store::Split;
use loader::Batch;
use serde::Serialize;

use crate::spec::RunSpec;

/// A run of tokens of one document in one sequence of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The sequence, counted in the batch.
    pub row: u64,
    /// Its tokens in the sequence.
    pub tokens: Range<u32>,
    /// Index into the plan's sources.
    pub source: usize,
    /// The document, counted in the source's stream.
    pub document: u64,
}

/// One document of a step and its part in the loss.
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
    /// The sequences of the step that hold a part of it.
    pub sequences: Vec<u64>,
    /// Its tokens in this step.
    pub tokens: u64,
    /// Its labels in this step.
    pub labels: u64,
    /// Sum of its token losses, in nats.
    pub loss: f64,
    /// Mean loss of a label.
    pub mean: f64,
}

/// The pieces of the documents of a batch, in reading order; padding is none.
pub fn pieces(spec: &RunSpec, batch: &Batch) -> Result<Vec<Piece>> {
    let mut found = Vec::new();
    for (row, sample) in (0u64..).zip(&batch.samples) {
        let name = &spec.plan.sources()[sample.source].name;
        let stream = spec.data.stream(name, Split::Train)?;
        let starts = &batch.boundaries[row as usize];
        let mut first = 0;
        for segment in &sample.segments {
            let (begin, end) = (first, first + segment.tokens);
            // A joint between two segments is a boundary, so a piece never reaches over one.
            let inner = starts.iter().copied().filter(|start| (begin + 1..end).contains(start));
            let cuts: Vec<u32> = [begin].into_iter().chain(inner).chain([end]).collect();
            for cut in cuts.windows(2) {
                let document =
                    stream.document_of_token(segment.start + u64::from(cut[0] - begin))?;
                let (tokens, source) = (cut[0]..cut[1], sample.source);
                found.push(Piece { row, tokens, source, document });
            }
            first = end;
        }
    }
    Ok(found)
}

/// Documents of `rows` with their part in the loss, worst first. `losses` holds a number for each token of these rows.
pub fn rank(
    spec: &RunSpec,
    batch: &Batch,
    rows: Range<u64>,
    losses: &[f32],
) -> Result<Vec<DocumentLoss>> {
    let mut sums: BTreeMap<(usize, u64), DocumentLoss> = BTreeMap::new();
    let width = batch.seq_len as usize;
    for piece in pieces(spec, batch)?.into_iter().filter(|piece| rows.contains(&piece.row)) {
        let entry = match sums.entry((piece.source, piece.document)) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert(describe(spec, piece.source, piece.document)?)
            }
        };
        let places = piece.tokens.start as usize..piece.tokens.end as usize;
        let mask = batch.row(&batch.mask, piece.row);
        let losses = &losses[(piece.row - rows.start) as usize * width..][..width];
        if entry.sequences.last() != Some(&piece.row) {
            entry.sequences.push(piece.row);
        }
        entry.tokens += places.len() as u64;
        for place in places.filter(|place| mask[*place] != 0) {
            entry.labels += 1;
            entry.loss += f64::from(losses[place]);
        }
    }
    let mut ranked: Vec<_> = sums.into_values().collect();
    for document in &mut ranked {
        document.mean = document.loss / document.labels.max(1) as f64;
    }
    ranked.sort_by(|a, b| worse(a.mean, b.mean));
    Ok(ranked)
}

/// What is not a number is worst of all.
fn worse(a: f64, b: f64) -> Ordering {
    let key = |value: f64| if value.is_nan() { f64::INFINITY } else { value };
    key(b).total_cmp(&key(a))
}

/// A document without its losses yet.
fn describe(spec: &RunSpec, source: usize, document: u64) -> Result<DocumentLoss> {
    let name = &spec.plan.sources()[source].name;
    let stream = spec.data.stream(name, Split::Train)?;
    let record = stream.document(document)?;
    let file = stream.source().inputs.get(record.file as usize);
    Ok(DocumentLoss {
        source: name.clone(),
        id: record.id,
        file: file.map_or_else(|| format!("input {}", record.file), |input| input.path.clone()),
        row: record.row,
        group: record.group,
        sequences: Vec::new(),
        tokens: 0,
        labels: 0,
        loss: 0.0,
        mean: 0.0,
    })
}
