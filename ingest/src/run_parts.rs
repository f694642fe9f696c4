//! The only way to run the parts of a scan, a build or a check.
//!
//! While at least as many parts are left as there are workers, each worker does a whole part: it reads, parses, encodes
//! and writes, without a channel. Then every part that is left gets a reader of its own, and all workers process what
//! these read. So the last part leaves no core idle.
//!
//! Invariant: the fault returned is that of the lowest part at fault, whatever the number of workers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use contract::{Fault, Result};
use crossbeam::channel::{Receiver, Sender, bounded, unbounded};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::parallel::{SPARE, WORKERS_MAX, guarded, no_thread, of_pool};

/// Processes the batches of records of one part: on the worker that has the part, or on all workers.
pub(crate) struct Drive<'a> {
    part: usize,
    /// Parts from this number on stop, because a part before them, or the code that takes the results, has failed.
    end: &'a AtomicUsize,
    /// For a part that all workers process together: their pool, and how many batches may be in flight.
    pool: Option<(&'a ThreadPool, usize)>,
}

impl Drive<'_> {
    /// Calls `next` until it returns `None`, `map` on any thread with each batch, and `take` on this thread with each
    /// result, in the order of `next`. Returns the first fault in that order; `place` names the batch if `map` panics.
    pub(crate) fn run<T: Send, R: Send>(
        &self,
        mut next: impl FnMut() -> Result<Option<T>> + Send,
        map: impl Fn(T) -> Result<R> + Sync,
        place: impl Fn(&T) -> String + Sync,
        mut take: impl FnMut(R) -> Result<()>,
    ) -> Result<()> {
        let map = |batch: T| {
            let place = place(&batch);
            guarded(|| place, || map(batch))
        };
        let Some((pool, in_flight)) = self.pool else {
            while let Some(batch) = next()? {
                take(map(batch)?)?;
                self.refuse_after_fault()?;
            }
            return Ok(());
        };
        let map = &map;
        pool.in_place_scope(|jobs| {
            thread::scope(|scope| {
                let (order, promises) = bounded::<Receiver<Result<R>>>(in_flight);
                let read = move || {
                    loop {
                        let (reply, promise) = bounded(1);
                        if order.send(promise).is_err() {
                            return;
                        }
                        match guarded(|| "the reader".to_owned(), &mut next) {
                            // The receiver is closed once an earlier batch has failed.
                            Ok(Some(batch)) => jobs.spawn(move |_| drop(reply.send(map(batch)))),
                            // A promise without a reply marks the end.
                            Ok(None) => return,
                            Err(fault) => return drop(reply.send(Err(fault))),
                        }
                    }
                };
                thread::Builder::new().spawn_scoped(scope, read).map_err(no_thread)?;
                for promise in promises {
                    let Ok(result) = promise.recv() else { return Ok(()) };
                    take(result?)?;
                    self.refuse_after_fault()?;
                }
                Ok(())
            })
        })
    }

    /// Calls `check` with each item, on as many threads as the part has; the fault is the first one in their order.
    pub(crate) fn each<T: Sync>(
        &self,
        items: &[T],
        check: impl Fn(&T) -> Result<()> + Sync,
    ) -> Result<()> {
        let failed = |item: &T| check(item).err();
        let fault = match self.pool {
            None => items.iter().find_map(failed),
            Some((pool, _)) => pool.install(|| items.par_iter().find_map_first(failed)),
        };
        fault.map_or(Ok(()), Err)
    }

    /// Ends a part after a fault of an earlier one. Users never see this fault: that of the earlier part is returned.
    fn refuse_after_fault(&self) -> Result<()> {
        match self.end.load(Ordering::Relaxed) > self.part {
            true => Ok(()),
            false => Err(Fault::bug("a part before this one has failed")),
        }
    }
}

/// Something that received on another thread.
enum Event<T> {
    /// A part is done.
    Done(usize, Result<T>),
    /// A worker has found no more whole part to do.
    Free,
}

/// What all threads of a run share.
struct Run<F> {
    do_part: F,
    /// The parts before this number are done by one worker each. The others are done by all workers together, and begin
    /// when a worker finds no whole part left.
    whole: usize,
    /// The next whole part to begin.
    next_part: AtomicUsize,
    /// As in [`Drive`].
    end: AtomicUsize,
}

impl<F> Run<F> {
    /// Does a part: on the workers of `pool`, with its number of batches in flight, or on this thread alone.
    fn part<T>(&self, part: usize, pool: Option<(&ThreadPool, usize)>, events: &Sender<Event<T>>)
    where
        F: Fn(usize, &Drive<'_>) -> Result<T>,
    {
        let drive = Drive { part, end: &self.end, pool };
        let done = guarded(|| format!("part {part}"), || (self.do_part)(part, &drive));
        if done.is_err() {
            self.end.fetch_min(part, Ordering::Relaxed);
        }
        // The receiver is closed only if a thread could not be started.
        let _ = events.send(Event::Done(part, done));
    }

    /// Does whole parts, one after the other, as long as there are any.
    fn whole_parts<T>(&self, events: &Sender<Event<T>>)
    where
        F: Fn(usize, &Drive<'_>) -> Result<T>,
    {
        loop {
            let part = self.next_part.fetch_add(1, Ordering::Relaxed);
            if part >= self.whole.min(self.end.load(Ordering::Relaxed)) {
                let _ = events.send(Event::Free);
                return;
            }
            self.part(part, None, events);
        }
    }

    /// Stops every part at its next batch.
    fn stop(&self) {
        self.end.store(0, Ordering::Relaxed);
    }
}

/// Runs `parts` parts by `workers` workers, and calls `take` here with the results, in the order of the parts.
pub(crate) fn run_parts<T: Send>(
    parts: usize,
    workers: usize,
    do_part: impl Fn(usize, &Drive<'_>) -> Result<T> + Sync,
    mut take: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    let workers = workers.clamp(1, WORKERS_MAX);
    let whole = (parts + 1).saturating_sub(workers);
    let (next_part, end) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let run = &Run { do_part, whole, next_part, end };
    let pool = ThreadPoolBuilder::new().num_threads(workers).build();
    let pool = &pool.map_err(|error| of_pool(&error))?;
    let (mut results, mut taken, mut fault) = (BTreeMap::new(), 0, None);
    thread::scope(|scope| {
        pool.in_place_scope(|jobs| {
            let (events, received) = unbounded();
            for _ in 0..workers.min(whole) {
                let events = events.clone();
                jobs.spawn(move |_| run.whole_parts(&events));
            }
            if whole == 0 {
                let _ = events.send(Event::Free);
            }
            let mut events = Some(events);
            for event in received {
                match event {
                    Event::Done(part, result) => drop(results.insert(part, result)),
                    Event::Free => {
                        // The first one that is free.
                        let Some(events) = events.take() else { continue };
                        let in_flight = workers / (parts - whole).max(1) + SPARE;
                        for part in whole..parts {
                            let events = events.clone();
                            let driver = move || run.part(part, Some((pool, in_flight)), &events);
                            let driver = thread::Builder::new().spawn_scoped(scope, driver);
                            driver.inspect_err(|_| run.stop()).map_err(no_thread)?;
                        }
                    }
                }
                while let Some(result) = results.remove(&taken).filter(|_| fault.is_none()) {
                    fault = result.and_then(&mut take).inspect_err(|_| run.stop()).err();
                    taken += 1;
                }
            }
            fault.map_or(Ok(()), Err)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex};
    use std::thread::ThreadId;

    use contract::Class;
    use proptest::prelude::*;

    use super::*;

    /// Slabs `0..count`, one after the other.
    fn slabs(count: u64) -> impl FnMut() -> Result<Option<u64>> + Send {
        let mut next = 0;
        move || {
            next += 1;
            Ok((next <= count).then_some(next - 1))
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// Parts of some slabs each; some slabs are at fault, some panic.
        #[test]
        fn results_are_taken_in_order_up_to_the_lowest_fault(
            counts in prop::collection::vec(0u64..9, 0..12),
            workers in 0usize..6,
            bad in prop::collection::btree_set((0usize..12, 0u64..9), 0..4),
            panics: bool,
        ) {
            let do_part = |part: usize, drive: &Drive<'_>| {
                let mut sum = Vec::new();
                let map = |slab: u64| match bad.contains(&(part, slab)) {
                    true if panics => panic!("{part} {slab} is bad"),
                    true => Err(Fault::data(format!("{part} {slab} is bad"))),
                    false => Ok(slab),
                };
                drive.run(slabs(counts[part]), map, |slab| slab.to_string(), |slab| {
                    sum.push(slab);
                    Ok(())
                })?;
                Ok((part, sum))
            };
            let mut found = Vec::new();
            let ran = run_parts(counts.len(), workers, do_part, |result| {
                found.push(result);
                Ok(())
            });
            let first = bad.iter().find(|(part, slab)| counts.get(*part).is_some_and(|count| slab < count));
            let all = first.map_or(counts.len(), |(part, _)| *part);
            let wanted: Vec<_> = (0..all).map(|part| (part, (0..counts[part]).collect::<Vec<_>>())).collect();
            prop_assert_eq!(found, wanted);
            match (ran, first) {
                (Ok(()), None) => {}
                (Err(fault), Some((part, slab))) => {
                    let class = if panics { Class::Bug } else { Class::Data };
                    prop_assert!(fault.class() == class, "{}", fault);
                    prop_assert!(fault.to_string().contains(&format!("{part} {slab} is bad")), "{}", fault);
                }
                (ran, first) => prop_assert!(false, "{:?} {:?}", ran, first),
            }
        }
    }

    /// Whole parts are done by one thread each; the last part by all workers.
    #[test]
    fn no_worker_is_idle_at_the_last_part() {
        for workers in [2, 3] {
            // Of the last part, as many slabs as workers must be in work at the same time.
            let (together, parts) = (Barrier::new(workers), 2 * workers);
            let threads = Mutex::new(Vec::<(usize, ThreadId)>::new());
            let do_part = |part: usize, drive: &Drive<'_>| {
                let map = |slab: u64| {
                    threads.lock().unwrap().push((part, thread::current().id()));
                    if part + 1 == parts {
                        together.wait();
                    }
                    Ok(slab)
                };
                drive.run(slabs(workers as u64), map, |_| String::new(), |_| Ok(()))
            };
            run_parts(parts, workers, do_part, |()| Ok(())).unwrap();
            let threads = threads.into_inner().unwrap();
            let of = |part: usize| {
                let mut own: Vec<_> = threads.iter().filter(|(of, _)| *of == part).collect();
                own.dedup();
                own.len()
            };
            assert!((0..=parts - workers).all(|part| of(part) == 1), "{threads:?}");
        }
    }

    #[test]
    fn whoever_takes_results_may_refuse_one() {
        for workers in [1, 4] {
            let mut taken = 0;
            let ran = run_parts(
                20,
                workers,
                |part, _| Ok(part),
                |part| {
                    taken += 1;
                    if part == 3 { Err(Fault::usage("enough")) } else { Ok(()) }
                },
            );
            assert_eq!((ran.unwrap_err().class(), taken), (Class::Usage, 4));
        }
    }
}
