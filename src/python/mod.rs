//! What Python imports as `normformer_rs._core`: wrappers, no arithmetic.

use crate::config::{self, DataConfig, SearchOptions, TrainingConfig, TransformerConfig};
use crate::data::Binarised;
use crate::error::Error;
use crate::model::{Context, Packed, Rates, Transformer};
use crate::operator::Group;
use crate::residual::Place;
use crate::run::{self, Mode};
use crate::train::{self, Observer};
use crate::{init, metrics, norm, operator, residual};
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyKeyboardInterrupt, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3_tch::PyTensor;
use serde_json::json;
use std::collections::HashMap;
use std::path::Path;
use tch::{Kind, Tensor};

create_exception!(_core, InputError, PyValueError, "Wrong input or configuration; the message says what to do.");
create_exception!(_core, DivergedError, PyRuntimeError, "The loss or the gradient is no longer finite.");
create_exception!(_core, Interrupted, PyException, "Stopped by the user; everything is saved.");

impl From<Error> for PyErr {
    fn from(e: Error) -> PyErr {
        let text = e.to_string();
        match e {
            Error::Invalid(_) => InputError::new_err(text),
            Error::Io { .. } => PyOSError::new_err(text),
            Error::Torch(_) => PyRuntimeError::new_err(text),
            Error::Diverged(_) => DivergedError::new_err(text),
            Error::Interrupted(_) => Interrupted::new_err(text),
        }
    }
}

fn json_text(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|e| PyRuntimeError::new_err(e.to_string()))
}

fn kind(precision: &str) -> PyResult<Kind> {
    match precision {
        "f32" => Ok(Kind::Float),
        "f64" => Ok(Kind::Double),
        "bf16" => Ok(Kind::BFloat16),
        other => Err(crate::error::unknown("precision", other, ["f32", "f64", "bf16"]).into()),
    }
}

/// The options of a configuration, as JSON.
#[pyfunction]
fn fields(which: &str) -> PyResult<String> {
    let fields = match which {
        "model" => TransformerConfig::fields(),
        "training" => TrainingConfig::fields(),
        "data" => DataConfig::fields(),
        "search" => SearchOptions::fields(),
        other => {
            return Err(crate::error::unknown("configuration", other, ["model", "training", "data", "search"]).into())
        }
    };
    json_text(&fields)
}

/// The tables of norms, residual schemes and initialisations, as JSON.
#[pyfunction]
fn tables() -> PyResult<String> {
    let entry =
        |name: &str, equation: &str, source: &str| json!({"name": name, "equation": equation, "source": source});
    json_text(&json!({
        "norms": norm::NORMS.iter().map(|n| {
            let mut entry = entry(n.name, n.equation, n.source);
            if let norm::Build::Formula(formula) = &n.build {
                entry["formula"] = json!({"has_bias": formula.has_bias});
            }
            entry
        }).collect::<Vec<_>>(),
        "residuals": residual::SCHEMES.iter().map(|s| entry(s.name(), s.equation(), s.source())).collect::<Vec<_>>(),
        "inits": init::INITS.iter().map(|i| entry(i.name, i.definition, i.source)).collect::<Vec<_>>(),
    }))
}

/// {operator: (kernel calls, composed calls)} since the process started.
#[pyfunction]
fn operator_counts() -> HashMap<&'static str, (u64, u64)> {
    operator::counts().into_iter().map(|(name, kernel, composed)| (name, (kernel, composed))).collect()
}

/// Threads that kernels may use, found by running one: `torch.get_num_threads()` unless OpenMP is missing.
#[pyfunction]
fn threads_in_kernels(py: Python<'_>) -> usize {
    py.allow_threads(|| {
        let seen = std::sync::Mutex::new(std::collections::HashSet::new());
        crate::cpu::parallel::for_each(64, 1, |_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            seen.lock().unwrap_or_else(|e| e.into_inner()).insert(std::thread::current().id());
        });
        seen.into_inner().unwrap_or_else(|e| e.into_inner()).len()
    })
}

/// Forces an instruction set (baseline, avx2, avx512; none: the best); returns the one in force.
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

/// Sends tensors of the CPU through the CUDA kernels, for the tests (cuda::set_stand_in).
#[pyfunction]
fn cuda_stand_in(on: bool) {
    crate::cuda::set_stand_in(on);
}

/// The names of the CUDA programs.
#[pyfunction]
fn cuda_programs() -> Vec<&'static str> {
    crate::cuda::programs().iter().map(|p| p.name).collect()
}

/// A CUDA program's binary for an architecture such as 90, and the compiler's remarks.
#[pyfunction]
fn cuda_compile(py: Python<'_>, program: &str, options: &str, architecture: i32) -> PyResult<(Vec<u8>, String)> {
    Ok(py.allow_threads(|| crate::cuda::compile_verbosely(program, options, architecture))?)
}

/// New parameters by their canonical names.
#[pyfunction]
fn parameters(py: Python<'_>, model: &str, seed: u64, device: &str) -> PyResult<Vec<(String, PyTensor)>> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let made = py.allow_threads(|| {
        tch::manual_seed(seed as i64);
        let built = Transformer::new(&model, run::device(device)?, Kind::Float)?;
        let list = built
            .parameters
            .iter()
            .chain(built.parameters.buffers())
            .map(|(name, t)| (name.to_string(), t.shallow_clone()));
        Ok::<_, Error>(list.collect::<Vec<_>>())
    })?;
    Ok(made.into_iter().map(|(name, t)| (name, PyTensor(t))).collect())
}

/// What the configuration's residual scheme puts into a stack, as JSON: `layers`, one object a layer of what its
/// sublayers share and of what stands around and inside each; how the layers follow each other (`flow`); and whether
/// linears have biases and gains are profiled.
#[pyfunction]
fn declare(model: &str, stack: &str) -> PyResult<String> {
    let config: TransformerConfig = config::from_json("model", model)?;
    let scheme = residual::find(config.residual.as_str())?;
    let first = Place::new(&config, residual::Stack::parse(stack)?, 0);
    let sublayer = |place: Place| json!({"around": scheme.around(&place), "inside": scheme.inside(&place)});
    let layer = |layer: i64| {
        let place = Place { layer, ..first };
        json!({"shared": scheme.layer(&place), "sublayers": place.each().map(sublayer).collect::<Vec<_>>()})
    };
    json_text(&json!({
        "layers": (0..first.layers()).map(layer).collect::<Vec<_>>(),
        "flow": scheme.stack(&first),
        "has_biases": scheme.has_biases(),
        "is_profiled": scheme.is_profiled(),
        "norm": first.norm_name(),
        "init": config.init(),
    }))
}

/// α_t of a growing scheme after t (int64 (1,)), on t's device.
#[pyfunction]
fn growth(steps: i64, curve: &str, t: PyTensor) -> PyResult<PyTensor> {
    let growth = residual::Growth { steps, curve: residual::Curve::parse(curve)? };
    Ok(PyTensor(growth.alpha(&t.0, Kind::Double)?))
}

/// Logits (B, T, V) of padded token ids (padding is 1): zero rows at padding. `seed` is int64 (seed, update,
/// micro-batch); none: evaluation.
#[pyfunction]
#[pyo3(signature = (model, names, tensors, source, target_input, seed, precision))]
#[allow(clippy::too_many_arguments)]
fn forward(
    py: Python<'_>,
    model: &str,
    names: Vec<String>,
    tensors: Vec<PyTensor>,
    source: Option<PyTensor>,
    target_input: PyTensor,
    seed: Option<PyTensor>,
    precision: &str,
) -> PyResult<PyTensor> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let kind = kind(precision)?;
    let tensors: HashMap<String, Tensor> = names.into_iter().zip(tensors.into_iter().map(|t| t.0)).collect();
    let (source, target, seed) = (source.map(|t| t.0), target_input.0, seed.map(|t| t.0));
    let logits = py.allow_threads(move || {
        let built = Transformer::with_parameters(&model, &tensors)?;
        // "f32" asks for the parameters' own precision: a model made double computes in double.
        let double = built.parameters.tensors().first().is_some_and(|t| t.kind() == Kind::Double);
        let kind = if double { Kind::Double } else { kind };
        let source = source.as_ref().map(|t| Packed::from_padded("source", t, model.vocab_size)).transpose()?;
        let packed = Packed::from_padded("target_input", &target, model.vocab_size)?;
        let ctx = match seed {
            Some(seed) => Context::training(Rates::of(&model), seed, kind),
            None => Context::evaluation(kind),
        };
        let features = built.features(source.as_ref(), &packed, &ctx)?;
        let logits = built.logits(&features, kind)?;
        packed.unpack(&logits, &target)
    })?;
    Ok(PyTensor(logits))
}

/// Sets, in place, the gains that the scheme takes from one training batch (SPEC §3, `admin`).
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn profile(
    py: Python<'_>,
    model: &str,
    names: Vec<String>,
    tensors: Vec<PyTensor>,
    source: Option<PyTensor>,
    target_input: PyTensor,
    seed: PyTensor,
    precision: &str,
) -> PyResult<()> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let kind = kind(precision)?;
    let tensors: HashMap<String, Tensor> = names.into_iter().zip(tensors.into_iter().map(|t| t.0)).collect();
    let (source, target, seed) = (source.map(|t| t.0), target_input.0, seed.0);
    py.allow_threads(move || {
        let built = Transformer::with_parameters(&model, &tensors)?;
        if !built.is_profiled()? {
            return Err(Error::invalid(format!("residual {:?} has nothing to profile", model.residual.as_str())));
        }
        let source = source.as_ref().map(|t| Packed::from_padded("source", t, model.vocab_size)).transpose()?;
        let target = Packed::from_padded("target_input", &target, model.vocab_size)?;
        built.profile(source.as_ref(), &target, Context::training(Rates::of(&model), seed, kind))
    })?;
    Ok(())
}

/// Python's observer behind Rust's trait.
struct PyObserver(PyObject);

impl PyObserver {
    fn tell(&self, method: &str, value: &impl serde::Serialize) -> crate::error::Result<()> {
        let text = serde_json::to_string(value).map_err(|e| Error::invalid(e.to_string()))?;
        self.call(method, |py| {
            let value = py.import("json")?.call_method1("loads", (text,))?;
            self.0.call_method1(py, method, (value,))
        })
    }

    fn call(&self, method: &str, work: impl FnOnce(Python<'_>) -> PyResult<PyObject>) -> crate::error::Result<()> {
        Python::with_gil(|py| {
            let told = py.check_signals().and_then(|()| work(py));
            match told {
                Ok(_) => Ok(()),
                Err(e) if e.is_instance_of::<PyKeyboardInterrupt>(py) => {
                    Err(Error::Interrupted("stopped by the user".into()))
                }
                Err(e) => Err(Error::invalid(format!("the observer's {method} failed: {e}"))),
            }
        })
    }
}

impl Observer for PyObserver {
    fn started(&mut self, v: &train::Started) -> crate::error::Result<()> {
        self.tell("started", v)
    }
    fn updated(&mut self, v: &train::Update) -> crate::error::Result<()> {
        self.tell("updated", v)
    }
    fn evaluated(&mut self, v: &train::Evaluation) -> crate::error::Result<()> {
        self.tell("evaluated", v)
    }
    fn message(&mut self, level: &str, text: &str) -> crate::error::Result<()> {
        self.call("message", |py| self.0.call_method1(py, "message", (level, text)))
    }
}

/// Trains with the GIL released; the observer is called between updates. `group`: the name of a process group of
/// torch.distributed, this process's rank in it and its size; none: a process alone.
#[pyfunction]
#[pyo3(name = "train")]
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
) -> PyResult<()> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let training: TrainingConfig = config::from_json("training", training)?;
    let data: DataConfig = config::from_json("data", data)?;
    let mode = Mode::parse(mode)?;
    let group = group.map_or(Ok(Group::ALONE), |(name, rank, size)| Group::new(&name, rank, size))?;
    let mut observer = PyObserver(observer);
    py.allow_threads(|| run::train(&model, &training, &data, Path::new(output), mode, group, &mut observer))?;
    Ok(())
}

/// Tells the operators of a process group, which they then take by its name.
#[pyfunction]
fn join_group(name: &str, rank: usize, size: usize) -> PyResult<()> {
    Group::new(name, rank, size)?;
    Ok(())
}

/// {parameters, parameter_bytes, training_bytes, vocabulary, …} as JSON.
#[pyfunction]
fn dry_run(py: Python<'_>, model: &str, training: &str, data: &str) -> PyResult<String> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let training: TrainingConfig = config::from_json("training", training)?;
    let data: DataConfig = config::from_json("data", data)?;
    json_text(&py.allow_threads(|| run::dry_run(&model, &training, &data))?)
}

/// What to translate: a split of fairseq's binarised folder (data_bin, split, source_lang, target_lang), or lines.
#[derive(FromPyObject)]
enum SourceText {
    Binarised(String, String, Option<String>, Option<String>),
    Lines(Vec<String>),
}

/// Per sentence, the best translations as (text, score).
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn translate(
    py: Python<'_>,
    model_dir: &str,
    source: SourceText,
    search: &str,
    checkpoint: &str,
    batch_tokens: usize,
    precision: &str,
    device: &str,
) -> PyResult<Vec<Vec<(String, f64)>>> {
    let search = config::from_json::<SearchOptions>("search", search)?.config()?;
    let kind = kind(precision)?;
    Ok(py.allow_threads(|| {
        let translator = run::Translator::load(Path::new(model_dir), checkpoint, run::device(device)?)?;
        let interrupted = |_| {
            Python::with_gil(|py| py.check_signals()).map_err(|_| Error::Interrupted("translation was stopped".into()))
        };
        let source = match source {
            SourceText::Lines(lines) => translator.encode(&lines),
            SourceText::Binarised(folder, split, source, target) => {
                let data = Binarised::parallel(folder, &split, source.as_deref(), target.as_deref())?;
                translator.read(&data, &split)?
            }
        };
        translator.translate(source, &search, batch_tokens, kind, interrupted)
    })?)
}

/// Averages checkpoints: the last `count`, or those of the given updates. Returns the path.
#[pyfunction]
#[pyo3(signature = (model_dir, count=None, updates=None))]
fn average(py: Python<'_>, model_dir: &str, count: Option<usize>, updates: Option<Vec<u64>>) -> PyResult<String> {
    let path = py.allow_threads(|| run::average(Path::new(model_dir), count, updates))?;
    Ok(path.display().to_string())
}

/// {loss, nll, perplexity, tokens} of other text, as JSON.
#[pyfunction]
#[pyo3(signature = (model_dir, source, target, checkpoint, precision, device))]
fn evaluate_loss(
    py: Python<'_>,
    model_dir: &str,
    source: Option<&str>,
    target: &str,
    checkpoint: &str,
    precision: &str,
    device: &str,
) -> PyResult<String> {
    let kind = kind(precision)?;
    let score = py.allow_threads(|| {
        let translator = run::Translator::load(Path::new(model_dir), checkpoint, run::device(device)?)?;
        translator.evaluate(source, target, kind)
    })?;
    let perplexity = score.perplexity();
    json_text(&json!({"loss": score.loss, "nll": score.nll, "perplexity": perplexity, "tokens": score.tokens}))
}

/// A checkpoint's parameters by name; the path is a checkpoint's folder.
#[pyfunction]
fn load_parameters(path: &str) -> PyResult<Vec<(String, PyTensor)>> {
    let (arrays, _) = train::checkpoint::load_model(path)?;
    let tensors = train::load_parameters(&arrays, tch::Device::Cpu)?;
    Ok(tensors.into_iter().map(|(name, t)| (name, PyTensor(t))).collect())
}

/// Writes a model that was trained elsewhere as a run; `dictionary` is the path of its dict.txt.
#[pyfunction]
#[pyo3(signature = (output, model, training, dictionary, target_vocabulary, names, tensors))]
#[allow(clippy::too_many_arguments)]
fn save_model(
    py: Python<'_>,
    output: &str,
    model: &str,
    training: &str,
    dictionary: &str,
    target_vocabulary: Option<Vec<bool>>,
    names: Vec<String>,
    tensors: Vec<PyTensor>,
) -> PyResult<()> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let training: TrainingConfig = config::from_json("training", training)?;
    let tensors: HashMap<String, Tensor> = names.into_iter().zip(tensors.into_iter().map(|t| t.0)).collect();
    let (output, dictionary) = (Path::new(output), Path::new(dictionary));
    py.allow_threads(move || {
        run::save_model(output, &model, &training, dictionary, target_vocabulary.as_deref(), &tensors)
    })?;
    Ok(())
}

/// The target vocabulary of a run, a flag for each type; None where it is the vocabulary.
#[pyfunction]
fn target_vocabulary(model_dir: &str) -> PyResult<Option<Vec<bool>>> {
    Ok(run::target_vocabulary(Path::new(model_dir))?)
}

/// The target types of fairseq's binarised folder, a flag for each; of its one language without a pair.
#[pyfunction]
fn target_types(py: Python<'_>, data_bin: &str, pair: Option<(String, String)>) -> PyResult<Vec<bool>> {
    Ok(py.allow_threads(|| match &pair {
        Some((source, target)) => {
            Binarised::parallel(data_bin, "train", Some(source), Some(target))?.target_types("train")
        }
        None => Binarised::monolingual(data_bin).target_types("train"),
    })?)
}

/// A learning-rate schedule of the training loop, for other loops.
#[pyclass]
struct Schedule(train::Schedule);

#[pymethods]
impl Schedule {
    #[new]
    fn new(training: &str, d_model: i64) -> PyResult<Self> {
        let training: TrainingConfig = config::from_json("training", training)?;
        training.validate()?;
        Ok(Schedule(train::Schedule::new(&training, d_model)))
    }

    /// Of update n, 1 for the first.
    fn learning_rate(&self, n: u64) -> f64 {
        self.0.learning_rate(n)
    }

    /// An evaluation after update n scored `score`, more being better.
    fn evaluated(&mut self, n: u64, score: f64) {
        self.0.evaluated(n, score);
    }

    /// What evaluations have taught it, as JSON.
    #[getter]
    fn memory(&self) -> PyResult<String> {
        json_text(&self.0.memory)
    }

    #[setter]
    fn set_memory(&mut self, memory: &str) -> PyResult<()> {
        self.0.memory = config::from_json("memory", memory)?;
        Ok(())
    }
}

/// multi-bleu's numbers, as JSON.
#[pyfunction]
fn bleu(hypotheses: Vec<String>, references: Vec<String>) -> PyResult<String> {
    let b = metrics::bleu(&hypotheses, &references)?;
    json_text(&json!({
        "bleu": b.bleu, "precisions": b.precisions, "brevity_penalty": b.brevity_penalty, "ratio": b.ratio,
        "hyp_len": b.hyp_len, "ref_len": b.ref_len, "text": b.to_string(),
    }))
}

#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    operator::register();
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("InputError", m.py().get_type::<InputError>())?;
    m.add("DivergedError", m.py().get_type::<DivergedError>())?;
    m.add("Interrupted", m.py().get_type::<Interrupted>())?;
    m.add_function(wrap_pyfunction!(fields, m)?)?;
    m.add_function(wrap_pyfunction!(tables, m)?)?;
    m.add_function(wrap_pyfunction!(operator_counts, m)?)?;
    m.add_function(wrap_pyfunction!(threads_in_kernels, m)?)?;
    m.add_function(wrap_pyfunction!(cpu_level, m)?)?;
    m.add_function(wrap_pyfunction!(cuda_stand_in, m)?)?;
    m.add_function(wrap_pyfunction!(cuda_programs, m)?)?;
    m.add_function(wrap_pyfunction!(cuda_compile, m)?)?;
    m.add_function(wrap_pyfunction!(parameters, m)?)?;
    m.add_function(wrap_pyfunction!(declare, m)?)?;
    m.add_function(wrap_pyfunction!(growth, m)?)?;
    m.add_function(wrap_pyfunction!(forward, m)?)?;
    m.add_function(wrap_pyfunction!(profile, m)?)?;
    m.add_function(wrap_pyfunction!(train_py, m)?)?;
    m.add_function(wrap_pyfunction!(join_group, m)?)?;
    m.add_function(wrap_pyfunction!(dry_run, m)?)?;
    m.add_function(wrap_pyfunction!(translate, m)?)?;
    m.add_function(wrap_pyfunction!(average, m)?)?;
    m.add_function(wrap_pyfunction!(evaluate_loss, m)?)?;
    m.add_function(wrap_pyfunction!(load_parameters, m)?)?;
    m.add_function(wrap_pyfunction!(save_model, m)?)?;
    m.add_function(wrap_pyfunction!(target_vocabulary, m)?)?;
    m.add_function(wrap_pyfunction!(target_types, m)?)?;
    m.add_class::<Schedule>()?;
    m.add_function(wrap_pyfunction!(bleu, m)?)
}
