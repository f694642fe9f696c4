//! A transfer between two ranks that is under way.

#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::ffi::c_void;
use std::time::Duration;

use super::ffi::{shim_work_free, shim_work_wait};
use super::milliseconds;
use crate::Result;
use crate::shim::guarded;

/// A transfer over Gloo. The tensor is kept as long as the transfer; dropping it cancels the transfer.
#[derive(Debug)]
pub(super) struct GlooTransfer(pub(super) *mut c_void);

// SAFETY: it holds handles of transfers, which any thread may wait for or free.
unsafe impl Send for GlooTransfer {}

impl Drop for GlooTransfer {
    fn drop(&mut self) {
        // SAFETY: made by `shim_send` or `shim_recv`, freed once. Gloo then forgets the buffer under its lock.
        unsafe { shim_work_free(self.0) }
    }
}

impl GlooTransfer {
    /// Waits until the transfer is done. Gloo closes every connection of this rank when the time runs out.
    pub(super) fn wait(&self, timeout: Duration) -> Result<()> {
        // SAFETY: the work is alive.
        guarded("wait for a rank", unsafe { shim_work_wait(self.0, milliseconds(timeout)) })
    }
}
