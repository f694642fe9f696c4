//! What ran between two moments, by libtorch's profiler: operations on every thread of the process, and on a GPU each
//! kernel and copy with its duration.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::ffi::{CString, c_char, c_int};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Device;

use crate::shim::{guarded, said};
use crate::{Error, Result};

unsafe extern "C" {
    fn shim_profile(on_device: c_int) -> c_int;
    fn shim_profiled(path: *const c_char) -> c_int;
}

/// A process has one profiler.
static ALONE: Mutex<()> = Mutex::new(());

/// An operation, kernel or copy that ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its name in libtorch, or from the kernel's author.
    pub name: String,
    /// Whether it ran on a GPU; otherwise it is an operation on the host, which may contain others.
    pub on_device: bool,
    /// The thread or device stream.
    pub place: u64,
    /// Its start, in nanoseconds of a clock that all events share.
    pub begin: u64,
    /// Its duration.
    pub nanoseconds: u64,
}

/// An active profiler.
#[derive(Debug)]
#[must_use]
pub struct Profile {
    _alone: MutexGuard<'static, ()>,
}

/// Starts profiling all threads, and the GPU if `device` is one.
///
/// # Errors
/// If libtorch refuses.
pub fn begin(device: Device) -> Result<Profile> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: a plain number in.
    guarded("begin a profile", unsafe { shim_profile(c_int::from(device != Device::Cpu)) })?;
    Ok(Profile { _alone: alone })
}

impl Profile {
    /// Stops profiling and returns what ran. Also writes everything to `file`, in a format for Perfetto and browsers.
    ///
    /// # Errors
    /// If libtorch refuses, or the path contains a zero byte.
    pub fn end(self, file: &Path) -> Result<Vec<Event>> {
        const CALL: &str = "end a profile";
        let path = CString::new(file.as_os_str().as_encoded_bytes())
            .map_err(|error| Error::Foreign { call: CALL, reason: error.to_string() })?;
        // SAFETY: a C string that outlives the call.
        guarded(CALL, unsafe { shim_profiled(path.as_ptr()) })?;
        let wrong = || Error::Foreign { call: CALL, reason: "an event is no event".to_owned() };
        said().lines().map(|line| event(line).ok_or_else(wrong)).collect()
    }
}

fn event(line: &str) -> Option<Event> {
    let mut words = line.splitn(5, ' ');
    let on_device = words.next()? == "1";
    let mut number = || words.next()?.parse().ok();
    let (place, begin, nanoseconds) = (number()?, number()?, number()?);
    Some(Event { name: words.next()?.to_owned(), on_device, place, begin, nanoseconds })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Kind, Tensor};

    #[test]
    fn operations_of_every_thread_are_seen() {
        let file = std::env::temp_dir().join(format!("profile-{}.json", std::process::id()));
        let profile = begin(Device::Cpu).unwrap();
        let twice = || {
            let x = Tensor::ones([64, 64], (Kind::Float, Device::Cpu));
            drop(x.matmul(&x));
        };
        twice();
        std::thread::spawn(twice).join().unwrap();
        let events = profile.end(&file).unwrap();
        let products: Vec<_> = events.iter().filter(|event| event.name == "aten::mm").collect();
        // Other tests of this process may run matmuls meanwhile.
        assert!(products.len() >= 2, "{events:?}");
        assert!(products.iter().any(|one| one.place != products[0].place), "{products:?}");
        assert!(products.iter().all(|one| !one.on_device && one.nanoseconds > 0), "{products:?}");
        let kept = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert!(kept.contains("traceEvents") && kept.contains("aten::mm"));
        // It can be started again.
        drop(begin(Device::Cpu).unwrap().end(&file).unwrap());
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn names_may_have_spaces() {
        let event = event("1 7 20 5 void gemm<a, b>(int)").unwrap();
        assert_eq!(
            (event.on_device, event.place, event.begin, event.nanoseconds),
            (true, 7, 20, 5)
        );
        assert_eq!(event.name, "void gemm<a, b>(int)");
        assert!(super::event("1 7 x").is_none());
    }
}
