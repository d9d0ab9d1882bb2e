// One update of flat buffers (adam.rs). Values that change from step to step are read from device memory. If the
// gradient scale is not finite, the gradients are zeroed and nothing else changes. K_FIRST, K_SECOND: the storage
// types of the moments; bf16 moments are rounded stochastically.
struct Adam {
  f32* parameters;
  void *first, *second;  // moments
  f32* gradients;
  const f32 *grad_scale, *step_size, *keep;
  f32 beta1, rest1, beta2, rest2, eps;
  u32 seed_low, seed_high, site, update;
  i64 place;  // index of the first number among all numbers of the run
  i64 count;  // number of chunks
};

enum { THREADS = 256, ROW = 1024 };

// Moments of other types are not rounded.
template <class T>
struct Roundings {
  DEV Roundings(const Adam&, i64) {}
  DEV void apply(Values&, int) const {}
};
// Rounds bf16 moments stochastically, each number with its own random half word. A row of random half words belongs to
// ROW numbers: it has one per number for the first moment, then one per number for the second.
template <>
struct Roundings<bf16> {
  const Adam& a;
  u32 row;
  int column;

  DEV Roundings(const Adam& adam, i64 at) : a(adam) {
    const i64 place = adam.place + at * VEC;
    row = (u32)(place / ROW), column = (int)(place % ROW);
  }
  DEV void apply(Values& v, int moment) const {
    u32 c[4] = {(u32)(moment * ROW + column) / 8, row, a.site, a.update};
    philox(c, a.seed_low, a.seed_high);
    // Adds the random bits to the half that bf16 drops, which carries into the kept half with the right probability.
    // One block of eight half words serves all VEC numbers, because `place` is a multiple of VEC.
#pragma unroll
    for (int j = 0; j < VEC; j++)
      v.v[j] = __uint_as_float(__float_as_uint(v.v[j]) + half_word(c, column % 8 + j) & 0xffff0000u);
  }
};

KERNEL(THREADS, adam, Adam) {
  const f32 scale = *a.grad_scale, step = *a.step_size, keep = *a.keep;
  const bool finite = fabsf(scale) < __uint_as_float(0x7f800000u);
  for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < a.count; at += (i64)gridDim.x * THREADS) {
    Values g = load<f32>(a.gradients, at);
    if (finite) {
      Values p = load<f32>(a.parameters, at), m = load<K_FIRST>(a.first, at), v = load<K_SECOND>(a.second, at);
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        const f32 d = g.v[j] * scale;  // the formula's g
        m.v[j] = fmaf(a.beta1, m.v[j], a.rest1 * d);
        v.v[j] = fmaf(a.beta2, v.v[j], a.rest2 * (d * d));
        p.v[j] = fmaf(keep, p.v[j], -(step * m.v[j] / (sqrtf(v.v[j]) + a.eps)));
      }
      Roundings<K_FIRST>(a, at).apply(m, 0);
      Roundings<K_SECOND>(a, at).apply(v, 1);
      store<f32>(a.parameters, at, p);
      store<K_FIRST>(a.first, at, m);
      store<K_SECOND>(a.second, at, v);
    }
#pragma unroll
    for (int j = 0; j < VEC; j++) g.v[j] = 0.f;
    store<f32>(a.gradients, at, g);
  }
}
