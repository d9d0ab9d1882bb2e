//! The parts of a residual scheme in a model, built from its declarations: norms, gains, changes and connections.

use super::mixing::BuiltMixing;
use super::norm::{self, Norm, RowContext, StepNorm};
use super::{Builder, Context};
use crate::error::{Error, Result};
use crate::init::Fill;
use crate::norm::conventions::{AFFINE, ZERO_CENTRED};
use crate::norm::spec::CLOCK;
use crate::norm::{named, scale_norm, NormContext};
use crate::operator::RowNormOp;
use crate::options::Options;
use crate::residual::{self as declared, FirstValue, Growth, LayerContext, NormAt, Point};
use std::cell::RefCell;
use std::collections::BTreeMap;
use tch::{Kind, Tensor};

/// The tensors that a stack's layers keep for later layers of the same pass, by name.
pub type KeptTensors = RefCell<BTreeMap<String, Tensor>>;

/// Builds a norm of the stack's kind, such as layernorm. The scheme declares the norm's name, width and place in `at`.
fn norm(b: &mut Builder, place: &LayerContext, at: &NormAt) -> Result<Box<dyn Norm>> {
    let last_of_decoder = at.last && place.stack == declared::StackName::Decoder;
    let (spec, mut options) = named(place.norm_name(), place.options)?;
    if !at.is_weighted {
        without_weight(options.to_mut());
    }
    let (heads, ends_stack, start) = (place.model.heads, at.ends_stack, at.start);
    let context = NormContext { width: at.width, heads, options: &options, last_of_decoder, ends_stack, start };
    b.within(&at.name, |b| Ok(Box::new(NamedNorm { name: b.place(), norm: norm::build(spec, b, &context)? }) as _))
}

/// A norm that shows its output to a watch.
struct NamedNorm {
    name: String,
    norm: Box<dyn Norm>,
}

impl Norm for NamedNorm {
    /// Returns N(x), and shows it to the watch if there is one.
    fn forward(&self, x: &Tensor, rows: &RowContext) -> Result<Tensor> {
        let y = self.norm.forward(x, rows)?;
        if let Some(watch) = rows.watch {
            watch.norm(&self.name, &y)?;
        }
        Ok(y)
    }

    /// Returns the row kernels of the norm, if it has some.
    fn row(&self) -> Result<Option<StepNorm<'_>>> {
        self.norm.row()
    }
}

/// Sets the options that give an rmsnorm no weight: no affine parameters, and no zero-centred weight.
fn without_weight(options: &mut Options) {
    for option_spec in [&AFFINE, &ZERO_CENTRED] {
        options.set(option_spec, false.into()).expect("both are true or false");
    }
}

/// Builds the norm that `at` declares; `None` if it declares none.
fn norm_if(b: &mut Builder, place: &LayerContext, at: &Option<NormAt>) -> Result<Option<Box<dyn Norm>>> {
    at.as_ref().map(|at| norm(b, place, at)).transpose()
}

/// Creates the parameter that a scheme declares, or returns the existing one of the same name.
pub fn learned(b: &mut Builder, declared: &declared::Learned) -> Result<Tensor> {
    let fill = match &declared.value {
        FirstValue::All(value) => Fill::Constant(*value),
        FirstValue::Each(values) => Fill::Each(values.clone()),
        FirstValue::Normal { normal } => Fill::Normal { std: *normal },
    };
    b.shared(&declared.name, &declared.shape, &fill, declared.sums_over)
}

/// The least value of the square of a [`BuiltGain::CoSigmoid`]; it keeps the slope of the root finite.
const LEAST_VARIANCE: f64 = 1e-3;

/// The factor of x (residual gain) or of F(x) (branch gain) in the residual sum.
pub enum BuiltGain {
    One,
    /// A scalar, or one number per column.
    Is(Tensor),
    /// σ(w/τ) with the parameter w and the temperature τ.
    Sigmoid(Tensor, f64),
    /// √max(1 − σ(w/τ)², 10⁻³), with the w and τ of a [`Sigmoid`](Self::Sigmoid) gain.
    CoSigmoid(Tensor, f64),
    /// |w/τ| with the parameter w and the temperature τ.
    Magnitude(Tensor, f64),
    /// 1 − |w/τ|, with the w and τ of a [`Magnitude`](Self::Magnitude) gain.
    CoMagnitude(Tensor, f64),
    /// α_t, which the stack computes for each update.
    Growing,
}

impl BuiltGain {
    /// Builds a declared gain, and declares its parameter if it has one.
    fn build(b: &mut Builder, declared: &declared::Gain) -> Result<Self> {
        Ok(match declared {
            declared::Gain::One => BuiltGain::One,
            declared::Gain::Constant(value) => BuiltGain::Is(b.constant(*value)?),
            declared::Gain::Learned(parameter) => BuiltGain::Is(learned(b, parameter)?),
            declared::Gain::Sigmoid { of, temperature } => BuiltGain::Sigmoid(learned(b, of)?, *temperature),
            declared::Gain::CoSigmoid { of, temperature } => BuiltGain::CoSigmoid(learned(b, of)?, *temperature),
            declared::Gain::Magnitude { of, temperature } => BuiltGain::Magnitude(learned(b, of)?, *temperature),
            declared::Gain::CoMagnitude { of, temperature } => BuiltGain::CoMagnitude(learned(b, of)?, *temperature),
            declared::Gain::Growing => BuiltGain::Growing,
        })
    }

    /// Returns the gain's current value; `None` means 1. `alpha_t` is the stack's α_t, for a gain that grows.
    pub fn now(&self, alpha_t: Option<&Tensor>) -> Result<Option<Tensor>> {
        Ok(match self {
            BuiltGain::One => None,
            BuiltGain::Is(gain) => Some(gain.shallow_clone()),
            BuiltGain::Sigmoid(w, temperature) => Some(w.f_div_scalar(*temperature)?.f_sigmoid()?),
            BuiltGain::CoSigmoid(w, temperature) => {
                // 1 − σ(w)² = σ(−w)(1 + σ(w)), and the product does not cancel where σ(w) is close to 1.
                let w = w.f_div_scalar(*temperature)?;
                let rest = w.f_neg()?.f_sigmoid()?.f_mul(&w.f_sigmoid()?.f_add_scalar(1.0)?)?;
                Some(rest.f_clamp_min(LEAST_VARIANCE)?.f_sqrt()?)
            }
            BuiltGain::Magnitude(w, temperature) => Some(w.f_div_scalar(*temperature)?.f_abs()?),
            BuiltGain::CoMagnitude(w, temperature) => {
                Some(w.f_div_scalar(*temperature)?.f_abs()?.f_neg()?.f_add_scalar(1.0)?)
            }
            BuiltGain::Growing => alpha_t.map(Tensor::shallow_clone),
        })
    }

    /// Returns gain⊙x in x's type, for a [`BuiltChange::Mix`].
    fn times(&self, x: &Tensor) -> Result<Tensor> {
        let alpha_t = None; // no gain of a mix grows with the updates
        match self.now(alpha_t)? {
            Some(gain) => Ok(x.f_mul(&gain.f_to_kind(x.kind())?)?),
            None => Ok(x.shallow_clone()),
        }
    }
}

/// The residual connection of one sublayer: x⁺ = after(α⊙skip(x) + β⊙drop(f)) with f = branch(F(before(x))), and s⁺ =
/// α⊙s + β⊙drop(f) for every stream s beside x.
pub struct BuiltResidual {
    pub before: BuiltChanges,
    pub skip: BuiltChanges,
    pub branch: BuiltChanges,
    pub after: BuiltChanges,
    pub alpha: BuiltGain,
    pub beta: BuiltGain,
    /// The gains α and β of each stream beside x.
    pub streams: Vec<(BuiltGain, BuiltGain)>,
    /// The mixing that reads x and writes F(x); `None` if the connection is the plain one above.
    pub mixing: Option<BuiltMixing>,
}

impl BuiltResidual {
    /// Builds the residual connection of the sublayer at this place, and declares its parameters.
    pub fn build(b: &mut Builder, place: &LayerContext, declared: &declared::ResidualSpec) -> Result<Self> {
        let gains = |b: &mut Builder, step: &declared::StreamStep| {
            Ok((BuiltGain::build(b, &step.alpha)?, BuiltGain::build(b, &step.beta)?))
        };
        Ok(BuiltResidual {
            before: BuiltChanges::build(b, place, &declared.before)?,
            alpha: BuiltGain::build(b, &declared.alpha)?,
            beta: BuiltGain::build(b, &declared.beta)?,
            skip: BuiltChanges::build(b, place, &declared.skip)?,
            branch: BuiltChanges::build(b, place, &declared.branch)?,
            after: BuiltChanges::build(b, place, &declared.after)?,
            streams: declared.streams.iter().map(|step| gains(b, step)).collect::<Result<_>>()?,
            mixing: declared.mixing.as_ref().map(|mixing| BuiltMixing::build(b, mixing)).transpose()?,
        })
    }
}

pub enum BuiltChange {
    Norm {
        norm: Box<dyn Norm>,
        width: i64,
    },
    Shift(Tensor),
    Scale(Tensor),
    Times(f64),
    /// Divides each row by its length, so that the length becomes 1; the number is ε.
    Unit(f64),
    HeadScale(Tensor),
    DampForward(Tensor),
    Keep(String),
    Mix {
        name: String,
        own: BuiltGain,
        kept: BuiltGain,
    },
}

impl BuiltChange {
    /// Builds a declared change, and declares its parameters.
    fn build(b: &mut Builder, place: &LayerContext, declared: &declared::Change) -> Result<Self> {
        Ok(match declared {
            declared::Change::Norm(at) => BuiltChange::Norm { norm: norm(b, place, at)?, width: at.width },
            declared::Change::Shift(parameter) => BuiltChange::Shift(learned(b, parameter)?),
            declared::Change::Scale(parameter) => BuiltChange::Scale(learned(b, parameter)?),
            declared::Change::Times(c) => BuiltChange::Times(*c),
            declared::Change::Unit(eps) => BuiltChange::Unit(*eps),
            declared::Change::HeadScale(parameter) => BuiltChange::HeadScale(learned(b, parameter)?),
            declared::Change::DampForward(parameter) => BuiltChange::DampForward(learned(b, parameter)?),
            declared::Change::Keep(name) => BuiltChange::Keep(name.clone()),
            declared::Change::Mix { name, own, kept } => {
                let (own, kept) = (BuiltGain::build(b, own)?, BuiltGain::build(b, kept)?);
                BuiltChange::Mix { name: name.clone(), own, kept }
            }
        })
    }

    /// Returns x after this change. `Keep` writes to the kept tensors in `rows`, and `Mix` reads from them.
    pub fn apply(&self, x: &Tensor, rows: &RowContext) -> Result<Tensor> {
        Ok(match self {
            BuiltChange::Norm { norm, .. } => norm.forward(x, rows)?,
            BuiltChange::Shift(b) => x.f_sub(&b.f_to_kind(x.kind())?)?,
            BuiltChange::Scale(s) => x.f_mul(&s.f_to_kind(x.kind())?)?,
            BuiltChange::Times(c) => x.f_mul_scalar(*c)?,
            BuiltChange::Unit(eps) => RowNormOp::of(&scale_norm::OPERATOR).call(x, None, None, *eps)?,
            BuiltChange::HeadScale(s) => {
                // s has one number for each head, and x is (…, heads·d_head).
                let heads = x.f_unflatten(-1, [s.numel() as i64, -1].as_slice())?;
                heads.f_mul(&s.f_to_kind(x.kind())?.f_unsqueeze(-1)?)?.f_flatten(-2, -1)?
            }
            // x − silu(a)·x, in which autograd takes the second x as a constant: the gradient of x is not scaled.
            BuiltChange::DampForward(a) => x.f_sub(&x.f_detach()?.f_mul(&a.f_silu()?.f_to_kind(x.kind())?)?)?,
            BuiltChange::Keep(name) => {
                rows.kept_tensors()?.borrow_mut().insert(name.clone(), x.shallow_clone());
                x.shallow_clone()
            }
            BuiltChange::Mix { name, own, kept } => {
                let earlier = rows.kept_tensors()?.borrow().get(name).map(Tensor::shallow_clone);
                let earlier =
                    earlier.ok_or_else(|| Error::invalid(format!("no layer has left {name:?} for this one")))?;
                own.times(x)?.f_add(&kept.times(&earlier)?)?
            }
        })
    }

    /// True if this change of queries, keys or values applies to each head's part of a row, not to the whole row, which
    /// is `width` wide.
    fn is_by_head(&self, width: i64) -> bool {
        match self {
            BuiltChange::Norm { width: norm_width, .. } => *norm_width != width,
            // A parameter that is not as wide as the row is a scalar or as wide as a head. Both fit a head's part.
            BuiltChange::Shift(p) | BuiltChange::Scale(p) => p.numel() as i64 != width,
            // These act on whole rows: kept tensors hold rows, and the parameter of `DampForward` may be as wide as
            // one.
            BuiltChange::Keep(_) | BuiltChange::Mix { .. } | BuiltChange::DampForward(_) => false,
            _ => true,
        }
    }
}

/// The changes at one place, in the order in which they apply.
pub struct BuiltChanges(Vec<BuiltChange>);

impl BuiltChanges {
    /// Builds declared changes, and declares their parameters.
    pub fn build(b: &mut Builder, place: &LayerContext, declared: &[declared::Change]) -> Result<Self> {
        Ok(BuiltChanges(declared.iter().map(|change| BuiltChange::build(b, place, change)).collect::<Result<_>>()?))
    }

    /// Returns x after all changes, in their order.
    pub fn apply(&self, x: Tensor, ctx: &Context) -> Result<Tensor> {
        self.0.iter().try_fold(x, |x, change| change.apply(&x, &ctx.rows()))
    }

    /// True if there are no changes at this place.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if no change alters x: each of them at most keeps x for later layers.
    pub fn only_look(&self) -> bool {
        self.0.iter().all(|change| matches!(change, BuiltChange::Keep(_)))
    }

    /// Returns the norm if it is the only change here; then a fused step can compute it.
    pub fn norm(&self) -> Option<&dyn Norm> {
        match self.0.as_slice() {
            [BuiltChange::Norm { norm, .. }] => Some(norm.as_ref()),
            _ => None,
        }
    }
}

/// The changes inside a sublayer, each with the point at which it applies.
pub struct Inside(Vec<(Point, BuiltChange)>);

impl Inside {
    /// Builds the changes declared inside a sublayer, and declares their parameters.
    pub fn build(b: &mut Builder, place: &LayerContext, declared: &[(Point, declared::Change)]) -> Result<Self> {
        let build = |(point, change): &(Point, declared::Change)| Ok((*point, BuiltChange::build(b, place, change)?));
        Ok(Inside(declared.iter().map(build).collect::<Result<_>>()?))
    }

    /// Returns queries, keys or values (…, d), the rows of `heads` heads, after the changes declared for this point.
    pub fn at_heads(&self, point: Point, x: Tensor, heads: i64, rows: &RowContext) -> Result<Tensor> {
        let d = *x.size().last().expect("rows have a width");
        // A change by head sees the rows split into heads, (…, heads, d_head).
        self.0.iter().filter(|(place, _)| *place == point).try_fold(x, |x, (_, change)| match change.is_by_head(d) {
            false => change.apply(&x, rows),
            true => {
                let by_head = x.f_unflatten(-1, [heads, -1].as_slice())?;
                Ok(change.apply(&by_head, rows)?.f_flatten(-2, -1)?)
            }
        })
    }

    /// True if there is a change at this point.
    pub fn changes(&self, point: Point) -> bool {
        self.0.iter().any(|(place, _)| *place == point)
    }

    /// Returns x after the changes at this point.
    pub fn at(&self, point: Point, x: Tensor, rows: &RowContext) -> Result<Tensor> {
        self.0.iter().filter(|(place, _)| *place == point).try_fold(x, |x, (_, change)| change.apply(&x, rows))
    }
}

/// The scheme's parts before the first layer of a stack, between layers, and after the last.
pub struct BuiltEnds {
    begin: BuiltChanges,
    pub combine: Option<BuiltCombine>,
    /// The mixing that reads the stack's output; `None` if the output is x.
    pub mixing: Option<BuiltMixing>,
    growth: Option<(Growth, Tensor)>,
    /// The final norm of each stream beside x.
    streams: Vec<Option<Box<dyn Norm>>>,
    end: BuiltChanges,
}

impl BuiltEnds {
    /// Builds the parts of the scheme that belong to the whole stack, and declares their parameters and the clock t.
    pub fn build(b: &mut Builder, place: &LayerContext, declared: &declared::StackSpec) -> Result<Self> {
        let begin = BuiltChanges::build(b, place, &declared.begin)?;
        let combine = declared.combine.as_ref().map(|c| BuiltCombine::build(b, place, c)).transpose()?;
        let mixing = declared.mixing.as_ref().map(|mixing| BuiltMixing::build(b, mixing)).transpose()?;
        let growth = match declared.growth {
            Some(growth) => Some((growth, b.buffer(CLOCK.name, &[1], CLOCK.start, Kind::Int64)?)),
            None => None,
        };
        let streams = declared.streams.iter().map(|stream| norm_if(b, place, &stream.norm)).collect::<Result<_>>()?;
        let end = BuiltChanges::build(b, place, &declared.end)?;
        Ok(BuiltEnds { begin, combine, mixing, growth, streams, end })
    }

    /// Computes the first layer's input from the embedding x. `smear` changes x right before the scheme's first
    /// [`BuiltChange::Keep`], or after all changes if there is none.
    pub fn enter(&self, x: Tensor, ctx: &Context, smear: impl FnOnce(Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let changes = &self.begin.0;
        let is_keep = |change: &BuiltChange| matches!(change, BuiltChange::Keep(_));
        let (before_keep, rest) = changes.split_at(changes.iter().position(is_keep).unwrap_or(changes.len()));
        let apply = |x: Tensor, change: &BuiltChange| change.apply(&x, &ctx.rows());
        let x = smear(before_keep.iter().try_fold(x, apply)?)?;
        rest.iter().try_fold(x, apply)
    }

    /// Returns x and the streams beside it, which all begin with the value of x. They are views, so that autograd
    /// sums their gradients in the same order whether or not layers run again for their gradients.
    pub fn begin(&self, x: Tensor) -> Result<(Tensor, Vec<Tensor>)> {
        let streams = self.streams.iter().map(|_| Ok(x.f_view_as(&x)?)).collect::<Result<_>>()?;
        let x = match &self.mixing {
            Some(mixing) => mixing.begin(x)?,
            None => x,
        };
        Ok((x, streams))
    }

    /// Returns the stack's output: combines x and the streams beside it into one tensor, and applies the changes at the
    /// end.
    pub fn finish(&self, mut x: Tensor, streams: Vec<Tensor>, ctx: &Context) -> Result<Tensor> {
        if let Some(mixing) = &self.mixing {
            let all: Vec<&Tensor> = [&x].into_iter().chain(&streams).collect();
            let is_training = ctx.has_flat(); // only training loops on a CPU have flat buffers
            let (output, _) = mixing.read(&all, ctx.watch(), is_training)?; // at the end, nothing is written
            x = output;
        }
        // With a mixing there are no streams of the scheme's own, so nothing is added here.
        for (norm, stream) in self.streams.iter().zip(streams) {
            x = match norm {
                Some(norm) => x.f_add(&norm.forward(&stream, &ctx.rows())?)?,
                None => x.f_add(&stream)?,
            };
        }
        self.end.apply(x, ctx)
    }

    /// Returns a layer's output, x and the streams beside it, as one tensor for diagnostics.
    pub fn seen(&self, x: &Tensor, streams: &[Tensor]) -> Result<Tensor> {
        match &self.mixing {
            Some(mixing) => mixing.seen(&[x].into_iter().chain(streams).collect::<Vec<_>>()),
            None => Ok(x.shallow_clone()),
        }
    }

    /// Returns the α_t of each layer, in this type; empty if the scheme has no gain that grows.
    pub fn alphas(&self, layers: usize, kind: Kind) -> Result<Vec<Tensor>> {
        match &self.growth {
            None => Ok(Vec::new()),
            Some((growth, t)) if growth.by_layer => {
                (0..layers).map(|layer| growth.alpha(t, layer as i64, kind)).collect()
            }
            Some((growth, t)) => {
                let alpha = growth.alpha(t, 0, kind)?; // the same in all layers, so layer 0 stands for each
                Ok((0..layers).map(|_| alpha.shallow_clone()).collect())
            }
        }
    }

    /// Returns the stack's final norm if it is the only part that ends the stack.
    pub fn end_norm(&self) -> Option<&dyn Norm> {
        let nothing_else = self.combine.is_none() && self.streams.is_empty() && self.mixing.is_none();
        self.end.norm().filter(|_| nothing_else)
    }
}

/// Learned weighted sums of the embedding and all layer outputs so far.
pub struct BuiltCombine {
    weight: Tensor,
    norms: Vec<Box<dyn Norm>>,
    on_sums: bool,
    skips_first: bool,
}

impl BuiltCombine {
    /// Builds the sums that a scheme declares between layers: the matrix of weights, and the norms.
    fn build(b: &mut Builder, place: &LayerContext, declared: &declared::Combine) -> Result<Self> {
        Ok(BuiltCombine {
            weight: learned(b, &declared.weight)?,
            norms: declared.norms.iter().map(|at| norm(b, place, at)).collect::<Result<_>>()?,
            on_sums: declared.on_sums,
            skips_first: declared.skips_first,
        })
    }

    /// Appends an output y (first the embedding, then each layer's output) to `outputs`, and returns the input of the
    /// next layer, or the stack's output. `outputs` holds the earlier outputs of this pass, after their norms if the
    /// norms apply to outputs and not to sums.
    pub fn next(&self, y: Tensor, outputs: &mut Vec<Tensor>, ctx: &Context) -> Result<Tensor> {
        let row = outputs.len(); // the number of y, and of the matrix row that sums the outputs up to y
        let norm = row.checked_sub(1).and_then(|index| self.norms.get(index)); // the embedding, row 0, has no norm
        let normed = |x: Tensor| norm.map_or_else(|| Ok(x.shallow_clone()), |norm| norm.forward(&x, &ctx.rows()));
        outputs.push(if self.on_sums { y } else { normed(y)? });
        if self.skips_first && row == 0 {
            // The first input is a view of the embedding. So autograd sums the embedding's gradients in the same order
            // whether or not layers run again for their gradients.
            return Ok(outputs[0].f_view_as(&outputs[0])?);
        }
        // The matrix is lower-triangular: this row has as many weights as there are outputs.
        let weights = self.weight.f_get(row as i64)?.f_narrow(0, 0, row as i64 + 1)?;
        // One product of the flattened outputs and the row of weights computes Σ_k w_k y_k.
        let flat = Tensor::f_stack(&outputs.iter().map(|y| y.flatten(0, -1)).collect::<Vec<_>>(), 1)?;
        let sum = flat.f_matmul(&weights.f_to_kind(flat.kind())?)?.f_view_as(&outputs[0])?;
        if self.on_sums {
            normed(sum)
        } else {
            Ok(sum)
        }
    }
}
