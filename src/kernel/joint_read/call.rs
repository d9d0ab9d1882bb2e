//! The read of hyper-connections on tensors of the CPU; threads share the positions.

use super::{forward as forward_positions, share_gradients, stream_gradients, Divisor, JointResults};
use crate::cpu::parallel::{self, numbers, Shared};
use crate::cpu::{Accumulator, Element};
use crate::error::Result;
use crate::kernel::view::{accumulation, by_dtype, View};
use tch::{Kind, Tensor};

/// The sizes of a read: the number of positions, of streams, of numbers in a stream, and of rows of W.
#[derive(Clone, Copy, Debug)]
pub struct ReadShape {
    pub positions: i64,
    pub n: i64,
    pub d: i64,
    pub rows: i64,
}

/// Reads the streams `h`, and writes x, m, σ(s m₀ + b), r and c/⟨dm, m⟩ to `to`. `parameters` are W and b. All tensors but
/// the streams and x are of the type in which sums over the streams accumulate.
pub fn forward(
    shape: ReadShape,
    h: &Tensor,
    parameters: [&Tensor; 2],
    [scale, eps]: [f64; 2],
    by: Divisor,
    to: [&Tensor; 5],
) -> Result<()> {
    let ReadShape { positions, n, d, rows } = shape;
    let (stored, computed) = (h.kind(), accumulation(h.kind()));
    let view = |t: &Tensor, kind: Kind, cols: i64| View::of_rows(t, kind, [positions, cols]);
    let [w, b] = parameters;
    let (w, b) = (View::of_rows(w, computed, [rows, n * d])?, View::of_rows(b, computed, [1, n])?);
    let [x, mixes, sigmoids, scales, slopes] = to;
    let (h, x) = (view(h, stored, n * d)?, view(x, stored, d)?);
    let to = [
        view(mixes, computed, rows)?,
        view(sigmoids, computed, n)?,
        view(scales, computed, 1)?,
        view(slopes, computed, 1)?,
    ];
    by_dtype!(h, E => {
        // SAFETY: `of_rows` has checked types, sizes and layout; the tensors outlive this function, and those
        // of `to` are the caller's own.
        let (h_all, w, b, x, to) = unsafe {
            let to = to.map(|t| Shared::<<E as Element>::Acc>::new(t.slice_mut()));
            (h.slice::<E>(), w.slice(), b.slice(), Shared::new(x.slice_mut::<E>()), to)
        };
        let number = <<E as Element>::Acc as Accumulator>::from_f64;
        let (n, d, k) = (n as usize, d as usize, rows as usize);
        parallel::over_rows(h.rows(), n * d, |rows, of_h| {
            // SAFETY: each range of positions writes its own numbers.
            let to = unsafe {
                let [mixes, sigmoids, scales, slopes] = &to;
                JointResults {
                    x: x.slice(numbers(&rows, d)),
                    mixes: mixes.slice(numbers(&rows, k)),
                    sigmoids: sigmoids.slice(numbers(&rows, n)),
                    scales: scales.slice(rows.clone()),
                    slopes: slopes.slice(rows),
                }
            };
            forward_positions::<E>(&h_all[of_h], w, number(scale), b, number(eps), by, to);
        });
        Ok(())
    })
}

/// Writes dp to `dp` (positions, n).
pub fn gradient_of_shares(shape: ReadShape, dx: &Tensor, h: &Tensor, dp: &Tensor) -> Result<()> {
    let ReadShape { positions, n, d, .. } = shape;
    let (stored, computed) = (h.kind(), accumulation(h.kind()));
    let dx = View::of_rows(dx, stored, [positions, d])?;
    let (h, dp) = (View::of_rows(h, stored, [positions, n * d])?, View::of_rows(dp, computed, [positions, n])?);
    by_dtype!(h, E => {
        // SAFETY: as in `forward`.
        let (dx, h_all, dp) = unsafe {
            (dx.slice::<E>(), h.slice::<E>(), Shared::new(dp.slice_mut::<<E as Element>::Acc>()))
        };
        let (n, d) = (n as usize, d as usize);
        parallel::over_rows(h.rows(), n * d, |rows, of_h| {
            // SAFETY: each range of positions writes its own numbers.
            let dp = unsafe { dp.slice(numbers(&rows, n)) };
            share_gradients::<E>(&dx[numbers(&rows, d)], &h_all[of_h], n, d, dp);
        });
        Ok(())
    })
}

/// Writes the streams' gradient to `dh`, given dx, the streams, dh′ if there is one, and [W, r·dm, p, c].
pub fn gradient_of_streams(
    shape: ReadShape,
    dx: &Tensor,
    h: &Tensor,
    written: Option<&Tensor>,
    [w, steps, p, c]: [&Tensor; 4],
    dh: &Tensor,
) -> Result<()> {
    let ReadShape { positions, n, d, rows } = shape;
    let (stored, computed) = (h.kind(), accumulation(h.kind()));
    let view = |t: &Tensor, kind: Kind, cols: i64| View::of_rows(t, kind, [positions, cols]);
    let written = written.map(|t| view(t, stored, n * d)).transpose()?;
    let (dx, h, dh) = (view(dx, stored, d)?, view(h, stored, n * d)?, view(dh, stored, n * d)?);
    let w = View::of_rows(w, computed, [rows, n * d])?;
    let (steps, p, c) = (view(steps, computed, rows)?, view(p, computed, n)?, view(c, computed, 1)?);
    by_dtype!(h, E => {
        // SAFETY: as in `forward`.
        let (dx, h_all, written, w, steps, p, c, dh) = unsafe {
            (dx.slice::<E>(), h.slice::<E>(), written.map(|t| t.slice::<E>()), w.slice(), steps.slice(), p.slice(),
             c.slice(), Shared::new(dh.slice_mut::<E>()))
        };
        let (n, d, k) = (n as usize, d as usize, rows as usize);
        parallel::over_rows(h.rows(), n * d, |rows, of_rows| {
            // SAFETY: each range of positions writes its own numbers.
            let dh = unsafe { dh.slice(of_rows.clone()) };
            let written = written.map(|all| &all[of_rows.clone()]);
            let (dx, p) = (&dx[numbers(&rows, d)], &p[numbers(&rows, n)]);
            let steps = &steps[numbers(&rows, k)];
            stream_gradients::<E>(dx, &h_all[of_rows], written, w, steps, p, &c[rows], d, dh);
        });
        Ok(())
    })
}
