//! Conversion between tensors and a checkpoint's arrays.

use super::{Array, Bytes};
use crate::error::{Error, Result};
use crate::host::Held;
use crate::model::Parameters;
use safetensors::Dtype;
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

/// The types of tensors that a checkpoint can hold, with their names in safetensors.
const KINDS: [(Kind, Dtype); 5] = [
    (Kind::Float, Dtype::F32),
    (Kind::Double, Dtype::F64),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Half, Dtype::F16),
    (Kind::Int64, Dtype::I64),
];

/// Returns a tensor's data as an array. The array shares the memory of a tensor on the host, so it must be dropped
/// before the tensor changes.
pub fn to_array(t: &Tensor) -> Result<Array> {
    let data = Bytes::Held(Held::new("a checkpoint's tensor", t)?);
    let dtype = KINDS.iter().find(|(kind, _)| *kind == t.kind()).map(|(_, dtype)| *dtype);
    let dtype = dtype.ok_or_else(|| Error::invalid(format!("a checkpoint cannot hold {:?} tensors", t.kind())))?;
    Ok(Array { dtype, shape: t.size().iter().map(|n| *n as usize).collect(), data })
}

/// Returns a tensor with the data of an array, on this device.
pub fn to_tensor(array: &Array, device: Device) -> Result<Tensor> {
    let kind = KINDS.iter().find(|(_, dtype)| *dtype == array.dtype).map(|(kind, _)| *kind);
    let kind = kind.ok_or_else(|| Error::invalid(format!("a model cannot hold {:?} numbers", array.dtype)))?;
    let shape: Vec<i64> = array.shape.iter().map(|n| *n as i64).collect();
    Ok(Tensor::f_from_data_size(&array.data, &shape, kind)?.f_to_device(device)?)
}

/// Returns a model's parameters and buffers as arrays, under their canonical names.
pub fn to_arrays(parameters: &Parameters) -> Result<BTreeMap<String, Array>> {
    parameters.iter().chain(parameters.buffers()).map(|(name, t)| Ok((name.to_string(), to_array(t)?))).collect()
}

/// Returns a checkpoint's arrays as tensors on this device, for [`crate::model::Transformer::with_parameters`].
pub fn load_parameters(arrays: &BTreeMap<String, Array>, device: Device) -> Result<BTreeMap<String, Tensor>> {
    arrays.iter().map(|(name, array)| Ok((name.clone(), to_tensor(array, device)?))).collect()
}
