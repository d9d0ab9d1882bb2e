//! Lets a Python function hear what a model computes.

use crate::analysis::{Logits, Watch};
use crate::error::{Error, Result};
use crate::model::Parameters;
use pyo3::prelude::*;
use pyo3_tch::PyTensor;
use tch::Tensor;

/// Calls a Python function with what a forward pass computes: `heard(event, name, first_row, tensors)`.
///
/// | event | tensors |
/// |---|---|
/// | "layer input", "layer" | [x], the input or the output of a layer |
/// | "product" | [x, y] of a linear layer; its weight is the rows of the matrix `name` from `first_row` on |
/// | "norm" | [y], the output of the norm `name` |
/// | "attention" | the logits (n, heads, queries, keys), each tensor those of n sentences |
///
/// A logit is −∞ if the query does not attend to the key. `name` is empty and `first_row` 0 for events without them.
#[derive(Debug)]
pub struct Listener {
    /// The Python function.
    heard: Py<PyAny>,
    /// The model's matrices, in whose memory `product` looks up a weight.
    matrices: Vec<ParameterMatrix>,
}

/// The name of a parameter with two dimensions, and the place of its rows in memory.
#[derive(Debug)]
struct ParameterMatrix {
    name: String,
    address: usize,
    rows: usize,
    bytes_of_row: usize,
}

impl Listener {
    /// Builds the listener for a model with these parameters; `heard` is the Python function.
    pub fn of(heard: Py<PyAny>, parameters: &Parameters) -> Result<Self> {
        // `size2` fails for a parameter that is no matrix, which is then left out.
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

    /// Calls the Python function with these four arguments. An exception that it raises is set as Python's current
    /// error, which replaces the returned error when that reaches Python.
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
    /// Reports the input x of a layer.
    fn layer_input(&self, x: &Tensor) -> Result<()> {
        self.tell("layer input", "", 0, vec![x.shallow_clone()])
    }

    /// Reports the output x of a layer.
    fn layer(&self, x: &Tensor) -> Result<()> {
        self.tell("layer", "", 0, vec![x.shallow_clone()])
    }

    /// Reports the input x and the output y of a linear layer. Says nothing if `weight` is no part of a parameter.
    fn product(&self, weight: &Tensor, x: &Tensor, y: &Tensor) -> Result<()> {
        // `weight` may be some rows of a parameter. Its address shows which parameter, and which row is the first.
        let first_row_in = |matrix: &ParameterMatrix| {
            let offset = (weight.data_ptr() as usize).checked_sub(matrix.address)?;
            let row = offset / matrix.bytes_of_row.max(1);
            // An address beyond the last row belongs to another tensor.
            (row < matrix.rows).then_some(row)
        };
        let place = self.matrices.iter().find_map(|matrix| first_row_in(matrix).map(|row| (&matrix.name, row)));
        let Some((name, first_row)) = place else { return Ok(()) };
        self.tell("product", name, first_row, vec![x.shallow_clone(), y.shallow_clone()])
    }

    /// Reports the output y of the norm `name`.
    fn norm(&self, name: &str, y: &Tensor) -> Result<()> {
        self.tell("norm", name, 0, vec![y.shallow_clone()])
    }

    /// Reports the logits of an attention, one tensor for each group of sentences that the attention computes together.
    fn attention(&self, logits: &Logits) -> Result<()> {
        let mut parts = Vec::new();
        // `each` calls the closure for one group of sentences after the other. `is_attended` is true where the query
        // attends to the key.
        (logits.each)(&mut |logits_of_part, is_attended| {
            let mut part = logits_of_part.f_masked_fill(&is_attended.f_logical_not()?, f64::NEG_INFINITY)?;
            if let Some(sinks) = logits.sinks {
                // Add a column with the sinks, one logit for each head. A query at padding does not attend to it.
                let mut shape = part.size();
                let (heads, columns) = (shape[shape.len() - 3], shape.len() - 1);
                shape[columns] = 1;
                let sinks = sinks.f_detach()?.f_to_kind(part.kind())?.f_reshape([heads, 1, 1].as_slice())?;
                let is_padding = is_attended.f_any_dim(-1, true)?.f_logical_not()?;
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
