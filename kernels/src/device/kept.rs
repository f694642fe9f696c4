//! One object per GPU and process, for occasional use.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tch::Device;

use crate::Result;

/// By GPU, made at first use and never dropped.
///
/// libtorch has 32 streams per GPU and hands them out in turn. With a new stream for each validation batch or saved
/// state, a communicator would sooner or later share its stream with copies.
pub(super) struct PerGpu<T>(Mutex<BTreeMap<usize, Arc<T>>>);

impl<T> PerGpu<T> {
    pub(super) const fn new() -> Self {
        PerGpu(Mutex::new(BTreeMap::new()))
    }

    /// The object of `device`; on a CPU a new one, which is cheap.
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
