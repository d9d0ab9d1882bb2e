//! The operators of norms: names, kernels and composed forms, from which they are registered.

use super::composed::{self, ComposedNorm};
use super::spec::NormArgs;
use super::statistics::{AppliedStatistics, BatchTensors, StateTensors};
use crate::error::Result;
use crate::kernel::columns::{self, ColumnOptions};
use crate::kernel::rows::RowNormKernel;
use tch::Tensor;

/// A norm of rows.
pub struct RowNormOpSpec {
    /// torch.ops.normformer_rs.`operator`: the norm alone.
    pub operator: &'static str,
    /// The norm after a residual step.
    pub residual: &'static str,
    /// Of a curve: the names of its learned numbers, first the scale, then the shift, where it has one. A norm that has
    /// them has no ε.
    pub numbers: &'static [&'static str],
    pub kernel: RowNormKernel,
    /// The composed form.
    pub x_hat: ComposedNorm,
}

impl RowNormOpSpec {
    /// y in x's type, by the composed form, with ε or with a curve's numbers.
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

/// A norm of rows that calls other norms' kernels, or none: (x, weight, keywords…) → y.
pub struct CompositeNormOpSpec {
    /// torch.ops.normformer_rs.`operator`.
    pub operator: &'static str,
    /// The module's keywords, in the schema's order.
    pub keywords: &'static [&'static str],
    /// Kernels that compute the same of rows in f32 and f64.
    pub rows: Option<&'static RowNormOpSpec>,
    /// The same in tch, from what kernels get for the weight.
    pub composed: fn(&Tensor, Option<&Tensor>, &NormArgs) -> Result<Tensor>,
}

/// A norm with statistics of columns.
pub struct ColumnNormOpSpec {
    /// torch.ops.normformer_rs.`operator`.
    pub operator: &'static str,
    /// What the schema calls the two buffers.
    pub state: [&'static str; 2],
    pub kernel: columns::ColumnNormKernel,
    /// What `kernel.settle` computes, in tch: the statistics to apply and the new running ones, of the batch's.
    pub composed: fn(&BatchTensors, &StateTensors, &ColumnOptions) -> Result<AppliedStatistics>,
}

/// A function that a user declares: what it is called with beside x and the parameters.
pub struct OwnNorm {
    pub name: &'static str,
    /// As config.json has it.
    pub declaration: String,
}

/// The most parameters that such a function takes.
pub const MOST: usize = 8;
