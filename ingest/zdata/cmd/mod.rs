//! One file per command: its arguments and what it does.

pub(crate) mod amend;
pub(crate) mod batch;
pub(crate) mod build;
pub(crate) mod digest;
pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod init;
pub(crate) mod inspect;
pub(crate) mod output;
pub(crate) mod plan;
pub(crate) mod publish;
pub(crate) mod task;
pub(crate) mod tokenizer;
pub(crate) mod verify;
pub(crate) mod verify_run;
pub(crate) mod whereabouts;
