//! `zdata where`: every place at which a run sees a document.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use contract::{Fault, Result, counted, note};
use ingest::progress::meanwhile;
use loader::{Stores, explain};
use mixer::{DataPlan, Visit};
use serde::Serialize;
use store::{DocumentRecord, Location, Split};

use super::batch::InfillRow;
use super::output;
use super::reaction::FollowedRun;

/// Arguments.
#[derive(clap::Args)]
#[command(after_help = "Example: zdata where curricula/demo.toml --doc web-1234")]
pub(crate) struct Args {
    /// The curriculum: a path or a URL.
    #[arg(value_parser = super::place())]
    curriculum: Location,
    /// The document's id.
    #[arg(long, value_name = "ID")]
    doc: String,
    /// Search this source only.
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    #[command(flatten)]
    follow: FollowedRun,
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
    /// How it is rearranged there for fill-in-the-middle, if it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    infill: Option<InfillRow>,
}

/// Does it.
pub(crate) fn exec(args: Args) -> Result<()> {
    let opened = args.follow.opened(&args.curriculum)?;
    let stores = opened.stores()?;
    let (doc, source) = (args.doc.as_str(), args.source.as_deref());
    let found = meanwhile("where", "searching", || search(&opened.plan, stores, doc, source))?;
    if opened.plan.fixed_until() < opened.plan.steps() {
        let last = opened.plan.fixed_until();
        note!(
            "note: the mix reacts to the loss: what steps after {last} read is not fixed, and left out"
        );
    }
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
    let within = |name: &str| source.is_none_or(|only| stores.is_called(name, only));
    if let Some(name) = source
        && !plan.sources().iter().any(|facts| within(&facts.name))
    {
        stores.stream(name, Split::Train)?; // A fault that knows the names.
    }
    let mut found = Vec::new();
    for split in Split::ALL {
        for (number, documents) in stores.find(doc, split, within)? {
            let name = &plan.sources()[number].name;
            let stream = stores.stream(name, split)?;
            for document in documents {
                let record = stream.document(document)?;
                let seen = match split {
                    Split::Train => seen(plan, stores, number, &record)?,
                    Split::Validation => Vec::new(),
                };
                let place = Whereabouts {
                    id: record.shown_id().into_owned(),
                    source: name.clone(),
                    split: split.name(),
                    document,
                    origin: output::origin(stream.source(), &record),
                    kept: stream.source().kept(&record),
                    tokens: record.tokens,
                    seen,
                };
                found.push((number, place));
            }
        }
    }
    found.sort_by_key(|(number, _)| *number);
    Ok(found.into_iter().map(|(_, place)| place).collect())
}

fn seen(
    plan: &DataPlan,
    stores: &Stores,
    source: usize,
    record: &DocumentRecord,
) -> Result<Vec<Seen>> {
    let visits = plan.visits(source, record.first_token..record.first_token + record.tokens)?;
    let seen = |visit: Visit| {
        let step = plan.step_of(visit.sample)?;
        let first = visit.token - record.first_token;
        let (sample, at) = (plan.sample(visit.sample)?, visit.offset_in_sequence);
        Ok(Seen {
            step,
            sequence: visit.sample - plan.step(step)?.first_sample,
            offset: visit.offset_in_sequence,
            tokens: [first, first + u64::from(visit.tokens)],
            sample: visit.sample,
            banned: sample.banned.iter().any(|it| it.contains(&at)),
            infill: match plan.objective(source).and_then(|one| one.fim.as_ref()) {
                Some(_) => explain::piece_at(plan, stores, &sample, at)?
                    .and_then(|piece| InfillRow::of(&piece)),
                None => None,
            },
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
        for Seen { step, sequence, offset, tokens: [from, to], sample: _, banned, infill } in seen {
            let banned = if *banned { ", banned" } else { "" };
            let infill = infill.as_ref().map(|infill| format!(", {}", infill.text()));
            let infill = infill.unwrap_or_default();
            let _ = writeln!(
                out,
                "  step {step}, sequence {sequence}, offset {offset}: its tokens {from}..{to}{banned}{infill}"
            );
        }
    }
    out
}
