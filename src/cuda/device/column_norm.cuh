// The interface of a norm with column statistics (columns.rs), for one column. A norm is a struct Norm with
//   CENTRED                         true if xhat subtracts a mean
//   ahead(State, Options)           true if, in training, xhat does not depend on the batch
//   settle(Batch, State, Options)   returns the statistics of xhat
//   moved(Batch, State, Options)    returns the state after an accepted batch
// These functions compute in double, because they run only once per column.

// The measured statistics of a batch. The means are 0 if nothing was measured.
struct Batch {
  double count, rows;    // the number of real rows, and of all rows
  double mean, square;   // over real rows; square is the mean of (x - mean)^2
  double square_of_all;  // the mean of x^2 over all rows, for PowerNorm's release mode
};
struct State {
  double first, second;
  i64 iters;  // the number of accepted training passes
};
struct Options {
  double alpha, eps;
  i64 warmup;
  bool train, release;
  bool running;  // true if evaluation uses the buffers
};
// The statistics that xhat and its gradient use (`Stats` in kernel/columns.rs).
struct Used {
  double shift, scale, slope, gamma, share;
  bool exact;
};

// Returns the statistics of xhat from values that are not the batch's own.
static DEV Used used_of(double shift, double square, double eps) {
  const double scale = 1.0 / sqrt(square + eps);
  return Used{shift, scale, scale, 0.0, 0.0, false};
}
// Returns the statistics of xhat from the batch's own values.
static DEV Used used_of(const Batch& b, double eps) {
  Used used = used_of(b.mean, b.square, eps);
  used.share = b.count > 0.0 ? 1.0 / b.count : 0.0;
  used.exact = true;
  return used;
}
static DEV double decayed(double old, double now, double alpha) { return alpha * old + (1.0 - alpha) * now; }
