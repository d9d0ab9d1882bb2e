// Philox4x32-10, with the numbers of src/cpu/philox.rs: element (row, column) uses half word (column mod 8) of the
// block with counter (column/8, row, site | micro_batch·2^16, update). So the CPU and the GPU drop the same elements.
struct Dropout {
  const i64* seed;  // (seed, update, micro-batch), on the device
  u32 site;
  u32 threshold;  // an element is kept if its 16 bits are at least this; 0 drops nothing
  f32 scale;      // the factor of kept elements
};

// Replaces the counter c by its block of four random words.
static DEV void philox(u32 (&c)[4], u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u32 high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0];
    const u32 high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
    c[0] = high1 ^ c[1] ^ k0, c[1] = low1, c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}
// Returns 16 bits of a block. Comparisons choose the word, because a variable index would move registers to memory.
static DEV u32 half_word(const u32 (&c)[4], int half) {
  const u32 word = half < 4 ? (half < 2 ? c[0] : c[1]) : (half < 6 ? c[2] : c[3]);
  return word >> half % 2 * 16 & 0xffffu;
}

struct Mask {
  u32 key[2], high[2], threshold;  // high: the counter's last two words, which all elements share

  DEV Mask(const Dropout& d) : key{0, 0}, high{0, 0}, threshold(d.threshold) {
    if (threshold == 0) return;
    key[0] = (u32)d.seed[0];
    key[1] = (u32)((u64)d.seed[0] >> 32);
    high[0] = (d.site & 0xffffu) | (u32)d.seed[2] << 16;
    high[1] = (u32)d.seed[1];
  }

  // Writes the random block with this index `column` in a row to c.
  DEV void block(u32 column, u32 row, u32 (&c)[4]) const {
    c[0] = column, c[1] = row, c[2] = high[0], c[3] = high[1];
    philox(c, key[0], key[1]);
  }

  // Zeroes the dropped elements among N columns of a row, from column chunk·N on.
  template <int N>
  DEV void apply(i64 row, int chunk, f32 (&v)[N]) const {
    static_assert(N == 1 || N == 4 || N == 8, "packs lie within a block");
    if (threshold == 0) return;
    u32 c[4];
    block((u32)(chunk * N) / 8, (u32)row, c);
    const int first = chunk * N % 8;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (half_word(c, first + i) < threshold) v[i] = 0.f;
  }
};
