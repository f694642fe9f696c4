//! Memory that NumPy reads where it is.
//!
//! NumPy's array interface names an address, and the array keeps this object alive: no copy, no dependence on NumPy's
//! release, and no code here that is not checked. (The buffer protocol is in Python's stable interface from 3.11 on.)

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::process::Owned;

/// What keeps the memory alive.
#[expect(dead_code, reason = "held for its memory")]
enum Holder {
    Batch(Arc<Owned<loader::Batch>>),
    Words(Vec<i32>),
}

/// An array of numbers.
#[pyclass(frozen, module = "zdata._zdata")]
pub(crate) struct Array {
    _holder: Holder,
    address: usize,
    shape: Vec<usize>,
    kind: &'static str,
}

/// The type of signed 32-bit numbers in this machine's order, and of bytes.
pub(crate) const I32: &str = if cfg!(target_endian = "little") { "<i4" } else { ">i4" };
pub(crate) const U8: &str = "|u1";

impl Array {
    /// A list of numbers.
    pub(crate) fn of(mut words: Vec<i32>) -> Self {
        let (address, shape) = (words.as_mut_ptr().expose_provenance(), vec![words.len()]);
        Array { _holder: Holder::Words(words), address, shape, kind: I32 }
    }

    /// A column of a batch, at this address of its memory.
    pub(crate) fn column(
        batch: &Arc<Owned<loader::Batch>>,
        address: usize,
        kind: &'static str,
        shape: [usize; 2],
    ) -> Self {
        Array { _holder: Holder::Batch(Arc::clone(batch)), address, shape: shape.to_vec(), kind }
    }
}

#[pymethods]
impl Array {
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", self.kind)?;
        interface.set_item("shape", pyo3::types::PyTuple::new(py, &self.shape)?)?;
        let read_only = false;
        interface.set_item("data", (self.address, read_only))?;
        Ok(interface)
    }

    fn __len__(&self) -> usize {
        self.shape.first().copied().unwrap_or_default()
    }
}
