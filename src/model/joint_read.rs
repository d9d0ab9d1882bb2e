//! The read of hyper-connections whose gates are functions of all streams together (docs/spec.md §2.23).
//!
//! > m = r·W vec(H),  p = σ(s m₀ + b) + ε,  x = Σ_i p_i h_i
//!
//! r is one over the size of vec(H) (kernel/joint_read.rs), m₀ the first n numbers of m.

use super::mixing::{unit, unit_rms, wide};
use crate::error::Result;
use crate::kernel::joint_read::call::{self as kernel, Weights};
use crate::kernel::joint_read::Size;
use crate::operator::{apply, mix_streams, Differentiable, Recording};
use std::cell::OnceCell;
use tch::{Kind, Tensor};

/// What a read computes.
pub struct JointRead {
    /// H, for the sublayer's write. So the read gets the gradient that the write gives to H, and adds it to its own.
    pub streams: Tensor,
    /// x, (…, d).
    pub x: Tensor,
    /// m, (…, rows of W), in the type of the computation.
    pub mixes: Tensor,
}

/// Reads streams (…, n, d). W (rows, n·d), s (1) and b (n) are in the type of the computation; `eps` is p's ε.
pub fn read(streams: &Tensor, parameters: [&Tensor; 3], size: Size, eps: f64) -> Result<JointRead> {
    if !kernel::computes(streams) {
        return composed(streams, parameters, size, eps);
    }
    let function = Function { size, eps, kept: OnceCell::new() };
    let [weight, scale, bias] = parameters;
    let inputs = [streams, weight, scale, bias];
    let results = match Recording::is_on() && inputs.iter().any(|t| t.requires_grad()) {
        true => apply(function, &inputs)?,
        false => function.forward(inputs.map(Tensor::shallow_clone).into())?,
    };
    let [streams, x, mixes] = results.try_into().expect("streams, x and m");
    Ok(JointRead { streams, x, mixes })
}

/// Computes the read with operators and tch's operations.
fn composed(streams: &Tensor, [weight, scale, bias]: [&Tensor; 3], size: Size, eps: f64) -> Result<JointRead> {
    let flat = wide(&streams.f_flatten(-2, -1)?)?; // (…, n·d)
    let normed = match size {
        Size::RootMeanSquare(_) => unit_rms(&flat)?,
        Size::Norm(_) => unit(&flat)?,
    };
    let mixes = normed.f_linear::<&Tensor>(weight, None)?;
    let shares = shares(&mixes, scale, bias)?.f_add_scalar(eps)?;
    let x = mix_streams(streams, &shares.f_unsqueeze(-2)?, None)?.f_squeeze_dim(-2)?;
    Ok(JointRead { streams: streams.shallow_clone(), x, mixes })
}

/// Returns σ(s m₀ + b), (…, n).
fn shares(mixes: &Tensor, scale: &Tensor, bias: &Tensor) -> Result<Tensor> {
    Ok(mixes.f_narrow(-1, 0, bias.size1()?)?.f_mul(scale)?.f_add(bias)?.f_sigmoid()?)
}

struct Function {
    size: Size,
    eps: f64,
    /// The streams as a matrix (positions, n·d), and what the forward pass has computed from them.
    kept: OnceCell<(Tensor, Weights)>,
}

impl Differentiable for Function {
    fn saves_inputs(&self) -> bool {
        true
    }

    fn forward(&self, inputs: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let [streams, weight, scale, bias] = &inputs[..] else { unreachable!("H, W, s and b") };
        let streams = streams.f_detach()?.f_contiguous()?;
        let [around @ .., n, d] = &streams.size()[..] else { unreachable!("streams are (…, n, d)") };
        let flat = streams.f_view([-1, n * d])?;
        let (weight, bias) = (weight.f_contiguous()?, bias.f_contiguous()?);
        let (x, weights) = kernel::forward(&flat, &weight, scale.f_double_value(&[0])?, &bias, self.eps, self.size)?;
        let shaped = |t: &Tensor| t.f_reshape([around, &[t.size()[1]]].concat().as_slice());
        let made = vec![streams.f_detach()?, shaped(&x)?, shaped(&weights.mixes)?];
        self.kept.get_or_init(|| (flat, Weights { mixes: weights.mixes.detach(), ..weights }));
        Ok(made)
    }

    fn backward(&self, inputs: Vec<Tensor>, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let [streams, weight, scale, bias] = &inputs[..] else { unreachable!("H, W, s and b") };
        let (flat, Weights { mixes, shares: p, scales, slopes }) = self.kept.get().expect("forward has kept them");
        let [written, dx, dm] = &gradients[..] else { unreachable!("a gradient for each result") };
        let as_rows = |t: &Tensor, columns: i64| t.f_reshape([-1, columns].as_slice())?.f_contiguous();
        let (n, d) = (bias.size1()?, streams.size()[streams.dim() - 1]);
        let kind = weight.kind();
        let dx = match dx {
            Some(dx) => as_rows(dx, d)?,
            None => Tensor::f_zeros([flat.size()[0], d].as_slice(), (flat.kind(), flat.device()))?,
        };
        // The gradient of s m₀ + b is dp σ(1 − σ).
        let dp = kernel::gradient_of_shares(&dx, flat, kind)?;
        let dlogits = dp.f_mul(p)?.f_mul(&p.f_neg()?.f_add_scalar(1.0)?)?;
        let first = mixes.f_narrow(1, 0, n)?;
        let dscale = dlogits.f_mul(&first)?.f_sum(Kind::Double)?.f_to_kind(kind)?.f_view([1])?;
        let dbias = dlogits.f_sum_dim_intlist([0i64].as_slice(), false, None::<Kind>)?;
        let dm = match dm {
            Some(dm) => as_rows(dm, mixes.size()[1])?,
            None => mixes.f_zeros_like()?,
        };
        let of_first = dm.f_narrow(1, 0, n)?.f_add(&dlogits.f_mul(scale)?)?;
        let dm = Tensor::f_cat(&[of_first, dm.f_narrow(1, n, mixes.size()[1] - n)?], 1)?;
        let of_size = dm.f_mul(mixes)?.f_sum_dim_intlist([1i64].as_slice(), true, None::<Kind>)?; // ⟨dm, m⟩
        let scaled = dm.f_mul(scales)?;
        let dweight = scaled.f_transpose(0, 1)?.f_mm(&wide(flat)?)?;
        let written = written.as_ref().map(|t| as_rows(t, n * d)).transpose()?;
        let (p, c) = (p.f_add_scalar(self.eps)?, of_size.f_mul(slopes)?);
        let dh = kernel::gradient_of_streams(&dx, flat, written.as_ref(), [&weight.f_contiguous()?, &scaled, &p, &c])?;
        Ok([dh.f_view(streams.size().as_slice())?, dweight, dscale, dbias].map(Some).into())
    }
}

#[cfg(test)]
mod tests {
    use super::super::mixing::{EPS, LEAST_NORM};
    use super::*;
    use crate::cpu::simd::{force, Level};
    use tch::Device;

    #[test]
    fn the_kernel_computes_the_formula_and_its_gradients() {
        tch::manual_seed(6);
        let random = |size: &[i64], kind: Kind| Tensor::randn(size, (Kind::Double, Device::Cpu)).to_kind(kind);
        let sizes = [Size::RootMeanSquare(EPS), Size::Norm(LEAST_NORM)];
        for level in Level::ALL {
            force(Some(level));
            for (kind, bound) in [(Kind::Float, 1e-5), (Kind::Double, 1e-12), (Kind::BFloat16, 2e-2)] {
                for (size, rows, n, d, is_written) in
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
                    type Form = fn(&Tensor, [&Tensor; 3], Size, f64) -> Result<JointRead>;
                    let run = |is_exact: bool, form: Form| {
                        let leaf = |t: &Tensor| {
                            if is_exact { t.to_kind(Kind::Double) } else { t.copy() }.set_requires_grad(true)
                        };
                        let leaves = inputs.each_ref().map(leaf);
                        let [h, w, s, b] = leaves.each_ref();
                        let JointRead { streams, x, mixes } = form(h, [w, s, b], sizes[size], EPS).unwrap();
                        let results = [streams, x, mixes];
                        let used = results.iter().zip(&given).skip(usize::from(!is_written));
                        let loss: Tensor = used.map(|(t, g)| (t * g.to_kind(t.kind())).sum(Kind::Double)).sum();
                        let mut all = Tensor::run_backward(&[loss], &[h, w, s, b], false, false);
                        all.extend(results);
                        all
                    };
                    for (i, (found, wanted)) in run(false, read).iter().zip(run(true, composed)).enumerate() {
                        assert_eq!(found.size(), wanted.size());
                        let error = (found.to_kind(Kind::Double) - &wanted).abs().sum(Kind::Double).double_value(&[]);
                        let size = wanted.abs().sum(Kind::Double).double_value(&[]);
                        let text = format!("{level:?} {kind:?} {rows} {n} {d}, number {i}: {error} of {size}");
                        assert!(error <= bound * size, "{text}");
                    }
                }
            }
        }
        force(None);
    }
}
