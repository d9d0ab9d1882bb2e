// Norms with statistics of columns (column_norm.cuh): the passes over rows.
//   y = w*xhat + b,  xhat = (x - shift)*scale;  dx = p*dy - q*xhat - r
// A block takes a slab of rows and a tile of 32 chunks of columns, a warp every eighth of the rows. What is added up in
// which order follows from the number of rows alone, so neither the device nor the alignment shows in a result.
// K_X: the storage type of x, y and their gradients.

struct Rows {
  const u8* pad;  // not 0 at padding; null: every row is real
  i64 count, slab;  // all rows, and those of a slab
  int chunks;

  DEV bool real(i64 row) const { return !pad || !pad[row]; }
};

// What a thread takes.
struct Place {
  int lane, warp, chunk;
  i64 slab, first, end;  // the slab's rows; none where the tile reaches past the last column

  DEV Place(const Rows& rows) : lane(threadIdx.x % 32), warp(threadIdx.x / 32) {
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
// A number for every column, where there are any.
static DEV Values given(const f32* p, int chunk, f32 absent) { return p ? load<f32>(p, chunk) : all(absent); }

// Rows that a thread sums in f32 before their sum is added in double.
enum { ROUND = 32 };

// N sums over the rows from `first` to `end`, of which all warps get those of their lanes; all threads must call.
// work(row, sums) adds one row. `shared` holds N*THREADS numbers.
template <int N, class Work>
static DEV void over_rows(const Place& p, i64 first, i64 end, double* shared, double (&sums)[N], Work work) {
  const auto by = [&](int warp, int k) -> double& { return shared[(k * WARPS + warp) * 32 + p.lane]; };
#pragma unroll
  for (int k = 0; k < N; k++) by(p.warp, k) = 0.0;
  for (i64 round = first + p.warp; round < end; round += ROUND * WARPS) {
    const i64 last = round + ROUND * WARPS < end ? round + ROUND * WARPS : end;
    f32 part[N];
#pragma unroll
    for (f32& v : part) v = 0.f;
#pragma unroll 4
    for (i64 row = round; row < last; row += WARPS) work(row, part);
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

struct Measure {
  const void* x;
  Rows rows;
  f32* partial;  // a slab's means over its real rows: PARTS for every column
  f32* counts;   // a slab's real rows
};
// Of a centred norm the guess, and the means of d = x - guess and of d*d; of others the mean of x*x.
enum { PARTS = Norm::CENTRED ? 3 : 1 };
enum { COUNT = 0, SQUARES = 1, SUM = 1 + VEC, SUMS = Norm::CENTRED ? 1 + 2 * VEC : 1 + VEC };
// Rows whose mean is the guess: mean d*d - (mean d)^2 then keeps its digits.
enum { FEW = 64 };

KERNEL(THREADS, columns_measure, Measure) {
  SHARED(double, shared, SUMS * THREADS);
  const Place p(a.rows);
  Values guess = all(0.f);
  double sums[SUMS];
  const auto measure = [&](i64 first, i64 end) {
    over_rows(p, first, end, shared, sums, [&](i64 row, f32(&part)[SUMS]) {
      // Padding is read and left out: so the loads of several rows are on their way together.
      const bool real = a.rows.real(row);
      const Values x = load<K_X>(a.x, row * a.rows.chunks + p.chunk);
      part[COUNT] += real ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        const f32 d = real ? x.v[j] - guess.v[j] : 0.f;
        part[SQUARES + j] = fmaf(d, d, part[SQUARES + j]);
        if constexpr (Norm::CENTRED) part[SUM + j] += d;
      }
    });
  };
  if constexpr (Norm::CENTRED) {
    i64 first = p.first;
    while (first < p.end && !a.rows.real(first)) first++;
    measure(first, first + FEW < p.end ? first + FEW : p.end);
#pragma unroll
    for (int j = 0; j < VEC; j++) guess.v[j] = sums[COUNT] > 0.0 ? (f32)(sums[SUM + j] / sums[COUNT]) : 0.f;
  }
  measure(p.first, p.end);
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
};

KERNEL(THREADS, columns_normalise, Normalise) {
  const Place p(a.rows);
  if (p.first == p.end) return;
  const Values shift = load<f32>(a.stats, p.chunk), scale = load<f32>(a.stats, a.rows.chunks + p.chunk);
  const Values weight = given(a.weight, p.chunk, 1.f), bias = given(a.bias, p.chunk, 0.f);
  for (i64 row = p.first + p.warp; row < p.end; row += WARPS) {
    const i64 at = row * a.rows.chunks + p.chunk;
    const bool real = a.rows.real(row);
    const Values x = load<K_X>(a.x, at);
    Values y;
#pragma unroll
    for (int j = 0; j < VEC; j++)
      y.v[j] = real ? fmaf(weight.v[j], (x.v[j] - shift.v[j]) * scale.v[j], bias.v[j]) : 0.f;
    store<K_X>(a.y, at, y);
  }
}

struct GradientSums {
  const void *dy, *x;
  Rows rows;
  const f32* stats;
  f32* partial;  // a slab's sums over its real rows, for every column: of dy, and of dy*xhat
};

KERNEL(THREADS, columns_gradient_sums, GradientSums) {
  SHARED(double, shared, 2 * VEC * THREADS);
  const Place p(a.rows);
  Values shift = all(0.f), scale = all(1.f);
  if (p.first < p.end) shift = load<f32>(a.stats, p.chunk), scale = load<f32>(a.stats, a.rows.chunks + p.chunk);
  double sums[2 * VEC];
  over_rows(p, p.first, p.end, shared, sums, [&](i64 row, f32(&part)[2 * VEC]) {
    const i64 at = row * a.rows.chunks + p.chunk;
    const bool real = a.rows.real(row);
    const Values x = load<K_X>(a.x, at), dy = load<K_X>(a.dy, at);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
      const f32 g = real ? dy.v[j] : 0.f, hat = real ? (x.v[j] - shift.v[j]) * scale.v[j] : 0.f;
      part[j] += g;
      part[VEC + j] = fmaf(g, hat, part[VEC + j]);
    }
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
  const f32 *stats, *slopes;  // slopes: p, q and r
  void* dx;
};

KERNEL(THREADS, columns_gradient, Gradient) {
  const Place p(a.rows);
  if (p.first == p.end) return;
  const auto row_of = [&](const f32* rows, int i) { return load<f32>(rows, (i64)i * a.rows.chunks + p.chunk); };
  const Values shift = row_of(a.stats, 0), scale = row_of(a.stats, 1);
  const Values by_dy = row_of(a.slopes, 0), by_hat = row_of(a.slopes, 1), mean = row_of(a.slopes, 2);
  for (i64 row = p.first + p.warp; row < p.end; row += WARPS) {
    const i64 at = row * a.rows.chunks + p.chunk;
    const bool real = a.rows.real(row);
    const Values x = load<K_X>(a.x, at), dy = load<K_X>(a.dy, at);
    Values dx;
#pragma unroll
    for (int j = 0; j < VEC; j++) {
      const f32 hat = (x.v[j] - shift.v[j]) * scale.v[j];
      dx.v[j] = real ? fmaf(by_dy.v[j], dy.v[j], -fmaf(by_hat.v[j], hat, mean.v[j])) : 0.f;
    }
    store<K_X>(a.dx, at, dx);
  }
}
