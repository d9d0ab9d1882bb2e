//! The family of norms with statistics of columns: measure the batch, settle what x̂ is made with, write it; and back.

use super::count::Count;
use super::ffi::{self, by_dtype, give, into_raw, pointer, status, take, View};
use super::{device_columns, engine};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{memory, Accumulator, Element};
use crate::cuda::Program;
use crate::error::Result;
use crate::norm::columns::{self, Batch, Options, Slopes, State, Stats};
use crate::norm::statistics::{self, Measured, StateTensors, Used};
use crate::norm::COLUMN_NORMS;
use std::ffi::{c_char, c_int, CStr};
use tch::Tensor;
use torch_sys::C_tensor;

/// A norm with statistics of columns as an operator: what the C++ shim registers under `operator`.
pub struct ColumnKernels {
    /// torch.ops.normformer_rs.`operator`.
    pub operator: &'static CStr,
    /// What the schema calls the two buffers.
    pub state: [&'static CStr; 2],
    /// x̂ has a mean taken away.
    pub centred: bool,
    /// The gradient in training is PowerNorm's, made with the second buffer, and no derivative of the formula.
    pub approximate: bool,
    /// Says what x̂ is made with, and then moves the state.
    pub settle: fn(&Batch, &mut State, &Options) -> Stats,
    /// The same in tch.
    pub composed: fn(&Measured, &StateTensors, &Options) -> Result<Used>,
    /// The same kernels for a GPU.
    pub program: Program,
    pub count: Count,
}

impl ColumnKernels {
    /// Everything unsaid: a norm without a mean, with a true gradient. `settle` and `composed` must be said.
    pub const fn new(operator: &'static CStr, name: &'static str, program: Program) -> Self {
        ColumnKernels {
            operator,
            state: [c"first", c"second"],
            centred: false,
            approximate: false,
            settle: |_, _, _| unreachable!("every norm says how it settles"),
            composed: |_, _, _| unreachable!("every norm says how it settles"),
            program,
            count: Count::new(name),
        }
    }

    fn index(&'static self) -> i64 {
        let found = COLUMN_NORMS.iter().position(|k| std::ptr::eq(*k, self));
        found.expect("every ColumnKernels is listed in norm::COLUMN_NORMS") as i64
    }
}

/// A call of the operator.
pub struct Column<'a> {
    pub x: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub bias: Option<&'a Tensor>,
    pub pad_mask: Option<&'a Tensor>,
    pub state: StateTensors,
    /// The statistics of an earlier run of the same forward pass: used as they are, and nothing moves.
    pub stats: Option<&'a Tensor>,
    pub options: Options,
}

/// (N(x), the statistics it used) through the dispatcher: differentiable, on any device.
pub fn column_norm(kernels: &'static ColumnKernels, call: &Column) -> Result<(Tensor, Tensor)> {
    engine::register();
    let state = &call.state;
    let tensors = [
        Some(call.x),
        call.weight,
        call.bias,
        call.pad_mask,
        state.first.as_ref(),
        state.second.as_ref(),
        state.iters.as_ref(),
        state.refused.as_ref(),
        call.stats,
    ]
    .map(pointer);
    let mut stats = std::ptr::null_mut();
    // SAFETY: the tensors outlive the call; two new ones come back.
    unsafe {
        let y = take(nfrs_column(kernels.index(), tensors.as_ptr(), &call.options, &mut stats))?;
        Ok((y, take(stats)?))
    }
}

extern "C" {
    fn nfrs_column(
        norm: i64,
        tensors: *const *const C_tensor,
        options: &Options,
        stats: *mut *mut C_tensor,
    ) -> *mut C_tensor;
}

// ---- kernels ----

/// What the shim passes: x and y (or dy and dx) with everything between them. Absent views have null data.
#[repr(C)]
pub(super) struct Call {
    pub x: View,
    pub weight: View,
    pub bias: View,
    pub pad: View,
    /// On the CPU float64 copies of the buffers; on a GPU the buffers.
    pub first: View,
    pub second: View,
    pub iters: View,
    pub refused: View,
    /// Whether the buffers themselves are float64.
    pub wide_state: bool,
    /// `stats` holds the statistics of an earlier run.
    pub given: bool,
    pub options: Options,
    pub y: View,
    pub stats: View,
    /// On a GPU: [`device_columns::partial_length`] numbers that slabs of rows leave.
    pub partial: View,
    /// On a GPU: four rows of float64, what was measured.
    pub batch: View,
}

#[repr(C)]
pub(super) struct Gradients {
    pub dy: View,
    pub dx: View,
    pub dweight: View,
    pub dbias: View,
    /// On a GPU: three rows, p, q and r.
    pub slopes: View,
}

impl Call {
    /// The largest number that the buffers can hold.
    pub fn largest(&self) -> f64 {
        if self.wide_state {
            f64::MAX
        } else {
            f32::MAX.into()
        }
    }

    /// # Safety
    /// As [`View::slice_mut`]: the copies of the buffers are the call's own.
    unsafe fn state<'a>(&self) -> State<'a> {
        State {
            first: self.first.slice_mut(),
            second: self.second.slice_mut(),
            iters: self.iters.slice_mut(),
            refused: self.refused.slice_mut(),
            largest: self.largest(),
        }
    }
}

fn as_acc<A: Accumulator>(v: &[f64]) -> Vec<A> {
    memory::collected(v.iter().map(|v| A::from_f64(*v)))
}

/// The weight, or ones.
fn or_ones<A: Accumulator>(weight: &[A], cols: usize) -> Vec<A> {
    if weight.is_empty() {
        memory::filled(A::ONE, cols)
    } else {
        memory::collected(weight.iter().copied())
    }
}

/// Σd and Σd² with d = x − guess over the rows of all threads.
fn sums<E: Element>(cols: usize, x: &[E], pad: &[u8], guess: &[E::Acc]) -> (Vec<f64>, Vec<f64>) {
    let (mut sum, mut squares) = (memory::filled(0.0, guess.len()), memory::filled(0.0, cols));
    parallel::sum_over_rows(x.len() / cols.max(1), cols, &mut [&mut sum, &mut squares], |r, sums| {
        let [sum, squares] = sums else { unreachable!("two sums were asked for") };
        columns::sums::<E>(cols, &x[r.start * cols..r.end * cols], part(pad, &r), guess, sum, squares);
    });
    (sum, squares)
}

/// The mask's part for these rows.
fn part<'a>(pad: &'a [u8], rows: &std::ops::Range<usize>) -> &'a [u8] {
    if pad.is_empty() {
        pad
    } else {
        &pad[rows.clone()]
    }
}

fn measure<E: Element>(kernels: &ColumnKernels, cols: usize, x: &[E], pad: &[u8], release: bool) -> Batch {
    let rows = x.len() / cols.max(1);
    let count = (rows - pad.iter().filter(|v| **v != 0).count()) as f64;
    let mean_of = |mut sums: Vec<f64>, n: f64| {
        sums.iter_mut().for_each(|s| *s /= n.max(1.0));
        sums
    };
    if !kernels.centred {
        let square = mean_of(sums(cols, x, pad, &[]).1, count);
        let all_too = release && !pad.is_empty();
        let square_of_all = all_too.then(|| mean_of(sums(cols, x, &[], &[]).1, rows as f64));
        return Batch { count, mean: memory::filled(0.0, cols), square, square_of_all, rows: rows as f64 };
    }
    // Moments about a guess, the mean of the first real rows: (guess − μ)² is at most rows/64·σ² and typically σ²/64,
    // so that mean d² − (mean d)² loses at most log₂(1 + rows/64) bits, and typically none.
    let first = pad.iter().position(|v| *v == 0).unwrap_or(0);
    let few = first..(first + columns::BLOCK).min(rows);
    let zero = memory::filled(E::Acc::ZERO, cols);
    let [mut sum, mut squares] = [(); 2].map(|()| memory::filled(0.0, cols));
    let of_few = part(pad, &few);
    columns::sums::<E>(cols, &x[few.start * cols..few.end * cols], of_few, &zero, &mut sum, &mut squares);
    let real = few.len() - of_few.iter().filter(|v| **v != 0).count();
    let guess: Vec<E::Acc> = as_acc(&mean_of(sum, real as f64));
    let (sum, squares) = sums(cols, x, pad, &guess);
    let (offset, square) = (mean_of(sum, count), mean_of(squares, count));
    let variance = square.iter().zip(&offset).map(|(s, m)| {
        let variance = s - m * m;
        // Not `max`: a NaN has to stay one.
        if variance < 0.0 {
            0.0
        } else {
            variance
        }
    });
    let square = memory::collected(variance);
    let mean = memory::collected(offset.iter().zip(&guess).map(|(m, g)| m + g.to_f64()));
    Batch { count, mean, square, square_of_all: None, rows: rows as f64 }
}

/// The batches of all ranks as one (Chan, Golub and LeVeque 1979): from counts, means and mean squares about those
/// means, never as mean x² − mean², which cancels.
fn over_ranks(batch: Batch, o: &Options) -> Result<Batch> {
    if o.group.is_alone() {
        return Ok(batch);
    }
    let cols = batch.square.len();
    let of_all = batch.square_of_all.as_ref().unwrap_or(&batch.square);
    let counts = [batch.count, batch.rows];
    let mine = memory::collected(counts.iter().chain(&batch.mean).chain(&batch.square).chain(of_all).copied());
    let all = Vec::<f64>::try_from(o.group.gather(&Tensor::f_from_slice(&mine)?)?.f_flatten(0, -1)?)?;
    let ranks: Vec<_> = all.chunks(mine.len()).map(|r| (r[0], r[1], r[2..].chunks(cols.max(1)))).collect();
    let (count, rows) = ranks.iter().fold((0.0, 0.0), |(n, all), (count, rows, _)| (n + count, all + rows));
    let zeros = || memory::filled(0.0, cols);
    let mut merged = Batch { count, rows, mean: zeros(), square: zeros(), square_of_all: None };
    let mut square_of_all = zeros();
    for (n, all, parts) in &ranks {
        let (share, share_of_all) = (n / count.max(1.0), all / rows.max(1.0));
        for (to, (from, share)) in [&mut merged.mean, &mut merged.square, &mut square_of_all]
            .into_iter()
            .zip(parts.clone().zip([share, share, share_of_all]))
        {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += share * from);
        }
    }
    for (n, _, parts) in &ranks {
        let mean = parts.clone().next().unwrap_or(&[]);
        for ((square, mean), own) in merged.square.iter_mut().zip(&merged.mean).zip(mean) {
            *square += n / count.max(1.0) * (own - mean).powi(2);
        }
    }
    merged.square_of_all = o.release.then_some(square_of_all);
    Ok(merged)
}

fn forward<E: Element>(kernels: &ColumnKernels, v: &Call) -> Result<()> {
    let cols = v.stats.cols();
    // SAFETY: the shim gave contiguous tensors of E (parameters and statistics of its accumulation type), a mask of
    // bytes; y, stats and the copies of the buffers are its own.
    let (x, weight, bias, pad) =
        unsafe { (v.x.slice::<E>(), v.weight.slice::<E::Acc>(), v.bias.slice(), v.pad.slice::<u8>()) };
    // SAFETY: as above.
    let (y, out, mut state) = unsafe { (v.y.slice_mut::<E>(), v.stats.slice_mut::<E::Acc>(), v.state()) };
    if !v.given {
        let o = &v.options;
        let batch = match o.train || state.first.is_empty() {
            true => over_ranks(measure(kernels, cols, x, pad, o.release), o)?,
            false => Batch { mean: memory::filled(0.0, cols), ..Batch::default() },
        };
        (kernels.settle)(&batch, &mut state, o).write(out);
    }
    let (shift, scale) = (&out[..cols], &out[cols..2 * cols]);
    let (weight, zero) = (or_ones(weight, cols), memory::filled(E::Acc::ZERO, cols));
    let bias: &[E::Acc] = if bias.is_empty() { &zero } else { bias };
    let pad = if v.options.release { &[] } else { pad };
    let shared = Shared::new(y);
    parallel::for_each(x.len() / cols.max(1), parallel::grain(cols), |r| {
        let all = r.start * cols..r.end * cols;
        // SAFETY: the ranges are disjoint and inside y.
        let y = unsafe { shared.slice(all.clone()) };
        columns::normalise::<E>(cols, &x[all], part(pad, &r), shift, scale, &weight, bias, y);
    });
    Ok(())
}

fn backward<E: Element>(kernels: &ColumnKernels, v: &Call, d: &Gradients) -> Result<()> {
    let cols = v.stats.cols();
    // SAFETY: as in `forward`.
    let (dy, x, weight, pad, rows) = unsafe {
        (d.dy.slice::<E>(), v.x.slice::<E>(), v.weight.slice::<E::Acc>(), v.pad.slice::<u8>(), v.stats.slice())
    };
    // SAFETY: the gradients are fresh, the copies of the buffers the call's own.
    let (dx, dweight, dbias, mut state) =
        unsafe { (d.dx.slice_mut::<E>(), d.dweight.slice_mut::<E::Acc>(), d.dbias.slice_mut::<E::Acc>(), v.state()) };
    let o = &v.options;
    let pad = if o.release { &[] } else { pad };
    let stats = Stats::read::<E::Acc>(rows, cols);
    let (shift, scale) = (as_acc::<E::Acc>(&stats.shift), as_acc::<E::Acc>(&stats.scale));
    let [mut sum, mut sum_x] = [(); 2].map(|()| memory::filled(0.0, cols));
    parallel::sum_over_rows(x.len() / cols.max(1), cols, &mut [&mut sum, &mut sum_x], |r, sums| {
        let [sum, sum_x] = sums else { unreachable!("two sums were asked for") };
        let all = r.start * cols..r.end * cols;
        columns::gradient_sums::<E>(cols, &dy[all.clone()], &x[all], part(pad, &r), &shift, &scale, sum, sum_x);
    });
    for (out, sums) in [(dweight, &sum_x), (dbias, &sum)] {
        out.iter_mut().zip(sums).for_each(|(d, s)| *d = E::Acc::from_f64(*s));
    }
    if !o.group.is_alone() && (stats.exact || (kernels.approximate && o.train)) {
        let all = o.group.sum(&Tensor::f_from_slice(&[sum, sum_x].concat())?)?;
        let mut all = Vec::<f64>::try_from(all)?;
        sum_x = all.split_off(cols);
        sum = all;
    }
    let (p, q, r) = slopes(kernels, &stats, &or_ones(weight, cols), (&sum, &sum_x), &mut state, o);
    let (p, q, r) = (as_acc::<E::Acc>(&p), as_acc::<E::Acc>(&q), as_acc::<E::Acc>(&r));
    let shared = Shared::new(dx);
    parallel::for_each(x.len() / cols.max(1), parallel::grain(cols), |rows| {
        let all = rows.start * cols..rows.end * cols;
        // SAFETY: the ranges are disjoint and inside dx.
        let dx = unsafe { shared.slice(all.clone()) };
        let slopes = Slopes { p: &p, q: &q, r: &r };
        columns::gradient::<E>(cols, &dy[all.clone()], &x[all], part(pad, &rows), &shift, &scale, slopes, dx);
    });
    Ok(())
}

/// p, q and r of dx = p⊙dy − q⊙x̂ − r; moves ν.
fn slopes<A: Accumulator>(
    kernels: &ColumnKernels,
    stats: &Stats,
    weight: &[A],
    (sum, sum_x): (&[f64], &[f64]),
    state: &mut State,
    o: &Options,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let by_weight = |v: &[f64]| memory::collected(v.iter().zip(weight).map(|(v, w)| v * w.to_f64()));
    let p = by_weight(&stats.slope);
    let mut lambda = by_weight(sum_x);
    lambda.iter_mut().for_each(|v| *v *= stats.share);
    let [mut q, mut r] = [(); 2].map(|()| memory::filled(0.0, p.len()));
    if stats.exact {
        q = memory::collected(stats.slope.iter().zip(&lambda).map(|(slope, lambda)| slope * lambda));
        if kernels.centred {
            r = memory::collected(p.iter().zip(sum).map(|(p, sum)| p * sum * stats.share));
        }
    }
    if kernels.approximate && o.train && !state.second.is_empty() {
        let nu = memory::collected(state.second.iter().map(|ema| (1.0 - o.alpha_bwd) * ema));
        if !stats.exact {
            q = memory::collected(stats.slope.iter().zip(&nu).map(|(slope, nu)| slope * nu));
        }
        let terms = state.second.iter().zip(&lambda).zip(nu.iter().zip(&stats.gamma));
        let moved = memory::collected(terms.map(|((ema, lambda), (nu, gamma))| ema + lambda - nu * gamma));
        if state.accepts(stats.share, &[&moved]) {
            state.second.copy_from_slice(&moved);
        }
    }
    (p, q, r)
}

// ---- what the shim calls ----

#[no_mangle]
extern "C" fn nfrs_column_count() -> i64 {
    COLUMN_NORMS.len() as i64
}

#[no_mangle]
extern "C" fn nfrs_column_name(norm: i64) -> *const c_char {
    COLUMN_NORMS[norm as usize].operator.as_ptr()
}

#[no_mangle]
extern "C" fn nfrs_column_state(norm: i64, which: i64) -> *const c_char {
    COLUMN_NORMS[norm as usize].state[which as usize].as_ptr()
}

#[no_mangle]
extern "C" fn nfrs_column_approximate(norm: i64) -> bool {
    COLUMN_NORMS[norm as usize].approximate
}

#[no_mangle]
extern "C" fn nfrs_column_centred(norm: i64) -> bool {
    COLUMN_NORMS[norm as usize].centred
}

#[no_mangle]
extern "C" fn nfrs_column_stats() -> i64 {
    Stats::ROWS as i64
}

#[no_mangle]
extern "C" fn nfrs_column_partial(rows: i64, cols: i64) -> i64 {
    device_columns::partial_length(rows, cols)
}

#[no_mangle]
unsafe extern "C" fn nfrs_column_forward(norm: i64, call: &Call) -> c_int {
    let kernels = COLUMN_NORMS[norm as usize];
    kernels.count.kernel();
    status(|| match call.x.device() {
        None => by_dtype!(call.x, E => forward::<E>(kernels, call)),
        Some(device) => device_columns::forward(device, kernels, call),
    })
}

#[no_mangle]
unsafe extern "C" fn nfrs_column_backward(norm: i64, call: &Call, gradients: &Gradients) -> c_int {
    let kernels = COLUMN_NORMS[norm as usize];
    status(|| match call.x.device() {
        None => by_dtype!(call.x, E => backward::<E>(kernels, call, gradients)),
        Some(device) => device_columns::backward(device, kernels, call, gradients),
    })
}

/// x, weight, bias, pad_mask, first, second, iters, refused, stats, in this order; any but x may be null.
#[no_mangle]
unsafe extern "C" fn nfrs_column_composed(
    norm: i64,
    tensors: *const *const C_tensor,
    options: &Options,
    stats: *mut *mut C_tensor,
) -> *mut C_tensor {
    let kernels = COLUMN_NORMS[norm as usize];
    kernels.count.composed();
    // SAFETY: the shim passes nine pointers to live tensors, or null.
    let [x, weight, bias, pad, first, second, iters, refused, given] = unsafe { borrow_all(tensors) };
    give(|| {
        let state = StateTensors { first, second, iters, refused };
        let x = x.as_ref().expect("x is never absent");
        let parameters = (weight.as_ref(), bias.as_ref());
        let (y, used) = statistics::forward(kernels, x, parameters, pad.as_ref(), &state, given.as_ref(), options)?;
        // SAFETY: the shim gave room for a pointer.
        unsafe { *stats = into_raw(used) };
        Ok(y)
    })
}

/// dy, x, weight, pad_mask, second, refused, stats, in this order; writes dx, dγ, dβ.
#[no_mangle]
unsafe extern "C" fn nfrs_column_composed_backward(
    norm: i64,
    tensors: *const *const C_tensor,
    options: &Options,
    gradients: *mut *mut C_tensor,
) -> c_int {
    // SAFETY: the shim passes seven pointers to live tensors, or null.
    let [dy, x, weight, pad, second, refused, stats] = unsafe { borrow_all(tensors) };
    status(|| {
        let given = [dy, x, stats].map(|t| t.expect("dy, x and stats are never absent"));
        let [dy, x, stats] = &given;
        let state = StateTensors { second, refused, ..StateTensors::default() };
        let kernels = COLUMN_NORMS[norm as usize];
        let made = statistics::backward(kernels, dy, x, weight.as_ref(), pad.as_ref(), stats, &state, options)?;
        for (i, t) in [made.0, made.1, made.2].into_iter().enumerate() {
            // SAFETY: the shim gave room for three pointers.
            unsafe { *gradients.add(i) = into_raw(t) };
        }
        Ok(())
    })
}

/// # Safety
/// `tensors` points to N pointers to live tensors, or null.
unsafe fn borrow_all<const N: usize>(tensors: *const *const C_tensor) -> [Option<Tensor>; N] {
    std::array::from_fn(|i| ffi::borrow(*tensors.add(i)))
}
