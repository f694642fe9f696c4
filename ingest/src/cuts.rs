//! Where a corpus is cut into parts: a function of its files' names and sizes, and of where the groups of large ones
//! are.

use contract::{Digest, Result};

use crate::corpus::{Corpus, PartInputs, SourceFile};
use crate::parallel::{self, Map};
use crate::progress::meanwhile;
use crate::source::Layout;

/// The limit on parts, where the sources allow it.
pub(crate) const PARTS_MAX: usize = 1 << 14;

/// Files that are looked into at the same time: in a bucket each takes some round trips.
const SIDES: usize = 16;

/// A file to be cut: its size, and its layout if it has one and is too large for a part.
struct Sized {
    bytes: u64,
    layout: Option<Layout>,
}

/// Cuts every source into the inputs of parts of its store; also the bytes of a part that this took.
pub(crate) fn parts(corpus: &Corpus) -> Result<(Vec<PartInputs>, u64)> {
    let mut bytes = corpus.part_bytes.max(1);
    let sizes =
        meanwhile("corpus", "looking where large inputs may be cut", || sizes(corpus, bytes))?;
    loop {
        let (mut parts, mut rest) = (Vec::new(), sizes.as_slice());
        for (number, source) in corpus.sources.iter().enumerate() {
            let (own, others) = rest.split_at(source.files.len());
            cut(number, &source.files, own, bytes, &mut parts);
            rest = others;
        }
        if parts.len() <= PARTS_MAX.max(corpus.sources.len()) || bytes == u64::MAX {
            return Ok((parts, bytes));
        }
        // By doubling, so that a corpus that grows a little is cut at the same files.
        bytes = bytes.saturating_mul(2);
    }
}

/// All files of the corpus, in order; of those above `bytes`, the layout.
fn sizes(corpus: &Corpus, bytes: u64) -> Result<Vec<Sized>> {
    let mut files = corpus.sources.iter().flat_map(|source| &source.files);
    let sides = files.clone().count().min(SIDES);
    let sized = |(): &mut (), file: &SourceFile| {
        let size = file.size()?;
        let layout = (size > bytes).then(|| Layout::of(&file.path, file.format)).transpose()?;
        Ok(Sized { bytes: size, layout: layout.flatten() })
    };
    let map = Map { begin: || (), map: sized, place: |file: &&SourceFile| file.shown.clone() };
    let mut all = Vec::new();
    parallel::run(
        sides,
        || Ok(files.next()),
        map,
        |sized| {
            all.push(sized);
            Ok(())
        },
    )?;
    Ok(all)
}

/// Cuts the files of a source into ranges of at most `bytes`, and larger files into groups. Each cut depends only on
/// the files near it, so that editing or adding a file does not move all later ranges: whether a file ends its range is
/// a random number of its name, with a probability that grows with its size.
fn cut(
    source: usize,
    files: &[SourceFile],
    sizes: &[Sized],
    bytes: u64,
    parts: &mut Vec<PartInputs>,
) {
    let (mut first, mut sum) = (0, 0u64);
    for (number, (file, Sized { bytes: size, layout })) in files.iter().zip(sizes).enumerate() {
        if number > first && sum.saturating_add(*size) > bytes {
            parts.push(PartInputs::files(source, first..number));
            (first, sum) = (number, 0);
        }
        sum = sum.saturating_add(*size);
        let cuts = layout.iter().filter(|_| *size > bytes).flat_map(|layout| layout.cuts(bytes));
        for cut in cuts {
            parts.push(PartInputs { source, files: number..number + 1, cut: Some(cut) });
            (first, sum) = (number + 1, 0);
        }
        let drawn = Digest::of_bytes(file.shown.as_bytes()).0 as u64;
        let last = u128::from(drawn) * u128::from(bytes) < u128::from(size.saturating_mul(2)) << 64;
        if last && first <= number && number + 1 < files.len() {
            parts.push(PartInputs::files(source, first..number + 1));
            (first, sum) = (number + 1, 0);
        }
    }
    if first < files.len() || files.is_empty() {
        parts.push(PartInputs::files(source, first..files.len()));
    }
}
