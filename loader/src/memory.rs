//! The memory of batches: callers may supply it, and it is reused.
//!
//! A batch of a million tokens is 13 MB. Fresh from the system, its page faults cost more than the rest of its
//! assembly. So memory returns to its pool when its batch is dropped, on whatever thread, and the pool only holds what
//! was in flight. A trainer supplies memory that its device reads directly, so a batch is written once and never copied
//! on the host.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use contract::{Fault, Result};

/// Buffers that wait in a pool for reuse: more than a prefetcher of sensible depth has in flight.
const WAITING: usize = 64;

/// The columns of a batch, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns<'a> {
    /// Token ids; 0 in padding.
    pub tokens: &'a [i32],
    /// The next token of the same document, in this row or past its end; 0 if there is none.
    pub labels: &'a [i32],
    /// Positions, from 0 at every boundary.
    pub positions: &'a [i32],
    /// 1 where the label counts, 0 at a document's last token and in padding.
    pub mask: &'a [u8],
}

/// The same, writable.
#[derive(Debug)]
pub struct ColumnsMut<'a> {
    /// See [`Columns`].
    pub tokens: &'a mut [i32],
    /// See [`Columns`].
    pub labels: &'a mut [i32],
    /// See [`Columns`].
    pub positions: &'a mut [i32],
    /// See [`Columns`].
    pub mask: &'a mut [u8],
}

/// Memory for one batch. Its initial content does not matter: every value is written.
pub trait BatchMemory: Any + Send + Sync {
    /// Its columns, each of the requested length.
    fn columns(&self) -> Columns<'_>;

    /// The same, writable; waits until nothing reads them any more.
    fn columns_mut(&mut self) -> Result<ColumnsMut<'_>>;
}

/// The memory of a batch, of any type. Cloning copies it to plain memory.
pub(crate) struct AnyBatchMemory(Box<dyn BatchMemory>);

impl AnyBatchMemory {
    /// Takes `memory` for a batch; an error if its columns do not have `tokens` tokens.
    pub(crate) fn new(memory: Box<dyn BatchMemory>, tokens: usize) -> Result<AnyBatchMemory> {
        let Columns { tokens: ids, labels, positions, mask } = memory.columns();
        let lengths = [ids.len(), labels.len(), positions.len(), mask.len()];
        if lengths.iter().any(|length| *length != tokens) {
            let what = format!("columns of {lengths:?} for {tokens} tokens");
            return Err(Fault::bug(format!("memory that does not fit its batch: {what}")));
        }
        Ok(AnyBatchMemory(memory))
    }

    pub(crate) fn columns(&self) -> Columns<'_> {
        self.0.columns()
    }

    pub(crate) fn columns_mut(&mut self) -> Result<ColumnsMut<'_>> {
        self.0.columns_mut()
    }

    /// The memory itself if its type is `M`.
    pub(crate) fn as_mut<M: BatchMemory>(&mut self) -> Option<&mut M> {
        let memory: &mut dyn Any = &mut *self.0;
        memory.downcast_mut()
    }
}

impl Clone for AnyBatchMemory {
    fn clone(&self) -> Self {
        let Columns { tokens, labels, positions, mask } = self.columns();
        let words = [tokens, labels, positions].concat();
        AnyBatchMemory(Box::new(Pooled { words, mask: mask.to_vec(), pool: Arc::default() }))
    }
}

impl PartialEq for AnyBatchMemory {
    fn eq(&self, other: &Self) -> bool {
        self.columns() == other.columns()
    }
}

impl Eq for AnyBatchMemory {}

impl fmt::Debug for AnyBatchMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.columns().fmt(f)
    }
}

/// Plain memory, which returns to its pool when dropped.
struct Pooled {
    /// Tokens, labels and positions, one after the other.
    words: Vec<i32>,
    mask: Vec<u8>,
    pool: Arc<Pool>,
}

/// Plain memory that waits for reuse.
#[derive(Default)]
pub(crate) struct Pool(Mutex<Vec<(Vec<i32>, Vec<u8>)>>);

impl Pool {
    /// Memory for `tokens` tokens.
    pub(crate) fn take(self: &Arc<Self>, tokens: usize) -> Box<dyn BatchMemory> {
        let waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let (mut words, mut mask) = waiting.unwrap_or_default();
        resize(&mut words, 3 * tokens);
        resize(&mut mask, tokens);
        Box::new(Pooled { words, mask, pool: Arc::clone(self) })
    }
}

/// Sets a list's length and keeps what it holds.
fn resize<T: Clone + Default>(values: &mut Vec<T>, length: usize) {
    values.truncate(length);
    values.resize(length, T::default());
}

impl BatchMemory for Pooled {
    fn columns(&self) -> Columns<'_> {
        let (tokens, words) = self.words.split_at(self.mask.len());
        let (labels, positions) = words.split_at(self.mask.len());
        Columns { tokens, labels, positions, mask: &self.mask }
    }

    fn columns_mut(&mut self) -> Result<ColumnsMut<'_>> {
        let (tokens, words) = self.words.split_at_mut(self.mask.len());
        let (labels, positions) = words.split_at_mut(self.mask.len());
        Ok(ColumnsMut { tokens, labels, positions, mask: &mut self.mask })
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let mut waiting = self.pool.0.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() < WAITING {
            waiting.push((std::mem::take(&mut self.words), std::mem::take(&mut self.mask)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back() {
        let pool: Arc<Pool> = Arc::default();
        let mut first = pool.take(1000);
        first.columns_mut().unwrap().mask.fill(7);
        let place = |memory: &dyn BatchMemory| {
            let Columns { tokens, labels, positions, mask } = memory.columns();
            assert!([labels.len(), positions.len(), mask.len()] == [tokens.len(); 3]);
            (tokens.as_ptr(), labels.as_ptr(), positions.as_ptr(), mask.as_ptr())
        };
        let places = place(&*first);
        let second = pool.take(10);
        assert_ne!(place(&*second), places);
        drop(first);
        let third = pool.take(1000);
        assert_eq!((place(&*third), third.columns().tokens.len()), (places, 1000));
        drop((second, third));
        assert_eq!(pool.take(2000).columns().positions.len(), 2000);
        drop((0..100).map(|_| pool.take(1)).collect::<Vec<_>>());
        assert_eq!(pool.0.lock().unwrap().len(), WAITING);
    }

    #[test]
    fn memory_that_does_not_fit_is_refused() {
        let pool: Arc<Pool> = Arc::default();
        assert!(AnyBatchMemory::new(pool.take(3), 4).is_err());
        let held = AnyBatchMemory::new(pool.take(3), 3).unwrap();
        let mut other = held.clone();
        assert_eq!(other, held);
        other.columns_mut().unwrap().labels[2] += 1;
        assert_ne!(other, held, "a copy has memory of its own");
    }
}
