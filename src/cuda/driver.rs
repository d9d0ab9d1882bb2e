//! The CUDA driver: devices, their contexts, loaded kernels, and launches.

use super::library::{api, chosen_folder, open, symbol};
use super::{Device, Grid};
use crate::error::{Error, Result};
use libloading::os::unix::{Library, RTLD_NOW};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::sync::{OnceLock, PoisonError, RwLock};

type DriverContext = *mut c_void;

api!(
    /// The functions of libcuda that this crate calls.
    Api {
        cuInit: fn(c_uint) -> c_int;
        cuGetErrorString: fn(c_int, *mut *const c_char) -> c_int;
        cuDeviceGet: fn(*mut c_int, c_int) -> c_int;
        cuDeviceGetAttribute: fn(*mut c_int, c_int, c_int) -> c_int;
        cuDeviceGetName: fn(*mut c_char, c_int, c_int) -> c_int;
        cuDriverGetVersion: fn(*mut c_int) -> c_int;
        cuDevicePrimaryCtxRetain: fn(*mut DriverContext, c_int) -> c_int;
        cuCtxPushCurrent_v2: fn(DriverContext) -> c_int;
        cuCtxPopCurrent_v2: fn(*mut DriverContext) -> c_int;
        cuModuleLoadData: fn(*mut *mut c_void, *const c_void) -> c_int;
        cuModuleGetFunction: fn(*mut *mut c_void, *mut c_void, *const c_char) -> c_int;
        cuOccupancyMaxActiveBlocksPerMultiprocessor: fn(*mut c_int, *mut c_void, c_int, usize) -> c_int;
        cuLaunchKernel: fn(
            *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void,
            *mut *mut c_void,
        ) -> c_int;
        cuThreadExchangeStreamCaptureMode: fn(*mut c_int) -> c_int;
        cuStreamIsCapturing: fn(*mut c_void, *mut c_int) -> c_int;
    }
);

// These are values of the driver's enums CUdevice_attribute and CUstreamCaptureMode.
const MULTIPROCESSOR_COUNT: c_int = 16;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
const CAPTURE_MODE_RELAXED: c_int = 2;

/// The CUDA driver, with a cache of devices' properties.
pub struct Driver {
    api: Api,
    devices: RwLock<HashMap<Device, Properties>>,
}

/// The properties of a device.
#[derive(Clone, Copy)]
pub struct Properties {
    /// The compute capability as a number: 90 for 9.0.
    pub architecture: i32,
    pub multiprocessors: u32,
    /// The primary context, which torch uses too. It is retained as long as the process lives.
    context: DriverContext,
}

// SAFETY: the context is the driver's handle, which any thread may use.
unsafe impl Send for Properties {}
// SAFETY: the context is the driver's handle, which any thread may use.
unsafe impl Sync for Properties {}

/// The driver's handle of a loaded kernel.
#[derive(Clone, Copy)]
pub struct Function(*mut c_void);

// SAFETY: the handle belongs to a module that is never unloaded, and any thread may launch it.
unsafe impl Send for Function {}
// SAFETY: the handle belongs to a module that is never unloaded, and any thread may launch it.
unsafe impl Sync for Function {}

impl Driver {
    /// Loads libcuda and initialises the driver.
    pub fn bind() -> Result<Self> {
        let name = "libcuda.so.1";
        let file = chosen_folder().map(|f| f.join(name)).filter(|f| f.exists()).unwrap_or_else(|| name.into());
        // SAFETY: these functions of the driver have these types.
        let api = unsafe { Api::bind(open(file)?) }?;
        let driver = Driver { api, devices: RwLock::default() };
        // SAFETY: the driver's initialisation may be called any number of times.
        driver.check(unsafe { (driver.api.cuInit)(0) }, "cuInit")?;
        Ok(driver)
    }

    /// Returns a device's properties, which are queried at the first call.
    pub fn device(&self, device: Device) -> Result<Properties> {
        if let Some(properties) = self.devices.read().unwrap_or_else(PoisonError::into_inner).get(&device) {
            return Ok(*properties);
        }
        let (mut handle, mut context) = (0, std::ptr::null_mut());
        let (mut major, mut minor, mut multiprocessors) = (0, 0, 0);
        // SAFETY: the driver writes only to variables of this function.
        unsafe {
            self.check((self.api.cuDeviceGet)(&mut handle, device), "cuDeviceGet")?;
            for (value, attribute) in [
                (&mut major, COMPUTE_CAPABILITY_MAJOR),
                (&mut minor, COMPUTE_CAPABILITY_MINOR),
                (&mut multiprocessors, MULTIPROCESSOR_COUNT),
            ] {
                self.check((self.api.cuDeviceGetAttribute)(value, attribute, handle), "cuDeviceGetAttribute")?;
            }
            self.check((self.api.cuDevicePrimaryCtxRetain)(&mut context, handle), "cuDevicePrimaryCtxRetain")?;
        }
        let properties =
            Properties { architecture: 10 * major + minor, multiprocessors: multiprocessors.max(1) as u32, context };
        self.devices.write().unwrap_or_else(PoisonError::into_inner).insert(device, properties);
        Ok(properties)
    }

    /// Returns the device's name and the driver's version, such as "NVIDIA H100, driver 13.0".
    pub fn describe(&self, device: Device) -> Result<String> {
        let (mut name, mut handle, mut version) = ([0 as c_char; 256], 0, 0);
        // SAFETY: the driver writes only to variables of this function, and terminates the name within the given
        // length.
        let name = unsafe {
            self.check((self.api.cuDeviceGet)(&mut handle, device), "cuDeviceGet")?;
            let most = name.len() as c_int - 1;
            self.check((self.api.cuDeviceGetName)(name.as_mut_ptr(), most, handle), "cuDeviceGetName")?;
            self.check((self.api.cuDriverGetVersion)(&mut version), "cuDriverGetVersion")?;
            CStr::from_ptr(name.as_ptr()).to_string_lossy().replace(['\t', '\n'], " ")
        };
        // The driver's version is 1000·major + 10·minor.
        Ok(format!("{name}, driver {}.{}", version / 1000, version % 1000 / 10))
    }

    /// Loads a compiled program, which is never unloaded, on a device. Returns its kernel named `kernel`.
    pub fn load(&self, device: Device, binary: &[u8], kernel: &CStr) -> Result<Function> {
        let _current = self.enter(device)?;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // A kernel may be used for the first time while a CUDA graph is captured. Loading is then allowed only in
        // relaxed mode. Looking up the kernel needs this mode too, because a driver may load it only then.
        let mut mode = CAPTURE_MODE_RELAXED;
        // SAFETY: the binary is complete and comes from the compiler; the driver writes only to variables of this
        // function.
        unsafe {
            self.check((self.api.cuThreadExchangeStreamCaptureMode)(&mut mode), "cuThreadExchangeStreamCaptureMode")?;
            let mut loaded =
                self.check((self.api.cuModuleLoadData)(&mut module, binary.as_ptr().cast()), "cuModuleLoadData");
            if loaded.is_ok() {
                let status = (self.api.cuModuleGetFunction)(&mut function, module, kernel.as_ptr());
                loaded = self.check(status, "cuModuleGetFunction");
            }
            // The first exchange stored the thread's own mode in `mode`; this one restores it.
            (self.api.cuThreadExchangeStreamCaptureMode)(&mut mode);
            loaded?;
        }
        Ok(Function(function))
    }

    /// Returns the number of blocks of `threads` threads that a device runs at once.
    pub fn blocks_at_once(&self, device: Device, function: Function, threads: u32) -> Result<u32> {
        let multiprocessors = self.device(device)?.multiprocessors;
        let _current = self.enter(device)?;
        let (mut blocks, threads, dynamic_memory) = (0, threads as c_int, 0);
        // SAFETY: the kernel is loaded, and the driver writes only to a variable of this function.
        let status = unsafe {
            (self.api.cuOccupancyMaxActiveBlocksPerMultiprocessor)(&mut blocks, function.0, threads, dynamic_memory)
        };
        self.check(status, "cuOccupancyMaxActiveBlocksPerMultiprocessor")?;
        Ok(blocks.max(1) as u32 * multiprocessors) // `blocks` is per multiprocessor
    }

    /// True if work launched on this stream is captured for a CUDA graph instead of running on the device.
    pub fn is_capturing(&self, device: Device, stream: *mut c_void) -> Result<bool> {
        let (_current, mut state) = (self.enter(device)?, 0);
        // SAFETY: the stream is torch's or the default one, and the driver writes only to a variable of this
        // function.
        self.check(unsafe { (self.api.cuStreamIsCapturing)(stream, &mut state) }, "cuStreamIsCapturing")?;
        Ok(state != 0)
    }

    /// Launches a loaded kernel on a stream.
    ///
    /// # Safety
    /// `arguments` points to the one struct that the kernel takes. The conditions of [`launch`](super::launch) hold for
    /// this struct.
    pub unsafe fn launch(
        &self,
        device: Device,
        function: Function,
        grid: Grid,
        stream: *mut c_void,
        arguments: *const c_void,
    ) -> Result<()> {
        let _current = self.enter(device)?;
        let mut pointers = [arguments.cast_mut()];
        // SAFETY: guaranteed by the caller.
        let status = unsafe {
            let (blocks, threads) = (grid.blocks, grid.threads);
            let (pointers, extra) = (pointers.as_mut_ptr(), std::ptr::null_mut());
            // The grid and the blocks have one dimension; the 0 is the size of dynamic shared memory.
            (self.api.cuLaunchKernel)(function.0, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, extra)
        };
        self.check(status, "cuLaunchKernel")
    }

    /// Makes the device's context the current one, until the returned guard is dropped.
    fn enter(&self, device: Device) -> Result<Current<'_>> {
        let context = self.device(device)?.context;
        // SAFETY: the primary context is retained, so it is still alive.
        self.check(unsafe { (self.api.cuCtxPushCurrent_v2)(context) }, "cuCtxPushCurrent")?;
        Ok(Current(self))
    }

    /// Turns the status `code` of the driver into an error unless it is 0; `act` names the function that returned it.
    fn check(&self, code: c_int, act: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the driver sets the pointer to a constant string, or to null.
        let reason = unsafe {
            (self.api.cuGetErrorString)(code, &mut text);
            if text.is_null() {
                "an unknown error".into()
            } else {
                CStr::from_ptr(text).to_string_lossy()
            }
        };
        Err(Error::Torch(format!("{act}: the CUDA driver says {reason} ({code})")))
    }
}

/// A guard that makes a device's context the thread's current one as long as it lives.
struct Current<'a>(&'a Driver);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: the call pops the context that `enter` pushed.
        unsafe { (self.0.api.cuCtxPopCurrent_v2)(&mut popped) };
    }
}

/// Returns torch's current stream on a device, from the libtorch_cuda that this process has loaded.
pub fn torch_stream(device: Device) -> Result<*mut c_void> {
    type GetStream = unsafe extern "C" fn(i32, *mut *mut c_void) -> i32;
    const NAME: &str = "aoti_torch_get_current_cuda_stream";
    static GET_STREAM: OnceLock<std::result::Result<GetStream, String>> = OnceLock::new();
    let get_stream = GET_STREAM.get_or_init(|| {
        // SAFETY: the library is already loaded, so opening it runs no code; the function is in torch's stable C
        // interface and has this type.
        unsafe {
            let library = Library::open(Some("libtorch_cuda.so"), RTLD_NOW | libc::RTLD_NOLOAD)
                .map_err(|e| format!("torch has not loaded libtorch_cuda.so: {e}"))?;
            let function = symbol::<GetStream>(&library, NAME).map_err(|e| e.to_string())?;
            // The library stays open, so that the function stays valid.
            std::mem::forget(library);
            Ok(function)
        }
    });
    let mut stream = std::ptr::null_mut();
    // SAFETY: torch writes only to a variable of this function.
    match unsafe { get_stream.as_ref().map_err(|e| Error::Torch(e.clone()))?(device, &mut stream) } {
        0 => Ok(stream),
        code => Err(Error::Torch(format!("{NAME} failed for CUDA device {device} ({code})"))),
    }
}
