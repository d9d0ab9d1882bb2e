//! Gradient norms of each layer, and values of gains, for the log.

use super::optimizer::QkClip;
use crate::error::Result;
use crate::model::Parameters;
use crate::operator::Pending;
use serde::Serialize;
use std::collections::BTreeMap;
use tch::{no_grad, Kind, Tensor};

/// The numbers of one update for each layer and gain, which the option `log_layers` asks for.
#[derive(Clone, Debug, Serialize)]
pub struct Layers {
    /// The Euclidean norm of each layer's gradient before clipping. The squares of these norms add up to the square of
    /// the whole gradient's norm.
    pub gradients: BTreeMap<String, f64>,
    /// The value of each gain of a norm or scheme before the update; if the gain is a vector, its mean.
    pub gains: BTreeMap<String, f64>,
    /// With `qk_clip`, the largest logit of each head, under the name of the attention and the head's number.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub logits: BTreeMap<String, f64>,
}

/// The numbers of [`Layers`] while they travel from the device to the host.
pub struct PendingLayers {
    /// The names of the layers.
    layers: Vec<String>,
    /// The names of the gains.
    gains: Vec<String>,
    /// The names of the attention heads; none without `qk_clip`.
    heads: Vec<String>,
    /// One number for each gain, then one for each layer, then one for each head.
    numbers: Pending,
}

impl PendingLayers {
    /// Queues the computation of the numbers on the device. This must happen after gradients are summed over ranks, and
    /// before the optimizer's step, which clips gradients and resets the largest logits. `clip` has the largest logits;
    /// `None` without `qk_clip`.
    pub fn of(parameters: &Parameters, clip: Option<&QkClip>) -> Result<Self> {
        no_grad(|| {
            let (mut norms_by_layer, mut gains) = (BTreeMap::<&str, Vec<Tensor>>::new(), Vec::new());
            // `read` relies on this order: means of gains, norms of layers, largest logits.
            let mut numbers = Vec::new();
            for (name, t) in parameters.iter() {
                let norm = t.f_grad()?.f_norm_scalaropt_dtype(2.0, Kind::Double)?;
                norms_by_layer.entry(layer_of(name)).or_default().push(norm);
                if is_gain(name, t.dim()) {
                    gains.push(name.to_string());
                    numbers.push(t.f_mean(Kind::Double)?);
                }
            }
            for norms in norms_by_layer.values() {
                numbers.push(Tensor::f_stack(norms, 0)?.f_norm()?);
            }
            let layers = norms_by_layer.into_keys().map(str::to_string).collect();
            let mut parts = vec![Tensor::f_stack(&numbers, 0)?];
            // The numbers are sent as one tensor, in which the largest logits come last.
            parts.extend(clip.map(QkClip::largest).transpose()?);
            let heads = clip.map_or_else(Vec::new, QkClip::heads);
            Ok(PendingLayers { layers, gains, heads, numbers: Pending::of(&Tensor::f_cat(&parts, 0)?)? })
        })
    }

    /// Waits for the numbers, and returns them by name.
    pub fn read(self) -> Result<Layers> {
        let numbers = self.numbers.read()?;
        let (gains, rest) = numbers.split_at(self.gains.len());
        let (gradients, logits) = rest.split_at(self.layers.len());
        let named = |names: Vec<String>, values: &[f64]| names.into_iter().zip(values.iter().copied()).collect();
        let (gradients, gains) = (named(self.layers, gradients), named(self.gains, gains));
        Ok(Layers { gradients, gains, logits: named(self.heads, logits) })
    }
}

/// Returns the part of a parameter's name that names its layer: all up to the first number. For a parameter outside of
/// layers, such as an embedding or a weight of dlcl's sums, returns the name's first part.
fn layer_of(name: &str) -> &str {
    // The length of the parts so far.
    let mut end = 0;
    // In names with the part `combine`, the number counts weighted sums of layers' outputs, not layers.
    let is_sum = name.split('.').any(|part| part == "combine");
    for part in name.split('.') {
        end += part.len();
        if !is_sum && part.bytes().all(|b| b.is_ascii_digit()) {
            return &name[..end];
        }
        end += 1; // the dot
    }
    name.split('.').next().unwrap_or(name)
}

/// True if the parameter belongs to a norm or residual scheme and is not a bias, as in Python's `nn.learned_gains`.
/// `dimensions` is its number of dimensions.
fn is_gain(name: &str, dimensions: usize) -> bool {
    let mut parts = name.rsplit('.');
    let (leaf, module) = (parts.next().unwrap_or(name), parts.next());
    // The weights of dlcl's sums, in modules called `combine`, are gains even if they are matrices.
    (dimensions <= 1 || module == Some("combine")) && !leaf.ends_with("bias")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_gains_by_their_names() {
        for (name, layer) in [
            ("encoder.layers.10.self_attn.q.weight", "encoder.layers.10"),
            ("embedding.weight", "embedding"),
            ("decoder.norm.weight", "decoder"),
            ("encoder.combine.1.weight", "encoder"),
        ] {
            assert_eq!(layer_of(name), layer);
        }
        assert!(is_gain("encoder.layers.0.norm1.weight", 1) && is_gain("encoder.combine.weight0", 2));
        assert!(!is_gain("encoder.layers.0.norm1.bias", 1) && !is_gain("embedding.weight", 2));
        assert!(!is_gain("encoder.layers.0.linear1.weight", 2));
    }
}
