//! DLCL: a layer's input is a learned sum of all earlier outputs (Wang et al. 2019).

use super::{postnorm, prenorm, Change, Combine, LayerContext, Learned, NormAt, ResidualSpec, Scheme, StackSpec};
use crate::choice;
use crate::options::option_spec;
use crate::parametrisation::SumsOver;

choice! {
    /// The scheme of dlcl's layers: PreNorm or PostNorm.
    pub enum DlclNorm ("dlcl_norm") { Pre = "pre", Post = "post" }
}

option_spec! {
    /// Scheme of dlcl's layers: prenorm (pre) or postnorm (post).
    NORM ("dlcl_norm"): DlclNorm = DlclNorm::Pre;
}

pub static DLCL: Scheme = Scheme {
    name: "dlcl",
    equation: "input of layer l+1: Σ_k W_{l+1,k} N_k(y_k) (pre), N_l(Σ_k W_{l+1,k} y_k) (post), k ≤ l",
    source: "Wang et al. 2019",
    options: &[&NORM],
    around,
    stack,
    own_depth: Some("a layer's input is an average of outputs"),
    ..Scheme::PLAIN
};

/// Declares the residual connection of PreNorm or PostNorm, as the option `dlcl_norm` says.
fn around(place: &LayerContext) -> ResidualSpec {
    let mut around = (layers(place).around)(place);
    // PostNorm marks its last norm as the stack's last one. Here the norm of the last sum follows it.
    for change in &mut around.after {
        if let Change::Norm(norm) = change {
            norm.last = false;
        }
    }
    around
}

/// Declares that each layer reads a weighted sum of all earlier outputs, which begins as their mean.
///
/// Output 0 is the embedding, and output l is that of layer l, from 1 to the number L of layers. Row l of the weights
/// sums up the outputs 0 to l: rows 0 to L − 1 give the inputs of layers 1 to L, and row L gives the stack's output. In
/// the form `pre` each output but the embedding has a norm, in the form `post` each sum but that of row 0, which is the
/// embedding times one weight. So there are norms 1 to L.
fn stack(place: &LayerContext) -> StackSpec {
    let on_sums = place.options.get(&NORM) == DlclNorm::Post;
    // With norms on sums, the norm of the last sum is the stack's last norm.
    let norm = |layer: i64| NormAt {
        name: format!("combine.norms.{layer}"),
        last: on_sums && layer == place.layers(),
        ..place.norm()
    };
    let norms = (1..=place.layers()).map(norm).collect();
    // L + 1 outputs and as many rows. Row l begins with equal weights for the outputs 0 to l.
    let size = place.layers() + 1;
    let mean = |row: i64, column: i64| if column <= row { 1.0 / (row + 1) as f64 } else { 0.0 };
    let weight = Learned::matrix("combine.weight", [size; 2], mean).summed_over(SumsOver::Depth);
    let skips_first = false; // layer 1 reads row 0's sum, the weighted embedding, and not the embedding itself
    let combine = Combine { weight, norms, on_sums, skips_first };
    StackSpec { combine: Some(combine), ..(layers(place).stack)(place) }
}

/// Returns the scheme of the sublayers, PreNorm or PostNorm, from the option `dlcl_norm`.
fn layers(place: &LayerContext) -> &'static Scheme {
    match place.options.get(&NORM) {
        DlclNorm::Pre => &prenorm::PRENORM,
        DlclNorm::Post => &postnorm::POSTNORM,
    }
}
