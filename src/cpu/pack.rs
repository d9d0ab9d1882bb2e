//! Sixteen numbers at a time: what row kernels compute on, in the registers of each instruction set.
//!
//! LLVM makes good code of loops over lanes while a value is used once; a kernel that holds running sums of several rows
//! in registers, converts 16-bit numbers on the way in and out, or writes past the caches has to say so. It is written
//! once over [`Pack`], and [`multiversion!`](crate::multiversion) hands it the instruction set as an [`Isa`].
//!
//! Every implementation adds lanes up in the same order. AVX2 and AVX-512 give the same bits; the portable one rounds
//! [`mul_add`](Pack::mul_add) twice, so that its last bits differ (without the instruction a fused one is a call into
//! libm, forty times slower).

use crate::cpu::simd::has_avx512_bf16;
use crate::cpu::{pages, Accumulator, Element};
use std::array::from_fn;

/// Numbers in a pack: one AVX-512 register of f32.
pub const WIDTH: usize = 16;
/// Numbers in a block, the unit of stores: a cache line of 16-bit numbers.
pub const PAIR_LANES: usize = 2 * WIDTH;

/// An instruction set, as a type.
///
/// [`multiversion!`](crate::multiversion) alone names one, after asking the processor for it: what the implementations
/// of [`Pack`] rely on.
pub trait Isa: 'static {
    /// Whether a·b + c is one instruction, rounded once.
    const FUSED: bool;
    /// Rows that row kernels take together: their coefficients are read, and the sums of their gradients read and written,
    /// once for all. Four need thirty registers for running sums and coefficients; where there are sixteen, it is one row.
    const ROWS: usize;
    type F32: Pack<f32>;
}

/// The pack of `A` on the instruction set `S`.
pub type Of<A, S> = <A as Accumulator>::Pack<S>;

/// How results go to memory.
#[derive(Clone, Copy, Debug)]
pub struct Store {
    /// Past the caches, for results too large to be found there again: the lines written need not be read first, and
    /// nothing else is pushed out. Blocks that do not start on a cache line, as those of spare rows, go through them, and
    /// so does what has fresh pages: the system has just cleared them, in the caches.
    streamed: bool,
    /// The processor rounds to bf16 by itself.
    bf16: bool,
}

/// Bytes in a cache line, which a streamed block has to start on.
const LINE: usize = 64;

impl Store {
    /// Through the caches, of numbers of the computing type.
    pub const PLAIN: Self = Store { streamed: false, bf16: false };

    /// Through the caches, of numbers of any type.
    #[inline(always)]
    pub fn cached() -> Self {
        Store { streamed: false, bf16: has_avx512_bf16() }
    }

    /// The best way for `result`, the rows of `cols` numbers that one thread writes.
    #[inline(always)]
    pub fn of<E>(result: &[E], cols: usize) -> Self {
        let aligned = result.as_ptr().addr().is_multiple_of(LINE) && (cols * size_of::<E>()).is_multiple_of(LINE);
        let streamed = aligned && size_of_val(result) >= LARGE && !pages::are_fresh(result);
        Store { streamed, ..Store::cached() }
    }

    /// Whether the block that starts `at` goes past the caches.
    #[inline(always)]
    fn streams<E>(self, at: *const E) -> bool {
        self.streamed && at.addr().is_multiple_of(LINE)
    }

    #[inline(always)]
    pub fn is_streamed(self) -> bool {
        self.streamed
    }

    /// Orders streamed stores before whatever this thread publishes next.
    #[inline(always)]
    pub fn finish(self) {
        #[cfg(target_arch = "x86_64")]
        if self.streamed {
            // SAFETY: part of SSE, which every x86-64 processor has.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
    }
}

/// A thread's share from which results are streamed. A norm holds four tensors of this size between its forward and its
/// backward pass, and a processor two to four megabytes of last-level cache per core.
const LARGE: usize = 4 << 20;

/// Sixteen numbers.
pub trait Pack<A: Accumulator>: Copy {
    fn splat(value: A) -> Self;
    fn load<E: Element<Acc = A>>(from: &[E; WIDTH]) -> Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// self·a + b.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// The sum of the lanes: i with i + 8, then i + 4, i + 2, i + 1.
    fn sum(self) -> A;
    /// Stores numbers of the computing type.
    fn put(self, to: &mut [A; WIDTH]);
    /// Rounds and stores two packs.
    fn store<E: Element<Acc = A>>(block: [Self; 2], to: &mut [E; PAIR_LANES], how: Store);

    #[inline(always)]
    fn zero() -> Self {
        Self::splat(A::ZERO)
    }

    /// self where `bits` is at least `threshold`, else zero: dropout.
    fn keep(self, bits: &[u16; WIDTH], threshold: u16) -> Self;

    #[inline(always)]
    fn pair<E: Element<Acc = A>>(from: &[E; PAIR_LANES]) -> [Self; 2] {
        let halves = from.as_chunks::<WIDTH>().0;
        [Self::load(&halves[0]), Self::load(&halves[1])]
    }
}

/// The numbers of pack `p` in a block.
#[inline(always)]
pub fn pack<E>(block: &[E; PAIR_LANES], p: usize) -> &[E; WIDTH] {
    &block.as_chunks().0[p]
}

/// The same, to be written.
#[inline(always)]
pub fn pack_mut<E>(block: &mut [E; PAIR_LANES], p: usize) -> &mut [E; WIDTH] {
    &mut block.as_chunks_mut().0[p]
}

/// Statements for each pack of a block. A loop would be one only where LLVM unrolls it.
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

/// Any processor: arrays, and what LLVM makes of them. f64 uses it on all.
#[derive(Clone, Copy)]
pub struct Portable<A>([A; WIDTH]);

#[derive(Clone, Copy, Debug)]
pub struct Baseline;

impl Isa for Baseline {
    const FUSED: bool = false;
    const ROWS: usize = 1;
    type F32 = Portable<f32>;
}

impl<A: Accumulator> Pack<A> for Portable<A> {
    #[inline(always)]
    fn splat(value: A) -> Self {
        Portable([value; WIDTH])
    }
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
    #[inline(always)]
    fn mul_add(self, a: Self, b: Self) -> Self {
        Portable(from_fn(|l| self.0[l] * a.0[l] + b.0[l]))
    }
    #[inline(always)]
    fn sum(self) -> A {
        let v = self.0;
        let v: [A; 8] = from_fn(|l| v[l] + v[l + 8]);
        let v: [A; 4] = from_fn(|l| v[l] + v[l + 4]);
        (v[0] + v[2]) + (v[1] + v[3])
    }
    #[inline(always)]
    fn put(self, to: &mut [A; WIDTH]) {
        *to = self.0;
    }
    #[inline(always)]
    fn store<E: Element<Acc = A>>(block: [Self; 2], to: &mut [E; PAIR_LANES], _: Store) {
        for (to, pack) in to.as_chunks_mut::<WIDTH>().0.iter_mut().zip(block) {
            for l in 0..WIDTH {
                to[l] = E::store(pack.0[l]);
            }
        }
    }
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
