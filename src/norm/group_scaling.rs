//! Group scaling ("layer-scale"): x/√(mean over each group of x² + 1e-5), without parameters (Shen et al. 2020,
//! Appendix A, and the authors' code; docs/spec.md §1.10).
//!
//! Group scaling is rmsnorm applied to groups of a row instead of whole rows. It uses rmsnorm's kernels, and its
//! gradient is exact.

use super::spec::NormOption;
use crate::options::{not_negative, option_spec};

/// The name, the equation and the source, for the tables of the documentation.
pub const ABOUT: [&str; 3] = [
    "groupscaling",
    "x/√(mean over each group of x² + 1e-5), before batchnorm, powernorm-v and powernorm; 0 groups: none",
    "Shen et al. 2020, Appendix A",
];

/// The ε in the authors' code.
pub const EPS: f64 = 1e-5;

option_spec! {
    /// Number of groups of the scaling before batchnorm, powernorm-v and powernorm; 0 turns it off; powernorm's release
    /// mode uses the number of heads.
    pub(super) GROUPSCALING ("groupscaling"): i64 = 1, not_negative;
}

/// The number of groups in the group scaling that precedes the norm; 0 turns the scaling off.
pub(super) const GROUPS: NormOption = NormOption::of("groups", &GROUPSCALING);
