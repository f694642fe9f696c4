//! `zdata build --check`: every record that is not a document, without building anything.
//!
//! Files are read as a build reads them, parsing in parallel, and told in their order. A file that cannot be read on is
//! told as well, and the next one is read: one run shows all there is to mend.

use contract::{Class, Fault, Result};
use rayon::prelude::*;

use crate::corpus::{Corpus, Source, SourceFile};
use crate::recipe::mapping::Mapping;
use crate::source::{self, Input, Limits, Parsed, Row, Slab};

/// Slabs parsed at a time, for each thread: enough to keep all busy, and a bound on memory.
const SLABS: usize = 4;

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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Files.
    pub files: u64,
    /// Records that are documents.
    pub documents: u64,
    /// Records that are not, and files that cannot be read on.
    pub bad: u64,
}

/// Reads the whole corpus, and tells what is wrong in the order of the inputs.
pub fn check(corpus: &Corpus, mut tell: impl FnMut(Bad<'_>) -> Result<()>) -> Result<Checked> {
    let limits = Limits { max_document_bytes: corpus.max_document_bytes, ..Limits::default() };
    let mut checked = Checked::default();
    for source in &corpus.sources {
        for file in &source.files {
            checked.files += 1;
            let told = |reason, fault: Fault| Bad {
                source: &source.name,
                file: &file.shown,
                reason,
                fault: fault.or_at(|| file.shown.clone()),
            };
            let mut look = |parsed: Parsed| match parsed {
                Parsed::Document(_) => {
                    checked.documents += 1;
                    Ok(())
                }
                Parsed::Dropped { reason, fault, .. } => {
                    checked.bad += 1;
                    tell(told(Some(reason), fault))
                }
            };
            match one(source, file, &limits, &mut look) {
                Err(fault) if fault.class() == Class::Data => {
                    checked.bad += 1;
                    tell(told(None, fault))?;
                }
                outcome => outcome?,
            }
        }
    }
    Ok(checked)
}

fn one(
    source: &Source,
    file: &SourceFile,
    limits: &Limits,
    look: &mut dyn FnMut(Parsed) -> Result<()>,
) -> Result<()> {
    let mut input = source::open(&file.path, file.format, &source.fields, limits)?;
    loop {
        let (slabs, end) = some_slabs(input.as_mut(), SLABS * rayon::current_num_threads());
        let parse = |slab: &Slab| -> Result<Vec<Parsed>> {
            let parsed = slab.parse(&source.fields)?.into_iter();
            Ok(parsed.map(|parsed| mapped(parsed, source.recipe.mapping.as_ref(), file)).collect())
        };
        let parsed: Vec<Result<Vec<Parsed>>> = slabs.par_iter().map(parse).collect();
        for slab in parsed {
            slab?.into_iter().try_for_each(&mut *look)?;
        }
        if let Some(end) = end {
            return end;
        }
    }
}

/// The next slabs, and how the file ended if it did: what was read before an error is looked at too.
fn some_slabs(input: &mut dyn Input, most: usize) -> (Vec<Slab>, Option<Result<()>>) {
    let mut slabs = Vec::new();
    while slabs.len() < most {
        match input.next_slab() {
            Ok(Some(slab)) => slabs.push(slab),
            Ok(None) => return (slabs, Some(Ok(()))),
            Err(fault) => return (slabs, Some(Err(fault))),
        }
    }
    (slabs, None)
}

/// A record of which the template or the chat makes no text is no document either.
fn mapped(parsed: Parsed, mapping: Option<&Mapping>, file: &SourceFile) -> Parsed {
    let (Parsed::Document(document), Some(mapping)) = (&parsed, mapping) else { return parsed };
    let place = || match document.group {
        Some(group) => format!("{}: row {} of group {group}", file.shown, document.row),
        None => format!("{}:{}", file.shown, document.row),
    };
    let (row, bytes) =
        (Row { group: document.group, row: document.row }, document.text.len() as u64);
    match mapping.text(&document.text) {
        Ok(text) if !text.is_empty() => parsed,
        Ok(_) => {
            let fault = Fault::data("the document is empty").at(place());
            Parsed::Dropped { reason: "empty", row, bytes, fault }
        }
        Err(fault) => {
            let fault = fault.or_at(place);
            Parsed::Dropped { reason: "missing text", row, bytes, fault }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let checked = check(&corpus, |bad| {
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
        assert_eq!(checked.unwrap(), Checked { files: 4, documents: 40, bad: 5 });
        assert!(!bench.path("store").exists());
    }
}
