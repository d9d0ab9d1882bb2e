//! The read of hyper-connections on tensors of the CPU; threads share the positions.

use super::{forward as forward_positions, share_gradients, stream_gradients, Read, Size};
use crate::cpu::parallel::{self, numbers, Shared};
use crate::cpu::{Accumulator, Element};
use crate::error::{Error, Result};
use crate::kernel::view::{by_dtype, View};
use tch::{Device, Kind, Tensor};

/// What a read computes from streams beside x, in the type of the computation.
pub struct Weights {
    /// m, (positions, rows).
    pub mixes: Tensor,
    /// σ(s m₀ + b), (positions, n).
    pub shares: Tensor,
    /// r, (positions, 1).
    pub scales: Tensor,
    /// c/⟨dm, m⟩, (positions, 1).
    pub slopes: Tensor,
}

/// Returns x (positions, d) and its weights, for streams (positions, n·d). W (rows, n·d) and b (n) are in the type of the
/// computation.
pub fn forward(
    flat: &Tensor,
    weight: &Tensor,
    scale: f64,
    bias: &Tensor,
    eps: f64,
    size: Size,
) -> Result<(Tensor, Weights)> {
    let (positions, n) = (flat.size()[0], bias.size1()?);
    let made = |columns: i64, kind: Kind| Tensor::f_empty([positions, columns].as_slice(), (kind, flat.device()));
    let kind = weight.kind();
    let x = made(flat.size()[1] / n, flat.kind())?;
    let weights = Weights {
        mixes: made(weight.size()[0], kind)?,
        shares: made(n, kind)?,
        scales: made(1, kind)?,
        slopes: made(1, kind)?,
    };
    let (h, w, bias) = (matrix(flat)?, matrix(weight)?, matrix(&bias.f_view([1, n])?)?);
    let (to_x, to_mixes, to_shares) = (matrix(&x)?, matrix(&weights.mixes)?, matrix(&weights.shares)?);
    let (to_scales, to_slopes) = (matrix(&weights.scales)?, matrix(&weights.slopes)?);
    by_dtype!(h, E => {
        // SAFETY: `matrix` has checked that the tensors are contiguous on the CPU; they outlive this function and have the
        // types E and E's computing type; the results are new.
        let (numbers_of_h, weight, bias, all_x, computed) = unsafe {
            let computed = [to_mixes, to_shares, to_scales, to_slopes].map(|t| Shared::<<E as Element>::Acc>::new(t.slice_mut()));
            (h.slice::<E>(), w.slice(), bias.slice(), Shared::new(to_x.slice_mut::<E>()), computed)
        };
        let (d, k, n) = (to_x.cols(), w.rows(), to_shares.cols());
        let number = <<E as Element>::Acc as Accumulator>::from_f64;
        parallel::over_rows(h.rows(), h.cols(), |rows, of_h| {
            // SAFETY: each range of positions writes its own numbers.
            let to = unsafe {
                let [mixes, shares, scales, slopes] = &computed;
                Read {
                    x: all_x.slice(numbers(&rows, d)),
                    mixes: mixes.slice(numbers(&rows, k)),
                    shares: shares.slice(numbers(&rows, n)),
                    scales: scales.slice(rows.clone()),
                    slopes: slopes.slice(rows),
                }
            };
            forward_positions::<E>(&numbers_of_h[of_h], weight, number(scale), bias, number(eps), size, to);
        });
        Ok::<(), Error>(())
    })?;
    Ok((x, weights))
}

/// Returns dp (positions, n) for dx (positions, d) and the streams (positions, n·d).
pub fn gradient_of_shares(dx: &Tensor, flat: &Tensor, kind: Kind) -> Result<Tensor> {
    let (dx, h) = (matrix(dx)?, matrix(flat)?);
    let n = h.cols() / dx.cols();
    let dp = Tensor::f_empty([h.rows, n as i64].as_slice(), (kind, flat.device()))?;
    let to = matrix(&dp)?;
    by_dtype!(h, E => {
        // SAFETY: as in `forward`.
        let (dx_all, h_all, dp) = unsafe {
            (dx.slice::<E>(), h.slice::<E>(), Shared::new(to.slice_mut::<<E as Element>::Acc>()))
        };
        let d = dx.cols();
        parallel::over_rows(h.rows(), n * d, |rows, of_h| {
            // SAFETY: each range of positions writes its own numbers.
            let dp = unsafe { dp.slice(numbers(&rows, n)) };
            share_gradients::<E>(&dx_all[numbers(&rows, d)], &h_all[of_h], n, d, dp);
        });
        Ok::<(), Error>(())
    })?;
    Ok(dp)
}

/// Returns the streams' gradient (positions, n·d), given dx (positions, d), the streams, dh′ if there is one, W, r·dm
/// (positions, rows of W), p (positions, n) and c (positions, 1).
pub fn gradient_of_streams(
    dx: &Tensor,
    flat: &Tensor,
    written: Option<&Tensor>,
    [weight, dm, shares, of_h]: [&Tensor; 4],
) -> Result<Tensor> {
    let dh = Tensor::f_empty(flat.size().as_slice(), (flat.kind(), flat.device()))?;
    let written = written.map(matrix).transpose()?;
    let (dx, h, to) = (matrix(dx)?, matrix(flat)?, matrix(&dh)?);
    let (weight, dm) = (matrix(weight)?, matrix(dm)?);
    let (shares, of_h) = (matrix(shares)?, matrix(of_h)?);
    by_dtype!(h, E => {
        // SAFETY: as in `forward`.
        let (dx_all, h_all, written, weight, dm_all, shares_all, of_h, dh) = unsafe {
            (dx.slice::<E>(), h.slice::<E>(), written.map(|t| t.slice::<E>()), weight.slice(), dm.slice(), shares.slice(),
             of_h.slice(), Shared::new(to.slice_mut::<E>()))
        };
        let (d, n, k) = (dx.cols(), shares.cols(), dm.cols());
        parallel::over_rows(h.rows(), n * d, |rows, of_rows| {
            // SAFETY: each range of positions writes its own numbers.
            let dh = unsafe { dh.slice(of_rows.clone()) };
            let written = written.map(|all| &all[of_rows.clone()]);
            let (dx, shares) = (&dx_all[numbers(&rows, d)], &shares_all[numbers(&rows, n)]);
            let dm = &dm_all[numbers(&rows, k)];
            stream_gradients::<E>(dx, &h_all[of_rows], written, weight, dm, shares, &of_h[rows], d, dh);
        });
        Ok::<(), Error>(())
    })?;
    Ok(dh)
}

fn matrix(t: &Tensor) -> Result<View> {
    let of = if t.is_contiguous() { View::of(t) } else { None };
    of.ok_or_else(|| Error::Torch("the streams are read from contiguous matrices on the CPU".to_string()))
}

/// True if kernels of the CPU read these streams.
pub fn computes(streams: &Tensor) -> bool {
    let kinds = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    streams.device() == Device::Cpu && kinds.contains(&streams.kind()) && streams.numel() > 0
}
