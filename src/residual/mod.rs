//! Residual schemes: one table, one file per scheme.
//!
//! A scheme answers at four places, each a no-op unless it says otherwise:
//!
//! * the **stack**: what a layer's input is, given all earlier outputs, and the norm after the last layer;
//! * the **layer**: parameters that its sublayers share;
//! * **around** a sublayer: x⁺ = N_after(α⊙x + β⊙drop(N_amid(F(N_before(x)))));
//! * **inside** a sublayer, at named points.
//!
//! It only declares; [`crate::model`] runs what was declared, and fuses x⁺ with the next norm where both have row kernels.

pub mod postnorm;
pub mod prenorm;
pub mod step;

use crate::error::{unknown, Result};
use crate::model::Builder;
use crate::norm::{self, Norm};
use tch::Tensor;

/// Every scheme that models may name.
pub static SCHEMES: &[&dyn Scheme] = &[&prenorm::PreNorm, &postnorm::PostNorm];

/// The scheme of that name.
pub fn find(name: &str) -> Result<&'static dyn Scheme> {
    SCHEMES
        .iter()
        .copied()
        .find(|s| s.name() == name)
        .ok_or_else(|| unknown("residual", name, SCHEMES.iter().map(|s| s.name())))
}

pub trait Scheme: Sync {
    fn name(&self) -> &'static str;
    fn equation(&self) -> &'static str;
    fn source(&self) -> &'static str;

    /// Around a sublayer. `shared` is what [`layer`](Self::layer) made for its layer.
    fn around(&self, b: &mut Builder, place: &Place, shared: &[Tensor]) -> Result<Around>;

    /// Inside a sublayer.
    fn inside(&self, _: &mut Builder, _: &Place) -> Result<Inside> {
        Ok(Inside::default())
    }

    /// Parameters that the sublayers of a layer share.
    fn layer(&self, _: &mut Builder, _: &Place) -> Result<Vec<Tensor>> {
        Ok(Vec::new())
    }

    /// How layers follow each other, and the norm after the last.
    fn stack(&self, b: &mut Builder, place: &Place) -> Result<Flow>;
}

/// Which stack a layer belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    Encoder,
    Decoder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sublayer {
    SelfAttention,
    CrossAttention,
    FeedForward,
}

/// Where in the model something is declared.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    pub stack: Stack,
    /// Layers of the encoder, N; 0 for a decoder-only model.
    pub encoder_layers: i64,
    /// Layers of the decoder, M.
    pub decoder_layers: i64,
    /// 0-based.
    pub layer: i64,
    pub sublayer: Sublayer,
    /// The sublayer's 0-based number within its layer: its norm is norm1, norm2, …
    pub index: i64,
    /// Sublayers in a layer of this stack.
    pub sublayers: i64,
    pub d_model: i64,
    pub d_ff: i64,
    /// The stack's norm.
    pub norm: &'a norm::Spec,
    pub norm_eps: Option<f64>,
}

impl Place<'_> {
    pub fn layers(&self) -> i64 {
        match self.stack {
            Stack::Encoder => self.encoder_layers,
            Stack::Decoder => self.decoder_layers,
        }
    }

    /// The stack's last sublayer.
    pub fn is_last(&self) -> bool {
        self.layer + 1 == self.layers() && self.index + 1 == self.sublayers
    }

    /// The stack's norm, over d_model, under a name; `last` where no norm of the stack follows it.
    pub fn norm(&self, b: &mut Builder, name: &str, last: bool) -> Result<Box<dyn Norm>> {
        let site = norm::Site {
            width: self.d_model,
            eps: self.norm_eps,
            last_of_decoder: last && self.stack == Stack::Decoder,
        };
        b.within(name, |b| (self.norm.build)(b, &site))
    }

    /// torch.nn's name of the sublayer's norm.
    pub fn norm_name(&self) -> String {
        format!("norm{}", self.index + 1)
    }
}

/// What stands around one sublayer. Gains are scalars or one number per column; none is 1.
#[derive(Default)]
pub struct Around {
    pub before: Option<Box<dyn Norm>>,
    pub alpha: Option<Tensor>,
    pub beta: Option<Tensor>,
    pub amid: Option<Box<dyn Norm>>,
    pub after: Option<Box<dyn Norm>>,
}

/// Named points inside a sublayer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// The heads' outputs, joined, before the output projection.
    AfterHeads,
    /// After the attention's output projection.
    AfterOutput,
    /// Before q, k and v (self-attention), before q (cross-attention), or before the first linear (feed-forward).
    Input,
    /// After the first linear, before the activation.
    BeforeActivation,
    /// After the activation and its dropout, before the second linear.
    Amid,
}

/// What happens at a point.
pub enum Change {
    Norm(Box<dyn Norm>),
    /// x + b
    Shift(Tensor),
    /// x ⊙ s
    Scale(Tensor),
    /// Each head's columns times its own scalar.
    HeadScale(Tensor),
}

/// What a scheme puts inside a sublayer.
#[derive(Default)]
pub struct Inside(pub Vec<(Point, Change)>);

impl Inside {
    /// x after whatever stands at this point.
    pub fn at(&self, point: Point, x: Tensor, rows: &norm::Rows) -> Result<Tensor> {
        self.0.iter().filter(|(p, _)| *p == point).try_fold(x, |x, (_, change)| {
            Ok(match change {
                Change::Norm(n) => n.forward(&x, rows)?,
                Change::Shift(b) => x.f_add(&b.f_to_kind(x.kind())?)?,
                Change::Scale(s) => x.f_mul(&s.f_to_kind(x.kind())?)?,
                Change::HeadScale(s) => {
                    let heads = x.f_unflatten(-1, [s.numel() as i64, -1].as_slice())?;
                    heads.f_mul(&s.f_to_kind(x.kind())?.f_unsqueeze(-1)?)?.f_flatten(-2, -1)?
                }
            })
        })
    }
}

/// How the layers of a stack follow each other.
#[derive(Default)]
pub struct Flow {
    /// A layer's input from all outputs so far (the embedding first); none: the last one. Also asked once after the
    /// last layer, for the stack's output.
    pub combine: Option<Box<dyn Combine>>,
    /// The norm after the last layer.
    pub end: Option<Box<dyn Norm>>,
}

pub trait Combine: Send {
    fn input(&self, outputs: &[Tensor], rows: &norm::Rows) -> Result<Tensor>;
}
