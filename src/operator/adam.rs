//! Adam's update of flat f32 buffers on a GPU, with everything that changes from step to step read on the device.

use super::call::{values, Call, Value};
use super::declare::{tensor, DtypeRule, Kernels, Operator};
use super::engine::Handle;
use crate::error::Result;
use crate::kernel::adam::call::{composed, launch, Buffers, Decays};
use crate::kernel::adam::PROGRAM;
use tch::Tensor;

static HANDLE: Handle = Handle::new("adam_");

/// What an update reads and writes.
pub type AdamBuffers<'a> = Buffers<&'a Tensor>;

/// One update through the dispatcher, on any device.
pub fn adam_in_place(buffers: &AdamBuffers, beta1: f64, beta2: f64, eps: f64) -> Result<()> {
    let Buffers { parameters, first, second, gradients, grad_scale, step_size, keep } = *buffers;
    let arguments = values![parameters, first, second, gradients, grad_scale, step_size, keep, beta1, beta2, eps];
    let [] = HANDLE.call(&arguments)?;
    Ok(())
}

pub(super) fn operator() -> Operator {
    // n: numbers of a buffer
    let buffer = |name| tensor(name, "=n", DtypeRule::Float32).written();
    let one = |name| tensor(name, "=1", DtypeRule::Float32);
    Operator::new(
        "adam_(Tensor(a!) parameters, Tensor(b!) first, Tensor(c!) second, Tensor(d!) gradients, Tensor grad_scale, \
         Tensor step_size, Tensor keep, float beta1, float beta2, float eps) -> ()",
        [
            buffer("parameters").leading(),
            buffer("first"),
            buffer("second"),
            buffer("gradients"),
            one("grad_scale"),
            one("step_size"),
            one("keep"),
        ],
        [],
    )
    .kernel_on(Kernels::Gpu, |call| {
        let device = call.device().expect("the kernels are a GPU's");
        let (buffers, decays) = read(call, |v| v.view);
        launch(device, &buffers, decays)
    })
    .formula(|call| {
        let (buffers, decays) = read(call, Value::required);
        composed(&buffers, decays)?;
        Ok(vec![])
    })
    .program(&PROGRAM)
    .counted(&HANDLE)
}

fn read<T>(call: &Call, of: impl Fn(&Value) -> T) -> (Buffers<T>, Decays) {
    let [tensors @ .., beta1, beta2, eps] = call.arguments::<10>();
    let [parameters, first, second, gradients, grad_scale, step_size, keep] = tensors.each_ref().map(of);
    let buffers = Buffers { parameters, first, second, gradients, grad_scale, step_size, keep };
    (buffers, [beta1, beta2, eps].map(Value::float))
}
