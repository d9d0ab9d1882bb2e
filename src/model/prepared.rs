//! Weights prepared once for many products: decoding multiplies by the same weights at every step.

use super::linear::times;
use crate::error::Result;
use crate::host::has_memory;
use crate::kernel::packed::call::{linear, pack};
use crate::kernel::packed::PackedMatrix;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tch::{Device, Kind, Tensor};

/// The weights of a model that does not change, each prepared at its first use. Threads share the prepared weights;
/// each thread has a model with the same tensors. The key is a weight's address and its number of elements, because a
/// matrix and a part of the matrix may begin at the same address.
#[derive(Default)]
pub struct PreparedWeights(Mutex<HashMap<(usize, usize), KeptWeight>>);

struct KeptWeight {
    prepared: PreparedWeight,
    /// The weight itself, kept alive so that no other tensor gets its address.
    _of: Tensor,
}

impl std::fmt::Debug for PreparedWeights {
    /// Writes only the type's name, because the weights are too long to print.
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("PreparedWeights")
    }
}

/// The weight and bias of a linear layer y = xWᵀ + b, prepared for products.
pub enum PreparedWeight {
    F32(Arc<PackedMatrix<f32>>),
    F64(Arc<PackedMatrix<f64>>),
    /// The weight and bias for libtorch, in the type of products.
    Cast(Tensor, Option<Tensor>),
}

impl PreparedWeights {
    /// Computes y = xWᵀ + b in the computing type `kind`. The first call with a weight prepares it, with its bias.
    pub fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Result<Tensor> {
        // A weight without memory of its own, such as a fake tensor, has no address that could be the key. So nothing
        // is kept.
        if !has_memory(weight) {
            return PreparedWeight::new(weight, bias, kind)?.linear(x, kind);
        }
        let key = (weight.data_ptr() as usize, weight.numel());
        let prepared = {
            let mut weights = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match weights.get(&key) {
                Some(entry) => entry.prepared.shallow_clone(),
                None => {
                    let prepared = PreparedWeight::new(weight, bias, kind)?;
                    let entry = KeptWeight { prepared: prepared.shallow_clone(), _of: weight.shallow_clone() };
                    weights.insert(key, entry);
                    prepared
                }
            }
        };
        prepared.linear(x, kind)
    }
}

impl PreparedWeight {
    /// Prepares W (outputs, inputs) and b (outputs) for products of the type `kind`. On the CPU, f32 and f64 weights
    /// are packed for this package's product.
    pub fn new(weight: &Tensor, bias: Option<&Tensor>, kind: Kind) -> Result<Self> {
        let cast = |t: &Tensor| t.f_detach()?.f_to_kind(kind)?.f_contiguous();
        let (weight, bias) = (cast(weight)?, bias.map(cast).transpose()?);
        let have_memory = has_memory(&weight) && bias.as_ref().is_none_or(has_memory);
        let can_pack = have_memory && PreparedWeight::is_packed(weight.device(), kind);
        Ok(match (can_pack, kind) {
            (true, Kind::Double) => PreparedWeight::F64(Arc::new(pack(&weight, bias.as_ref())?)),
            (true, _) => PreparedWeight::F32(Arc::new(pack(&weight, bias.as_ref())?)),
            (false, _) => PreparedWeight::Cast(weight, bias),
        })
    }

    /// True if weights on this device are packed for products in this type.
    pub fn is_packed(device: Device, kind: Kind) -> bool {
        device == Device::Cpu && matches!(kind, Kind::Float | Kind::Double)
    }

    /// Returns the same weight, which shares its memory.
    pub fn shallow_clone(&self) -> Self {
        match self {
            PreparedWeight::F32(w) => PreparedWeight::F32(w.clone()),
            PreparedWeight::F64(w) => PreparedWeight::F64(w.clone()),
            PreparedWeight::Cast(w, b) => {
                PreparedWeight::Cast(w.shallow_clone(), b.as_ref().map(Tensor::shallow_clone))
            }
        }
    }

    /// Computes y = xWᵀ + b in the type `kind` for which the weight has been prepared.
    pub fn linear(&self, x: &Tensor, kind: Kind) -> Result<Tensor> {
        let x = x.f_to_kind(kind)?;
        match self {
            PreparedWeight::F32(w) => linear(&x, w),
            PreparedWeight::F64(w) => linear(&x, w),
            PreparedWeight::Cast(w, b) => times(&x, &w.f_transpose(0, 1)?, b.as_ref()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prepared_weights_multiply_as_libtorch_does() {
        tch::manual_seed(5);
        let weights = PreparedWeights::default();
        let random = |size: &[i64]| Tensor::randn(size, (Kind::Double, Device::Cpu));
        for (kind, bound) in [(Kind::Double, 1e-12), (Kind::Float, 1e-5), (Kind::BFloat16, 0.3)] {
            let (all, bias) = (random(&[96, 40]), random(&[96]));
            // The weights are a matrix and its first rows, which begin at the same address.
            for (weight, bias) in [(all.shallow_clone(), None), (all.narrow(0, 0, 33), Some(bias.narrow(0, 3, 33)))] {
                for x in [random(&[7, 40]), random(&[201, 43]).narrow(1, 3, 40), random(&[2, 3, 40]), random(&[0, 40])]
                {
                    let wanted = x.linear(&weight, bias.as_ref());
                    for _ in 0..2 {
                        let found = PreparedWeights::linear(&weights, &x, &weight, bias.as_ref(), kind).unwrap();
                        assert_eq!((found.kind(), found.size()), (kind, wanted.size()));
                        let off = (found.to_kind(Kind::Double) - &wanted).abs();
                        assert!(off.numel() == 0 || off.max().double_value(&[]) < bound, "{kind:?}: {off:?}");
                    }
                }
            }
            weights.0.lock().unwrap().clear();
        }
    }
}
