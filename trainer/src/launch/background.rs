//! Detached threads.

use std::thread;

use contract::{Fault, Result};

/// Runs `work` on a detached thread.
pub(super) fn in_background(work: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = thread::Builder::new().spawn(work);
    started.map(drop).map_err(|error| Fault::not_started("a thread", &error))
}
