//! Return codes and messages of the C++ shim.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::{Error, Result};

unsafe extern "C" {
    fn shim_text() -> *const c_char;
    fn shim_describe(what: *const c_char) -> c_int;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Return codes of the shim, as in `shim.h`; every other code is a failure with a message.
pub(crate) const DONE: c_int = 0;
pub(crate) const FAILED: c_int = 1;
const NO_MEMORY: c_int = 2;
pub(crate) const LATE: c_int = 3;

/// Converts the return code of a shim call to a result.
pub(crate) fn guarded(call: &'static str, code: c_int) -> Result<()> {
    if code == DONE {
        return Ok(());
    }
    // C++ messages end in a stack trace; the first line has the reason.
    let reason = said().lines().next().unwrap_or_default().to_owned();
    Err(match code {
        NO_MEMORY => Error::NoMemory { call, reason },
        LATE => Error::Late { call },
        _ => Error::Foreign { call, reason },
    })
}

/// The message of the last shim call on this thread.
pub(crate) fn said() -> String {
    // SAFETY: a C string that lives until the next call on this thread, and is copied here.
    unsafe { CStr::from_ptr(shim_text()) }.to_string_lossy().into_owned()
}

/// The number that a shim call writes to its out-pointer.
pub(crate) fn number(call: &'static str, ask: impl FnOnce(*mut c_int) -> c_int) -> Result<c_int> {
    let mut out = 0;
    guarded(call, ask(&raw mut out))?;
    Ok(out)
}

/// The release of libtorch that this program was compiled against.
pub(crate) fn compiled_against() -> Result<String> {
    describe(c"compiled_against")
}

/// A function of a library that this process has loaded; null if there is none. A search takes longer than a launch.
pub(crate) fn symbol(name: &CStr) -> *mut c_void {
    // SAFETY: a null handle searches the whole process; the name outlives the call.
    unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) }
}

/// libtorch's description of `what`.
pub(crate) fn describe(what: &CStr) -> Result<String> {
    // SAFETY: the name is a C string that outlives the call.
    guarded("describe libtorch", unsafe { shim_describe(what.as_ptr()) })?;
    Ok(said().trim().to_owned())
}
