//! The roles and multipliers of parameters.

use crate::error::Error;
use crate::parametrisation::{self, Multipliers, ParameterRole, Part, StepSize, SumsOver};
use pyo3::prelude::*;
use std::collections::HashMap;

/// Returns the multipliers (init, lr, weight_decay, eps) of parameters with this role, for a model that is `width`
/// times as wide and `depth` times as deep as its base model. `alpha` overrides the parametrisation's depth exponent.
/// `sums_over` is the dimension over which products with the parameter are summed. `step_size` is the property of the
/// optimizer's steps that is the same at all widths.
#[pyfunction]
#[pyo3(signature = (parametrisation, role, width, depth, alpha=None, sums_over="nothing", step_size="entries"))]
fn multipliers(
    parametrisation: &str,
    role: &str,
    width: f64,
    depth: f64,
    alpha: Option<f64>,
    sums_over: &str,
    step_size: &str,
) -> PyResult<HashMap<&'static str, f64>> {
    let chosen = parametrisation::find(parametrisation)?;
    if chosen.is_unit_scaled {
        let text =
            format!("{parametrisation} has multipliers for each parameter, not for a role: use unit_multipliers");
        return Err(Error::invalid(text).into());
    }
    let part = Part { role: ParameterRole::parse(role)?, sums_over: SumsOver::parse(sums_over)? };
    for (name, ratio) in [("width", width), ("depth", depth)] {
        if !(ratio > 0.0 && ratio.is_finite()) {
            return Err(Error::invalid(format!("{name} over the base's must be greater than 0, got {ratio}")).into());
        }
    }
    let step_size = StepSize::parse(step_size)?;
    let Multipliers { init, lr, weight_decay, eps } = chosen.multipliers(part, width, depth, alpha, step_size);
    Ok(HashMap::from([("init", init), ("lr", lr), ("weight_decay", weight_decay), ("eps", eps)]))
}

/// Adds this file's functions to the Python module.
pub(super) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(multipliers, m)?)
}
