//! Muon: the orthogonalised momentum (Jordan et al. 2024; Liu et al. 2025).

use super::rule::{mix, Rule};
use crate::config::{MuonScale, Precision, TrainingConfig};
use crate::error::Result;
use crate::parametrisation::{ParameterRole, Part, StepSize};
use tch::{Kind, Tensor};

/// The coefficients a, b, c of the polynomial a·s + b·s³ + c·s⁵. Applied several times, it moves all singular values
/// s near 1.
const QUINTIC: [f64; 3] = [3.4445, -4.7750, 2.0315];
/// The number of steps of the Newton–Schulz iteration.
const STEPS: usize = 5;
/// The smallest norm by which a matrix is divided.
const EPS: f64 = 1e-7;

/// m ← m + (1 − μ)(g − m). The direction d is g + μ(m − g) if `nesterov`, else m. The step is scale·NS(d), in which
/// NS is the Newton–Schulz iteration.
pub struct Muon {
    pub momentum: f64,
    pub nesterov: bool,
    pub scale: MuonScale,
    /// True if each matrix keeps its Frobenius norm.
    pub on_sphere: bool,
    /// True if the iteration runs in bf16.
    pub in_bf16: bool,
}

impl Muon {
    /// Reads the rule's settings from the options.
    pub fn of(config: &TrainingConfig) -> Self {
        Muon {
            momentum: config.muon_momentum,
            nesterov: config.muon_nesterov,
            scale: config.muon_scale,
            on_sphere: config.muon_on_sphere,
            in_bf16: config.precision == Precision::Bf16,
        }
    }

    /// Returns, for each of the `matrices` (matrices, rows, columns), one with the same singular vectors, and singular
    /// values near 1. First divides each by its number in `norms`, (matrices, 1, 1), so that its singular values are at
    /// most 1.
    pub fn iterate(&self, matrices: &Tensor, norms: &Tensor) -> Result<Tensor> {
        let kind = if self.in_bf16 { Kind::BFloat16 } else { matrices.kind() };
        Ok(newton_schulz(matrices.f_div(norms)?.f_to_kind(kind)?)?.f_to_kind(matrices.kind())?)
    }
}

impl Rule for Muon {
    /// The state is the momentum m, `state[0]` below.
    fn state(&self, size: &[i64]) -> Vec<(&'static str, Vec<i64>)> {
        vec![("momentum_buffer", size.to_vec())]
    }

    /// Muon updates the matrices of hidden layers.
    fn takes(&self, part: Part, size: &[i64]) -> bool {
        part.role == ParameterRole::HiddenMatrix && size.len() == 2
    }

    /// Updates m with the gradient g. Returns g + μ(m − g) if `nesterov`, else m.
    fn direction(&self, gradient: &Tensor, state: &mut [Tensor]) -> Result<Tensor> {
        mix(&mut state[0], gradient, 1.0 - self.momentum)?;
        let momentum = state[0].f_to_kind(gradient.kind())?;
        match self.nesterov {
            true => Ok(gradient.f_lerp(&momentum, self.momentum)?),
            false => Ok(momentum),
        }
    }

    /// Muon's directions are orthogonalised.
    fn is_orthogonal(&self) -> bool {
        true
    }

    /// Applies the Newton–Schulz iteration to the matrices, divided by their Frobenius norms.
    fn orthogonalised(&self, directions: &Tensor) -> Result<Tensor> {
        self.iterate(directions, &norms(directions)?.f_clamp_min(EPS)?)
    }

    /// Returns `scale` for a matrix of this size, [rows, columns].
    fn factor(&self, size: &[i64]) -> f64 {
        let (rows, columns) = (size[0] as f64, size[1] as f64);
        match self.scale {
            MuonScale::Spectral => (rows / columns).max(1.0).sqrt(),
            // An orthogonal matrix has entries with an RMS of 1/√max(r, c); this factor makes it 0.2 (Liu et al. 2025).
            MuonScale::Rms => 0.2 * rows.max(columns).sqrt(),
        }
    }

    /// Returns the measure of a step's size that `scale` makes the same at all widths.
    fn step_size(&self) -> StepSize {
        match self.scale {
            MuonScale::Spectral => StepSize::SpectralNorm,
            MuonScale::Rms => StepSize::Orthogonal,
        }
    }

    /// True if the options ask that each matrix keeps its Frobenius norm.
    fn keeps_norm(&self) -> bool {
        self.on_sphere
    }
}

/// Returns the Frobenius norm of each of the `matrices` (matrices, rows, columns), as (matrices, 1, 1).
pub fn norms(matrices: &Tensor) -> Result<Tensor> {
    Ok(matrices.f_norm_scalaropt_dim(2.0, [1i64, 2].as_slice(), true)?)
}

/// Returns, for each matrix of `x`, one with the same singular vectors and singular values near 1: the result of five
/// steps X ← aX + (bA + cA²)X with A = XXᵀ, or X ← aX + X(bA + cA²) with A = XᵀX if X has more rows than columns. The
/// singular values of X are at most 1.
fn newton_schulz(mut x: Tensor) -> Result<Tensor> {
    let size = x.size();
    let is_tall = size[1] > size[2];
    let [a, b, c] = QUINTIC;
    for _ in 0..STEPS {
        // `gram` is A and `polynomial` bA + cA². In tch, `u.f_baddbmm(v, w, β, α)` is β·u + α·vw.
        let transposed = x.f_mt()?;
        let gram = if is_tall { transposed.f_bmm(&x)? } else { x.f_bmm(&transposed)? };
        let polynomial = gram.f_baddbmm(&gram, &gram, b, c)?;
        let (left, right) = if is_tall { (&x, &polynomial) } else { (&polynomial, &x) };
        x = x.f_baddbmm(left, right, a, 1.0)?;
    }
    Ok(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    /// The iteration changes only the singular values.
    #[test]
    fn newton_schulz_maps_the_singular_values() {
        for size in [[5i64, 9], [9, 5], [6, 6], [1, 4]] {
            tch::manual_seed(3);
            let [matrix, other] = [(); 2].map(|()| Tensor::randn(size, (Kind::Double, Device::Cpu)));
            let norm = matrix.norm();
            let both = Tensor::stack(&[&other / other.norm(), &matrix / &norm], 0);
            let found = newton_schulz(both).unwrap().get(1);
            let (u, s, v) = matrix.svd(true, true);
            let mut s = s / &norm;
            for _ in 0..STEPS {
                let [a, b, c] = QUINTIC;
                s = &s * a + s.pow_tensor_scalar(3) * b + s.pow_tensor_scalar(5) * c;
            }
            let expected = u.matmul(&s.diag(0)).matmul(&v.tr());
            assert!((found - expected).abs().max().double_value(&[]) < 1e-12, "{size:?}");
        }
    }
}
