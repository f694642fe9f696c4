//! The progress that ranks publish, and when other ranks can read it.

use super::exchange_id::ExchangeId;
use super::tests::{SECONDS, place, ranks};
use super::*;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

/// Waits until something holds, and fails if it does not.
fn until(mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < SECONDS, "it does not come");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Exchanges of a test that counts posts.
const MANY: u64 = 20_000;

#[test]
fn many_exchanges_are_published_by_a_few_posts() {
    ranks(2, SECONDS, |group| {
        let (start, peers) = (Instant::now(), group.peers().unwrap());
        for number in 1..=MANY {
            group.reached(&format!("step {number}"));
            drop(group.begin("an exchange").unwrap());
        }
        let progress = |rank| RankProgress::find(&peers.store(), rank).unwrap();
        let is_at_the_end =
            |at: RankProgress| at.place == format!("step {MANY}") && at.begun[0] >= MANY;
        // The last progress of each rank, which then changes no more, is seen by the other one.
        for rank in [0, 1] {
            until(|| progress(rank).is_some_and(is_at_the_end));
        }
        let (posts, time) = (peers.posts(), start.elapsed());
        assert!(posts <= 10 * (time.as_secs() + 1) + 2, "{posts} posts in {time:?}");
        group.barrier("the end").unwrap();
    });
}

#[test]
fn the_last_progress_of_a_rank_that_leaves_is_seen() {
    let store = KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), SECONDS).unwrap();
    let port = store.port();
    thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let group = Group::open(&place(rank, 2, port), SECONDS, &|_| ()).unwrap();
                for number in 0..=100 {
                    group.computed(number, Some(Duration::from_millis(number)));
                    group.reached(&format!("step {number}"));
                }
            });
        }
    });
    for rank in [0, 1] {
        let last = RankProgress::find(&store, rank).unwrap().unwrap();
        assert_eq!((last.place.as_str(), last.computed.last().unwrap().0), ("step 100", 100));
    }
}

#[test]
fn a_report_follows_the_progress_of_its_rank() {
    ranks(2, SECONDS, |group| {
        let peers = group.peers().unwrap();
        group.reached("step 1");
        group.barrier("the start").unwrap();
        if group.rank() == 0 {
            group.reached("step 2");
            group.report("a fault");
        }
        until(|| peers.word().is_some());
        let seen = RankProgress::find(&peers.store(), 0).unwrap().unwrap();
        assert_eq!(seen.place, "step 2");
    });
}

#[test]
fn an_exchange_fails_once_the_store_has() {
    let store = KeyValueStore::serve("127.0.0.1", 0, "test/", &RunKey::default(), SECONDS).unwrap();
    let (port, held) = (store.port(), Mutex::new(Some(store)));
    let both = std::sync::Barrier::new(2);
    thread::scope(|scope| {
        for rank in 0..2 {
            let (held, both) = (&held, &both);
            scope.spawn(move || {
                let group = Group::open(&place(rank, 2, port), SECONDS, &|_| ()).unwrap();
                both.wait();
                drop(held.lock().unwrap().take());
                // Nothing is exchanged: only what the thread of the mailbox finds ends this.
                let mut error = String::new();
                until(|| {
                    let failed = group.begin("the gathering of losses").err();
                    error = failed.map_or_else(String::new, |failed| failed.to_string());
                    !error.is_empty()
                });
                let words = [
                    "the launcher, which holds the store, has ended or cannot be reached",
                    "missed in the gathering of losses (",
                    "the store does not answer",
                ];
                assert!(words.iter().all(|word| error.contains(word)), "{error}");
                assert!(group.spoke_first());
                let again = group.begin("the next exchange").err().unwrap().to_string();
                assert!(again.contains("missed in the next exchange ("), "{again}");
            });
        }
    });
}

/// Rank 1 begins an exchange right after it has published something, so its next post has to wait; just then time runs
/// out for rank 0, which waits for rank 2.
#[test]
fn a_rank_that_has_just_begun_is_not_blamed() {
    let begun = AtomicU64::new(0);
    let said = ranks(3, SECONDS, |group| {
        group.barrier("the start").unwrap();
        let peers = group.peers().unwrap();
        let mut error = None;
        if group.rank() == 1 {
            group.reached("step 1");
            let place = || RankProgress::find(&peers.store(), 1).unwrap().map(|at| at.place);
            until(|| place().as_deref() == Some("step 1"));
            begun.store(peers.next(0, "an exchange").unwrap().number, Ordering::Release);
        }
        if group.rank() == 0 {
            until(|| begun.load(Ordering::Acquire) > 0);
            let id = ExchangeId { axis: 0, number: begun.load(Ordering::Acquire) };
            error = Some(peers.stalled("an exchange", id, &[1, 2]).to_string());
        }
        until(|| peers.word().is_some());
        error
    });
    let said = said[0].as_ref().unwrap();
    assert!(said.contains("rank 2, last seen") && !said.contains("rank 1, last"), "{said}");
}
