// The curve of DyT (dyt.rs), f = tanh.
struct Norm : Curve {
  static DEV f32 value(f32 z) { return tanhf(z); }
  static DEV f32 slope(f32, f32 t) { return fmaf(-t, t, 1.f); }
};
