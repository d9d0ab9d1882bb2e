//! Mix-LN: PostNorm in a stack's first layers, PreNorm in the others (Li et al. 2024).

use super::{postnorm::POSTNORM, prenorm::PRENORM, LayerContext, ResidualSpec, Scheme};
use crate::options::{below_one, option_spec};

option_spec! {
    /// Share of mix-ln's layers that are postnorm's; their number is rounded down.
    pub PART ("mix_ln_part"): f64 = 0.25, below_one;
}

pub static MIX_LN: Scheme = Scheme {
    name: "mix-ln",
    equation: "postnorm in the first ⌊L/4⌋ of a stack's L layers, prenorm in the others, N after the stack",
    source: "Li et al. 2024",
    options: &[&PART],
    init: PRENORM.init,
    around,
    stack: PRENORM.stack,
    ..Scheme::PLAIN
};

/// Declares PostNorm in the stack's first layers, and PreNorm in the others.
fn around(place: &LayerContext) -> ResidualSpec {
    // In f64, 0.29·100 is a little less than 29, so a small number is added before rounding down.
    let first = (place.options.get(&PART) * place.layers() as f64 + 1e-9).floor() as i64;
    match place.layer < first {
        true => (POSTNORM.around)(place),
        false => (PRENORM.around)(place),
    }
}
