//! The dedup scan: one pass over the inputs before the build, if a step compares documents.
//!
//! Workers take each document through the steps up to the last that compares, and hand on, in input order, what that
//! step needs to know: a digest, a signature, matches. Then the steps are decided in their order: a document that one
//! removes is no candidate for the next. What is left is a list of the documents removed, beside the parts,
//! which the build reads. Whoever wants to know why a document is not in the store finds it there.

mod table;
#[cfg(test)]
mod tests;

use std::path::Path;

use contract::{Fault, Identity, Result};
use serde::{Deserialize, Serialize};
use store::{FileRecord, SourceRecord};

use self::table::Table;
use super::matches;
use super::observe::{Observed, Observer};
use super::tools::Tools;
use crate::corpus::Corpus;
use crate::dropped::{self, REMOVED};
use crate::parallel::{self, Map};
use crate::walk::{Part, Walk, place};

/// What a finished scan found.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Scan {
    /// The inputs by source: whoever reads them later must find the same.
    pub(crate) inputs: Vec<Vec<Identity>>,
    /// The lists in each source's folder.
    pub(crate) files: Vec<Vec<FileRecord>>,
}

impl Scan {
    /// Enters the lists into the records of the finished sources, if these were read from the inputs scanned.
    pub(crate) fn close(self, corpus: &Corpus, sources: &mut [SourceRecord]) -> Result<()> {
        let Scan { inputs, files } = self;
        for (number, source) in sources.iter_mut().enumerate() {
            if corpus.sources[number].recipe.scanned() == 0 {
                continue;
            }
            let changed = source.inputs.iter().zip(&inputs[number]).find(|(a, b)| a.sha256 != **b);
            if let Some((input, _)) = changed {
                return Err(Fault::mismatch("this input changed between scan and build")
                    .at(input.path.clone())
                    .hint(dropped::CHANGED_HINT));
            }
            let others = files[number].iter().filter(|file| file.name != REMOVED);
            source.prepared.get_or_insert_default().files = others.cloned().collect();
        }
        Ok(())
    }
}

/// Reads the sources of `corpus` that are scanned, and hands on what is seen of their documents, in input order.
pub(crate) fn read_through(
    tools: &Tools<'_>,
    corpus: &Corpus,
    workers: usize,
    mut take: impl FnMut(Seen) -> Result<()>,
) -> Result<()> {
    let observer = Observer { corpus, tools };
    let mut walk = Walk::only(corpus, |source| source.recipe.scanned() > 0);
    let look = |(): &mut (), part| match part {
        Part::FileEnd { bytes, identity, .. } => Ok(Some(Seen::End { bytes, identity })),
        Part::Slab { slab, source, file, raw } => {
            let observed = observer.slab(&slab, source, file)?;
            Ok(Some(Seen::Documents { observed, raw }))
        }
        Part::SourceEnd => Ok(None),
    };
    let map = Map { begin: || (), map: look, place: |part: &Part| place(corpus, part) };
    parallel::run(workers, || walk.next(), map, |seen| seen.map_or(Ok(()), &mut take))?;
    Ok(())
}

/// What was seen of all documents, until it is decided.
pub(crate) struct Gathered<'a> {
    corpus: &'a Corpus,
    store: &'a Path,
    table: Table,
    matches: matches::Writer,
    inputs: Vec<Vec<Identity>>,
}

impl<'a> Gathered<'a> {
    /// Nothing yet. The lists will be written to `store`; `scratch` is a folder for the time until then.
    pub(crate) fn new(corpus: &'a Corpus, store: &'a Path, scratch: &Path) -> Result<Self> {
        let table = Table::new(corpus, scratch)?;
        let inputs = corpus.sources.iter().map(|_| Vec::new()).collect();
        Ok(Gathered { corpus, store, table, matches: matches::Writer::new(corpus, store)?, inputs })
    }

    /// The next document, in input order.
    pub(crate) fn document(
        &mut self,
        source: usize,
        file: usize,
        observed: Observed,
    ) -> Result<()> {
        self.matches.push(source, file, &observed.matches)?;
        self.table.push(source, file, observed)
    }

    /// The end of a file.
    pub(crate) fn end(&mut self, source: usize, identity: Identity) {
        self.inputs[source].push(identity);
    }

    /// Decides who goes, and writes the lists.
    pub(crate) fn decide(mut self) -> Result<Scan> {
        self.table.decide(self.corpus)?;
        let mut files = self.table.write(self.corpus, self.store)?;
        for (files, matches) in files.iter_mut().zip(self.matches.finish()?) {
            files.extend(matches);
        }
        Ok(Scan { inputs: self.inputs, files })
    }
}

/// What the workers hand on.
pub(crate) enum Seen {
    /// Documents of one file, of which `raw` bytes are read.
    Documents { observed: Vec<Observed>, raw: u64 },
    /// The end of a file, with its content.
    End { bytes: u64, identity: Identity },
}
