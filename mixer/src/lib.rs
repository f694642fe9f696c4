//! Curriculum to plan: which text is sample number i. Everything here is arithmetic with inverses.
//!
//! Invariant: no I/O, no threads, no clock, no floats.

#![forbid(unsafe_code)]

pub mod sample;

pub use sample::{SampleSpec, Segment, SourceFacts, StepSpec};
