//! A store stub: a store described in a few lines of TOML, sufficient for planning.
//!
//! ```toml
//! [[source]]
//! name = "web"
//! tokens = 9_000_000_000_000
//! documents = 10_000_000_000
//! ```

use contract::Result;
use serde::Deserialize;
use settings::{File, Spanned, Table};

use crate::sample::SourceFacts;

/// The file as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreStub {
    source: Vec<Spanned<SourceFacts>>,
}

/// Reads a store stub; `None` if the text has no `[[source]]`.
pub fn store_stub(text: &str, name: &str) -> Result<Option<Vec<SourceFacts>>> {
    let file = File::new(name, text);
    if !file.parse::<Table>()?.contains_key("source") {
        return Ok(None);
    }
    let StoreStub { source } = file.parse()?;
    let mut all: Vec<SourceFacts> = Vec::new();
    for facts in source {
        let SourceFacts { name, tokens: _, documents: _, unit, selection: _ } = facts.get_ref();
        if name.is_empty() || *unit == 0 {
            let fault = file.fault(&facts, "a source needs a name and a unit above zero");
            return Err(fault.found(format!("name {name:?}, unit {unit}")));
        }
        if all.iter().any(|earlier| earlier.name == *name) {
            let what = format!("two sources are named {name:?}");
            return Err(file.fault(&facts, what).wanted("a name for each source"));
        }
        all.push(facts.into_inner());
    }
    Ok(Some(all))
}
