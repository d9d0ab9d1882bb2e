// BatchNorm (batch_norm.rs) applies the batch's mean and variance, or the running ones.
struct Norm {
  enum { CENTRED = 1 };
  static DEV bool ahead(const State&, const Options&) { return false; }
  static DEV Used settle(const Batch& b, const State& s, const Options& o) {
    return o.running ? used_of(s.first, s.second, o.eps) : used_of(b, o.eps);
  }
  static DEV State moved(const Batch& b, const State& s, const Options& o) {
    return State{decayed(s.first, b.mean, o.alpha), decayed(s.second, b.square, o.alpha), s.iters};
  }
};
