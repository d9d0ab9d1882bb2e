// The curve of Derf (derf.rs), f = erf.
struct Norm : Curve {
  static DEV f32 value(f32 z) { return erff(z); }
  static DEV f32 slope(f32 z, f32) { return 1.12837917f * expf(-z * z); }
};
