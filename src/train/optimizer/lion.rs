//! Lion: the sign of a mixture of gradient and momentum (Chen et al. 2023, algorithm 2).

use super::rule::{mix, Rule};
use crate::error::Result;
use crate::parametrisation::Part;
use tch::Tensor;

/// step = sign(m + (1 − β₁)(g − m)); afterwards m ← m + (1 − β₂)(g − m).
pub struct Lion {
    pub beta1: f64,
    pub beta2: f64,
}

impl Rule for Lion {
    /// The state is the momentum m, `state[0]` below.
    fn state(&self, size: &[i64]) -> Vec<(&'static str, Vec<i64>)> {
        vec![("exp_avg", size.to_vec())]
    }

    /// Lion updates every parameter.
    fn takes(&self, _: Part, _: &[i64]) -> bool {
        true
    }

    /// Returns sign(m + (1 − β₁)(g − m)) for the gradient g, then updates m.
    fn direction(&self, gradient: &Tensor, state: &mut [Tensor]) -> Result<Tensor> {
        let step = state[0].f_to_kind(gradient.kind())?.f_lerp(gradient, 1.0 - self.beta1)?.f_sign()?;
        mix(&mut state[0], gradient, 1.0 - self.beta2)?;
        Ok(step)
    }
}
