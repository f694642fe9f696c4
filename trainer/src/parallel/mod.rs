//! Many ranks, one ledger: leaves are computed anywhere, added in the one order, and each weight is moved by its owner.
//!
//! ```text
//! leaves v of rank r --own subtrees--> blocks --of a machine--> each piece's owner --> G, by the same tree whoever adds
//! owner: checksums and chunk squares of G --to all--> the same norm --> update --new weights--> all
//! ```
//!
//! - [`launch`] finds a rank's place in what torchrun, srun, mpirun or `--nproc` left in the environment.
//! - [`team`] says who computes which leaves and who shares a machine; [`owners`] says who owns what; [`shard`] is the part
//!   of the state that a rank holds; [`step`] is one step, `gather` its sum; [`restore`] reads a rank's part of a checkpoint.
//! - [`run`] is the loop: rank 0 alone writes to the run's folder. [`mod@bench`] times the exchanges.
//!
//! Invariant: collectives only move bytes. Every addition happens on one rank, in the order of the tree, so that the
//! number of ranks is no argument of any bit.

pub mod bench;
mod gather;
pub mod launch;
pub mod owners;
pub mod restore;
pub mod run;
pub mod shard;
pub mod step;
pub mod team;
pub(crate) mod words;

use contract::Fault;

pub use run::train_as;
pub use team::{Schedule, Team};

/// What cannot be reached is the machine's fault; the run itself is well.
pub fn lost(error: kernels::Error) -> Fault {
    let again =
        "run the same command again, with as many ranks as you like: it goes on where it stopped";
    match error {
        kernels::Error::Missing { what } => Fault::machine(what).hint(again),
        kernels::Error::Reported { what } => {
            Fault::machine("another rank stopped the run").found(what).hint(again)
        }
        other => Fault::machine(other.to_string()),
    }
}
