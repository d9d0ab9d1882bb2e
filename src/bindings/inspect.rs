//! Python's access to options, tables and counts, and functions for tests.

use super::{json_text, released};
use crate::config::{self, resume, DataConfig, GenerationOptions, SearchOptions, TrainingConfig, TransformerConfig};
use crate::error::unknown;
use crate::{init, model, norm, operator, parametrisation, residual, train};
use pyo3::prelude::*;
use pyo3_tch::PyTensor;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};

/// Returns the content of _tables.json: the version, the options of every configuration, and the tables of norms,
/// residual schemes, initialisations and parametrisations. `python -m normformer_rs._stubs --write` writes the file.
#[pyfunction]
fn tables() -> PyResult<String> {
    let entry =
        |name: &str, equation: &str, source: &str| json!({"name": name, "equation": equation, "source": source});
    // Methods that are in none of the tables below, each as [name, equation, source].
    let others = [norm::group_scaling::ABOUT, norm::fix_norm::ABOUT, residual::PROFILING, model::TENSORIZED];
    // Numbers that Python's implementations take from the Rust code.
    let constants = [
        ("fixnorm_eps", norm::fix_norm::EPS),
        ("fixnorm_bound", norm::fix_norm::INIT_BOUND),
        ("groupscaling_eps", norm::group_scaling::EPS),
    ];
    let parametrisations = parametrisation::PARAMETRISATIONS.iter().map(|p| p.describe());
    json_text(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "options": {
            "model": TransformerConfig::fields(),
            "training": TrainingConfig::fields(),
            "data": DataConfig::fields(),
            "search": SearchOptions::fields(),
            "generation": GenerationOptions::fields(),
        },
        "resume": resume::described(),
        "tables": {
            "norms": norm::NORMS.iter().map(|n| n.describe()).collect::<Vec<_>>(),
            "families": norm::families::FAMILIES.iter().map(|f| f.describe()).collect::<Vec<_>>(),
            "residuals": residual::SCHEMES.iter().map(|s| {
                let mut scheme = entry(s.name, s.equation, s.source);
                scheme["init"] = s.init.into();
                scheme
            }).collect::<Vec<_>>(),
            "inits": init::INITS.iter().map(|i| entry(i.name, i.definition, i.source)).collect::<Vec<_>>(),
            "parametrisations": parametrisations.collect::<Vec<_>>(),
            "others": others.map(|[name, equation, source]| entry(name, equation, source)),
            "constants": constants.map(|(name, value)| json!({"name": name, "value": value})),
        },
    }))
}

/// Errors if options of a model and its training (both JSON) contradict each other. The size of the vocabulary is not
/// known yet, so a valid size, 8, stands for it.
#[pyfunction]
fn check_options(model: &str, training: &str) -> PyResult<()> {
    let mut model: TransformerConfig = config::from_json("model", model)?;
    let training: TrainingConfig = config::from_json("training", training)?;
    model.vocab_size = 8;
    model.validate()?;
    training.validate()?;
    Ok(training.check_with(&model)?)
}

/// Returns {operator: (kernel calls, composed calls)}, counted since the process started.
#[pyfunction]
fn operator_counts() -> HashMap<&'static str, (u64, u64)> {
    operator::counts().into_iter().map(|(name, kernel, composed)| (name, (kernel, composed))).collect()
}

/// Runs the kernels' parallel loop and returns the number of threads that took part: `torch.get_num_threads()`, unless
/// OpenMP is missing.
#[pyfunction]
fn threads_in_kernels(py: Python<'_>) -> usize {
    py.allow_threads(|| {
        // A thread that panicked does not harm the set of ids, so a poisoned lock is used all the same.
        let thread_ids = std::sync::Mutex::new(std::collections::HashSet::new());
        // Each of the 64 parts takes 1 ms, so no thread can take all of them before the others have started.
        let (parts, parts_at_a_time) = (64, 1);
        crate::cpu::parallel::for_each(parts, parts_at_a_time, |_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            thread_ids.lock().unwrap_or_else(|e| e.into_inner()).insert(std::thread::current().id());
        });
        thread_ids.into_inner().unwrap_or_else(|e| e.into_inner()).len()
    })
}

/// Forces an instruction set (baseline, avx2 or avx512; None for the best) and returns the one that is now used.
#[pyfunction]
#[pyo3(signature = (name=None))]
fn cpu_level(name: Option<&str>) -> PyResult<&'static str> {
    use crate::cpu::simd::{force, Level};
    let level = match name {
        None => None,
        Some(name) => Some(Level::ALL.into_iter().find(|l| l.name() == name).ok_or_else(|| {
            PyErr::from(crate::error::unknown("level", name, Level::ALL.into_iter().map(Level::name)))
        })?),
    };
    Ok(force(level).name())
}

/// Makes the CUDA kernels run on CPU tensors, or stops that; for tests (see `cuda::set_stand_in`).
#[pyfunction]
fn cuda_stand_in(on: bool) {
    crate::cuda::set_stand_in(on);
}

/// Returns why kernels do not run on a CUDA device, or None if they run.
#[pyfunction]
fn cuda_missing(py: Python<'_>, device: i32) -> PyResult<Option<String>> {
    Ok(released(py, || {
        Ok::<_, crate::error::Error>(match crate::cuda::readiness(device)? {
            crate::cuda::Readiness::Ready => None,
            crate::cuda::Readiness::Missing(why) => Some(why),
        })
    })?)
}

/// Returns the results of checking kernels on this machine, one line each: device and driver, program, options,
/// kernel, verdict.
#[pyfunction]
fn cuda_verdicts() -> Vec<String> {
    crate::cuda::verdict::kept()
}

/// Returns each CUDA program's name, with the size in bytes of each struct that its kernels take as an argument.
#[pyfunction]
fn cuda_programs() -> BTreeMap<&'static str, BTreeMap<&'static str, usize>> {
    let structs = |p: &crate::cuda::Program| p.structs.iter().map(|layout| (layout.name, layout.size)).collect();
    operator::programs().iter().map(|p| (p.name, structs(p))).collect()
}

/// Compiles a CUDA program for an architecture such as 90, and returns the binary and the compiler's messages. Errors
/// if a struct has another layout in the program than in Rust.
#[pyfunction]
fn cuda_compile(py: Python<'_>, program: &str, options: &str, architecture: i32) -> PyResult<(Vec<u8>, String)> {
    let all = operator::programs();
    let chosen = all.iter().find(|p| p.name == program);
    let chosen = chosen.ok_or_else(|| unknown("program", program, all.iter().map(|p| p.name)))?;
    Ok(released(py, || crate::cuda::compile_verbosely(chosen, options, architecture))?)
}

/// Makes one step of the optimizer that the options `training` (JSON) name, for one matrix or vector of any floating
/// type. Changes `parameter` and `state` in place. `state` holds the tensors of the optimizer's state, in order.
#[pyfunction]
fn step_by_rule(
    py: Python<'_>,
    training: &str,
    parameter: PyTensor,
    gradient: PyTensor,
    state: Vec<PyTensor>,
    lr: f64,
) -> PyResult<()> {
    let config: TrainingConfig = crate::config::from_json("training", training)?;
    config.validate()?;
    let mut state: Vec<tch::Tensor> = state.into_iter().map(|t| t.0).collect();
    let (mut parameter, gradient) = (parameter.0, gradient.0);
    released(py, move || tch::no_grad(|| train::step_by_rule(&config, &mut parameter, &gradient, &mut state, lr)))?;
    Ok(())
}

/// Adds this file's functions to the Python module.
pub(super) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(check_options, m)?)?;
    m.add_function(wrap_pyfunction!(tables, m)?)?;
    m.add_function(wrap_pyfunction!(operator_counts, m)?)?;
    m.add_function(wrap_pyfunction!(threads_in_kernels, m)?)?;
    m.add_function(wrap_pyfunction!(cpu_level, m)?)?;
    m.add_function(wrap_pyfunction!(cuda_stand_in, m)?)?;
    m.add_function(wrap_pyfunction!(cuda_missing, m)?)?;
    m.add_function(wrap_pyfunction!(cuda_verdicts, m)?)?;
    m.add_function(wrap_pyfunction!(cuda_programs, m)?)?;
    m.add_function(wrap_pyfunction!(cuda_compile, m)?)?;
    m.add_function(wrap_pyfunction!(step_by_rule, m)?)
}
