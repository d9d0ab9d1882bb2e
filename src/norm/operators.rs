//! The declarations of norms' operators: names, kernels and composed forms.

use super::composed::{self, ComposedNorm};
use super::spec::NormArgs;
use super::statistics::{AppliedStatistics, BatchTensors, StateTensors};
use crate::error::Result;
use crate::kernel::columns::{self, ColumnOptions};
use crate::kernel::rows::RowNormKernel;
use tch::Tensor;

/// The operators of a row norm.
pub struct RowNormOpSpec {
    /// The name of the norm's operator in torch.ops.normformer_rs.
    pub operator: &'static str,
    /// The name of the operator with a residual step before the norm.
    pub residual: &'static str,
    /// The names of a curve's learned numbers: first the scale, then the shift if it has one. A norm with such numbers
    /// has no ε.
    pub numbers: &'static [&'static str],
    pub kernel: RowNormKernel,
    /// The composed form of x̂.
    pub x_hat: ComposedNorm,
}

impl RowNormOpSpec {
    /// Computes y in x's type with the composed form, from ε or from a curve's numbers.
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

/// The operator of a row norm that uses another norm's kernels, or none: (x, weight, keywords…) → y.
pub struct CompositeNormOpSpec {
    /// The name of the operator in torch.ops.normformer_rs.
    pub operator: &'static str,
    /// The module's keyword arguments, in the schema's order.
    pub keywords: &'static [&'static str],
    /// Kernels that compute the same function for rows in f32 and f64.
    pub rows: Option<&'static RowNormOpSpec>,
    /// Computes the function in tch; the weight is the one that kernels would get.
    pub composed: fn(&Tensor, Option<&Tensor>, &NormArgs) -> Result<Tensor>,
}

/// The operator of a norm with column statistics.
pub struct ColumnNormOpSpec {
    /// The name of the operator in torch.ops.normformer_rs.
    pub operator: &'static str,
    /// The names of the two buffers in the schema.
    pub state: [&'static str; 2],
    pub kernel: columns::ColumnNormKernel,
    /// Computes `kernel.settle` in tch: from the batch's statistics, the ones to apply and the new running ones.
    pub composed: fn(&BatchTensors, &StateTensors, &ColumnOptions) -> Result<AppliedStatistics>,
}

/// A user's function, and its arguments besides x and the parameters.
pub struct OwnNorm {
    pub name: &'static str,
    /// The declaration as stored in config.json.
    pub declaration: String,
}

/// The maximum number of parameters of such a function.
pub const MOST: usize = 8;
