//! The declarations of residual schemes, as plain data.

use super::growth::Growth;
use super::mixing::Mixing;
use crate::parametrisation::SumsOver;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeSet;

/// A norm at one place of a scheme, and the name of its parameters. The model's options choose the kind of norm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NormAt {
    pub name: String,
    pub width: i64,
    /// True if this is the last of the stack's norms.
    #[serde(default)]
    pub last: bool,
    /// True if the norm comes after the stack's last layer.
    #[serde(default)]
    pub ends_stack: bool,
    /// The factor by which the initial value of the norm's weight is multiplied.
    #[serde(default = "one")]
    pub start: f64,
    /// False for an rmsnorm without a weight.
    #[serde(default = "yes")]
    pub is_weighted: bool,
}

/// Returns serde's default of a factor.
fn one() -> f64 {
    1.0
}

/// Returns serde's default of [`NormAt::is_weighted`].
fn yes() -> bool {
    true
}

/// A parameter of the scheme, with its initial values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Learned {
    pub name: String,
    pub shape: Vec<i64>,
    pub value: FirstValue,
    /// The dimension over which products with this parameter are summed. Parametrisations scale its learning rate
    /// accordingly.
    #[serde(default, skip_serializing_if = "SumsOver::is_nothing")]
    pub sums_over: SumsOver,
}

/// A parameter's initial values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FirstValue {
    All(f64),
    /// One value for each element, in row-major order.
    Each(Vec<f64>),
    /// Random initial values from N(0, std²).
    Normal {
        normal: f64,
    },
}

impl Learned {
    /// Declares a parameter whose products are not summed over the width or the depth of the model.
    fn of(name: impl Into<String>, shape: &[i64], value: FirstValue) -> Self {
        Learned { name: name.into(), shape: shape.to_vec(), value, sums_over: SumsOver::Nothing }
    }

    /// Sets the dimension over which products with this parameter are summed.
    pub fn summed_over(self, sums_over: SumsOver) -> Self {
        Learned { sums_over, ..self }
    }

    /// Declares a parameter whose elements all begin with `value`.
    pub fn new(name: impl Into<String>, shape: &[i64], value: f64) -> Self {
        Learned::of(name, shape, FirstValue::All(value))
    }

    /// Declares a parameter with random initial values from N(0, std²).
    pub fn normal(name: impl Into<String>, shape: &[i64], std: f64) -> Self {
        Learned::of(name, shape, FirstValue::Normal { normal: std })
    }

    /// Declares a parameter with one initial value for each element, in row-major order.
    pub fn each(name: impl Into<String>, shape: &[i64], values: Vec<f64>) -> Self {
        Learned::of(name, shape, FirstValue::Each(values))
    }

    /// Declares a matrix whose initial elements are `entry(row, column)`.
    pub fn matrix(name: impl Into<String>, [rows, columns]: [i64; 2], entry: impl Fn(i64, i64) -> f64) -> Self {
        let entries = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        Learned::each(name, &[rows, columns], entries.map(|(row, column)| entry(row, column)).collect())
    }
}

/// The factor of x in a residual sum (the residual gain, `alpha`), or of F(x) (the branch gain, `beta`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gain {
    #[default]
    One,
    Constant(f64),
    /// A scalar, or one number per column. Gains in a layer that have the same name share one parameter.
    Learned(Learned),
    /// σ(w/τ) with a parameter w and the temperature τ.
    Sigmoid {
        of: Learned,
        temperature: f64,
    },
    /// √max(1 − σ(w/τ)², 10⁻³); it is used with a [`Gain::Sigmoid`] of the same w.
    CoSigmoid {
        of: Learned,
        temperature: f64,
    },
    /// |w/τ| with a parameter w and the temperature τ.
    Magnitude {
        of: Learned,
        temperature: f64,
    },
    /// 1 − |w/τ|; it is used with a [`Gain::Magnitude`] of the same w.
    CoMagnitude {
        of: Learned,
        temperature: f64,
    },
    /// α_t, which changes during training by the stack's [`Growth`].
    Growing,
}

impl Gain {
    /// Returns the parameter of the gain, if it has one.
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
    /// The changes of x before F reads it.
    pub before: Vec<Change>,
    /// The changes of x before the sum; F reads x without these changes.
    pub skip: Vec<Change>,
    /// The changes of F's output before the sum.
    pub branch: Vec<Change>,
    /// The changes of the sum.
    pub after: Vec<Change>,
    /// α, the residual gain.
    pub alpha: Gain,
    /// β, the branch gain.
    pub beta: Gain,
    /// The sublayer's update of each stream beside x, in the order of [`StackSpec::streams`].
    pub streams: Vec<StreamStep>,
    /// The mixing that reads x from several tensors and writes F(x) to several. It replaces α, β, `skip`, `after` and
    /// `streams`.
    pub mixing: Option<Mixing>,
}

impl ResidualSpec {
    /// Iterates over all changes of the connection.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        [&self.before, &self.skip, &self.branch, &self.after].into_iter().flatten()
    }

    /// Sets the gains α and β to constants.
    pub fn with_gains(self, (alpha, beta): (f64, f64)) -> Self {
        ResidualSpec { alpha: Gain::Constant(alpha), beta: Gain::Constant(beta), ..self }
    }

    /// Multiplies F(x) by m: folds m into β, if the β of x and of every stream beside x is a constant. Returns the
    /// factor by which F(x) must still be multiplied: 1 if m was folded into β, otherwise m.
    pub fn times(mut self, m: f64) -> (Self, f64) {
        let mut gains: Vec<&mut Gain> = self.streams.iter_mut().map(|step| &mut step.beta).collect();
        gains.push(&mut self.beta);
        let are_constant = gains.iter().all(|gain| matches!(gain, Gain::One | Gain::Constant(_)));
        if m == 1.0 || self.mixing.is_some() || !are_constant {
            return (self, m);
        }
        for gain in gains {
            *gain = match gain {
                Gain::Constant(value) => Gain::Constant(*value * m),
                _ => Gain::Constant(m), // it was `Gain::One`
            };
        }
        (self, 1.0)
    }
}

/// A sublayer's update of a stream s beside x: s⁺ = α⊙s + β⊙drop(f). f and the dropout mask are the same as for x⁺.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StreamStep {
    /// α, the residual gain.
    pub alpha: Gain,
    /// β, the branch gain.
    pub beta: Gain,
}

/// The declaration of a sublayer: its residual connection, and the changes inside it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SublayerSpec {
    #[serde(default)]
    pub around: ResidualSpec,
    /// The changes inside the sublayer, each with its point, in the order of the points.
    #[serde(default, deserialize_with = "in_order")]
    pub inside: Vec<(Point, Change)>,
    /// The factor on F(x) that the parametrisation sets; 1 if the factor has been folded into β.
    #[serde(default = "one")]
    pub scale: f64,
}

/// Reads changes and sorts them by point, because a dictionary may name them in any order.
fn in_order<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<(Point, Change)>, D::Error> {
    let mut inside = Vec::<(Point, Change)>::deserialize(deserializer)?;
    inside.sort_by_key(|(point, _)| *point);
    Ok(inside)
}

/// The declaration of a layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// The changes of x at the layer's beginning.
    #[serde(default)]
    pub begin: Vec<Change>,
    pub sublayers: Vec<SublayerSpec>,
}

impl SublayerSpec {
    /// Iterates over the sublayer's changes, around and inside it, in the order in which they act.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        let ResidualSpec { before, skip, branch, after, .. } = &self.around;
        before
            .iter()
            .chain(self.inside.iter().map(|(_, change)| change))
            .chain([branch, skip, after].into_iter().flatten())
    }
}

impl LayerSpec {
    /// Iterates over the layer's changes in the order in which they act.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        self.begin.iter().chain(self.sublayers.iter().flat_map(SublayerSpec::changes))
    }

    /// Returns the names of the kept tensors that come from outside of the layer: the layer mixes them in before it
    /// keeps a tensor of the same name itself.
    pub fn takes(&self) -> BTreeSet<&str> {
        let (mut kept, mut takes) = (BTreeSet::new(), BTreeSet::new());
        for change in self.changes() {
            match change {
                Change::Keep(name) => {
                    kept.insert(name.as_str());
                }
                Change::Mix { name, .. } if !kept.contains(name.as_str()) => {
                    takes.insert(name.as_str());
                }
                _ => {}
            }
        }
        takes
    }

    /// Returns the names of the tensors that the layer keeps.
    pub fn leaves(&self) -> BTreeSet<&str> {
        self.changes().filter_map(Change::keeps).collect()
    }
}

/// Returns the names of the tensors that layer `index` keeps and that later layers or the stack's end read. `flow` is
/// the declaration of the stack.
pub fn leaves<'a>(layers: &'a [LayerSpec], index: usize, flow: &'a StackSpec) -> BTreeSet<&'a str> {
    let read_above: BTreeSet<&str> = layers[index + 1..].iter().flat_map(LayerSpec::takes).collect();
    let read_at_end: BTreeSet<&str> = flow.end.iter().filter_map(Change::mixes).collect();
    layers[index].leaves().into_iter().filter(|name| read_above.contains(name) || read_at_end.contains(name)).collect()
}

/// Named points inside a sublayer, in the order in which they are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Point {
    /// The input of the projections to q, k and v (self-attention), of the projection to q (cross-attention), or of
    /// the first linear layer (feed-forward).
    Input,
    /// The inputs of the projections to q, k and v separately, in self-attention. These points come after
    /// [`Point::Input`].
    QueryInput,
    KeyInput,
    ValueInput,
    /// The queries. A norm of width d_head acts on each head separately, one of width d_model on all heads together.
    /// A norm at `Key` or `Value` acts in the same way.
    Query,
    Key,
    Value,
    /// The queries and keys of self-attention, after they have been rotated by their positions if positions are
    /// rotary.
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
    /// The points at the separate inputs of q, k and v.
    pub const INPUTS: [Point; 3] = [Point::QueryInput, Point::KeyInput, Point::ValueInput];

    /// The points on q, k and v, between their projections and attention's products QKᵀ and PV.
    pub const BEFORE_PRODUCTS: [Point; 5] =
        [Point::Query, Point::Key, Point::Value, Point::RotatedQuery, Point::RotatedKey];

    /// True for a point on q, k or v, between their projections and attention's products.
    pub fn is_before_products(self) -> bool {
        Self::BEFORE_PRODUCTS.contains(&self)
    }
}

/// A change that a scheme makes to a tensor at some place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Norm(NormAt),
    /// Subtracts b: x − b.
    Shift(Learned),
    /// Multiplies by s: x ⊙ s.
    Scale(Learned),
    /// Multiplies by a constant: c·x.
    Times(f64),
    /// Divides each row by its length: x/max(‖x‖₂, ε); the number is ε.
    Unit(f64),
    /// Multiplies the columns of each head by the head's scalar.
    HeadScale(Learned),
    /// x − silu(a)·sg(x), in which sg(x) is x without its gradient. So x is scaled but its gradient is not (Chen et
    /// al. 2025, GPAS).
    DampForward(Learned),
    /// Keeps x under a name, so that a later [`Change::Mix`] in this stack can read it.
    Keep(String),
    /// own⊙x + kept⊙k, in which k is the tensor that has been kept under the name.
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

    /// Returns the name of the kept tensor that this change reads, if it reads one.
    pub fn mixes(&self) -> Option<&str> {
        match self {
            Change::Mix { name, .. } => Some(name),
            _ => None,
        }
    }

    /// Returns the name under which this change keeps x, if it does.
    pub fn keeps(&self) -> Option<&str> {
        match self {
            Change::Keep(name) => Some(name),
            _ => None,
        }
    }
}

impl From<NormAt> for Vec<Change> {
    /// Returns a list that holds only this norm, as most places need.
    fn from(norm: NormAt) -> Self {
        vec![Change::Norm(norm)]
    }
}

/// The scheme's parts that belong to the whole stack: before the first layer, between layers, and after the last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct StackSpec {
    /// The changes of the stack's input. The streams beside x begin with the changed input.
    pub begin: Vec<Change>,
    /// The weighted sum of all earlier outputs that a layer reads; `None` means that a layer reads the last output.
    pub combine: Option<Combine>,
    /// The residual streams beside x. Like x, they pass from sublayer to sublayer.
    pub streams: Vec<ExtraStream>,
    /// The mixing that computes the stack's output from the tensors that sublayers have written; `None` means that the
    /// output is x.
    pub mixing: Option<Mixing>,
    /// The schedule of α_t, the value of [`Gain::Growing`].
    pub growth: Option<Growth>,
    /// The changes after the last layer.
    pub end: Vec<Change>,
}

/// A residual stream s beside x. It begins with the value of x, and [`ResidualSpec::streams`] of each sublayer
/// updates it. After the last layer x ← x + N(s), or x + s without a norm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExtraStream {
    pub norm: Option<NormAt>,
}

/// Weighted sums of outputs: y_0 is the embedding, y_1, y_2, … are the layers' outputs. Row l of the lower-triangular
/// `weight` combines y_0 to y_l into the input of layer l + 1; the last row gives the stack's output. If there are
/// norms, `norms[l − 1]` applies to y_l, or with `on_sums` to the sum of row l.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Combine {
    pub weight: Learned,
    pub norms: Vec<NormAt>,
    pub on_sums: bool,
    /// True if the first layer reads y_0 itself. Then row 0 has no effect.
    pub skips_first: bool,
}
