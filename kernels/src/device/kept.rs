//! What a process has one of for each of its GPUs, for use now and then.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tch::Device;

use crate::Result;

/// By GPU, made where it is first asked for, and never dropped.
///
/// libtorch has 32 streams for a GPU and hands them out in turn: were there a new one for each piece of held-out text, or for
/// each state that is kept, sooner or later a communicator would share its stream with copies.
pub(super) struct Kept<T>(Mutex<BTreeMap<usize, Arc<T>>>);

impl<T> Kept<T> {
    pub(super) const fn new() -> Self {
        Kept(Mutex::new(BTreeMap::new()))
    }

    /// That of `device`; of a CPU a new one, which costs nothing there.
    pub(super) fn of(
        &self,
        device: Device,
        make: impl FnOnce(Device) -> Result<T>,
    ) -> Result<Arc<T>> {
        let Device::Cuda(index) = device else { return Ok(Arc::new(make(device)?)) };
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(one) = kept.get(&index) {
            return Ok(Arc::clone(one));
        }
        let one = Arc::new(make(device)?);
        kept.insert(index, Arc::clone(&one));
        Ok(one)
    }
}
