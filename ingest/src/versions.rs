//! What affects bytes besides inputs and settings: versions of this crate's stages, of libraries, of Unicode tables.
//!
//! The results of an earlier build are reused if the cache key is the same. So everything that changes a stage's output
//! for the same input has a version here, or at its step (`step!`). Two tests enforce this: one hashes the output of
//! every stage and step for a generated corpus, the other checks the libraries in `Cargo.lock`.

use contract::{Framed, Identity};

/// The processing of files and records, with the number of times that its output has changed. A new number invalidates
/// all parts of earlier builds.
pub(crate) const STAGES: [(&str, u32); 6] =
    [("arrow", 2), ("jsonl", 3), ("parquet", 2), ("text", 1), ("mapping", 3), ("encode", 2)];

/// Libraries that affect what is read, the text, its tokens or the bytes of files, with their dependencies. The others,
/// with reasons, are in `versions/neutral.txt`.
const LIBRARIES: &str = "\
    aho-corasick arrow arrow-arith arrow-array arrow-buffer arrow-cast arrow-cmp arrow-data arrow-ipc arrow-ord \
    arrow-row arrow-schema arrow-select arrow-string atoi brotli brotli-decompressor chrono daachorse fancy-regex \
    fastokens flate2 icu_collections icu_normalizer icu_normalizer_data icu_properties icu_properties_data itoa \
    lexical-core lexical-parse-float lexical-parse-integer lexical-util lexical-write-float lexical-write-integer \
    lz4_flex minijinja minijinja-contrib miniz_oxide num-bigint onig onig_sys parquet pcre2 pcre2-sys regex \
    regex-automata regex-syntax ryu serde_json simdutf8 snap sonic-number sonic-rs spm_precompiled suffix \
    tokenizers unicode-normalization unicode-normalization-alignments unicode-segmentation unicode_categories \
    zlib-rs zmij zstd/0.14.3 zstd-safe/8.2.0 zstd-sys";

/// These libraries with their releases in `Cargo.lock`: all releases of a name, unless the list says which one is
/// linked.
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

/// The identity of all of them, with the Unicode tables of the standard library and of the normal forms.
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
