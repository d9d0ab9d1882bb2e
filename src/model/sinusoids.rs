//! Tables of sines and cosines by position (docs/spec.md §4.2).

use super::PAD;
use crate::error::Result;
use std::cell::RefCell;
use tch::{Device, Kind, Tensor};

/// How the sines and cosines are arranged in a row of a table.
#[derive(Clone, Copy, Debug)]
pub enum SinusoidRow {
    /// Column 2j has the sine of position·10000^(−2j/d), and column 2j+1 has its cosine.
    Twt,
    /// Sines are in the first half of the columns, cosines in the second. The first token has position padding_idx +
    /// 1.
    Fairseq,
    /// Cosines are in the first half of the columns, sines in the second. The angles are position·θ^(−2j/d).
    Rotary { theta: f64 },
}

/// A table of sinusoids with at least as many rows as any call has asked for.
#[derive(Debug)]
pub struct Sinusoids {
    layout: SinusoidRow,
    width: i64,
    /// All tables made so far; the last one is in use. The earlier, shorter ones stay because a recorded CUDA graph may
    /// still read them.
    tables: RefCell<Vec<Tensor>>,
}

impl Sinusoids {
    /// Returns sinusoids of this width, without a table yet.
    pub fn new(layout: SinusoidRow, width: i64) -> Self {
        Sinusoids { layout, width, tables: RefCell::default() }
    }

    /// Returns a table that has at least the first `rows` positions, (rows or more, width). Tables are reused.
    pub fn table(&self, rows: i64, kind: Kind, device: Device) -> Result<Tensor> {
        let mut tables = self.tables.borrow_mut();
        if !tables.last().is_some_and(|t| t.size()[0] >= rows && t.kind() == kind && t.device() == device) {
            // The numbers of rows are powers of two from 64 on, so that few tables are made.
            tables.push(self.make((rows as usize).next_power_of_two().max(64), kind, device)?);
        }
        Ok(tables.last().expect("a table was made above").shallow_clone())
    }

    /// Computes a table (rows, width) in f64, then casts it to `kind`. Row p belongs to position p, and each pair of a
    /// sine and a cosine has one angle.
    fn make(&self, rows: usize, kind: Kind, device: Device) -> Result<Tensor> {
        let d = self.width as usize;
        let half = d / 2;
        let mut values = vec![0f64; rows * d];
        for (position, row) in values.chunks_exact_mut(d).enumerate() {
            for j in 0..half {
                match self.layout {
                    SinusoidRow::Twt => {
                        let angle = position as f64 * 10000f64.powf(-2.0 * j as f64 / d as f64);
                        (row[2 * j], row[2 * j + 1]) = angle.sin_cos();
                    }
                    SinusoidRow::Fairseq => {
                        // Rows of width 2 have one frequency, for which fairseq's divisor half − 1 would be 0.
                        let step = 10000f64.ln() / (half as f64 - 1.0).max(1.0);
                        let angle = (position as i64 + PAD + 1) as f64 * (-(j as f64) * step).exp();
                        (row[j], row[half + j]) = angle.sin_cos();
                    }
                    SinusoidRow::Rotary { theta } => {
                        let angle = position as f64 * theta.powf(-2.0 * j as f64 / d as f64);
                        (row[half + j], row[j]) = angle.sin_cos();
                    }
                }
            }
        }
        let table = Tensor::f_from_slice(&values)?.f_reshape([rows as i64, d as i64].as_slice())?;
        Ok(table.f_to_kind(kind)?.f_to_device(device)?)
    }
}
