//! A layer: its sublayers, with the residual scheme's changes around and inside each of them.

use super::attention::Attention;
use super::feed_forward::FeedForward;
use super::mixing::PendingWrite;
use super::norm::Norm;
use super::residual::{BuiltChanges, BuiltResidual, Inside};
use super::tensorized::Tensorized;
use super::{times, Builder, Context};
use crate::error::{Error, Result};
use crate::init::Init;
use crate::operator;
use crate::residual::{LayerContext, LayerSpec, Mixing, Point, Sublayer, SublayerSpec};
use std::collections::BTreeSet;
use tch::{no_grad, Kind, Tensor};

pub struct Layer {
    /// The changes applied to x when the layer begins.
    pub begin: BuiltChanges,
    pub sublayers: Vec<BuiltSublayer>,
    /// The names of the tensors that this layer reads from earlier layers.
    pub takes: Vec<String>,
    /// The names of the tensors that this layer keeps for later layers.
    pub leaves: Vec<String>,
}

/// A sublayer, with the residual connection around it.
pub struct BuiltSublayer {
    pub function: SublayerFunction,
    pub around: BuiltResidual,
    pub inside: Inside,
    /// The factor on F(x) that the parametrisation sets; 1 if the factor has been folded into β.
    scale: f64,
}

pub enum SublayerFunction {
    SelfAttention(Attention),
    Tensorized(Tensorized),
    CrossAttention(Attention),
    FeedForward(FeedForward),
}

/// The residual streams between two sublayers.
pub struct Streams {
    pub x: Tensor,
    /// The streams beside x; their number is set by the scheme's [`StackSpec`](crate::residual::StackSpec).
    pub others: Vec<Tensor>,
    /// N(x) of the next sublayer, if the fused step that computed x has computed N(x) as well.
    pub normed: Option<Tensor>,
    /// The state of a hyper-connection between its read and its write.
    pub unwritten: Option<PendingWrite>,
    /// The value α_t of the stack at the current layer, if the scheme has a gain that grows.
    pub alpha_t: Option<Tensor>,
    /// The standard deviation of everything added so far, while profiling (docs/spec.md §3.4).
    pub deviation: Option<Tensor>,
}

impl Streams {
    /// Iterates over the tensors that a layer changes: x, the other streams, and N(x) if it has been computed.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.x].into_iter().chain(&self.others).chain(&self.normed)
    }

    /// Builds streams from the tensors that [`tensors`](Self::tensors) lists: x, `others` streams beside x, and perhaps
    /// N(x).
    pub fn of(tensors: impl IntoIterator<Item = Tensor>, others: usize, alpha_t: Option<Tensor>) -> Self {
        let mut tensors = tensors.into_iter();
        let x = tensors.next().expect("x is the first of a layer's tensors");
        let others = tensors.by_ref().take(others).collect();
        Streams { x, others, normed: tensors.next(), unwritten: None, alpha_t, deviation: None }
    }

    /// Returns views of x and of the other streams. Because of the views, autograd first sums the gradients that come
    /// from within one layer, then adds those of other layers. So the order is the same if the layer runs again for
    /// its gradients.
    pub fn viewed(&self) -> Result<Self> {
        let view = |t: &Tensor| Ok(t.f_view_as(t)?);
        let views = self.tensors().map(view).collect::<Result<Vec<_>>>()?;
        Ok(Streams::of(views, self.others.len(), self.alpha_t.as_ref().map(Tensor::shallow_clone)))
    }

    /// Returns the first `kept` tensors of these streams, followed by the tensors of `after` from index `kept` on.
    pub fn followed_by(self, kept: usize, after: Streams) -> Self {
        let old = [self.x].into_iter().chain(self.others);
        let new = [after.x].into_iter().chain(after.others);
        let mut tensors = old.take(kept).chain(new.skip(kept)).collect::<Vec<_>>().into_iter();
        let x = tensors.next().expect("x is the first");
        Streams { x, others: tensors.collect(), ..after }
    }
}

impl Layer {
    /// Builds the layer that contains `place` from its declaration, and declares its parameters.
    pub fn build(
        b: &mut Builder,
        place: &LayerContext,
        init: &Init,
        has_biases: bool,
        declared: &LayerSpec,
    ) -> Result<Self> {
        let begin = BuiltChanges::build(b, place, &declared.begin)?;
        let mut sublayers = Vec::new();
        // `around` is the connection around the sublayer, `inside` are the changes inside it, and `scale` multiplies
        // F(x).
        for (place, SublayerSpec { around, inside, scale }) in place.each().zip(&declared.sublayers) {
            // "Apart" means that q, k and v have separate inputs.
            let reads_apart = around.mixing.as_ref().is_some_and(Mixing::reads_apart);
            let is_apart = reads_apart || inside.iter().any(|(point, _)| Point::INPUTS.contains(point));
            if is_apart && place.model.tensorized.is_some() {
                return Err(Error::invalid(
                    "tensorized attention reads one input, so q, k and v cannot have their own: leave attnres_queries out",
                ));
            }
            let function = match (place.sublayer, place.model.tensorized) {
                (Sublayer::SelfAttention, Some(sizes)) => {
                    SublayerFunction::Tensorized(b.within("self_attn", |b| Tensorized::build(b, &place, init, sizes))?)
                }
                (Sublayer::SelfAttention, None) => SublayerFunction::SelfAttention(
                    b.within("self_attn", |b| Attention::build(b, &place, init, has_biases))?,
                ),
                (Sublayer::CrossAttention, _) => SublayerFunction::CrossAttention(
                    b.within("multihead_attn", |b| Attention::build(b, &place, init, has_biases))?,
                ),
                (Sublayer::FeedForward, _) => {
                    SublayerFunction::FeedForward(FeedForward::build(b, &place, init, has_biases)?)
                }
            };
            let (around, inside) = (BuiltResidual::build(b, &place, around)?, Inside::build(b, &place, inside)?);
            sublayers.push(BuiltSublayer { function, around, inside, scale: *scale });
        }
        let owned = |names: BTreeSet<&str>| names.into_iter().map(String::from).collect();
        Ok(Layer { begin, sublayers, takes: owned(declared.takes()), leaves: owned(declared.leaves()) })
    }

    /// Returns how many of the streams' tensors the layer leaves unchanged, for later layers to read.
    pub fn keeps(&self, streams: &Streams) -> usize {
        // Later sublayers change no more tensors than the first one: they only add to the last tensor, or new ones.
        let first_mixing = self.sublayers.first().and_then(|branch| branch.around.mixing.as_ref());
        let tensors = streams.others.len() + 1; // x is one of them
        first_mixing.map_or(0, |mixing| mixing.keeps(tensors))
    }

    /// Returns how many tensors the layer adds to the streams.
    pub fn adds(&self) -> usize {
        let adds = |branch: &&BuiltSublayer| branch.around.mixing.as_ref().is_some_and(|mixing| mixing.adds());
        self.sublayers.iter().filter(adds).count()
    }
}

impl BuiltSublayer {
    /// Returns the input of the sublayer's function F: the norm of x, where a mixing, if there is one, reads x from all
    /// streams. The read of a hyper-connection also computes what its write needs, the state `streams.unwritten`, which
    /// [`close`](Self::close) takes.
    pub fn input(&self, streams: &mut Streams, ctx: &Context) -> Result<Tensor> {
        let x = match &self.around.mixing {
            Some(mixing) => {
                let tensors: Vec<&Tensor> = streams.tensors().collect();
                // In a training loop on a CPU, the only place with flat buffers, kernels without a second derivative
                // read the streams. Elsewhere, as in training on a GPU, operators and tch's operations read them.
                let uses_cpu_kernels = ctx.has_flat();
                let (x, unwritten) = mixing.read(&tensors, ctx.watch(), uses_cpu_kernels)?;
                streams.unwritten = unwritten;
                x
            }
            None => streams.x.shallow_clone(),
        };
        // The fused step of the previous sublayer may have applied the norm already. A mixing's x never comes from such
        // a step, so `normed` is `None` there.
        match &streams.normed {
            Some(normed) => Ok(normed.shallow_clone()),
            None => self.around.before.apply(x, ctx),
        }
    }

    /// Returns the streams after the sublayer; f is the output of its function F, before dropout. If the norm that
    /// follows x⁺ has row kernels, one fused step computes both. That norm is this sublayer's own after the sum, or
    /// `next`, which begins the next sublayer or ends the stack.
    pub fn close(&self, mut streams: Streams, f: Tensor, next: Option<&dyn Norm>, ctx: &Context) -> Result<Streams> {
        let BuiltResidual { alpha, beta, skip, branch, after, .. } = &self.around;
        let f = times(branch.apply(f, ctx)?, self.scale)?;
        let alpha_t = streams.alpha_t.as_ref();
        // The rate, the seed and the site determine the dropout mask of f.
        let (p, seed, site) = (ctx.rates.residual, ctx.seed.as_ref(), ctx.dropout_site());
        // A mixing writes f itself, without α, β and the changes of the plain connection.
        if let Some(mixing) = &self.around.mixing {
            let unwritten = streams.unwritten.take();
            let f = operator::dropout(f, p, seed, site)?;
            let tensors = [streams.x].into_iter().chain(streams.others).collect();
            let mut tensors = mixing.write(tensors, unwritten, f)?.into_iter();
            let x = tensors.next().expect("a mixing writes at least one tensor");
            return Ok(Streams { x, others: tensors.collect(), ..streams });
        }
        let x = &skip.apply(streams.x.shallow_clone(), ctx)?;
        let (alpha, beta) = (alpha.now(alpha_t)?, beta.now(alpha_t)?);
        // In a profiling pass, r is the standard deviation so far, and the gain on x is the ω that gets this value.
        let deviation = match (&streams.deviation, &alpha) {
            (Some(r), Some(omega)) => {
                let scaled = beta.as_ref().map(|beta| f.f_mul(&beta.f_to_kind(f.kind())?)).transpose()?; // β⊙f
                Some(no_grad(|| profile(omega, r, x, scaled.as_ref().unwrap_or(&f), (p, seed, site)))?)
            }
            _ => None,
        };
        let step = operator::Step { x, f: &f, alpha: alpha.as_ref(), beta: beta.as_ref(), p, seed, site };
        // The other streams use the same dropout site as x, and so the same mask.
        let others = streams.others.iter().zip(&self.around.streams).map(|(s, (alpha, beta))| {
            let (alpha, beta) = (alpha.now(alpha_t)?, beta.now(alpha_t)?);
            operator::Step { x: s, alpha: alpha.as_ref(), beta: beta.as_ref(), ..step }.add()
        });
        let others = others.collect::<Result<_>>()?;
        // `fused` is the norm that reads the sum directly, if one step can compute both. With a watch there is none,
        // because a watch must see each norm's output.
        let fused = match after.is_empty() {
            _ if ctx.watch().is_some() => None,
            true => next.map(|norm| norm.row()).transpose()?.flatten(),
            false => after.norm().map(|norm| norm.row()).transpose()?.flatten(),
        };
        // The norm `next` yields a sublayer's input, in f's type. This sublayer's own norm yields x⁺, in x's type.
        let (x, normed) = match (fused, after.is_empty()) {
            (Some(next), true) => step.then_norm(&next, f.kind()).map(|(x, normed)| (x, Some(normed)))?,
            (Some(own), false) => (step.then_norm(&own, x.kind())?.1, None),
            (None, _) => (after.apply(step.add()?, ctx)?, None),
        };
        Ok(Streams { x, others, normed, deviation, ..streams })
    }
}

/// Sets the gain ω on x to r, the standard deviation of the residual stream so far. Returns the next one, √(Var(ωx) +
/// Var(drop f)), with variances over all elements (docs/spec.md §3.4). (p, seed, site) are the rate, the seed and the
/// site of the dropout. Errors if r is not finite.
fn profile(
    omega: &Tensor,
    r: &Tensor,
    x: &Tensor,
    f: &Tensor,
    (p, seed, site): (f64, Option<&Tensor>, i64),
) -> Result<Tensor> {
    // r has one element, so its sum is its value.
    let gain = r.f_sum(Kind::Double)?.f_double_value(&[])?;
    if !gain.is_finite() {
        return Err(Error::invalid(format!(
            "profiling found a gain on x of {gain}: expected a finite number. The branches grow from sublayer to \
             sublayer, as with norms whose output grows with their input (repbn, prepbn): choose another norm, or fewer \
             layers"
        )));
    }
    let mut omega = omega.shallow_clone();
    omega.f_copy_(&r.f_expand_as(&omega)?)?;
    let dropped = operator::dropout(f.shallow_clone(), p, seed, site)?;
    let unbiased = false; // divide by the number of elements
    let variance = |t: &Tensor| t.f_to_kind(r.kind())?.f_var(unbiased);
    Ok(variance(&x.f_mul(&omega)?)?.f_add(&variance(&dropped)?)?.f_sqrt()?)
}
