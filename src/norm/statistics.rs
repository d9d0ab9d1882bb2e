//! The composed form of norms with column statistics. It is used on devices without kernels, under torch.func, and
//! for second derivatives. No tensor is read on the host: masks replace branches on tensors' values.

use super::composed::{accumulate, affine};
use super::operators::ColumnNormOpSpec;
use crate::error::Result;
use crate::kernel::columns::{ColumnOptions, Stats};
use tch::{no_grad, Kind, Tensor};

/// The tensors of a norm's state, as passed to an operator.
#[derive(Debug, Default)]
pub struct StateTensors {
    /// The norm's two buffers, which [`ColumnNormOpSpec::state`] names.
    pub first: Option<Tensor>,
    pub second: Option<Tensor>,
    /// The number of updates so far.
    pub iters: Option<Tensor>,
    /// The number of batches whose statistics were not finite.
    pub refused: Option<Tensor>,
}

/// The statistics measured on a batch; see [`BatchStatistics`](crate::kernel::columns::BatchStatistics).
pub struct BatchTensors {
    /// The number of rows that are not padding, a scalar.
    pub count: Tensor,
    /// The number of rows, padding included, a scalar.
    pub rows: Tensor,
    /// The mean of the rows that are not padding; `None` if the norm does not centre.
    mean: Option<Tensor>,
    /// The mean of (x − mean)², or of x² if the norm does not centre.
    pub square: Tensor,
    /// The mean of x² over all rows, padding included; `None` if it is not needed or equals `square`.
    pub square_of_all: Option<Tensor>,
}

/// The statistics from which x̂ is computed, and the numbers that the backward pass needs; see [`Stats`].
pub struct AppliedStatistics {
    /// The mean that is subtracted; `None` if the norm does not centre.
    pub shift: Option<Tensor>,
    /// The factor of x − shift.
    pub scale: Tensor,
    /// The factor that dx uses in place of `scale`.
    pub slope: Tensor,
    /// The mean of x̂².
    pub gamma: Tensor,
    /// A bool scalar: true if the statistics are the batch's own, so that they have a gradient.
    pub exact: Tensor,
    /// The factor 1/rows of the means in the backward pass, a scalar; 0 if the pass needs no means.
    pub share: Tensor,
    /// The σ² or ψ² from which `scale` was computed.
    pub square: Tensor,
}

/// Rows (…, d), with a mask that marks padding rows.
struct MaskedRows {
    x: Tensor,
    /// A mask that is true at padding, (…, 1).
    pad: Option<Tensor>,
    /// All dimensions except the last.
    dims: Vec<i64>,
}

impl MaskedRows {
    /// Casts x to the type in which statistics accumulate, and turns a single row (d,) into (1, d). `pad` is true at
    /// padding; it has the shape of x without the last dimension.
    fn new(x: &Tensor, pad: Option<&Tensor>) -> Result<Self> {
        let x = accumulate(x)?;
        let x = if x.dim() == 1 { x.f_unsqueeze(0)? } else { x };
        let dims = (0..x.dim() as i64 - 1).collect();
        Ok(MaskedRows { x, pad: pad.map(|pad| pad.f_unsqueeze(-1)).transpose()?, dims })
    }

    /// Returns t with the padding rows set to zero.
    fn real(&self, t: &Tensor) -> Result<Tensor> {
        match &self.pad {
            Some(pad) => Ok(t.f_masked_fill(pad, 0.0)?),
            None => Ok(t.shallow_clone()),
        }
    }

    /// Returns the sum of t over all rows, (d,).
    fn sum(&self, t: &Tensor) -> Result<Tensor> {
        Ok(t.f_sum_dim_intlist(self.dims.as_slice(), false, None)?)
    }

    /// Returns the number of rows, padding included.
    fn rows(&self) -> f64 {
        self.dims.iter().map(|d| self.x.size()[*d as usize] as f64).product()
    }

    /// Returns the number of real rows as a scalar tensor.
    fn count(&self) -> Result<Tensor> {
        match &self.pad {
            Some(pad) => Ok(pad.f_logical_not()?.f_sum(self.x.kind())?),
            None => Ok(Tensor::f_full([0i64; 0].as_slice(), self.rows(), (self.x.kind(), self.x.device()))?),
        }
    }
}

impl BatchTensors {
    /// Measures the batch. `centred` is true if the norm subtracts the mean. If `with_padding` is true, also measures
    /// the mean square over all rows.
    fn of(rows: &MaskedRows, centred: bool, with_padding: bool) -> Result<Self> {
        let count = rows.count()?;
        let divisor = count.f_clamp_min(1.0)?;
        let real = rows.real(&rows.x)?;
        let mean = match centred {
            true => Some(rows.sum(&real)?.f_div(&divisor)?),
            false => None,
        };
        let from_mean = match &mean {
            Some(mean) => rows.real(&real.f_sub(mean)?)?,
            None => real,
        };
        let square = rows.sum(&from_mean.f_square()?)?.f_div(&divisor)?;
        let square_of_all = match with_padding && rows.pad.is_some() {
            true => Some(rows.sum(&rows.x.f_square()?)?.f_div_scalar(rows.rows().max(1.0))?),
            false => None,
        };
        let all = count.f_full_like(rows.rows())?;
        Ok(BatchTensors { count, rows: all, mean, square, square_of_all })
    }

    /// Merges the statistics of all ranks. Each rank sends its count, its mean, and its mean square about its own mean,
    /// because the difference mean x² − mean² would lose digits.
    fn over_ranks(self, options: &ColumnOptions) -> Result<Self> {
        let Some(ranks) = options.ranks else { return Ok(self) };
        let flat = |t: &Tensor| t.f_view(-1);
        let of_all = self.square_of_all.as_ref().unwrap_or(&self.square);
        let own =
            [flat(&self.count)?, flat(&self.rows)?, self.mean()?, self.square.shallow_clone(), of_all.shallow_clone()];
        // Each rank's row: count, rows, d means, d squares about its means, d squares over all rows: (ranks, 2 + 3d).
        let gathered = ranks.gather(&Tensor::f_cat(&own, 0)?)?;
        let d = self.square.size()[0];
        // Returns `n` columns of `gathered`, beginning at column `from`.
        let columns = |from: i64, n: i64| gathered.f_narrow(1, from, n);
        let weighted_sum =
            |shares: &Tensor, t: &Tensor| shares.f_mul(t)?.f_sum_dim_intlist([0i64].as_slice(), false, None);
        // These have one number per rank; their sums are over all ranks.
        let (counts, rows) = (columns(0, 1)?, columns(1, 1)?);
        let (count, all_rows) = (counts.f_sum(counts.kind())?, rows.f_sum(rows.kind())?);
        let shares = counts.f_div(&count.f_clamp_min(1.0)?)?;
        let means = columns(2, d)?;
        let mean = weighted_sum(&shares, &means)?;
        // About the common mean, a rank's mean square is larger by the square of the distance between the means.
        let squares_about_mean = columns(2 + d, d)?.f_add(&means.f_sub(&mean)?.f_square()?)?;
        let square = weighted_sum(&shares, &squares_about_mean)?;
        let square_of_all = match options.release {
            true => Some(weighted_sum(&rows.f_div(&all_rows.f_clamp_min(1.0)?)?, &columns(2 + 2 * d, d)?)?),
            false => None,
        };
        Ok(BatchTensors { count, rows: all_rows, mean: self.mean.map(|_| mean), square, square_of_all })
    }

    /// Returns the batch's mean; zero if the norm does not centre.
    pub fn mean(&self) -> Result<Tensor> {
        match &self.mean {
            Some(mean) => Ok(mean.shallow_clone()),
            None => Ok(self.square.f_zeros_like()?),
        }
    }

    /// Returns the batch's own statistics in the form in which they are applied.
    pub fn used(&self, options: &ColumnOptions) -> Result<AppliedStatistics> {
        let has_rows = self.count.f_gt(0.0)?;
        // 1/count, or 0 without rows: `a.f_where_self(mask, b)` is a where the mask is true, and b elsewhere.
        let share = self.count.f_reciprocal()?.f_where_self(&has_rows, &self.count.f_zeros_like()?)?;
        let used = AppliedStatistics::of(self.mean.as_ref(), &self.square, &self.count, options)?;
        Ok(AppliedStatistics { exact: has_rows.f_ones_like()?, share, ..used })
    }
}

impl AppliedStatistics {
    /// Returns statistics with this shift and with a scale computed from `square`, in the form in which they are
    /// applied. The gradient treats them as constants, like running statistics.
    fn of(shift: Option<&Tensor>, square: &Tensor, count: &Tensor, options: &ColumnOptions) -> Result<Self> {
        let scale = square.f_add_scalar(options.eps)?.f_rsqrt()?;
        Ok(AppliedStatistics {
            shift: shift.map(Tensor::shallow_clone),
            slope: scale.shallow_clone(),
            gamma: scale.f_zeros_like()?,
            scale,
            exact: count.f_zeros_like()?.f_to_kind(Kind::Bool)?,
            share: count.f_zeros_like()?,
            square: square.shallow_clone(),
        })
    }

    /// Returns the running statistics in the form in which they are applied.
    pub fn running(
        mean: Option<&Tensor>,
        square: &Tensor,
        batch: &BatchTensors,
        options: &ColumnOptions,
    ) -> Result<Self> {
        let flat = |t: &Tensor| t.f_flatten(0, -1)?.f_to_kind(batch.square.kind());
        let mean = mean.map(flat).transpose()?;
        AppliedStatistics::of(mean.as_ref(), &flat(square)?, &batch.count, options)
    }

    /// Returns the statistics as one tensor, with a row for each number that the backward pass reads.
    fn stats(&self) -> Result<Tensor> {
        let row = |t: &Tensor| t.f_to_kind(self.scale.kind())?.f_expand_as(&self.scale);
        let shift = match &self.shift {
            Some(shift) => shift.shallow_clone(),
            None => self.scale.f_zeros_like()?,
        };
        let rows = [&shift, &self.scale, &self.slope, &self.gamma].map(Tensor::shallow_clone);
        let constants = [row(&self.exact)?, row(&self.share)?];
        Ok(Tensor::f_stack(&rows.into_iter().chain(constants).collect::<Vec<_>>(), 0)?.f_detach()?)
    }
}

impl StateTensors {
    /// Returns a bool scalar: true if the batch has rows and all numbers of `values` are finite, so that they may enter
    /// the state. Counts a batch with non-finite numbers as refused.
    pub fn accepts(&self, batch: &BatchTensors, values: &[&Tensor]) -> Result<Tensor> {
        no_grad(|| {
            // A number must be finite in the type of the state's buffers.
            let kind = self.first.as_ref().map_or(Kind::Double, Tensor::kind);
            let has_rows = batch.count.f_gt(0.0)?;
            let mut finite = has_rows.f_ones_like()?;
            for v in values {
                finite = finite.f_logical_and(&v.f_to_kind(kind)?.f_isfinite()?.f_all()?)?;
            }
            self.refuse(&has_rows.f_logical_and(&finite.f_logical_not()?)?)?;
            Ok(has_rows.f_logical_and(&finite)?)
        })
    }

    /// Adds 1 to the number of refused batches if `now` is true.
    fn refuse(&self, now: &Tensor) -> Result<()> {
        if let Some(refused) = &self.refused {
            let _ = refused.shallow_clone().f_add_(&now.f_to_kind(refused.kind())?)?;
        }
        Ok(())
    }

    /// Sets buffer ← α·buffer + (1 − α)·now, if `accepted` is true.
    pub fn move_to(&self, buffer: &Tensor, now: &Tensor, alpha: f64, accepted: &Tensor) -> Result<()> {
        let now = now.f_detach()?.f_to_kind(buffer.kind())?.f_view_as(buffer)?;
        let moved = buffer.f_mul_scalar(alpha)?.f_add(&now.f_mul_scalar(1.0 - alpha)?)?;
        self.replace(buffer, &moved, accepted)
    }

    /// Sets buffer ← now, if `accepted` is true.
    pub fn replace(&self, buffer: &Tensor, now: &Tensor, accepted: &Tensor) -> Result<()> {
        no_grad(|| {
            let now = now.f_detach()?.f_to_kind(buffer.kind())?.f_view_as(buffer)?;
            Ok(buffer.shallow_clone().f_copy_(&now.f_where_self(accepted, buffer)?)?)
        })
    }
}

/// Returns y and the statistics that the backward pass needs. Autograd's gradient of y is right if the norm's gradient
/// is that of its formula. `pad` is true at padding rows. If `given` has the statistics of an earlier forward pass,
/// they are applied unchanged.
pub fn forward(
    kernels: &ColumnNormOpSpec,
    x: &Tensor,
    (weight, bias): (Option<&Tensor>, Option<&Tensor>),
    pad: Option<&Tensor>,
    state: &StateTensors,
    given: Option<&Tensor>,
    options: &ColumnOptions,
) -> Result<(Tensor, Tensor)> {
    let rows = MaskedRows::new(x, pad)?;
    let (shift, scale, stats) = match given {
        // Rows 0 and 1 are the shift and the scale.
        Some(stats) => (Some(stats.f_get(0)?), stats.f_get(1)?, stats.f_detach_copy()?),
        None => {
            // Running statistics need no numbers from the other ranks.
            let from_batch = options.train || state.first.is_none();
            let measured = BatchTensors::of(&rows, kernels.kernel.centred, options.release)?;
            let measured = if from_batch { measured.over_ranks(options)? } else { measured };
            let used = (kernels.composed)(&measured, state, options)?;
            let stats = used.stats()?;
            (used.shift, used.scale, stats)
        }
    };
    // A NaN in the padding would reach the gradients of real rows. So padding is set to 0 first. The authors' code
    // (release) normalises the padding like real rows.
    let x_real = if options.release { rows.x.shallow_clone() } else { rows.real(&rows.x)? };
    let mut y = affine(hat(&x_real, shift.as_ref(), &scale)?, weight, bias)?;
    if !options.release {
        y = rows.real(&y)?;
    }
    Ok((y.f_view_as(x)?.f_to_kind(x.kind())?, stats))
}

/// Returns x̂ = (x − shift)·scale.
fn hat(x: &Tensor, shift: Option<&Tensor>, scale: &Tensor) -> Result<Tensor> {
    let centred = match shift {
        Some(shift) => x.f_sub(shift)?,
        None => x.shallow_clone(),
    };
    Ok(centred.f_mul(scale)?)
}

/// Returns (dx, dγ, dβ), and updates PowerNorm's ν (power_norm.rs). `stats` are from `forward`. dγ and dβ have the type
/// in which statistics accumulate. With g = dy, dx = p⊙g − q⊙x̂ − p⊙mean(g); the last term only exists if the norm
/// centres. Here p = γ⊙slope, and q = slope⊙Λ with Λ = mean(γ⊙g⊙x̂). If PowerNorm applied running statistics, q is
/// slope⊙ν.
pub fn backward(
    kernels: &ColumnNormOpSpec,
    dy: &Tensor,
    x: &Tensor,
    weight: Option<&Tensor>,
    pad: Option<&Tensor>,
    stats: &Tensor,
    state: &StateTensors,
    options: &ColumnOptions,
) -> Result<(Tensor, Tensor, Tensor)> {
    let rows = MaskedRows::new(x, if options.release { None } else { pad })?;
    let g = rows.real(&dy.f_to_kind(rows.x.kind())?.f_view_as(&rows.x)?)?;
    // These are the rows of `stats`, in the order of `AppliedStatistics::stats`.
    let [shift, scale, slope, gamma, exact, share] = [0, 1, 2, 3, 4, 5].map(|i| stats.get(i));
    let x_hat = rows.real(&hat(&rows.x, Some(&shift), &scale)?)?;
    let (sum_g, sum_gx) = (rows.sum(&g)?, rows.sum(&g.f_mul(&x_hat)?)?);
    let weight = match weight {
        Some(weight) => weight.f_to_kind(g.kind())?,
        None => scale.f_ones_like()?,
    };
    // The coefficients p and q of the formula above.
    let p = weight.f_mul(&slope)?;
    // The gradients of parameters are sums over this rank's rows; dx uses the sums over all ranks.
    let (sum_g_over_ranks, sum_gx_over_ranks) = match options.ranks {
        None => (sum_g.shallow_clone(), sum_gx.shallow_clone()),
        Some(ranks) => {
            let both = ranks.sum(&Tensor::f_stack(&[&sum_g, &sum_gx], 0)?)?;
            (both.f_get(0)?, both.f_get(1)?)
        }
    };
    let lambda = weight.f_mul(&sum_gx_over_ranks)?.f_mul(&share)?;
    // If the applied statistics are not the batch's own, dx does not depend on the batch's sums. The sums may be
    // infinite, so they are replaced by zeros: `a.f_where_self(mask, b)` is a where the mask is true, and b elsewhere.
    let (is_exact, zeros) = (exact.f_eq(1.0)?, slope.f_zeros_like()?);
    let mut q = slope.f_mul(&lambda)?.f_where_self(&is_exact, &zeros)?;
    if let (true, true, Some(ema)) = (kernels.kernel.approximate, options.train, &state.second) {
        // PowerNorm in training. Its buffer has ν/(1 − α_b) and becomes the old buffer − ν⊙Γ + Λ.
        let old = ema.f_flatten(0, -1)?.f_to_kind(g.kind())?;
        let nu = old.f_mul_scalar(1.0 - options.alpha_bwd)?;
        q = q.f_where_self(&is_exact, &slope.f_mul(&nu)?)?;
        let now = old.f_add(&lambda)?.f_sub(&nu.f_mul(&gamma)?)?;
        let has_rows = share.f_gt(0.0)?.f_any()?;
        let finite = now.f_to_kind(ema.kind())?.f_isfinite()?.f_all()?;
        state.refuse(&has_rows.f_logical_and(&finite.f_logical_not()?)?)?;
        state.replace(ema, &now, &has_rows.f_logical_and(&finite)?)?;
    }
    let mut dx = p.f_mul(&g)?.f_sub(&q.f_mul(&x_hat)?)?;
    if kernels.kernel.centred {
        dx = dx.f_sub(&p.f_mul(&sum_g_over_ranks)?.f_mul(&share)?.f_where_self(&is_exact, &zeros)?)?;
    }
    debug_assert_eq!(stats.size()[0] as usize, Stats::ROWS);
    // dγ is the sum of g⊙x̂ over this rank's rows, dβ the sum of g.
    Ok((rows.real(&dx)?.f_view_as(x)?.f_to_kind(x.kind())?, sum_gx, sum_g))
}
