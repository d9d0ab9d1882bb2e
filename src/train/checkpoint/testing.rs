//! Helpers for the tests of this folder.

use serde_json::json;

use super::{Array, Checkpoint, Dtype};

/// Returns an f32 array of this shape.
pub fn f32s(shape: &[usize], values: impl IntoIterator<Item = f32>) -> Array {
    Array { dtype: Dtype::F32, shape: shape.into(), data: values.into_iter().flat_map(f32::to_le_bytes).collect() }
}

/// Builds a small checkpoint in which every part depends on `update`.
pub fn checkpoint(update: u64) -> Checkpoint {
    let x = update as f32;
    Checkpoint {
        model: [
            ("encoder.weight".into(), f32s(&[3, 50], (0..150).map(|i| x + i as f32))),
            ("iters".into(), Array { dtype: Dtype::I64, shape: vec![1], data: update.to_le_bytes().into() }),
        ]
        .into(),
        optimizer: [("encoder.weight.m".into(), f32s(&[3, 50], (0..150).map(|i| x - i as f32)))].into(),
        state: json!({"update": update, "seed": 1, "best_bleu": 41.5 + f64::from(x) / 3.0}),
        config: json!({"model": {"d_model": 50, "norm": {"name": "scalenorm"}}, "training": {"updates": update}}),
    }
}
