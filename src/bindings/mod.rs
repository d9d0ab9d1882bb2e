//! The extension module `normformer_rs._core`: functions and classes that call the crate and do no arithmetic
//! themselves.

mod graphs;
mod inspect;
mod listener;
mod model;
mod parametrisation;
mod runs;
mod training;

use crate::error::Error;
use crate::operator::caught;
use pyo3::exceptions::{PyNotImplementedError, PyOSError, PyRuntimeError};
use pyo3::import_exception;
use pyo3::prelude::*;
use pyo3::sync::GILOnceCell;
use pyo3_tch::PyTensor;
use std::collections::BTreeMap;
use std::io;
use tch::{Kind, Tensor};

import_exception!(normformer_rs.errors, InputError);
import_exception!(normformer_rs.errors, DivergedError);
import_exception!(normformer_rs.errors, Interrupted);

impl From<Error> for PyErr {
    /// Returns the Python exception for an error. Each kind of error that users may want to catch has its own class.
    fn from(e: Error) -> PyErr {
        // If a Python exception caused the error, that exception is returned itself.
        if let Error::Raised(_) | Error::Torch(_) = &e {
            let raised = Python::with_gil(|py| {
                if let Error::Raised(raised) = &e {
                    raised.restore();
                }
                // An exception that a tensor subclass raised may still be set as Python's current error.
                PyErr::take(py)
            });
            if let Some(raised) = raised {
                return raised;
            }
        }
        let text = crate::error::printable(&e.to_string());
        match e {
            Error::Invalid(_) => InputError::new_err(text),
            Error::Io { source, .. } => os_error(text, &source),
            Error::Torch(_) | Error::Raised(_) => PyRuntimeError::new_err(text),
            Error::NotImplemented(_) => PyNotImplementedError::new_err(text),
            Error::Diverged(_) => DivergedError::new_err(text),
            Error::Interrupted(_) => Interrupted::new_err(text),
        }
    }
}

/// Returns an OSError with this text. Its `errno` lets Python code distinguish a full disk from a missing file.
fn os_error(text: String, source: &io::Error) -> PyErr {
    let number = source.raw_os_error().or(match source.kind() {
        io::ErrorKind::StorageFull => Some(libc::ENOSPC),
        io::ErrorKind::QuotaExceeded => Some(libc::EDQUOT),
        io::ErrorKind::FileTooLarge => Some(libc::EFBIG),
        io::ErrorKind::NotFound => Some(libc::ENOENT),
        io::ErrorKind::PermissionDenied => Some(libc::EACCES),
        _ => None,
    });
    let error = PyOSError::new_err(text);
    // The attribute `strerror` stays unset, so Python prints only the text.
    match Python::with_gil(|py| error.value(py).setattr("errno", number)) {
        Ok(()) => error,
        Err(failed) => failed,
    }
}

/// Runs `work` without the GIL. A panic becomes an error, because pyo3's PanicException would escape
/// `except Exception`.
fn released<T: Send>(py: Python<'_>, work: impl FnOnce() -> crate::error::Result<T> + Send) -> crate::error::Result<T> {
    py.allow_threads(|| caught(work))
}

/// Raises if the work should stop: runs pending signal handlers, then raises if a stop has been requested earlier.
fn check_signals(py: Python<'_>) -> PyResult<()> {
    py.check_signals()?;
    check_stop_request(py)
}

/// Raises if Python has recorded a request to stop. The Python function `ask` raises the exception.
fn check_stop_request(py: Python<'_>) -> PyResult<()> {
    static ASK: GILOnceCell<Py<PyAny>> = GILOnceCell::new();
    ASK.import(py, "normformer_rs.loop.signals", "ask")?.call0().map(drop)
}

/// Returns the value as JSON.
fn json_text(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|e| PyRuntimeError::new_err(e.to_string()))
}

/// Returns libtorch's type of numbers for a precision's name.
fn kind(precision: &str) -> PyResult<Kind> {
    match precision {
        "f32" => Ok(Kind::Float),
        "f64" => Ok(Kind::Double),
        "bf16" => Ok(Kind::BFloat16),
        other => Err(crate::error::unknown("precision", other, ["f32", "f64", "bf16"]).into()),
    }
}

/// Returns the tensors by name; `names` has the name of each of the `tensors`, in the same order.
fn named(names: Vec<String>, tensors: Vec<PyTensor>) -> BTreeMap<String, Tensor> {
    names.into_iter().zip(tensors.into_iter().map(|t| t.0)).collect()
}

/// The version of libtorch that the extension is linked against. Before `_loading.py` loads the extension, it searches
/// the file for this text: with another libtorch loading fails, and the linker's message would not name the cause.
static BUILT_AGAINST: &str = concat!("normformer_rs is built against torch ", env!("NORMFORMER_RS_TORCH"), ";");

// Fills the Python module; Python calls this function at the import. A doc comment would become the module's `__doc__`.
#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    // oneDNN reads its limits at its first use, so this must run before any product.
    crate::cpu::amx::avoid_if_broken();
    crate::operator::register();
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("BUILT_AGAINST", BUILT_AGAINST)?;
    m.add("InputError", m.py().get_type::<InputError>())?;
    m.add("DivergedError", m.py().get_type::<DivergedError>())?;
    m.add("Interrupted", m.py().get_type::<Interrupted>())?;
    inspect::add(m)?;
    model::add(m)?;
    parametrisation::add(m)?;
    training::add(m)?;
    runs::add(m)
}
