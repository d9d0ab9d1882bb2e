//! CUDA graphs by torch's own class, which knows what its allocator and libraries need while a stream is captured.
//!
//! Only functions of C are called: a Ctrl-C that waits for Python's next instruction does not show up between beginning
//! and end, or in a replay, but where the observer is told.

use crate::error::{Error, Result};
use crate::operator::SideStream;
use crate::train::{Recorder, Replay, Work};
use pyo3::prelude::*;
use pyo3::types::IntoPyDict;
use tch::Device;

pub fn recorder(device: Device) -> Box<dyn Recorder> {
    Box::new(CudaGraphs { device, made: None })
}

/// Graphs of one device.
struct CudaGraphs {
    device: Device,
    made: Option<GraphPool>,
}

/// What all graphs share.
struct GraphPool {
    torch: PyObject,
    /// The device's number.
    index: usize,
    /// What one graph needs while it runs, another may use after it.
    pool: PyObject,
    /// Torch's default stream cannot be captured. None where no device is (in tests).
    stream: Option<SideStream>,
}

/// A graph: torch's object, begun or done.
struct CudaGraph(Option<PyObject>);

impl Drop for CudaGraph {
    /// Gives its memory back now. Without Python's lock the object would live on until somebody else takes it.
    fn drop(&mut self) {
        Python::with_gil(|_| drop(self.0.take()));
    }
}

impl GraphPool {
    fn new(device: Device) -> Result<Self> {
        let (index, stream) = match device {
            Device::Cuda(index) => (index, Some(SideStream::of(index)?)),
            _ => (0, None),
        };
        let made = Python::with_gil(|py| {
            let torch = py.import("torch._C")?;
            let pool = torch.call_method0("_graph_pool_handle")?.unbind();
            PyResult::Ok(GraphPool { torch: torch.into_any().unbind(), index, pool, stream })
        });
        made.map_err(failed)
    }

    /// A new graph that takes up what is now given to the current stream. What the allocator has spare goes back first, so
    /// that the pool can have it.
    fn begin(&self, py: Python<'_>) -> PyResult<CudaGraph> {
        self.torch.call_method0(py, "_cuda_synchronize")?;
        self.torch.call_method0(py, "_cuda_emptyCache")?;
        let graph = self.torch.call_method0(py, "_CUDAGraph")?;
        // Other threads, a notebook's say, may go on as they like.
        let mode = "thread_local".into_pyobject(py)?.into_any().unbind();
        let options = [("pool", self.pool.clone_ref(py)), ("capture_error_mode", mode)].into_py_dict(py)?;
        graph.call_method(py, "capture_begin", (), Some(&options)).inspect_err(|_| self.abandon(py))?;
        Ok(CudaGraph(Some(graph)))
    }

    fn end(&self, py: Python<'_>, graph: &CudaGraph) -> PyResult<()> {
        graph.call(py, "capture_end").inspect_err(|_| self.abandon(py))?;
        Ok(())
    }

    /// A capture that fails leaves the allocator giving from the pool.
    fn abandon(&self, py: Python<'_>) {
        // Where it had not begun to, there is nothing to end.
        let _ = self.torch.call_method1(py, "_cuda_endAllocateToPool", (self.index, self.pool.clone_ref(py)));
    }
}

impl Recorder for CudaGraphs {
    fn record(&mut self, work: Work) -> Result<Box<dyn Replay>> {
        let made = match &mut self.made {
            Some(made) => made,
            none => none.insert(GraphPool::new(self.device)?),
        };
        let _entered = made.stream.as_ref().map(SideStream::enter).transpose()?;
        let graph = Python::with_gil(|py| made.begin(py)).map_err(failed)?;
        let worked = work();
        let ended = Python::with_gil(|py| made.end(py, &graph)).map_err(failed);
        worked.and(ended)?;
        Ok(Box::new(graph))
    }
}

impl Replay for CudaGraph {
    fn replay(&self) -> Result<()> {
        Python::with_gil(|py| self.call(py, "replay")).map_err(failed)
    }
}

impl CudaGraph {
    fn call(&self, py: Python<'_>, method: &str) -> PyResult<()> {
        self.0.as_ref().expect("only Drop takes it").call_method0(py, method)?;
        Ok(())
    }
}

fn failed(error: PyErr) -> Error {
    Error::Torch(error.to_string())
}
