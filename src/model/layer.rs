//! A layer: sublayers, and what the residual scheme puts around and inside each.

use super::attention::Attention;
use super::feed_forward::FeedForward;
use super::residual::{shared, Around, Inside};
use super::tensorized::Tensorized;
use super::{Builder, Context};
use crate::config::AttentionName;
use crate::error::Result;
use crate::init::Init;
use crate::norm::Norm;
use crate::operator;
use crate::residual::{Place, Scheme, Sublayer};
use tch::{no_grad, Tensor};

pub struct Layer {
    pub sublayers: Vec<Branch>,
}

/// A sublayer with its residual.
pub struct Branch {
    pub function: Function,
    pub around: Around,
    pub inside: Inside,
}

pub enum Function {
    SelfAttention(Attention),
    Tensorized(Tensorized),
    CrossAttention(Attention),
    FeedForward(FeedForward),
}

/// The residual stream between two sublayers.
pub struct Stream {
    pub x: Tensor,
    /// The next sublayer's N(x), where the step that made x has made it too.
    pub normed: Option<Tensor>,
    /// α_t of the stack.
    pub alpha_t: Option<Tensor>,
    /// Profiling: the deviation of everything added so far (docs/spec.md §3.4).
    pub deviation: Option<Tensor>,
}

impl Layer {
    pub fn build(b: &mut Builder, place: &Place, init: &Init, scheme: &dyn Scheme) -> Result<Self> {
        let shared = shared(b, &scheme.layer(place))?;
        let mut sublayers = Vec::new();
        for place in place.each() {
            let function = match place.sublayer {
                Sublayer::SelfAttention if place.config.attention == AttentionName::Tensorized => {
                    Function::Tensorized(b.within("self_attn", |b| Tensorized::build(b, &place, init))?)
                }
                Sublayer::SelfAttention => Function::SelfAttention(
                    b.within("self_attn", |b| Attention::build(b, &place, init, scheme.has_biases()))?,
                ),
                Sublayer::CrossAttention => Function::CrossAttention(
                    b.within("multihead_attn", |b| Attention::build(b, &place, init, scheme.has_biases()))?,
                ),
                Sublayer::FeedForward => {
                    Function::FeedForward(FeedForward::build(b, &place, init, scheme.has_biases())?)
                }
            };
            let around = Around::build(b, &place, &scheme.around(&place), &shared)?;
            sublayers.push(Branch { function, around, inside: Inside::build(b, &place, &scheme.inside(&place))? });
        }
        Ok(Layer { sublayers })
    }
}

impl Branch {
    /// What F is applied to.
    pub fn input(&self, stream: &Stream, ctx: &Context) -> Result<Tensor> {
        match (&self.around.before, &stream.normed) {
            (Some(_), Some(normed)) => Ok(normed.shallow_clone()),
            (Some(norm), None) => norm.forward(&stream.x, &ctx.rows()),
            (None, _) => Ok(stream.x.shallow_clone()),
        }
    }

    /// The stream after F(…) = f, in one fused step with the norm that follows it: this sublayer's own, or `next`, the
    /// one that the next sublayer (or the end of the stack) begins with.
    pub fn close(&self, stream: &Stream, f: Tensor, next: Option<&dyn Norm>, ctx: &Context) -> Result<Stream> {
        let Around { alpha, beta, amid, after, .. } = &self.around;
        let f = match amid {
            Some(norm) => norm.forward(&f, &ctx.rows())?,
            None => f,
        };
        let alpha_t = stream.alpha_t.as_ref();
        let (p, seed, site) = (ctx.rates.residual, ctx.seed.as_ref(), ctx.site());
        let deviation = match (&stream.deviation, alpha.now(alpha_t)) {
            (Some(r), Some(omega)) => Some(no_grad(|| profile(omega, r, &stream.x, &f, (p, seed, site)))?),
            _ => None,
        };
        let step =
            operator::Step { x: &stream.x, f: &f, alpha: alpha.now(alpha_t), beta: beta.now(alpha_t), p, seed, site };
        let on =
            |x, normed| Stream { x, normed, alpha_t: stream.alpha_t.as_ref().map(Tensor::shallow_clone), deviation };
        match (after.as_deref(), next) {
            (Some(after), _) => {
                let x = match after.row() {
                    Some(row) => step.then_norm(row, stream.x.kind())?.1,
                    None => after.forward(&step.add()?, &ctx.rows())?,
                };
                Ok(on(x, None))
            }
            (None, Some(next)) => match next.row() {
                Some(row) => {
                    let (x, normed) = step.then_norm(row, f.kind())?;
                    Ok(on(x, Some(normed)))
                }
                None => Ok(on(step.add()?, None)),
            },
            (None, None) => Ok(on(step.add()?, None)),
        }
    }
}

/// ω ← r; the next r is √(Var(ωx) + Var(drop f)), over all elements (docs/spec.md §3.4).
fn profile(
    omega: &Tensor,
    r: &Tensor,
    x: &Tensor,
    f: &Tensor,
    (p, seed, site): (f64, Option<&Tensor>, i64),
) -> Result<Tensor> {
    let mut omega = omega.shallow_clone();
    omega.f_copy_(&r.f_expand_as(&omega)?)?;
    let dropped = operator::dropout(f.shallow_clone(), p, seed, site)?;
    let variance = |t: &Tensor| t.f_to_kind(r.kind())?.f_var(false);
    Ok(variance(&x.f_mul(&omega)?)?.f_add(&variance(&dropped)?)?.f_sqrt()?)
}
