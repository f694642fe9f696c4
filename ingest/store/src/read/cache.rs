//! An LRU cache, so that ten thousand shards need neither ten thousand open files nor the memory of ten thousand
//! indexes.

use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lru::LruCache;

/// The key of an entry: the number of a stream, and one of its shards.
pub(super) type Slot = (u64, usize);

/// A map bounded by the weight of its values. Values are shared handles: an evicted one lives until its last user drops
/// it.
pub(super) struct Lru<V, K: Hash + Eq = Slot> {
    limit: u64,
    inner: Mutex<Inner<V, K>>,
}

struct Inner<V, K: Hash + Eq> {
    weight: u64,
    entries: LruCache<K, (u64, V)>,
}

impl<V: Clone, K: Hash + Eq> Lru<V, K> {
    /// An empty map whose values may weigh `limit` in total. A single heavier value is kept alone.
    pub(super) fn new(limit: u64) -> Self {
        Lru { limit, inner: Mutex::new(Inner { weight: 0, entries: LruCache::unbounded() }) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner<V, K>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value at `slot`, marked as most recently used.
    pub(super) fn get(&self, slot: K) -> Option<V> {
        self.inner().entries.get(&slot).map(|(_, value)| value.clone())
    }

    /// Stores `value` at `slot` and evicts the least recently used values until the rest fits.
    pub(super) fn put(&self, slot: K, weight: u64, value: V) {
        let Inner { weight: sum, entries } = &mut *self.inner();
        let mut gone = entries.pop(&slot);
        loop {
            *sum -= gone.map_or(0, |(weight, _)| weight);
            if *sum + weight <= self.limit || entries.is_empty() {
                break;
            }
            gone = entries.pop_lru().map(|(_, entry)| entry);
        }
        *sum += weight;
        entries.put(slot, (weight, value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compared with a plain list in order of use.
        #[test]
        fn keeps_the_youngest(
            limit in 1u64..12,
            uses in prop::collection::vec((0u64..4, 0usize..3, 1u64..4), 0..60),
        ) {
            let cache = Lru::new(limit);
            let mut list: Vec<(Slot, u64)> = Vec::new();
            for (stream, shard, weight) in uses {
                let slot = (stream, shard);
                let known = list.iter().position(|(other, _)| *other == slot);
                prop_assert_eq!(cache.get(slot), known.map(|at| list[at].1));
                match known {
                    Some(at) => {
                        let entry = list.remove(at);
                        list.push(entry);
                    }
                    None => {
                        while list.iter().map(|(_, w)| w).sum::<u64>() + weight > limit && !list.is_empty() {
                            list.remove(0);
                        }
                        list.push((slot, weight));
                        cache.put(slot, weight, weight);
                    }
                }
            }
        }
    }
}
