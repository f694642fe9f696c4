//! What decides bytes besides inputs and settings: versions of what this crate does, of libraries, of Unicode's tables.
//!
//! What an earlier build made is used again if its cache key is the same. So whatever makes a stage give other output
//! for the same input has a version here, or at its step (`step!`), and two tests hold them: one hashes what every stage
//! and step makes of a generated corpus, the other looks which libraries `Cargo.lock` has.

use contract::{Framed, Identity};

/// What is done to a file and to a record, and how often what it gives has changed. A new number here makes every part
/// of earlier builds again.
pub(crate) const STAGES: [(&str, u32); 6] =
    [("arrow", 2), ("jsonl", 2), ("parquet", 2), ("text", 1), ("mapping", 3), ("encode", 2)];

/// Libraries that decide what is read, what text becomes and which tokens come of it, or the bytes of files, with those under
/// them. `versions/neutral.txt` has the others, and why.
const LIBRARIES: &str = "\
    aho-corasick arrow arrow-arith arrow-array arrow-buffer arrow-cast arrow-cmp arrow-data arrow-ipc arrow-ord \
    arrow-row arrow-schema arrow-select arrow-string atoi brotli brotli-decompressor chrono daachorse fancy-regex \
    fastokens flate2 icu_collections icu_normalizer icu_normalizer_data icu_properties icu_properties_data itoa \
    lexical-core lexical-parse-float lexical-parse-integer lexical-util lexical-write-float lexical-write-integer \
    lz4_flex minijinja minijinja-contrib miniz_oxide num-bigint onig onig_sys parquet pcre2 pcre2-sys regex \
    regex-automata regex-syntax ryu serde_json simdutf8 snap sonic-number sonic-rs spm_precompiled suffix \
    tokenizers unicode-normalization unicode-normalization-alignments unicode-segmentation unicode_categories \
    zlib-rs zmij zstd/0.14.3 zstd-safe/8.2.0 zstd-sys";

/// These libraries, each by the release that `Cargo.lock` names: every one of a name, unless the list says which is linked.
fn libraries() -> Vec<(&'static str, &'static str)> {
    let package = |text: &'static str| {
        let mut lines = text.lines();
        let mut value = |key| lines.find_map(|line| line.strip_prefix(key)?.strip_suffix('"'));
        let (name, release) = (value("name = \"")?, value("version = \"")?);
        let is_it = |known: &str| match known.split_once('/') {
            Some((known, only)) => (known, only) == (name, release),
            None => known == name,
        };
        LIBRARIES.split(' ').any(is_it).then_some((name, release))
    };
    include_str!("../../Cargo.lock").split("[[package]]").filter_map(package).collect()
}

/// All of them as one, with Unicode's tables of the compiler's library and of the normal forms.
pub(crate) fn identity() -> Identity {
    let mut framed = Framed::new("zdata versions", 1);
    framed.count(STAGES.len());
    for (stage, version) in STAGES {
        framed.field(stage).field(&version);
    }
    let libraries = libraries();
    framed.count(libraries.len());
    for (library, release) in libraries {
        framed.field(library).field(release);
    }
    for (major, minor, patch) in [char::UNICODE_VERSION, unicode_normalization::UNICODE_VERSION] {
        framed.field(&u64::from(major)).field(&u64::from(minor)).field(&u64::from(patch));
    }
    framed.finish()
}

#[cfg(test)]
mod tests;
