//! Attention on a CPU in training, for queries, keys and values that one product has computed side by side.
//!
//! Autograd would split the columns of the product and then concatenate the three gradients. Here each gradient is
//! written directly to its columns.

use crate::error::{Error, Result};
use crate::host::host;
use crate::kernel::attention::call::{backward, forward, AttentionViews, Settings};
use crate::kernel::dropout::Draw;
use crate::kernel::view::accumulation;
use crate::kernel::view::View;
use crate::operator::{apply, Differentiable};
use std::cell::OnceCell;
use tch::Tensor;

/// Computes softmax(scale·QKᵀ)V per head, (rows, d), where Q, K and V are each a third of the columns of `stacked`,
/// (rows, 3d).
///
/// `ranges` is int64 (sentences, 4), as in [`attention`](crate::operator::attention); `dropout` is (p, seed, site).
/// `stacked` must require a gradient.
pub fn stacked_attention(
    stacked: &Tensor,
    ranges: &Tensor,
    heads: i64,
    causal: bool,
    scale: f64,
    dropout: Option<(f64, &Tensor, i64)>,
) -> Result<Tensor> {
    let draw = match dropout {
        Some((p, seed, site)) => Draw { p, site, ..Draw::NONE }.seeded(&host("seed", seed)?),
        None => Draw::NONE,
    };
    let settings = Settings { heads, causal, scale, draw };
    let function = StackedAttention { ranges: ranges.f_contiguous()?, settings, lse: OnceCell::new() };
    Ok(apply(function, &[stacked])?.swap_remove(0))
}

struct StackedAttention {
    ranges: Tensor,
    settings: Settings,
    /// log Σ exp of each row and head, which the forward pass keeps for the backward pass.
    lse: OnceCell<Tensor>,
}

impl StackedAttention {
    /// Returns Q, K and V, the thirds of `stacked`, in the form that attention's kernels read.
    fn views(&self, stacked: &Tensor) -> Result<AttentionViews> {
        let [q, k, v] = thirds(stacked)?;
        Ok(AttentionViews { q, k, v, ranges: view(&self.ranges)?, settings: self.settings })
    }
}

impl Differentiable for StackedAttention {
    /// Returns true: the backward pass needs Q, K and V.
    fn saves_inputs(&self) -> bool {
        true
    }

    /// Returns the heads' outputs (rows, d) for the input `[q|k|v]`, (rows, 3d).
    fn forward(&self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let stacked = &inputs[0];
        let (rows, columns) = stacked.size2()?;
        let sums_kind = accumulation(stacked.kind());
        let out = Tensor::f_empty([rows, columns / 3].as_slice(), (stacked.kind(), stacked.device()))?;
        let lse = Tensor::f_empty([rows, self.settings.heads].as_slice(), (sums_kind, stacked.device()))?;
        forward(&self.views(stacked)?, &view(&out)?, &view(&lse)?)?; // it writes to `out` and `lse`
        self.lse.get_or_init(|| lse);
        Ok(vec![out])
    }

    /// Returns the gradient of `[q|k|v]`; each third of its columns is written in place.
    fn backward(&self, inputs: Vec<Tensor>, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let (Some(dout), Some(lse)) = (&gradients[0], self.lse.get()) else { return Ok(vec![None]) };
        let (dout, gradient) = (dout.f_contiguous()?, inputs[0].f_empty_like()?);
        let shares = None; // without sinks, each query's weights sum to 1
        backward(&self.views(&inputs[0])?, &view(&dout)?, &view(lse)?, shares, &thirds(&gradient)?)?;
        Ok(vec![Some(gradient)])
    }
}

/// Returns views of the three thirds of the columns: Q, K and V.
fn thirds(stacked: &Tensor) -> Result<[View; 3]> {
    let d = stacked.size2()?.1 / 3;
    let part = |i: i64| view(&stacked.f_narrow(1, i * d, d)?);
    Ok([part(0)?, part(1)?, part(2)?])
}

/// Returns a view of a matrix on the CPU for attention's kernels; errors if the tensor is none.
pub(super) fn view(t: &Tensor) -> Result<View> {
    let wrong = || Error::Torch("attention in training takes matrices on the CPU, row by row".to_string());
    View::of(t).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::attention;
    use tch::{Device, Kind};

    #[test]
    fn value_and_gradient_are_those_of_attention() {
        tch::manual_seed(6);
        let (d, heads, scale, seed) = (24, 4, 0.4, Tensor::from_slice(&[5i64, 7, 1]));
        let ranges = Tensor::from_slice(&[0i64, 3, 0, 3, 3, 1, 3, 1, 4, 5, 4, 5]).view([3, 4]);
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
            for (causal, p) in [(false, 0.0), (true, 0.3)] {
                let leaf = || Tensor::randn([9, 3 * d], (kind, Device::Cpu)).set_requires_grad(true);
                let (ours, dout) = (leaf(), Tensor::randn([9, d], (kind, Device::Cpu)));
                let theirs = ours.detach().set_requires_grad(true);
                let made = stacked_attention(&ours, &ranges, heads, causal, scale, Some((p, &seed, 3))).unwrap();
                let [q, k, v] = [0, 1, 2].map(|i| theirs.narrow(1, i * d, d));
                let wanted = attention(&q, &k, &v, &ranges, heads, causal, scale, p, Some(&seed), 3).unwrap();
                (&made * &dout).sum(kind).backward();
                (&wanted * &dout).sum(kind).backward();
                assert!(made.equal(&wanted), "{kind:?} {causal}");
                assert!(ours.grad().equal(&theirs.grad()), "{kind:?} {causal}");
            }
        }
    }
}
