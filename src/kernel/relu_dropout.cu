// ReLU and dropout (relu_dropout.rs): y = M*max(x, 0); dx = dy*scale where y is not 0, else 0. A NaN stays NaN.
struct Relu {
  const void *x, *dy;  // in the backward pass x points to y
  void* y;             // in the backward pass y points to dx
  i64 count;           // number of chunks in all rows
  int chunks;          // number of chunks in a row
  Dropout dropout;
};

enum { THREADS = 256 };

KERNEL(THREADS, relu_dropout, Relu) {
  Dropout dropout = a.dropout;
  if (K_BACKWARD) dropout.threshold = 0;  // y is 0 at dropped elements, so no seed is needed
  const Mask mask(dropout);
  for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < a.count; at += (i64)gridDim.x * THREADS) {
    Values v = load<K_X>(a.x, at), factor;
#pragma unroll
    for (int j = 0; j < VEC; j++) factor.v[j] = a.dropout.scale;
    if (K_BACKWARD) {
      const Values dy = load<K_X>(a.dy, at);
      // v holds y: dx is 0 where y is 0, NaN where y is NaN (only a NaN differs from itself), and dy*scale elsewhere.
#pragma unroll
      for (int j = 0; j < VEC; j++) v.v[j] = v.v[j] == 0.f ? 0.f : v.v[j] != v.v[j] ? v.v[j] : dy.v[j] * factor.v[j];
    } else {
      const i64 row = at / a.chunks;
      mask.apply(row, (int)(at - row * a.chunks), factor.v);
      // fmaxf is not used, because it would turn a NaN into 0.
#pragma unroll
      for (int j = 0; j < VEC; j++) v.v[j] = (v.v[j] <= 0.f ? 0.f : v.v[j]) * factor.v[j];
    }
    store<K_X>(a.y, at, v);
  }
}
