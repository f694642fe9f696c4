//! Answers of commands as JSON, for the Python package.

use contract::Result;
use loader::{OpenedCurriculum, Stores};
use mixer::{DataPlan, SampleSpec};
use serde_json::json;
use store::{DocumentRecord, SourceRecord};

use crate::cmd::output::{self, json};
use crate::cmd::{batch, plan, whereabouts};

/// What `zdata plan --json` prints.
pub fn plan(opened: &OpenedCurriculum) -> Result<String> {
    json(&plan::Report::new(opened)?)
}

/// The documents of each sample, as `zdata batch --json` prints those of a sequence; with their text if it is wanted.
pub fn documents(
    plan: &DataPlan,
    stores: &Stores,
    samples: &[SampleSpec],
    text: bool,
) -> Result<String> {
    json(&batch::documents(plan, stores, samples, text)?)
}

/// What `zdata where --json` prints.
pub fn whereabouts(opened: &OpenedCurriculum, doc: &str, source: Option<&str>) -> Result<String> {
    json(&whereabouts::search(&opened.plan, opened.stores()?, doc, source)?)
}

/// Documents of a store that follow each other from number `first` on.
pub fn provenance(source: &SourceRecord, records: &[DocumentRecord], first: u64) -> Result<String> {
    let document = |(number, record): (u64, &DocumentRecord)| {
        json!({
            "id": record.shown_id(),
            "number": number,
            "source": source.name,
            "file": output::file(source, record),
            "row": record.row,
            "group": record.group,
            "bytes": record.bytes,
            "origin": output::origin(source, record),
            "first_token": record.first_token,
            "tokens": record.tokens,
            "kept": source.kept(record),
        })
    };
    json(&(first..).zip(records).map(document).collect::<Vec<_>>())
}
