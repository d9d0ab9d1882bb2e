//! A guard against processors that announce AMX but cannot run it.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__cpuid, __cpuid_count};

/// oneDNN's environment variables that limit its instruction set; the current name is first.
const LIMITS: [&str; 2] = ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"];

/// Keeps torch's bf16 products from using AMX if the processor does not report the size of its tiles. Some virtual
/// machines show the feature but hide leaf 1Dh of CPUID. Then oneDNN loads no tiles, and its first product would end
/// the process with SIGILL. oneDNN reads the limit at its first use, so this must run at import. A limit that the
/// user has set stays.
pub fn avoid_if_broken() {
    // AVX512_CORE_FP16 is oneDNN's highest level without AMX.
    if is_broken() && LIMITS.iter().all(|name| std::env::var_os(name).is_none()) {
        std::env::set_var(LIMITS[0], "AVX512_CORE_FP16");
    }
}

/// True if the processor announces AMX's tiles but does not report their size.
#[cfg(target_arch = "x86_64")]
pub fn is_broken() -> bool {
    // SAFETY: every x86-64 processor has CPUID, and only leaves up to the last one are read.
    #[allow(unused_unsafe)] // later versions of Rust make this function safe
    unsafe {
        // Leaf 7 announces tiles in bit 24 of edx. Leaf 1Dh holds their size, which is 0 if the leaf is hidden.
        let last = __cpuid(0).eax;
        let has_tiles = last >= 7 && __cpuid_count(7, 0).edx & 1 << 24 != 0;
        has_tiles && (last < 0x1d || __cpuid_count(0x1d, 1).eax == 0)
    }
}

/// True if the processor is Intel's.
#[cfg(target_arch = "x86_64")]
pub fn is_intel() -> bool {
    // SAFETY: every x86-64 processor has leaf 0 of CPUID.
    #[allow(unused_unsafe)] // later versions of Rust make this function safe
    let leaf = unsafe { __cpuid(0) };
    // These registers spell the vendor's name, in this order.
    [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat() == *b"GenuineIntel"
}

/// Returns false: other architectures have no tiles.
#[cfg(not(target_arch = "x86_64"))]
pub fn is_broken() -> bool {
    false
}

/// Returns false: Intel's processors are x86.
#[cfg(not(target_arch = "x86_64"))]
pub fn is_intel() -> bool {
    false
}
