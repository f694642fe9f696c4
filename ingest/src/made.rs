//! Folders that these programs made: what lies in them is no text, however it is called.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;
use store::open::{BUILD_FOLDER, MANIFEST, MANIFEST_SUM, TOKENIZER};
use store::regular;

/// The file that says what an export is.
pub const NOTE: &str = "export.json";

/// The file that says what a plan of a build is.
pub(crate) const PLAN: &str = "plan.json";

/// The folder of parts, of all plans.
pub(crate) const PARTS: &str = "parts";

/// What such a folder is, and two names that only one of that kind holds.
const KINDS: [(&str, &str, &str); 4] = [
    ("a store", MANIFEST, MANIFEST_SUM),
    ("an export", NOTE, TOKENIZER),
    ("unfinished", BUILD_FOLDER, ".build/staging"),
    ("a run", "ledger.jsonl", "run.toml"),
];

/// What a folder of parts is, whose names anybody may have given.
const KIND_OF_PARTS: &str = "parts of a build";

/// What `folder` is, if these programs made it.
pub(crate) fn kind(folder: &Path) -> Option<&'static str> {
    let has = |name: &str| folder.join(name).exists();
    let kind = KINDS.iter().find(|(_, one, other)| has(one) && has(other));
    kind.map(|(what, ..)| *what).or_else(|| has_plan(folder).then_some(KIND_OF_PARTS))
}

/// Whether a folder holds a plan and parts, and not only names of theirs.
fn has_plan(folder: &Path) -> bool {
    /// The keys of a plan that tell it from what others call so; what stands in the two others is `cluster`'s affair.
    #[derive(Deserialize)]
    #[expect(dead_code, reason = "read to see whether it is there")]
    struct Plan {
        corpus: String,
        said: String,
        found: BTreeMap<String, IgnoredAny>,
        head: BTreeMap<String, IgnoredAny>,
        tasks: Vec<(usize, Range<usize>)>,
    }
    let text = || regular::read(&folder.join(PLAN)).ok();
    folder.join(PARTS).is_dir()
        && text().is_some_and(|text| serde_json::from_slice::<Plan>(&text).is_ok())
}

/// The folders among `files`, the names in a bucket, that these programs made, and what they are; each ends in a slash.
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
    use crate::cluster::plan;
    use crate::corpus::Corpus;
    use crate::testing::Workbench;

    #[test]
    fn a_store_in_a_bucket_is_known_by_both_names() {
        let names = ["a/manifest.json", "a/manifest.sum", "b/manifest.json", "c/x-manifest.json"];
        let files: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        assert_eq!(among(&files), [("a/".to_owned(), "a store")]);
    }

    /// A plan and its parts are words of everybody.
    #[test]
    fn a_folder_of_somebody_elses_plan_and_parts_is_text() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("parts")).unwrap();
        std::fs::write(folder.path().join("plan.json"), "{\"text\": \"to read on\"}").unwrap();
        assert_eq!(kind(folder.path()), None);
        let bench = Workbench::new(3);
        let corpus = Corpus::read(bench.corpus("")).unwrap();
        plan(&corpus, folder.path(), plan::TASK_BYTES).unwrap();
        assert_eq!(kind(folder.path()), Some(KIND_OF_PARTS));
    }
}
