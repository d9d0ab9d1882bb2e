//! The read of hyper-connections on tensors of the CPU; threads share the positions.

use super::{backward as backward_positions, forward as forward_positions};
use super::{Divisor, JointGiven, JointResults, JointSums};
use crate::cpu::parallel::{self, numbers, Shared};
use crate::cpu::{Accumulator, Element};
use crate::error::Result;
use crate::kernel::view::{accumulation, by_dtype, View};
use tch::{Kind, Tensor};

/// The sizes of a read.
#[derive(Clone, Copy, Debug)]
pub struct ReadShape {
    pub positions: i64,
    /// The number of streams.
    pub n: i64,
    /// The number of numbers in a stream at a position.
    pub d: i64,
    /// The number of rows of W.
    pub rows: i64,
}

/// Reads the streams `h` (positions, n, d), and writes the fields of [`JointResults`] to `to`, in their order: x, m,
/// σ(s m₀ + b), r and c/⟨dm, m⟩. `parameters` are W and b; `scale` is s, `eps` the ε of the gates, and `by` the size
/// that divides W vec(H). All tensors but the streams and x are of the type in which sums over the streams accumulate.
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
    // Returns the view of a tensor that has a row of `cols` numbers for each position.
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
        let computing = <<E as Element>::Acc as Accumulator>::from_f64;
        let (n, d, k) = (n as usize, d as usize, rows as usize);
        parallel::over_rows(h.rows(), n * d, |rows, h_range| {
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
            forward_positions::<E>(&h_all[h_range], w, computing(scale), b, computing(eps), by, to);
        });
        Ok(())
    })
}

/// The tensors from which the gradients of a read are computed, as in [`JointGiven`].
pub struct JointSaved<'a> {
    pub dx: &'a Tensor,
    pub h: &'a Tensor,
    /// The gradient that the sublayer's write gives to the streams; `None` without a write.
    pub written: Option<&'a Tensor>,
    /// The gradient of m where it is used for other things than the gates; `None` if it is not.
    pub dm: Option<&'a Tensor>,
    /// The matrix W.
    pub weight: &'a Tensor,
    /// The results of the forward pass after x: m, σ(s m₀ + b), r and c/⟨dm, m⟩.
    pub forward: [&'a Tensor; 4],
}

/// Writes the streams' gradient to `dh`, and the gradients of W, s and b, which are sums over positions, to `sums`.
/// `scale` is s, and `eps` the ε of the gates.
pub fn backward(
    shape: ReadShape,
    saved: &JointSaved,
    [scale, eps]: [f64; 2],
    dh: &Tensor,
    sums: [&Tensor; 3],
) -> Result<()> {
    let ReadShape { positions, n, d, rows } = shape;
    let (stored, computed) = (saved.h.kind(), accumulation(saved.h.kind()));
    // Returns the view of a tensor that has a row of `cols` numbers for each position.
    let view = |t: &Tensor, kind: Kind, cols: i64| View::of_rows(t, kind, [positions, cols]);
    let (dx, h, dh) = (view(saved.dx, stored, d)?, view(saved.h, stored, n * d)?, view(dh, stored, n * d)?);
    let written = saved.written.map(|t| view(t, stored, n * d)).transpose()?;
    let dm = saved.dm.map(|t| view(t, computed, rows)).transpose()?;
    let w = View::of_rows(saved.weight, computed, [rows, n * d])?;
    let [mixes, sigmoids, scales, slopes] = saved.forward;
    let (mixes, sigmoids) = (view(mixes, computed, rows)?, view(sigmoids, computed, n)?);
    let (scales, slopes) = (view(scales, computed, 1)?, view(slopes, computed, 1)?);
    let [dw, dscale, dbias] = sums;
    let dw = View::of_rows(dw, computed, [rows, n * d])?;
    let (dscale, dbias) = (View::of_rows(dscale, computed, [1, 1])?, View::of_rows(dbias, computed, [1, n])?);
    by_dtype!(h, E => {
        // SAFETY: `of_rows` has checked types, sizes and layout; the tensors outlive this function, and dh and the sums
        // are the caller's own.
        let (all, w, dh, dw, dscale, dbias) = unsafe {
            let all = JointGiven::<E> {
                dx: dx.slice(),
                h: h.slice(),
                written: written.map(|t| t.slice()),
                dm: dm.map(|t| t.slice()),
                mixes: mixes.slice(),
                sigmoids: sigmoids.slice(),
                scales: scales.slice(),
                slopes: slopes.slice(),
            };
            (all, w.slice(), Shared::new(dh.slice_mut::<E>()), dw.slice_mut(), dscale.slice_mut(), dbias.slice_mut())
        };
        let computing = <<E as Element>::Acc as Accumulator>::from_f64;
        let (n, d, k) = (n as usize, d as usize, rows as usize);
        parallel::sum_over_rows(h.rows(), n * d, [dw, dscale, dbias], |rows, h_range, [weight, scale_sum, bias]| {
            // SAFETY: each range of positions writes its own numbers.
            let dh = unsafe { dh.slice(h_range.clone()) };
            let given = JointGiven {
                dx: &all.dx[numbers(&rows, d)],
                h: &all.h[h_range.clone()],
                written: all.written.map(|t| &t[h_range.clone()]),
                dm: all.dm.map(|t| &t[numbers(&rows, k)]),
                mixes: &all.mixes[numbers(&rows, k)],
                sigmoids: &all.sigmoids[numbers(&rows, n)],
                scales: &all.scales[rows.clone()],
                slopes: &all.slopes[rows],
            };
            let sums = JointSums { weight, scale: scale_sum, bias };
            backward_positions::<E>(given, w, computing(scale), computing(eps), dh, sums);
        });
        Ok(())
    })
}
