//! The optimizer over flat buffers. All parameters are views of one tensor and their gradients views of another, so
//! Adam's update is one pass, and clipping computes one norm (docs/spec.md §4.9). Rules other than Adam update one
//! parameter at a time.

mod lion;
mod muon;
mod normuon;
mod qk_clip;
pub mod rule;
mod ruled;
pub mod unit;

use super::checkpoint::{to_array, to_tensor, Array};
use super::schedule::Schedule;
use super::trainer::kind_of;
use crate::config::{AdamForm, DecayOf, TrainingConfig, TransformerConfig};
use crate::cpu::parallel::{self, Shared};
use crate::cpu::Element;
use crate::error::{Error, Result};
use crate::kernel::adam::{self, call::Coefficients, Moment, Rounding};
use crate::model::{FlatBuffers, Parameters};
use crate::operator::{self, AdamBuffers, ProcessGroup};
use crate::parametrisation::{Multipliers, StepSize};
use half::bf16;
pub use qk_clip::QkClip;
use ruled::Ruled;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use tch::{no_grad, Device, Kind, Tensor};
use unit::UnitMatrices;

/// The alignment of the views, as a number of elements: a cache line of f32.
const ALIGN: usize = 16;
/// The number of elements that a thread processes at a time.
const GRAIN: usize = 1 << 16;
/// The names of Adam's moments in a checkpoint.
const FIRST: &str = "exp_avg";
const SECOND: &str = "exp_avg_sq";
/// The ε that clipping adds to the norm, as torch.nn.utils.clip_grad_norm_ does.
const CLIP_EPS: f64 = 1e-6;

/// The optimizer of a run: the flat buffers, the optimizer's state, and its options.
pub struct Optimizer {
    /// The elements of all parameters, in one dimension.
    parameters: Tensor,
    /// The elements of all gradients, at the same indices.
    gradients: Tensor,
    /// Adam's first moments, of the parameters that Adam updates.
    first: Tensor,
    /// Adam's second moments, of the same parameters.
    second: Tensor,
    /// For each parameter that Adam updates: its range in the buffers and its shape.
    places: BTreeMap<String, (Range<usize>, Vec<i64>)>,
    /// The segments that Adam updates, in the order of the buffers. The elements of a segment have the same
    /// multipliers.
    segments: Vec<Segment>,
    /// The rule that updates some parameters instead of Adam; these come last in the buffers. `None` for Adam alone.
    ruled: Option<Ruled>,
    /// The matrices that stay on the sphere; empty without `unit_matrices`.
    unit: UnitMatrices,
    /// `None` without `qk_clip`.
    qk_clip: Option<QkClip>,
    /// On a GPU: 0, or NaN once the loss or gradient norm of an update was not finite. The host reads these numbers
    /// late, so the device itself must skip that update and all later ones.
    health: Tensor,
    beta1: f64,
    beta2: f64,
    eps: f64,
    form: AdamForm,
    weight_decay: f64,
    clip_norm: f64,
    seed: u64,
}

/// Neighbouring elements in the buffers, of parameters that have the same multipliers.
#[derive(Debug, PartialEq)]
struct Segment {
    elements: Range<usize>,
    multipliers: Multipliers,
}

impl Segment {
    /// Returns the elements of a flat buffer that belong to this segment.
    fn of(&self, flat: &Tensor) -> Result<Tensor> {
        Ok(flat.f_narrow(0, self.elements.start as i64, self.elements.len() as i64)?)
    }
}

impl Optimizer {
    /// Moves the model's parameters into one buffer and their gradients into another. They have the order in which
    /// the model declares them, or are grouped by role if the parametrisation distinguishes roles.
    pub fn new(parameters: &Parameters, config: &TrainingConfig, model: &TransformerConfig) -> Result<Self> {
        // The number of elements that a parameter takes in a buffer, rounded up so that the next one is aligned.
        let aligned = |t: &Tensor| t.numel().div_ceil(ALIGN) * ALIGN;
        let total: usize = parameters.tensors().iter().map(aligned).sum();
        let device = parameters.tensors().first().map_or(Device::Cpu, Tensor::device);
        let zeros = |kind| Tensor::f_zeros([total as i64].as_slice(), (kind, device));
        let (flat, gradients) = (zeros(Kind::Float)?, zeros(Kind::Float)?);
        let moments = kind_of(config.moments);
        let mut ruled = Ruled::of(config);
        if config.unit_matrices && !model.scaled().parametrisation.is_standard() {
            return Err(Error::invalid(
                "unit_matrices sets the lengths of matrices, which the parametrisation would scale: leave one of them out",
            ));
        }
        if ruled.is_some() && model.scaled().unit.is_some() {
            return Err(Error::invalid(format!(
                "parametrisation {:?} has rates for Adam alone, got optimizer = {:?}: leave one of them out",
                model.parametrisation.as_str(),
                config.optimizer.name()
            )));
        }
        let mut sorted: Vec<_> = parameters
            .parts()
            .map(|(name, t, part)| {
                // The rule that updates this parameter; `None` if Adam does.
                let rule = ruled.as_ref().map(|ruled| &ruled.rule).filter(|rule| rule.takes(part, &t.size()));
                let step_size = rule.map_or(StepSize::Entries, |rule| rule.step_size());
                // `order` is a sort key that groups parameters with equal multipliers.
                let (order, multipliers) = model.multipliers(name, part, &t.size(), step_size);
                let skips_decay =
                    config.weight_decay != 0.0 && config.weight_decay_of == DecayOf::Matrices && !part.is_matrix();
                let weight_decay = if skips_decay { 0.0 } else { multipliers.weight_decay };
                // Adam's parameters come first, those with equal multipliers next to each other.
                let sort_key = (rule.is_some(), skips_decay, order);
                (sort_key, Multipliers { weight_decay, ..multipliers }, name, t)
            })
            .collect();
        sorted.sort_by_key(|(sort_key, ..)| *sort_key);
        // `start` is where the next parameter begins in the buffers.
        let (mut start, mut segments, mut places) = (0, Vec::<Segment>::new(), BTreeMap::new());
        let mut adam_end = 0;
        for ((is_ruled, ..), multipliers, name, t) in sorted {
            if t.kind() != Kind::Float {
                return Err(Error::invalid(format!("training keeps its parameters in float32, got {:?}", t.kind())));
            }
            let view_of = |flat: &Tensor| view_at(flat, &(start..start + t.numel()), t);
            let view = view_of(&flat)?;
            no_grad(|| view.shallow_clone().f_copy_(t))?;
            // The model's own tensor now refers to the buffer's memory.
            t.shallow_clone().f_set_data(&view)?;
            operator::set_grad(t, &view_of(&gradients)?)?;
            // `elements` includes the padding up to the next parameter, `place` does not.
            let (place, elements) = (start..start + t.numel(), start..start + aligned(t));
            start = elements.end;
            if let (true, Some(ruled)) = (is_ruled, &mut ruled) {
                ruled.add(name, view, view_at(&gradients, &place, t)?, moments, model.d_model, multipliers)?;
                continue;
            }
            // Adam's parameters come first, so its moments reach only as far as the last of them.
            adam_end = start;
            places.insert(name.to_string(), (place, t.size()));
            match segments.last_mut().filter(|last| last.multipliers == multipliers) {
                Some(last) => last.elements.end = start,
                None => segments.push(Segment { elements, multipliers }),
            }
        }
        let zeros = |kind| Tensor::f_zeros([adam_end as i64].as_slice(), (kind, device));
        Ok(Optimizer {
            parameters: flat,
            gradients,
            first: zeros(moments)?,
            second: zeros(moments)?,
            places,
            segments,
            ruled,
            unit: unit_matrices(parameters, config),
            qk_clip: (config.qk_clip > 0.0).then(|| QkClip::new(parameters, config.qk_clip)).transpose()?,
            health: Tensor::f_zeros([0i64; 0].as_slice(), (Kind::Double, device))?,
            beta1: config.beta1,
            beta2: config.beta2,
            eps: config.adam_eps,
            form: config.adam_form,
            weight_decay: match model.scaled().unit {
                // Adam multiplies the decay by the learning rate. u-μP's decay follows the schedule, but does not
                // depend on the highest rate.
                Some(_) => config.weight_decay / Schedule::new(config, model.scaled().base_width).highest(),
                None => config.weight_decay,
            },
            clip_norm: config.clip_norm,
            seed: config.seed,
        })
    }

    /// Returns the flat buffers to which linear layers add their gradients, with products of type `kind`; `None` on a
    /// GPU, where CUDA graphs record the passes.
    pub fn flat(&self, kind: Kind) -> Result<Option<FlatBuffers>> {
        let on_cpu = self.parameters.device() == Device::Cpu;
        on_cpu.then(|| FlatBuffers::new(&self.parameters, &self.gradients, kind)).transpose()
    }

    /// Replaces every rank's gradients by the sum over ranks, and its largest logits by the largest of all ranks.
    pub fn join_ranks(&mut self, group: ProcessGroup) -> Result<()> {
        group.sum_in_place(&mut self.gradients)?;
        self.qk_clip.as_mut().map_or(Ok(()), |clip| clip.join_ranks(group))
    }

    /// Returns the clip of queries and keys; `None` without `qk_clip`.
    pub fn qk_clip(&self) -> Option<&QkClip> {
        self.qk_clip.as_ref()
    }

    /// Replaces every rank's parameters by rank 0's.
    pub fn share_parameters(&mut self, group: ProcessGroup) -> Result<()> {
        let first = group.first(&self.parameters)?;
        no_grad(|| Ok(self.parameters.f_copy_(&first)?))
    }

    /// Applies update number `step` (from 1) with the accumulated gradients and the learning rate `lr`, and zeroes the
    /// gradients. Returns their global norm before clipping, as a 0-dim float64 tensor on the same device, so that the
    /// host does not wait. If the norm or `loss` (0-dim) is not finite, nothing is updated; on a GPU, later updates are
    /// skipped, too. All ranks of `group` have equal gradients.
    pub fn step(&mut self, step: u64, lr: f64, loss: &Tensor, group: ProcessGroup) -> Result<Tensor> {
        no_grad(|| {
            let norm = match self.parameters.device() {
                Device::Cpu => self.step_on_cpu(step, lr, loss, group),
                _ => self.step_on_device(step, lr, loss, group),
            }?;
            self.qk_clip.as_mut().map_or(Ok(()), QkClip::forget)?;
            Ok(norm)
        })
    }

    /// Returns Adam's coefficients in update `step`, for parameters with these multipliers.
    fn adam(&self, step: u64, lr: f64, multipliers: &Multipliers) -> adam::Adam {
        let Optimizer { beta1, beta2, weight_decay, .. } = *self;
        // The update computes √(1−β₂ᵗ)/(1−β₁ᵗ)·m/(√v + eps). This is torch's step m̂/(√v̂ + ε) if eps = ε√(1−β₂ᵗ).
        let eps = match self.form {
            AdamForm::Fairseq => self.eps,
            AdamForm::Torch => self.eps * (1.0 - beta2.powf(step as f64)).sqrt(),
        };
        let (lr, eps) = (lr * multipliers.lr, eps * multipliers.eps);
        adam::Adam { lr, beta1, beta2, eps, weight_decay: weight_decay * multipliers.weight_decay, step }
    }

    /// Returns the source of random bits with which update `step` rounds the moments of a segment.
    fn rounding(&self, step: u64, segment: &Segment) -> Rounding {
        Rounding { seed: self.seed, update: step as u32, first: segment.elements.start }
    }

    /// Applies the update on the CPU, segment by segment. Skips the update if the norm or the loss is not finite.
    fn step_on_cpu(&mut self, step: u64, lr: f64, loss: &Tensor, group: ProcessGroup) -> Result<Tensor> {
        let norm = self.norm_on_cpu();
        if norm.is_finite() && loss.f_double_value(&[])?.is_finite() {
            let limit = self.clip_norm / (norm + CLIP_EPS);
            let scale = if self.clip_norm > 0.0 { limit.min(1.0) } else { 1.0 };
            for segment in &self.segments {
                let (adam, rounding) = (self.adam(step, lr, &segment.multipliers), self.rounding(step, segment));
                match self.first.kind() {
                    Kind::BFloat16 => self.update_on_cpu::<bf16>(segment, &adam, &rounding, scale),
                    _ => self.update_on_cpu::<f32>(segment, &adam, &rounding, scale),
                }
            }
            if let Some(ruled) = &mut self.ruled {
                ruled.step(lr, self.weight_decay, &Tensor::f_from_slice(&[scale as f32])?, None, group)?;
            }
            self.unit.normalise(None)?;
            self.qk_clip.as_ref().map_or(Ok(()), |clip| clip.apply(None))?;
        }
        Ok(Tensor::f_from_slice(&[norm])?.f_squeeze()?)
    }

    /// Applies the update with the Adam operator, which reads the clipping factor on the device. If that factor is NaN,
    /// the operator changes nothing.
    fn step_on_device(&mut self, step: u64, lr: f64, loss: &Tensor, group: ProcessGroup) -> Result<Tensor> {
        let norm = self.gradients.f_norm()?.f_to_kind(Kind::Double)?;
        // 0·v is 0, or NaN if v is not finite; a sum with NaN remains NaN.
        self.health = self.health.f_add(&norm.f_mul_scalar(0.0)?)?.f_add(&loss.f_mul_scalar(0.0)?)?;
        // The factor of gradients is 1 without clipping, and NaN if any update so far was not finite.
        let scale = self.health.f_add_scalar(1.0)?;
        let scale = match self.clip_norm > 0.0 {
            true => scale
                .f_mul(&norm.f_add_scalar(CLIP_EPS)?.f_reciprocal()?.f_mul_scalar(self.clip_norm)?.f_clamp_max(1.0)?)?,
            false => scale,
        };
        let scale = scale.f_to_kind(Kind::Float)?;
        // The operator takes the numbers that change from update to update as tensors on the device.
        let one_number = |v: f64| Tensor::f_full([1i64].as_slice(), v, (Kind::Float, norm.device()));
        for segment in &self.segments {
            let adam = self.adam(step, lr, &segment.multipliers);
            let buffers = AdamBuffers {
                parameters: &segment.of(&self.parameters)?,
                first: &segment.of(&self.first)?,
                second: &segment.of(&self.second)?,
                gradients: &segment.of(&self.gradients)?,
                grad_scale: &scale,
                step_size: &one_number(adam.step_size())?,
                keep: &one_number(1.0 - adam.lr * adam.weight_decay)?,
            };
            let adam::Adam { beta1, beta2, eps, .. } = adam;
            let rounding = self.rounding(step, segment);
            operator::adam_in_place(&buffers, &Coefficients { beta1, beta2, eps, rounding })?;
        }
        let is_alive = scale.f_isfinite()?;
        if let Some(ruled) = &mut self.ruled {
            ruled.step(lr, self.weight_decay, &scale, Some(&is_alive), group)?;
        }
        self.unit.normalise(Some(&is_alive))?;
        self.qk_clip.as_ref().map_or(Ok(()), |clip| clip.apply(Some(&is_alive)))?;
        Ok(norm)
    }

    /// Returns the Euclidean norm of all gradients.
    fn norm_on_cpu(&self) -> f64 {
        let gradients = host::<f32>(&self.gradients);
        // The gradients are cut into pieces of `GRAIN` elements. The pieces' sums are added in a fixed order, so the
        // result has the same bits with any number of threads.
        let pieces = gradients.len().div_ceil(GRAIN);
        let sums = Mutex::new(vec![0f64; pieces]);
        let pieces_at_a_time = 1;
        parallel::for_each(pieces, pieces_at_a_time, |range| {
            for piece in range {
                let end = gradients.len().min((piece + 1) * GRAIN);
                let sum = adam::sum_of_squares(&gradients[piece * GRAIN..end]);
                // A thread that panicked has left the other sums intact, so a poisoned lock is used all the same.
                sums.lock().unwrap_or_else(|e| e.into_inner())[piece] = sum;
            }
        });
        let sums = sums.into_inner().unwrap_or_else(|e| e.into_inner());
        sums.iter().sum::<f64>().sqrt()
    }

    /// Updates one segment with Adam; `scale` is the factor of the gradients, for clipping, and `M` the type of the
    /// moments. Only `step_on_cpu`, which holds the optimizer mutably, may call this function.
    fn update_on_cpu<M: Moment<f32>>(&self, segment: &Segment, adam: &adam::Adam, rounding: &Rounding, scale: f64) {
        let Range { start, end } = segment.elements;
        // p, g, m and v are the segment's parameters, gradients, first moments and second moments.
        let [p, g] = [&self.parameters, &self.gradients].map(|t| Shared::new(&mut host_mut::<f32>(t)[start..end]));
        let [m, v] = [&self.first, &self.second].map(|t| Shared::new(&mut host_mut::<M>(t)[start..end]));
        parallel::for_each(end - start, GRAIN, |range| {
            // An element's random bits depend on its index in the buffer, so not on how threads divide the work.
            let rounding = Rounding { first: rounding.first + range.start, ..*rounding };
            // SAFETY: the ranges are disjoint and inside the segment, which only this call touches.
            let (p, g, m, v) =
                unsafe { (p.slice(range.clone()), g.slice(range.clone()), m.slice(range.clone()), v.slice(range)) };
            adam::update(adam, &(scale as f32), &rounding, p, m, v, g);
        });
    }

    /// Returns the part of `moment`, the buffer of first or second moments, that belongs to the parameter `name`, with
    /// the parameter's shape.
    fn moment(&self, moment: &Tensor, name: &str) -> Result<Tensor> {
        let (place, shape) = &self.places[name];
        Ok(moment.f_narrow(0, place.start as i64, place.len() as i64)?.f_view(shape.as_slice())?)
    }

    /// Returns the state under the names that it has in a checkpoint, those of torch's optimizers: `exp_avg.NAME` and
    /// `exp_avg_sq.NAME` for parameters that Adam updates, and `momentum_buffer.NAME` for Muon's.
    fn state(&self) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        for (kind, moment) in [(FIRST, &self.first), (SECOND, &self.second)] {
            for name in self.places.keys() {
                tensors.insert(format!("{kind}.{name}"), self.moment(moment, name)?);
            }
        }
        tensors.extend(self.ruled.iter().flat_map(Ruled::state));
        Ok(tensors)
    }

    /// Returns the state as arrays for a checkpoint.
    pub fn to_arrays(&self) -> Result<BTreeMap<String, Array>> {
        self.state()?.into_iter().map(|(name, t)| Ok((name, to_array(&t)?))).collect()
    }

    /// Reads the state from a checkpoint of the same model and optimizer. Tensors of another type are converted.
    pub fn load(&mut self, arrays: &BTreeMap<String, Array>) -> Result<()> {
        // The tensors of the state share the optimizer's memory, so copying into them sets the optimizer's state.
        for (key, mut own) in self.state()? {
            let array = arrays.get(&key).ok_or_else(|| {
                Error::invalid(format!(
                    "the checkpoint has no {key} among the optimizer's tensors: another model's checkpoint?"
                ))
            })?;
            let loaded = to_tensor(array, own.device())?;
            if loaded.size() != own.size() {
                return Err(Error::invalid(format!(
                    "the checkpoint's {key} has the shape {:?}, this model's {:?}: another model's checkpoint?",
                    loaded.size(),
                    own.size()
                )));
            }
            own.f_copy_(&loaded)?;
        }
        Ok(())
    }
}

/// Scales the vectors of the matrices that stay on the sphere to norm 1, before the first update.
pub fn begin(parameters: &Parameters, config: &TrainingConfig) -> Result<()> {
    unit_matrices(parameters, config).begin()
}

/// Returns the matrices that stay on the sphere; none without the option `unit_matrices`.
fn unit_matrices(parameters: &Parameters, config: &TrainingConfig) -> UnitMatrices {
    let mut unit = UnitMatrices::default();
    for (name, t, part) in parameters.parts().filter(|_| config.unit_matrices) {
        unit.add(name, part, t);
    }
    unit
}

/// Returns the elements `place` of a flat buffer, with the shape of the parameter to which they belong.
fn view_at(flat: &Tensor, place: &Range<usize>, parameter: &Tensor) -> Result<Tensor> {
    Ok(flat.f_narrow(0, place.start as i64, place.len() as i64)?.f_view(parameter.size().as_slice())?)
}

/// Returns the elements of a buffer. `E` is their type: f32, except for moments.
fn host<E: Element>(t: &Tensor) -> &[E] {
    // SAFETY: `t` is one of the flat buffers: contiguous on the CPU, of type `E`, alive as long as the reference.
    unsafe { std::slice::from_raw_parts(t.data_ptr().cast(), t.numel()) }
}

/// Returns the elements of a buffer for writing; see [`host`].
#[allow(clippy::mut_from_ref)]
fn host_mut<E: Element>(t: &Tensor) -> &mut [E] {
    // SAFETY: see `host`. `update_on_cpu` is the only caller, and uses each buffer once at a time. It is only called
    // by `step_on_cpu`, which holds the optimizer mutably.
    unsafe { std::slice::from_raw_parts_mut(t.data_ptr().cast(), t.numel()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Precision;
    use crate::init::Fill;
    use crate::model::Builder;

    const ALONE: ProcessGroup = ProcessGroup::ALONE;

    /// Builds an optimizer for the default model.
    fn optimizer(clip_norm: f64) -> Optimizer {
        optimizer_of("{}", clip_norm)
    }

    /// Builds an optimizer for a model with the options `model` (JSON).
    fn optimizer_of(model: &str, clip_norm: f64) -> Optimizer {
        decaying(model, clip_norm, DecayOf::All)
    }

    /// Builds an optimizer with weight decay of some parameters.
    fn decaying(model: &str, clip_norm: f64, weight_decay_of: DecayOf) -> Optimizer {
        let config = TrainingConfig { clip_norm, weight_decay: 0.1, weight_decay_of, ..Default::default() };
        configured(model, &config)
    }

    /// Builds an optimizer for parameters named as in a model with two encoder layers and one decoder layer. `model` is
    /// the model's options (JSON).
    fn configured(model: &str, config: &TrainingConfig) -> Optimizer {
        let mut b = Builder::fresh(4, Device::Cpu, Kind::Float);
        let _ = b.parameter("embedding.weight", &[7, 5], &Fill::Constant(0.3)).unwrap();
        for (stack, layer) in [("encoder", 0), ("encoder", 1), ("decoder", 0)] {
            let name = |leaf: &str| format!("{stack}.layers.{layer}.{leaf}");
            let _ = b.parameter(&name("linear1.weight"), &[7, 5], &Fill::Constant(0.3)).unwrap();
            let _ = b.parameter(&name("linear1.bias"), &[300], &Fill::Constant(-1.0)).unwrap();
        }
        let _ = b.parameter("decoder.norm.weight", &[20], &Fill::Constant(2.0)).unwrap();
        let model = crate::config::from_json("model", model).unwrap();
        Optimizer::new(&b.finish().unwrap(), config, &model).unwrap()
    }

    const COMPLETEP: &str = r#"{"parametrisation": "completep", "base_width": 64, "base_depth": 2,
        "encoder_layers": 8, "decoder_layers": 4, "depth_alpha": 0.75}"#;

    #[test]
    fn equal_multipliers_lie_side_by_side() {
        // With the padding of `ALIGN`, a matrix of 35 elements takes 48, a bias of 300 takes 304, and the norm of 20
        // takes 32.
        let standard = optimizer(1.0);
        let all = Segment { elements: 0..standard.parameters.numel(), multipliers: Multipliers::ONE };
        assert_eq!(standard.segments, [all]);
        let decays = decaying("{}", 1.0, DecayOf::Matrices).segments;
        // (elements, multiplier of weight decay) of the four matrices, then of the vectors.
        let of_matrices = [(48 * 4, 1.0), (304 * 3 + 32, 0.0)];
        assert_eq!(
            decays.iter().map(|s| (s.elements.len(), s.multipliers.weight_decay)).collect::<Vec<_>>(),
            of_matrices
        );
        let segments = optimizer_of(COMPLETEP, 1.0).segments;
        let lengths: Vec<usize> = segments.iter().map(|segment| segment.elements.len()).collect();
        // The segments are the table, then the matrices and the vectors of the two encoder layers and of the decoder
        // layer, then the last norm.
        assert_eq!(lengths, [48, 2 * 48, 48, 2 * 304, 304, 32]);
        assert!(segments.windows(2).all(|pair| pair[0].elements.end == pair[1].elements.start));
    }

    /// Returns a random gradient for all parameters.
    fn gradient(optimizer: &Optimizer, seed: i64) -> Tensor {
        tch::manual_seed(seed);
        Tensor::randn(optimizer.gradients.size(), (Kind::Float, Device::Cpu))
    }

    #[test]
    fn a_device_makes_the_update_that_the_cpu_makes() {
        let cases = [("{}", 0.0, Precision::F32), ("{}", 1.0, Precision::F32), (COMPLETEP, 1.0, Precision::F32)];
        for (model, clip_norm, moments) in cases.into_iter().chain([(COMPLETEP, 1.0, Precision::Bf16)]) {
            let config = TrainingConfig { clip_norm, weight_decay: 0.1, moments, ..Default::default() };
            let [mut cpu, mut device] = [(); 2].map(|()| configured(model, &config));
            let start = cpu.parameters.copy();
            let finite = Tensor::from(2.5);
            // Some norms lie below the limit for clipping, some above it.
            for (step, size) in [(1, 1e-3), (2, 10.0), (3, 0.1)] {
                let gradient = gradient(&cpu, step) * size;
                cpu.gradients.copy_(&gradient);
                device.gradients.copy_(&gradient);
                let (number, lr) = (step as u64, 1e-2);
                let norms = [
                    cpu.step_on_cpu(number, lr, &finite, ALONE),
                    no_grad(|| device.step_on_device(number, lr, &finite, ALONE)),
                ];
                let [ours, theirs] = norms.map(|norm| norm.unwrap().double_value(&[]));
                assert!((ours / theirs - 1.0).abs() < 1e-6, "{ours} {theirs}");
                for (ours, theirs) in [(&cpu.parameters, &device.parameters), (&cpu.second, &device.second)] {
                    if ours.kind() == Kind::BFloat16 {
                        // An f32 that differs in its last bit is rounded to another 16-bit number once in 65,536
                        // times.
                        let others = ours.ne_tensor(theirs).to_kind(Kind::Float).mean(Kind::Float);
                        assert!(others.double_value(&[]) < 2e-3, "step {step}");
                        continue;
                    }
                    let [off, size] = [ours - theirs, theirs.copy()].map(|t| t.abs().max().double_value(&[]));
                    assert!(off < 1e-6 * (1.0 + size), "step {step}");
                }
            }
            assert_ne!(start, cpu.parameters);
        }
    }

    /// A rule's update on a device equals the one on the CPU, for each of the three matrices in `in_proj_weight`. The
    /// state has the names of torch's optimizers.
    #[test]
    fn a_rule_updates_matrices_and_adam_the_rest() {
        use crate::config::OptimizerName::{Lion, Muon, Normuon};
        for (name, count) in [(Muon, 1), (Normuon, 2), (Lion, 1)] {
            let config = TrainingConfig { optimizer: name, clip_norm: 1.0, weight_decay: 0.1, ..Default::default() };
            let [mut cpu, mut device] = [(); 2].map(|()| configured("{}", &config));
            let names: Vec<_> = cpu.to_arrays().unwrap().into_keys().collect();
            let count_of = |leaf: &str| names.iter().filter(|name| name.ends_with(leaf)).count();
            assert_eq!(count_of("encoder.layers.0.linear1.weight"), count, "{names:?}");
            assert_eq!(count_of("embedding.weight"), if name == Lion { 1 } else { 2 }, "{names:?}");
            let (start, finite) = (cpu.parameters.copy(), Tensor::from(2.5));
            for step in 1..4 {
                let gradient = gradient(&cpu, step);
                cpu.gradients.copy_(&gradient);
                device.gradients.copy_(&gradient);
                let _ = cpu.step(step as u64, 1e-2, &finite, ALONE).unwrap();
                let _ = no_grad(|| device.step_on_device(step as u64, 1e-2, &finite, ALONE)).unwrap();
                let off = (&cpu.parameters - &device.parameters).abs().max().double_value(&[]);
                assert!(off < 1e-6, "{name:?} {off}");
            }
            assert!((&start - &cpu.parameters).abs().max().double_value(&[]) > 1e-3);
            let arrays = cpu.to_arrays().unwrap();
            device.load(&arrays).unwrap();
            assert_eq!(device.state().unwrap(), cpu.state().unwrap());
            let before = device.state().unwrap().into_iter().map(|(name, t)| (name, t.copy())).collect();
            device.gradients.copy_(&(gradient(&device, 9) * f64::INFINITY));
            let _ = no_grad(|| device.step_on_device(4, 1e-2, &finite, ALONE)).unwrap();
            assert_eq!(device.state().unwrap(), before, "{name:?}");
        }
    }

    #[test]
    fn what_is_not_finite_moves_nothing() {
        for (size, loss) in [(f64::INFINITY, 2.5), (1.0, f64::NAN), (1.0, f64::INFINITY)] {
            for on_device in [false, true] {
                let mut optimizer = optimizer(1.0);
                let step = |optimizer: &mut Optimizer, number: i64, size: f64, loss: f64| {
                    optimizer.gradients.copy_(&(gradient(optimizer, number) * size));
                    let (number, lr, loss) = (number as u64, 1e-2, Tensor::from(loss));
                    let norm = match on_device {
                        true => no_grad(|| optimizer.step_on_device(number, lr, &loss, ALONE)),
                        false => optimizer.step_on_cpu(number, lr, &loss, ALONE),
                    };
                    let state = [&optimizer.parameters, &optimizer.first, &optimizer.second].map(Tensor::copy);
                    (norm.unwrap().double_value(&[]), state)
                };
                let (_, before) = step(&mut optimizer, 1, 1.0, 2.5);
                let (norm, after) = step(&mut optimizer, 2, size, loss);
                assert_eq!(norm.is_finite(), size.is_finite());
                assert_eq!(before, after, "{size} {loss} {on_device}");
                // A device starts this step before the host has read the loss of the step before.
                let (_, later) = step(&mut optimizer, 3, 1.0, 2.5);
                assert_eq!(before == later, on_device, "{size} {loss}");
            }
        }
    }
}
