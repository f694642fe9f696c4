//! Curriculum to plan: which text sample number `i` shows. Everything is arithmetic that can be inverted.
//!
//! ```text
//! step -> samples -> phase -> source, ordinal -> epoch, group, window -> tokens       Plan::step, Plan::sample
//!                                                 tokens -> every (sample, offset)    Plan::visits
//! ```
//!
//! - [`curriculum`]: parses the file, reports mistakes with their place, writes canonical text, compares edits.
//! - [`mixing`]: which source sample `j` of a phase comes from: exact at every prefix, in O(depth).
//! - [`order`]: the order in which a source is read, across phases and sequence lengths.
//! - [`plan`]: the two together.
//!
//! Invariant: no I/O, no threads, no clock, and no float affects which text is read, except a loss of a ledger in a mix
//! that reacts: it is rounded to an integer first ([`WindowLosses`]).
//! Invariant: the size of a plan grows with phases x sources, never with tokens, samples or steps.
//!
//! An amendment of a mix at step S cuts a phase into two segments, and so does a change of the batch. Only an
//! [`order::Cursor`] is passed from the first to the second, and the place in the mix where only the batch changes.
//! A banned document keeps its position; only its text is hidden in samples from S on.
//!
//! A source with packed documents permutes packs instead of windows, so a sample has several [`Span`]s. The content of
//! packs is in a table next to the store ([`PackTable`]), made by [`fit`]. A ramp of weights has no other clock: it
//! is another closed form of the same queries ([`mixing::Mixing`]: pick, count, nth).
//! A mix that reacts to the loss is constant in each window of steps; a plan has the windows whose weights are known
//! ([`DataPlan::fixed_until`]), and losses extend it ([`DataPlan::extended`]).

#![forbid(unsafe_code)]

mod banning;
mod bans;
mod composition;
mod constant;
mod dealing;
mod digest;
pub mod fit;
mod limits;
pub mod mixing;
mod objective;
pub mod order;
mod packing;
pub mod packs;
pub mod plan;
mod planning;
mod ramp;
mod reaction;
mod remainder;
pub mod sample;
mod segment;
pub mod shuffle_test;
mod stub;
mod visits;
mod windows;

pub use bans::Ban;
pub use composition::Composition;
pub use curriculum::{Curriculum, CurriculumDifference, Mix, MixWeights, RemainderRule};
pub use digest::{PLAN_VERSION, check_version};
pub use objective::Objective;
pub use packs::{PackPlace, PackTable, PackedLength};
pub use plan::{DataPlan, PackTables, PhasePlan, SourceState, SourceUse};
pub use reaction::{MixWindow, SourceLossSum, WindowLosses};
pub use sample::{SampleSpec, SourceFacts, Span, StepSpec, unknown};
pub use stub::store_stub;
pub use visits::Visit;
