// Norms over the last dimension (norm.cuh), alone and in the fused residual step:
//   x_plus = alpha*x + beta*drop(f),  y = N(x_plus)        with K_STEP = 1; x_plus = x with K_STEP = 0
//   dx = alpha*G,  df = beta*drop(G),  G = dx_plus + N'(dy)
//   dw = sum dy*xhat,  db = sum dy,  dalpha = sum G*x,  dbeta = sum G*drop(f)      over rows
// and the gradients of a curve's scale and shift (norm.cuh). K_BACKWARD: 1 compiles the backward kernel, 0 the forward
// kernel. K_X, K_F, K_Y, K_P: the storage types of the residual stream, the branch, y, and the norm's weight and
// bias; other parameters are f32. K_WEIGHT, K_BIAS, K_ALPHA, K_BETA: the kinds of parameters (parameter.cuh). y is
// computed from x_plus after its rounding to K_X, because the backward pass reads the rounded x_plus.

// A thread's chunks of a row: kept in registers, or, if they do not fit, read again at each use.
template <class T>
struct Line {
  Pack<T, VEC> kept[HELD > 0 ? HELD : 1];
  const Pack<T, VEC>* from;

  DEV Line(const void* rows, i64 row, int chunks) : from((const Pack<T, VEC>*)rows + row * chunks) {}
  // Requests all chunks before any is used, because work on one chunk would delay the next request.
  DEV void fetch_all(int lane, int chunks) {
    if constexpr (HELD > 0) each_chunk(lane, chunks, [&](int i, int chunk) { kept[i] = fetch(from + chunk); });
  }
  DEV Values at(int i, int chunk) const {
    Values found;
    widen(HELD > 0 ? kept[i] : fetch(from + chunk), found.v);
    return found;
  }
};

struct Row {
  f32 shift, scale;
};

constexpr bool NORMED = Norm::STATS > 0 || Norm::CURVED;
enum { OF_CURVE = Norm::CURVED };  // the kind of a curve's numbers: ONE for a curve, else NONE

// Returns a curve's scale and shift, which are the same for all rows. A missing shift is -0, because adding -0 changes
// nothing.
static DEV Row learned(const f32* const (&numbers)[2]) {
  return Row{numbers[1] ? *numbers[1] : -0.f, *numbers[0]};
}

static DEV f32 hat_of(Row row, f32 x) {
  if constexpr (Norm::CURVED)
    return Norm::value(fmaf(row.scale, x, row.shift));
  else
    return (x - row.shift) * row.scale;
}

struct Forward {
  const void *x, *f;
  const f32 *alpha, *beta;
  const K_P *weight, *bias;
  const f32* numbers[2];
  void *x_plus, *y;
  f32* stats;
  i64 rows;
  int chunks;
  f32 eps;
  Dropout dropout;
};

#if !K_BACKWARD
// Adds |d|^p to the sum, or takes the maximum if p is infinite. A NaN stays NaN.
static DEV f32 with_power(f32 sum, f32 d) {
  if constexpr (EUCLIDEAN)
    return fmaf(d, d, sum);
  else if constexpr (OF_LARGEST)
    return sum > fabsf(d) || sum != sum ? sum : fabsf(d);
  else if constexpr (ORDER == 1.f)
    return sum + fabsf(d);
  else
    return sum + powf(fabsf(d), ORDER);
}
static DEV f32 root_of(f32 sum) {
  if constexpr (EUCLIDEAN)
    return sqrtf(sum);
  else if constexpr (OF_LARGEST || ORDER == 1.f)
    return sum;
  else
    return powf(sum, 1.f / ORDER);
}

// Returns the row's sum of x (POWER 1), or the sum of with_power(x - shift) whose root is the length (POWER 2). If
// UNITS is true, x is first multiplied by `inverse`.
template <int POWER, bool UNITS>
static DEV f32 moment(Team& team, const Line<K_X>& line, int chunks, f32 inverse, f32 shift) {
  f32 sum[1] = {0.f};
  each_chunk(team.lane, chunks, [&](int i, int chunk) {
    const Values x = line.at(i, chunk);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
      // The shift is 0 if POWER is 1.
      const f32 d = UNITS ? fmaf(x.v[j], inverse, -shift) : POWER == 1 ? x.v[j] : x.v[j] - shift;
      sum[0] = POWER == 1 ? sum[0] + d : with_power(sum[0], d);
    }
  });
  if constexpr (OF_LARGEST)
    team.combine<LargestOrNan>(sum);
  else
    team.combine<Add>(sum);
  return sum[0];
}

// Returns a power of two near max |x|, so that division by it is exact. If the length is not Euclidean it returns max
// |x| itself, because powers of a ratio above 1 could overflow again. NaN is ignored.
static DEV f32 unit_of(Team& team, const Line<K_X>& line, int chunks) {
  f32 most[1] = {0x1p-126f};
  each_chunk(team.lane, chunks, [&](int i, int chunk) {
    const Values x = line.at(i, chunk);
#pragma unroll
    for (int j = 0; j < VEC; j++) most[0] = fmaxf(most[0], fabsf(x.v[j]));
  });
  team.combine<Largest>(most);
  // The exponent's bits alone are a power of two.
  return EUCLIDEAN ? __uint_as_float(__float_as_uint(most[0]) & 0x7f800000u) : most[0];
}

// Returns the shift and the scale of a row.
static DEV Row measure(Team& team, const Line<K_X>& line, int chunks, f32 eps) {
  const f32 cols = (f32)(chunks * VEC);
  f32 unit = 1.f;
  f32 shift = Norm::STATS == 2 ? moment<1, false>(team, line, chunks, 1.f, 0.f) / cols : 0.f;
  f32 squares = moment<2, false>(team, line, chunks, 1.f, shift);
  // The sum overflowed, or is so small that single squares may have lost bits to underflow: compute it again in units
  // of the largest number. All threads of a row take this branch together. A block with several rows has one warp per
  // row and so no barriers.
  if (!OF_LARGEST && !(squares >= 0x1p-100f && squares < 0x1p127f)) {
    unit = unit_of(team, line, chunks);
    shift = Norm::STATS == 2 ? moment<1, true>(team, line, chunks, 1.f / unit, 0.f) / cols : 0.f;
    squares = moment<2, true>(team, line, chunks, 1.f / unit, shift);
    shift *= unit;
  }
  return Row{shift, Norm::scale(Length{unit, root_of(squares)}, cols, eps)};
}

KERNEL(THREADS, rows_forward, Forward) {
  SHARED(f32, shared, 2 * MOST * WARPS);
  Team team(shared);
  const Mask mask(a.dropout);
  for (i64 first = (i64)blockIdx.x * ROWS; first < a.rows; first += (i64)gridDim.x * ROWS) {
    const i64 row = first + team.row;
    // A row past the end has no chunks, but its threads must reach the barriers too.
    const int chunks = row < a.rows ? a.chunks : 0;
    Line<K_X> line(K_STEP ? a.x_plus : a.x, row, a.chunks);
    if constexpr (K_STEP) {
      Line<K_X> before(a.x, row, a.chunks);
      Line<K_F> branch(a.f, row, a.chunks);
      before.fetch_all(team.lane, chunks);
      branch.fetch_all(team.lane, chunks);
      each_chunk(team.lane, chunks, [&](int i, int chunk) {
        const Values x = before.at(i, chunk), alpha = values<K_ALPHA>(a.alpha, chunk, 1.f);
        const Values beta = values<K_BETA>(a.beta, chunk, 1.f);
        Values f = branch.at(i, chunk), x_plus;
#pragma unroll
        for (int j = 0; j < VEC; j++) f.v[j] *= beta.v[j] * a.dropout.scale;
        mask.apply(row, chunk, f.v);
#pragma unroll
        for (int j = 0; j < VEC; j++) x_plus.v[j] = fmaf(alpha.v[j], x.v[j], f.v[j]);
        const auto stored = store<K_X>(a.x_plus, row * a.chunks + chunk, x_plus);
        // The norm needs the rounded x_plus; without registers for it, `line` reads it back from memory.
        if (HELD > 0) line.kept[i] = stored;
      });
    } else {
      line.fetch_all(team.lane, chunks);
    }
    if (!NORMED) continue;
    Row found;
    if constexpr (Norm::CURVED) {
      found = learned(a.numbers);
    } else {
      found = measure(team, line, chunks, a.eps);
      if (team.lane == 0 && chunks > 0) {
        // A row has STATS numbers, and the scale is the last of them.
        if (Norm::STATS == 2) a.stats[2 * row] = found.shift;
        a.stats[Norm::STATS * (row + 1) - 1] = found.scale;
      }
    }
    each_chunk(team.lane, chunks, [&](int i, int chunk) {
      const Values x = line.at(i, chunk), weight = values<K_WEIGHT>(a.weight, chunk, 1.f);
      const Values bias = values<K_BIAS>(a.bias, chunk, 0.f);
      Values y;
#pragma unroll
      for (int j = 0; j < VEC; j++) y.v[j] = fmaf(weight.v[j], hat_of(found, x.v[j]), bias.v[j]);
      store<K_Y>(a.y, row * a.chunks + chunk, y);
    });
  }
}
#endif

// dx_plus or dy is null if that output got no gradient. x is read only for dalpha. df may be null.
struct Backward {
  const void *dx_plus, *dy, *x_plus, *x, *f;
  const f32 *stats, *alpha, *beta;
  const K_P* weight;
  const f32* numbers[2];
  void *dx, *df;
  f32 *dalpha, *dbeta, *dweight, *dbias, *dscale, *dshift;  // where the first block stores its sums
  i64 rows;
  int chunks;
  int sums;  // the distance between the sums of two blocks
  f32 eps;
  Dropout dropout;
};

#if K_BACKWARD
// Returns the derivative of the row's length with respect to x, up to a factor; `largest` is the row's largest |x|.
static DEV f32 slope_of(f32 x, f32 hat, f32 largest) {
  const f32 sign = x > 0.f ? 1.f : x < 0.f ? -1.f : x;  // x itself if it is 0 or NaN
  if constexpr (EUCLIDEAN)
    return hat;
  else if constexpr (OF_LARGEST)
    return fabsf(x) == largest ? sign : 0.f;
  else if constexpr (ORDER == 1.f)
    return sign;
  else
    return sign * powf(fabsf(hat), ORDER - 1.f);
}

KERNEL(THREADS, rows_backward, Backward) {
  SHARED(f32, shared, 2 * MOST * WARPS);
  SHARED(f32, scratch, ROWS * 32 * VEC);
  Team team(shared);
  const Mask mask(a.dropout);
  const f32 cols = (f32)(a.chunks * VEC);
  Sum<K_ALPHA> dalpha(a.dalpha, a.sums, team.lane, a.chunks);
  Sum<K_BETA> dbeta(a.dbeta, a.sums, team.lane, a.chunks);
  Sum<K_WEIGHT> dweight(a.dweight, a.sums, team.lane, a.chunks);
  Sum<K_BIAS> dbias(a.dbias, a.sums, team.lane, a.chunks);
  Sum<OF_CURVE> dscale(a.dscale, a.sums, team.lane, a.chunks);
  Sum<OF_CURVE> dshift(a.dshift, a.sums, team.lane, a.chunks);
  const bool normed = NORMED && a.dy;
  for (i64 first = (i64)blockIdx.x * ROWS; first < a.rows; first += (i64)gridDim.x * ROWS) {
    const i64 row = first + team.row;
    const int chunks = row < a.rows ? a.chunks : 0;  // see rows_forward
    Line<K_X> x_plus(a.x_plus, row, a.chunks);
    Line<K_Y> dy(a.dy, row, a.chunks);
    Line<K_X> dx_plus(a.dx_plus, row, a.chunks);
    if (normed) {
      x_plus.fetch_all(team.lane, chunks);
      dy.fetch_all(team.lane, chunks);
    }
    if (K_STEP && a.dx_plus) dx_plus.fetch_all(team.lane, chunks);
    Row found = {0.f, 1.f};
    f32 sums[2] = {0.f, 0.f};  // of g*xhat, and of g
    // The row's largest |x|, and the number of x that reach it; 1 for other lengths.
    f32 largest[1] = {0.f}, ties[1] = {OF_LARGEST ? 0.f : 1.f};
    // First half: the sums over the row on which dx depends.
    if constexpr (Norm::CURVED) {
      found = learned(a.numbers);
    } else if (normed) {
      if (chunks > 0) {
        if (Norm::STATS == 2) found.shift = a.stats[2 * row];
        found.scale = a.stats[Norm::STATS * (row + 1) - 1];
      }
      each_chunk(team.lane, chunks, [&](int i, int chunk) {
        const Values x = x_plus.at(i, chunk), d = dy.at(i, chunk);
        const Values weight = values<K_WEIGHT>(a.weight, chunk, 1.f);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
          const f32 g = weight.v[j] * d.v[j];
          sums[0] = fmaf(g, (x.v[j] - found.shift) * found.scale, sums[0]);
          sums[1] += g;
          if constexpr (OF_LARGEST) largest[0] = fmaxf(largest[0], fabsf(x.v[j]));
        }
      });
      if constexpr (OF_LARGEST) team.combine<Largest>(largest);
      if constexpr (OF_LARGEST) {
        each_chunk(team.lane, chunks, [&](int i, int chunk) {
          const Values x = x_plus.at(i, chunk);
#pragma unroll
          for (int j = 0; j < VEC; j++) ties[0] += fabsf(x.v[j]) == largest[0] ? 1.f : 0.f;
        });
        team.combine<Add>(ties);
      }
      // Only a norm that subtracts the mean needs the sum of g.
      if (Norm::STATS == 2) {
        team.combine<Add>(sums);
      } else {
        f32 sum[1] = {sums[0]};
        team.combine<Add>(sum);
        sums[0] = sum[0];
      }
    }
    const f32 pull = Norm::pull(found.scale, cols, a.eps, sums[0]) / ties[0];  // shared by numbers that tie
    const f32 share = Norm::STATS == 2 ? found.scale / cols * sums[1] : 0.f;  // the mean of scale*g
    // Second half: G, and from it dx, df and this row's terms of the sums over rows.
    each_chunk(team.lane, chunks, [&](int i, int chunk) {
      const i64 at = row * a.chunks + chunk;
      Values total;  // G = dx_plus + N'(dy)
#pragma unroll
      for (int j = 0; j < VEC; j++) total.v[j] = 0.f;
      if (normed) {
        const Values x = x_plus.at(i, chunk), d = dy.at(i, chunk);
        const Values weight = values<K_WEIGHT>(a.weight, chunk, 1.f);
        Values dw, u, ux;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
          const f32 hat = hat_of(found, x.v[j]);
          dw.v[j] = d.v[j] * hat;
          if constexpr (Norm::CURVED) {
            u.v[j] = weight.v[j] * d.v[j] * Norm::slope(fmaf(found.scale, x.v[j], found.shift), hat);
            ux.v[j] = u.v[j] * x.v[j];
            total.v[j] = found.scale * u.v[j];
          } else {
            const f32 slope = slope_of(x.v[j], hat, largest[0]);
            total.v[j] = fmaf(found.scale, weight.v[j] * d.v[j], -fmaf(pull, slope, share));
          }
        }
        dweight.add(i, chunk, dw.v);
        dbias.add(i, chunk, d.v);
        if constexpr (Norm::CURVED) {
          dscale.add(i, chunk, ux.v);
          dshift.add(i, chunk, u.v);
        }
      }
      if (K_STEP && a.dx_plus) {
        const Values d = dx_plus.at(i, chunk);
#pragma unroll
        for (int j = 0; j < VEC; j++) total.v[j] += d.v[j];
      }
      const Values alpha = values<K_ALPHA>(a.alpha, chunk, 1.f);
      Values dx;
#pragma unroll
      for (int j = 0; j < VEC; j++) dx.v[j] = alpha.v[j] * total.v[j];
      store<K_X>(a.dx, at, dx);
      if (K_ALPHA != NONE && a.dalpha) {
        Values d = load<K_X>(a.x, at);
#pragma unroll
        for (int j = 0; j < VEC; j++) d.v[j] *= total.v[j];
        dalpha.add(i, chunk, d.v);
      }
      if (K_BETA != NONE && a.dbeta) {
        // The product is dropped, not its factor, because the dropped value may have been infinite.
        Values d = load<K_F>(a.f, at);
#pragma unroll
        for (int j = 0; j < VEC; j++) d.v[j] *= a.dropout.scale * total.v[j];
        mask.apply(row, chunk, d.v);
        dbeta.add(i, chunk, d.v);
      }
      if (K_STEP && a.df) {
        Values d = values<K_BETA>(a.beta, chunk, 1.f);
#pragma unroll
        for (int j = 0; j < VEC; j++) d.v[j] *= a.dropout.scale * total.v[j];
        mask.apply(row, chunk, d.v);
        store<K_F>(a.df, at, d);
      }
    });
  }
  dalpha.finish(team, scratch, a.chunks);
  dbeta.finish(team, scratch, a.chunks);
  dweight.finish(team, scratch, a.chunks);
  dbias.finish(team, scratch, a.chunks);
  dscale.finish(team, scratch, a.chunks);
  dshift.finish(team, scratch, a.chunks);
}
#endif
