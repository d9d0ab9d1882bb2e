//! l2norm: y = x/max(‖x‖₂, ε) over the last dimension, without parameters (Loshchilov et al. 2024, `justnorm`;
//! docs/spec.md §1.14). It uses ScaleNorm's kernels without a gain.

use super::scale_norm;
use super::spec::{Form, NormOption, Spec, NORM_EPS};

/// The keyword argument ε, which keeps rows of zeros at zero. nGPT has no ε; 1e-12 is the default of torch's
/// `normalize`.
const EPS: NormOption =
    NormOption::at("eps", Some(&NORM_EPS), |context| context.options.get(&NORM_EPS).unwrap_or(1e-12).into());

pub static SPEC: Spec = Spec {
    name: "l2norm",
    module: "L2Norm",
    equation: "y = x/max(‖x‖₂, ε) over the last dimension, ε = 1e-12, nothing learned",
    source: "Loshchilov et al. 2024",
    parameters: &[],
    buffers: &[],
    options: &[EPS],
    form: Form::Rows(&scale_norm::OPERATOR),
};
