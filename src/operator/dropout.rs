//! Dropout as arguments of an operator: the rate `p`, a seed, and the number of the dropout site.

use super::call::{values, Call, Value};
use super::declare::{number, tensor, DtypeRule, Operator};
use super::engine::Handle;
use crate::error::{Error, Result};
use crate::host::host;
use crate::kernel::dropout::{self, Draw};
use tch::Tensor;

static MASK: Handle = Handle::new("dropout_mask");

/// Errors unless the rate p lies in [0, 1); `operator` is the name in the message.
pub fn check_rate(operator: &str, p: f64) -> Result<()> {
    match (0.0..1.0).contains(&p) {
        true => Ok(()),
        false => Err(Error::invalid(format!("{operator}: dropout p must lie in [0, 1), got {p}"))),
    }
}

/// Errors if the rate p is not in [0, 1), or if it is above 0 and there is no seed.
pub fn check_dropout(operator: &str, p: &Value, seed: &Value) -> Result<()> {
    check_rate(operator, p.float())?;
    match p.float() == 0.0 || !seed.is_none() {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{operator}: with p > 0 a seed is needed, an int64 tensor (seed, update, micro_batch)"
        ))),
    }
}

/// Returns the dropout settings for a kernel, from the call's arguments p, seed and site. A GPU kernel reads the seed
/// on the device.
pub fn draw(call: &Call, [p, seed, site]: [&Value; 3]) -> Draw {
    let draw = Draw { p: p.float(), site: site.int(), ..Draw::NONE };
    if draw.p == 0.0 {
        return Draw::NONE;
    }
    match call.device() {
        Some(_) => Draw { device_seed: seed.view.data.cast(), ..draw },
        // SAFETY: the operators' tables guarantee three int64; C++ keeps them, contiguous, for the call.
        None => draw.seeded(unsafe { seed.view.slice() }),
    }
}

/// Returns the dropout factors with which a formula multiplies t, 0 or 1/(1 − p), in t's shape; `None` without
/// dropout. `draw` is (p, seed, site).
pub fn drawn_for(t: &Tensor, draw: [&Value; 3]) -> Result<Option<Tensor>> {
    let size = t.size();
    let cols = size.last().copied().unwrap_or(1);
    let rows = size.iter().product::<i64>() / cols.max(1);
    let mask = drawn(draw, rows, cols)?;
    Ok(mask.map(|mask| mask.f_to_device(t.device())?.f_to_kind(t.kind())?.f_reshape(size.as_slice())).transpose()?)
}

/// Returns dropout factors (rows, cols), 0 or 1/(1 − p), as float64 on the seed's device; `None` without dropout.
///
/// The call goes through the dispatcher, because only it can read a seed that torch.func wraps. If vmap's examples
/// have separate seeds, the dispatcher calls the operator once per example.
pub fn drawn([p, seed, site]: [&Value; 3], rows: i64, cols: i64) -> Result<Option<Tensor>> {
    match seed.tensor() {
        Some(seed) if p.float() > 0.0 => dropout_mask(&seed, rows, cols, p.float(), site.int()).map(Some),
        _ => Ok(None),
    }
}

/// Returns dropout factors (rows, cols), 0 or 1/(1 − p), as float64 on the seed's device. `seed` is int64 (seed,
/// update, micro-batch); `site` numbers the places of dropout in a model.
pub fn dropout_mask(seed: &Tensor, rows: i64, cols: i64, p: f64, site: i64) -> Result<Tensor> {
    let [mask] = MASK.call(&values![seed, rows, cols, p, site])?;
    Ok(mask)
}

/// Declares the operator that returns the dropout factors; kernels draw the same factors.
pub(super) fn operator() -> Operator {
    Operator::new(
        "dropout_mask(Tensor seed, int rows, int cols, float p, int site) -> Tensor",
        [tensor("seed", "=3", DtypeRule::Int64).leading(), number("rows", "r"), number("cols", "c")],
        [tensor("mask", "rc", DtypeRule::Float64)],
    )
    .plan(|call| {
        let [_, rows, cols, p, _] = call.arguments();
        check_rate("dropout_mask", p.float())?;
        match rows.int() >= 0 && cols.int() >= 0 {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "dropout_mask: rows and cols must be at least 0, got {} and {}",
                rows.int(),
                cols.int()
            ))),
        }
    })
    .formula(|call| {
        let [seed, rows, cols, p, site] = call.arguments();
        let (seed, draw) = (seed.required(), Draw { p: p.float(), site: site.int(), ..Draw::NONE });
        let draw = draw.seeded(&host("dropout_mask: seed", &seed)?);
        let mask = dropout::mask(&draw, rows.int() as usize, cols.int() as usize)?;
        Ok(vec![Some(mask.f_to_device(seed.device())?)])
    })
    .formula_alone()
    .looped() // under vmap, each example may have its own seed
}
