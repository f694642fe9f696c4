//! The mailbox of a rank's progress: computing threads leave the newest value in it, and a thread of its own posts
//! that.
//!
//! The first change is posted at once, later ones at most ten times a second, always the newest value. So publishing
//! progress costs a computing thread a lock and never an answer of the store, and the store gets a few requests a
//! second from each rank, however short its exchanges are.
//!
//! What a rank has published is up to [`PAUSE`] old. Where another rank relies on it, [`Mailbox::flush`] posts the
//! newest value first. Only the thread posts, so no older value replaces a newer one. It waits for the store without
//! the lock, so a store that does not answer delays none of the threads that leave values.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::whereabouts::RankProgress;
use super::wire::Deadline;
use crate::{Error, Result};

/// Time between the beginnings of two posts, unless a flush asks for one earlier.
pub(super) const PAUSE: Duration = Duration::from_millis(100);

/// How long a flush waits. A store that takes longer does not answer whatever is asked next either.
const PATIENCE: Duration = Duration::from_secs(1);

/// The newest progress of a rank, and the thread that posts it until this is dropped.
#[derive(Debug)]
pub(super) struct Mailbox {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Shared with the thread.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    newest: RankProgress,
    /// Number of changes so far, of those that are contained in the last post, and of those that a flush waits for.
    changes: u64,
    posted: u64,
    urgent: u64,
    /// Number of posts.
    posts: u64,
    /// Why a post failed; none follows it.
    failed: Option<String>,
    /// Set when no more changes come.
    over: bool,
}

impl Mailbox {
    /// A mailbox whose thread publishes with `post`. `start` itself is not published.
    pub(super) fn open(
        start: RankProgress,
        post: impl Fn(&RankProgress) -> Result<()> + Send + 'static,
    ) -> Result<Mailbox> {
        let (changes, posted, urgent, posts) = (0, 0, 0, 0);
        let (failed, over) = (None, false);
        let state = State { newest: start, changes, posted, urgent, posts, failed, over };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let there = Arc::clone(&shared);
        let thread = std::thread::Builder::new().spawn(move || there.post_all(post));
        let call = "publish the progress of a rank";
        let thread = thread.map_err(|error| Error::Short { call, error })?;
        Ok(Mailbox { shared, thread: Some(thread) })
    }

    /// Changes the progress, which the thread then publishes; returns what `change` does.
    pub(super) fn update<T>(&self, change: impl FnOnce(&mut RankProgress) -> T) -> T {
        let mut state = self.shared.lock();
        let found = change(&mut state.newest);
        // The thread looks for further changes by itself after the first.
        if state.changes == state.posted {
            self.shared.changed.notify_all();
        }
        state.changes += 1;
        found
    }

    /// The newest progress, published or not.
    pub(super) fn newest(&self) -> RankProgress {
        self.shared.lock().newest.clone()
    }

    /// Why a post has failed, if one has.
    pub(super) fn failure(&self) -> Option<String> {
        self.shared.lock().failed.clone()
    }

    /// Publishes the newest progress without a pause. Returns whether that is done or impossible; `false` after
    /// [`PATIENCE`].
    pub(super) fn flush(&self) -> bool {
        let mut state = self.shared.lock();
        let (wanted, deadline) = (state.changes, Deadline::after(PATIENCE));
        state.urgent = wanted;
        self.shared.changed.notify_all();
        loop {
            let (done, left) = (state.posted >= wanted || state.failed.is_some(), deadline.left());
            if done || left.is_zero() {
                return done;
            }
            state = self.shared.wait(state, left);
        }
    }

    /// How often the thread has posted.
    #[cfg(test)]
    pub(super) fn posts(&self) -> u64 {
        self.shared.lock().posts
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        // A thread that still waits for the store ends with that wait, and does not keep the process alive.
        if self.flush()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Posts until no more changes come, or until a post fails.
    fn post_all(&self, post: impl Fn(&RankProgress) -> Result<()>) {
        let mut last = None;
        while let Some((changes, progress)) = self.next(last) {
            last = Some(Instant::now());
            let failed = post(&progress).err().map(|error| error.to_string());
            let mut state = self.lock();
            state.posts += 1;
            if failed.is_none() {
                state.posted = changes;
            }
            state.failed = failed;
            self.changed.notify_all();
            if state.failed.is_some() {
                return;
            }
        }
    }

    /// What to post next, with its number of changes, once it is time; `last` is when the last post began. `None` when
    /// no more changes come.
    fn next(&self, last: Option<Instant>) -> Option<(u64, RankProgress)> {
        let mut state = self.lock();
        loop {
            if state.changes == state.posted {
                if state.over {
                    return None;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let left = last.map_or(Duration::ZERO, |last| PAUSE.saturating_sub(last.elapsed()));
            if left.is_zero() || state.over || state.urgent > state.posted {
                return Some((state.changes, state.newest.clone()));
            }
            state = self.wait(state, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{RecvTimeoutError, channel};

    const SECONDS: Duration = Duration::from_secs(20);

    /// A mailbox, and the places that it posts.
    fn heard() -> (Mailbox, Arc<Mutex<Vec<String>>>) {
        let heard = Arc::<Mutex<Vec<String>>>::default();
        let there = Arc::clone(&heard);
        let post = move |progress: &RankProgress| {
            there.lock().unwrap().push(progress.place.clone());
            Ok(())
        };
        (Mailbox::open(RankProgress::start(), post).unwrap(), heard)
    }

    /// Posts that may begin within a time: one at once, and one after each pause.
    fn most(time: Duration) -> u64 {
        2 + (time.as_millis() / PAUSE.as_millis()) as u64
    }

    #[test]
    fn many_changes_are_a_few_posts_and_the_last_is_seen() {
        let (start, (mailbox, heard)) = (Instant::now(), heard());
        std::thread::scope(|scope| {
            for axis in 0..4 {
                let mailbox = &mailbox;
                scope.spawn(move || {
                    for number in 0..20_000 {
                        mailbox.update(|now| {
                            now.begun[axis] += 1;
                            now.place = format!("exchange {number} of axis {axis}");
                        });
                    }
                });
            }
        });
        mailbox.update(|now| now.place = "the last".to_owned());
        // Without another change, and without a flush.
        while heard.lock().unwrap().last().is_none_or(|last| last != "the last") {
            assert!(start.elapsed() < SECONDS);
            std::thread::sleep(Duration::from_millis(5));
        }
        let (posts, time) = (mailbox.posts(), start.elapsed());
        assert!(posts <= most(time), "{posts} posts in {time:?}");
        assert_eq!(mailbox.newest().begun, [20_000; 4]);
        drop(mailbox);
        let heard = Arc::into_inner(heard).expect("the thread has ended").into_inner().unwrap();
        assert_eq!(heard.len() as u64, posts, "nothing is posted twice");
    }

    #[test]
    fn a_flush_and_the_end_post_the_newest_at_once() {
        let (mailbox, heard) = heard();
        assert!(mailbox.flush() && mailbox.posts() == 0, "there is nothing to post");
        for number in 0..50 {
            mailbox.update(|now| now.place = format!("place {number}"));
            assert!(mailbox.flush());
            assert_eq!(heard.lock().unwrap().last(), Some(&format!("place {number}")));
        }
        mailbox.update(|now| now.place = "the last".to_owned());
        drop(mailbox);
        assert_eq!(heard.lock().unwrap().last().unwrap(), "the last");
    }

    #[test]
    fn a_failure_stays_and_ends_the_posts() {
        let fail = |_: &RankProgress| Err(Error::Late { call: "ask the store" });
        let mailbox = Mailbox::open(RankProgress::start(), fail).unwrap();
        assert_eq!(mailbox.failure(), None);
        for number in 0..3 {
            mailbox.update(|now| now.begun[0] = number);
            assert!(mailbox.flush());
            assert!(mailbox.failure().unwrap().contains("ask the store"));
        }
        assert_eq!((mailbox.posts(), mailbox.newest().begun[0]), (1, 2));
    }

    /// Values are left, and the mailbox ends, while a post waits for the store.
    #[test]
    fn a_store_that_does_not_answer_is_waited_for_by_the_thread_alone() {
        let (begin, begun) = channel();
        let (answer, answered) = channel::<()>();
        let (end, ended) = channel::<()>();
        let post = move |_: &RankProgress| {
            let _end = &end;
            begin.send(()).unwrap();
            let _ = answered.recv();
            Ok(())
        };
        let mailbox = Mailbox::open(RankProgress::start(), post).unwrap();
        mailbox.update(|now| now.begun[0] += 1);
        begun.recv_timeout(SECONDS).unwrap();
        (0..1000).for_each(|_| mailbox.update(|now| now.begun[0] += 1));
        assert_eq!((mailbox.newest().begun[0], mailbox.posts()), (1001, 0));
        drop(mailbox);
        // As soon as it gets an answer, the thread posts what is left, and ends.
        drop(answer);
        begun.recv_timeout(SECONDS).unwrap();
        assert_eq!(ended.recv_timeout(SECONDS), Err(RecvTimeoutError::Disconnected));
    }
}
