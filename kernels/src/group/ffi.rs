//! The functions of `shim/group.cpp`.

use std::ffi::{c_char, c_int, c_void};

use torch_sys::C_tensor;

unsafe extern "C" {
    pub(super) fn shim_store_open(
        host: *const c_char,
        port: c_int,
        listener: c_int,
        name: *const c_char,
        timeout: i64,
        out: *mut *mut c_void,
        bound: *mut c_int,
    ) -> c_int;
    pub(super) fn shim_store_free(store: *mut c_void);
    pub(super) fn shim_store_set(
        store: *mut c_void,
        key: *const c_char,
        value: *const c_char,
    ) -> c_int;
    pub(super) fn shim_store_first(
        store: *mut c_void,
        key: *const c_char,
        value: *const c_char,
    ) -> c_int;
    pub(super) fn shim_store_find(store: *mut c_void, key: *const c_char, has: *mut c_int)
    -> c_int;
    pub(super) fn shim_group_open(
        store: *mut c_void,
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
