// The norm of a residual step without a norm: it keeps no statistics and changes nothing.
struct Norm : Straight {
  enum { STATS = 0 };
  static DEV f32 scale(Length, f32, f32) { return 1.f; }
  static DEV f32 pull(f32, f32, f32, f32) { return 0.f; }
};
