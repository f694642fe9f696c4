//! Where a corpus is cut into parts: a function of its files' names and sizes.

use std::ops::Range;

use contract::{Digest, Result};

use crate::corpus::{Corpus, SourceFile};

/// The limit on parts, where the sources allow it.
pub(crate) const PARTS_MAX: usize = 1 << 14;

/// A source, and the range of its files that becomes one part.
pub(crate) type FileRange = (usize, Range<usize>);

/// Cuts every source into ranges of files, one for each part of its store; also the bytes of a part that this took.
pub(crate) fn parts(corpus: &Corpus) -> Result<(Vec<FileRange>, u64)> {
    let mut sizes: Vec<Vec<u64>> = Vec::new();
    for source in &corpus.sources {
        sizes.push(source.files.iter().map(SourceFile::size).collect::<Result<_>>()?);
    }
    let mut bytes = corpus.part_bytes.max(1);
    loop {
        let mut parts = Vec::new();
        for (number, (source, sizes)) in corpus.sources.iter().zip(&sizes).enumerate() {
            parts.extend(cut(&source.files, sizes, bytes).into_iter().map(|range| (number, range)));
        }
        if parts.len() <= PARTS_MAX.max(corpus.sources.len()) || bytes == u64::MAX {
            return Ok((parts, bytes));
        }
        // By doubling, so that a corpus that grows a little is cut at the same files.
        bytes = bytes.saturating_mul(2);
    }
}

/// Cuts a list of files into ranges of at most `bytes`. Each cut depends only on the files near it, so that editing or
/// adding a file does not move all later ranges: whether a file ends its range is a random number of its name, with a
/// probability that grows with its size.
fn cut(files: &[SourceFile], sizes: &[u64], bytes: u64) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let (mut first, mut sum) = (0, 0u64);
    for (number, (file, size)) in files.iter().zip(sizes).enumerate() {
        if number > first && sum.saturating_add(*size) > bytes {
            ranges.push(first..number);
            (first, sum) = (number, 0);
        }
        sum = sum.saturating_add(*size);
        let drawn = Digest::of_bytes(file.shown.as_bytes()).0 as u64;
        let last = u128::from(drawn) * u128::from(bytes) < u128::from(size.saturating_mul(2)) << 64;
        if last && number + 1 < files.len() {
            ranges.push(first..number + 1);
            (first, sum) = (number + 1, 0);
        }
    }
    ranges.push(first..files.len());
    ranges
}
