//! Prefetches batches, in order.
//!
//! ```text
//! reader threads --(one slot per step, handed out in step order)--> last stage, a thread of its own --> `next`
//! ```
//!
//! A reader takes the next step number and a slot in the order queue under one lock, so the queue has step order
//! however fast the readers are. The queue is bounded by the depth: a full queue blocks the readers.
//!
//! A reader assembles its batch directly in memory that the caller supplies (such as a pinned buffer of a ring), and
//! passes it to a closure that all readers call concurrently: a trainer checks there what it is about to copy to a
//! device. The ring may make a reader wait for a copy, never for another reader.
//!
//! The last stage is a closure on its own thread, because copying a batch to a device needs state that belongs to one
//! thread. It starts a copy of the batch's memory on a side stream, records an event after it, and passes on the device
//! tensors with that event. The compute stream waits for the event, the CPU does not. The memory is reused only after
//! its event has completed and its batch is dropped. The closure sees the readers' results in step order, one at a
//! time, and is dropped on its thread.
//!
//! Where steps are only summarized, a slot is for some rows of a step, so that readers share a large step, and the last
//! stage joins them.
//!
//! An error is delivered at its step, after all earlier steps, and ends the stream. Dropping the prefetcher at any time
//! stops and joins all its threads.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use contract::{Fault, Result};
use crossbeam::channel::{Receiver, Sender, bounded};

use crate::batch::{Piece, PieceSummary};
use crate::growing::PlanFeed;
use crate::{Batch, BatchMemory, RankSlice, StepSummary, Stores, batch_in};

/// Settings that affect only speed, so none has a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchOptions {
    /// Threads that read and assemble; at least one is started.
    pub threads: usize,
    /// Batches waiting for the last stage, finished or not; at least one.
    pub depth: usize,
}

impl Default for PrefetchOptions {
    fn default() -> Self {
        PrefetchOptions { threads: 2, depth: 4 }
    }
}

/// What to prefetch.
pub struct PrefetchSource {
    /// The plan, or one that grows.
    pub plan: PlanFeed,
    /// The stores with its text.
    pub stores: Arc<Stores>,
    /// The steps, half-open.
    pub steps: Range<u64>,
    /// Threads and depth.
    pub options: PrefetchOptions,
}

/// Delivers the last stage's result for each step's batch, in order.
pub struct Prefetcher<T> {
    ready: Option<Receiver<Result<T>>>,
    left: u64,
    threads: Vec<JoinHandle<()>>,
    /// The plan that readers may wait for.
    plan: Option<PlanFeed>,
}

/// A step's slot, which receives its batch.
type Slot<B> = Receiver<Result<B>>;

impl<T: Send + 'static> Prefetcher<T> {
    /// Starts prefetching the batches of `steps` (half-open) for `slice`; `next` returns what `last` makes of each.
    pub fn start(
        plan: impl Into<PlanFeed>,
        stores: Arc<Stores>,
        steps: Range<u64>,
        slice: RankSlice,
        options: PrefetchOptions,
        last: impl FnMut(Batch) -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        let pool = Arc::clone(&stores);
        let memory = move |tokens| Ok(pool.memory(tokens));
        let ahead = PrefetchSource { plan: plan.into(), stores, steps, options };
        Prefetcher::by_step(ahead, move |_| Ok(slice), memory, Ok, last)
    }

    /// The same with a slice that depends on the step. `memory` allocates for a number of tokens. Readers apply `check`
    /// to each batch before `last`.
    pub fn by_step<B: Send + 'static>(
        ahead: PrefetchSource,
        slice: impl Fn(u64) -> Result<RankSlice> + Send + Sync + 'static,
        memory: impl Fn(usize) -> Result<Box<dyn BatchMemory>> + Send + Sync + 'static,
        check: impl Fn(Batch) -> Result<B> + Send + Sync + 'static,
        last: impl FnMut(B) -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        let PrefetchSource { plan, stores, steps, options } = ahead;
        let feed = Some(plan.clone());
        let make = move |step| {
            let plan = plan.at(step)?;
            check(batch_in(&plan, &stores, step, slice(step)?, &memory)?)
        };
        Prefetcher::over(feed, steps, options, make, last, begin)
    }

    /// The same for any function from a step to its batch, on threads that `begin` starts; `plan` is what it may wait
    /// for.
    fn over<B: Send + 'static>(
        plan: Option<PlanFeed>,
        steps: Range<u64>,
        options: PrefetchOptions,
        make: impl Fn(u64) -> Result<B> + Send + Sync + 'static,
        mut last: impl FnMut(B) -> Result<T> + Send + 'static,
        begin: impl Fn(String, Work) -> io::Result<JoinHandle<()>>,
    ) -> Result<Self> {
        let each = move |batch| last(batch).map(Some);
        Prefetcher::over_pieces(plan, steps.clone(), steps, options, make, each, begin)
    }

    /// The same for pieces of the steps, of which only the last one of a step comes to a result.
    fn over_pieces<P: Send + 'static, B: Send + 'static>(
        plan: Option<PlanFeed>,
        steps: Range<u64>,
        pieces: impl Iterator<Item = P> + Send + 'static,
        options: PrefetchOptions,
        make: impl Fn(P) -> Result<B> + Send + Sync + 'static,
        last: impl FnMut(B) -> Result<Option<T>> + Send + 'static,
        begin: impl Fn(String, Work) -> io::Result<JoinHandle<()>>,
    ) -> Result<Self> {
        let (order, slots) = bounded::<Slot<B>>(options.depth.max(1));
        let (done, ready) = bounded(1);
        let left = steps.end.saturating_sub(steps.start);
        let mut prefetcher = Prefetcher { ready: Some(ready), left, threads: Vec::new(), plan };
        let next = Arc::new(Mutex::new((pieces, order)));
        let make = Arc::new(make);
        let mut spawn = |name: String, work: Work| {
            let thread =
                begin(name, work).map_err(|error| Fault::not_started("a thread", &error))?;
            prefetcher.threads.push(thread);
            Ok(())
        };
        // The last stage starts first: if a reader cannot be started, the others only wait for this stage.
        spawn("loader-last".to_owned(), Box::new(move || finish(&slots, &done, last)))?;
        for number in 0..options.threads.max(1) {
            let (next, make) = (Arc::clone(&next), Arc::clone(&make));
            spawn(format!("loader-{number}"), Box::new(move || read(&next, &*make)))?;
        }
        Ok(prefetcher)
    }
}

impl Prefetcher<StepSummary> {
    /// The summary of each step. A reader holds at most `held` tokens at a time (at least one row).
    pub fn summaries(ahead: PrefetchSource, held: u64) -> Result<Self> {
        let pool = Arc::clone(&ahead.stores);
        Prefetcher::summaries_in(ahead, held, move |tokens| Ok(pool.memory(tokens)))
    }

    /// The same, in memory that `memory` allocates for a number of tokens.
    pub fn summaries_in(
        ahead: PrefetchSource,
        held: u64,
        memory: impl Fn(usize) -> Result<Box<dyn BatchMemory>> + Send + Sync + 'static,
    ) -> Result<Self> {
        let PrefetchSource { plan, stores, steps, options } = ahead;
        let pieces = steps.clone().flat_map(move |step| {
            let pieces = plan.at(step).and_then(|plan| Piece::all(plan, step, held));
            let (pieces, fault) = pieces.map_or_else(|f| (None, Some(f)), |all| (Some(all), None));
            pieces.into_iter().flatten().map(Ok).chain(fault.map(Err))
        });
        let make = move |piece: Result<Piece>| piece?.summary(&stores, &memory);
        let mut open = None;
        let last = move |piece| Ok(PieceSummary::join(&mut open, piece));
        Prefetcher::over_pieces(None, steps, pieces, options, make, last, begin)
    }
}

/// The body of a thread.
type Work = Box<dyn FnOnce() + Send>;

/// Starts a thread of the operating system.
fn begin(name: String, work: Work) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name).spawn(work)
}

/// A reader: takes the next piece and its slot until no piece is left or the receiver is dropped.
fn read<P, B>(
    next: &Mutex<(impl Iterator<Item = P>, Sender<Slot<B>>)>,
    make: &(impl Fn(P) -> Result<B> + ?Sized),
) {
    loop {
        let (piece, sender) = {
            // The lock is held while the queue is full: other readers could only wait for it as well.
            let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(piece) = next.0.next() else { return };
            let (sender, slot) = bounded(1);
            if next.1.send(slot).is_err() {
                return;
            }
            (piece, sender)
        };
        let made = make(piece);
        let failed = made.is_err();
        // Sending fails if the stream has ended meanwhile: the batch is not needed any more.
        if sender.send(made).is_err() || failed {
            return;
        }
    }
}

/// The last stage: applies the closure to the slots in order, until an error or the end.
fn finish<B, T>(
    slots: &Receiver<Slot<B>>,
    done: &Sender<Result<T>>,
    mut last: impl FnMut(B) -> Result<Option<T>>,
) {
    for slot in slots {
        // A reader that panicked drops its slot: report an error at its step instead of waiting forever.
        let made = slot.recv().unwrap_or_else(|_| Err(Fault::bug("a loader thread panicked")));
        let Some(value) = made.and_then(&mut last).transpose() else { continue };
        let failed = value.is_err();
        if done.send(value).is_err() || failed {
            return;
        }
    }
}

impl<T> Iterator for Prefetcher<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        let value = self.ready.as_ref()?.recv();
        let value = value.unwrap_or_else(|_| Err(Fault::bug("the loader's last stage panicked")));
        if value.is_err() {
            self.left = 0;
        }
        Some(value)
    }
}

impl<T> Drop for Prefetcher<T> {
    fn drop(&mut self) {
        // The last stage stops once its receiver is dropped, the readers once the slots are dropped and no step of a
        // growing plan is waited for.
        self.ready = None;
        self.plan.iter().for_each(PlanFeed::close);
        for thread in self.threads.drain(..) {
            // A thread's panic was delivered as an error at its step.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use contract::{Class, Key, Purpose, draw};
    use proptest::prelude::*;

    use super::*;

    /// Returns a step's value after a delay that varies by step.
    fn slow(step: u64) -> Result<u64> {
        thread::sleep(Duration::from_micros(
            draw(Key::from_seed(1), Purpose::Generate, step) % 300,
        ));
        Ok(step * step)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn order_knows_neither_threads_nor_depth(threads in 0usize..9, depth in 0usize..9, end in 1u64..60) {
            let mut calls = 0;
            let last = move |value: u64| {
                calls += 1;
                Ok((calls, value))
            };
            let options = PrefetchOptions { threads, depth };
            let stream = Prefetcher::over(None, 1..end, options, slow, last, super::begin).unwrap();
            let found: Vec<_> = stream.map(Result::unwrap).collect();
            prop_assert_eq!(found, (1..end).map(|step| (step, step * step)).collect::<Vec<_>>());
        }

        #[test]
        fn a_fault_comes_at_its_step_and_ends_the_stream(
            threads in 1usize..5, depth in 1usize..5, bad in 1u64..20, late: bool,
        ) {
            let make = move |step| if step == bad && !late { Err(Fault::data("torn")) } else { slow(step) };
            let last = move |value| if value == bad * bad { Err(Fault::data("torn")) } else { Ok(value) };
            let options = PrefetchOptions { threads, depth };
            let mut stream = Prefetcher::over(None, 1..100, options, make, last, super::begin).unwrap();
            for step in 1..bad {
                prop_assert_eq!(stream.next(), Some(Ok(step * step)));
            }
            prop_assert_eq!(stream.next(), Some(Err(Fault::data("torn"))));
            prop_assert_eq!(stream.next(), None);
        }

        /// However early it is dropped, all threads end and drop their closures.
        #[test]
        fn dropping_joins_every_thread(threads in 1usize..5, depth in 1usize..5, taken in 0usize..12) {
            let token = Arc::new(());
            let (made, ended) = (Arc::clone(&token), Arc::clone(&token));
            let make = move |step| {
                let _held = &made;
                slow(step)
            };
            let last = move |value| {
                let _held = &ended;
                Ok(value)
            };
            let options = PrefetchOptions { threads, depth };
            let stream = Prefetcher::over(None, 1..u64::MAX, options, make, last, super::begin).unwrap();
            let mut stream = stream;
            prop_assert_eq!(stream.by_ref().take(taken).count(), taken);
            drop(stream);
            prop_assert_eq!(Arc::strong_count(&token), 1);
        }

        /// No more batches are made ahead than the depth allows.
        #[test]
        fn depth_bounds_what_waits(threads in 1usize..5, depth in 1usize..5) {
            let made = Arc::new(AtomicU64::new(0));
            let counter = Arc::clone(&made);
            let make = move |step| Ok(counter.fetch_max(step, Ordering::Relaxed).max(step));
            let options = PrefetchOptions { threads, depth };
            let mut stream = Prefetcher::over(None, 1..1000, options, make, |_| Ok(()), super::begin).unwrap();
            for taken in 1..20 {
                prop_assert!(stream.next().is_some());
                thread::sleep(Duration::from_micros(200));
                // Not counting the queue: one batch in the last stage, one that waits to be taken, one in each reader.
                prop_assert!(made.load(Ordering::Relaxed) <= taken + (depth + threads + 2) as u64);
            }
        }
    }

    /// The readers already started fill the queue meanwhile.
    #[test]
    fn where_a_thread_cannot_be_had_the_others_end() {
        for given in 0..4 {
            let begun = AtomicU64::new(0);
            let begin = |name, work| match begun.fetch_add(1, Ordering::Relaxed) < given {
                true => super::begin(name, work),
                false => {
                    thread::sleep(Duration::from_millis(20));
                    Err(io::ErrorKind::WouldBlock.into())
                }
            };
            let options = PrefetchOptions { threads: 3, depth: 1 };
            let fault = Prefetcher::over(None, 1..u64::MAX, options, slow, Ok, begin)
                .map(drop)
                .unwrap_err();
            assert!(fault.class() == Class::Machine && fault.to_string().contains("ulimit -u"));
        }
    }

    #[test]
    fn a_panic_is_a_fault_at_its_step() {
        let options = PrefetchOptions { threads: 2, depth: 2 };
        let reader = |step| if step == 3 { panic!("reader") } else { Ok(step) };
        let mut stream = Prefetcher::over(None, 1..9, options, reader, Ok, super::begin).unwrap();
        assert_eq!((stream.next(), stream.next()), (Some(Ok(1)), Some(Ok(2))));
        assert_eq!(stream.next().unwrap().unwrap_err().class(), Class::Bug);
        assert_eq!(stream.next(), None);
        let last = |step| if step == 2 { panic!("last stage") } else { Ok(step) };
        let mut stream = Prefetcher::over(None, 1..9, options, Ok, last, super::begin).unwrap();
        assert_eq!(stream.next(), Some(Ok(1)));
        assert_eq!(stream.next().unwrap().unwrap_err().class(), Class::Bug);
        assert_eq!(stream.next(), None);
    }
}
