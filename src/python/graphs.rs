//! CUDA graphs by torch.cuda, which knows what torch's allocator and libraries need while a stream is captured.

use crate::error::{Error, Result};
use crate::train::{Recorder, Replay, Work};
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;

/// Graphs of one memory pool: what one needs while it runs, another may use after it.
#[derive(Default)]
pub struct CudaGraphs {
    pool: Option<PyObject>,
}

struct Recorded(PyObject);

impl CudaGraphs {
    /// A new graph, and the context in which torch records it.
    fn begin(&mut self, py: Python<'_>) -> PyResult<(PyObject, PyObject)> {
        let cuda = py.import("torch.cuda")?;
        let pool = match &self.pool {
            Some(pool) => pool.clone_ref(py),
            None => self.pool.insert(cuda.call_method0("graph_pool_handle")?.unbind()).clone_ref(py),
        };
        let graph = cuda.getattr("CUDAGraph")?.call0()?;
        // Other threads, a notebook's say, may go on as they like.
        let options = [("pool", pool), ("capture_error_mode", "thread_local".into_pyobject(py)?.into_any().unbind())];
        let recording = cuda.getattr("graph")?.call((&graph,), Some(&options.into_py_dict(py)?))?;
        recording.call_method0("__enter__")?;
        Ok((graph.unbind(), recording.unbind()))
    }
}

impl Recorder for CudaGraphs {
    fn record(&mut self, work: Work) -> Result<Box<dyn Replay>> {
        let (graph, recording) = Python::with_gil(|py| self.begin(py)).map_err(failed)?;
        let worked = work();
        let nothing = || Python::with_gil(|py| (py.None(), py.None(), py.None()));
        let ended = Python::with_gil(|py| recording.call_method1(py, "__exit__", nothing()));
        worked?;
        ended.map_err(failed)?;
        Ok(Box::new(Recorded(graph)))
    }
}

impl Replay for Recorded {
    fn replay(&self) -> Result<()> {
        Python::with_gil(|py| self.0.call_method0(py, "replay")).map_err(failed)?;
        Ok(())
    }
}

fn failed(error: PyErr) -> Error {
    Error::Torch(error.to_string())
}
