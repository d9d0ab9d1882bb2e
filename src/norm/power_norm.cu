// PowerNorm (power_norm.rs) applies the running mean square of the step before, or during warm-up the batch's own.
struct Norm {
  enum { CENTRED = 0 };
  static DEV bool ahead(const State& s, const Options& o) { return s.iters + 1 > o.warmup; }
  static DEV bool warming(const Batch& b, const State& s, const Options& o) { return !ahead(s, o) && b.count > 0.0; }
  static DEV Used settle(const Batch& b, const State& s, const Options& o) {
    const Used running = used_of(0.0, s.first, o.eps), own = used_of(b, o.eps);
    if (!o.train) return running;
    const bool warm = warming(b, s, o);
    Used used = warm ? own : running;
    used.gamma = b.square_of_all * used.scale * used.scale;
    used.share = b.count > 0.0 ? 1.0 / (o.release ? b.rows : b.count) : 0.0;
    used.exact = warm && !o.release;
    if (o.release && b.count > 0.0) used.slope = own.slope;
    return used;
  }
  // During warm-up psi^2 is the mean of all batches so far; the authors' code then also decays it.
  static DEV State moved(const Batch& b, State s, const Options& o) {
    const bool warm = warming(b, s, o);
    s.iters++;
    if (warm && (!o.release || s.iters < o.warmup)) s.first += (b.square - s.first) / (double)s.iters;
    if (!warm || o.release) s.first = decayed(s.first, b.square, o.alpha);
    return s;
  }
};
