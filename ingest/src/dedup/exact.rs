//! Exact duplicates: documents with the same text, byte for byte, after the previous steps.

/// Why a document is removed.
pub(crate) const REASON: &str = "exact-duplicates: of an earlier document";
