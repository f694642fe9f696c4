//! `zdata build --check`: every record that is not a document, without building anything.
//!
//! Files are read as in a build, part by part, and reported in order. After a file that cannot be read to its end, the
//! next one is read: one run reports everything there is to fix.

use std::collections::BTreeMap;
use std::sync::Mutex;

use contract::{Class, Fault, Result, counted, note};

use crate::assembly::request::{nameless, never_kept, nothing_left};
use crate::corpus::{Corpus, PartInputs, drops, stops};
use crate::cuts;
use crate::progress::{Measure, PartProgress, Progress};
use crate::run_parts::{Drive, run_parts};
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
    file: usize,
    fault: Fault,
}

/// What was read of the inputs, or the damaged file.
type Read<T> = std::result::Result<T, Damaged>;

/// What a worker found.
enum Seen {
    /// The records of a slab, with `raw` bytes of the file read so far: the number of documents, whether one of them
    /// has its own id, whether one has a value by kept column, and the bad records.
    Records {
        file: usize,
        raw: u64,
        documents: u64,
        named: bool,
        kept: Vec<bool>,
        bad: Vec<(&'static str, Fault)>,
    },
    /// The end of a file, with its size in bytes.
    FileEnd(u64),
}

/// Reads the whole corpus and reports what is wrong in the order of the inputs. No preparation step is run.
pub fn check(
    corpus: &Corpus,
    options: Options,
    tell: impl FnMut(Bad<'_>) -> Result<()> + Send,
) -> Result<Checked> {
    let (mut parts, _) = cuts::parts(corpus)?;
    // What is wrong with a file is reported once.
    parts.retain(|part| part.first_group() == 0);
    parts.iter_mut().for_each(|part| part.cut = None);
    // A list of every bad record may be too long to be held until its turn: the corpus is then read as one part.
    let at_once = options.listed == u64::MAX;
    let parts: Vec<_> =
        if at_once { vec![parts] } else { parts.into_iter().map(|part| vec![part]).collect() };
    let progress = Progress::new("check", Measure::Bytes, corpus.bytes()?, options.quiet);
    let (progress, tell) = (Mutex::new(progress), Mutex::new(tell));
    let say = |bad: Bad<'_>| {
        let mut tell = tell.lock().map_err(|_| Fault::bug("a report panicked"))?;
        match progress.lock() {
            Ok(progress) => progress.aside(|| (*tell)(bad)),
            Err(_) => (*tell)(bad),
        }
    };
    let do_part = |number: usize, drive: &Drive<'_>| {
        let look = |part: &PartInputs| {
            let mut count = Count::new(corpus, part.source, part.files.start, options.listed);
            let mut held = Vec::new();
            let only = corpus.cut(part);
            let mut passed = PartProgress::new(&progress);
            count.read(&only, drive, &mut passed, |bad| match at_once {
                true => say(bad),
                false => {
                    held.push(bad);
                    Ok(())
                }
            })?;
            Ok((count, held))
        };
        parts[number].iter().map(look).collect::<Result<Vec<_>>>()
    };
    let mut total =
        Total { corpus, source: 0, of: Counted::default(), checked: Checked::default() };
    run_parts(parts.len(), options.workers, do_part, |counts| {
        for (count, held) in counts {
            total.add(count.source, count.counted);
            held.into_iter().try_for_each(&say)?;
        }
        Ok(())
    })?;
    total.end_before(corpus.sources.len());
    total.checked.files = corpus.sources.iter().map(|source| source.files.len() as u64).sum();
    Ok(total.checked)
}

/// Counts of a source, or of some of its files.
#[derive(Default)]
struct Counted {
    documents: u64,
    bad: u64,
    /// Whether a document has its own id.
    named: bool,
    /// Whether a document has a value, by kept column.
    kept: Vec<bool>,
    /// Other records by reason.
    reasons: BTreeMap<&'static str, u64>,
    /// The first place at which a build would stop.
    stop: Option<Fault>,
}

/// What was found so far in some files of a source.
struct Count<'a> {
    corpus: &'a Corpus,
    source: usize,
    /// The first of the files, and the current one, counted from there.
    first: usize,
    file: usize,
    /// The file that cannot be read to its end: its slabs that were read already are ignored.
    damaged: Option<usize>,
    /// Bad records reported for the current file, unreported ones by reason, and the limit.
    listed: u64,
    unlisted: BTreeMap<&'static str, u64>,
    limit: u64,
    counted: Counted,
}

impl<'a> Count<'a> {
    fn new(corpus: &'a Corpus, source: usize, first: usize, limit: u64) -> Self {
        let (unlisted, counted) = (BTreeMap::new(), Counted::default());
        Count { corpus, source, first, file: 0, damaged: None, listed: 0, unlisted, limit, counted }
    }

    /// Reads the files, which are those of `only`.
    fn read(
        &mut self,
        only: &Corpus,
        drive: &Drive<'_>,
        passed: &mut PartProgress<'_>,
        mut tell: impl FnMut(Bad<'a>) -> Result<()>,
    ) -> Result<()> {
        let mut walk = Walk::new(only);
        let next = || match walk.next() {
            Err(fault) if fault.class() == Class::Data => {
                let (_, file) = walk.pass_over();
                Ok(Some(Err(Damaged { file, fault })))
            }
            part => part.map(|part| part.map(Ok)),
        };
        let map = |read: Read<Part>| match read {
            Ok(part) => look(only, part),
            Err(damaged) => Ok(Some(Err(damaged))),
        };
        let place = |read: &Read<Part>| match read {
            Ok(part) => place(only, part),
            Err(Damaged { file, .. }) => only.sources[0].files[*file].shown.clone(),
        };
        drive.run(next, map, place, |found| match found {
            None => Ok(()),
            Some(found) => self.take(found, passed, &mut tell),
        })
    }

    /// Adds the next result, in the order of the inputs.
    fn take(
        &mut self,
        seen: Read<Seen>,
        passed: &mut PartProgress<'_>,
        tell: &mut impl FnMut(Bad<'a>) -> Result<()>,
    ) -> Result<()> {
        match seen {
            Ok(Seen::Records { file, .. }) | Err(Damaged { file, .. })
                if self.damaged == Some(file) => {}
            Ok(Seen::Records { file, raw, documents, named, kept, bad }) => {
                self.counted.named |= named;
                any_of(&mut self.counted.kept, &kept);
                self.counted.documents += documents;
                for (reason, fault) in bad {
                    *self.counted.reasons.entry(reason).or_default() += 1;
                    self.counted.bad += 1;
                    self.file = file;
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
                passed.within(raw, std::iter::empty());
            }
            Err(Damaged { file, fault }) => {
                self.file_end(tell)?;
                (self.damaged, self.file) = (Some(file), file);
                self.counted.bad += 1;
                self.stop(&fault);
                self.tell(None, fault, tell)?;
            }
            Ok(Seen::FileEnd(bytes)) => {
                self.file_end(tell)?;
                passed.file(bytes);
            }
        }
        Ok(())
    }

    /// Reports something in the current file.
    fn tell(
        &self,
        reason: Option<&'static str>,
        fault: Fault,
        tell: &mut impl FnMut(Bad<'a>) -> Result<()>,
    ) -> Result<()> {
        let (corpus, source) = (self.corpus, self.source);
        let source = &corpus.sources[source];
        let file = source.files[self.first + self.file].shown.as_str();
        let fault = drops(self.named(fault))?;
        tell(Bad { source: &source.name, file, reason, fault })
    }

    /// Records where a build would stop, if this is the first place.
    fn stop(&mut self, fault: &Fault) {
        if self.counted.stop.is_none() {
            self.counted.stop = Some(self.named(fault.clone()));
        }
    }

    /// The fault with the current file, if it names no place.
    fn named(&self, fault: Fault) -> Fault {
        let files = &self.corpus.sources[self.source].files;
        fault.or_at(|| files[self.first + self.file].shown.clone())
    }

    /// Reports the counts of the records of a file that were not listed.
    fn file_end(&mut self, tell: &mut impl FnMut(Bad<'a>) -> Result<()>) -> Result<()> {
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
}

/// The counts of all sources, added part by part.
struct Total<'a> {
    corpus: &'a Corpus,
    /// The current source, and its counts so far.
    source: usize,
    of: Counted,
    checked: Checked,
}

impl Total<'_> {
    fn add(&mut self, source: usize, part: Counted) {
        self.end_before(source);
        let Counted { documents, bad, named, kept, reasons, stop } = part;
        self.checked.documents += documents;
        self.checked.bad += bad;
        self.checked.stop = self.checked.stop.take().or(stop);
        self.of.documents += documents;
        self.of.named |= named;
        any_of(&mut self.of.kept, &kept);
        for (reason, count) in reasons {
            *self.of.reasons.entry(reason).or_default() += count;
        }
    }

    /// Ends the sources before this one.
    fn end_before(&mut self, source: usize) {
        while self.source < source {
            let of = &self.corpus.sources[self.source];
            let Counted { documents, named, kept, reasons, .. } = std::mem::take(&mut self.of);
            if documents == 0 && !reasons.is_empty() {
                let reasons = reasons.into_iter();
                let fault = nothing_left(&of.name, reasons.map(|(reason, n)| (n, reason)));
                self.checked.emptied.get_or_insert(fault);
            }
            if let (Some(id), false, true) = (&of.fields.id, named, documents > 0) {
                note!("{}", nameless(&of.name, id));
            }
            let columns = of.fields.keep.iter().zip(kept).filter(|_| documents > 0);
            for (column, _) in columns.filter(|(_, kept)| !kept) {
                note!("{}", never_kept(&of.name, column));
            }
            self.source += 1;
        }
    }
}

/// Adds to the columns with a value those of more documents.
fn any_of(all: &mut Vec<bool>, more: &[bool]) {
    all.resize(more.len().max(all.len()), false);
    all.iter_mut().zip(more).for_each(|(any, value)| *any |= value);
}

/// Checks what was read, on any thread.
fn look(only: &Corpus, part: Part) -> Result<Option<Read<Seen>>> {
    let (slab, file, raw) = match part {
        Part::Slab { slab, file, raw, .. } => (slab, file, raw),
        Part::FileEnd { content, .. } => return Ok(Some(Ok(Seen::FileEnd(content.bytes)))),
        Part::SourceEnd => return Ok(None),
    };
    let of = &only.sources[0];
    let all = match slab.parse(&of.fields) {
        Err(fault) if fault.class() == Class::Data => {
            return Ok(Some(Err(Damaged { file, fault })));
        }
        all => all?,
    };
    let (mut documents, mut named, mut bad) = (0, false, Vec::new());
    let mut kept = vec![false; of.fields.keep.len()];
    for parsed in all {
        match parsed {
            Parsed::Dropped { reason, fault, .. } => bad.push((reason, fault)),
            Parsed::Document(mut document) => {
                named |= document.id.is_some();
                match of.recipe.text(&mut document) {
                    Ok(()) => {
                        documents += 1;
                        kept.iter_mut()
                            .zip(&document.kept)
                            .for_each(|(any, v)| *any |= v.is_some());
                    }
                    // A record from which the template or the chat makes no text.
                    Err(none) => {
                        let place = || document.place(&of.files[file].shown);
                        bad.push((none.reason, none.fault.or_at(place)));
                    }
                }
            }
        }
    }
    Ok(Some(Ok(Seen::Records { file, raw, documents, named, kept, bad })))
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
