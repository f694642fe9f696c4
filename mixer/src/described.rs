//! A store described in a few lines of TOML, where only planning is asked for.
//!
//! ```toml
//! [[source]]
//! name = "web"
//! tokens = 9_000_000_000_000
//! documents = 10_000_000_000
//! ```

use contract::UNIT_TOKENS;
use contract::{Fault, Result};

use crate::sample::SourceFacts;
use curriculum::{Section, Text};

/// Reads a description; `None` if the text has no `[[source]]`, and so describes nothing.
pub fn described_store(text: &str, file: &str) -> Result<Option<Vec<SourceFacts>>> {
    let text = Text::new(text, file);
    let document = text.document()?;
    let root = Section::root(&text, document.as_table());
    if !root.has("source") {
        return Ok(None);
    }
    root.only(&["source"])?;
    let mut all: Vec<SourceFacts> = Vec::new();
    for section in root.sections("source")? {
        let facts = source(&section)?;
        if all.iter().any(|earlier| earlier.name == facts.name) {
            let what = format!("two sources are named {:?}", facts.name);
            return Err(section.fault("name", what).wanted("a name for each source"));
        }
        all.push(facts);
    }
    Ok(Some(all))
}

fn source(section: &Section) -> Result<SourceFacts> {
    section.only(&["name", "tokens", "documents", "unit"]).map_err(|fault| {
        fault.wanted("a described store: name, tokens, documents and, if need be, unit")
    })?;
    let missing = |key: &str, wanted: &str| -> Fault { section.missing(key, wanted) };
    let name = section.string("name")?.filter(|name| !name.is_empty());
    let tokens = section.whole("tokens", 0)?;
    let documents = section.whole("documents", 0)?;
    Ok(SourceFacts {
        name: name.ok_or_else(|| missing("name", "name = \"...\""))?.to_owned(),
        tokens: tokens.ok_or_else(|| missing("tokens", "tokens of the training stream"))?,
        documents: documents.ok_or_else(|| missing("documents", "documents of the stream"))?,
        unit: section.whole("unit", 1)?.unwrap_or(UNIT_TOKENS),
    })
}
