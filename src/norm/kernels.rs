//! What a norm with kernels hands to the operators that are registered for it.

use super::composed::{self, Hat};
use super::spec::Given;
use super::statistics::{BatchTensors, StateTensors, Used};
use crate::error::Result;
use crate::kernel::columns::{self, ColumnOptions};
use crate::kernel::rows::Rules;
use tch::Tensor;

/// A norm of rows.
pub struct RowKernels {
    /// torch.ops.normformer_rs.`operator`: the norm alone.
    pub operator: &'static str,
    /// The norm after a residual step.
    pub residual: &'static str,
    /// Of a curve: the names of its learned numbers, first the scale, then the shift, where it has one. A norm that has
    /// them has no ε.
    pub numbers: &'static [&'static str],
    pub rules: Rules,
    /// The composed form.
    pub hat: Hat,
}

impl RowKernels {
    /// y in x's type, by the composed form, with ε or with a curve's numbers.
    pub fn composed(
        &self,
        x: &Tensor,
        affine: (Option<&Tensor>, Option<&Tensor>),
        eps: f64,
        numbers: &[Tensor],
    ) -> Result<Tensor> {
        let numbers = numbers.iter().map(|n| Ok(n.f_reshape([1i64])?)).collect::<Result<Vec<_>>>()?;
        composed::apply(self.hat, x, &numbers, affine, &Given::of_eps(eps))
    }
}

/// A norm of rows that calls other norms' kernels, or none: (x, weight, keywords…) → y.
pub struct OwnOperator {
    /// torch.ops.normformer_rs.`operator`.
    pub operator: &'static str,
    /// The module's keywords, in the schema's order.
    pub keywords: &'static [&'static str],
    /// Kernels that compute the same of rows in f32 and f64.
    pub rows: Option<&'static RowKernels>,
    /// The same in tch, from what kernels get for the weight.
    pub composed: fn(&Tensor, Option<&Tensor>, &Given) -> Result<Tensor>,
}

/// A norm with statistics of columns.
pub struct ColumnKernels {
    /// torch.ops.normformer_rs.`operator`.
    pub operator: &'static str,
    /// What the schema calls the two buffers.
    pub state: [&'static str; 2],
    pub rule: columns::ColumnRule,
    /// `rule.settle` in tch.
    pub composed: fn(&BatchTensors, &StateTensors, &ColumnOptions) -> Result<Used>,
}

/// A function that a user declares: what it is called with beside x and the parameters.
pub struct OwnNorm {
    pub name: &'static str,
    /// JSON.
    pub options: String,
}

/// The most parameters that such a function takes.
pub const MOST: usize = 8;
