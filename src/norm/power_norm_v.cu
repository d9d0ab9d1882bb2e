// PN-V (power_norm_v.rs) applies the batch's mean square, or the running one.
struct Norm {
  enum { CENTRED = 0 };
  static DEV bool ahead(const State&, const Options&) { return false; }
  static DEV Used settle(const Batch& b, const State& s, const Options& o) {
    return o.running ? used_of(0.0, s.first, o.eps) : used_of(b, o.eps);
  }
  static DEV State moved(const Batch& b, const State& s, const Options& o) {
    return State{decayed(s.first, b.square, o.alpha), s.second, s.iters};
  }
};
