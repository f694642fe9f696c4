//! Curriculum to plan: which text is sample number `i`. Everything here is arithmetic with inverses.
//!
//! ```text
//! step -> samples -> phase -> source, ordinal -> epoch, group, window -> tokens       Plan::step, Plan::sample
//!                                                 tokens -> every (sample, offset)    Plan::visits
//! ```
//!
//! - [`curriculum`]: the file, read with a place for every mistake; its canonical text; what an edit changes.
//! - [`mixing`]: which source sample `j` of a phase comes from: exact at every prefix, in O(depth).
//! - [`order`]: the order in which a source is gone through, across phases and lengths.
//! - [`plan`]: the two together.
//!
//! Invariant: no I/O, no threads, no clock, and no float decides which text is read.
//! Invariant: what a plan holds grows with phases x sources, never with tokens, samples or steps.
//!
//! An amendment of a mix from step S cuts a phase into two segments at S, and an [`order::Cursor`] is all that the second
//! knows of the first; a banned document keeps its place, and only its text is gone from samples from S on.
//!
//! A source whose documents are packed permutes packs where others permute windows, which is why a sample has several
//! [`Span`]s; what a pack holds is a table beside the store ([`PackTable`]), made by [`fit`]. Ramps will fit without another
//! clock: a ramp of weights or batch gives a phase other closed forms of the same four questions ([`mixing::Mixing`]: pick,
//! count, nth; [`Plan::step`]).

#![forbid(unsafe_code)]

mod banning;
mod bans;
mod described;
mod digest;
pub mod fit;
mod limits;
mod makeup;
pub mod mixing;
pub mod order;
mod packing;
pub mod packs;
pub mod plan;
mod planning;
mod remainder;
pub mod sample;
mod segment;
mod visits;

pub use bans::Ban;
pub use curriculum::{Curriculum, Difference, RemainderRule};
pub use described::described_store;
pub use digest::{PLAN_VERSION, check_version};
pub use makeup::Makeup;
pub use packs::{PackPlace, PackTable, PackedLength};
pub use plan::{PackTables, PhasePlan, Plan, SourceUse, Standing};
pub use sample::{SampleSpec, SourceFacts, Span, StepSpec, unknown};
pub use visits::Visit;
