//! Parameters by their canonical names, which are torch.nn's: `encoder.layers.0.self_attn.in_proj_weight`, …

use crate::error::{Error, Result};
use crate::init::Fill;
use std::collections::HashMap;
use tch::{no_grad, Device, Kind, Tensor};

/// Parameters in the order in which the model declares them.
#[derive(Default)]
pub struct Parameters {
    names: Vec<String>,
    tensors: Vec<Tensor>,
}

impl Parameters {
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.names.iter().map(String::as_str).zip(&self.tensors)
    }

    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// How many numbers there are.
    pub fn numel(&self) -> usize {
        self.tensors.iter().map(Tensor::numel).sum()
    }

    fn push(&mut self, name: String, tensor: Tensor) {
        self.names.push(name);
        self.tensors.push(tensor);
    }
}

enum Source<'a> {
    /// Made new, from libtorch's generator.
    Fresh(Device, Kind),
    /// Taken from whoever has them.
    Given(&'a HashMap<String, Tensor>),
}

/// Declares parameters while a model is built.
pub struct Builder<'a> {
    source: Source<'a>,
    path: Vec<String>,
    made: Parameters,
}

impl<'a> Builder<'a> {
    /// Parameters made new.
    pub fn fresh(device: Device, kind: Kind) -> Self {
        Builder { source: Source::Fresh(device, kind), path: Vec::new(), made: Parameters::default() }
    }

    /// Parameters that exist already. [`finish`](Self::finish) refuses names that nothing asked for.
    pub fn given(tensors: &'a HashMap<String, Tensor>) -> Self {
        Builder { source: Source::Given(tensors), path: Vec::new(), made: Parameters::default() }
    }

    /// Declares what `build` declares under `name.`.
    pub fn within<T>(&mut self, name: &str, build: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.path.push(name.to_string());
        let built = build(self);
        self.path.pop();
        built
    }

    /// A parameter: a leaf that requires a gradient where it is made new, the given tensor as it is where it is not.
    pub fn parameter(&mut self, name: &str, shape: &[i64], fill: &Fill) -> Result<Tensor> {
        let name = self.path.iter().map(String::as_str).chain([name]).collect::<Vec<_>>().join(".");
        let tensor = match &self.source {
            Source::Fresh(device, kind) => {
                let mut t = Tensor::f_empty(shape, (*kind, *device))?;
                no_grad(|| fill_tensor(&mut t, fill))?;
                t.set_requires_grad(true)
            }
            Source::Given(tensors) => {
                let t = tensors.get(&name).ok_or_else(|| {
                    Error::invalid(format!(
                        "the model has a parameter {name} of shape {shape:?}, and the given weights have none of that name"
                    ))
                })?;
                if t.size() != shape {
                    return Err(Error::invalid(format!(
                        "parameter {name} must have shape {shape:?}, the given one has {:?}: another model's weights?",
                        t.size()
                    )));
                }
                t.shallow_clone()
            }
        };
        self.made.push(name, tensor.shallow_clone());
        Ok(tensor)
    }

    /// A constant of the model, on its device.
    pub fn constant(&self, value: f64) -> Result<Tensor> {
        let device = match &self.source {
            Source::Fresh(device, _) => *device,
            Source::Given(tensors) => tensors.values().next().map_or(Device::Cpu, Tensor::device),
        };
        Ok(Tensor::f_full([1i64].as_slice(), value, (Kind::Float, device))?)
    }

    /// Everything that was declared.
    pub fn finish(self) -> Result<Parameters> {
        if let Source::Given(tensors) = self.source {
            let mut extra: Vec<&str> =
                tensors.keys().filter(|k| !self.made.names.contains(k)).map(String::as_str).collect();
            if !extra.is_empty() {
                extra.sort_unstable();
                return Err(Error::invalid(format!(
                    "the given weights have {} that this model lacks: {}",
                    extra.len(),
                    extra[..extra.len().min(8)].join(", ")
                )));
            }
        }
        Ok(self.made)
    }
}

fn fill_tensor(t: &mut Tensor, fill: &Fill) -> Result<()> {
    match fill {
        Fill::Constant(value) => drop(t.f_fill_(*value)?),
        Fill::Normal { std } => drop(t.f_normal_(0.0, *std)?),
        Fill::Uniform { bound } => drop(t.f_uniform_(-bound, *bound)?),
        Fill::Rows(blocks) => {
            let mut start = 0;
            for (rows, fill) in blocks {
                fill_tensor(&mut t.f_narrow(0, start, *rows)?, fill)?;
                start += rows;
            }
        }
        Fill::WithZeroRow(row, fill) => {
            fill_tensor(t, fill)?;
            drop(t.f_select(0, *row)?.f_zero_()?);
        }
    }
    Ok(())
}
