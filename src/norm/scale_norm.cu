// scale_norm.rs, and lp_norm.rs with K_ORDER: scale = 1/max(length, eps), and no pull where the clamp holds.
struct Norm : Straight {
  enum { STATS = 1 };
  static DEV f32 scale(Length x, f32, f32 eps) {
    const f32 scale = 1.f / x.unit / x.root, most = 1.f / eps;
    // Not fminf: a NaN has to stay one.
    return scale >= most ? most : scale;
  }
  static DEV f32 pull(f32 scale, f32, f32 eps, f32 sum_gx) { return scale >= 1.f / eps ? 0.f : scale * sum_gx; }
};
