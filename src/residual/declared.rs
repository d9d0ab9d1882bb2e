//! What a scheme declares, in plain data.

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
    /// No norm of the stack follows it.
    #[serde(default)]
    pub last: bool,
    /// It stands after the last layer.
    #[serde(default)]
    pub ends_stack: bool,
    /// Its weight starts at this times its own first value.
    #[serde(default = "one")]
    pub start: f64,
    /// False: an rmsnorm without a weight.
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
    /// What its products are summed over, so that parametrisations scale its rate.
    #[serde(default, skip_serializing_if = "SumsOver::is_nothing")]
    pub sums_over: SumsOver,
}

/// A parameter's initial values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FirstValue {
    All(f64),
    /// Number by number, row after row.
    Each(Vec<f64>),
    /// Drawn from N(0, std²).
    Normal {
        normal: f64,
    },
}

impl Learned {
    fn of(name: impl Into<String>, shape: &[i64], value: FirstValue) -> Self {
        Learned { name: name.into(), shape: shape.to_vec(), value, sums_over: SumsOver::Nothing }
    }

    /// Its products are summed over this.
    pub fn summed_over(self, sums_over: SumsOver) -> Self {
        Learned { sums_over, ..self }
    }

    /// Every number is `value`.
    pub fn new(name: impl Into<String>, shape: &[i64], value: f64) -> Self {
        Learned::of(name, shape, FirstValue::All(value))
    }

    /// Drawn from N(0, std²).
    pub fn normal(name: impl Into<String>, shape: &[i64], std: f64) -> Self {
        Learned::of(name, shape, FirstValue::Normal { normal: std })
    }

    /// Number by number, row after row.
    pub fn each(name: impl Into<String>, shape: &[i64], values: Vec<f64>) -> Self {
        Learned::of(name, shape, FirstValue::Each(values))
    }

    /// A matrix whose entries are given by row and column.
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
    /// A scalar or one number per column. Gains of a layer that have one name share one parameter.
    Learned(Learned),
    /// σ(w/τ) of a parameter w.
    Sigmoid {
        of: Learned,
        temperature: f64,
    },
    /// √max(1 − σ(w/τ)², 10⁻³), beside [`Gain::Sigmoid`] of the same w.
    CoSigmoid {
        of: Learned,
        temperature: f64,
    },
    /// α_t, which the stack's [`Growth`] moves.
    Growing,
}

impl Gain {
    /// Its parameter.
    pub fn learned(&self) -> Option<&Learned> {
        match self {
            Gain::Learned(of) | Gain::Sigmoid { of, .. } | Gain::CoSigmoid { of, .. } => Some(of),
            Gain::One | Gain::Constant(_) | Gain::Growing => None,
        }
    }
}

/// The residual around one sublayer: x⁺ = after(α⊙skip(x) + β⊙drop(branch(F(before(x))))).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ResidualSpec {
    /// On F's input.
    pub before: Vec<Change>,
    /// On x in the sum.
    pub skip: Vec<Change>,
    /// On F's output.
    pub branch: Vec<Change>,
    /// On the sum.
    pub after: Vec<Change>,
    /// α, the residual gain.
    pub alpha: Gain,
    /// β, the branch gain.
    pub beta: Gain,
    /// What the sublayer does to each stream beside x, in the order of [`StackSpec::streams`].
    pub streams: Vec<StreamStep>,
    /// How x is read and F(x) written, in place of α, β, `skip`, `after` and `streams`; none: by those.
    pub mixing: Option<Mixing>,
}

impl ResidualSpec {
    /// Everything that changes something.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        [&self.before, &self.skip, &self.branch, &self.after].into_iter().flatten()
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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StreamStep {
    /// α, the residual gain.
    pub alpha: Gain,
    /// β, the branch gain.
    pub beta: Gain,
}

/// A sublayer: what stands around it and, point by point, inside.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SublayerSpec {
    #[serde(default)]
    pub around: ResidualSpec,
    /// In the order of the points.
    #[serde(default, deserialize_with = "in_order")]
    pub inside: Vec<(Point, Change)>,
    /// Of F(x): the parametrisation's factor, where β has not taken it.
    #[serde(default = "one")]
    pub scale: f64,
}

/// A dictionary may name a later point before an earlier one.
fn in_order<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Vec<(Point, Change)>, D::Error> {
    let mut inside = Vec::<(Point, Change)>::deserialize(from)?;
    inside.sort_by_key(|(point, _)| *point);
    Ok(inside)
}

/// A layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// On x as the layer begins.
    #[serde(default)]
    pub begin: Vec<Change>,
    pub sublayers: Vec<SublayerSpec>,
}

impl SublayerSpec {
    /// In the order in which they act.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        let ResidualSpec { before, skip, branch, after, .. } = &self.around;
        before
            .iter()
            .chain(self.inside.iter().map(|(_, change)| change))
            .chain([branch, skip, after].into_iter().flatten())
    }
}

impl LayerSpec {
    /// In the order in which they act.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        self.begin.iter().chain(self.sublayers.iter().flat_map(SublayerSpec::changes))
    }

    /// The names that it reads and has not left itself before.
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

    /// The names that it leaves tensors under.
    pub fn leaves(&self) -> BTreeSet<&str> {
        self.changes().filter_map(Change::keeps).collect()
    }
}

/// What layer `index` leaves for those above it and for the stack's end, by name.
pub fn leaves<'a>(layers: &'a [LayerSpec], index: usize, flow: &'a StackSpec) -> BTreeSet<&'a str> {
    let above: BTreeSet<&str> = layers[index + 1..].iter().flat_map(LayerSpec::takes).collect();
    let at_end: BTreeSet<&str> = flow.end.iter().filter_map(Change::mixes).collect();
    layers[index].leaves().into_iter().filter(|name| above.contains(name) || at_end.contains(name)).collect()
}

/// Named points inside a sublayer, in the order in which they are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Point {
    /// Before q, k and v (self-attention), before q (cross-attention), or before the first linear (feed-forward).
    Input,
    /// Before q alone, k alone, or v alone, of self-attention; after [`Point::Input`].
    QueryInput,
    KeyInput,
    ValueInput,
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
    AfterActivation,
}

impl Point {
    /// Before q, k and v, one by one.
    pub const INPUTS: [Point; 3] = [Point::QueryInput, Point::KeyInput, Point::ValueInput];

    /// Between the projections and the products of attention.
    pub const BEFORE_PRODUCTS: [Point; 5] =
        [Point::Query, Point::Key, Point::Value, Point::RotatedQuery, Point::RotatedKey];

    pub fn is_before_products(self) -> bool {
        Self::BEFORE_PRODUCTS.contains(&self)
    }
}

/// What happens at a point.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// x − silu(a)·sg(x), sg(x) being x without its gradient: x is scaled, its gradient is not (Chen et al. 2025, GPAS).
    DampForward(Learned),
    /// Leaves x under a name, for [`Change::Mix`] later in this stack.
    Keep(String),
    /// own⊙x + kept⊙(what was left under the name).
    Mix {
        name: String,
        own: Gain,
        kept: Gain,
    },
}

impl Change {
    /// Norm alone.
    pub fn norm(&self) -> Option<&NormAt> {
        match self {
            Change::Norm(at) => Some(at),
            _ => None,
        }
    }

    /// The name that it reads.
    pub fn mixes(&self) -> Option<&str> {
        match self {
            Change::Mix { name, .. } => Some(name),
            _ => None,
        }
    }

    /// The name that it leaves x under.
    pub fn keeps(&self) -> Option<&str> {
        match self {
            Change::Keep(name) => Some(name),
            _ => None,
        }
    }
}

/// A list of one norm, the form that most places have.
impl From<NormAt> for Vec<Change> {
    fn from(at: NormAt) -> Self {
        vec![Change::Norm(at)]
    }
}

/// How the layers of a stack follow each other.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StackSpec {
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

/// A residual stream beside x. It begins as x does; each sublayer's [`ResidualSpec::streams`] move it; after the last layer
/// x ← x + N(s).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtraStream {
    pub norm: Option<NormAt>,
}

/// Row l of `weight`, lower-triangular, weighs y_0 (the embedding) to y_l, the layers' outputs, into the input of layer
/// l + 1; the last row makes the stack's output. `norms[l − 1]`, where there are norms, stands on y_l, or on row l's sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Combine {
    pub weight: Learned,
    pub norms: Vec<NormAt>,
    pub on_sums: bool,
    /// The first layer reads y_0 itself, and row 0 does nothing.
    pub skips_first: bool,
}
