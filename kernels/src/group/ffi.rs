//! The functions of `shim/group.cpp`.

use std::ffi::{c_char, c_int, c_void};

use torch_sys::C_tensor;

/// A store with the interface that Gloo needs. Each call returns one of the codes of `shim.h`.
#[repr(C)]
pub(super) struct StoreCalls {
    /// First argument of each call.
    pub(super) owner: *mut c_void,
    /// Sets a key to a value.
    pub(super) set: unsafe extern "C" fn(*mut c_void, *const u8, usize, *const u8, usize) -> c_int,
    /// Waits until the key has a value and passes it to `shim_bytes` with the last argument.
    pub(super) wait: unsafe extern "C" fn(*mut c_void, *const u8, usize, *mut c_void) -> c_int,
    /// Called once, after the last request.
    pub(super) free: unsafe extern "C" fn(*mut c_void),
}

unsafe extern "C" {
    pub(super) fn shim_bytes(sink: *mut c_void, bytes: *const u8, length: usize) -> c_int;
    pub(super) fn shim_group_open(
        store: StoreCalls,
        rank: c_int,
        world: c_int,
        interface: *const c_char,
        host: *const c_char,
        timeout: i64,
        out: *mut *mut c_void,
    ) -> c_int;
    pub(super) fn shim_group_free(group: *mut c_void);
    pub(super) fn shim_send(
        group: *mut c_void,
        tensor: *const C_tensor,
        to: c_int,
        tag: c_int,
        out: *mut *mut c_void,
    ) -> c_int;
    pub(super) fn shim_recv(
        group: *mut c_void,
        tensor: *const C_tensor,
        from: c_int,
        tag: c_int,
        out: *mut *mut c_void,
    ) -> c_int;
    pub(super) fn shim_work_wait(work: *mut c_void, timeout: i64) -> c_int;
    pub(super) fn shim_lived(out: *mut i64) -> c_int;
    pub(super) fn shim_work_free(work: *mut c_void);
    pub(super) fn shim_collective(
        group: *mut c_void,
        which: c_int,
        input: *const C_tensor,
        output: *const C_tensor,
        timeout: i64,
    ) -> c_int;
    pub(super) fn shim_vanish(code: c_int) -> !;
}
