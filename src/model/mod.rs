//! The Transformer of docs/spec.md §4 on packed rows, built from the tables of norms, residual schemes and
//! initialisations.

mod attention;
mod attention_heads;
mod column_gate;
mod context;
mod depth_attention;
mod embedding;
mod feed_forward;
mod gather;
mod host_batch;
mod joint_read;
mod layer;
mod linear;
mod mixing;
mod norm;
mod packed;
mod parameters;
mod positions;
mod prepared;
mod ranges;
mod reads;
mod residual;
mod running;
mod sentences;
mod sink_attention;
mod sinusoids;
mod sizes;
mod smear;
mod softcap;
mod stack;
mod stacked_attention;
mod tensorized;
#[cfg(test)]
mod tests;
mod transformer;
mod value_embedding;
mod written_rows;

pub use attention_heads::AttentionHeads;
pub use context::{Context, Rates};
pub use embedding::first_values;
pub use host_batch::{DeviceBuffer, HostBatch};
pub use linear::{FlatBuffers, FlatParameter};
pub use packed::{Packed, PaddedShape};
pub use parameters::{Builder, Parameters};
pub use prepared::{PreparedWeight, PreparedWeights};
pub use ranges::Ranges;
pub use reads::Reads;
pub use sentences::Sentences;
pub use softcap::Softcap;
pub use stack::StackCache;
pub use tensorized::TENSORIZED;
pub use transformer::Transformer;

use crate::data::vocabulary;
use crate::error::Result;
use tch::Tensor;

/// The ids of the special tokens, as i64 because tensors of ids are int64.
pub const BOS: i64 = vocabulary::BOS as i64;
pub const PAD: i64 = vocabulary::PAD as i64;
pub const EOS: i64 = vocabulary::EOS as i64;
pub const UNK: i64 = vocabulary::UNK as i64;

/// Returns x times a constant factor, or x itself if the factor is 1.
fn times(x: Tensor, factor: f64) -> Result<Tensor> {
    if factor == 1.0 {
        return Ok(x);
    }
    Ok(x.f_mul_scalar(factor)?)
}
