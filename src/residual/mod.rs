//! Residual schemes: one table, one file per scheme.
//!
//! A scheme answers at four places, each a no-op unless it says otherwise:
//!
//! * the **stack**: what a layer's input is, given all earlier outputs, which streams travel beside x, and what follows
//!   the last layer;
//! * the **layer**: parameters that its sublayers share;
//! * **around** a sublayer: x⁺ = N_after(α⊙x + β⊙drop(f)), f = N_amid(F(N_before(x))), and s⁺ = α⊙s + β⊙drop(f) of
//!   every stream s beside x;
//! * **inside** a sublayer, at named points.
//!
//! A stack's layers may have different schemes ([`Schemes`]).
//!
//! A scheme only declares, in plain data: [`crate::model`] builds and runs what was declared (and fuses x⁺ with the next norm
//! where both have row kernels), and Python's modules are built from the same declarations.

mod admin;
mod branchnorm;
mod deepnorm;
mod dlcl;
mod fixup;
mod layerscale;
mod normformer;
mod postnorm;
mod prenorm;
mod resi_dual;
mod rezero;
mod sandwich;
mod schemes;
mod subln;

pub use admin::PROFILING;
pub use branchnorm::Curve;
pub use dlcl::DlclNorm;
pub use fixup::RFixupMode;
pub use normformer::NormFormerMode;
pub use schemes::Schemes;

use crate::choice;
use crate::config::TransformerConfig;
use serde::Serialize;

/// Every scheme that models may name.
pub static SCHEMES: &[&dyn Scheme] = &[
    &prenorm::PreNorm,
    &postnorm::PostNorm,
    &deepnorm::DeepNorm,
    &branchnorm::BranchNorm,
    &rezero::ReZero,
    &fixup::RFixup,
    &fixup::TFixup,
    &admin::Admin,
    &admin::AdminConst,
    &dlcl::Dlcl,
    &normformer::NormFormer,
    &subln::SubLn,
    &sandwich::Sandwich,
    &layerscale::LayerScale,
    &resi_dual::ResiDual,
];

/// Whether a scheme puts a norm anywhere in such a model.
pub fn has_norms(schemes: &Schemes, config: &TransformerConfig) -> bool {
    schemes.all().any(|scheme| puts_norms(scheme, config))
}

fn puts_norms(scheme: &dyn Scheme, config: &TransformerConfig) -> bool {
    let place = Place::new(config, Stack::Decoder, 0);
    let is_norm = |change: &Change| matches!(change, Change::Norm(_));
    let has = |place: Place| {
        let Around { before, amid, after, .. } = scheme.around(&place);
        let inside = scheme.inside(&place);
        before.or(amid).or(after).is_some() || inside.iter().any(|(_, change)| is_norm(change))
    };
    let flow = scheme.stack(&place);
    let has_end_norm = flow.streams.iter().any(|stream| stream.norm.is_some()) || flow.end.iter().any(is_norm);
    place.each().any(has) || flow.combine.is_some() || has_end_norm
}

pub trait Scheme: Sync {
    fn name(&self) -> &'static str;
    fn equation(&self) -> &'static str;
    fn source(&self) -> &'static str;

    /// The initialisation that goes with it.
    fn init(&self) -> &'static str {
        "xavier"
    }

    /// Around a sublayer.
    fn around(&self, place: &Place) -> Around;

    /// Inside a sublayer.
    fn inside(&self, _: &Place) -> Vec<(Point, Change)> {
        Vec::new()
    }

    /// Parameters that the sublayers of a layer share, for [`Gain::Shared`].
    fn layer(&self, _: &Place) -> Vec<Learned> {
        Vec::new()
    }

    /// How layers follow each other, and what follows the last.
    fn stack(&self, place: &Place) -> Flow;

    /// Linear layers have biases.
    fn has_biases(&self) -> bool {
        true
    }

    /// The gains on x are set by profiling the first batch (docs/spec.md §3.4).
    fn is_profiled(&self) -> bool {
        false
    }
}

choice! {
    /// Which stack a layer belongs to.
    pub enum Stack ("stack") { Encoder = "encoder", Decoder = "decoder" }
}

impl Stack {
    /// The sublayers of its layers.
    pub fn sublayers(self, config: &TransformerConfig) -> &'static [Sublayer] {
        use Sublayer::{CrossAttention, FeedForward, SelfAttention};
        match self {
            Stack::Decoder if config.has_encoder() => &[SelfAttention, CrossAttention, FeedForward],
            _ => &[SelfAttention, FeedForward],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sublayer {
    SelfAttention,
    CrossAttention,
    FeedForward,
}

impl Sublayer {
    /// torch.nn's name of an attention; a feed-forward's linears stand in the layer itself.
    pub fn path(self) -> &'static str {
        match self {
            Sublayer::SelfAttention => "self_attn.",
            Sublayer::CrossAttention => "multihead_attn.",
            Sublayer::FeedForward => "",
        }
    }
}

/// Where in the model something is declared.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    pub config: &'a TransformerConfig,
    pub stack: Stack,
    /// 0-based.
    pub layer: i64,
    pub sublayer: Sublayer,
    /// The sublayer's 0-based number within its layer.
    pub index: i64,
    /// Sublayers in a layer of this stack.
    pub sublayers: i64,
}

impl<'a> Place<'a> {
    /// The first sublayer of a layer.
    pub fn new(config: &'a TransformerConfig, stack: Stack, layer: i64) -> Self {
        let sublayers = stack.sublayers(config);
        Place { config, stack, layer, sublayer: sublayers[0], index: 0, sublayers: sublayers.len() as i64 }
    }

    /// Every sublayer of this layer.
    pub fn each(self) -> impl Iterator<Item = Place<'a>> {
        let sublayers = self.stack.sublayers(self.config).iter();
        sublayers.enumerate().map(move |(index, &sublayer)| Place { index: index as i64, sublayer, ..self })
    }

    /// Layers of the encoder, N; 0 in a decoder-only model.
    pub fn encoder_layers(&self) -> i64 {
        if self.config.has_encoder() {
            self.config.encoder_layers
        } else {
            0
        }
    }

    /// Layers of the decoder, M.
    pub fn decoder_layers(&self) -> i64 {
        self.config.decoder_layers
    }

    /// Layers of this stack, L.
    pub fn layers(&self) -> i64 {
        match self.stack {
            Stack::Encoder => self.encoder_layers(),
            Stack::Decoder => self.decoder_layers(),
        }
    }

    /// What a constant of this stack is made of: a scheme's three formulas, one for each kind of stack.
    pub fn constant(
        &self,
        encoder: impl Fn(f64, f64) -> f64,
        decoder: impl Fn(f64, f64) -> f64,
        alone: impl Fn(f64) -> f64,
    ) -> f64 {
        let (n, m) = (self.encoder_layers() as f64, self.decoder_layers() as f64);
        match self.stack {
            Stack::Encoder => encoder(n, m),
            Stack::Decoder if self.config.has_encoder() => decoder(n, m),
            Stack::Decoder => alone(m),
        }
    }

    /// The stack's last sublayer.
    pub fn is_last(&self) -> bool {
        self.layer + 1 == self.layers() && self.index + 1 == self.sublayers
    }

    /// The stack's norm.
    pub fn norm_name(&self) -> &'a str {
        match self.stack {
            Stack::Encoder => self.config.encoder_norm(),
            Stack::Decoder => self.config.decoder_norm(),
        }
    }

    /// `stem` with the sublayer's number: torch.nn's norm1, norm2, …
    pub fn numbered(&self, stem: &str) -> String {
        format!("{stem}{}", self.index + 1)
    }

    /// The sublayer's own norm in a scheme that ends with another.
    pub fn norm(&self) -> NormAt {
        NormAt { name: self.numbered("norm"), width: self.config.d_model, last: false, ends_stack: false }
    }

    /// The sublayer's own norm in a scheme whose last norm is the last sublayer's.
    pub fn closing_norm(&self) -> NormAt {
        NormAt { last: self.is_last(), ..self.norm() }
    }

    /// The norm after the last layer.
    pub fn end_norm(&self) -> NormAt {
        NormAt { name: "norm".into(), width: self.config.d_model, last: true, ends_stack: true }
    }
}

/// The stack's norm under a name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NormAt {
    pub name: String,
    pub width: i64,
    /// No norm of the stack follows it.
    pub last: bool,
    /// It stands after the last layer.
    pub ends_stack: bool,
}

/// A parameter of the scheme, every number of it `value` at the start.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Learned {
    pub name: String,
    pub shape: Vec<i64>,
    pub value: f64,
}

impl Learned {
    pub fn new(name: impl Into<String>, shape: &[i64], value: f64) -> Self {
        Learned { name: name.into(), shape: shape.to_vec(), value }
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
}

impl Around {
    /// The declaration with F(x) times m: folded into β where every β is a constant; else the factor that is left for
    /// F(x).
    pub fn times(mut self, m: f64) -> (Self, f64) {
        let mut gains: Vec<&mut Gain> = self.streams.iter_mut().map(|step| &mut step.beta).collect();
        gains.push(&mut self.beta);
        if m == 1.0 || !gains.iter().all(|gain| matches!(gain, Gain::One | Gain::Constant(_))) {
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
    /// The queries of each head, (…, heads, d_head).
    Query,
    /// The keys of each head, (…, heads, d_head).
    Key,
    /// The heads' outputs, joined, before the output projection.
    AfterHeads,
    /// After the attention's output projection.
    AfterOutput,
    /// After the first linear, before the activation.
    BeforeActivation,
    /// After the activation and its dropout, before the second linear.
    Amid,
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
    /// Each head's columns times its own scalar.
    HeadScale(Learned),
}

/// How the layers of a stack follow each other.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Flow {
    /// A layer's input from all outputs so far; none: the last one.
    pub combine: Option<Combine>,
    /// What travels beside x from sublayer to sublayer.
    pub streams: Vec<ExtraStream>,
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

/// Row l of `weight` weighs y_0 (the embedding) to y_l, the layers' outputs, into the input of layer l + 1; the last row
/// makes the stack's output. `norms[l − 1]` stands on y_l, or on row l's sum.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Combine {
    pub weight: String,
    pub norms: Vec<NormAt>,
    pub on_sums: bool,
}

/// α_t = min(1, curve(t/T)), t a buffer named `t`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Growth {
    pub steps: i64,
    pub curve: Curve,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn sublayers_move_every_stream_of_their_stack() {
        for scheme in SCHEMES {
            for stack in [Stack::Encoder, Stack::Decoder] {
                let config = TransformerConfig::default();
                let place = Place::new(&config, stack, 0);
                let streams = scheme.stack(&place).streams.len();
                assert!(place.each().all(|place| scheme.around(&place).streams.len() == streams), "{}", scheme.name());
            }
        }
    }

    #[test]
    fn constants_take_a_branchs_factor_and_learned_gains_leave_it() {
        let learned = || Gain::Learned(Learned::new("branch_scale", &[1], 0.0));
        let around = |beta, stream| Around {
            beta,
            streams: vec![StreamStep { alpha: Gain::One, beta: stream }],
            ..Around::default()
        };
        let scaled = around(Gain::One, Gain::Constant(3.0)).times(0.5);
        assert_eq!(scaled, (around(Gain::Constant(0.5), Gain::Constant(1.5)), 1.0));
        for around in [around(learned(), Gain::One), around(Gain::One, learned()), around(Gain::Growing, Gain::One)] {
            assert_eq!(around.clone().times(0.5), (around, 0.5));
        }
        assert_eq!(around(Gain::One, Gain::One).times(1.0), (around(Gain::One, Gain::One), 1.0));
    }

    /// A constant of a stack in a model of as many layers on either side.
    pub fn place_of(layers: i64, stack: Stack, constant: fn(&Place) -> f64) -> f64 {
        let config = TransformerConfig { encoder_layers: layers, decoder_layers: layers, ..Default::default() };
        constant(&Place::new(&config, stack, 0))
    }

    /// To the digits that are printed.
    pub fn near(value: f64, printed: &str) {
        let decimals = printed.split_once('.').map_or(0, |(_, digits)| digits.len());
        assert_eq!(format!("{value:.decimals$}"), printed);
    }
}
