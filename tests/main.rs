//! The integration tests, one file for each thing that could go wrong.
//!
//! They run the real binaries on corpora that they generate in scratch folders, and need no network, no GPU and nothing
//! outside this repository.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

#[cfg(feature = "train")]
mod amd;
mod amend;
#[cfg(feature = "train")]
mod between;
mod bucket;
mod buckets;
#[cfg(feature = "train")]
mod checkpoints;
mod cli;
mod corrupt;
mod determinism;
#[cfg(feature = "train")]
mod device;
#[cfg(feature = "train")]
mod device_check;
mod docs;
mod evaluate;
mod faults;
#[cfg(feature = "train")]
mod faulty;
#[cfg(feature = "train")]
mod fork;
mod golden;
mod inputs;
mod interop;
#[cfg(feature = "train")]
mod learns;
mod linkage;
#[cfg(feature = "train")]
mod losses;
mod manifests;
#[cfg(feature = "train")]
mod memory;
#[cfg(feature = "train")]
mod metrics;
#[cfg(feature = "train")]
mod network;
mod objective;
#[cfg(feature = "train")]
mod options;
#[cfg(feature = "train")]
mod own;
mod package;
mod packed;
#[cfg(feature = "train")]
mod page;
#[cfg(feature = "train")]
mod pages;
mod places;
mod poor;
mod prepare;
#[cfg(feature = "train")]
mod pretended;
mod python;
mod ramps;
#[cfg(feature = "train")]
mod ranks;
#[cfg(feature = "train")]
mod reacting;
#[cfg(feature = "train")]
mod recipes;
mod remote;
mod resume;
#[cfg(feature = "train")]
mod ring;
#[cfg(feature = "train")]
mod sizing;
#[cfg(feature = "train")]
mod speed;
#[cfg(feature = "train")]
mod starts;
#[cfg(feature = "train")]
mod story;
#[cfg(feature = "train")]
mod strangers;
#[cfg(feature = "train")]
mod supervise;
mod tasks;
mod tidy;
#[cfg(feature = "train")]
mod transport;
mod web;
