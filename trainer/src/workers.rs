//! Workers: several cores compute a step without changing a bit of its results.
//!
//! A worker computes whole items (a micro-batch, a matrix of the optimizer) with one math thread; results are consumed
//! in item order, whichever worker finished first. So the number of workers affects only speed.
//!
//! Invariant: the only threads that compute weights, gradients or losses are started here.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use contract::fault::more_of;
use contract::{Fault, Result};
use kernels::{ops, runtime};

use crate::audit::AuditFraction;
use crate::model::{ActivationCheckpointing, MicroBatchOptions};
use crate::refusal::{self, caught, lost};

/// A number of workers, at least one, and how each computes a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workers {
    count: usize,
    options: MicroBatchOptions,
    audit: Option<AuditFraction>,
}

/// The shared state of the workers of one fold.
struct Shared<T> {
    /// The next item to begin.
    begin: u64,
    /// The next item to be consumed; all before it have been.
    take: u64,
    /// Finished items that are not next in order yet.
    waiting: BTreeMap<u64, Result<T>>,
    /// Whether a worker is consuming items now.
    taking: bool,
    /// The first failure in item order; later items are not consumed.
    failure: Option<Fault>,
}

impl Workers {
    /// `count` workers that save every activation and compute in main memory.
    pub fn new(count: usize) -> Self {
        Workers { count: count.max(1), options: MicroBatchOptions::default(), audit: None }
    }

    /// The same workers with this activation checkpointing.
    pub fn keeping(self, keep: ActivationCheckpointing) -> Self {
        Workers { options: MicroBatchOptions { keep, ..self.options }, ..self }
    }

    /// The same workers with these operations, which the kernel table names.
    pub fn computing_by(self, ops: ops::OpsTable) -> Self {
        Workers { options: MicroBatchOptions { ops, ..self.options }, ..self }
    }

    /// The same workers, which compute the audited micro-batches of a step twice.
    pub fn auditing(self, audit: Option<AuditFraction>) -> Self {
        Workers { audit, ..self }
    }

    /// Which micro-batches of a step are computed twice.
    pub fn audit(self) -> Option<AuditFraction> {
        self.audit
    }

    /// How a micro-batch is computed.
    pub fn options(self) -> MicroBatchOptions {
        self.options
    }

    /// The operations by which they compute.
    pub fn ops(self) -> ops::OpsTable {
        self.options.ops
    }

    /// The activation checkpointing of a micro-batch.
    pub fn keep(self) -> ActivationCheckpointing {
        self.options.keep
    }

    /// One worker for each core of the machine.
    pub fn available() -> Self {
        Workers::new(thread::available_parallelism().map_or(1, usize::from))
    }

    /// The same with `count` workers.
    pub fn of(self, count: usize) -> Self {
        Workers { count, ..self }
    }

    /// The same with one worker.
    pub fn one(self) -> Self {
        self.of(1)
    }

    /// The number of workers.
    pub fn count(self) -> usize {
        self.count
    }

    /// Computes `work(0)`, `work(1)`, ... `work(items - 1)` on the workers and passes each result to `take`, in order.
    ///
    /// At most one more result than workers exists at a time, so memory does not depend on `items`. On failure, returns
    /// the first failure in item order; no result from that item on has been passed to `take`.
    pub fn fold<T: Send>(
        self,
        items: u64,
        work: impl Fn(u64) -> Result<T> + Sync,
        take: impl FnMut(u64, T) -> Result<()> + Send,
    ) -> Result<()> {
        self.fold_ahead(items, self.count as u64 + 1, work, take)
    }

    /// As [`Workers::fold`], but workers may be up to `ahead` results ahead.
    fn fold_ahead<T: Send>(
        self,
        items: u64,
        ahead: u64,
        work: impl Fn(u64) -> Result<T> + Sync,
        take: impl FnMut(u64, T) -> Result<()> + Send,
    ) -> Result<()> {
        let (waiting, failure) = (BTreeMap::new(), None);
        let shared = Mutex::new(Shared { begin: 0, take: 0, waiting, taking: false, failure });
        let (moved, take) = (Condvar::new(), Mutex::new(take));
        let worker = || {
            runtime::enter_thread().map_err(lost)?;
            while let Some(item) = begin_next(&shared, &moved, items, ahead) {
                let result = caught(|| work(item));
                deliver(&shared, &moved, &take, item, result);
            }
            Ok(())
        };
        self.run(items, worker)?;
        let shared = shared.into_inner().unwrap_or_else(PoisonError::into_inner);
        shared.failure.map_or(Ok(()), Err)
    }

    /// Computes `work` for every item on the workers; results are in item order.
    pub fn map<I: Send, T: Send>(
        self,
        items: Vec<I>,
        work: impl Fn(I) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let mut results = Vec::with_capacity(items.len());
        self.map_each(items, work, |result| {
            results.push(result);
            Ok(())
        })?;
        Ok(results)
    }

    /// The same, but passes each result to `take`, in item order. No worker waits for a slow earlier item.
    pub(crate) fn map_each<I: Send, T: Send>(
        self,
        items: Vec<I>,
        work: impl Fn(I) -> Result<T> + Sync,
        mut take: impl FnMut(T) -> Result<()> + Send,
    ) -> Result<()> {
        let count = items.len() as u64;
        let slots: Vec<Mutex<Option<I>>> =
            items.into_iter().map(|item| Mutex::new(Some(item))).collect();
        let once = |index: u64| match lock(&slots[index as usize]).take() {
            Some(item) => work(item),
            None => Err(Fault::bug("an item was handed to two workers")),
        };
        self.fold_ahead(count, count, once, |_, result| take(result))
    }

    /// Groups items for [`Workers::map`]: single items in main memory; on a device one group, so the host reads once.
    pub(crate) fn batched<I>(
        device: tch::Device,
        items: impl IntoIterator<Item = I>,
    ) -> Vec<Vec<I>> {
        match device {
            tch::Device::Cpu => items.into_iter().map(|item| vec![item]).collect(),
            _ => vec![items.into_iter().collect()],
        }
    }

    /// Runs `worker` on all workers, at most one per item. Even a single worker gets its own thread, so that it
    /// computes under the same conditions as many.
    fn run(self, items: u64, worker: impl Fn() -> Result<()> + Sync) -> Result<()> {
        let none = |error: std::io::Error| {
            let hint = format!("give fewer with --workers, or {}", more_of(&error));
            Fault::not_started("a thread for a worker", &error).hint(hint)
        };
        thread::scope(|scope| {
            let start = |_| thread::Builder::new().spawn_scoped(scope, &worker).map_err(none);
            let handles: Vec<_> = (0..(self.count as u64).min(items)).map(start).collect();
            let join = |handle: Result<thread::ScopedJoinHandle<'_, Result<()>>>| {
                handle?.join().unwrap_or_else(|panic| Err(refusal::fault(&*panic)))
            };
            let joined: Vec<_> = handles.into_iter().map(join).collect();
            joined.into_iter().collect()
        })
    }
}

/// Returns the next item for a worker, once it is close enough to the next one to consume.
fn begin_next<T>(
    shared: &Mutex<Shared<T>>,
    moved: &Condvar,
    items: u64,
    ahead: u64,
) -> Option<u64> {
    let mut state = lock(shared);
    loop {
        if state.begin >= items || state.failure.is_some() {
            return None;
        }
        if state.begin < state.take + ahead {
            state.begin += 1;
            return Some(state.begin - 1);
        }
        state = moved.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Stores a result, then consumes all results that are next in order, unless another worker is doing so.
fn deliver<T>(
    shared: &Mutex<Shared<T>>,
    moved: &Condvar,
    take: &Mutex<impl FnMut(u64, T) -> Result<()>>,
    item: u64,
    result: Result<T>,
) {
    let mut state = lock(shared);
    state.waiting.insert(item, result);
    while !state.taking && state.failure.is_none() {
        let turn = state.take;
        let Some(result) = state.waiting.remove(&turn) else { break };
        state.taking = true;
        drop(state);
        let outcome = result.and_then(|value| caught(|| lock(take)(turn, value)));
        state = lock(shared);
        state.taking = false;
        state.take += 1;
        state.failure = outcome.err();
        moved.notify_all();
    }
}

/// A worker that panicked has already failed the whole fold, so a poisoned lock is not reported again.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn results_come_in_order_and_never_pile_up(
            // Starting a thread for each worker, even without items, would kill the process.
            workers in prop_oneof![1usize..6, Just(1_000_000)],
            naps in prop::collection::vec(0u64..3, 0..40),
        ) {
            let alive = AtomicU64::new(0);
            let most = AtomicU64::new(0);
            let mut seen = Vec::new();
            let work = |item: u64| {
                most.fetch_max(alive.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                thread::sleep(Duration::from_millis(naps[item as usize]));
                Ok(item * item)
            };
            let take = |item, value| {
                alive.fetch_sub(1, Ordering::SeqCst);
                seen.push((item, value));
                Ok(())
            };
            Workers::new(workers).fold(naps.len() as u64, work, take).unwrap();
            let wanted: Vec<_> = (0..naps.len() as u64).map(|item| (item, item * item)).collect();
            prop_assert_eq!(seen, wanted);
            prop_assert!(most.into_inner() <= workers.min(naps.len()) as u64 + 1);
        }

        #[test]
        fn the_first_failure_in_item_order_wins(
            workers in 1usize..6,
            bad in prop::collection::btree_set(0u64..30, 1..5),
        ) {
            let mut taken = 0;
            let work = |item| {
                thread::sleep(Duration::from_micros((item * 7919) % 500));
                if bad.contains(&item) { Err(Fault::data(format!("item {item}"))) } else { Ok(item) }
            };
            let take = |_, _| { taken += 1; Ok(()) };
            let fault = Workers::new(workers).fold(30, work, take).unwrap_err();
            let first = *bad.first().unwrap();
            prop_assert_eq!(fault, Fault::data(format!("item {first}")));
            prop_assert_eq!(taken, first);
        }
    }

    #[test]
    fn a_panic_is_a_bug_with_its_message_and_does_not_hang() {
        for workers in [1, 3] {
            let work = |item| if item == 5 { panic!("item {item} broke") } else { Ok(item) };
            let fault = Workers::new(workers).map((0..50).collect(), work).unwrap_err();
            assert_eq!(fault.class(), contract::Class::Bug);
            assert!(fault.to_string().contains("item 5 broke"), "{fault}");
        }
    }
}
