//! A norm's composed form: its equation in tch calls, which autograd follows on any device.
//!
//! A norm without kernels is its composed form alone; one with kernels runs it under torch.func, for second derivatives,
//! and where the kernels cannot run.

use super::{accumulate, find, Form, Norm, Rows};
use crate::error::{Error, Result};
use tch::Tensor;

/// x̂ of x, of the parameters that are neither weight nor bias, and of the options that are numbers, each in the order in
/// which the norm declares them. All tensors are f32 or f64; x has at least one number in a row.
pub type Hat = fn(&Tensor, &[Tensor], &[f64]) -> Result<Tensor>;

/// y = weight⊙x̂ + bias in x's type, computed in f32 or f64.
pub fn apply(
    hat: Hat,
    x: &Tensor,
    inside: &[Tensor],
    (weight, bias): (Option<&Tensor>, Option<&Tensor>),
    options: &[f64],
) -> Result<Tensor> {
    let wide = accumulate(x)?;
    let inside = inside.iter().map(|p| Ok(p.f_to_kind(wide.kind())?)).collect::<Result<Vec<_>>>()?;
    Ok(affine(hat(&wide, &inside, options)?, weight, bias)?.f_to_kind(x.kind())?)
}

/// weight⊙x̂ + bias in x̂'s type.
pub fn affine(hat: Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut y = hat;
    if let Some(weight) = weight {
        y = y.f_mul(&weight.f_to_kind(y.kind())?)?;
    }
    if let Some(bias) = bias {
        y = y.f_add(&bias.f_to_kind(y.kind())?)?;
    }
    Ok(y)
}

/// The norm of that name, which must be its composed form alone. `parameters` and `options` as it declares them.
pub fn call(name: &str, x: &Tensor, parameters: Vec<Option<Tensor>>, options: &[f64]) -> Result<Tensor> {
    let spec = find(name)?;
    let Form::Composed(hat) = spec.form else {
        return Err(Error::invalid(format!("{name} has an operator of its own: call that")));
    };
    let wanted = (spec.parameters.len(), spec.count_of_numbers());
    let got = (parameters.len(), options.len());
    if wanted != got {
        return Err(Error::invalid(format!(
            "{name} takes {} parameters and {} options, got {} and {}",
            wanted.0, wanted.1, got.0, got.1
        )));
    }
    let (mut inside, mut weight, mut bias) = (Vec::new(), None, None);
    for (declared, given) in spec.parameters.iter().zip(parameters) {
        match (declared.name, given) {
            ("weight", given) => weight = given,
            ("bias", given) => bias = given,
            (_, Some(given)) => inside.push(given),
            (absent, None) => return Err(Error::invalid(format!("{name} needs its parameter {absent}, got none"))),
        }
    }
    apply(hat, x, &inside, (weight.as_ref(), bias.as_ref()), options)
}

/// A norm in a model that is computed by its composed form.
pub(super) struct Composed {
    pub hat: Hat,
    pub inside: Vec<Tensor>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
    pub options: Vec<f64>,
}

impl Norm for Composed {
    fn forward(&self, x: &Tensor, _: &Rows) -> Result<Tensor> {
        apply(self.hat, x, &self.inside, (self.weight.as_ref(), self.bias.as_ref()), &self.options)
    }
}
