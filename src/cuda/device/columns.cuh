// Norms with column statistics (column_norm.cuh): the passes over rows.
//   y = w*xhat + b,  xhat = (x - shift)*scale;  dx = p*dy - q*xhat - r
// A block processes a slab of rows and a tile of 32 chunks of columns; each of its eight warps processes every eighth
// row. The order of additions depends only on the number of rows, so neither the device nor the alignment changes a
// result. K_X: the storage type of x, y and their gradients.

struct Rows {
  const u8* pad;  // not 0 at padding; null if every row is real
  i64 count, slab;  // the number of rows, and of rows in a slab
  int chunks;

  DEV bool real(i64 row) const { return !pad || !pad[row]; }
};

// The chunk of columns and the slab of rows that a thread processes.
struct Place {
  int lane, warp, chunk;
  i64 slab, first, end;  // the slab's rows; none if the chunk lies past the last column

  DEV Place(const Rows& rows) : lane(threadIdx.x % 32), warp(threadIdx.x / 32) {
    // Neighbouring blocks process the tiles of one slab.
    const int tiles = (rows.chunks + 31) / 32;
    chunk = blockIdx.x % tiles * 32 + lane;
    slab = blockIdx.x / tiles;
    first = slab * rows.slab;
    end = first + rows.slab < rows.count ? first + rows.slab : rows.count;
    if (chunk >= rows.chunks) end = first;
  }
};

static DEV Values all(f32 v) {
  Values values;
#pragma unroll
  for (int j = 0; j < VEC; j++) values.v[j] = v;
  return values;
}
// Loads a chunk of p, or returns `absent` for every column if p is null.
static DEV Values given(const f32* p, int chunk, f32 absent) { return p ? load<f32>(p, chunk) : all(absent); }

// ROUND rows are summed in f32 before their sum is added in double; ABREAST rows are loaded at the same time.
enum { ROUND = 32, ABREAST = 4 };

// Computes N sums over the rows from `first` to `end` for each lane; every warp gets the totals. All threads must call.
// work(row, load(row), sums) adds one row. `shared` holds N*THREADS numbers.
template <int N, class Load, class Work>
static DEV void over_rows(
    const Place& p, i64 first, i64 end, double* shared, double (&sums)[N], Load load, Work work) {
  // A warp's number for sum k, in this thread's lane.
  const auto by = [&](int warp, int k) -> double& { return shared[(k * WARPS + warp) * 32 + p.lane]; };
#pragma unroll
  for (int k = 0; k < N; k++) by(p.warp, k) = 0.0;
  for (i64 round = first + p.warp; round < end; round += ROUND * WARPS) {
    // The warp's rows in this round lie WARPS apart, from `round` to before `last`; `part` holds their sums.
    const i64 last = round + ROUND * WARPS < end ? round + ROUND * WARPS : end;
    f32 part[N];
#pragma unroll
    for (f32& v : part) v = 0.f;
    for (i64 row = round; row < last; row += ABREAST * WARPS) {
      // All rows are loaded first: the compiler cannot know that `work` never writes memory that `load` reads.
      decltype(load(row)) read[ABREAST];
#pragma unroll
      for (int i = 0; i < ABREAST; i++)
        if (row + i * WARPS < last) read[i] = load(row + i * WARPS);
#pragma unroll
      for (int i = 0; i < ABREAST; i++)
        if (row + i * WARPS < last) work(row + i * WARPS, read[i], part);
    }
#pragma unroll
    for (int k = 0; k < N; k++) by(p.warp, k) += part[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < N; k++) {
    sums[k] = by(0, k);
#pragma unroll
    for (int w = 1; w < WARPS; w++) sums[k] += by(w, k);
  }
  __syncthreads();
}

// A chunk of a row in the storage type, and true if the row is real. Padding is loaded too but not summed, so that
// loads need not wait for the mask.
struct Read {
  Pack<K_X, VEC> x, dy;
  bool real;
};
static DEV Values widened(const Pack<K_X, VEC>& pack) {
  Values found;
  widen(pack, found.v);
  return found;
}

// The arguments for writing y already in the pass that measures x, which is possible if y does not depend on the batch.
struct Ahead {
  const K_STATE* first;  // the running statistics
  const i64* iters;
  const f32 *weight, *bias;
  void* y;     // null if not wanted
  f32* wrote;  // receives 1 if y was written, else 0
  Options options;
};

// Writes a chunk of y, or zeros if the row is not real.
static DEV void write(void* to, i64 at, const Values& x, const Values& shift, const Values& scale,
                      const Values& weight, const Values& bias, bool real) {
  Values y;
#pragma unroll
  for (int j = 0; j < VEC; j++) y.v[j] = real ? fmaf(weight.v[j], (x.v[j] - shift.v[j]) * scale.v[j], bias.v[j]) : 0.f;
  store<K_X>(to, at, y);
}

struct Measure {
  const void* x;
  Rows rows;
  f32* partial;  // per slab, PARTS means over its real rows for each column
  f32* counts;   // per slab, the number of its real rows
  Ahead ahead;
};
// For a centred norm the parts are the guess and, with d = x - guess, the means of d and of d*d; else the mean of
// x*x.
enum { PARTS = Norm::CENTRED ? 3 : 1 };
enum { COUNT = 0, SQUARES = 1, SUM = 1 + VEC, SUMS = Norm::CENTRED ? 1 + 2 * VEC : 1 + VEC };
// The guess is the mean of the first FEW real rows; near the true mean, mean d*d - (mean d)^2 keeps its digits.
enum { FEW = 64 };

KERNEL(THREADS, columns_measure, Measure) {
  SHARED(double, shared, SUMS * THREADS);
  const Place p(a.rows);
  const Ahead& ahead = a.ahead;
  const i64 iters = ahead.iters ? *ahead.iters : 0;
  // True if y does not depend on the batch. Then this pass writes y, with statistics for which an empty batch will do.
  const bool writes = ahead.y && Norm::ahead(State{0.0, 0.0, iters}, ahead.options);
  if (ahead.y && blockIdx.x == 0 && threadIdx.x == 0) *ahead.wrote = writes ? 1.f : 0.f;
  Values guess = all(0.f), shift = guess, scale = guess, weight = guess, bias = guess;
  if (writes && p.first < p.end) {
    weight = given(ahead.weight, p.chunk, 1.f), bias = given(ahead.bias, p.chunk, 0.f);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
      const State state = {ahead.first[(i64)p.chunk * VEC + j], 0.0, iters};
      const Used used = Norm::settle(Batch{}, state, ahead.options);
      shift.v[j] = (f32)used.shift, scale.v[j] = (f32)used.scale;
    }
  }
  double sums[SUMS];
  // Computes the sums over some of the slab's rows, with d = x - guess.
  const auto measure = [&](i64 first, i64 end) {
    const auto read = [&](i64 row) {
      Read found;
      found.real = a.rows.real(row);
      found.x = fetch((const Pack<K_X, VEC>*)a.x + row * a.rows.chunks + p.chunk);
      return found;
    };
    over_rows(p, first, end, shared, sums, read, [&](i64 row, const Read& found, f32(&part)[SUMS]) {
      const bool real = found.real;
      const Values x = widened(found.x);
      part[COUNT] += real ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        const f32 d = real ? x.v[j] - guess.v[j] : 0.f;
        part[SQUARES + j] = fmaf(d, d, part[SQUARES + j]);
        if constexpr (Norm::CENTRED) part[SUM + j] += d;
      }
      // PowerNorm's release mode normalises padding too.
      const bool written = real || ahead.options.release;
      if (writes) write(ahead.y, row * a.rows.chunks + p.chunk, x, shift, scale, weight, bias, written);
    });
  };
  if constexpr (Norm::CENTRED) {
    // The first call has the guess 0, so it gives the sum of the first rows from the first real one on.
    i64 first = p.first;
    while (first < p.end && !a.rows.real(first)) first++;
    measure(first, first + FEW < p.end ? first + FEW : p.end);
#pragma unroll
    for (int j = 0; j < VEC; j++) guess.v[j] = sums[COUNT] > 0.0 ? (f32)(sums[SUM + j] / sums[COUNT]) : 0.f;
  }
  measure(p.first, p.end);
  // All warps have the totals; the first one stores them as means, in the order of PARTS.
  if (p.warp > 0 || p.first == p.end) return;
  const double share = sums[COUNT] > 0.0 ? 1.0 / sums[COUNT] : 0.0;
  if (p.chunk == 0) a.counts[p.slab] = (f32)sums[COUNT];
  const i64 at = p.slab * PARTS * a.rows.chunks + p.chunk;
  Values mean;
  if constexpr (Norm::CENTRED) {
    store<f32>(a.partial, at, guess);
#pragma unroll
    for (int j = 0; j < VEC; j++) mean.v[j] = (f32)(share * sums[SUM + j]);
    store<f32>(a.partial, at + a.rows.chunks, mean);
  }
#pragma unroll
  for (int j = 0; j < VEC; j++) mean.v[j] = (f32)(share * sums[SQUARES + j]);
  store<f32>(a.partial, at + (PARTS - 1) * a.rows.chunks, mean);
}

struct Normalise {
  const void* x;
  Rows rows;
  const f32 *stats, *weight, *bias;
  void* y;
  const f32* wrote;  // the flag that columns_measure wrote; null if it did not run
};

KERNEL(THREADS, columns_normalise, Normalise) {
  const Place p(a.rows);
  if (p.first == p.end || (a.wrote && *a.wrote == 1.f)) return;
  const Values shift = load<f32>(a.stats, p.chunk), scale = load<f32>(a.stats, a.rows.chunks + p.chunk);
  const Values weight = given(a.weight, p.chunk, 1.f), bias = given(a.bias, p.chunk, 0.f);
  for (i64 row = p.first + p.warp; row < p.end; row += WARPS) {
    const i64 at = row * a.rows.chunks + p.chunk;
    write(a.y, at, load<K_X>(a.x, at), shift, scale, weight, bias, a.rows.real(row));
  }
}

// The coefficients of dx = p*dy - q*xhat - r for one column.
struct Slope {
  double p, q, r;
};
// Returns the coefficients for statistics that do not come from the batch: q uses PowerNorm's nu before its update.
static DEV Slope slope_ahead(double weight, double scale, double nu) { return Slope{weight * scale, scale * nu, 0.0}; }
// Writes a chunk of dx, or zeros if the row is not real. `slope` holds p, q and r.
static DEV void write_gradient(
    void* to, i64 at, const Values& dy, const Values& hat, const Values (&slope)[3], bool real) {
  Values dx;
#pragma unroll
  for (int j = 0; j < VEC; j++)
    dx.v[j] = real ? fmaf(slope[0].v[j], dy.v[j], -fmaf(slope[1].v[j], hat.v[j], slope[2].v[j])) : 0.f;
  store<K_X>(to, at, dx);
}
static DEV Values hat_of(const Values& x, const Values& shift, const Values& scale) {
  Values hat;
#pragma unroll
  for (int j = 0; j < VEC; j++) hat.v[j] = (x.v[j] - shift.v[j]) * scale.v[j];
  return hat;
}
// The rows of the tensor `stats` (`Stats` in kernel/columns.rs). EXACT has the same value in all columns.
enum { SHIFT, SCALE, SLOPE, GAMMA, EXACT, SHARE };
static DEV bool is_exact(const f32* stats, i64 cols) { return stats[EXACT * cols] == 1.f; }

struct GradientSums {
  const void *dy, *x;
  Rows rows;
  const f32* stats;
  f32* partial;  // per slab and column, the sums over its real rows of dy and of dy*xhat
  // The arguments for writing dx in the same pass, which is possible if dx does not depend on these sums.
  const f32* weight;
  const K_STATE* second;  // PowerNorm's nu in training; null otherwise
  double alpha_bwd;
  void* dx;
};

KERNEL(THREADS, columns_gradient_sums, GradientSums) {
  SHARED(double, shared, 2 * VEC * THREADS);
  const Place p(a.rows);
  const i64 chunks = a.rows.chunks, cols = chunks * VEC;
  Values shift = all(0.f), scale = all(1.f), slope[3] = {shift, shift, shift};
  // dx depends on the sums only if the statistics are the batch's own; otherwise this pass writes it. `slope` then
  // holds p and q, and its r stays 0.
  const bool writes = !is_exact(a.stats, cols);
  if (p.first < p.end) {
    shift = load<f32>(a.stats, SHIFT * chunks + p.chunk), scale = load<f32>(a.stats, SCALE * chunks + p.chunk);
    const Values weight = given(a.weight, p.chunk, 1.f), by = load<f32>(a.stats, SLOPE * chunks + p.chunk);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
      const double old = a.second ? a.second[(i64)p.chunk * VEC + j] : 0.0;
      const Slope found = slope_ahead(weight.v[j], by.v[j], (1.0 - a.alpha_bwd) * old);
      slope[0].v[j] = (f32)found.p, slope[1].v[j] = (f32)found.q;
    }
  }
  double sums[2 * VEC];  // of dy, then of dy*xhat, for each column of the chunk
  const auto read = [&](i64 row) {
    const i64 at = row * chunks + p.chunk;
    return Read{fetch((const Pack<K_X, VEC>*)a.x + at), fetch((const Pack<K_X, VEC>*)a.dy + at), a.rows.real(row)};
  };
  over_rows(p, p.first, p.end, shared, sums, read, [&](i64 row, const Read& found, f32(&part)[2 * VEC]) {
    const bool real = found.real;
    const Values dy = widened(found.dy), hats = hat_of(widened(found.x), shift, scale);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
      const f32 g = real ? dy.v[j] : 0.f, hat = real ? hats.v[j] : 0.f;
      part[j] += g;
      part[VEC + j] = fmaf(g, hat, part[VEC + j]);
    }
    if (writes) write_gradient(a.dx, row * chunks + p.chunk, dy, hats, slope, real);
  });
  if (p.warp > 0 || p.first == p.end) return;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    Values sum;
#pragma unroll
    for (int j = 0; j < VEC; j++) sum.v[j] = (f32)sums[k * VEC + j];
    store<f32>(a.partial, (2 * p.slab + k) * a.rows.chunks + p.chunk, sum);
  }
}

struct Gradient {
  const void *dy, *x;
  Rows rows;
  const f32 *stats, *slopes;  // slopes has the rows p, q and r
  void* dx;
};

// Writes dx, unless columns_gradient_sums has written it.
KERNEL(THREADS, columns_gradient, Gradient) {
  const Place p(a.rows);
  const i64 chunks = a.rows.chunks;
  if (p.first == p.end || !is_exact(a.stats, chunks * VEC)) return;
  const auto row_of = [&](const f32* rows, int i) { return load<f32>(rows, i * chunks + p.chunk); };
  const Values shift = row_of(a.stats, SHIFT), scale = row_of(a.stats, SCALE);
  const Values slope[3] = {row_of(a.slopes, 0), row_of(a.slopes, 1), row_of(a.slopes, 2)};
  for (i64 row = p.first + p.warp; row < p.end; row += WARPS) {
    const i64 at = row * chunks + p.chunk;
    const Values hat = hat_of(load<K_X>(a.x, at), shift, scale);
    write_gradient(a.dx, at, load<K_X>(a.dy, at), hat, slope, a.rows.real(row));
  }
}
