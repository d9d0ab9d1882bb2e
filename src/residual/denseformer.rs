//! DenseFormer: a layer's input is a learned sum of all earlier outputs. Initially it is the last output (Pagliardini
//! et al. 2024).

use super::{prenorm::PRENORM, Combine, LayerContext, Learned, Scheme, StackSpec};
use crate::parametrisation::SumsOver;

pub static DENSEFORMER: Scheme = Scheme {
    name: "denseformer",
    equation: "prenorm; input of layer l+1, and N after the stack: Σ_k W_lk y_k, k ≤ l, W = I at the start",
    source: "Pagliardini et al. 2024",
    around: PRENORM.around,
    stack,
    ..Scheme::PLAIN
};

/// Declares that each layer reads a weighted sum of all earlier outputs, the embedding included. The weights begin as
/// the identity matrix, so that a layer first reads the last output alone.
fn stack(place: &LayerContext) -> StackSpec {
    let identity = |row: i64, column: i64| if row == column { 1.0 } else { 0.0 };
    let weight = Learned::matrix("combine.weight", [place.layers() + 1; 2], identity).summed_over(SumsOver::Depth);
    let combine = Combine { weight, norms: Vec::new(), on_sums: false, skips_first: true };
    StackSpec { combine: Some(combine), ..(PRENORM.stack)(place) }
}
