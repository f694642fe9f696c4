//! Exact duplicates: documents with the same text, byte for byte, after the previous steps.

use contract::Digest;

/// Why a document is removed.
pub(crate) const REASON: &str = "exact-duplicates: of an earlier document";

/// A document's text by its digest.
pub(crate) type Entry = (u64, u64, u32);

/// The table entry of a document.
pub(crate) fn entry(content: Digest, document: u32) -> Entry {
    ((content.0 >> 64) as u64, content.0 as u64, document)
}

/// The documents that equal an earlier one, each with the first of its kind. Sorts `entries`.
pub(crate) fn later(entries: &mut [Entry]) -> Vec<(u32, u32)> {
    use rayon::slice::ParallelSliceMut as _;
    entries.par_sort_unstable();
    let mut found = Vec::new();
    for same in entries.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
        found.extend(same[1..].iter().map(|(_, _, document)| (*document, same[0].2)));
    }
    found
}
