//! Adam over flat buffers: all parameters are views of one tensor, their gradients of another, so an update is one pass
//! and clipping one norm (SPEC §4).

use super::checkpoint::Array;
use super::snapshot::{to_array, to_tensor};
use crate::config::TrainingConfig;
use crate::cpu::parallel::{self, Shared};
use crate::error::{Error, Result};
use crate::kernel::adam;
use crate::model::Parameters;
use crate::operator::{self, Group};
use std::collections::BTreeMap;
use std::sync::Mutex;
use tch::{no_grad, Device, Kind, Tensor};

/// Views start at multiples of this many numbers: a cache line of f32.
const ALIGN: usize = 16;
/// Numbers of a thread's piece.
const GRAIN: usize = 1 << 16;

pub struct Optimizer {
    parameters: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    clip_norm: f64,
}

impl Optimizer {
    /// Moves the model's parameters into one buffer and hangs their gradients on another.
    pub fn new(parameters: &Parameters, config: &TrainingConfig) -> Result<Self> {
        let aligned = |t: &Tensor| t.numel().div_ceil(ALIGN) * ALIGN;
        let total: usize = parameters.tensors().iter().map(aligned).sum();
        let device = parameters.tensors().first().map_or(Device::Cpu, Tensor::device);
        let zeros = || Tensor::f_zeros([total as i64].as_slice(), (Kind::Float, device));
        let (flat, gradients) = (zeros()?, zeros()?);
        let mut start = 0;
        for t in parameters.tensors() {
            if t.kind() != Kind::Float {
                return Err(Error::invalid(format!("training keeps its parameters in float32, got {:?}", t.kind())));
            }
            let view = |flat: &Tensor| -> Result<Tensor> {
                Ok(flat.f_narrow(0, start as i64, t.numel() as i64)?.f_view(t.size().as_slice())?)
            };
            let own = view(&flat)?;
            no_grad(|| own.shallow_clone().f_copy_(t))?;
            t.shallow_clone().f_set_data(&own)?;
            operator::set_grad(t, &view(&gradients)?)?;
            start += aligned(t);
        }
        Ok(Optimizer {
            parameters: flat,
            gradients,
            first: zeros()?,
            second: zeros()?,
            beta1: config.beta1,
            beta2: config.beta2,
            eps: config.adam_eps,
            weight_decay: config.weight_decay,
            clip_norm: config.clip_norm,
        })
    }

    /// Every rank's gradients become the sum of all.
    pub fn sum_gradients(&mut self, group: Group) -> Result<()> {
        group.sum_in_place(&mut self.gradients)
    }

    /// Every rank's parameters become rank 0's.
    pub fn share_parameters(&mut self, group: Group) -> Result<()> {
        let first = group.first(&self.parameters)?;
        no_grad(|| Ok(self.parameters.f_copy_(&first)?))
    }

    /// Update `step` (from 1) with the accumulated gradients, which are zero afterwards. Returns their global norm
    /// before clipping. A norm that is not finite changes nothing.
    pub fn step(&mut self, step: u64, lr: f64) -> Result<f64> {
        let norm = self.gradient_norm()?;
        if !norm.is_finite() {
            return Ok(norm);
        }
        // 1e-6 as in torch.nn.utils.clip_grad_norm_
        let scale = if self.clip_norm > 0.0 { (self.clip_norm / (norm + 1e-6)).min(1.0) } else { 1.0 };
        let adam = adam::Adam {
            lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
            step,
        };
        match self.parameters.device() {
            Device::Cpu => self.step_cpu(&adam, scale),
            _ => no_grad(|| self.step_composed(&adam, scale)),
        }?;
        Ok(norm)
    }

    fn gradient_norm(&self) -> Result<f64> {
        if self.gradients.device() != Device::Cpu {
            return Ok(self.gradients.f_norm()?.f_double_value(&[])?);
        }
        let gradients = host(&self.gradients);
        // One partial sum per piece, added in order: the same bits whatever the number of threads.
        let pieces = gradients.len().div_ceil(GRAIN);
        let sums = Mutex::new(vec![0f64; pieces]);
        parallel::for_each(pieces, 1, |range| {
            for piece in range {
                let end = gradients.len().min((piece + 1) * GRAIN);
                let sum = adam::sum_of_squares(&gradients[piece * GRAIN..end]);
                sums.lock().unwrap_or_else(|e| e.into_inner())[piece] = sum;
            }
        });
        let sums = sums.into_inner().unwrap_or_else(|e| e.into_inner());
        Ok(sums.iter().sum::<f64>().sqrt())
    }

    fn step_cpu(&mut self, adam: &adam::Adam, scale: f64) -> Result<()> {
        let n = self.parameters.numel();
        let [p, g, m, v] =
            [&self.parameters, &self.gradients, &self.first, &self.second].map(|t| Shared::new(host_mut(t)));
        parallel::for_each(n, GRAIN, |range| {
            // SAFETY: the ranges are disjoint and inside the buffers, which only this call touches.
            let (p, g, m, v) =
                unsafe { (p.slice(range.clone()), g.slice(range.clone()), m.slice(range.clone()), v.slice(range)) };
            adam::update(adam, &(scale as f32), p, m, v, g);
        });
        Ok(())
    }

    /// The same in tch, for other devices.
    fn step_composed(&mut self, adam: &adam::Adam, scale: f64) -> Result<()> {
        let t = adam.step as f64;
        let rate = adam.lr * (1.0 - adam.beta2.powf(t)).sqrt() / (1.0 - adam.beta1.powf(t));
        let g = self.gradients.f_mul_scalar(scale)?;
        let _ = self.first.f_mul_scalar_(adam.beta1)?.f_add_(&g.f_mul_scalar(1.0 - adam.beta1)?)?;
        let _ = self.second.f_mul_scalar_(adam.beta2)?.f_addcmul_(&g, &(&g * (1.0 - adam.beta2)))?;
        let _ = self.parameters.f_mul_scalar_(1.0 - adam.lr * adam.weight_decay)?;
        let change = self.first.f_div(&self.second.f_sqrt()?.f_add_scalar(adam.eps)?)?;
        let _ = self.parameters.f_sub_(&change.f_mul_scalar(rate)?)?;
        let _ = self.gradients.f_zero_()?;
        Ok(())
    }

    /// Adam's moments, for a checkpoint.
    pub fn to_arrays(&self) -> Result<BTreeMap<String, Array>> {
        Ok(BTreeMap::from([
            ("first_moment".to_string(), to_array(&self.first)?),
            ("second_moment".to_string(), to_array(&self.second)?),
        ]))
    }

    /// Takes up the moments of a checkpoint of the same model.
    pub fn load(&mut self, arrays: &BTreeMap<String, Array>) -> Result<()> {
        for (name, moment) in [("first_moment", &mut self.first), ("second_moment", &mut self.second)] {
            let array = arrays.get(name).ok_or_else(|| {
                Error::invalid(format!(
                    "the checkpoint has no {name}: an averaged checkpoint cannot be resumed, only translated with"
                ))
            })?;
            let loaded = to_tensor(array, moment.device())?;
            if loaded.size() != moment.size() {
                return Err(Error::invalid(format!(
                    "the checkpoint's {name} has {} numbers, this model needs {}: another model's checkpoint?",
                    loaded.numel(),
                    moment.numel()
                )));
            }
            moment.f_copy_(&loaded)?;
        }
        Ok(())
    }
}

fn host(t: &Tensor) -> &[f32] {
    // SAFETY: `t` is one of the flat buffers: contiguous f32 on the CPU, alive as long as the reference.
    unsafe { std::slice::from_raw_parts(t.data_ptr().cast(), t.numel()) }
}

#[allow(clippy::mut_from_ref)]
fn host_mut(t: &Tensor) -> &mut [f32] {
    // SAFETY: as `host`; `step_cpu`, which holds the optimizer mutably, is the only caller and uses each buffer once.
    unsafe { std::slice::from_raw_parts_mut(t.data_ptr().cast(), t.numel()) }
}
