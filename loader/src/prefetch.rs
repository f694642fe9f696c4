//! Batches ahead of time, in order.
//!
//! ```text
//! reader threads --(one slot per step, handed out in step order)--> last stage, a thread of its own --> `next`
//! ```
//!
//! A reader takes the next step's number and a slot in the order queue at one stroke, so that the queue's order is the
//! steps' order whatever the readers' pace. The queue's bound is the depth: a full queue stops the readers.
//!
//! The last stage is a closure on its own thread, because putting a batch on a device needs state that lives with one
//! thread. For a GPU the trainer passes one that copies the batch into a pinned buffer of a small ring, starts the copy
//! to the device on a side stream, records an event behind it, and hands on the device tensors with that event; the
//! compute stream waits for the event, not the CPU, and a pinned buffer is filled again only after its event has
//! passed. On a CPU it wraps the batch's memory without copying. The closure sees the batches in step order, one at a
//! time, and is dropped on its thread.
//!
//! A fault is delivered at its step, after all steps before it, and ends the stream. Dropping the prefetcher at any
//! moment stops and joins all its threads.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use contract::{Fault, Result};
use crossbeam::channel::{Receiver, Sender, bounded};
use mixer::Plan;

use crate::{Batch, RankSlice, Stores, batch};

/// How fast, never what: nothing here has a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchOptions {
    /// Threads that read and assemble; at least one runs.
    pub threads: usize,
    /// Batches that may wait, assembled or in the making, before the last stage; at least one.
    pub depth: usize,
}

impl Default for PrefetchOptions {
    fn default() -> Self {
        PrefetchOptions { threads: 2, depth: 4 }
    }
}

/// Delivers what the last stage made of each step's batch, in order.
pub struct Prefetcher<T> {
    ready: Option<Receiver<Result<T>>>,
    left: u64,
    threads: Vec<JoinHandle<()>>,
}

/// A step's slot: its batch comes through here.
type Slot<B> = Receiver<Result<B>>;

impl<T: Send + 'static> Prefetcher<T> {
    /// Starts reading the batches of `steps` (half-open) for `slice`; `last` makes of each what `next` returns.
    pub fn start(
        plan: Arc<Plan>,
        stores: Arc<Stores>,
        steps: Range<u64>,
        slice: RankSlice,
        options: PrefetchOptions,
        last: impl FnMut(Batch) -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        let make = move |step| batch(&plan, &stores, step, slice);
        Prefetcher::over(steps, options, make, last)
    }

    /// The same over any function from a step to its batch.
    fn over<B: Send + 'static>(
        steps: Range<u64>,
        options: PrefetchOptions,
        make: impl Fn(u64) -> Result<B> + Send + Sync + 'static,
        last: impl FnMut(B) -> Result<T> + Send + 'static,
    ) -> Result<Self> {
        let (order, slots) = bounded::<Slot<B>>(options.depth.max(1));
        let (done, ready) = bounded(1);
        let left = steps.end.saturating_sub(steps.start);
        let mut prefetcher = Prefetcher { ready: Some(ready), left, threads: Vec::new() };
        let next = Arc::new(Mutex::new((steps, order)));
        let make = Arc::new(make);
        for number in 0..options.threads.max(1) {
            let (next, make) = (Arc::clone(&next), Arc::clone(&make));
            prefetcher.spawn(format!("loader-{number}"), move || read(&next, &*make))?;
        }
        prefetcher.spawn("loader-last".to_owned(), move || finish(&slots, &done, last))?;
        Ok(prefetcher)
    }

    fn spawn(&mut self, name: String, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = thread::Builder::new().name(name).spawn(work).map_err(|error| {
            Fault::machine(format!("cannot start a thread: {error}")).hint("raise `ulimit -u`")
        })?;
        self.threads.push(thread);
        Ok(())
    }
}

/// A reader: takes the next step with its slot until there is none, or nobody listens.
fn read<B>(
    next: &Mutex<(Range<u64>, Sender<Slot<B>>)>,
    make: &(impl Fn(u64) -> Result<B> + ?Sized),
) {
    loop {
        let (step, sender) = {
            // Held while the queue is full: the others could do nothing but wait behind this one.
            let mut next = next.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(step) = next.0.next() else { return };
            let (sender, slot) = bounded(1);
            if next.1.send(slot).is_err() {
                return;
            }
            (step, sender)
        };
        let made = make(step);
        let failed = made.is_err();
        // The slot is gone if the stream ended meanwhile: then nobody wants this batch.
        if sender.send(made).is_err() || failed {
            return;
        }
    }
}

/// The last stage: slots in order, each through the closure, until a fault or the end.
fn finish<B, T>(
    slots: &Receiver<Slot<B>>,
    done: &Sender<Result<T>>,
    mut last: impl FnMut(B) -> Result<T>,
) {
    for slot in slots {
        // A reader that panicked drops its slot: say so at its step instead of waiting for ever.
        let made = slot.recv().unwrap_or_else(|_| Err(Fault::bug("a loader thread panicked")));
        let value = made.and_then(&mut last);
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
        // With its receiver gone the last stage stops, with the slots gone the readers do.
        self.ready = None;
        for thread in self.threads.drain(..) {
            // A thread's panic was delivered as a fault at its step.
            let _ = thread.join();
        }
    }
}
