//! How an operator is declared, once: schema, what its tensors must be, outputs, kernels, formula and derivative.
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

type Run = Box<dyn Fn(&Call) -> Result<()> + Send + Sync>;
/// Outputs, or gradients; None: zeros, or no gradient.
type Make = Box<dyn Fn(&Call) -> Result<Vec<Option<Tensor>>> + Send + Sync>;

/// An operator.
pub struct Operator {
    pub(super) schema: String,
    pub(super) arguments: Vec<Argument>,
    pub(super) outputs: Vec<Argument>,
    pub(super) kernels: Kernels,
    pub(super) plan: Option<Run>,
    kernel: Option<Run>,
    pub(super) formula: Option<Make>,
    pub(super) backward: Option<Box<Operator>>,
    /// Of a backward operator: whose it is, once it is registered.
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
    /// It is a composition: PyTorch differentiates and traces what its formula calls.
    Composition,
}

impl Operator {
    /// `schema` as torch reads it; what each of its tensors must be, in the schema's order; and its outputs.
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

    /// What no table says: refuses numbers, and says which outputs are not made ([`Call::leave_out`]).
    pub fn plan(self, plan: impl Fn(&Call) -> Result<()> + Send + Sync + 'static) -> Self {
        Operator { plan: Some(Box::new(plan)), ..self }
    }

    /// Writes the outputs, on the CPU or a GPU.
    pub fn kernel(self, kernel: impl Fn(&Call) -> Result<()> + Send + Sync + 'static) -> Self {
        self.kernel_on(Kernels::Everywhere, kernel)
    }

    /// As [`kernel`](Self::kernel), on one of them alone.
    pub fn kernel_on(self, kernels: Kernels, kernel: impl Fn(&Call) -> Result<()> + Send + Sync + 'static) -> Self {
        Operator { kernels, kernel: Some(Box::new(kernel)), ..self }
    }

    /// Its outputs in tch: where no kernel is, under torch.func, and for the gradient that is differentiated again.
    pub fn formula(self, formula: impl Fn(&Call) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static) -> Self {
        Operator { formula: Some(Box::new(formula)), ..self }
    }

    /// Its formula computes it on every device.
    pub fn formula_alone(self) -> Self {
        Operator { kernels: Kernels::Nowhere, ..self }
    }

    /// It is its formula alone, and PyTorch differentiates and traces what that calls.
    pub fn composition(self) -> Self {
        Operator { kernels: Kernels::Composition, ..self }
    }

    /// How it is differentiated. The backward operator's arguments say what a node keeps: `dNAME` is the gradient of
    /// output NAME, any other is the output or argument of that name. Its output `dNAME` is argument NAME's gradient.
    pub fn backward(self, backward: Operator) -> Self {
        Operator { backward: Some(Box::new(backward)), ..self }
    }

    /// Gradients of its arguments, by their places, that can be differentiated again; without it the formula is run
    /// again.
    pub fn double_backward(
        self,
        double_backward: impl Fn(&Call) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> Self {
        Operator { double_backward: Some(Box::new(double_backward)), ..self }
    }

    /// Outside a torch.func transform the derivative is the backward operator's, where no kernel is, too.
    pub fn with_own_gradient(self) -> Self {
        Operator { has_own_gradient: true, ..self }
    }

    /// vmap calls it for one example after the other.
    pub fn looped(self) -> Self {
        Operator { is_looped: true, ..self }
    }

    /// Its kernels for GPUs, where no other operator says them.
    pub fn program(self, program: &'static Program) -> Self {
        Operator { program: Some(program), ..self }
    }

    /// The handle counts its calls.
    pub fn counted(self, handle: &'static Handle) -> Self {
        Operator { handle: Some(handle), ..self }
    }

    pub fn name(&self) -> &str {
        self.schema.split('(').next().unwrap_or_default()
    }

    fn missing(&self) -> Error {
        Error::Torch(format!("{} has no kernel here", self.name()))
    }

    pub(super) fn run_kernel(&self, call: &Call) -> Result<()> {
        self.kernel.as_ref().ok_or_else(|| self.missing())?(call)
    }

    pub(super) fn run_formula(&self, call: &Call) -> Result<Vec<Option<Tensor>>> {
        self.handle.inspect(|h| h.count_composed());
        self.formula_of(call)
    }

    /// As a formula runs that nobody counts.
    pub(super) fn formula_of(&self, call: &Call) -> Result<Vec<Option<Tensor>>> {
        self.formula.as_ref().ok_or_else(|| self.missing())?(call)
    }

    pub(super) fn gradients_again(&self, call: &Call) -> Result<Vec<Option<Tensor>>> {
        match &self.double_backward {
            Some(double_backward) => double_backward(call),
            None => engine::gradients_again(&call.wanted(), &call.given(), |inputs| {
                call.with(inputs, |call| self.run_formula(call))
            }),
        }
    }
}
