//! The read of hyper-connections whose gates are functions of all streams together (docs/spec.md §2.23).
//!
//! > m = r·W vec(H),  p = σ(s m₀ + b) + ε,  x = Σ_i p_i h_i
//!
//! r is one over the size of vec(H) (kernel/joint_read.rs), m₀ the first n numbers of m.

use super::sizes::{unit, unit_rms};
use crate::error::Result;
use crate::kernel::joint_read::call::{self as kernel, JointSaved, ReadShape};
use crate::kernel::joint_read::Divisor;
use crate::kernel::view::accumulation;
use crate::norm::composed::accumulate;
use crate::operator::{evaluate, mix_streams, Differentiable};
use std::cell::OnceCell;
use tch::{Kind, Tensor};

/// The results of a read.
pub struct JointRead {
    /// H, which the sublayer's write uses. So the read's backward pass also gets the write's gradient of H, and adds it
    /// to its own.
    pub streams: Tensor,
    /// x, (…, d).
    pub x: Tensor,
    /// m, the product W vec(H) divided by the size of vec(H), (…, rows of W), in the type of sums.
    pub mixes: Tensor,
}

/// Reads x = Σ_i p_i h_i from the streams H (…, n, d), with p = σ(s m₀ + b) + ε and m = W vec(H) divided by the size of
/// vec(H); m₀ is the first n numbers of m. `parameters` are W (rows, n·d), s (1) and b (n), in the type of sums.
/// `divisor` names the size of vec(H), and `eps` is ε. In a training loop (`is_training`) a kernel of the CPU computes
/// the read; it has no second derivative.
pub fn read(
    streams: &Tensor,
    parameters: [&Tensor; 3],
    divisor: Divisor,
    eps: f64,
    is_training: bool,
) -> Result<JointRead> {
    if !is_training || streams.numel() == 0 {
        return composed(streams, parameters, divisor, eps);
    }
    let node = JointReadNode { divisor, eps, kept: OnceCell::new() };
    let [weight, scale, bias] = parameters;
    let inputs = [streams, weight, scale, bias];
    let [streams, x, mixes] = evaluate(node, &inputs)?.try_into().expect("streams, x and m");
    Ok(JointRead { streams, x, mixes })
}

/// Computes the read with operators and tch's operations; the arguments are those of [`read`].
fn composed(streams: &Tensor, [weight, scale, bias]: [&Tensor; 3], divisor: Divisor, eps: f64) -> Result<JointRead> {
    let flat = accumulate(&streams.f_flatten(-2, -1)?)?; // (…, n·d)
    let normed = match divisor {
        Divisor::RootMeanSquare(least) => unit_rms(&flat, least)?,
        Divisor::Norm(least) => unit(&flat, least)?,
    };
    let mixes = normed.f_linear::<&Tensor>(weight, None)?;
    // The logits of p come from m₀, the first n numbers of m.
    let logits = mixes.f_narrow(-1, 0, bias.size1()?)?.f_mul(scale)?.f_add(bias)?;
    let p = logits.f_sigmoid()?.f_add_scalar(eps)?;
    let added = None; // the sum alone, without a sublayer output
    let x = mix_streams(streams, &p.f_unsqueeze(-2)?, added)?.f_squeeze_dim(-2)?;
    Ok(JointRead { streams: streams.shallow_clone(), x, mixes })
}

struct JointReadNode {
    divisor: Divisor,
    /// The ε that is added to p.
    eps: f64,
    /// m, σ(s m₀ + b), r and c/⟨dm, m⟩, (positions, …), which the forward pass keeps for the backward pass. r is one
    /// over the size of vec(H); c is the factor of H in H's gradient through r.
    kept: OnceCell<[Tensor; 4]>,
}

impl Differentiable for JointReadNode {
    /// Returns true: the backward pass needs H, W, s and b.
    fn saves_inputs(&self) -> bool {
        true
    }

    /// Returns H, x and m for the inputs H, W, s and b, and keeps what the backward pass needs.
    fn forward(&self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let [streams, weight, scale, bias] = &inputs[..] else { unreachable!("H, W, s and b") };
        // H is also an output, and autograd lets no function return its input. So this is another tensor on H's memory.
        let streams = streams.f_detach()?.f_contiguous()?;
        let size = streams.size();
        let [around @ .., n, d] = &size[..] else { unreachable!("streams are (…, n, d)") };
        let shape = shape(&streams, weight);
        let sums_kind = accumulation(streams.kind());
        // Makes a tensor (…, last) for a result of each position.
        let empty =
            |last: i64, kind: Kind| Tensor::f_empty([around, &[last]].concat().as_slice(), (kind, streams.device()));
        let (x, mixes) = (empty(*d, streams.kind())?, empty(shape.rows, sums_kind)?);
        let (sigmoids, scales, slopes) = (empty(*n, sums_kind)?, empty(1, sums_kind)?, empty(1, sums_kind)?);
        let parameters = [&weight.f_contiguous()?, &bias.f_contiguous()?];
        let numbers = [scale.f_double_value(&[0])?, self.eps];
        let results = [&x, &mixes, &sigmoids, &scales, &slopes];
        kernel::forward(shape, &streams, parameters, numbers, self.divisor, results)?;
        // The dimensions before the last become one, of all positions.
        let rows = |t: &Tensor| t.f_detach()?.f_view([shape.positions, *t.size().last().expect("a last dimension")]);
        let kept = [rows(&mixes)?, rows(&sigmoids)?, rows(&scales)?, rows(&slopes)?];
        self.kept.set(kept).expect("the forward pass runs once");
        Ok(vec![streams, x, mixes])
    }

    /// Returns the gradients of H, W, s and b from those of the results H, x and m; `None` means 0.
    fn backward(&self, inputs: Vec<Tensor>, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let [streams, weight, scale, bias] = &inputs[..] else { unreachable!("H, W, s and b") };
        let forward = self.kept.get().expect("the forward pass has kept them").each_ref();
        // `written` is the gradient that the sublayer's write gives to H. The kernel adds the read's own to it.
        let [written, dx, dm] = &gradients[..] else { unreachable!("a gradient for each result") };
        let shape = shape(streams, weight);
        let (streams, weight) = (streams.f_contiguous()?, weight.f_contiguous()?);
        let contiguous = |t: &Option<Tensor>| t.as_ref().map(|t| t.f_contiguous()).transpose();
        let (written, dm) = (contiguous(written)?, contiguous(dm)?);
        let dx = match contiguous(dx)? {
            Some(dx) => dx,
            None => Tensor::f_zeros([shape.positions, shape.d].as_slice(), (streams.kind(), streams.device()))?,
        };
        let dh = Tensor::f_empty(streams.size().as_slice(), (streams.kind(), streams.device()))?;
        let [dweight, dscale, dbias] = [&weight, scale, bias].map(Tensor::f_zeros_like);
        let (dweight, dscale, dbias) = (dweight?, dscale?, dbias?);
        let (written, dm) = (written.as_ref(), dm.as_ref());
        let saved = JointSaved { dx: &dx, h: &streams, written, dm, weight: &weight, forward };
        let numbers = [scale.f_double_value(&[0])?, self.eps];
        kernel::backward(shape, &saved, numbers, &dh, [&dweight, &dscale, &dbias])?;
        Ok([dh, dweight, dscale, dbias].map(Some).into())
    }
}

/// Returns the sizes of a read from streams (…, n, d) and W (rows, n·d). `positions` counts the places before n and d.
fn shape(streams: &Tensor, weight: &Tensor) -> ReadShape {
    let size = streams.size();
    let [around @ .., n, d] = &size[..] else { unreachable!("streams are (…, n, d)") };
    ReadShape { positions: around.iter().product(), n: *n, d: *d, rows: weight.size()[0] }
}

#[cfg(test)]
mod tests {
    use super::super::sizes::{EPS, LEAST_NORM};
    use super::*;
    use crate::cpu::simd::{force, Level};
    use crate::testing::assert_near;
    use tch::Device;

    #[test]
    fn the_kernel_computes_the_formula_and_its_gradients() {
        tch::manual_seed(6);
        let random = |size: &[i64], kind: Kind| Tensor::randn(size, (Kind::Double, Device::Cpu)).to_kind(kind);
        let divisors = [Divisor::RootMeanSquare(EPS), Divisor::Norm(LEAST_NORM)];
        for level in Level::ALL {
            force(Some(level));
            for (kind, bound) in [(Kind::Float, 1e-5), (Kind::Double, 1e-12), (Kind::BFloat16, 2e-2)] {
                // `by` is the index of the divisor, and H has n streams of width d in 2·rows places.
                for (by, rows, n, d, is_written) in
                    [(0, 1, 1, 1, true), (0, 3, 4, 33, true), (1, 400, 4, 32, true), (1, 7, 2, 65, false)]
                {
                    let wide = if kind == Kind::Double { kind } else { Kind::Float };
                    let inputs = [
                        random(&[2, rows, n, d], kind),
                        random(&[n + 3, n * d], wide),
                        random(&[1], wide),
                        random(&[n], wide),
                    ];
                    // The gradients of the results: of H only if there is a write.
                    let given = [
                        random(&[2, rows, n, d], kind) * f64::from(is_written),
                        random(&[2, rows, d], kind),
                        random(&[2, rows, n + 3], kind),
                    ];
                    type Form = fn(&Tensor, [&Tensor; 3], Divisor, f64) -> Result<JointRead>;
                    // Returns the gradients of all inputs, then the results; in f64 if `is_exact`.
                    let run = |is_exact: bool, form: Form| {
                        let leaf = |t: &Tensor| {
                            if is_exact { t.to_kind(Kind::Double) } else { t.copy() }.set_requires_grad(true)
                        };
                        let leaves = inputs.each_ref().map(leaf);
                        let [h, w, s, b] = leaves.each_ref();
                        let JointRead { streams, x, mixes } = form(h, [w, s, b], divisors[by], EPS).unwrap();
                        let results = [streams, x, mixes];
                        let used = results.iter().zip(&given).skip(usize::from(!is_written));
                        let loss: Tensor = used.map(|(t, g)| (t * g.to_kind(t.kind())).sum(Kind::Double)).sum();
                        let mut all = Tensor::run_backward(&[loss], &[h, w, s, b], false, false);
                        all.extend(results);
                        all
                    };
                    for (i, (found, wanted)) in run(false, |h, w, by, eps| read(h, w, by, eps, true))
                        .iter()
                        .zip(run(true, composed))
                        .enumerate()
                    {
                        let what = format!("{level:?} {kind:?} {rows} {n} {d}, number {i}");
                        assert_near(found, &wanted, bound, 0.0, &what);
                    }
                }
            }
        }
        force(None);
    }

    #[test]
    fn streams_whose_squares_overflow_have_gates() {
        tch::manual_seed(8);
        let random = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        let [h, w, s, b] = [random(&[3, 4, 33]) * 1e30, random(&[7, 132]) * 1e20, random(&[1]) * 1e-20, random(&[4])];
        let exact = [&h, &w, &s, &b].map(|t| t.to_kind(Kind::Double));
        for by in [Divisor::RootMeanSquare(EPS), Divisor::Norm(LEAST_NORM)] {
            let JointRead { x, mixes, .. } = read(&h, [&w, &s, &b], by, EPS, true).unwrap();
            let [h, w, s, b] = &exact;
            let wanted = composed(h, [w, s, b], by, EPS).unwrap();
            for (found, wanted) in [(x, wanted.x), (mixes, wanted.mixes)] {
                assert!(
                    found.to_kind(Kind::Double).allclose(&wanted, 1e-4, 1e-30, false),
                    "{by:?}: {found} for {wanted}"
                );
            }
        }
    }
}
