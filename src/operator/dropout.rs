//! Dropout among an operator's arguments: its rate `p`, a seed, and the site that draws.

use super::call::{Call, Value};
use crate::error::{Error, Result};
use crate::kernel::dropout::Draw;

pub fn check_rate(operator: &str, p: f64) -> Result<()> {
    match (0.0..1.0).contains(&p) {
        true => Ok(()),
        false => Err(Error::invalid(format!("{operator}: dropout p must lie in [0, 1), got {p}"))),
    }
}

pub fn check_dropout(operator: &str, p: &Value, seed: &Value) -> Result<()> {
    check_rate(operator, p.float())?;
    match p.float() == 0.0 || !seed.is_none() {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{operator}: with p > 0 a seed is needed, an int64 tensor (seed, update, micro_batch)"
        ))),
    }
}

/// What a kernel draws.
pub fn draw(call: &Call, [p, seed, site]: [&Value; 3]) -> Draw {
    let draw = Draw { p: p.float(), site: site.int(), ..Draw::NONE };
    if draw.p == 0.0 {
        return Draw::NONE;
    }
    match call.device() {
        Some(_) => Draw { device_seed: seed.view.data.cast(), ..draw },
        // SAFETY: the operators' tables say that a seed is three int64; C++ keeps it, contiguous, for the call.
        None => draw.seeded(unsafe { seed.view.slice() }),
    }
}

/// What a formula draws.
pub fn draw_composed([p, seed, site]: [&Value; 3]) -> Result<Draw> {
    let draw = Draw { p: p.float(), site: site.int(), ..Draw::NONE };
    match seed.tensor() {
        Some(seed) if draw.p > 0.0 => {
            Ok(draw.seeded(&Vec::<i64>::try_from(seed.f_to_device(tch::Device::Cpu)?.f_flatten(0, -1)?)?))
        }
        _ => Ok(Draw::NONE),
    }
}
