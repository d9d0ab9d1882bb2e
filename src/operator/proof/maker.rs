//! The test tensors of a proof: random numbers, adapted to each case.

use super::cases::Case;
use super::is_written;
use crate::cuda::{self, Device, Layout};
use crate::error::Result;
use crate::kernel::columns::gpu::slabs;
use crate::operator::argument::{Argument, DtypeRule, Reading, LEADER, OPTIONAL};
use crate::operator::call::{replaced, scalar_type, Value};
use crate::operator::declare::Operator;
use crate::operator::engine;
use crate::operator::register::Declared;
use tch::{Kind, Tensor};

/// A tensor for each argument in an operator's schema; `None` if the argument is absent or not a tensor.
pub type Tensors = Vec<Option<Tensor>>;

/// Returns the numbers 0, 1, 2, … in the shape `size`.
pub fn counted(size: &[i64], device: tch::Device) -> Result<Tensor> {
    Ok(Tensor::f_arange(size.iter().product::<i64>(), (Kind::Int64, device))?.f_view(size)?)
}

/// Returns the first columns of `real`, the call's tensor for this argument: at most eight ([`WIDE`]) more than the
/// remainder of its columns modulo eight. The remainder stays, because kernels use it to choose how many numbers they
/// read at once.
pub fn few_columns(argument: &Argument, real: &Tensor) -> Result<Tensor> {
    // A vector of any shape, such as PowerNorm's (1, d, 1, 1), is flattened first.
    let real = if argument.sizes == "=d" { real.f_reshape([-1].as_slice())? } else { real.f_view_as(real)? };
    let columns = real.size().last().copied().unwrap_or(1);
    Ok(real.f_narrow(-1, 0, columns.min(WIDE + columns % WIDE))?.f_contiguous()?)
}

/// True if a backward operator's argument is an output of the forward operator. Such a tensor must fit the input.
pub fn is_kept(backward: &Operator, argument: &Argument) -> bool {
    backward.forward.get().is_some_and(|forward| forward.outputs.iter().any(|output| output.name == argument.name))
}

/// Returns a number of rows above the number that the device's blocks process at once, but so small that f64 copies
/// fit.
pub fn rows(leader: &Tensor, device: Device) -> i64 {
    // A block processes at most four rows at once (`Layout::of`). The rows need two rounds and a part of a third.
    let at_once = 4 * Layout::most_blocks(cuda::multiprocessors(device).unwrap_or(1));
    // The limit of 2^24 numbers keeps the f64 copies small.
    let most = (1 << 24) / leader.size().last().copied().unwrap_or(1).max(1);
    i64::from(2 * at_once + 3).min(most.max(LEAST))
}

/// The minimum number of rows: more than a block processes, and not a multiple of the rows of a group.
const LEAST: i64 = 67;

/// A small number of rows, so that one row too many changes results, but with more slabs than a block has warps.
pub const FEW: i64 = 579;

/// Added to the salt of a gradient's random numbers, so that dy differs from x: in the direction of x, a norm's output
/// does not change.
const GRADIENTS: usize = 64;

/// A number of rows so large that slabs exceed their minimum, and that a warp sums a slab in more than one round.
pub const LONG: i64 = 140_000;

/// The maximum number of columns that a kernel reads at once.
const WIDE: i64 = 8;

/// The value of counters late in training.
pub const LATE: i64 = 1_000_000;

/// The minimum length of flat buffers; the remainder of the actual length modulo sixteen is added.
const FLAT: i64 = 1 << 14;

/// Creates the test tensors of a case.
pub struct Maker {
    pub rows: i64,
    /// True if the leader's `sizes` are "*", that is, if the operator gives no meaning to any of its dimensions.
    pub is_whole: bool,
    /// True if there is dropout. Then no NaN is inserted, because a dropped NaN may become 0 or stay NaN.
    pub is_dropped: bool,
    /// True if the operator has buffers that it updates.
    pub has_state: bool,
    /// True if the operator is a row norm or a residual step, whose rows have further corner cases.
    pub has_corners: bool,
    /// True if the rows are logits, in which −∞ means a probability of 0.
    pub is_logits: bool,
    /// True if kernels must not read the first row.
    pub is_hidden: bool,
    /// True if the operator is the backward operator of another.
    pub is_backward: bool,
    pub case: Case,
    /// The value for the operator's counters; `None` keeps the call's own values.
    pub counter: Option<i64>,
    /// The call's ε, or 1 if it has none.
    pub eps: f64,
}

impl Maker {
    /// Creates a test tensor for each tensor in `given`, the values of a call.
    pub fn all(&self, declared: &Declared, given: &[Value]) -> Result<Tensors> {
        let mut made: Tensors = given.iter().map(|_| None).collect();
        for (argument, place) in &declared.table {
            if let Some(real) = given[*place].tensor() {
                made[*place] = Some(self.tensor(argument, *place, &real, given[*place].view.data.addr())?);
            }
        }
        Ok(made)
    }

    /// Creates the tensors of a backward operator by running its forward operator on test tensors, so that the kept
    /// tensors (inputs and outputs of the same forward call) fit together. `values` are those of the backward call.
    pub fn after(&self, forward: &Operator, backward: &Declared, values: &[Value]) -> Result<Tensors> {
        let declared = Declared::new(forward)?;
        let (_, leader_place) = backward.leader()?;
        let like = values[leader_place].required();
        // The numbers of this seed (seed, update, micro-batch) are arbitrary.
        let seed = Tensor::f_from_slice(&[3i64, 1, 4])?.f_to_device(like.device())?;
        let dy = backward.place("dy").map(|place| values[place]).filter(|dy| !dy.is_none());
        // Some buffers are arguments of the forward operator only. A counter of 0 and a warm-up of 1 make this a first
        // update.
        let (statistics, counter) = buffers(backward, values, &like)?;
        let absent = Value::from(None::<f64>);
        let mut given = Vec::with_capacity(declared.formals.len());
        for (place, formal) in declared.formals.iter().enumerate() {
            let argument = declared.table.iter().find(|(_, index)| *index == place).map(|(argument, _)| *argument);
            // An argument with an output's name has statistics of an earlier call. Here the norm must measure its own.
            let is_output = forward.outputs.iter().any(|output| output.name == formal.name);
            let known =
                backward.place(formal.name).map(|place| values[place]).filter(|value| !is_output && !value.is_none());
            // The forward call gets the backward call's values. For arguments that the backward operator lacks, tensors
            // or numbers stand in.
            given.push(match (known, argument, formal.name) {
                (Some(value), ..) => value,
                (None, Some(argument), _) if argument.is & OPTIONAL == 0 => Value::from(&like),
                (None, Some(_), "seed") => Value::from(&seed),
                (None, Some(argument), _) if matches!(argument.reading, Reading::State) => {
                    Value::from(if argument.dtype == DtypeRule::Int64 { &counter } else { &statistics })
                }
                (None, Some(_), _) => absent,
                // y gets the type that dy has.
                (None, None, "dtype") => {
                    dy.and_then(|dy| dy.tensor()).map_or(absent, |dy| scalar_type(dy.kind()).into())
                }
                (None, None, "warmup") => Value::from(1i64),
                (None, None, _) => formal.default.map_or(Value::from(0i64), Value::from),
            });
        }
        let inputs = self.all(&declared, &given)?;
        let outputs = engine::call_by_name(forward.name(), &replaced(&given, &inputs), forward.outputs.len())?;
        let mut made: Tensors = values.iter().map(|_| None).collect();
        for (argument, place) in &backward.table {
            let Some(real) = values[*place].tensor() else { continue };
            // The argument `dy` is the gradient of the output `y`.
            let gradient_of = argument.name.strip_prefix('d').and_then(|name| declared.output(name));
            let address = values[*place].view.data.addr();
            made[*place] = Some(match (gradient_of, declared.output(argument.name)) {
                // The gradient of output k is random, output k itself is kept, and other arguments are inputs.
                (Some(k), _) => {
                    let drawn = self.random(&outputs[k].size(), *place + GRADIENTS, &real, address)?;
                    self.spoilt(drawn, f64::INFINITY)?
                }
                (None, Some(k)) => aligned_as(&outputs[k], real.kind(), address)?,
                (None, None) => {
                    let input = declared.place(argument.name).and_then(|index| inputs[index].as_ref());
                    aligned_as(input.unwrap_or(&real), real.kind(), address)?
                }
            });
        }
        Ok(made)
    }

    /// Creates a test tensor in place of `real`, the call's argument at index `place`, with the alignment of `address`.
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
        // Numbers such as "=1" keep the call's values, because random ones would make no sense. So do tables with a
        // fixed number of rows, such as the statistics "6d". A size "1|d" is a parameter, which does not keep them.
        if !has_rows && !argument.sizes.contains('d')
            || argument.sizes.starts_with(|c: char| c.is_ascii_digit() && c != '1')
        {
            let is_scale = argument.sizes == "=1" && matches!(self.case, Case::Spoilt(_));
            let scale = if is_scale { real.f_full_like(f64::NAN)? } else { real.f_view_as(real)? };
            return aligned_as(&scale, real.kind(), address);
        }
        let drawn = self.random(&size, place, real, address)?.f_to_kind(Kind::Double)?;
        // The first condition that holds decides.
        let drawn = match () {
            _ if is_leader && self.case == Case::Extreme => self.extreme(&drawn, real.kind())?,
            // The columns get a mean far from 0.
            _ if is_leader && self.case == Case::Late => drawn.f_add_scalar(100.0)?,
            // The last rows of a slab lie far from its first rows, and slabs lie far from each other.
            _ if is_leader && self.case == Case::Long => {
                let row = counted(&[self.rows, 1], real.device())?;
                let in_slab = row.f_remainder(slabs(self.rows).0)?.f_mul_scalar(0.1)?;
                let mean = if real.kind() == Kind::Half { 300.0 } else { 3000.0 };
                drawn.f_add(&in_slab)?.f_add(&row.f_mul_scalar(1e-3)?)?.f_add_scalar(mean)?
            }
            _ if is_leader && !self.is_backward => self.spoilt(drawn, f64::NAN)?,
            _ if is_leader => drawn,
            // Buffers are above 0, because some are variances or mean squares.
            _ if is_written(argument) => drawn.f_abs()?.f_add_scalar(0.1)?,
            _ if has_rows => drawn,
            // Parameters scatter around 1, the usual gain.
            _ => drawn.f_mul_scalar(0.5)?.f_add_scalar(1.0)?,
        };
        if is_leader && self.is_hidden {
            let _ = drawn.f_select(0, 0)?.f_fill_(f64::NAN)?;
        }
        aligned_as(&drawn, real.kind(), address)
    }

    /// Makes some rows corner cases. The squares of huge and tiny rows leave f32's range; but for column statistics
    /// they do not, because such statistics would be refused.
    fn extreme(&self, x: &Tensor, kind: Kind) -> Result<Tensor> {
        // These are the factors of the huge and the tiny row.
        let (huge, tiny) = match (kind, self.has_state) {
            // If one row dominated a column's statistics, its exact gradient would be nearly 0, and only rounding
            // would be compared.
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
        if self.is_logits {
            // In row 3, the first five classes have the probability 0.
            let _ = x.f_select(0, 3)?.f_slice(0, 0, None::<i64>, 5)?.f_fill_(f64::NEG_INFINITY)?;
        }
        if !self.is_dropped && x.dim() > 1 && x.size()[0] > 4 {
            let _ = put(4, -1, f64::NAN)?;
        }
        if self.has_corners {
            // The row's largest number occurs twice (row 6), or once at either end (rows 7 and 8). Row 9 has one 0.
            for (row, column, number) in [(6, 0, huge), (6, -1, -huge), (7, 0, huge), (8, -1, huge), (9, 0, 0.0)] {
                let _ = put(row, column, number)?;
            }
            if !self.is_dropped {
                let _ = put(3, 0, f64::NAN)?;
            }
            // The lengths of these rows lie near ε: the length of a random row is about √columns.
            for (row, share) in [(5, 0.6), (10, 1.4)] {
                let _ = x.f_select(0, row)?.f_mul_scalar_(share * self.eps / (x.size()[1] as f64).sqrt())?;
            }
        }
        Ok(x)
    }

    /// Writes `number` into the case's column of the middle row, if the case is `Spoilt`.
    fn spoilt(&self, x: Tensor, number: f64) -> Result<Tensor> {
        if let (Case::Spoilt(column), true) = (self.case, x.dim() > 1) {
            let _ = x.f_select(0, self.rows / 2)?.f_select(-1, column)?.f_fill_(number)?;
        }
        Ok(x)
    }

    /// Returns the size of a test tensor: the call's size, but with the proof's own number of rows.
    fn size(&self, sizes: &str, real: &Tensor) -> Vec<i64> {
        let size = real.size();
        // Returns the last `k` sizes of the call's tensor.
        let last_of = |k: usize| size[size.len().saturating_sub(k)..].iter().copied();
        match sizes {
            "=n" => vec![FLAT + real.numel() as i64 % 16],
            "*" if self.is_whole => {
                std::iter::once((FLAT / size.last().copied().unwrap_or(1).max(1)).clamp(3, self.rows))
                    .chain(last_of(1))
                    .collect()
            }
            // One dimension of rows replaces "*" or "n"; each further letter is a dimension that stays.
            _ if sizes.starts_with(['*', 'n']) => std::iter::once(self.rows).chain(last_of(sizes.len() - 1)).collect(),
            _ => size,
        }
    }

    /// Returns nearly normally distributed numbers in the type of `like`, with the alignment of `address`, without
    /// using torch's generators. Each is the sum of four uniform numbers, shifted to mean 0 and scaled to variance 1. A
    /// uniform number is the fraction of a large multiple of a sine, a hash of its index and `salt`.
    fn random(&self, size: &[i64], salt: usize, like: &Tensor, address: usize) -> Result<Tensor> {
        let count: i64 = size.iter().product();
        let index = Tensor::f_arange(count, (Kind::Double, like.device()))?;
        let mut sum = Tensor::f_full([count].as_slice(), -2.0, (Kind::Double, like.device()))?;
        for term in 0..4 {
            let phase = (4 * salt + term) as f64;
            // The constants are the usual ones of this hash.
            let wild = index.f_mul_scalar(12.9898 + phase)?.f_sin()?.f_mul_scalar(43758.5453 + phase)?;
            sum = sum.f_add(&wild.f_sub(&wild.f_floor()?)?)?;
        }
        aligned_as(&sum.f_mul_scalar(3f64.sqrt())?.f_view(size)?, like.kind(), address)
    }
}

/// Returns column statistics of 1 in the type of the backward operator's buffers, and a counter of 0. `values` are
/// those of the backward call, and `like` is its leader.
fn buffers(backward: &Declared, values: &[Value], like: &Tensor) -> Result<(Tensor, Tensor)> {
    let states = backward.table.iter().filter(|(argument, _)| matches!(argument.reading, Reading::State));
    let kind =
        states.filter_map(|(_, place)| values[*place].tensor()).map(|t| t.kind()).find(|kind| *kind != Kind::Int64);
    let columns = like.size().last().copied().unwrap_or(1);
    let statistics = Tensor::f_ones([columns].as_slice(), (kind.unwrap_or(Kind::Float), like.device()))?;
    Ok((statistics, Tensor::f_zeros([1].as_slice(), (Kind::Int64, like.device()))?))
}

/// Returns a tensor of the shape `size`, whose first dimension is rows, with the rows of `real` again and again.
fn repeated(real: &Tensor, size: &[i64]) -> Result<Tensor> {
    let row_shape = &size[1..];
    let rows = real.f_reshape([&[-1], row_shape].concat().as_slice())?;
    let index = Tensor::f_arange(size[0], (Kind::Int64, real.device()))?.f_remainder(rows.size()[0].max(1))?;
    Ok(rows.f_index_select(0, &index)?)
}

/// Returns a copy of t in the type `kind`, at an address that is equal to `address` modulo sixteen. The width of
/// kernels' reads depends on this remainder.
pub fn aligned_as(t: &Tensor, kind: Kind, address: usize) -> Result<Tensor> {
    let offset = (address % 16 / kind.elt_size_in_bytes()) as i64;
    let count = t.numel() as i64;
    let room = Tensor::f_empty([count + offset].as_slice(), (kind, t.device()))?;
    let mut copy = room.f_narrow(0, offset, count)?.f_view(t.size().as_slice())?;
    copy.f_copy_(t)?;
    Ok(copy)
}
