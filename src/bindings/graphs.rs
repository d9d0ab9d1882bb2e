//! Records CUDA graphs with torch's own class, which does what torch's allocator and libraries need during a capture.
//!
//! During a capture and a replay, Python runs no bytecode, so Ctrl-C cannot interrupt them. Python raises it later,
//! when the training loop calls its observer.

use crate::error::{Error, Result};
use crate::operator::SideStream;
use crate::train::{Recorder, Replay, Work};
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;
use tch::Device;

/// Returns the recorder with which the training loop records CUDA graphs on a device.
pub fn recorder(device: Device) -> Box<dyn Recorder> {
    Box::new(CudaGraphs { device, shared: None })
}

/// The recorder of CUDA graphs for one device.
struct CudaGraphs {
    device: Device,
    /// The state that all graphs share; `None` until the first recording creates it.
    shared: Option<GraphPool>,
}

/// The state that all graphs on a device share.
struct GraphPool {
    /// The Python module `torch._C`.
    torch: PyObject,
    /// The index of the CUDA device; 0 if there is none, as in tests.
    index: usize,
    /// The memory pool of all graphs. They can share it because they never run at the same time.
    pool: PyObject,
    /// The stream on which graphs are captured, because torch's default stream cannot be captured. `None` if there is
    /// no CUDA device, as in tests.
    stream: Option<SideStream>,
}

/// A graph: torch's Python object, whose capture is running or complete. `None` only while it is dropped.
struct CudaGraph(Option<PyObject>);

impl Drop for CudaGraph {
    /// Frees the graph's memory at once. Without the GIL, pyo3 would free the object only when a thread takes the GIL.
    fn drop(&mut self) {
        Python::with_gil(|_| drop(self.0.take()));
    }
}

impl GraphPool {
    /// Prepares the pool for the graphs of one device, and the side stream on which they are captured.
    fn new(device: Device) -> Result<Self> {
        let (index, stream) = match device {
            Device::Cuda(index) => (index, Some(SideStream::of(index)?)),
            _ => (0, None),
        };
        let created = Python::with_gil(|py| {
            let torch = py.import("torch._C")?;
            let pool = torch.call_method0("_graph_pool_handle")?.unbind();
            PyResult::Ok(GraphPool { torch: torch.into_any().unbind(), index, pool, stream })
        });
        created.map_err(failed)
    }

    /// Begins to capture the work on the current stream as a new graph. First frees the memory that the allocator has
    /// cached, so that the pool can use it.
    fn begin(&self, py: Python<'_>) -> PyResult<CudaGraph> {
        self.torch.call_method0(py, "_cuda_synchronize")?;
        self.torch.call_method0(py, "_cuda_emptyCache")?;
        let graph = self.torch.call_method0(py, "_CUDAGraph")?;
        // With "thread_local", other threads, such as those of a notebook, may use CUDA during the capture.
        let mode = "thread_local".into_pyobject(py)?.into_any().unbind();
        let options = [("pool", self.pool.clone_ref(py)), ("capture_error_mode", mode)].into_py_dict(py)?;
        graph.call_method(py, "capture_begin", (), Some(&options)).inspect_err(|_| self.abandon(py))?;
        Ok(CudaGraph(Some(graph)))
    }

    /// Ends the capture of a graph.
    fn end(&self, py: Python<'_>, graph: &CudaGraph) -> PyResult<()> {
        graph.call(py, "capture_end").inspect_err(|_| self.abandon(py))?;
        Ok(())
    }

    /// Ends the allocation from the pool, which would otherwise continue after a failed capture.
    fn abandon(&self, py: Python<'_>) {
        // If the allocation has not begun, this call fails; the error is ignored.
        let _ = self.torch.call_method1(py, "_cuda_endAllocateToPool", (self.index, self.pool.clone_ref(py)));
    }
}

impl Recorder for CudaGraphs {
    /// Records the work as a CUDA graph. The work is captured, not executed; a replay executes it.
    fn record(&mut self, work: Work) -> Result<Box<dyn Replay>> {
        let shared = match &mut self.shared {
            Some(shared) => shared,
            // `get_or_insert_with` could not pass on an error of `new`.
            none => none.insert(GraphPool::new(self.device)?),
        };
        // While this guard lives, the side stream is the current stream.
        let _entered = shared.stream.as_ref().map(SideStream::enter).transpose()?;
        let graph = Python::with_gil(|py| shared.begin(py)).map_err(failed)?;
        // The capture ends even if the work has failed; then the work's error is reported, not the capture's.
        let worked = work();
        let ended = Python::with_gil(|py| shared.end(py, &graph)).map_err(failed);
        worked.and(ended)?;
        Ok(Box::new(graph))
    }
}

impl Replay for CudaGraph {
    /// Launches the graph on torch's current stream.
    fn replay(&self) -> Result<()> {
        Python::with_gil(|py| self.call(py, "replay")).map_err(failed)
    }
}

impl CudaGraph {
    /// Calls the method called `method` of torch's graph, without arguments.
    fn call(&self, py: Python<'_>, method: &str) -> PyResult<()> {
        self.0.as_ref().expect("only Drop takes it").call_method0(py, method)?;
        Ok(())
    }
}

/// Converts an exception of torch to this crate's error.
fn failed(error: PyErr) -> Error {
    Error::Torch(error.to_string())
}
