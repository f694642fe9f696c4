//! What a store's reader needs from the system and from the tokenizer's file.

use std::fs;

use crate::folder::{StoreFile, damaged, missing};
use crate::open::TOKENIZER;
use crate::{Location, Manifest};
use contract::{Identity, Result};

/// Reads `tokenizer.json`, which must be the one that made the tokens.
pub(super) fn tokenizer(root: &Location, manifest: &Manifest) -> Result<Vec<u8>> {
    let path = root.join(TOKENIZER);
    path.reread(|| {
        let bytes = StoreFile::new(root, &[TOKENIZER]).read();
        let bytes = bytes.map_err(|error| missing(&path, &error))?;
        let found = Identity::of_bytes(&bytes);
        if found == manifest.tokenizer.sha256 {
            return Ok(bytes);
        }
        Err(damaged(&path, "the tokenizer is not the one that made this store's tokens")
            .found(found)
            .wanted(manifest.tokenizer.sha256))
    })
}

/// How many files this process may open; 256 if the system does not say.
pub(super) fn file_limit() -> u64 {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find(|line| line.starts_with("Max open files"));
    line.and_then(|line| line.split_whitespace().nth(3)?.parse().ok()).unwrap_or(256)
}
