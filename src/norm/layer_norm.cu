// LayerNorm (layer_norm.rs): scale = 1/sqrt(variance + eps).
struct Norm : Straight {
  enum { STATS = 2 };
  static DEV f32 scale(Length x, f32 cols, f32 eps) {
    return 1.f / hypotf(x.unit * (x.root / sqrtf(cols)), sqrtf(eps));
  }
  static DEV f32 pull(f32 scale, f32 cols, f32, f32 sum_gx) { return scale / cols * sum_gx; }
};
