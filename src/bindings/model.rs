//! Functions on models whose parameters are tensors in Python.

use super::listener::Listener;
use super::{json_text, kind, named, released};
use crate::analysis::{Columns, Diagnostics, StackObservation};
use crate::config::{self, TransformerConfig};
use crate::error::Error;
use crate::init::{self, Role, Table};
use crate::model::{first_values, Context, HostBatch, Packed, Rates, Sentences, Transformer};
use crate::norm;
use crate::operator::{self, caught};
use crate::residual;
use crate::run;
use crate::train;
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3_tch::PyTensor;
use serde_json::json;
use std::collections::HashMap;
use std::rc::Rc;
use tch::{Kind, Tensor};

/// Returns the parameters and buffers of a new model, each under its canonical name. `seed` is that of the initial
/// values.
#[pyfunction]
fn parameters(py: Python<'_>, model: &str, seed: u64, device: &str) -> PyResult<Vec<(String, PyTensor)>> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let created = released(py, || {
        let built = Transformer::new(&model, seed, run::device(device)?, Kind::Float)?;
        let list = built
            .parameters
            .iter()
            .chain(built.parameters.buffers())
            .map(|(name, t)| (name.to_string(), t.shallow_clone()));
        Ok::<_, Error>(list.collect::<Vec<_>>())
    })?;
    Ok(created.into_iter().map(|(name, t)| (name, PyTensor(t))).collect())
}

/// Initialises the matrix (roles·fan_out, fan_in) of a linear layer in place, one block of rows for each role (such as
/// query, key and value). The configuration's initialisation is that of sublayer `sublayer` of layer `layer` (both
/// counted from 0) in a stack. `kinds` are the layer's sublayers, if they differ from the stack's.
#[pyfunction]
#[pyo3(signature = (weight, roles, model, stack, layer, sublayer, kinds=None))]
#[allow(clippy::too_many_arguments)] // Python makes one call
fn draw_linear(
    py: Python<'_>,
    weight: PyTensor,
    roles: Vec<String>,
    model: &str,
    stack: &str,
    layer: i64,
    sublayer: usize,
    kinds: Option<Vec<String>>,
) -> PyResult<()> {
    let config: TransformerConfig = config::from_json("model", model)?;
    let roles = roles.iter().map(|role| Role::parse(role)).collect::<Result<Vec<_>, _>>()?;
    let kinds = sublayers(kinds)?;
    let context = with_kinds(config.place(residual::StackName::parse(stack)?, layer), &kinds);
    // `each` iterates over the places of the layer's sublayers.
    let place = context
        .each()
        .nth(sublayer)
        .ok_or_else(|| Error::invalid(format!("sublayer must be below {}, got {sublayer}", context.sublayers)))?;
    let init = init::find(config.init())?;
    let weight = weight.0;
    let (rows, cols) = caught(|| Ok(weight.size2()?))?;
    // Each role has an equal block of rows.
    let fill = init.linears(&roles, cols, rows / roles.len().max(1) as i64, &place);
    released(py, move || fill.write(&weight, &init::ProcessGenerator))?;
    Ok(())
}

/// Initialises the bias of a linear layer in place, one block of numbers for each role. `fan_in` is the number of
/// columns of the layer's matrix.
#[pyfunction]
fn draw_bias(py: Python<'_>, bias: PyTensor, roles: Vec<String>, fan_in: i64, model: &str) -> PyResult<()> {
    let config: TransformerConfig = config::from_json("model", model)?;
    let roles = roles.iter().map(|role| Role::parse(role)).collect::<Result<Vec<_>, _>>()?;
    let bias = bias.0;
    let block = bias.numel() as i64 / roles.len().max(1) as i64;
    let blocks: Vec<(Role, i64)> = roles.into_iter().map(|role| (role, block)).collect();
    let fill = init::find(config.init())?.biases(&blocks, fan_in);
    released(py, move || fill.write(&bias, &init::ProcessGenerator))?;
    Ok(())
}

/// Initialises a table of word embeddings (V, d) or an untied output projection in place. `name` is the parameter's
/// name, as `parameters` returns it.
#[pyfunction]
fn draw_table(py: Python<'_>, weight: PyTensor, name: &str, model: &str) -> PyResult<()> {
    let config: TransformerConfig = config::from_json("model", model)?;
    let init = init::find(config.init())?;
    let fill = match name {
        "output_projection" => init.output_matrix(&config.outline(), config.vocab_size, &config.options),
        table => first_values(Table::parse(table)?, &config, init),
    };
    let weight = weight.0;
    released(py, move || fill.write(&weight, &init::ProcessGenerator))?;
    Ok(())
}

/// Parses the names of a layer's sublayers. None gives an empty list, which means the sublayers of the stack.
fn sublayers(kinds: Option<Vec<String>>) -> Result<Vec<residual::Sublayer>, Error> {
    kinds.unwrap_or_default().iter().map(|kind| residual::Sublayer::parse(kind)).collect()
}

/// Returns `context`, the place of a layer's first sublayer, for a layer with the sublayers `kinds`. An empty list
/// changes nothing.
fn with_kinds<'a>(context: residual::LayerContext<'a>, kinds: &'a [residual::Sublayer]) -> residual::LayerContext<'a> {
    context.of_block(kinds).unwrap_or(context)
}

/// Returns what the configuration's residual schemes declare for a stack, as JSON. `layers` has one object for each
/// layer: the changes before, around and inside its sublayers, and the names of the tensors that it reads from
/// earlier layers and keeps for later ones. `flow` holds what belongs to the whole stack. Two flags say whether
/// linear layers have biases and whether gains are profiled. `kinds` are a layer's sublayers, if they differ from the
/// stack's.
#[pyfunction]
#[pyo3(signature = (model, stack, kinds=None))]
fn declare(model: &str, stack: &str, kinds: Option<Vec<String>>) -> PyResult<String> {
    let config: TransformerConfig = config::from_json("model", model)?;
    let kinds = sublayers(kinds)?;
    config.check_options_of(&kinds)?;
    let schemes = config.schemes();
    // The place of the first sublayer in the stack's first layer.
    let first = with_kinds(config.place(residual::StackName::parse(stack)?, 0), &kinds);
    let (layers, flow) = (schemes.layers(&first), schemes.flow(&first));
    let layer = |(index, layer): (usize, &residual::LayerSpec)| {
        let (takes, leaves) = (layer.takes(), residual::leaves(&layers, index, &flow));
        json!({"begin": layer.begin, "sublayers": layer.sublayers, "takes": takes, "leaves": leaves})
    };
    json_text(&json!({
        "layers": layers.iter().enumerate().map(layer).collect::<Vec<_>>(),
        "flow": flow,
        "has_biases": schemes.has_biases(),
        "is_profiled": schemes.is_profiled(),
        "norm": first.norm_name(),
        "init": config.init(),
        "attention": config.unusual_scores(),
    }))
}

/// Returns the keyword arguments of a norm's module at one place in a model, as JSON. The place is given by two flags:
/// whether the norm is the decoder's last one, and whether it comes after a stack's last layer.
#[pyfunction]
fn norm_settings(model: &str, name: &str, last_of_decoder: bool, ends_stack: bool) -> PyResult<String> {
    let config: TransformerConfig = config::from_json("model", model)?;
    let (width, heads) = (config.d_model, config.heads);
    let (spec, options) = norm::named(name, &config.options)?;
    // `start` is a factor of the initial gain.
    let context = norm::NormContext { width, heads, options: &options, last_of_decoder, ends_stack, start: 1.0 };
    json_text(&spec.keyword_arguments(&context))
}

/// Returns [start, std, offset, factor] for each parameter p of a norm with the keyword arguments `given` (JSON): p is
/// initialised to N(start, std²), and kernels receive factor·(offset + p). Errors if an argument makes no sense.
#[pyfunction]
fn norm_numbers(name: &str, width: i64, given: &str) -> PyResult<Vec<[f64; 4]>> {
    let spec = norm::find(name)?;
    let given = serde_json::from_str(given).map_err(|e| Error::invalid(e.to_string()))?;
    let arguments = spec.given(width, given)?;
    let numbers = spec.parameters.iter().map(|parameter| parameter.numbers(&arguments));
    Ok(numbers.map(|n| [n.start, n.std, n.offset, n.factor]).collect())
}

/// Computes a norm of x with PyTorch operations, which torch.export can record. The arguments are those of the
/// operator with the same name.
#[pyfunction]
fn composed_norm(x: PyTensor, parameters: Vec<Option<PyTensor>>, options: Vec<f64>, name: &str) -> PyResult<PyTensor> {
    let parameters = parameters.into_iter().map(|p| p.map(|p| p.0)).collect();
    let spec = norm::find(name)?;
    Ok(PyTensor(caught(|| spec.composed(&x.0, operator::width(&x.0)?, parameters, &options))?))
}

/// Returns α_t, the gain of a scheme whose gain grows along `curve` for `steps` updates, after `t` updates. `t` is
/// int64 (1,); the result is float64 on the same device.
#[pyfunction]
fn growth(steps: i64, curve: &str, t: PyTensor) -> PyResult<PyTensor> {
    // `by_layer` is false, so that α is the same in every layer; the 0 below is a layer's number.
    let growth = residual::Growth { steps, curve: residual::GrowthCurve::parse(curve)?, by_layer: false };
    Ok(PyTensor(caught(|| growth.alpha(&t.0, 0, Kind::Double))?))
}

/// Returns two words for each parameter: its role (embedding, hidden-matrix, hidden-vector or end), and the dimension
/// over which products with it are summed (nothing, width, root-width or depth).
#[pyfunction]
fn parameter_parts(
    model: &str,
    names: Vec<String>,
    tensors: Vec<PyTensor>,
) -> PyResult<HashMap<String, (&'static str, &'static str)>> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let built = Transformer::with_parameters(&model, &named(names, tensors))?;
    let parts = built.parameters.parts();
    Ok(parts.map(|(name, _, part)| (name.to_string(), (part.role.name(), part.sums_over.name()))).collect())
}

/// Returns (lr, weight_decay, eps) of each parameter of a model under u-μP, by name.
#[pyfunction]
fn unit_multipliers(
    model: &str,
    names: Vec<String>,
    tensors: Vec<PyTensor>,
) -> PyResult<HashMap<String, (f64, f64, f64)>> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let built = Transformer::with_parameters(&model, &named(names, tensors))?;
    let parts = built.parameters.parts();
    let each = parts.map(|(name, t, part)| {
        // The first result, a sort key for the optimizer, is not needed.
        let (_, factors) = model.multipliers(name, part, &t.size(), crate::parametrisation::StepSize::Entries);
        (name.to_string(), (factors.lr, factors.weight_decay, factors.eps))
    });
    Ok(each.collect())
}

/// Returns the names of the matrices whose vectors the option `unit_matrices` keeps at norm 1, each with the dimension
/// along which these vectors lie.
#[pyfunction]
fn unit_dimensions(model: &str, names: Vec<String>, tensors: Vec<PyTensor>) -> PyResult<HashMap<String, i64>> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let built = Transformer::with_parameters(&model, &named(names, tensors))?;
    let parts = built.parameters.parts();
    Ok(parts
        .filter_map(|(name, t, part)| Some((name.to_string(), train::unit_dimension(name, part, t.dim())?)))
        .collect())
}

/// Returns the logits (B, T, V) for token ids `source` (B, S) and `target_input` (B, T), padded with id 1. At padding
/// the logits are zeros. A language model has no source. `seed` is int64 (seed, update, micro-batch) for dropout; None
/// means evaluation. `heard` is called with what the pass computes, see [`Listener`].
#[pyfunction]
#[pyo3(signature = (model, names, tensors, source, target_input, seed, precision, heard=None))]
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
    heard: Option<Py<PyAny>>,
) -> PyResult<PyTensor> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let kind = kind(precision)?;
    let tensors = named(names, tensors);
    let (source, target, seed) = (source.map(|t| t.0), target_input.0, seed.map(|t| t.0));
    let logits = released(py, move || {
        let (built, read, kind) = reading(Transformer::with_parameters(&model, &tensors)?, source, &target, kind)?;
        let ctx = context(&model, seed, kind);
        let ctx = match heard {
            Some(heard) => ctx.watched(Rc::new(Listener::of(heard, &built.parameters)?)),
            None => ctx,
        };
        let logits = built.logits(&built.features(&read, &ctx)?, kind)?;
        read.target.unpack(&logits, &target)
    })?;
    Ok(PyTensor(logits))
}

/// Packs padded token ids, (B, S) and (B, T), for the model. Returns the model unchanged, so that callers can build it
/// in the call; the packed sentences; and the type of matrix products.
fn reading(
    built: Transformer,
    source: Option<Tensor>,
    target: &Tensor,
    kind: Kind,
) -> crate::error::Result<(Transformer, Sentences, Kind)> {
    let vocabulary = built.config.vocab_size;
    // "f32" means the parameters' own precision: a float64 model computes in float64.
    let is_double = built.parameters.tensors().first().is_some_and(|t| t.kind() == Kind::Double);
    let source = source.as_ref().map(|t| Packed::from_padded("source", t, vocabulary)).transpose()?;
    let target = Packed::from_padded("target_input", target, vocabulary)?;
    let read = Sentences::new(source, target, built.device())?.to(built.device())?;
    Ok((built, read, if is_double { Kind::Double } else { kind }))
}

/// Returns the settings of a pass in training mode if there is a seed, else in evaluation mode. `kind` is the type of
/// matrix products.
fn context(model: &TransformerConfig, seed: Option<Tensor>, kind: Kind) -> Context {
    match seed {
        Some(seed) => Context::training(Rates::of(model), seed, kind),
        None => Context::evaluation(kind),
    }
}

/// Runs the model on padded token ids, and returns the diagnostics of each stack (see [`Observed`]). The arguments mean
/// the same as in `forward`. `loss` is a Python function that computes a scalar from the logits; None leaves out the
/// gradients of statistics. Running statistics do not change.
#[pyfunction]
#[pyo3(signature = (model, names, tensors, source, target_input, seed, precision, loss))]
#[allow(clippy::too_many_arguments)]
fn observe<'py>(
    py: Python<'py>,
    model: &str,
    names: Vec<String>,
    tensors: Vec<PyTensor>,
    source: Option<PyTensor>,
    target_input: PyTensor,
    seed: Option<PyTensor>,
    precision: &str,
    loss: Option<Bound<'py, PyAny>>,
) -> PyResult<Vec<Observed<'py>>> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let kind = kind(precision)?;
    let tensors = named(names, tensors);
    let (source, target, seed) = (source.map(|t| t.0), target_input.0, seed.map(|t| t.0));
    let is_differentiated = loss.is_some();
    let (watch, logits) = released(py, move || {
        // Parameters require gradients only if there is a loss to differentiate.
        let build = if is_differentiated { Transformer::to_train } else { Transformer::with_parameters };
        let (built, read, kind) = reading(build(&model, &tensors)?, source, &target, kind)?;
        let watch = Rc::new(Diagnostics::default());
        // A recomputation does not update running statistics.
        let is_recompute = true;
        let ctx = context(&model, seed, kind).fork(is_recompute).watched(watch.clone());
        let logits = if is_differentiated {
            tch::with_grad(|| read.target.unpack(&built.logits(&built.features(&read, &ctx)?, kind)?, &target))
                .map(Some)
        } else {
            tch::no_grad(|| built.features(&read, &ctx)).map(|_| None)
        }?;
        // `into_inner` needs the only reference to `watch`, and `ctx` has another.
        drop(ctx);
        Ok::<_, Error>((Rc::into_inner(watch).expect("the pass is over"), logits))
    })?;
    let loss = match (loss, logits) {
        (Some(loss), Some(logits)) => Some(loss.call1((PyTensor(logits),))?.extract::<PyTensor>()?.0),
        _ => None,
    };
    let observations = released(py, move || watch.finish(loss.as_ref()))?;
    let stacks = observations.into_iter().map(|observation| {
        let StackObservation { cosines, active, statistics, sizes, scores, mixing } = observation;
        let statistics = statistics.into_iter().map(<[f64; 7]>::from).collect();
        ([cosines, active, sizes, scores, mixing].map(|numbers| numbers.into_pyarray(py)), statistics)
    });
    Ok(stacks.collect())
}

/// The diagnostics of a stack, which [`StackObservation`] explains: [cosines, active, sizes, scores, mixing], and seven
/// numbers for each norm with running statistics.
type Observed<'py> = ([Bound<'py, PyArray1<f64>>; 5], Vec<[f64; 7]>);

/// Returns the diagnostics of a norm with running statistics: the distances of the batch's mean, variance and ψ² from
/// the running ones, the sizes of their gradients, and the share of bounded channels. `square` is the running variance,
/// or ψ² if `mean` is None; `dy` is the gradient of the norm's output.
#[pyfunction]
#[pyo3(signature = (x, pad_mask, weight, mean, square, eps, dy))]
#[allow(clippy::too_many_arguments)]
fn statistics(
    py: Python<'_>,
    x: PyTensor,
    pad_mask: Option<PyTensor>,
    weight: Option<PyTensor>,
    mean: Option<PyTensor>,
    square: PyTensor,
    eps: f64,
    dy: Option<PyTensor>,
) -> PyResult<[f64; 7]> {
    let tensor = |t: Option<PyTensor>| t.map(|t| t.0);
    let (pad_mask, weight, mean, dy) = (tensor(pad_mask), tensor(weight), tensor(mean), tensor(dy));
    let columns = Columns { x: x.0, pad_mask, weight, mean, square: square.0, eps };
    let statistics = released(py, move || columns.statistics(dy.as_ref()))?;
    Ok(statistics.into())
}

/// Returns the largest attention logit of each head over the batches, pairs (source, target_input) of padded token ids.
/// The keys are the attention's name and the head's number. There is no dropout.
#[pyfunction]
fn largest_logits(
    py: Python<'_>,
    model: &str,
    names: Vec<String>,
    tensors: Vec<PyTensor>,
    batches: Vec<(Option<PyTensor>, PyTensor)>,
    precision: &str,
) -> PyResult<HashMap<String, f64>> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let kind = kind(precision)?;
    let tensors = named(names, tensors);
    let batches: Vec<_> = batches.into_iter().map(|(source, target)| (source.map(|t| t.0), target.0)).collect();
    let largest = released(py, move || {
        let mut built = Transformer::with_parameters(&model, &tensors)?;
        // Without a limit nothing is clipped; the clip only measures.
        let clip = train::QkClip::new(&built.parameters, f64::INFINITY)?;
        // `reading` takes the model and gives it back, for the next batch.
        for (source, target) in batches {
            let (returned, read, kind) = reading(built, source, &target, kind)?;
            let ctx = Context::evaluation(kind).measuring_logits(true);
            let _ = tch::no_grad(|| returned.features(&read, &ctx))?;
            built = returned;
        }
        Ok::<_, Error>(clip.heads().into_iter().zip(Vec::<f64>::try_from(clip.largest()?)?).collect())
    })?;
    Ok(largest)
}

/// Applies QK-clip to the parameters in place: scales down the queries and keys of heads whose largest logit exceeds
/// `limit`. `largest` is the result of `largest_logits`.
#[pyfunction]
fn clip_queries_and_keys(
    py: Python<'_>,
    model: &str,
    names: Vec<String>,
    tensors: Vec<PyTensor>,
    largest: HashMap<String, f64>,
    limit: f64,
) -> PyResult<()> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let tensors = named(names, tensors);
    released(py, move || {
        let built = Transformer::with_parameters(&model, &tensors)?;
        let clip = train::QkClip::new(&built.parameters, limit)?;
        // A head without a logit in `largest` is not clipped.
        let largest_of = |head: String| largest.get(&head).copied().unwrap_or(f64::NEG_INFINITY);
        // There is one number per head, and the heads of an attention are next to each other.
        let logits: Vec<f64> = clip.heads().into_iter().map(largest_of).collect();
        for (attention, logits) in built.parameters.attentions().iter().zip(logits.chunks(model.heads as usize)) {
            tch::no_grad(|| attention.largest.shallow_clone().f_copy_(&Tensor::from_slice(logits)))?;
        }
        clip.apply(None)
    })?;
    Ok(())
}

/// Sets the gains that the residual scheme measures on one training batch, in place (docs/spec.md §3.4). The arguments
/// mean the same as in `forward`.
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
    let tensors = named(names, tensors);
    let (source, target, seed) = (source.map(|t| t.0), target_input.0, seed.0);
    released(py, move || {
        let (built, read, kind) = reading(Transformer::with_parameters(&model, &tensors)?, source, &target, kind)?;
        if !built.is_profiled() {
            return Err(Error::invalid(format!("residual {:?} has nothing to profile", model.residual.as_str())));
        }
        built.profile(&read, Context::training(Rates::of(&model), seed, kind))
    })?;
    Ok(())
}

/// Adds this file's functions to the Python module.
pub(super) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(parameters, m)?)?;
    m.add_function(wrap_pyfunction!(draw_linear, m)?)?;
    m.add_function(wrap_pyfunction!(draw_bias, m)?)?;
    m.add_function(wrap_pyfunction!(draw_table, m)?)?;
    m.add_function(wrap_pyfunction!(declare, m)?)?;
    m.add_function(wrap_pyfunction!(growth, m)?)?;
    m.add_function(wrap_pyfunction!(composed_norm, m)?)?;
    m.add_function(wrap_pyfunction!(norm_settings, m)?)?;
    m.add_function(wrap_pyfunction!(unit_multipliers, m)?)?;
    m.add_function(wrap_pyfunction!(parameter_parts, m)?)?;
    m.add_function(wrap_pyfunction!(unit_dimensions, m)?)?;
    m.add_function(wrap_pyfunction!(norm_numbers, m)?)?;
    m.add_function(wrap_pyfunction!(forward, m)?)?;
    m.add_function(wrap_pyfunction!(observe, m)?)?;
    m.add_function(wrap_pyfunction!(statistics, m)?)?;
    m.add_function(wrap_pyfunction!(largest_logits, m)?)?;
    m.add_function(wrap_pyfunction!(clip_queries_and_keys, m)?)?;
    m.add_function(wrap_pyfunction!(profile, m)?)
}
