//! What belongs to one process.
//!
//! `fork` copies memory but no threads: a lock that another thread held stays locked, and a pool has no workers. So a
//! child opens its own, and drops nothing of its parent's.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};

use contract::Result;
use pyo3::prelude::*;

use crate::error::Outcome;

/// A value that only the process that made it drops.
pub(crate) struct Owned<T> {
    process: u32,
    value: ManuallyDrop<Option<T>>,
}

impl<T> Owned<T> {
    pub(crate) fn new(value: T) -> Self {
        Owned { process: process::id(), value: ManuallyDrop::new(Some(value)) }
    }

    /// The value, unless a parent process made it.
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.as_ref().filter(|_| self.process == process::id())
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.process == process::id() {
            drop(self.value.take());
        }
    }
}

/// The function that opens a value.
type Opener<T> = Box<dyn Fn() -> Result<T> + Send + Sync>;

/// A value that each process opens by itself.
pub(crate) struct PerProcess<T> {
    open: Opener<T>,
    /// Locked only by a thread that holds Python's global lock and does not give it up: never while Python forks.
    held: Mutex<Arc<Owned<T>>>,
}

impl<T: Send + Sync> PerProcess<T> {
    /// Opens the value for this process.
    pub(crate) fn open(
        py: Python<'_>,
        open: impl Fn() -> Result<T> + Send + Sync + 'static,
    ) -> Outcome<Self> {
        let value = py.detach(&open)?;
        let held = Mutex::new(Arc::new(Owned::new(value)));
        Ok(PerProcess { open: Box::new(open), held })
    }

    /// This process's value.
    pub(crate) fn get(&self, py: Python<'_>) -> Outcome<Mine<T>> {
        let lock = || self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let held = Arc::clone(&lock());
        if held.get().is_some() {
            return Ok(Mine(held));
        }
        let own = Arc::new(Owned::new(py.detach(&self.open)?));
        *lock() = Arc::clone(&own);
        Ok(Mine(own))
    }
}

/// A shared value of this process.
pub(crate) struct Mine<T>(Arc<Owned<T>>);

impl<T> Clone for Mine<T> {
    fn clone(&self) -> Self {
        Mine(Arc::clone(&self.0))
    }
}

impl<T> Deref for Mine<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.value.as_ref().expect("taken only by `drop`")
    }
}
