//! An ordered parallel map: one reader, any number of workers, results taken in reading order.
//!
//! For each part, the reader puts a promise into an ordered queue. Workers fulfil the promises in any order; the caller
//! takes them in order. The queue is bounded, and so is memory. The reported error is the first in reading order,
//! whatever the number of workers. A panic is an error like any other: a bug of ours, at the part that caused it.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use contract::fault::{again, io_cause, more_of};
use contract::guard::said;
use contract::{Fault, Result};
use crossbeam::channel::{Receiver, Sender, bounded};

/// Parts in flight in addition to one per worker.
pub(crate) const SPARE: usize = 3;

/// The limit on workers: more than any machine has cores.
pub const WORKERS_MAX: usize = 1024;

/// What is done with each part.
pub(crate) struct Map<Begin, Do, Place> {
    /// Creates a worker's state, which it keeps from part to part.
    pub(crate) begin: Begin,
    /// Processes a part, on any worker.
    pub(crate) map: Do,
    /// The place of a part, for the message of a panic.
    pub(crate) place: Place,
}

/// Calls `next` until there is nothing, the map on any thread, and `take` here, in the order of `next`. Returns the
/// workers' states.
pub(crate) fn run<T: Send, R: Send, S: Send>(
    workers: usize,
    next: impl FnMut() -> Result<Option<T>> + Send,
    map: Map<
        impl Fn() -> S + Sync,
        impl Fn(&mut S, T) -> Result<R> + Sync,
        impl Fn(&T) -> String + Sync,
    >,
    mut take: impl FnMut(R) -> Result<()>,
) -> Result<Vec<S>> {
    let workers = workers.clamp(1, WORKERS_MAX);
    let (order, promises) = bounded::<Receiver<Result<R>>>(workers + SPARE);
    let (parts, work) = bounded::<(T, Reply<R>)>(workers + SPARE);
    thread::scope(|scope| {
        let reader = move || read(next, &order, &parts);
        thread::Builder::new().spawn_scoped(scope, reader).map_err(no_thread)?;
        let mut kept = Vec::new();
        for _ in 0..workers {
            let (work, map) = (work.clone(), &map);
            let worker = move || {
                let mut state = (map.begin)();
                for (part, reply) in work {
                    let place = (map.place)(&part);
                    let done = guarded(|| place, || (map.map)(&mut state, part));
                    // The receiver is closed once an earlier part has failed.
                    let _ = reply.send(done);
                }
                state
            };
            kept.push(thread::Builder::new().spawn_scoped(scope, worker).map_err(no_thread)?);
        }
        drop(work);
        for promise in promises {
            // A promise without a reply marks the end.
            let Ok(result) = promise.recv() else { break };
            take(result?)?;
        }
        let joined = |worker: thread::ScopedJoinHandle<'_, S>| {
            worker.join().map_err(|panic| panicked(panic.as_ref()))
        };
        kept.into_iter().map(joined).collect()
    })
}

type Reply<R> = Sender<Result<R>>;

/// Sends out parts, each with a promise, until there are none or the receivers are closed.
fn read<T, R>(
    mut next: impl FnMut() -> Result<Option<T>>,
    order: &Sender<Receiver<Result<R>>>,
    parts: &Sender<(T, Reply<R>)>,
) {
    loop {
        let (reply, promise) = bounded(1);
        if order.send(promise).is_err() {
            return;
        }
        let sent = match guarded(|| "the reader".to_owned(), &mut next) {
            Ok(Some(part)) => parts.send((part, reply)).is_ok(),
            Ok(None) => false,
            Err(fault) => {
                let _ = reply.send(Err(fault));
                false
            }
        };
        if !sent {
            return;
        }
    }
}

/// Runs `work`; a panic becomes a fault at `place`.
pub(crate) fn guarded<R>(
    place: impl FnOnce() -> String,
    work: impl FnOnce() -> Result<R>,
) -> Result<R> {
    // State that a panic left incomplete is never used again: the first fault ends everything.
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done,
        Err(panic) => Err(panicked(panic.as_ref()).at(place())),
    }
}

fn panicked(panic: &(dyn Any + Send)) -> Fault {
    Fault::bug("a worker panicked").found(said(panic))
}

/// Starts the thread pool of the parallel-iterator library, which would panic if the system has no threads left.
pub(crate) fn start_shared() -> Result<()> {
    match rayon::ThreadPoolBuilder::new().build_global() {
        Err(error) if io_cause(&error).is_some() => Err(of_pool(&error)),
        _ => Ok(()),
    }
}

/// The fault if a pool of threads cannot be made.
pub(crate) fn of_pool(error: &rayon::ThreadPoolBuildError) -> Fault {
    match io_cause(error) {
        Some(error) => no_thread(again(error)),
        None => Fault::bug(format!("no pool of threads can be made: {error}")),
    }
}

/// The fault if the system gives no thread.
pub(crate) fn no_thread(error: io::Error) -> Fault {
    let hint = format!("ask for fewer --workers, or {}", more_of(&error));
    Fault::not_started("a thread", &error).hint(hint)
}

#[cfg(test)]
mod tests {
    use contract::Class;

    use super::*;

    /// Runs 100 parts, with `bad` applied in the map from part 0 on. Returns the parts taken, and the outcome.
    fn hundred(
        workers: usize,
        bad: impl Fn(u64) -> Result<()> + Sync,
    ) -> (Vec<u64>, Result<Vec<u64>>) {
        let mut number = 0;
        let next = || {
            number += 1;
            Ok((number <= 100).then_some(number - 1))
        };
        let map = |count: &mut u64, number: u64| {
            *count += 1;
            if number.is_multiple_of(7) {
                thread::yield_now();
            }
            bad(number).map(|()| number)
        };
        let map = Map { begin: || 0, map, place: |number: &u64| format!("part {number}") };
        let mut seen = Vec::new();
        let outcome = run(workers, next, map, |number| {
            seen.push(number);
            Ok(())
        });
        (seen, outcome)
    }

    #[test]
    fn results_come_in_order_and_the_first_error_wins() {
        for workers in [0, 1, 3] {
            for bad in [None, Some(0), Some(57), Some(99)] {
                let (seen, outcome) = hundred(workers, |number| match bad {
                    Some(bad) if number >= bad => Err(Fault::data(number.to_string())),
                    _ => Ok(()),
                });
                assert_eq!(seen, (0..bad.unwrap_or(100)).collect::<Vec<_>>());
                match bad {
                    None => {
                        let kept = outcome.unwrap();
                        assert_eq!((kept.len(), kept.iter().sum::<u64>()), (workers.max(1), 100));
                    }
                    Some(bad) => {
                        assert!(outcome.unwrap_err().to_string().contains(&bad.to_string()));
                    }
                }
            }
        }
    }

    #[test]
    fn a_panic_is_a_bug_at_its_part() {
        for workers in [1, 3] {
            let (seen, outcome) = hundred(workers, |number| {
                assert!(number != 57, "number {number} is odd");
                Ok(())
            });
            assert_eq!(seen, (0..57).collect::<Vec<_>>());
            let fault = outcome.unwrap_err();
            assert_eq!((fault.class(), fault.place()), (Class::Bug, Some("part 57")), "{fault}");
            assert!(fault.to_string().contains("number 57 is odd"), "{fault}");
        }
        // Also where parts are read.
        let map =
            Map { begin: || (), map: |(): &mut (), ()| Ok(()), place: |(): &()| String::new() };
        let fault = run(2, || panic!("unread"), map, |()| Ok(())).unwrap_err();
        assert!(fault.class() == Class::Bug && fault.to_string().contains("unread"), "{fault}");
    }
}
