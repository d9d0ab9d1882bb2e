//! Gates that read only the first columns of their input (nanochat).

use super::{Builder, Context};
use crate::error::Result;
use crate::init::Fill;
use tch::Tensor;

/// The weights are drawn uniformly between 0 and this bound.
const BOUND: f64 = 0.02;

/// σ(W x), where x is the first columns of the input and W (gates, columns) has no bias.
pub struct ColumnGate(Tensor);

impl ColumnGate {
    /// Declares `gates` gates that read the first `columns` columns of an input of width `d_model`, or all if there are
    /// fewer. `name` is the name of the module.
    pub fn build(b: &mut Builder, name: &str, gates: i64, columns: i64, d_model: i64) -> Result<Self> {
        let shape = [gates, columns.min(d_model)];
        Ok(ColumnGate(b.within(name, |b| b.parameter("weight", &shape, &Fill::UpTo { bound: BOUND }))?))
    }

    /// Returns the gates σ(W x), (rows, gates), of x (rows, d_model), in the type of matrix products.
    pub fn of(&self, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        let weight = &self.0; // (gates, columns)
        let first_columns = x.f_narrow(-1, 0, weight.size()[1])?.f_contiguous()?;
        Ok(ctx.linear(&first_columns, weight, None)?.f_sigmoid()?)
    }
}
