//! The feed-forward sublayer: `W₂·drop(σ(W₁x + b₁)) + b₂`, or with a gate `W₂·drop(σ(W₁x + b₁)⊙(W₃x + b₃)) + b₂`.

use super::residual::Inside;
use super::{times, Builder, Context};
use crate::error::Result;
use crate::init::{Init, Role};
use crate::operator;
use crate::parametrisation::UnitScaled;
use crate::residual::{Activation, LayerContext, Point};
use tch::Tensor;

pub struct FeedForward {
    weight1: Tensor,
    bias1: Option<Tensor>,
    weight2: Tensor,
    bias2: Option<Tensor>,
    activation: Activation,
    /// W₃ and b₃, if there is a gate.
    gate: Option<(Tensor, Option<Tensor>)>,
    /// The factors of u-μP; `None` under any other parametrisation.
    unit: Option<UnitScaled>,
}

impl FeedForward {
    /// Declares the parameters of the feed-forward sublayer at this place.
    pub fn build(b: &mut Builder, place: &LayerContext, init: &Init, has_biases: bool) -> Result<Self> {
        let (d, f, activation) = (place.model.d_model, place.model.d_ff, place.model.activation);
        // Declares the weight of a linear layer, and its bias if layers have biases.
        let mut layer = |name: &str, role, fan_in, fan_out| {
            b.within(name, |b| {
                let weight = b.parameter("weight", &[fan_out, fan_in], &init.matrix(role, fan_in, fan_out, place))?;
                let bias = has_biases
                    .then(|| b.parameter("bias", &[fan_out], &init.biases(&[(role, fan_out)], fan_in)))
                    .transpose()?;
                Ok((weight, bias))
            })
        };
        let (weight1, bias1) = layer("linear1", Role::FeedForward1, d, f)?;
        let (weight2, bias2) = layer("linear2", Role::FeedForward2, f, d)?;
        let gate = activation.is_gated().then(|| layer("linear3", Role::Gate, d, f)).transpose()?;
        let unit = place.model.scaled.unit;
        Ok(FeedForward { weight1, bias1, weight2, bias2, activation, gate, unit })
    }

    /// Computes the sublayer's function F(x), (rows, d). `inside` holds the residual scheme's changes at points inside
    /// the sublayer.
    pub fn forward(&self, x: &Tensor, inside: &Inside, ctx: &Context) -> Result<Tensor> {
        let rows = ctx.rows();
        let x = inside.at(Point::Input, x.shallow_clone(), &rows)?;
        let h = ctx.linear(&x, &self.weight1, self.bias1.as_ref())?; // (rows, d_ff)
        let h = inside.at(Point::BeforeActivation, h, &rows)?;
        let h = match self.activation {
            Activation::Relu => {
                operator::relu_dropout(&h, ctx.rates.activation, ctx.seed.as_ref(), ctx.dropout_site())?
            }
            Activation::Gelu | Activation::GeGlu => self.dropped(h.f_gelu("none")?, &x, ctx)?,
            Activation::Relu2 => self.dropped(h.f_relu()?.f_square()?, &x, ctx)?,
            Activation::Silu | Activation::SwiGlu => self.dropped(self.silu(&h)?, &x, ctx)?,
        };
        ctx.show(|watch| watch.activations(&h))?;
        let h = inside.at(Point::AfterActivation, h, &rows)?;
        ctx.linear(&h, &self.weight2, self.bias2.as_ref())
    }

    /// Returns hσ(h); under u-μP hσ(αh), where α is the activation's factor, times the factor of the gated activation.
    fn silu(&self, h: &Tensor) -> Result<Tensor> {
        match self.unit {
            None => Ok(h.f_silu()?),
            Some(unit) => times(h.f_mul(&times(h.shallow_clone(), unit.activation)?.f_sigmoid()?)?, unit.gated()),
        }
    }

    /// Returns the activation's output h, times the gate W₃x + b₃ if there is one, after dropout.
    fn dropped(&self, h: Tensor, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        let h = match &self.gate {
            Some((weight, bias)) => h.f_mul(&ctx.linear(x, weight, bias.as_ref())?)?,
            None => h,
        };
        operator::dropout(h, ctx.rates.activation, ctx.seed.as_ref(), ctx.dropout_site())
    }
}
