//! Adds up the rows of a matrix, for example for the gradient of a bias.

use crate::cpu::pack::{Of, Pack, Store, PAIR_LANES};
use crate::cpu::{memory, parallel, Accumulator, Element};
use crate::error::Result;
use crate::kernel::view::{accumulation, by_dtype, View};
use crate::multiversion;
use std::ops::Range;
use tch::Tensor;

/// The number of rows that form a partial sum, which is then added to the total. With partial sums the rounding error
/// grows more slowly than in one long sum.
const TOGETHER: usize = 64;

/// Adds the rows of x (rows, n) to `sum` (n). Uses a CPU kernel if `sum` has the type in which x is accumulated (f64
/// for f64, else f32), otherwise torch. No gradient is recorded.
pub fn add_rows(sum: &Tensor, x: &Tensor) -> Result<()> {
    let computing = accumulation(x.kind());
    match (View::of(x), View::of(&sum.f_unsqueeze(0)?)) {
        (Some(x), Some(to)) if sum.kind() == computing && to.cols == x.cols => {
            by_dtype!(x, E => add_typed::<E>(&x, &to))
        }
        _ => {
            // `f_add_` takes a mutable handle; the shallow clone is another handle of the same memory.
            let _ = sum.shallow_clone().f_add_(&x.f_sum_dim_intlist([0i64].as_slice(), false, sum.kind())?)?;
            Ok(())
        }
    }
}

/// Computes [`add_rows`] on the CPU for the storage type E of x; `to` is the sum.
fn add_typed<E: Element>(x: &View, to: &View) -> Result<()> {
    let (mut sums, stride) = (memory::filled(E::Acc::ZERO, x.cols()), x.stride as usize);
    // SAFETY: the views are of tensors on the CPU that outlive this call. x is of E, and the sum of its computing
    // type. The caller may write the sum's memory, which x does not share.
    let (numbers, to) = unsafe { (x.slice::<E>(), to.slice_mut::<E::Acc>()) };
    parallel::sum_over_rows(x.rows(), x.cols(), [&mut sums], |rows, _, [sums]| {
        add::<E>(numbers, rows, stride, sums);
    });
    for (to, sum) in to.iter_mut().zip(sums) {
        *to += sum;
    }
    Ok(())
}

multiversion! {
    /// Adds the rows `rows` of `x` to `sums`, one sum per column. Rows are `stride` numbers apart.
    fn add[isa S][E: Element](x: &[E], rows: Range<usize>, stride: usize, sums: &mut [E::Acc]) {
        for first in rows.clone().step_by(TOGETHER) {
            let together = first..rows.end.min(first + TOGETHER);
            // A block is two packs of columns, whose sums stay in registers. The columns after the last block, `rest`,
            // are added one by one.
            let (blocks, rest) = sums.as_chunks_mut::<PAIR_LANES>();
            let whole = blocks.len() * PAIR_LANES;
            for (b, sum) in blocks.iter_mut().enumerate() {
                let mut total = [Of::<E::Acc, S>::zero(); 2];
                for row in together.clone() {
                    let from = &x[row * stride + b * PAIR_LANES..];
                    let numbers = from.first_chunk::<PAIR_LANES>().expect("a row has all its blocks");
                    let [low, high] = Of::<E::Acc, S>::pair(numbers);
                    total = [total[0].add(low), total[1].add(high)];
                }
                let before = Of::<E::Acc, S>::pair(sum);
                Of::<E::Acc, S>::store([before[0].add(total[0]), before[1].add(total[1])], sum, Store::PLAIN);
            }
            for (c, sum) in rest.iter_mut().enumerate() {
                let mut total = E::Acc::ZERO;
                for row in together.clone() {
                    total += x[row * stride + whole + c].load();
                }
                *sum += total;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{force, Level};
    use tch::{Device, Kind};

    #[test]
    fn a_sum_of_another_type_is_torch_s() {
        let x = Tensor::ones([3, 40], (Kind::BFloat16, Device::Cpu));
        // The kernel would write four bytes per number, but bf16 has two: it would overwrite the second row.
        let sums = Tensor::zeros([2, 40], (Kind::BFloat16, Device::Cpu));
        add_rows(&sums.get(0), &x).unwrap();
        assert_eq!(Vec::<f32>::try_from(sums.to_kind(Kind::Float).view(-1)).unwrap(), [[3.0; 40], [0.0; 40]].concat());
    }

    #[test]
    fn rows_are_added_to_the_sum() {
        tch::manual_seed(4);
        for level in Level::ALL {
            force(Some(level));
            for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
                for (rows, cols) in [(0, 3), (1, 1), (63, 32), (64, 33), (300, 97), (3000, 64)] {
                    // The matrix consists of columns of a wider one, as gradients of q, k and v do.
                    let x =
                        Tensor::randn([rows, cols + 5], (Kind::Double, Device::Cpu)).to_kind(kind).narrow(1, 2, cols);
                    let sum = Tensor::randn([cols], (Kind::Double, Device::Cpu)).to_kind(accumulation(kind));
                    let exact = |t: &Tensor| t.to_kind(Kind::Double);
                    let wanted = exact(&sum) + exact(&x).sum_dim_intlist([0i64].as_slice(), false, Kind::Double);
                    add_rows(&sum, &x).unwrap();
                    let largest = wanted.abs().max().double_value(&[]).max(1.0);
                    let error = (exact(&sum) - wanted).abs().max().double_value(&[]);
                    let unit = if kind == Kind::Double { f64::EPSILON } else { f32::EPSILON as f64 };
                    // Sums of 64 rows, and the sums of these, are off by a few units in the last place of the largest
                    // result.
                    assert!(error < 4.0 * unit * largest, "{level:?} {kind:?} {rows} {cols}: {error}");
                }
            }
        }
        force(None);
    }
}
