//! Philox4x32-10 (Salmon et al. 2011): random numbers that depend only on a seed and on the place where they are
//! used.
//!
//! A dropout mask is Philox(seed, update, micro-batch, site, element). So recomputation, resumed runs and any number
//! of ranks get the same mask, and the backward pass needs no stored mask. Element (row r, column c) of a matrix uses
//! the (c mod 8)-th 16-bit half word, low halves first, of the block with
//!
//! > key = (seed low, seed high), counter = (⌊c/8⌋, r, site | micro-batch · 2¹⁶, update).

use super::memory;

// `fill` reinterprets 64-bit numbers as half words, so the order of bytes matters.
const _: () = assert!(cfg!(target_endian = "little"), "fill writes words as pairs of halves, low half first");

/// The number of columns that one Philox block serves.
pub const BLOCK: usize = 8;
/// The number of blocks computed side by side: one AVX-512 register of 32-bit words.
const LANES: usize = 16;

/// The seed and counters of one stream of random numbers; an element's row and column complete the counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream {
    pub seed: u64,
    pub update: u32,
    pub micro_batch: u16,
    pub site: u16,
}

/// A dropout rate in the form that kernels apply.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    pub stream: Stream,
    /// The threshold round(p·2¹⁶); an element is kept if its 16 random bits are at least this.
    pub threshold: u16,
    /// The factor 1/(1 − threshold/2¹⁶) of kept elements. It uses the rounded rate, so that the expectation is exact.
    pub scale: f64,
}

impl Dropout {
    /// Returns the form for kernels; `None` if p rounds to zero, because then nothing is dropped or scaled.
    pub fn new(p: f64, stream: Stream) -> Option<Self> {
        let threshold = (p * 65536.0 + 0.5).floor().clamp(0.0, 65535.0) as u16;
        (threshold > 0).then(|| Dropout { stream, threshold, scale: 65536.0 / (65536.0 - threshold as f64) })
    }
}

/// Sixteen 32-bit words, each in the low half of 64 bits (the high half is garbage). In this form the processor
/// multiplies 32 by 32 bits without moving data between rounds, twice as fast as in the form of sixteen u32.
type Words = [u64; LANES];

/// Computes one round for sixteen counters; `c[i][l]` is word i of counter l. Words 0 and 2 are multiplied by the
/// algorithm's constants, and the halves of the products are mixed with the other words and the key.
#[inline(always)]
fn round(c: &mut [Words; 4], key: [u32; 2]) {
    const M0: u64 = 0xD251_1F53;
    const M1: u64 = 0xCD9E_8D57;
    for l in 0..LANES {
        let p0 = M0 * (c[0][l] & 0xffff_ffff);
        let p1 = M1 * (c[2][l] & 0xffff_ffff);
        c[0][l] = (p1 >> 32) ^ c[1][l] ^ key[0] as u64;
        c[1][l] = p1;
        c[2][l] = (p0 >> 32) ^ c[3][l] ^ key[1] as u64;
        c[3][l] = p0;
    }
}

/// Computes the ten rounds for sixteen counters at the same time, and returns their random words. `c[i][l]` is word i
/// of counter l; `seed` is the key.
#[inline(always)]
fn philox(mut c: [Words; 4], seed: u64) -> [Words; 4] {
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        round(&mut c, key);
        // Between rounds the algorithm adds these constants to the key.
        key[0] = key[0].wrapping_add(0x9E37_79B9);
        key[1] = key[1].wrapping_add(0xBB67_AE85);
    }
    c
}

/// Returns the number of half words per row of `cols` columns in [`fill`]'s output: cols rounded up to whole blocks.
#[inline(always)]
pub fn padded(cols: usize) -> usize {
    cols.div_ceil(BLOCK) * BLOCK
}

/// Writes the random half words of `rows` rows from row `first_row` on, `padded(cols)` per row. `out` must have the
/// length of [`scratch`]'s buffers: `rows·padded(cols)`, rounded up to 128. These are sixteen blocks of eight half
/// words, which are computed side by side.
#[inline(always)]
pub fn fill(stream: &Stream, first_row: usize, rows: usize, cols: usize, out: &mut [u16]) {
    let per_row = padded(cols) / BLOCK;
    // `high` holds the two words of the counter that all elements of the stream share.
    let high = [stream.site as u32 | (stream.micro_batch as u32) << 16, stream.update];
    // These are the row of the next block, and the block's index in that row.
    let (mut row, mut block) = (first_row as u32, 0u32);
    let mut blocks_left = rows * per_row;
    for group in out.chunks_exact_mut(LANES * BLOCK) {
        if blocks_left == 0 {
            break;
        }
        // `counters[i][l]` is word i of the counter of the group's block l: the block's index, its row, then `high`.
        let mut counters = [[0; LANES], [0; LANES], [high[0] as u64; LANES], [high[1] as u64; LANES]];
        // The previous group may have ended exactly at the end of a row.
        if block as usize == per_row {
            (row, block) = (row + 1, 0);
        }
        if block as usize + LANES <= per_row {
            // All sixteen blocks are in one row.
            for l in 0..LANES {
                counters[0][l] = block as u64 + l as u64;
                counters[1][l] = row as u64;
            }
            block += LANES as u32;
        } else {
            for l in 0..LANES {
                if block as usize == per_row {
                    (row, block) = (row + 1, 0);
                }
                (counters[0][l], counters[1][l]) = (block as u64, row as u64);
                block += 1;
            }
        }
        let words = philox(counters, stream.seed);
        // Two numbers hold the four words of a block, low word first.
        let mut pairs = [0u64; LANES * BLOCK / 4];
        for l in 0..LANES {
            pairs[2 * l] = words[0][l] & 0xffff_ffff | words[1][l] << 32;
            pairs[2 * l + 1] = words[2][l] & 0xffff_ffff | words[3][l] << 32;
        }
        // Writing the half words one by one would cost as much as five of the rounds.
        // SAFETY: any 64 bits are four valid u16.
        let halves: [u16; LANES * BLOCK] = unsafe { std::mem::transmute(pairs) };
        group.copy_from_slice(&halves);
        blocks_left = blocks_left.saturating_sub(LANES);
    }
}

/// Allocates a buffer that [`fill`] accepts for this many rows and columns.
pub fn scratch(rows: usize, cols: usize) -> Vec<u16> {
    memory::filled(0, rows.saturating_mul(padded(cols)).div_ceil(LANES * BLOCK).saturating_mul(LANES * BLOCK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // These are Random123's published test vectors.
        for (counter, key, want) in [
            ([0u32; 4], 0u64, [0x6627e8d5u32, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]),
            ([u32::MAX; 4], u64::MAX, [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]),
            (
                [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344],
                0x299f31d0_a4093822,
                [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1],
            ),
        ] {
            let got = philox(counter.map(|v: u32| [v as u64; LANES]), key);
            // All lanes compute the same block; lane 5 stands for them.
            assert_eq!(got.map(|w| w[5] as u32), want);
        }
    }

    #[test]
    fn an_element_does_not_depend_on_its_neighbours() {
        let stream = Stream { seed: 0x1234_5678_9abc_def0, update: 7, micro_batch: 3, site: 5 };
        for cols in [1, 8, 30, 128, 131, 512] {
            let mut all = scratch(9, cols);
            fill(&stream, 40, 9, cols, &mut all);
            for r in 0..9 {
                let mut alone = scratch(1, cols);
                fill(&stream, 40 + r, 1, cols, &mut alone);
                assert_eq!(all[r * padded(cols)..][..cols], alone[..cols], "row {r} of {cols}");
            }
        }
    }
}
