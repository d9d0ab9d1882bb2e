//! PreNorm: `x⁺ = x + F(N(x))`, and N after the stack (TwT eq 3).

use super::{Around, Flow, Place, Scheme};
use crate::error::Result;
use crate::model::Builder;
use tch::Tensor;

pub struct PreNorm;

impl Scheme for PreNorm {
    fn name(&self) -> &'static str {
        "prenorm"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = x + F(N(x)); N after the stack"
    }

    fn source(&self) -> &'static str {
        "Nguyen & Salazar 2019, eq 3"
    }

    fn around(&self, b: &mut Builder, place: &Place, _: &[Tensor]) -> Result<Around> {
        Ok(Around { before: Some(place.norm(b, &place.norm_name(), false)?), ..Around::default() })
    }

    fn stack(&self, b: &mut Builder, place: &Place) -> Result<Flow> {
        Ok(Flow { end: Some(place.norm(b, "norm", true)?), ..Flow::default() })
    }
}
