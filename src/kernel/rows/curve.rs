//! Norms that are curves: y = w⊙f(z) + b with z = scale·x + shift, elementwise.
//!
//! With g = w⊙dy and u = g⊙f′(z):
//!
//! > dx = scale·u,  dscale = Σ u⊙x,  dshift = Σ u,  dw = Σ dy⊙f(z),  db = Σ dy   (sums over rows)
//!
//! `scale` and `shift` are single numbers, so their gradients are sums over all elements: first over each row, in
//! lanes, then over the rows. A curve is two functions on a buffer of z, called through [`Curve`]. Only these two are
//! compiled for each curve.

use super::blocks::{columns, split, split_ref, start, write_columns, Blocks, BlocksMut, Group, PARTS};
use super::passes::{each_row, fetch, normalise, rows};
use super::{CurveNorm, Measured, GROUP};
use crate::cpu::memory::Aligned;
use crate::cpu::pack::{pack, pack_mut, Isa, Of, Pack, Store, PAIR_LANES};
use crate::cpu::{Accumulator, Element};
use crate::{each_pack, multiversion};

/// The number of learned scalars of a curve: a scale and a shift.
pub const NUMBERS: usize = 2;

/// A [`CurveNorm`] as function pointers, for the kernels.
#[derive(Clone, Copy)]
pub struct Curve<A> {
    /// Replaces each z by f(z).
    values: fn(&mut [A]),
    /// Replaces each z by f(z), and writes f′(z) to the second slice.
    slopes: fn(&mut [A], &mut [A]),
}

impl<A: Accumulator> Curve<A> {
    /// Returns the functions of a curve.
    pub const fn of<N: CurveNorm>() -> Self {
        Curve { values: values::<A, N>, slopes: slopes::<A, N> }
    }
}

multiversion! {
    /// Replaces each z by f(z).
    fn values[isa S][A: Accumulator, N: CurveNorm](z: &mut [A]) {
        for z in z.iter_mut() {
            *z = N::at::<A, S>(*z).0;
        }
    }
}

multiversion! {
    /// Replaces each z by f(z), and writes f′(z) to `slopes`.
    fn slopes[isa S][A: Accumulator, N: CurveNorm](z: &mut [A], slopes: &mut [A]) {
        for (z, slope) in z.iter_mut().zip(slopes) {
            (*z, *slope) = N::at::<A, S>(*z);
        }
    }
}

/// Returns a curve's (scale, shift) from `given`, with 1 for a missing scale and −0 for a missing shift.
pub fn numbers<A: Accumulator>(given: [Option<A>; NUMBERS]) -> [A; NUMBERS] {
    // Adding −0 changes nothing, but adding 0 would turn −0 into 0.
    [given[0].unwrap_or(A::ONE), given[1].unwrap_or(-A::ZERO)]
}

multiversion! {
    /// Computes y = w⊙f(scale·x + shift) + b with `numbers` = (scale, shift), for rows of `cols` numbers. `weight` and
    /// `bias` are as in [`super::forward`].
    pub fn forward[isa S][E: Element](
        curve: &Curve<E::Acc>, cols: usize, x: &[E], numbers: [E::Acc; NUMBERS], weight: &[E::Acc], bias: &[E::Acc],
        y: &mut [E],
    ) {
        if cols == 0 {
            return;
        }
        let (weight, bias) = (columns(weight, cols, E::Acc::ONE), columns(bias, cols, E::Acc::ZERO));
        let (store, group) = (Store::of(y, cols), Group::new::<S>(x.len() / cols, cols));
        // Spare rows, to read and to write, fill up the last group.
        let (spare, mut spare_out) = (group.spare::<E>(), group.spare_out::<E>());
        let mut bend = Bend::new(curve, numbers, cols);
        for g in 0..group.count() {
            let (x, y) = (group.rows(g, x, &spare), group.rows_mut(g, y, &mut spare_out));
            bend.forward::<S, E, E>(x, group.range(g).len(), &weight, &bias, y, store);
        }
        store.finish();
    }
}

multiversion! {
    /// Computes the gradient of [`forward`] from `dy`: overwrites `dx`, and adds to the others. `dweight` is empty or
    /// as long as `weight`, `dbias` empty or one per column, and `dnumbers` empty or those of scale and shift.
    pub fn backward[isa S][E: Element](
        curve: &Curve<E::Acc>, cols: usize, dy: &[E], x: &[E], numbers: [E::Acc; NUMBERS], weight: &[E::Acc],
        dx: &mut [E], dweight: &mut [E::Acc], dbias: &mut [E::Acc], dnumbers: &mut [E::Acc],
    ) {
        if cols == 0 {
            return;
        }
        let mut bend = BendBack::new(curve, numbers, weight, cols, dweight, dbias, dnumbers);
        let (store, group) = (Store::of(dx, cols), Group::new::<S>(x.len() / cols, cols));
        // Spare rows, to read and to write, fill up the last group.
        let (spare, mut spare_out) = (group.spare::<E>(), group.spare_out::<E>());
        for g in 0..group.count() {
            let (dy, x) = (group.rows(g, dy, &spare), group.rows(g, x, &spare));
            let dx = group.rows_mut(g, dx, &mut spare_out);
            // The empty rows are dx⁺, which only a residual step has.
            bend.backward::<S, E, E, E>(dy, x, [&[]; GROUP], group.range(g).len(), dx, store);
        }
        store.finish();
        bend.finish(dweight, dbias, dnumbers);
    }
}

/// A curve with its (scale, shift), and a buffer for z = scale·x + shift of a group of rows.
pub struct Bend<'a, A> {
    curve: &'a Curve<A>,
    numbers: [A; NUMBERS],
    cols: usize,
    /// The buffer: it holds first z, an affine function of x, which f(z) then replaces.
    affines: Aligned<A>,
}

impl<'a, A: Accumulator> Bend<'a, A> {
    /// Returns the curve with its (scale, shift) and an empty buffer; `cols` is the width of the rows.
    pub fn new(curve: &'a Curve<A>, numbers: [A; NUMBERS], cols: usize) -> Self {
        Bend { curve, numbers, cols, affines: Aligned::new(GROUP * cols) }
    }

    /// Computes y = weight⊙f(z) + bias, with z = scale·x + shift, for a group of rows. Only the first `count` rows are
    /// real, the others are spare.
    #[inline(always)]
    pub fn forward<S: Isa, X: Element<Acc = A>, Y: Element<Acc = A>>(
        &mut self,
        x: [&[X]; GROUP],
        count: usize,
        weight: &[A],
        bias: &[A],
        y: [&mut [Y]; GROUP],
        store: Store,
    ) {
        self.compute_affines::<S, X>(x);
        (self.curve.values)(&mut self.affines[..count * self.cols]);
        // f(z) is x̂ already, so `normalise` gets the shift 0 and the scale 1. `false` means that shifts are not
        // subtracted.
        normalise::<S, A, Y, false>(
            split_ref(&self.affines, self.cols),
            [Measured::NONE; GROUP],
            weight,
            bias,
            y,
            store,
        );
    }

    /// Writes z = scale·x + shift of a group of rows to the buffer.
    #[inline(always)]
    fn compute_affines<S: Isa, X: Element<Acc = A>>(&mut self, x: [&[X]; GROUP]) {
        let [scale, shift] = self.numbers.map(Of::<A, S>::splat);
        // Rows are prefetched one group, that is `ahead` numbers, before they are needed.
        let ahead = GROUP * self.cols;
        let mut x = Blocks::of(x);
        let mut z = BlocksMut::of(split(&mut self.affines, self.cols));
        // Part 0 has the whole blocks of a row, and part 1 its padded last block, if there is one.
        for part in 0..PARTS {
            let n = x.len(part);
            let (x, z) = (x.part::<S>(part, n), z.part::<S>(part, n));
            for b in 0..n {
                each_row!(S, r => {
                    fetch(&x[r][b], ahead);
                    let [low, high] = Of::<A, S>::pair(&x[r][b]);
                    let block = [scale.mul_add(low, shift), scale.mul_add(high, shift)];
                    Of::<A, S>::store(block, &mut z[r][b], Store::PLAIN);
                });
            }
        }
        z.finish();
    }
}

/// A curve for the backward pass, and the sums of its gradients over rows.
pub struct BendBack<'a, A> {
    bend: Bend<'a, A>,
    /// A buffer for f′(z) of a group of rows.
    slopes: Aligned<A>,
    weight: Aligned<A>,
    dweight: Aligned<A>,
    dbias: Aligned<A>,
    dnumbers: [A; NUMBERS],
}

impl<'a, A: Accumulator> BendBack<'a, A> {
    /// Starts the sums at the values of the gradients `dweight`, `dbias` and `dnumbers` (of scale and shift), each of
    /// which may be empty; [`finish`](Self::finish) writes the new sums.
    pub fn new(
        curve: &'a Curve<A>,
        numbers: [A; NUMBERS],
        weight: &[A],
        cols: usize,
        dweight: &[A],
        dbias: &[A],
        dnumbers: &[A],
    ) -> Self {
        BendBack {
            bend: Bend::new(curve, numbers, cols),
            slopes: Aligned::new(GROUP * cols),
            weight: columns(weight, cols, A::ONE),
            dweight: start(dweight, cols),
            dbias: start(dbias, cols),
            dnumbers: dnumbers.try_into().unwrap_or([A::ZERO; NUMBERS]),
        }
    }

    /// Computes dx = scale·u for a group of rows, plus `dx_plus` if this is not empty, where z = scale·x + shift and u
    /// = weight⊙dy⊙f′(z). Adds these rows' terms to the sums that are the parameters' gradients. Only the first `count`
    /// rows of the group are real, the others are spare.
    #[inline(always)]
    pub fn backward<S: Isa, X: Element<Acc = A>, Y: Element<Acc = A>, D: Element<Acc = A>>(
        &mut self,
        dy: [&[Y]; GROUP],
        x: [&[X]; GROUP],
        dx_plus: [&[X]; GROUP],
        count: usize,
        dx: [&mut [D]; GROUP],
        store: Store,
    ) {
        self.bend.compute_affines::<S, X>(x);
        let (cols, has_dx_plus) = (self.bend.cols, !dx_plus[0].is_empty());
        let real = count * cols;
        // After this call `affines` holds f(z) instead of z, and `slopes` holds f′(z).
        (self.bend.curve.slopes)(&mut self.bend.affines[..real], &mut self.slopes[..real]);
        let scale = Of::<A, S>::splat(self.bend.numbers[0]);
        let mut dy = Blocks::of(dy);
        let mut x = Blocks::of(x);
        let mut dx_plus = Blocks::of(dx_plus);
        let mut dx = BlocksMut::of(dx);
        let mut affines = Blocks::of(split_ref(&self.bend.affines, cols));
        let mut slopes = Blocks::of(split_ref(&self.slopes, cols));
        let (mut sum_u, mut sum_ux) = ([[Of::<A, S>::zero(); 2]; GROUP], [[Of::<A, S>::zero(); 2]; GROUP]);
        // `done` counts the blocks of earlier parts: part 0 has the whole blocks of a row, and part 1 its padded last
        // block, if there is one. Rows are prefetched one group, that is `ahead` numbers, before they are needed.
        let (mut done, ahead) = (0, GROUP * cols);
        for part in 0..PARTS {
            let n = x.len(part);
            let (dy, x, dx) = (dy.part::<S>(part, n), x.part::<S>(part, n), dx.part::<S>(part, n));
            let (affines, slopes) = (affines.part::<S>(part, n), slopes.part::<S>(part, n));
            let dx_plus = dx_plus.part::<S>(part, if has_dx_plus { n } else { 0 });
            let weight = &self.weight.as_chunks::<PAIR_LANES>().0[done..done + n];
            let dweight = &mut self.dweight.as_chunks_mut::<PAIR_LANES>().0[done..done + n];
            let dbias = &mut self.dbias.as_chunks_mut::<PAIR_LANES>().0[done..done + n];
            done += n;
            for b in 0..n {
                // This holds the block of dx of each row, as two packs.
                let mut blocks = [[Of::<A, S>::zero(); 2]; GROUP];
                each_row!(S, r => { fetch(&dy[r][b], ahead) });
                each_pack!(p => {
                    let w: Of<A, S> = Pack::load(pack(&weight[b], p));
                    let mut dw: Of<A, S> = Pack::load(pack(&dweight[b], p));
                    let mut db: Of<A, S> = Pack::load(pack(&dbias[b], p));
                    each_row!(S, r => {
                        let (dy, x): (Of<A, S>, Of<A, S>) = (Pack::load(pack(&dy[r][b], p)), Pack::load(pack(&x[r][b], p)));
                        let (hat, slope) = (Pack::load(pack(&affines[r][b], p)), Pack::load(pack(&slopes[r][b], p)));
                        dw = dy.mul_add(hat, dw);
                        db = db.add(dy);
                        let u = w.mul(dy).mul(slope);
                        sum_u[r][p] = sum_u[r][p].add(u);
                        sum_ux[r][p] = u.mul_add(x, sum_ux[r][p]);
                        blocks[r][p] = scale.mul(u);
                        if has_dx_plus {
                            blocks[r][p] = blocks[r][p].add(Pack::load(pack(&dx_plus[r][b], p)));
                        }
                    });
                    dw.put(pack_mut(&mut dweight[b], p));
                    db.put(pack_mut(&mut dbias[b], p));
                });
                each_row!(S, r => { Of::<A, S>::store(blocks[r], &mut dx[r][b], store) });
            }
        }
        dx.finish();
        // `sums` holds each row's terms of the gradients of scale, Σ u⊙x, and shift, Σ u.
        let sums = rows!(r => [sum_ux[r][0].add(sum_ux[r][1]).sum(), sum_u[r][0].add(sum_u[r][1]).sum()]);
        for [dscale, dshift] in &sums[..count] {
            self.dnumbers[0] += *dscale;
            self.dnumbers[1] += *dshift;
        }
    }

    /// Writes the sums over all rows, which are the gradients of weight, bias and (scale, shift). A slice is empty if
    /// its gradient is not wanted.
    pub fn finish(&self, dweight: &mut [A], dbias: &mut [A], dnumbers: &mut [A]) {
        write_columns(&self.dweight[..self.bend.cols], dweight);
        write_columns(&self.dbias[..self.bend.cols], dbias);
        dnumbers.copy_from_slice(&self.dnumbers[..dnumbers.len()]);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::tests::{acc, near, numbers, Tested, WIDTHS};
    use super::*;
    use crate::cpu::simd::{force, Level};
    use half::{bf16, f16};

    /// A curve's formula: returns (f(z), f′(z)).
    type Exact = fn(f64) -> (f64, f64);

    /// Checks a curve against its formula for every type, width, kind of weight and instruction set.
    pub fn check<N: CurveNorm>(exact: Exact) {
        for level in Level::ALL {
            force(Some(level));
            for cols in WIDTHS {
                check_type::<N, f32>(exact, cols);
                check_type::<N, f64>(exact, cols);
                check_type::<N, bf16>(exact, cols);
                check_type::<N, f16>(exact, cols);
            }
            check_nan::<N>();
        }
        force(None);
        check_splitting::<N>();
    }

    /// Checks rows of `cols` numbers of type E, with each kind of weight and bias and several (scale, shift).
    fn check_type<N: CurveNorm, E: Tested>(exact: Exact, cols: usize) {
        let seed = cols as u64;
        // The numbers of a row have these (scale, mean). Some rows lie near 0, where the curve bends, others where it
        // is flat. Seven rows do not fill the last group.
        let kinds = [(1.0, 0.0), (1.0, 0.5), (0.0, 0.0), (100.0, 0.0), (1e-4, 0.0), (3.0, 1.0), (E::HUGE, 0.0)];
        let row = |(k, (scale, mean)): (u64, (f64, f64))| numbers::<E>(cols, seed + k, scale, mean);
        let x: Vec<E> = (0..).zip(kinds).flat_map(row).collect();
        let dy = numbers::<E>(x.len(), seed + 100, 1.0, 0.1);
        let (per_column, gain) = (numbers::<f64>(cols, seed + 200, 0.5, 2.0), vec![1.75]);
        for (weight, bias) in [(vec![], vec![]), (gain, vec![0.5]), (per_column, numbers::<f64>(cols, 300, 1.0, 0.0))] {
            for learned in [[0.5, -0.0], [-1.25, 0.375], [0.0, 0.5]] {
                check_rows::<N, E>(exact, cols, (&x, &dy), (&acc(&weight), &acc(&bias)), learned);
            }
        }
    }

    /// Returns the value of column i: `values` has one per column, one for all, or none (`absent`).
    fn at(values: &[f64], i: usize, absent: f64) -> f64 {
        if values.len() == 1 {
            values[0]
        } else {
            *values.get(i).unwrap_or(&absent)
        }
    }

    /// Compares y and all gradients with the formula, for rows of x and their dy, weight w and bias b; `learned` is the
    /// curve's (scale, shift).
    fn check_rows<N: CurveNorm, E: Tested>(
        exact: Exact,
        cols: usize,
        (x, dy): (&[E], &[E]),
        (w, b): (&[E::Acc], &[E::Acc]),
        learned: [f64; NUMBERS],
    ) {
        let curve = Curve::of::<N>();
        let given = learned.map(E::Acc::from_f64);
        let (mut y, mut dx) = (vec![E::default(); x.len()], vec![E::default(); x.len()]);
        // The sums start at one, to check that the pass adds to them.
        let [mut dw, mut db, mut dn] = [w.len(), b.len(), NUMBERS].map(|len| vec![E::Acc::ONE; len]);
        forward::<E>(&curve, cols, x, given, w, b, &mut y);
        backward::<E>(&curve, cols, dy, x, given, w, &mut dx, &mut dw, &mut db, &mut dn);
        let unit = 8.0 * E::UNIT_ACC;
        let [weight, bias] = [w, b].map(|v| v.iter().map(|v| v.to_f64()).collect::<Vec<_>>());
        let [mut want_dw, mut want_db, mut want_dn] = [w.len(), b.len(), NUMBERS].map(|len| vec![1.0; len]);
        // `sum_error` bounds the rounding error of the sums over rows; it grows with each term.
        let mut sum_error = unit;
        for i in 0..x.len() {
            let (x, dy, w) = (x[i].value(), dy[i].value(), at(&weight, i % cols, 1.0));
            let z = learned[0] * x + learned[1];
            // z is rounded before the curve is applied, and the curve's slope is at most 1.2.
            let (hat, slope) = exact(z);
            let u = w * dy * slope;
            // f′ contains an exponential, which passes on the rounding error of its argument, z or z².
            let relative = unit * (1.0 + z * z);
            let error = unit + relative * slope;
            near(y[i], w * hat + at(&bias, i % cols, 0.0), 4.0 * error, format_args!("y {i} of {cols}"));
            near(dx[i], learned[0] * u, error * 4.0, format_args!("dx {i} of {cols}, {learned:?}"));
            sum_error += relative * (u.abs() + (u * x).abs()) + unit * dy.abs();
            want_dn[0] += u * x;
            want_dn[1] += u;
            for (sums, term) in [(&mut want_dw, dy * hat), (&mut want_db, dy)] {
                // A gain has one sum for all columns.
                let place = sums.len().saturating_sub(1).min(i % cols);
                if let Some(sum) = sums.get_mut(place) {
                    *sum += term;
                }
            }
        }
        // The gradients of weight, bias and (scale, shift) are compared number by number.
        let pairs = [(&dw, &want_dw), (&db, &want_db), (&dn, &want_dn)];
        for (k, (got, want)) in pairs.into_iter().flat_map(|(got, want)| got.iter().zip(want)).enumerate() {
            let error = 2.0 * sum_error;
            assert!((got.to_f64() - want).abs() <= error, "sum {k} of {cols}: {} for {want} ± {error:e}", got.to_f64());
        }
    }

    /// Checks that a NaN makes only its own element of y and dx NaN, and only the sum of its column.
    fn check_nan<N: CurveNorm>() {
        // There are five rows of 40 columns; the NaN is in row 2, column 7.
        let (curve, mut x) = (Curve::of::<N>(), [0.5f32; 5 * 40]);
        x[2 * 40 + 7] = f32::NAN;
        let (mut y, mut dx, mut dw) = ([0.0; 5 * 40], [0.0; 5 * 40], [0.0; 40]);
        forward::<f32>(&curve, 40, &x, [0.5, 0.25], &[], &[], &mut y);
        let ones = [1.0; 40];
        backward::<f32>(&curve, 40, &y, &x, [0.5, 0.25], &ones, &mut dx, &mut dw, &mut [], &mut []);
        for (i, (y, dx)) in y.iter().zip(&dx).enumerate() {
            assert!((y.is_nan(), dx.is_nan()) == (i == 87, i == 87), "{i}");
        }
        assert!((0..40).all(|i| dw[i].is_nan() == (i == 7)));
    }

    /// Checks that rows and sums do not depend on how the rows are split.
    fn check_splitting<N: CurveNorm>() {
        let curve = Curve::of::<N>();
        for cols in WIDTHS {
            let (x, dy) = (numbers::<f32>(8 * cols, 1, 1.0, 0.0), numbers::<f32>(8 * cols, 2, 1.0, 0.5));
            // Computes eight rows, `rows` at a time.
            let run = |rows: usize| {
                let (mut y, mut dx) = (vec![0.0; 8 * cols], vec![0.0; 8 * cols]);
                let (mut db, mut dn) = (vec![0.0; cols], [0.0; NUMBERS]);
                for part in (0..8 * cols).step_by(rows * cols) {
                    let part = part..part + rows * cols;
                    forward::<f32>(&curve, cols, &x[part.clone()], [0.5, 0.25], &[], &[], &mut y[part.clone()]);
                    let (dy, x, dx) = (&dy[part.clone()], &x[part.clone()], &mut dx[part]);
                    backward::<f32>(&curve, cols, dy, x, [0.5, 0.25], &[], dx, &mut [], &mut db, &mut dn);
                }
                (y, dx, db, dn)
            };
            assert!(run(8) == run(1) && run(8) == run(4), "{cols}");
        }
    }

    #[test]
    #[should_panic(expected = "takes 0, 1 or 4 coefficients, not 3")]
    fn a_weight_of_another_length_is_refused() {
        struct Line;
        impl CurveNorm for Line {
            fn at<A: Accumulator, S: Isa>(z: A) -> (A, A) {
                (z, A::ONE)
            }
        }
        forward::<f32>(&Curve::of::<Line>(), 4, &[0.0; 4], [1.0, 0.0], &[1.0; 3], &[], &mut [0.0; 4]);
    }
}
