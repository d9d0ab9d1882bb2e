//! A norm in a model: what its entry declares, built.

use super::residual::Shelf;
use super::running::{self, Kept};
use super::Builder;
use crate::analysis::Watch;
use crate::error::{Error, Result};
use crate::init::Fill;
use crate::norm::composed::{self, Hat};
use crate::norm::conventions::Conventions;
use crate::norm::spec::{DeclaredShape, Parameter, Start, WEIGHT};
use crate::norm::{Form, Site, Spec};
use crate::operator::{self, ProcessGroup, RowOperator, Rowwise};
use std::ops::Deref;
use tch::{Kind, Tensor};

/// A norm in a model.
pub trait Norm: Send {
    /// N(x) over the last dimension. `rows` says what the rows are, for norms with statistics across them.
    fn forward(&self, x: &Tensor, rows: &PassRows) -> Result<Tensor>;

    /// What the fused residual step needs, for a norm with row kernels.
    fn row(&self) -> Result<Option<StepNorm<'_>>> {
        Ok(None)
    }
}

/// A norm for the fused residual step.
pub enum StepNorm<'a> {
    Kept(&'a Rowwise),
    /// With a weight that was computed for one call.
    Made(Rowwise),
}

impl Deref for StepNorm<'_> {
    type Target = Rowwise;

    fn deref(&self) -> &Rowwise {
        match self {
            StepNorm::Kept(norm) => norm,
            StepNorm::Made(norm) => norm,
        }
    }
}

/// What a norm with statistics across rows must know of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassRows<'a> {
    /// Training: statistics are taken from the batch and move once per forward.
    pub train: bool,
    /// A second run of the same forward pass, for its gradient: nothing moves.
    pub again: bool,
    /// True at padding, in x's leading shape; none: every row is real.
    pub pad_mask: Option<&'a Tensor>,
    /// Where norms leave what they used for a second run, and find it in one.
    pub kept: Option<&'a Kept>,
    /// The ranks whose rows these are.
    pub group: ProcessGroup,
    pub watch: Option<&'a Watch>,
    /// What the stack's layers have left so far.
    pub shelf: Option<&'a Shelf>,
}

impl PassRows<'_> {
    pub fn shelf(&self) -> Result<&Shelf> {
        self.shelf.ok_or_else(|| Error::invalid("no stack runs that could keep a tensor"))
    }
}

/// Declares the parameters and makes the norm.
pub fn build(spec: &Spec, b: &mut Builder, site: &Site) -> Result<Box<dyn Norm>> {
    let (mut inside, mut weight, mut bias) = (Vec::new(), None, None);
    for parameter in spec.parameters {
        let made = parameter_of(spec, parameter, b, site)?;
        match (parameter.name, made) {
            ("weight", made) => weight = made,
            ("bias", made) => bias = made,
            (_, made) => inside.extend(made),
        }
    }
    let options = spec.numbers(site);
    let form = match spec.form {
        Form::Chosen(choose) => choose(&options),
        form => form,
    };
    Ok(match form {
        Form::Composed(hat) => Box::new(Composed { hat, inside, weight, bias, options }),
        Form::Rows(kernels) => {
            let (operator, eps) = (RowOperator::of(kernels), spec.number("eps", site).unwrap_or(0.0));
            let (rows, how) = (Rowwise { operator, weight, bias, numbers: inside, eps }, Conventions::of(spec, site));
            if how.are_plain() {
                Box::new(rows)
            } else {
                how.measured(site.width)?;
                Box::new(Conventional { rows, how })
            }
        }
        Form::Operator(name) => Box::new(ByOperator { name, weight, options }),
        Form::Columns(kernels) => running::build(spec, kernels, weight, bias, b, site)?,
        Form::Chosen(_) => unreachable!("options choose a form that is computed"),
    })
}

/// None: the norm goes without it.
fn parameter_of(spec: &Spec, parameter: &Parameter, b: &mut Builder, site: &Site) -> Result<Option<Tensor>> {
    let start = match parameter.start {
        Start::Is(value) => value,
        Start::Length => match spec.number("p", site) {
            Some(p) => (site.width as f64).powf(1.0 / p),
            None => (site.width as f64).sqrt(),
        },
    };
    let is_centred = spec.value("zero_centred", site).is_some_and(|flag| flag == true);
    let start = match parameter.name == WEIGHT.name {
        true => start * site.start - f64::from(is_centred),
        false => start,
    };
    let is_learned = !parameter.is_affine() || spec.value("elementwise_affine", site).is_none_or(|flag| flag == true);
    Ok(match (is_learned, parameter.shape) {
        (true, shape) => Some(b.parameter(parameter.name, &shape.of(site.width), &Fill::Constant(start))?),
        (false, DeclaredShape::One) => Some(b.constant(start)?),
        (false, _) => None,
    })
}

impl Norm for Rowwise {
    fn forward(&self, x: &Tensor, _: &PassRows) -> Result<Tensor> {
        self.call(x)
    }

    fn row(&self) -> Result<Option<StepNorm<'_>>> {
        Ok(Some(StepNorm::Kept(self)))
    }
}

/// An RMSNorm of other conventions in a model.
struct Conventional {
    /// Its weight is as it is learned.
    rows: Rowwise,
    how: Conventions,
}

impl Conventional {
    /// γ; none: 1.
    fn gain(&self) -> Result<Option<Tensor>> {
        self.rows.weight.as_ref().map(|weight| self.how.gain(weight)).transpose()
    }

    /// γ as the kernels take it.
    fn with(&self, weight: Option<Tensor>) -> Rowwise {
        Rowwise { operator: self.rows.operator, weight, bias: None, numbers: Vec::new(), eps: self.rows.eps }
    }
}

impl Norm for Conventional {
    fn forward(&self, x: &Tensor, _: &PassRows) -> Result<Tensor> {
        let gain = self.gain()?;
        if !self.how.has_kernel(x.kind()) {
            return self.how.composed(x, gain.as_ref(), self.rows.eps);
        }
        match self.how.rounds_first(x.kind()) {
            true => self.how.times_gain(self.with(None).call(x)?, gain.as_ref()),
            false => self.with(gain).call(x),
        }
    }

    /// The stream is never in 16 bits here, so rounding first changes nothing.
    fn row(&self) -> Result<Option<StepNorm<'_>>> {
        match self.how.has_kernel(Kind::Float) {
            true => Ok(Some(StepNorm::Made(self.with(self.gain()?)))),
            false => Ok(None),
        }
    }
}

/// A norm in a model that is computed by its composed form.
struct Composed {
    hat: Hat,
    inside: Vec<Tensor>,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    options: Vec<f64>,
}

impl Norm for Composed {
    fn forward(&self, x: &Tensor, _: &PassRows) -> Result<Tensor> {
        composed::apply(self.hat, x, &self.inside, (self.weight.as_ref(), self.bias.as_ref()), &self.options)
    }
}

/// A norm by the operator of that name.
struct ByOperator {
    name: &'static str,
    weight: Option<Tensor>,
    options: Vec<f64>,
}

impl Norm for ByOperator {
    fn forward(&self, x: &Tensor, _: &PassRows) -> Result<Tensor> {
        operator::norm_by_name(self.name, x, self.weight.as_ref(), &self.options)
    }
}
