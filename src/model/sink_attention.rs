//! Attention with sinks on a CPU: the softmax of each head has one more logit b, which belongs to no value
//! (docs/spec.md §4.3).
//!
//! > s = σ(lse − b),  O = s·O₀,  lse⁺ = log(e^lse + e^b)
//! > dQ, dK and dV as without b, but P = exp(S − lse⁺) sums to s;  db = −Σ (1 − s)·⟨dO, O⟩ over the head's rows
//!
//! O₀ and lse = log Σ exp S are the results of attention's kernel without b.

use super::stacked_attention::view;
use crate::error::Result;
use crate::host::host;
use crate::kernel::attention::call::{backward, forward, AttentionViews, Settings};
use crate::kernel::dropout::Draw;
use crate::kernel::view::accumulation;
use crate::operator::{evaluate, Differentiable};
use std::cell::OnceCell;
use tch::{Kind, Tensor};

/// Computes drop(softmax(scale·QKᵀ, b))V per head, (rows, d), with each head's sink as one more logit of its softmax;
/// `sinks` is b, (heads). `ranges` is int64 (sentences, 4), as in [`attention`](crate::operator::attention); `dropout`
/// is (p, seed, site).
pub fn sink_attention(
    qkv: [&Tensor; 3],
    sinks: &Tensor,
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
    let function = SinkAttention { ranges: ranges.f_contiguous()?, settings, kept: OnceCell::new() };
    let [q, k, v] = qkv;
    let inputs = [q, k, v, sinks];
    Ok(evaluate(function, &inputs)?.swap_remove(0))
}

struct SinkAttention {
    ranges: Tensor,
    settings: Settings,
    /// lse and O, which the forward pass keeps for the backward pass.
    kept: OnceCell<[Tensor; 2]>,
}

impl SinkAttention {
    /// Returns q, k and v, with the ranges and the settings, in the form that attention's kernels read.
    fn views(&self, [q, k, v]: [&Tensor; 3]) -> Result<AttentionViews> {
        let [q, k, v] = [view(q)?, view(k)?, view(v)?];
        Ok(AttentionViews { q, k, v, ranges: view(&self.ranges)?, settings: self.settings })
    }

    /// Splits each row into heads, (rows, heads, d_head), and casts it to `kind`.
    fn heads(&self, t: &Tensor, kind: Kind) -> Result<Tensor> {
        Ok(t.f_to_kind(kind)?.f_unflatten(1, [self.settings.heads, -1].as_slice())?)
    }
}

impl Differentiable for SinkAttention {
    /// Returns true: the backward pass needs Q, K, V and the sinks.
    fn saves_inputs(&self) -> bool {
        true
    }

    /// Returns O = s·O₀ for the inputs Q, K, V and b. O₀ is attention without the sinks b, lse is its log-sum-exp, and
    /// s = σ(lse − b) is the share of a softmax that is left to the keys.
    fn forward(&self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let [q, k, v, sinks] = &inputs[..] else { unreachable!("queries, keys, values and sinks") };
        let kind = accumulation(q.kind());
        let without_sinks = Tensor::f_empty(q.size().as_slice(), (q.kind(), q.device()))?;
        let lse = Tensor::f_empty([q.size()[0], self.settings.heads].as_slice(), (kind, q.device()))?;
        forward(&self.views([q, k, v])?, &view(&without_sinks)?, &view(&lse)?)?;
        let share = lse.f_sub(&sinks.f_detach()?.f_to_kind(kind)?)?.f_sigmoid()?; // s
        let out = self.heads(&without_sinks, kind)?.f_mul(&share.f_unsqueeze(-1)?)?;
        let out = out.f_flatten(1, 2)?.f_to_kind(q.kind())?;
        self.kept.get_or_init(|| [lse, out.detach()]);
        Ok(vec![out])
    }

    /// Returns the gradients of Q, K, V and b from dO; all are `None` if O has no gradient.
    fn backward(&self, inputs: Vec<Tensor>, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let (Some(dout), Some([lse, out])) = (&gradients[0], self.kept.get()) else {
            return Ok((0..4).map(|_| None).collect());
        };
        let [q, k, v, sinks] = &inputs[..] else { unreachable!("queries, keys, values and sinks") };
        let (dout, b) = (dout.f_contiguous()?, sinks.f_to_kind(lse.kind())?);
        let (share, sink_share) = (lse.f_sub(&b)?.f_sigmoid()?, b.f_sub(lse)?.f_sigmoid()?); // s and 1 − s
        let [dq, dk, dv] = [q, k, v].map(|t| Tensor::f_empty(t.size().as_slice(), (t.kind(), t.device())));
        let (dq, dk, dv) = (dq?, dk?, dv?);
        let gradient_views = [view(&dq)?, view(&dk)?, view(&dv)?];
        let lse_with_sinks = lse.f_logaddexp(&b)?;
        // With sinks, the weights P = exp(S − lse⁺) of the keys sum to s instead of 1. `share` tells the kernel so.
        let (dout_view, lse_view) = (view(&dout)?, view(&lse_with_sinks)?);
        backward(&self.views([q, k, v])?, &dout_view, &lse_view, Some(&view(&share)?), &gradient_views)?;
        let products = self.heads(&dout, lse.kind())?.f_mul(&self.heads(out, lse.kind())?)?;
        // db = −Σ (1 − s)·⟨dO, O⟩ over the rows.
        let keepdim = false;
        let dots = products.f_sum_dim_intlist([-1i64].as_slice(), keepdim, None::<Kind>)?; // ⟨dO, O⟩, (rows, heads)
        let dsinks = dots.f_mul(&sink_share)?.f_sum_dim_intlist([0i64].as_slice(), keepdim, None::<Kind>)?.f_neg()?;
        Ok([dq, dk, dv, dsinks.f_to_kind(sinks.kind())?].map(Some).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::attention::Extras;
    use crate::operator::composed_attention;
    use tch::Device;

    /// The inputs include values far from 0, for which a log-sum-exp in f32 is less exact.
    #[test]
    fn value_and_gradients_are_those_of_the_composed_form() {
        tch::manual_seed(7);
        let (d, heads, seed) = (24, 4, Tensor::from_slice(&[5i64, 7, 1]));
        let ranges = Tensor::from_slice(&[0i64, 3, 0, 3, 3, 1, 3, 0, 4, 5, 4, 5]).view([3, 4]);
        for (kind, scale, bound) in [(Kind::Double, 0.4, 1e-12), (Kind::Double, 30.0, 1e-9), (Kind::Float, 30.0, 1e-4)]
        {
            for (causal, p) in [(false, 0.0), (true, 0.3)] {
                let leaves = [d, d, d].map(|d| Tensor::randn([9, d], (kind, Device::Cpu)));
                let b = Tensor::from_slice(&[0.3, -2.0, 20.0, 60.0]).to_kind(kind);
                let dout = Tensor::randn([9, d], (kind, Device::Cpu));
                let results = |attend: &dyn Fn([&Tensor; 3], &Tensor) -> Tensor, kind: Kind| {
                    let leaf = |t: &Tensor| t.to_kind(kind).detach().copy().set_requires_grad(true);
                    let (inputs, b) = (leaves.each_ref().map(leaf), leaf(&b));
                    let out = attend(inputs.each_ref(), &b);
                    (&out * dout.to_kind(kind)).sum(kind).backward();
                    [out.detach(), inputs[0].grad(), inputs[1].grad(), inputs[2].grad(), b.grad()]
                };
                let dropout = Some((p, &seed, 3));
                let ours = |qkv: [&Tensor; 3], b: &Tensor| {
                    sink_attention(qkv, b, &ranges, heads, causal, scale, dropout).unwrap()
                };
                let theirs = |qkv: [&Tensor; 3], b: &Tensor| {
                    let extras = Extras { softcap: None, sinks: Some(b) };
                    composed_attention(qkv, &ranges, heads, causal, scale, &extras, dropout).unwrap()
                };
                let (ours, theirs) = (results(&ours, kind), results(&theirs, Kind::Double));
                for (place, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                    let size = theirs.abs().max().double_value(&[]).max(1.0);
                    let apart = (ours.to_kind(Kind::Double) - theirs).abs().max().double_value(&[]) / size;
                    assert!(apart < bound, "{kind:?} {scale} {causal} {place}: {apart}");
                }
            }
        }
    }
}
