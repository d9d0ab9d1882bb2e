//! CUDA without a toolkit: kernels are distributed as source, compiled at run time for the device, and launched on
//! torch's current stream. CUDA is not needed to build; if it is missing at run time, the composed formulas run.
//!
//! A launch has three steps. [`nvrtc`] compiles a [`Program`] (source text) with its options, only once per machine
//! because the [`cache`] keeps the binary on disk. The [`driver`] loads it, once per process and device. Then the
//! kernel is put on the stream. This last step neither allocates nor synchronises, so a CUDA graph can capture it.

mod cache;
mod driver;
mod layout;
mod library;
mod nvrtc;
mod structs;
pub mod verdict;

pub use layout::Layout;
pub use structs::StructLayout;

use crate::device_struct;
use crate::error::{Error, Result};
use driver::{Driver, Function};
use std::collections::HashMap;
use std::ffi::{c_void, CString};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};

/// A device's index, as in torch.
pub type Device = i32;

/// The source of kernels that are compiled together, as files in the order of their dependencies.
#[derive(Debug)]
pub struct Program {
    /// The file name that the compiler's messages show.
    pub name: &'static str,
    pub files: &'static [&'static str],
    /// The structs that the kernels take as arguments, and the structs inside these.
    pub structs: &'static [&'static StructLayout],
}

/// Types and conversions, the first file of every program.
pub const PRELUDE: &str = include_str!("device/prelude.cuh");
/// The functions that load and store a few columns at a time.
pub const CHUNK: &str = include_str!("device/chunk.cuh");
/// Sums and maxima over the threads of a row.
pub const REDUCE: &str = include_str!("device/reduce.cuh");
/// The interface that a row norm implements.
pub const NORM: &str = include_str!("device/norm.cuh");
/// Dropout masks.
pub const PHILOX: &str = include_str!("device/philox.cuh");
/// Parameters that are absent, one number, or one number per column; and the sums that are their gradients.
pub const PARAMETER: &str = include_str!("device/parameter.cuh");
/// The passes over rows that all row norms share.
pub const ROWS: &str = include_str!("device/rows.cuh");

/// The interface that a norm with column statistics implements.
pub const COLUMN_NORM: &str = include_str!("device/column_norm.cuh");
/// The passes over rows that all norms with column statistics share.
pub const COLUMNS: &str = include_str!("device/columns.cuh");
/// The kernels that run between the passes of [`COLUMNS`]: they merge partial sums into a batch's statistics.
pub const SETTLE: &str = include_str!("device/settle.cuh");

/// The kernel that adds up the sums of all blocks: the second stage of every sum over rows.
pub static SUMS: Program = Program {
    name: "sums.cu",
    files: &[PRELUDE, include_str!("device/sums.cu")],
    structs: &[&Output::LAYOUT, &SumPartials::LAYOUT],
};

device_struct! {
    /// The struct `Output` of sums.cu: the tensor that receives the columns from `first` on, and its dtype.
    #[derive(Clone, Copy)]
    pub struct Output = "Output" {
        pub to: *mut u8,
        pub first: i32,
        pub dtype: i32,
    }
}

/// The maximum number of outputs in one launch of [`SUMS`].
pub const OUTPUTS: usize = 6;

device_struct! {
    /// The struct `Sums` of sums.cu: each block's sums of all columns, and the outputs to which their totals go.
    /// `stride` is the number of sums from one block's first column to the next block's.
    pub struct SumPartials = "Sums" {
        pub partial: *const u8,
        pub blocks: i32,
        pub columns: i32,
        pub stride: i32,
        pub outputs: [Output; OUTPUTS],
    }
}

/// The size of a launch: the number of blocks, and the number of threads in each.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    pub blocks: u32,
    pub threads: u32,
}

/// The user's choice in NORMFORMER_RS_CUDA.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CudaMode {
    /// Kernels run if they can, once their results have been compared with the formula's ([`verdict`]).
    Auto,
    /// Like `Auto`, but it is an error if kernels cannot run.
    Require,
    /// Kernels run, but their results are not compared with the formula's.
    Trust,
    /// Only composed formulas run.
    Off,
}

/// Reads NORMFORMER_RS_CUDA; an unset or empty variable means `Auto`.
fn cuda_mode() -> Result<CudaMode> {
    match std::env::var("NORMFORMER_RS_CUDA").as_deref() {
        Err(_) | Ok("" | "auto") => Ok(CudaMode::Auto),
        Ok("require") => Ok(CudaMode::Require),
        Ok("trust") => Ok(CudaMode::Trust),
        Ok("off") => Ok(CudaMode::Off),
        Ok(other) => Err(crate::error::unknown("NORMFORMER_RS_CUDA", other, ["auto", "require", "trust", "off"])),
    }
}

/// The state of a device: whether kernels run on it.
#[derive(Clone, Debug, PartialEq)]
pub enum Readiness {
    /// The kernels run.
    Ready,
    /// The kernels cannot run, for this reason; composed formulas run instead.
    Missing(String),
}

/// Returns whether kernels run on a device. The first call checks this: it binds the libraries, then compiles and loads
/// the smallest program. Errors if kernels are required but cannot run; the message gives the reason.
pub fn readiness(device: Device) -> Result<Readiness> {
    static KNOWN: Mutex<Option<HashMap<Device, Readiness>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(readiness) = known.get(&device) {
        return Ok(readiness.clone());
    }
    let cuda_mode = cuda_mode()?;
    let readiness = match cuda_mode {
        CudaMode::Off => Readiness::Missing("NORMFORMER_RS_CUDA=off".to_string()),
        CudaMode::Auto | CudaMode::Require | CudaMode::Trust => match kernel(device, &SUMS, "", "sum_partials") {
            Ok(_) => Readiness::Ready,
            Err(e) => Readiness::Missing(e.to_string()),
        },
    };
    // This error returns before the result is stored in `known`, so a later call checks again.
    if let (CudaMode::Require, Readiness::Missing(why)) = (cuda_mode, &readiness) {
        return Err(Error::Torch(format!(
            "NORMFORMER_RS_CUDA=require, but the kernels cannot run on CUDA device {device}: {why}"
        )));
    }
    known.insert(device, readiness.clone());
    Ok(readiness)
}

/// Returns a device's number of multiprocessors, which determines the number of blocks in a sum.
pub fn multiprocessors(device: Device) -> Result<u32> {
    Ok(driver()?.device(device)?.multiprocessors)
}

/// Returns how many blocks of a kernel, with `threads` threads each, the device runs at once.
pub fn blocks_at_once(
    device: Device,
    program: &'static Program,
    options: &str,
    kernel: &'static str,
    threads: u32,
) -> Result<u32> {
    driver()?.blocks_at_once(device, self::kernel(device, program, options, kernel)?.function, threads)
}

/// Launches a kernel on torch's current stream, if the [`verdict`] on its variant allows it. `options` are the compiler
/// options that select the variant, and `arguments` is the one struct that the kernel takes.
///
/// # Safety
/// `A` has the same fields as the struct that the kernel takes. Its pointers belong to the device, point to as much
/// memory as the kernel accesses for these `arguments`, and stay valid until the kernel has finished.
pub unsafe fn launch<A>(
    device: Device,
    program: &'static Program,
    options: &str,
    kernel: &'static str,
    grid: Grid,
    arguments: &A,
) -> Result<()> {
    if grid.blocks == 0 {
        return Ok(());
    }
    let kernel = self::kernel(device, program, options, kernel)?;
    kernel.variant.admit()?;
    let stream = stream(device)?;
    // SAFETY: guaranteed by the caller. The kernel takes its struct by value, so the driver copies it during this
    // call.
    unsafe { driver()?.launch(device, kernel.function, grid, stream, std::ptr::from_ref(arguments).cast::<c_void>()) }
}

/// True if a CUDA graph is being captured on torch's current stream.
pub fn is_capturing(device: Device) -> Result<bool> {
    driver()?.is_capturing(device, stream(device)?)
}

/// Returns torch's current stream, or the default stream if CPU tensors stand in for the device's.
fn stream(device: Device) -> Result<*mut c_void> {
    if stand_in() {
        Ok(std::ptr::null_mut())
    } else {
        driver::torch_stream(device)
    }
}

/// Returns the driver, which is bound at the first call.
fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();
    DRIVER.get_or_init(|| Driver::bind().map_err(|e| e.to_string())).as_ref().map_err(|e| Error::Torch(e.clone()))
}

/// A loaded kernel, which is never unloaded, and the verdict on its variant.
struct Kernel {
    function: Function,
    variant: verdict::Variant,
}

/// Returns the kernel named `kernel` of a program compiled with `options`; compiles and loads it at its first use.
fn kernel(device: Device, program: &'static Program, options: &str, kernel: &'static str) -> Result<&'static Kernel> {
    type ProgramKey = (Device, &'static str, &'static str);
    // The inner map's key is the options alone, so that a launch finds its kernel without allocating a string.
    static LOADED: RwLock<Option<HashMap<ProgramKey, HashMap<String, &'static Kernel>>>> = RwLock::new(None);
    let key = (device, program.name, kernel);
    let look_up = |all: &Option<HashMap<ProgramKey, HashMap<String, &'static Kernel>>>| {
        all.as_ref().and_then(|all| all.get(&key)).and_then(|kernels| kernels.get(options)).copied()
    };
    if let Some(kernel) = look_up(&LOADED.read().unwrap_or_else(PoisonError::into_inner)) {
        return Ok(kernel);
    }
    // The lock is held during compilation, so that other threads that want the same kernel wait for it.
    let mut loaded = LOADED.write().unwrap_or_else(PoisonError::into_inner);
    // Another thread may have loaded the kernel in the meantime.
    if let Some(kernel) = look_up(&loaded) {
        return Ok(kernel);
    }
    let driver = driver()?;
    let properties = driver.device(device)?;
    let (binary, file) = cache::compiled(program, options, properties.architecture)?;
    let name = CString::new(kernel).expect("kernels have plain names");
    let function = driver.load(device, &binary, &name)?;
    let is_trusted = cuda_mode()? == CudaMode::Trust;
    let variant = verdict::Variant::new(driver.describe(device)?, [program.name, options, kernel], file, is_trusted);
    let new_kernel = Box::leak(Box::new(Kernel { function, variant }));
    loaded.get_or_insert_default().entry(key).or_default().insert(options.to_string(), new_kernel);
    Ok(new_kernel)
}

/// True if tests have sent CPU tensors through the CUDA kernels, on a driver that runs on the host.
static STAND_IN: AtomicBool = AtomicBool::new(false);

/// Makes CUDA kernels run on CPU tensors, for tests. This needs a driver, found through NORMFORMER_RS_CUDA_LIBRARIES,
/// that uses the host's memory as device memory.
pub fn set_stand_in(on: bool) {
    STAND_IN.store(on, Ordering::Relaxed);
}

/// True if [`set_stand_in`] has turned CUDA kernels on for CPU tensors.
pub fn stand_in() -> bool {
    STAND_IN.load(Ordering::Relaxed)
}

/// Compiles a program for an architecture such as 90. Returns the binary, and the compiler's messages about registers
/// and spills. Errors if a struct's layout in the sources differs from that in Rust.
pub fn compile_verbosely(program: &Program, options: &str, architecture: i32) -> Result<(Vec<u8>, String)> {
    let assertions: String = program.structs.iter().map(|layout| layout.assertions()).collect();
    let source = program.files.concat() + &assertions;
    let options = format!("{options} --ptxas-options=-v");
    nvrtc::compiler()?.compile(program.name, &source, &options, architecture)
}
