// What a norm with statistics of columns says of itself (columns.rs), for one column. A norm is a struct Norm with
//   CENTRED                         xhat has a mean taken away
//   ahead(State, Options)           what xhat is made with does not depend on the batch (in training)
//   settle(Batch, State, Options)   what xhat is made with
//   moved(Batch, State, Options)    the state after a batch that is taken in
// In double, like the merging of what was measured: it is done once per column.

// What was measured; nothing in evaluation.
struct Batch {
  double count, rows;    // real rows, and all
  double mean, square;   // over real rows; the square of x - mean
  double square_of_all;  // over all rows: release
};
struct State {
  double first, second;
  i64 iters;  // training forwards that were taken in
};
struct Options {
  double alpha, eps;
  i64 warmup;
  bool train, release;
  bool running;  // evaluation by the buffers
};
struct Used {
  double shift, scale, slope, gamma, share;
  bool exact;
};

// By statistics that the batch has not made.
static DEV Used used_of(double shift, double square, double eps) {
  const double scale = 1.0 / sqrt(square + eps);
  return Used{shift, scale, scale, 0.0, 0.0, false};
}
// By the batch's own.
static DEV Used used_of(const Batch& b, double eps) {
  Used used = used_of(b.mean, b.square, eps);
  used.share = b.count > 0.0 ? 1.0 / b.count : 0.0;
  used.exact = true;
  return used;
}
static DEV double decayed(double old, double now, double alpha) { return alpha * old + (1.0 - alpha) * now; }
