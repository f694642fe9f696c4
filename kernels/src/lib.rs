//! All unsafe and foreign code: libtorch's switches and devices, the fixed tree of additions, checksums.
//!
//! ```text
//! runtime   determinism switches, set and read back; the kernel table
//! shim      results of C++ shim calls; thread  a computing thread
//! layout    sizes, dtypes and addresses of operands, and memory for results, at little cost to the host
//! levels    levels of determinism verified with each kernel table
//! device    CPU, or a GPU whose library is opened at run time; staging of batches
//! group     ranks that exchange bytes, with deadlines; between GPUs by RCCL or NCCL, opened at run time
//! memory    counts bytes of live tensors
//! probe     digest of the mathematics library's results
//! profile   what ran between two moments, by libtorch's profiler
//! product   matmuls, by the library that has the better kernels here
//! record    numbers that stay on their device until the host reads them, all at once
//! tree      the one order in which leaves are added
//! addend    an operand of the tree for a parameter: an unconverted gradient, or a sum
//! shapes    computes with shapes alone, to count operations and bytes
//! ops       the table of operations: kernels for the CPU, and the reference in libtorch
//! checksum  order-free sums over bits, for any layout; sums  their arithmetic
//! share     tensors read by several threads at once
//! signals   keeps signals that stop a program until it handles them
//! want      lack of memory in foreign code; for our own code see the crate `allocator`
//! ```
//!
//! Invariant: this crate depends on no other member of the workspace, and no other member uses `unsafe`. Invariant:
//! nothing here knows models, batches or steps.

pub mod addend;
mod ahead;
pub mod checksum;
pub mod device;
pub mod error;
pub mod group;
#[cfg(feature = "hip")]
pub mod hip;
pub mod layout;
pub mod levels;
pub mod memory;
pub mod ops;
mod probe;
pub mod product;
pub mod profile;
pub mod record;
pub mod runtime;
pub mod shapes;
pub mod share;
mod shim;
pub mod signals;
mod sums;
mod thread;
pub mod tree;
pub mod want;

pub use error::{Error, Result};
