//! Parametrisations: how initial values, forward passes, learning rates, weight decay and Adam's ε depend on a
//! model's width and depth, and on the role of a parameter (docs/spec.md §3.7).
//!
//! A parametrisation sets multipliers relative to a base model, so that options tuned on a small base model also suit
//! wide and deep models. This file only computes numbers. A configuration computes a model's multipliers ([`Scaled`]);
//! the initialisation, the model and the optimizer apply them. Python reads them through the extension module `_core`.

mod unit_scaled;

pub use unit_scaled::{UnitScaled, STD};

use crate::choice;
use crate::error::{unknown, Result};
use serde_json::{json, Value};

choice! {
    /// A parameter's role in the parametrisation.
    pub enum ParameterRole ("role") {
        /// A table of word embeddings, or the output projection's matrix.
        Embedding = "embedding",
        /// A matrix of a layer.
        HiddenMatrix = "hidden-matrix",
        /// A bias in a layer, or a parameter of a layer's norm or residual scheme.
        HiddenVector = "hidden-vector",
        /// A parameter outside the layers other than a table: in a norm before or after the stack, the output's bias,
        /// or dlcl's weights.
        End = "end",
    }
}

choice! {
    /// The dimension over which products with a norm's or a scheme's parameter are summed.
    #[derive(Default)]
    pub enum SumsOver ("sums_over") {
        /// No sum, or one whose length is the same in every model.
        #[default]
        Nothing = "nothing",
        /// The width, for a query or for a matrix from the residual stream to a few numbers.
        Width = "width",
        /// The width, with the sum divided by its square root.
        RootWidth = "root-width",
        /// The number of layers in a stack.
        Depth = "depth",
    }
}

impl SumsOver {
    /// True if products with the parameter are not summed over a dimension that grows with the model.
    pub fn is_nothing(&self) -> bool {
        *self == SumsOver::Nothing
    }
}

/// The kind of a parameter, as its module declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeclaredAs {
    /// The weight or bias of a linear layer, or a table of embeddings.
    Weights,
    /// A parameter of a norm or of a residual scheme.
    Own(SumsOver),
}

/// The role of a parameter, and the dimension over which products with it are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub role: ParameterRole,
    pub sums_over: SumsOver,
}

impl Part {
    /// True for the matrix of a linear layer and for a table; weight decay applies to these.
    pub fn is_matrix(self) -> bool {
        matches!(self.role, ParameterRole::HiddenMatrix | ParameterRole::Embedding)
    }
}

/// Returns the role and the summed dimension of a parameter with this canonical name, such as
/// `encoder.layers.0.linear1.weight`, this number of dimensions, and this kind.
pub fn part(name: &str, dimensions: usize, declared: DeclaredAs) -> Part {
    let words: Vec<&str> = name.split('.').collect();
    // A layer's parameter has `layers.NUMBER` in its name.
    let is_in_layer = words.windows(2).any(|pair| matches!(pair, ["layers", number] if number.parse::<u32>().is_ok()));
    let is_table = name.ends_with("embedding.weight") || name.ends_with("output_projection.weight");
    let (is_matrix, sums_over) = match declared {
        DeclaredAs::Weights => (dimensions > 1, SumsOver::Nothing),
        DeclaredAs::Own(sums_over) => (false, sums_over),
    };
    let role = match (is_in_layer, is_matrix) {
        (_, true) if is_table => ParameterRole::Embedding,
        (true, true) => ParameterRole::HiddenMatrix,
        (true, false) => ParameterRole::HiddenVector,
        (false, _) => ParameterRole::End,
    };
    Part { role, sums_over }
}

choice! {
    /// The size of an optimizer's step ΔW that is the same at all widths. For a matrix whose two sizes grow with the
    /// width, the change ΔW·x of a layer's output has the same size at all widths if the spectral norm of ΔW has.
    #[derive(Default)]
    pub enum StepSize ("step_size") {
        /// The size of the entries, as with Adam and Lion. The spectral norm then grows with the width.
        #[default]
        Entries = "entries",
        /// The spectral norm, as with Muon's scale `spectral`.
        SpectralNorm = "spectral-norm",
        /// The root mean square of the entries of an orthogonal matrix, as with Muon's scale `rms`. The spectral norm
        /// then grows with the square root of the width.
        Orthogonal = "orthogonal",
    }
}

impl StepSize {
    /// Returns the factor of a matrix's learning rate in a model that is `width` times as wide as its base model.
    fn rate(self, width: f64) -> f64 {
        match self {
            StepSize::Entries => 1.0 / width,
            StepSize::SpectralNorm => 1.0,
            StepSize::Orthogonal => width.powf(-0.5),
        }
    }
}

choice! {
    /// The factor of attention's scores qᵀk: 1/√d_head, or 1/d_head.
    pub enum AttentionScale ("attention_scale") { InverseSqrt = "inverse-sqrt", Inverse = "inverse" }
}

/// The ratios of a model's sizes to those of its base model.
#[derive(Clone, Copy, Debug)]
pub struct Ratios {
    /// m_d: the model's width divided by the base model's.
    pub width: f64,
    /// m_L: the number of layers in a stack divided by the base model's.
    pub depth: f64,
    /// α, the exponent of m_L.
    pub alpha: f64,
    /// The factor of the learning rate of a layer's matrix, which depends on the width and the optimizer.
    pub rate: f64,
}

/// The factors by which the values of options are multiplied for one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// The initial standard deviation is this factor times that of the base model's parameter.
    pub init: f64,
    pub lr: f64,
    pub weight_decay: f64,
    /// The factor by which Adam's ε is multiplied.
    pub eps: f64,
}

impl Multipliers {
    pub const ONE: Multipliers = Multipliers { init: 1.0, lr: 1.0, weight_decay: 1.0, eps: 1.0 };
}

/// An entry of the table of parametrisations.
#[derive(Clone, Copy, Debug)]
pub struct Parametrisation {
    pub name: &'static str,
    pub equation: &'static str,
    pub source: &'static str,
    /// The names of the options that this parametrisation requires.
    pub base: &'static [&'static str],
    /// α, unless `depth_alpha` is given; `None` if the depth has no effect.
    pub alpha: Option<f64>,
    pub attention: AttentionScale,
    multipliers: fn(ParameterRole, &Ratios) -> Multipliers,
    /// Returns the factor of every F(x).
    branch: fn(&Ratios) -> f64,
    /// Returns the factor of the logits.
    logits: fn(&Ratios) -> f64,
    /// True for u-μP, whose parameters' multipliers come from [`UnitScaled`] instead of this entry.
    pub is_unit_scaled: bool,
}

/// Every parametrisation that a model can use by name.
pub static PARAMETRISATIONS: &[&Parametrisation] = &[&STANDARD, &MUP, &DEPTH_MUP, &COMPLETEP, &U_MUP];

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
    is_unit_scaled: false,
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
        lr: if role == ParameterRole::HiddenMatrix { m.rate } else { 1.0 },
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
        let of_mup = (MUP.multipliers)(role, m);
        match role {
            ParameterRole::Embedding | ParameterRole::End => of_mup,
            ParameterRole::HiddenMatrix | ParameterRole::HiddenVector => Multipliers {
                lr: of_mup.lr * m.depth.powf(m.alpha - 1.0),
                // The optimizer multiplies decay by the learning rate. Dividing by the rate's factor for the width
                // makes the product independent of the width.
                weight_decay: decay(role, 1.0 / m.rate),
                eps: of_mup.eps * m.depth.powf(-m.alpha),
                ..of_mup
            },
        }
    },
    branch: |m| m.depth.powf(-m.alpha),
    ..MUP
};

/// u-μP has no base model: m_d is the model's own width.
static U_MUP: Parametrisation = Parametrisation {
    name: "u-mup",
    equation:
        "std 1; products × fan_in^(−1/2), logits × α/d, scores × α/d_head; x⁺ = (x + τF)/√(1+τ²); in L layers rate × \
               L^(−1/2), of matrices × (L·fan_in)^(−1/2), of embeddings × d^(−1/2); decay free of the rate",
    source: "Blake et al. 2024; graphcore-research/unit-scaling",
    base: &["attention_length"],
    attention: AttentionScale::Inverse,
    logits: |m| 1.0 / m.width,
    is_unit_scaled: true,
    ..STANDARD
};

/// Returns the factor of weight decay for a parameter of this role: `of_matrices` for the matrices of layers, 1 for
/// tables, and 0 for vectors.
fn decay(role: ParameterRole, of_matrices: f64) -> f64 {
    match role {
        ParameterRole::Embedding => 1.0,
        ParameterRole::HiddenMatrix => of_matrices,
        ParameterRole::HiddenVector | ParameterRole::End => 0.0,
    }
}

/// Returns the entry of the table with this name.
pub fn find(name: &str) -> Result<&'static Parametrisation> {
    let names = PARAMETRISATIONS.iter().map(|p| p.name);
    PARAMETRISATIONS.iter().copied().find(|p| p.name == name).ok_or_else(|| unknown("parametrisation", name, names))
}

impl Parametrisation {
    /// Returns the multipliers of a parameter in a model that is `width` times as wide and `depth` times as deep as
    /// its base model, for an optimizer with steps of this size. `alpha` overrides the parametrisation's exponent.
    pub fn multipliers(
        &self,
        part: Part,
        width: f64,
        depth: f64,
        alpha: Option<f64>,
        step_size: StepSize,
    ) -> Multipliers {
        self.of(part, &Ratios { width, depth, alpha: self.exponent(alpha), rate: step_size.rate(width) })
    }

    /// Returns the multipliers of a parameter, from its role and the model's ratios `m`. If products with the parameter
    /// are summed over a dimension, the parameter's learning rate falls with the number of terms. If the dimension is
    /// the width, its initial std falls, too.
    fn of(&self, part: Part, m: &Ratios) -> Multipliers {
        let of_role = (self.multipliers)(part.role, m);
        let init_factor = match part.sums_over {
            SumsOver::Width if !self.is_standard() => m.width.powf(-0.5),
            _ => 1.0,
        };
        let lr_factor = match part.sums_over {
            _ if self.is_standard() => 1.0,
            SumsOver::Nothing => 1.0,
            SumsOver::Width => 1.0 / m.width,
            SumsOver::RootWidth => m.width.powf(-0.5),
            SumsOver::Depth if self.alpha.is_some() => 1.0 / m.depth,
            SumsOver::Depth => 1.0,
        };
        Multipliers { init: of_role.init * init_factor, lr: of_role.lr * lr_factor, ..of_role }
    }

    /// Returns α: `given`, else the parametrisation's own, else 0, with which the depth has no effect.
    fn exponent(&self, given: Option<f64>) -> f64 {
        given.or(self.alpha).unwrap_or(0.0)
    }

    /// Returns the entry as JSON. Python's `param_groups` uses it to check its arguments.
    pub fn describe(&self) -> Value {
        let Parametrisation { name, equation, source, base, alpha, .. } = self;
        json!({"name": name, "equation": equation, "source": source, "needs": base, "alpha": alpha})
    }

    /// True if all multipliers are 1.
    pub fn is_standard(&self) -> bool {
        self.base.is_empty()
    }
}

/// The parametrisation of one model.
#[derive(Clone, Copy, Debug)]
pub struct Scaled {
    pub parametrisation: &'static Parametrisation,
    pub d_model: i64,
    /// The width of the base model; under `standard` the model's own width.
    pub base_width: i64,
    /// The number of layers in the base model's stacks; `None` means m_L = 1.
    pub base_depth: Option<i64>,
    pub depth_alpha: Option<f64>,
    /// α_in: the factor of the sum of embeddings and positions.
    pub input: f64,
    /// α_out, the factor of the logits.
    pub output: f64,
    pub attention: AttentionScale,
    /// A factor of every F(x), in addition to the parametrisation's.
    pub residual: f64,
    /// The factor of the scores qᵀk, which replaces that of `attention`; `None` keeps it.
    pub given_scores: Option<f64>,
    /// The factors of u-μP; `None` under any other parametrisation.
    pub unit: Option<UnitScaled>,
}

impl Scaled {
    /// Returns the `standard` parametrisation for a model of this width.
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
            residual: 1.0,
            given_scores: None,
            unit: None,
        }
    }

    /// Returns the ratios for a stack with `layers` layers and an optimizer with steps of this size. If `layers` is
    /// `None`, m_L is 1.
    fn ratios(&self, layers: Option<i64>, step_size: StepSize) -> Ratios {
        let depth = layers.zip(self.base_depth).map_or(1.0, |(layers, base)| layers as f64 / base as f64);
        let width = self.d_model as f64 / self.base_width as f64;
        Ratios { width, depth, alpha: self.parametrisation.exponent(self.depth_alpha), rate: step_size.rate(width) }
    }

    /// Returns the ratios for the forward pass and the initial values, which do not depend on the optimizer.
    fn forward(&self, layers: Option<i64>) -> Ratios {
        self.ratios(layers, StepSize::default())
    }

    /// Returns the factor of every sublayer's output F(x) in a stack with `layers` layers.
    pub fn branch(&self, layers: i64) -> f64 {
        self.residual * (self.parametrisation.branch)(&self.forward(Some(layers)))
    }

    /// Returns the factor of the decoder's output before the output projection.
    pub fn logits(&self) -> f64 {
        self.output * (self.parametrisation.logits)(&self.forward(None))
    }

    /// Returns the factor of attention's scores qᵀk, for heads of width `d_head`.
    pub fn scores(&self, d_head: i64) -> f64 {
        self.given_scores.unwrap_or(match self.attention {
            AttentionScale::InverseSqrt => (d_head as f64).powf(-0.5),
            AttentionScale::Inverse => 1.0 / d_head as f64,
        })
    }

    /// Returns the factor that turns a layer matrix's std under the initialisation into σ_base/√m_d, which is the base
    /// model's std over the root of the width ratio. A std that depends on fan_in and fan_out already falls with the
    /// width, so its factor is 1. A std that is the same at all widths (`has_fixed_std`) needs the whole multiplier.
    pub fn matrix(&self, has_fixed_std: bool) -> f64 {
        match has_fixed_std {
            true => (self.parametrisation.multipliers)(ParameterRole::HiddenMatrix, &self.forward(None)).init,
            false => 1.0,
        }
    }

    /// Returns the factor of the initial std of a random parameter of a norm or a scheme.
    pub fn drawn(&self, sums_over: SumsOver) -> f64 {
        let part = Part { role: ParameterRole::HiddenVector, sums_over };
        self.parametrisation.of(part, &self.forward(None)).init
    }

    /// Returns the multipliers of a parameter in a stack with `layers` layers, or of a parameter outside the stacks,
    /// for an optimizer with steps of this size.
    pub fn parameter(&self, part: Part, layers: i64, step_size: StepSize) -> Multipliers {
        self.parametrisation.of(part, &self.ratios(Some(layers), step_size))
    }
}
