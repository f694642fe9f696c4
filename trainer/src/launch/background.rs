//! Threads that nobody waits for.

use std::thread;

use contract::{Fault, Result};

/// Does something on a thread that nobody waits for.
pub(super) fn in_background(work: impl FnOnce() + Send + 'static) -> Result<()> {
    thread::Builder::new().spawn(work).map(drop).map_err(|error| {
        Fault::machine(format!("cannot start a thread: {error}")).hint("raise `ulimit -u`")
    })
}
