//! What a norm with kernels hands to the operators that are registered for it.

use super::composed::{self, Hat};
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
    pub rules: Rules,
    /// The composed form.
    pub hat: Hat,
}

impl RowKernels {
    /// y in x's type, by the composed form.
    pub fn composed(&self, x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        composed::apply(self.hat, x, &[], (weight, bias), &[eps])
    }
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
