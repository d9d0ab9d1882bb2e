//! What a scheme declares, in plain data.

use super::growth::Growth;
use super::mixing::Mixing;
use serde::Serialize;

/// The stack's norm under a name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NormAt {
    pub name: String,
    pub width: i64,
    /// No norm of the stack follows it.
    pub last: bool,
    /// It stands after the last layer.
    pub ends_stack: bool,
    /// Its weight starts at this times its own first value.
    pub start: f64,
    /// False: an rmsnorm without a weight.
    pub is_weighted: bool,
}

/// A parameter of the scheme, and its first values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Learned {
    pub name: String,
    pub shape: Vec<i64>,
    pub value: FirstValue,
}

/// What a parameter's numbers are at the start.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum FirstValue {
    All(f64),
    /// Number by number, row after row.
    Each(Vec<f64>),
}

impl Learned {
    /// Every number is `value`.
    pub fn new(name: impl Into<String>, shape: &[i64], value: f64) -> Self {
        Learned { name: name.into(), shape: shape.to_vec(), value: FirstValue::All(value) }
    }

    /// A matrix whose entries are given by row and column.
    pub fn matrix(name: impl Into<String>, [rows, columns]: [i64; 2], entry: impl Fn(i64, i64) -> f64) -> Self {
        let entries = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let value = FirstValue::Each(entries.map(|(row, column)| entry(row, column)).collect());
        Learned { name: name.into(), shape: vec![rows, columns], value }
    }
}

/// What x or F(x) is multiplied by.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Gain {
    #[default]
    One,
    Constant(f64),
    /// A scalar or one number per column.
    Learned(Learned),
    /// The layer's parameter of that number.
    Shared(usize),
    /// α_t, which the stack's [`Growth`] moves.
    Growing,
}

/// What stands around one sublayer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Around {
    pub before: Option<NormAt>,
    pub alpha: Gain,
    pub beta: Gain,
    pub amid: Option<NormAt>,
    pub after: Option<NormAt>,
    /// What the sublayer does to each stream beside x, in the order of [`Flow::streams`].
    pub streams: Vec<StreamStep>,
    /// How x is read and F(x) written, in place of α, β, `after` and `streams`; none: by those.
    pub mixing: Option<Mixing>,
    /// In the sum, x is x plus the layer's input.
    pub adds_bottom: bool,
}

impl Around {
    /// Its norms.
    pub fn norms(self) -> impl Iterator<Item = NormAt> {
        [self.before, self.amid, self.after].into_iter().flatten()
    }

    /// The declaration with F(x) times m: folded into β where every β is a constant; else the factor that is left for
    /// F(x).
    pub fn times(mut self, m: f64) -> (Self, f64) {
        let mut gains: Vec<&mut Gain> = self.streams.iter_mut().map(|step| &mut step.beta).collect();
        gains.push(&mut self.beta);
        if m == 1.0 || self.mixing.is_some() || !gains.iter().all(|gain| matches!(gain, Gain::One | Gain::Constant(_)))
        {
            return (self, m);
        }
        for gain in gains {
            *gain = match gain {
                Gain::Constant(value) => Gain::Constant(*value * m),
                _ => Gain::Constant(m),
            };
        }
        (self, 1.0)
    }
}

/// s⁺ = α⊙s + β⊙drop(f) of a stream s beside x; f and the dropout's mask are those of x⁺.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StreamStep {
    pub alpha: Gain,
    pub beta: Gain,
}

/// Named points inside a sublayer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Point {
    /// Before q, k and v (self-attention), before q (cross-attention), or before the first linear (feed-forward).
    Input,
    /// The queries. A norm of d_head works on each head's, one of d_model on all heads' joined; so at keys and values.
    Query,
    Key,
    Value,
    /// Queries and keys of self-attention after their rotation by positions, if there is one.
    RotatedQuery,
    RotatedKey,
    /// The heads' outputs, joined, before the output projection.
    AfterHeads,
    /// After the attention's output projection.
    AfterOutput,
    /// After the first linear, before the activation.
    BeforeActivation,
    /// After the activation and its dropout, before the second linear.
    Amid,
}

impl Point {
    /// Between the projections and the products of attention.
    pub fn is_before_products(self) -> bool {
        matches!(self, Point::Query | Point::Key | Point::Value | Point::RotatedQuery | Point::RotatedKey)
    }
}

/// What happens at a point.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Norm(NormAt),
    /// x − b
    Shift(Learned),
    /// x ⊙ s
    Scale(Learned),
    /// c·x
    Times(f64),
    /// x/max(‖x‖₂, ε)
    Unit(f64),
    /// Each head's columns times its own scalar.
    HeadScale(Learned),
}

/// How the layers of a stack follow each other.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Flow {
    /// Before the first layer, and before the streams beside x begin.
    pub begin: Vec<Change>,
    /// A layer's input from all outputs so far; none: the last one.
    pub combine: Option<Combine>,
    /// What travels beside x from sublayer to sublayer.
    pub streams: Vec<ExtraStream>,
    /// How the stack's output is read of what the sublayers have written; none: it is x.
    pub mixing: Option<Mixing>,
    /// α_t of [`Gain::Growing`].
    pub growth: Option<Growth>,
    /// After the last layer.
    pub end: Vec<Change>,
}

/// A residual stream beside x. It begins as x does; each sublayer's [`Around::streams`] move it; after the last layer
/// x ← x + N(s).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExtraStream {
    pub norm: Option<NormAt>,
}

/// Row l of `weight`, lower-triangular, weighs y_0 (the embedding) to y_l, the layers' outputs, into the input of layer
/// l + 1; the last row makes the stack's output. `norms[l − 1]`, where there are norms, stands on y_l, or on row l's sum.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Combine {
    pub weight: Learned,
    pub norms: Vec<NormAt>,
    pub on_sums: bool,
    /// The first layer reads y_0 itself, and row 0 does nothing.
    pub skips_first: bool,
}
