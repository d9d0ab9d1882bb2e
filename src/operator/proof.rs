//! The first use of a kernel's variant on a device: its results are compared with the formula's (docs/cuda.md).
//!
//! A proof calls the operator with tensors of its own: of the types, widths, alignment and presence that the call at
//! hand has, so that the same variants run. Their rows are more than the device takes at once. Once more with rows of
//! corner cases: huge, tiny or zero, with a NaN, with one large number at an end, or shorter than ε. What a kernel asks at run time is asked in several ways: whether there is a
//! mask, and of norms with statistics whether it leaves any row, whether they train, which of the two variants they are,
//! and whether what comes in is finite. Their counters stand early, late and where a warm-up ends; late their columns have
//! means. They meet few rows, and more than a hundred thousand. The formula computes the same in f64 where the call is f32.

use super::argument::{Argument, DtypeRule, Reading, LEADER, OPTIONAL, WRITTEN};
use super::call::{replaced, scalar_type, Call, Value};
use super::declare::Operator;
use super::engine;
use super::ffi::caught;
use super::register::Declared;
use crate::cuda::verdict::{self, Verdict};
use crate::cuda::{self, Device, Layout};
use crate::error::Result;
use crate::kernel::columns::gpu::slab_of;
use std::sync::{Mutex, PoisonError};
use tch::{Kind, Tensor};

/// Compares the variants that a call needs, and tells the verdict. None: they are right; else what was wrong.
pub fn prove(operator: &Operator, call: &Call, device: Device) -> Option<String> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (compared, launched) = verdict::launched(|| caught(|| tch::no_grad(|| compare(operator, call, device))));
    let unknown = verdict::unknown(&launched);
    let (verdict, what) = match compared {
        Ok(None) => (Verdict::Right, None),
        Ok(Some(how)) => (Verdict::Wrong, Some(format!("disagrees with its formula ({how})"))),
        Err(e) => (Verdict::Off, Some(format!("could not be compared with its formula ({e})"))),
    };
    verdict::judge(&unknown, verdict);
    let names: Vec<String> = unknown.iter().map(|variant| variant.name()).collect();
    what.map(|what| format!("{} {what}: {}", operator.name(), names.join("; ")))
}

#[derive(Clone, Copy, PartialEq)]
enum Case {
    Usual,
    Extreme,
    /// Without the call's mask, or with one.
    Masked,
    /// Every row is padding, in a warm-up: there is nothing to count.
    Padding,
    /// Columns have means, and counters are high.
    Late,
    /// Training for evaluation, and the other way round.
    Other,
    /// Counters are so many steps before the end of a warm-up, and rows are few.
    Before(i64),
    /// The release for the paper, and the other way round; every so-manyth row is padding.
    Variant(i64),
    /// One number in this column is not finite; of flat buffers, the numbers that all of them are scaled by.
    Spoilt(i64),
    /// So many rows in a few columns that what takes them together grows.
    Long,
}

/// How the results differ, if they do. An error: they could not be compared.
fn compare(operator: &Operator, call: &Call, device: Device) -> Result<Option<String>> {
    use Case::{Before, Extreme, Late, Long, Masked, Other, Padding, Spoilt, Usual, Variant};
    let first = [Usual, Extreme, Masked, Padding, Late, Other, Before(1), Before(0)];
    for case in first.into_iter().chain([Variant(2), Variant(1), Spoilt(0), Spoilt(-1), Long]) {
        let Some((given, arguments)) = arguments(operator, call, device, case)? else { continue };
        let (kernel, formula) = (copies(&arguments)?, wide(&copies(&arguments)?)?); // each writes its own
        let by_kernel = engine::call_by_name(operator.name(), &replaced(&given, &kernel), operator.outputs.len())?;
        let by_formula = call.with_values(&replaced(&given, &formula), |call| operator.formula_of(call))?;
        let outputs = operator.outputs.iter().zip(&by_kernel).zip(&by_formula);
        let outputs = outputs.filter_map(|((output, found), expected)| Some((output.name, found, expected.as_ref()?)));
        let declared = Declared::new(operator)?;
        let written = declared.table.iter().filter(|(argument, _)| is_written(argument));
        let written = written.filter_map(|(a, at)| Some((a.name, kernel[*at].as_ref()?, formula[*at].as_ref()?)));
        for (name, found, expected) in outputs.chain(written).filter(|(_, found, _)| found.numel() > 0) {
            if let Some(how) = difference(found, expected)? {
                return Ok(Some(format!("{name} {how}")));
            }
        }
    }
    Ok(None)
}

fn is_written(argument: &Argument) -> bool {
    argument.is & WRITTEN != 0 || matches!(argument.reading, Reading::State)
}

fn copies(all: &[Option<Tensor>]) -> Result<Tensors> {
    all.iter().map(|t| t.as_ref().map(|t| aligned_as(t, t.kind(), t.data_ptr().addr())).transpose()).collect()
}

/// f32 as f64; 16-bit types stay, since formulas round where kernels do.
fn wide(all: &[Option<Tensor>]) -> Result<Tensors> {
    let is_narrow = all.iter().flatten().any(|t| matches!(t.kind(), Kind::BFloat16 | Kind::Half));
    let widened = |t: &Tensor| match t.kind() {
        Kind::Float if !is_narrow => t.f_to_kind(Kind::Double),
        _ => t.f_view_as(t),
    };
    all.iter().map(|t| Ok(t.as_ref().map(widened).transpose()?)).collect()
}

// ---- the arguments of a proof ----

/// Tensors at the places of the schema; None: these numbers make no sense for this operator.
fn arguments(operator: &Operator, call: &Call, device: Device, case: Case) -> Result<Option<(Vec<Value>, Tensors)>> {
    let declared = Declared::new(operator)?;
    let (leader, leaders) = declared.leader()?;
    let place_of = |name: &str| declared.formals.iter().position(|formal| formal.name == name);
    let mut given = call.all().to_vec();
    let x = given[leaders].required();
    let has_state = declared.table.iter().any(|(argument, _)| matches!(argument.reading, Reading::State));
    let Some(fabricated) = staged(case, &declared, has_state, &mut given)? else { return Ok(None) };
    let is_dropped = place_of("seed").and(place_of("p")).is_some_and(|p| given[p].float() > 0.0);
    let counter = match case {
        Case::Late | Case::Other | Case::Variant(_) => Some(LATE),
        Case::Padding => Some(0),
        Case::Before(steps) => place_of("warmup").map(|place| given[place].int() - steps),
        _ => None,
    };
    let (is_backward, is_whole) = (operator.forward.get().is_some(), leader.sizes == "*");
    let rows = match case {
        Case::Long => LONG,
        Case::Before(_) => FEW,
        _ => rows(&x, device),
    };
    let eps = place_of("eps").map_or(1.0, |place| given[place].float());
    // Where a mask is made the first row is padding, which the paper's rule never looks at.
    let is_papers = place_of("variant").is_some_and(|place| given[place].text() == "paper");
    let has_mask = matches!(case, Case::Masked | Case::Long) && fabricated.iter().any(|t| t.kind() == Kind::Bool);
    let is_hidden = has_mask && is_papers;
    let has_corners = leader.sizes == "*d" && !has_state;
    let made = Maker { is_dropped, has_state, has_corners, is_hidden, is_backward, rows, is_whole, case, counter, eps };
    let tensors = match operator.forward.get().filter(|_| declared.table.iter().any(|(a, _)| is_kept(operator, a))) {
        None => made.all(&declared, &given)?,
        Some(forward) => made.after(forward, &declared, &given)?,
    };
    Ok(Some((given, tensors)))
}

/// Makes `given` what the case says, and returns the tensors that it then points to. None: the case makes no sense here.
fn staged(case: Case, declared: &Declared, has_state: bool, given: &mut [Value]) -> Result<Option<Vec<Tensor>>> {
    let (leader, leaders) = declared.leader()?;
    let place_of = |name: &str| declared.formals.iter().position(|formal| formal.name == name);
    let x = given[leaders].required();
    let mask = declared.table.iter().find(|(argument, _)| argument.dtype == DtypeRule::Bool);
    let mut fabricated: Vec<(usize, Tensor)> = Vec::new();
    match (case, mask) {
        // Flat buffers have no rows, and of one number nothing is left that could be compared.
        (Case::Extreme, _) if leader.sizes == "=n" || x.size().last() == Some(&1) => return Ok(None),
        (Case::Late | Case::Padding | Case::Long, _) if !has_state => return Ok(None),
        (Case::Spoilt(_), _) if !has_state && leader.sizes != "=n" => return Ok(None),
        // In evaluation the formula multiplies what is infinite by zero.
        (Case::Spoilt(_), _) if place_of("train").is_some_and(|place| !given[place].flag()) => return Ok(None),
        (Case::Masked | Case::Padding, None) => return Ok(None),
        (Case::Masked, Some((_, place))) if !given[*place].is_none() => given[*place] = Value::from(None::<f64>),
        // A target outside the vocabulary has no gradient that could be compared.
        (Case::Masked | Case::Padding, Some((argument, _))) if argument.sizes != "*" => return Ok(None),
        (Case::Masked | Case::Padding | Case::Variant(_), Some((_, place))) => {
            let every = match case {
                Case::Padding => 1,
                Case::Variant(every) => every,
                _ => 2,
            };
            let mask = counted(&x.size()[..x.dim() - 1], x.device())?.f_remainder(every)?.f_eq(0)?;
            fabricated.push((*place, mask));
        }
        (Case::Long, Some((_, place))) => {
            // Of every other slab the last rows alone are real.
            let (row, slab) = (counted(&[LONG], x.device())?, slab_of(LONG));
            let is_first = row.f_remainder(slab)?.f_lt(slab * 3 / 4)?;
            fabricated.push((*place, row.f_remainder(2 * slab)?.f_lt(slab)?.f_logical_and(&is_first)?));
        }
        (Case::Other, _) => match place_of("train") {
            Some(place) => given[place] = Value::from(!given[place].flag()),
            None => return Ok(None),
        },
        (Case::Before(_), _) if place_of("warmup").is_none() => return Ok(None),
        _ => (),
    }
    match (case, place_of("variant")) {
        (Case::Variant(_), None) => return Ok(None),
        (Case::Variant(_), Some(place)) => {
            given[place] = Value::from(if given[place].text() == "paper" { "release" } else { "paper" })
        }
        _ => (),
    }
    if let (Case::Before(_) | Case::Padding, Some(place)) = (case, place_of("warmup")) {
        given[place] = Value::from(given[place].int().max(3));
    }
    if case == Case::Long {
        for (argument, place) in declared.table.iter().filter(|(argument, _)| argument.sizes.ends_with('d')) {
            if let Some(real) = given[*place].tensor() {
                fabricated.push((*place, few_columns(argument, &real)?));
            }
        }
    }
    for (place, tensor) in &fabricated {
        let view = given[*place].view; // its address decides how the proof's own tensor lies
        given[*place] = tensor.into();
        given[*place].view = view;
    }
    Ok(Some(fabricated.into_iter().map(|(_, tensor)| tensor).collect()))
}

type Tensors = Vec<Option<Tensor>>;

/// 0, 1, 2 …, of this shape.
fn counted(size: &[i64], device: tch::Device) -> Result<Tensor> {
    Ok(Tensor::f_arange(size.iter().product::<i64>(), (Kind::Int64, device))?.f_view(size)?)
}

/// As few columns as have the rests of all of them: kernels read by those.
fn few_columns(argument: &Argument, real: &Tensor) -> Result<Tensor> {
    let real = if argument.sizes == "=d" { real.f_reshape([-1].as_slice())? } else { real.f_view_as(real)? };
    let columns = real.size().last().copied().unwrap_or(1);
    Ok(real.f_narrow(-1, 0, columns.min(WIDE + columns % WIDE))?.f_contiguous()?)
}

/// Whether a backward operator's argument is an output of the forward one: it must fit the input.
fn is_kept(backward: &Operator, argument: &Argument) -> bool {
    let outputs = backward.forward.get().map_or(&[][..], |forward| &forward.outputs[..]);
    outputs.iter().any(|output| output.name == argument.name)
}

/// More rows than the device's blocks take at once, and so few that f64 copies stay small.
fn rows(leader: &Tensor, device: Device) -> i64 {
    let at_once = 4 * Layout::most_blocks(cuda::multiprocessors(device).unwrap_or(1));
    let most = (1 << 24) / leader.size().last().copied().unwrap_or(1).max(1);
    i64::from(2 * at_once + 3).min(most.max(LEAST))
}

/// Rows that are too many for one block, and are missing or left over wherever rows are taken together.
const LEAST: i64 = 67;

/// So few that one too many shows, and more slabs than a block has warps.
const FEW: i64 = 579;

/// Numbers of gradients are others than those of inputs at the same place: along x a norm has no slope.
const GRADIENTS: usize = 64;

/// Rows whose slabs are longer than the shortest.
const LONG: i64 = 140_000;

/// Columns that a kernel reads at once, at most.
const WIDE: i64 = 8;

/// How many rows are corner cases.
const CORNERS: i64 = 11;

/// What counters show late in a training.
const LATE: i64 = 1_000_000;

/// How many numbers flat buffers have, but for what is over sixteen.
const FLAT: i64 = 1 << 14;

struct Maker {
    rows: i64,
    /// The leader's shape is its own: no other dimension follows its rows.
    is_whole: bool,
    /// A NaN that is dropped may be 0 or NaN.
    is_dropped: bool,
    /// It has buffers that move.
    has_state: bool,
    /// Its rows are those of a norm that measures each.
    has_corners: bool,
    /// Nobody may look at the first row.
    is_hidden: bool,
    is_backward: bool,
    case: Case,
    /// The value of its counters. None: the call's own values.
    counter: Option<i64>,
    /// The call's, or 1.
    eps: f64,
}

impl Maker {
    /// A tensor for each that is there.
    fn all(&self, declared: &Declared, given: &[Value]) -> Result<Tensors> {
        let mut made: Tensors = given.iter().map(|_| None).collect();
        for (argument, place) in &declared.table {
            if let Some(real) = given[*place].tensor() {
                made[*place] = Some(self.tensor(argument, *place, &real, given[*place].view.data.addr())?);
            }
        }
        Ok(made)
    }

    /// For a backward operator: the forward pass runs on such tensors, so that what it keeps belongs together.
    fn after(&self, forward: &Operator, backward: &Declared, all: &[Value]) -> Result<Tensors> {
        let before = Declared::new(forward)?;
        let place_of = |name: &str| backward.formals.iter().position(|formal| formal.name == name);
        let like = all[backward.leader()?.1].required();
        let seed = Tensor::f_from_slice(&[3i64, 1, 4])?.f_to_device(like.device())?;
        let dy = place_of("dy").map(|place| all[place]).filter(|dy| !dy.is_none());
        // Buffers that only the forward pass takes. Their counter and a warm-up of one make it a first update.
        let (statistics, counter) = buffers(backward, all, &like)?;
        let absent = Value::from(None::<f64>);
        let mut given = Vec::with_capacity(before.formals.len());
        for (place, formal) in before.formals.iter().enumerate() {
            let row = before.table.iter().find(|(_, at)| *at == place).map(|(argument, _)| *argument);
            // A norm takes statistics, too, in place of measuring its rows. Here it shall measure them.
            let is_made = forward.outputs.iter().any(|output| output.name == formal.name);
            let known = place_of(formal.name).map(|place| all[place]).filter(|value| !is_made && !value.is_none());
            given.push(match (known, row, formal.name) {
                (Some(value), ..) => value,
                (None, Some(argument), _) if argument.is & OPTIONAL == 0 => Value::from(&like),
                (None, Some(_), "seed") => Value::from(&seed),
                (None, Some(argument), _) if matches!(argument.reading, Reading::State) => {
                    Value::from(if argument.dtype == DtypeRule::Int64 { &counter } else { &statistics })
                }
                (None, Some(_), _) => absent,
                (None, None, "dtype") => {
                    dy.and_then(|dy| dy.tensor()).map_or(absent, |dy| scalar_type(dy.kind()).into())
                }
                (None, None, "warmup") => Value::from(1i64),
                (None, None, _) => formal.default.map_or(Value::from(0i64), Value::from),
            });
        }
        let inputs = self.all(&before, &given)?;
        let outputs = engine::call_by_name(forward.name(), &replaced(&given, &inputs), forward.outputs.len())?;
        let mut made: Tensors = all.iter().map(|_| None).collect();
        for (argument, place) in &backward.table {
            let Some(real) = all[*place].tensor() else { continue };
            let output = |name: &str| forward.outputs.iter().position(|output| output.name == name);
            let gradient_of = argument.name.strip_prefix('d').and_then(output);
            let address = all[*place].view.data.addr();
            made[*place] = Some(match (gradient_of, output(argument.name)) {
                (Some(k), _) => {
                    let drawn = self.random(&outputs[k].size(), *place + GRADIENTS, &real, address)?;
                    self.spoilt(drawn, f64::INFINITY)?
                }
                (None, Some(k)) => aligned_as(&outputs[k], real.kind(), address)?,
                (None, None) => {
                    let at = before.formals.iter().position(|formal| formal.name == argument.name);
                    let input = at.and_then(|at| inputs[at].as_ref());
                    aligned_as(input.unwrap_or(&real), real.kind(), address)?
                }
            });
        }
        Ok(made)
    }

    /// One in the place of `real`.
    fn tensor(&self, argument: &Argument, place: usize, real: &Tensor, address: usize) -> Result<Tensor> {
        let size = self.size(&argument.sizes, real);
        if !real.is_floating_point() {
            let counter = self.counter.filter(|_| matches!(argument.reading, Reading::State));
            return match (size == real.size(), counter) {
                (true, Some(steps)) => Ok(real.f_full_like(steps)?),
                (true, None) => aligned_as(real, real.kind(), address),
                (false, _) => repeated(real, &size),
            };
        }
        let has_rows = argument.sizes.starts_with(['*', 'n']) || argument.sizes == "=n";
        let is_leader = argument.is & LEADER != 0;
        if !has_rows && !argument.sizes.contains('d')
            || argument.sizes.starts_with(|c: char| c.is_ascii_digit() && c != '1')
        {
            let is_scale = argument.sizes == "=1" && matches!(self.case, Case::Spoilt(_));
            let scale = if is_scale { real.f_full_like(f64::NAN)? } else { real.f_view_as(real)? };
            return aligned_as(&scale, real.kind(), address);
        }
        let drawn = self.random(&size, place, real, address)?.f_to_kind(Kind::Double)?;
        let drawn = match () {
            _ if is_leader && self.case == Case::Extreme => self.extreme(&drawn, real.kind())?,
            _ if is_leader && self.case == Case::Late => drawn.f_add_scalar(100.0)?,
            // The last rows of a slab lie far from its first, and slabs far from each other.
            _ if is_leader && self.case == Case::Long => {
                let row = counted(&[self.rows, 1], real.device())?;
                let (in_slab, in_all) =
                    (row.f_remainder(slab_of(self.rows))?.f_mul_scalar(0.1)?, row.f_mul_scalar(1e-3)?);
                drawn.f_add(&in_slab)?.f_add(&in_all)?.f_add_scalar(if real.kind() == Kind::Half {
                    300.0
                } else {
                    3000.0
                })?
            }
            _ if is_leader && !self.is_backward => self.spoilt(drawn, f64::NAN)?,
            _ if is_leader => drawn,
            _ if is_written(argument) => drawn.f_abs()?.f_add_scalar(0.1)?,
            _ if has_rows => drawn,
            _ => drawn.f_mul_scalar(0.5)?.f_add_scalar(1.0)?,
        };
        if is_leader && self.is_hidden {
            let _ = drawn.f_select(0, 0)?.f_fill_(f64::NAN)?;
        }
        aligned_as(&drawn, real.kind(), address)
    }

    /// With rows of corner cases. Squares leave f32's range, but for statistics of columns, which are then refused.
    fn extreme(&self, x: &Tensor, kind: Kind) -> Result<Tensor> {
        let (huge, tiny) = match (kind, self.has_state) {
            // If one row dominates a column's statistics, its exact gradient is nearly 0: rounding would be compared.
            (_, true) if self.is_backward => (3.0, 1e-3),
            (Kind::Half, _) => (1e3, 1e-3),
            (_, true) => (1e12, 1e-12),
            (_, false) => (1e25, 1e-25),
        };
        let x = x.f_detach_copy()?;
        for (row, factor) in [(0, huge), (1, tiny), (2, 0.0)] {
            let _ = x.f_select(0, row)?.f_mul_scalar_(factor)?;
        }
        let put = |row, column, number: f64| -> Result<Tensor> {
            Ok(x.f_select(0, row)?.f_select(-1, column)?.f_fill_(number)?)
        };
        if !self.is_dropped && x.dim() > 1 && x.size()[0] > 4 {
            let _ = put(4, -1, f64::NAN)?;
        }
        if self.has_corners && x.size()[0] >= CORNERS {
            // The largest twice, or once at either end.
            for (row, column, number) in [(6, 0, huge), (6, -1, -huge), (7, 0, huge), (8, -1, huge), (9, 0, 0.0)] {
                let _ = put(row, column, number)?;
            }
            if !self.is_dropped {
                let _ = put(3, 0, f64::NAN)?;
            }
            // About as long as ε.
            for (row, share) in [(5, 0.6), (10, 1.4)] {
                let _ = x.f_select(0, row)?.f_mul_scalar_(share * self.eps / (x.size()[1] as f64).sqrt())?;
            }
        }
        Ok(x)
    }

    /// With one number that is not finite, where the case has one.
    fn spoilt(&self, x: Tensor, with: f64) -> Result<Tensor> {
        if let (Case::Spoilt(column), true) = (self.case, x.dim() > 1) {
            let _ = x.f_select(0, self.rows / 2)?.f_select(-1, column)?.f_fill_(with)?;
        }
        Ok(x)
    }

    fn size(&self, sizes: &str, real: &Tensor) -> Vec<i64> {
        let size = real.size();
        let after = |k: usize| size[size.len().saturating_sub(k)..].iter().copied();
        match sizes {
            "=n" => vec![FLAT + real.numel() as i64 % 16],
            "*" if self.is_whole => {
                std::iter::once((FLAT / size.last().copied().unwrap_or(1).max(1)).clamp(3, self.rows))
                    .chain(after(1))
                    .collect()
            }
            _ if sizes.starts_with(['*', 'n']) => std::iter::once(self.rows).chain(after(sizes.len() - 1)).collect(),
            _ => size,
        }
    }

    /// Nearly normal numbers that no generator of torch's has to give.
    fn random(&self, size: &[i64], salt: usize, like: &Tensor, address: usize) -> Result<Tensor> {
        let count: i64 = size.iter().product();
        let index = Tensor::f_arange(count, (Kind::Double, like.device()))?;
        let mut sum = Tensor::f_full([count].as_slice(), -2.0, (Kind::Double, like.device()))?;
        for term in 0..4 {
            let phase = (4 * salt + term) as f64;
            let wild = index.f_mul_scalar(12.9898 + phase)?.f_sin()?.f_mul_scalar(43758.5453 + phase)?;
            sum = sum.f_add(&wild.f_sub(&wild.f_floor()?)?)?;
        }
        aligned_as(&sum.f_mul_scalar(3f64.sqrt())?.f_view(size)?, like.kind(), address)
    }
}

/// Statistics of columns like those that the backward pass has, and a counter.
fn buffers(backward: &Declared, all: &[Value], like: &Tensor) -> Result<(Tensor, Tensor)> {
    let states = backward.table.iter().filter(|(argument, _)| matches!(argument.reading, Reading::State));
    let kind = states.filter_map(|(_, at)| all[*at].tensor()).map(|t| t.kind()).find(|kind| *kind != Kind::Int64);
    let columns = like.size().last().copied().unwrap_or(1);
    let statistics = Tensor::f_ones([columns].as_slice(), (kind.unwrap_or(Kind::Float), like.device()))?;
    Ok((statistics, Tensor::f_zeros([1].as_slice(), (Kind::Int64, like.device()))?))
}

/// The rows of `real` again and again.
fn repeated(real: &Tensor, size: &[i64]) -> Result<Tensor> {
    let row = &size[1..];
    let all = real.f_reshape([&[-1], row].concat().as_slice())?;
    let index = Tensor::f_arange(size[0], (Kind::Int64, real.device()))?.f_remainder(all.size()[0].max(1))?;
    Ok(all.f_index_select(0, &index)?)
}

/// A copy whose address leaves the same rest as `address`, divided by sixteen: kernels read by it.
fn aligned_as(t: &Tensor, kind: Kind, address: usize) -> Result<Tensor> {
    let offset = (address % 16 / kind.elt_size_in_bytes()) as i64;
    let count = t.numel() as i64;
    let room = Tensor::f_empty([count + offset].as_slice(), (kind, t.device()))?;
    let mut copy = room.f_narrow(0, offset, count)?.f_view(t.size().as_slice())?;
    copy.f_copy_(t)?;
    Ok(copy)
}

// ---- the comparison ----

/// How a result differs from the formula's beyond what rounding explains.
fn difference(found: &Tensor, expected: &Tensor) -> Result<Option<String>> {
    // Of a number, of the largest in its row, on average of a row, and of the smallest numbers.
    let (of_number, of_row, of_mean, least) = match found.kind() {
        // On a GPU f64 parameters have been computed in f32.
        Kind::Float | Kind::Double => (1e-4, 2e-5, 1e-5, 1e-30),
        Kind::BFloat16 => (2f64.powi(-7), 2f64.powi(-8), 2f64.powi(-10), 1e-30),
        Kind::Half => (2f64.powi(-10), 2f64.powi(-11), 2f64.powi(-13), 2f64.powi(-24)),
        _ => (0.0, 0.0, 0.0, 0.5),
    };
    // In a few columns nearly everything may cancel.
    let is_short = matches!(found.kind(), Kind::BFloat16 | Kind::Half);
    let is_narrow = found.size().last().is_some_and(|columns| *columns < 16) && of_mean > 0.0;
    let least = if is_narrow { 4.0 * of_mean } else { least };
    let found = found.f_to_kind(Kind::Double)?;
    let expected = expected.f_to_kind(Kind::Double)?.f_view(found.size().as_slice())?;
    let row = |t: Tensor| if t.dim() == 0 { t.f_view([1].as_slice()) } else { Ok(t) };
    let (found, expected) = (row(found)?, row(expected)?);
    let is_nan = expected.f_isnan()?;
    if found.f_isnan()?.f_ne_tensor(&is_nan)?.f_any()?.f_int64_value(&[])? != 0 {
        return Ok(Some("has NaN in other places".into()));
    }
    let are_equal = found.f_eq_tensor(&expected)?.f_logical_or(&is_nan)?;
    // Of results in 16 bits, few numbers may round another way than the formula's.
    let share = 1.0 - are_equal.f_to_kind(Kind::Double)?.f_mean(Kind::Double)?.f_double_value(&[])?;
    if is_short && !is_narrow && are_equal.numel() > 1000 && share > 0.05 {
        return Ok(Some(format!("differs in {:.0} % of its numbers", 100.0 * share)));
    }
    let apart = found.f_sub(&expected)?.f_abs()?.f_masked_fill(&are_equal, 0.0)?;
    let size = expected.f_abs()?.f_nan_to_num(0.0, 0.0, 0.0)?;
    let largest = size.f_amax([-1].as_slice(), true)?;
    let allowed = size.f_mul_scalar(of_number)?.f_add(&largest.f_mul_scalar(of_row)?)?.f_add_scalar(least)?;
    let beyond = apart.f_div(&allowed)?.f_view([-1].as_slice())?;
    let worst = beyond.f_argmax(0, false)?.f_int64_value(&[])?;
    let farthest = beyond.f_double_value(&[worst])?;
    if farthest.is_nan() || farthest > 1.0 {
        let at = |t: &Tensor| t.f_contiguous()?.f_view([-1].as_slice())?.f_double_value(&[worst]);
        let (got, wanted) = (at(&found)?, at(&expected)?);
        return Ok(Some(format!("{:?} is {got:e} at {worst}, expected {wanted:e}", found.size())));
    }
    // Of few 16-bit numbers a single one that rounds the other way is much.
    let are_enough = found.size().last().is_some_and(|columns| *columns >= if of_mean < 1e-4 { 16 } else { 64 });
    if are_enough && of_mean > 0.0 {
        let mean = |t: &Tensor| t.f_mean_dim(-1, false, Kind::Double);
        let allowed = mean(&size)?.f_mul_scalar(of_mean)?.f_add_scalar(least)?;
        let beyond = mean(&apart)?.f_div(&allowed)?.f_max()?.f_double_value(&[])?;
        if beyond > 1.0 {
            return Ok(Some(format!("has a row {beyond:.1} times farther away than rounding explains")));
        }
    }
    Ok(None)
}
