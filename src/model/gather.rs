//! Gathering of a tensor's rows. The gradient is a gather as well, without a sum.

use crate::error::Result;
use crate::operator::{apply, Differentiable};
use tch::Tensor;

/// Returns `x[rows]` for x (n, …). Row i of x must appear in the result once, in row `back[i]`. If `absent[i]` is true,
/// the row must not appear, and its gradient is 0; `absent` is bool (n, 1).
///
/// Under these conditions the gradient is a gather, too. The gradient of `index_select` is a sum, which takes more
/// passes and, on a GPU, adds in varying order.
pub fn gather(x: &Tensor, rows: &Tensor, back: &Tensor, absent: &Tensor) -> Result<Tensor> {
    let [rows, back, absent] = [rows, back, absent].map(Tensor::shallow_clone);
    let [y]: [Tensor; 1] = apply(Gather { rows, back, absent }, &[x])?.try_into().expect("it has one output");
    Ok(y)
}

/// The arguments of [`gather`] beside x.
struct Gather {
    rows: Tensor,
    back: Tensor,
    absent: Tensor,
}

impl Differentiable for Gather {
    /// Returns false: the backward pass needs only the row numbers.
    fn saves_inputs(&self) -> bool {
        false
    }

    /// Returns `x[rows]`.
    fn forward(&self, x: Vec<Tensor>) -> Result<Vec<Tensor>> {
        Ok(vec![x[0].f_index_select(0, &self.rows)?])
    }

    /// Returns the gradient of x from that of the result, `None` if there is none. The first argument, saved inputs, is
    /// empty.
    fn backward(&self, _: Vec<Tensor>, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        // A row of x has the gradient of its row in the result, or 0 if it is not there.
        let gather_back = |g: &Tensor| Ok(g.f_index_select(0, &self.back)?.f_masked_fill_(&self.absent, 0.0)?);
        gradients.iter().map(|g| g.as_ref().map(gather_back).transpose()).collect()
    }
}
