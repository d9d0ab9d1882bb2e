//! How an operator is declared, once: schema, what its tensors must be, outputs, kernels, formula and derivative.
//! The C++ side (`shim/operators.h`) registers what is declared here, and knows no operator.

use super::call::Call;
use super::engine::Handle;
use super::ffi::{self, into_raw, shim_error, status};
use crate::error::{Error, Result};
use std::ffi::{c_int, c_void};
use tch::Tensor;
use torch_sys::C_tensor;

type Run = Box<dyn Fn(&Call) -> Result<()> + Send + Sync>;
/// Outputs, or gradients; None: zeros, or no gradient.
type Make = Box<dyn Fn(&Call) -> Result<Vec<Option<Tensor>>> + Send + Sync>;

/// An operator.
pub struct Operator {
    schema: String,
    arguments: Vec<Argument>,
    outputs: Vec<Argument>,
    kernels: Kernels,
    plan: Option<Run>,
    kernel: Option<Run>,
    formula: Option<Make>,
    backward: Option<Box<Operator>>,
    again: Option<Make>,
    has_own_gradient: bool,
    is_looped: bool,
    handle: Option<&'static Handle>,
}

/// Where an operator has kernels.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kernels {
    Everywhere,
    Cpu,
    Gpu,
    /// It is a composition: PyTorch differentiates and traces what its formula calls.
    Composition,
}

impl Operator {
    /// `schema` as torch reads it; what each of its tensors must be, in the schema's order; and its outputs.
    pub fn new(
        schema: impl Into<String>,
        arguments: impl Into<Vec<Argument>>,
        outputs: impl Into<Vec<Argument>>,
    ) -> Self {
        Operator {
            schema: schema.into(),
            arguments: arguments.into(),
            outputs: outputs.into(),
            kernels: Kernels::Everywhere,
            plan: None,
            kernel: None,
            formula: None,
            backward: None,
            again: None,
            has_own_gradient: false,
            is_looped: false,
            handle: None,
        }
    }

    /// What no table says: refuses numbers, and says which outputs are not made ([`Call::leave_out`]).
    pub fn plan(self, plan: impl Fn(&Call) -> Result<()> + Send + Sync + 'static) -> Self {
        Operator { plan: Some(Box::new(plan)), ..self }
    }

    /// Writes the outputs, on the CPU or a GPU.
    pub fn kernel(self, kernel: impl Fn(&Call) -> Result<()> + Send + Sync + 'static) -> Self {
        self.kernel_on(Kernels::Everywhere, kernel)
    }

    /// As [`kernel`](Self::kernel), on one of them alone.
    pub fn kernel_on(self, kernels: Kernels, kernel: impl Fn(&Call) -> Result<()> + Send + Sync + 'static) -> Self {
        Operator { kernels, kernel: Some(Box::new(kernel)), ..self }
    }

    /// Its outputs in tch: where no kernel is, under torch.func, and for the gradient that is differentiated again.
    pub fn formula(self, formula: impl Fn(&Call) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static) -> Self {
        Operator { formula: Some(Box::new(formula)), ..self }
    }

    /// It is its formula alone, and PyTorch differentiates and traces what that calls.
    pub fn composition(self) -> Self {
        Operator { kernels: Kernels::Composition, ..self }
    }

    /// How it is differentiated. The backward operator's arguments say what a node keeps: `dNAME` is the gradient of
    /// output NAME, any other is the output or argument of that name. Its output `dNAME` is argument NAME's gradient.
    pub fn backward(self, backward: Operator) -> Self {
        Operator { backward: Some(Box::new(backward)), ..self }
    }

    /// Gradients of the tensor arguments that can be differentiated again; without it the formula is run again.
    pub fn again(self, again: impl Fn(&Call) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static) -> Self {
        Operator { again: Some(Box::new(again)), ..self }
    }

    /// Outside a torch.func transform the derivative is the backward operator's, where no kernel is, too.
    pub fn with_own_gradient(self) -> Self {
        Operator { has_own_gradient: true, ..self }
    }

    /// vmap calls it for one example after the other.
    pub fn looped(self) -> Self {
        Operator { is_looped: true, ..self }
    }

    /// The handle counts its calls.
    pub fn counted(self, handle: &'static Handle) -> Self {
        Operator { handle: Some(handle), ..self }
    }

    pub fn handle(&self) -> Option<&'static Handle> {
        self.handle
    }
}

/// What a tensor, or a number, must be (`shim/arguments.h` has the language of `sizes`).
#[derive(Clone)]
pub struct Argument {
    name: &'static str,
    sizes: String,
    kind: Kind,
    is: u8,
    reading: Reading,
    like: &'static str,
}

/// arguments.h's `Type`.
#[derive(Clone, Copy)]
pub enum Kind {
    Floating,
    /// The leader's; of an output: the type of what it is like.
    Same,
    /// Floating, and float64 where the leader is.
    Width,
    /// What the leader is computed in.
    Computed,
    Float32,
    Float64,
    Int64,
    Bool,
    /// An integer that a letter of sizes stands for.
    Number,
    /// What the argument `dtype` says.
    Dtype,
    /// A string that messages call the operator.
    Title,
}

/// How kernels get a tensor: declared.h's `Reading`.
#[derive(Clone, Copy)]
enum Reading {
    Dense,
    Columns,
    Computed,
    Parameter,
    Seed,
    State,
}

// arguments.h's flags.
const LEADER: u8 = 1;
const OPTIONAL: u8 = 2;
const HOST: u8 = 4;
const WRITTEN: u8 = 8;
const KEPT: u8 = 16;
const PLAIN: u8 = 32;
const FIXED: u8 = 64;
const SHARED: u8 = 128;

/// A tensor that must be there, read as it is.
pub fn tensor(name: &'static str, sizes: impl Into<String>, kind: Kind) -> Argument {
    Argument { name, sizes: sizes.into(), kind, is: 0, reading: Reading::Dense, like: "" }
}

/// The floating tensor that types and devices are compared with.
pub fn leader(name: &'static str, sizes: &str) -> Argument {
    tensor(name, sizes, Kind::Floating).leading()
}

/// A norm's gain or bias: absent, one number, or one for each column.
pub fn parameter(name: &'static str) -> Argument {
    Argument { reading: Reading::Parameter, ..tensor(name, "1|d", Kind::Floating).optional() }
}

/// int64 (seed, update, micro-batch), needed where `p` > 0.
pub fn seed() -> Argument {
    Argument { reading: Reading::Seed, ..tensor("seed", "=3", Kind::Int64).optional().flag(HOST) }
}

/// An integer argument that `letter` of sizes stands for.
pub fn number(name: &'static str, letter: &str) -> Argument {
    tensor(name, letter, Kind::Number)
}

/// A string that messages call the operator by.
pub fn title(name: &'static str) -> Argument {
    tensor(name, "", Kind::Title)
}

/// The gradient of the argument `of`.
pub fn gradient(name: &'static str, of: &'static str) -> Argument {
    tensor(name, "@", Kind::Same).like(of)
}

impl Argument {
    fn flag(self, flag: u8) -> Self {
        Argument { is: self.is | flag, ..self }
    }

    pub fn optional(self) -> Self {
        self.flag(OPTIONAL)
    }

    /// What types and devices are compared with.
    pub fn leading(self) -> Self {
        self.flag(LEADER)
    }

    /// It may lie on the CPU, wherever the leader is.
    pub fn on_host(self) -> Self {
        self.flag(HOST)
    }

    /// Written where it lies.
    pub fn written(self) -> Self {
        self.flag(WRITTEN)
    }

    /// A node keeps it, though the backward operator does not take it.
    pub fn kept(self) -> Self {
        self.flag(KEPT)
    }

    /// So too, whatever is written to it meanwhile.
    pub fn kept_plain(self) -> Self {
        self.flag(PLAIN)
    }

    /// An output without a derivative, though its gradient has a name.
    pub fn fixed(self) -> Self {
        self.flag(FIXED)
    }

    /// An output that is the first one, where it is left out.
    pub fn or_first(self) -> Self {
        self.flag(SHARED)
    }

    /// An output: like this argument. An argument of a backward operator: given where this one's gradient is wanted.
    pub fn like(self, like: &'static str) -> Self {
        Argument { like, ..self }
    }

    /// Read in what the leader is computed in.
    pub fn computed(self) -> Self {
        Argument { reading: Reading::Computed, ..self }
    }

    /// Read as a matrix whose rows may be any distance apart.
    pub fn by_columns(self) -> Self {
        Argument { reading: Reading::Columns, ..self }
    }

    /// Read as a working copy, in float64 on the CPU; [`Call::write_back`] says that it has changed.
    pub fn state(self) -> Self {
        Argument { reading: Reading::State, ..self }
    }
}

// ---- what C++ is told ----

#[repr(C)]
struct Text {
    data: *const u8,
    length: i64,
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Text { data: text.as_ptr(), length: text.len() as i64 }
    }
}

#[repr(C)]
struct ArgumentRow {
    name: Text,
    sizes: Text,
    like: Text,
    kind: u8,
    is: u8,
    reading: u8,
}

impl From<&Argument> for ArgumentRow {
    fn from(a: &Argument) -> Self {
        let texts = [a.name, &a.sizes, a.like].map(Text::from);
        let [name, sizes, like] = texts;
        ArgumentRow { name, sizes, like, kind: a.kind as u8, is: a.is, reading: a.reading as u8 }
    }
}

#[repr(C)]
struct OperatorRow {
    operator: *const c_void,
    schema: Text,
    arguments: *const ArgumentRow,
    n_arguments: i64,
    outputs: *const ArgumentRow,
    n_outputs: i64,
    is: u32,
    backward: *const OperatorRow,
}

// declared.h's flags of an operator.
const ON_CPU: u32 = 1;
const ON_GPU: u32 = 2;
const COMPOSED: u32 = 4;
const COMPOSITION: u32 = 8;
const RECORDED: u32 = 16;
const BATCHED: u32 = 32;
const DIFFERENTIATES: u32 = 64;

extern "C" {
    fn nfrs_define(row: &OperatorRow) -> bool;
}

impl Operator {
    fn name(&self) -> &str {
        self.schema.split('(').next().unwrap_or_default()
    }

    /// declared.h's flags.
    fn flags(&self) -> u32 {
        let kernels = match self.kernels {
            Kernels::Everywhere => ON_CPU | ON_GPU,
            Kernels::Cpu => ON_CPU,
            Kernels::Gpu => ON_GPU,
            Kernels::Composition => ON_GPU | COMPOSITION,
        };
        let has_formula = self.formula.is_some();

        let more = [
            (has_formula, COMPOSED),
            (self.has_own_gradient, RECORDED),
            (has_formula && self.backward.is_some() && !self.is_looped, BATCHED),
            (self.again.is_some(), DIFFERENTIATES),
        ];
        more.into_iter().filter(|(is, _)| *is).fold(kernels, |flags, (_, flag)| flags | flag)
    }

    /// Calls `with` with what C++ reads of this operator.
    fn with_row<T>(&'static self, with: &mut dyn FnMut(&OperatorRow) -> T) -> T {
        let [arguments, outputs] =
            [&self.arguments, &self.outputs].map(|rows| rows.iter().map(ArgumentRow::from).collect::<Vec<_>>());
        let mut all = |backward: *const OperatorRow| {
            with(&OperatorRow {
                operator: std::ptr::from_ref(self).cast(),
                schema: self.schema.as_str().into(),
                arguments: arguments.as_ptr(),
                n_arguments: arguments.len() as i64,
                outputs: outputs.as_ptr(),
                n_outputs: outputs.len() as i64,
                is: self.flags(),
                backward,
            })
        };
        match &self.backward {
            Some(backward) => backward.with_row(&mut |row| all(row)),
            None => all(std::ptr::null()),
        }
    }

    /// Registers it with PyTorch's dispatcher.
    pub fn register(&'static self) -> Result<()> {
        // SAFETY: the row and all that it points to outlive the call; the operator outlives everything.
        match self.with_row(&mut |row| unsafe { nfrs_define(row) }) {
            true => Ok(()),
            false => Err(shim_error()),
        }
    }
}

/// declared.h's `Stage`.
const PLAN: c_int = 0;
const KERNEL: c_int = 1;
const FORMULA: c_int = 2;

/// Runs a stage of a call for C++; `made` has room for what the stage makes.
#[no_mangle]
unsafe extern "C" fn nfrs_run(operator: *const c_void, stage: c_int, call: &Call, made: *mut *mut C_tensor) -> c_int {
    // SAFETY: C++ hands back what `register` has given it.
    let operator = unsafe { &*operator.cast::<Operator>() };
    let missing = || Error::Torch(format!("{} has no kernel here", operator.name()));
    match stage {
        PLAN => operator.plan.as_ref().map_or(0, |plan| ffi::status_of_plan(|| plan(call))),
        KERNEL => {
            operator.handle.inspect(|h| h.count_kernel());
            status(|| operator.kernel.as_ref().ok_or_else(missing)?(call))
        }
        _ => status(|| {
            let formula = match stage {
                FORMULA => {
                    operator.handle.inspect(|h| h.count_composed());
                    operator.formula.as_ref()
                }
                _ => operator.again.as_ref(),
            };
            for (i, t) in formula.ok_or_else(missing)?(call)?.into_iter().enumerate() {
                // SAFETY: as said above.
                unsafe { *made.add(i) = t.map_or(std::ptr::null_mut(), into_raw) };
            }
            Ok(())
        }),
    }
}
