//! The passes over memory that all norms with column statistics share.

use crate::cpu::convert::{narrow, scratch, target, wide, widen};
use crate::cpu::memory::Aligned;
use crate::cpu::{Accumulator, Element};
use crate::multiversion;
use std::array::from_fn;

/// The number of rows summed in the computing type before their sum is added in f64.
pub const BLOCK_ROWS: usize = 64;
/// The number of rows in a group. A group is added in one step, so that a partial sum in memory is read and written
/// once for four rows.
const GROUP: usize = 4;

/// True if row `r` is padding, which has a byte other than 0 in the mask `pad`; an empty mask marks no row.
#[inline(always)]
fn is_pad(pad: &[u8], r: usize) -> bool {
    pad.get(r).is_some_and(|v| *v != 0)
}

/// Calls `step(indices, number, ends_block)` for each group of up to four rows that `pad` does not mark. `ends_block`
/// is true if a block of [`BLOCK_ROWS`] rows ends with the group. The last call ends a block, and may have no rows.
#[inline(always)]
fn in_blocks(rows: usize, pad: &[u8], mut step: impl FnMut([usize; GROUP], usize, bool)) {
    // `group` holds the indices of the group's real rows so far, and `filled` their number.
    let (mut group, mut filled, mut groups_in_block) = ([0; GROUP], 0, 0);
    for r in 0..rows {
        if is_pad(pad, r) {
            continue;
        }
        group[filled] = r;
        filled += 1;
        if filled == GROUP {
            groups_in_block += 1;
            let ends_block = groups_in_block == BLOCK_ROWS / GROUP;
            step(group, filled, ends_block);
            filled = 0;
            if ends_block {
                groups_in_block = 0;
            }
        }
    }
    step(group, filled, true);
}

/// Adds the partial sums to the totals, which are in f64, and sets the partial sums to zero.
#[inline(always)]
fn flush<A: Accumulator>(part: &mut [A], total: &mut [f64]) {
    for (part, total) in part.iter_mut().zip(total) {
        *total += part.to_f64();
        *part = A::ZERO;
    }
}

multiversion! {
    /// Adds Σd to `sum` and Σd² to `squares`, both per column, with d = x − guess. `x` has rows of `cols` numbers, and
    /// rows that `pad` marks are left out. If `guess` is empty, d = x, and `sum` stays as it is.
    pub fn sums[E: Element](
        cols: usize, x: &[E], pad: &[u8], guess: &[E::Acc], sum: &mut [f64], squares: &mut [f64],
    ) {
        if cols == 0 {
            return;
        }
        let centred = !guess.is_empty();
        let zero = Aligned::new(cols);
        // This row fills up a group that has too few rows. Its d is 0, so it adds nothing to the sums.
        let filler: &[E::Acc] = if centred { guess } else { &zero };
        // For 16-bit types these hold the group's rows in the computing type; otherwise they are empty.
        let mut widened = [(); GROUP].map(|()| scratch::<E>(cols));
        let (mut part, mut part_squares) = (Aligned::new(if centred { cols } else { 0 }), Aligned::new(cols));
        in_blocks(x.len() / cols, pad, |group, n, ends_block| {
            if n > 0 {
                for i in 0..n {
                    widen(&x[group[i] * cols..][..cols], &mut widened[i]);
                }
                let rows: [&[E::Acc]; GROUP] =
                    from_fn(|i| if i < n { wide(&x[group[i] * cols..][..cols], &widened[i]) } else { filler });
                match centred {
                    true => add_centred(rows, guess, &mut part, &mut part_squares),
                    false => add_squares(rows, &mut part_squares),
                }
            }
            if ends_block {
                flush(&mut part, sum);
                flush(&mut part_squares, squares);
            }
        });
    }
}

/// Adds Σd to `sum` and Σd² to `squares` with d = x − guess, over a group of rows.
#[inline(always)]
fn add_centred<A: Accumulator>(rows: [&[A]; GROUP], guess: &[A], sum: &mut [A], squares: &mut [A]) {
    // Slices of one known length let the compiler drop the checks of indices.
    let n = squares.len();
    let (rows, guess, sum) = (rows.map(|r| &r[..n]), &guess[..n], &mut sum[..n]);
    for c in 0..n {
        let d: [A; GROUP] = from_fn(|i| rows[i][c] - guess[c]);
        sum[c] += (d[0] + d[1]) + (d[2] + d[3]);
        squares[c] += (d[0] * d[0] + d[1] * d[1]) + (d[2] * d[2] + d[3] * d[3]);
    }
}

/// Adds Σx² over a group of rows to `squares`.
#[inline(always)]
fn add_squares<A: Accumulator>(rows: [&[A]; GROUP], squares: &mut [A]) {
    let n = squares.len();
    let rows = rows.map(|r| &r[..n]);
    for c in 0..n {
        let x: [A; GROUP] = from_fn(|i| rows[i][c]);
        squares[c] += (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]);
    }
}

multiversion! {
    /// Computes y = weight⊙x̂ + bias with x̂ = (x − shift)⊙scale for rows of `cols` numbers, and 0 in rows that `pad`
    /// marks.
    pub fn normalise[E: Element](
        cols: usize, x: &[E], pad: &[u8], shift: &[E::Acc], scale: &[E::Acc], weight: &[E::Acc], bias: &[E::Acc],
        y: &mut [E],
    ) {
        if cols == 0 {
            return;
        }
        // For f32 and f64 these are empty: `wide` and `target` return the rows themselves, and `narrow` does nothing.
        let (mut widened, mut out) = (scratch::<E>(cols), scratch::<E>(cols));
        for r in 0..x.len() / cols {
            let (x, y) = (&x[r * cols..][..cols], &mut y[r * cols..][..cols]);
            if is_pad(pad, r) {
                y.fill(E::default());
                continue;
            }
            widen(x, &mut widened);
            write(wide(x, &widened), shift, scale, weight, bias, target(y, &mut out));
            narrow(&out, y);
        }
    }
}

/// Computes y of one row, as [`normalise`] does, in the computing type.
#[inline(always)]
fn write<A: Accumulator>(x: &[A], shift: &[A], scale: &[A], weight: &[A], bias: &[A], y: &mut [A]) {
    let n = y.len();
    let (x, shift, scale, weight, bias) = (&x[..n], &shift[..n], &scale[..n], &weight[..n], &bias[..n]);
    for c in 0..n {
        y[c] = (x[c] - shift[c]) * scale[c] * weight[c] + bias[c];
    }
}

multiversion! {
    /// Adds Σdy to `sum` and Σdy⊙x̂ to `sum_x`, both per column, with x̂ = (x − shift)⊙scale. `dy` and `x` have rows of
    /// `cols` numbers, and rows that `pad` marks are left out.
    pub fn gradient_sums[E: Element](
        cols: usize, dy: &[E], x: &[E], pad: &[u8], shift: &[E::Acc], scale: &[E::Acc], sum: &mut [f64],
        sum_x: &mut [f64],
    ) {
        if cols == 0 {
            return;
        }
        let zero = Aligned::new(cols);
        let mut widened_dy = [(); GROUP].map(|()| scratch::<E>(cols));
        let mut widened_x = [(); GROUP].map(|()| scratch::<E>(cols));
        let (mut part, mut part_x) = (Aligned::new(cols), Aligned::new(cols));
        in_blocks(x.len() / cols, pad, |group, n, ends_block| {
            if n > 0 {
                for i in 0..n {
                    widen(&dy[group[i] * cols..][..cols], &mut widened_dy[i]);
                    widen(&x[group[i] * cols..][..cols], &mut widened_x[i]);
                }
                let dys: [&[E::Acc]; GROUP] =
                    from_fn(|i| if i < n { wide(&dy[group[i] * cols..][..cols], &widened_dy[i]) } else { &*zero });
                // In a group that has too few rows, dy = 0 in the missing ones, so that any finite x adds nothing.
                // Their x is `shift`, whose x̂ is 0.
                let xs: [&[E::Acc]; GROUP] =
                    from_fn(|i| if i < n { wide(&x[group[i] * cols..][..cols], &widened_x[i]) } else { shift });
                add_gradients(dys, xs, shift, scale, &mut part, &mut part_x);
            }
            if ends_block {
                flush(&mut part, sum);
                flush(&mut part_x, sum_x);
            }
        });
    }
}

/// Adds Σdy to `sum` and Σdy⊙x̂ to `sum_x` per column, over a group of rows, with x̂ = (x − shift)⊙scale.
#[inline(always)]
fn add_gradients<A: Accumulator>(
    dy: [&[A]; GROUP],
    x: [&[A]; GROUP],
    shift: &[A],
    scale: &[A],
    sum: &mut [A],
    sum_x: &mut [A],
) {
    let n = sum.len();
    let (dy, x) = (dy.map(|r| &r[..n]), x.map(|r| &r[..n]));
    let (shift, scale, sum_x) = (&shift[..n], &scale[..n], &mut sum_x[..n]);
    for c in 0..n {
        let dy: [A; GROUP] = from_fn(|i| dy[i][c]);
        let dy_hat: [A; GROUP] = from_fn(|i| dy[i] * ((x[i][c] - shift[c]) * scale[c]));
        sum[c] += (dy[0] + dy[1]) + (dy[2] + dy[3]);
        sum_x[c] += (dy_hat[0] + dy_hat[1]) + (dy_hat[2] + dy_hat[3]);
    }
}

/// The coefficients of dx = p⊙dy − q⊙x̂ − r, one of each per column.
#[derive(Clone, Copy)]
pub struct GradientCoefficients<'a, A> {
    pub p: &'a [A],
    pub q: &'a [A],
    pub r: &'a [A],
}

multiversion! {
    /// Computes dx = p⊙dy − q⊙x̂ − r with x̂ = (x − shift)⊙scale and the coefficients `slopes`. Rows have `cols`
    /// numbers; dx is 0 in rows that `pad` marks.
    pub fn gradient[E: Element](
        cols: usize, dy: &[E], x: &[E], pad: &[u8], shift: &[E::Acc], scale: &[E::Acc],
        slopes: GradientCoefficients<E::Acc>, dx: &mut [E],
    ) {
        if cols == 0 {
            return;
        }
        // For f32 and f64 these are empty: `wide` and `target` return the rows themselves, and `narrow` does nothing.
        let [mut widened_dy, mut widened_x, mut out] = [(); 3].map(|()| scratch::<E>(cols));
        for r in 0..x.len() / cols {
            let (dy, x, dx) = (&dy[r * cols..][..cols], &x[r * cols..][..cols], &mut dx[r * cols..][..cols]);
            if is_pad(pad, r) {
                dx.fill(E::default());
                continue;
            }
            widen(dy, &mut widened_dy);
            widen(x, &mut widened_x);
            slope(wide(dy, &widened_dy), wide(x, &widened_x), shift, scale, slopes, target(dx, &mut out));
            narrow(&out, dx);
        }
    }
}

/// Computes dx of one row, as [`gradient`] does, in the computing type.
#[inline(always)]
fn slope<A: Accumulator>(dy: &[A], x: &[A], shift: &[A], scale: &[A], slopes: GradientCoefficients<A>, dx: &mut [A]) {
    let n = dx.len();
    let (dy, x, shift, scale) = (&dy[..n], &x[..n], &shift[..n], &scale[..n]);
    let (p, q, r) = (&slopes.p[..n], &slopes.q[..n], &slopes.r[..n]);
    for c in 0..n {
        dx[c] = p[c] * dy[c] - q[c] * ((x[c] - shift[c]) * scale[c]) - r[c];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};

    /// Returns n numbers in [−1, 1) that depend on `step`, some of them exactly representable in bf16.
    fn numbers(n: usize, step: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * step + i * i * 7) % 509) as f32 / 254.5 - 1.0).collect()
    }

    #[test]
    fn sums_skip_padding_at_every_level_with_the_same_bits() {
        let (rows, cols) = (203, 37);
        let x = numbers(rows * cols, 31);
        let pad: Vec<u8> = (0..rows).map(|r| u8::from(r % 5 == 2)).collect();
        let guess: Vec<f32> = x[..cols].to_vec();
        // These are the sums and the sums of squares that each instruction set computes.
        let mut seen: Vec<(Vec<f64>, Vec<f64>)> = vec![];
        for level in Level::ALL {
            force(Some(level));
            let (mut sum, mut squares) = (vec![0.0; cols], vec![0.0; cols]);
            sums::<f32>(cols, &x, &pad, &guess, &mut sum, &mut squares);
            seen.push((sum, squares));
        }
        force(None);
        for c in 0..cols {
            let d = |r: usize| x[r * cols + c] as f64 - guess[c] as f64;
            let real = || (0..rows).filter(|r| r % 5 != 2);
            let (sum, squares): (f64, f64) = (real().map(d).sum(), real().map(|r| d(r) * d(r)).sum());
            assert!((seen[0].0[c] - sum).abs() < 1e-4 && (seen[0].1[c] - squares).abs() < 1e-4);
        }
        assert!(seen.iter().all(|s| *s == seen[0]));
    }

    #[test]
    fn thousands_of_rows_lose_nothing() {
        let x = vec![0.1f32; 100_000];
        let mut squares = vec![0.0];
        sums::<f32>(1, &x, &[], &[], &mut [], &mut squares);
        let exact = 100_000.0 * 0.1f32 as f64 * 0.1f32 as f64;
        assert!((squares[0] / exact - 1.0).abs() < 3e-7, "{squares:?}");
    }
}
