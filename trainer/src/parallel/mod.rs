//! Many ranks, one ledger: leaves are computed anywhere, added in the one order, and each weight is moved by its owner.
//!
//! ```text
//! leaves v of rank r --own subtrees--> blocks --of a machine--> each piece's owner --> G, by the same tree whoever adds
//! owner: checksums and chunk squares of G --to all--> the same norm --> update --new weights--> all
//! ```
//!
//! - [`shard`] is the part of the state that a rank holds; [`step`] is one step; [`restore`] reads a rank's part of a
//!   checkpoint; [`run`] is the loop: rank 0 alone writes to the run's folder.

pub mod restore;
pub mod run;
pub mod shard;
pub mod step;

pub use run::train_as;
