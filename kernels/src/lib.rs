//! All that is unsafe or foreign: libtorch's switches and devices, the fixed tree of additions, checksums.
//!
//! ```text
//! runtime   determinism switches, set and read back; the kernel table
//! shim      how calls of the C++ shim end; thread  one that computes
//! levels    which levels of determinism have been shown under which kernel table
//! device    CPU, or a GPU whose library is opened at run time; staging of batches
//! group     ranks that exchange bytes, with deadlines; between GPUs by RCCL or NCCL, opened at run time
//! memory    bytes of tensors that are alive, counted
//! probe     what the mathematics library answers
//! profile   what ran between two moments, by libtorch's profiler
//! product   matrix products, by the library that has the better kernels here
//! record    numbers that stay where they are until the host reads them, all at once
//! tree      the one order in which leaves are added
//! addend    what is added in a tree for a parameter: a gradient as it was made, or a sum
//! ops       the table of operations: kernels for the CPU, and the reference in libtorch
//! checksum  order-free sums over bits, for any layout; sums  their arithmetic
//! share     tensors read by several threads at once
//! signals   those that ask a program to stop, kept until it listens
//! want      want of memory in foreign code; in ours it is met in `allocator`, beside this crate
//! ```
//!
//! Invariant: this crate depends on no other member of the workspace, and no other member says `unsafe`.
//! Invariant: nothing here knows what a model, a batch or a step is.

pub mod addend;
mod ahead;
pub mod checksum;
pub mod device;
pub mod error;
pub mod group;
#[cfg(feature = "hip")]
pub mod hip;
pub mod levels;
pub mod memory;
pub mod ops;
mod probe;
pub mod product;
pub mod profile;
pub mod record;
pub mod runtime;
pub mod share;
mod shim;
pub mod signals;
mod sums;
mod thread;
pub mod tree;
pub mod want;

pub use error::{Error, Result};
