//! What decides bytes besides inputs and settings: versions of what this crate does, of libraries, of Unicode's tables.
//!
//! What an earlier build made is used again if its cache key is the same. So whatever makes a stage give other output
//! for the same input has a version here, or at its step (`step!`), and two tests hold them: one hashes what every stage
//! and step makes of a generated corpus, the other looks into `Cargo.lock`.

use contract::{Framed, Identity};

/// What is done to a file and to a record, and how often what it gives has changed. A new number here makes every part
/// of earlier builds again.
pub(crate) const STAGES: [(&str, u32); 6] =
    [("arrow", 1), ("jsonl", 1), ("parquet", 1), ("text", 1), ("mapping", 2), ("encode", 1)];

/// Libraries that decide what is read, what text becomes and which tokens come of it, or the bytes of files, by the
/// release that is linked, with those under them. `versions/neutral.txt` has the others, and why.
pub(crate) const LIBRARIES: [(&str, &str); 64] = [
    ("aho-corasick", "1.1.5"),
    ("arrow", "60.1.0"),
    ("arrow-arith", "60.1.0"),
    ("arrow-array", "60.1.0"),
    ("arrow-buffer", "60.1.0"),
    ("arrow-cast", "60.1.0"),
    ("arrow-cmp", "60.1.0"),
    ("arrow-data", "60.1.0"),
    ("arrow-ipc", "60.1.0"),
    ("arrow-ord", "60.1.0"),
    ("arrow-row", "60.1.0"),
    ("arrow-schema", "60.1.0"),
    ("arrow-select", "60.1.0"),
    ("arrow-string", "60.1.0"),
    ("atoi", "3.1.1"),
    ("brotli", "9.1.1"),
    ("brotli-decompressor", "6.2.0"),
    ("chrono", "0.4.45"),
    ("daachorse", "1.0.1"),
    ("daachorse", "3.0.3"),
    ("fancy-regex", "0.17.0"),
    ("fastokens", "0.3.5"),
    ("flate2", "1.1.10"),
    ("icu_collections", "2.4.0"),
    ("icu_normalizer", "2.4.0"),
    ("icu_normalizer_data", "2.4.0"),
    ("icu_properties", "2.4.0"),
    ("icu_properties_data", "2.4.0"),
    ("itoa", "1.0.18"),
    ("lexical-core", "1.0.6"),
    ("lexical-parse-float", "1.0.6"),
    ("lexical-parse-integer", "1.0.6"),
    ("lexical-util", "1.0.7"),
    ("lexical-write-float", "1.0.6"),
    ("lexical-write-integer", "1.0.6"),
    ("lz4_flex", "0.14.0"),
    ("miniz_oxide", "0.9.1"),
    ("num-bigint", "0.5.1"),
    ("onig", "6.5.3"),
    ("onig_sys", "69.9.3"),
    ("parquet", "60.1.0"),
    ("pcre2", "0.2.11"),
    ("pcre2-sys", "0.2.10"),
    ("regex", "1.13.1"),
    ("regex-automata", "0.4.18"),
    ("regex-syntax", "0.8.11"),
    ("ryu", "1.0.23"),
    ("serde_json", "1.0.154"),
    ("simdutf8", "0.1.5"),
    ("snap", "1.1.2"),
    ("sonic-number", "0.1.3"),
    ("sonic-rs", "0.5.10"),
    ("spm_precompiled", "0.1.4"),
    ("suffix", "1.3.0"),
    ("tokenizers", "0.23.2"),
    ("unicode-normalization", "0.1.26"),
    ("unicode-normalization-alignments", "0.1.12"),
    ("unicode-segmentation", "1.13.3"),
    ("unicode_categories", "0.1.1"),
    ("zlib-rs", "0.6.8"),
    ("zmij", "1.0.23"),
    ("zstd", "0.14.3"),
    ("zstd-safe", "8.2.0"),
    ("zstd-sys", "2.1.2+zstd.1.5.7"),
];

/// All of them as one, with Unicode's tables of the compiler's library and of the normal forms.
pub(crate) fn identity() -> Identity {
    let mut framed = Framed::new("zdata versions", 1);
    framed.count(STAGES.len());
    for (stage, version) in STAGES {
        framed.field(stage).field(&version);
    }
    framed.count(LIBRARIES.len());
    for (library, release) in LIBRARIES {
        framed.field(library).field(release);
    }
    for (major, minor, patch) in [char::UNICODE_VERSION, unicode_normalization::UNICODE_VERSION] {
        framed.field(&u64::from(major)).field(&u64::from(minor)).field(&u64::from(patch));
    }
    framed.finish()
}

#[cfg(test)]
mod tests;
