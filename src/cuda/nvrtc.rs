//! NVRTC, NVIDIA's run-time compiler, which compiles source to a device binary. It comes with torch's own wheels.

use super::library::{api, chosen_folder, mapped, open, versions};
use crate::error::{Error, Result};
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

type CompiledProgram = *mut c_void;

api!(
    /// The functions of libnvrtc that this crate calls.
    Nvrtc {
        nvrtcVersion: fn(*mut c_int, *mut c_int) -> c_int;
        nvrtcGetErrorString: fn(c_int) -> *const c_char;
        nvrtcCreateProgram: fn(
            *mut CompiledProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        ) -> c_int;
        nvrtcDestroyProgram: fn(*mut CompiledProgram) -> c_int;
        nvrtcCompileProgram: fn(CompiledProgram, c_int, *const *const c_char) -> c_int;
        nvrtcGetProgramLogSize: fn(CompiledProgram, *mut usize) -> c_int;
        nvrtcGetProgramLog: fn(CompiledProgram, *mut c_char) -> c_int;
        nvrtcGetCUBINSize: fn(CompiledProgram, *mut usize) -> c_int;
        nvrtcGetCUBIN: fn(CompiledProgram, *mut c_char) -> c_int;
    }
);

/// Returns the compiler, which is loaded once per process.
pub fn compiler() -> Result<&'static Nvrtc> {
    static COMPILER: OnceLock<std::result::Result<Nvrtc, String>> = OnceLock::new();
    COMPILER.get_or_init(|| find().map_err(|e| e.to_string())).as_ref().map_err(|e| Error::Torch(e.clone()))
}

/// Returns the folders to search: only NORMFORMER_RS_CUDA_LIBRARIES, if it is set. Otherwise these are the folders of
/// the CUDA libraries that torch has loaded, and those of torch's wheels.
fn folders() -> Vec<PathBuf> {
    if let Some(folder) = chosen_folder() {
        return vec![folder];
    }
    let parent = |p: PathBuf| p.parent().map(Path::to_owned);
    let mut folders: Vec<PathBuf> =
        ["libnvrtc.so.", "libcudart.so."].iter().filter_map(|prefix| mapped(prefix)).filter_map(parent).collect();
    // The path ends in site-packages/torch/lib.
    if let Some(lib) = mapped("libtorch_cpu.so").and_then(parent) {
        let site = lib.join("../..");
        folders.extend(["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"].map(|folder| site.join(folder)));
        folders.push(lib);
    }
    folders
}

/// Loads the first libnvrtc that can be opened: from [`folders`], then from the loader's search path. If none can, the
/// error says why, for each.
fn find() -> Result<Nvrtc> {
    let mut errors = Vec::new();
    for folder in folders() {
        for file in versions(&folder, "libnvrtc.so") {
            // The compiler looks up its built-ins only by name in the loader's search path. Loading them first lets
            // it find them.
            for builtins in versions(&folder, "libnvrtc-builtins.so") {
                if let Ok(library) = open(builtins) {
                    std::mem::forget(library);
                }
            }
            match open(&file) {
                // SAFETY: these functions of NVRTC have had these types since CUDA 11.1.
                Ok(library) => return unsafe { Nvrtc::bind(library) },
                Err(e) => errors.push(e.to_string()),
            }
        }
    }
    if chosen_folder().is_none() {
        for name in ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"] {
            match open(name) {
                // SAFETY: these functions of NVRTC have had these types since CUDA 11.1.
                Ok(library) => return unsafe { Nvrtc::bind(library) },
                Err(e) => errors.push(e.to_string()),
            }
        }
    }
    Err(Error::Torch(format!(
        "NVIDIA's run-time compiler was not found ({}): install nvidia-cuda-nvrtc, or name the folder of libnvrtc.so in \
         NORMFORMER_RS_CUDA_LIBRARIES",
        if errors.is_empty() { "no libnvrtc.so".to_string() } else { errors.join("; ") }
    )))
}

impl Nvrtc {
    /// Returns the version, (major, minor).
    pub fn version(&self) -> (i32, i32) {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the compiler writes only to variables of this function.
        unsafe { (self.nvrtcVersion)(&mut major, &mut minor) };
        (major, minor)
    }

    /// Compiles `source` for an architecture such as 90. Returns the binary, and the compiler's messages, in which
    /// the source is called `name`.
    pub fn compile(&self, name: &str, source: &str, options: &str, architecture: i32) -> Result<(Vec<u8>, String)> {
        let text = |s: &str| CString::new(s).expect("sources and options hold no NUL");
        let (source, file) = (text(source), text(name));
        let architecture = format!("--gpu-architecture=sm_{architecture}");
        let options: Vec<CString> =
            ["--std=c++17", &architecture].into_iter().chain(options.split_whitespace()).map(text).collect();
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut handle = std::ptr::null_mut();
        // The source includes no headers, so none are passed.
        // SAFETY: the strings outlive the program, which is destroyed below.
        let status = unsafe {
            (self.nvrtcCreateProgram)(
                &mut handle,
                source.as_ptr(),
                file.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        self.check(status, "nvrtcCreateProgram", "")?;
        // SAFETY: the program was created above, and the strings are still alive.
        let result = unsafe {
            let compiled = (self.nvrtcCompileProgram)(handle, pointers.len() as c_int, pointers.as_ptr());
            let log = self.read(handle, self.nvrtcGetProgramLogSize, self.nvrtcGetProgramLog).unwrap_or_default();
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
            let architecture = options[1].to_string_lossy(); // the option --gpu-architecture
            self.check(compiled, &format!("compiling {name} for {architecture}"), &log)
                .and_then(|()| Ok((self.read(handle, self.nvrtcGetCUBINSize, self.nvrtcGetCUBIN)?, log)))
        };
        // SAFETY: the program was created above, and is not used again.
        unsafe { (self.nvrtcDestroyProgram)(&mut handle) };
        result
    }

    /// Returns one of the compiler's outputs, the log or the binary. `size` is the function that reports its length,
    /// and `get` the one that copies it.
    ///
    /// # Safety
    /// The program has not been destroyed, and `get` writes as many bytes as `size` reports.
    unsafe fn read(
        &self,
        program: CompiledProgram,
        size: unsafe extern "C" fn(CompiledProgram, *mut usize) -> c_int,
        get: unsafe extern "C" fn(CompiledProgram, *mut c_char) -> c_int,
    ) -> Result<Vec<u8>> {
        let mut length = 0;
        // SAFETY: guaranteed by the caller.
        self.check(unsafe { size(program, &mut length) }, "reading the compiler's output", "")?;
        let mut bytes = vec![0u8; length];
        // SAFETY: guaranteed by the caller; the buffer has the reported length.
        self.check(unsafe { get(program, bytes.as_mut_ptr().cast()) }, "reading the compiler's output", "")?;
        Ok(bytes)
    }

    /// Turns the status `code` of the compiler into an error unless it is 0. The error's text has the operation `act`,
    /// the reason, and the compiler's messages `log`.
    fn check(&self, code: c_int, act: &str, log: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC returns a constant string.
        let reason = unsafe { CStr::from_ptr((self.nvrtcGetErrorString)(code)) }.to_string_lossy();
        let log = if log.is_empty() { String::new() } else { format!("\n{log}") };
        Err(Error::Torch(format!("{act}: NVRTC says {reason}{log}")))
    }
}
