//! The dry run: counts a run's parameters and estimates its memory.
//!
//! Memory is measured, because no formula covers what each norm, scheme and activation keeps for its backward pass.
//! Smaller models with only a few of the layers make a forward and backward pass over a few sentences of the run's
//! largest batch. The result is extrapolated: memory is linear in rows, and quadratic in layers, because a layer may
//! keep something of every earlier layer.

use super::start::objective;
use super::{device, prepare, PreparedData};
use crate::config::{DataConfig, Precision, TrainingConfig, TransformerConfig};
use crate::cpu::pages;
use crate::data::{collate, plan, Interrupt};
use crate::error::Result;
use crate::model::Transformer;
use crate::train::peak_of_update;
use tch::{Device, Kind};

/// The size in bytes of one f32 parameter together with its gradient.
const TRAINED: usize = 8;
/// The numbers of layers to measure, for a stack that has more. Three of them determine a quadratic function.
const LAYERS: [i64; 3] = [2, 4, 6];
/// The numbers of rows of the two batches to measure, for a batch that has more. Two of them determine a line.
const ROWS: [usize; 2] = [2048, 4096];

/// Returns a run's number of parameters, its memory in bytes and the size of its data, as a JSON object.
pub fn dry_run(
    model: &TransformerConfig,
    training: &TrainingConfig,
    data: &DataConfig,
    check_interrupt: Interrupt,
) -> Result<serde_json::Value> {
    let prepared = prepare(model, training, data, check_interrupt)?;
    // On a GPU the host's memory does not count. A device that does not exist here is another machine's GPU.
    let on_cpu = device(&training.device).is_ok_and(|device| device == Device::Cpu);
    let resident = if on_cpu { resident_bytes() } else { 0 };
    let parameters = Transformer::new(&prepared.model, 0, Device::Cpu, Kind::Float)?.parameters.numel();
    let activations = Trial { prepared: &prepared, training }.activations(check_interrupt)?;
    // The bytes per parameter of three tensors: the bf16 copy, the initial model, and Adam's two moments.
    let bf16_copy = if training.precision == Precision::Bf16 { 2 } else { 0 };
    let initial = if training.log_statistics > 0 { 4 } else { 0 };
    let moments = if training.moments == Precision::Bf16 { 4 } else { 8 };
    let permanent = parameters.saturating_mul(TRAINED + moments + bf16_copy + initial);
    pages::give_back_memory();
    Ok(serde_json::json!({
        "parameters": parameters,
        "parameter_bytes": parameters * 4,
        "activation_bytes": activations,
        "training_bytes": resident.saturating_add(permanent).saturating_add(activations),
        "vocabulary": prepared.vocabulary.len(),
        "sentences": prepared.train.len(),
        "skipped": prepared.skipped,
    }))
}

/// A run whose memory is measured with smaller models and batches.
struct Trial<'a> {
    prepared: &'a PreparedData,
    training: &'a TrainingConfig,
}

impl Trial<'_> {
    /// Returns the bytes that a forward and backward pass over the largest batch needs.
    fn activations(&self, check_interrupt: Interrupt) -> Result<usize> {
        let (model, batch) = (&self.prepared.model, self.largest_batch());
        let encoders =
            if model.has_encoder() { measured_layers(model.encoder_layers) } else { vec![model.encoder_layers] };
        let decoders = measured_layers(model.decoder_layers);
        let mut bytes_with = |encoder_layers: i64, decoder_layers: i64| -> Result<f64> {
            check_interrupt()?;
            let smaller = TransformerConfig { encoder_layers, decoder_layers, ..model.clone() };
            self.of_batch(&smaller, &batch)
        };
        // Each stack grows alone, while the other one has its smallest measured number of layers.
        let first = bytes_with(encoders[0], decoders[0])?;
        let (mut by_encoder, mut by_decoder) = (vec![first], vec![first]);
        for &layers in &encoders[1..] {
            by_encoder.push(bytes_with(layers, decoders[0])?);
        }
        for &layers in &decoders[1..] {
            by_decoder.push(bytes_with(encoders[0], layers)?);
        }
        // Estimates the bytes for `all_layers` layers from the `bytes` measured with each of the numbers in `layers`.
        let extrapolated = |layers: &[i64], bytes: &[f64], all_layers: i64| {
            let points: Vec<_> = layers.iter().map(|&n| n as f64).zip(bytes.iter().copied()).collect();
            through(&points, all_layers as f64)
        };
        let by_encoder = extrapolated(&encoders, &by_encoder, model.encoder_layers);
        let by_decoder = extrapolated(&decoders, &by_decoder, model.decoder_layers);
        // Each of the two estimates includes the first measurement, which must count only once.
        Ok((by_encoder + by_decoder - first).max(0.0) as usize)
    }

    /// Returns the bytes that a model's pass over a batch, a list of sentence indices, needs. A large batch is
    /// extrapolated linearly from two parts of it.
    fn of_batch(&self, model: &TransformerConfig, batch: &[usize]) -> Result<f64> {
        let lengths = self.prepared.train.lengths();
        // A sentence has a row for each source token and each target token.
        let rows = |sentences: &[usize]| sentences.iter().map(|&s| lengths[s].0 + lengths[s].1).sum::<usize>();
        let peak = |sentences: &[usize]| -> Result<f64> {
            let objective = objective(self.prepared, self.training, Device::Cpu)?;
            Ok(peak_of_update(model, self.training, objective, &collate(&self.prepared.train, sentences))? as f64)
        };
        // For each number in `ROWS`, how many of the batch's first sentences have at least as many rows.
        let sentences_of_parts = ROWS.map(|least| (1..batch.len()).find(|&n| rows(&batch[..n]) >= least));
        match sentences_of_parts {
            [Some(small), Some(large)] if small < large => {
                let points = [small, large].map(|n| (rows(&batch[..n]) as f64, &batch[..n]));
                let points = points.into_iter().map(|(rows, sentences)| Ok((rows, peak(sentences)?)));
                Ok(through(&points.collect::<Result<Vec<_>>>()?, rows(batch) as f64))
            }
            _ => peak(batch),
        }
    }

    /// Returns the indices of the sentences of the batch that has the most rows.
    fn largest_batch(&self) -> Vec<usize> {
        let lengths = self.prepared.train.lengths();
        let batches = plan(&lengths, self.training.max_tokens as usize, self.training.seed, 0);
        let rows = |batch: &Vec<usize>| batch.iter().map(|&s| lengths[s].0 + lengths[s].1).sum::<usize>();
        batches.into_iter().max_by_key(rows).unwrap_or_default()
    }
}

/// Returns the numbers of layers to measure for a stack that has `layers`.
fn measured_layers(layers: i64) -> Vec<i64> {
    if layers <= LAYERS[2] {
        vec![layers]
    } else {
        LAYERS.to_vec()
    }
}

/// Evaluates at x the polynomial through the points (xᵢ, yᵢ), by Lagrange's formula Σᵢ yᵢ Πⱼ (x − xⱼ)/(xᵢ − xⱼ), where
/// j ≠ i.
fn through(points: &[(f64, f64)], x: f64) -> f64 {
    let term = |&(x_i, y_i): &(f64, f64)| {
        let others = points.iter().map(|(x_j, _)| x_j).filter(|x_j| **x_j != x_i);
        y_i * others.map(|x_j| (x - x_j) / (x_i - x_j)).product::<f64>()
    };
    points.iter().map(term).sum()
}

/// Returns the resident memory of the process in bytes. At this point it consists of libraries and data.
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    // The second number of the file counts resident pages.
    let pages = pages.and_then(|text| text.split(' ').nth(1)?.parse::<usize>().ok()).unwrap_or(0);
    // SAFETY: the call only reads a constant of the system.
    pages * unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_polynomial_goes_through_its_points() {
        let square = |x: f64| 3.0 * x * x - 2.0 * x + 5.0;
        let points = LAYERS.map(|x| (x as f64, square(x as f64)));
        assert!((through(&points, 48.0) - square(48.0)).abs() < 1e-6);
        assert_eq!(through(&points[..1], 9.0), square(2.0));
    }
}
