//! Soft limits of logits and of attention scores (docs/spec.md §4.3).

use crate::error::Result;
use tch::Tensor;

/// The function c·tanh(z/c), which is bounded by ±c (Gemma 2).
#[derive(Clone, Copy, Debug)]
pub struct Softcap(pub f64);

impl Softcap {
    /// Returns c·tanh(z/c) for each number of z; c is `self.0`. The operation is differentiable.
    pub fn of(self, z: &Tensor) -> Result<Tensor> {
        Ok(z.f_div_scalar(self.0)?.f_tanh()?.f_mul_scalar(self.0)?)
    }

    /// Replaces each number of z by c·tanh(z/c), in place.
    pub fn write(self, z: &mut Tensor) -> Result<()> {
        let _ = z.f_div_scalar_(self.0)?.f_tanh_()?.f_mul_scalar_(self.0)?;
        Ok(())
    }

    /// Returns the slope 1 − tanh²(z/c) of the cap from the capped numbers c·tanh(z/c).
    pub fn slope(self, capped: &Tensor) -> Result<Tensor> {
        Ok(capped.f_div_scalar(self.0)?.f_square()?.f_neg()?.f_add_scalar(1.0)?)
    }
}
