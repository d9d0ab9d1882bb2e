//! The declarations of the operators that compute norms: names, kernels and composed forms.

use super::composed::{self, ComposedNorm};
use super::spec::NormArgs;
use super::statistics::{AppliedStatistics, BatchTensors, StateTensors};
use crate::error::Result;
use crate::kernel::columns::{self, ColumnOptions};
use crate::kernel::rows::RowNormKernel;
use tch::Tensor;

/// The operators of a row norm: the norm alone, and the norm after a residual step.
pub struct RowNormOpSpec {
    /// The name of the norm's operator in torch.ops.normformer_rs.
    pub operator: &'static str,
    /// The name of the operator that computes a residual step and then the norm.
    pub residual: &'static str,
    /// The names of the learned numbers of a curve such as DyT: the scale, then the shift if there is one. A norm
    /// with such numbers has no ε.
    pub numbers: &'static [&'static str],
    pub kernel: RowNormKernel,
    /// The function that computes x̂ in the composed form.
    pub x_hat: ComposedNorm,
}

impl RowNormOpSpec {
    /// Computes y in x's type with the composed form. `affine` are the weight and the bias. A curve uses `numbers`,
    /// every other norm `eps`.
    pub fn composed(
        &self,
        x: &Tensor,
        affine: (Option<&Tensor>, Option<&Tensor>),
        eps: f64,
        numbers: &[Tensor],
    ) -> Result<Tensor> {
        let numbers = numbers.iter().map(|n| Ok(n.f_reshape([1i64])?)).collect::<Result<Vec<_>>>()?;
        composed::apply(self.x_hat, x, &numbers, affine, &NormArgs::of_eps(eps))
    }
}

/// The operator (x, weight, keywords…) → y of a row norm without own kernels, which may use another norm's.
pub struct CompositeNormOpSpec {
    /// The name of the operator in torch.ops.normformer_rs.
    pub operator: &'static str,
    /// The keyword arguments of the module, in the order of the operator's schema.
    pub keywords: &'static [&'static str],
    /// The kernels that compute the same function for rows in f32 and f64; `None` if there are none.
    pub rows: Option<&'static RowNormOpSpec>,
    /// Computes y with PyTorch's operations, from x, the weight factor·(offset + p) and the options.
    pub composed: fn(&Tensor, Option<&Tensor>, &NormArgs) -> Result<Tensor>,
}

/// The operator of a norm with column statistics.
pub struct ColumnNormOpSpec {
    /// The name of the operator in torch.ops.normformer_rs.
    pub operator: &'static str,
    /// The names of the two state buffers in the operator's schema.
    pub state: [&'static str; 2],
    pub kernel: columns::ColumnNormKernel,
    /// Computes the same as `kernel.settle` with PyTorch's operations: the statistics to apply, and the new running
    /// ones.
    pub composed: fn(&BatchTensors, &StateTensors, &ColumnOptions) -> Result<AppliedStatistics>,
}

/// A norm that adds a learned share of x to a norm N with column statistics: N(x) + η·x. In training it may begin as a
/// norm of rows and fade to N(x) + η·x.
pub struct BlendedNormOpSpec {
    pub columns: &'static ColumnNormOpSpec,
    /// Returns the norm of rows from which the norm fades; `None` if the norm does not fade. A norm that fades declares
    /// the buffer [`CLOCK`](super::spec::CLOCK) and the options `steps` and `warm`.
    pub from: Option<fn(&NormArgs) -> &'static RowNormOpSpec>,
}

/// A norm that a user's function computes.
pub struct OwnNorm {
    pub name: &'static str,
    /// The declaration as config.json stores it, which is passed to the function's operator.
    pub declaration: String,
}

/// The maximum number of parameters that a user's norm may have.
pub const MOST: usize = 8;
