//! The family of norms with statistics of columns: measure the batch, settle what x̂ is made with, write it; and back.

use super::collective::numbers;
use super::count::Count;
use super::declare::{leader, make, run, tensor, Derivative, Kind as Type, Operator};
use super::device_columns;
use super::engine::{self, Handle};
use super::ffi::{by_dtype, Call, Value, View, Why};
use super::Group;
use crate::cpu::parallel::{self, Shared};
use crate::cpu::{memory, Accumulator, Element};
use crate::cuda::Program;
use crate::error::{Error, Result};
use crate::norm::columns::{self, Batch, Options, Slopes, State, Stats};
use crate::norm::statistics::{self, Measured, StateTensors, Used};
use tch::Tensor;

/// A norm with statistics of columns as an operator.
pub struct ColumnKernels {
    /// torch.ops.normformer_rs.`operator`.
    pub operator: &'static str,
    /// What the schema calls the two buffers.
    pub state: [&'static str; 2],
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
    pub handle: Handle,
}

impl ColumnKernels {
    /// Defaults: not centred, exact gradient. `settle` and `composed` must be given.
    pub const fn new(operator: &'static str, program: Program) -> Self {
        ColumnKernels {
            operator,
            state: ["first", "second"],
            centred: false,
            approximate: false,
            settle: |_, _, _| unreachable!("every norm says how it settles"),
            composed: |_, _, _| unreachable!("every norm says how it settles"),
            program,
            count: Count::new(operator),
            handle: Handle::new(operator),
        }
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
    let (state, o) = (&call.state, &call.options);
    let (variant, group) = (if o.release { "release" } else { "paper" }, o.group.name());
    kernels
        .handle
        .call(&[
            call.x.into(),
            call.weight.into(),
            call.bias.into(),
            call.pad_mask.into(),
            state.first.as_ref().into(),
            state.second.as_ref().into(),
            state.iters.as_ref().into(),
            state.refused.as_ref().into(),
            call.stats.into(),
            o.train.into(),
            o.alpha.into(),
            o.eps.into(),
            o.alpha_bwd.into(),
            o.warmup.into(),
            variant.into(),
            group.as_str().into(),
        ])
        .map(|[y, stats]| (y, stats))
}

// ---- the operators ----

pub(super) fn operator(k: &'static ColumnKernels) -> Operator {
    let (name, [first, second]) = (k.operator, k.state);
    let per_column = |name| tensor(name, "=d", Type::Floating).optional();
    let pad = || tensor("pad_mask", "*", Type::Bool).optional();
    let counter = |name| tensor(name, "=1", Type::Int64).optional().state();
    let stats = || tensor("stats", format!("{}d", Stats::ROWS), Type::Computed);
    Operator {
        schema: format!(
            "{name}(Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? pad_mask=None, Tensor(a!)? {first}=None, \
             Tensor(b!)? {second}=None, Tensor(c!)? iters=None, Tensor(d!)? refused=None, Tensor? stats=None, *, \
             bool train, float alpha=0.9, float eps=1e-05, float alpha_bwd=0.9, int warmup=0, str variant=\"paper\", \
             str group=\"\") -> (Tensor, Tensor)"
        ),
        arguments: vec![
            leader("x", "*d"),
            per_column("weight").computed(),
            per_column("bias").computed().kept(),
            pad(),
            per_column(first).state().kept_plain(),
            per_column(second).state(),
            counter("iters"),
            counter("refused"),
            stats().optional(),
        ],
        outputs: vec![tensor("y", "*d", Type::Same), stats()],
        plan: run(move |call| plan(k, call)),
        kernel: run(move |call| forward(k, call)),
        formula: make(move |call| {
            let [x, weight, bias, pad, buffers @ .., stats, _, _, _, _, _, _, _] = call.arguments::<16>();
            let [x, weight, bias, pad, stats] = [x, weight, bias, pad, stats].map(Value::tensor);
            let x = x.expect("the schema requires it");
            let [first, second, iters, refused] = buffers.each_ref().map(Value::tensor);
            let state = StateTensors { first, second, iters, refused };
            let (parameters, o) = ((weight.as_ref(), bias.as_ref()), options(k, call)?);
            let (y, used) = statistics::forward(k, &x, parameters, pad.as_ref(), &state, stats.as_ref(), &o)?;
            Ok(vec![Some(y), Some(used)])
        }),
        derivative: Some(Derivative {
            backward: Box::new(Operator {
                schema: format!(
                    "{name}_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? pad_mask, Tensor(a!)? {second}, \
                     Tensor(b!)? refused, Tensor stats, *, bool train, float alpha_bwd=0.9, str variant=\"paper\", \
                     str group=\"\") -> (Tensor, Tensor, Tensor)"
                ),
                arguments: vec![
                    tensor("dy", "*d", Type::Same),
                    leader("x", "*d"),
                    per_column("weight").computed(),
                    pad(),
                    per_column(second).state(),
                    counter("refused"),
                    stats(),
                ],
                outputs: vec![
                    tensor("dx", "*d", Type::Same),
                    tensor("dweight", "d", Type::Computed),
                    tensor("dbias", "d", Type::Computed),
                ],
                plan: run(move |call| {
                    let o = backward_options(k, call)?;
                    if call.device().is_some() && !o.group.is_alone() {
                        call.decline();
                    }
                    Ok(())
                }),
                kernel: run(move |call| backward(k, call)),
                formula: make(move |call| {
                    let [dy, x, weight, pad, second, refused, stats, ..] = call.arguments::<11>();
                    let [dy, x, stats] = [dy, x, stats].map(Value::required);
                    let (weight, pad) = (weight.tensor(), pad.tensor());
                    let state =
                        StateTensors { second: second.tensor(), refused: refused.tensor(), ..StateTensors::default() };
                    let (weight, pad, o) = (weight.as_ref(), pad.as_ref(), backward_options(k, call)?);
                    let (dx, dweight, dbias) = statistics::backward(k, &dy, &x, weight, pad, &stats, &state, &o)?;
                    Ok([dx, dweight, dbias].map(Some).into())
                }),
                ..Operator::default()
            }),
            again: make(move |call| again(k, call)),
        }),
        has_own_gradient: true,
        count: Some(&k.count),
        ..Operator::default()
    }
}

fn is_release(k: &ColumnKernels, variant: &Value) -> Result<bool> {
    match variant.text() {
        "paper" => Ok(false),
        "release" => Ok(true),
        other => Err(Error::invalid(format!("{}: variant must be one of paper, release; got \"{other}\"", k.operator))),
    }
}

fn group(k: &ColumnKernels, name: &Value) -> Result<Group> {
    Group::named(name.text()).ok_or_else(|| {
        Error::invalid(format!(
            "{}: \"{}\" is no process group that normformer_rs was told of; give the module sync=True, which tells it",
            k.operator,
            name.text()
        ))
    })
}

/// The numbers of a forward call.
fn options(k: &ColumnKernels, call: &Call) -> Result<Options> {
    let [.., train, alpha, eps, alpha_bwd, warmup, variant, name] = call.arguments::<16>();
    Ok(Options {
        alpha: alpha.float(),
        alpha_bwd: alpha_bwd.float(),
        eps: eps.float(),
        warmup: warmup.int(),
        group: group(k, name)?,
        train: train.flag(),
        release: is_release(k, variant)?,
    })
}

fn backward_options(k: &ColumnKernels, call: &Call) -> Result<Options> {
    let [.., train, alpha_bwd, variant, name] = call.arguments::<11>();
    let (group, release) = (group(k, name)?, is_release(k, variant)?);
    Ok(Options { alpha_bwd: alpha_bwd.float(), group, train: train.flag(), release, ..Options::default() })
}

fn plan(k: &ColumnKernels, call: &Call) -> Result<()> {
    let ([.., first, second, iters, _, _, _, _, _, _, _, _, _], o) = (call.arguments::<16>(), options(k, call)?);
    let (name, [own_first, own_second]) = (k.operator, k.state);
    if k.approximate && [first, second, iters].into_iter().any(Value::is_none) {
        return Err(Error::invalid(format!("{name} needs its buffers {own_first}, {own_second} and iters")));
    }
    if k.centred && first.is_none() != second.is_none() {
        let both = format!("{name} needs both of its buffers {own_first} and {own_second}, or neither");
        return Err(Error::invalid(both));
    }
    let refuse = |why: &str| Err(Error::NotImplemented(format!("{name}: {why}")));
    match call.why() {
        Why::Transform if k.approximate && o.train => refuse(
            "torch.func differentiates formulas, and the gradient in training is PowerNorm's approximation, which is no \
             formula's: use loss.backward(), or call eval() first",
        ),
        Why::Transform if !o.group.is_alone() => {
            refuse("torch.func sees one process only: train without sync, or use loss.backward()")
        }
        Why::Batch if o.train && !first.is_none() => refuse(
            "under vmap every example would move the running statistics: call eval() first, or give no buffers",
        ),
        _ => {
            // A GPU's kernels know one process, and buffers of one type.
            let mixed = !second.is_none() && first.dtype != second.dtype;
            if call.device().is_some() && (mixed || !o.group.is_alone()) {
                call.decline();
            }
            Ok(())
        }
    }
}

/// Gradients by the formula, which can be differentiated again.
fn again(k: &ColumnKernels, call: &Call) -> Result<Vec<Option<Tensor>>> {
    let [x, weight, bias, pad, first, ..] = call.arguments::<16>();
    let ([_, stats], [dy, _], o) = (call.outputs(), call.gradients(), options(k, call)?);
    let refuse = |why: &str| Err(Error::NotImplemented(format!("{}: {why}", k.operator)));
    if !o.group.is_alone() {
        return refuse(
            "statistics over several ranks have no second derivative: train without create_graph, or without sync",
        );
    }
    if k.approximate && o.train {
        return refuse(
            "the gradient in training is PowerNorm's approximation (Shen et al. 2020, eq 11), which is no function's \
             derivative and has none itself: train without create_graph, take powernorm-v, or call eval() first",
        );
    }
    k.count.composed();
    // A formula of the batch is formed again; one of running statistics has them as constants.
    let from_batch = o.train || first.is_none();
    let given = if from_batch { None } else { stats.tensor() };
    let (pad, state, o) = (pad.tensor(), StateTensors::default(), Options { train: from_batch, ..o });
    let inputs = [x, weight, bias].map(Value::tensor);
    let mut made = engine::gradients_again(&inputs, &dy.required(), |inputs| {
        let [Some(x), weight, bias] = inputs else { unreachable!("the schema requires x") };
        let parameters = (weight.as_ref(), bias.as_ref());
        Ok(statistics::forward(k, x, parameters, pad.as_ref(), &state, given.as_ref(), &o)?.0)
    })?;
    made.resize_with(9, || None);
    Ok(made)
}

// ---- kernels ----

/// x and y (or dy and dx) with everything between them; absent views have null data.
pub(super) struct Views {
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
}

pub(super) struct Gradients {
    pub dy: View,
    pub dx: View,
    pub dweight: View,
    pub dbias: View,
}

fn forward(k: &'static ColumnKernels, call: &Call) -> Result<()> {
    let ([x, weight, bias, pad, first, second, iters, refused, given, ..], [y, stats]) =
        (call.arguments::<16>(), call.outputs());
    let v = Views {
        x: x.view,
        weight: weight.view,
        bias: bias.view,
        pad: of_rows(&x.view, pad),
        first: first.view,
        second: second.view,
        iters: iters.view,
        refused: refused.view,
        wide_state: is_wide(first),
        given: !given.is_none(),
        options: options(k, call)?,
        y: y.view,
        stats: stats.view,
    };
    if let Some(given) = given.tensor() {
        stats.required().f_copy_(&given)?;
    }
    match call.device() {
        None => by_dtype!(v.x, E => forward_typed::<E>(k, &v))?,
        Some(device) => device_columns::forward(device, k, &v)?,
    }
    if v.options.train && !v.given {
        // The buffers, by their places among the arguments; PowerNorm's second moves in the backward pass.
        let moved: &[usize] = if k.approximate { &[4, 6, 7] } else { &[4, 5, 6, 7] };
        moved.iter().for_each(|i| call.write_back(*i));
    }
    Ok(())
}

fn backward(k: &'static ColumnKernels, call: &Call) -> Result<()> {
    let ([dy, x, weight, pad, second, refused, stats, ..], [dx, dweight, dbias]) =
        (call.arguments::<11>(), call.outputs());
    let v = Views {
        x: x.view,
        weight: weight.view,
        bias: View::ABSENT,
        pad: of_rows(&x.view, pad),
        first: View::ABSENT,
        second: second.view,
        iters: View::ABSENT,
        refused: refused.view,
        wide_state: is_wide(second),
        given: false,
        options: backward_options(k, call)?,
        y: View::ABSENT,
        stats: stats.view,
    };
    let d = Gradients { dy: dy.view, dx: dx.view, dweight: dweight.view, dbias: dbias.view };
    match call.device() {
        None => by_dtype!(v.x, E => backward_typed::<E>(k, &v, &d))?,
        Some(device) => device_columns::backward(device, k, &v, &d)?,
    }
    if v.options.train && k.approximate {
        // So too, among the backward operator's.
        [4, 5].into_iter().for_each(|i| call.write_back(i));
    }
    Ok(())
}

fn is_wide(buffer: &Value) -> bool {
    buffer.dtype == 1
}

impl Views {
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

/// The mask of x's rows: none where x has no numbers, of which its view has no rows.
fn of_rows(x: &View, pad: &Value) -> View {
    match x.rows() {
        0 => View::ABSENT,
        _ => pad.view,
    }
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
    let all = numbers(&o.group.gather(&Tensor::f_from_slice(&mine)?)?)?;
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

fn forward_typed<E: Element>(kernels: &ColumnKernels, v: &Views) -> Result<()> {
    let cols = v.stats.cols();
    // SAFETY: C++ gave contiguous tensors of E (parameters and statistics of its accumulation type), a mask of
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

fn backward_typed<E: Element>(kernels: &ColumnKernels, v: &Views, d: &Gradients) -> Result<()> {
    let cols = v.stats.cols();
    // SAFETY: as in `forward_typed`.
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
        let mine = memory::collected(sum.iter().chain(&sum_x).copied());
        let all = numbers(&o.group.sum(&Tensor::f_from_slice(&mine)?)?)?;
        sum.copy_from_slice(&all[..cols]);
        sum_x.copy_from_slice(&all[cols..]);
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
