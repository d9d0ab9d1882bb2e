//! The different definitions of "RMSNorm" in use, as options of `rmsnorm` (docs/spec.md §1.16).

use super::composed::{accumulate, affine, in_units, mean, over_row, unit};
use super::operators::CompositeNormOpSpec;
use super::rms_norm;
use super::spec::{Form, NormArgs, NormOption, EPS};
use crate::choice;
use crate::error::{Error, Result};
use crate::options::option_spec;
use serde_json::Value;
use tch::{Kind, Tensor};

choice! {
    /// The step at which numbers are rounded to x's type: γ⊙x̂ at the end, x̂ before the product with γ, or the row's
    /// scale before its product with x.
    pub enum Cast ("rmsnorm_cast") { After = "after", Before = "before", Scale = "scale" }
}

choice! {
    /// The place of ε: √(mean x² + ε), or √(mean x²) + ε.
    pub enum EpsPlace ("rmsnorm_eps_place") { Inside = "inside", Outside = "outside" }
}

option_spec! {
    /// Give rmsnorm a weight.
    pub AFFINE ("rmsnorm_weight"): bool = true;
    /// Store rmsnorm's weight as γ − 1, 0 at the start (zero-centred).
    pub ZERO_CENTRED ("rmsnorm_zero_centred"): bool = false;
    /// Step at which rmsnorm rounds to x's type: after the product with γ (after), before it (before), or already the
    /// row's scale (scale); they differ in 16 bits.
    CAST ("rmsnorm_cast"): Cast = Cast::After;
    /// Place of rmsnorm's ε: inside the root, √(mean x² + ε), or outside, √(mean x²) + ε.
    EPS_PLACE ("rmsnorm_eps_place"): EpsPlace = EpsPlace::Inside;
    /// Part p of rmsnorm's rows that is measured: the mean square is that of the first ⌊p·d⌋ numbers.
    PART ("rmsnorm_part"): f64 = 1.0, |name, p| match 0.0 < p && p <= 1.0 {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name} must lie in (0, 1], got {p}"))),
    };
}

/// The keyword arguments of RMSNorm's module.
pub static KEYWORDS: &[NormOption] = &[
    EPS,
    NormOption::of("elementwise_affine", &AFFINE),
    NormOption::of("zero_centred", &ZERO_CENTRED),
    NormOption::of("cast", &CAST),
    NormOption::of("eps_place", &EPS_PLACE),
    NormOption::of("part", &PART),
];

/// The deviations of a norm from y = weight⊙x/√(mean x² + ε), rounded once at the end. Whether the weight is stored as
/// γ or γ − 1 is part of the weight's declaration instead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conventions {
    pub cast: Cast,
    /// True if ε is added to the root instead of the mean square.
    pub eps_outside: bool,
    /// The share p of a row that is measured: the mean square is over the first ⌊p·d⌋ numbers.
    pub part: f64,
}

/// The operator of an rmsnorm with other conventions than the usual ones, if row kernels can compute its x̂ in f32 and
/// f64.
static WITH_KERNELS: CompositeNormOpSpec = CompositeNormOpSpec { rows: Some(&rms_norm::OPERATOR), ..WITHOUT_KERNELS };

/// The operator of an rmsnorm with other conventions whose x̂ no kernel computes; it has only the composed form.
static WITHOUT_KERNELS: CompositeNormOpSpec = CompositeNormOpSpec {
    operator: "conventional_rms_norm",
    keywords: &["eps", "cast", "eps_place", "part"],
    rows: None,
    composed: |x, weight, given| {
        let conventions = Conventions::of(given)?;
        conventions.composed(x, weight, given.float("eps"), conventions.measured(given.width)?)
    },
};

/// Returns the form of an rmsnorm with these options. Errors if an option is invalid for the norm's width.
pub fn form(given: &NormArgs) -> Result<Form> {
    let conventions = Conventions::of(given)?;
    // Errors if no number of a row would be measured.
    conventions.measured(given.width)?;
    // A form is chosen before x's type is known. It needs kernels for f32 at least.
    Ok(match (conventions.has_kernel(Kind::Float), conventions.cast) {
        (true, Cast::After) => Form::Rows(&rms_norm::OPERATOR),
        (true, _) => Form::Operator(&WITH_KERNELS),
        (false, _) => Form::Operator(&WITHOUT_KERNELS),
    })
}

impl Conventions {
    /// Returns the conventions of an rmsnorm with these keyword arguments.
    fn of(given: &NormArgs) -> Result<Self> {
        let word = |keyword| given.value(keyword).and_then(Value::as_str).unwrap_or_default();
        Conventions::parse(word("cast"), word("eps_place"), given.float("part"))
    }

    /// Returns the conventions from the words and the number of the options of the same names.
    pub fn parse(cast: &str, eps_place: &str, part: f64) -> Result<Self> {
        let (cast, eps_outside) = (Cast::parse(cast)?, EpsPlace::parse(eps_place)? == EpsPlace::Outside);
        (PART.check)("part", part)?;
        Ok(Conventions { cast, eps_outside, part })
    }

    /// True if the row kernels compute x̂ for rows of this type; otherwise the composed form does.
    pub fn has_kernel(&self, kind: Kind) -> bool {
        !self.eps_outside && self.part == 1.0 && (self.cast != Cast::Scale || is_wide(kind))
    }

    /// Returns the number of elements of a row of `width` that enter the mean square. Errors if it is 0.
    pub fn measured(&self, width: i64) -> Result<i64> {
        match (self.part * width as f64).floor() as i64 {
            0 if width > 0 => Err(Error::invalid(format!(
                "{} = {} of {width} numbers is none: make it at least 1/{width}, or leave it out",
                PART.name, self.part
            ))),
            count => Ok(count),
        }
    }

    /// Multiplies x̂, which has already been rounded to x's type, by the gain. The product is rounded to this type too.
    pub fn times_gain(&self, x_hat: Tensor, gain: Option<&Tensor>) -> Result<Tensor> {
        match gain {
            Some(_) => Ok(affine(accumulate(&x_hat)?, gain, None)?.f_to_kind(x_hat.kind())?),
            None => Ok(x_hat),
        }
    }

    /// Computes y in x's type with PyTorch's operations. The mean square is over a row's first `measured` numbers.
    pub fn composed(&self, x: &Tensor, gain: Option<&Tensor>, eps: f64, measured: i64) -> Result<Tensor> {
        let wide = accumulate(x)?;
        let measured_part = |x: &Tensor| x.f_narrow(-1, 0, measured);
        // Rows are divided by `unit`, so that their squares stay in range, and ε is converted to the same unit below.
        // `unit` expects the ε that is added to the mean square. An ε outside the root is like ε² there.
        let unit = unit(&measured_part(&wide)?, if self.eps_outside { eps * eps } else { eps })?;
        let in_range = wide.f_div(&unit)?;
        // The scale of x̂ = in_range·scale.
        let scale = if self.eps_outside {
            // For rows of zeros, PyTorch's norm has the gradient 0; a square root would have an infinite one.
            let length = over_row(&measured_part(&in_range)?, measured, |x| {
                Ok(x.f_norm_scalaropt_dim(2.0, [-1i64].as_slice(), true)?)
            })?;
            // The root mean square is the length divided by √measured.
            let root = length.f_mul_scalar((measured as f64).powf(-0.5))?;
            root.f_add(&unit.f_reciprocal()?.f_mul_scalar(eps)?)?.f_reciprocal()?
        } else {
            let square = mean(&measured_part(&in_range)?.f_square()?, measured)?;
            square.f_add(&in_units(eps, &unit)?)?.f_rsqrt()?
        };
        let x_hat = match self.cast {
            // The rounded number is the scale of x itself, not of x/unit.
            Cast::Scale => wide.f_mul(&rounded(&scale.f_div(&unit)?, x.kind())?)?,
            _ => in_range.f_mul(&scale)?,
        };
        match self.cast {
            Cast::After => Ok(affine(x_hat, gain, None)?.f_to_kind(x.kind())?),
            _ => self.times_gain(x_hat.f_to_kind(x.kind())?, gain),
        }
    }

    /// True if x̂ of rows of this type is rounded before it is multiplied by γ. In f32 and f64, nothing is rounded.
    pub fn rounds_first(&self, kind: Kind) -> bool {
        self.cast != Cast::After && !is_wide(kind)
    }
}

/// Rounds the numbers of t to `kind` but keeps t's own type, so that sums in the backward pass do not leave the range
/// of 16 bits. The gradient passes through unchanged (a straight-through estimator).
fn rounded(t: &Tensor, kind: Kind) -> Result<Tensor> {
    let exact = t.f_detach()?;
    let rounded = accumulate(&exact.f_to_kind(kind)?)?.f_to_kind(t.kind())?;
    // For autograd, the added difference is a constant, so t's gradient is that of the identity.
    Ok(t.f_add(&rounded.f_sub(&exact)?)?)
}

/// True for f32 and f64, the types in which statistics accumulate.
fn is_wide(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::Double)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::norm::{find, named, NormContext};
    use crate::options::Options;
    use serde_json::json;

    const X: [f64; 4] = [1.0, -2.0, 3.0, 0.5];
    const GAMMA: [f64; 4] = [1.0, 0.5, 2.0, -1.0];

    /// Returns the arguments of the norm or family `name` with width 64.
    fn given(name: &str, options: &Options) -> NormArgs {
        let (spec, options) = named(name, options).unwrap();
        spec.at(&NormContext { options: &options, width: 64, ..NormContext::ANY })
    }

    /// Returns the conventions of the norm or family `name`.
    fn of(name: &str) -> Conventions {
        Conventions::of(&given(name, &Options::NONE)).unwrap()
    }

    /// Returns y of the composed form for rows of any width. `how` are the norm's conventions.
    fn composed(how: Conventions, x: &Tensor, gain: Option<&Tensor>, eps: f64) -> Tensor {
        how.composed(x, gain, eps, how.measured(*x.size().last().unwrap()).unwrap()).unwrap()
    }

    #[test]
    fn known_rows_have_known_results() {
        for (name, weighs, expected) in [
            ("rmsnorm:llama", true, [0.52981287, -0.52981287, 3.17887721, -0.26490643]),
            ("rmsnorm:gemma", true, [1.05962574, -1.58943861, 4.76831582, 0.0]),
        ] {
            let (how, given) = (of(name), given(name, &Options::NONE));
            let gain = find(name).unwrap().parameters[0].numbers(&given).of(&Tensor::from_slice(&GAMMA)).unwrap();
            let y = composed(how, &Tensor::from_slice(&X), weighs.then_some(&gain), given.float("eps"));
            for (i, wanted) in expected.into_iter().enumerate() {
                assert!((y.double_value(&[i as i64]) - wanted).abs() < 1e-8, "{name} {i}");
            }
        }
        let how = Conventions { part: 0.5, ..of("rmsnorm:original") };
        let y = composed(how, &Tensor::from_slice(&X), Some(&Tensor::from_slice(&GAMMA)), 1e-8);
        for (i, wanted) in [0.63245553, -0.63245553, 3.79473317, -0.31622776].into_iter().enumerate() {
            assert!((y.double_value(&[i as i64]) - wanted).abs() < 1e-8, "{i}");
        }
    }

    #[test]
    fn rows_of_zeros_have_finite_gradients() {
        let x =
            Tensor::f_zeros([2i64, 4].as_slice(), (Kind::Double, tch::Device::Cpu)).unwrap().set_requires_grad(true);
        composed(of("rmsnorm:original"), &x, None, 1e-8).sum(Kind::Double).backward();
        assert!(x.grad().isfinite().all().int64_value(&[]) == 1);
    }

    #[test]
    fn rows_whose_squares_leave_the_range_are_like_others() {
        tch::manual_seed(5);
        let x = Tensor::randn([2, 64], (Kind::Float, tch::Device::Cpu));
        for name in ["rmsnorm:original", "rmsnorm:partial", "rmsnorm:deepseek-v4"] {
            let how = of(name);
            let run = |x: &Tensor, eps: f64| {
                let x = x.set_requires_grad(true);
                let y = composed(how, &x, None, eps);
                (y.sin().sum(Kind::Float)).backward();
                (y.detach(), x.grad())
            };
            let (y, dx) = run(&x.copy(), 0.0);
            for size in [1e25, 1e-25] {
                // With ε = 0, y does not depend on the size of x, and dx is divided by the size.
                let (y_resized, dx_resized) = run(&(&x * size), 0.0);
                let y_error = (y_resized - &y).abs().max().double_value(&[]);
                let dx_error = (dx_resized * size - &dx).abs().max().double_value(&[]);
                assert!(y_error < 1e-5 && dx_error < 1e-5, "{name} {size}: {y_error} {dx_error}");
            }
            // An ε that is large beside x makes y small, but not 0.
            let largest = (run(&(&x * 1e-25), 1e-5).0).abs().max().double_value(&[]);
            assert!(largest > 0.0 && largest < 1e-18, "{name}: {largest}");
        }
    }

    #[test]
    fn the_gradient_of_a_rounded_scale_stays_in_f16s_range() {
        tch::manual_seed(5);
        let how = of("rmsnorm:deepseek-v4");
        let rows = Tensor::randn([4, 512], (Kind::Float, tch::Device::Cpu));
        for size in [1.0, 30.0, 3000.0] {
            let gradient = |kind| {
                let x = (&rows * size).to_kind(Kind::Half).to_kind(kind).set_requires_grad(true);
                (composed(how, &x, None, 1e-6) * (rows.sign() * 8.0).to_kind(kind)).sum(kind).backward();
                x.grad().to_kind(Kind::Double)
            };
            let (in_f16, exact) = (gradient(Kind::Half), gradient(Kind::Double));
            let error = (in_f16 - &exact).abs().max().double_value(&[]);
            assert!(error < 5e-3 * exact.abs().max().double_value(&[]), "{size}: {error}");
        }
    }

    #[test]
    fn a_sum_in_16_bits_would_lose_small_weights() {
        let numbers = find("rmsnorm:gemma").unwrap().parameters[0].numbers(&given("rmsnorm:gemma", &Options::NONE));
        let weight = Tensor::from_slice(&[0.00390625f32]).to_kind(Kind::BFloat16);
        assert_eq!(numbers.of(&weight).unwrap().double_value(&[0]), 1.00390625);
    }

    #[test]
    fn a_part_of_no_numbers_is_an_error() {
        let how = Conventions { part: 0.2, ..of("rmsnorm:original") };
        let e = how.measured(4).unwrap_err().to_string();
        assert!(e.contains("rmsnorm_part = 0.2 of 4 numbers is none"), "{e}");
        assert_eq!(how.measured(5).unwrap(), 1);
    }

    #[test]
    fn families_choose_forms_and_epsilon() {
        let has_rows = |name| matches!(form(&given(name, &Options::NONE)), Ok(Form::Rows(_)));
        assert!(["rmsnorm", "rmsnorm:olmo", "rmsnorm:gemma"].into_iter().all(has_rows) && !has_rows("rmsnorm:llama"));
        assert!(of("rmsnorm:llama").has_kernel(Kind::BFloat16) && !of("rmsnorm:partial").has_kernel(Kind::Float));
        let scaled = of("rmsnorm:deepseek-v4");
        assert!(scaled.has_kernel(Kind::Double) && !scaled.has_kernel(Kind::BFloat16));
        let mut options = Options::default();
        options.set(&crate::norm::spec::NORM_EPS, json!(0.5)).unwrap();
        assert_eq!(given("rmsnorm:llama", &options).float("eps"), 0.5);
        let e = find("rmsnorm:lama").err().unwrap().to_string();
        assert!(e.contains("did you mean \"rmsnorm:llama\""), "{e}");
    }
}
