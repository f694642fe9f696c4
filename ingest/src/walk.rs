//! The inputs of a corpus in reading order, slab by slab.

use contract::{Identity, Result};

use crate::corpus::{Corpus, Source};
use crate::source::{self, Input, Limits, Slab};

/// What is read next.
pub(crate) enum Part {
    /// Records of a file, of which `raw` bytes are read so far.
    Slab { slab: Box<Slab>, source: usize, file: usize, raw: u64 },
    /// The end of a file, with its content.
    FileEnd { source: usize, file: usize, bytes: u64, identity: Identity },
    /// The end of a source.
    SourceEnd,
}

/// Reads the files of a corpus.
pub(crate) struct Walk<'a> {
    corpus: &'a Corpus,
    wanted: fn(&Source) -> bool,
    source: usize,
    file: usize,
    input: Option<Box<dyn Input>>,
}

impl<'a> Walk<'a> {
    /// All sources.
    pub(crate) fn new(corpus: &'a Corpus) -> Self {
        Walk::only(corpus, |_| true)
    }

    /// The sources that are wanted.
    pub(crate) fn only(corpus: &'a Corpus, wanted: fn(&Source) -> bool) -> Self {
        Walk { corpus, wanted, source: 0, file: 0, input: None }
    }

    /// The next part; nothing at the end.
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
            let input = match &mut self.input {
                Some(input) => input,
                none => {
                    let max_document_bytes = self.corpus.max_document_bytes;
                    let limits = Limits { max_document_bytes, ..Limits::default() };
                    none.insert(source::open(&file.path, file.format, &source.fields, &limits)?)
                }
            };
            let (source, number) = (self.source, self.file);
            if let Some(slab) = input.next_slab()? {
                let (slab, raw) = (Box::new(slab), input.content().0);
                return Ok(Some(Part::Slab { slab, source, file: number, raw }));
            }
            let (bytes, identity) = input.content();
            (self.input, self.file) = (None, number + 1);
            return Ok(Some(Part::FileEnd { source, file: number, bytes, identity }));
        }
    }

    /// Leaves the file at hand, which cannot be read on. Returns the numbers of its source and of itself.
    pub(crate) fn pass_over(&mut self) -> (usize, usize) {
        let at = (self.source, self.file);
        (self.input, self.file) = (None, self.file + 1);
        at
    }
}

/// Where a part stands, for messages.
pub(crate) fn place(corpus: &Corpus, part: &Part) -> String {
    match part {
        Part::Slab { source, file, .. } | Part::FileEnd { source, file, .. } => {
            let file = corpus.sources.get(*source).and_then(|source| source.files.get(*file));
            file.map(|file| file.shown.clone()).unwrap_or_default()
        }
        Part::SourceEnd => String::new(),
    }
}
