//! The declaration of an operator's argument or output.

/// The requirements on a tensor or a number (`shim/declared.h` describes the language of `sizes`).
#[derive(Clone)]
pub struct Argument {
    pub name: &'static str,
    pub sizes: String,
    pub dtype: DtypeRule,
    /// A combination of the flags below.
    pub is: u8,
    pub reading: Reading,
    pub like: &'static str,
}

/// The enum `Type` of declared.h, and two kinds of arguments that are no tensors.
#[derive(Clone, Copy, PartialEq)]
pub enum DtypeRule {
    Floating,
    /// The leader's type; for an output, the type of the argument that it is like.
    Same,
    /// A floating type, which is float64 if the leader is.
    Width,
    /// The type in which kernels compute the operator's first tensor: f64 for f64, else f32.
    Computed,
    Float32,
    Float64,
    Int64,
    Bool,
    /// The type that the argument `dtype` names.
    Dtype,
    /// float32 or bfloat16.
    Moment,
    /// An integer for which a letter of sizes stands.
    Number,
    /// A string by which messages call the operator.
    Title,
}

/// The form in which kernels get a tensor: `Reading` in declared.h.
#[derive(Clone, Copy)]
pub enum Reading {
    Dense,
    Columns,
    Computed,
    Parameter,
    Seed,
    State,
}

// Flags of declared.h.
pub const OPTIONAL: u8 = 1;
const HOST: u8 = 2;
pub const WRITTEN: u8 = 4;
const SHARED: u8 = 8;
// Flags that declared.h does not have: C++ learns them from indices in the declaration.
pub const LEADER: u8 = 16;
pub const KEPT: u8 = 32;
pub const PLAIN: u8 = 64;
pub const FIXED: u8 = 128;

/// Declares a required tensor that is read as it is.
pub fn tensor(name: &'static str, sizes: impl Into<String>, dtype: DtypeRule) -> Argument {
    Argument { name, sizes: sizes.into(), dtype, is: 0, reading: Reading::Dense, like: "" }
}

/// Declares the floating tensor with which types and devices are compared.
pub fn leader(name: &'static str, sizes: &str) -> Argument {
    tensor(name, sizes, DtypeRule::Floating).leading()
}

/// Declares a norm's gain or bias: absent, one number, or one for each column.
pub fn parameter(name: &'static str) -> Argument {
    Argument { reading: Reading::Parameter, ..tensor(name, "1|d", DtypeRule::Floating).optional() }
}

/// Declares a norm's parameter: like [`parameter`], or a matrix with a side as long as the number of columns.
pub fn parameter_or_matrix(name: &'static str) -> Argument {
    Argument { sizes: "1|d#".into(), ..parameter(name) }
}

/// Declares the seed, int64 (seed, update, micro-batch), which is required if `p` > 0.
pub fn seed() -> Argument {
    Argument { reading: Reading::Seed, ..tensor("seed", "=3", DtypeRule::Int64).optional().flag(HOST) }
}

/// Declares an integer argument for which `letter` of sizes stands.
pub fn number(name: &'static str, letter: &str) -> Argument {
    tensor(name, letter, DtypeRule::Number)
}

/// Declares a string by which messages call the operator.
pub fn title(name: &'static str) -> Argument {
    tensor(name, "", DtypeRule::Title)
}

/// Declares the gradient of the argument `of`.
pub fn gradient(name: &'static str, of: &'static str) -> Argument {
    tensor(name, "@", DtypeRule::Same).like(of)
}

impl Argument {
    fn flag(self, flag: u8) -> Self {
        Argument { is: self.is | flag, ..self }
    }

    pub fn optional(self) -> Self {
        self.flag(OPTIONAL)
    }

    /// Makes it the tensor with which types and devices are compared.
    pub fn leading(self) -> Self {
        self.flag(LEADER)
    }

    /// Allows it on the CPU, wherever the leader is.
    pub fn on_host(self) -> Self {
        self.flag(HOST)
    }

    /// Marks it as written in place.
    pub fn written(self) -> Self {
        self.flag(WRITTEN)
    }

    /// Lets the autograd node keep it, even if the backward operator does not take it.
    pub fn kept(self) -> Self {
        self.flag(KEPT)
    }

    /// Lets the autograd node keep it, even if it is written to meanwhile.
    pub fn kept_plain(self) -> Self {
        self.flag(PLAIN)
    }

    /// Marks an output as having no derivative, although its gradient has a name.
    pub fn fixed(self) -> Self {
        self.flag(FIXED)
    }

    /// Lets an output be the first output if it is left out.
    pub fn or_first(self) -> Self {
        self.flag(SHARED)
    }

    /// For an output: gives it the shape and type of an argument. For a backward operator's argument: passes it only if
    /// the gradient of that argument is wanted.
    pub fn like(self, like: &'static str) -> Self {
        Argument { like, ..self }
    }

    /// Converts it to the leader's computing type.
    pub fn computed(self) -> Self {
        Argument { reading: Reading::Computed, ..self }
    }

    /// Lets kernels read it as a matrix with any distance between its rows.
    pub fn by_columns(self) -> Self {
        Argument { reading: Reading::Columns, ..self }
    }

    /// Lets kernels read it as a working copy, in float64 on the CPU;
    /// [`Call::write_back`](super::call::Call::write_back) marks it as changed.
    pub fn state(self) -> Self {
        Argument { reading: Reading::State, ..self }
    }
}
