//! A store: its sources, documents and tokens.

use std::path::PathBuf;

use contract::{Fault, Result};
use pyo3::prelude::*;
use serde_json::json;
use store::{Split, StreamReader};

use crate::array::Array;
use crate::error::Outcome;
use crate::process::PerProcess;

/// An opened store with the readers of its streams.
struct Opened {
    store: store::Store,
    /// By source and split.
    streams: Vec<[StreamReader; 2]>,
}

impl Opened {
    fn stream(&self, source: &str, split: &str) -> Result<&StreamReader> {
        let sources = &self.store.manifest().sources;
        let names = || sources.iter().map(|source| source.name.as_str());
        let number = names().position(|name| name == source);
        let split_number = Split::ALL.iter().position(|known| known.name() == split);
        match (number, split_number) {
            (Some(source), Some(split)) => Ok(&self.streams[source][split]),
            (None, _) => Err(Fault::usage("the store has no such source")
                .at(self.store.root().to_string())
                .found(source)
                .one_of(source, names())),
            (_, None) => {
                let known = Split::ALL.map(Split::name);
                Err(Fault::usage("there is no such split").found(split).wanted(known.join(" or ")))
            }
        }
    }
}

/// A store.
#[pyclass(frozen, module = "zdata._zdata")]
pub(crate) struct Store {
    opened: PerProcess<Opened>,
}

/// Checks that a range lies in a stream.
fn within(range: (u64, u64), count: u64, what: &str) -> Result<std::ops::Range<u64>> {
    if range.0 > range.1 || range.1 > count {
        return Err(Fault::usage(format!("the stream does not have these {what}"))
            .found(format!("{}..{}", range.0, range.1))
            .wanted(format!("{what} within 0..{count}")));
    }
    Ok(range.0..range.1)
}

#[pymethods]
impl Store {
    #[new]
    fn new(py: Python<'_>, root: PathBuf) -> Outcome<Self> {
        let root = storage::written(&storage::locate_argument(root.as_os_str())?.absolute()?);
        let opened = PerProcess::open(py, move || {
            let store = store::Store::open(storage::locate_written(&root)?)?;
            let count = store.manifest().sources.len();
            let streams = |source| Split::ALL.map(|split| store.stream(source, split));
            Ok(Opened { streams: (0..count).map(streams).collect(), store })
        })?;
        Ok(Store { opened })
    }

    /// What the store holds, as JSON.
    fn manifest(&self, py: Python<'_>) -> Outcome<String> {
        let opened = self.opened.get(py)?;
        let manifest = opened.store.manifest();
        let stream = |stream: &store::StreamRecord| {
            let digest = stream.digest.to_string();
            json!({ "tokens": stream.tokens, "documents": stream.documents, "text_bytes": stream.text_bytes,
                "digest": digest })
        };
        let sources = manifest.sources.iter().map(|source| {
            json!({ "name": source.name, "train": stream(&source.train),
                "validation": stream(&source.validation), "keep": source.keep })
        });
        let tokenizer = &manifest.tokenizer;
        let whole = json!({
            "digest": manifest.digest.to_string(), "token_bytes": manifest.token_bytes, "unit": manifest.unit,
            "vocab": tokenizer.vocab, "begin": tokenizer.begin, "end": tokenizer.end,
            "sources": sources.collect::<Vec<_>>(),
        });
        Ok(whole.to_string())
    }

    /// Tokens of a stream.
    fn tokens(
        &self,
        py: Python<'_>,
        source: &str,
        split: &str,
        range: (u64, u64),
    ) -> Outcome<Array> {
        let opened = self.opened.get(py)?;
        let stream = opened.stream(source, split)?;
        let range = within(range, stream.record().tokens, "tokens")?;
        let mut ids = Vec::new();
        py.detach(|| stream.read_ids(range, &mut ids))?;
        Ok(Array::of(ids))
    }

    /// Where the documents that begin within a range of tokens do.
    fn starts(
        &self,
        py: Python<'_>,
        source: &str,
        split: &str,
        range: (u64, u64),
    ) -> Outcome<Vec<u64>> {
        let opened = self.opened.get(py)?;
        let stream = opened.stream(source, split)?;
        let range = within(range, stream.record().tokens, "tokens")?;
        let mut starts = Vec::new();
        py.detach(|| stream.starts_in(range, &mut starts))?;
        Ok(starts)
    }

    /// The provenance of documents, as JSON.
    fn documents(
        &self,
        py: Python<'_>,
        source: &str,
        split: &str,
        range: (u64, u64),
    ) -> Outcome<String> {
        let opened = self.opened.get(py)?;
        let stream = opened.stream(source, split)?;
        let range = within(range, stream.record().documents, "documents")?;
        Ok(py.detach(|| {
            let records = stream.documents(std::slice::from_ref(&range))?;
            zdata_cli::answers::provenance(stream.source(), &records, range.start)
        })?)
    }

    /// The numbers of the documents that have an id.
    fn find(&self, py: Python<'_>, source: &str, split: &str, id: &str) -> Outcome<Vec<u64>> {
        let opened = self.opened.get(py)?;
        let stream = opened.stream(source, split)?;
        Ok(py.detach(|| stream.find(id))?)
    }

    /// The bytes of `tokenizer.json`.
    fn tokenizer(&self, py: Python<'_>) -> Outcome<Vec<u8>> {
        let opened = self.opened.get(py)?;
        Ok(py.detach(|| opened.store.tokenizer())?)
    }
}
