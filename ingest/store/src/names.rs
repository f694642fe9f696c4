//! The names of a store's files.

/// The manifest's name.
pub const MANIFEST: &str = "manifest.json";

/// The name of the digest of the manifest's bytes, for the flipped bit that changes no meaning.
pub const MANIFEST_SUM: &str = "manifest.sum";

/// The tokenizer's name.
pub const TOKENIZER: &str = "tokenizer.json";

/// The name of a part's folder in that of its source.
pub(crate) fn part(number: u32) -> String {
    format!("{number:05}")
}

/// The folder in which an unfinished build keeps its state, removed at the end.
pub const BUILD_FOLDER: &str = ".build";
