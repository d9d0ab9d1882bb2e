//! Normalisation layers: one table, one file per norm.
//!
//! A norm declares its equation, parameters, buffers and options, and its composed form (tch): a [`Spec`]. One that works
//! row by row may add its row arithmetic, which the plain operator and the fused residual step share; one with statistics
//! of columns adds how it settles them, which [`kernel::columns`](crate::kernel::columns) runs.

pub mod batch_norm;
pub mod composed;
pub mod dyt;
pub mod fix_norm;
pub mod group_scaling;
pub mod kernels;
pub mod layer_norm;
pub mod lp_norm;
pub mod power_norm;
pub mod power_norm_v;
pub mod rms_norm;
pub mod running;
pub mod scale_norm;
pub mod spec;
pub mod statistics;

use crate::analysis::Watch;
use crate::config::TransformerConfig;
use crate::error::{unknown, Result};
use crate::operator::{Group, RowOperator};
use kernels::{ColumnKernels, RowKernels};
use running::Kept;
pub use spec::{Form, Spec};
use tch::{Kind, Tensor};

/// Every norm that models may name.
pub static NORMS: &[&Spec] = &[
    &layer_norm::SPEC,
    &rms_norm::SPEC,
    &scale_norm::SPEC,
    &scale_norm::FIXED,
    &lp_norm::SPEC,
    &batch_norm::SPEC,
    &power_norm_v::SPEC,
    &power_norm::SPEC,
    &dyt::SPEC,
];

/// Every norm with row kernels; an operator is registered for each, at its place in this list.
pub static ROW_NORMS: &[&RowKernels] = &[&layer_norm::KERNELS, &rms_norm::KERNELS, &scale_norm::KERNELS];

/// Every norm with statistics of columns; an operator is registered for each, at its place in this list.
pub static COLUMN_NORMS: &[&ColumnKernels] = &[&batch_norm::KERNELS, &power_norm_v::KERNELS, &power_norm::KERNELS];

/// Where a norm stands in a model, for those that care.
#[derive(Clone, Copy, Debug)]
pub struct Site<'a> {
    /// Numbers per row.
    pub width: i64,
    /// The options of norms are among the model's.
    pub config: &'a TransformerConfig,
    /// The last norm of the decoder, whose gain `scalenorm-fixed` learns (Nguyen & Salazar 2019, Table 7).
    pub last_of_decoder: bool,
    /// It stands after a stack's last layer.
    pub ends_stack: bool,
}

/// A norm in a model.
pub trait Norm: Send {
    /// N(x) over the last dimension. `rows` says what the rows are, for norms with statistics across them.
    fn forward(&self, x: &Tensor, rows: &Rows) -> Result<Tensor>;

    /// What the fused residual step needs, for a norm with row kernels.
    fn row(&self) -> Option<&Rowwise> {
        None
    }
}

/// What a norm with statistics across rows must know of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rows<'a> {
    /// Training: statistics are taken from the batch and move once per forward.
    pub train: bool,
    /// A second run of the same forward pass, for its gradient: nothing moves.
    pub again: bool,
    /// True at padding, in x's leading shape; none: every row is real.
    pub pad_mask: Option<&'a Tensor>,
    /// Where norms leave what they used for a second run, and find it in one.
    pub kept: Option<&'a Kept>,
    /// The ranks whose rows these are.
    pub group: Group,
    pub watch: Option<&'a Watch>,
}

/// A norm whose rows do not touch each other.
pub struct Rowwise {
    pub operator: &'static RowOperator,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
    pub eps: f64,
}

impl Norm for Rowwise {
    fn forward(&self, x: &Tensor, _: &Rows) -> Result<Tensor> {
        self.operator.call(x, self.weight.as_ref(), self.bias.as_ref(), self.eps)
    }

    fn row(&self) -> Option<&Rowwise> {
        Some(self)
    }
}

/// The table's entry of that name.
pub fn find(name: &str) -> Result<&'static Spec> {
    NORMS.iter().copied().find(|n| n.name == name).ok_or_else(|| unknown("norm", name, NORMS.iter().map(|n| n.name)))
}

/// x in the type that statistics accumulate in: f32, or f64 for f64.
fn accumulate(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_to_kind(if x.kind() == Kind::Double { Kind::Double } else { Kind::Float })?)
}
