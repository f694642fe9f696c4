//! Errors: a fault becomes the exception of its exit code, with its parts as attributes.

use contract::Fault;
use pyo3::prelude::*;

/// What a function for Python returns.
pub(crate) type Outcome<T> = Result<T, Raised>;

/// An error on its way to Python.
#[derive(Debug)]
pub(crate) enum Raised {
    Fault(Fault),
    Python(PyErr),
}

impl From<Fault> for Raised {
    fn from(fault: Fault) -> Self {
        Raised::Fault(fault)
    }
}

impl From<PyErr> for Raised {
    fn from(error: PyErr) -> Self {
        Raised::Python(error)
    }
}

impl From<Raised> for PyErr {
    fn from(raised: Raised) -> Self {
        match raised {
            Raised::Python(error) => error,
            Raised::Fault(fault) => {
                Python::attach(|py| exception(py, &fault).unwrap_or_else(|error| error))
            }
        }
    }
}

/// The exception of a fault.
fn exception(py: Python<'_>, fault: &Fault) -> PyResult<PyErr> {
    let [found, wanted, hint] = fault.details();
    let parts = (
        fault.class().exit_code(),
        fault.to_string(),
        fault.what(),
        fault.place(),
        found,
        wanted,
        hint,
    );
    let made = py.import("zdata.errors")?.getattr("from_parts")?.call1(parts)?;
    Ok(PyErr::from_value(made))
}
