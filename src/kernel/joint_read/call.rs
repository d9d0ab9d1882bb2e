//! The read of hyper-connections on tensors of the CPU; threads share the positions.

use super::{scales as scales_of_positions, share_gradients, stream_gradients, Size};
use crate::cpu::parallel::{self, numbers, Shared};
use crate::cpu::Element;
use crate::error::{Error, Result};
use crate::kernel::view::{by_dtype, View};
use tch::{Device, Kind, Tensor};

/// Returns r and c/⟨dm, m⟩ of streams (positions, n·d), each (positions, 1), in the type `kind` of the computation.
pub fn scales(flat: &Tensor, size: Size, kind: Kind) -> Result<[Tensor; 2]> {
    let made = [(); 2].map(|()| Tensor::f_empty([flat.size()[0], 1].as_slice(), (kind, flat.device())));
    let [r, slopes] = made;
    let (r, slopes) = (r?, slopes?);
    let (h, to_r, to_slopes) = (matrix(flat)?, matrix(&r)?, matrix(&slopes)?);
    by_dtype!(h, E => {
        // SAFETY: `matrix` has checked that the tensors are contiguous on the CPU; they outlive this function and have the
        // types E and E's computing type; the results are new.
        let (numbers_of_h, to_r, to_slopes) = unsafe {
            (h.slice::<E>(), Shared::new(to_r.slice_mut::<<E as Element>::Acc>()), Shared::new(to_slopes.slice_mut()))
        };
        let width = h.cols();
        parallel::over_rows(h.rows(), width, |rows, numbers| {
            // SAFETY: each range of positions writes its own numbers.
            let (r, slopes) = unsafe { (to_r.slice(rows.clone()), to_slopes.slice(rows)) };
            scales_of_positions::<E>(&numbers_of_h[numbers], width, size, r, slopes);
        });
        Ok::<(), Error>(())
    })?;
    Ok([r, slopes])
}

/// Returns dp (positions, n) for dx (positions, d) and the streams (positions, n·d).
pub fn gradient_of_shares(dx: &Tensor, flat: &Tensor, kind: Kind) -> Result<Tensor> {
    let (dx, h) = (matrix(dx)?, matrix(flat)?);
    let n = h.cols() / dx.cols();
    let dp = Tensor::f_empty([h.rows, n as i64].as_slice(), (kind, flat.device()))?;
    let to = matrix(&dp)?;
    by_dtype!(h, E => {
        // SAFETY: as in `scales`.
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

/// Returns the streams' gradient (positions, n·d), given dx (positions, d), the streams, dh′ if there is one, M (positions,
/// n·d), p (positions, n) and c (positions, 1).
pub fn gradient_of_streams(
    dx: &Tensor,
    flat: &Tensor,
    written: Option<&Tensor>,
    [products, shares, of_h]: [&Tensor; 3],
) -> Result<Tensor> {
    let dh = Tensor::f_empty(flat.size().as_slice(), (flat.kind(), flat.device()))?;
    let written = written.map(matrix).transpose()?;
    let (dx, h, to) = (matrix(dx)?, matrix(flat)?, matrix(&dh)?);
    let (products, shares, of_h) = (matrix(products)?, matrix(shares)?, matrix(of_h)?);
    by_dtype!(h, E => {
        // SAFETY: as in `scales`.
        let (dx_all, h_all, written, products, shares_all, of_h, dh) = unsafe {
            (dx.slice::<E>(), h.slice::<E>(), written.map(|t| t.slice::<E>()), products.slice(), shares.slice(),
             of_h.slice(), Shared::new(to.slice_mut::<E>()))
        };
        let (d, n) = (dx.cols(), shares.cols());
        parallel::over_rows(h.rows(), n * d, |rows, of_rows| {
            // SAFETY: each range of positions writes its own numbers.
            let dh = unsafe { dh.slice(of_rows.clone()) };
            let written = written.map(|all| &all[of_rows.clone()]);
            let (dx, shares) = (&dx_all[numbers(&rows, d)], &shares_all[numbers(&rows, n)]);
            let products = &products[of_rows.clone()];
            stream_gradients::<E>(dx, &h_all[of_rows], written, products, shares, &of_h[rows], d, dh);
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
