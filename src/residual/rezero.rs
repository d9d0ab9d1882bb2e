//! ReZero: `x⁺ = x + a_l F(x)`, one scalar a_l = 0 per layer, no norm (Bachlechner et al. 2020).

use super::{Around, Flow, Gain, Learned, Place, Scheme};

pub struct ReZero;

impl Scheme for ReZero {
    fn name(&self) -> &'static str {
        "rezero"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = x + a_l F(x), a_l = 0 at the start, one per layer, no norm"
    }

    fn source(&self) -> &'static str {
        "Bachlechner et al. 2020"
    }

    fn layer(&self, _: &Place) -> Vec<Learned> {
        vec![Learned::new("branch_scale", &[1], 0.0)]
    }

    fn around(&self, _: &Place) -> Around {
        Around { beta: Gain::Shared(0), ..Around::default() }
    }

    fn stack(&self, _: &Place) -> Flow {
        Flow::default()
    }
}
