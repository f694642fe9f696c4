//! Turns (plan, step, rank slice) into a batch, and prefetches batches for a device.
//!
//! ```text
//! Plan --step--> SampleSpec* --Stores--> rows: tokens, labels, positions, boundaries, mask --> digest
//! ```
//!
//! Invariant: a batch is a function of the plan, the store's content, the step and the rank slice. Threads, prefetch
//! depth, open files, shard boundaries and earlier reads affect only speed.
//! Invariant: boundaries come from the store's document starts, never from a token's value.
//! Invariant: all threads of the data path start in `prefetch.rs`.

#![forbid(unsafe_code)]

pub mod assemble;
pub mod batch;
mod buckets;
pub mod explain;
mod growing;
mod infill;
mod labels;
pub mod memory;
mod objective;
pub mod open;
mod packs;
pub mod prefetch;
pub mod recorded;
mod sealed;
mod selection;
pub mod slice;
pub mod stores;
pub mod stream;
pub mod validation;

pub use batch::{Batch, RowLabels, StepSummary, batch, batch_in, rows, step_digest};
pub use growing::{GrowingPlan, PlanFeed};
pub use infill::{Infill, InfillMode, InfillToken};
pub use labels::{hidden_by, steps_without_labels, without_labels};
pub use memory::{BatchMemory, Columns, ColumnsMut};
pub use open::OpenedCurriculum;
pub use prefetch::{PrefetchOptions, PrefetchSource, Prefetcher};
pub use slice::RankSlice;
pub use stores::Stores;
pub use stream::SourceStream;
