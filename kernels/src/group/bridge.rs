//! Gives Gloo access to our store. Ranks exchange their addresses through it, so only processes with the run's key can
//! supply one.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::slice;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::ffi::{StoreCalls, shim_bytes, shim_group_open};
use super::{KeyValueStore, milliseconds, text};
use crate::shim::{DONE, FAILED, LATE, guarded};
use crate::{Error, Result};

/// The owner that the callbacks get.
struct CallbackOwner {
    /// Weak: Gloo must not keep the store open after its owner has dropped it.
    store: Weak<KeyValueStore>,
    timeout: Duration,
    /// Why a call failed: Gloo reports less.
    failed: Arc<Mutex<Option<Error>>>,
}

/// Connects `rank` to all other ranks of `world` and returns Gloo's process group, to be freed with `shim_group_free`.
/// An interface takes precedence over a host; without either libtorch chooses.
pub(super) fn connect(
    store: &Arc<KeyValueStore>,
    rank: u32,
    world: u32,
    [interface, host]: [&str; 2],
    timeout: Duration,
) -> Result<*mut c_void> {
    let (interface, host, mut handle) = (text(interface)?, text(host)?, ptr::null_mut());
    let failed = Arc::new(Mutex::new(None));
    let asked =
        CallbackOwner { store: Arc::downgrade(store), timeout, failed: Arc::clone(&failed) };
    let owner = Box::into_raw(Box::new(asked)).cast();
    let calls = StoreCalls { owner, set, wait, free };
    // SAFETY: texts and out-pointer outlive the call; the ownership of `CallbackOwner` is handed over, and `free`
    // releases it.
    let connected = guarded("connect the ranks", unsafe {
        shim_group_open(
            calls,
            rank as c_int,
            world as c_int,
            interface.as_ptr(),
            host.as_ptr(),
            milliseconds(timeout),
            &raw mut handle,
        )
    });
    let failed = failed.lock().unwrap_or_else(PoisonError::into_inner).take();
    connected.map_err(|error| failed.unwrap_or(error)).map(|()| handle)
}

impl CallbackOwner {
    /// Answers a request; an error is kept in `failed`.
    fn answer(&self, ask: impl FnOnce(&KeyValueStore) -> Result<()>) -> c_int {
        let gone = || Error::Foreign { call: "ask the store", reason: "it is closed".to_owned() };
        let answer = self.store.upgrade().ok_or_else(gone).and_then(|store| ask(&store));
        let Err(error) = answer else { return DONE };
        let code = if matches!(error, Error::Late { .. }) { LATE } else { FAILED };
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        code
    }
}

/// # Safety
/// `bytes` are `length` bytes that outlive the result.
unsafe fn given<'a>(bytes: *const u8, length: usize) -> &'a [u8] {
    // SAFETY: as the caller promises; an empty vector of C++ may have no address.
    if length == 0 { &[] } else { unsafe { slice::from_raw_parts(bytes, length) } }
}

/// # Safety
/// As `StoreCalls` says; `owner` was made by [`connect`] and is not freed.
unsafe extern "C" fn set(
    owner: *mut c_void,
    key: *const u8,
    key_length: usize,
    value: *const u8,
    length: usize,
) -> c_int {
    // SAFETY: the caller's promises.
    let (asked, key, value) =
        unsafe { (&*owner.cast::<CallbackOwner>(), given(key, key_length), given(value, length)) };
    asked.answer(|store| store.put(&String::from_utf8_lossy(key), value))
}

/// # Safety
/// As `StoreCalls` says; `owner` was made by [`connect`] and is not freed.
unsafe extern "C" fn wait(
    owner: *mut c_void,
    key: *const u8,
    key_length: usize,
    sink: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promises.
    let (asked, key) = unsafe { (&*owner.cast::<CallbackOwner>(), given(key, key_length)) };
    asked.answer(|store| {
        let found = store.wait_for_bytes(&String::from_utf8_lossy(key), asked.timeout)?;
        let found = found.ok_or(Error::Late { call: "hear from another rank" })?;
        // SAFETY: the sink is the caller's, and the bytes are copied.
        guarded("hear from another rank", unsafe { shim_bytes(sink, found.as_ptr(), found.len()) })
    })
}

/// # Safety
/// `owner` was made by [`connect`], and no other call uses it from here on.
unsafe extern "C" fn free(owner: *mut c_void) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(owner.cast::<CallbackOwner>()) });
}
