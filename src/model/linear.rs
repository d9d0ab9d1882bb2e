//! Linear layers of a model in training, with parameters and gradients in flat buffers.
//!
//! Autograd would cast each weight in every pass, compute the gradient as a new tensor in the type of products, cast
//! the gradient back and add it. Here a weight is cast once per update, and a product adds to the gradient in place.

use crate::error::Result;
use crate::host::has_memory;
use crate::kernel::product::{add_product, product};
use crate::kernel::row_sum::add_rows;
use crate::operator::{apply, Differentiable, Recording};
use tch::{Device, Kind, Tensor};

/// The flat buffers of a model that is trained on a CPU. Each parameter is a view of one buffer, and its gradient is
/// a view of the other.
#[derive(Debug)]
pub struct FlatBuffers {
    parameters: Tensor,
    gradients: Tensor,
    /// The parameters in the type of products; the same tensor as `parameters` if the types are equal.
    cast: Tensor,
}

/// A parameter, or some rows of it, in the flat buffers.
pub struct FlatParameter {
    /// The parameter in the type of products.
    pub value: Tensor,
    /// The gradient. Linear layers add to it in the backward pass, the loss already in the forward pass.
    pub gradient: Tensor,
}

impl FlatBuffers {
    /// Wraps contiguous buffers of equal length, one with the parameters and one with their gradients. `kind` is the
    /// type of matrix products.
    pub fn new(parameters: &Tensor, gradients: &Tensor, kind: Kind) -> Result<Self> {
        let cast = parameters.f_detach()?.f_to_kind(kind)?;
        Ok(FlatBuffers { parameters: parameters.shallow_clone(), gradients: gradients.shallow_clone(), cast })
    }

    /// Casts the parameters again after they have changed.
    pub fn refresh(&self) -> Result<()> {
        if self.cast.kind() != self.parameters.kind() {
            self.cast.shallow_clone().f_copy_(&self.parameters.f_detach()?)?;
        }
        Ok(())
    }

    /// Returns the value and the gradient of `t` in the buffers; `None` if `t` is neither a parameter nor some rows of
    /// one.
    pub fn place(&self, t: &Tensor) -> Result<Option<FlatParameter>> {
        if t.kind() != self.parameters.kind() || t.device() != Device::Cpu || !t.is_contiguous() || !has_memory(t) {
            return Ok(None);
        }
        let [buffer_start, t_start] = [&self.parameters, t].map(|t| t.data_ptr() as usize);
        let bytes = t.kind().elt_size_in_bytes();
        // The index of t's first element. It wraps around if t lies before the buffer, which the next line refuses.
        let first = t_start.wrapping_sub(buffer_start) / bytes;
        if t_start < buffer_start || first + t.numel() > self.parameters.numel() {
            return Ok(None);
        }
        let view = |flat: &Tensor| flat.f_narrow(0, first as i64, t.numel() as i64)?.f_view(t.size().as_slice());
        Ok(Some(FlatParameter { value: view(&self.cast)?, gradient: view(&self.gradients)? }))
    }
}

/// Computes y = x Wᵀ + b in the type `kind`, whatever the types of x and of the parameters; x is (…, columns of W).
///
/// If W and b are in the flat buffers `flat`, the backward pass adds their gradients directly to the buffers.
pub fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    kind: Kind,
    flat: Option<&FlatBuffers>,
) -> Result<Tensor> {
    let x = x.f_to_kind(kind)?;
    let is_recorded = Recording::is_on();
    // Autograd records a `FlatLinear` only if its input requires a gradient.
    if let Some(flat) = flat.filter(|_| !is_recorded || x.requires_grad()) {
        if let Some(placed) = FlatLinear::of(flat, weight, bias)? {
            return match is_recorded {
                true => Ok(apply(placed, &[&x])?.swap_remove(0)),
                false => placed.value(&x),
            };
        }
    }
    let bias = bias.map(|bias| bias.f_to_kind(kind)).transpose()?;
    Ok(x.f_linear(&weight.f_to_kind(kind)?, bias.as_ref())?)
}

/// A linear layer whose parameters are in the flat buffers.
struct FlatLinear {
    weight: FlatParameter,
    bias: Option<FlatParameter>,
}

impl FlatLinear {
    /// Finds a linear layer's weight and bias in the flat buffers; returns `None` if one of them is not there.
    fn of(flat: &FlatBuffers, weight: &Tensor, bias: Option<&Tensor>) -> Result<Option<Self>> {
        let Some(weight) = flat.place(weight)? else { return Ok(None) };
        let bias = match bias {
            Some(bias) => match flat.place(bias)? {
                Some(bias) => Some(bias),
                None => return Ok(None),
            },
            None => None,
        };
        Ok(Some(FlatLinear { weight, bias }))
    }

    /// Computes y = x Wᵀ + b without recording gradients.
    fn value(&self, x: &Tensor) -> Result<Tensor> {
        times(x, &self.weight.value.f_transpose(0, 1)?, self.bias.as_ref().map(|bias| &bias.value))
    }
}

/// Computes xw + b for tensors of one type, without recording gradients; x is (…, rows of w).
pub(super) fn times(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut size = x.size();
    *size.last_mut().expect("x has a last dimension") = w.size()[1];
    let y = Tensor::f_empty(size.as_slice(), (x.kind(), x.device()))?;
    product(&y.f_flatten(0, -2)?, &x.f_flatten(0, -2)?, w, bias)?;
    Ok(y)
}

impl Differentiable for FlatLinear {
    /// Returns true: the backward pass needs x for the gradient of W.
    fn saves_inputs(&self) -> bool {
        true
    }

    /// Returns y = x Wᵀ + b; the only input is x.
    fn forward(&self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        Ok(vec![self.value(&inputs[0])?])
    }

    /// Adds dW = dyᵀx and db = Σ dy to the flat buffers, and returns dx = dy W.
    fn backward(&self, inputs: Vec<Tensor>, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let Some(dy) = &gradients[0] else { return Ok(vec![None]) };
        let as_matrix = |t: &Tensor| t.f_flatten(0, -2);
        let (x_rows, dy_rows) = (as_matrix(&inputs[0])?, as_matrix(dy)?);
        add_product(&self.weight.gradient, &dy_rows, &x_rows)?;
        if let Some(bias) = &self.bias {
            add_rows(&bias.gradient, &dy_rows)?;
        }
        Ok(vec![Some(times(dy, &self.weight.value, None)?)])
    }
}
