//! Adam's update of flat buffers as an operator; on a GPU, values that change from step to step are read from the
//! device.

use super::call::{values, Call, Value};
use super::declare::{tensor, DtypeRule, Kernels, Operator};
use super::engine::Handle;
use crate::error::{Error, Result};
use crate::kernel::adam::call::{composed, launch, Buffers, Coefficients};
use crate::kernel::adam::{Rounding, PROGRAM};
use tch::Tensor;

static HANDLE: Handle = Handle::new("adam_");

/// The tensors of an update.
pub type AdamBuffers<'a> = Buffers<&'a Tensor>;

/// Runs one update of Adam through the dispatcher, on any device. It changes the parameters and both moments in place.
pub fn adam_in_place(buffers: &AdamBuffers, settings: &Coefficients) -> Result<()> {
    let Buffers { parameters, first, second, gradients, grad_scale, step_size, keep } = *buffers;
    let Coefficients { beta1, beta2, eps, rounding } = *settings;
    // `place` is the index of the first element among all elements of the run; like the other two it decides the random
    // bits of stochastic rounding.
    let [seed, update, place] = [rounding.seed as i64, i64::from(rounding.update), rounding.first as i64];
    let arguments = values![
        parameters, first, second, gradients, grad_scale, step_size, keep, beta1, beta2, eps, seed, update, place
    ];
    let [] = HANDLE.call(&arguments)?;
    Ok(())
}

/// Declares the update, which has kernels on GPUs and a formula elsewhere. `first` and `second` are the moments; each
/// parameter is multiplied by `keep` (its weight decay) before the step is subtracted.
pub(super) fn operator() -> Operator {
    // The letter n stands for the length of a buffer.
    let buffer = |name| tensor(name, "=n", DtypeRule::Float32).written();
    let scalar = |name| tensor(name, "=1", DtypeRule::Float32);
    Operator::new(
        "adam_(Tensor(a!) parameters, Tensor(b!) first, Tensor(c!) second, Tensor(d!) gradients, Tensor grad_scale, \
         Tensor step_size, Tensor keep, float beta1, float beta2, float eps, \
         int random_seed=0, int update=0, int place=0) -> ()",
        [
            buffer("parameters").leading(),
            tensor("first", "=n", DtypeRule::Moment).written(),
            tensor("second", "=n", DtypeRule::Moment).written(),
            buffer("gradients"),
            scalar("grad_scale"),
            scalar("step_size"),
            scalar("keep"),
        ],
        [],
    )
    .plan(|call| {
        let [.., update, place] = call.arguments::<13>();
        for (name, number) in [("update", update.int()), ("place", place.int())] {
            if number < 0 {
                return Err(Error::invalid(format!("adam_: {name} must be at least 0, got {number}")));
            }
        }
        Ok(())
    })
    .kernel_on(Kernels::Gpu, |call| {
        let device = call.device().expect("the kernels are a GPU's");
        let (buffers, settings) = read(call, |value| value.view);
        launch(device, &buffers, &settings)
    })
    .formula(|call| {
        let (buffers, settings) = read(call, Value::required);
        composed(&buffers, &settings)?;
        Ok(vec![])
    })
    .program(&PROGRAM)
    .counted(&HANDLE)
}

/// Reads a call's arguments. `convert` turns each of the first seven, which are tensors, into the form that the caller
/// needs: a tensor for the formula, a view for the kernel.
fn read<T>(call: &Call, convert: impl Fn(&Value) -> T) -> (Buffers<T>, Coefficients) {
    let [tensors @ .., beta1, beta2, eps, seed, update, place] = call.arguments::<13>();
    let [parameters, first, second, gradients, grad_scale, step_size, keep] = tensors.each_ref().map(convert);
    let buffers = Buffers { parameters, first, second, gradients, grad_scale, step_size, keep };
    let [beta1, beta2, eps] = [beta1, beta2, eps].map(Value::float);
    let rounding = Rounding { seed: seed.int() as u64, update: update.int() as u32, first: place.int() as usize };
    (buffers, Coefficients { beta1, beta2, eps, rounding })
}
