// relu_dropout.rs: y = M*max(x, 0), dx = dy*scale where y is not 0. A NaN stays one.
struct Relu {
  const void *x, *dy;  // backward: x is y
  void* y;             // backward: dx
  i64 count;           // of chunks, in all rows
  int chunks;          // in a row
  Dropout dropout;
};

enum { THREADS = 256 };

KERNEL(THREADS, relu_dropout, Relu) {
  Dropout dropout = a.dropout;
  if (K_BACKWARD) dropout.threshold = 0;  // y tells what was dropped; there is no seed
  const Mask mask(dropout);
  for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < a.count; at += (i64)gridDim.x * THREADS) {
    Values v = load<K_X>(a.x, at), factor;
#pragma unroll
    for (int j = 0; j < VEC; j++) factor.v[j] = a.dropout.scale;
    if (K_BACKWARD) {
      const Values dy = load<K_X>(a.dy, at);
#pragma unroll
      for (int j = 0; j < VEC; j++) v.v[j] = v.v[j] == 0.f ? 0.f : v.v[j] != v.v[j] ? v.v[j] : dy.v[j] * factor.v[j];
    } else {
      const i64 row = at / a.chunks;
      mask.apply(row, (int)(at - row * a.chunks), factor.v);
      // Not fmaxf, which loses a NaN.
#pragma unroll
      for (int j = 0; j < VEC; j++) v.v[j] = (v.v[j] <= 0.f ? 0.f : v.v[j]) * factor.v[j];
    }
    store<K_X>(a.y, at, v);
  }
}
