//! Writes checkpoints in the background: training waits for the copy of the state, not for the disk.
//!
//! One at a time: if writing takes longer than the interval, training waits for it at the next checkpoint. Errors are
//! reported at the next step.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use contract::{Digest, Fault, Result};

/// A checkpoint that was written.
#[derive(Clone, Debug, PartialEq)]
pub struct WrittenCheckpoint {
    /// Its step.
    pub step: u64,
    /// The digest of its state.
    pub state: Digest,
    /// How long training waited for it.
    pub stall: Duration,
    /// How long it took to write.
    pub writing: Duration,
    /// Why older checkpoints could not be removed.
    pub left: Option<Fault>,
}

/// At most one checkpoint that is being written.
#[derive(Default)]
pub struct Saver(Option<JoinHandle<Result<WrittenCheckpoint>>>);

/// The polling interval of [`Saver::is_busy`].
const LOOK: Duration = Duration::from_millis(2);

impl Saver {
    /// With nothing to write.
    pub fn new() -> Self {
        Saver(None)
    }

    /// Starts `write`, which commits the state `state` after `step` and returns why it could not remove older
    /// checkpoints. The previous one must have ended.
    pub fn start(
        &mut self,
        step: u64,
        state: Digest,
        stall: Duration,
        write: impl FnOnce() -> Result<Option<Fault>> + Send + 'static,
    ) -> Result<()> {
        if self.0.is_some() {
            return Err(Fault::bug("two checkpoints were to be written at once"));
        }
        let work = move || {
            let start = Instant::now();
            let left = write()?;
            Ok(WrittenCheckpoint { step, state, stall, writing: start.elapsed(), left })
        };
        let thread = thread::Builder::new().name("checkpoint".to_owned()).spawn(work);
        self.0 = Some(thread.map_err(|error| Fault::not_started("a thread", &error))?);
        Ok(())
    }

    /// Whether a checkpoint is still being written after waiting for at most `turn`.
    pub fn is_busy(&self, turn: Duration) -> bool {
        let (start, busy) =
            (Instant::now(), || self.0.as_ref().is_some_and(|it| !it.is_finished()));
        while busy() && start.elapsed() < turn {
            thread::sleep(LOOK);
        }
        busy()
    }

    /// The checkpoint that was written, if one is done.
    pub fn done(&mut self) -> Result<Option<WrittenCheckpoint>> {
        if self.0.as_ref().is_some_and(JoinHandle::is_finished) { self.wait() } else { Ok(None) }
    }

    /// Waits for the checkpoint that is being written.
    pub fn wait(&mut self) -> Result<Option<WrittenCheckpoint>> {
        let Some(thread) = self.0.take() else { return Ok(None) };
        let joined = thread.join();
        joined.unwrap_or_else(|_| Err(Fault::bug("the writing of a checkpoint panicked"))).map(Some)
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        // A run that stops for another reason still finishes its checkpoint, and returns that other reason.
        if let Err(why) = self.wait() {
            contract::note!("warning: the checkpoint that was being written was not kept: {why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn one_at_a_time_and_every_fault_is_told() {
        let (mut saver, (go, wait)) = (Saver::new(), channel::<()>());
        assert_eq!(saver.wait().unwrap(), None);
        let work = move || wait.recv().map(|()| None).map_err(|_| Fault::bug("gone"));
        saver.start(7, Digest(1), Duration::ZERO, work).unwrap();
        assert_eq!(saver.done().unwrap(), None, "it does not wait");
        assert!(saver.is_busy(Duration::from_millis(5)));
        assert!(saver.start(7, Digest(1), Duration::ZERO, || Ok(None)).is_err());
        go.send(()).unwrap();
        assert!(!saver.is_busy(Duration::MAX));
        assert_eq!(saver.wait().unwrap().unwrap().step, 7);
        saver
            .start(7, Digest(1), Duration::ZERO, || Err(Fault::machine("the disk is full")))
            .unwrap();
        assert_eq!(saver.wait(), Err(Fault::machine("the disk is full")));
        saver.start(7, Digest(1), Duration::ZERO, || panic!("broken")).unwrap();
        assert_eq!(saver.wait().unwrap_err().class(), contract::Class::Bug);
    }
}
