//! `zdata._zdata`: stores, plans and batches for the Python package in `zdata/`, which documents and types them.
//!
//! Invariant: importing it starts no thread and takes no lock; reading gives up Python's global lock.

#![forbid(unsafe_code)]

// A test program, which `cargo test --all-targets` links of every library, has no Python: it is empty.
#[cfg(not(test))]
mod array;
#[cfg(not(test))]
mod batch;
#[cfg(not(test))]
mod curriculum;
#[cfg(not(test))]
mod error;
#[cfg(not(test))]
mod process;
#[cfg(not(test))]
mod store;

/// The compiled half of the package.
#[cfg(not(test))]
#[pyo3::pymodule]
mod _zdata {
    use std::ffi::OsString;
    use std::path::PathBuf;
    use std::str::FromStr as _;

    use contract::{Digest, Fault};
    use pyo3::prelude::*;

    use super::error::Outcome;

    #[pymodule_export]
    use super::array::Array;
    #[pymodule_export]
    use super::batch::Batch;
    #[pymodule_export]
    use super::curriculum::{BatchesAhead, Curriculum};
    #[pymodule_export]
    use super::store::Store;

    /// Runs the command line `zdata`; returns its exit code. `program` starts the jobs of a cluster.
    #[pyfunction]
    fn main(py: Python<'_>, program: PathBuf, args: Vec<OsString>) -> u8 {
        py.detach(|| zdata_cli::main(program, args))
    }

    /// The digest of a step from the digests of its sequences, in order.
    #[pyfunction]
    fn step_digest(sequences: Vec<String>) -> Outcome<String> {
        let parsed = sequences.iter().map(|text| {
            let wrong = |why| Fault::usage("this is not a digest").found(text).wanted(why);
            Digest::from_str(text).map_err(wrong)
        });
        let sequences: Vec<Digest> = parsed.collect::<Result<_, _>>()?;
        Ok(loader::step_digest([sequences.as_slice()]).to_string())
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("THREADS_MAX", super::curriculum::THREADS_MAX)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
