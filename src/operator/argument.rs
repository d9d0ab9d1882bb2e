//! The declaration of an operator's argument or output.

/// The requirements on a tensor or a number of an operator's call.
#[derive(Clone)]
pub struct Argument {
    pub name: &'static str,
    /// The shape, with a letter or a digit per dimension. `*` stands for any leading dimensions: "*d" is (…, d). "=3"
    /// means three numbers in any shape; `shim/declared.h` describes the whole notation.
    pub sizes: String,
    pub dtype: DtypeRule,
    /// A combination of the flags below.
    pub is: u8,
    pub reading: Reading,
    /// The name of another argument, or "" if there is none; see [`Argument::like`].
    pub like: &'static str,
}

/// The required type of a tensor (`Type` in declared.h); the last two variants mark arguments that are not tensors.
#[derive(Clone, Copy, PartialEq)]
pub enum DtypeRule {
    Floating,
    /// The leader's type. For an output: the type of the argument that it is `like`.
    Same,
    /// A floating type, which is float64 if and only if the leader is.
    Width,
    /// The type in which kernels compute: float64 if the leader is, else float32.
    Computed,
    Float32,
    Float64,
    Int64,
    Bool,
    /// The type that the argument `dtype` names.
    Dtype,
    /// float32 or bfloat16.
    Moment,
    /// An integer argument; a letter in `sizes` stands for its value.
    Number,
    /// A string argument that error messages use as the operator's name.
    Title,
}

/// The form in which kernels read a tensor; declared.h describes the variants (`Reading`).
#[derive(Clone, Copy)]
pub enum Reading {
    Dense,
    Columns,
    Computed,
    Parameter,
    Seed,
    State,
}

// The flags of `Argument::is`; the methods of `Argument` that set them say what they mean. C++ reads these four from
// `is`, so declared.h has the same numbers.
pub const OPTIONAL: u8 = 1;
const HOST: u8 = 2;
pub const WRITTEN: u8 = 4;
const SHARED: u8 = 8;
// C++ does not read the flags below: it gets the indices of the arguments that have them.
pub const LEADER: u8 = 16;
pub const KEPT: u8 = 32;
pub const PLAIN: u8 = 64;
pub const FIXED: u8 = 128;

/// Declares a required tensor that kernels read without conversion.
pub fn tensor(name: &'static str, sizes: impl Into<String>, dtype: DtypeRule) -> Argument {
    Argument { name, sizes: sizes.into(), dtype, is: 0, reading: Reading::Dense, like: "" }
}

/// Declares the leader: the floating tensor with which the other tensors' types and devices are compared.
pub fn leader(name: &'static str, sizes: &str) -> Argument {
    tensor(name, sizes, DtypeRule::Floating).leading()
}

/// Declares a norm's gain or bias: absent, one number, or one number per column.
pub fn parameter(name: &'static str) -> Argument {
    Argument { reading: Reading::Parameter, ..tensor(name, "1|d", DtypeRule::Floating).optional() }
}

/// Declares a norm's parameter: like [`parameter`], or a matrix with as many rows or columns as x has columns.
pub fn parameter_or_matrix(name: &'static str) -> Argument {
    Argument { sizes: "1|d#".into(), ..parameter(name) }
}

/// Declares the seed, an int64 tensor (seed, update, micro-batch); it is required if `p` > 0.
pub fn seed() -> Argument {
    Argument { reading: Reading::Seed, ..tensor("seed", "=3", DtypeRule::Int64).optional().flag(HOST) }
}

/// Declares an integer argument. In the `sizes` of other arguments, `letter` stands for the value that a call gives it.
pub fn number(name: &'static str, letter: &str) -> Argument {
    tensor(name, letter, DtypeRule::Number)
}

/// Declares a string argument that error messages use as the operator's name.
pub fn title(name: &'static str) -> Argument {
    tensor(name, "", DtypeRule::Title)
}

/// Declares a backward operator's output `name`, the gradient of the forward operator's argument `argument`, in that
/// argument's shape and type.
pub fn gradient(name: &'static str, argument: &'static str) -> Argument {
    tensor(name, "@", DtypeRule::Same).like(argument)
}

impl Argument {
    /// Adds one of the flags above.
    fn flag(self, flag: u8) -> Self {
        Argument { is: self.is | flag, ..self }
    }

    /// Allows the argument to be absent.
    pub fn optional(self) -> Self {
        self.flag(OPTIONAL)
    }

    /// Makes the argument the leader, with which types and devices are compared.
    pub fn leading(self) -> Self {
        self.flag(LEADER)
    }

    /// Allows the tensor on the CPU, even if the leader is on a GPU.
    pub fn on_host(self) -> Self {
        self.flag(HOST)
    }

    /// Marks the tensor as written in place.
    pub fn written(self) -> Self {
        self.flag(WRITTEN)
    }

    /// Makes the autograd node keep the tensor, even if the backward operator does not take it.
    pub fn kept(self) -> Self {
        self.flag(KEPT)
    }

    /// Makes the autograd node keep the tensor without checking whether it is written to meanwhile.
    pub fn kept_plain(self) -> Self {
        self.flag(PLAIN)
    }

    /// Marks an output as having no derivative, although the backward operator has an argument for its gradient.
    pub fn fixed(self) -> Self {
        self.flag(FIXED)
    }

    /// Makes the first output serve as this output, too, if this one is left out.
    pub fn or_first(self) -> Self {
        self.flag(SHARED)
    }

    /// For an output: gives it the shape and type of the argument `like`. For a backward operator's argument: passes
    /// it only if the gradient of the argument `like` is wanted.
    pub fn like(self, like: &'static str) -> Self {
        Argument { like, ..self }
    }

    /// Makes kernels read the tensor in the type in which they compute.
    pub fn computed(self) -> Self {
        Argument { reading: Reading::Computed, ..self }
    }

    /// Lets kernels read a matrix whose rows are any distance apart.
    pub fn by_columns(self) -> Self {
        Argument { reading: Reading::Columns, ..self }
    }

    /// Makes kernels read a working copy, in float64 on the CPU. [`Call::write_back`](super::call::Call::write_back)
    /// copies it back.
    pub fn state(self) -> Self {
        Argument { reading: Reading::State, ..self }
    }
}
