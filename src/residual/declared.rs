//! The declarations of residual schemes, as plain data.

use super::growth::Growth;
use super::mixing::Mixing;
use crate::parametrisation::SumsOver;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeSet;

/// The stack's norm under a name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NormAt {
    pub name: String,
    pub width: i64,
    /// True if no norm of the stack follows it.
    #[serde(default)]
    pub last: bool,
    /// True if it comes after the last layer.
    #[serde(default)]
    pub ends_stack: bool,
    /// The factor of its weight's initial value.
    #[serde(default = "one")]
    pub start: f64,
    /// False for an rmsnorm without a weight.
    #[serde(default = "yes")]
    pub is_weighted: bool,
}

fn one() -> f64 {
    1.0
}

fn yes() -> bool {
    true
}

/// A parameter of the scheme, and its initial values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Learned {
    pub name: String,
    pub shape: Vec<i64>,
    pub value: FirstValue,
    /// The dimension over which its products are summed, by which parametrisations scale its learning rate.
    #[serde(default, skip_serializing_if = "SumsOver::is_nothing")]
    pub sums_over: SumsOver,
}

/// A parameter's initial values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FirstValue {
    All(f64),
    /// One value per element, in row-major order.
    Each(Vec<f64>),
    /// Random values from N(0, std²).
    Normal {
        normal: f64,
    },
}

impl Learned {
    fn of(name: impl Into<String>, shape: &[i64], value: FirstValue) -> Self {
        Learned { name: name.into(), shape: shape.to_vec(), value, sums_over: SumsOver::Nothing }
    }

    /// Sets the dimension over which its products are summed.
    pub fn summed_over(self, sums_over: SumsOver) -> Self {
        Learned { sums_over, ..self }
    }

    /// Declares a parameter filled with `value`.
    pub fn new(name: impl Into<String>, shape: &[i64], value: f64) -> Self {
        Learned::of(name, shape, FirstValue::All(value))
    }

    /// Declares a parameter with random values from N(0, std²).
    pub fn normal(name: impl Into<String>, shape: &[i64], std: f64) -> Self {
        Learned::of(name, shape, FirstValue::Normal { normal: std })
    }

    /// Declares a parameter with one value per element, in row-major order.
    pub fn each(name: impl Into<String>, shape: &[i64], values: Vec<f64>) -> Self {
        Learned::of(name, shape, FirstValue::Each(values))
    }

    /// Declares a matrix whose entries are given by row and column.
    pub fn matrix(name: impl Into<String>, [rows, columns]: [i64; 2], entry: impl Fn(i64, i64) -> f64) -> Self {
        let entries = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        Learned::each(name, &[rows, columns], entries.map(|(row, column)| entry(row, column)).collect())
    }
}

/// The factor of x (the residual gain, `alpha`) or of F(x) (the branch gain, `beta`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gain {
    #[default]
    One,
    Constant(f64),
    /// A scalar, or one number per column. Gains of a layer with the same name share one parameter.
    Learned(Learned),
    /// σ(w/τ) with a parameter w and the temperature τ.
    Sigmoid {
        of: Learned,
        temperature: f64,
    },
    /// √max(1 − σ(w/τ)², 10⁻³), beside [`Gain::Sigmoid`] with the same w.
    CoSigmoid {
        of: Learned,
        temperature: f64,
    },
    /// |w/τ|.
    Magnitude {
        of: Learned,
        temperature: f64,
    },
    /// 1 − |w/τ|, beside [`Gain::Magnitude`] with the same w.
    CoMagnitude {
        of: Learned,
        temperature: f64,
    },
    /// α_t, which the stack's [`Growth`] changes.
    Growing,
}

impl Gain {
    /// Returns its parameter.
    pub fn learned(&self) -> Option<&Learned> {
        match self {
            Gain::Learned(of)
            | Gain::Sigmoid { of, .. }
            | Gain::CoSigmoid { of, .. }
            | Gain::Magnitude { of, .. }
            | Gain::CoMagnitude { of, .. } => Some(of),
            Gain::One | Gain::Constant(_) | Gain::Growing => None,
        }
    }
}

/// The residual connection of one sublayer: x⁺ = after(α⊙skip(x) + β⊙drop(branch(F(before(x))))).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ResidualSpec {
    /// Changes of F's input.
    pub before: Vec<Change>,
    /// Changes of x in the sum.
    pub skip: Vec<Change>,
    /// Changes of F's output.
    pub branch: Vec<Change>,
    /// Changes of the sum.
    pub after: Vec<Change>,
    /// α, the residual gain.
    pub alpha: Gain,
    /// β, the branch gain.
    pub beta: Gain,
    /// The sublayer's step on each stream beside x, in the order of [`StackSpec::streams`].
    pub streams: Vec<StreamStep>,
    /// The mixing that reads x and writes F(x), instead of α, β, `skip`, `after` and `streams`; `None` to use those.
    pub mixing: Option<Mixing>,
}

impl ResidualSpec {
    /// Iterates over all changes.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        [&self.before, &self.skip, &self.branch, &self.after].into_iter().flatten()
    }

    /// Multiplies F(x) by m: folds it into β if every β is a constant; otherwise returns m as the factor that remains
    /// for F(x).
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

/// The step s⁺ = α⊙s + β⊙drop(f) of a stream s beside x; f and the dropout's mask are those of x⁺.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StreamStep {
    /// α, the residual gain.
    pub alpha: Gain,
    /// β, the branch gain.
    pub beta: Gain,
}

/// A sublayer's declaration: around it, and at points inside it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SublayerSpec {
    #[serde(default)]
    pub around: ResidualSpec,
    /// The changes inside, in the order of the points.
    #[serde(default, deserialize_with = "in_order")]
    pub inside: Vec<(Point, Change)>,
    /// Factor on F(x) set by the parametrisation; 1 if it was folded into β.
    #[serde(default = "one")]
    pub scale: f64,
}

/// Reads changes and sorts them by point, because a dictionary may name a later point before an earlier one.
fn in_order<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Vec<(Point, Change)>, D::Error> {
    let mut inside = Vec::<(Point, Change)>::deserialize(from)?;
    inside.sort_by_key(|(point, _)| *point);
    Ok(inside)
}

/// A layer's declaration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// Changes of x when the layer begins.
    #[serde(default)]
    pub begin: Vec<Change>,
    pub sublayers: Vec<SublayerSpec>,
}

impl SublayerSpec {
    /// Iterates over the changes in the order in which they act.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        let ResidualSpec { before, skip, branch, after, .. } = &self.around;
        before
            .iter()
            .chain(self.inside.iter().map(|(_, change)| change))
            .chain([branch, skip, after].into_iter().flatten())
    }
}

impl LayerSpec {
    /// Iterates over the changes in the order in which they act.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        self.begin.iter().chain(self.sublayers.iter().flat_map(SublayerSpec::changes))
    }

    /// Returns the names of tensors that it reads and has not kept itself before.
    pub fn takes(&self) -> BTreeSet<&str> {
        let (mut kept, mut takes) = (BTreeSet::new(), BTreeSet::new());
        for change in self.changes() {
            match change {
                Change::Keep(name) => kept.insert(name.as_str()),
                Change::Mix { name, .. } if !kept.contains(name.as_str()) => takes.insert(name.as_str()),
                _ => false,
            };
        }
        takes
    }

    /// Returns the names under which it keeps tensors.
    pub fn leaves(&self) -> BTreeSet<&str> {
        self.changes().filter_map(Change::keeps).collect()
    }
}

/// Returns the names of tensors that layer `index` keeps for the layers above it and for the stack's end.
pub fn leaves<'a>(layers: &'a [LayerSpec], index: usize, flow: &'a StackSpec) -> BTreeSet<&'a str> {
    let above: BTreeSet<&str> = layers[index + 1..].iter().flat_map(LayerSpec::takes).collect();
    let at_end: BTreeSet<&str> = flow.end.iter().filter_map(Change::mixes).collect();
    layers[index].leaves().into_iter().filter(|name| above.contains(name) || at_end.contains(name)).collect()
}

/// Named points inside a sublayer, in the order in which they are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Point {
    /// The input of q, k and v (self-attention), of q (cross-attention), or of the first linear layer (feed-forward).
    Input,
    /// The input of q alone, k alone, or v alone, in self-attention; after [`Point::Input`].
    QueryInput,
    KeyInput,
    ValueInput,
    /// The queries. A norm of width d_head acts on each head's, one of d_model on all heads' joined; the same holds for
    /// keys and values.
    Query,
    Key,
    Value,
    /// Queries and keys of self-attention after their rotation by positions, if there is one.
    RotatedQuery,
    RotatedKey,
    /// The joined outputs of the heads, before the output projection.
    AfterHeads,
    /// The output of the attention's output projection.
    AfterOutput,
    /// The output of the first linear layer, before the activation.
    BeforeActivation,
    /// The output of the activation and its dropout, before the second linear layer.
    AfterActivation,
}

impl Point {
    /// The points before q, k and v individually.
    pub const INPUTS: [Point; 3] = [Point::QueryInput, Point::KeyInput, Point::ValueInput];

    /// The points between attention's projections and its products.
    pub const BEFORE_PRODUCTS: [Point; 5] =
        [Point::Query, Point::Key, Point::Value, Point::RotatedQuery, Point::RotatedKey];

    pub fn is_before_products(self) -> bool {
        Self::BEFORE_PRODUCTS.contains(&self)
    }
}

/// A change at a point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Norm(NormAt),
    /// x − b.
    Shift(Learned),
    /// x ⊙ s.
    Scale(Learned),
    /// c·x.
    Times(f64),
    /// x/max(‖x‖₂, ε).
    Unit(f64),
    /// Each head's columns times a scalar of that head.
    HeadScale(Learned),
    /// x − silu(a)·sg(x), where sg(x) is x without its gradient: x is scaled, its gradient is not (Chen et al. 2025,
    /// GPAS).
    DampForward(Learned),
    /// Keeps x under a name, for a later [`Change::Mix`] in this stack.
    Keep(String),
    /// own⊙x + kept⊙(the tensor kept under the name).
    Mix {
        name: String,
        own: Gain,
        kept: Gain,
    },
}

impl Change {
    /// Returns the norm, if the change is one.
    pub fn norm(&self) -> Option<&NormAt> {
        match self {
            Change::Norm(at) => Some(at),
            _ => None,
        }
    }

    /// Returns the name of the tensor that it reads.
    pub fn mixes(&self) -> Option<&str> {
        match self {
            Change::Mix { name, .. } => Some(name),
            _ => None,
        }
    }

    /// Returns the name under which it keeps x.
    pub fn keeps(&self) -> Option<&str> {
        match self {
            Change::Keep(name) => Some(name),
            _ => None,
        }
    }
}

/// Builds a list of one norm, the form that most places have.
impl From<NormAt> for Vec<Change> {
    fn from(at: NormAt) -> Self {
        vec![Change::Norm(at)]
    }
}

/// The connections between a stack's layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StackSpec {
    /// Changes before the first layer, and before the streams beside x begin.
    pub begin: Vec<Change>,
    /// The combination of all outputs so far into a layer's input; `None` means the last output.
    pub combine: Option<Combine>,
    /// The streams that run beside x from sublayer to sublayer.
    pub streams: Vec<ExtraStream>,
    /// The mixing that reads the stack's output from what the sublayers have written; `None` if the output is x.
    pub mixing: Option<Mixing>,
    /// The α_t of [`Gain::Growing`].
    pub growth: Option<Growth>,
    /// Changes after the last layer.
    pub end: Vec<Change>,
}

/// A residual stream beside x. It begins as x; each sublayer's [`ResidualSpec::streams`] updates it; after the last
/// layer x ← x + N(s).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtraStream {
    pub norm: Option<NormAt>,
}

/// Weighted sums of outputs. Row l of the lower-triangular `weight` combines y_0 (the embedding) to y_l, the layers'
/// outputs, into the input of layer l + 1; the last row gives the stack's output. `norms[l − 1]`, if there are norms,
/// applies to y_l or, with `on_sums`, to row l's sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Combine {
    pub weight: Learned,
    pub norms: Vec<NormAt>,
    pub on_sums: bool,
    /// True if the first layer reads y_0 itself, so that row 0 does nothing.
    pub skips_first: bool,
}
