//! Training with progress reports to an observer, and learning-rate schedules.

use super::runs::{as_raised, interruptible};
use super::{check_stop_request, graphs, json_text, released};
use crate::config::{self, DataConfig, TrainingConfig, TransformerConfig};
use crate::error::Error;
use crate::operator::ProcessGroup;
use crate::run::{self, Mode, Surroundings};
use crate::train::{self, Observer};
use pyo3::prelude::*;
use std::path::Path;

/// Trains with the GIL released; the observer is called between updates. `mode` is "new", "resume" or "overwrite".
/// `group` is (name of a torch.distributed process group, this process's rank, number of processes), or None for a
/// single process. `from_checkpoint` is the checkpoint from which the mode "resume" continues (default: the newest).
/// `init_from` is a run, or RUN:CHECKPOINT, whose weights a new run begins with.
#[pyfunction]
#[pyo3(name = "train", signature = (model, training, data, output, mode, group, observer, from_checkpoint=None, init_from=None))]
#[allow(clippy::too_many_arguments)]
fn train_py(
    py: Python<'_>,
    model: &str,
    training: &str,
    data: &str,
    output: &str,
    mode: &str,
    group: Option<(String, usize, usize)>,
    observer: PyObject,
    from_checkpoint: Option<String>,
    init_from: Option<String>,
) -> PyResult<()> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let training: TrainingConfig = config::from_json("training", training)?;
    let data: DataConfig = config::from_json("data", data)?;
    let mode = Mode::parse(mode, from_checkpoint)?;
    let group = group.map_or(Ok(ProcessGroup::ALONE), |(name, rank, size)| ProcessGroup::new(&name, rank, size))?;
    let mut observer = PyObserver { observer, raised: None };
    let done = released(py, || {
        // `graphs::recorder` makes the recorder when the device is known.
        let recorder = Some(graphs::recorder as fn(_) -> _);
        let surroundings = Surroundings { group, recorder, init_from: init_from.as_deref(), observer: &mut observer };
        run::train(&model, &training, &data, Path::new(output), mode, surroundings)
    });
    as_raised(py, done, observer.raised)
}

/// Registers a process group of torch.distributed by its name, for the collective operators.
#[pyfunction]
fn join_group(name: &str, rank: usize, size: usize) -> PyResult<()> {
    ProcessGroup::new(name, rank, size)?;
    Ok(())
}

/// Returns {parameters, parameter_bytes, training_bytes, vocabulary, …} of a planned run as JSON.
#[pyfunction]
fn dry_run(py: Python<'_>, model: &str, training: &str, data: &str) -> PyResult<String> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let training: TrainingConfig = config::from_json("training", training)?;
    let data: DataConfig = config::from_json("data", data)?;
    json_text(&interruptible(py, "the dry run", |check_interrupt| {
        run::dry_run(&model, &training, &data, check_interrupt)
    })?)
}

/// Passes a run's events from Rust to an observer in Python.
struct PyObserver {
    observer: PyObject,
    /// The first exception that the observer or a signal handler has raised. It ends the run, which first saves a
    /// checkpoint.
    raised: Option<PyErr>,
}

impl PyObserver {
    /// Calls the observer's method `method` with `value`, converted to Python dicts, lists and numbers through JSON.
    fn tell(&mut self, method: &str, value: &impl serde::Serialize) -> crate::error::Result<()> {
        let text = serde_json::to_string(value).map_err(|e| Error::invalid(e.to_string()))?;
        self.call(|py, observer| {
            let value = py.import("json")?.call_method1("loads", (text,))?;
            observer.call_method1(py, method, (value,)).map(drop)
        })
    }

    /// Runs `work` with the GIL, and keeps the first exception in `raised`. While an exception is ending the run,
    /// requests to stop are ignored.
    fn call(&mut self, work: impl FnOnce(Python<'_>, &PyObject) -> PyResult<()>) -> crate::error::Result<()> {
        let is_ending = self.raised.is_some();
        let called = Python::with_gil(|py| {
            py.check_signals()?;
            work(py, &self.observer)?;
            if is_ending {
                Ok(())
            } else {
                check_stop_request(py)
            }
        });
        called.map_err(|error| {
            self.raised.get_or_insert(error);
            Error::Interrupted("stopped".into())
        })
    }
}

impl Observer for PyObserver {
    fn started(&mut self, event: &train::Started) -> crate::error::Result<()> {
        self.tell("started", event)
    }
    fn updated(&mut self, event: &train::Update) -> crate::error::Result<()> {
        self.tell("updated", event)
    }
    fn evaluated(&mut self, event: &train::Evaluation) -> crate::error::Result<()> {
        self.tell("evaluated", event)
    }
    fn check_interrupt(&mut self) -> crate::error::Result<()> {
        // The closure does nothing, because `call` itself checks for signals and requests to stop.
        self.call(|_, _| Ok(()))
    }
    fn message(&mut self, level: &str, text: &str) -> crate::error::Result<()> {
        let text = crate::error::printable(text);
        self.call(|py, observer| observer.call_method1(py, "message", (level, text)).map(drop))
    }
}

/// A learning-rate schedule of the training loop, for use in a user's own loop.
#[pyclass(name = "Schedule")]
struct PySchedule(train::Schedule);

#[pymethods]
impl PySchedule {
    #[new]
    /// Builds the schedule of the training options (JSON); some rates depend on the model's width `d_model`.
    fn new(training: &str, d_model: i64) -> PyResult<Self> {
        let training: TrainingConfig = config::from_json("training", training)?;
        training.validate()?;
        Ok(PySchedule(train::Schedule::new(&training, d_model)))
    }

    /// Returns the learning rate of update n, from 1.
    fn learning_rate(&self, n: u64) -> f64 {
        self.0.learning_rate(n)
    }

    /// Passes the score of an evaluation after update n to the schedule; a higher score is better.
    fn evaluated(&mut self, n: u64, score: f64) {
        self.0.evaluated(n, score);
    }

    /// Returns the state that the schedule has learned from evaluations, as JSON.
    #[getter]
    fn memory(&self) -> PyResult<String> {
        json_text(&self.0.memory)
    }

    /// Sets this state, as `memory` returned it.
    #[setter]
    fn set_memory(&mut self, memory: &str) -> PyResult<()> {
        self.0.memory = config::from_json("memory", memory)?;
        Ok(())
    }
}

/// Adds this file's functions to the Python module.
pub(super) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PySchedule>()?;
    m.add_function(wrap_pyfunction!(train_py, m)?)?;
    m.add_function(wrap_pyfunction!(join_group, m)?)?;
    m.add_function(wrap_pyfunction!(dry_run, m)?)
}
