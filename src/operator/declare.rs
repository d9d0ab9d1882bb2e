//! The declaration of an operator: schema, requirements on its tensors, outputs, kernels, formula and derivative.
//! `register` passes these declarations to C++.

pub use super::argument::{
    gradient, leader, number, parameter, parameter_or_matrix, seed, tensor, title, Argument, DtypeRule,
};

use super::call::Call;
use super::engine::{self, Handle};
use crate::cuda::Program;
use crate::error::{Error, Result};
use std::sync::OnceLock;
use tch::Tensor;

/// A function that checks a call, or writes its outputs.
type Run = Box<dyn Fn(&Call) -> Result<()> + Send + Sync>;
/// A function that computes outputs or gradients. `None` stands for an output of zeros, or for an absent gradient.
type Make = Box<dyn Fn(&Call) -> Result<Vec<Option<Tensor>>> + Send + Sync>;

/// The declaration of an operator. A method of nearly the same name sets each optional field, and describes it.
pub struct Operator {
    pub(super) schema: String,
    pub(super) arguments: Vec<Argument>,
    pub(super) outputs: Vec<Argument>,
    pub(super) kernels: Kernels,
    pub(super) plan: Option<Run>,
    kernel: Option<Run>,
    pub(super) formula: Option<Make>,
    pub(super) backward: Option<Box<Operator>>,
    /// The forward operator of a backward operator; it is set when the forward operator is registered.
    pub(super) forward: OnceLock<&'static Operator>,
    pub(super) double_backward: Option<Make>,
    pub(super) has_own_gradient: bool,
    pub(super) is_looped: bool,
    pub(super) handle: Option<&'static Handle>,
    pub(super) program: Option<&'static Program>,
}

/// The devices for which an operator has kernels.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kernels {
    Everywhere,
    Cpu,
    Gpu,
    Nowhere,
    /// No kernels, only a formula, whose operators PyTorch differentiates and traces.
    Composition,
}

impl Operator {
    /// Declares an operator by its schema in torch's syntax, the requirements on its tensors in the schema's order,
    /// and its outputs.
    pub fn new(
        schema: impl Into<String>,
        arguments: impl Into<Vec<Argument>>,
        outputs: impl Into<Vec<Argument>>,
    ) -> Self {
        Operator {
            schema: schema.into(),
            arguments: arguments.into(),
            outputs: outputs.into(),
            kernels: Kernels::Everywhere,
            plan: None,
            kernel: None,
            formula: None,
            backward: None,
            forward: OnceLock::new(),
            double_backward: None,
            has_own_gradient: false,
            is_looped: false,
            handle: None,
            program: None,
        }
    }

    /// Adds checks that the requirements on arguments cannot express. `plan` may also choose outputs that are not
    /// computed ([`Call::leave_out`]).
    pub fn plan(self, plan: impl Fn(&Call) -> Result<()> + Send + Sync + 'static) -> Self {
        Operator { plan: Some(Box::new(plan)), ..self }
    }

    /// Sets the kernel, which writes the call's outputs on the CPU and on GPUs.
    pub fn kernel(self, kernel: impl Fn(&Call) -> Result<()> + Send + Sync + 'static) -> Self {
        self.kernel_on(Kernels::Everywhere, kernel)
    }

    /// Sets the kernel for the devices `kernels` alone.
    pub fn kernel_on(self, kernels: Kernels, kernel: impl Fn(&Call) -> Result<()> + Send + Sync + 'static) -> Self {
        Operator { kernels, kernel: Some(Box::new(kernel)), ..self }
    }

    /// Sets the formula in tch. It runs if there is no kernel, under torch.func, and for second derivatives.
    pub fn formula(self, formula: impl Fn(&Call) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static) -> Self {
        Operator { formula: Some(Box::new(formula)), ..self }
    }

    /// Makes the formula compute the operator on every device.
    pub fn formula_alone(self) -> Self {
        Operator { kernels: Kernels::Nowhere, ..self }
    }

    /// Makes the operator a composition: it has only a formula, whose operations PyTorch differentiates and traces.
    pub fn composition(self) -> Self {
        Operator { kernels: Kernels::Composition, ..self }
    }

    /// Sets the backward operator. The names of its arguments determine what an autograd node keeps: `dNAME` is the
    /// gradient of output NAME, and any other name is an output or argument of this operator. Its output `dNAME` is
    /// the gradient of argument NAME.
    pub fn backward(self, backward: Operator) -> Self {
        Operator { backward: Some(Box::new(backward)), ..self }
    }

    /// Sets a function that returns the arguments' gradients, by index, in a form that can be differentiated again.
    /// Without it the formula runs again and is differentiated.
    pub fn double_backward(
        self,
        double_backward: impl Fn(&Call) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> Self {
        Operator { double_backward: Some(Box::new(double_backward)), ..self }
    }

    /// Uses the backward operator for gradients even if there is no kernel, except under torch.func transforms.
    pub fn with_own_gradient(self) -> Self {
        Operator { has_own_gradient: true, ..self }
    }

    /// Makes vmap call the operator once per example, instead of batching its formula.
    pub fn looped(self) -> Self {
        Operator { is_looped: true, ..self }
    }

    /// Sets the operator's CUDA program. If several operators share a program, only one of them may set it.
    pub fn program(self, program: &'static Program) -> Self {
        Operator { program: Some(program), ..self }
    }

    /// Makes `handle` count the operator's calls.
    pub fn counted(self, handle: &'static Handle) -> Self {
        Operator { handle: Some(handle), ..self }
    }

    /// Returns the operator's name, with which the schema begins.
    pub fn name(&self) -> &str {
        self.schema.split('(').next().unwrap_or_default()
    }

    /// Returns the error for a call that needs a kernel or a formula which the operator lacks.
    fn missing(&self) -> Error {
        Error::Torch(format!("{} has no kernel here", self.name()))
    }

    /// Runs the kernel, which writes the call's outputs.
    pub(super) fn run_kernel(&self, call: &Call) -> Result<()> {
        self.kernel.as_ref().ok_or_else(|| self.missing())?(call)
    }

    /// Counts the call, and returns the outputs that the formula computes.
    pub(super) fn run_formula(&self, call: &Call) -> Result<Vec<Option<Tensor>>> {
        self.handle.inspect(|h| h.count_composed());
        self.formula_of(call)
    }

    /// Returns the outputs that the formula computes, but does not count the call.
    pub(super) fn formula_of(&self, call: &Call) -> Result<Vec<Option<Tensor>>> {
        self.formula.as_ref().ok_or_else(|| self.missing())?(call)
    }

    /// Returns the gradients of the arguments, by index, in a form that can be differentiated again.
    pub(super) fn gradients_again(&self, call: &Call) -> Result<Vec<Option<Tensor>>> {
        match &self.double_backward {
            Some(double_backward) => double_backward(call),
            None => engine::gradients_again(&call.wanted(), &call.given(), |inputs| {
                call.with(inputs, |call| self.run_formula(call))
            }),
        }
    }
}
