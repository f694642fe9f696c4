//! A map that forgets what was used longest ago, so that ten thousand shards need neither ten thousand open files nor
//! the memory of ten thousand indexes.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Whose entry: a stream's number and a shard of it.
pub(super) type Slot = (u64, usize);

/// A map bounded by the weight of its values. Values are shared handles: one that is forgotten lives on until its last
/// user lets go.
pub(super) struct Lru<V> {
    limit: u64,
    inner: Mutex<Inner<V>>,
}

struct Inner<V> {
    clock: u64,
    weight: u64,
    entries: BTreeMap<Slot, Entry<V>>,
    by_age: BTreeMap<u64, Slot>,
}

struct Entry<V> {
    used: u64,
    weight: u64,
    value: V,
}

impl<V: Clone> Lru<V> {
    /// An empty map whose values may weigh `limit` together. One value heavier than that is kept alone.
    pub(super) fn new(limit: u64) -> Self {
        let (entries, by_age) = (BTreeMap::new(), BTreeMap::new());
        Lru { limit, inner: Mutex::new(Inner { clock: 0, weight: 0, entries, by_age }) }
    }

    /// The value at `slot`, which thereby becomes the youngest.
    pub(super) fn get(&self, slot: Slot) -> Option<V> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Inner { clock, entries, by_age, .. } = &mut *inner;
        let entry = entries.get_mut(&slot)?;
        // The youngest stays so for free: neighbouring windows ask for the same shard.
        if entry.used != *clock {
            by_age.remove(&entry.used);
            *clock += 1;
            entry.used = *clock;
            by_age.insert(*clock, slot);
        }
        Some(entry.value.clone())
    }

    /// Puts `value` at `slot` and forgets the oldest ones until the rest fits.
    pub(super) fn put(&self, slot: Slot, weight: u64, value: V) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.forget(slot);
        while inner.weight + weight > self.limit {
            let Some((_, &oldest)) = inner.by_age.first_key_value() else { break };
            inner.forget(oldest);
        }
        inner.clock += 1;
        inner.weight += weight;
        let used = inner.clock;
        inner.by_age.insert(used, slot);
        inner.entries.insert(slot, Entry { used, weight, value });
    }
}

impl<V> Inner<V> {
    fn forget(&mut self, slot: Slot) {
        if let Some(entry) = self.entries.remove(&slot) {
            self.by_age.remove(&entry.used);
            self.weight -= entry.weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a plain list in order of use.
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
