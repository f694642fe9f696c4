//! `zdata where`: every place at which a run sees a document.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use contract::{Fault, Result, counted};
use ingest::progress::meanwhile;
use loader::Stores;
use mixer::{DataPlan, Visit};
use serde::Serialize;
use store::{DocumentRecord, Location, Split};

use super::output;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: zdata where curricula/demo.toml --doc web-1234")]
pub(crate) struct Args {
    /// The curriculum: a path or s3://bucket/key.
    #[arg(value_parser = super::place())]
    curriculum: Location,
    /// The document's id.
    #[arg(long, value_name = "ID")]
    doc: String,
    /// Search this source only.
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// A document that has the id.
#[derive(Serialize)]
pub(crate) struct Whereabouts {
    id: String,
    source: String,
    split: &'static str,
    document: u64,
    origin: String,
    /// The fields that its source keeps.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    kept: BTreeMap<String, String>,
    tokens: u64,
    seen: Vec<Seen>,
}

/// A run of its tokens in a sequence.
#[derive(Serialize)]
struct Seen {
    step: u64,
    /// The sequence, counted in the step.
    sequence: u64,
    /// Where in the sequence the run begins.
    offset: u32,
    /// Tokens of the document, from its begin.
    tokens: [u64; 2],
    sample: u64,
    /// Whether an amendment hides it there.
    banned: bool,
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    let opened = super::opened(&args.curriculum)?;
    let stores = opened.stores()?;
    let (doc, source) = (args.doc.as_str(), args.source.as_deref());
    let found = meanwhile("where", "searching", || search(&opened.plan, stores, doc, source))?;
    output::answer(args.json, &found, || text(&found))
}

/// All documents with the id, in the order of the plan's sources; having none is an error.
pub(crate) fn search(
    plan: &DataPlan,
    stores: &Stores,
    doc: &str,
    source: Option<&str>,
) -> Result<Vec<Whereabouts>> {
    let found = found(plan, stores, doc, source)?;
    if found.is_empty() {
        let place = source.map_or("any source".to_owned(), |name| format!("{name:?}"));
        return Err(Fault::usage(format!("no document of {place} has this id"))
            .found(format!("{doc:?}"))
            .hint(
                "`zdata batch CURRICULUM.toml --step N` shows ids (FILE#ROW where the corpus has none, FILE counting \
                 the inputs of the source from 0), \
                 `zdata inspect STORE --dropped` those of documents that were not kept",
            ));
    }
    Ok(found)
}

fn found(
    plan: &DataPlan,
    stores: &Stores,
    doc: &str,
    source: Option<&str>,
) -> Result<Vec<Whereabouts>> {
    if let Some(name) = source {
        stores.stream(name, Split::Train)?; // A fault that knows the names, if this is none.
    }
    let mut found = Vec::new();
    for (number, facts) in plan.sources().iter().enumerate() {
        if source.is_some_and(|name| *name != facts.name) {
            continue;
        }
        for split in Split::ALL {
            let stream = stores.stream(&facts.name, split)?;
            for document in stream.find(doc)? {
                let record = stream.document(document)?;
                let seen = match split {
                    Split::Train => seen(plan, number, &record)?,
                    Split::Validation => Vec::new(),
                };
                found.push(Whereabouts {
                    id: record.shown_id().into_owned(),
                    source: facts.name.clone(),
                    split: split.name(),
                    document,
                    origin: output::origin(stream.source(), &record),
                    kept: stream.source().kept(&record),
                    tokens: record.tokens,
                    seen,
                });
            }
        }
    }
    Ok(found)
}

fn seen(plan: &DataPlan, source: usize, record: &DocumentRecord) -> Result<Vec<Seen>> {
    let visits = plan.visits(source, record.first_token..record.first_token + record.tokens)?;
    let seen = |visit: Visit| {
        let step = plan.step_of(visit.sample)?;
        let first = visit.token - record.first_token;
        Ok(Seen {
            step,
            sequence: visit.sample - plan.step(step)?.first_sample,
            offset: visit.offset_in_sequence,
            tokens: [first, first + u64::from(visit.tokens)],
            sample: visit.sample,
            banned: plan
                .sample(visit.sample)?
                .banned
                .iter()
                .any(|it| it.contains(&visit.offset_in_sequence)),
        })
    };
    visits.into_iter().map(seen).collect()
}

fn text(found: &[Whereabouts]) -> String {
    let mut out = String::new();
    for Whereabouts { id, source, split, document, origin, kept, tokens, seen } in found {
        let (id, origin) = (output::plain(id), output::plain(origin));
        let tokens = counted(*tokens, "token");
        let _ = writeln!(out, "{id}: document {document} of {source}, {tokens}, from {origin}");
        for (column, value) in kept {
            let _ = writeln!(out, "  {}: {}", output::plain(column), output::plain(value));
        }
        if *split == Split::Validation.name() {
            out += "  held out for validation: no step trains on it\n";
        } else if seen.is_empty() {
            out += "  no step of this curriculum comes to it\n";
        }
        for Seen { step, sequence, offset, tokens: [from, to], sample: _, banned } in seen {
            let banned = if *banned { ", banned" } else { "" };
            let _ = writeln!(
                out,
                "  step {step}, sequence {sequence}, offset {offset}: its tokens {from}..{to}{banned}"
            );
        }
    }
    out
}
