//! BranchNorm: `x⁺ = N(x + α_t F(x))`, α_t growing to 1 over the first T updates (Liu et al. 2023, eq 7, 8).

use super::{Around, Flow, Gain, Growth, GrowthCurve, Place, Scheme};
use crate::options::{not_negative, setting, Listed};

setting! {
    /// T of branchnorm: α_t = min(1, t/T) reaches 1 at this update.
    STEPS ("branchnorm_steps"): i64 = 4000, not_negative;
    /// How branchnorm's α grows.
    GROWTH ("branchnorm_growth"): GrowthCurve = GrowthCurve::Linear;
}

pub struct BranchNorm;

impl Scheme for BranchNorm {
    fn name(&self) -> &'static str {
        "branchnorm"
    }

    fn equation(&self) -> &'static str {
        "x⁺ = N(x + α_t F(x)), α_t = min(1, t/T)"
    }

    fn source(&self) -> &'static str {
        "Liu et al. 2023, eq 7, 8"
    }

    fn options(&self) -> &'static [&'static dyn Listed] {
        &[&STEPS, &GROWTH]
    }

    fn init(&self) -> &'static str {
        "deepnorm"
    }

    fn around(&self, place: &Place) -> Around {
        Around { beta: Gain::Growing, after: Some(place.closing_norm()), ..Around::default() }
    }

    fn stack(&self, place: &Place) -> Flow {
        let growth = Growth { steps: place.options.get(&STEPS), curve: place.options.get(&GROWTH), by_layer: false };
        Flow { growth: Some(growth), ..Flow::default() }
    }
}
