//! Residual schemes: one table, one file per scheme.
//!
//! A scheme declares changes at four places. Most schemes leave the layer and the inside empty:
//!
//! * the **stack**: the changes before the first layer, how a layer's input is combined from all earlier outputs, the
//!   residual streams beside x, and the changes after the last layer;
//! * the **layer**: the changes of x at a layer's beginning;
//! * **around** a sublayer: x⁺ = after(α⊙skip(x) + β⊙drop(f)) with f = branch(F(before(x))), and s⁺ = α⊙s + β⊙drop(f)
//!   for every stream s beside x. Instead, a sublayer may read x from several tensors and write F(x) to several
//!   ([`Mixing`]);
//! * **inside** a sublayer, at named points.
//!
//! The changes at each place are a list of [`Change`]s. A change may keep a tensor under a name ([`Change::Keep`]),
//! which a later change in the stack reads ([`Change::Mix`]).
//!
//! A stack's layers may have different schemes ([`Schemes`]).
//!
//! A scheme only declares its changes, as plain data. [`crate::model`] builds and runs the declarations, and fuses x⁺
//! with the norm that follows if both have row kernels. Python's modules are built from the same declarations.

mod admin;
mod attnres;
mod b2t;
mod branchnorm;
mod check;
mod declared;
mod deepnorm;
mod denseformer;
mod depth_scaled;
mod dlcl;
mod fixup;
mod given;
mod gpas;
mod growth;
mod hybridnorm;
mod hyper_connections;
mod keel;
mod layerscale;
mod ln_scaling;
mod mhc;
mod mhc_lite;
mod mix_ln;
mod mixing;
mod ngpt;
mod normformer;
mod olmo2;
mod peri_ln;
mod place;
mod postnorm;
mod prenorm;
mod prores;
mod resi_dual;
mod rezero;
mod sandwich;
mod scheme;
mod schemes;
mod subln;
mod value_residual;
mod variance_gate;
mod x0_lambdas;

pub use admin::PROFILING;
pub use declared::{leaves, StreamStep, SublayerSpec};
pub use declared::{
    Change, Combine, ExtraStream, FirstValue, Gain, LayerSpec, Learned, NormAt, Point, ResidualSpec, StackSpec,
};
pub use given::GivenScheme;
pub use growth::{Growth, GrowthCurve};
pub use mixing::{DepthAttention, DepthWeights, Dynamic, Gates, HyperConnection, Mixing};
pub use place::{
    Activation, LayerContext, ModelShape, NormOver, OutputGate, QkNorm, StackName, Sublayer, TensorizedSizes, ValueNorm,
};
pub use scheme::Scheme;
pub use schemes::{SchemeRef, Schemes};

use crate::options::{distinct, AnyOption};

/// Every scheme that a model can use by name.
pub static SCHEMES: &[&Scheme] = &[
    &prenorm::PRENORM,
    &postnorm::POSTNORM,
    &deepnorm::DEEPNORM,
    &branchnorm::BRANCHNORM,
    &rezero::REZERO,
    &fixup::R_FIXUP,
    &fixup::T_FIXUP,
    &admin::ADMIN,
    &admin::ADMIN_CONST,
    &dlcl::DLCL,
    &normformer::NORMFORMER,
    &subln::SUBLN,
    &sandwich::SANDWICH,
    &layerscale::LAYERSCALE,
    &resi_dual::RESI_DUAL,
    &hybridnorm::HYBRIDNORM,
    &hybridnorm::HYBRIDNORM_STAR,
    &peri_ln::PERI_LN,
    &olmo2::OLMO2,
    &ln_scaling::LN_SCALING,
    &mix_ln::MIX_LN,
    &denseformer::DENSEFORMER,
    &attnres::ATTNRES,
    &mhc::MHC,
    &hyper_connections::HYPER_CONNECTIONS,
    &prores::PRORES,
    &b2t::B2T,
    &gpas::GPAS,
    &value_residual::VALUE_RESIDUAL,
    &x0_lambdas::X0_LAMBDAS,
    &depth_scaled::DEPTH_SCALED,
    &variance_gate::VARIANCE_GATE,
    &keel::KEEL,
    &mhc_lite::MHC_LITE,
    &ngpt::NGPT,
];

/// Returns the options of all schemes.
pub fn option_specs() -> Vec<&'static dyn AnyOption> {
    distinct(SCHEMES.iter().flat_map(|scheme| scheme.options).copied())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::options::Options;

    #[test]
    fn sublayers_move_every_stream_of_their_stack() {
        for scheme in SCHEMES {
            for stack in [StackName::Encoder, StackName::Decoder] {
                let options = Options::default();
                let place = LayerContext::new(ModelShape::SMALL, &options, stack, 0);
                let streams = (scheme.stack)(&place).streams.len();
                assert!(place.each().all(|place| (scheme.around)(&place).streams.len() == streams), "{}", scheme.name);
            }
        }
    }

    #[test]
    fn constants_take_a_branchs_factor_and_learned_gains_leave_it() {
        let learned = || Gain::Learned(Learned::new("branch_scale", &[1], 0.0));
        let around = |beta, stream| ResidualSpec {
            beta,
            streams: vec![StreamStep { alpha: Gain::One, beta: stream }],
            ..ResidualSpec::default()
        };
        let scaled = around(Gain::One, Gain::Constant(3.0)).times(0.5);
        assert_eq!(scaled, (around(Gain::Constant(0.5), Gain::Constant(1.5)), 1.0));
        for around in [around(learned(), Gain::One), around(Gain::One, learned()), around(Gain::Growing, Gain::One)] {
            assert_eq!(around.clone().times(0.5), (around, 0.5));
        }
        assert_eq!(around(Gain::One, Gain::One).times(1.0), (around(Gain::One, Gain::One), 1.0));
    }

    /// Returns a constant of one stack in a model whose stacks have `layers` layers each.
    pub fn place_of(layers: i64, stack: StackName, constant: fn(&LayerContext) -> f64) -> f64 {
        let model = ModelShape { encoder_layers: layers, decoder_layers: layers, ..ModelShape::SMALL };
        constant(&LayerContext::new(model, &Options::default(), stack, 0))
    }

    /// Asserts that `value`, rounded to the decimals of `printed`, equals `printed`.
    pub fn near(value: f64, printed: &str) {
        let decimals = printed.split_once('.').map_or(0, |(_, digits)| digits.len());
        assert_eq!(format!("{value:.decimals$}"), printed);
    }
}
