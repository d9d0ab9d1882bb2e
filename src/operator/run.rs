//! The stages of a call that C++ asks for: plan, kernel, formula, gradients. A GPU's kernels run only after their
//! proof.

use super::call::Call;
use super::declare::Operator;
use super::ffi::{caught, into_raw, keep, status, status_of_plan};
use super::proof;
use crate::cpu::pages;
use crate::cuda::verdict::{self, Refusal, Verdict};
use crate::cuda::{self, Device};
use crate::error::{Error, Result};
use crate::host::CTensor;
use std::ffi::{c_int, c_void};

/// The outcome of a call's kernel stage.
enum Ran {
    Kernel,
    /// The kernels are wrong on this device, so the formula must run. The text is a warning for users; only the first
    /// refusal has one.
    Refused(Option<String>),
}

// With these results `nfrs_run` tells C++ that the kernels are wrong on this device. REFUSED_NOW also tells that the
// text of a warning is stored.
const REFUSED: c_int = 4;
const REFUSED_NOW: c_int = 5;

// The stages of a call, as C++ numbers them in declared.h. A fourth one, GRADIENT, is the default case of `nfrs_run`.
const PLAN: c_int = 0;
const KERNEL: c_int = 1;
const FORMULA: c_int = 2;

/// Runs a stage of a call for C++. `made` has room for the results of a formula or gradient stage. Returns a code of
/// [`status`] or [`status_of_plan`], or one of the codes above.
#[no_mangle]
unsafe extern "C" fn nfrs_run(operator: *const c_void, stage: c_int, call: &Call, made: *mut *mut CTensor) -> c_int {
    // SAFETY: C++ passes back the pointer to the operator that `register` gave it.
    let operator = unsafe { &*operator.cast::<Operator>() };
    match stage {
        PLAN => operator.plan.as_ref().map_or(0, |plan| status_of_plan(|| plan(call))),
        KERNEL => {
            operator.handle.inspect(|h| h.count_kernel());
            let Some(device) = call.device() else {
                // The kernel is about to write the outputs, and large memory pages are faster to clear.
                for output in call.all_outputs() {
                    pages::ask_for_large(output.view.bytes());
                }
                return status(|| operator.run_kernel(call));
            };
            match caught(|| run_proven(operator, call, device)) {
                Ok(Ran::Kernel) => 0,
                Ok(Ran::Refused(None)) => REFUSED,
                Ok(Ran::Refused(Some(warning))) => {
                    keep(Error::Torch(warning));
                    REFUSED_NOW
                }
                Err(e) => status(|| Err(e)),
            }
        }
        _ => status(|| {
            let results =
                if stage == FORMULA { operator.run_formula(call)? } else { operator.gradients_again(call)? };
            for (i, t) in results.into_iter().enumerate() {
                // SAFETY: `made` has room for the stage's results.
                unsafe { *made.add(i) = t.map_or(std::ptr::null_mut(), into_raw) };
            }
            Ok(())
        }),
    }
}

/// Runs kernels that have been proven on this device; proves those that are still unknown first.
fn run_proven(operator: &Operator, call: &Call, device: Device) -> Result<Ran> {
    match verdict::admitted(|| operator.run_kernel(call)) {
        Ok(done) => return done.map(|()| Ran::Kernel),
        Err(Refusal::Wrong) => return Ok(Ran::Refused(None)),
        Err(Refusal::Unknown) => (),
    }
    if !proof::is_possible(operator, call)? || cuda::is_capturing(device)? {
        // If there is nothing to compare with, or if a CUDA graph is being captured, the kernels run without a proof.
        // `launched` allows variants without a verdict.
        return verdict::launched(|| operator.run_kernel(call)).0.map(|()| Ran::Kernel);
    }
    if let Some(warning) = proof::prove(operator, call, device) {
        return Ok(Ran::Refused(Some(warning)));
    }
    let (done, launched) = verdict::launched(|| operator.run_kernel(call));
    // A variant still without a verdict was launched now, but not by the proof: its result may be wrong.
    match verdict::unknown(&launched)[..] {
        [] => done.map(|()| Ran::Kernel),
        [missed, ..] => {
            verdict::judge(&launched, Verdict::Off);
            Ok(Ran::Refused(Some(format!("{}: its proof did not run {}", operator.name(), missed.name()))))
        }
    }
}
