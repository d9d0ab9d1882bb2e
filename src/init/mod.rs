//! Initialisations of linear layers and embeddings, in one table (docs/spec.md §3). They do not change norms, which
//! start with γ = 1 and β = 0.

mod schemes;

use crate::choice;
use crate::error::{unknown, Result};
use crate::options::{distinct, AnyOption, Options};
use crate::parametrisation;
use crate::residual::{LayerContext, ModelShape};
use tch::{no_grad, Tensor};

choice! {
    /// The use of a weight matrix.
    pub enum Role ("role") {
        Query = "query",
        Key = "key",
        Value = "value",
        AttentionOutput = "output",
        FeedForward1 = "fc1",
        FeedForward2 = "fc2",
        /// The third matrix of a gated feed-forward sublayer: W₃ in W₂(σ(W₁x)⊙W₃x).
        Gate = "gate",
        /// The matrix of attention's output gate.
        OutputGate = "output_gate",
    }
}

/// A source of random numbers, which fills tensors in place.
pub trait RandomNumbers {
    /// Fills the tensor with numbers from N(0, std²).
    fn normal(&self, t: &Tensor, std: f64) -> Result<()>;
    /// Fills the tensor with uniform numbers between −bound and bound.
    fn uniform(&self, t: &Tensor, bound: f64) -> Result<()>;
}

/// libtorch's default generator, seeded by `torch.manual_seed` and shared by all threads of the process.
pub struct ProcessGenerator;

// In-place methods need a mutable tensor. A shallow clone is one, and it shares the memory of `t`.
impl RandomNumbers for ProcessGenerator {
    /// Fills the tensor with numbers from N(0, std²).
    fn normal(&self, t: &Tensor, std: f64) -> Result<()> {
        let _ = t.shallow_clone().f_normal_(0.0, std)?;
        Ok(())
    }

    /// Fills the tensor with uniform numbers between −bound and bound.
    fn uniform(&self, t: &Tensor, bound: f64) -> Result<()> {
        let _ = t.shallow_clone().f_uniform_(-bound, bound)?;
        Ok(())
    }
}

/// The probability erf(3/√2) that a normal variable lies within three standard deviations.
const WITHIN_THREE: f64 = 0.997_300_203_936_739_8;

/// The distribution of a parameter's initial values.
#[derive(Clone, Debug)]
pub enum Fill {
    Constant(f64),
    Normal {
        std: f64,
    },
    /// A normal distribution truncated at three standard deviations.
    CutNormal {
        std: f64,
    },
    /// A uniform distribution between −bound and bound.
    Uniform {
        bound: f64,
    },
    /// A uniform distribution between 0 and a bound.
    UpTo {
        bound: f64,
    },
    /// Consecutive blocks of rows, each with its number of rows and its own fill, such as q, k and v in one matrix.
    Rows(Vec<(i64, Fill)>),
    /// The value of each element, in row-major order.
    Each(Vec<f64>),
    /// Another fill, after which one row is set to zero, for the embedding of padding.
    WithZeroRow(i64, Box<Fill>),
}

impl Fill {
    /// Returns the fill with its values multiplied by a factor.
    pub fn times(self, factor: f64) -> Self {
        match self {
            _ if factor == 1.0 => self,
            Fill::Constant(value) => Fill::Constant(value * factor),
            Fill::Normal { std } => Fill::Normal { std: std * factor },
            Fill::CutNormal { std } => Fill::CutNormal { std: std * factor },
            Fill::Uniform { bound } => Fill::Uniform { bound: bound * factor },
            Fill::UpTo { bound } => Fill::UpTo { bound: bound * factor },
            Fill::Rows(blocks) => {
                Fill::Rows(blocks.into_iter().map(|(rows, fill)| (rows, fill.times(factor))).collect())
            }
            Fill::WithZeroRow(row, fill) => Fill::WithZeroRow(row, Box::new(fill.times(factor))),
            Fill::Each(values) => Fill::Each(values.into_iter().map(|value| value * factor).collect()),
        }
    }

    /// Fills a tensor in place, with random numbers from `draw`. Autograd does not record this.
    pub fn write(&self, t: &Tensor, draw: &dyn RandomNumbers) -> Result<()> {
        let mut t = t.shallow_clone();
        no_grad(|| {
            match self {
                Fill::Constant(value) => drop(t.f_fill_(*value)?),
                Fill::Normal { std } => draw.normal(&t, *std)?,
                // √2·σ·erfinv(u) of a uniform u is normal; u within ±erf(3/√2) gives numbers within ±3σ.
                Fill::CutNormal { std } => {
                    draw.uniform(&t, WITHIN_THREE)?;
                    drop(t.f_erfinv_()?.f_mul_scalar_(std * 2f64.sqrt())?);
                }
                Fill::Uniform { bound } => draw.uniform(&t, *bound)?,
                // Numbers between ±bound/2, moved up by bound/2.
                Fill::UpTo { bound } => {
                    draw.uniform(&t, bound / 2.0)?;
                    drop(t.f_add_scalar_(bound / 2.0)?);
                }
                Fill::Rows(blocks) => {
                    let mut start = 0;
                    for (rows, fill) in blocks {
                        fill.write(&t.f_narrow(0, start, *rows)?, draw)?;
                        start += rows;
                    }
                }
                Fill::Each(values) => {
                    let values = Tensor::f_from_slice(values)?.f_view_as(&t)?;
                    t.f_copy_(&values)?;
                }
                Fill::WithZeroRow(row, fill) => {
                    fill.write(&t, draw)?;
                    drop(t.f_select(0, *row)?.f_zero_()?);
                }
            }
            Ok(())
        })
    }
}

choice! {
    /// A table of word embeddings, named as its parameter.
    pub enum Table ("embedding") {
        Source = "source_embedding",
        Target = "target_embedding",
        Shared = "embedding",
    }
}

/// An entry of the table of initialisations.
#[derive(Clone, Copy)]
pub struct Init {
    pub name: &'static str,
    pub definition: &'static str,
    pub source: &'static str,
    pub options: &'static [&'static dyn AnyOption],
    /// Returns the fill of the matrix (fan_out, fan_in) of a linear layer.
    pub linear: fn(Role, fan_in: i64, fan_out: i64, &LayerContext) -> Fill,
    /// Returns the fill of a linear layer's bias.
    pub bias: fn(Role, fan_in: i64) -> Fill,
    /// Returns the fill of a table of word embeddings, (V, d).
    pub embedding: fn(Table, &ModelShape, &Options) -> Fill,
    /// Returns the fill of an output projection that shares no table with the embeddings, (V, d).
    pub output: fn(d_model: i64, vocab_size: i64, &Options) -> Fill,
    /// True if the std of linear layers does not depend on the width.
    pub has_fixed_std: bool,
}

impl Init {
    /// Returns the fill of a layer's matrix (fan_out, fan_in) at this place, with the factor of the std that the
    /// model's parametrisation sets.
    pub fn matrix(&self, role: Role, fan_in: i64, fan_out: i64, place: &LayerContext) -> Fill {
        unit_scaled_or(&place.model, || {
            (self.linear)(role, fan_in, fan_out, place).times(place.model.scaled.matrix(self.has_fixed_std))
        })
    }

    /// Returns the fill of biases that are stacked in one tensor. Each part has a role and a number of elements.
    pub fn biases(&self, parts: &[(Role, i64)], fan_in: i64) -> Fill {
        Fill::Rows(parts.iter().map(|&(role, fan_out)| (fan_out, (self.bias)(role, fan_in))).collect())
    }

    /// Returns the fill of matrices (fan_out, fan_in) that are stacked in one tensor, one matrix for each role.
    pub fn linears(&self, roles: &[Role], fan_in: i64, fan_out: i64, place: &LayerContext) -> Fill {
        Fill::Rows(roles.iter().map(|&role| (fan_out, self.matrix(role, fan_in, fan_out, place))).collect())
    }

    /// Returns the fill of a table of word embeddings, (V, d). Its std is that of the base model, at every width.
    pub fn table(&self, table: Table, model: &ModelShape, options: &Options) -> Fill {
        unit_scaled_or(model, || {
            (self.embedding)(table, &ModelShape { d_model: model.scaled.base_width, ..*model }, options)
        })
    }

    /// Returns the fill of an untied output projection, (V, d). Its std is that of the base model, at every width.
    pub fn output_matrix(&self, model: &ModelShape, vocab_size: i64, options: &Options) -> Fill {
        unit_scaled_or(model, || (self.output)(model.scaled.base_width, vocab_size, options))
    }
}

/// Returns u-μP's fill of a matrix or table if the model uses u-μP, else the fill that `own` computes, the
/// initialisation's.
fn unit_scaled_or(model: &ModelShape, own: impl FnOnce() -> Fill) -> Fill {
    match model.scaled.unit {
        Some(_) => Fill::Normal { std: parametrisation::STD },
        None => own(),
    }
}

/// Every initialisation that a model can use by name.
pub static INITS: &[&Init] = &[
    &schemes::XAVIER,
    &schemes::SMALL,
    &schemes::FAIRSEQ,
    &schemes::FAIRSEQ_0_12_2,
    &schemes::DEEPNORM,
    &schemes::SUBLN,
    &schemes::DS_INIT,
    &schemes::T_FIXUP,
    &schemes::R_FIXUP,
    &schemes::GPT2,
    &schemes::NORMAL,
    &schemes::LLAMA_DEPTH,
    &schemes::FAN_IN,
    &schemes::B2T,
];

/// Returns the entry of the table with this name.
pub fn find(name: &str) -> Result<&'static Init> {
    let names = INITS.iter().map(|init| init.name);
    INITS.iter().copied().find(|init| init.name == name).ok_or_else(|| unknown("init", name, names))
}

/// Returns the options of all initialisations.
pub fn option_specs() -> Vec<&'static dyn AnyOption> {
    distinct(INITS.iter().flat_map(|init| init.options).copied())
}

/// Returns Xavier's normal distribution: std = gain·√(2/(fan_in + fan_out)).
pub fn xavier_normal(gain: f64, fan_in: i64, fan_out: i64) -> Fill {
    Fill::Normal { std: gain * (2.0 / (fan_in + fan_out) as f64).sqrt() }
}

/// Returns Xavier's uniform distribution: bound = gain·√(6/(fan_in + fan_out)).
pub fn xavier_uniform(gain: f64, fan_in: i64, fan_out: i64) -> Fill {
    Fill::Uniform { bound: gain * (6.0 / (fan_in + fan_out) as f64).sqrt() }
}

/// Returns the normal distribution of word embeddings, with mean 0 and variance 1/d.
pub fn embedding(d_model: i64) -> Fill {
    Fill::Normal { std: (d_model as f64).powf(-0.5) }
}
