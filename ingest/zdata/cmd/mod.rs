//! One file per command: its arguments and what it does.

pub(crate) mod amend;
pub(crate) mod batch;
mod beside;
pub(crate) mod build;
pub(crate) mod completions;
pub(crate) mod digest;
pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod init;
pub(crate) mod inspect;
pub(crate) mod output;
pub(crate) mod plan;
pub(crate) mod publish;
mod reaction;
mod recorded;
pub(crate) mod schema;
pub(crate) mod shuffle_test;
pub(crate) mod task;
pub(crate) mod tokenizer;
pub(crate) mod verify;
pub(crate) mod verify_run;
pub(crate) mod whereabouts;

use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
use ingest::WORKERS_MAX;
use ingest::progress::meanwhile;
use loader::OpenedCurriculum;
use store::Location;

/// Reads a place: a path or a URL.
pub(crate) fn place() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text| storage::locate_argument(&text))
}

/// Reads a place at which something is created.
pub(crate) fn output_place() -> impl TypedValueParser<Value = Location> {
    OsStringValueParser::new().try_map(|text| storage::locate_output(&text))
}

/// Reads a path of this machine; `otherwise` says what to do with what lies elsewhere.
pub(crate) fn local(otherwise: &'static str) -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(move |text| storage::local_argument(&text, otherwise))
}

/// Opens what a curriculum trains on. Documents that are packed for the first time can take long.
pub(crate) fn opened(curriculum: &Location) -> contract::Result<OpenedCurriculum> {
    meanwhile("plan", "opening stores and packing documents", || OpenedCurriculum::open(curriculum))
}

/// Reads a number of threads.
pub(crate) fn workers(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=WORKERS_MAX) => Ok(count),
        _ => Err(format!("wanted a whole number from 1 to {WORKERS_MAX}")),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_number_of_workers_reaches_the_machine_unchecked() {
        assert_eq!(super::workers("1"), Ok(1));
        assert_eq!(super::workers("1024"), Ok(1024));
        for wrong in ["0", "1025", "1000000", "99999999999999999999", "-1", "two", ""] {
            assert!(super::workers(wrong).unwrap_err().contains("1 to 1024"), "{wrong}");
        }
    }
}
