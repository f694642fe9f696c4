//! What the files of a store are called.

/// The manifest's name.
pub const MANIFEST: &str = "manifest.json";

/// The name of the digest of the manifest's bytes, for the flipped bit that changes no meaning.
pub const MANIFEST_SUM: &str = "manifest.sum";

/// The tokenizer's name.
pub const TOKENIZER: &str = "tokenizer.json";

/// What an unfinished build keeps in the store's folder, and removes at its end.
pub const BUILD_FOLDER: &str = ".build";
