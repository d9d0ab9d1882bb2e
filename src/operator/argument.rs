//! What an operator says of an argument or an output, in the words of a declaration.

/// What a tensor, or a number, must be (`shim/declared.h` has the language of `sizes`).
#[derive(Clone)]
pub struct Argument {
    pub name: &'static str,
    pub sizes: String,
    pub dtype: DtypeRule,
    /// The flags below.
    pub is: u8,
    pub reading: Reading,
    pub like: &'static str,
}

/// declared.h's `Type`, and two of arguments that are no tensors.
#[derive(Clone, Copy, PartialEq)]
pub enum DtypeRule {
    Floating,
    /// The leader's; of an output: the type of what it is like.
    Same,
    /// Floating, and float64 where the leader is.
    Width,
    /// The type in which kernels compute the operator's first tensor: f64 for f64, else f32.
    Computed,
    Float32,
    Float64,
    Int64,
    Bool,
    /// What the argument `dtype` says.
    Dtype,
    /// float32 or bfloat16.
    Moment,
    /// An integer that a letter of sizes stands for.
    Number,
    /// A string that messages call the operator.
    Title,
}

/// How kernels get a tensor: declared.h's `Reading`.
#[derive(Clone, Copy)]
pub enum Reading {
    Dense,
    Columns,
    Computed,
    Parameter,
    Seed,
    State,
}

// declared.h's flags.
pub const OPTIONAL: u8 = 1;
const HOST: u8 = 2;
pub const WRITTEN: u8 = 4;
const SHARED: u8 = 8;
// What C++ learns from where an argument stands.
pub const LEADER: u8 = 16;
pub const KEPT: u8 = 32;
pub const PLAIN: u8 = 64;
pub const FIXED: u8 = 128;

/// A tensor that must be there, read as it is.
pub fn tensor(name: &'static str, sizes: impl Into<String>, dtype: DtypeRule) -> Argument {
    Argument { name, sizes: sizes.into(), dtype, is: 0, reading: Reading::Dense, like: "" }
}

/// The floating tensor that types and devices are compared with.
pub fn leader(name: &'static str, sizes: &str) -> Argument {
    tensor(name, sizes, DtypeRule::Floating).leading()
}

/// A norm's gain or bias: absent, one number, or one for each column.
pub fn parameter(name: &'static str) -> Argument {
    Argument { reading: Reading::Parameter, ..tensor(name, "1|d", DtypeRule::Floating).optional() }
}

/// What a norm learns: as [`parameter`], or a matrix with a side of as many numbers as columns.
pub fn parameter_or_matrix(name: &'static str) -> Argument {
    Argument { sizes: "1|d#".into(), ..parameter(name) }
}

/// int64 (seed, update, micro-batch), needed where `p` > 0.
pub fn seed() -> Argument {
    Argument { reading: Reading::Seed, ..tensor("seed", "=3", DtypeRule::Int64).optional().flag(HOST) }
}

/// An integer argument that `letter` of sizes stands for.
pub fn number(name: &'static str, letter: &str) -> Argument {
    tensor(name, letter, DtypeRule::Number)
}

/// A string that messages call the operator by.
pub fn title(name: &'static str) -> Argument {
    tensor(name, "", DtypeRule::Title)
}

/// The gradient of the argument `of`.
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

    /// Read as a working copy, in float64 on the CPU; [`Call::write_back`](super::call::Call::write_back) says that it has changed.
    pub fn state(self) -> Self {
        Argument { reading: Reading::State, ..self }
    }
}
