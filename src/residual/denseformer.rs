//! DenseFormer: a layer's input is a learned sum of all earlier outputs, the last one at the start (Pagliardini et al.
//! 2024).

use super::{prenorm::PreNorm, Combine, LayerContext, Learned, ResidualSpec, Scheme, StackSpec};
use crate::parametrisation::SumsOver;

pub struct DenseFormer;

impl Scheme for DenseFormer {
    fn name(&self) -> &'static str {
        "denseformer"
    }

    fn equation(&self) -> &'static str {
        "prenorm; input of layer l+1, and N after the stack: Σ_k W_lk y_k, k ≤ l, W = I at the start"
    }

    fn source(&self) -> &'static str {
        "Pagliardini et al. 2024"
    }

    fn around(&self, place: &LayerContext) -> ResidualSpec {
        PreNorm.around(place)
    }

    fn stack(&self, place: &LayerContext) -> StackSpec {
        let identity = |row: i64, column: i64| f64::from(u8::from(row == column));
        let weight = Learned::matrix("combine.weight", [place.layers() + 1; 2], identity).summed_over(SumsOver::Depth);
        let combine = Combine { weight, norms: Vec::new(), on_sums: false, skips_first: true };
        StackSpec { combine: Some(combine), ..PreNorm.stack(place) }
    }
}
