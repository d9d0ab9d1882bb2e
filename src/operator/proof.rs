//! The proof of a kernel variant, at its first use on a device: its results are compared with the formula's
//! (docs/cuda.md).
//!
//! A proof calls the operator with test tensors ([`cases`]). They have the types, widths and alignment of the actual
//! call's tensors, and optional tensors that the call lacks are absent, so that the same variants run. The formula
//! computes in f64 if the call is in f32.

mod cases;
mod difference;
mod maker;

use super::argument::{Argument, Reading, WRITTEN};
use super::call::{replaced, Call};
use super::declare::Operator;
use super::engine;
use super::ffi::caught;
use super::register::Declared;
use crate::cuda::verdict::{self, Verdict};
use crate::cuda::Device;
use crate::error::Result;
use cases::{arguments, Case};
use difference::difference;
use maker::{aligned_as, Tensors};
use std::sync::{Mutex, PoisonError};
use tch::{Kind, Tensor};

/// True if the operator has a formula to compare with, and the call at least one number to compare.
pub fn is_possible(operator: &Operator, call: &Call) -> Result<bool> {
    let (_, leader_place) = Declared::new(operator)?.leader()?;
    Ok(operator.formula.is_some() && call.all()[leader_place].required().numel() > 0)
}

/// Compares the kernel variants that a call needs with the formula, and records the verdict. Returns `None` if they are
/// right, otherwise a description of the error.
pub fn prove(operator: &Operator, call: &Call, device: Device) -> Option<String> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let (compared, launched) = verdict::launched(|| caught(|| tch::no_grad(|| compare(operator, call, device))));
    let unknown = verdict::unknown(&launched); // the variants that this proof judges
    let (verdict, fault) = match compared {
        Ok(None) => (Verdict::Right, None),
        Ok(Some(difference)) => (Verdict::Wrong, Some(format!("disagrees with its formula ({difference})"))),
        Err(e) => (Verdict::Off, Some(format!("could not be compared with its formula ({e})"))),
    };
    verdict::judge(&unknown, verdict);
    let names: Vec<String> = unknown.iter().map(|variant| variant.name()).collect();
    fault.map(|fault| format!("{} {fault}: {}", operator.name(), names.join("; ")))
}

/// Runs the kernel and the formula on the test tensors of every case. Returns how the results first differ, or `None`
/// if they agree; errors if they cannot be compared.
fn compare(operator: &Operator, call: &Call, device: Device) -> Result<Option<String>> {
    for case in Case::ALL {
        let Some((given, arguments)) = arguments(operator, call, device, case)? else { continue };
        // The kernel and the formula may write to their arguments, so each has its own copies.
        // `given` are the values of the case, in which these tensors replace the tensor arguments.
        let (kernel, formula) = (copies(&arguments)?, wide(&copies(&arguments)?)?);
        let by_kernel = engine::call_by_name(operator.name(), &replaced(&given, &kernel), operator.outputs.len())?;
        let by_formula = call.with_values(&replaced(&given, &formula), |call| operator.formula_of(call))?;
        // Compare the outputs, and the arguments that are written in place: (name, kernel's result, formula's result).
        let outputs = operator.outputs.iter().zip(&by_kernel).zip(&by_formula);
        let outputs = outputs.filter_map(|((output, found), expected)| Some((output.name, found, expected.as_ref()?)));
        let declared = Declared::new(operator)?;
        let written = declared.table.iter().filter(|(argument, _)| is_written(argument));
        let written = written
            .filter_map(|(argument, place)| Some((argument.name, kernel[*place].as_ref()?, formula[*place].as_ref()?)));
        for (name, found, expected) in outputs.chain(written).filter(|(_, found, _)| found.numel() > 0) {
            if let Some(description) = difference(found, expected)? {
                return Ok(Some(format!("{name} {description}")));
            }
        }
    }
    Ok(None)
}

/// True if the operator changes the argument in place.
fn is_written(argument: &Argument) -> bool {
    argument.is & WRITTEN != 0 || matches!(argument.reading, Reading::State)
}

/// Copies the tensors. Each copy's address has the alignment of the original's.
fn copies(tensors: &[Option<Tensor>]) -> Result<Tensors> {
    tensors.iter().map(|t| t.as_ref().map(|t| aligned_as(t, t.kind(), t.data_ptr().addr())).transpose()).collect()
}

/// Returns the tensors, with f32 converted to f64. If one has 16 bits, all keep their types: then formulas round where
/// kernels round.
fn wide(tensors: &[Option<Tensor>]) -> Result<Tensors> {
    let has_16_bits = tensors.iter().flatten().any(|t| matches!(t.kind(), Kind::BFloat16 | Kind::Half));
    let widened = |t: &Tensor| match t.kind() {
        Kind::Float if !has_16_bits => t.f_to_kind(Kind::Double),
        _ => t.f_view_as(t),
    };
    tensors.iter().map(|t| Ok(t.as_ref().map(widened).transpose()?)).collect()
}
