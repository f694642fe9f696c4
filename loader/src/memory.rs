//! The memory in which batches lie: whoever wants a batch may bring it, and it is used again.
//!
//! A batch of a million tokens is 13 MB. Fresh from the system it costs more in page faults than all the rest of its
//! assembly; so memory goes back to where it came from when its batch is dropped, on whatever thread that happens, and
//! there is as much as is in flight. Who feeds a device brings memory that the device reads by itself, so that a batch is
//! written once and copied by nobody.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use contract::{Fault, Result};

/// Batches whose memory waits to be used again, per pool: more than a prefetcher of sensible depth ever has in flight.
const WAITING: usize = 64;

/// The columns of a batch, row after row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Columns<'a> {
    /// Token ids; 0 in padding.
    pub tokens: &'a [i32],
    /// The token that follows each one in its document, be it in this row or past its end; 0 where there is none.
    pub labels: &'a [i32],
    /// Positions, from 0 at every boundary.
    pub positions: &'a [i32],
    /// 1 where the label counts, 0 at a document's last token and in padding.
    pub mask: &'a [u8],
}

/// The same, to be written.
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

/// Memory for one batch. What it holds at first is of no account: every value is written.
pub trait Memory: Any + Send + Sync {
    /// Its columns, each as long as it was asked for.
    fn columns(&self) -> Columns<'_>;

    /// The same, to be written; where something still reads them, once that is done.
    fn columns_mut(&mut self) -> Result<ColumnsMut<'_>>;
}

/// The memory that a batch has, whatever it is. A copy of it is plain memory of its own.
pub(crate) struct Held(Box<dyn Memory>);

impl Held {
    /// Memory for `tokens` tokens, if that is what `memory` is.
    pub(crate) fn new(memory: Box<dyn Memory>, tokens: usize) -> Result<Held> {
        let Columns { tokens: ids, labels, positions, mask } = memory.columns();
        let lengths = [ids.len(), labels.len(), positions.len(), mask.len()];
        if lengths.iter().any(|length| *length != tokens) {
            let what = format!("columns of {lengths:?} for {tokens} tokens");
            return Err(Fault::bug(format!("memory that does not fit its batch: {what}")));
        }
        Ok(Held(memory))
    }

    pub(crate) fn columns(&self) -> Columns<'_> {
        self.0.columns()
    }

    pub(crate) fn columns_mut(&mut self) -> Result<ColumnsMut<'_>> {
        self.0.columns_mut()
    }

    /// The memory itself, where it is an `M`.
    pub(crate) fn as_mut<M: Memory>(&mut self) -> Option<&mut M> {
        let memory: &mut dyn Any = &mut *self.0;
        memory.downcast_mut()
    }
}

impl Clone for Held {
    fn clone(&self) -> Self {
        let Columns { tokens, labels, positions, mask } = self.columns();
        let words = [tokens, labels, positions].concat();
        Held(Box::new(Pooled { words, mask: mask.to_vec(), pool: Arc::default() }))
    }
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        self.columns() == other.columns()
    }
}

impl Eq for Held {}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.columns().fmt(f)
    }
}

/// Plain memory, which comes back.
struct Pooled {
    /// Tokens, labels and positions, one after the other.
    words: Vec<i32>,
    mask: Vec<u8>,
    pool: Arc<Pool>,
}

/// Where plain memory waits.
#[derive(Default)]
pub(crate) struct Pool(Mutex<Vec<(Vec<i32>, Vec<u8>)>>);

impl Pool {
    /// Memory for `tokens` tokens.
    pub(crate) fn take(self: &Arc<Self>, tokens: usize) -> Box<dyn Memory> {
        let waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let (mut words, mut mask) = waiting.unwrap_or_default();
        resize(&mut words, 3 * tokens);
        resize(&mut mask, tokens);
        Box::new(Pooled { words, mask, pool: Arc::clone(self) })
    }
}

/// Makes a list so long; what it holds stays as it is.
fn resize<T: Clone + Default>(values: &mut Vec<T>, length: usize) {
    values.truncate(length);
    values.resize(length, T::default());
}

impl Memory for Pooled {
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
        let place = |memory: &dyn Memory| {
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
        assert!(Held::new(pool.take(3), 4).is_err());
        let held = Held::new(pool.take(3), 3).unwrap();
        let mut other = held.clone();
        assert_eq!(other, held);
        other.columns_mut().unwrap().labels[2] += 1;
        assert_ne!(other, held, "a copy has memory of its own");
    }
}
