//! Lets a Python function hear what a model computes.

use crate::analysis::{Logits, Watch};
use crate::error::{Error, Result};
use crate::model::Parameters;
use pyo3::prelude::*;
use pyo3_tch::PyTensor;
use tch::Tensor;

/// The watch that calls a Python function with each part of a pass: `heard(event, name, first_row, tensors)`. The
/// events are "layer input" and "layer" with [x], "product" with [x, y] of rows of the matrix `name` from
/// `first_row` on, "norm" with [y], and "attention" with the logits (n, heads, queries, keys) of some sentences in each
/// tensor, −∞ where a query does not attend to the key. Names that do not apply are empty.
#[derive(Debug)]
pub struct Listener {
    heard: Py<PyAny>,
    matrices: Vec<ParameterMatrix>,
}

/// The memory of a parameter with two dimensions.
#[derive(Debug)]
struct ParameterMatrix {
    name: String,
    address: usize,
    rows: usize,
    bytes_of_row: usize,
}

impl Listener {
    /// Builds the watch for a model with these parameters.
    pub fn of(heard: Py<PyAny>, parameters: &Parameters) -> Result<Self> {
        let matrix = |(name, t): (&str, &Tensor)| {
            let (rows, columns) = t.size2().ok()?;
            let bytes_of_row = columns as usize * t.kind().elt_size_in_bytes();
            Some(ParameterMatrix {
                name: name.to_string(),
                address: t.data_ptr() as usize,
                rows: rows as usize,
                bytes_of_row,
            })
        };
        Ok(Listener { heard, matrices: parameters.iter().filter_map(matrix).collect() })
    }

    /// Calls the Python function. An exception that it raises is set as Python's current error, which replaces the
    /// returned error when that reaches Python.
    fn tell(&self, event: &str, name: &str, first_row: usize, tensors: Vec<Tensor>) -> Result<()> {
        Python::with_gil(|py| {
            let tensors: Vec<PyTensor> = tensors.into_iter().map(PyTensor).collect();
            self.heard.call1(py, (event, name, first_row, tensors)).map(drop).map_err(|error| {
                error.restore(py);
                Error::of_torch("what a model computes could not be read")
            })
        })
    }
}

impl Watch for Listener {
    fn layer_input(&self, x: &Tensor) -> Result<()> {
        self.tell("layer input", "", 0, vec![x.shallow_clone()])
    }

    fn layer(&self, x: &Tensor) -> Result<()> {
        self.tell("layer", "", 0, vec![x.shallow_clone()])
    }

    fn product(&self, weight: &Tensor, x: &Tensor, y: &Tensor) -> Result<()> {
        // `weight` may be some rows of a parameter. Its address shows which parameter, and which row is the first.
        let row_of = |m: &ParameterMatrix| {
            (weight.data_ptr() as usize).checked_sub(m.address).map(|offset| offset / m.bytes_of_row.max(1))
        };
        // An address beyond the last row belongs to another tensor.
        let found = self.matrices.iter().find_map(|m| row_of(m).filter(|row| *row < m.rows).map(|row| (&m.name, row)));
        let Some((name, first_row)) = found else { return Ok(()) };
        self.tell("product", name, first_row, vec![x.shallow_clone(), y.shallow_clone()])
    }

    fn norm(&self, name: &str, y: &Tensor) -> Result<()> {
        self.tell("norm", name, 0, vec![y.shallow_clone()])
    }

    fn attention(&self, logits: &Logits) -> Result<()> {
        let mut parts = Vec::new();
        (logits.each)(&mut |logits_of_part, seen| {
            let mut part = logits_of_part.f_masked_fill(&seen.f_logical_not()?, f64::NEG_INFINITY)?;
            if let Some(sinks) = logits.sinks {
                // Add a column with the logits of the sinks. A query at padding does not attend to it.
                let mut shape = part.size();
                let (heads, columns) = (shape[shape.len() - 3], shape.len() - 1);
                shape[columns] = 1;
                let sinks = sinks.f_detach()?.f_to_kind(part.kind())?.f_reshape([heads, 1, 1].as_slice())?;
                let is_padding = seen.f_any_dim(-1, true)?.f_logical_not()?;
                let sinks = sinks.f_expand(shape.as_slice(), false)?.f_masked_fill(&is_padding, f64::NEG_INFINITY)?;
                part = Tensor::f_cat(&[part, sinks], -1)?;
            }
            // The logits of a single sentence may lack the first dimension.
            parts.push(if part.dim() < 4 { part.f_unsqueeze(0)? } else { part });
            Ok(())
        })?;
        self.tell("attention", "", 0, parts)
    }
}
