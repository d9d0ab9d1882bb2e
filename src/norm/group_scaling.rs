//! Group scaling ("layer-scale"): x/√(mean over each group of x² + 1e-5), no parameters (Shen et al. 2020, Appendix A,
//! and its code; docs/spec.md §1.10).
//!
//! It is rmsnorm's row, a group for a row: its kernels, and its true gradient in training and evaluation.

use super::rms_norm;
use crate::error::Result;
use crate::operator;
use tch::Tensor;

/// Name, equation and source.
pub const ABOUT: [&str; 3] = [
    "groupscaling",
    "x/√(mean over each group of x² + 1e-5), before batchnorm, powernorm-v and powernorm; 0 groups: none",
    "Shen et al. 2020, Appendix A",
];

/// ε of the authors' code.
pub const EPS: f64 = 1e-5;

/// x (…, d) in `groups` equal parts of its last dimension.
pub fn group_scaling(x: &Tensor, groups: i64) -> Result<Tensor> {
    if groups == 1 {
        return operator::row_norm(&rms_norm::KERNELS, x, None, None, EPS);
    }
    let parts = x.f_unflatten(-1, [groups, -1].as_slice())?;
    Ok(operator::row_norm(&rms_norm::KERNELS, &parts, None, None, EPS)?.f_flatten(-2, -1)?)
}
