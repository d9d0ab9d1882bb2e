//! Dropout of an operator call: the settings from which kernels draw the mask, and the mask as a tensor for formulas.

use crate::cpu::memory;
use crate::cpu::philox::{self, Stream};
use crate::device_struct;
use crate::error::Result;
use tch::Tensor;

/// The settings of dropout: its rate, and the numbers that select its random stream.
#[derive(Clone, Copy)]
pub struct Draw {
    /// The rate, the probability that an element is dropped.
    pub p: f64,
    pub seed: i64,
    /// The number of the training update, and of the micro-batch in it.
    pub update: i64,
    pub micro_batch: i64,
    /// The number of the dropout layer in the model.
    pub site: i64,
    /// A device pointer to (seed, update, micro-batch), which a GPU's kernel reads instead of the fields above.
    pub device_seed: *const i64,
}

impl Draw {
    /// The settings that drop nothing.
    pub const NONE: Draw = Draw { p: 0.0, seed: 0, update: 0, micro_batch: 0, site: 0, device_seed: std::ptr::null() };

    /// Returns the settings with the three numbers of `seed`: the seed, the update and the micro-batch.
    pub fn seeded(self, seed: &[i64]) -> Draw {
        Draw { seed: seed[0], update: seed[1], micro_batch: seed[2], ..self }
    }

    /// Converts the settings for the CPU's kernels; returns `None` if nothing is dropped.
    pub fn dropout(&self) -> Option<philox::Dropout> {
        let stream = Stream {
            seed: self.seed as u64,
            update: self.update as u32,
            micro_batch: self.micro_batch as u16,
            site: self.site as u16,
        };
        philox::Dropout::new(self.p, stream)
    }
}

device_struct! {
    /// The struct `Dropout` of philox.cuh.
    pub struct OnDevice = "Dropout" {
        seed: *const i64,
        site: u32,
        threshold: u32,
        scale: f32,
    }
}

impl OnDevice {
    /// Converts the settings for a GPU's kernels.
    pub fn of(draw: &Draw) -> Self {
        // Only the threshold and the scale are needed here: the kernel reads the stream's numbers on the device.
        let dropout = philox::Dropout::new(draw.p, Stream::default());
        let (threshold, scale) = dropout.map_or((0, 1.0), |dropout| (dropout.threshold, dropout.scale));
        OnDevice { seed: draw.device_seed, site: draw.site as u32, threshold: threshold.into(), scale: scale as f32 }
    }
}

/// Returns dropout's factors, 0 or 1/(1 − p), for a matrix (rows, cols), as a float64 tensor on the CPU.
pub fn mask(draw: &Draw, rows: usize, cols: usize) -> Result<Tensor> {
    let mut factors = memory::filled(1.0, rows.saturating_mul(cols));
    // Without elements there is nothing to draw, and rows of 0 columns cannot be iterated.
    if let (Some(dropout), true) = (draw.dropout(), rows * cols > 0) {
        let mut random = philox::scratch(rows, cols);
        philox::fill(&dropout.stream, 0, rows, cols, &mut random);
        for (factors, random) in factors.chunks_exact_mut(cols).zip(random.chunks_exact(philox::padded(cols))) {
            for (factor, random) in factors.iter_mut().zip(random) {
                *factor = if *random >= dropout.threshold { dropout.scale } else { 0.0 };
            }
        }
    }
    Ok(Tensor::f_from_slice(&factors)?.f_reshape([rows as i64, cols as i64].as_slice())?)
}
