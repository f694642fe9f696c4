//! One reader, any number of workers, results in the order of reading.

use std::thread;

use contract::{Fault, Result};
use crossbeam::channel::{Sender, bounded};

/// Parts in flight beyond one for each worker.
const SPARE: usize = 3;

/// Calls `next` until there is nothing, `map` on any thread, and `take` here, in the order of `next`. The first error
/// in that order is the one returned.
pub(crate) fn run<T: Send, R: Send>(
    workers: usize,
    mut next: impl FnMut() -> Result<Option<T>> + Send,
    map: impl Fn(T) -> Result<R> + Sync,
    mut take: impl FnMut(R) -> Result<()>,
) -> Result<()> {
    let (order, promises) = bounded(workers + SPARE);
    let (parts, work) = bounded::<(T, Sender<Result<R>>)>(workers + SPARE);
    thread::scope(|scope| {
        scope.spawn(move || {
            loop {
                let (reply, promise) = bounded(1);
                if order.send(promise).is_err() {
                    return;
                }
                let sent = match next() {
                    Ok(Some(part)) => parts.send((part, reply)).is_ok(),
                    Ok(None) => return,
                    Err(fault) => {
                        let _ = reply.send(Err(fault));
                        false
                    }
                };
                if !sent {
                    return;
                }
            }
        });
        for _ in 0..workers {
            let (work, map) = (work.clone(), &map);
            scope.spawn(move || {
                for (part, reply) in work {
                    // Nobody waits for the reply once a part has failed.
                    let _ = reply.send(map(part));
                }
            });
        }
        drop(work);
        for promise in promises {
            // A promise without a reply is the end, or a worker that died: then the scope panics.
            let Ok(result) = promise.recv() else { break };
            take(result?)?;
        }
        Ok::<(), Fault>(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order_and_the_first_error_wins() {
        for workers in [1, 3] {
            for bad in [None, Some(0), Some(57), Some(99)] {
                let mut number = 0;
                let next = || {
                    number += 1;
                    Ok((number <= 100).then_some(number - 1))
                };
                let map = |number: u64| {
                    if number.is_multiple_of(7) {
                        thread::yield_now();
                    }
                    match bad {
                        Some(bad) if number >= bad => Err(Fault::data(number.to_string())),
                        _ => Ok(number),
                    }
                };
                let mut seen = Vec::new();
                let outcome = run(workers, next, map, |number| {
                    seen.push(number);
                    Ok(())
                });
                assert_eq!(seen, (0..bad.unwrap_or(100)).collect::<Vec<_>>());
                match bad {
                    None => assert!(outcome.is_ok()),
                    Some(bad) => {
                        assert!(outcome.unwrap_err().to_string().contains(&bad.to_string()))
                    }
                }
            }
        }
    }
}
