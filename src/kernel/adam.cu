// adam.rs: one update of flat buffers. What changes from step to step is read where it lies, on the device; a scale that is
// not finite leaves everything but the gradients, which are zeroed, as it is.
struct Adam {
  f32 *parameters, *first, *second, *gradients;
  const f32 *grad_scale, *step_size, *keep;
  f32 beta1, rest1, beta2, rest2, eps;
  i64 count;  // of chunks
};

enum { THREADS = 256 };

KERNEL(THREADS, adam, Adam) {
  const f32 scale = *a.grad_scale, step = *a.step_size, keep = *a.keep;
  const bool finite = fabsf(scale) < __uint_as_float(0x7f800000u);
  for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < a.count; at += (i64)gridDim.x * THREADS) {
    Values g = load<f32>(a.gradients, at);
    if (finite) {
      Values p = load<f32>(a.parameters, at), m = load<f32>(a.first, at), v = load<f32>(a.second, at);
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        const f32 d = g.v[j] * scale;
        m.v[j] = fmaf(a.beta1, m.v[j], a.rest1 * d);
        v.v[j] = fmaf(a.beta2, v.v[j], a.rest2 * (d * d));
        p.v[j] = fmaf(keep, p.v[j], -(step * m.v[j] / (sqrtf(v.v[j]) + a.eps)));
      }
      store<f32>(a.parameters, at, p);
      store<f32>(a.first, at, m);
      store<f32>(a.second, at, v);
    }
#pragma unroll
    for (int j = 0; j < VEC; j++) g.v[j] = 0.f;
    store<f32>(a.gradients, at, g);
  }
}
