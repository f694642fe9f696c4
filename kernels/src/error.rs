//! What can go wrong between us and foreign code.

use std::io::{self, ErrorKind};

use crate::want;

/// The result of anything that leaves our own code.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A refusal of libtorch, of a device library, or of this crate on their behalf.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Parallel work or a device context existed before the switches were set: they may not be in force.
    #[error("{what} is in use already, so the determinism switches come too late to take effect")]
    TooLate {
        /// What exists already.
        what: &'static str,
    },
    /// A switch was set, and reads back differently.
    #[error("the switch {switch} is not in force: it reads {found}, wanted {wanted}")]
    NotInForce {
        /// Its name.
        switch: &'static str,
        /// What it reads.
        found: i32,
        /// What it has to read.
        wanted: i32,
    },
    /// The device asked for cannot be had on this machine.
    #[error("device {device:?} cannot be used: {reason}")]
    NoDevice {
        /// As it was asked for.
        device: String,
        /// Why not.
        reason: String,
    },
    /// A foreign function could not get the memory that it needs.
    #[error("{call}: there is not enough memory: {reason}")]
    NoMemory {
        /// What was called.
        call: &'static str,
        /// What it said.
        reason: String,
    },
    /// The system gives this process no more of something, be it files, threads or memory.
    #[error("{call}: {error}")]
    Short {
        /// What it was wanted for.
        call: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// A deadline has passed.
    #[error("{call}: the time ran out")]
    Late {
        /// What was waited for.
        call: &'static str,
    },
    /// A foreign function failed.
    #[error("{call}: {reason}")]
    Foreign {
        /// What was called.
        call: &'static str,
        /// What it said.
        reason: String,
    },
    /// A rank could not be reached, and this rank was the first to notice.
    #[error("{what}")]
    Missing {
        /// Which, where it was last seen, and what it was missed in.
        what: String,
    },
    /// One end of a connection does not have the run's key.
    #[error("{what}")]
    Stranger {
        /// Where, and what it did.
        what: String,
    },
    /// Ranks were started in a way that cannot work: the same commands would end like this again.
    #[error("{what}")]
    Mistaken {
        /// Which ranks, and what of them does not fit together.
        what: String,
    },
    /// Another rank left word of why the ranks stop.
    #[error("{what}")]
    Reported {
        /// Its word.
        what: String,
    },
    /// An operand that an operation does not promise to take: a bug of whoever called it.
    #[error("{operation}: {operand} is {found}, wanted {wanted}")]
    Operand {
        /// Which operation.
        operation: &'static str,
        /// Which of its operands.
        operand: &'static str,
        /// What it was given.
        found: String,
        /// What it takes.
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
                // What libtorch says ends in a stack trace.
                let reason = error.to_string().lines().next().unwrap_or_default().to_owned();
                Error::NoMemory { call: "libtorch", reason }
            }
            false => Error::Torch(error),
        }
    }
}

/// Whether the system had no file or memory left to give: then the other end is not at fault.
pub(crate) fn is_short(error: &io::Error) -> bool {
    // By the system's numbers: the standard library names none of them.
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

    /// As oneDNN does, of which this test knows no way to let it alone have no memory.
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
        // Only their first pages are ever touched, which is why there are few.
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
