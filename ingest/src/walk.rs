//! The inputs of a corpus in reading order, slab by slab.
//!
//! Invariant: once the end of a file is returned, all its bytes were those of one unchanged version of the file.

use contract::Result;

use crate::corpus::{Corpus, Source};
use crate::source::{Content, Input, Limits, Slab, Stamp};

/// The next item read.
pub(crate) enum Part {
    /// Records of a file, with `raw` bytes read so far.
    Slab { slab: Box<Slab>, source: usize, file: usize, raw: u64 },
    /// The end of a file, or of the groups that are read.
    FileEnd { source: usize, file: usize, content: Content },
    /// The end of a source.
    SourceEnd,
}

/// Reads the files of a corpus.
pub(crate) struct Walk<'a> {
    corpus: &'a Corpus,
    wanted: fn(&Source) -> bool,
    source: usize,
    file: usize,
    /// The open file, and its stamp from before it was opened.
    input: Option<(Box<dyn Input>, Stamp)>,
}

impl<'a> Walk<'a> {
    /// Reads all sources.
    pub(crate) fn new(corpus: &'a Corpus) -> Self {
        Walk::only(corpus, |_| true)
    }

    /// Reads the wanted sources.
    pub(crate) fn only(corpus: &'a Corpus, wanted: fn(&Source) -> bool) -> Self {
        Walk { corpus, wanted, source: 0, file: 0, input: None }
    }

    /// The next part; none at the end.
    pub(crate) fn next(&mut self) -> Result<Option<Part>> {
        loop {
            let Some(source) = self.corpus.sources.get(self.source) else { return Ok(None) };
            let file = source.files.get(self.file).filter(|_| (self.wanted)(source));
            let Some(file) = file else {
                (self.source, self.file) = (self.source + 1, 0);
                if (self.wanted)(source) {
                    return Ok(Some(Part::SourceEnd));
                }
                continue;
            };
            let (input, stamp) = match &mut self.input {
                Some(input) => input,
                none => {
                    let stamp = file.stamp()?;
                    let max_document_bytes = self.corpus.max_document_bytes;
                    let limits = Limits { max_document_bytes, ..Limits::default() };
                    let input = file.open(&source.fields, &limits)?;
                    none.insert((input, stamp))
                }
            };
            let (source, number) = (self.source, self.file);
            if let Some(slab) = input.next_slab()? {
                let (slab, raw) = (Box::new(slab), input.raw_bytes());
                return Ok(Some(Part::Slab { slab, source, file: number, raw }));
            }
            let content = input.content();
            file.unchanged(stamp, content.bytes)?;
            (self.input, self.file) = (None, number + 1);
            return Ok(Some(Part::FileEnd { source, file: number, content }));
        }
    }

    /// Skips the rest of the current file, which cannot be read. Returns the indexes of its source and of the file.
    pub(crate) fn pass_over(&mut self) -> (usize, usize) {
        let at = (self.source, self.file);
        (self.input, self.file) = (None, self.file + 1);
        at
    }
}

/// The place of a part, for messages.
pub(crate) fn place(corpus: &Corpus, part: &Part) -> String {
    match part {
        Part::Slab { source, file, .. } | Part::FileEnd { source, file, .. } => {
            let file = corpus.sources.get(*source).and_then(|source| source.files.get(*file));
            file.map(|file| file.shown.clone()).unwrap_or_default()
        }
        Part::SourceEnd => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::path::Path;
    use std::time::{Duration, SystemTime};

    use contract::Class;

    use super::*;
    use crate::testing::Workbench;

    /// A file that changes in any way between its first slab and its end.
    #[test]
    fn a_file_that_changes_while_it_is_read_has_no_end() {
        let text = |path: &Path| fs::read_to_string(path).unwrap();
        let changes: [&dyn Fn(&Path); 5] = [
            &|path| fs::File::options().append(true).open(path).unwrap().write_all(b"\n").unwrap(),
            &|path| fs::write(path, text(path).replace("one", "six")).unwrap(),
            &|path| fs::File::options().write(true).open(path).unwrap().set_len(9).unwrap(),
            &|path| {
                let other = path.with_extension("other");
                fs::write(&other, text(path)).unwrap();
                fs::rename(&other, path).unwrap();
            },
            &|_| (),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let bench = Workbench::new(9);
            let corpus = Corpus::read(bench.corpus("")).unwrap();
            let file = corpus.sources[0].files[0].path.local().unwrap();
            // Long ago: a file that is written twice within one tick of the clock looks untouched.
            let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
            fs::File::options().write(true).open(file).unwrap().set_modified(old).unwrap();
            let mut walk = Walk::new(&corpus);
            assert!(matches!(walk.next(), Ok(Some(Part::Slab { .. }))));
            change(file);
            let next = walk.next();
            if number + 1 == changes.len() {
                assert!(matches!(next, Ok(Some(Part::FileEnd { .. }))));
                continue;
            }
            let fault = next.map(drop).unwrap_err();
            assert_eq!(fault.class(), Class::Mismatch, "{fault}");
            let told = fault.to_string();
            assert!(told.contains("web-0.jsonl") && told.contains("changed while"), "{told}");
        }
    }
}
