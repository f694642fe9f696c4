//! Tests of the whole trainer on a generated store and a tiny model; each file covers one thing that could go wrong.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod amended;
mod bf16;
mod context;
mod crashes;
mod culprits;
mod cuts;
mod damage;
mod evaluate;
mod explain;
mod folded;
#[path = "../../../tests/support/folder.rs"]
mod folder;
mod fork;
mod groups;
mod guard;
mod hf;
mod hits;
mod kinds;
mod machine;
mod objective;
mod plan;
mod ranks;
mod reacting;
mod refuse;
mod replays;
mod report;
mod same_bits;
mod sizing;
mod sums;
mod support;
mod verdicts;
mod watch;
