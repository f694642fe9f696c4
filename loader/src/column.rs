//! The memory of batches, used again.
//!
//! A batch of a million tokens is 13 MB. Fresh from the system it costs more in page faults than all the rest of its
//! assembly; so a column goes back to its pool when its batch is dropped, on whatever thread that happens, and
//! memory stays at what is in flight.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Columns that wait to be used again, per pool: more than a prefetcher of sensible depth ever has in flight.
const WAITING: usize = 64;

/// One column of a batch: derefs to a slice.
pub struct Column<T> {
    values: Vec<T>,
    pool: Arc<BufferPool<T>>,
}

/// Where columns wait.
pub(crate) struct BufferPool<T>(Mutex<Vec<Vec<T>>>);

impl<T> Default for BufferPool<T> {
    fn default() -> Self {
        BufferPool(Mutex::new(Vec::new()))
    }
}

impl<T: Copy + Default> BufferPool<T> {
    /// A column of `size` values, whatever they are: the caller writes every one.
    pub(crate) fn take(self: &Arc<Self>, size: usize) -> Column<T> {
        let waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut values = waiting.unwrap_or_default();
        values.truncate(size);
        values.resize(size, T::default());
        Column { values, pool: Arc::clone(self) }
    }
}

impl<T> Drop for Column<T> {
    fn drop(&mut self) {
        let mut waiting = self.pool.0.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() < WAITING {
            waiting.push(std::mem::take(&mut self.values));
        }
    }
}

impl<T> Deref for Column<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values
    }
}

impl<T> DerefMut for Column<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values
    }
}

impl<T: Clone> Clone for Column<T> {
    fn clone(&self) -> Self {
        Column { values: self.values.clone(), pool: Arc::clone(&self.pool) }
    }
}

impl<T: PartialEq> PartialEq for Column<T> {
    fn eq(&self, other: &Self) -> bool {
        self.values == other.values
    }
}

impl<T: Eq> Eq for Column<T> {}

impl<T: std::fmt::Debug> std::fmt::Debug for Column<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.values.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back() {
        let pool: Arc<BufferPool<u8>> = Arc::default();
        let mut first = pool.take(1000);
        first.fill(7);
        let place = first.as_ptr();
        let second = pool.take(10);
        assert_ne!(second.as_ptr(), place);
        drop(first);
        let third = pool.take(1000);
        assert_eq!((third.as_ptr(), third.len()), (place, 1000));
        drop((second, third));
        assert_eq!(pool.take(2000).len(), 2000);
        drop((0..100).map(|_| pool.take(1)).collect::<Vec<_>>());
        assert_eq!(pool.0.lock().unwrap().len(), WAITING);
    }
}
