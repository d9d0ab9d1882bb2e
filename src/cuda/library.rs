//! Shared libraries that are bound at run time: finds and opens them, and declares the types of their functions.

use crate::error::{Error, Result};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::path::{Path, PathBuf};

/// Declares a struct of a library's functions, with a function `bind` that looks up each of them by name.
macro_rules! api {
    ($(#[$doc:meta])* $name:ident { $($f:ident : fn($($t:ty),* $(,)?) -> $r:ty;)* }) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        pub struct $name { $($f: unsafe extern "C" fn($($t),*) -> $r,)* }

        impl $name {
            /// Looks up each function in `library`; errors if one is missing.
            ///
            /// # Safety
            /// The library's functions of these names have the declared types.
            unsafe fn bind(library: libloading::os::unix::Library) -> $crate::error::Result<Self> {
                let functions = Self {
                    // SAFETY: guaranteed by the caller.
                    $($f: unsafe { $crate::cuda::library::symbol(&library, stringify!($f))? },)*
                };
                // The library is never unloaded, so that the functions outlive every caller.
                std::mem::forget(library);
                Ok(functions)
            }
        }
    };
}
pub(super) use api;

/// Returns the symbol `name` of a library, such as a function; errors if the library lacks it.
///
/// # Safety
/// The library's symbol of this name is a `T`.
pub unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T> {
    // SAFETY: guaranteed by the caller.
    let symbol = unsafe { library.get::<T>(name.as_bytes()) };
    symbol.map(|s| *s).map_err(|e| Error::Torch(format!("the library lacks {name} ({}): it is too old", reason(&e))))
}

/// Returns the folder that the user has set in NORMFORMER_RS_CUDA_LIBRARIES, in which libraries are searched first.
pub fn chosen_folder() -> Option<PathBuf> {
    std::env::var_os("NORMFORMER_RS_CUDA_LIBRARIES").map(PathBuf::from)
}

/// Opens a library by its path, or by its name in the loader's search path.
pub fn open(file: impl AsRef<Path>) -> Result<Library> {
    let file = file.as_ref();
    // SAFETY: CUDA's libraries may be loaded at any time by any thread.
    unsafe { Library::open(Some(file), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|e| Error::Torch(format!("{} cannot be loaded: {}", file.display(), reason(&e))))
}

/// Returns the message of the system's loader, which libloading wraps in an error of its own.
fn reason(e: &libloading::Error) -> String {
    std::error::Error::source(e).map_or_else(|| e.to_string(), ToString::to_string)
}

/// Returns the path of a library that this process has loaded and whose file name begins with `prefix`.
pub fn mapped(prefix: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    // The path at the end of a line is its only field with a slash.
    maps.lines().filter_map(|line| line.find('/').map(|i| PathBuf::from(&line[i..]))).find(|p| is_library(p, prefix))
}

/// Returns the files of a folder whose names begin with `prefix`, the newest version first.
pub fn versions(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let mut libraries: Vec<PathBuf> = files.filter(|p| is_library(p, prefix)).collect();
    libraries.sort();
    libraries.reverse();
    libraries
}

/// True if the file name begins with `prefix`, and the file is not NVIDIA's second build of its compiler.
fn is_library(path: &Path, prefix: &str) -> bool {
    // The second build has `.alt.` in its name.
    path.file_name().and_then(|f| f.to_str()).is_some_and(|f| f.starts_with(prefix) && !f.contains(".alt."))
}
