//! How α_t of [`Gain::Growing`](super::Gain::Growing) grows (Liu et al. 2023, eq 8).

use crate::choice;
use crate::error::Result;
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

/// The schedule α_t = curve(t/T), between 0 and 1. The update's number t is a buffer named `t`; T is `steps`, or T·l
/// in layer l (counted from 1) with `by_layer`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    pub steps: i64,
    pub curve: GrowthCurve,
    pub by_layer: bool,
}

choice! {
    /// The growth of α with x = t/T: x; (e^5x − 1)/(e⁵ − 1); the logistic of 10(x − ½), rescaled to run from 0 to 1.
    pub enum GrowthCurve ("branchnorm_growth") { Linear = "linear", Exp = "exp", Sigmoid = "sigmoid" }
}

impl Growth {
    /// Returns α_t in a layer counted from 0, as a tensor (1,) of this type on the device of `t`. `t` is the update's
    /// number, int64 (1,), and stays on its device: the host never reads it.
    pub fn alpha(&self, t: &Tensor, layer: i64, kind: Kind) -> Result<Tensor> {
        let steps = if self.by_layer { self.steps * (layer + 1) } else { self.steps };
        // With T = 0, α is 1 from the start.
        if steps == 0 {
            return Ok(t.f_ones_like()?.f_to_kind(kind)?);
        }
        let x = t.f_to_kind(Kind::Double)?.f_div_scalar(steps as f64)?;
        let grown = match self.curve {
            GrowthCurve::Linear => x,
            GrowthCurve::Exp => x.f_mul_scalar(5.0)?.f_expm1()?.f_div_scalar(5f64.exp_m1())?,
            // The logistic curve is rescaled, so that it runs from 0 at t = 0 to 1 at t = T.
            GrowthCurve::Sigmoid => {
                let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
                let (low, high) = (logistic(-5.0), logistic(5.0));
                let raw = x.f_sub_scalar(0.5)?.f_mul_scalar(10.0)?.f_sigmoid()?;
                raw.f_sub_scalar(low)?.f_div_scalar(high - low)?
            }
        };
        Ok(grown.f_clamp(0.0, 1.0)?.f_to_kind(kind)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_curves() {
        for (curve, at_1000, at_2000) in [
            (GrowthCurve::Linear, 0.25, 0.5),
            (GrowthCurve::Exp, 0.016894, 0.075858),
            (GrowthCurve::Sigmoid, 0.070104, 0.5),
        ] {
            let growth = Growth { steps: 4000, curve, by_layer: false };
            let alpha = |t: i64| growth.alpha(&Tensor::from_slice(&[t]), 5, Kind::Double).unwrap().double_value(&[0]);
            assert!((alpha(1000) - at_1000).abs() < 1e-6 && (alpha(2000) - at_2000).abs() < 1e-6, "{curve:?}");
            assert!(alpha(1) > 0.0 && (alpha(4000) - 1.0).abs() < 1e-6 && (alpha(9000) - 1.0).abs() < 1e-6);
        }
        let at_once = Growth { steps: 0, curve: GrowthCurve::Linear, by_layer: true };
        assert_eq!(at_once.alpha(&Tensor::from_slice(&[1i64]), 3, Kind::Float).unwrap().double_value(&[0]), 1.0);
    }

    #[test]
    fn layers_grow_one_after_the_other() {
        let growth = Growth { steps: 100, curve: GrowthCurve::Linear, by_layer: true };
        let alpha = |t: i64, l| growth.alpha(&Tensor::from_slice(&[t]), l, Kind::Double).unwrap().double_value(&[0]);
        assert_eq!([0, 1, 2, 3].map(|layer| alpha(100, layer)), [1.0, 0.5, 1.0 / 3.0, 0.25]);
        assert_eq!([0, 1, 2, 3].map(|layer| alpha(300, layer)), [1.0, 1.0, 1.0, 0.75]);
    }
}
