//! Folders that these programs made: what lies in them is no text, however it is called.

use std::path::Path;

use store::open::{BUILD_FOLDER, MANIFEST, MANIFEST_SUM, TOKENIZER};

use crate::interop::export::NOTE;

/// What such a folder is, and two names that only one of that kind holds.
const KINDS: [(&str, &str, &str); 5] = [
    ("a store", MANIFEST, MANIFEST_SUM),
    ("an export", NOTE, TOKENIZER),
    ("unfinished", BUILD_FOLDER, ".build/staging"),
    ("parts of a build", "plan.json", "parts"),
    ("a run", "ledger.jsonl", "run.toml"),
];

/// What `folder` is, if these programs made it.
pub(crate) fn kind(folder: &Path) -> Option<&'static str> {
    let has = |name: &str| folder.join(name).exists();
    let kind = KINDS.iter().find(|(_, one, other)| has(one) && has(other));
    kind.map(|(what, ..)| *what)
}

/// The folders among `files`, the names in a bucket, that these programs made; each ends in a slash.
pub(crate) fn among(files: &[String]) -> Vec<String> {
    let folder = |name: &String| {
        let is_of = |(_, one, other): &(&str, &str, &str)| {
            let folder = name.strip_suffix(one)?;
            let whole = folder.ends_with('/') && files.contains(&format!("{folder}{other}"));
            whole.then(|| folder.to_owned())
        };
        KINDS.iter().find_map(is_of)
    };
    files.iter().filter_map(folder).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_in_a_bucket_is_known_by_both_names() {
        let names = ["a/manifest.json", "a/manifest.sum", "b/manifest.json", "c/x-manifest.json"];
        let files: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        assert_eq!(among(&files), ["a/"]);
    }
}
