//! Values that each process makes for itself: a forked child has none of the threads that serve its parent's.

use std::process;
use std::sync::{Mutex, PoisonError};

/// A value made at its first use in a process, which lives until the process ends.
pub(crate) struct OncePerProcess<T: 'static>(Mutex<Option<(u32, &'static T)>>);

impl<T> OncePerProcess<T> {
    pub(crate) const fn new() -> Self {
        OncePerProcess(Mutex::new(None))
    }

    /// This process's value, which `make` makes.
    pub(crate) fn get(&self, make: impl FnOnce() -> T) -> &'static T {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match *held {
            Some((process, value)) if process == process::id() => value,
            _ => {
                let value: &'static T = Box::leak(Box::new(make()));
                *held = Some((process::id(), value));
                value
            }
        }
    }
}
