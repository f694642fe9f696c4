//! `zdata build --check`: every record that is not a document, without building anything.
//!
//! Files are read as in a build, by the same reader and on as many threads, and reported in order. After a file that
//! cannot be read to its end, the next one is read: one run reports everything there is to fix.

use std::collections::BTreeMap;

use contract::{Class, Fault, Result, counted, note};

use crate::assembly::request::{nameless, nothing_left};
use crate::corpus::{Corpus, drops, stops};
use crate::parallel::{self, Map};
use crate::progress::{Measure, Progress};
use crate::source::Parsed;
use crate::walk::{Part, Walk, place};

/// Options that affect only speed and messages.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that parse.
    pub workers: usize,
    /// Whether progress is not shown.
    pub quiet: bool,
    /// Bad records reported per file; the rest are reported as a count by reason.
    pub listed: u64,
}

/// A record that is not a document, or a file that cannot be read to its end.
#[derive(Debug)]
pub struct Bad<'a> {
    /// The source.
    pub source: &'a str,
    /// The file, as the corpus names it.
    pub file: &'a str,
    /// The reason that a build counts it under, or [`UNLISTED`]; none if the file itself is damaged.
    pub reason: Option<&'static str>,
    /// The same as an error that names the place.
    pub fault: Fault,
}

/// Replaces the reason where records over the limit are reported as a count.
pub const UNLISTED: &str = "not listed";

/// What a check read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Files.
    pub files: u64,
    /// Records that are documents.
    pub documents: u64,
    /// Records that are not documents, and files that cannot be read to their end.
    pub bad: u64,
    /// The first record or file at which a build would stop.
    pub stop: Option<Fault>,
    /// The first source that has records and no document, as the error at which a build would stop.
    pub emptied: Option<Fault>,
}

/// A file that cannot be read to its end.
struct Damaged {
    source: usize,
    file: usize,
    fault: Fault,
}

/// What was read of the inputs, or the damaged file.
type Read<T> = std::result::Result<T, Damaged>;

/// What a worker found.
enum Seen {
    /// The records of a slab, with `raw` bytes of the file read so far: the number of documents, whether one of them
    /// has its own id, and the bad records.
    Records {
        source: usize,
        file: usize,
        raw: u64,
        documents: u64,
        named: bool,
        bad: Vec<(&'static str, Fault)>,
    },
    /// The end of a file, with its size in bytes.
    FileEnd(u64),
    /// The end of a source.
    SourceEnd,
}

/// Reads the whole corpus and reports what is wrong in the order of the inputs. No preparation step is run.
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
        place: (0, 0),
        damaged: None,
        source: 0,
        documents: 0,
        named: false,
        reasons: BTreeMap::new(),
        listed: 0,
        unlisted: BTreeMap::new(),
        limit: options.listed,
        checked: Checked::default(),
    };
    parallel::run(options.workers, next, map, |found| count.take(found, &mut tell))?;
    count.checked.files = corpus.sources.iter().map(|source| source.files.len() as u64).sum();
    Ok(count.checked)
}

/// Checks what was read, on any thread.
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
                    // A record from which the template or the chat makes no text.
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
    /// The source and the file of the last bad record.
    place: (usize, usize),
    /// The file that cannot be read to its end: its slabs that were read already are ignored.
    damaged: Option<(usize, usize)>,
    /// The current source, its documents, and its other records by reason.
    source: usize,
    documents: u64,
    /// Whether a document of the source has its own id.
    named: bool,
    reasons: BTreeMap<&'static str, u64>,
    /// Bad records reported for the current file, unreported ones by reason, and the limit.
    listed: u64,
    unlisted: BTreeMap<&'static str, u64>,
    limit: u64,
    checked: Checked,
}

impl Count<'_> {
    /// Adds the next result, in the order of the inputs.
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
                    self.checked.bad += 1;
                    self.place = (source, file);
                    if stops(self.corpus, reason) {
                        self.stop(&fault);
                    }
                    if self.listed < self.limit {
                        self.listed += 1;
                        self.tell(Some(reason), fault, tell)?;
                    } else {
                        *self.unlisted.entry(reason).or_default() += 1;
                    }
                }
                self.progress.within(raw);
                self.progress.tick();
            }
            Err(Damaged { source, file, fault }) => {
                self.file_end(tell)?;
                self.damaged = Some((source, file));
                self.place = (source, file);
                self.checked.bad += 1;
                self.stop(&fault);
                self.tell(None, fault, tell)?;
            }
            Ok(Seen::FileEnd(bytes)) => {
                self.file_end(tell)?;
                self.progress.add(bytes);
            }
            Ok(Seen::SourceEnd) => self.source_end(),
        }
        Ok(())
    }

    /// Reports something in the current file.
    fn tell(
        &mut self,
        reason: Option<&'static str>,
        fault: Fault,
        tell: &mut impl FnMut(Bad<'_>) -> Result<()>,
    ) -> Result<()> {
        let source = &self.corpus.sources[self.place.0];
        let file = source.files[self.place.1].shown.as_str();
        let fault = drops(self.named(fault))?;
        self.progress.aside(|| tell(Bad { source: &source.name, file, reason, fault }))
    }

    /// Records where a build would stop, if this is the first place.
    fn stop(&mut self, fault: &Fault) {
        if self.checked.stop.is_none() {
            self.checked.stop = Some(self.named(fault.clone()));
        }
    }

    /// The fault with the current file, if it names no place.
    fn named(&self, fault: Fault) -> Fault {
        let (source, file) = self.place;
        fault.or_at(|| self.corpus.sources[source].files[file].shown.clone())
    }

    /// Reports the counts of the records of a file that were not listed.
    fn file_end(&mut self, tell: &mut impl FnMut(Bad<'_>) -> Result<()>) -> Result<()> {
        self.listed = 0;
        let unlisted = std::mem::take(&mut self.unlisted);
        if unlisted.is_empty() {
            return Ok(());
        }
        let all = counted(unlisted.values().sum::<u64>(), "more bad record");
        let each = unlisted.iter().map(|(reason, count)| format!("{count} {reason}"));
        let each: Vec<String> = each.collect();
        self.tell(Some(UNLISTED), Fault::data(format!("{all} ({})", each.join(", "))), tell)
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
        let options = Options { workers: 3, quiet: true, listed: 9 };
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
        // 15 of the first file, 15 of the intact second one, 10 of the other source.
        let checked = checked.unwrap();
        let counts = (checked.files, checked.documents, checked.bad, &checked.emptied);
        assert_eq!(counts, (4, 40, 5, &None));
        assert!(checked.stop.unwrap().to_string().contains("web-0.jsonl:11"));
        assert!(!bench.path("store").exists());
    }

    /// Unlisted records are counted per file, and the first record at which a build stops is reported anyway.
    #[test]
    fn of_a_file_only_so_many_records_are_listed() {
        let bench = Workbench::new(30);
        bench.write("web-0.jsonl", "{\"text\": \"\"}\n".repeat(4) + "nonsense\nnonsense\n");
        bench.write("web-1.jsonl", "nonsense\n".repeat(2) + &json_lines(0, 5));
        let corpus = Corpus::read(bench.corpus("")).unwrap();
        let mut told = Vec::new();
        let options = Options { workers: 2, quiet: true, listed: 2 };
        let checked = check(&corpus, options, |bad| {
            told.push((bad.file.to_owned(), bad.reason.unwrap(), bad.fault.what().to_owned()));
            Ok(())
        });
        let checked = checked.unwrap();
        assert_eq!(checked.bad, 8);
        let told: Vec<_> =
            told.iter().map(|(file, reason, what)| (&**file, *reason, &**what)).collect();
        let (empty, bad) = ("the document is empty", "malformed JSON");
        let rest = "4 more bad records (2 empty, 2 malformed)";
        assert_eq!(
            told,
            [
                ("web-0.jsonl", "empty", empty),
                ("web-0.jsonl", "empty", empty),
                ("web-0.jsonl", UNLISTED, rest),
                ("web-1.jsonl", "malformed", bad),
                ("web-1.jsonl", "malformed", bad),
            ]
        );
        assert!(checked.stop.is_some());
    }

    /// A build stops at a source of which nothing is left, regardless of `on_error`.
    #[test]
    fn a_source_without_a_document_is_told_as_a_build_would() {
        let bench = Workbench::new(30);
        bench.write("web-0.jsonl", "{\"x\": 1}\n{\"text\": \"\"}\n".repeat(2));
        bench.write("web-1.jsonl", "");
        let corpus = Corpus::read(bench.corpus("on_error = \"skip\"\n")).unwrap();
        let options = Options { workers: 1, quiet: true, listed: 9 };
        let emptied = check(&corpus, options, |_| Ok(())).unwrap().emptied.unwrap();
        let told = emptied.to_string();
        assert!(told.contains("\"web\"") && told.contains("4 records: 2 empty, 2 mis"), "{told}");
        let built = build(&corpus, &bench.path("store"), crate::testing::options(2)).unwrap_err();
        assert_eq!(built.to_string(), told);
    }
}
