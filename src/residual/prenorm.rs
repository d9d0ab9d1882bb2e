//! PreNorm: `x⁺ = x + F(N(x))`, and N after the stack (Nguyen & Salazar 2019, eq 3).

use super::{Around, Change, Flow, Place, Scheme};

pub struct PreNorm;

impl Scheme for PreNorm {
    fn name(&self) -> &'static str {
        "prenorm"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = x + F(N(x)), N after the stack"
    }

    fn source(&self) -> &'static str {
        "Nguyen & Salazar 2019, eq 3"
    }

    fn init(&self) -> &'static str {
        "smallinit"
    }

    fn around(&self, place: &Place) -> Around {
        Around { before: Some(place.norm()), ..Around::default() }
    }

    fn stack(&self, place: &Place) -> Flow {
        Flow { end: vec![Change::Norm(place.end_norm())], ..Flow::default() }
    }
}
