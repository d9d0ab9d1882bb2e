// Norms with column statistics: the kernels that run between the passes of columns.cuh. They merge the slabs'
// results, choose the statistics of xhat, and update the state. K_STATE: the type of the buffers.

// The number of some rows, their mean, and their mean square about that mean.
struct Moments {
  double count, mean, square;

  // Merges the moments of more rows (Chan, Golub and LeVeque 1979).
  DEV void add(const Moments& more) {
    if (more.count == 0.0) return;
    const double share = more.count / (count + more.count), rest = 1.0 - share, gap = more.mean - mean;
    mean += share * gap;
    square = rest * square + share * more.square + share * rest * gap * gap;
    count += more.count;
  }
};

struct Merge {
  const f32 *partial, *counts;  // the results of columns_measure
  double *mean, *square, *count;  // mean and count may be null
  int slabs, cols;
};

// The number of slabs that a warp loads at the same time.
enum { ON_THEIR_WAY = 8 };

// Merges the slabs. A block processes 32 columns, and each of its eight warps every eighth slab.
KERNEL(THREADS, columns_merge, Merge) {
  SHARED(Moments, shared, THREADS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
  Moments found = {0.0, 0.0, 0.0};
  for (int first = warp; column < a.cols && first < a.slabs; first += ON_THEIR_WAY * WARPS) {
    f32 counts[ON_THEIR_WAY], parts[ON_THEIR_WAY][PARTS];
#pragma unroll
    for (int i = 0; i < ON_THEIR_WAY; i++) {
      // A slab past the end counts no rows, so adding it changes nothing.
      const int slab = first + i * WARPS;
      counts[i] = slab < a.slabs ? a.counts[slab] : 0.f;
#pragma unroll
      for (int k = 0; k < PARTS; k++)
        parts[i][k] = slab < a.slabs ? a.partial[((i64)slab * PARTS + k) * a.cols + column] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < ON_THEIR_WAY; i++) {
      // The parts that columns_measure stored: guess, mean d and mean d*d, or only the last.
      double mean = 0.0, square = parts[i][PARTS - 1];
      if constexpr (Norm::CENTRED) {
        const double offset = parts[i][1];
        mean = parts[i][0] + offset;
        square -= offset * offset;
        // fmax is not used, because it would turn a NaN into 0.
        if (square < 0.0) square = 0.0;
      }
      found.add(Moments{counts[i], mean, square});
    }
  }
  shared[threadIdx.x] = found;
  __syncthreads();
  if (warp > 0 || column >= a.cols) return;
  for (int w = 1; w < WARPS; w++) found.add(shared[32 * w + lane]);
  if (a.mean) a.mean[column] = found.mean;
  a.square[column] = found.square;
  if (a.count && column == 0) *a.count = found.count;
}

// Returns true if `refused` is false in every thread. All threads must call.
static DEV bool agreed(Team& team, bool refused) {
  f32 any[1] = {refused ? 1.f : 0.f};
  team.combine<Largest>(any);
  return any[0] == 0.f;
}

struct Settle {
  const double *mean, *square, *square_of_all, *count;  // null if nothing was measured
  double rows;
  K_STATE *first, *second;  // absent buffers are null
  i64 *iters, *refused;
  f32* stats;
  int cols;
  Options options;
  double largest;  // the largest number that the buffers can hold
};

// Chooses the statistics of xhat and updates the state. One block runs, so that either all columns accept a batch or
// none does.
KERNEL(THREADS, columns_settle, Settle) {
  SHARED(f32, shared, 2 * MOST * WARPS);
  Team team(shared);
  const Options o = a.options;
  const double count = a.count ? *a.count : 0.0;
  const i64 iters = a.iters ? *a.iters : 0;
  // The state moves in training with buffers and real rows, if the statistics of all columns are finite (`taken`);
  // otherwise the batch is refused. The comparison with the largest number is false for a NaN.
  const bool moves = o.train && a.first && count > 0.0;
  bool finite = true;
  if (moves)
    for (int c = team.lane; c < a.cols; c += LANES)
      finite = finite && fabs(a.mean[c]) <= a.largest && fabs(a.square[c]) <= a.largest;
  const bool taken = agreed(team, !finite);
  if (moves && !taken && a.refused && team.lane == 0) ++*a.refused;
  for (int c = team.lane; c < a.cols; c += LANES) {
    Batch batch = {count, a.rows, 0.0, 0.0, 0.0};
    if (a.square) batch.mean = a.mean[c], batch.square = a.square[c], batch.square_of_all = a.square_of_all[c];
    const State state = {a.first ? a.first[c] : 0.0, a.second ? a.second[c] : 0.0, iters};
    const Used used = Norm::settle(batch, state, o);
    // The rows of the tensor `stats`, in the order of columns.cuh.
    const double rows[] = {used.shift, used.scale, used.slope, used.gamma, used.exact ? 1.0 : 0.0, used.share};
#pragma unroll
    for (int i = 0; i < 6; i++) a.stats[(i64)i * a.cols + c] = (f32)rows[i];
    if (!moves || !taken) continue;
    const State moved = Norm::moved(batch, state, o);
    a.first[c] = (K_STATE)moved.first;
    if (a.second) a.second[c] = (K_STATE)moved.second;
    if (a.iters && c == 0) *a.iters = moved.iters;
  }
}

struct Slopes {
  const f32 *sum, *sum_x, *stats, *weight;  // sums of dy and dy*xhat; the weight may be null
  K_STATE* second;                          // PowerNorm's nu in training; null otherwise
  i64* refused;
  f32* slopes;
  int cols;
  double alpha_bwd, largest;
};

struct Found {
  Slope slope;
  double second;  // the buffer of nu after this batch
};

// Returns column c's coefficients of dx, and its buffer after this batch. lambda is the mean of weight*dy*xhat, nu is
// (1 - alpha_bwd)*buffer, and the buffer becomes buffer + lambda - nu*mean(xhat^2).
static DEV Found slope(const Slopes& a, int c) {
  const auto stat = [&](int i) { return (double)a.stats[(i64)i * a.cols + c]; };
  const double weight = a.weight ? a.weight[c] : 1.0, scale = stat(SLOPE), share = stat(SHARE);
  const double lambda = weight * a.sum_x[c] * share, old = a.second ? a.second[c] : 0.0, nu = (1.0 - a.alpha_bwd) * old;
  Slope found = slope_ahead(weight, scale, nu);
  if (is_exact(a.stats, a.cols)) {
    found.q = scale * lambda;
    found.r = Norm::CENTRED ? found.p * a.sum[c] * share : 0.0;
  }
  return Found{found, old + lambda - nu * stat(GAMMA)};
}

// Computes p, q and r of dx, and updates PowerNorm's nu. One block runs, so that either all columns update nu or none
// does.
KERNEL(THREADS, columns_slopes, Slopes) {
  SHARED(f32, shared, 2 * MOST * WARPS);
  Team team(shared);
  // As in columns_settle; the statistics' share is 0 if the batch had no real rows.
  const bool moves = a.second && a.stats[SHARE * (i64)a.cols] > 0.f;
  bool finite = true;
  if (moves)
    for (int c = team.lane; c < a.cols; c += LANES) finite = finite && fabs(slope(a, c).second) <= a.largest;
  const bool taken = agreed(team, !finite);
  if (moves && !taken && a.refused && team.lane == 0) ++*a.refused;
  for (int c = team.lane; c < a.cols; c += LANES) {
    const Found found = slope(a, c);
    a.slopes[c] = (f32)found.slope.p;
    a.slopes[a.cols + c] = (f32)found.slope.q;
    a.slopes[2 * (i64)a.cols + c] = (f32)found.slope.r;
    if (moves && taken) a.second[c] = (K_STATE)found.second;
  }
}
