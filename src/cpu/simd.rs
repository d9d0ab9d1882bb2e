//! Instruction sets, chosen at run time.
//!
//! A kernel is written once, as plain Rust over arrays of lanes. [`multiversion!`](crate::multiversion) compiles it
//! for the baseline, for AVX2 + FMA + F16C and for AVX-512, and calls the best version that the processor can run.
//! `NORMFORMER_RS_CPU` (`baseline`, `avx2`, `avx512`) chooses a lower level, so that tests can run each version.

use std::sync::atomic::{AtomicU8, Ordering};

/// The instruction sets, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    Baseline = 1,
    Avx2 = 2,
    Avx512 = 3,
}

impl Level {
    /// All levels, weakest first.
    pub const ALL: [Level; 3] = [Level::Baseline, Level::Avx2, Level::Avx512];

    /// Returns the level's name, as NORMFORMER_RS_CPU takes it.
    pub fn name(self) -> &'static str {
        match self {
            Level::Baseline => "baseline",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        }
    }

    /// Returns the level with this number; `None` for 0, which means that none is chosen yet.
    fn from_u8(v: u8) -> Option<Level> {
        Level::ALL.into_iter().find(|l| *l as u8 == v)
    }
}

/// Returns the best level that the processor has.
pub fn supported() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        let has_avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("f16c");
        let has_avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match (has_avx2, has_avx512) {
            (true, true) => return Level::Avx512,
            (true, false) => return Level::Avx2,
            _ => {}
        }
    }
    Level::Baseline
}

/// The number of the level at which kernels run; 0 until one is chosen.
static CHOSEN: AtomicU8 = AtomicU8::new(0);

/// Returns the level at which kernels run; the first call chooses it.
#[inline]
pub fn level() -> Level {
    Level::from_u8(CHOSEN.load(Ordering::Relaxed)).unwrap_or_else(choose)
}

/// Chooses the level at the first call: the one that NORMFORMER_RS_CPU names, or the best if it names none.
#[cold]
fn choose() -> Level {
    let wanted = std::env::var("NORMFORMER_RS_CPU").ok();
    let wanted = Level::ALL.into_iter().find(|l| Some(l.name()) == wanted.as_deref());
    force(wanted)
}

/// Forces a level (`None` for the best), limited to the processor's best; returns the level in effect.
pub fn force(wanted: Option<Level>) -> Level {
    let level = wanted.map_or(supported(), |w| w.min(supported()));
    CHOSEN.store(level as u8, Ordering::Relaxed);
    level
}

/// True if kernels run at AVX-512 and the processor has an instruction that rounds to bf16.
#[inline(always)]
pub fn has_avx512_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return level() == Level::Avx512 && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// True if the processor has the bf16 instructions that libtorch's products use. Only x86 is checked; elsewhere true.
pub fn has_bf16_products() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    return true;
}

/// Compiles a function once per [`Level`], and calls the version for the level that [`level`] returns.
///
/// The body is generic Rust. Everything that it calls in hot loops must be `#[inline(always)]`, so that it is
/// compiled for the same instruction set. Generic parameters are written `[E: Element, F: Element]`; `[isa S]` before
/// them passes the instruction set as a type, an [`Isa`](crate::cpu::pack::Isa).
///
/// On AVX-512, f64 (a type of 8 bytes) runs AVX2's code, which saves compile time; the results are the same.
#[macro_export]
macro_rules! multiversion {
    // The first form has `[isa S]`, the second has not. Below, types of 8 bytes skip the AVX-512 version.
    ($(#[$doc:meta])* $vis:vis fn $name:ident [isa $isa:ident] [$($g:ident : $bound:path),+] ($($arg:ident : $ty:ty),* $(,)?) $body:block) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name <$($g: $bound),+> ($($arg: $ty),*) {
            // The body is inlined into each version, and so is compiled for the version's instruction set.
            #[inline(always)]
            fn body <$isa: $crate::cpu::pack::Isa, $($g: $bound),+> ($($arg: $ty),*) $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,f16c")]
            fn avx512 <$($g: $bound),+> ($($arg: $ty),*) {
                body::<$crate::cpu::pack::Avx512, $($g),+>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,bmi2,f16c")]
            fn avx2 <$($g: $bound),+> ($($arg: $ty),*) {
                body::<$crate::cpu::pack::Avx2, $($g),+>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            if const { $(size_of::<$g>() < 8)&&+ } && $crate::cpu::simd::level() == $crate::cpu::simd::Level::Avx512 {
                // SAFETY: `level` never exceeds `supported`, which has checked that the processor has these features.
                return unsafe { avx512::<$($g),+>($($arg),*) };
            }
            #[cfg(target_arch = "x86_64")]
            if $crate::cpu::simd::level() >= $crate::cpu::simd::Level::Avx2 {
                // SAFETY: `level` is at least AVX2 only if the processor has these features.
                return unsafe { avx2::<$($g),+>($($arg),*) };
            }
            body::<$crate::cpu::pack::Baseline, $($g),+>($($arg),*)
        }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident $([$($g:ident : $bound:path),+])? ($($arg:ident : $ty:ty),* $(,)?) $body:block) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$($g: $bound),+>)? ($($arg: $ty),*) {
            // The body is inlined into each version, and so is compiled for the version's instruction set.
            #[inline(always)]
            fn body $(<$($g: $bound),+>)? ($($arg: $ty),*) $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,f16c")]
            fn avx512 $(<$($g: $bound),+>)? ($($arg: $ty),*) {
                body $(::<$($g),+>)? ($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,bmi2,f16c")]
            fn avx2 $(<$($g: $bound),+>)? ($($arg: $ty),*) {
                body $(::<$($g),+>)? ($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            if const { true $($(&& size_of::<$g>() < 8)+)? }
                && $crate::cpu::simd::level() == $crate::cpu::simd::Level::Avx512
            {
                // SAFETY: `level` never exceeds `supported`, which has checked that the processor has these features.
                return unsafe { avx512 $(::<$($g),+>)? ($($arg),*) };
            }
            #[cfg(target_arch = "x86_64")]
            if $crate::cpu::simd::level() >= $crate::cpu::simd::Level::Avx2 {
                // SAFETY: `level` is at least AVX2 only if the processor has these features.
                return unsafe { avx2 $(::<$($g),+>)? ($($arg),*) };
            }
            body $(::<$($g),+>)? ($($arg),*)
        }
    };
}
