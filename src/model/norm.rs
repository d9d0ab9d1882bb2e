//! Norms in a model, built from their declarations.

use super::residual::KeptTensors;
use super::running::{self, BuiltBlendedNorm, UsedStatistics};
use super::Builder;
use crate::analysis::Watch;
use crate::error::{Error, Result};
use crate::init::Fill;
use crate::norm::composed::{self, ComposedNorm, WholeNorm};
use crate::norm::operators::{CompositeNormOpSpec, OwnNorm};
use crate::norm::spec::{DeclaredShape, NormArgs, Numbers, Parameter, WEIGHT};
use crate::norm::{Form, NormContext, Spec};
use crate::operator::{self, BoundRowNorm, ProcessGroup, RowNormOp};
use std::ops::Deref;
use tch::Tensor;

/// A norm in a model.
pub trait Norm: Send {
    /// Returns N(x) over the last dimension. `rows` describes the rows to norms that keep statistics across rows.
    fn forward(&self, x: &Tensor, rows: &RowContext) -> Result<Tensor>;

    /// Returns the norm in the form that the fused residual step needs; `None` if the norm has no row kernels.
    fn row(&self) -> Result<Option<StepNorm<'_>>> {
        Ok(None)
    }
}

/// A norm with row kernels, and its parameters in the form that the kernels read.
pub enum StepNorm<'a> {
    Borrowed(&'a BoundRowNorm),
    /// A norm whose parameters were computed for one call.
    Owned(BoundRowNorm),
}

impl Deref for StepNorm<'_> {
    type Target = BoundRowNorm;

    /// Returns the norm, borrowed or owned.
    fn deref(&self) -> &BoundRowNorm {
        match self {
            StepNorm::Borrowed(norm) => norm,
            StepNorm::Owned(norm) => norm,
        }
    }
}

/// The facts about a pass and its rows that norms and changes need.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowContext<'a> {
    /// True in training: then statistics are computed from the batch, and the running ones are updated once per
    /// forward pass.
    pub train: bool,
    /// True when the same forward pass is computed again for its gradient; then statistics are not updated.
    pub is_recompute: bool,
    /// True for a micro-batch that is not the last of its update; then statistics that count updates do not change.
    pub is_partial: bool,
    /// True at padding rows; its shape is that of x without the last dimension. `None` if no row is padding.
    pub pad_mask: Option<&'a Tensor>,
    /// The map in which norms store the statistics that they used, for the recomputation.
    pub statistics: Option<&'a UsedStatistics>,
    /// The process group whose ranks' rows form one batch.
    pub group: ProcessGroup,
    pub watch: Option<&'a dyn Watch>,
    /// The tensors that the stack's layers have kept so far.
    pub kept_tensors: Option<&'a KeptTensors>,
}

impl RowContext<'_> {
    /// Returns the tensors that the stack's layers have kept so far; errors outside a stack.
    pub fn kept_tensors(&self) -> Result<&KeptTensors> {
        self.kept_tensors.ok_or_else(|| Error::invalid("no stack runs that could keep a tensor"))
    }
}

/// A parameter p. Kernels and formulas receive factor·(offset + p).
pub(super) struct BuiltParameter {
    p: Tensor,
    numbers: Numbers,
}

impl BuiltParameter {
    /// Returns factor·(offset + p), which kernels and formulas receive.
    pub fn value(&self) -> Result<Tensor> {
        self.numbers.of(&self.p)
    }
}

/// The parameters of a norm: the weight, the bias, and the parameters that x̂ depends on.
pub(super) struct NormParameters {
    pub inside: Vec<BuiltParameter>,
    pub weight: Option<BuiltParameter>,
    pub bias: Option<BuiltParameter>,
}

impl NormParameters {
    /// Returns the values of weight and bias.
    pub fn values(&self) -> Result<[Option<Tensor>; 2]> {
        let value = |p: &Option<BuiltParameter>| p.as_ref().map(BuiltParameter::value).transpose();
        Ok([value(&self.weight)?, value(&self.bias)?])
    }

    /// Returns all parameters in the order in which the norm declares them, with `None` for those that its options
    /// leave out.
    fn in_order(self, spec: &Spec) -> Vec<Option<BuiltParameter>> {
        let NormParameters { inside, mut weight, mut bias } = self;
        let mut inside = inside.into_iter();
        let next = |parameter: &Parameter| match parameter.name {
            "weight" => weight.take(),
            "bias" => bias.take(),
            _ => inside.next(),
        };
        spec.parameters.iter().map(next).collect()
    }

    /// Returns the values of the parameters that x̂ depends on.
    fn numbers(&self) -> Result<Vec<Tensor>> {
        self.inside.iter().map(BuiltParameter::value).collect()
    }

    /// Binds the parameters' current values to the kernels of `operator`.
    fn bind(&self, operator: &'static RowNormOp, eps: f64) -> Result<BoundRowNorm> {
        let [weight, bias] = self.values()?;
        Ok(BoundRowNorm { operator, weight, bias, numbers: self.numbers()?, eps })
    }

    /// True if factor·(offset + p) is p for each parameter p, so that kernels can read the parameters themselves.
    fn is_plain(&self) -> bool {
        self.inside.iter().chain(&self.weight).chain(&self.bias).all(|p| p.numbers.are_plain())
    }
}

/// Declares the parameters of a norm and builds the norm in the form that its specification and its options choose.
/// `context` is the norm's place in the model: its width and the options' values.
pub fn build(spec: &Spec, b: &mut Builder, context: &NormContext) -> Result<Box<dyn Norm>> {
    let given = spec.at(context); // the values of the norm's own options at this place
    let mut affine = NormParameters { inside: Vec::new(), weight: None, bias: None };
    for parameter in spec.parameters {
        let built = parameter_of(parameter, &given, b, context)?;
        match parameter.name {
            "weight" => affine.weight = built,
            "bias" => affine.bias = built,
            _ => affine.inside.extend(built),
        }
    }
    let eps = given.number("eps").unwrap_or(0.0);
    Ok(match spec.form_of(&given)? {
        // PyTorch's operations compute x̂, or in the second form all of y, weight and bias included.
        Form::Composed(x_hat) => Box::new(BuiltComposedNorm { x_hat, affine, given }),
        Form::Whole(y) => Box::new(BuiltWholeNorm { y, parameters: affine.in_order(spec), given }),
        // Kernels read the parameters p themselves. If they need factor·(offset + p), each call computes it first.
        Form::Rows(kernels) if affine.is_plain() => Box::new(affine.bind(RowNormOp::of(kernels), eps)?),
        Form::Rows(kernels) => Box::new(TransformedRowNorm { operator: RowNormOp::of(kernels), affine, eps }),
        // The package has an operator for this norm alone.
        Form::Operator(own) => Box::new(BuiltCompositeNorm { own, affine, given, eps }),
        Form::Columns(kernels) => {
            // Only norms that fade have a clock, and those have the form `Blended`. So there is no clock here.
            let (norm, _clock) = running::build(spec, kernels, affine, b, context, &given)?;
            Box::new(norm)
        }
        Form::Blended(blend) => Box::new(BuiltBlendedNorm::build(spec, blend, affine, b, context, &given)?),
        // A user's function computes y from x and all parameters.
        Form::Own(own) => Box::new(BuiltOwnNorm { own, parameters: affine.in_order(spec) }),
        Form::Chosen(..) => unreachable!("options choose a form that is computed"),
    })
}

/// Declares one parameter; returns `None` if the options leave the parameter out. `given` holds the norm's arguments.
/// With `elementwise_affine` off, an affine parameter becomes a constant, or `None` if the constant would not change
/// the norm.
fn parameter_of(
    parameter: &Parameter,
    given: &NormArgs,
    b: &mut Builder,
    context: &NormContext,
) -> Result<Option<BuiltParameter>> {
    let numbers = parameter.numbers(given);
    // NaN means that a user's norm declares no initial value for rows of this width.
    if numbers.start.is_nan() {
        let (name, width) = (parameter.name, context.width);
        return Err(Error::invalid(format!(
            "a norm declares no start of {name:?} for rows of {width}: declare it again"
        )));
    }
    if !(parameter.is_present)(given) {
        return Ok(None);
    }
    // All parameters are learned, except affine ones with `elementwise_affine` off.
    if !parameter.is_affine() || given.value("elementwise_affine").is_none_or(|flag| flag == true) {
        // A gain's usual initial value is multiplied by the factor that the scheme sets at this place.
        let start_factor = if parameter.is_gain { context.start } else { 1.0 };
        let fill = match numbers.std {
            0.0 => Fill::Constant(numbers.first(start_factor)),
            std => Fill::Normal { std },
        };
        let p = b.own(parameter.name, &parameter.shape.of(given), &fill, parameter.sums_over)?;
        return Ok(Some(BuiltParameter { p, numbers }));
    }
    let value = numbers.at_start(); // factor·(offset + the initial p)
    let neutral = if parameter.name == WEIGHT.name { 1.0 } else { 0.0 };
    if parameter.shape != DeclaredShape::One && value == neutral {
        return Ok(None);
    }
    // The constant already has the final value, so nothing is added or multiplied.
    let numbers = Numbers { start: value, std: 0.0, offset: 0.0, factor: 1.0 };
    Ok(Some(BuiltParameter { p: b.constant(value)?, numbers }))
}

impl Norm for BoundRowNorm {
    /// Returns N(x), computed by row kernels.
    fn forward(&self, x: &Tensor, _: &RowContext) -> Result<Tensor> {
        self.call(x)
    }

    /// Returns the norm itself, whose parameters kernels can read as they are.
    fn row(&self) -> Result<Option<StepNorm<'_>>> {
        Ok(Some(StepNorm::Borrowed(self)))
    }
}

/// A norm with row kernels whose parameters must be transformed before the kernels can read them.
struct TransformedRowNorm {
    operator: &'static RowNormOp,
    affine: NormParameters,
    eps: f64,
}

impl Norm for TransformedRowNorm {
    /// Returns N(x), computed by row kernels from the parameters' current values factor·(offset + p).
    fn forward(&self, x: &Tensor, _: &RowContext) -> Result<Tensor> {
        self.affine.bind(self.operator, self.eps)?.call(x)
    }

    /// Returns row kernels bound to the parameters' current values factor·(offset + p).
    fn row(&self) -> Result<Option<StepNorm<'_>>> {
        Ok(Some(StepNorm::Owned(self.affine.bind(self.operator, self.eps)?)))
    }
}

/// A norm whose x̂ is computed by a formula of PyTorch's operations.
struct BuiltComposedNorm {
    x_hat: ComposedNorm,
    affine: NormParameters,
    given: NormArgs,
}

impl Norm for BuiltComposedNorm {
    /// Returns weight⊙x̂ + bias, in which a formula of PyTorch's operations computes x̂ from x.
    fn forward(&self, x: &Tensor, _: &RowContext) -> Result<Tensor> {
        let [weight, bias] = self.affine.values()?;
        composed::apply(self.x_hat, x, &self.affine.numbers()?, (weight.as_ref(), bias.as_ref()), &self.given)
    }
}

/// A norm whose y, weight included, is computed by a formula of PyTorch's operations.
struct BuiltWholeNorm {
    y: WholeNorm,
    parameters: Vec<Option<BuiltParameter>>,
    given: NormArgs,
}

impl Norm for BuiltWholeNorm {
    /// Returns y, which a formula of PyTorch's operations computes from x and all parameters.
    fn forward(&self, x: &Tensor, _: &RowContext) -> Result<Tensor> {
        composed::whole(self.y, x, &values_of(&self.parameters)?, &self.given)
    }
}

/// A norm that has its own composite operator.
struct BuiltCompositeNorm {
    own: &'static CompositeNormOpSpec,
    affine: NormParameters,
    given: NormArgs,
    eps: f64,
}

impl Norm for BuiltCompositeNorm {
    /// Returns N(x), computed by the norm's own operator.
    fn forward(&self, x: &Tensor, _: &RowContext) -> Result<Tensor> {
        let [weight, _] = self.affine.values()?;
        operator::own_norm(self.own, x, weight.as_ref(), &self.given)
    }

    /// Returns the norm with row kernels, if it has some. They may replace the composite operator here, because a
    /// model's residual stream is never in 16 bits.
    fn row(&self) -> Result<Option<StepNorm<'_>>> {
        let bind = |kernels| Ok(StepNorm::Owned(self.affine.bind(RowNormOp::of(kernels), self.eps)?));
        self.own.rows.map(bind).transpose()
    }
}

/// A norm that a user's function computes.
struct BuiltOwnNorm {
    own: &'static OwnNorm,
    /// The parameters, in the order of the function's arguments.
    parameters: Vec<Option<BuiltParameter>>,
}

impl Norm for BuiltOwnNorm {
    /// Returns y, which a user's function computes from x and the parameters that the norm's options leave in.
    fn forward(&self, x: &Tensor, _: &RowContext) -> Result<Tensor> {
        let values: Vec<Tensor> = values_of(&self.parameters)?.into_iter().flatten().collect();
        operator::norm_of_ones_own(self.own, x, &values)
    }
}

/// Returns the parameters' values, with `None` for those that the norm's options leave out.
fn values_of(parameters: &[Option<BuiltParameter>]) -> Result<Vec<Option<Tensor>>> {
    parameters.iter().map(|p| p.as_ref().map(BuiltParameter::value).transpose()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::norm::scale_norm;
    use crate::norm::spec::{Quantity, EPS};
    use crate::operator::Step;
    use tch::{Device, Kind};

    /// nGPT's scale, y = (s·√d)⊙x/max(‖x‖₂, ε) with s = 1/√d at the start. The test adds an offset.
    static SCALED: Spec = Spec {
        name: "scaled",
        parameters: &[Parameter {
            start: Quantity::By("1/√d", |given| (given.width as f64).powf(-0.5)),
            offset: Quantity::Is(0.25),
            factor: Quantity::By("√d", |given| (given.width as f64).sqrt()),
            ..WEIGHT
        }],
        options: &[EPS],
        form: Form::Rows(&scale_norm::OPERATOR),
        ..scale_norm::SPEC
    };

    #[test]
    fn kernels_and_steps_get_transformed_weights() {
        let mut b = Builder::fresh(1, Device::Cpu, Kind::Float);
        let context = NormContext { width: 4, start: 3.0, ..NormContext::ANY };
        let norm = b.within("norm", |b| build(&SCALED, b, &context)).unwrap();
        let made = b.finish().unwrap();
        // The start is 2·(0.25 + 0.5) times the context's 3, so p begins at 4.5/2 − 0.25 = 2.
        let (weight, gain) = (&made.tensors()[0], 4.5);
        assert_eq!(weight.double_value(&[0]), 2.0);
        let x = Tensor::from_slice(&[1.0f32, -2.0, 3.0, 0.5]).view([1, 4]);
        let rows = RowNormOp::of(&scale_norm::OPERATOR);
        let expected = rows.call(&x, None, None, 1e-5).unwrap() * gain;
        let y = norm.forward(&x, &RowContext::default()).unwrap();
        assert!((&y - &expected).abs().max().double_value(&[]) < 1e-6);
        let step = Step { x: &x, f: &x, alpha: None, beta: None, p: 0.0, seed: None, site: 0 };
        let (_, fused) = step.then_norm(&norm.row().unwrap().unwrap(), Kind::Float).unwrap();
        assert!((&fused - &expected).abs().max().double_value(&[]) < 1e-6, "rows of twice x have the same direction");
        y.sum(Kind::Float).backward();
        let slope = weight.grad() * 0.5 - &expected / gain;
        assert!(slope.abs().max().double_value(&[]) < 1e-6, "a gradient has the factor");
    }
}
