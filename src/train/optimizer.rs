//! Adam over flat buffers: all parameters are views of one tensor, their gradients of another, so an update is one pass
//! and clipping one norm (docs/spec.md §4.9).

use super::checkpoint::Array;
use super::checkpoint::{to_array, to_tensor};
use crate::config::{AdamForm, TrainingConfig};
use crate::cpu::parallel::{self, Shared};
use crate::error::{Error, Result};
use crate::kernel::adam;
use crate::model::Parameters;
use crate::operator::{self, AdamBuffers, Group};
use std::collections::BTreeMap;
use std::sync::Mutex;
use tch::{no_grad, Device, Kind, Tensor};

/// Views start at multiples of this many numbers: a cache line of f32.
const ALIGN: usize = 16;
/// Numbers of a thread's piece.
const GRAIN: usize = 1 << 16;
/// Added to the norm that clips, as torch.nn.utils.clip_grad_norm_ does.
const CLIP_EPS: f64 = 1e-6;

pub struct Optimizer {
    parameters: Tensor,
    gradients: Tensor,
    first: Tensor,
    second: Tensor,
    /// On a GPU: 0, or NaN since an update that was not finite. The host learns of that late, and until then nothing moves.
    health: Tensor,
    beta1: f64,
    beta2: f64,
    eps: f64,
    form: AdamForm,
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
            health: Tensor::f_zeros([0i64; 0].as_slice(), (Kind::Double, device))?,
            beta1: config.beta1,
            beta2: config.beta2,
            eps: config.adam_eps,
            form: config.adam_form,
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
    /// before clipping, a 0-dim float64 tensor beside them, so that nobody waits for the device. Where that or `loss`
    /// (0-dim) is not finite nothing moves, on a GPU at later updates neither.
    pub fn step(&mut self, step: u64, lr: f64, loss: &Tensor) -> Result<Tensor> {
        let adam = self.adam(step, lr);
        match self.parameters.device() {
            Device::Cpu => self.step_on_cpu(&adam, loss),
            _ => no_grad(|| self.step_on_device(&adam, loss)),
        }
    }

    fn adam(&self, step: u64, lr: f64) -> adam::Adam {
        let Optimizer { beta1, beta2, weight_decay, .. } = *self;
        // m̂/(√v̂ + ε) is √(1−β₂ᵗ)/(1−β₁ᵗ)·m/(√v + ε√(1−β₂ᵗ)).
        let eps = match self.form {
            AdamForm::Fairseq => self.eps,
            AdamForm::Torch => self.eps * (1.0 - beta2.powf(step as f64)).sqrt(),
        };
        adam::Adam { lr, beta1, beta2, eps, weight_decay, step }
    }

    fn step_on_cpu(&mut self, adam: &adam::Adam, loss: &Tensor) -> Result<Tensor> {
        let norm = self.norm_on_cpu();
        if norm.is_finite() && loss.f_double_value(&[])?.is_finite() {
            let limit = self.clip_norm / (norm + CLIP_EPS);
            self.update_on_cpu(adam, if self.clip_norm > 0.0 { limit.min(1.0) } else { 1.0 });
        }
        Ok(Tensor::f_from_slice(&[norm])?.f_squeeze()?)
    }

    /// The same through the operator, which reads what clipping found where it is.
    fn step_on_device(&mut self, adam: &adam::Adam, loss: &Tensor) -> Result<Tensor> {
        let norm = self.gradients.f_norm()?.f_to_kind(Kind::Double)?;
        // 0·v is 0, or NaN where v is not finite.
        self.health = self.health.f_add(&norm.f_mul_scalar(0.0)?)?.f_add(&loss.f_mul_scalar(0.0)?)?;
        let scale = self.health.f_add_scalar(1.0)?;
        let scale = match self.clip_norm > 0.0 {
            true => scale
                .f_mul(&norm.f_add_scalar(CLIP_EPS)?.f_reciprocal()?.f_mul_scalar(self.clip_norm)?.f_clamp_max(1.0)?)?,
            false => scale,
        };
        let number = |v: f64| Tensor::f_full([1i64].as_slice(), v, (Kind::Float, norm.device()));
        let buffers = AdamBuffers {
            parameters: &self.parameters,
            first: &self.first,
            second: &self.second,
            gradients: &self.gradients,
            grad_scale: &scale.f_to_kind(Kind::Float)?,
            step_size: &number(adam.step_size())?,
            keep: &number(1.0 - adam.lr * adam.weight_decay)?,
        };
        operator::adam_in_place(&buffers, adam.beta1, adam.beta2, adam.eps)?;
        Ok(norm)
    }

    fn norm_on_cpu(&self) -> f64 {
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
        sums.iter().sum::<f64>().sqrt()
    }

    fn update_on_cpu(&mut self, adam: &adam::Adam, scale: f64) {
        let n = self.parameters.numel();
        let [p, g, m, v] =
            [&self.parameters, &self.gradients, &self.first, &self.second].map(|t| Shared::new(host_mut(t)));
        parallel::for_each(n, GRAIN, |range| {
            // SAFETY: the ranges are disjoint and inside the buffers, which only this call touches.
            let (p, g, m, v) =
                unsafe { (p.slice(range.clone()), g.slice(range.clone()), m.slice(range.clone()), v.slice(range)) };
            adam::update(adam, &(scale as f32), p, m, v, g);
        });
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
    // SAFETY: as `host`; `update_on_cpu`, which holds the optimizer mutably, is the only caller and uses each buffer once.
    unsafe { std::slice::from_raw_parts_mut(t.data_ptr().cast(), t.numel()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init::Fill;
    use crate::model::Builder;

    fn optimizer(clip_norm: f64) -> Optimizer {
        let mut b = Builder::fresh(Device::Cpu, Kind::Float);
        let _ = b.parameter("matrix", &[7, 5], &Fill::Constant(0.3)).unwrap();
        let _ = b.parameter("vector", &[300], &Fill::Constant(-1.0)).unwrap();
        let config = TrainingConfig { clip_norm, weight_decay: 0.1, ..TrainingConfig::default() };
        Optimizer::new(&b.finish().unwrap(), &config).unwrap()
    }

    fn gradient(optimizer: &Optimizer, seed: i64) -> Tensor {
        tch::manual_seed(seed);
        Tensor::randn(optimizer.gradients.size(), (Kind::Float, Device::Cpu))
    }

    #[test]
    fn a_device_makes_the_update_that_the_cpu_makes() {
        for clip_norm in [0.0, 1.0] {
            let (mut cpu, mut device) = (optimizer(clip_norm), optimizer(clip_norm));
            let start = cpu.parameters.copy();
            let finite = Tensor::from(2.5);
            // Below the limit and above it.
            for (step, size) in [(1, 1e-3), (2, 10.0), (3, 0.1)] {
                let gradient = gradient(&cpu, step) * size;
                cpu.gradients.copy_(&gradient);
                device.gradients.copy_(&gradient);
                let adam = cpu.adam(step as u64, 1e-2);
                let norms = [cpu.step_on_cpu(&adam, &finite), no_grad(|| device.step_on_device(&adam, &finite))];
                let [ours, theirs] = norms.map(|norm| norm.unwrap().double_value(&[]));
                assert!((ours / theirs - 1.0).abs() < 1e-6, "{ours} {theirs}");
                for (ours, theirs) in [(&cpu.parameters, &device.parameters), (&cpu.second, &device.second)] {
                    let [off, size] = [ours - theirs, theirs.copy()].map(|t| t.abs().max().double_value(&[]));
                    assert!(off < 1e-6 * (1.0 + size), "step {step}");
                }
            }
            assert_ne!(start, cpu.parameters);
        }
    }

    #[test]
    fn what_is_not_finite_moves_nothing() {
        for (size, loss) in [(f64::INFINITY, 2.5), (1.0, f64::NAN), (1.0, f64::INFINITY)] {
            for on_device in [false, true] {
                let mut optimizer = optimizer(1.0);
                let step = |optimizer: &mut Optimizer, number: i64, size: f64, loss: f64| {
                    optimizer.gradients.copy_(&(gradient(optimizer, number) * size));
                    let (adam, loss) = (optimizer.adam(number as u64, 1e-2), Tensor::from(loss));
                    let norm = match on_device {
                        true => no_grad(|| optimizer.step_on_device(&adam, &loss)),
                        false => optimizer.step_on_cpu(&adam, &loss),
                    };
                    let state = [&optimizer.parameters, &optimizer.first, &optimizer.second].map(Tensor::copy);
                    (norm.unwrap().double_value(&[]), state)
                };
                let (_, before) = step(&mut optimizer, 1, 1.0, 2.5);
                let (norm, after) = step(&mut optimizer, 2, size, loss);
                assert_eq!(norm.is_finite(), size.is_finite());
                assert_eq!(before, after, "{size} {loss} {on_device}");
                // Given to a device before the host has read the loss.
                let (_, later) = step(&mut optimizer, 3, 1.0, 2.5);
                assert_eq!(before == later, on_device, "{size} {loss}");
            }
        }
    }
}
