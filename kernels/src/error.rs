//! Errors at the boundary to foreign code.

use std::io::{self, ErrorKind};

use crate::want;

/// The result of anything that calls foreign code.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A refusal of libtorch, of a device library, or of this crate on their behalf.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Parallel work or a device context existed before the switches were set, so they may have no effect.
    #[error("{what} is in use already, so the determinism switches come too late to take effect")]
    TooLate {
        /// What exists already.
        what: &'static str,
    },
    /// A switch was set, but reads back differently.
    #[error("the switch {switch} is not in force: it reads {found}, wanted {wanted}")]
    NotInForce {
        /// Its name.
        switch: &'static str,
        /// What it reads.
        found: i32,
        /// What it has to read.
        wanted: i32,
    },
    /// The requested device cannot be used on this machine.
    #[error("device {device:?} cannot be used: {reason}")]
    NoDevice {
        /// As requested.
        device: String,
        /// Why not.
        reason: String,
    },
    /// A foreign function could not get the memory that it needs.
    #[error("{call}: there is not enough memory: {reason}")]
    NoMemory {
        /// The call.
        call: &'static str,
        /// Its message.
        reason: String,
    },
    /// The system refuses this process more files, threads or memory.
    #[error("{call}: {error}")]
    Short {
        /// The purpose.
        call: &'static str,
        /// The system's error.
        error: io::Error,
    },
    /// A deadline has passed.
    #[error("{call}: the time ran out")]
    Late {
        /// What was awaited.
        call: &'static str,
    },
    /// A foreign function failed.
    #[error("{call}: {reason}")]
    Foreign {
        /// The call.
        call: &'static str,
        /// Its message.
        reason: String,
    },
    /// A rank could not be reached, and this rank was the first to notice.
    #[error("{what}")]
    Missing {
        /// The rank, where it was last seen, and the exchange that missed it.
        what: String,
    },
    /// One end of a connection does not have the run's key.
    #[error("{what}")]
    Stranger {
        /// The address, and what it did.
        what: String,
    },
    /// Ranks were started in a way that cannot work: the same commands would fail again.
    #[error("{what}")]
    Mistaken {
        /// The ranks, and what is inconsistent.
        what: String,
    },
    /// Another rank reported why the ranks stop.
    #[error("{what}")]
    Reported {
        /// Its report.
        what: String,
    },
    /// An operand that an operation does not support: a bug of the caller.
    #[error("{operation}: {operand} is {found}, wanted {wanted}")]
    Operand {
        /// The operation.
        operation: &'static str,
        /// The operand.
        operand: &'static str,
        /// What was passed.
        found: String,
        /// What is required.
        wanted: String,
    },
    /// libtorch failed.
    #[error("libtorch: {0}")]
    Torch(tch::TchError),
}

impl From<tch::TchError> for Error {
    fn from(error: tch::TchError) -> Self {
        match want::was_refused() || want::nothing_left() {
            true => {
                // libtorch's messages end in a stack trace.
                let reason = error.to_string().lines().next().unwrap_or_default().to_owned();
                Error::NoMemory { call: "libtorch", reason }
            }
            false => Error::Torch(error),
        }
    }
}

/// Whether the system is out of files or memory: then the other end is not at fault.
pub(crate) fn is_short(error: &io::Error) -> bool {
    // By the system's error codes: the standard library has no names for them.
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    const ENOBUFS: i32 = 105;
    error.kind() == ErrorKind::OutOfMemory
        || matches!(error.raw_os_error(), Some(ENFILE | EMFILE | ENOBUFS))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use tch::Tensor;

    use super::*;

    /// An error like oneDNN's, which this test cannot deprive of memory selectively.
    #[test]
    fn what_fails_where_no_memory_is_left_failed_for_that() {
        const CHILD: &str = "TEST_OF_WANT";
        let fails = || -> Error {
            let (two, three) = (Tensor::from_slice(&[1f32; 2]), Tensor::from_slice(&[1f32; 3]));
            two.f_add(&three).unwrap_err().into()
        };
        if std::env::var_os(CHILD).is_none() {
            assert!(matches!(fails(), Error::Torch(_)), "there is memory");
            let name = "error::tests::what_fails_where_no_memory_is_left_failed_for_that";
            let limited = "ulimit -v 2000000; exec \"$0\" --exact \"$@\"";
            let program = std::env::current_exe().unwrap();
            let mut child = Command::new("sh");
            child.args(["-c", limited]).arg(program).arg(name).env(CHILD, "1");
            let ran = child.output().unwrap();
            assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stdout));
            return;
        }
        drop(fails());
        // Only their first pages are ever touched, so these are few.
        let mut all = Vec::new();
        loop {
            let mut some = Vec::<u8>::new();
            if some.try_reserve_exact(16 << 20).is_err() {
                break;
            }
            all.push(some);
        }
        assert!(all.len() > 4, "{}", all.len());
        all.truncate(all.len() - 2);
        assert!(matches!(fails(), Error::NoMemory { .. }));
    }
}
