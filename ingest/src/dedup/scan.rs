//! The dedup scan: one pass over the inputs before the build, if a step compares documents.
//!
//! Workers run each document through the steps up to the last one that compares, and pass on, in input order, what that
//! step needs: a digest, a signature, matches. This is kept on disk. Then the steps are decided in order: a document
//! that one removes is not a candidate for the next. The result is a list of removed documents, next to the parts,
//! which the build reads. It also tells users why a document is not in the store.

mod decided;
mod marks;
mod table;
#[cfg(test)]
mod tests;

use std::path::Path;

use contract::{Fault, Identity, Result};
use serde::{Deserialize, Serialize};
use store::{FileRecord, SourceRecord};

pub(crate) use self::decided::{disk_bytes, memory_bytes};
use self::table::Table;
use super::matches;
use super::observe::{Observed, Observer};
use super::sorter::{BUDGET, Scratch};
use super::tools::Tools;
use crate::corpus::Corpus;
use crate::dropped::{self, REMOVED};
use crate::run_parts::Drive;
use crate::walk::{Part, Walk, place};

/// The result of a finished scan.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Scan {
    /// The inputs of parts, by source: later readers must find the same.
    pub(crate) inputs: Vec<Vec<Identity>>,
    /// The lists in each source's folder.
    pub(crate) files: Vec<Vec<FileRecord>>,
}

impl Scan {
    /// Adds the lists to the records of the finished sources, which were built from these inputs of parts,
    /// with their names.
    pub(crate) fn close(
        &self,
        corpus: &Corpus,
        built: &[Vec<(String, Identity)>],
        sources: &mut [SourceRecord],
    ) -> Result<()> {
        let Scan { inputs, files } = self;
        for (number, source) in sources.iter_mut().enumerate() {
            if corpus.sources[number].recipe.scanned() == 0 {
                continue;
            }
            let changed = built[number].iter().zip(&inputs[number]).find(|((_, a), b)| a != *b);
            if let Some(((input, _), _)) = changed {
                return Err(Fault::mismatch("this input changed between scan and build")
                    .at(input.clone())
                    .hint(dropped::CHANGED_HINT));
            }
            let (removed, others) =
                files[number].iter().cloned().partition(|it| it.name == REMOVED);
            let removed: Vec<FileRecord> = removed;
            source.removed_file = removed.into_iter().next();
            source.prepared.get_or_insert_default().files = others;
        }
        Ok(())
    }
}

/// Reads the scanned sources of `corpus`, and passes on what is seen of their documents, in input order.
pub(crate) fn read_through(
    tools: &Tools<'_>,
    corpus: &Corpus,
    drive: &Drive<'_>,
    mut take: impl FnMut(Seen) -> Result<()>,
) -> Result<()> {
    let observer = Observer { corpus, tools };
    let mut walk = Walk::only(corpus, |source| source.recipe.scanned() > 0);
    let look = |part| match part {
        Part::FileEnd { content, .. } => {
            Ok(Some(Seen::End { bytes: content.bytes, identity: content.sha256 }))
        }
        Part::Slab { slab, source, file, raw } => {
            let observed = observer.slab(&slab, source, file)?;
            Ok(Some(Seen::Documents { observed, raw }))
        }
        Part::SourceEnd => Ok(None),
    };
    let take = |seen: Option<Seen>| seen.map_or(Ok(()), &mut take);
    drive.run(|| walk.next(), look, |part| place(corpus, part), take)
}

/// What was seen of all documents, before the decision.
pub(crate) struct Gathered<'a> {
    corpus: &'a Corpus,
    store: &'a Path,
    table: Table,
    matches: matches::Writer,
    inputs: Vec<Vec<Identity>>,
}

impl<'a> Gathered<'a> {
    /// Nothing yet. The lists are written to `store`; `scratch` is an empty, temporary folder.
    pub(crate) fn new(corpus: &'a Corpus, store: &'a Path, scratch: &Path) -> Result<Self> {
        let table = Table::new(corpus, Scratch::new(scratch, BUDGET))?;
        let inputs = corpus.sources.iter().map(|_| Vec::new()).collect();
        Ok(Gathered { corpus, store, table, matches: matches::Writer::new(corpus, store)?, inputs })
    }

    /// Adds the next document, in input order.
    pub(crate) fn document(
        &mut self,
        source: usize,
        file: usize,
        observed: Observed,
    ) -> Result<()> {
        self.matches.push(source, file, &observed.matches)?;
        self.table.push(source, file, observed)
    }

    /// Adds the end of an input of a part.
    pub(crate) fn end(&mut self, source: usize, identity: Identity) {
        self.inputs[source].push(identity);
    }

    /// Decides which documents are removed, and writes the lists.
    pub(crate) fn decide(self) -> Result<Scan> {
        let mut files = self.table.decide(self.corpus)?.write(self.corpus, self.store)?;
        for (files, matches) in files.iter_mut().zip(self.matches.finish()?) {
            files.extend(matches);
        }
        Ok(Scan { inputs: self.inputs, files })
    }
}

/// What the workers pass on.
pub(crate) enum Seen {
    /// Documents of one file, with `raw` bytes read so far.
    Documents { observed: Vec<Observed>, raw: u64 },
    /// The end of a file, with its content.
    End { bytes: u64, identity: Identity },
}
