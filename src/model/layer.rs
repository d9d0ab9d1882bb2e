//! A layer: sublayers, and what the residual scheme puts around and inside each.

use super::attention::Attention;
use super::feed_forward::FeedForward;
use super::{Builder, Context};
use crate::error::Result;
use crate::init::Init;
use crate::norm::Norm;
use crate::operator;
use crate::residual::{Around, Inside, Place, Scheme, Sublayer};
use tch::Tensor;

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
    CrossAttention(Attention),
    FeedForward(FeedForward),
}

/// The residual stream between two sublayers.
pub struct Stream {
    pub x: Tensor,
    /// The next sublayer's N(x), where the step that made x has made it too.
    pub normed: Option<Tensor>,
}

impl Layer {
    pub fn build(
        b: &mut Builder,
        place: &Place,
        kinds: &[Sublayer],
        heads: i64,
        init: &Init,
        scheme: &dyn Scheme,
    ) -> Result<Self> {
        let shared = scheme.layer(b, place)?;
        let mut sublayers = Vec::new();
        for (index, &sublayer) in kinds.iter().enumerate() {
            let place = Place { sublayer, index: index as i64, ..*place };
            let function = match sublayer {
                Sublayer::SelfAttention => {
                    Function::SelfAttention(b.within("self_attn", |b| Attention::build(b, &place, heads, init))?)
                }
                Sublayer::CrossAttention => {
                    Function::CrossAttention(b.within("multihead_attn", |b| Attention::build(b, &place, heads, init))?)
                }
                Sublayer::FeedForward => Function::FeedForward(FeedForward::build(b, &place, init)?),
            };
            let around = scheme.around(b, &place, &shared)?;
            sublayers.push(Branch { function, around, inside: scheme.inside(b, &place)? });
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
        let step = operator::Step {
            x: &stream.x,
            f: &f,
            alpha: alpha.as_ref(),
            beta: beta.as_ref(),
            p: ctx.rates.residual,
            seed: ctx.seed.as_ref(),
            site: ctx.site(),
        };
        match (after.as_deref(), next) {
            (Some(after), _) => {
                let x = match after.row() {
                    Some(row) => step.then_norm(row, stream.x.kind())?.1,
                    None => after.forward(&step.add()?, &ctx.rows())?,
                };
                Ok(Stream { x, normed: None })
            }
            (None, Some(next)) => match next.row() {
                Some(row) => {
                    let (x, normed) = step.then_norm(row, f.kind())?;
                    Ok(Stream { x, normed: Some(normed) })
                }
                None => Ok(Stream { x: step.add()?, normed: None }),
            },
            (None, None) => Ok(Stream { x: step.add()?, normed: None }),
        }
    }
}
