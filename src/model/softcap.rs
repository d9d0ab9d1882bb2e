//! Soft limits of logits and of attention's scores (docs/spec.md §4.3).

use crate::error::Result;
use tch::Tensor;

/// c·tanh(z/c), at most ±c (Gemma 2).
#[derive(Clone, Copy, Debug)]
pub struct Softcap(pub f64);

impl Softcap {
    /// The capped numbers; autograd follows.
    pub fn of(self, z: &Tensor) -> Result<Tensor> {
        Ok(z.f_div_scalar(self.0)?.f_tanh()?.f_mul_scalar(self.0)?)
    }

    /// Caps numbers where they lie.
    pub fn write(self, z: &mut Tensor) -> Result<()> {
        let _ = z.f_div_scalar_(self.0)?.f_tanh_()?.f_mul_scalar_(self.0)?;
        Ok(())
    }

    /// The slope 1 − tanh²(z/c), of capped numbers.
    pub fn slope(self, capped: &Tensor) -> Result<Tensor> {
        Ok(capped.f_div_scalar(self.0)?.f_square()?.f_neg()?.f_add_scalar(1.0)?)
    }
}
