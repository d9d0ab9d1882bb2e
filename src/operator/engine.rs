//! Calls of operators through the dispatcher, and functions of the autograd engine that tch does not bind.

use super::call::Value;
use super::ffi::{shim_error, Span};
use crate::cuda::verdict;
use crate::error::{Error, Result};
use crate::host::CTensor;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use tch::Tensor;

extern "C" {
    fn nfrs_operator(name: *const c_char, length: i64) -> *const c_void;
    fn nfrs_call(operator: *const c_void, arguments: Span<Value>, outputs: *mut *mut CTensor, n_outputs: usize)
        -> bool;
    fn nfrs_above_autograd() -> *mut c_void;
    fn nfrs_leave_autograd(guard: *mut c_void);
    fn nfrs_gradients(
        roots: Span<Value>,
        gradients: Span<Value>,
        inputs: Span<Value>,
        create_graph: bool,
        made: *mut *mut CTensor,
    ) -> bool;
    fn nfrs_has_columns(x: *const CTensor, multiple_of: i64) -> bool;
    fn nfrs_width(x: *const CTensor, width: *mut i64) -> bool;
    fn nfrs_set_grad(leaf: *const CTensor, gradient: *const CTensor) -> bool;
    /// A function of torch-sys.
    fn at_grad_set_enabled(on: c_int) -> c_int;
}

/// An operator of the dispatcher. The first call looks it up; the handle counts the calls of our operators.
pub struct Handle {
    /// The namespace before `name`: "normformer_rs::", or "" for torch's operators, whose names include it.
    library: &'static str,
    pub name: &'static str,
    /// The operator's address in C++; 0 until it has been found.
    address: AtomicUsize,
    /// The number of kernel calls.
    kernel: AtomicU64,
    /// The number of formula calls.
    composed: AtomicU64,
}

impl Handle {
    /// Creates the handle of one of our operators.
    pub const fn new(name: &'static str) -> Self {
        let (address, kernel, composed) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Handle { library: "normformer_rs::", name, address, kernel, composed }
    }

    /// Creates the handle of one of torch's operators from its full name, such as "aten::add".
    pub const fn of_torch(name: &'static str) -> Self {
        Handle { library: "", ..Handle::new(name) }
    }

    /// Counts a kernel call.
    pub fn count_kernel(&self) {
        self.count(&self.kernel);
    }

    /// Counts a formula call.
    pub fn count_composed(&self) {
        self.count(&self.composed);
    }

    /// Counts a call, except during a kernel's proof.
    fn count(&self, calls: &AtomicU64) {
        if !verdict::is_proof() {
            calls.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of kernel calls and of formula calls since the process started, so that tests can assert
    /// which ran.
    pub fn counts(&self) -> (u64, u64) {
        (self.kernel.load(Ordering::Relaxed), self.composed.load(Ordering::Relaxed))
    }

    /// Returns the operator's address in C++, and looks it up if this is the first call.
    fn find(&self) -> Result<*const c_void> {
        let mut address = self.address.load(Ordering::Relaxed);
        if address == 0 {
            #[cfg(test)]
            super::register();
            let name = format!("{}{}", self.library, self.name);
            // SAFETY: the name outlives the call.
            address = unsafe { nfrs_operator(name.as_ptr().cast(), name.len() as i64) as usize };
            self.address.store(address, Ordering::Relaxed);
        }
        match address {
            0 => Err(Error::Torch(format!(
                "{}{} is not registered: call operator::register first",
                self.library, self.name
            ))),
            address => Ok(address as *const c_void),
        }
    }

    /// True if the operator is registered.
    pub fn exists(&self) -> bool {
        self.find().is_ok()
    }

    /// Calls the operator, which has N outputs; `arguments` are all of the schema's arguments.
    pub fn call<const N: usize>(&self, arguments: &[Value]) -> Result<[Tensor; N]> {
        let operator = self.find()?;
        let mut outputs = [std::ptr::null_mut(); N];
        // SAFETY: the operator is never freed, the arguments outlive the call, and there is room for N tensors.
        match unsafe { nfrs_call(operator, Span::of(arguments), outputs.as_mut_ptr(), N) } {
            // SAFETY: C++ created N tensors, and passes their ownership to us.
            true => Ok(outputs.map(|t| unsafe { Tensor::from_ptr(t.cast()) })),
            false => Err(shim_error()),
        }
    }
}

/// Calls one of our operators by its name; `arguments` are all of the schema's arguments.
pub fn call_by_name(name: &str, arguments: &[Value], n_outputs: usize) -> Result<Vec<Tensor>> {
    let full_name = format!("normformer_rs::{name}");
    // SAFETY: the name outlives the call.
    let operator = unsafe { nfrs_operator(full_name.as_ptr().cast(), full_name.len() as i64) };
    if operator.is_null() {
        return Err(Error::Torch(format!("{full_name} is not registered: call operator::register first")));
    }
    let mut outputs = vec![std::ptr::null_mut(); n_outputs];
    // SAFETY: the operator is never freed, the arguments outlive the call, and there is room for the tensors.
    match unsafe { nfrs_call(operator, Span::of(arguments), outputs.as_mut_ptr(), n_outputs) } {
        // SAFETY: C++ created `n_outputs` tensors, and passes their ownership to us.
        true => Ok(outputs.into_iter().map(|t| unsafe { Tensor::from_ptr(t.cast()) }).collect()),
        false => Err(shim_error()),
    }
}

/// Returns the gradients of `inputs`; `gradient` is that of `f(inputs)`. They cannot be differentiated again. The
/// function works inside an operator, where the dispatcher has turned autograd off.
pub fn gradients(
    inputs: &[&Tensor],
    gradient: &Tensor,
    f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
) -> Result<Vec<Option<Tensor>>> {
    /// Keeps autograd on in this thread until it is dropped.
    struct AutogradGuard(*mut c_void);
    impl Drop for AutogradGuard {
        fn drop(&mut self) {
            // SAFETY: nfrs_above_autograd created it in this thread, and nobody else uses it.
            unsafe { nfrs_leave_autograd(self.0) }
        }
    }
    // SAFETY: the function takes no arguments.
    let _guard = AutogradGuard(unsafe { nfrs_above_autograd() });
    let leaves: Vec<Tensor> = inputs.iter().map(|t| t.detach().set_requires_grad(true)).collect();
    let _recording = Recording::set(true);
    let (root, create_graph) = (f(&leaves)?, false);
    run(&[&root], &[gradient], &leaves.iter().collect::<Vec<_>>(), create_graph)
}

/// Returns a gradient for each input that requires one, and `None` for the others; `gradients` are those of the outputs
/// `f(inputs)`. The results can be differentiated again. They are partial derivatives: if one input was computed from
/// another, no gradient flows between them, because aliases replace the inputs.
pub fn gradients_again(
    inputs: &[Option<Tensor>],
    gradients: &[Option<Tensor>],
    f: impl FnOnce(&[Option<Tensor>]) -> Result<Vec<Option<Tensor>>>,
) -> Result<Vec<Option<Tensor>>> {
    let alias = |t: &Option<Tensor>| Ok(t.as_ref().map(|t| t.f_view_as(t)).transpose()?);
    let aliases = inputs.iter().map(alias).collect::<Result<Vec<_>>>()?;
    let outputs = f(&aliases)?;
    let is_differentiable = |t: &&Tensor| t.requires_grad();
    let pairs = outputs.iter().zip(gradients);
    // Outputs without a gradient do not take part.
    let pairs = pairs.filter_map(|(t, g)| t.as_ref().filter(is_differentiable).zip(g.as_ref()));
    let (roots, given): (Vec<_>, Vec<_>) = pairs.unzip();
    let is_wanted = |t: &Option<Tensor>| t.as_ref().is_some_and(Tensor::requires_grad);
    let leaves: Vec<&Tensor> = aliases.iter().filter(|t| is_wanted(t)).flatten().collect();
    // `computed` are the gradients of `leaves`, in order; below, each input that requires none gets `None`.
    let create_graph = true;
    let mut computed = match roots.is_empty() || leaves.is_empty() {
        true => vec![].into_iter(),
        false => run(&roots, &given, &leaves, create_graph)?.into_iter(),
    };
    Ok(aliases.iter().map(|t| if is_wanted(t) { computed.next().flatten() } else { None }).collect())
}

/// Back-propagates from `roots`, whose gradients are `gradients`. Returns a gradient for each of `leaves`, which can be
/// differentiated again if `create_graph` is true. If `leaves` is empty, adds gradients to the `.grad` of all leaf
/// tensors on which the roots depend.
fn run(
    roots: &[&Tensor],
    gradients: &[&Tensor],
    leaves: &[&Tensor],
    create_graph: bool,
) -> Result<Vec<Option<Tensor>>> {
    let [roots, gradients, leaves] =
        [roots, gradients, leaves].map(|all| all.iter().map(|t| (*t).into()).collect::<Vec<Value>>());
    let mut computed = vec![std::ptr::null_mut(); leaves.len()];
    let [roots, gradients, leaves] = [&roots, &gradients, &leaves].map(|all| Span::of(all));
    // SAFETY: all tensors outlive the call, and there is room for a gradient of each leaf.
    match unsafe { nfrs_gradients(roots, gradients, leaves, create_graph, computed.as_mut_ptr()) } {
        true => {
            // SAFETY: the pointer is null if no root depends on the leaf, otherwise it is a new tensor that we own.
            let owned = |t: *mut CTensor| (!t.is_null()).then(|| unsafe { Tensor::from_ptr(t.cast()) });
            Ok(computed.into_iter().map(owned).collect())
        }
        false => Err(shim_error()),
    }
}

/// True if the size of x's last dimension is a multiple of `multiple_of`; with `multiple_of` = 0, if the size is 0. The
/// size may be symbolic.
pub fn has_columns(x: &Tensor, multiple_of: i64) -> bool {
    // SAFETY: the tensor outlives the call; an exception counts as false.
    unsafe { nfrs_has_columns(x.as_ptr().cast(), multiple_of) }
}

/// Returns the size of x's last dimension; the other sizes may be symbolic.
pub fn width(x: &Tensor) -> Result<i64> {
    let mut width = 0;
    // SAFETY: the tensor and the number outlive the call.
    match unsafe { nfrs_width(x.as_ptr().cast(), &mut width) } {
        true => Ok(width),
        false => Err(shim_error()),
    }
}

/// A guard that turns autograd's recording on or off for this thread. It holds the old setting, which its drop
/// restores.
pub struct Recording(c_int);

impl Recording {
    /// Turns recording on or off until the returned guard is dropped.
    pub fn set(on: bool) -> Self {
        // SAFETY: the function sets this thread's switch, and returns the old setting.
        Recording(unsafe { at_grad_set_enabled(on.into()) })
    }

    /// True if autograd records operations on this thread.
    pub fn is_on() -> bool {
        // The setting is read by changing it. The guard holds the old setting, and restores it when this line ends.
        Recording::set(false).0 == 1
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: the function sets this thread's switch.
        unsafe { at_grad_set_enabled(self.0) };
    }
}

/// Back-propagates `gradients` from `roots`, which need not be scalars.
pub fn backward(roots: &[&Tensor], gradients: &[&Tensor]) -> Result<()> {
    let create_graph = false;
    run(roots, gradients, &[], create_graph).map(drop)
}

/// Back-propagates from one root.
pub fn backward_from(root: &Tensor, gradient: &Tensor) -> Result<()> {
    backward(&[root], &[gradient])
}

/// Sets `leaf.grad`, the tensor to which backward passes add the leaf's gradient.
pub fn set_grad(leaf: &Tensor, gradient: &Tensor) -> Result<()> {
    // SAFETY: both tensors outlive the call; the leaf keeps its own reference to the gradient.
    match unsafe { nfrs_set_grad(leaf.as_ptr().cast(), gradient.as_ptr().cast()) } {
        true => Ok(()),
        false => Err(shim_error()),
    }
}
