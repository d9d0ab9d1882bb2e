//! The four passes over a group of rows: measure, normalise, and the two halves of the gradient.

use super::blocks::{columns, start, write_columns, Blocks, BlocksMut, PARTS};
use super::{Measured, RowGradient, RowNormFns, Sums, GROUP};
use crate::cpu::memory::Aligned;
use crate::cpu::pack::{pack, pack_mut, Isa, Of, Pack, Store, PAIR_LANES};
use crate::cpu::{memory, Accumulator, Element};
use crate::each_pack;

/// Builds an array with the value of an expression for each row `$r` of a group, 0 to 3. It avoids `map`, whose closure
/// is a separate function, compiled without the surrounding instruction set unless LLVM happens to inline it.
macro_rules! rows {
    ($r:ident => $value:expr) => {
        [
            {
                let $r = 0;
                $value
            },
            {
                let $r = 1;
                $value
            },
            {
                let $r = 2;
                $value
            },
            {
                let $r = 3;
                $value
            },
        ]
    };
}
pub(crate) use rows;

/// Runs statements for each row `$r` of a group that the instruction set `$isa` processes together.
macro_rules! each_row {
    ($isa:ty, $r:ident => $work:block) => {{
        let [(), (), (), ()] = rows!($r => {
            if $r < <$isa as $crate::cpu::pack::Isa>::ROWS $work
        });
    }};
}
pub(crate) use each_row;

impl<A: Accumulator> RowNormFns<A> {
    /// Returns the shift and the scale of each row of a group.
    #[inline(always)]
    pub fn measure<S: Isa, E: Element<Acc = A>>(&self, x: [&[E]; GROUP], eps: A) -> [Measured<A>; GROUP] {
        let cols = A::from_f64(x[0].len() as f64);
        // A norm needs no sums, the squares alone, or both moments.
        let sums = match self.stats {
            0 => return [Measured::NONE; GROUP],
            1 => {
                let squares = squares::<S, E>(x);
                rows!(r => Sums { cols, about: A::ZERO, sum: A::ZERO, squares: squares[r] })
            }
            _ => moments::<S, E>(x, cols),
        };
        let mut measured = [Measured::NONE; GROUP];
        for r in 0..S::ROWS {
            // A norm returns `None` if the sums have lost precision.
            measured[r] = (self.measure)(&sums[r], eps).unwrap_or_else(|| self.measure_scaled(x[r], eps));
        }
        measured
    }

    /// Returns the shift and the scale of a row whose sums have lost precision, from the row itself.
    #[cold]
    #[inline(never)]
    fn measure_scaled<E: Element<Acc = A>>(&self, x: &[E], eps: A) -> Measured<A> {
        (self.measure_scaled)(&memory::collected(x.iter().map(|v| v.load())), eps)
    }
}

/// Returns Σx² of each row of a group.
#[inline(always)]
fn squares<S: Isa, E: Element>(x: [&[E]; GROUP]) -> [E::Acc; GROUP] {
    // This pass is the first over its rows and waits for memory. So it prefetches the same columns GROUP rows further
    // on.
    let ahead = GROUP * x[0].len();
    let mut x = Blocks::of(x);
    // Each row has two packs of partial sums, because a block of the row is two packs.
    let mut sums = [[Of::<E::Acc, S>::zero(); 2]; GROUP];
    // Part 0 has the whole blocks of a row, and part 1 its padded last block, if there is one.
    for part in 0..PARTS {
        let n = x.len(part);
        let x = x.part::<S>(part, n);
        for b in 0..n {
            each_row!(S, r => {
                fetch(&x[r][b], ahead);
                let [low, high] = Of::<E::Acc, S>::pair(&x[r][b]);
                sums[r] = [low.mul_add(low, sums[r][0]), high.mul_add(high, sums[r][1])];
            });
        }
    }
    rows!(r => sums[r][0].add(sums[r][1]).sum())
}

/// Returns Σd and Σd² of each row of a group, where d = x − guess and the guess is the mean of the row's first columns.
/// From them follow μ = guess + mean d and σ² = mean d² − (mean d)².
///
/// With guess = 0, E[x²] − μ² would lose every digit for a row with μ = 4096·σ in f32. Here (guess − μ)² is at most
/// cols/128·σ² for any row (Cauchy-Schwarz over the 128 columns of the guess) and typically σ²/128, so at most log₂(1
/// + cols/128) bits are lost.
///
/// `cols` is the number of columns in the type of the sums.
#[inline(always)]
fn moments<S: Isa, E: Element>(x: [&[E]; GROUP], cols: E::Acc) -> [Sums<E::Acc>; GROUP] {
    // The guess is the mean of this many columns.
    const FIRST: usize = 128;
    let width = x[0].len();
    let mut x = Blocks::of(x);
    let mut sums = [[Of::<E::Acc, S>::zero(); 2]; GROUP];
    // The guess uses only whole blocks, which are in part 0. A row that is shorter than one block has only part 1, the
    // padded last block.
    let part = if x.len(0) > 0 { 0 } else { 1 };
    let n = x.len(part).min(FIRST / PAIR_LANES);
    let first = x.part::<S>(part, n);
    for b in 0..n {
        each_row!(S, r => {
            let [low, high] = Of::<E::Acc, S>::pair(&first[r][b]);
            sums[r] = [sums[r][0].add(low), sums[r][1].add(high)];
        });
    }
    // A row that is shorter than one block is padded with zeros, which must not count.
    let guess_columns = (n * PAIR_LANES).min(width);
    let share = E::Acc::ONE / E::Acc::from_f64(guess_columns as f64);
    // `about` is the guess of each row, and `shift` has it in all lanes.
    let about = rows!(r => sums[r][0].add(sums[r][1]).sum() * share);
    let shift = rows!(r => Of::<E::Acc, S>::splat(about[r]));

    // This pass is the first over its rows and waits for memory. So it prefetches the same columns GROUP rows further
    // on.
    let ahead = GROUP * width;
    // The padded last block is multiplied by these factors: 1 for the row's numbers, 0 for the padding.
    let mut real = [E::Acc::ZERO; PAIR_LANES];
    real[..width % PAIR_LANES].fill(E::Acc::ONE);
    let real = Of::<E::Acc, S>::pair(&real);
    let mut sums = [[Of::<E::Acc, S>::zero(); 2]; GROUP];
    let mut squares = sums;
    for part in 0..PARTS {
        let n = x.len(part);
        let x = x.part::<S>(part, n);
        for b in 0..n {
            each_row!(S, r => {
                fetch(&x[r][b], ahead);
                let [low, high] = Of::<E::Acc, S>::pair(&x[r][b]);
                let (mut low, mut high) = (low.sub(shift[r]), high.sub(shift[r]));
                // In the padding x − guess is not 0, so it is multiplied by 0.
                if part == 1 {
                    (low, high) = (low.mul(real[0]), high.mul(real[1]));
                }
                sums[r] = [sums[r][0].add(low), sums[r][1].add(high)];
                squares[r] = [low.mul_add(low, squares[r][0]), high.mul_add(high, squares[r][1])];
            });
        }
    }
    rows!(r => Sums {
        cols,
        about: about[r],
        sum: sums[r][0].add(sums[r][1]).sum(),
        squares: squares[r][0].add(squares[r][1]).sum(),
    })
}

/// Computes y = weight⊙x̂ + bias with x̂ = (x − shift)·scale for a group of rows, each with its shift and scale in
/// `rows`. `weight` and `bias` have one number per column. If C (centred) is false, all shifts are zero and not
/// subtracted.
#[inline(always)]
pub fn normalise<S: Isa, E: Element, Y: Element<Acc = E::Acc>, const C: bool>(
    x: [&[E]; GROUP],
    rows: [Measured<E::Acc>; GROUP],
    weight: &[E::Acc],
    bias: &[E::Acc],
    y: [&mut [Y]; GROUP],
    store: Store,
) {
    let affines = rows!(r => Affine::<E::Acc, S, C>::of(rows[r]));
    let mut x = Blocks::of(x);
    let mut y = BlocksMut::of(y);
    let (mut weight, mut bias) = (weight.as_chunks::<PAIR_LANES>().0, bias.as_chunks::<PAIR_LANES>().0);
    // Part 0 has the whole blocks of a row, and part 1 its padded last block, if there is one.
    for part in 0..PARTS {
        let n = x.len(part);
        let (x, y, weights, biases) = (x.part::<S>(part, n), y.part::<S>(part, n), &weight[..n], &bias[..n]);
        // The blocks after these belong to the next part.
        (weight, bias) = (&weight[n..], &bias[n..]);
        for b in 0..n {
            let (w, c) = (Of::<E::Acc, S>::pair(&weights[b]), Of::<E::Acc, S>::pair(&biases[b]));
            each_row!(S, r => {
                let [low, high] = Of::<E::Acc, S>::pair(&x[r][b]);
                let (low, high) = (affines[r].at(low).mul_add(w[0], c[0]), affines[r].at(high).mul_add(w[1], c[1]));
                Of::<E::Acc, S>::store([low, high], &mut y[r][b], store);
            });
        }
    }
    y.finish();
}

/// A norm and its weight for the backward pass, with the sums over rows that are the gradients of weight and bias.
///
/// The weight is one number per column, or a single gain. A gain is kept separately, so that its gradient is the one
/// sum Σdy⊙x̂ instead of a sum per column.
pub struct Weight<'a, A> {
    norm: &'a RowNormFns<A>,
    eps: A,
    cols: usize,
    /// The single gain; 1 for a weight per column.
    gain: A,
    /// The sum that is the gain's gradient; unused for a weight per column.
    dgain: A,
    /// The weight per column; empty if all are one and no sum per column is wanted.
    columns: Aligned<A>,
    /// The sums per column that are the gradients of the weight per column and of the bias.
    dcolumns: Aligned<A>,
    dbias: Aligned<A>,
    /// True if Σg is needed or dbias is wanted; one pass computes both.
    biased: bool,
}

impl<'a, A: Accumulator> Weight<'a, A> {
    /// Starts the sums at the values of the gradients `dweight` (empty if not wanted, or as long as `weight`) and
    /// `dbias` (empty, or one per column); [`finish`](Self::finish) writes the new sums.
    pub fn new(norm: &'a RowNormFns<A>, weight: &[A], cols: usize, eps: A, dweight: &[A], dbias: &[A]) -> Self {
        // One number for several columns is a gain. For a single column it is the weight of that column.
        let (gain, dgain, weight, dweight) = match (weight, dweight) {
            ([gain], dgain) if cols > 1 => (*gain, dgain.first().copied().unwrap_or(A::ZERO), &[][..], &[][..]),
            _ => (A::ONE, A::ZERO, weight, dweight),
        };
        // One pass forms the sums per column for both the weight and the bias, so both get buffers if either needs one.
        let biased = !dbias.is_empty() || norm.stats == 2;
        let (columns, dcolumns, dbias) = if !weight.is_empty() || biased {
            (columns(weight, cols, A::ONE), start(dweight, cols), start(dbias, cols))
        } else {
            (Aligned::new(0), Aligned::new(0), Aligned::new(0))
        };
        Weight { norm, eps, cols, gain, dgain, columns, dcolumns, dbias, biased }
    }

    /// Computes the first half of the gradient of a group of rows: adds their terms to the gradients of weight and
    /// bias. Returns for each row its shift and scale from `rows`, and the coefficients of dx = p·g + q·x̂ − r.
    #[inline(always)]
    pub fn row_gradients<S: Isa, X: Element<Acc = A>, Y: Element<Acc = A>>(
        &mut self,
        dy: [&[Y]; GROUP],
        x: [&[X]; GROUP],
        rows: [Measured<A>; GROUP],
    ) -> [(Measured<A>, RowGradient<A>); GROUP] {
        // The last two parameters are true if there is a weight per column, and if Σg is needed.
        let sums = if self.columns.is_empty() {
            self.sums::<S, X, Y, false, false>(dy, x, rows)
        } else if self.biased {
            self.sums::<S, X, Y, true, true>(dy, x, rows)
        } else {
            self.sums::<S, X, Y, true, false>(dy, x, rows)
        };
        let cols = A::from_f64(self.cols as f64);
        let mut row_gradients = [(Measured::NONE, RowGradient::NONE); GROUP];
        for r in 0..S::ROWS {
            // The sums leave out a single gain: Σdy⊙x̂ is its gradient. The norm's formula takes sums of g = gain·dy,
            // so they are multiplied by the gain. The second half leaves the gain out of g too, so p is multiplied by
            // it.
            let (sum_g, sum_gx) = sums[r];
            self.dgain += sum_gx;
            let gradient = (self.norm.gradient)(rows[r], self.eps, cols, self.gain * sum_g, self.gain * sum_gx);
            row_gradients[r] = (rows[r], RowGradient { p: gradient.p * self.gain, ..gradient });
        }
        row_gradients
    }

    /// Returns (Σg, Σg⊙x̂) of each row, with g = w⊙dy. If W is true, there is a weight w per column, and dy⊙x̂ is added
    /// to its gradient. If B is true, dy is added to the bias's gradient, and Σg is computed; otherwise Σg is 0, and
    /// all shifts are zero.
    #[inline(always)]
    fn sums<S: Isa, X: Element<Acc = A>, Y: Element<Acc = A>, const W: bool, const B: bool>(
        &mut self,
        dy: [&[Y]; GROUP],
        x: [&[X]; GROUP],
        rows: [Measured<A>; GROUP],
    ) -> [(A, A); GROUP] {
        let affines = rows!(r => Affine::<A, S, B>::of(rows[r]));
        let mut dy = Blocks::of(dy);
        let mut x = Blocks::of(x);
        let (mut sum_g, mut sum_gx) = ([[Of::<A, S>::zero(); 2]; GROUP], [[Of::<A, S>::zero(); 2]; GROUP]);
        // `done` counts the blocks of earlier parts: part 0 has the whole blocks of a row, and part 1 its padded last
        // block, if there is one. Rows are prefetched GROUP rows, that is `ahead` numbers, before they are needed.
        let (mut done, ahead) = (0, GROUP * self.cols);
        for part in 0..PARTS {
            let n = x.len(part);
            let (dy, x) = (dy.part::<S>(part, n), x.part::<S>(part, n));
            let columns = if W { done..done + n } else { 0..0 };
            let weight = &self.columns.as_chunks::<PAIR_LANES>().0[columns.clone()];
            let dweight = &mut self.dcolumns.as_chunks_mut::<PAIR_LANES>().0[columns.clone()];
            let dbias = &mut self.dbias.as_chunks_mut::<PAIR_LANES>().0[columns];
            done += n;
            // Slices of a length known to be n let the compiler drop the checks of indices.
            let count = if W { n } else { 0 };
            let (weight, dweight, dbias) = (&weight[..count], &mut dweight[..count], &mut dbias[..count]);
            for b in 0..n {
                each_row!(S, r => {
                    fetch(&dy[r][b], ahead);
                    fetch(&x[r][b], ahead);
                });
                // One pack at a time needs fewer registers for running sums than a whole block.
                each_pack!(p => {
                    let (mut w, mut dw, mut db) = (Of::<A, S>::zero(), Of::<A, S>::zero(), Of::<A, S>::zero());
                    if W {
                        (w, dw) = (Pack::load(pack(&weight[b], p)), Pack::load(pack(&dweight[b], p)));
                    }
                    if B {
                        db = Pack::load(pack(&dbias[b], p));
                    }
                    each_row!(S, r => {
                        let (dy, x): (Of<A, S>, Of<A, S>) = (Pack::load(pack(&dy[r][b], p)), Pack::load(pack(&x[r][b], p)));
                        let hat = affines[r].at(x); // x̂
                        let g = if W { w.mul(dy) } else { dy };
                        sum_gx[r][p] = g.mul_add(hat, sum_gx[r][p]);
                        if W {
                            dw = dy.mul_add(hat, dw);
                        }
                        if B {
                            sum_g[r][p] = sum_g[r][p].add(g);
                            db = db.add(dy);
                        }
                    });
                    if W {
                        dw.put(pack_mut(&mut dweight[b], p));
                    }
                    if B {
                        db.put(pack_mut(&mut dbias[b], p));
                    }
                });
            }
        }
        rows!(r => {
            let sum_g = if B { sum_g[r][0].add(sum_g[r][1]).sum() } else { A::ZERO };
            (sum_g, sum_gx[r][0].add(sum_gx[r][1]).sum())
        })
    }

    /// Returns the weight per column; empty if all are one.
    #[inline(always)]
    pub fn columns(&self) -> &[A] {
        &self.columns
    }

    /// Computes the second half of the gradient of a group of rows: dx = p·g + q·x̂ − r. In it g is dy times the weight
    /// per column. `row_gradients` are the results of [`row_gradients`](Self::row_gradients).
    #[inline(always)]
    pub fn apply<S: Isa, E: Element<Acc = A>>(
        &self,
        dy: [&[E]; GROUP],
        x: [&[E]; GROUP],
        row_gradients: [(Measured<A>, RowGradient<A>); GROUP],
        dx: [&mut [E]; GROUP],
        store: Store,
    ) {
        // The pass is compiled with and without a weight per column, and with and without shifts.
        if self.columns.is_empty() {
            self.apply_to::<S, E, false, false>(dy, x, row_gradients, dx, store);
        } else if self.norm.stats < 2 {
            self.apply_to::<S, E, true, false>(dy, x, row_gradients, dx, store);
        } else {
            self.apply_to::<S, E, true, true>(dy, x, row_gradients, dx, store);
        }
    }

    /// Computes [`apply`](Self::apply). W is true if there is a weight per column; if C (centred) is false, all shifts
    /// are zero and not subtracted.
    #[inline(always)]
    fn apply_to<S: Isa, E: Element<Acc = A>, const W: bool, const C: bool>(
        &self,
        dy: [&[E]; GROUP],
        x: [&[E]; GROUP],
        row_gradients: [(Measured<A>, RowGradient<A>); GROUP],
        dx: [&mut [E]; GROUP],
        store: Store,
    ) {
        let rows = rows!(r => Lines::<A, S, C>::of(row_gradients[r]));
        let mut dy = Blocks::of(dy);
        let mut x = Blocks::of(x);
        let mut dx = BlocksMut::of(dx);
        let mut weight = self.columns.as_chunks::<PAIR_LANES>().0;
        // Part 0 has the whole blocks of a row, and part 1 its padded last block, if there is one.
        for part in 0..PARTS {
            let n = x.len(part);
            let (dy, x, dx) = (dy.part::<S>(part, n), x.part::<S>(part, n), dx.part::<S>(part, n));
            // `here` takes the weight's blocks of this part; the others stay in `weight`.
            let here;
            (here, weight) = weight.split_at(if W { n } else { 0 });
            for b in 0..n {
                let w = if W { Of::<A, S>::pair(&here[b]) } else { [Of::<A, S>::zero(); 2] };
                each_row!(S, r => {
                    let (dy, x) = (Of::<A, S>::pair(&dy[r][b]), Of::<A, S>::pair(&x[r][b]));
                    let g = if W { [w[0].mul(dy[0]), w[1].mul(dy[1])] } else { dy };
                    let block = [rows[r].at(g[0], x[0]), rows[r].at(g[1], x[1])];
                    Of::<A, S>::store(block, &mut dx[r][b], store);
                });
            }
        }
        dx.finish();
    }

    /// Writes the sums over all rows to the gradients of weight and bias; a slice is empty if its gradient is not
    /// wanted.
    pub fn finish(&self, dweight: &mut [A], dbias: &mut [A]) {
        match dweight {
            // One number for several columns is a gain.
            [dgain] if self.cols > 1 => *dgain = self.dgain,
            _ => dweight.copy_from_slice(&self.dcolumns[..dweight.len()]),
        }
        write_columns(&self.dbias[..self.cols.min(self.dbias.len())], dbias);
    }
}

/// The coefficients of a row's x̂ = (x − shift)·scale, copied to all lanes of a pack. If C (centred) is false, the
/// shift is zero and not subtracted.
#[derive(Clone, Copy)]
pub struct Affine<A: Accumulator, S: Isa, const C: bool> {
    scale: Of<A, S>,
    shift: Of<A, S>,
}

impl<A: Accumulator, S: Isa, const C: bool> Affine<A, S, C> {
    /// Copies the row's shift and scale to all lanes.
    #[inline(always)]
    pub fn of(row: Measured<A>) -> Self {
        Affine { scale: Pack::splat(row.scale), shift: Pack::splat(row.shift) }
    }

    /// Returns x̂ = (x − shift)·scale for a pack of numbers.
    #[inline(always)]
    pub fn at(&self, x: Of<A, S>) -> Of<A, S> {
        // x·scale − shift·scale would be one instruction, but would leave the rounding error of a product: a row of
        // equal numbers must become zeros, however large they are.
        if C {
            x.sub(self.shift).mul(self.scale)
        } else {
            x.mul(self.scale)
        }
    }
}

/// A row's dx = p·g + q·x̂ − r as a function of g and x, with the coefficients copied to all lanes of a pack.
#[derive(Clone, Copy)]
pub struct Lines<A: Accumulator, S: Isa, const C: bool> {
    hat: Affine<A, S, C>,
    p: Of<A, S>,
    q: Of<A, S>,
    minus_r: Of<A, S>,
}

impl<A: Accumulator, S: Isa, const C: bool> Lines<A, S, C> {
    /// Copies the row's shift and scale and the coefficients of its dx to all lanes.
    #[inline(always)]
    pub fn of((row, gradient): (Measured<A>, RowGradient<A>)) -> Self {
        // If r is 0, −r is −0. Adding −0 changes nothing, but adding 0 would turn −0 into 0.
        let minus_r = Pack::splat(-gradient.r);
        Lines { hat: Affine::of(row), p: Pack::splat(gradient.p), q: Pack::splat(gradient.q), minus_r }
    }

    /// Returns dx = p·g + q·x̂ − r for packs of g and x.
    #[inline(always)]
    pub fn at(&self, g: Of<A, S>, x: Of<A, S>) -> Of<A, S> {
        self.p.mul_add(g, self.q.mul_add(self.hat.at(x), self.minus_r))
    }
}

/// Prefetches the block that lies `ahead` numbers further on, in the next group of rows, because the processor does not
/// by itself prefetch for eight or more rows. An address past the end is harmless. On aarch64 nothing is prefetched.
#[inline(always)]
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub fn fetch<E>(block: &[E; PAIR_LANES], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    // A cache line has 64 bytes.
    for line in 0..size_of_val(block) / 64 {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T1};
        let address = block.as_ptr().wrapping_add(ahead).wrapping_byte_add(64 * line);
        // SAFETY: the instruction is part of SSE, which every x86-64 processor has, and a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
}
