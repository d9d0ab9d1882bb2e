// ScaleNorm (scale_norm.rs), and with K_ORDER LpNorm (lp_norm.rs): scale = 1/max(length, eps). If the length is at most
// eps, scale is constant, so pull is 0.
struct Norm : Straight {
  enum { STATS = 1 };
  static DEV f32 scale(Length x, f32, f32 eps) {
    const f32 scale = 1.f / x.unit / x.root, most = 1.f / eps;
    // fminf would replace a NaN by `most`.
    return scale >= most ? most : scale;
  }
  static DEV f32 pull(f32 scale, f32, f32 eps, f32 sum_gx) { return scale >= 1.f / eps ? 0.f : scale * sum_gx; }
};
