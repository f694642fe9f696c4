//! Recognizes our own outputs (stores, exports, caches, runs), so that globs skip them.

use std::path::Path;

use store::open::{BUILD_FOLDER, MANIFEST, MANIFEST_SUM, TOKENIZER};

use crate::cache_dir::is_cache;

/// The file that describes an export.
pub const NOTE: &str = "export.json";

/// A kind of output, and two names that only folders of this kind contain.
const KINDS: [(&str, &str, &str); 4] = [
    ("a store", MANIFEST, MANIFEST_SUM),
    ("an export", NOTE, TOKENIZER),
    ("unfinished", BUILD_FOLDER, ".build/staging"),
    ("a run", "ledger.jsonl", "run.toml"),
];

/// What kind of output `folder` is, if it is ours.
pub(crate) fn kind(folder: &Path) -> Option<&'static str> {
    let has = |name: &str| folder.join(name).exists();
    let kind = KINDS.iter().find(|(_, one, other)| has(one) && has(other));
    kind.map(|(what, ..)| *what).or_else(|| is_cache(folder).then_some("parts of a build"))
}

/// The folders of our own outputs among `files`, the names in a bucket, with their kinds; each ends in a slash.
pub(crate) fn among(files: &[String]) -> Vec<(String, &'static str)> {
    let folder = |name: &String| {
        let is_of = |(what, one, other): &(&'static str, &str, &str)| {
            let folder = name.strip_suffix(one)?;
            let whole = folder.ends_with('/') && files.contains(&format!("{folder}{other}"));
            whole.then(|| (folder.to_owned(), *what))
        };
        KINDS.iter().find_map(is_of)
    };
    files.iter().filter_map(folder).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache_dir::CacheDir;

    #[test]
    fn a_store_in_a_bucket_is_known_by_both_names() {
        let names = ["a/manifest.json", "a/manifest.sum", "b/manifest.json", "c/x-manifest.json"];
        let files: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        assert_eq!(among(&files), [("a/".to_owned(), "a store")]);
    }

    /// `plan` and `parts` are common names, so they do not mark a folder; a marker does.
    #[test]
    fn a_folder_of_somebody_elses_plan_and_parts_is_text() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["theirs/parts", "theirs/plan.json"] {
            std::fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        assert_eq!(kind(&folder.path().join("theirs")), None);
        let ours = folder.path().join("ours");
        CacheDir::make(&ours).unwrap();
        assert_eq!(kind(&ours), Some("parts of a build"));
    }
}
