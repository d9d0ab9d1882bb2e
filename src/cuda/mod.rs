//! CUDA without a toolkit: kernels are distributed as source, compiled at run time for the device, and launched on
//! torch's current stream. Building needs nothing of CUDA, and without CUDA the composed formulas run.
//!
//! A launch goes through these steps: [`nvrtc`] compiles a [`Program`] (source text) with its options, once per
//! machine, since the [`cache`] keeps the binary on disk; the [`driver`] loads it, once per process and device; the
//! kernel is put on the stream. The launch itself neither allocates nor synchronises, so a CUDA graph can capture it.

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
    /// The file name in the compiler's messages.
    pub name: &'static str,
    pub files: &'static [&'static str],
    /// The structs that the kernels take, and the structs inside them.
    pub structs: &'static [&'static StructLayout],
}

/// The beginning of every program.
pub const PRELUDE: &str = include_str!("device/prelude.cuh");
/// Operations on a few columns at a time.
pub const CHUNK: &str = include_str!("device/chunk.cuh");
/// Sums over the threads of a row.
pub const REDUCE: &str = include_str!("device/reduce.cuh");
/// The interface that a row norm implements.
pub const NORM: &str = include_str!("device/norm.cuh");
/// Dropout masks.
pub const PHILOX: &str = include_str!("device/philox.cuh");
/// Scales and shifts that are absent, one number or one per column, and the sums of their gradients.
pub const PARAMETER: &str = include_str!("device/parameter.cuh");
/// The passes over rows that all row norms share.
pub const ROWS: &str = include_str!("device/rows.cuh");

/// The interface that a norm with column statistics implements.
pub const COLUMN_NORM: &str = include_str!("device/column_norm.cuh");
/// The passes over rows that all norms with column statistics share.
pub const COLUMNS: &str = include_str!("device/columns.cuh");
/// The steps between these passes, which settle a batch's statistics.
pub const SETTLE: &str = include_str!("device/settle.cuh");

/// The kernel that adds up the blocks' sums: the second stage of every sum over rows.
pub static SUMS: Program = Program {
    name: "sums.cu",
    files: &[PRELUDE, include_str!("device/sums.cu")],
    structs: &[&Output::LAYOUT, &SumPartials::LAYOUT],
};

device_struct! {
    /// The struct `Output` of sums.cu: the destination and the dtype of the columns from `first` on.
    #[derive(Clone, Copy)]
    pub struct Output = "Output" {
        pub to: *mut u8,
        pub first: i32,
        pub dtype: i32,
    }
}

/// The maximum number of outputs of one launch.
pub const OUTPUTS: usize = 6;

device_struct! {
    /// The struct `Sums` of sums.cu.
    pub struct SumPartials = "Sums" {
        pub partial: *const u8,
        pub blocks: i32,
        pub columns: i32,
        pub stride: i32,
        pub outputs: [Output; OUTPUTS],
    }
}

/// The number of blocks and the number of threads in each.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    pub blocks: u32,
    pub threads: u32,
}

/// The value of NORMFORMER_RS_CUDA.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CudaMode {
    Auto,
    Require,
    Trust,
    Off,
}

fn cuda_mode() -> Result<CudaMode> {
    match std::env::var("NORMFORMER_RS_CUDA").as_deref() {
        Err(_) | Ok("" | "auto") => Ok(CudaMode::Auto),
        Ok("require") => Ok(CudaMode::Require),
        Ok("trust") => Ok(CudaMode::Trust),
        Ok("off") => Ok(CudaMode::Off),
        Ok(other) => Err(crate::error::unknown("NORMFORMER_RS_CUDA", other, ["auto", "require", "trust", "off"])),
    }
}

/// The state of a device.
#[derive(Clone, Debug, PartialEq)]
pub enum Readiness {
    /// Kernels run on the device.
    Ready,
    /// Composed formulas run instead, for this reason.
    Missing(String),
}

/// Finds out once whether kernels run on a device: binds the libraries, then compiles and loads the smallest program.
/// Errors if kernels are required and cannot run; the message says why.
pub fn readiness(device: Device) -> Result<Readiness> {
    static KNOWN: Mutex<Option<HashMap<Device, Readiness>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = known.get_or_insert_default();
    if let Some(found) = known.get(&device) {
        return Ok(found.clone());
    }
    let cuda_mode = cuda_mode()?;
    let found = match cuda_mode {
        CudaMode::Off => Readiness::Missing("NORMFORMER_RS_CUDA=off".to_string()),
        CudaMode::Auto | CudaMode::Require | CudaMode::Trust => match kernel(device, &SUMS, "", "sum_partials") {
            Ok(_) => Readiness::Ready,
            Err(e) => Readiness::Missing(e.to_string()),
        },
    };
    if let (CudaMode::Require, Readiness::Missing(why)) = (cuda_mode, &found) {
        return Err(Error::Torch(format!(
            "NORMFORMER_RS_CUDA=require, but the kernels cannot run on CUDA device {device}: {why}"
        )));
    }
    known.insert(device, found.clone());
    Ok(found)
}

/// Returns the number of multiprocessors of a device, which determines the number of blocks of a sum.
pub fn multiprocessors(device: Device) -> Result<u32> {
    Ok(driver()?.device(device)?.multiprocessors)
}

/// Returns the number of a kernel's blocks that a device runs at once.
pub fn blocks_at_once(
    device: Device,
    program: &'static Program,
    options: &str,
    kernel: &'static str,
    threads: u32,
) -> Result<u32> {
    driver()?.blocks_at_once(device, self::kernel(device, program, options, kernel)?.function, threads)
}

/// Launches a kernel on torch's current stream, if its [`verdict`] admits it.
///
/// # Safety
/// `A` is the struct that the kernel takes, field by field. Its pointers are the device's, point to as much memory as
/// the kernel uses for `arguments`, and stay valid until the stream has passed the kernel.
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
    // SAFETY: guaranteed by the caller; a kernel takes its one struct by value, so the driver copies it here.
    unsafe { driver()?.launch(device, kernel.function, grid, stream, std::ptr::from_ref(arguments).cast::<c_void>()) }
}

/// True if torch's current stream is being captured.
pub fn is_capturing(device: Device) -> Result<bool> {
    driver()?.is_capturing(device, stream(device)?)
}

fn stream(device: Device) -> Result<*mut c_void> {
    if stand_in() {
        Ok(std::ptr::null_mut())
    } else {
        driver::torch_stream(device)
    }
}

fn driver() -> Result<&'static Driver> {
    static DRIVER: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();
    DRIVER.get_or_init(|| Driver::bind().map_err(|e| e.to_string())).as_ref().map_err(|e| Error::Torch(e.clone()))
}

/// A loaded kernel, which is never unloaded, and its verdict.
struct Kernel {
    function: Function,
    variant: verdict::Variant,
}

/// Returns the kernel, and compiles and loads it at its first use.
fn kernel(device: Device, program: &'static Program, options: &str, kernel: &'static str) -> Result<&'static Kernel> {
    type ProgramKey = (Device, &'static str, &'static str);
    // The inner map is keyed by options, so that a launch looks its kernel up without allocating a string.
    static LOADED: RwLock<Option<HashMap<ProgramKey, HashMap<String, &'static Kernel>>>> = RwLock::new(None);
    let key = (device, program.name, kernel);
    let found = |all: &Option<HashMap<ProgramKey, HashMap<String, &'static Kernel>>>| {
        all.as_ref().and_then(|all| all.get(&key)).and_then(|kernels| kernels.get(options)).copied()
    };
    if let Some(kernel) = found(&LOADED.read().unwrap_or_else(PoisonError::into_inner)) {
        return Ok(kernel);
    }
    // The lock is held during compilation: threads that want the same kernel wait for it.
    let mut loaded = LOADED.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(kernel) = found(&loaded) {
        return Ok(kernel);
    }
    let driver = driver()?;
    let properties = driver.device(device)?;
    let (binary, file) = cache::compiled(program, options, properties.architecture)?;
    let name = CString::new(kernel).expect("kernels have plain names");
    let function = driver.load(device, &binary, &name)?;
    let is_trusted = cuda_mode()? == CudaMode::Trust;
    let variant = verdict::Variant::new(driver.describe(device)?, [program.name, options, kernel], file, is_trusted);
    let made = Box::leak(Box::new(Kernel { function, variant }));
    loaded.get_or_insert_default().entry(key).or_default().insert(options.to_string(), made);
    Ok(made)
}

static STAND_IN: AtomicBool = AtomicBool::new(false);

/// Sends CPU tensors through the CUDA kernels, for tests. The driver found through NORMFORMER_RS_CUDA_LIBRARIES must
/// use the host's memory as device memory.
pub fn set_stand_in(on: bool) {
    STAND_IN.store(on, Ordering::Relaxed);
}

/// True if [`set_stand_in`] is on.
pub fn stand_in() -> bool {
    STAND_IN.load(Ordering::Relaxed)
}

/// Compiles a program for an architecture such as 90; returns the binary and the compiler's messages on registers and
/// spills. Fails if the sources lay out a struct differently from Rust.
pub fn compile_verbosely(program: &Program, options: &str, architecture: i32) -> Result<(Vec<u8>, String)> {
    let assertions: String = program.structs.iter().map(|layout| layout.assertions()).collect();
    let source = program.files.concat() + &assertions;
    let options = format!("{options} --ptxas-options=-v");
    nvrtc::compiler()?.compile(program.name, &source, &options, architecture)
}
