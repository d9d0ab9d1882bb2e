//! Mix-LN: PostNorm in a stack's first layers, PreNorm in the others (Li et al. 2024).

use super::{postnorm::PostNorm, prenorm::PreNorm, LayerContext, ResidualSpec, Scheme, StackSpec};
use crate::options::{below_one, option_spec, AnyOption};

option_spec! {
    /// The part of mix-ln's layers that are postnorm's, rounded down.
    pub PART ("mix_ln_part"): f64 = 0.25, below_one;
}

pub struct MixLn;

impl Scheme for MixLn {
    fn name(&self) -> &'static str {
        "mix-ln"
    }

    fn equation(&self) -> &'static str {
        "postnorm in the first ⌊L/4⌋ of a stack's L layers, prenorm in the others, N after the stack"
    }

    fn source(&self) -> &'static str {
        "Li et al. 2024"
    }

    fn options(&self) -> &'static [&'static dyn AnyOption] {
        &[&PART]
    }

    fn init(&self) -> &'static str {
        PreNorm.init()
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        // 0.29·100 is a little less than 29 in f64.
        let first = (place.options.get(&PART) * place.layers() as f64 + 1e-9).floor() as i64;
        match place.layer < first {
            true => PostNorm.around(place),
            false => PreNorm.around(place),
        }
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        PreNorm.stack(place)
    }
}
