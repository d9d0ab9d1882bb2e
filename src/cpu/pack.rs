//! Packs of sixteen numbers, on which row kernels compute, in the registers of each instruction set.
//!
//! LLVM compiles loops over lanes well if each value is used once. It does not by itself keep running sums of several
//! rows in registers, convert 16-bit numbers on load and store, or bypass the caches. A kernel that needs this is
//! written once over [`Pack`], and [`multiversion!`](crate::multiversion) passes it the instruction set as an [`Isa`].
//!
//! Every implementation adds lanes in the same order, so in f32 AVX2, AVX-512 and aarch64's NEON give the same bits. On
//! x86 the last bits of the portable implementation differ, because its [`mul_add`](Pack::mul_add) rounds twice: on a
//! processor without the fused instruction, libm's function would be forty times slower.

use crate::cpu::simd::has_avx512_bf16;
use crate::cpu::{pages, Accumulator, Element};
use std::array::from_fn;

/// The number of lanes in a pack: one AVX-512 register of f32.
pub const WIDTH: usize = 16;
/// The number of lanes in a block, the unit of stores: a cache line of 16-bit numbers.
pub const PAIR_LANES: usize = 2 * WIDTH;

/// An instruction set, as a type. Only [`multiversion!`](crate::multiversion) names one, after it has checked that
/// the processor has it; the implementations of [`Pack`] rely on that.
pub trait Isa: 'static {
    /// True if a·b + c is one instruction with one rounding.
    const FUSED: bool;
    /// The number of rows that row kernels process together, so that coefficients, and the sums of their gradients,
    /// are read and written once for all these rows. Four rows need thirty registers for running sums and
    /// coefficients; an instruction set with sixteen registers processes one row.
    const ROWS: usize;
    /// The pack of f32 numbers.
    type F32: Pack<f32>;
}

/// The pack type of `A` on the instruction set `S`.
pub type Of<A, S> = <A as Accumulator>::Pack<S>;

/// The way in which results are written to memory.
#[derive(Clone, Copy, Debug)]
pub struct Store {
    /// True if results bypass the caches, because they are too large to stay in them until they are read. Then lines
    /// need not be read before they are written, and nothing else is evicted. Blocks that do not start on a cache line,
    /// such as those of spare rows, still use the caches. So do results on fresh pages: the system has just cleared
    /// these pages, so they are in the caches.
    streamed: bool,
    /// True if the processor has an instruction that rounds to bf16.
    bf16: bool,
}

/// The size in bytes of a cache line, on which a streamed block must start.
const LINE: usize = 64;

impl Store {
    /// Stores numbers of the computing type through the caches.
    pub const PLAIN: Self = Store { streamed: false, bf16: false };

    /// Returns the way to store numbers of any type through the caches.
    #[inline(always)]
    pub fn cached() -> Self {
        Store { streamed: false, bf16: has_avx512_bf16() }
    }

    /// Returns the best way to store `result`, which is one thread's rows of `cols` numbers.
    #[inline(always)]
    pub fn of<E>(result: &[E], cols: usize) -> Self {
        // `aligned` is true if every row starts on a cache line.
        let aligned = result.as_ptr().addr().is_multiple_of(LINE) && (cols * size_of::<E>()).is_multiple_of(LINE);
        let streamed = aligned && size_of_val(result) >= LARGE && !pages::are_fresh(result);
        Store { streamed, ..Store::cached() }
    }

    /// True if the block that begins at the address `start` bypasses the caches.
    #[inline(always)]
    fn streams<E>(self, start: *const E) -> bool {
        self.streamed && start.addr().is_multiple_of(LINE)
    }

    /// True if results bypass the caches.
    #[inline(always)]
    pub fn is_streamed(self) -> bool {
        self.streamed
    }

    /// Orders streamed stores before this thread's later stores, so that other threads see the results in time.
    #[inline(always)]
    pub fn finish(self) {
        #[cfg(target_arch = "x86_64")]
        if self.streamed {
            // SAFETY: part of SSE, which every x86-64 processor has.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
    }
}

/// A thread's part of the results bypasses the caches if it has at least this many bytes. Between its forward and its
/// backward pass, a norm needs four tensors of this size, and a processor has two to four megabytes of last-level
/// cache per core.
const LARGE: usize = 4 << 20;

/// A pack of sixteen numbers.
pub trait Pack<A: Accumulator>: Copy {
    /// Returns a pack with `value` in every lane.
    fn splat(value: A) -> Self;
    /// Loads sixteen numbers and widens them to the computing type.
    fn load<E: Element<Acc = A>>(from: &[E; WIDTH]) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// Returns self·a + b.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// Returns the sum of the lanes: first i + (i + 8), then these sums with distance 4, 2 and 1.
    fn sum(self) -> A;
    /// Stores the pack in the computing type.
    fn put(self, to: &mut [A; WIDTH]);
    /// Rounds two packs to the storage type and stores them.
    fn store<E: Element<Acc = A>>(block: [Self; 2], to: &mut [E; PAIR_LANES], how: Store);

    /// Returns a pack of zeros.
    #[inline(always)]
    fn zero() -> Self {
        Self::splat(A::ZERO)
    }

    /// Keeps the lanes whose random `bits` are at least `threshold` and zeroes the others, as dropout does.
    fn keep(self, bits: &[u16; WIDTH], threshold: u16) -> Self;

    /// Loads the two packs of a block.
    #[inline(always)]
    fn pair<E: Element<Acc = A>>(from: &[E; PAIR_LANES]) -> [Self; 2] {
        let halves = from.as_chunks::<WIDTH>().0;
        [Self::load(&halves[0]), Self::load(&halves[1])]
    }
}

/// Returns one half of a block, the sixteen numbers of pack `p`, which is 0 or 1.
#[inline(always)]
pub fn pack<E>(block: &[E; PAIR_LANES], p: usize) -> &[E; WIDTH] {
    &block.as_chunks().0[p]
}

/// Returns one half of a block, the sixteen numbers of pack `p`, which is 0 or 1, for writing.
#[inline(always)]
pub fn pack_mut<E>(block: &mut [E; PAIR_LANES], p: usize) -> &mut [E; WIDTH] {
    &mut block.as_chunks_mut().0[p]
}

/// Writes the statements `$work` out for each of a block's two packs, first with `$p` = 0 and then with `$p` = 1. A
/// loop would not do, because LLVM does not unroll every loop.
#[macro_export]
macro_rules! each_pack {
    ($p:ident => $work:block) => {{
        {
            let $p = 0;
            $work
        }
        {
            let $p = 1;
            $work
        }
    }};
}

/// The pack for any processor: an array of lanes, which LLVM vectorises. For f64 it is used on every processor. In the
/// methods, `l` is the index of a lane.
#[derive(Clone, Copy)]
pub struct Portable<A>([A; WIDTH]);

/// The instruction set that every processor of an architecture has.
#[derive(Clone, Copy, Debug)]
pub struct Baseline;

impl Isa for Baseline {
    const FUSED: bool = cfg!(target_arch = "aarch64");
    const ROWS: usize = 1;
    type F32 = Portable<f32>;
}

impl<A: Accumulator> Pack<A> for Portable<A> {
    /// Returns a pack with `value` in every lane.
    #[inline(always)]
    fn splat(value: A) -> Self {
        Portable([value; WIDTH])
    }
    /// Loads sixteen numbers of the storage type E, and widens them to A.
    #[inline(always)]
    fn load<E: Element<Acc = A>>(from: &[E; WIDTH]) -> Self {
        Portable(from_fn(|l| from[l].load()))
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Portable(from_fn(|l| self.0[l] + other.0[l]))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Portable(from_fn(|l| self.0[l] - other.0[l]))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Portable(from_fn(|l| self.0[l] * other.0[l]))
    }
    /// Returns self·a + b, rounded once on aarch64 and twice elsewhere.
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        Portable(from_fn(|l| match Baseline::FUSED {
            true => self.0[l].mul_add(a.0[l], b.0[l]),
            false => self.0[l] * a.0[l] + b.0[l],
        }))
    }
    /// Returns the sum of the lanes.
    #[inline(always)]
    fn sum(self) -> A {
        // Every implementation adds the lanes in this order, so that their sums have the same bits.
        let v = self.0;
        let v: [A; 8] = from_fn(|l| v[l] + v[l + 8]);
        let v: [A; 4] = from_fn(|l| v[l] + v[l + 4]);
        (v[0] + v[2]) + (v[1] + v[3])
    }
    /// Stores the lanes without conversion.
    #[inline(always)]
    fn put(self, to: &mut [A; WIDTH]) {
        *to = self.0;
    }
    /// Rounds two packs to the storage type and stores them through the caches, which a plain loop cannot bypass.
    #[inline(always)]
    fn store<E: Element<Acc = A>>(block: [Self; 2], to: &mut [E; PAIR_LANES], _: Store) {
        for (to, pack) in to.as_chunks_mut::<WIDTH>().0.iter_mut().zip(block) {
            for l in 0..WIDTH {
                to[l] = E::store(pack.0[l]);
            }
        }
    }
    /// Keeps the lanes whose random `bits` are at least `threshold`, and zeroes the others.
    #[inline(always)]
    fn keep(self, bits: &[u16; WIDTH], threshold: u16) -> Self {
        Portable(from_fn(|l| if bits[l] >= threshold { self.0[l] } else { A::ZERO }))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(test)]
mod tests;
