//! Compiles the C++ code that registers the operators with PyTorch, against the libtorch that torch-sys uses.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=src/operator/shim");
    let torch = torch_folder();
    let (lib, include) = (torch.join("lib"), torch.join("include"));
    println!("cargo:rustc-env=NORMFORMER_RS_TORCH={}", torch_version(&include));

    let mut shim = cc::Build::new();
    if env::var_os("CARGO_FEATURE_PYTHON").is_some() {
        shim.define("NORMFORMER_RS_PYTHON", None);
    }
    let is_macos = env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "macos");
    if is_macos {
        shim.flag("-Xpreprocessor"); // Apple's clang takes the flag after it for the preprocessor alone
    }
    shim.cpp(true)
        .std("c++20")
        .pic(true)
        .flag("-fopenmp") // without this flag at::parallel_for is a serial loop
        .flag("-fvisibility=hidden")
        .flag("-O2")
        .warnings(false) // torch's headers cause warnings
        .define("NORMFORMER_RS_SHIM", None)
        .include(&include)
        .include(include.join("torch/csrc/api/include"))
        .file("src/operator/shim/shim.cpp");
    // `cargo check` for another system has neither its headers nor its libtorch.
    println!("cargo:rerun-if-env-changed=NORMFORMER_RS_WITHOUT_CPP");
    if env::var_os("NORMFORMER_RS_WITHOUT_CPP").is_some() {
        return;
    }
    shim.compile("normformer_rs_shim");

    // Link torch's own OpenMP, by its file name: a second copy would have a second pool of threads.
    println!("cargo:rustc-link-arg={}", if is_macos { "-lomp" } else { "-l:libgomp.so.1" });
    if env::var_os("CARGO_FEATURE_PYTHON").is_some() {
        println!("cargo:rustc-link-lib=torch_python");
        // In the wheel, libtorch lies beside this library in site-packages.
        let here = if is_macos { "@loader_path" } else { "$ORIGIN" };
        println!("cargo:rustc-link-arg-cdylib=-Wl,-rpath,{here}/../torch/lib");
    } else {
        // Tests and programs use the libtorch that they were built with, and find it without LD_LIBRARY_PATH.
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
        if lib.join("libtorch_cuda.so").exists() {
            // No code names a symbol of libtorch_cuda. Without this flag the linker would leave the library out, and
            // CUDA with it.
            println!("cargo:rustc-link-arg=-Wl,--no-as-needed,-ltorch_cuda,--as-needed");
        }
    }
}

/// Returns the torch folder of the Python that torch-sys uses: `python` in an active environment, else `python3`.
fn torch_folder() -> PathBuf {
    let python = if env::var_os("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
    let find = "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])";
    let output = Command::new(python).args(["-c", find]).output().unwrap_or_else(|e| panic!("run {python}: {e}"));
    let folder = String::from_utf8_lossy(&output.stdout).trim().to_string();
    assert!(output.status.success(), "{python} has no torch: {}", String::from_utf8_lossy(&output.stderr));
    folder.into()
}

/// Returns the version of the libtorch that the build uses, such as 2.11.0.
fn torch_version(include: &Path) -> String {
    let header = include.join("torch/headeronly/version.h");
    let text = fs::read_to_string(&header).unwrap_or_else(|e| panic!("read {}: {e}", header.display()));
    let number = |part: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("#define TORCH_VERSION_{part} ")));
        line.unwrap_or_else(|| panic!("{} has no TORCH_VERSION_{part}", header.display())).trim().to_string()
    };
    ["MAJOR", "MINOR", "PATCH"].map(number).join(".")
}
