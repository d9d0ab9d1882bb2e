//! PostNorm: `x⁺ = N(x + F(x))`, the original Transformer's (TwT eq 2).

use super::{Around, Flow, Place, Scheme};
use crate::error::Result;
use crate::model::Builder;
use tch::Tensor;

pub struct PostNorm;

impl Scheme for PostNorm {
    fn name(&self) -> &'static str {
        "postnorm"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = N(x + F(x))"
    }

    fn source(&self) -> &'static str {
        "Nguyen & Salazar 2019, eq 2"
    }

    fn around(&self, b: &mut Builder, place: &Place, _: &[Tensor]) -> Result<Around> {
        Ok(Around { after: Some(place.norm(b, &place.norm_name(), place.is_last())?), ..Around::default() })
    }

    fn stack(&self, _: &mut Builder, _: &Place) -> Result<Flow> {
        Ok(Flow::default())
    }
}
