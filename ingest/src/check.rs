//! `zdata build --check`: every record that is not a document, without building anything.
//!
//! Files are read as a build reads them, by the same walk and on as many threads, and told in their order. A file that
//! cannot be read on is told as well, and the next one is read: one run shows all there is to mend.

use std::collections::BTreeMap;

use contract::{Class, Fault, Result, note};

use crate::assembly::request::{nameless, nothing_left};
use crate::corpus::{Corpus, drops};
use crate::parallel::{self, Map};
use crate::progress::{Measure, Progress};
use crate::source::Parsed;
use crate::walk::{Part, Walk, place};

/// What only decides how fast, and what is said meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that parse.
    pub workers: usize,
    /// Whether to keep silent about progress.
    pub quiet: bool,
}

/// A record that is not a document, or a file that cannot be read on.
#[derive(Debug)]
pub struct Bad<'a> {
    /// The source.
    pub source: &'a str,
    /// The file, as the corpus names it.
    pub file: &'a str,
    /// The reason that a build counts it under; none if it is the file that is damaged.
    pub reason: Option<&'static str>,
    /// The same as an error that names the place.
    pub fault: Fault,
}

/// What a check read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Files.
    pub files: u64,
    /// Records that are documents.
    pub documents: u64,
    /// Records that are not, and files that cannot be read on.
    pub bad: u64,
    /// The first source that has records and no document, as the error at which a build would stop.
    pub emptied: Option<Fault>,
}

/// A file that cannot be read on.
struct Damaged {
    source: usize,
    file: usize,
    fault: Fault,
}

/// What was read or seen of the inputs, unless a file ends it.
type Read<T> = std::result::Result<T, Damaged>;

/// What a worker saw.
enum Seen {
    /// The records of a slab, up to which `raw` bytes of the file are read: so many documents, whether one of them has its own
    /// id, and those that are none.
    Records {
        source: usize,
        file: usize,
        raw: u64,
        documents: u64,
        named: bool,
        bad: Vec<(&'static str, Fault)>,
    },
    /// The end of a file of so many bytes.
    FileEnd(u64),
    /// The end of a source.
    SourceEnd,
}

/// Reads the whole corpus, and tells what is wrong in the order of the inputs. No step of preparation is run.
pub fn check(
    corpus: &Corpus,
    options: Options,
    mut tell: impl FnMut(Bad<'_>) -> Result<()>,
) -> Result<Checked> {
    let mut walk = Walk::new(corpus);
    let next = || match walk.next() {
        Err(fault) if fault.class() == Class::Data => {
            let (source, file) = walk.pass_over();
            Ok(Some(Err(Damaged { source, file, fault })))
        }
        part => part.map(|part| part.map(Ok)),
    };
    let map = Map {
        begin: || (),
        map: |(): &mut (), read: Read<Part>| match read {
            Ok(part) => look(corpus, part),
            Err(damaged) => Ok(Err(damaged)),
        },
        place: |read: &Read<Part>| match read {
            Ok(part) => place(corpus, part),
            Err(Damaged { source, file, .. }) => corpus.sources[*source].files[*file].shown.clone(),
        },
    };
    let progress = Progress::new("check", Measure::Bytes, corpus.bytes()?, options.quiet);
    let mut count = Count {
        corpus,
        progress,
        damaged: None,
        source: 0,
        documents: 0,
        named: false,
        reasons: BTreeMap::new(),
        checked: Checked::default(),
    };
    parallel::run(options.workers, next, map, |found| count.take(found, &mut tell))?;
    count.checked.files = corpus.sources.iter().map(|source| source.files.len() as u64).sum();
    Ok(count.checked)
}

/// Looks at what was read, on any thread.
fn look(corpus: &Corpus, part: Part) -> Result<Read<Seen>> {
    let (slab, source, file, raw) = match part {
        Part::Slab { slab, source, file, raw } => (slab, source, file, raw),
        Part::FileEnd { bytes, .. } => return Ok(Ok(Seen::FileEnd(bytes))),
        Part::SourceEnd => return Ok(Ok(Seen::SourceEnd)),
    };
    let of = &corpus.sources[source];
    let all = match slab.parse(&of.fields) {
        Err(fault) if fault.class() == Class::Data => {
            return Ok(Err(Damaged { source, file, fault }));
        }
        all => all?,
    };
    let (mut documents, mut named, mut bad) = (0, false, Vec::new());
    for parsed in all {
        match parsed {
            Parsed::Dropped { reason, fault, .. } => bad.push((reason, fault)),
            Parsed::Document(mut document) => {
                named |= document.id.is_some();
                match of.recipe.text(&mut document) {
                    Ok(()) => documents += 1,
                    // A record of which the template or the chat makes no text.
                    Err(none) => {
                        let place = || document.place(&of.files[file].shown);
                        bad.push((none.reason, none.fault.or_at(place)));
                    }
                }
            }
        }
    }
    Ok(Ok(Seen::Records { source, file, raw, documents, named, bad }))
}

/// What was found so far.
struct Count<'a> {
    corpus: &'a Corpus,
    progress: Progress,
    /// The file that cannot be read on: slabs of it that were read already are not looked at.
    damaged: Option<(usize, usize)>,
    /// The source at hand, its documents, and its other records by reason.
    source: usize,
    documents: u64,
    /// Whether a document of it has its own id.
    named: bool,
    reasons: BTreeMap<&'static str, u64>,
    checked: Checked,
}

impl Count<'_> {
    /// Takes what was found next, in the order of the inputs.
    fn take(
        &mut self,
        seen: Read<Seen>,
        tell: &mut impl FnMut(Bad<'_>) -> Result<()>,
    ) -> Result<()> {
        match seen {
            Ok(Seen::Records { source, file, .. }) | Err(Damaged { source, file, .. })
                if self.damaged == Some((source, file)) => {}
            Ok(Seen::Records { source, file, raw, documents, named, bad }) => {
                self.named |= named;
                self.documents += documents;
                self.checked.documents += documents;
                for (reason, fault) in bad {
                    *self.reasons.entry(reason).or_default() += 1;
                    self.bad(source, file, Some(reason), fault, tell)?;
                }
                self.progress.within(raw);
                self.progress.tick();
            }
            Err(Damaged { source, file, fault }) => {
                self.damaged = Some((source, file));
                self.bad(source, file, None, fault, tell)?;
            }
            Ok(Seen::FileEnd(bytes)) => self.progress.add(bytes),
            Ok(Seen::SourceEnd) => self.source_end(),
        }
        Ok(())
    }

    fn bad(
        &mut self,
        source: usize,
        file: usize,
        reason: Option<&'static str>,
        fault: Fault,
        tell: &mut impl FnMut(Bad<'_>) -> Result<()>,
    ) -> Result<()> {
        self.checked.bad += 1;
        let source = &self.corpus.sources[source];
        let file = source.files[file].shown.as_str();
        let fault = drops(fault.or_at(|| file.to_owned()))?;
        self.progress.aside(|| tell(Bad { source: &source.name, file, reason, fault }))
    }

    fn source_end(&mut self) {
        let source = &self.corpus.sources[self.source];
        let reasons = std::mem::take(&mut self.reasons);
        if self.documents == 0 && !reasons.is_empty() {
            let reasons = reasons.into_iter();
            let fault = nothing_left(&source.name, reasons.map(|(reason, n)| (n, reason)));
            self.checked.emptied.get_or_insert(fault);
        }
        if let (Some(id), false, true) = (&source.fields.id, self.named, self.documents > 0) {
            self.progress.aside(|| note!("{}", nameless(&source.name, id)));
        }
        (self.source, self.documents, self.named) = (self.source + 1, 0, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::build;
    use crate::testing::{Workbench, json_lines};

    #[test]
    fn every_bad_record_is_told_once_and_nothing_is_built() {
        let bench = Workbench::new(30);
        let bad = "{\"text\": 7}\nnonsense\n{\"text\": \"\"}\n{\"body\": \"x\"}\n";
        bench.write("web-0.jsonl", json_lines(0, 10) + bad + &json_lines(10, 5));
        bench.write("web-1.jsonl.gz", b"this is not gzip");
        let path = bench.corpus("");
        let text = std::fs::read_to_string(&path).unwrap().replace("web-*.jsonl", "web-*.jsonl*");
        std::fs::write(&path, text).unwrap();
        let corpus = Corpus::read(&path).unwrap();
        let mut told = Vec::new();
        let options = Options { workers: 3, quiet: true };
        let checked = check(&corpus, options, |bad| {
            let place = bad.fault.place().unwrap_or_default().to_owned();
            told.push((bad.file.to_owned(), bad.reason, place));
            Ok(())
        });
        let records = told.iter().filter(|(file, ..)| file == "web-0.jsonl");
        let records: Vec<_> = records
            .map(|(_, reason, place)| (reason.unwrap(), place.rsplit(':').next().unwrap()))
            .collect();
        let wanted =
            [("missing text", "11"), ("malformed", "12"), ("empty", "13"), ("missing text", "14")];
        assert_eq!(records, wanted);
        let files: Vec<_> = told.iter().filter(|(_, reason, _)| reason.is_none()).collect();
        assert!(files.len() == 1 && files[0].0 == "web-1.jsonl.gz", "{told:?}");
        // 15 of the first file, 15 of the sound second one, 10 of the other source.
        let wanted = Checked { files: 4, documents: 40, bad: 5, emptied: None };
        assert_eq!(checked.unwrap(), wanted);
        assert!(!bench.path("store").exists());
    }

    /// A build stops at a source of which nothing is left, whatever `on_error` says.
    #[test]
    fn a_source_without_a_document_is_told_as_a_build_would() {
        let bench = Workbench::new(30);
        bench.write("web-0.jsonl", "{\"x\": 1}\n{\"text\": \"\"}\n".repeat(2));
        bench.write("web-1.jsonl", "");
        let corpus = Corpus::read(bench.corpus("on_error = \"skip\"\n")).unwrap();
        let options = Options { workers: 1, quiet: true };
        let emptied = check(&corpus, options, |_| Ok(())).unwrap().emptied.unwrap();
        let told = emptied.to_string();
        assert!(told.contains("\"web\"") && told.contains("4 records: 2 empty, 2 mis"), "{told}");
        let built = build(&corpus, &bench.path("store"), crate::testing::options(2)).unwrap_err();
        assert_eq!(built.to_string(), told);
    }
}
