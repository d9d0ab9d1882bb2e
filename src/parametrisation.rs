//! Parametrisations: how first values, forward passes, learning rates, weight decay and Adam's ε change with a model's
//! width and depth, by the role of a parameter (docs/spec.md §3.7).
//!
//! A parametrisation says it in multipliers of what a base model has, so that options tuned on a small base serve wide
//! and deep models. Everything here is plain numbers: a configuration says what a model's are ([`Scaled`]), its
//! initialisation, the model and the optimizer apply them, and Python reads them through `_core`.

use crate::choice;
use crate::error::{unknown, Result};
use serde_json::{json, Value};

choice! {
    /// A parameter's place in the parametrisation.
    pub enum ParameterRole ("role") {
        /// A table of word vectors, or the output projection's matrix.
        Embedding = "embedding",
        /// A matrix of a layer.
        HiddenMatrix = "hidden-matrix",
        /// A bias, a norm's parameter or a scheme's parameter of a layer.
        HiddenVector = "hidden-vector",
        /// Outside the layers and no table: a norm before or after the stack, the output's bias, dlcl's sums.
        End = "end",
    }
}

choice! {
    /// What the products with a norm's or a scheme's parameter are summed over.
    #[derive(Default)]
    pub enum SumsOver ("sums_over") {
        /// Nothing, or as many numbers in every model.
        #[default]
        Nothing = "nothing",
        /// The width: a query, or a matrix from the stream to a few numbers.
        Width = "width",
        /// The width, and divided by its root.
        RootWidth = "root-width",
        /// The layers of a stack.
        Depth = "depth",
    }
}

impl SumsOver {
    pub fn is_nothing(&self) -> bool {
        *self == SumsOver::Nothing
    }
}

/// What a model declares of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeclaredAs {
    /// A linear layer's weights, its bias, or a table's.
    Weights,
    /// A norm's, or a residual scheme's.
    Own(SumsOver),
}

/// A parameter's role, and what its products are summed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub role: ParameterRole,
    pub sums_over: SumsOver,
}

impl Part {
    /// A linear layer's matrix, or a table: what weight decay is for.
    pub fn is_matrix(self) -> bool {
        matches!(self.role, ParameterRole::HiddenMatrix | ParameterRole::Embedding)
    }
}

/// The part that a parameter's canonical name, its number of dimensions and what the model declares of it give it.
pub fn part(name: &str, dimensions: usize, declared: DeclaredAs) -> Part {
    let parts: Vec<&str> = name.split('.').collect();
    let is_in_layer = parts.windows(2).any(|pair| pair[0] == "layers" && pair[1].parse::<u32>().is_ok());
    let is_table = name.ends_with("embedding.weight") || name.ends_with("output_projection.weight");
    let (is_matrix, sums_over) = match declared {
        DeclaredAs::Weights => (dimensions > 1, SumsOver::Nothing),
        DeclaredAs::Own(sums_over) => (false, sums_over),
    };
    let role = match (is_in_layer, is_matrix) {
        (true, true) => ParameterRole::HiddenMatrix,
        (true, false) => ParameterRole::HiddenVector,
        (false, true) if is_table => ParameterRole::Embedding,
        (false, _) => ParameterRole::End,
    };
    Part { role, sums_over }
}

choice! {
    /// What attention's scores qᵀk are multiplied by: 1/√d_head, or 1/d_head.
    pub enum AttentionScale ("attention_scale") { InverseSqrt = "inverse-sqrt", Inverse = "inverse" }
}

/// A model's size over its base's.
#[derive(Clone, Copy, Debug)]
pub struct Ratios {
    /// m_d, of the widths.
    pub width: f64,
    /// m_L, of a stack's layers.
    pub depth: f64,
    /// α, the exponent of m_L.
    pub alpha: f64,
}

/// What the options' values are multiplied by for a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// Of the standard deviation that the base model's parameter has at first.
    pub init: f64,
    pub lr: f64,
    pub weight_decay: f64,
    /// Of Adam's ε.
    pub eps: f64,
}

impl Multipliers {
    pub const ONE: Multipliers = Multipliers { init: 1.0, lr: 1.0, weight_decay: 1.0, eps: 1.0 };
}

/// An entry of the table.
#[derive(Clone, Copy, Debug)]
pub struct Parametrisation {
    pub name: &'static str,
    pub equation: &'static str,
    pub source: &'static str,
    /// The options that it needs.
    pub base: &'static [&'static str],
    /// α where `depth_alpha` says no other; none: the depth changes nothing.
    pub alpha: Option<f64>,
    pub attention: AttentionScale,
    multipliers: fn(ParameterRole, &Ratios) -> Multipliers,
    /// Of every F(x).
    branch: fn(&Ratios) -> f64,
    /// Of the logits.
    logits: fn(&Ratios) -> f64,
}

/// Every parametrisation that models may name.
pub static PARAMETRISATIONS: &[&Parametrisation] = &[&STANDARD, &MUP, &DEPTH_MUP, &COMPLETEP];

static STANDARD: Parametrisation = Parametrisation {
    name: "standard",
    equation: "all multipliers 1; scores × 1/√d_head",
    source: "",
    base: &[],
    alpha: None,
    attention: AttentionScale::InverseSqrt,
    multipliers: |_, _| Multipliers::ONE,
    branch: |_| 1.0,
    logits: |_| 1.0,
};

static MUP: Parametrisation = Parametrisation {
    name: "mup",
    equation:
        "m_d = d_model/base_width; layers' matrices: std σ_base/√m_d, rate × 1/m_d; every ε × 1/m_d; no decay of \
               vectors; embeddings × α_in, logits × α_out/m_d, scores × 1/d_head",
    source: "Yang & Hu 2021; Yang et al. 2022; EleutherAI/nanoGPT-mup",
    base: &["base_width"],
    multipliers: |role, m| Multipliers {
        init: if role == ParameterRole::HiddenMatrix { m.width.powf(-0.5) } else { 1.0 },
        lr: if role == ParameterRole::HiddenMatrix { 1.0 / m.width } else { 1.0 },
        weight_decay: decay(role, 1.0),
        eps: 1.0 / m.width,
    },
    attention: AttentionScale::Inverse,
    logits: |m| 1.0 / m.width,
    ..STANDARD
};

static DEPTH_MUP: Parametrisation = Parametrisation {
    name: "depth-mup",
    equation: "completep with α = 1/2",
    source: "Yang et al. 2023 (TP-VI); as in Dey et al. 2025",
    alpha: Some(0.5),
    ..COMPLETEP
};

static COMPLETEP: Parametrisation = Parametrisation {
    name: "completep",
    equation:
        "mup, and with m_L = layers/base_depth and α = 1: F × m_L^(−α); in layers rate × m_L^(α−1), ε × m_L^(−α), \
               decay of matrices × m_d",
    source: "Dey et al. 2025, Table 1, eq 40",
    base: &["base_width", "base_depth"],
    alpha: Some(1.0),
    multipliers: |role, m| {
        let narrow = (MUP.multipliers)(role, m);
        match role {
            ParameterRole::Embedding | ParameterRole::End => narrow,
            ParameterRole::HiddenMatrix | ParameterRole::HiddenVector => Multipliers {
                lr: narrow.lr * m.depth.powf(m.alpha - 1.0),
                weight_decay: decay(role, m.width),
                eps: narrow.eps * m.depth.powf(-m.alpha),
                ..narrow
            },
        }
    },
    branch: |m| m.depth.powf(-m.alpha),
    ..MUP
};

/// `matrices` for a layer's matrices, 1 for tables; vectors are not decayed.
fn decay(role: ParameterRole, matrices: f64) -> f64 {
    match role {
        ParameterRole::Embedding => 1.0,
        ParameterRole::HiddenMatrix => matrices,
        ParameterRole::HiddenVector | ParameterRole::End => 0.0,
    }
}

/// The table's entry of that name.
pub fn find(name: &str) -> Result<&'static Parametrisation> {
    let names = PARAMETRISATIONS.iter().map(|p| p.name);
    PARAMETRISATIONS.iter().copied().find(|p| p.name == name).ok_or_else(|| unknown("parametrisation", name, names))
}

impl Parametrisation {
    /// Of a parameter in a model so much larger than its base; `alpha`: another exponent than the parametrisation's.
    pub fn multipliers(&self, part: Part, width: f64, depth: f64, alpha: Option<f64>) -> Multipliers {
        self.of(part, &Ratios { width, depth, alpha: self.exponent(alpha) })
    }

    /// A role's; a rate that is the smaller, the more numbers one step moves together; and a smaller std where random
    /// numbers are summed.
    fn of(&self, part: Part, m: &Ratios) -> Multipliers {
        let of_role = (self.multipliers)(part.role, m);
        let drawn = match part.sums_over {
            SumsOver::Width if !self.is_standard() => m.width.powf(-0.5),
            _ => 1.0,
        };
        let summed = match part.sums_over {
            _ if self.is_standard() => 1.0,
            SumsOver::Nothing => 1.0,
            SumsOver::Width => 1.0 / m.width,
            SumsOver::RootWidth => m.width.powf(-0.5),
            SumsOver::Depth if self.alpha.is_some() => 1.0 / m.depth,
            SumsOver::Depth => 1.0,
        };
        Multipliers { init: of_role.init * drawn, lr: of_role.lr * summed, ..of_role }
    }

    /// α: the one that an option gives, or its own; 0 where the depth changes nothing.
    fn exponent(&self, given: Option<f64>) -> f64 {
        given.or(self.alpha).unwrap_or(0.0)
    }

    /// The entry, as JSON: Python's `param_groups` checks its arguments by it.
    pub fn describe(&self) -> Value {
        let Parametrisation { name, equation, source, base, alpha, .. } = self;
        json!({"name": name, "equation": equation, "source": source, "needs": base, "alpha": alpha})
    }

    /// It multiplies nothing.
    pub fn is_standard(&self) -> bool {
        self.base.is_empty()
    }
}

/// The parametrisation of one model.
#[derive(Clone, Copy, Debug)]
pub struct Scaled {
    pub parametrisation: &'static Parametrisation,
    pub d_model: i64,
    /// The width for which everything is chosen that is not multiplied: the model's own under `standard`.
    pub base_width: i64,
    /// None: m_L is 1.
    pub base_depth: Option<i64>,
    pub depth_alpha: Option<f64>,
    /// α_in, which multiplies embeddings with their positions.
    pub input: f64,
    /// α_out.
    pub output: f64,
    pub attention: AttentionScale,
}

impl Scaled {
    /// Of a model of that width without a parametrisation.
    pub const fn standard(d_model: i64) -> Self {
        Scaled {
            parametrisation: &STANDARD,
            d_model,
            base_width: d_model,
            base_depth: None,
            depth_alpha: None,
            input: 1.0,
            output: 1.0,
            attention: AttentionScale::InverseSqrt,
        }
    }

    /// Of a stack of so many layers; without one, m_L is 1.
    fn ratios(&self, layers: Option<i64>) -> Ratios {
        let depth = layers.zip(self.base_depth).map_or(1.0, |(layers, base)| layers as f64 / base as f64);
        let width = self.d_model as f64 / self.base_width as f64;
        Ratios { width, depth, alpha: self.parametrisation.exponent(self.depth_alpha) }
    }

    /// What every F(x) is multiplied by in a stack of so many layers.
    pub fn branch(&self, layers: i64) -> f64 {
        (self.parametrisation.branch)(&self.ratios(Some(layers)))
    }

    /// What the decoder's output is multiplied by before the output projection.
    pub fn logits(&self) -> f64 {
        self.output * (self.parametrisation.logits)(&self.ratios(None))
    }

    /// What scores qᵀk are multiplied by.
    pub fn scores(&self, d_head: i64) -> f64 {
        match self.attention {
            AttentionScale::InverseSqrt => (d_head as f64).powf(-0.5),
            AttentionScale::Inverse => 1.0 / d_head as f64,
        }
    }

    /// What a matrix of a layer has times the values that its initialisation draws at the model's own width. Those fall
    /// as 1/√d already where it follows the fans, which is σ_base/√m_d; a std that is one number for all widths is
    /// σ_base itself.
    pub fn matrix(&self, has_fixed_std: bool) -> f64 {
        match has_fixed_std {
            true => (self.parametrisation.multipliers)(ParameterRole::HiddenMatrix, &self.ratios(None)).init,
            false => 1.0,
        }
    }

    /// What the std of a norm's or a scheme's drawn parameter is multiplied by.
    pub fn drawn(&self, sums_over: SumsOver) -> f64 {
        let part = Part { role: ParameterRole::HiddenVector, sums_over };
        self.parametrisation.of(part, &self.ratios(None)).init
    }

    /// Of a parameter in a stack of so many layers, or outside stacks.
    pub fn parameter(&self, part: Part, layers: i64) -> Multipliers {
        self.parametrisation.of(part, &self.ratios(Some(layers)))
    }
}
